"""How a rank that is lost or late is described: in errors, and in the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..messages import ranks_text
from .processes import Process
from .roll import Place, Wait

_LISTED = 3


def _who(rank: int, process: Process | None) -> str:
    return f"rank {rank}" + (f" ({process})" if process else "")


def says(rank: int, process: Process | None, words: str) -> str:
    """It has told so itself."""
    return f"{_who(rank, process)} says: {words}"


def left(rank: int, process: Process | None, words: str) -> str:
    """Its program has ended, or let the group go."""
    return f"{_who(rank, process)} does not come any more: {words}"


def gone(rank: int, process: Process | None, how: str) -> str:
    """Its process has ended, by a signal, say."""
    how = how or "its program has ended, or was killed, or ran out of memory"
    return f"{_who(rank, process)} is gone ({how}), without a word"


def stopped(rank: int, process: Process | None) -> str:
    return f"{_who(rank, process)} is stopped (SIGSTOP, or a debugger)"


def late(rank: int, process: Process | None, answer: dict[str, Any] | None, is_fresh: bool, wait: Wait) -> str:
    """It has not come. ``answer``: what it has answered last; ``is_fresh``: to this call."""
    if answer is None:
        return f"{_who(rank, process)} does not answer, and has never said where it is"
    places, waits = answer["places"], answer["waits"]
    place = places.get(wait.owner) or next(iter(places.values()), None)
    where = "is past its last DistributedDataParallel" if place is None else f"is {Place(*place).words}"
    if waits:
        where = "waits for " + ", and for ".join(what for _, _, what, _ in waits)
    where += f", {answer['line']}" * bool(answer["line"])
    where += f". Its last error: {answer['words']}" * bool(answer["words"])
    if is_fresh:
        return f"{_who(rank, process)} {where}"
    silent = "does not answer: it is in one long call, stopped, cut off or gone. It was last seen:"
    return f"{_who(rank, process)} {silent} {where}"


def joined(texts: Sequence[str]) -> str:
    return "; ".join(texts[:_LISTED])


def lost(wait: Wait, seconds: float | None, ranks: Sequence[int], words: str, error: str, left: bool) -> str:
    """The error of a rank whose wait is over, after so many seconds (``None``: nobody has waited).

    Args:
        words: of ``ranks``, which do not come.
        error: the collective's own.
        left: a rank has ended, without an exception.
    """
    waited = "" if seconds is None else f", for which rank {wait.here} has waited {seconds:.0f} s"
    note = f" The collective's own error: {error.splitlines()[0]}" if error else ""
    note += " Ranks with different numbers of batches train inside of `with ddp.join():`." * left
    return f"{ranks_text(ranks)} will not take part in {wait.what}{waited}. {words[0].upper()}{words[1:]}.{note}"


def slow(wait: Wait, seconds: float, late: dict[int, str], store_is_silent: bool) -> str:
    """The log's line of a rank that goes on waiting. ``late``: by rank, what is known of it."""
    waited = f"rank {wait.here} has waited {seconds:.0f} s for {wait.what}"
    if store_is_silent:
        return f"{waited}. The process group's store does not answer: its host may be stopped or cut off."
    if not late:
        hook = f" Or {wait.hook}, which must not wait for a collective in a callback?" if wait.hook else ""
        return f"{waited}, and all ranks are there: a slow network?{hook}"
    return (
        f"{waited}. {ranks_text([*late])} did not come yet: slow, or in another branch of the program "
        f"({joined([*late.values()])})."
    )
