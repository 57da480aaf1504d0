"""Reductions other than the mean over ranks."""
