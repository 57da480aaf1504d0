"""What simulate.py computes with: a measured backward, replayed on networks and rank counts that are not at hand.

Overview
    A :class:`~optimum.backward_profile.BackwardProfile` says when gradients are ready; a topology says
    what an allreduce of M bytes costs on p ranks, from the cost of one message over one hop;
    :class:`Stragglers` says how much slower than usual the slowest rank of a step is. From those follow
    a step's time for any buckets, at any number of ranks, without any rank.

What always holds
    Nothing here communicates, sleeps or reads a clock; the same arguments give the same answer.

What the model leaves out: a network shared with other jobs, and that collectives slow the backward beside them. How
far off that leaves it on a given machine is printed by simulate.py, which measures a sweep of bucket sizes and
predicts it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimum import capped
from optimum.backward_profile import BackwardProfile, simulate_step

from minddp.planner import Cost, LinearCost, optimal_plan

MIB = 1 << 20
_FIRST_CAP, _CAP = MIB, 25 * MIB  # torch's default caps


# Topologies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """A ring: p - 1 steps of reduce-scatter and p - 1 of all-gather, each sending M/p bytes a hop.

    T(M) = 2 (p - 1) alpha + 2 (p - 1)/p beta M   (Thakur, Rabenseifner, Gropp 2005, section 4.4)
    """

    hop: LinearCost
    name: str = "ring"

    @classmethod
    def from_measured(cls, allreduce: LinearCost, ranks: int) -> Ring:
        """The ring on which ``ranks`` ranks would show the measured ``allreduce`` cost."""
        steps = 2 * (ranks - 1)
        if steps < 1:
            raise ValueError(f"from_measured: ranks must be at least 2, got {ranks}")
        return cls(LinearCost(allreduce.latency_seconds / steps, allreduce.seconds_per_byte * ranks / steps))

    def cost(self, ranks: int) -> LinearCost:
        """An allreduce among ``ranks`` ranks."""
        steps = 2 * (ranks - 1)
        return LinearCost(steps * self.hop.latency_seconds, steps / ranks * self.hop.seconds_per_byte)


@dataclass(frozen=True)
class Tree:
    """A double binary tree of depth d = ceil(log2 p), reduced up and broadcast down in k pieces.

    Each rank is inner node of one tree and leaf of the other, and sends W = 2 (p - 1)/p M bytes in all
    (Sanders, Speck, Traeff 2009; NCCL's tree). With M cut into k pieces a piece's step takes
    alpha + beta W/k, and 2d - 1 + k steps bring the last piece down: T = (2d - 1 + k)(alpha + beta W/k),
    least at k = sqrt(beta W (2d - 1)/alpha). T is the least over whole k.
    """

    hop: LinearCost
    name: str = "tree"

    def cost(self, ranks: int) -> Cost:
        """An allreduce among ``ranks`` ranks."""
        fill = 2 * math.ceil(math.log2(ranks)) - 1 if ranks > 1 else 0
        if fill == 0:
            return LinearCost(0.0, 0.0)
        alpha, beta = self.hop.latency_seconds, self.hop.seconds_per_byte

        def seconds(nbytes: int) -> float:
            wire = 2 * (ranks - 1) / ranks * beta * nbytes
            if alpha == 0:
                return wire
            best = math.sqrt(wire * fill / alpha)
            return min((fill + k) * (alpha + wire / k) for k in (max(1, math.floor(best)), math.ceil(best) or 1))

        return seconds


@dataclass(frozen=True)
class Hierarchy:
    """Nodes of ``ranks_per_node``: reduce-scatter inside, rings between nodes, all-gather inside.

    Inside a node 2 (g - 1) steps of M/g bytes over ``inner``. Between n nodes each of the g ranks
    reduces its M/g on a ring of its own; the g rings share the node's ``outer`` link, which so carries
    2 (n - 1)/n M bytes. A last node that is not full counts as full.
    """

    inner: LinearCost
    outer: LinearCost
    ranks_per_node: int = 8
    name: str = "hierarchy"

    def cost(self, ranks: int) -> LinearCost:
        """An allreduce among ``ranks`` ranks."""
        inside = min(ranks, self.ranks_per_node)
        nodes = math.ceil(ranks / self.ranks_per_node)
        within, between = Ring(self.inner).cost(inside), Ring(self.outer).cost(nodes)
        return LinearCost(
            within.latency_seconds + between.latency_seconds,
            within.seconds_per_byte + between.seconds_per_byte,
        )


Topology = Ring | Tree | Hierarchy


# Ranks that are slow --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stragglers:
    """Ranks that are now and then slow: each rank's compute is slower by a factor exp(|N(0, sigma)|).

    A step waits for its slowest rank, so what counts is the largest factor of p ranks. ``steps`` draws
    are made for each number of ranks, from ``seed``.
    """

    sigma: float = 0.0
    steps: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0 and self.steps >= 1):
            raise ValueError(
                f"Stragglers: sigma must be at least 0 and steps at least 1, got {self.sigma}, {self.steps}"
            )

    def slowdowns(self, ranks: int) -> list[float]:
        """The slowest rank's factor in each of ``steps`` steps."""
        if self.sigma == 0:
            return [1.0]
        rng = random.Random(self.seed)
        half_normal = statistics.NormalDist()
        # The largest of p draws of |N| has the distribution (2 Phi(x) - 1)^p: invert it at u.
        draws = ((1 + rng.random() ** (1 / ranks)) / 2 for _ in range(self.steps))
        return [math.exp(self.sigma * half_normal.inv_cdf(min(u, 1 - 1e-16))) for u in draws]


def mean_step_seconds(
    profile: BackwardProfile,
    buckets: Sequence[Sequence[int]],
    cost: Cost,
    slowdowns: Sequence[float] = (1.0,),
) -> float:
    """The mean step time where the slowest rank computes slower by each of ``slowdowns``.

    A factor applies to all that is computed before the collectives, since these begin when all ranks have come to
    them (see :meth:`Stragglers.slowdowns`).
    """
    return statistics.fmean(simulate_step(slowed(profile, s), buckets, cost).step_seconds for s in slowdowns)


def slowed(profile: BackwardProfile, factor: float) -> BackwardProfile:
    """The profile with forward and backward ``factor`` times as long."""
    return replace(
        profile,
        ready_seconds=[seconds * factor for seconds in profile.ready_seconds],
        backward_seconds=profile.backward_seconds * factor,
        forward_seconds=profile.forward_seconds * factor,
    )


# Many ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks: mean step seconds of each choice of buckets, and a step's without communication.

    ``uniform_seconds`` maps a uniform cap in bytes to its step; ``planned_buckets`` counts the plan's
    buckets. Efficiency is a step without communication over the step: 1 is perfect weak scaling.
    """

    ranks: int
    local_seconds: float
    default_seconds: float
    uniform_seconds: dict[int, float]
    planned_seconds: float
    planned_buckets: int

    @property
    def best_cap(self) -> int:
        """The uniform cap with the shortest step, in bytes."""
        return min(self.uniform_seconds, key=lambda cap: self.uniform_seconds[cap])

    def efficiency(self, step_seconds: float) -> float:
        """Weak-scaling efficiency of a step of this many seconds."""
        return self.local_seconds / step_seconds


def scaling(
    profile: BackwardProfile,
    topology: Topology,
    ranks: Sequence[int],
    caps: Sequence[int],
    stragglers: Stragglers | None = None,
) -> list[ScalingPoint]:
    """Step times against ranks, for torch's default caps, uniform ``caps`` (bytes) and planned buckets.

    The plan of each number of ranks is the optimum for that number's cost and its median slowdown.
    """
    stragglers = stragglers if stragglers is not None else Stragglers()
    if not caps or any(p < 1 for p in ranks):
        raise ValueError("scaling: caps must hold at least one cap, and every number of ranks be at least 1")
    return [_scaling_point(profile, topology.cost(p), p, caps, stragglers.slowdowns(p)) for p in ranks]


def _scaling_point(
    profile: BackwardProfile, cost: Cost, ranks: int, caps: Sequence[int], slowdowns: Sequence[float]
) -> ScalingPoint:
    def step(buckets: list[list[int]]) -> float:
        return mean_step_seconds(profile, buckets, cost, slowdowns)

    usual = statistics.median(slowdowns)
    plan = optimal_plan([seconds * usual for seconds in profile.ready_seconds], profile.nbytes, cost)
    return ScalingPoint(
        ranks=ranks,
        local_seconds=profile.local_seconds,
        default_seconds=step(capped(profile.nbytes, [_FIRST_CAP, _CAP])),
        uniform_seconds={cap: step(capped(profile.nbytes, [cap])) for cap in caps},
        planned_seconds=step(plan.buckets),
        planned_buckets=len(plan.buckets),
    )
