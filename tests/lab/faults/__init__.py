"""Faults of one rank, at each place of training, beside torch's class: what the others are told, and when."""
