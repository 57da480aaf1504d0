"""One step of all ranks as a picture. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reader import RankStep

__all__ = ["draw", "pyplot"]

_COLORS = {
    "forward": "#c9ced6", "backward": "#8fa3bf", "wait": "#d1495b", "late": "#f0b6bd", "gradient": "#30475e",
    "copy": "#edae49", "collective": "#2a9d8f", "early": "#b5ddd8",
}  # fmt: skip
_ROWS = ("step", "gradients", "pack, unpack", "collectives")


def pyplot(instead: str) -> Any:
    """matplotlib's, without a window; ``instead`` is what to do where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(f"the picture needs matplotlib: install it, or {instead}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(steps: Sequence[RankStep], paths: Sequence[str | Path]) -> None:
    """Draws all ranks' parts of one step, one below the other, into each of ``paths`` (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = pyplot("use --no-picture")
    lanes = _lanes(steps)
    height = 0.48 * (2.8 + _lane_height(lanes) * (1 + max(lanes.values(), default=0)))
    figure, all_axes = plt.subplots(
        len(steps), 1, sharex=True, squeeze=False, figsize=(11, 0.9 + height * len(steps)), layout="constrained"
    )
    for axes, step in zip(all_axes[:, 0], steps, strict=True):
        _draw_rank(axes, step, step.origin * 1e3, lanes)
    all_axes[-1, 0].set_xlabel("milliseconds since the first rank's forward began")
    figure.suptitle(_title(steps), fontsize=12)
    figure.legend(handles=_legend(steps), loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    for path in paths:
        figure.savefig(path, dpi=130)
    plt.close(figure)


def _title(steps: Sequence[RankStep]) -> str:
    """A sentence on the rank that was blocked for longest."""
    worst = max(steps, key=lambda step: step.times.exposed_seconds or 0.0)
    times, iteration = worst.times, f"In iteration {worst.times.iteration}"
    if times.exposed_seconds is None:
        return f"{iteration} the host enqueues {len(times.buckets)} buckets: nobody knows when they have travelled"
    exposed, step = times.exposed_seconds * 1e3, times.step_seconds * 1e3
    if exposed < 0.01 * step:
        return f"{iteration} backward hides all communication: other buckets cannot make it faster"
    late = sum(worst.exposed_late_seconds(bucket) for bucket in times.buckets) * 1e3
    of_it = f", {late:.1f} ms of them for a late rank" if late >= 0.05 else ""
    return f"{iteration} communication blocks rank {worst.rank} for {exposed:.1f} of {step:.1f} ms{of_it}"


def _draw_rank(axes: Any, step: RankStep, origin_ms: float, lanes: dict[int, int]) -> None:
    """Bars of one rank; ``origin_ms`` is where its backward began, ``lanes`` where each bucket's bar lies."""
    times, count, lane = step.times, 1 + max(lanes.values(), default=0), _lane_height(lanes)

    def bar(row: float, begin: float, length: float, color: str, height: float = 0.7) -> None:
        place = {"left": origin_ms + begin * 1e3, "width": length * 1e3, "height": height}
        edge = _COLORS[color] if color == "copy" else "white"  # a copy is too short to lose its edges
        axes.barh(row, **place, color=_COLORS[color], edgecolor=edge, linewidth=0.4)

    bar(0, -times.forward_seconds, times.forward_seconds, "forward")
    bar(0, 0.0, times.backward_seconds, "backward")
    axes.eventplot(
        [origin_ms + moment * 1e3 for moment in step.ready], lineoffsets=1, linelengths=0.7, linewidths=0.6,
        colors=_COLORS["gradient"],
    )  # fmt: skip
    for bucket in times.buckets:
        late, exposed = step.exposed_late_seconds(bucket), bucket.exposed_seconds or 0.0
        if late:
            bar(0, bucket.end - exposed, late, "late")
        if exposed > late:
            bar(0, bucket.end - exposed + late, exposed - late, "wait")
        bar(2, bucket.launched - bucket.pack_seconds, bucket.pack_seconds, "copy")
        bar(2, bucket.unpacked - bucket.unpack_seconds, bucket.unpack_seconds, "copy")
        row = 2.65 + lane * (lanes[bucket.index] + 0.5)
        begin = bucket.launched + step.late_seconds(bucket)  # of the transfer
        bar(row, bucket.launched, begin - bucket.launched, "early", lane)
        bar(row, begin, bucket.end - begin, "collective", lane)
        if count <= _NUMBERED_LANES and len(times.buckets) <= 40:
            style = {"ha": "center", "va": "center_baseline", "fontsize": 8}  # black: legible beside a short bar, too
            axes.text(origin_ms + (begin + bucket.end) / 2 * 1e3, row, str(bucket.index), **style)
    axes.set_yticks([0, 1, 2, 2.65 + lane * count / 2], _ROWS, fontsize=8)
    axes.set_ylim(2.8 + lane * count, -0.5)
    axes.set_title(f"rank {step.rank}", loc="left", fontsize=9)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


_NUMBERED_LANES = 12


def _lane_height(lanes: dict[int, int]) -> float:
    """In rows: a lane with a number in it is as high as the number; more lanes share one row."""
    count = 1 + max(lanes.values(), default=0)
    return max(0.7 / count, 0.3 if count <= _NUMBERED_LANES else 0.0)


def _lanes(steps: Sequence[RankStep]) -> dict[int, int]:
    """Each bucket's lane, the same on all ranks: collectives under way together on some rank have different ones."""
    flights: dict[int, list[tuple[int, float, float]]] = {}
    for step in steps:
        for bucket in step.times.buckets:
            flights.setdefault(bucket.index, []).append((step.rank, bucket.launched, bucket.end))
    lanes: dict[int, int] = {}
    busy: list[dict[int, float]] = []  # by lane: until when each rank's is taken
    for index, flight in sorted(flights.items()):
        free = (i for i, ends in enumerate(busy) if all(ends.get(r, -math.inf) <= begin for r, begin, _ in flight))
        lanes[index] = next(free, len(busy))
        if lanes[index] == len(busy):
            busy.append({})
        busy[lanes[index]].update({rank: end for rank, _, end in flight})
    return lanes


def _legend(steps: Sequence[RankStep]) -> list[Any]:
    """Of what a step consists of; waits for a late rank only where there is one to be seen."""
    from matplotlib.patches import Patch

    labels = {
        "forward": "forward", "backward": "backward", "late": "exposed: late rank", "wait": "exposed: transfer",
        "gradient": "gradient arrives", "copy": "pack, unpack", "early": "collective awaits a rank",
        "collective": "transfer (bucket)",
    }  # fmt: skip
    shortest = max(step.times.step_seconds for step in steps) / 500  # in a picture of some thousand pixels
    pairs = [(step, bucket) for step in steps for bucket in step.times.buckets]
    if not any(step.exposed_late_seconds(bucket) > shortest for step, bucket in pairs):
        del labels["late"]
    if not any(step.late_seconds(bucket) > shortest for step, bucket in pairs):
        del labels["early"]
    return [Patch(color=_COLORS[key], label=label) for key, label in labels.items()]
