"""Who is slow, from a trace: the same report as :func:`minddp.report`, without links.

    minddp report trace.json                      # the last 20 steps
    minddp report trace.json --steps 100 --json report.json

Files come from :func:`minddp.trace`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..timeline.report import TraceFileError, load
from .result import Report, make_report

__all__ = ["main", "report_of"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parse(argv)
    try:
        report = report_of(load(arguments.trace), arguments.steps, arguments.module)
        print(report)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    except (OSError, TraceFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def report_of(trace: dict[str, Any], steps: int = 20, module: int = 0) -> Report:
    """The report of a trace's last steps.

    Args:
        trace: what ``minddp.timeline.load`` gives.
        steps: at most so many.
        module: which wrapped module, in order of first use.

    Raises:
        TraceFileError: the ranks have no step of it in common, or the trace is of an older minddp.
    """
    if steps < 1:
        raise TraceFileError(f"steps must be at least 1, got {steps}")
    ranks = [part for part in trace["ranks"] if module < len(part["modules"])]
    records = [part["modules"][module] for part in ranks]
    stamps = {part["rank"]: record["steps"] for part, record in zip(ranks, records, strict=True)}
    if any("previous_end_ns" not in step for record in records for step in record["steps"]):
        raise TraceFileError("the trace was written by an older minddp, whose steps have no moments between them")
    notes = []
    if trace["missing_ranks"]:
        notes.append(f"Ranks {trace['missing_ranks']} did not hand in their part.")
    report = make_report(stamps, steps, notes=notes)
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
