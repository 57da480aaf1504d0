"""Reads a trace: exposed communication per bucket as a table; the command also draws a step of all ranks.

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
from ..messages import ranks_text
from .picture import draw
from .step_times import BucketTimes, StepTimes, step_begin, step_times, wrong_part

__all__ = ["RankStep", "TraceFileError", "load", "main", "modules_of", "rank_steps", "table"]

_MEBIBYTE = 1024 * 1024


class TraceFileError(ValueError):
    """The file is not a trace of minddp, or does not hold the step asked for."""


class RankStep:
    """One rank's part of one step.

    Attributes:
        rank: the rank.
        times: the step in seconds.
        origin: when its backward began, in seconds since the first forward of a rank that reads the same clock.
        ready: when each parameter's gradient arrived, seconds since backward began.
        names: the parameters' names.
        late: by bucket, how many seconds of its collective were over before the last rank had launched it;
            None where the ranks read several clocks, or a rank's part is missing.
    """

    def __init__(self, part: dict[str, Any], module: dict[str, Any], step: dict[str, Any], start_ns: int = 0):
        self.rank = int(part["rank"])
        self.times: StepTimes = step_times(step)
        self.names: list[str] = module["parameter_names"]
        begin = step["backward_begin_ns"]
        self.origin = (begin - start_ns) * 1e-9
        self.ready = [(moment - begin) * 1e-9 for moment in step["ready_ns"] if moment >= 0]
        self.late: dict[int, float] | None = None

    def late_seconds(self, bucket: BucketTimes) -> float:
        """The part of a bucket's collective that only waited for another rank to launch it; 0 where unknown."""
        return (self.late or {}).get(bucket.index, 0.0)

    def exposed_late_seconds(self, bucket: BucketTimes) -> float:
        """The part of a bucket's exposed time that is in its ``late_seconds``."""
        end = min(bucket.end, bucket.launched + self.late_seconds(bucket))
        return max(0.0, end - max(bucket.launched, bucket.end - (bucket.exposed_seconds or 0.0)))


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
    shape = {"world_size": int, "missing_ranks": [int], "ranks": [dict]}
    why = misfit(document, {"minddp": shape})
    if not why:
        parts = enumerate(document["minddp"]["ranks"])
        why = next(filter(None, (wrong_part(part, f"it['minddp']['ranks'][{i}]") for i, part in parts)), "")
    if why:
        raise TraceFileError(f"{refusal}, or of an older minddp, or damaged: {why}")
    return {key: document["minddp"][key] for key in shape}


def rank_steps(trace: dict[str, Any], iteration: int | None = None, module: int = 0) -> list[RankStep]:
    """Every rank's part of ``iteration`` (default: the last that all ranks have) of the ``module``-th module.

    Raises:
        TraceFileError: not all ranks have it; the text says which iterations there are.
    """
    records = modules_of(trace, module)
    by_rank = {rank: {step["iteration"]: step for step in record["steps"]} for rank, record in records.items()}
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    if iteration is None and common:
        iteration = max(common)
    if iteration not in common:
        what = f"iterations {min(common)} to {max(common)}" if common else "no iteration of it"
        raise TraceFileError(f"module {module}, iteration {iteration} is not there: all ranks have {what}")
    ranks = [(part, part["rank"]) for part in trace["ranks"] if part["rank"] in records]
    found = [(part, records[rank], by_rank[rank][iteration]) for part, rank in ranks]
    starts: dict[str, int] = {}  # by clock
    for part, _, step in found:
        starts[part["clock"]] = min(starts.get(part["clock"], step_begin(step)), step_begin(step))
    steps = [RankStep(part, record, step, starts[part["clock"]]) for part, record, step in found]
    if len(found) == trace["world_size"] and len(starts) == 1:
        _find_late(steps)
    return steps


def modules_of(trace: dict[str, Any], module: int) -> dict[int, dict[str, Any]]:
    """By rank, the ``module``-th module's part of a trace, in order of first use; -1 is the last.

    Raises:
        TraceFileError: no rank has it.
    """
    modules = {part["rank"]: part["modules"] for part in trace["ranks"]}
    found = {rank: theirs[module] for rank, theirs in modules.items() if -len(theirs) <= module < len(theirs)}
    if not found:
        most = max(map(len, modules.values()), default=0)
        raise TraceFileError(f"module {module} is not there: the trace has {most} of them")
    return found


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


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parse(argv)
    try:
        _report(arguments)
    except (OSError, ImportError, ValueError) as error:
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
    others = [part["rank"] for part in trace["ranks"] if part["clock"] != trace["ranks"][0]["clock"]]
    for ranks, what in ((others, "read another clock"), (trace["missing_ranks"], "did not hand in a part")):
        if ranks:
            print(f"{ranks_text(ranks)} {what}: who is late is not known")
    if not arguments.no_picture:
        path = Path(arguments.trace)
        pictures = arguments.picture or [path.with_suffix(".svg"), path.with_suffix(".png")]
        try:
            draw(steps, pictures)
        except ImportError as error:
            if arguments.picture:
                raise
            print(f"not drawn: {error}")
        else:
            print("drawn:", ", ".join(str(picture) for picture in pictures))
