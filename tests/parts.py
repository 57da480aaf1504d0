"""``python -m tests.parts``: what `make test-all` consists of, in parts; when each was last green.

``run NAME`` makes one part, ``run --of COMMIT`` the one that a commit's hash chooses (the same commit, the same
part), ``run`` all of them; ``status`` prints the table; ``green NAME SECONDS`` notes what has run by other ways. The
notes are lines of JSON in `.green.jsonl` at the repository's root; the variable GREEN names another file, for runs in
clones that do not stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What a part makes. Those with "each" are within a commit's reach: minutes. The others are for a night.
EACH = {
    **{f"rest {i}/3": ["test-rest", f"ARGS=--turn {i}/3"] for i in (1, 2, 3)},
    **{f"newest {i}/6": ["check-newest", f"ARGS=--turn {i}/6"] for i in range(1, 7)},
    "oldest": ["check-torch-2.11.0", "ARGS=--turn 1/6"],
    "conformance-shm": ["conformance-shm"],
    "fuzz": ["fuzz", "ARGS=--programs 1500"],
    "soak": ["soak", "ARGS=--steps 3000"],
    "sanitize shm": ["sanitize", "ARGS=shm --operations 4000"],
    "faults": ["faults-part"],
    "package": ["package"],
}
NIGHT = {
    "engines": ["engines"],
    "libraries": ["libraries"],
    "faults, every cell": ["faults"],
    "kills": ["kills"],
    "soak, long": ["soak", "ARGS=--steps 20000"],
    "sanitize": ["sanitize"],
}
# What every commit runs, by `.ci/run`.
ALWAYS = ("test", "lint", "check-cuda", "conformance")  # and in the other lane:
ALWAYS += ("test-libraries", "tutorials", "gpu-check", "site", "test-docs")


def notes_path() -> Path:
    return Path(os.environ.get("GREEN") or ROOT / ".green.jsonl")


def commit() -> str:
    """The commit that is checked out, with a ``+`` where files differ from it; empty outside of git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def note(name: str, seconds: float) -> None:
    """The part has just been green."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with notes_path().open("a") as notes:
        notes.write(json.dumps({"part": name, "commit": commit(), "when": when, "seconds": round(seconds)}) + "\n")


def chosen_by(commit: str) -> str:
    """The part of :data:`EACH` that belongs to a commit."""
    return list(EACH)[int(commit.rstrip("+"), 16) % len(EACH)]


def status() -> str:
    """The table, oldest first, what never was green before all."""
    last: dict[str, dict[str, str]] = {}
    if notes_path().exists():
        for line in notes_path().read_text().splitlines():
            last[json.loads(line)["part"]] = json.loads(line)
    names = sorted([*ALWAYS, *EACH, *NIGHT], key=lambda name: last.get(name, {}).get("when", ""))
    rows = [f"{'part':20} {'last green (UTC)':20} {'commit':10} {'seconds':>7}"]
    for name in names:
        seen = last.get(name)
        if seen is None:
            rows.append(f"{name:20} never")
        else:
            at = seen["commit"][:9] + "+" * seen["commit"].endswith("+")
            rows.append(f"{name:20} {seen['when'][:16].replace('T', ' '):20} {at:10} {seen['seconds']:>7}")
    return "\n".join(rows)


def run(name: str) -> bool:
    """Makes a part, and notes it where it is green."""
    began = time.monotonic()
    print(f"=== {name}: make {' '.join({**EACH, **NIGHT}[name])}", flush=True)
    green = subprocess.run(["make", *{**EACH, **NIGHT}[name]], cwd=ROOT).returncode == 0
    seconds = time.monotonic() - began
    if green:
        note(name, seconds)
    print(f"=== {name}: {'ok' if green else 'FAILED'}, {seconds:.0f} s", flush=True)
    return green


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status")
    runs = commands.add_parser("run")
    runs.add_argument("names", nargs="*", metavar="NAME", help="these parts; none: all")
    runs.add_argument("--of", metavar="COMMIT", help="the part that this commit chooses; HEAD")
    green = commands.add_parser("green")
    green.add_argument("name", choices=[*ALWAYS, *EACH, *NIGHT])
    green.add_argument("seconds", type=float)
    options = parser.parse_args(arguments)
    if options.command == "status":
        print(status())
    elif options.command == "green":
        note(options.name, options.seconds)
    else:
        names = options.names or [*EACH, *NIGHT]
        if options.of:
            names = [chosen_by(commit() if options.of == "HEAD" else options.of)]
        if unknown := set(names) - {*EACH, *NIGHT}:
            parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join([*EACH, *NIGHT])}")
        green_ones = [name for name in names if run(name)]  # one that fails does not keep the others from running
        return 0 if green_ones == names else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
