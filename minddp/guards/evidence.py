"""What is known of a rank that others wait for, and what follows from it: certain or suspected, and in which words.

What is certain ends a wait at once. What is suspected is logged, and ends nothing: it may be wrong. :class:`Kind` is
the whole of the rule; :func:`judge` finds a rank's row. Pure: no clock, no store, no process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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


class Place(NamedTuple):
    """How far a rank is with a wrapper, as it says itself. Travels as JSON.

    ``begun``: the last iteration whose backward has begun. ``done``: the last one whose backward is over.
    ``collectives``: how many of the wrapper's outside of backward have ended. ``words``: "in forward of iteration 3".
    """

    begun: int
    done: int
    collectives: int
    words: str


class Wait(NamedTuple):
    """A wait of this rank.

    ``here``: this rank in the default group, whose numbers all texts use. ``others``: the group's other ranks.
    ``hook``: the communication hook that sends what is waited for, if one does. ``given_up``: the last iteration that
    this rank gave up. ``fails_as``: the name under which another rank reports that it will not come; empty: the
    wrapper's.
    """

    awaited: Awaited
    here: int
    others: tuple[int, ...]
    hook: str = ""
    given_up: int = 0
    fails_as: str = ""


class Fact(NamedTuple):
    """What is known of another rank.

    ``rank``: in the default group. ``report``: what it last answered. ``failure``: what it has reported of an
    exception, or of its end. ``sight``: what this machine's kernel says of its process. ``silent``: it was asked, and
    has not answered for long. ``ended_at``: when this rank has first seen that it has failed, or is gone.
    """

    rank: int
    process: Process | None = None
    sight: Sight | None = None
    report: dict[str, Any] | None = None
    silent: bool = False
    failure: dict[str, Any] | None = None
    ended_at: float = math.inf

    @property
    def is_gone(self) -> bool:
        """Its process."""
        return self.sight is not None and self.sight.state == "gone"

    @property
    def how(self) -> str:
        """By which signal, or with which exit code, its process has ended; empty where nobody can tell."""
        return "" if self.sight is None else self.sight.how

    @property
    def has_ended(self) -> bool:
        """Its program, or what it did for the wrapper that is waited for."""
        return self.failure is not None or self.is_gone

    @property
    def has_left(self) -> bool:
        return self.failure is not None and self.failure["left"]

    @property
    def awaits(self) -> Awaited | None:
        """What it says that it waits for."""
        said = (self.report or {}).get("wait")
        return Awaited(*said) if said else None

    @property
    def because(self) -> set[int]:
        """The ranks because of which it has failed."""
        return set((self.failure or {}).get("because", ()))

    def place(self, wrapper: str) -> Place | None:
        """Where it was when it failed, or is."""
        found = (self.failure or self.report or {}).get("places", {}).get(wrapper)
        return None if found is None else Place(*found)


class Kind(Enum):
    """Evidence, and what is said of the rank, in the order in which it is looked for. Two kinds are certain."""

    # fmt: off
    HERE = "it waits for the same, or has sent its part", "waits for the same"
    FAILED = "it has reported an exception that ended its backward, its step or its program", "says: {words}"
    ENDED = ("it has left the group, or its process is gone: by a signal or with an exit code, before the iteration "
             "that is waited for, or while all other ranks are there", "{end}")
    GONE = ("it has left, or its process is gone, and another rank is still on its way: it may have done its part",
            "{end}")
    STOPPED = "the kernel says that its process is stopped", "is stopped (SIGSTOP, or a debugger)"
    SILENT = ("it was asked, and has not answered",
              "does not answer: it is in one long call, stopped, cut off or gone. It was last seen: {where}")
    WAITS = "it waits for something else, in minddp or in torch.distributed", "{where}"
    BUSY = "it answers from the program's own code", "{where}"
    UNKNOWN = "nothing is known of it", "has not said where it is"
    # fmt: on


CERTAIN = {Kind.FAILED, Kind.ENDED}
_ON_THEIR_WAY = {Kind.STOPPED, Kind.SILENT, Kind.BUSY, Kind.UNKNOWN}
Judged = list[tuple[Fact, Kind]]


def judge(facts: Sequence[Fact], wait: Wait) -> Judged:
    """The row of each of the other ranks.

    A rank that is gone may have done its part before, as one does that was sent the last buffers. If another rank is
    still on its way, that one may be what is waited for.
    """
    kinds = [_alone(fact, wait) for fact in facts]
    alone = not _ON_THEIR_WAY.intersection(kinds)
    return [
        (fact, Kind.ENDED if kind is Kind.GONE and (alone or _is_certainly_missed(fact, wait)) else kind)
        for fact, kind in zip(facts, kinds)
    ]


def _alone(fact: Fact, wait: Wait) -> Kind:
    if _has_sent_its_part(fact, wait.awaited):
        return Kind.HERE
    if fact.failure is not None and not fact.has_left and not _has_failed_before(fact, wait):
        return Kind.FAILED
    if fact.has_left or fact.is_gone:
        return Kind.GONE
    if fact.sight is not None and fact.sight.state == "stopped":
        return Kind.STOPPED
    if fact.silent:
        return Kind.SILENT
    if not fact.report:
        return Kind.UNKNOWN
    return Kind.WAITS if fact.awaits or fact.report["collective"] else Kind.BUSY


def _has_sent_its_part(fact: Fact, mine: Awaited) -> bool:
    theirs, place = fact.awaits, fact.place(mine.wrapper)
    if theirs and not fact.silent and fact.failure is None and (theirs == mine or theirs.joins or mine.joins):
        return True
    if place is None:
        return False
    if mine.collective:
        return place.collectives >= mine.collective
    return 0 < mine.iteration <= place.done


def _has_failed_before(fact: Fact, wait: Wait) -> bool:
    """In the backward of an iteration that this rank has given up as well: its program may go on as this one does."""
    place = fact.place(wait.awaited.wrapper)
    if fact.failure is None or fact.failure["ends"] or place is None or place.begun == place.done:
        return False
    return place.begun <= wait.given_up < wait.awaited.iteration


def _is_certainly_missed(fact: Fact, wait: Wait) -> bool:
    """It has ended badly; or said where it was, which was not past its part."""
    told = fact.failure is not None and fact.place(wait.awaited.wrapper) is not None
    return bool(fact.how) or (told and wait.awaited.iteration + wait.awaited.collective > 0)


def has_gone_on(fact: Fact, places: dict[str, Place]) -> bool:
    """Whether a rank is past the beginning of a later backward of a wrapper than this rank, which is at ``places``,
    or waits in a later collective."""
    if fact.report is None:
        return False
    waits = fact.awaits or Awaited("")
    begun = {wrapper: Place(*place).begun for wrapper, place in fact.report["places"].items()}
    return any(
        max(begun.get(wrapper, 0), waits.iteration * (waits.wrapper == wrapper)) > mine.begun
        or (waits.wrapper == wrapper and waits.collective > mine.collectives)
        for wrapper, mine in places.items()
    )


def absent(judged: Judged) -> Judged:
    return [(fact, kind) for fact, kind in judged if kind is not Kind.HERE]


def culprits(causes: Judged, judged: Judged) -> Judged:
    """``causes``, and the absent ranks that they have named themselves, without those that failed, or wait, because
    of another one of them."""
    blamed = {rank for fact, _ in causes for rank in fact.because}
    found = causes + [each for each in absent(judged) if each not in causes and each[0].rank in blamed]
    ranks = {fact.rank for fact, _ in found}
    first = [(fact, kind) for fact, kind in found if not ranks & fact.because - {fact.rank}]
    return [(fact, kind) for fact, kind in first if kind is not Kind.WAITS] or first or found


def lost_ranks(causes: Judged, here: int) -> list[int]:
    """The ranks that ``causes`` come down to. A rank that gave up because of another one counts as that one: it may
    have come back meanwhile."""
    return sorted(set().union(*(fact.because - {here} or {fact.rank} for fact, _ in causes)))


def describe(fact: Fact, kind: Kind, wrapper: str) -> str:
    """ "rank 1 (process 77 on a) is stopped"."""
    who = f"rank {fact.rank}" + (f" ({fact.process})" if fact.process else "")
    words = (fact.failure or {}).get("words", "")
    return f"{who} " + str(kind.value[1]).format(words=words, end=_end(fact), where=_where(fact, wrapper))


def _end(fact: Fact) -> str:
    if fact.failure is not None:
        return f"does not come any more: {fact.failure['words']}" + (f" ({fact.how})" if fact.how else "")
    return f"is gone ({fact.how or 'its program has ended, or was killed, or ran out of memory'}), without a word"


def _where(fact: Fact, wrapper: str) -> str:
    report = fact.report
    if not report:
        return "nowhere yet (torch's class, in a process that was started past `minddp run`, reports nothing)"
    places = report["places"]
    place = places.get(wrapper) or next(iter(places.values()), None)
    does = "is past its last DistributedDataParallel" if place is None else f"is {Place(*place).words}"
    if fact.awaits:
        does = f"waits for {fact.awaits.what}"
    words = f". Its last error: {report['words']}" if report["words"] else ""
    return does + (f", {report['line']}" if report["line"] else "") + words


def _describe_all(judged: Judged, wrapper: str) -> str:
    return "; ".join(describe(fact, kind, wrapper) for fact, kind in judged[:_LISTED])


def lost(wait: Wait, seconds: float | None, causes: Judged, error: str) -> str:
    """The error of a rank whose wait is over (``None``: it does not begin), ``error`` being the collective's own."""
    ranks = ranks_text([fact.rank for fact, _ in causes])
    waited = "" if seconds is None else f", for which rank {wait.here} has waited {seconds:.0f} s"
    # Programs look for these words in an error to skip a batch: another rank's lack of memory is none here.
    who = re.sub(r"(?i)out of memory", "out-of-memory", _describe_all(causes, wait.awaited.wrapper))
    note = f" The collective's own error: {error.splitlines()[0]}" if error else ""
    if any(kind is Kind.ENDED and not fact.how for fact, kind in causes):
        note += " Ranks with different numbers of batches train inside of `with ddp.join():`."
    return f"{ranks} will not take part in {wait.awaited.what}{waited}. {who[0].upper()}{who[1:]}.{note}"


def slow(wait: Wait, seconds: float, judged: Judged, store_is_silent: bool) -> str:
    """The warning of a rank that goes on waiting."""
    late = culprits(absent(judged), [])
    waited = f"rank {wait.here} has waited {seconds:.0f} s for {wait.awaited.what}"
    if not late:
        hook = f" Or {wait.hook}, which must not wait for a collective in a callback?" if wait.hook else ""
        return f"{waited}, and all ranks are there: a slow network?{hook}"
    silent = " The process group's store does not answer: its host may be stopped or cut off." * store_is_silent
    return (
        f"{waited}. {ranks_text([fact.rank for fact, _ in late])} did not come yet: slow, or in another branch of "
        f"the program ({_describe_all(late, wait.awaited.wrapper)}).{silent}"
    )
