"""What hurts users of torch's class, as programs that run with both; ``python -m tests.pains`` writes the page."""
