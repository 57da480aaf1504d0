"""One rank's part of one step, cut into its own work, transfers and waits. Pure: stamps in, seconds out.

Overview
    A step goes from the end of one synchronized backward to the end of the next. All ranks leave the end of a step's
    last collective at about the same moment. So what a rank does by itself from there until it has launched its
    last bucket says who is late, whatever clock it reads: these are its *own* phases. What remains are collectives.
    They transfer something only once all ranks have launched them, and that needs aligned clocks.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..timeline.step_times import Stamps, flight, launched_buckets, on_device, waits
from .intervals import Intervals, common, length, union, without

__all__ = ["PHASES", "LastLaunch", "Parts", "last_launches", "own_phases", "parts_of"]

PHASES = ("input", "optimizer", "micro-batches", "forward", "backward", "hook", "unpack")
_NS = 1e-9
_AT_ONCE_NS = 10_000  # a collective that is over by then when its hook returns: the hook has waited for it

LastLaunch = tuple[int, int]
"""When the last rank launched a bucket, in nanoseconds of the clock at hand, and which rank that was."""


@dataclass(frozen=True)
class Parts:
    """One rank's part of one step, in seconds.

    Attributes:
        iteration: which synchronized backward, from 1.
        own: by phase, see this module's text.
        step_seconds: from the end of the step before to this one's.
        meeting_seconds: in forward's own collectives before it runs (buffers, join, checks).
        blocked_seconds: backward waited for collectives; ``None`` on a device.
        hidden_seconds: transfers while the rank computed.
        exposed_seconds: transfers while it was blocked.
        waiting_seconds: blocked while nothing was transferred. These three are ``None`` on a device, and
            where clocks could not be aligned.
        waiting_for: by rank, the part of ``waiting_seconds`` in which that rank had still to launch.
        exposed_by_bucket: by bucket, how long it blocked the step; empty on a device.
    """

    iteration: int
    own: dict[str, float]
    step_seconds: float
    meeting_seconds: float
    blocked_seconds: float | None
    hidden_seconds: float | None
    exposed_seconds: float | None
    waiting_seconds: float | None
    waiting_for: dict[int, float]
    exposed_by_bucket: dict[int, float]

    @property
    def own_seconds(self) -> float:
        """All phases together."""
        return sum(self.own.values())


def own_phases(step: Stamps) -> dict[str, float]:
    """Seconds of each phase of :data:`PHASES`.

    Args:
        step: one step of the reducer's ``recent_steps()``, with a step before it.
    """
    previous, forward, backward = step["previous_end_ns"], step["forward_begin_ns"], step["backward_begin_ns"]
    if not previous <= forward <= backward:  # a forward that is not the wrapper's
        forward = backward
    last = step["arrival_ns"] if previous <= step["arrival_ns"] <= forward else forward
    first = step["first_arrival_ns"] if previous <= step["first_arrival_ns"] <= last else last
    optimizer = min(step["optimizer_ns"], first - previous)
    launched = launched_buckets(step)
    launch_end = max([step["backward_end_ns"], *(bucket["launch_end_ns"] for bucket in launched)])
    in_hooks = sum(bucket["launch_end_ns"] - bucket["launch_ns"] for bucket in launched)
    waits_there = sum(end - begin for begin, end in _hook_waits(step))
    over = max([launch_end, *(flight(bucket)[1] for bucket in launched)])
    lengths = (
        first - previous - optimizer, optimizer, last - first, backward - forward,
        launch_end - backward - in_hooks, in_hooks - waits_there, step["finalize_end_ns"] - over,
    )  # fmt: skip
    return {phase: max(0, ns) * _NS for phase, ns in zip(PHASES, lengths, strict=True)}


def _hook_waits(step: Stamps) -> Intervals:
    """Where a hook itself has waited for its collective, and so for other ranks: its own part is not known."""
    launched = launched_buckets(step)
    if any(bucket.get("on_device", False) or _started(bucket) > bucket["launch_ns"] for bucket in launched):
        return []
    return union((bucket["launch_ns"], bucket["launch_end_ns"]) for bucket in launched)


def _started(bucket: Stamps) -> int:
    """When its collective began: a hook may do much before. Of one that waits for its collective, when it began."""
    at_once = flight(bucket)[1] <= bucket["launch_end_ns"] + _AT_ONCE_NS
    return int(bucket["launch_ns"] if at_once else bucket["launch_end_ns"])


def last_launches(steps: Mapping[int, tuple[Stamps, int]]) -> dict[int, LastLaunch]:
    """By bucket, who launched it last and when, in nanoseconds of the reference clock.

    Args:
        steps: one step by rank, with the offset of that rank's clock from the reference in nanoseconds.
    """
    last: dict[int, LastLaunch] = {}
    for rank, (step, offset) in steps.items():
        for bucket in launched_buckets(step):
            moment = _started(bucket) - offset, rank
            last[bucket["index"]] = max(last.get(bucket["index"], moment), moment)
    return last


def parts_of(step: Stamps, last: Mapping[int, LastLaunch] | None) -> Parts:
    """Seconds of one rank's part of a step.

    Args:
        step: the rank's stamps.
        last: by bucket, when the last rank launched it, in nanoseconds of this rank's clock; ``None`` where
            that is not known.
    """
    forward = step["forward_begin_ns"]
    meets = step["previous_end_ns"] <= step["arrival_ns"] <= forward <= step["backward_begin_ns"]
    facts: dict[str, Any] = {
        "iteration": step["iteration"],
        "own": own_phases(step),
        "step_seconds": (step["finalize_end_ns"] - step["previous_end_ns"]) * _NS,
        "meeting_seconds": (forward - step["arrival_ns"]) * _NS if meets else 0.0,
    }
    seen: dict[str, Any] = dict.fromkeys(_UNSEEN)
    if on_device(step):
        return Parts(**facts, **seen, waiting_for={}, exposed_by_bucket={})
    ends = {wait.bucket: (wait.begin, wait.end) for wait in waits(step)}
    blocked = union([*ends.values(), *_hook_waits(step)])
    by_bucket = {bucket: (end - begin) * _NS for bucket, (begin, end) in ends.items()}
    seen["blocked_seconds"] = length(blocked) * _NS
    if last is None:
        return Parts(**facts, **seen, waiting_for={}, exposed_by_bucket=by_bucket)
    transfers = union(_transfer(bucket, last) for bucket in launched_buckets(step))
    waiting = without(blocked, transfers)
    seen["exposed_seconds"] = length(common(transfers, blocked)) * _NS
    seen["hidden_seconds"] = length(without(transfers, blocked)) * _NS
    seen["waiting_seconds"] = length(waiting) * _NS
    waiting_for = _waiting_for(launched_buckets(step), last, waiting)
    return Parts(**facts, **seen, waiting_for=waiting_for, exposed_by_bucket=by_bucket)


_UNSEEN = ("blocked_seconds", "hidden_seconds", "exposed_seconds", "waiting_seconds")


def _transfer(bucket: Stamps, last: Mapping[int, LastLaunch]) -> tuple[int, int]:
    done = flight(bucket)[1]
    return max(_started(bucket), min(last[bucket["index"]][0], done)), done


def _waiting_for(buckets: Sequence[Stamps], last: Mapping[int, LastLaunch], waiting: Intervals) -> dict[int, float]:
    lacking: dict[int, list[tuple[int, int]]] = {}
    for bucket in buckets:
        moment, rank = last[bucket["index"]]
        lacking.setdefault(rank, []).append((_started(bucket), min(moment, flight(bucket)[1])))
    found = {rank: length(common(union(spans), waiting)) * _NS for rank, spans in lacking.items()}
    return {rank: seconds for rank, seconds in found.items() if seconds > 0}
