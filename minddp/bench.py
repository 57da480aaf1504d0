"""Runs the benchmarks from where they lie: ``python -m minddp.bench buckets --models mlp38 --link 1gbit``.

The scripts are the folder ``benchmarks`` of the source tree, beside this package; an installation without
the sources has none, and is told so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

COMMANDS = {
    "buckets": ("bucket_size", "step time against bucket size, drawn"),
    "overhead": ("overhead", "the step split into compute, collectives and reducer"),
    "memory": ("memory", "bytes of gradients and buckets per parameter byte"),
    "paper": ("paper", "the questions of the VLDB 2020 paper on DDP"),
}
_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named benchmark with the arguments after its name; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        print(_usage(), file=sys.stderr)
        return 0 if words and words[0] in ("-h", "--help") else 2
    script, _ = COMMANDS[words[0]]
    if not (_FOLDER / f"{script}.py").exists():
        print(
            f"error: the benchmarks are not in {_FOLDER}: they come with minddp's source tree, not with an "
            "installed package. Run this in a clone",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(_FOLDER))
    harness = importlib.import_module("harness")
    benchmark = importlib.import_module(script)
    harness.run_main(lambda: benchmark.main(words[1:]))
    return 0  # run_main exits by itself


def _usage() -> str:
    lines = ["usage: python -m minddp.bench COMMAND [--help] ...", "commands:"]
    return "\n".join(lines + [f"  {name:10s}{text}" for name, (_, text) in COMMANDS.items()])


if __name__ == "__main__":
    sys.exit(main())
