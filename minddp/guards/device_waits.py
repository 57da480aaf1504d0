"""Which ranks are lost for certain while the program may wait for its device, which nobody sees.

With NCCL the host enqueues a backward and goes on, until it reads something (``loss.item()``). No wait of minddp's
tells then that a rank is lost, and the group's own timeout is half an hour. So the watchdog asks here, on its own
thread, in each turn in which a rank has failed or is gone.

What is asked about is the last iteration that this rank has launched as a whole. Lost is a rank that has reported an
exception in that iteration, or before. A process that is gone without a word (killed, for example) may have done its
part, and nobody knows whether this rank waits at all: that is logged as a warning.

No wait, no clock: what :mod:`evidence` is for waits that are seen.
"""

from __future__ import annotations

from typing import Any

from .. import _C
from .evidence import Awaited, Fact, Judged, Kind, Wait, describe

PARTIAL_SUMS = (
    " A step of an optimizer that was enqueued after that backward may have used partial sums: from now on "
    "optimizer.step(), forward and ddp.state_dict() raise. Start again from a checkpoint."
)
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


def certainly_lost(judged: Judged, wait: Wait) -> Judged:
    """Those of ``judged`` that are, for ``wait`` by :func:`may_wait`: they knew this wrapper when they failed, and
    had not done their part."""
    return [(fact, kind) for fact, kind in judged if kind is Kind.FAILED and _knew(fact, wait)]


def _knew(fact: Fact, wait: Wait) -> bool:
    return fact.failure is not None and wait.wrapper in fact.failure["places"]


def gone_without_a_word(judged: Judged) -> Judged:
    """Those of ``judged`` whose processes are gone, and have reported neither an exception nor their end."""
    return [
        (fact, kind)
        for fact, kind in judged
        if fact.failure is None and fact.sight is not None and fact.sight.state == "gone" and kind is not Kind.HERE
    ]


def suspicion(gone: Judged, wait: Wait) -> str:
    """The warning about them."""
    who = "; ".join(describe(fact, kind, wait) for fact, kind in gone)
    return (
        f"{who}. If rank {wait.here} waits for its device, it may wait for the part of {wait.what} that is missing, "
        "until the process group's own timeout. If not, its next forward raises LostPeer."
    )
