"""The C++ under sanitizers: ``make sanitize``."""
