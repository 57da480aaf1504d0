"""Reads a trace: exposed communication per bucket as a table, one step of all ranks as a picture.

    minddp timeline trace.json                    # the last step that every rank has
    minddp timeline trace.json --iteration 7 --picture step7.svg

The picture needs matplotlib. Files come from :func:`minddp.trace`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .step_times import BucketTimes, StepTimes, step_times

__all__ = ["RankStep", "TraceFileError", "draw", "load", "main", "table"]

_MEBIBYTE = 1024 * 1024


class TraceFileError(ValueError):
    """The file is not a trace of minddp, or does not hold the step asked for."""


class RankStep:
    """One rank's part of one step.

    Attributes:
        rank: the rank.
        times: the step in seconds.
        origin: when its backward began, in seconds of rank 0's clock.
        ready: when each parameter's gradient arrived, seconds since backward began.
        names: the parameters' names.
    """

    def __init__(self, part: dict[str, Any], module: dict[str, Any], step: dict[str, Any]):
        self.rank = int(part["rank"])
        self.times: StepTimes = step_times(step)
        self.names: list[str] = module["parameter_names"]
        begin = step["backward_begin_ns"]
        self.origin = (begin - (part["offset_ns"] or 0)) * 1e-9
        self.ready = [(moment - begin) * 1e-9 for moment in step["ready_ns"] if moment >= 0]


def load(path: str | Path) -> dict[str, Any]:
    """The part of a trace file that is minddp's own: ``world_size``, ``missing_ranks``, ``ranks``.

    Raises:
        TraceFileError: the file is not JSON, or not a trace written by ``minddp.trace``.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        return {key: document["minddp"][key] for key in ("world_size", "missing_ranks", "ranks")}
    except (ValueError, KeyError, TypeError):
        raise TraceFileError(f"{path} is not a trace written by minddp.trace") from None


def rank_steps(trace: dict[str, Any], iteration: int | None = None, module: int = 0) -> list[RankStep]:
    """Every rank's part of ``iteration`` (default: the last that all ranks have) of the ``module``-th module.

    Raises:
        TraceFileError: no rank has it; the text says which iterations there are.
    """
    by_rank = {part["rank"]: _steps(part, module) for part in trace["ranks"]}
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    if iteration is None and common:
        iteration = max(common)
    if iteration not in common:
        what = f"iterations {min(common)} to {max(common)}" if common else "no iteration of it"
        raise TraceFileError(f"module {module}, iteration {iteration} is not there: all ranks have {what}")
    return [
        RankStep(part, part["modules"][module], by_rank[part["rank"]][iteration]) for part in trace["ranks"]
    ]


def _steps(part: dict[str, Any], module: int) -> dict[int, dict[str, Any]]:
    if module >= len(part["modules"]):
        return {}
    return {step["iteration"]: step for step in part["modules"][module]["steps"]}


# ---- text


def table(steps: Sequence[RankStep]) -> str:
    """The step's parts and exposed communication of each bucket, for every rank; milliseconds."""
    lines = [f"iteration {steps[0].times.iteration}: milliseconds, moments counted from backward's begin"]
    lines += _aligned([("rank", "step", "forward", "backward", "communication", "exposed"), *_totals(steps)])
    lines += ["", "exposed: the step stood still for it, backward having ended"]
    heading = ("rank", "bucket", "MiB", "parameters", "ready", "launched", "done", "took", "exposed")
    lines += _aligned([heading, *_bucket_rows(steps)])
    return "\n".join(lines)


def _totals(steps: Sequence[RankStep]) -> Iterator[tuple[str, ...]]:
    for step in steps:
        times = step.times
        parts = [times.step_seconds, times.forward_seconds, times.backward_seconds]
        parts += [times.communication_seconds, times.exposed_seconds]
        yield (str(step.rank), *(_ms(part) for part in parts))


def _bucket_rows(steps: Sequence[RankStep]) -> Iterator[tuple[str, ...]]:
    for step in steps:
        for bucket in step.times.buckets:
            seconds = [bucket.ready, bucket.launched, bucket.done]
            seconds += [bucket.communication_seconds, bucket.exposed_seconds]
            size = f"{bucket.nbytes / _MEBIBYTE:.2f}"
            facts = (str(step.rank), str(bucket.index), size, str(len(bucket.parameters)))
            yield (*facts, *(_ms(value) for value in seconds))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def clocks(trace: dict[str, Any]) -> str:
    """How well the ranks' clocks are aligned, in one line a case."""
    shared = [part["rank"] for part in trace["ranks"] if part["offset_ns"] == 0 and part["error_ns"] == 0]
    lines = [f"clocks: ranks {', '.join(map(str, shared))} read the same clock"]
    for part in trace["ranks"]:
        if part["offset_ns"] is None:
            lines.append(f"clocks: rank {part['rank']} could not be measured; its times are not aligned")
        elif part["error_ns"]:
            offset, error = part["offset_ns"] / 1e6, part["error_ns"] / 1e6
            lines.append(f"clocks: rank {part['rank']} moved by {offset:.3f} ms, right to {error:.3f} ms")
    return "\n".join(lines)


# ---- picture

_COLORS = {
    "forward": "#c9ced6", "backward": "#8fa3bf", "wait": "#d1495b", "gradient": "#30475e",
    "copy": "#edae49", "collective": "#2a9d8f",
}  # fmt: skip
_ROWS = ("step", "gradients", "pack, unpack", "collectives")


def draw(steps: Sequence[RankStep], paths: Sequence[str | Path]) -> None:
    """Draws all ranks' parts of one step, one below the other, into each of ``paths`` (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("the picture needs matplotlib: install it, or use --no-picture") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(
        len(steps), 1, sharex=True, squeeze=False, figsize=(11, 0.9 + 1.9 * len(steps)), layout="constrained"
    )
    start = min(step.origin - step.times.forward_seconds for step in steps)
    for axes, step in zip(all_axes[:, 0], steps, strict=True):
        _draw_rank(axes, step, (step.origin - start) * 1e3)
    all_axes[-1, 0].set_xlabel("milliseconds since the first rank's forward began")
    worst = max(step.times.exposed_seconds for step in steps) * 1e3
    figure.suptitle(
        f"Iteration {steps[0].times.iteration}: {len(steps[0].times.buckets)} buckets, "
        f"{worst:.1f} ms of communication exposed",
        fontsize=12,
    )
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    for path in paths:
        figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_rank(axes: Any, step: RankStep, origin_ms: float) -> None:
    """Bars of one rank; ``origin_ms`` is where its backward began."""
    times = step.times

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
    for bucket, lane, lanes in _lanes(times.buckets):
        if bucket.exposed_seconds:
            bar(0, bucket.done - bucket.exposed_seconds, bucket.exposed_seconds, "wait")
        bar(2, bucket.launched - bucket.pack_seconds, bucket.pack_seconds, "copy")
        bar(2, bucket.unpacked - bucket.unpack_seconds, bucket.unpack_seconds, "copy")
        row = 2.65 + 0.7 * (lane + 0.5) / lanes
        bar(row, bucket.launched, bucket.communication_seconds, "collective", 0.7 / lanes)
        if lanes <= 8 and len(times.buckets) <= 40:
            style = {"ha": "center", "va": "center", "fontsize": 7 if lanes <= 3 else 4, "color": "white"}
            axes.text(origin_ms + (bucket.launched + bucket.done) / 2 * 1e3, row, str(bucket.index), **style)
    axes.set_yticks(range(4), _ROWS, fontsize=8)
    axes.set_ylim(3.5, -0.5)
    axes.set_title(f"rank {step.rank}", loc="left", fontsize=9)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _lanes(buckets: Sequence[BucketTimes]) -> list[tuple[BucketTimes, int, int]]:
    """(bucket, its lane, number of lanes): collectives under way together get lanes of their own."""
    busy_until: list[float] = []
    placed = []
    for bucket in buckets:
        lane = next((i for i, end in enumerate(busy_until) if end <= bucket.launched), len(busy_until))
        busy_until[lane : lane + 1] = [bucket.done]
        placed.append((bucket, lane))
    return [(bucket, lane, len(busy_until)) for bucket, lane in placed]


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    labels = {
        "forward": "forward", "backward": "backward", "wait": "waiting (exposed)",
        "gradient": "gradient arrives", "copy": "pack, unpack", "collective": "collective (bucket)",
    }  # fmt: skip
    return [Patch(color=_COLORS[key], label=label) for key, label in labels.items()]


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parse(argv)
    try:
        _report(arguments)
    except (OSError, ImportError, TraceFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("minddp timeline", description=__doc__, formatter_class=layout)
    parser.add_argument("trace", help="a file written by minddp.trace")
    parser.add_argument("--iteration", type=int, help="which step (default: the last that all ranks have)")
    parser.add_argument("--module", type=int, default=0, help="which wrapped module, in order of first use")
    parser.add_argument(
        "--picture", action="append", help="where to draw (default: the trace's name with .svg and .png)"
    )
    parser.add_argument("--no-picture", action="store_true", help="print only")
    return parser.parse_args(argv)


def _report(arguments: argparse.Namespace) -> None:
    trace = load(arguments.trace)
    steps = rank_steps(trace, arguments.iteration, arguments.module)
    print(table(steps))
    print(clocks(trace))
    if trace["missing_ranks"]:
        print(f"missing: ranks {trace['missing_ranks']} did not hand in their part")
    if not arguments.no_picture:
        path = Path(arguments.trace)
        pictures = arguments.picture or [path.with_suffix(".svg"), path.with_suffix(".png")]
        draw(steps, pictures)
        print("drawn:", ", ".join(str(picture) for picture in pictures))

