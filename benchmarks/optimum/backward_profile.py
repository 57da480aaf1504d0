"""What a measured step tells the planner: when gradients came, what the rest took, and what other buckets would take.

A :class:`StepTimes` is one ``reducer.last_step()``, or the median of several, or the slowest of ranks;
:class:`BackwardProfile` has the gradients in ready order; :func:`simulate_step` replays it with other buckets. All
times are in seconds; ready times count from the moment backward began.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minddp.planner import Cost, LinearCost, plan_finish

from .collective_cost import fit_linear

__all__ = ["BackwardProfile", "Burst", "SimulatedStep", "StepTimes", "bursts", "fit_bursts", "simulate_step"]

_NS = 1e-9


@dataclass(frozen=True)
class StepTimes:
    """One synchronized step of one rank.

    Attributes:
        forward_seconds: from the forward's begin to the backward's.
        backward_seconds: the length of backward, without waiting for collectives.
        step_seconds: from the forward's begin until the averaged gradients were in place.
        tail_seconds: what came after both backward and the last collective (unpacking).
        ready_seconds: when each parameter's gradient was ready, by parameter index; a parameter
            without a gradient counts as ready when backward ended.
        collectives: bytes, launch and end of each bucket's collective, in launch order, since backward
            began; an end below 0 where none ran or its end was not seen.
    """

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    tail_seconds: float
    ready_seconds: list[float]
    collectives: list[tuple[int, float, float]]

    @classmethod
    def from_last_step(cls, step: Mapping[str, Any]) -> StepTimes:
        """Reads the dictionary that the reducer's ``last_step()`` gives."""
        origin, ended = step["backward_begin_ns"], step["backward_end_ns"]
        collectives = [
            (
                b["nbytes"],
                (b["launch_ns"] - origin) * _NS,
                (b["done_ns"] - origin) * _NS if b["done_ns"] >= 0 else -1.0,
            )
            for b in step["buckets"]
        ]
        done = max([ended, *(b["done_ns"] for b in step["buckets"])])
        return cls(
            forward_seconds=(origin - step["forward_begin_ns"]) * _NS,
            backward_seconds=(ended - origin) * _NS,
            step_seconds=(step["finalize_end_ns"] - step["forward_begin_ns"]) * _NS,
            tail_seconds=max(0, step["finalize_end_ns"] - done) * _NS,
            ready_seconds=[max(0, (ns if ns >= 0 else ended) - origin) * _NS for ns in step["ready_ns"]],
            collectives=collectives,
        )

    @classmethod
    def median(cls, steps: Sequence[StepTimes]) -> StepTimes:
        """The median of each number over steps of one rank with the same buckets."""
        rows = (step.row() for step in steps)
        return steps[0].with_row([statistics.median(column) for column in zip(*rows, strict=True)])

    @classmethod
    def slowest(cls, ranks: Sequence[StepTimes]) -> StepTimes:
        """One step of several ranks: the largest entry of each :meth:`row`."""
        rows = (times.row() for times in ranks)
        return ranks[0].with_row([max(column) for column in zip(*rows, strict=True)])

    def row(self) -> list[float]:
        """All times as numbers whose largest over ranks is that of the group.

        Ranks' clocks differ; each counts from the begin of its own backward. What a rank does itself
        counts where it is latest. A collective ends everywhere at about the same moment, which is the
        *soonest* in the time of the rank whose backward began last, the one that the others waited
        for: ends are negated.
        """
        parts = [self.forward_seconds, self.backward_seconds, self.step_seconds, self.tail_seconds]
        launches = [launch for _, launch, _ in self.collectives]
        return [*parts, *self.ready_seconds, *launches, *(-end for _, _, end in self.collectives)]

    def with_row(self, row: Sequence[float]) -> StepTimes:
        """These times with the numbers of ``row``, laid out as :meth:`row` does."""
        ready, buckets = len(self.ready_seconds), len(self.collectives)
        launches, ends = row[4 + ready : 4 + ready + buckets], row[4 + ready + buckets :]
        collectives = [
            (nbytes, launch, -end)
            for (nbytes, _, _), launch, end in zip(self.collectives, launches, ends, strict=True)
        ]
        return StepTimes(row[0], row[1], row[2], row[3], list(row[4 : 4 + ready]), collectives)


@dataclass(frozen=True)
class Burst:
    """Collectives that followed each other without a pause: how many, their bytes, their seconds."""

    count: int
    nbytes: int
    seconds: float


def bursts(collectives: Sequence[tuple[int, float, float]]) -> list[Burst]:
    """Joins collectives (bytes, launch, end) that were launched before the one before had ended.

    An engine may work on several at a time, which share its bandwidth and end together; what is known
    is how long it took for all of them.
    """
    found: list[Burst] = []
    begin = end = -math.inf
    for nbytes, launch, done in collectives:
        if done < 0:
            continue
        joins = launch < end and bool(found)
        before = found.pop() if joins else Burst(0, 0, 0.0)
        begin = begin if joins else launch
        end = max(end, done)
        found.append(Burst(before.count + 1, before.nbytes + nbytes, end - begin))
    return [burst for burst in found if burst.seconds > 0]


def fit_bursts(seen: Sequence[Burst]) -> LinearCost:
    """What one collective costs, from bursts and single ones: the line of least error in seconds.

    Parts of a step are to be predicted, so a burst's milliseconds weigh more than a lone small
    message's microseconds; those settle the latency where the bursts leave it open.
    """
    if not seen:
        raise ValueError("fit_bursts: no collective was timed")
    return fit_linear([b.nbytes for b in seen], [b.seconds for b in seen], [b.count for b in seen], relative=False)


@dataclass(frozen=True)
class BackwardProfile:
    """A backward to plan for or to replay.

    Attributes:
        ready_seconds: when each gradient is ready, in ready order (rising).
        nbytes: bytes of each gradient, in the same order.
        backward_seconds: the length of backward; not below the last ready time.
        forward_seconds: what a step takes before backward begins.
        tail_seconds: what it takes after backward and the last collective.
    """

    ready_seconds: list[float]
    nbytes: list[int]
    backward_seconds: float
    forward_seconds: float = 0.0
    tail_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.ready_seconds) != len(self.nbytes) or not self.nbytes:
            raise ValueError(
                "BackwardProfile: ready_seconds and nbytes must have one entry a gradient, at least one, "
                f"got {len(self.ready_seconds)} and {len(self.nbytes)}"
            )
        if sorted(self.ready_seconds) != list(self.ready_seconds) or self.ready_seconds[0] < 0:
            raise ValueError("BackwardProfile: ready_seconds must rise and begin at 0 or later")
        if self.backward_seconds < self.ready_seconds[-1] or min(self.forward_seconds, self.tail_seconds) < 0:
            raise ValueError(
                "BackwardProfile: backward_seconds must reach the last ready time, "
                "forward_seconds and tail_seconds be at least 0"
            )

    @property
    def local_seconds(self) -> float:
        """A step without communication."""
        return self.forward_seconds + self.backward_seconds + self.tail_seconds

    @classmethod
    def from_times(cls, times: StepTimes, nbytes: Sequence[int]) -> tuple[BackwardProfile, list[int]]:
        """The backward of ``times``, and the parameter index at each position of it.

        Args:
            times: of one step, or the median of several.
            nbytes: bytes of each gradient, by parameter index.
        """
        order = sorted(range(len(nbytes)), key=lambda index: times.ready_seconds[index])
        ready = [times.ready_seconds[index] for index in order]
        profile = cls(
            ready,
            [nbytes[index] for index in order],
            max(times.backward_seconds, ready[-1]),
            times.forward_seconds,
            times.tail_seconds,
        )
        return profile, order


class SimulatedStep(NamedTuple):
    """A replayed step, in seconds.

    Attributes:
        step_seconds: forward, backward with its collectives, and tail.
        finish_seconds: when the last collective was done, since backward began.
    """

    step_seconds: float
    finish_seconds: float


def simulate_step(profile: BackwardProfile, buckets: Sequence[Sequence[int]], cost: Cost) -> SimulatedStep:
    """Replays one step with other buckets. The model leaves out that collectives slow the backward beside them.

    Args:
        profile: the measured backward.
        buckets: positions of the profile's gradients, a list a bucket, in launch order.
        cost: seconds of an allreduce of so many bytes.
    """
    finish = plan_finish(buckets, profile.ready_seconds, profile.nbytes, cost)
    step = profile.forward_seconds + max(profile.backward_seconds, finish) + profile.tail_seconds
    return SimulatedStep(step, finish)
