"""Who is slow, from a trace: the same report as :func:`minddp.report`.

    minddp report trace.json                      # the last 20 steps
    minddp report trace.json --steps 100 --json report.json

Files come from :func:`minddp.trace`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..documents import write_whole
from ..messages import ranks_text
from ..timeline.reader import TraceFileError, load, modules_of
from .parts import part_of
from .result import Report, make_report

__all__ = ["main", "report_of"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parse(argv)
    try:
        report = report_of(load(arguments.trace), arguments.steps, arguments.module)
        print(report)
        if arguments.json:
            write_whole(arguments.json, json.dumps(report.to_dict(), indent=1) + "\n")
    except (OSError, TraceFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def report_of(trace: dict[str, Any], steps: int = 20, module: int = 0) -> Report:
    """The report of a trace's last steps.

    Args:
        trace: what ``minddp.timeline.load`` gives.
        steps: at most so many.
        module: which wrapped module, in order of first use; -1 is the last.

    Raises:
        TraceFileError: there is no such module, or the ranks have no step of it in common.
    """
    if steps < 1:
        raise TraceFileError(f"steps must be at least 1, got {steps}")
    found = modules_of(trace, module)
    steps_of = {rank: [s for s in record["steps"] if s["previous_end_ns"] >= 0] for rank, record in found.items()}
    missing = trace["missing_ranks"]
    notes = [f"{ranks_text(missing).capitalize()} did not hand in their part."] if missing else []
    report = make_report({rank: list(map(part_of, theirs)) for rank, theirs in steps_of.items()}, steps, notes)
    if not report.steps:
        raise TraceFileError(f"module {module}: the ranks have no finished step in common with another before it")
    return report


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("minddp report", description=__doc__, formatter_class=layout)
    parser.add_argument("trace", help="a file written by minddp.trace")
    parser.add_argument("--steps", type=int, default=20, help="the last so many steps (default: 20)")
    parser.add_argument("--module", type=int, default=0, help="which wrapped module, in order of first use")
    parser.add_argument("--json", help="write the report there, too")
    return parser.parse_args(argv)
