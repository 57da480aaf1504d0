"""Small faults, planted on purpose: each must make a named test fail.

``mutants.toml`` is the list: one hand-written fault of the reducer, the transports or the Python half an entry, with
the tests that are to catch it. ``python -m tests.mutants`` (``make mutants``) plants one after another in a copy of
the repository and runs those tests. ``places.py`` finds what a fault takes the place of, by syntax. A mutant that
survives shows a promise that no test holds.
"""
