"""What a report holds, in numbers and names."""

from __future__ import annotations

from dataclasses import dataclass, field

from .advice import Advice
from .diagnosis import SlowLink, Straggler

__all__ = ["Findings", "RankTimes"]


@dataclass(frozen=True)
class RankTimes:
    """One rank's medians over the steps, in seconds.

    Attributes:
        rank: of the wrapper's group.
        phases: its own work by phase, see ``minddp.straggler.parts``.
        own_seconds: all of its own work.
        meeting_seconds: in forward's own collectives before it runs (buffers, join, checks).
        blocked_seconds: backward waited for collectives.
        hidden_seconds: transfers while it computed.
        exposed_seconds: transfers while it was blocked.
        waiting_seconds: blocked while nothing was transferred.
        waits_for: the rank that it waits for most; ``None``: for none.
    """

    rank: int
    phases: dict[str, float]
    own_seconds: float
    meeting_seconds: float
    blocked_seconds: float | None
    hidden_seconds: float | None
    exposed_seconds: float | None
    waiting_seconds: float | None
    waits_for: int | None


@dataclass(frozen=True)
class Findings:
    """Where the steps' time went on every rank, and what to make of it.

    Attributes:
        steps: how many it is of.
        first_iteration, last_iteration: which ones.
        step_seconds: the median step, from the end of one synchronized backward to the end of the next.
        ranks: each rank's medians.
        straggler: who holds the others up; ``None``: nobody does, or ``notes`` says why that is not known.
        slow_link: the link that is slower than the others, if one is.
        overlap: the part of all transfers that backward hides; ``None`` where it is not known.
        exposed_buckets: (bucket, seconds) of those that block the step, on the rank that is blocked least; the
            longest first.
        advice: what the planner predicts, where enough was seen.
        notes: what is not known, and why.
    """

    steps: int
    first_iteration: int
    last_iteration: int
    step_seconds: float
    ranks: tuple[RankTimes, ...]
    straggler: Straggler | None
    slow_link: SlowLink | None
    overlap: float | None
    exposed_buckets: tuple[tuple[int, float], ...]
    advice: Advice | None
    notes: tuple[str, ...] = field(default=())
