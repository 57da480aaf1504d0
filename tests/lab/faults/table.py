"""docs/faults.md from results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from .program import FAULTS, PLACES

Results = Sequence[dict[str, Any]]
WELL = ("told", "unharmed")
WORDS = (*WELL, "not named", "late", "not told", "replicas differ", "wrong weights", "stuck", "no fault")
SHOWN = {"told": "reported", "not told": "not reported"}  # in the page

_PAGE = """# Faults: how the other ranks learn about one

`make lab ARGS="faults --page docs/faults.md"` writes this page, cell by cell. Real processes train a small model. In
its fourth step one of them meets a fault at the named place. The results are:

- "reported": each other rank raises within 10 seconds of the fault (a cut link: {cut:.0f}), with an error that names
  the faulty rank. Its weights until then are those of a run without a fault, and its process ends. (A swallowed
  exception gives the others another batch, so weights are not compared there.)
- "unharmed": all ranks go on to the end, alike.
- "not named": an error that does not say which rank.
- "late": a report after these seconds.
- "stuck": still running {stuck} seconds after the fault.
- "replicas differ": all ended, with different weights.

All but the first two count as lost. The group's timeout is {group} s. All other arguments have their defaults. A
stopped process goes on after twelve seconds. Where there is an entry, torch's class had the same cells.

## Certain and suspected faults

A wait of this rank for others ends before the group's own timeout in two cases, at once and with an error that names
the rank:

- A rank has told that it does not finish this very iteration, or that its program has ended by an exception.
- A rank has left, or its process is gone, and all other ranks wait for the same.

Where the collective itself has failed with a lost connection, the error says who has told, else who is gone, else who
has not answered. Everything else is suspected, and ends nothing before the group's own timeout: a rank that is
stopped, that computes, that waits elsewhere, that does not answer. One rank asks all others where they are, after 10
seconds, after one minute, and each time that the wait has doubled. It writes one line into its log
(`logging.getLogger("minddp")`), with the rank, its host, process and location.

## With many ranks

What ranks tell each other does not grow with their number squared. `python benchmarks/watch.py --ranks 64,256,1024`,
with clients of the real class on two cores (c84ce6a): seconds until the last rank knows of a notice; until all know
that one is gone and all others wait (7.5 s of that are waited on purpose); until all have left.

| ranks | notice | one dies, all raise | all leave | requests a second | the store host's share of a core |
|---|---|---|---|---|---|
| 64 | 2.0 s | 10.1 s | 1.0 s | 80 | 0.005 |
| 256 | 1.8 s | 9.5 s | 1.0 s | 320 | 0.018 |
| 1,024 | 1.9 s | 9.8 s | 1.0 s | 1,281 | 0.059 |

4,096 clients are not carried by two cores: the run was given up after 200 s, without a result.

## Results

{summary}

Seconds are the median over cells from the fault to the error in the other ranks.

{tables}
"""


def summary(results: Results) -> str:
    lines = []
    for kind in ("minddp", "torch"):
        of_kind = [result for result in results if result["class"] == kind]
        if of_kind:
            counts = [(word, sum(result["verdict"] == word for result in of_kind)) for word in WORDS]
            shown = [(SHOWN.get(word, word), count) for word, count in counts if count or word == "told"]
            found = ", ".join(f"{word}: {count}" for word, count in shown)
            lost = sum(result["verdict"] not in WELL for result in of_kind)
            lines.append(f"- {kind}: {len(of_kind)} cells; {found}; lost: {lost}")
    return "\n".join(lines)


def page(results: Results, group_timeout: int, cut: float, stuck: int) -> str:
    tables = "\n\n".join(_table(results, backend) for backend in ("gloo", "shm"))
    return _PAGE.format(cut=cut, stuck=stuck, group=group_timeout, summary=summary(results), tables=tables)


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
    found = ", ".join(f"{count} {SHOWN.get(word, word)}" for word, count in counts if count)
    seconds = [s["told"] for result in results for s in result["survivors"] if s["told"] is not None]
    return found + (f", {median(seconds):.1f} s" if seconds else "")
