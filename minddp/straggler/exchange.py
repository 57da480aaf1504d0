""":func:`report`: what ranks exchange for it, through the process group's store.

Overview
    Each rank writes its stamps under a key of its own. Rank 0 reads those of the ranks that have come, makes the
    report, and writes it; the others read it.

What always holds
    A rank waits a limited time for another, and returns what it has seen itself where the other does not come: so
    one rank alone may ask. There is no collective, and the program's keep their order; only links are measured by
    messages of the group, where all ranks have come and all have asked for it. Rank 0 begins with them, and a rank
    gives up, by the same key, of which the store takes one value alone: so all ranks measure, or none. What fails is
    a note of the report.

A report's keys, below the wrapper's name and the iteration: ``<rank>`` (what a rank has stamped), ``settled`` (where
links are asked for: rank 0 begins, or a rank has given up), ``links`` (whether they are measured: rank 0 has read
what has come), ``report``.
"""

from __future__ import annotations

import json
import time
import weakref
import zlib
from typing import Any

import torch.distributed as dist

from ..functions import averager_of
from ..messages import ranks_text
from .links import can_be_measured, measure_links
from .result import Report, make_report

__all__ = ["MAX_STEPS", "report"]

MAX_STEPS = 32  # that a reducer keeps
_FOR_THE_OTHERS = 0.4  # seconds in which rank 0 awaits them; they await rank 0 twice as long
_FOR_THE_REPORT = 5.0  # seconds, once rank 0 has come
_LONGEST_PAUSE = 0.05
_BEGUN, _GIVEN_UP = "rank 0 has begun", "a rank has given up"  # what settles whether links are measured
_HINT = "Call report() on all ranks at the same point, between two steps."
_NO_LINKS = (
    "Links were not measured: all ranks have to ask for it, of a process group of torch's own with three ranks or "
    "more, and of a module on the CPU."
)


def report(ddp: Any, steps: int = 20, *, links: bool = False) -> Report:
    """Which rank holds the others up, and in what. ``print()`` of what it returns is a table with sentences.

    Call it on all ranks at the same point between two steps: each gets the same report, that of rank 0, whose
    ``steps`` counts. Ranks are numbered as in the wrapper's process group. Called on one rank alone it returns what
    that rank has seen within a second; whoever is missing is named in ``notes``, and it raises nothing.

    Args:
        ddp: the wrapper.
        steps: of the last so many synchronized steps, 1 to 32. Fewer than 8 name nobody. New buckets (after the
            first step, while ``"auto"`` measures) begin anew.
        links: measure the links by short messages between neighbours, too, if all ranks ask for it. That takes a
            second or so, and needs three ranks or more, parameters on the CPU and a process group of torch's own.

    Returns:
        The report, in seconds. Its ``steps`` is 0, and ``notes`` says so, where there are none yet.

    Raises:
        TypeError, ValueError: an argument makes no sense.
        RuntimeError: every parameter's reduction is delayed.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"report: steps must be a number of steps, got {steps!r}")
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"report: steps must be 1 to {MAX_STEPS}, which are kept, got {steps}")
    if not isinstance(links, bool):
        raise TypeError(f"report: links must be a bool, got {links!r}")
    averager = averager_of(ddp, "report")
    rank, size = averager.group.rank(), averager.group.size()
    stamps = [_lean(step) for step in averager.reducer.recent_steps(steps)]
    notes = [_NO_LINKS] if links and not can_be_measured(averager.group, averager.parameters.device) else []
    if size == 1:
        return make_report({rank: stamps}, steps, notes=notes)
    mine = {"steps": stamps, "links": links and not notes}
    try:
        turn = _next_turn(averager)
        if rank == 0:
            return _lead(turn, averager, mine, steps, notes)
        return _follow(turn, averager, mine)
    except Exception as error:  # whatever the store, a link or a peer's words are: what observes goes on
        notes.append(f"This is rank {rank}'s part alone: {error}")
        return make_report({rank: stamps}, steps, notes=notes)


def _lean(step: dict[str, Any]) -> dict[str, Any]:
    """Without what a report does not read: a list of all parameters in each step."""
    buckets = [{name: value for name, value in bucket.items() if name != "parameters"} for bucket in step["buckets"]]
    return {name: value for name, value in step.items() if name != "ready_ns"} | {"buckets": buckets}


def _lead(turn: _Turn, averager: Any, mine: dict[str, Any], steps: int, notes: list[str]) -> Report:
    """On rank 0: the report of the ranks that have come, which the others read."""
    ranks = list(range(averager.group.size()))
    if turn.comes([str(rank) for rank in ranks[1:]], _FOR_THE_OTHERS):
        come = ranks
    else:
        come = [rank for rank in ranks if rank == 0 or turn.comes([str(rank)], 0)]
    everyone = {0: mine, **{rank: turn.take(str(rank)) for rank in come[1:]}}
    asked = [theirs["links"] for theirs in everyone.values()]
    links = all(asked) and come == ranks and turn.settles(_BEGUN)
    turn.put("links", links)
    times = _links_of(averager) if links else {}
    if any(asked) and not links:
        notes.append(_NO_LINKS)
    if come != ranks:
        notes.append(f"{ranks_text(sorted({*ranks} - {*come})).capitalize()} did not come. {_HINT}")
    made = make_report({rank: theirs["steps"] for rank, theirs in everyone.items()}, steps, times, notes)
    turn.put("report", made.to_dict())
    return made


def _follow(turn: _Turn, averager: Any, mine: dict[str, Any]) -> Report:
    """On another rank: hands in its part, and reads the report."""
    rank = averager.group.rank()
    turn.put(str(rank), mine)
    try:
        if not turn.comes(["links"], 2 * _FOR_THE_OTHERS):
            raise TimeoutError(f"rank 0, which makes the report, did not come. {_HINT}")
        links = turn.take("links")
    except Exception:
        if not mine["links"] or turn.settles(_GIVEN_UP):
            raise
        links = True  # rank 0 was first, and counts on this rank
    if links:
        _links_of(averager)
    if not turn.comes(["report"], _FOR_THE_REPORT):
        raise TimeoutError("rank 0 did not end the report.")
    made = Report.from_dict(turn.take("report"))
    if made.steps and rank not in [row.rank for row in made.ranks]:
        raise TimeoutError(f"rank 0 had made the report before this rank came. {_HINT}")
    return made


def _links_of(averager: Any) -> dict[tuple[int, int], float]:
    with averager.observers.together():
        return measure_links(averager.group)


class _Turn:
    """The keys of one report of one wrapper, and this rank's part in it.

    Args:
        store: where they lie.
        iteration, number: whose report, and how many this rank has made of that iteration before.
    """

    def __init__(self, store: dist.Store, iteration: int, number: int):
        self.iteration, self.number = iteration, number
        self._store: Any = store
        self._written: list[str] = []

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, zlib.compress(json.dumps(value).encode()))
        self._written.append(key)

    def settles(self, word: str) -> bool:
        """Whether this word, or the same one of another rank, is the first that was said of the links.

        That a rank has given up stays in the store: rank 0 may come to this turn at any time.
        """
        said: bytes = self._store.compare_set("settled", "", word)
        if word == _BEGUN:
            self._written.append("settled")
        return said == word.encode()

    def forget(self) -> None:
        for key in self._written:
            self._store.delete_key(key)

    def take(self, key: str) -> Any:
        return json.loads(zlib.decompress(self._store.get(key)))

    def comes(self, keys: list[str], seconds: float) -> bool:
        """Whether ``keys`` are there in time. Looks ever more seldom: the store has one host, for all ranks."""
        pause = 0.001
        while not self._store.check(keys):
            if seconds <= 0:  # counted in pauses, since a clock may stand still
                return False
            time.sleep(pause)
            seconds, pause = seconds - pause, min(2 * pause, _LONGEST_PAUSE)
        return True


_turns: weakref.WeakKeyDictionary[Any, list[_Turn]] = weakref.WeakKeyDictionary()  # the last two, by reducer


def _next_turn(averager: Any) -> _Turn:
    """This rank's next one. What it has written two turns ago is deleted: nobody reads that any more."""
    guards = averager.observers.get("guards")
    inspector = None if guards is None else guards.inspector
    if inspector is None:
        raise LookupError("no guards watch this wrapper, by whose store ranks exchange their steps.")
    # The program's threads may block the default store's own client for as long as they like.
    base = inspector.client() or dist.distributed_c10d._get_default_store()
    iteration, turns = averager.reducer.iteration(), _turns.setdefault(averager.reducer, [])
    number = turns[-1].number + 1 if turns and turns[-1].iteration == iteration else 0
    prefix = f"minddp/report/{inspector.key}/{iteration}.{number}"
    turns.append(_Turn(dist.PrefixStore(prefix, base), iteration, number))
    if len(turns) > 2:
        turns.pop(0).forget()
    return turns[-1]
