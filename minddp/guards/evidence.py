"""What is known of a rank that others wait for, and what follows from it: certain or suspected, and in which words.

What is certain ends a wait at once. What is suspected is logged, and ends nothing: it may be wrong. :data:`TABLE` is
the whole of the rule; :func:`judge` finds a rank's row. Pure: no clock, no store, no process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ..messages import ranks_text
from .processes import Process, Sight

_LISTED = 3


class Awaited(NamedTuple):
    """What a rank waits for, as all ranks say it: equal where they wait for the same. Travels as JSON.

    ``wrapper``: whose it is; the group's name where it is no wrapper's. ``iteration``: of the wrapper's backward; 0:
    outside of one. ``collective``: its number among the wrapper's outside of backward; 0: none of these. ``what``: in
    words. ``joins``: the rank has no data, and takes part in whatever the others send.
    """

    wrapper: str
    iteration: int = 0
    collective: int = 0
    what: str = ""
    joins: bool = False


@dataclass(frozen=True)
class Wait:
    """A wait of this rank.

    ``here``: this rank in the default group, whose numbers all texts use. ``others``: the group's other ranks.
    ``parameters``: names by index of those whose gradients are waited for. ``hook``: the communication hook that
    sends them, if one does. ``given_up``: the last iteration that this rank gave up.
    """

    awaited: Awaited
    here: int
    others: tuple[int, ...]
    parameters: dict[int, str] = field(default_factory=dict)
    hook: str = ""
    given_up: int = 0

    @property
    def wrapper(self) -> str:
        return self.awaited.wrapper


class Fact(NamedTuple):
    """What is known of another rank.

    ``rank``: in the default group. ``report``: what it last answered. ``failure``: what it has reported of an
    exception, or of its end. ``sight``: what this machine's kernel says of its process. ``silent``: it was asked, and
    has not answered for long.
    """

    rank: int
    process: Process | None = None
    sight: Sight | None = None
    report: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    silent: bool = False

    @property
    def is_gone(self) -> bool:
        """Its process."""
        return self.sight is not None and self.sight.state == "gone"

    @property
    def has_ended(self) -> bool:
        """Its program, or what it did for the wrapper that is waited for."""
        return self.failure is not None or self.is_gone

    @property
    def awaits(self) -> Awaited | None:
        """What it says that it waits for."""
        said = (self.report or {}).get("wait")
        return Awaited(*said) if said else None


class Kind(Enum):
    FAILED = "failed"
    ENDED = "ended"
    HERE = "here"
    GONE = "gone"
    STOPPED = "stopped"
    SILENT = "silent"
    WAITS = "waits"
    BUSY = "busy"
    UNKNOWN = "unknown"


# Evidence -> is it certain? -> what is said of the rank. In the order in which it is looked for.
TABLE: dict[Kind, tuple[str, str, str]] = {
    Kind.HERE: (
        "it waits for the same, or has sent its part", "-", "waits for the same",
    ),
    Kind.FAILED: (
        "it has reported an exception that ended its backward, its step or its program", "certain", "says: {words}",
    ),
    Kind.ENDED: (
        "it has left the group, or its process is gone: by a signal or with an exit code, before the iteration that "
        "is waited for, or while all other ranks are there", "certain", "{end}",
    ),
    Kind.GONE: (
        "it has left, or its process is gone, and another rank is still on its way: it may have done its part",
        "suspected", "{end}",
    ),
    Kind.STOPPED: (
        "the kernel says that its process is stopped", "suspected", "is stopped (SIGSTOP, or a debugger)",
    ),
    Kind.SILENT: (
        "it was asked, and has not answered", "suspected",
        "does not answer: it is in one long call, stopped, cut off or gone. It was last seen: {where}",
    ),
    Kind.WAITS: (
        "it waits for something else, in minddp or in torch.distributed", "suspected", "{where}",
    ),
    Kind.BUSY: (
        "it answers from the program's own code", "suspected", "{where}",
    ),
    Kind.UNKNOWN: (
        "nothing is known of it", "suspected", "has not said where it is",
    ),
}  # fmt: skip
CERTAIN = {kind for kind, (_, certain, _) in TABLE.items() if certain == "certain"}
_ON_THEIR_WAY = {Kind.GONE, Kind.STOPPED, Kind.SILENT, Kind.BUSY, Kind.UNKNOWN}
Judged = list[tuple[Fact, Kind]]


def judge(facts: Sequence[Fact], wait: Wait) -> Judged:
    """The row of each of the other ranks.

    Who is gone may have done its part before, as a rank does that was sent the last buffers: where another one is
    still on its way, that one may be what is waited for.
    """
    kinds = [_alone(fact, wait) for fact in facts]
    waited_for = [kind in _ON_THEIR_WAY for kind in kinds if kind is not Kind.GONE]
    alone = not any(waited_for)
    return [
        (fact, Kind.ENDED if kind is Kind.GONE and (alone or _is_certainly_missed(fact, wait)) else kind)
        for fact, kind in zip(facts, kinds)
    ]


def _alone(fact: Fact, wait: Wait) -> Kind:
    report = fact.report or {}
    if _has_sent_its_part(fact, wait):
        return Kind.HERE
    left = fact.failure is not None and fact.failure["left"]
    if fact.failure is not None and not left and not _has_failed_before(fact, wait):
        return Kind.FAILED
    if left or fact.is_gone:
        return Kind.GONE
    if fact.sight is not None and fact.sight.state == "stopped":
        return Kind.STOPPED
    if fact.silent:
        return Kind.SILENT
    if not report:
        return Kind.UNKNOWN
    return Kind.WAITS if fact.awaits or report.get("collective") else Kind.BUSY


def _has_sent_its_part(fact: Fact, wait: Wait) -> bool:
    theirs, mine = fact.awaits, wait.awaited
    if theirs and not fact.silent and fact.failure is None and (theirs == mine or theirs.joins or mine.joins):
        return True
    place = (fact.failure or fact.report or {}).get("places", {}).get(wait.wrapper)
    if place is None:
        return False
    if mine.collective:
        return bool(place["collectives"] >= mine.collective)
    done = place["iteration"] - (place["phase"] != "between")
    return bool(mine.iteration and done >= mine.iteration)


def _has_failed_before(fact: Fact, wait: Wait) -> bool:
    """In the backward of an iteration that this rank has given up as well: its program may go on as this one does."""
    assert fact.failure is not None
    place = fact.failure["places"].get(wait.wrapper)
    if fact.failure["ends"] or place is None or place["phase"] != "backward":
        return False
    return bool(place["iteration"] <= wait.given_up < wait.awaited.iteration)


def _is_certainly_missed(fact: Fact, wait: Wait) -> bool:
    if fact.sight is not None and fact.sight.how:
        return True
    place = (fact.failure or {}).get("places", {}).get(wait.wrapper)
    return place is not None and wait.awaited.iteration + wait.awaited.collective > 0  # and has not sent its part


def has_gone_on(fact: Fact, places: dict[str, dict[str, Any]]) -> bool:
    """Whether a rank waits in a later backward, or collective, of a wrapper than this rank at its ``places``, or is
    past the beginning of such a backward."""
    theirs = fact.awaits
    if theirs and theirs.wrapper in places:
        mine = places[theirs.wrapper]
        return bool(theirs.iteration > mine["iteration"] or theirs.collective > mine["collectives"])
    return any(
        place["iteration"] - (place["phase"] in ("forward", "loss")) > places[wrapper]["iteration"]
        for wrapper, place in (fact.report or {}).get("places", {}).items()
        if wrapper in places
    )


def culprits(causes: Judged, judged: Judged) -> Judged:
    """``causes``, and the absent ranks that they have named themselves, without those that failed, or wait, because
    of another one of them."""
    blamed = {rank for fact, _ in causes for rank in _because(fact)}
    absent = [each for each in judged if each[1] is not Kind.HERE and each not in causes]
    found = causes + [(fact, kind) for fact, kind in absent if fact.rank in blamed]
    ranks = {fact.rank for fact, _ in found}
    first = [(fact, kind) for fact, kind in found if not ranks & set(_because(fact)) - {fact.rank}]
    return [(fact, kind) for fact, kind in first if kind is not Kind.WAITS] or first or found


def lost_ranks(causes: Judged, here: int) -> list[int]:
    """The ranks that ``causes`` come down to. A rank that gave up because of another one counts as that one: it may
    have come back meanwhile."""
    found: set[int] = set()
    for fact, _ in causes:
        found |= set(_because(fact)) - {here} or {fact.rank}
    return sorted(found)


def _because(fact: Fact) -> Sequence[int]:
    return (fact.failure or {}).get("because", ())


def describe(fact: Fact, kind: Kind, wait: Wait) -> str:
    """ "rank 1 (process 77 on a) is stopped"."""
    who = f"rank {fact.rank}" + (f" ({fact.process})" if fact.process else "")
    words = (fact.failure or {}).get("words", "")
    return f"{who} " + TABLE[kind][2].format(words=words, end=_end(fact), where=_where(fact, wait))


def _end(fact: Fact) -> str:
    how = fact.sight.how if fact.sight is not None else ""
    if fact.failure is not None:
        return f"does not come any more: {fact.failure['words']}" + (f" ({how})" if how else "")
    return f"is gone ({how or 'its program has ended, or was killed, or ran out of memory'}), without a word"


def _where(fact: Fact, wait: Wait) -> str:
    report = fact.report
    if not report:
        return "nowhere yet"
    line = f", at {report['line']}" if report.get("line") else ""
    does = f", where it {report['does']}" if report.get("does") else ""
    words = f". Its last error: {report['words']}" if report.get("words") else ""
    inside = f", in torch.distributed's {report['collective']}" if report.get("collective") else ""
    rest = f"{line}{inside}{does}"
    if fact.awaits:
        return f"waits for {fact.awaits.what}{line}{words}"
    here = report["places"].get(wait.wrapper) or next(iter(report["places"].values()), None)
    if here is None:
        return f"is past its last DistributedDataParallel{rest}{words}"
    phase, iteration = here["phase"], here["iteration"]
    if phase == "between":
        return f"is between iterations {iteration} and {iteration + 1}{rest}{words}"
    absent = [name for index, name in wait.parameters.items() if phase != "backward" or index in here["missing"]]
    never = f"; it never produced {_names(absent)}" if absent and wait.wrapper else ""
    place = "past forward" if phase == "loss" else f"in {phase}"
    return f"is {place} of iteration {iteration}{rest}{never}{words}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def lost(wait: Wait, seconds: float | None, causes: Judged, error: str) -> str:
    """The error of a rank whose wait is over (``None``: it does not begin), ``error`` being the collective's own."""
    who = "; ".join(describe(fact, kind, wait) for fact, kind in causes[:_LISTED])
    ranks = ranks_text([fact.rank for fact, _ in causes])
    note = f" The collective's own error: {error.splitlines()[0]}" if error else ""
    waited = "" if seconds is None else f", for which rank {wait.here} has waited {seconds:.0f} s"
    if any(kind is Kind.ENDED and not (fact.sight and fact.sight.how) for fact, kind in causes):
        note += " Ranks with different numbers of batches train inside of `with ddp.join():`."
    # Programs look for these words in an error to skip a batch: another rank's lack of memory is none here.
    who = re.sub(r"(?i)out of memory", "out-of-memory", who)
    return f"{ranks} will not take part in {wait.awaited.what}{waited}. {who[0].upper()}{who[1:]}.{note}"


def slow(wait: Wait, seconds: float, judged: Judged, store_is_silent: bool) -> str:
    """The warning of a rank that goes on waiting."""
    absent = culprits([(fact, kind) for fact, kind in judged if kind is not Kind.HERE], [])
    waited = f"rank {wait.here} has waited {seconds:.0f} s for {wait.awaited.what}"
    if not absent:
        hook = f" Or {wait.hook}, which must not wait for a collective in a callback?" if wait.hook else ""
        return f"{waited}, and all ranks are there: a slow network?{hook}"
    who = "; ".join(describe(fact, kind, wait) for fact, kind in absent[:_LISTED])
    silent = " The process group's store does not answer: its host may be stopped or cut off." * store_is_silent
    return (
        f"{waited}. {ranks_text([fact.rank for fact, _ in absent])} did not come yet: slow, or in another branch of "
        f"the program ({who}).{silent}"
    )
