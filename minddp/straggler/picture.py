"""A report drawn: a bar for each rank's median step."""

from __future__ import annotations

import os

from ..timeline.report import pyplot
from .findings import Findings, RankTimes
from .parts import PHASES

__all__ = ["draw"]

_COLORS = {
    "input": "#edae49", "optimizer": "#b08ea2", "micro-batches": "#dfe3e8", "before forward": "#f0b6bd",
    "forward": "#c9ced6", "backward": "#8fa3bf", "hook": "#30475e", "waiting for a rank": "#d1495b",
    "transfer, exposed": "#2a9d8f", "unpack": "#edc98f",
}  # fmt: skip


def draw(report: Findings, path: str | os.PathLike[str]) -> None:
    """Draws into ``path`` (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = pyplot("read str(report)")
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.5 * len(report.ranks)), layout="constrained")
    labelled: set[str] = set()
    for row in report.ranks:
        left = 0.0
        for name, seconds in _parts(row).items():
            if seconds <= 0:
                continue
            label = None if name in labelled else name
            labelled.add(name)
            axes.barh(f"rank {row.rank}", seconds * 1e3, left=left, color=_COLORS[name], label=label, height=0.7)
            left += seconds * 1e3
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds, medians of {report.steps} steps")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(report), fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _parts(row: RankTimes) -> dict[str, float]:
    """In the order of a step."""
    parts = {phase: row.phases[phase] for phase in PHASES if phase != "unpack"}
    exposed = row.exposed_seconds if row.exposed_seconds is not None else row.blocked_seconds
    parts |= {"waiting for a rank": row.waiting_seconds or 0.0, "transfer, exposed": exposed or 0.0}
    parts |= {"unpack": row.phases["unpack"], "before forward": row.meeting_seconds}
    order = ("input", "optimizer", "micro-batches", "before forward")
    return {name: parts[name] for name in [*order, *(name for name in parts if name not in order)]}


def _title(report: Findings) -> str:
    late = "no rank holds the others up" if report.straggler is None else str(report.straggler)
    return late[0].upper() + late[1:]
