"""Which commit a result is of. Imports nothing of minddp, which need not be built yet.

What lies in ``benchmarks/results`` names a commit that holds all that ran: it is not written from a changed tree.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# What decides on a result. The results themselves come one after the other, before one commit has all of them.
_SOURCES = ("benchmarks", "csrc", "minddp", "tests", "setup.py", "pyproject.toml", "Makefile")


@functools.cache  # as it was at the first question, which comes before the measurement
def commit() -> str:
    """Its short name; with ``-dirty`` where sources are changed or not in it; empty outside of a clone."""
    with contextlib.suppress(OSError):
        head = _git("rev-parse", "--short", "HEAD")
        changed = head and _git("status", "--porcelain", "--", *_SOURCES, ":!benchmarks/results")
        return f"{head}-dirty" if changed else head
    return ""


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()


def why_not(path: Path, told: str = "") -> str:
    """Why no result may be written to ``path``; empty: it may. ``told``: the commit, where no git can be asked."""
    known = commit() or told
    if not path.resolve().is_relative_to(RESULTS) or (known and not known.endswith("-dirty")):
        return ""
    state = "has changes that no commit holds (git status)" if known else "is no clone of git"
    return f"{path}: results in benchmarks/results name their commit, but this tree {state}: write elsewhere"
