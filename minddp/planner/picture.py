"""The picture of a plan: what each choice of buckets took. Needs matplotlib; nothing else here does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["draw"]


def draw(trials: Sequence[Mapping[str, Any]], kept: str, title: str) -> Any:
    """A figure with a row for each of ``trials``, the first on top: a dot for the median, a bar for the quartiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 0.32 * len(trials)), layout="constrained")
    axes = figure.add_subplot(xlabel="step, ms (dot: median; bar: from quartile to quartile)")
    for row, trial in enumerate(trials):
        step, (low, high) = 1e3 * trial["step_seconds"], (1e3 * seconds for seconds in trial["quartiles"])
        colour = "#1b6ca8" if trial["name"] == kept else "#8a8f98"
        axes.errorbar(step, row, xerr=[[step - low], [high - step]], fmt="o", color=colour, capsize=4)
    axes.set_yticks(range(len(trials)), [_label(trial, kept) for trial in trials])
    axes.set_ylim(len(trials) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color="#e5e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, wrap=True)
    return figure


def _label(trial: Mapping[str, Any], kept: str) -> str:
    count = f"{trial['buckets']} bucket{'s' * (trial['buckets'] != 1)}"
    return f"{trial['name']}, {count}" + ", kept" * (trial["name"] == kept)
