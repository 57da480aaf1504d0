"""Reads a trace: exposed communication per bucket as a table, one step of all ranks as a picture.

    minddp timeline trace.json                    # the last step that every rank has
    minddp timeline trace.json --iteration 7 --picture step7.svg

The picture needs matplotlib. Files come from :func:`minddp.trace`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..documents import misfit, parse
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
        late: by bucket, how many seconds of its collective were over before the last rank had launched it;
            None where the ranks' clocks could not be aligned, or a rank's part is missing.
    """

    def __init__(self, part: dict[str, Any], module: dict[str, Any], step: dict[str, Any]):
        self.rank = int(part["rank"])
        self.times: StepTimes = step_times(step)
        self.names: list[str] = module["parameter_names"]
        begin = step["backward_begin_ns"]
        self.origin = (begin - (part["offset_ns"] or 0)) * 1e-9
        self.ready = [(moment - begin) * 1e-9 for moment in step["ready_ns"] if moment >= 0]
        self.late: dict[int, float] | None = None

    def late_seconds(self, bucket: BucketTimes) -> float:
        """The part of a bucket's collective that only waited for another rank to launch it; 0 where unknown."""
        return (self.late or {}).get(bucket.index, 0.0)

    def exposed_late_seconds(self, bucket: BucketTimes) -> float:
        """The part of a bucket's exposed time that is in its ``late_seconds``."""
        end = min(done(bucket), bucket.launched + self.late_seconds(bucket))
        return max(0.0, end - max(bucket.launched, done(bucket) - (bucket.exposed_seconds or 0.0)))


def done(bucket: BucketTimes) -> float:
    """When its collective ended; on a device, where nobody knows, its launch: nothing is drawn of it."""
    return bucket.launched if bucket.done is None else bucket.done


def load(path: str | Path) -> dict[str, Any]:
    """The part of a trace file that is minddp's own: ``world_size``, ``missing_ranks``, ``ranks``.

    Raises:
        TraceFileError: the file is not JSON, not a trace written by ``minddp.trace``, or damaged, and where.
    """
    refusal = f"{path} is not a trace written by minddp.trace"
    try:
        document = parse(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceFileError(f"{refusal}: {error}") from None
    why = misfit(document, {"minddp": _SHAPE})
    if not why:
        modules = (module for part in document["minddp"]["ranks"] for module in part["modules"])
        why = next(filter(None, map(_wrong_numbers, modules)), "")
    if why:
        raise TraceFileError(f"{refusal}, or damaged: {why}")
    return {key: document["minddp"][key] for key in _SHAPE}


_BUCKET = {
    "index": int, "nbytes": int, "parameters": [int], "on_device?": bool, "launch_end_ns?": int,
    **dict.fromkeys(["ready_ns", "pack_begin_ns", "launch_ns", "done_ns", "unpack_begin_ns", "unpack_end_ns"], int),
}  # fmt: skip
_STEP = {
    "iteration": int, "ready_ns": [int], "buckets": [_BUCKET],
    **dict.fromkeys(["forward_begin_ns", "backward_begin_ns", "backward_end_ns", "finalize_end_ns"], int),
    **dict.fromkeys(["previous_end_ns?", "first_arrival_ns?", "optimizer_ns?", "arrival_ns?"], int),
}  # fmt: skip
_MODULE = {"name": str, "parameter_names": [str], "steps": [_STEP]}
_PART = {"rank": int, "offset_ns": (int, None), "error_ns": (int, None), "modules": [_MODULE]}
_SHAPE = {"world_size": int, "missing_ranks": [int], "ranks": [_PART]}


def _wrong_numbers(module: dict[str, Any]) -> str:
    """Why steps do not belong to the module's parameters; empty if they do."""
    count = len(module["parameter_names"])
    for step in module["steps"]:
        used = {index for bucket in step["buckets"] for index in bucket["parameters"]}
        if len(step["ready_ns"]) != count or not used <= set(range(count)):
            return f"iteration {step['iteration']} of {module['name']} is of other parameters than its {count}"
    return ""


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
    steps = [RankStep(part, part["modules"][module], by_rank[part["rank"]][iteration]) for part in trace["ranks"]]
    if not trace["missing_ranks"] and all(part["offset_ns"] is not None for part in trace["ranks"]):
        _find_late(steps)
    return steps


def _find_late(steps: Sequence[RankStep]) -> None:
    """A collective transfers nothing before all ranks have launched it: what comes before is a wait for the last."""
    last: dict[int, float] = {}
    for step in steps:
        for bucket in step.times.buckets:
            last[bucket.index] = max(last.get(bucket.index, -math.inf), step.origin + bucket.launched)
    for step in steps:
        step.late = {
            b.index: min(b.communication_seconds or 0.0, last[b.index] - (step.origin + b.launched))
            for b in step.times.buckets
        }


def _steps(part: dict[str, Any], module: int) -> dict[int, dict[str, Any]]:
    if module >= len(part["modules"]):
        return {}
    return {step["iteration"]: step for step in part["modules"][module]["steps"]}


# ---- text


def table(steps: Sequence[RankStep]) -> str:
    """The step's parts and exposed communication of each bucket, for every rank; milliseconds."""
    lines = [f"iteration {steps[0].times.iteration}: milliseconds; moments since the rank's own backward began"]
    heading: tuple[str, ...] = ("rank", "step", "forward", "backward", "communication", "exposed", "of it late")
    lines += _aligned([heading, *_totals(steps)])
    lines += ["", "exposed: the step waited for it after backward had ended"]
    lines += ["late: until the last rank had launched it; transfer: from then on, waiting for other buckets included"]
    heading = ("rank", "bucket", "MiB", "parameters", "ready", "launched", "done", "late", "transfer", "exposed")
    lines += _aligned([heading, *_bucket_rows(steps)])
    return "\n".join(lines)


def _totals(steps: Sequence[RankStep]) -> Iterator[tuple[str, ...]]:
    for step in steps:
        times = step.times
        parts: list[float | None] = [times.step_seconds, times.forward_seconds, times.backward_seconds]
        parts += [times.communication_seconds, times.exposed_seconds]
        late = sum(step.exposed_late_seconds(bucket) for bucket in times.buckets)
        yield (str(step.rank), *(_ms(part) for part in parts), "-" if step.late is None else _ms(late))


def _bucket_rows(steps: Sequence[RankStep]) -> Iterator[tuple[str, ...]]:
    for step in steps:
        for bucket in step.times.buckets:
            late = step.late_seconds(bucket)
            size = f"{bucket.nbytes / _MEBIBYTE:.3g}"
            facts = (str(step.rank), str(bucket.index), size, str(len(bucket.parameters)))
            moments = (_ms(bucket.ready), _ms(bucket.launched), _ms(bucket.done))
            length = bucket.communication_seconds
            parts = ("-", "-") if step.late is None or length is None else (_ms(late), _ms(length - late))
            yield (*facts, *moments, *parts, _ms(bucket.exposed_seconds))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


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
    start = min(step.origin - step.times.forward_seconds for step in steps)
    for axes, step in zip(all_axes[:, 0], steps, strict=True):
        _draw_rank(axes, step, (step.origin - start) * 1e3, lanes)
    all_axes[-1, 0].set_xlabel("milliseconds since the first rank's forward began")
    figure.suptitle(_title(steps), fontsize=12)
    figure.legend(handles=_legend(steps), loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    for path in paths:
        figure.savefig(path, dpi=130)
    plt.close(figure)


def _title(steps: Sequence[RankStep]) -> str:
    """Of the rank that was blocked for longest."""
    worst = max(steps, key=lambda step: step.times.exposed_seconds or 0.0)
    begin = f"Iteration {worst.times.iteration}: {len(worst.times.buckets)} buckets"
    if worst.times.communication_seconds is None or worst.times.exposed_seconds is None:
        return f"{begin}; the host's part, which enqueues them"
    communication, exposed = worst.times.communication_seconds * 1e3, worst.times.exposed_seconds * 1e3
    late = sum(worst.exposed_late_seconds(bucket) for bucket in worst.times.buckets) * 1e3
    of_it = f", {late:.1f} ms of it for a late rank" if late >= 0.05 else ""
    return f"{begin}; rank {worst.rank}: {communication:.1f} ms of communication, {exposed:.1f} ms exposed{of_it}"


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
            bar(0, done(bucket) - exposed, late, "late")
        if exposed > late:
            bar(0, done(bucket) - exposed + late, exposed - late, "wait")
        bar(2, bucket.launched - bucket.pack_seconds, bucket.pack_seconds, "copy")
        bar(2, bucket.unpacked - bucket.unpack_seconds, bucket.unpack_seconds, "copy")
        row = 2.65 + lane * (lanes[bucket.index] + 0.5)
        begin = bucket.launched + step.late_seconds(bucket)  # of the transfer
        bar(row, bucket.launched, begin - bucket.launched, "early", lane)
        bar(row, begin, done(bucket) - begin, "collective", lane)
        if count <= _NUMBERED_LANES and len(times.buckets) <= 40:
            style = {"ha": "center", "va": "center_baseline", "fontsize": 8}  # black: legible beside a short bar, too
            axes.text(origin_ms + (begin + done(bucket)) / 2 * 1e3, row, str(bucket.index), **style)
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
            flights.setdefault(bucket.index, []).append((step.rank, bucket.launched, done(bucket)))
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
