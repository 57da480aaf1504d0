"""Who keeps the others waiting: facts about each rank in, names and words out. Pure.

Two kinds of absence are told apart. A rank that cannot come is waited for no longer than ``desync_timeout``: it has
failed, left or died; or for so long it has been stopped, has not answered, has stood still inside of forward or
backward, or has waited for something else while no rank is on its way. One that answers, and computes, or runs the
program's own code between iterations (an evaluation, a checkpoint, data), is waited for as long as the group's
timeout says, and so is who may be waiting for it: training goes on when it comes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ..ranks.messages import ranks_text
from ..ranks.processes import Process, Sight
from ..ranks.waiting import ASKED, SHADOWED


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    ``key``: the same on all ranks that wait for it. ``rank``: this one, in the group. ``ranks``: the group's, in the
    default group, whose numbers all texts have. ``wrapper``: the waiting wrapper's name, and ``iteration`` its own;
    neither is there outside of its backward. ``parameters``: names by index of those whose gradients are waited for.
    ``hook``: the communication hook that sends them, if one does.
    """

    key: str
    what: str
    rank: int
    ranks: tuple[int, ...]
    wrapper: str = ""
    parameters: dict[int, str] = field(default_factory=dict)
    hook: str = ""
    iteration: int = 0

    @property
    def here(self) -> int:
        """This rank, in the default group."""
        return self.ranks[self.rank]

    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.here]


class Fact(NamedTuple):
    """What is known of another rank.

    ``rank``: in the default group. ``place``: its last answer, if it is fresh. ``distant``: it may be cut off.
    ``lasts``: seconds for which it has been seen stopped, or has not answered.
    """

    rank: int
    process: Process | None
    sight: Sight | None
    failure: dict[str, Any] | None
    place: dict[str, Any] | None
    distant: bool = False
    lasts: float = float("inf")


class Kind(Enum):
    FAILED = "failed"
    LEFT = "left"
    GONE = "gone"
    STOPPED = "stopped"
    SILENT = "silent"
    ELSEWHERE = "elsewhere"
    STUCK = "stuck"
    BUSY = "busy"
    UNKNOWN = "unknown"
    COMES = "comes"


CANNOT_COME = {Kind.FAILED, Kind.LEFT, Kind.GONE, Kind.STOPPED, Kind.SILENT, Kind.ELSEWHERE, Kind.STUCK}
_LISTED = 3


def _shadows(other: str, wait: Wait) -> bool:
    """Whether this rank, or the other, has run out of data: each takes part in whatever the other sends."""
    return wait.what == SHADOWED or other.endswith(SHADOWED)


def judge(fact: Fact, wait: Wait, may_be_silent: bool, patience: float) -> Kind:
    """``may_be_silent``: it has had time to answer. ``patience``: seconds for which what passes must have lasted."""
    if fact.failure is not None:
        return Kind.LEFT if fact.failure.get("left") else Kind.FAILED
    if fact.sight is not None and fact.sight.state == "gone":
        return Kind.GONE
    lasts = fact.lasts >= patience
    if fact.sight is not None and fact.sight.state == "stopped":
        return Kind.STOPPED if lasts else Kind.UNKNOWN
    place = fact.place
    if place is None:
        # One that is seen to run, and cannot be cut off, may be busy in one long call of C's.
        return Kind.SILENT if fact.distant and may_be_silent and lasts else Kind.UNKNOWN
    here = place["places"].get(wait.wrapper)
    if here is not None and here["iteration"] > wait.iteration > 0:  # what is waited for it has sent
        return Kind.COMES
    if place["wait"] and (place["wait"] == wait.key or _shadows(place["wait"], wait)):
        return Kind.COMES
    if (place["wait"] or "").endswith(ASKED):
        return Kind.BUSY
    if place["still"] >= patience:
        if place["wait"] or place["collective"]:
            return Kind.ELSEWHERE
        if place["ended"]:
            return Kind.STUCK
        inside = place["places"].values() if place["inside"] else ()
        if any(where["iteration"] > 1 and where["phase"] in ("forward", "backward") for where in inside):
            return Kind.STUCK
    return Kind.BUSY


def given_all(kind: Kind, members: Sequence[Kind], everyone: Sequence[Kind]) -> Kind:
    """A verdict, beside those on the ranks of the group that waits, and on all of the default group.

    Who waits elsewhere may be waiting for a rank that is on its way, and comes after it. And who has left may have
    done its part before that, as a rank does that was sent the last buffers, where a member is on its way.
    """
    asked = {Kind.ELSEWHERE: everyone, Kind.LEFT: members}.get(kind, ())
    return Kind.BUSY if any(other in (Kind.BUSY, Kind.UNKNOWN) for other in asked) else kind


def root_causes(judged: Sequence[tuple[Fact, Kind]]) -> list[tuple[Fact, Kind]]:
    """Without those that failed because of another one of them."""
    found = {fact.rank for fact, _ in judged}
    first = [
        (fact, kind)
        for fact, kind in judged
        if fact.failure is None or not found & set(fact.failure["because"]) - {fact.rank}
    ]
    # Who waits elsewhere waits for those, too.
    return [(fact, kind) for fact, kind in first if kind is not Kind.ELSEWHERE] or first or list(judged)


def describe(fact: Fact, kind: Kind, wait: Wait) -> str:
    """"rank 1 (process 77 on a) is stopped"."""
    who = f"rank {fact.rank}" + (f" ({fact.process})" if fact.process else "")
    if fact.failure is not None and kind is not Kind.COMES:
        says = "does not come any more" if fact.failure["left"] else "says"
        return f"{who} {says}: {fact.failure['words']}"
    if kind is Kind.GONE:
        unknown = "its program has ended, or was killed, or ran out of memory"
        how = fact.sight.how if fact.sight and fact.sight.how else unknown
        return f"{who} is gone ({how}), without a word"
    if kind is Kind.STOPPED or (kind is Kind.UNKNOWN and fact.sight is not None and fact.sight.state == "stopped"):
        return f"{who} is stopped (SIGSTOP, or a debugger)"
    if kind is Kind.SILENT:
        return f"{who} does not answer: it is stopped or gone, or cut off"
    if kind is Kind.UNKNOWN:
        return f"{who} " + ("does not answer" if fact.process else "has made no DistributedDataParallel yet")
    return f"{who} " + _where(fact.place or {}, wait)


def _where(place: dict[str, Any], wait: Wait) -> str:
    line = f", at {place['line']}" if place.get("line") else ""
    words = f". Its last error: {place['words']}" if place.get("words") else ""
    if place["wait"]:
        return f"waits for {'the same' if place['wait'] == wait.key else place['wait'].rpartition('|')[2]}{words}"
    inside = f", in torch.distributed's {place['collective']}" if place["collective"] else ""
    here = place["places"].get(wait.wrapper) or next(iter(place["places"].values()), None)
    if here is None:
        return f"is past its last DistributedDataParallel{line}{inside}{words}"
    phase, iteration = here["phase"], here["iteration"]
    absent = [name for index, name in wait.parameters.items() if phase != "backward" or index in here["missing"]]
    never = f"; it never produced {_names(absent)}" if absent and wait.wrapper else ""
    if phase == "between":
        return f"is between iterations {iteration} and {iteration + 1}{line}{inside}{words}"
    if phase == "loss":
        return f"is past forward of iteration {iteration}, before backward{line}{inside}{never}{words}"
    return f"is in {phase} of iteration {iteration}{line}{inside}{never}{words}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def lost(wait: Wait, seconds: float | None, causes: Sequence[tuple[Fact, Kind]], error: str) -> str:
    """The error of a rank whose wait is over (``None``: it does not begin), ``error`` being the collective's own."""
    who = "; ".join(describe(fact, kind, wait) for fact, kind in causes)
    ranks = ranks_text([fact.rank for fact, _ in causes])
    told = f" The collective's own error: {error.splitlines()[0]}" if error else ""
    waited = "" if seconds is None else f", for which rank {wait.here} has waited {seconds:.0f} s"
    if any(kind in (Kind.LEFT, Kind.GONE) and not (fact.sight and fact.sight.how) for fact, kind in causes):
        told += " Ranks with different numbers of batches train inside of `with ddp.join():`."
    # Programs look for these words in an error to skip a batch: another rank's lack of memory is none here.
    who = re.sub(r"(?i)out of memory", "out-of-memory", who)
    return (
        f"{ranks} will not take part in {wait.what}{waited}. "
        f"{who[0].upper()}{who[1:]}.{told}"
    )


def slow(wait: Wait, seconds: float, judged: Sequence[tuple[Fact, Kind]], store_is_silent: bool) -> str:
    """The warning of a rank that goes on waiting."""
    absent = [(fact, kind) for fact, kind in judged if kind is not Kind.COMES]
    ranks = [fact.rank for fact, _ in absent]
    who = "; ".join(describe(fact, kind, wait) for fact, kind in absent[:_LISTED])
    waited = f"rank {wait.here} has waited {seconds:.0f} s for {wait.what}"
    if not absent:
        hook = f" Or {wait.hook}, which must not wait for a collective in a callback?" if wait.hook else ""
        pair = " Or a communication hook that one of the two ranks alone has?" if len(wait.ranks) == 2 else ""
        return f"{waited}, and all ranks are there: a slow network?{hook}{pair}"
    silent = "The process group's store does not answer: its host may be stopped or cut off."
    return (
        f"{waited}. Ranks {ranks} have not reported waiting: they are slow, or took another branch and never "
        f"launched it ({who}). {silent if store_is_silent else ''}"
    ).rstrip()
