"""The C++ under sanitizers."""
