"""Which gradients to reduce together: the exact optimum under a cost model.

Overview
    Gradients become ready one after another while backward runs, and buckets of them are reduced one
    after another. Let gradient i of n be ready r_i seconds after backward began, let S_i be the bytes
    of the first i gradients and T(M) the seconds of an allreduce of M bytes. A bucket begins when its
    last gradient is ready and the previous bucket is done, so the first i gradients can be done at

        C(i) = min over j < i of  max(C(j), r_i) + T(S_i - S_j),    C(0) = 0

    which :func:`optimal_plan` solves exactly: in O(n^2) for any T, in O(n) for a linear T.

What always holds
    A plan's buckets partition the positions 0..n-1; within a kind (dtype, device) the buckets are
    contiguous in the order given and launched in that order; no bucket mixes kinds.

The collectives that run beside a backward slow it down; the model does not know that. So ``"auto"`` measures, and
``benchmarks/optimum`` (in a clone of the sources) measures ready times and costs, and plans with them.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .plan import BucketPlan

__all__ = ["Cost", "LinearCost", "bucket_spans", "optimal_plan", "plan_finish"]

Cost = Callable[[int], float]  # the seconds of an all-reduce of so many bytes


@dataclass(frozen=True)
class LinearCost:
    """``latency_seconds + nbytes * seconds_per_byte``; both at least 0 and finite, otherwise ValueError.

    This is the alpha-beta model (Hockney 1994), which most engines follow.
    """

    latency_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte"):
            value = float(plain_number(f"LinearCost: {name}", getattr(self, name)))
            object.__setattr__(self, name, value)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"LinearCost: {name} must be finite and at least 0, got {value!r}")

    def __call__(self, nbytes: int) -> float:
        return self.latency_seconds + self.seconds_per_byte * nbytes


def plain_number(name: str, value: Any) -> int | float:
    """``value`` as Python's int or float, if it is a number of whatever type (NumPy's); otherwise TypeError."""
    if isinstance(value, numbers.Real):
        return float(value) if not isinstance(value, numbers.Integral) else operator.index(value)
    try:
        return operator.index(value)  # a tensor's element
    except TypeError:
        raise TypeError(f"{name} must be numbers, got {value!r}") from None


def optimal_plan(
    ready_seconds: Sequence[float],
    nbytes: Sequence[int],
    cost: Cost,
    *,
    kinds: Sequence[Hashable] | None = None,
    slack_seconds: float = 0.0,
) -> BucketPlan:
    """The buckets that finish first under ``cost``, and among those the fewest.

    For one kind the finish is exact: the dynamic program of this module's text. For a :class:`LinearCost` no plan
    that finishes by then (or by ``slack_seconds`` later) has fewer buckets; for other costs the number is small,
    not proven least. Several kinds are each planned as if alone, to be done when the last of them can be, which is no
    optimum of all together; their buckets are launched as they become ready.

    Args:
        ready_seconds: when each gradient is ready, in seconds since backward began, in ready order.
            A value below an earlier one counts as that one: positions are launched in order.
        nbytes: each gradient's bytes on the wire.
        cost: seconds of an allreduce of so many bytes.
        kinds: what may not share a bucket, e.g. ``(dtype, device)`` of each gradient; one kind if None.
        slack_seconds: how much later than the optimum the plan may finish to have fewer buckets.

    Numbers may be of any type that has such (NumPy's).

    Raises:
        ValueError: lengths differ, or a value is negative or not finite.
        TypeError: a value is no number.
    """
    _check_gradients(ready_seconds, nbytes, kinds, slack_seconds)
    ready = [float(seconds) for seconds in itertools.accumulate(ready_seconds, max)]
    sizes: list[Any] = [plain_number("nbytes", size) for size in nbytes]
    slack = float(slack_seconds)
    lanes = _lanes(kinds if kinds is not None else [None] * len(sizes))
    buckets = _buckets_of_kinds(ready, sizes, cost, slack, lanes)
    return BucketPlan(buckets, plan_finish(buckets, ready, sizes, cost))


def bucket_spans(
    buckets: Sequence[Sequence[int]], ready_seconds: Sequence[float], nbytes: Sequence[int], cost: Cost
) -> list[tuple[float, float]]:
    """When each bucket's allreduce begins and ends, in seconds since backward began."""
    spans, done = [], 0.0
    for bucket in buckets:
        begin = max([done, *(ready_seconds[position] for position in bucket)])
        done = begin + cost(sum(nbytes[position] for position in bucket))
        spans.append((begin, done))
    return spans


def plan_finish(
    buckets: Sequence[Sequence[int]], ready_seconds: Sequence[float], nbytes: Sequence[int], cost: Cost
) -> float:
    """When the last of ``buckets`` is done, in seconds since backward began; 0 without buckets."""
    spans = bucket_spans(buckets, ready_seconds, nbytes, cost)
    return spans[-1][1] if spans else 0.0


def _check_gradients(
    ready_seconds: Sequence[float],
    nbytes: Sequence[int],
    kinds: Sequence[Hashable] | None,
    slack_seconds: float,
) -> None:
    lengths = {len(ready_seconds), len(nbytes), len(nbytes if kinds is None else kinds)}
    if len(lengths) != 1:
        raise ValueError(
            f"ready_seconds, nbytes and kinds must have one entry a gradient, got {len(ready_seconds)}, "
            f"{len(nbytes)} and {'None' if kinds is None else len(kinds)}"
        )
    for name, values in (
        ("ready_seconds", ready_seconds),
        ("nbytes", nbytes),
        ("slack_seconds", [slack_seconds]),
    ):
        for position, value in enumerate(values):
            plain_number(name, value)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value!r} at position {position}")


def _lanes(kinds: Sequence[Hashable]) -> list[list[int]]:
    """The positions of each kind."""
    lanes: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        lanes.setdefault(kind, []).append(position)
    return list(lanes.values())


class _Alone(NamedTuple):
    """One kind's gradients, as if there were no others: their positions, and C(0..n) of this module's text."""

    positions: list[int]
    ready: list[float]
    prefix: list[int]
    finish: list[float]

    @classmethod
    def of(cls, positions: list[int], ready: Sequence[float], nbytes: Sequence[int], cost: Cost) -> _Alone:
        mine = [ready[position] for position in positions]
        prefix = [0, *itertools.accumulate(nbytes[position] for position in positions)]
        if isinstance(cost, LinearCost):
            return cls(positions, mine, prefix, _finish_times_linear(mine, prefix, cost))
        return cls(positions, mine, prefix, _finish_times(mine, prefix, cost))

    def buckets(self, cost: Cost, deadline: float) -> list[list[int]]:
        found = _fewest_buckets(self.ready, self.prefix, cost, self.finish, deadline)
        return [[self.positions[index] for index in bucket] for bucket in found]


def _buckets_of_kinds(
    ready: Sequence[float], nbytes: Sequence[int], cost: Cost, slack: float, lanes: list[list[int]]
) -> list[list[int]]:
    """Each kind in the fewest buckets that, alone, are done when the last kind can be, or ``slack`` later.

    The slack is used only where all kinds together still keep it.
    """
    kinds = [_Alone.of(lane, ready, nbytes, cost) for lane in lanes]
    last = max((kind.finish[-1] for kind in kinds), default=0.0)

    def by(deadline: float) -> list[list[int]]:
        return sorted((b for kind in kinds for b in kind.buckets(cost, deadline)), key=lambda bucket: bucket[-1])

    loose = by(last + slack)
    if slack == 0 or len(lanes) == 1:
        return loose
    tight = by(last)
    latest = plan_finish(tight, ready, nbytes, cost) + slack
    return loose if plan_finish(loose, ready, nbytes, cost) <= latest else tight


def _finish_times(ready: Sequence[float], prefix: Sequence[int], cost: Cost) -> list[float]:
    """C(0..n) of this module's text for any cost, in O(n^2)."""
    finish = [0.0]
    for i, ready_i in enumerate(ready, 1):
        finish.append(min(max(finish[j], ready_i) + cost(prefix[i] - prefix[j]) for j in range(i)))
    return finish


def _finish_times_linear(ready: Sequence[float], prefix: Sequence[int], cost: LinearCost) -> list[float]:
    """C(0..n) for T(M) = a + b M, in O(n).

    C never falls, since dropping gradient i from a plan of the first i never makes it later. So for
    each i the j < i are split by the greatest ``idle`` with C(idle) <= r_i. Up to it a bucket starts
    at r_i, and the shortest, from ``idle``, is best. Beyond it the bucket starts at C(j), and the best
    has the least C(j) - b S_j. As r never falls either, both ends of that window only move forward:
    its minimum is kept in a monotone deque.
    """
    a, b = cost.latency_seconds, cost.seconds_per_byte
    finish = [0.0]
    idle = 0
    window: deque[tuple[float, int]] = deque()  # (C(j) - b S_j, j), both rising; j > idle
    for i, ready_i in enumerate(ready, 1):
        while idle + 1 < i and finish[idle + 1] <= ready_i:
            idle += 1
        while window and window[0][1] <= idle:
            window.popleft()
        best = ready_i + a + b * (prefix[i] - prefix[idle])
        if window:
            best = min(best, finish[window[0][1]] + a + b * (prefix[i] - prefix[window[0][1]]))
        finish.append(best)
        key = best - b * prefix[i]
        while window and window[-1][0] >= key:
            window.pop()
        window.append((key, i))
    return finish


def _fewest_buckets(
    ready: Sequence[float], prefix: Sequence[int], cost: Cost, finish: Sequence[float], deadline: float
) -> list[list[int]]:
    """Few buckets that end by ``deadline``, which is at least C(n): each, from the last, the largest.

    A bucket of gradients j+1..i may end at its deadline d if T <= d - r_i and the first j can be done
    by d - T, that is C(j) <= d - T; d - T is then the deadline of the first j. For linear costs the
    largest is also best: of two choices that split the same gradients into as many buckets, both leave
    the same deadline to what is before them, and the one with the larger later bucket asks its other
    bucket to be ready sooner, which an earlier gradient is.
    """
    rounding = 1e-12 * deadline
    buckets = []
    i = len(ready)
    while i > 0:
        for j in range(i):
            begin = deadline - cost(prefix[i] - prefix[j])
            if begin + rounding >= ready[i - 1] and begin + rounding >= finish[j]:
                break
        buckets.append(list(range(j, i)))
        i, deadline = j, max(begin, finish[j])
    return buckets[::-1]
