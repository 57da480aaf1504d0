"""How much of a backward's time collectives take, where ranks compute on all cores of a machine. Collective.

A rank computes for a moment, with as many threads as the program does, while all others compute too; and again while
allreduces run beside it, or sums. What it gets done less is what those have taken.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..planner.backward_profile import WIRE_BYTES, WIRE_COLLECTIVES, Burst
from ..planner.collective_cost import LinearCost
from ..ranks.messages import gather_objects
from .casts import Casts, quantized_sum, seconds_of

__all__ = ["measure_contention"]

_SIDE = 128  # of the matrices that are multiplied
_TURNS = 5
_SECONDS = 0.02  # of a turn; computing alone takes a third of it
_MOST = 64  # allreduces in a turn

Done = Callable[[], bool]


def measure_contention(
    group: Any, alone: Sequence[Burst], casts: Mapping[str, Casts]
) -> dict[str | None, LinearCost]:
    """By ``wire``, ``None`` without: seconds of backward's work that an allreduce of so many bytes costs.

    The same on all ranks: what the slowest of them loses.

    Args:
        group: the process group; on the CPU.
        alone: allreduces that were timed with nothing beside them: the largest is run, and one of a sixteenth.
        casts: what making gradients smaller takes, the same on all ranks.
    """
    large = max(alone, key=lambda burst: burst.nbytes)
    small = min(alone, key=lambda burst: abs(16 * burst.nbytes - large.nbytes))
    by_small, by_large = (_lost_beside(group, *_allreduces(group, burst)) for burst in (small, large))
    per_byte = max(0.0, by_large - by_small) / max(1, large.nbytes - small.nbytes)
    latency = max(0.0, by_small - per_byte * small.nbytes)
    share = min(1.0, _lost_beside(group, *_sums()))  # of a second of the processor's
    found: dict[str | None, LinearCost] = {None: LinearCost(latency, per_byte)}
    for wire, nbytes in WIRE_BYTES.items():
        if wire in casts:
            found[wire] = LinearCost(WIRE_COLLECTIVES * latency, per_byte + share * casts[wire].add / nbytes)
    return found


def _allreduces(group: Any, burst: Burst) -> tuple[Callable[[], Done], float]:
    """Begins as many as fill a turn. Of each, what it costs."""
    count = min(_MOST, max(1, round(_SECONDS / burst.seconds)))
    messages = [torch.zeros(burst.nbytes // 4) for _ in range(count)]

    def begin() -> Done:
        works = [group.allreduce([message]) for message in messages]
        return lambda: all(work.is_completed() for work in reversed(works))

    return begin, count


def _sums() -> tuple[Callable[[], Done], float]:
    """Begins a thread that sums for a turn. Of each of its seconds, what it costs."""
    add = quantized_sum()
    seconds = seconds_of(add)
    count = max(1, round(_SECONDS / seconds))

    def run() -> None:
        for _ in range(count):
            add()

    def begin() -> Done:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return lambda: not thread.is_alive()

    return begin, count * seconds


def _lost_beside(group: Any, begin: Callable[[], Done], amount: float) -> float:
    """Seconds of computing that are lost beside what ``begin`` begins, for each of ``amount``; the slowest rank's."""
    factor = torch.full((_SIDE, _SIDE), 1 / _SIDE)
    product = torch.empty_like(factor)
    token = torch.zeros(1)

    def compute(done: Done) -> tuple[int, float]:
        start = time.perf_counter()
        units = 0
        while not done():
            torch.mm(factor, factor, out=product)
            units += 1
        return units, time.perf_counter() - start

    lost = []
    for _ in range(_TURNS):
        group.allreduce([token]).wait()
        units, seconds = compute(_after(_SECONDS / 3))
        group.allreduce([token]).wait()
        units_beside, seconds_beside = compute(begin())
        lost.append(seconds_beside - units_beside * seconds / units)
    return max(0.0, *gather_objects(statistics.median(lost) / amount, group))


def _after(seconds: float) -> Done:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until
