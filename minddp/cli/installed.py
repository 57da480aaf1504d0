"""Imported for its effect: :func:`install`, in the process from which ``multiprocessing``'s forkserver forks."""

from .install import install

install()
