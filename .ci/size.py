"""Counts lines of code, comments included, by folder and in all. ``--since COMMIT`` shows what has changed."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter

SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")
# A sum and what belongs to it: a pattern of the paths.
SUMS = {
    "product": "(minddp|csrc)/",
    "core, Python and its stub": r"minddp/(\w+\.py$|_C/__init__\.pyi$)",
    "core, C++": r"csrc/(\w+\.\w+$|reducer/|copy/)",
    "benchmarks": "benchmarks/",
    "tests outside of tests/lab": "tests/(?!lab/)",
    "tests/lab": "tests/lab/",
}


def lines(commit: str | None) -> Counter[str]:
    """By path: the files of a commit, or the files as they are now, those that git does not know yet included."""
    command = ["git", "grep", "-I", "-c", "-e", "", *([commit] if commit else ["--untracked"])]
    command += ["--", "minddp", "csrc", "tests", "benchmarks"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = Counter[str]()
    for line in done.stdout.splitlines():
        path, _, number = line.removeprefix(f"{commit}:").rpartition(":")
        if path.endswith(SUFFIXES):
            found[path] = int(number)
    return found


def table(files: Counter[str]) -> Counter[str]:
    """By folder, two deep (tests/lab: three), then the sums."""
    rows = Counter[str]()
    for path in sorted(files):
        folders = path.split("/")[:-1]
        rows["/".join(folders[: 3 if folders[:2] == ["tests", "lab"] else 2])] += files[path]
    for name, pattern in SUMS.items():
        rows[f"in all: {name}"] = sum(number for path, number in files.items() if re.match(pattern, path))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", help="show the folders that changed since then, and the sums")
    since = parser.parse_args().since
    now = table(lines(None))
    before = table(lines(since)) if since else now
    for name in sorted({*before, *now}, key=lambda name: (name.startswith("in all"), name)):
        change = now[name] - before[name]
        if change or not since or name.startswith("in all"):
            print(f"{name:36} {now[name]:6,}" + (f" {change:+6,}" if since else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
