""":func:`report`: what ranks exchange for it, through the process group's store.

Each rank writes its parts of the last steps under one key. Rank 0 reads the keys that are there within one bounded
wait, makes the report, and writes it under one key, which the others read. So a rank reads one key, however many
there are, and rank 0 one of each rank, of some ten numbers a step. There is no collective. Rank 0 returns when the
others have read, or the time is over: the store may be in its process, and end with it.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch.distributed as dist

from ..functions import averager_of, refuse_left
from ..messages import ranks_text
from ..timeline.store import ask, comes, forget
from .parts import Part, part_of
from .result import Report, make_report

__all__ = ["MAX_STEPS", "report"]

MAX_STEPS = 32  # that a reducer keeps
_PATIENCE, _RANKS_A_SECOND = 1.0, 2000  # a second, and one more for each so many ranks
_FOR_THE_OTHERS = 0.4  # of it, in which rank 0 awaits the others' parts
_STORE_SECONDS = 1.0  # that the requests themselves may take
_HINT = "Call report() on all ranks at the same point, between two steps."
_LEFT = {"links": "nccl-tests and iperf3 measure links: docs/report.md says how."}


def report(ddp: Any, steps: int = 20, **left: Any) -> Report:
    """Which rank holds the others up, and in what. ``print()`` of what it returns is a table with sentences.

    Call it on all ranks at the same point between two steps: each gets the same report, that of rank 0, whose
    ``steps`` counts. Ranks are numbered as in the wrapper's process group. It waits a second at most, and one more
    for each 2,000 ranks. Called on one rank alone it returns what that rank has seen. Whoever is missing is named in
    ``notes``, as is a store that does not answer: it raises nothing.

    Args:
        ddp: the wrapper.
        steps: of the last so many synchronized steps, 1 to 32. Fewer than 8 name nobody. New buckets (after the
            first step, while ``"auto"`` measures) begin anew.

    Returns:
        The report, in seconds. Its ``steps`` is 0, and ``notes`` says so, where there are none yet.

    Raises:
        TypeError, ValueError: an argument makes no sense.
    """
    refuse_left("minddp.report", left, _LEFT)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"report: steps must be a number of steps, got {steps!r}")
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"report: steps must be 1 to {MAX_STEPS}, which are kept, got {steps}")
    averager = averager_of(ddp, "report")
    timeline = averager.observers.get("timeline")
    if timeline is None:
        return Report(notes=("The timeline, which stamps steps, is left out (MINDDP_PLAIN, MINDDP_WITHOUT).",))
    rank, size = averager.group.rank(), averager.group.size()
    mine = [part_of(step) for step in averager.reducer.recent_steps(steps) if step["previous_end_ns"] >= 0]
    if size == 1:
        return make_report({rank: mine}, steps)
    try:
        return _exchanged(timeline, averager.reducer.iteration(), rank, size, mine, steps)
    except Exception as error:  # whatever the store, or another rank, has answered: what observes goes on
        return make_report({rank: mine}, steps, [f"This is rank {rank}'s part alone: {error}."])


def _exchanged(timeline: Any, iteration: int, rank: int, size: int, mine: list[Part], steps: int) -> Report:
    """Rank 0's report, on all ranks."""
    if timeline.key is None:
        raise LookupError("this wrapper is a copy, or has init_sync=False: the ranks have no name for it yet")
    here, patience = f"{timeline.key}/{iteration}", _PATIENCE + size / _RANKS_A_SECOND
    has_read = f"{here}/{rank}/has read"
    old, timeline.keys = timeline.keys, [f"{here}/{rank}", has_read] if rank else [f"{here}/0"]

    def lead(store: Any) -> Report:
        keys = [f"{here}/{other}" for other in range(1, size)]
        all_come = comes(store, keys, _FOR_THE_OTHERS * patience, 1)
        there = keys if all_come else [key for key in keys if store.check([key])]
        found = zip(there, store.multi_get(there) if there else [])
        rows = {int(key.rpartition("/")[2]): _read(data) for key, data in found}
        parts = {0: mine} | {other: [Part(*row) for row in theirs] for other, theirs in rows.items()}
        missing = [other for other in range(size) if other not in parts]
        notes = [f"{ranks_text(missing).capitalize()} did not come. {_HINT}"] if missing else []
        made = make_report(parts, steps, notes)
        store.set(f"{here}/0", _packed(made.to_dict()))
        if there:
            comes(store, [f"{key}/has read" for key in there], (1 - _FOR_THE_OTHERS) * patience, 1)
        return made

    def follow(store: Any) -> Report:
        store.set(f"{here}/{rank}", _packed(mine))
        if not comes(store, [f"{here}/0"], patience, size):
            raise TimeoutError(f"rank 0, which makes the report, did not come. {_HINT[:-1]}")
        made = Report.from_dict(_read(store.get(f"{here}/0")))
        store.set(has_read, b"")
        return made

    def errand(store: Any) -> Report:
        made = (lead if rank == 0 else follow)(store)
        forget(store, [key for key in old if key not in timeline.keys])  # nobody reads the last report's any more
        return made

    base = dist.distributed_c10d._get_default_store()
    return ask(base, "minddp/report", patience + _STORE_SECONDS, errand)


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def _read(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
