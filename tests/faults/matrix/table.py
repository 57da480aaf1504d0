"""docs/faults.md from results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from minddp.guards.evidence import TABLE

from .program import FAULTS, PLACES

Results = Sequence[dict[str, Any]]
WELL = ("told", "unharmed")
WORDS = (*WELL, "not named", "late", "not told", "replicas differ", "wrong weights", "stuck", "no fault")

_PAGE = """# What the others are told when one rank meets a fault

Written by `make faults`, cell by cell: real processes train a small model; in its fourth step one of them meets a
fault at the named place. "Told": each other rank raises within 10 seconds of the fault (a cut link: {cut:.0f}), with
an error that names the faulty rank, its weights until then are those of a run without a fault (a swallowed exception
gives the others another batch: not compared), and its process ends. "Unharmed": all ranks go on to the end, alike.
Else: "not named" (an error that does not say who), "late", "stuck" (still running {stuck} seconds after the fault),
"replicas differ" (all ended, with different weights). The group's timeout is {group} s, all other
arguments have their defaults; a stopped process goes on after twelve seconds. Where there is an entry, torch's
class had the same cells.

## What is certain, and what is suspected

What is certain ends a wait at once, with the name. What is suspected is logged (`logging.getLogger("minddp")`): after
10 seconds, after one minute, and each time that the wait has doubled, with the rank, its host, process, place and
line, what it has not produced, and whether it computes, sleeps, waits or is stopped. It ends nothing before the
group's own timeout, unless `desync_timeout` says so.

{evidence}

## What was seen

{summary}

Seconds are the median over cells from the fault to the error in the other ranks.

{tables}
"""


def _evidence() -> str:
    rows = [f"| {evidence} | {certain} |" for evidence, certain, _ in TABLE.values()]
    return "\n".join(["| of a rank that is waited for | |", "|---|---|", *rows])


def summary(results: Results) -> str:
    lines = []
    for kind in ("minddp", "torch"):
        of_kind = [result for result in results if result["class"] == kind]
        if of_kind:
            counts = [(word, sum(result["verdict"] == word for result in of_kind)) for word in WORDS]
            told = ", ".join(f"{word}: {count}" for word, count in counts if count or word == "told")
            lost = sum(result["verdict"] not in WELL for result in of_kind)
            lines.append(f"- {kind}: {len(of_kind)} cells; {told}; lost: {lost}")
    return "\n".join(lines)


def page(results: Results, group_timeout: int, cut: float, stuck: int) -> str:
    tables = "\n\n".join(_table(results, backend) for backend in ("gloo", "shm"))
    return _PAGE.format(
        cut=cut, stuck=stuck, group=group_timeout, evidence=_evidence(), summary=summary(results), tables=tables
    )


def _table(results: Results, backend: str) -> str:
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result["backend"] == backend:
            groups[result["fault"], result["place"]][result["class"]].append(result)
    lines = [f"### {backend}", "", "| fault | place | minddp | torch |", "|---|---|---|---|"]
    for fault, place in sorted(groups, key=lambda cell: (FAULTS.index(cell[0]), PLACES.index(cell[1]))):
        by_class = groups[fault, place]
        lines.append(f"| {fault} | {place} | {_entry(by_class['minddp'])} | {_entry(by_class['torch'])} |")
    return "\n".join(lines)


def _entry(results: Results) -> str:
    if not results:
        return ""
    counts = [(word, sum(result["verdict"] == word for result in results)) for word in WORDS]
    found = ", ".join(f"{count} {word}" for word, count in counts if count)
    seconds = [s["told"] for result in results for s in result["survivors"] if s["told"] is not None]
    return found + (f", {median(seconds):.1f} s" if seconds else "")
