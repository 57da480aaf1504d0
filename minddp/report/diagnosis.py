"""Who holds the others up, and whose link is slow. Pure: seconds in, a name or none out.

A rank is named where its own work exceeds the median of the others' by more than 4 % of a step, by more than that
difference varies, and in nearly every step. One slow step names nobody, nor do ranks that take turns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .parts import PHASES

__all__ = ["MIN_STEPS", "SlowLink", "Straggler", "find_slow_link", "find_straggler", "phase_of"]

Key = TypeVar("Key")
MIN_STEPS = 5  # of fewer nobody is named
_SHARE_OF_STEP = 0.04
_SHARE_OF_STEPS = 0.8
_STANDARD_ERRORS = 3.0
_LINK_RATIO = 1.5
_LINK_SHARE = 0.04


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up.

    Attributes:
        rank: of the wrapper's group.
        phase: the phase in which its work exceeds the others' the most, see ``minddp.report.parts``.
        seconds: by how much its own work exceeds the median of the others', the median over steps.
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
        ranks: one rank whose every link is slow, or the sender and the receiver of one link.
        direction: "sends", "receives" or "both ways"; "link" for one link.
        seconds: what the probe's message takes there.
        usual_seconds: the median of the others.
    """

    ranks: tuple[int, ...]
    direction: str
    seconds: float
    usual_seconds: float

    def __str__(self) -> str:
        times = f"{self.seconds * 1e3:.2f} ms for the probe's message, elsewhere {self.usual_seconds * 1e3:.2f} ms"
        if self.direction == "link":
            return f"the link from rank {self.ranks[0]} to rank {self.ranks[1]} is slow: {times}"
        what = {"sends": "sends slowly", "receives": "receives slowly", "both ways": "has a slow link"}
        return f"rank {self.ranks[0]} {what[self.direction]}: {times}"


def _excesses(values: Sequence[Sequence[float]], rank: int) -> list[float]:
    """By step: a rank's value less the median of the others'."""
    others = [row for other, row in enumerate(values) if other != rank]
    return [mine - statistics.median(theirs) for mine, *theirs in zip(values[rank], *others, strict=True)]


def find_straggler(
    own: Sequence[Sequence[float]], step_seconds: float, phases: Sequence[Mapping[str, float]]
) -> Straggler | None:
    """The rank that holds the others up, if one does.

    Args:
        own: by rank and step, the seconds of the rank's own work.
        step_seconds: the length of a step.
        phases: by rank, the typical seconds by phase; see :func:`phase_of`.
    """
    found: list[Straggler] = []
    steps = min((len(row) for row in own), default=0)
    if len(own) < 2 or steps < MIN_STEPS or step_seconds <= 0:
        return None
    for rank in range(len(own)):
        excesses = _excesses(own, rank)
        typical = statistics.median(excesses)
        spread = 1.4826 * statistics.median(abs(excess - typical) for excess in excesses)
        error = 1.2533 * spread / math.sqrt(steps)  # of a median
        late = sum(excess > 0 for excess in excesses)
        if typical > max(_SHARE_OF_STEP * step_seconds, _STANDARD_ERRORS * error) and late >= _SHARE_OF_STEPS * steps:
            phase = phase_of(phases, rank)
            found.append(Straggler(rank, phase, typical, typical / step_seconds, late, steps))
    return max(found, key=lambda straggler: straggler.seconds, default=None)


def phase_of(phases: Sequence[Mapping[str, float]], rank: int) -> str:
    """The phase in which ``rank`` exceeds the median of the others by most seconds."""
    excess = {phase: _excesses([[row[phase]] for row in phases], rank)[0] for phase in PHASES}
    return max(PHASES, key=lambda phase: excess[phase])


def find_slow_link(
    seconds: Mapping[tuple[int, int], float], nbytes: int, step_nbytes: float, step_seconds: float
) -> SlowLink | None:
    """The link, or the rank's links, that take more than 1.5 times the median of the others, if it matters: what a
    step sends would take 4 % of it longer.

    Args:
        seconds: by (sender, receiver), what a message of ``nbytes`` takes.
        nbytes: the message's length.
        step_nbytes: what a rank sends in one step.
        step_seconds: the length of a step.
    """
    ranks = sorted({rank for edge in seconds for rank in edge})
    # A slow rank has no fast link; beside it, any other has one.
    sends = {r: min((t for (a, _), t in seconds.items() if a == r), default=math.nan) for r in ranks}
    receives = {r: min((t for (_, b), t in seconds.items() if b == r), default=math.nan) for r in ranks}
    matters = _LINK_SHARE * step_seconds * nbytes / step_nbytes if step_nbytes > 0 else math.inf
    slow_senders, slow_receivers = _slow(sends, matters), _slow(receives, matters)
    found = [SlowLink((rank,), "sends", *times) for rank, times in slow_senders.items()]
    found += [SlowLink((rank,), "receives", *times) for rank, times in slow_receivers.items()]
    for rank in slow_senders.keys() & slow_receivers.keys():
        found = [link for link in found if link.ranks != (rank,)]
        found.append(SlowLink((rank,), "both ways", *max(slow_senders[rank], slow_receivers[rank])))
    if not found:
        found = [SlowLink(edge, "link", *times) for edge, times in _slow(seconds, matters).items()]
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
