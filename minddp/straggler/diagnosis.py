"""Who holds the others up. Pure: seconds in, a name or none out.

A rank is named where its own work, as three of ten steps do not exceed it, is longer than the others' by more than
4 % of a step, where one phase is longer by more than 2.5 %, and where it is behind in 70 % of the steps. What a busy
machine adds now and then is not in these numbers: one slow step names nobody, nor do ranks that take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .parts import PHASES

__all__ = ["MIN_STEPS", "Straggler", "find_straggler"]

MIN_STEPS = 8  # of fewer nobody is named
_SHARE_OF_STEP, _SHARE_IN_PHASE = 0.04, 0.025
_SHARE_OF_STEPS = 0.7
_QUANTILE = 0.3


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up.

    Attributes:
        rank: of the wrapper's group.
        phase: the phase in which its work exceeds the others' the most, see ``minddp.straggler.parts``.
        seconds: by how much its own work, as three of ten steps do not exceed it, exceeds the median of the others'.
        fraction: the same as a part of a step.
        late_steps, steps: in how many of the steps it was behind.
    """

    rank: int
    phase: str
    seconds: float
    fraction: float
    late_steps: int
    steps: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the others up by {self.seconds * 1e3:.1f} ms a step ({self.fraction:.0%}), "
            f"in {self.phase}; it was behind in {self.late_steps} of {self.steps} steps"
        )


def _typical(values: Sequence[float]) -> float:
    """What three of ten values do not exceed: nearly that of an undisturbed step, and of no single one."""
    return sorted(values)[int(_QUANTILE * (len(values) - 1))]


def _excesses(values: Sequence[float]) -> list[float]:
    """Each rank's value less the median of the others'. Sorted once: there may be thousands of ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ordered, low, high = [values[rank] for rank in order], (len(values) - 2) // 2, (len(values) - 1) // 2
    found = [0.0] * len(values)
    for place, rank in enumerate(order):
        others = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
        found[rank] = values[rank] - others
    return found


def find_straggler(own: Sequence[Sequence[Mapping[str, float]]], step_seconds: float) -> Straggler | None:
    """The rank that holds the others up, if one does.

    Args:
        own: by rank and step, the seconds of the rank's own work by phase; the same steps of all ranks.
        step_seconds: the length of a step.
    """
    steps = min((len(row) for row in own), default=0)
    if len(own) < 2 or steps < MIN_STEPS or step_seconds <= 0:
        return None
    totals = [[sum(step.values()) for step in row] for row in own]
    more = _excesses([_typical(row) for row in totals])
    late = [sum(excess > 0 for excess in row) for row in zip(*map(_excesses, zip(*totals, strict=True)), strict=True)]
    by_phase = {phase: _excesses([_typical([step[phase] for step in row]) for row in own]) for phase in PHASES}
    found = []
    for rank, seconds in enumerate(more):
        phase = max(PHASES, key=lambda phase: by_phase[phase][rank])
        much = seconds > _SHARE_OF_STEP * step_seconds and by_phase[phase][rank] > _SHARE_IN_PHASE * step_seconds
        if much and late[rank] >= _SHARE_OF_STEPS * steps:
            found.append(Straggler(rank, phase, seconds, seconds / step_seconds, late[rank], steps))
    return max(found, key=lambda straggler: straggler.seconds, default=None)
