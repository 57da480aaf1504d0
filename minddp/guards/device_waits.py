"""Which ranks are lost for certain while the program may wait for its device, which nobody sees.

With NCCL the host enqueues a backward and goes on, until it reads something (``loss.item()``). No wait of minddp's
tells then that a rank is lost, and the group's own timeout is half an hour. So the watchdog asks here, on its own
thread, in each turn in which a rank has failed or is gone.

What is asked about is the last iteration that this rank has launched as a whole: whoever has done its part of that is
no loss yet. Of the others it is certain that one is lost

* which has reported that it failed in that iteration, or before;
* whose process has ended, for so long that what it had sent must have arrived. Should this rank wait for nothing at
  the moment, its group has no further use all the same.

No wait, no clock: what :mod:`evidence` is for waits that are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _C
from .evidence import Awaited, Fact, Judged, Kind, Wait

_BACKWARD_BEGIN, _BACKWARD_END = 2, 3  # among the reducer's moments


def launched(position: dict[str, Any]) -> int:
    """The last iteration that this rank has launched as a whole, by the reducer's ``position()``; 0: none."""
    moments = position["moments"]
    ended = moments[_BACKWARD_END] >= moments[_BACKWARD_BEGIN] and position["phase"] != _C.Phase.INCOMPLETE
    return int(position["iteration"]) - (not ended)


def may_wait(wrapper: str, iteration: int, rank: int, ranks: tuple[int, ...], hook: str, given_up: int) -> Wait:
    """The wait that this rank may be in."""
    what = f"the reduction of iteration {iteration}"
    awaited = Awaited(wrapper, iteration, what=what)
    return Wait(awaited, what, rank, ranks, hook=hook, iteration=iteration, given_up=given_up)


def certainly_lost(judged: Judged, wait: Wait, is_settled: Callable[[list[int]], bool]) -> Judged:
    """Those of ``judged`` that are, for ``wait`` by :func:`may_wait`.

    ``is_settled(ranks)``: whether they have been gone for long enough. Where a communication hook reduces, only a
    failure counts: the hook may need nobody.
    """
    causes: Judged = [(fact, kind) for fact, kind in judged if kind is Kind.FAILED and _is_of(fact, wait)]
    over: Judged = [
        (fact, kind) for fact, kind in judged if kind is Kind.ENDED or _has_ended_elsewhere(fact, kind, wait)
    ]
    if over and not wait.hook and is_settled([fact.rank for fact, _ in over]):
        causes += over
    return causes


def _is_of(fact: Fact, wait: Wait) -> bool:
    """It knew this wrapper when it failed; that it had not done its part is why it is judged so."""
    return fact.failure is not None and wait.wrapper in fact.failure["places"]


def _has_ended_elsewhere(fact: Fact, kind: Kind, wait: Wait) -> bool:
    return kind is Kind.FAILED and not _is_of(fact, wait) and fact.failure is not None and bool(fact.failure["ends"])
