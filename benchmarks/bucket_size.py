"""Which bucket size is best? Step time against ``bucket_cap_mb``, measured, drawn, with floors.

    python benchmarks/bucket_size.py --models mlp38,resnet50 --link 1gbit
    python benchmarks/bucket_size.py --models my_models:make --input 8x1024 --impl minddp --rounds 5

A model is one of benchmarks/models.py, or yours, as ``minddp tune`` takes it: a function without arguments that
returns a module (--input gives the shapes of its inputs), or a module and a function that calls it for the loss.

Each model is swept over uniform caps by every implementation that has buckets (minddp, torch); naive, flat
and per-parameter have none and give one time. Two floors are measured beside them: the local step (no
communication) and the collectives alone at each size. minddp's "auto" tunes itself once; its plan is
pinned in later visits. So is that of the optimum: benchmarks/optimum measures when gradients come and what an
all-reduce costs, computes the buckets that finish first, and the step that they would take. The table has how
far each size is from that step, and so are the optimum's own buckets when they are measured: what the model leaves
out. All of it is visited in rounds, in an order that changes; shown are medians of the rounds with quartiles. No
optimizer runs.

Each model gives one set of files in --output: .json (everything), .csv (every step), .svg and .png (the
plot) and .html (a report that needs no other file). An interrupted run keeps what it measured; the same
command goes on from there. ``--link`` (needs root) puts each rank in a network namespace of its own, joined
by interfaces shaped to that bandwidth.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import harness
from harness import BenchmarkError
from sweep import LOCAL, RAW, Point, Sweep

WITH_BUCKETS = ("minddp", "torch")
IMPLEMENTATIONS = (*WITH_BUCKETS, "naive", "flat", "per-parameter")
CAPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)


def points(arguments: argparse.Namespace) -> list[Point]:
    """Everything that a round visits."""
    found = [Point(LOCAL), *(Point(RAW, cap) for cap in arguments.caps)]
    for implementation in arguments.impl:
        if implementation not in WITH_BUCKETS:
            found.append(Point(implementation))
            continue
        found += [Point(implementation, cap) for cap in (*arguments.caps, "default")]
        if implementation == "minddp":
            found += [Point(implementation, "auto")] * (not arguments.no_auto)
            # On a device nobody knows when a gradient was ready, or a collective done.
            found += [Point(implementation, "optimum")] * (arguments.engine != "nccl")
    return found


def settings(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """What a result file stands for."""
    names = ("engine", "ranks", "link", "threads", "steps")
    return {"model": model, **{name: getattr(arguments, name) for name in names}}


def stem(arguments: argparse.Namespace, model: str) -> str:
    """The name of a model's files, without their suffix."""
    link = f"-{arguments.link}" if arguments.link else ""
    model = re.sub(r"[^\w.-]+", "-", model)
    return f"buckets-{model}-{arguments.engine}-{arguments.ranks}ranks{link}"


def _caps(text: str) -> list[float]:
    return [float(cap) for cap in harness.names(text)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=["mlp38"], help="names, or MODULE:FACTORY")
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help="such as 8x1024; repeatable")
    parser.add_argument("--impl", type=harness.names, default=list(IMPLEMENTATIONS), help="comma-separated")
    parser.add_argument("--caps", type=_caps, default=list(CAPS), help="MiB, comma-separated")
    parser.add_argument("--engine", default="gloo", choices=harness.ENGINES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", help="bandwidth between ranks, such as 1gbit; needs root")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a visit")
    parser.add_argument("--no-auto", action="store_true", help='leave bucket_cap_mb="auto" out')
    parser.add_argument("--fresh", action="store_true", help="start over instead of going on")
    parser.add_argument("--output", type=Path, default=harness.OUTPUT, help="folder for the results")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing; write the reports again")
    arguments = parser.parse_args(argv)
    check(arguments)
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Raises :class:`BenchmarkError` for arguments that cannot be run, before anything starts."""
    import models

    unknown = [name for name in arguments.impl if name not in IMPLEMENTATIONS]
    if unknown:
        raise BenchmarkError(f"--impl {','.join(unknown)}: known are {', '.join(IMPLEMENTATIONS)}")
    unknown = [name for name in arguments.models if name not in models.MODELS and ":" not in name]
    if unknown:
        raise BenchmarkError(
            f"--models {','.join(unknown)}: known are {', '.join(models.MODELS)}; module:function names yours"
        )
    # A model's inputs are part of its name, for the ranks and for the file of results.
    arguments.models = [" ".join([name, *arguments.input]) if ":" in name else name for name in arguments.models]
    for name in arguments.models:
        if ":" in name:
            models.workload(name, harness.rank_device("gloo", 0))  # what is wrong is said before ranks start
    if not arguments.caps or min(arguments.caps) <= 0:
        raise BenchmarkError(f"--caps must be above 0 (MiB), not {arguments.caps}")
    for name in ("ranks", "rounds", "steps", "threads"):
        if getattr(arguments, name) < 1:
            raise BenchmarkError(f"--{name} must be at least 1, not {getattr(arguments, name)}")


def main(argv: list[str] | None = None) -> int:
    """The command; 130 when it was interrupted (what was measured is reported all the same)."""
    import bucket_report

    arguments = parse(argv)
    for model in arguments.models:
        path = arguments.output / f"{stem(arguments, model)}.json"
        sweep = Sweep(path, settings(arguments, model), arguments.fresh)
        interrupted = False
        if not arguments.draw_only:
            try:
                sweep.run(points(arguments), arguments.rounds)
            except KeyboardInterrupt:
                interrupted = True
        bucket_report.write(sweep)
        if interrupted:
            left = len(sweep.missing(points(arguments), arguments.rounds))
            print(f"interrupted with {left} visits left; the same command goes on", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    harness.run_main(main)
