"""The trace's file: Chrome's trace event JSON, which Perfetto reads too, with minddp's own part beside the events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..documents import write_or_log
from ..logs import log
from ..messages import ranks_text
from .step_times import Stamps, flight, launched_buckets, step_begin, waits


def write(path: str, parts: list[dict[str, Any]], world_size: int) -> None:
    """Writes the whole file or nothing, and logs what it lacks, or why it could not be written."""
    missing = sorted(set(range(world_size)) - {part["rank"] for part in parts})
    others = [part["rank"] for part in parts if part["clock"] != parts[0]["clock"]]
    notes = []
    if missing:
        notes.append(f"{ranks_text(missing)} did not hand in a part in time")
    if others:
        notes.append(f"{ranks_text(others)} read another clock, so their steps are not beside the others'")
    for note in notes:
        log.warning("trace %s: %s", path, note)
    own = {"world_size": world_size, "missing_ranks": missing, "notes": notes, "ranks": parts}
    document = {"traceEvents": list(_events(parts)), "displayTimeUnit": "ms", "minddp": own}
    write_or_log(path, json.dumps(document), "the trace")


_STEP, _GRADIENTS, _COPIES, _COLLECTIVES = range(4)  # rows of a module, from the top; collectives last
_ROWS_A_MODULE = 100


def _events(parts: Sequence[Stamps]) -> Iterator[dict[str, Any]]:
    """Chrome trace events: a process per rank, rows per module; microseconds since the first forward of those ranks
    that read the same clock."""
    steps = list(_all_steps(parts))
    origins: dict[str, int] = {}  # by clock
    for part, _, step in steps:
        origins[part["clock"]] = min(origins.get(part["clock"], step_begin(step)), step_begin(step))
    for part in parts:
        yield from _row_names(part)
    for part, number, step in steps:
        for event in _step_events(step, part["modules"][number]["parameter_names"]):
            event["pid"], event["tid"] = part["rank"], number * _ROWS_A_MODULE + event["tid"]
            event["ts"] = (event["ts"] - origins[part["clock"]]) / 1e3
            yield event


def _row_names(part: Stamps) -> Iterator[dict[str, Any]]:
    rank = part["rank"]
    yield _label("process_name", rank, 0, name=f"rank {rank} ({part.get('host')}, pid {part.get('pid')})")
    yield _label("process_sort_index", rank, 0, sort_index=rank)
    for number, module in enumerate(part["modules"]):
        for row, label in enumerate(("step", "gradients", "pack, unpack", "collectives")):
            name = f"{module['name']}: {label}"
            yield _label("thread_name", rank, number * _ROWS_A_MODULE + row, name=name)


def _all_steps(parts: Sequence[Stamps]) -> Iterator[tuple[Stamps, int, Stamps]]:
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


def _step_events(step: Stamps, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The events of one step on the rows of its module."""
    iteration = step["iteration"]
    yield _span(_STEP, "forward", step_begin(step), step["backward_begin_ns"], iteration=iteration)
    yield _span(_STEP, "backward", step["backward_begin_ns"], step["backward_end_ns"], iteration=iteration)
    yield _span(_STEP, "finalize", step["backward_end_ns"], step["finalize_end_ns"], iteration=iteration)
    for wait in waits(step):
        yield _span(_STEP, f"wait for bucket {wait.bucket}", wait.begin, wait.end)
    for index, moment in enumerate(step["ready_ns"]):
        if moment >= 0:
            yield {"ph": "i", "s": "t", "tid": _GRADIENTS, "name": names[index], "ts": moment}
    yield from _bucket_events(launched_buckets(step), names)


def _bucket_events(buckets: Sequence[Stamps], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Packing, collective and unpacking; collectives that overlap get rows of their own."""
    busy_until: list[int] = []
    for bucket in buckets:
        launch, done = flight(bucket)
        label = f"bucket {bucket['index']}"
        if bucket["pack_begin_ns"] >= 0:
            yield _span(_COPIES, f"pack {label}", bucket["pack_begin_ns"], launch)
        if bucket["unpack_begin_ns"] >= 0:
            yield _span(_COPIES, f"unpack {label}", bucket["unpack_begin_ns"], bucket["unpack_end_ns"])
        row = next((i for i, end in enumerate(busy_until) if end <= launch), len(busy_until))
        busy_until[row : row + 1] = [done]
        facts = {"nbytes": bucket["nbytes"], "parameters": [names[i] for i in bucket["parameters"]]}
        yield _span(_COLLECTIVES + row, label, launch, done, **facts)
