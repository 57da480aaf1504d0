"""One rank's part of one step, cut into its own work, and waits for collectives. Pure: stamps in, seconds out.

Overview
    A step goes from the end of one synchronized backward to the end of the next. All ranks leave the end of a step's
    last collective at about the same moment. So what a rank does by itself from there until it has launched its
    last bucket says who is late, whatever clock it reads: these are its *own* phases. What remains are collectives.
    They transfer something only once all ranks have launched them. So the rank that is blocked least is blocked by
    transfers; what blocks another one longer is a wait for a rank.

Phases
    ===============  ==================================================================
    input            between two steps, without the optimizer: the data loader, logging
    optimizer        in optimizers' steps
    micro-batches    earlier forwards of the step, with their backwards (``no_sync``)
    forward          the last forward, and the loss
    backward         autograd, with packing
    hook             in the communication hook, or handing buckets to the process group
    unpack           after the last collective
    ===============  ==================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..timeline.step_times import Stamps, covered, flight, launched_buckets, on_device, waits

__all__ = ["PHASES", "Part", "RankTimes", "part_of", "times_of"]

PHASES = ("input", "optimizer", "micro-batches", "forward", "backward", "hook", "unpack")
_NS = 1e-9
_AT_ONCE_NS = 10_000  # a collective that is over by then when its hook returns: the hook has waited for it


@dataclass(frozen=True)
class RankTimes:
    """One rank's part of a step, or its medians over several, in seconds.

    Attributes:
        rank: of the wrapper's group.
        phases: its own work by phase, see this module's text.
        meeting_seconds: in forward's own collectives before it runs (buffers, join, checks).
        under_way_seconds: collectives were under way, with what they waited for other ranks; ``None`` on a device.
        blocked_seconds: backward, or its hook, waited for collectives; ``None`` on a device.
        waiting_seconds: of these, for another rank; ``None`` on a device, and where there is no other rank.
    """

    rank: int
    phases: dict[str, float]
    meeting_seconds: float
    under_way_seconds: float | None = None
    blocked_seconds: float | None = None
    waiting_seconds: float | None = None

    @property
    def exposed_seconds(self) -> float | None:
        """What transfers have blocked; ``None`` where ``waiting_seconds`` is."""
        if self.blocked_seconds is None or self.waiting_seconds is None:
            return None
        return self.blocked_seconds - self.waiting_seconds

    @property
    def own_seconds(self) -> float:
        """All phases together."""
        return sum(self.phases.values())


class Part(NamedTuple):
    """What a rank tells the others of one step, in nanoseconds; see :class:`RankTimes`."""

    iteration: int
    length: int
    phases: list[int]
    meeting: int
    under_way: int | None
    blocked: int | None


def times_of(rank: int, part: Part) -> RankTimes:
    """The same in seconds."""
    under_way, blocked = (None if ns is None else ns * _NS for ns in (part.under_way, part.blocked))
    phases = {phase: ns * _NS for phase, ns in zip(PHASES, part.phases, strict=True)}
    return RankTimes(rank, phases, part.meeting * _NS, under_way, blocked)


def part_of(step: Stamps) -> Part:
    """One rank's part of a step, as far as the rank knows it.

    Args:
        step: one step of the reducer's ``recent_steps()``, with a step before it.
    """
    forward, launched = step["forward_begin_ns"], launched_buckets(step)
    meets = step["previous_end_ns"] <= step["arrival_ns"] <= forward <= step["backward_begin_ns"]
    under_way = blocked = None
    if not on_device(step):
        under_way = covered([(_started(bucket), flight(bucket)[1]) for bucket in launched])
        blocked = covered([*((wait.begin, wait.end) for wait in waits(step)), *_hook_waits(step)])
    length = step["finalize_end_ns"] - step["previous_end_ns"]
    meeting = forward - step["arrival_ns"] if meets else 0
    return Part(step["iteration"], length, _own_phases(step), meeting, under_way, blocked)


def _own_phases(step: Stamps) -> list[int]:
    """Nanoseconds of each phase of :data:`PHASES`."""
    previous, forward, backward = step["previous_end_ns"], step["forward_begin_ns"], step["backward_begin_ns"]
    if not previous <= forward <= backward:  # a forward that is not the wrapper's
        forward = backward
    last = step["arrival_ns"] if previous <= step["arrival_ns"] <= forward else forward
    first = step["first_arrival_ns"] if previous <= step["first_arrival_ns"] <= last else last
    optimizer = min(step["optimizer_ns"], first - previous)
    launched = launched_buckets(step)
    launch_end = max([step["backward_end_ns"], *(bucket["launch_end_ns"] for bucket in launched)])
    in_hooks = sum(bucket["launch_end_ns"] - bucket["launch_ns"] for bucket in launched)
    waits_there = covered(_hook_waits(step))
    over = max([launch_end, *(flight(bucket)[1] for bucket in launched)])
    lengths = (
        first - previous - optimizer, optimizer, last - first, backward - forward,
        launch_end - backward - in_hooks, in_hooks - waits_there, step["finalize_end_ns"] - over,
    )  # fmt: skip
    return [max(0, ns) for ns in lengths]


def _hook_waits(step: Stamps) -> list[tuple[int, int]]:
    """Where a hook itself has waited for its collective, and so for other ranks: its own part is not known."""
    launched = launched_buckets(step)
    if any(bucket.get("on_device", False) or _started(bucket) > bucket["launch_ns"] for bucket in launched):
        return []
    return [(bucket["launch_ns"], bucket["launch_end_ns"]) for bucket in launched]


def _started(bucket: Stamps) -> int:
    """When its collective began: a hook may do much before. Of one that waits for its collective, when it began."""
    at_once = flight(bucket)[1] <= bucket["launch_end_ns"] + _AT_ONCE_NS
    return int(bucket["launch_ns"] if at_once else bucket["launch_end_ns"])
