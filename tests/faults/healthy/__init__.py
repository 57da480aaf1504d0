"""Programs in which one rank is slow, and which torch's class trains to the end."""
