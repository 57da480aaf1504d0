"""``minddp simulate``: measures a sweep of bucket sizes, and predicts other networks and numbers of ranks from it.

    minddp simulate --model mlp38 --link 1gbit
    minddp simulate --from results/simulate-mlp38.json --hop 5us,100gbit --speedup 40

The script is ``benchmarks/simulate.py`` of the source tree; what it computes with is :mod:`minddp.planner.simulator`.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import bench

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)  # and then the script's own
    return bench.run_script("simulate", arguments)
