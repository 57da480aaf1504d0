"""One step's stamps, as the reducer makes them, turned into seconds: ``minddp.last_step(ddp)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..documents import misfit
from ..functions import averager_of

__all__ = [
    "BucketTimes", "Stamps", "StepTimes", "covered", "ended", "flight", "launched_buckets", "on_device", "step_begin",
    "step_times", "waits",
]  # fmt: skip

_NS = 1e-9
Stamps = Mapping[str, Any]
"""What the reducer's ``last_step()`` returns."""


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of one step. Moments are seconds since backward began, the rest are durations.

    Attributes:
        index: position in launch order.
        nbytes: bytes that its collective reduced.
        parameters: indices of its parameters.
        ready: when its last gradient arrived.
        launched: when its collective was launched.
        done: when its collective ended; ``None`` on a device, where the host knows only when it enqueued it.
        unpacked: when its gradients were in place.
        pack_seconds, communication_seconds, unpack_seconds: packing; launch to end; unpacking (0 when
            gradients are views of the bucket).
        exposed_seconds: how long the step was blocked by this bucket after backward had ended.
            ``communication_seconds`` and this are ``None`` on a device.
    """

    index: int
    nbytes: int
    parameters: tuple[int, ...]
    ready: float
    launched: float
    done: float | None
    unpacked: float
    pack_seconds: float
    communication_seconds: float | None
    unpack_seconds: float
    exposed_seconds: float | None

    @property
    def end(self) -> float:
        """When its collective ended; on a device, where nobody knows, its launch."""
        return self.launched if self.done is None else self.done


@dataclass(frozen=True)
class StepTimes:
    """One synchronized step of this rank, in seconds. On a device all are the host's, which enqueues the step.

    Attributes:
        iteration: which synchronized backward, from 1; 0: none has ended yet, and there are no times.
        forward_seconds: the forward, up to where backward began; 0 when the next forward has begun.
        backward_seconds: autograd's backward, without the wait for collectives after it.
        communication_seconds: time during which at least one collective was under way; ``None`` on a device.
        exposed_seconds: the part of it that nothing hid: backward had ended and the step waited; ``None`` on a
            device.
        step_seconds: from forward's begin until the averaged gradients were in place.
        buckets: those that were reduced, in launch order.
    """

    iteration: int
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float | None
    exposed_seconds: float | None
    step_seconds: float
    buckets: tuple[BucketTimes, ...]


@dataclass(frozen=True)
class _Wait:
    """An interval (ns) in which the step was blocked by a bucket's collective."""

    bucket: int
    begin: int
    end: int


def step_times(step: Stamps) -> StepTimes:
    """Seconds from the stamps that a reducer's ``last_step()`` returns; no step if it has not ended."""
    if not ended(step):
        return _NO_STEP
    origin = step["backward_begin_ns"]
    begin = step_begin(step)
    exposed = {wait.bucket: wait.end - wait.begin for wait in waits(step)}
    launched = launched_buckets(step)
    seen = not on_device(step)
    return StepTimes(
        iteration=step["iteration"],
        forward_seconds=(origin - begin) * _NS,
        backward_seconds=(step["backward_end_ns"] - origin) * _NS,
        communication_seconds=covered([flight(bucket) for bucket in launched]) * _NS if seen else None,
        exposed_seconds=sum(exposed.values()) * _NS if seen else None,
        step_seconds=(step["finalize_end_ns"] - begin) * _NS,
        buckets=tuple(_bucket_times(bucket, origin, exposed.get(bucket["index"], 0)) for bucket in launched),
    )


_NO_STEP = StepTimes(0, 0.0, 0.0, None, None, 0.0, ())


def last_step(ddp: torch.nn.Module) -> StepTimes:
    """Where the last synchronized backward's time went, in seconds, bucket by bucket.

    Before the first one has ended, the result's ``iteration`` is 0, and it has no buckets. Cheap enough to call in
    every step; the raw stamps are ``ddp.reducer.last_step()``.

    Raises:
        TypeError: ``ddp`` is no wrapper.
    """
    averager = averager_of(ddp, "last_step")
    return step_times(averager.reducer.last_step()) if averager.observers.get("timeline") else _NO_STEP


def on_device(step: Stamps) -> bool:
    """Whether its collectives ran on a device: the stamps after a launch say when the host enqueued what follows."""
    return any(bucket.get("on_device", False) for bucket in step["buckets"])


def ended(step: Stamps) -> bool:
    """Whether the stamps are those of a whole step (a backward under way has overwritten some)."""
    return step["iteration"] > 0 and step["finalize_end_ns"] >= step["backward_begin_ns"]


def launched_buckets(step: Stamps) -> list[Stamps]:
    """The buckets whose collective ran, in launch order."""
    return [bucket for bucket in step["buckets"] if bucket["launch_ns"] >= 0]


def _bucket_times(bucket: Stamps, origin: int, exposed_ns: int) -> BucketTimes:
    launched, done = flight(bucket)
    seen = not bucket.get("on_device", False)
    return BucketTimes(
        index=bucket["index"],
        nbytes=bucket["nbytes"],
        parameters=tuple(bucket["parameters"]),
        ready=(bucket["ready_ns"] - origin) * _NS,
        launched=(launched - origin) * _NS,
        done=(done - origin) * _NS if seen else None,
        unpacked=(max(done, bucket["unpack_end_ns"]) - origin) * _NS,
        pack_seconds=_length(bucket["pack_begin_ns"], launched) * _NS,
        communication_seconds=(done - launched) * _NS if seen else None,
        unpack_seconds=_length(bucket["unpack_begin_ns"], bucket["unpack_end_ns"]) * _NS,
        exposed_seconds=exposed_ns * _NS if seen else None,
    )


def _length(begin: int, end: int) -> int:
    """Nanoseconds from ``begin`` to ``end``, 0 where one of them never came (is negative)."""
    return max(0, end - begin) if begin >= 0 and end >= 0 else 0


def flight(bucket: Stamps) -> tuple[int, int]:
    """Launch and end of a bucket's collective; an end that was not seen is that of the wait for it. On a device,
    where nobody knows it, the launch twice."""
    launch = bucket["launch_ns"]
    if bucket.get("on_device", False):
        return launch, launch
    ends = [bucket["done_ns"], bucket["unpack_begin_ns"]]
    return launch, next((end for end in ends if end >= launch), launch)


def covered(intervals: Sequence[tuple[int, int]]) -> int:
    """The length of the intervals' union."""
    total, reached = 0, -1
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def waits(step: Stamps) -> Iterator[_Wait]:
    """Where the step was blocked after backward: until each collective's end, other unpacking apart."""
    moment = step["backward_end_ns"]
    for bucket in sorted(launched_buckets(step), key=lambda bucket: max(flight(bucket)[1], moment)):
        done = flight(bucket)[1]
        if done > moment:
            yield _Wait(bucket["index"], moment, done)
        moment = max(moment, done, bucket["unpack_end_ns"])


def step_begin(step: Stamps) -> int:
    """The earliest stamp of ``step``."""
    return min(step["forward_begin_ns"], step["backward_begin_ns"])


def wrong_part(part: Any, place: str = "it") -> str:
    """Why ``part``, which lies at ``place``, is no rank's part of a trace; empty if it is one."""
    moments = ["ready_ns", "pack_begin_ns", "launch_ns", "launch_end_ns", "done_ns"]
    moments += ["unpack_begin_ns", "unpack_end_ns"]
    bucket = {"index": int, "nbytes": int, "parameters": [int], "on_device?": bool, **dict.fromkeys(moments, int)}
    moments = ["previous_end_ns", "first_arrival_ns", "optimizer_ns", "arrival_ns"]
    moments += ["forward_begin_ns", "backward_begin_ns", "backward_end_ns", "finalize_end_ns"]
    step = {"iteration": int, "ready_ns": [int], "buckets": [bucket], **dict.fromkeys(moments, int)}
    module = {"name": str, "parameter_names": [str], "steps": [step]}
    why = misfit(part, {"rank": int, "clock": str, "modules": [module]}, place)
    return why or next(filter(None, map(_wrong_numbers, part["modules"])), "")


def _wrong_numbers(module: dict[str, Any]) -> str:
    """Why steps do not belong to the module's parameters; empty if they do."""
    count = len(module["parameter_names"])
    for step in module["steps"]:
        used = {index for bucket in step["buckets"] for index in bucket["parameters"]}
        if len(step["ready_ns"]) != count or not used <= set(range(count)):
            return f"iteration {step['iteration']} of {module['name']} is of other parameters than its {count}"
        if not ended(step):
            return f"iteration {step['iteration']} of {module['name']} has not ended"
    return ""
