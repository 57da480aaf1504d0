"""How much does the reducer itself cost? A step split into compute, raw collectives and overhead.

For each model and world size every variant runs the same step (zero gradients, forward, backward,
gradients averaged), interleaved: each round visits all variants in a new order, so that a slow moment
of the machine falls on all alike. In a round,

    overhead    = step(variant) - step(local) - raw
    above floor = step(variant) - floor

raw    the collectives of torch's buckets, alone, launched together
floor  step(local) and then raw, in one: the step of a reducer that costs nothing and hides nothing

The two differ where ranks wait for each other: local and raw, measured apart, know no such wait, and the
floor's own overhead is its price. Where backward hides communication, both may be negative; compare the
steps there. Printed are medians over rounds with quartiles, and ratios to torch's DDP with default
arguments (--baseline: to another variant), with a 95 % interval from resampling whole rounds.

    python benchmarks/overhead.py                    # three models, world sizes 1 and 2
    python benchmarks/overhead.py --small --rounds 10
    python benchmarks/overhead.py --baseline torch-views-batched-lazy  # what one would pick of torch 2.15's
    python benchmarks/overhead.py --callgrind        # instructions instead of time; needs valgrind

A ratio is left out where torch's own cost is not clearly above zero.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
from harness import BenchmarkError, Ranks, spread

MODELS = ("many-small", "mlp67", "resnet50")
SMALL = {"mlp67": "mlp67-small", "resnet50": "resnet50-small"}
BASELINE = "torch"
VARIANTS = (
    "torch", "torch-views", "torch-static", "torch-batched", "torch-views-batched", "torch-views-batched-lazy",
    "minddp", "minddp-views", "minddp-views-lazy", "minddp-static",
)  # fmt: skip
COSTS = {"overhead": ("local", "raw"), "above_floor": ("floor",)}  # what is taken off the step
WARMUP = 3  # steps: torch's DDP rebuilds its buckets after the first
Samples = dict[str, list[float]]


# ---- on the ranks


def measure_rounds(
    rank: int, world_size: int, model: str, variants: list[str], rounds: int, inner: int, engine: str
) -> tuple[Samples, dict[str, list[int]]]:
    """Seconds per step of each variant, one median of ``inner`` steps a round; and the buckets' bytes."""
    import models
    import torch
    import variants as steps

    device = harness.rank_device(engine, rank)
    torch.manual_seed(rank)
    made = {
        name: steps.make_step(name, models.workload(model, device, rank), device) for name in ["local", *variants]
    }
    for step in made.values():
        for _ in range(WARMUP):
            step()
    sizes = {name: step.bucket_bytes() for name, step in made.items() if name != "local"}
    raw = steps.raw_collectives(sizes.get(BASELINE) or next(iter(sizes.values())), device)

    def floor() -> None:
        made["local"]()
        raw()

    calls: dict[str, Callable[[], None]] = {**made, "raw": raw, "floor": floor}
    samples: Samples = {name: [] for name in calls}
    for order in harness.rounds(list(calls), rounds):
        for name in order:
            samples[name].append(statistics.median(steps.timed(calls[name], inner)))
    return samples, sizes


# ---- in the parent


def slowest(per_rank: list[Samples]) -> Samples:
    """The step of a round is that of its slowest rank."""
    return {
        name: [max(times) for times in zip(*(samples[name] for samples in per_rank), strict=True)]
        for name in per_rank[0]
    }


def less(samples: Samples, variant: str, *parts: str) -> list[float]:
    """The step of ``variant`` without that of each of ``parts``, round by round."""
    return [step - sum(rest) for step, *rest in zip(samples[variant], *(samples[p] for p in parts), strict=True)]


def ratio_interval(numerator: list[float], denominator: list[float], draws: int = 2000) -> list[float]:
    """Ratio of medians and its 95 % bootstrap interval, whole rounds drawn again: [low, ratio, high]."""
    generator, count = random.Random(0), len(numerator)
    ratios = []
    for _ in range(draws):
        drawn = [generator.randrange(count) for _ in range(count)]
        below = statistics.median(denominator[i] for i in drawn)
        if below:
            ratios.append(statistics.median(numerator[i] for i in drawn) / below)
    ratios.sort()
    middle = statistics.median(numerator) / statistics.median(denominator)
    return [ratios[int(len(ratios) * 0.025)], middle, ratios[int(len(ratios) * 0.975)]]


def summarize(samples: Samples, variants: list[str], baseline: str = BASELINE) -> dict[str, Any]:
    """Everything that is printed and stored for one model at one world size."""
    rows: dict[str, Any] = {name: {"step": spread(samples[name]).to_json()} for name in ("local", "raw")}
    variants = [*variants, "floor"]
    for name in variants:
        rows[name] = {"step": spread(samples[name]).to_json()}
        if baseline in variants:
            rows[name]["step_ratio"] = ratio_interval(samples[name], samples[baseline])
        for key, parts in COSTS.items():
            if name in parts:
                continue
            cost = less(samples, name, *parts)
            rows[name][key] = spread(cost).to_json()
            if baseline in variants:
                base = less(samples, baseline, *parts)
                if spread(base).low > 0:  # else torch's cost is hidden behind backward: no ratio
                    rows[name][f"{key}_ratio"] = ratio_interval(cost, base)
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all models at all world sizes; the result as stored."""
    from rich.progress import track

    cases = [(model, world) for world in arguments.world_sizes for model in arguments.models]
    results = []
    for model, world in track(cases, description="overhead", transient=True):
        with Ranks(world, arguments.engine, threads=arguments.threads) as ranks:
            name = SMALL.get(model, model) if arguments.small else model
            inner = arguments.inner or (5 if model == "many-small" else 2)
            call = (name, arguments.variants, arguments.rounds, inner, arguments.engine)
            answers = ranks.run(measure_rounds, *call, timeout=arguments.timeout)
        samples = slowest([samples for samples, _ in answers])
        results.append(
            {
                "model": name, "world_size": world, "inner_steps": inner, "bucket_bytes": answers[0][1],
                "rows": summarize(samples, arguments.variants, arguments.baseline), "samples": samples,
            }
        )  # fmt: skip
        print_table(results[-1], arguments.baseline)
    settings = {
        "engine": arguments.engine, "threads": arguments.threads, "rounds": arguments.rounds,
        "baseline": arguments.baseline,
    }  # fmt: skip
    return {"benchmark": "overhead", **settings, "results": results}


def print_table(result: dict[str, Any], baseline: str = BASELINE) -> None:
    """One model at one world size, times in milliseconds."""
    from rich.console import Console
    from rich.table import Table

    title = rf"{result['model']}, {result['world_size']} rank(s): ms, median \[quartiles]"
    table = Table(title=title, title_justify="left")
    headings = ("variant", "step", f"/ {baseline}'s", "overhead", "/ its", "above floor", "/ its")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for name, row in result["rows"].items():
        cells = []
        for key in ("step", *COSTS):
            cells.append(_show(row[key]) if key in row else "")
            cells.append(show_ratio(row.get(f"{key}_ratio")) if name != baseline else "")
        table.add_row(name, *cells)
    Console(width=160).print(table)


def _show(value: dict[str, Any]) -> str:
    return harness.Spread(**value).show(1e3)


def show_ratio(interval: Sequence[float] | None) -> str:
    """``ratio [its 95 % interval]``; nothing where there is none."""
    return "" if interval is None else "{1:.2f} [{0:.2f}, {2:.2f}]".format(*interval)


# ---- instructions


def callgrind_child(variant: str, model: str, steps: int) -> None:
    """Runs under valgrind: counts the instructions of ``steps`` steps at world size 1."""
    import models
    import torch
    import torch.distributed as dist
    import variants as made

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        device = torch.device("cpu")
        step = made.make_step(variant, models.workload(model, device), device)
        for _ in range(WARMUP):
            step()
        torch._C._valgrind_toggle()
        for _ in range(steps):
            step()
        torch._C._valgrind_toggle_and_dump_stats()
        dist.destroy_process_group()


def count_instructions(variant: str, model: str, steps: int) -> float:
    """Instructions a step of the training thread, counted by callgrind (CPU: backward runs on it too)."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "callgrind.out"
        command = [
            "valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={output}",
            sys.executable, __file__, "--callgrind-child", variant, "--models", model, "--steps", str(steps),
        ]  # fmt: skip
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # valgrind runs one thread at a time
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env={**os.environ, **single})
        if done.returncode != 0:
            raise BenchmarkError(f"callgrind of {variant} failed:\n{done.stderr[-2000:]}")
        dumps = [path for path in Path(folder).iterdir() if path.name.startswith("callgrind.out")]
        return sum(_total(path) for path in dumps) / steps


def _total(path: Path) -> int:
    """The sum of instructions in one callgrind dump."""
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith(("summary:", "totals:")):
            return int(line.split()[1])
    return 0


def run_callgrind(arguments: argparse.Namespace) -> dict[str, Any]:
    """Instructions of every variant over those of the local step, on the first model."""
    from rich.progress import track

    if shutil.which("valgrind") is None:
        raise BenchmarkError("--callgrind needs valgrind: install it, or leave --callgrind out")
    model = SMALL.get(arguments.models[0], arguments.models[0]) if arguments.small else arguments.models[0]
    counts: dict[str, float] = {}
    for name in track(["local", *arguments.variants], description="callgrind", transient=True):
        counts[name] = count_instructions(name, model, arguments.steps)
    print(f"{model}, 1 rank: thousand instructions a step above the local {counts['local'] / 1e3:,.0f}")
    added = {name: counts[name] - counts["local"] for name in arguments.variants}
    for name, value in added.items():
        ratio = f"  {value / added[BASELINE]:6.3f} of torch's" if BASELINE in added and name != BASELINE else ""
        print(f"  {name:16s}{value / 1e3:12,.0f}{ratio}")
    return {"benchmark": "overhead-instructions", "model": model, "steps": arguments.steps, "counts": counts}


# ---- command line


def default_variants() -> list[str]:
    """Of all variants, those that the installed torch has arguments for."""
    from variants import supported

    return [name for name in VARIANTS if supported(name)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=list(MODELS), help="comma-separated")
    parser.add_argument("--variants", type=harness.names, help="comma-separated; default: all that this torch has")
    parser.add_argument("--baseline", default=BASELINE, help="the variant that ratios are to")
    parser.add_argument("--world-sizes", type=harness.numbers, default=[1, 2], help="comma-separated")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--inner", type=int, help="steps in a visit (default: 5 for many-small, else 2)")
    parser.add_argument("--engine", default="gloo", choices=harness.ENGINES)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a rank")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one model")
    parser.add_argument("--small", action="store_true", help="narrower models")
    parser.add_argument("--callgrind", action="store_true", help="count instructions, first model, 1 rank")
    parser.add_argument("--steps", type=int, default=5, help="steps counted by --callgrind")
    parser.add_argument("--callgrind-child", metavar="VARIANT", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file (default: build/results/overhead.json)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    arguments.variants = arguments.variants or default_variants()
    if arguments.baseline not in (BASELINE, *arguments.variants):
        raise BenchmarkError(f"--baseline {arguments.baseline} is none of {', '.join(arguments.variants)}")
    if any(model.startswith("resnet") for model in arguments.models) and find_spec("transformers") is None:
        raise BenchmarkError("resnet50 needs the package transformers: pip install it, or --models many-small,mlp67")
    if arguments.callgrind_child:
        callgrind_child(arguments.callgrind_child, arguments.models[0], arguments.steps)
        return 0
    result = run_callgrind(arguments) if arguments.callgrind else run(arguments)
    output = arguments.output or harness.OUTPUT / f"{result['benchmark']}.json"
    harness.write_json(output, {"command": harness.command(), "machine": harness.machine(), **result})
    print(f"written: {output}")
    return 0


if __name__ == "__main__":
    harness.run_main(main)
