"""Who holds the others up, and whose link is slow. Pure: seconds in, a name or none out.

A rank is named where its own work, as three of ten steps do not exceed it, is longer than the others' by more than
4 % of a step, where one phase is longer by more than 2.5 %, and where it is behind in 70 % of the steps. What a busy
machine adds now and then is not in these numbers: one slow step names nobody, nor do ranks that take turns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .parts import PHASES

__all__ = ["LINK_NBYTES", "MIN_STEPS", "SlowLink", "Straggler", "find_slow_link", "find_straggler"]

Key = TypeVar("Key")
MIN_STEPS = 8  # of fewer nobody is named
_SHARE_OF_STEP, _SHARE_IN_PHASE = 0.04, 0.025
_SHARE_OF_STEPS = 0.7
_QUANTILE = 0.3
LINK_NBYTES = 512 << 10  # of the message that is timed on each link
_LINK_RATIO = 1.5
_LINK_SHARE = 0.04


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


@dataclass(frozen=True)
class SlowLink:
    """A link that is slower than the others.

    Attributes:
        ranks: one rank, whose links are all slow in one direction or both; or a link's sender and receiver.
        seconds: what the timed message takes there.
        usual_seconds: the median of the others.
    """

    ranks: tuple[int, ...]
    seconds: float
    usual_seconds: float

    def __str__(self) -> str:
        several = len(self.ranks) > 1
        what = "the link from rank {} to rank {} is slow" if several else "rank {} has slow links"
        seconds, usual = f"{self.seconds * 1e3:.2f}", f"{self.usual_seconds * 1e3:.2f}"
        return f"{what.format(*self.ranks)}: {seconds} ms for {LINK_NBYTES >> 10} KiB, elsewhere {usual} ms"


def _typical(values: Sequence[float]) -> float:
    """What three of ten values do not exceed: nearly that of an undisturbed step, and of no single one."""
    return sorted(values)[int(_QUANTILE * (len(values) - 1))]


def _excess(values: Sequence[float], rank: int) -> float:
    """A rank's value less the median of the others'."""
    return values[rank] - statistics.median(value for other, value in enumerate(values) if other != rank)


def find_straggler(own: Sequence[Sequence[Mapping[str, float]]], step_seconds: float) -> Straggler | None:
    """The rank that holds the others up, if one does.

    Args:
        own: by rank and step, the seconds of the rank's own work by phase; the same steps of all ranks.
        step_seconds: the length of a step.
    """
    steps = min((len(row) for row in own), default=0)
    if len(own) < 2 or steps < MIN_STEPS or step_seconds <= 0:
        return None
    found: list[Straggler] = []
    totals = [[sum(step.values()) for step in row] for row in own]
    usual = [_typical(row) for row in totals]
    usual_phases = [{phase: _typical([step[phase] for step in row]) for phase in PHASES} for row in own]
    for rank in range(len(own)):
        seconds = _excess(usual, rank)
        late = sum(_excess(step, rank) > 0 for step in zip(*totals, strict=True))
        by_phase = {phase: _excess([row[phase] for row in usual_phases], rank) for phase in PHASES}
        phase = max(PHASES, key=lambda phase: by_phase[phase])
        much = seconds > _SHARE_OF_STEP * step_seconds and by_phase[phase] > _SHARE_IN_PHASE * step_seconds
        if much and late >= _SHARE_OF_STEPS * steps:
            found.append(Straggler(rank, phase, seconds, seconds / step_seconds, late, steps))
    return max(found, key=lambda straggler: straggler.seconds, default=None)


def find_slow_link(
    seconds: Mapping[tuple[int, int], float], step_nbytes: float, step_seconds: float
) -> SlowLink | None:
    """The link, or the rank's links, that take more than 1.5 times the median of the others, if it matters: what a
    step sends would take 4 % of it longer.

    Args:
        seconds: by (sender, receiver), what a message of :data:`LINK_NBYTES` takes.
        step_nbytes: what a rank sends in one step.
        step_seconds: the length of a step.
    """
    ranks = sorted({rank for edge in seconds for rank in edge})
    # A slow rank has no fast link; beside it, any other has one.
    sends = {r: min((t for (a, _), t in seconds.items() if a == r), default=math.nan) for r in ranks}
    receives = {r: min((t for (_, b), t in seconds.items() if b == r), default=math.nan) for r in ranks}
    matters = _LINK_SHARE * step_seconds * LINK_NBYTES / step_nbytes if step_nbytes > 0 else math.inf
    of_ranks = [*_slow(sends, matters).items(), *_slow(receives, matters).items()]
    found = [SlowLink((rank,), *times) for rank, times in of_ranks]
    if not found:
        found = [SlowLink(edge, *times) for edge, times in _slow(seconds, matters).items()]
    return max(found, key=lambda link: link.seconds / link.usual_seconds, default=None)


def _slow(times: Mapping[Key, float], matters: float) -> dict[Key, tuple[float, float]]:
    """Those above 1.5 times the median of the others, and by more than ``matters``; with that median."""
    found = {}
    for key, value in times.items():
        others = [other for name, other in times.items() if name != key]
        if not others:
            continue
        usual = statistics.median(others)
        if value > _LINK_RATIO * usual and value - usual > matters:
            found[key] = value, usual
    return found
