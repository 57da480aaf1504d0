"""How fast is the shared-memory transport? Collectives beside Gloo's and a copy, and a training step.

Collectives: for each size every variant runs in every round, interleaved in a new order:

    gloo     all_reduce through Gloo
    shm      the same tensor through backend "shm"
    copy     every rank copies a tensor of that size, all at once

Steps: a model whose gradients are large beside its arithmetic; torch's DDP and minddp's on both engines.
Printed are medians over rounds with quartiles and ratios of each round's times; a round's time is its
slowest rank's.

    python benchmarks/shm.py
    python benchmarks/shm.py --sizes 4096 --rounds 100 --steps 0
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import Ranks, spread

STEPS = ("torch gloo", "torch shm", "minddp gloo", "minddp shm", "minddp-views shm")
BASELINE = {"collectives": "gloo", "steps": "torch gloo"}
WARMUP = 3
Samples = dict[str, list[float]]


# ---- on the ranks


def collective_calls(numel: int, group: Any) -> dict[str, Callable[[], Any]]:
    """Each variant as a call. The tensors hold zeros, which stay what they are however often summed."""
    import torch
    import torch.distributed as dist

    tensor, target = torch.zeros(numel), torch.zeros(numel)
    return {
        "gloo": lambda: dist.all_reduce(tensor),
        "shm": lambda: dist.all_reduce(tensor, group=group),
        "copy": lambda: target.copy_(tensor),
    }


def mean_time(call: Callable[[], Any], count: int, group: Any) -> float:
    """Seconds of one of ``count`` calls in a row, begun by all ranks together."""
    import torch.distributed as dist

    call()
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def measure_collectives(rank: int, world_size: int, sizes: list[int], rounds: int) -> dict[int, Samples]:
    """Seconds of one call, for each size and variant, one mean a round."""
    import torch.distributed as dist

    harness.prepare_engine("shm", world_size)
    group = dist.new_group(backend="shm")
    result = {}
    for size in sizes:
        calls = collective_calls(max(size // 4, 1), group)
        count = max(2, min(50, (4 << 20) // max(size, 1)))
        samples: Samples = {name: [] for name in calls}
        for order in harness.rounds(list(calls), rounds):
            for name in order:
                samples[name].append(mean_time(calls[name], count, group))
        result[size] = samples
    return result


def measure_steps(rank: int, world_size: int, model: str, rounds: int) -> Samples:
    """Seconds of one training step for each variant, one median of two a round."""
    import models
    import torch
    import torch.distributed as dist
    import variants

    harness.prepare_engine("shm", world_size)
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    device = torch.device("cpu")
    steps = {"local": variants.make_step("local", models.workload(model, device, rank), device)}
    for name in STEPS:
        variant, engine = name.split()
        work = models.workload(model, device, rank)
        steps[name] = variants.make_step(variant, work, device, process_group=groups[engine])
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    samples: Samples = {name: [] for name in steps}
    for order in harness.rounds(list(steps), rounds):
        for name in order:
            samples[name].append(statistics.median(variants.timed(steps[name], 2)))
    return samples


# ---- in the parent


def slowest(per_rank: list[Samples]) -> Samples:
    """The time of a round is that of its slowest rank."""
    return {
        name: [max(times) for times in zip(*(samples[name] for samples in per_rank), strict=True)]
        for name in per_rank[0]
    }


def ratios(samples: Samples, name: str, baseline: str) -> dict[str, float]:
    """Median and quartiles of ``name`` / ``baseline``, round by round."""
    pairs = zip(samples[name], samples[baseline], strict=True)
    return spread(value / base for value, base in pairs).to_json()


def summarize(samples: Samples, baseline: str) -> dict[str, Any]:
    """What is printed and stored: seconds, and times as fast as the baseline."""
    rows = {}
    for name in samples:
        rows[name] = {
            "seconds": spread(samples[name]).to_json(),
            "speedup": ratios(samples, baseline, name),
            "share": ratios(samples, name, baseline),
        }
        if "copy" in samples:
            rows[name]["of_copy"] = ratios(samples, name, "copy")
    return rows


def print_table(title: str, rows: dict[str, Any], columns: dict[str, tuple[str, float]]) -> None:
    """``columns``: key of a row -> heading and the factor that it is printed with."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("variant", no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *(harness.Spread(**row[key]).show(scale) for key, (_, scale) in columns.items()))
    Console(width=120).print(table)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures everything; the result as stored."""
    result: dict[str, Any] = {"benchmark": "shm", "rounds": arguments.rounds, "collectives": [], "steps": None}
    world = arguments.ranks
    with Ranks(world, "gloo") as ranks:
        measured = ranks.run(measure_collectives, arguments.sizes, arguments.rounds, timeout=arguments.timeout)
        for size in arguments.sizes:
            rows = summarize(slowest([samples[size] for samples in measured]), BASELINE["collectives"])
            result["collectives"].append({"bytes": size, "ranks": world, "rows": rows})
            columns = {"seconds": ("us", 1e6), "speedup": ("Gloo / this", 1), "of_copy": ("this / copy", 1)}
            print_table(rf"all_reduce of {size:,} bytes, {world} ranks: median \[quartiles]", rows, columns)
        if arguments.steps:
            measured = ranks.run(measure_steps, arguments.model, arguments.steps, timeout=arguments.timeout)
            rows = summarize(slowest(measured), BASELINE["steps"])
            result["steps"] = {"model": arguments.model, "ranks": world, "rows": rows}
            columns = {"seconds": ("step, ms", 1e3), "share": ("this / torch gloo", 1)}
            print_table(rf"{arguments.model}, {world} ranks: median \[quartiles]", rows, columns)
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=harness.numbers, default=[1024, 262144, 33554432], help="bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the collectives")
    parser.add_argument("--steps", type=int, default=15, help="rounds of the training steps; 0: leave them out")
    parser.add_argument("--model", default="mlp67", help="a model of benchmarks/models.py")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each half")
    parser.add_argument("--output", type=Path, default=harness.OUTPUT / "shm.json", help="JSON file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    result = run(arguments)
    header = {"command": harness.command(), "machine": harness.machine()}
    harness.write_json(arguments.output, {**header, **result})
    print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    harness.run_main(main)
