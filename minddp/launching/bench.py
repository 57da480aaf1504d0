"""``minddp bench``: runs the benchmarks from where they lie.

    minddp bench buckets --models mlp38 --link 1gbit      # step time against bucket size, drawn
    minddp bench overhead --small                         # the step split into compute, collectives and reducer

The scripts are the folder ``benchmarks`` of the source tree, beside this package; an installation without
the sources has none, and hears so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "run_script"]

COMMANDS = {
    "buckets": ("bucket_size", "step time against bucket size, drawn"),
    "overhead": ("overhead", "the step split into compute, collectives and reducer"),
    "memory": ("memory", "bytes of gradients and buckets per parameter byte"),
    "paper": ("paper", "the questions of the VLDB 2020 paper on DDP"),
}
_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the named benchmark with the arguments after its name; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        asked = words[:1] in (["-h"], ["--help"])
        print(_usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return run_script(COMMANDS[words[0]][0], words[1:])


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Runs ``benchmarks/SCRIPT.py``; the exit status, where it does not exit by itself."""
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
    harness.run_main(lambda: benchmark.main(list(arguments)))
    return 0


def _usage() -> str:
    lines = [__doc__.rstrip(), "", "usage: minddp bench BENCHMARK [--help] ...", "benchmarks:"]
    return "\n".join(lines + [f"  {name:10s}{text}" for name, (_, text) in COMMANDS.items()])
