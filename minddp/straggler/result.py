"""All ranks' steps made into one :class:`Report`. Pure: stamps in, the report out."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..planner.backward_profile import Burst
from ..planner.collective_cost import LinearCost
from ..timeline.step_times import Stamps, on_device
from . import picture, text
from .advice import Advice, Gradients, advise
from .casts import Casts
from .diagnosis import MIN_STEPS, SlowLink, find_slow_link, find_straggler, typical
from .findings import Findings, RankTimes
from .parts import PHASES, Parts, last_launches, parts_of

__all__ = ["Probed", "RankSteps", "Report", "make_report"]


@dataclass(frozen=True)
class RankSteps:
    """What one rank has stamped.

    Attributes:
        rank: of the wrapper's group.
        offset_ns: its clock less the reference's; ``None`` where that is not known.
        steps: as the reducer's ``recent_steps()`` gives them.
    """

    rank: int
    offset_ns: int | None
    steps: Sequence[Stamps]


@dataclass(frozen=True)
class Probed:
    """What the probe has measured, with nothing beside it.

    Attributes:
        nbytes: of a message between neighbours.
        links: its seconds, by (sender, receiver).
        alone: allreduces.
        casts: by ``wire``, what making gradients smaller takes.
        taken: by ``wire``, ``None`` without, what an allreduce costs a backward beside it.
    """

    nbytes: int
    links: Mapping[tuple[int, int], float]
    alone: Sequence[Burst] = ()
    casts: Mapping[str, Casts] = field(default_factory=dict)
    taken: Mapping[str | None, LinearCost] = field(default_factory=dict)


class Report(Findings):
    """Where the steps' time went on every rank, and what to make of it. ``str()`` is a table with sentences."""

    def __str__(self) -> str:
        return text.describe(self)

    def to_dict(self) -> dict[str, Any]:
        """The same in what JSON can hold."""
        return dataclasses.asdict(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws each rank's median step as a bar into ``path`` (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed.
        """
        picture.draw(self, path)


def make_report(
    ranks: Sequence[RankSteps],
    steps: int,
    gradients: Gradients | None = None,
    probed: Probed | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """The report of the last ``steps`` steps that all of ``ranks`` have.

    Args:
        ranks: what each rank has stamped.
        steps: at most so many.
        gradients: what travels; without it there is no advice.
        probed: what the probe has measured.
        notes: what is not known already.

    Raises:
        ValueError: the ranks have no step in common that has another before it.
    """
    by_rank = {part.rank: {step["iteration"]: step for step in part.steps} for part in ranks}
    common = set.intersection(*(set(theirs) for theirs in by_rank.values())) if by_rank else set()
    iterations = sorted(i for i in common if all(theirs[i]["previous_end_ns"] >= 0 for theirs in by_rank.values()))
    iterations = iterations[-steps:]
    if not iterations:
        raise ValueError("the ranks have no finished synchronized step in common that has another before it")
    offsets = {part.rank: part.offset_ns for part in ranks}
    aligned = all(offset is not None for offset in offsets.values())
    parts: dict[int, list[Parts]] = {part.rank: [] for part in ranks}
    for iteration in iterations:
        stamps = {rank: theirs[iteration] for rank, theirs in by_rank.items()}
        last = last_launches({r: (s, offsets[r] or 0) for r, s in stamps.items()}) if aligned else None
        for rank, step in stamps.items():
            shift = offsets[rank] or 0
            mine = None if last is None else {b: (moment + shift, r) for b, (moment, r) in last.items()}
            parts[rank].append(parts_of(step, mine))
    stamps_by_rank = [[theirs[iteration] for iteration in iterations] for theirs in by_rank.values()]
    return _assemble(parts, stamps_by_rank, gradients, probed, [*notes, *_unknown(stamps_by_rank, aligned)])


def _unknown(steps: Sequence[Sequence[Stamps]], aligned: bool) -> list[str]:
    notes = []
    if any(on_device(step) for rank in steps for step in rank):
        notes.append(
            "The module is on a device: times are the host's, which enqueues the step. What collectives take, and "
            "who is late, is not known."
        )
    elif not aligned:
        notes.append("The ranks' clocks could not be aligned: transfers and waits for a rank are not told apart.")
    if len(steps[0]) < MIN_STEPS:
        notes.append(f"Nobody is named as late: {len(steps[0])} steps are too few, {MIN_STEPS} are needed.")
    return notes


def _assemble(
    parts: Mapping[int, Sequence[Parts]],
    stamps: Sequence[Sequence[Stamps]],
    gradients: Gradients | None,
    probed: Probed | None,
    notes: Sequence[str],
) -> Report:
    host_only = any(on_device(step) for rank in stamps for step in rank)
    rows = tuple(_median_row(rank, steps) for rank, steps in parts.items())
    step_seconds = statistics.median(part.step_seconds for steps in parts.values() for part in steps)
    straggler = None
    if not host_only:
        own = [[part.own_seconds for part in steps] for steps in parts.values()]
        phases = [{p: typical([part.own[p] for part in steps]) for p in PHASES} for steps in parts.values()]
        straggler = find_straggler(own, step_seconds, phases)
    hidden = sum(row.hidden_seconds or 0.0 for row in rows)
    exposed = sum(row.exposed_seconds or 0.0 for row in rows)
    known = len(rows) > 1 and all(row.hidden_seconds is not None for row in rows)
    return Report(
        steps=len(stamps[0]),
        first_iteration=stamps[0][0]["iteration"],
        last_iteration=stamps[0][-1]["iteration"],
        step_seconds=step_seconds,
        ranks=rows,
        straggler=straggler,
        slow_link=_slow_link(probed, stamps[0], step_seconds),
        overlap=hidden / (hidden + exposed) if known and hidden + exposed > 0 else None,
        exposed_buckets=_exposed_buckets(parts, step_seconds),
        advice=None if gradients is None or host_only or len(parts) == 1 else _advice(stamps, gradients, probed),
        notes=tuple(notes),
    )


def _median_row(rank: int, steps: Sequence[Parts]) -> RankTimes:
    def median(name: str) -> Any:
        values = [getattr(part, name) for part in steps]
        return None if None in values else statistics.median(values)

    others = {other for part in steps for other in part.waiting_for}
    waits = {other: sum(part.waiting_for.get(other, 0.0) for part in steps) for other in others}
    waiting = median("waiting_seconds")
    return RankTimes(
        rank=rank,
        phases={phase: statistics.median(part.own[phase] for part in steps) for phase in PHASES},
        own_seconds=median("own_seconds"),
        meeting_seconds=median("meeting_seconds"),
        blocked_seconds=median("blocked_seconds"),
        hidden_seconds=median("hidden_seconds"),
        exposed_seconds=median("exposed_seconds"),
        waiting_seconds=waiting,
        waits_for=max(waits, key=lambda other: waits[other]) if waits and waiting else None,
    )


def _exposed_buckets(parts: Mapping[int, Sequence[Parts]], step_seconds: float) -> tuple[tuple[int, float], ...]:
    """Of the rank that is blocked least: what blocks others longer is a wait for a rank. From 0.5 % of a step on."""
    by_rank = []
    for steps in parts.values():
        buckets = sorted({bucket for part in steps for bucket in part.exposed_by_bucket})
        medians = {b: statistics.median(part.exposed_by_bucket.get(b, 0.0) for part in steps) for b in buckets}
        by_rank.append({b: seconds for b, seconds in medians.items() if seconds > 0.005 * step_seconds})
    least = min(by_rank, key=lambda medians: sum(medians.values()))
    return tuple(sorted(least.items(), key=lambda item: -item[1]))


def _slow_link(probed: Probed | None, steps: Sequence[Stamps], step_seconds: float) -> SlowLink | None:
    if probed is None or not probed.links:
        return None
    ranks = len({rank for edge in probed.links for rank in edge})
    total = sum(bucket["nbytes"] for bucket in steps[-1]["buckets"] if bucket["launch_ns"] >= 0)
    return find_slow_link(probed.links, probed.nbytes, 2 * (ranks - 1) / ranks * total, step_seconds)


def _advice(stamps: Sequence[Sequence[Stamps]], gradients: Gradients, probed: Probed | None) -> Advice | None:
    try:
        return advise(stamps, gradients, *(() if probed is None else (probed.alone, probed.casts, probed.taken)))
    except ValueError:  # no times that a plan could be made from
        return None
