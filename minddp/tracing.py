"""Where a step's time goes: ``ddp.last_step()``, and timelines of all ranks as Chrome/Perfetto JSON.

Overview
    The reducer stamps every synchronized backward (always; a clock read per gradient and six per
    bucket). :func:`step_times` turns one step's stamps into seconds. While a trace is open, the module
    calls :func:`after_step` at the beginning of each forward, which keeps the stamps of the step before.
    When it closes, rank 0 collects every rank's part through the process group's store and writes one
    file; ``python -m minddp.timeline`` reads it, and so do chrome://tracing and ui.perfetto.dev.

What always holds
    With no trace open, ``active`` is False and nothing here runs. Closing runs no collective and never
    waits longer than its timeout: a rank that is missing is named in the file and in a warning.

Clocks
    Stamps are CLOCK_MONOTONIC. Ranks in one boot of one kernel read the same clock, so nothing is added
    to theirs. Another machine's offset is measured by ping-pong through the store: the answer with the
    shortest round trip counts, and half of that round trip bounds the error (Cristian's algorithm, 1989). The
    offset is measured once, on closing; the file states it, with its bound, for each rank. What clocks
    drift apart during the trace (tens of microseconds a second at worst) is not corrected.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .guards import lifetime  # noqa: F401  registers its exit handler first, so that it runs after the trace's

__all__ = ["BucketTimes", "StepTimes", "Trace", "active", "after_step", "step_times", "trace"]

active = False  # read by the module at each forward: is a trace open?

_NS = 1e-9
_PINGS = 16
_DEFAULT_STEPS = 100
_TIMEOUT = timedelta(seconds=30)
_Stamps = Mapping[str, Any]  # what the reducer's last_step() returns


# ---- one step in seconds


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of one step. Moments are seconds since backward began, the rest are durations.

    Attributes:
        index: position in launch order.
        nbytes: bytes that its collective reduced.
        parameters: indices of its parameters.
        ready: when its last gradient arrived.
        launched: when its collective was launched.
        done: when its collective ended.
        unpacked: when its gradients were in place.
        pack_seconds, communication_seconds, unpack_seconds: packing; launch to end; unpacking (0 when
            gradients are views of the bucket).
        exposed_seconds: how long the step stood still for this bucket after backward had ended.
    """

    index: int
    nbytes: int
    parameters: tuple[int, ...]
    ready: float
    launched: float
    done: float
    unpacked: float
    pack_seconds: float
    communication_seconds: float
    unpack_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class StepTimes:
    """One synchronized step of this rank, in seconds.

    Attributes:
        iteration: which synchronized backward, from 1.
        forward_seconds: the forward, up to where backward began; 0 when the next forward has begun.
        backward_seconds: autograd's backward, without the wait for collectives after it.
        communication_seconds: time during which at least one collective was under way.
        exposed_seconds: the part of it that nothing hid: backward had ended and the step waited.
        step_seconds: from forward's begin until the averaged gradients were in place.
        buckets: those that were reduced, in launch order.
    """

    iteration: int
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    exposed_seconds: float
    step_seconds: float
    buckets: tuple[BucketTimes, ...]


@dataclass(frozen=True)
class _Wait:
    """An interval (ns) in which the step stood still for a bucket's collective."""

    bucket: int
    begin: int
    end: int


def step_times(step: _Stamps) -> StepTimes:
    """Seconds from the stamps that a reducer's ``last_step()`` returns.

    Raises:
        RuntimeError: no synchronized backward has ended yet.
    """
    if not _ended(step):
        raise RuntimeError("there is no last step: no synchronized backward has ended on this rank")
    origin = step["backward_begin_ns"]
    begin = _begin(step)
    exposed = {wait.bucket: wait.end - wait.begin for wait in _waits(step)}
    launched = _launched(step)
    return StepTimes(
        iteration=step["iteration"],
        forward_seconds=(origin - begin) * _NS,
        backward_seconds=(step["backward_end_ns"] - origin) * _NS,
        communication_seconds=_covered([_flight(bucket) for bucket in launched]) * _NS,
        exposed_seconds=sum(exposed.values()) * _NS,
        step_seconds=(step["finalize_end_ns"] - begin) * _NS,
        buckets=tuple(_bucket_times(bucket, origin, exposed.get(bucket["index"], 0)) for bucket in launched),
    )


def _ended(step: _Stamps) -> bool:
    """Whether the stamps are those of a whole step (a backward under way has overwritten some)."""
    return step["iteration"] > 0 and step["finalize_end_ns"] >= step["backward_begin_ns"]


def _launched(step: _Stamps) -> list[_Stamps]:
    """The buckets whose collective ran, in launch order."""
    return [bucket for bucket in step["buckets"] if bucket["launch_ns"] >= 0]


def _bucket_times(bucket: _Stamps, origin: int, exposed_ns: int) -> BucketTimes:
    launched, done = _flight(bucket)
    return BucketTimes(
        index=bucket["index"],
        nbytes=bucket["nbytes"],
        parameters=tuple(bucket["parameters"]),
        ready=(bucket["ready_ns"] - origin) * _NS,
        launched=(launched - origin) * _NS,
        done=(done - origin) * _NS,
        unpacked=(max(done, bucket["unpack_end_ns"]) - origin) * _NS,
        pack_seconds=_length(bucket["pack_begin_ns"], launched) * _NS,
        communication_seconds=(done - launched) * _NS,
        unpack_seconds=_length(bucket["unpack_begin_ns"], bucket["unpack_end_ns"]) * _NS,
        exposed_seconds=exposed_ns * _NS,
    )


def _length(begin: int, end: int) -> int:
    """Nanoseconds from ``begin`` to ``end``, 0 where one of them never came (is negative)."""
    return max(0, end - begin) if begin >= 0 and end >= 0 else 0


def _flight(bucket: _Stamps) -> tuple[int, int]:
    """Launch and end of a bucket's collective; an end that was not seen is that of the wait for it."""
    launch = bucket["launch_ns"]
    ends = [bucket["done_ns"], bucket["unpack_begin_ns"]]
    return launch, next((end for end in ends if end >= launch), launch)


def _covered(intervals: Sequence[tuple[int, int]]) -> int:
    """The length of the intervals' union."""
    total, reached = 0, -1
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _waits(step: _Stamps) -> Iterator[_Wait]:
    """Where the step stood still after backward: until each collective's end, other unpacking apart."""
    moment = step["backward_end_ns"]
    for bucket in sorted(_launched(step), key=lambda bucket: max(_flight(bucket)[1], moment)):
        done = _flight(bucket)[1]
        if done > moment:
            yield _Wait(bucket["index"], moment, done)
        moment = max(moment, done, bucket["unpack_end_ns"])


# ---- recording


@dataclass
class _ModuleRecord:
    """What one wrapped module has shown so far, since its reducer was made: one made anew numbers steps and
    parameters anew, and gets a record of its own."""

    name: str
    parameter_names: list[str]
    reducer: Any  # kept, if another takes its place, until its last step is read
    earlier: int = 0  # steps in the module's records before this one
    steps: list[dict[str, Any]] = field(default_factory=list)
    last_iteration: int = 0
    dropped: int = 0

    def add(self, step: dict[str, Any], begin_ns: int, limit: int) -> None:
        """Keeps ``step`` unless it was seen before, began before the trace, or the limit is reached."""
        if step["iteration"] <= self.last_iteration or _begin(step) < begin_ns or not _ended(step):
            return
        self.last_iteration = step["iteration"]
        if self.earlier + len(self.steps) < limit:
            self.steps.append(step)
        else:
            self.dropped += 1

    def fits(self, ddp: Any) -> bool:
        """Whether the module's steps still are this record's."""
        same = self.reducer is ddp.reducer and self.parameter_names == list(ddp.parameter_names)
        return same and ddp.reducer.last_step()["iteration"] >= self.last_iteration

    def to_json(self) -> dict[str, Any]:
        facts = {"name": self.name, "parameter_names": self.parameter_names, "dropped": self.dropped}
        return {**facts, "steps": self.steps}


class Trace:
    """An open trace; a context manager. Made by :func:`trace`."""

    def __init__(self, path: str | os.PathLike[str], steps: int, timeout: timedelta = _TIMEOUT):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        self._path = os.fspath(path)
        folder = os.path.dirname(self._path) or "."
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"trace: the folder {folder!r} of {self._path!r} does not exist")
        if os.path.isdir(self._path):
            raise IsADirectoryError(f"trace: {self._path!r} is a folder; name a file in it")
        self._limit = steps
        self._timeout = timeout
        self._records: list[_ModuleRecord] = []
        self._by_module: weakref.WeakKeyDictionary[Any, _ModuleRecord] = weakref.WeakKeyDictionary()
        self._ranks: _Ranks | None = None

    def __enter__(self) -> Trace:
        global _open, active
        if _open is not None:
            raise RuntimeError(f"a trace is already open (it goes to {_open._path!r}): close it first")
        self._begin_ns = time.monotonic_ns()
        _open, active = self, True
        self._meet()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the trace; rank 0 writes the file. Does nothing when the trace is closed already."""
        global _open, active
        if _open is not self:
            return
        _open, active = None, False
        for ddp in list(self._by_module):
            self._look(ddp)
        for record in self._records:
            record.reducer = None
        self._meet()
        part = {**_process(), "modules": [record.to_json() for record in self._records]}
        ranks = self._ranks or _Ranks(None, 0, 1)
        parts = ranks.gather(part, self._timeout)
        if parts is not None:
            _write(self._path, parts, ranks.world_size)

    def close_if_used(self) -> None:
        """Closes, but writes only if a module took a step: a helper process (a data loader's) writes none."""
        global _open, active
        if _open is self and not self._records:
            _open, active = None, False
        try:
            self.close()
        except OSError as error:
            warnings.warn(f"MINDDP_TRACE: the trace could not be written: {error}", stacklevel=2)

    def add(self, ddp: Any) -> None:
        """Keeps ``ddp``'s last step, if it is new."""
        self._meet()
        self._look(ddp)

    def _look(self, ddp: Any) -> None:
        record = self._by_module.get(ddp)
        reducer = getattr(ddp, "reducer", None)
        if record is not None and record.reducer is not reducer:
            record.add(record.reducer.last_step(), self._begin_ns, self._limit)
        if reducer is None:  # given up when the interpreter ends
            return
        if record is None or not record.fits(ddp):
            record = self._new_record(ddp, record)
        record.add(reducer.last_step(), self._begin_ns, self._limit)

    def _new_record(self, ddp: Any, before: _ModuleRecord | None) -> _ModuleRecord:
        record = _ModuleRecord(type(ddp.module).__name__, list(ddp.parameter_names), ddp.reducer)
        if before is not None:
            before.reducer = None
            record.earlier = before.earlier + len(before.steps)
            record.name += f" (remade after {record.earlier} steps)"
        self._by_module[ddp] = record
        self._records.append(record)
        return record

    def _meet(self) -> None:
        """Takes the default group's store as soon as there is one: it may be gone when the trace closes."""
        if self._ranks is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            own = dist.PrefixStore(f"minddp-trace/{os.path.basename(self._path)}", store)
            self._ranks = _Ranks(own, dist.get_rank(), dist.get_world_size())
            self._ranks.announce()


_open: Trace | None = None


def trace(path: str | os.PathLike[str], *, steps: int = _DEFAULT_STEPS) -> Trace:
    """Records a timeline of every rank while the ``with`` block runs; rank 0 writes it to ``path``.

    Open it on every rank, with the same file name. Each synchronized step of each wrapped module shows
    forward, the arrival of each gradient, packing, collectives, unpacking and waits.

    Args:
        path: the file to write, Chrome's trace event JSON, replaced if it exists.
        steps: keep at most the first ``steps`` steps of each module; the file says how many came after.

    Raises:
        ValueError, OSError: at once, when ``steps`` < 1, the folder of ``path`` is missing, or ``path`` is a folder.
        RuntimeError: on entering, when another trace is open in this process.
    """
    return Trace(path, steps)


def after_step(ddp: Any) -> None:
    """Called by the module before a forward while ``active``: keeps the stamps of the step before."""
    if _open is not None:
        _open.add(ddp)


# ---- the other ranks


def _process() -> dict[str, Any]:
    """Where this process runs, and whose clock it reads."""
    return {"host": platform.node(), "pid": os.getpid(), "clock": _clock_identity()}


def _clock_identity() -> str:
    """Equal in two processes only if they read the same CLOCK_MONOTONIC."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # no Linux: never taken for another process's clock
        return f"{platform.node()} {os.getpid()}"


@dataclass
class _Ranks:
    """All ranks' parts, brought to rank 0 through a store; ``store`` is None for a single process."""

    store: Any
    rank: int
    world_size: int

    def announce(self) -> None:
        """Publishes whose clock this rank reads, so that nobody has to wait for it later."""
        self.store.set(f"clock{self.rank}", _clock_identity())

    def gather(self, part: dict[str, Any], timeout: timedelta) -> list[dict[str, Any]] | None:
        """On rank 0 the parts that came within ``timeout``, with ``offset_ns`` and ``error_ns`` of each
        rank's clock from rank 0's; None on other ranks, which wait only to have their clocks measured."""
        part = {**part, "rank": self.rank, "offset_ns": 0, "error_ns": 0}
        if self.world_size == 1:
            return [part]
        if self.rank == 0:
            return [part, *self._receive(timeout)]
        try:
            self.store.set(f"part{self.rank}", zlib.compress(json.dumps(part).encode()))
            self._answer_pings(timeout)
        except RuntimeError as error:  # rank 0, and the store with it, has gone
            warnings.warn(f"trace: rank {self.rank} could not hand in its part: {error}", stacklevel=3)
        return None

    def _receive(self, timeout: timedelta) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + timeout.total_seconds()
        for rank in range(1, self.world_size):
            left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
            if not self._came(f"part{rank}", left):
                continue
            part = json.loads(zlib.decompress(self._take(f"part{rank}")))
            if part["clock"] != _clock_identity():
                part["offset_ns"], part["error_ns"] = self._ping(rank, left)
            yield part

    def _take(self, key: str) -> bytes:
        """The value of ``key``, which is gone then: a later trace of the same name must not find it."""
        value: bytes = self.store.get(key)
        self.store.delete_key(key)
        return value

    def _came(self, key: str, timeout: timedelta) -> bool:
        try:
            self.store.wait([key], timeout)
        except RuntimeError:  # FileStore raises no DistError
            return False
        return True

    def _ping(self, rank: int, timeout: timedelta) -> tuple[int | None, int | None]:
        """``rank``'s clock minus this one's and the bound on its error; None where no answer came."""
        best: tuple[int, int] | None = None
        for turn in range(_PINGS):
            begin = time.monotonic_ns()
            self.store.set(f"ping{rank}.{turn}", b"")
            if not self._came(f"pong{rank}.{turn}", timeout):
                break
            trip = time.monotonic_ns() - begin
            theirs = int(self._take(f"pong{rank}.{turn}"))
            if best is None or trip / 2 < best[1]:
                best = theirs - (begin + trip // 2), trip // 2 + 1
        return best or (None, None)

    def _answer_pings(self, timeout: timedelta) -> None:
        if not self._came("clock0", timeout) or self.store.get("clock0").decode() == _clock_identity():
            return
        for turn in range(_PINGS):
            if not self._came(f"ping{self.rank}.{turn}", timeout):
                return
            now = time.monotonic_ns()
            self.store.set(f"pong{self.rank}.{turn}", str(now))
            self.store.delete_key(f"ping{self.rank}.{turn}")


# ---- the file


def _write(path: str, parts: list[dict[str, Any]], world_size: int) -> None:
    """Writes the whole file or nothing, and warns about what it lacks."""
    missing = sorted(set(range(world_size)) - {part["rank"] for part in parts})
    if missing:
        warnings.warn(f"trace {path}: rank(s) {missing} did not hand in their part in time", stacklevel=3)
    unaligned = [part["rank"] for part in parts if part["offset_ns"] is None]
    if unaligned:
        warnings.warn(f"trace {path}: the clock of rank(s) {unaligned} could not be measured", stacklevel=3)
    document = {
        "traceEvents": list(_events(parts)),
        "displayTimeUnit": "ms",
        "minddp": {"world_size": world_size, "missing_ranks": missing, "ranks": parts},
    }
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


_STEP, _GRADIENTS, _COPIES, _COLLECTIVES = range(4)  # rows of a module, from the top; collectives last
_ROWS_A_MODULE = 100


def _events(parts: Sequence[_Stamps]) -> Iterator[dict[str, Any]]:
    """Chrome trace events: a process per rank, rows per module; microseconds since the first forward."""
    steps = list(_all_steps(parts))
    origin = min((_begin(step) - (part["offset_ns"] or 0) for part, _, step in steps), default=0)
    for part in parts:
        yield from _row_names(part)
    for part, number, step in steps:
        for event in _step_events(step, part["modules"][number]["parameter_names"]):
            event["pid"], event["tid"] = part["rank"], number * _ROWS_A_MODULE + event["tid"]
            event["ts"] = (event["ts"] - (part["offset_ns"] or 0) - origin) / 1e3
            yield event


def _row_names(part: _Stamps) -> Iterator[dict[str, Any]]:
    rank = part["rank"]
    yield _label("process_name", rank, 0, name=f"rank {rank} ({part['host']}, pid {part['pid']})")
    yield _label("process_sort_index", rank, 0, sort_index=rank)
    for number, module in enumerate(part["modules"]):
        for row, label in enumerate(("step", "gradients", "pack, unpack", "collectives")):
            name = f"{module['name']}: {label}"
            yield _label("thread_name", rank, number * _ROWS_A_MODULE + row, name=name)


def _begin(step: _Stamps) -> int:
    """The earliest stamp of ``step``."""
    return min(step["forward_begin_ns"], step["backward_begin_ns"])


def _all_steps(parts: Sequence[_Stamps]) -> Iterator[tuple[_Stamps, int, _Stamps]]:
    """(part, module number, step) of everything recorded."""
    for part in parts:
        for number, module in enumerate(part["modules"]):
            for step in module["steps"]:
                yield part, number, step


def _label(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _span(tid: int, name: str, begin: int, end: int, **args: Any) -> dict[str, Any]:
    """A complete event; ``ts`` still in ns of the rank's own clock."""
    return {"ph": "X", "tid": tid, "name": name, "ts": begin, "dur": max(0, end - begin) / 1e3, "args": args}


def _step_events(step: _Stamps, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The events of one step on the rows of its module."""
    iteration = step["iteration"]
    yield _span(_STEP, "forward", _begin(step), step["backward_begin_ns"], iteration=iteration)
    yield _span(_STEP, "backward", step["backward_begin_ns"], step["backward_end_ns"], iteration=iteration)
    yield _span(_STEP, "finalize", step["backward_end_ns"], step["finalize_end_ns"], iteration=iteration)
    for wait in _waits(step):
        yield _span(_STEP, f"wait for bucket {wait.bucket}", wait.begin, wait.end)
    for index, moment in enumerate(step["ready_ns"]):
        if moment >= 0:
            yield {"ph": "i", "s": "t", "tid": _GRADIENTS, "name": names[index], "ts": moment}
    yield from _bucket_events(_launched(step), names)


def _bucket_events(buckets: Sequence[_Stamps], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Packing, collective and unpacking; collectives that overlap get rows of their own."""
    busy_until: list[int] = []
    for bucket in buckets:
        launch, done = _flight(bucket)
        label = f"bucket {bucket['index']}"
        if bucket["pack_begin_ns"] >= 0:
            yield _span(_COPIES, f"pack {label}", bucket["pack_begin_ns"], launch)
        if bucket["unpack_begin_ns"] >= 0:
            yield _span(_COPIES, f"unpack {label}", bucket["unpack_begin_ns"], bucket["unpack_end_ns"])
        row = next((i for i, end in enumerate(busy_until) if end <= launch), len(busy_until))
        busy_until[row : row + 1] = [done]
        facts = {"nbytes": bucket["nbytes"], "parameters": [names[i] for i in bucket["parameters"]]}
        yield _span(_COLLECTIVES + row, label, launch, done, **facts)


def _open_from_environment() -> None:
    """``MINDDP_TRACE=path``: a trace of the whole process, closed at its exit; a warning where it cannot be."""
    path = os.environ.get("MINDDP_TRACE")
    if not path:
        return
    try:
        opened = Trace(path, _DEFAULT_STEPS)
    except OSError as error:
        warnings.warn(f"MINDDP_TRACE: this process takes no trace. {error}", stacklevel=2)
        return
    atexit.register(opened.__enter__().close_if_used)


_open_from_environment()
