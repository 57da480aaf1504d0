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

The collectives that run beside a backward slow it down; the model does not know that. Measure the
ready times with the collectives on (:mod:`minddp.planner.autotune` does, and plans again until it settles).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .collective_cost import Cost, LinearCost, plain_number
from .plan import BucketPlan

__all__ = ["bucket_spans", "capped_buckets", "optimal_plan", "plan_finish"]

# Transitions that the program over several kinds may take: about two seconds of Python.
_LATTICE_BUDGET = 2_000_000
_SMALL_BUDGET = 200_000
_LATTICE_KINDS = 6


def optimal_plan(
    ready_seconds: Sequence[float],
    nbytes: Sequence[int],
    cost: Cost,
    *,
    kinds: Sequence[Hashable] | None = None,
    slack_seconds: float = 0.0,
) -> BucketPlan:
    """The buckets that finish first under ``cost``, and among those the fewest.

    The finish is exact: the dynamic program of this module's text. For a :class:`LinearCost` no plan that
    finishes by then (or by ``slack_seconds`` later) has fewer buckets; for other costs the number is small,
    not proven least. With several kinds the program runs over one position per kind; where that would take
    more than a few seconds (several hundred parameters of each kind), small neighbours are first merged,
    and the plan is optimal among those that keep them together. More than six kinds are each planned as if
    alone, which is no optimum, and launched as they become ready.

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
    small = len(lanes) == 1 and not isinstance(cost, LinearCost) and _lattice_transitions(lanes) <= _SMALL_BUDGET
    if small or 1 < len(lanes) <= _LATTICE_KINDS:
        buckets = _lattice_buckets(ready, sizes, cost, lanes, slack)
    else:
        buckets = _buckets_lane_by_lane(ready, sizes, cost, slack, lanes)
    return BucketPlan(buckets, plan_finish(buckets, ready, sizes, cost))


def capped_buckets(
    nbytes: Sequence[int],
    cap_nbytes: int,
    first_cap_nbytes: int | None = None,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Buckets filled in order and closed once they hold a cap's bytes: the rule of fixed caps.

    A bucket may so exceed the cap by less than its last gradient. Buckets are listed in the order in
    which their last gradients come.

    Args:
        nbytes: bytes of each gradient, in ready order.
        cap_nbytes: the cap, in bytes.
        first_cap_nbytes: the cap of each kind's first bucket, if another.
        kinds: what may not share a bucket; one kind when None.
    """
    cap = plain_number("cap_nbytes", cap_nbytes)
    first_cap = cap if first_cap_nbytes is None else plain_number("first_cap_nbytes", first_cap_nbytes)
    if not (cap > 0 and first_cap > 0):
        raise ValueError(f"caps must be above 0 bytes, got {cap_nbytes} and {first_cap_nbytes}")
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, float] = {}
    buckets = []
    for position, size in enumerate(nbytes):
        kind = kinds[position] if kinds is not None else None
        filling.setdefault(kind, []).append(position)
        room[kind] = room.get(kind, first_cap) - plain_number("nbytes", size)
        if room[kind] <= 0:
            buckets.append(filling.pop(kind))
            room[kind] = cap
    return sorted(buckets + list(filling.values()), key=lambda bucket: bucket[-1])


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


# One kind, or each kind alone -----------------------------------------------------------------------


def _buckets_lane_by_lane(
    ready: Sequence[float], nbytes: Sequence[int], cost: Cost, slack: float, lanes: list[list[int]]
) -> list[list[int]]:
    """Each kind as if alone; with the slack where all of them together still keep it."""
    loose = _sorted_lanes(ready, nbytes, cost, slack, lanes)
    if slack == 0 or len(lanes) == 1:
        return loose
    tight = _sorted_lanes(ready, nbytes, cost, 0.0, lanes)
    deadline = plan_finish(tight, ready, nbytes, cost) + slack
    return loose if plan_finish(loose, ready, nbytes, cost) <= deadline else tight


def _sorted_lanes(
    ready: Sequence[float], nbytes: Sequence[int], cost: Cost, slack: float, lanes: list[list[int]]
) -> list[list[int]]:
    buckets = []
    for lane in lanes:
        alone = _single_kind_buckets([ready[p] for p in lane], [nbytes[p] for p in lane], cost, slack)
        buckets += [[lane[position] for position in bucket] for bucket in alone]
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _single_kind_buckets(ready: Sequence[float], nbytes: Sequence[int], cost: Cost, slack: float) -> list[list[int]]:
    prefix = [0, *itertools.accumulate(nbytes)]
    if isinstance(cost, LinearCost):
        finish = _finish_times_linear(ready, prefix, cost)
    else:
        finish = _finish_times(ready, prefix, cost)
    return _fewest_buckets(ready, prefix, cost, finish, finish[-1] + slack)


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


# Several kinds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lattice:
    """The states of several kinds, numbered: how many atoms (gradients, or merged neighbours) of each are reduced.

    A state's number is the sum of its counts times ``strides``, so that it comes after all that it depends on.
    """

    atoms: list[list[list[int]]]
    ready: list[list[float]]  # of each kind's atoms
    seconds: list[list[list[float]]]  # [kind][end][begin]: of the bucket of atoms begin..end-1
    strides: list[int]

    @classmethod
    def of(cls, ready: Sequence[float], nbytes: Sequence[int], cost: Cost, atoms: list[list[list[int]]]) -> _Lattice:
        seconds = []
        for lane in atoms:
            prefix = [0, *itertools.accumulate(sum(nbytes[p] for p in atom) for atom in lane)]
            seconds.append([[cost(upto - prefix[j]) for j in range(end)] for end, upto in enumerate(prefix)])
        sizes = [len(lane) + 1 for lane in atoms]
        strides = [math.prod(sizes[lane + 1 :]) for lane in range(len(sizes))]
        return cls(atoms, [[ready[atom[-1]] for atom in lane] for lane in atoms], seconds, strides)

    def states(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Number and counts of each state, from none reduced to all."""
        return enumerate(itertools.product(*(range(len(lane) + 1) for lane in self.atoms)))

    def finish_times(self) -> list[float]:
        """C of each state: the least over the kind and length of the last bucket."""
        finish = [0.0]
        for number, counts in self.states():
            if number:
                finish.append(
                    min(
                        done + seconds if done > ready else ready + seconds
                        for lane, end in enumerate(counts)
                        if end
                        for ready in [self.ready[lane][end - 1]]
                        for done, seconds in zip(self._before(finish, number, lane, end), self.seconds[lane][end])
                    )
                )
        return finish

    def _before(self, values: list[float], number: int, lane: int, end: int) -> list[float]:
        """``values`` of the states with 0..end-1 atoms of ``lane`` in the place of ``end``."""
        stride = self.strides[lane]
        return values[number - end * stride : number : stride]


class _Rest(NamedTuple):
    """A way to reduce what a state has not: this many buckets, which begin by ``begin`` and end in time."""

    buckets: int
    begin: float
    lane: int
    end: int
    rest: _Rest | None


def _lattice_buckets(
    ready: Sequence[float], nbytes: Sequence[int], cost: Cost, lanes: list[list[int]], slack: float
) -> list[list[int]]:
    """The fewest buckets of one kind each, in any order of launching, that end ``slack`` after the optimum.

    Backward from the state in which all is reduced: a bucket that has to end by d begins at d - T, and can if its
    last gradient is ready then and the state before it can be reached by then. That d - T is the deadline of that
    state. Of two ways to reduce what a state has not, the one with fewer buckets and no earlier begin is as good
    for all that comes before; the others are dropped. With a linear T one way is left of each state, since all of
    as many buckets begin at the same time, and more buckets earlier. With another T there may be many: two are
    kept, that with the fewest buckets and that with the latest begin, by which the first state is surely reached.
    """
    lattice = _Lattice.of(ready, nbytes, cost, _affordable([[[p] for p in lane] for lane in lanes], nbytes))
    finish = lattice.finish_times()
    deadline = finish[-1] + slack
    rounding = 1e-12 * deadline
    ways: list[list[_Rest]] = [[] for _ in finish]
    ways[-1] = [_Rest(0, deadline, 0, 0, None)]
    for number, counts in reversed(list(lattice.states())):
        for rest in ways[number]:
            for lane, end in enumerate(counts):
                _add_bucket(rest, lane, end, number, lattice, finish, ways, rounding)
    return _walk(min(ways[0], key=lambda way: way.buckets), lattice)


def _add_bucket(
    rest: _Rest,
    lane: int,
    end: int,
    number: int,
    lattice: _Lattice,
    finish: list[float],
    ways: list[list[_Rest]],
    rounding: float,
) -> None:
    """Puts each bucket that ends with atom ``end`` of a kind before ``rest``, what state ``number`` lacks."""
    stride = lattice.strides[lane]
    latest, ready = rest.begin + rounding, lattice.ready[lane][end - 1] if end else 0.0
    before = number - end * stride
    for seconds in lattice.seconds[lane][end]:  # the longest bucket first, which leaves least to do
        start = latest - seconds
        if start >= ready and start >= finish[before]:
            _keep(ways[before], _Rest(rest.buckets + 1, rest.begin - seconds, lane, end, rest), rounding)
        before += stride


def _keep(ways: list[_Rest], new: _Rest, rounding: float) -> None:
    """Adds ``new`` unless it is no better than one that is there; what is no better than ``new`` goes."""
    for way in ways:
        if way.buckets <= new.buckets and way.begin + rounding >= new.begin:
            return
    ways[:] = [way for way in ways if way.buckets < new.buckets or way.begin > new.begin + rounding]
    ways.append(new)
    if len(ways) > 2:
        ways[:] = [min(ways, key=lambda way: way.buckets), max(ways, key=lambda way: way.begin)]


def _walk(way: _Rest | None, lattice: _Lattice) -> list[list[int]]:
    """The buckets of a way that begins where nothing is reduced."""
    buckets = []
    done = [0] * len(lattice.atoms)
    while way is not None and way.rest is not None:
        atoms = lattice.atoms[way.lane][done[way.lane] : way.end]
        buckets.append([position for atom in atoms for position in atom])
        done[way.lane], way = way.end, way.rest
    return buckets


def _affordable(atoms: list[list[list[int]]], nbytes: Sequence[int]) -> list[list[list[int]]]:
    """``atoms`` with neighbours merged, in the longest lane first, until the program is affordable."""
    while _lattice_transitions(atoms) > _LATTICE_BUDGET:
        longest = max(range(len(atoms)), key=lambda index: len(atoms[index]))
        atoms[longest] = _merge_small(atoms[longest], nbytes)
    return atoms


def _lattice_transitions(lanes: Sequence[Sequence[Any]]) -> int:
    return math.prod(len(lane) + 1 for lane in lanes) * sum(map(len, lanes)) // 2


def _merge_small(lane: list[list[int]], nbytes: Sequence[int]) -> list[list[int]]:
    """The lane in fewer atoms, at most four fifths as many: neighbours join until they hold a share."""
    sizes = [max(1, sum(nbytes[position] for position in atom)) for atom in lane]
    share = sum(sizes) / (0.8 * len(lane) - 1)
    merged: list[list[int]] = []
    held = share
    for atom, size in zip(lane, sizes, strict=True):
        if held >= share:
            merged.append([])
            held = 0
        merged[-1] += atom
        held += size
    return merged
