"""A report in words: a table of the ranks, and a sentence for each question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .findings import Findings, RankTimes
from .parts import PHASES

__all__ = ["describe"]

_NOTEWORTHY = 0.01  # of a step


def describe(report: Findings) -> str:
    """What a person reads."""
    which = f"{_count(report.steps, 'step')} (iterations {report.first_iteration} to {report.last_iteration})"
    lines = [
        f"{which} on {_count(len(report.ranks), 'rank')}, {_ms(report.step_seconds)} ms a step.",
        "Medians in milliseconds: first each rank's own work, then transfers and waits.",
        "",
        *_table(report.ranks),
        "",
        *_sentences(report),
    ]
    return "\n".join(lines)


def _table(ranks: Sequence[RankTimes]) -> list[str]:
    shown = [p for p in PHASES if p != "micro-batches" or any(row.phases[p] > 0 for row in ranks)]
    meets = any(row.meeting_seconds > 1e-4 for row in ranks)
    heading = ["rank", *shown, *(["before forward"] if meets else []), "hidden", "exposed", "waiting", "for rank"]
    rows = [heading]
    for row in ranks:
        cells = [str(row.rank), *(_ms(row.phases[phase]) for phase in shown)]
        cells += [_ms(row.meeting_seconds)] if meets else []
        exposed = row.exposed_seconds if row.exposed_seconds is not None else row.blocked_seconds
        cells += [_ms(row.hidden_seconds), _ms(exposed), _ms(row.waiting_seconds)]
        rows.append([*cells, "-" if row.waits_for is None else str(row.waits_for)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _sentences(report: Findings) -> Iterator[str]:
    yield from report.notes
    if report.straggler is not None:
        yield f"Late: {report.straggler}."
    elif report.ranks[0].blocked_seconds is not None and len(report.ranks) > 1:
        yield "Late: no rank holds the others up."
    if report.slow_link is not None:
        yield f"Link: {report.slow_link}."
    yield from _communication(report)
    yield from _advice(report)


def _communication(report: Findings) -> Iterator[str]:
    if report.overlap is not None:
        yield f"Overlap: {report.overlap:.0%} of the transfers are hidden behind computation."
    if report.exposed_buckets:
        named = [f"{bucket} ({_ms(seconds)} ms)" for bucket, seconds in report.exposed_buckets[:4]]
        more = len(report.exposed_buckets) - len(named)
        yield f"Exposed buckets: {', '.join(named)}{f', and {more} more' if more else ''}."


def _advice(report: Findings) -> Iterator[str]:
    advice = report.advice
    if advice is None:
        return
    yield (
        f"From forward to the averages: predicted {_ms(advice.present.seconds)} ms for the present "
        f"{_count(advice.present.buckets, 'bucket')}, measured {_ms(advice.measured_seconds)} ms."
    )
    if advice.taken_seconds > _NOTEWORTHY * advice.measured_seconds:
        yield (
            f"Collectives take {_ms(advice.taken_seconds)} ms of it from backward: the ranks compute on all cores, "
            "and these move and sum bytes on the same."
        )
    each = (f"{other.name} {_ms(other.seconds)} ms" for other in advice.others)
    yield f"Predicted otherwise: {', '.join(each)}."
    best, exact = advice.best(), advice.best(exact=True)
    if best is None:
        yield "Nothing is to be gained: no other choice saves 3 %."
        return
    also = f"; with the same gradients {exact.name}, {advice.gain(exact):.0%}" if exact not in (None, best) else ""
    yield f"Best: {best.name} saves {advice.gain(best):.0%}{also}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
