"""Tests of the core alone: they import no companion, and pass in a copy of the repository that has none."""
