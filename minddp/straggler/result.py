"""All ranks' parts of the last steps made into one :class:`Report`, and its words. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .diagnosis import MIN_STEPS, Straggler, find_straggler
from .parts import PHASES, Part, RankTimes, times_of

__all__ = ["Report", "make_report"]

MOST_ROWS = 64  # which every rank reads
_NO_STEPS = "No steps yet: the ranks have no finished synchronized step in common that has another before it."


@dataclass(frozen=True)
class Report:
    """Where the steps' time went on every rank, and who holds the others up. ``str()`` is a table with sentences.

    Attributes:
        steps: how many it is of; 0 where there are none yet.
        first_iteration, last_iteration: which ones.
        step_seconds: the median step, from the end of one synchronized backward to the end of the next.
        rank_count: how many ranks it is of.
        ranks: each rank's medians. Of more than 64 ranks those 64 whose own work takes longest.
        straggler: who holds the others up; ``None``: nobody does, or ``notes`` says why that is not known.
        overlap: the part of all transfers that backward hides; ``None`` where it is not known.
        notes: what is not known, and why.
    """

    steps: int = 0
    first_iteration: int = 0
    last_iteration: int = 0
    step_seconds: float = 0.0
    rank_count: int = 0
    ranks: tuple[RankTimes, ...] = ()
    straggler: Straggler | None = None
    overlap: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.steps:
            return "\n".join(self.notes)
        which = f"{_count(self.steps, 'step')} (iterations {self.first_iteration} to {self.last_iteration})"
        heading = f"{which} on {_count(self.rank_count, 'rank')}, {_ms(self.step_seconds)} ms a step."
        medians = "Medians in milliseconds: first each rank's own work, then what blocked it: transfers, a late rank."
        return "\n".join([heading, medians, "", *_table(self.ranks), "", *_sentences(self)])

    def to_dict(self) -> dict[str, Any]:
        """The same in what JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Report:
        """The report that :meth:`to_dict` gave, also where JSON has made lists of its tuples."""
        late = found["straggler"]
        facts = {
            "ranks": tuple(RankTimes(**row) for row in found["ranks"]),
            "straggler": late and Straggler(**late),
            "notes": tuple(found["notes"]),
        }
        return cls(**{**found, **facts})


def make_report(ranks: Mapping[int, Sequence[Part]], steps: int, notes: Sequence[str] = ()) -> Report:
    """The report of the last ``steps`` steps that all of ``ranks`` have; one without steps where they have none.

    Args:
        ranks: by rank, its parts of the last steps.
        steps: at most so many.
        notes: what is not known already.
    """
    by_rank = {rank: {part.iteration: part for part in parts} for rank, parts in ranks.items()}
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    if not common:
        return Report(notes=(*notes, _NO_STEPS))
    moments = [[theirs[iteration] for theirs in by_rank.values()] for iteration in common[-steps:]]
    times = [_times(list(by_rank), moment) for moment in moments]
    rows = list(map(_median_row, zip(*times, strict=True)))
    step_seconds = statistics.median(part.length for moment in moments for part in moment) * 1e-9
    on_host = not any(part.blocked is None for moment in moments for part in moment)
    straggler = None
    if on_host:
        own = [[step.phases for step in theirs] for theirs in zip(*times, strict=True)]
        straggler = find_straggler(own, step_seconds)
        straggler = straggler and dataclasses.replace(straggler, rank=rows[straggler.rank].rank)
    shown = sorted(sorted(rows, key=lambda row: -row.own_seconds)[:MOST_ROWS], key=lambda row: row.rank)
    return Report(
        steps=len(moments),
        first_iteration=common[-len(moments)],
        last_iteration=common[-1],
        step_seconds=step_seconds,
        rank_count=len(rows),
        ranks=tuple(shown),
        straggler=straggler,
        overlap=statistics.median(map(_overlap, times)) if on_host and len(rows) > 1 else None,
        notes=(*notes, *_unknown(len(moments), len(rows), on_host)),
    )


def _times(ranks: Sequence[int], moment: Sequence[Part]) -> list[RankTimes]:
    """All ranks' parts of one step. What blocks one longer than the least of them is a wait for a rank."""
    times = [times_of(rank, part) for rank, part in zip(ranks, moment, strict=True)]
    blocked = [each.blocked_seconds for each in times if each.blocked_seconds is not None]
    if len(times) == 1 or len(blocked) < len(times):
        return times
    pairs, least = zip(times, blocked, strict=True), min(blocked)
    return [dataclasses.replace(each, waiting_seconds=seconds - least) for each, seconds in pairs]


def _overlap(times: Sequence[RankTimes]) -> float:
    """The part of one step's transfers that backward hides. The least of all ranks has not waited for a rank."""
    transfers = min(each.under_way_seconds or 0.0 for each in times)
    exposed = min(each.blocked_seconds or 0.0 for each in times)
    return max(0.0, 1 - exposed / transfers) if transfers > 0 else 0.0


def _median_row(steps: Sequence[RankTimes]) -> RankTimes:
    def median(name: str) -> Any:
        values = [getattr(step, name) for step in steps]
        return None if None in values else statistics.median(values)

    seconds = [field.name for field in dataclasses.fields(RankTimes) if field.name.endswith("_seconds")]
    phases = {phase: statistics.median(step.phases[phase] for step in steps) for phase in PHASES}
    return RankTimes(steps[0].rank, phases, **{name: median(name) for name in seconds})


def _unknown(steps: int, ranks: int, on_host: bool) -> list[str]:
    notes = []
    if ranks > MOST_ROWS:
        notes.append(f"The table has the {MOST_ROWS} ranks whose own work takes longest.")
    if not on_host:
        notes.append(
            "The module is on a device: times are the host's, which enqueues the step. What collectives take, and "
            "who is late, is not known."
        )
    if steps < MIN_STEPS:
        notes.append(f"Nobody is named as late: {steps} steps are too few, {MIN_STEPS} are needed.")
    return notes


# The words ------------------------------------------------------------------------------------------


def _table(ranks: Sequence[RankTimes]) -> list[str]:
    shown = [p for p in PHASES if p != "micro-batches" or any(row.phases[p] > 0 for row in ranks)]
    meets = any(row.meeting_seconds > 1e-4 for row in ranks)
    compared = all(row.waiting_seconds is not None for row in ranks)
    blocked = ["exposed", "waiting"] if compared else ["blocked"]
    rows = [["rank", *shown, *(["before forward"] if meets else []), *blocked]]
    for row in ranks:
        seconds: list[float | None] = [row.phases[phase] for phase in shown]
        seconds += [row.meeting_seconds] if meets else []
        seconds += [row.exposed_seconds, row.waiting_seconds] if compared else [row.blocked_seconds]
        rows.append([str(row.rank), *map(_ms, seconds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _sentences(report: Report) -> Iterator[str]:
    yield from report.notes
    if report.straggler is not None:
        yield f"Late: {report.straggler}."
    elif report.ranks[0].blocked_seconds is not None and len(report.ranks) > 1:
        yield "Late: no rank holds the others up."
    if report.overlap is not None:
        yield f"Overlap: {report.overlap:.0%} of the transfers are hidden behind computation."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
