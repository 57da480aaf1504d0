"""What hurts users of torch's class, as programs that run with both; ``make lab ARGS=pains`` writes the page."""
