"""The computed optimum, tried: buckets planned from measured steps, then from the plan's own, until one comes again.

The collectives beside a backward slow it down, so a plan is made for times that were measured with such collectives:
first those of the default buckets, then those of the plan before it. Of the plans, the fastest as measured is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minddp.planner import BucketPlan, LinearCost, optimal_plan

from .backward_profile import BackwardProfile, Burst, StepTimes, bursts, fit_bursts, simulate_step
from .collective_cost import measure_allreduce

__all__ = ["Measured", "Planned", "find_plan", "search"]

MIB = 1 << 20
Buckets = list[list[int]]


@dataclass(frozen=True)
class Measured:
    """What some steps with one choice of buckets showed.

    Attributes:
        step_seconds: the median step.
        profile: the backward, gradients in ready order.
        order: the parameter index at each position of the profile.
        bursts: the collectives.
    """

    step_seconds: float
    profile: BackwardProfile
    order: list[int]
    bursts: list[Burst]

    @classmethod
    def of(cls, steps: Sequence[StepTimes], nbytes: Sequence[int]) -> Measured:
        """Of the slowest rank's times in each step; ``nbytes`` by parameter index."""
        times = StepTimes.median(steps)
        profile, order = BackwardProfile.from_times(times, nbytes)
        return cls(statistics.median(step.step_seconds for step in steps), profile, order, bursts(times.collectives))

    def predict(self, buckets: Buckets, cost: LinearCost) -> float:
        """The step's seconds with ``buckets`` of parameter indices."""
        position = {index: p for p, index in enumerate(self.order)}
        return simulate_step(self.profile, [[position[i] for i in bucket] for bucket in buckets], cost).step_seconds


class Planned(NamedTuple):
    """The plan that was fastest, in parameter indices; the step that the model computes for it; the model's cost."""

    buckets: Buckets
    predicted_seconds: float
    cost: LinearCost


def search(
    measure: Callable[[Buckets | None], Measured],
    kinds: Sequence[Hashable],
    samples: Sequence[Burst] = (),
    max_plans: int = 3,
) -> Planned:
    """The plans of this module's text.

    Args:
        measure: runs steps with buckets of parameter indices; None: with those in force.
        kinds: what may not share a bucket, by parameter index.
        samples: all-reduces measured alone; those of the steps are added to them.
        max_plans: how many plans are tried at most.
    """
    seen = list(samples)
    base = measure(None)
    tried: list[tuple[Measured, Buckets]] = []
    for _ in range(max_plans):
        seen += base.bursts
        profile = base.profile
        in_order = [kinds[index] for index in base.order]
        plan = optimal_plan(profile.ready_seconds, profile.nbytes, fit_bursts(seen), kinds=in_order)
        buckets = [[base.order[position] for position in bucket] for bucket in plan.buckets]
        if any(buckets == before for _, before in tried):
            break
        base = measure(buckets)
        tried.append((base, buckets))
    best, buckets = min(tried, key=lambda pair: pair[0].step_seconds)
    cost = fit_bursts([*seen, *base.bursts])
    return Planned(buckets, best.predict(buckets, cost), cost)


def find_plan(ddp: Any, run_step: Callable[[], None], steps: int = 5) -> BucketPlan:
    """The computed optimum for ``ddp`` on its ranks, as a plan to pin; its notes have what was computed.

    Collective, with CPU tensors: on a device nobody knows when a gradient was ready or a collective done. All ranks
    compute the same plan, from the slowest rank's times.
    """
    averager = ddp._minddp_averager

    def measure(buckets: Buckets | None) -> Measured:
        if buckets is not None:
            averager.set_buckets(buckets)
        for _ in range(3):  # buckets are rebuilt, buffers allocated
            run_step()
        mine = []
        for _ in range(steps):
            run_step()
            mine.append(StepTimes.from_last_step(averager.reducer.last_step()))
        slowest = torch.tensor([times.row() for times in mine], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        rows = slowest.tolist()
        return Measured.of([times.with_row(row) for times, row in zip(mine, rows, strict=True)], averager.nbytes)

    sizes, seconds = measure_allreduce(max_nbytes=min(sum(averager.nbytes), 4 * MIB), budget_seconds=1.0)
    alone = [Burst(1, nbytes, time) for nbytes, time in zip(sizes, seconds, strict=True)]
    found = search(measure, averager.kinds, alone)
    notes = {"predicted_step_seconds": found.predicted_seconds, "allreduce": repr(found.cost)}
    return BucketPlan.of_indices(found.buckets, *ddp._minddp_wrapped.facts(), notes)
