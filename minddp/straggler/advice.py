"""What other buckets, or fewer bytes, would make of a step, as the planner predicts it. Pure: stamps in, seconds out.

The newest step tells when gradients come, all steps tell how long the rest takes and what collectives cost. The probe
tells what collectives take from the backward beside them: the present ones' part is given back, and that of others is
taken. What is left out: vectors travel as they are also with ``wire=``. So the prediction for the present buckets
stands beside what was measured: that is how far to trust it.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..planner.backward_profile import WIRE_COLLECTIVES, BackwardProfile, Burst, StepTimes, bursts, fit_bursts
from ..planner.collective_cost import Cost, LinearCost
from ..planner.contention import FREE, transfers, without_transfers
from ..planner.optimal import capped_buckets, optimal_plan
from ..planner.simulator import simulate_step
from ..timeline.step_times import Stamps
from .casts import COPY, Casts

__all__ = ["Advice", "Gradients", "Prediction", "advise"]

_MIB = 1 << 20
_CAPS_MB = (0.5, 1, 2, 5, 10, 25, 50)
_WIRES = ("bf16", "int8")
_GAIN = 0.03  # of the present step: what is named as the best saves that much
_SLACK = 0.005  # of a step, for fewer buckets, as the tuner's


@dataclass(frozen=True)
class Gradients:
    """The gradients that travel, by parameter index.

    Attributes:
        nbytes: bytes of each on the wire.
        kinds: what may not share a bucket.
        can_shrink: they travel as float32, and nobody has asked for another ``wire``.
    """

    nbytes: Sequence[int]
    kinds: Sequence[Hashable]
    can_shrink: bool

    def to_json(self) -> dict[str, Any]:
        """For a trace's file; kinds become numbers."""
        numbers: dict[Hashable, int] = {}
        kinds = [numbers.setdefault(kind, len(numbers)) for kind in self.kinds]
        return {"nbytes": list(self.nbytes), "kinds": kinds, "can_shrink": self.can_shrink}


@dataclass(frozen=True)
class Prediction:
    """A step as predicted, from forward's begin to the averaged gradients.

    Attributes:
        name: what would be changed, as the constructor's argument.
        buckets: how many.
        seconds: the predicted step.
        exact: gradients stay as they are, but for the order of sums.
    """

    name: str
    buckets: int
    seconds: float
    exact: bool = True


@dataclass(frozen=True)
class Advice:
    """What the planner predicts.

    Attributes:
        measured_seconds: the step as it is: the median, without waits for a late rank.
        present: the prediction for the present buckets.
        others: predictions for other buckets and fewer bytes.
        caps: for each uniform cap that was tried; the best of them is one of ``others``.
        taken_seconds: of a backward, by the present collectives beside it; 0 where the probe was not asked.
    """

    measured_seconds: float
    present: Prediction
    others: tuple[Prediction, ...]
    caps: tuple[Prediction, ...] = ()
    taken_seconds: float = 0.0

    @property
    def error(self) -> float:
        """The prediction for the present buckets, less what was measured, as a part of that."""
        return self.present.seconds / self.measured_seconds - 1

    def best(self, exact: bool = False) -> Prediction | None:
        """The shortest predicted step, if it saves 3 % or more.

        Args:
            exact: only those that leave gradients as they are.
        """
        allowed = [other for other in self.others if other.exact or not exact]
        best = min(allowed, key=lambda other: other.seconds, default=self.present)
        return best if best.seconds <= (1 - _GAIN) * self.present.seconds else None

    def gain(self, prediction: Prediction) -> float:
        """What ``prediction`` saves of the present step, as a part of it."""
        return 1 - prediction.seconds / self.present.seconds


def advise(
    steps: Sequence[Sequence[Stamps]],
    gradients: Gradients,
    alone: Sequence[Burst] = (),
    casts: Mapping[str, Casts] = MappingProxyType({}),
    taken: Mapping[str | None, LinearCost] = MappingProxyType({}),
) -> Advice | None:
    """Predictions from what was measured.

    Args:
        steps: by rank, the same steps with the same buckets, oldest first; the newest tells of parameters.
        gradients: what travels.
        alone: collectives that were timed with nothing beside them.
        casts: what making gradients smaller takes, by ``wire``; nothing where it was not measured.
        taken: what an allreduce takes from the backward beside it, by ``wire``, ``None`` without; nothing where
            it was not measured.

    Returns:
        ``None`` where too little was seen: no collective, or only such as do not tell start from length.
    """
    newest = [rank[-1] for rank in steps]
    if any(len(step.get("ready_ns", ())) != len(gradients.nbytes) for step in newest):
        return None
    seen = [*alone]
    for moment in zip(*steps, strict=True):
        lean = [StepTimes.from_last_step({**step, "ready_ns": []}) for step in moment]
        seen += bursts(StepTimes.slowest(lean).collectives)
    if len({burst.nbytes / burst.count for burst in seen}) < 2:
        return None
    takes = taken.get(None, FREE)
    profile, order, taken_seconds = _profile(steps, gradients, takes)
    measured = statistics.median(
        min(step["finalize_end_ns"] - _forward_begin(step) for step in moment) * 1e-9
        for moment in zip(*steps, strict=True)
    )
    positions = {index: position for position, index in enumerate(order)}
    launched = [bucket["parameters"] for bucket in newest[0]["buckets"]]
    buckets = [[positions[index] for index in bucket] for bucket in launched]
    cost = fit_bursts(seen)
    present = _predict("the present buckets", profile, buckets, cost, takes)
    kinds = [gradients.kinds[index] for index in order]
    caps = _caps(profile, kinds, cost, takes)
    others = _other_buckets(profile, kinds, cost, takes, present, caps)
    if gradients.can_shrink:
        twice = replace(cost, latency_seconds=WIRE_COLLECTIVES * cost.latency_seconds)
        for wire in _WIRES:
            smaller = _on_wire(profile, wire, buckets, casts)
            predicted = _predict(f'wire="{wire}"', smaller, buckets, twice, taken.get(wire, takes))
            others.append(replace(predicted, exact=False))
    return Advice(measured, present, tuple(others), tuple(caps), taken_seconds)


def _forward_begin(step: Stamps) -> int:
    return min(step["forward_begin_ns"], step["backward_begin_ns"])


def _profile(
    steps: Sequence[Sequence[Stamps]], gradients: Gradients, taken: Cost
) -> tuple[BackwardProfile, list[int], float]:
    """The newest step's ready times, in a backward, forward and tail of typical length; without what its collectives
    took of backward; and how much that was.

    What ends a step is the rank whose forward and backward take longest together. The longest of each would be too
    much: one rank is late in forward, another one in backward.
    """
    moments = [
        [StepTimes.from_last_step({**step, "ready_ns": []}) for step in moment] for moment in zip(*steps, strict=True)
    ]
    slowest = [StepTimes.slowest(moment) for moment in moments]
    newest = StepTimes.slowest([StepTimes.from_last_step(rank[-1]) for rank in steps])
    forward = max(0.0, statistics.median(times.forward_seconds for moment in moments for times in moment))
    both = (max(max(0.0, each.forward_seconds) + each.backward_seconds for each in moment) for moment in moments)
    backward = max(0.0, statistics.median(both) - forward)
    profile, order = BackwardProfile.from_times(newest, gradients.nbytes)
    alone = without_transfers(profile, transfers(newest.collectives, taken))
    stretch = backward / profile.backward_seconds
    tail = statistics.median(times.tail_seconds for times in slowest)
    taken_seconds = stretch * (profile.backward_seconds - alone.backward_seconds)
    return replace(alone.slowed(stretch), forward_seconds=forward, tail_seconds=tail), order, taken_seconds


def _on_wire(
    profile: BackwardProfile, wire: str, buckets: Sequence[Sequence[int]], casts: Mapping[str, Casts]
) -> BackwardProfile:
    """Gradients are cast in place of being copied; one that is alone in its bucket was not copied."""
    smaller = profile.on_wire(wire)
    if not casts:
        return smaller
    cast, copy = casts[wire], casts[COPY]
    packs, unpack = [0.0] * len(profile.nbytes), 0.0
    for bucket in buckets:
        was_copied = len(bucket) > 1
        for i in bucket:
            packs[i] = profile.nbytes[i] * max(0.0, cast.pack - was_copied * copy.pack)
            unpack += profile.nbytes[i] * max(0.0, cast.unpack - was_copied * copy.unpack)
    return smaller.with_work(packs, unpack)


def _predict(
    name: str, profile: BackwardProfile, buckets: Sequence[Sequence[int]], cost: Cost, taken: Cost
) -> Prediction:
    return Prediction(name, len(buckets), simulate_step(profile, buckets, cost, taken=taken).step_seconds)


def _caps(profile: BackwardProfile, kinds: Sequence[Hashable], cost: Cost, taken: Cost) -> list[Prediction]:
    by_cap = {cap: capped_buckets(profile.nbytes, int(cap * _MIB), kinds=kinds) for cap in _CAPS_MB}
    return [_predict(f"bucket_cap_mb={cap:g}", profile, buckets, cost, taken) for cap, buckets in by_cap.items()]


def _other_buckets(
    profile: BackwardProfile,
    kinds: Sequence[Hashable],
    cost: Cost,
    taken: Cost,
    present: Prediction,
    caps: Sequence[Prediction],
) -> list[Prediction]:
    """The best uniform cap; and what is found by measuring: the best of caps, plans, and the present buckets."""
    plan = optimal_plan(
        profile.ready_seconds, profile.nbytes, cost, kinds=kinds, slack_seconds=_SLACK * profile.local_seconds
    )
    planned = _predict("planned", profile, plan.buckets, cost, taken)
    best_cap = min(caps, key=lambda prediction: prediction.seconds)
    auto = min(present, best_cap, planned, key=lambda prediction: prediction.seconds)
    return [best_cap, replace(auto, name='bucket_cap_mb="auto"')]
