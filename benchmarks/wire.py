"""When do fewer bytes pay? The step and its bytes by what gradients travel as, beside torch's communication hooks.

    python benchmarks/wire.py --models mlp38,gpt2-small --link 1gbit
    python benchmarks/wire.py --learning                        # what it costs: losses over 2,000 steps

Each round visits torch's class (default arguments, uniform caps, its fp16 and bf16 hooks) and minddp (torch's
PowerSGD hook, default arguments, ordered=True, wire="bf16", "fp16", "int8") in an order that changes. Shown are
medians of the rounds with quartiles, ratios to torch's default arguments and to its best cap, and the bytes that a
rank's network interface has sent in a step. No optimizer runs. ``--link`` (needs root) puts each rank in a network
namespace of its own; without it the ranks talk over loopback.

``--learning`` trains a classifier of handwritten digits and a small GPT, with five seeds for each wire, with error
feedback and without.

Results: wire-*.json and wire-*.png in --output. An interrupted run goes on with the same command.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bucket_report
import harness
from harness import Spread
from sweep import LOCAL, Point, Sweep

TORCH = Point("torch", "default")
DEFAULT = Point("minddp", "default")
CAPS = tuple(Point("torch", cap) for cap in (1.0, 4.0, 16.0))
# With torch's class over Gloo, PowerSGD's collectives of several buckets wait for each other for ever.
POWER = tuple(Point(f"minddp-powersgd{rank}", "default") for rank in (1, 4))
HOOKS = (Point("torch-fp16hook", "default"), Point("torch-bf16hook", "default"), *POWER)
WIRES = tuple(Point(f"minddp-{wire}", "default") for wire in ("ordered", "bf16", "fp16", "int8"))
POINTS = (Point(LOCAL), TORCH, *CAPS, *HOOKS, DEFAULT, *WIRES)
_TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
PALETTE = {"torch": "#d1495b", "minddp": "#1b6ca8", "local": "#8d99ae"}

Table = dict[Point, tuple[Spread, Spread, Spread, float, Spread | None]]


# ---- steps and bytes


def table(sweep: Sweep) -> Table:
    """By point: seconds, their ratios in a round to torch's default and to torch's best cap, bytes sent in a step,
    and seconds of packing in one, where they are known."""
    seconds: dict[tuple[int, str], float] = {}
    packing: dict[str, list[float]] = {}
    for visit in sweep.visits:
        seconds[visit["round"], visit["point"]] = statistics.median(visit["seconds"])
        if "pack_seconds" in visit:
            packing.setdefault(visit["point"], []).append(visit["pack_seconds"])
    numbers = sorted({number for number, _ in seconds})
    points = [point for point in POINTS if point.key in sweep.points]
    medians = {point: harness.spread(seconds[number, point.key] for number in numbers) for point in points}
    best = min({TORCH, *CAPS} & set(points), key=lambda point: medians[point].median)
    found: Table = {}
    for point in points:
        ratios = [
            harness.spread(seconds[number, point.key] / seconds[number, other.key] for number in numbers)
            for other in (TORCH, best)
        ]
        packs = harness.spread(packing[point.key]) if point.key in packing else None
        found[point] = (medians[point], ratios[0], ratios[1], sweep.facts[point.key]["sent_bytes"], packs)
    return found


def name(point: Point) -> str:
    words = {
        "local": "no communication", "torch-fp16hook": "torch, fp16_compress_hook",
        "torch-bf16hook": "torch, bf16_compress_hook", "minddp-powersgd1": "minddp, torch's PowerSGD, rank 1",
        "minddp-powersgd4": "minddp, torch's PowerSGD, rank 4", "minddp-ordered": "minddp, ordered=True",
        "minddp-bf16": 'minddp, wire="bf16"', "minddp-fp16": 'minddp, wire="fp16"',
        "minddp-int8": 'minddp, wire="int8"',
    }  # fmt: skip
    if point.variant in words:
        return words[point.variant]
    buckets = "default arguments" if point.cap_mb == "default" else f"{point.cap_mb:g} MiB buckets"
    return f"{point.variant}, {buckets}"


def print_table(found: Table, title: str) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=title, title_justify="left")
    for heading in ("", "step, ms", "/ torch's default", "/ torch's best cap", "MB sent", "packing, ms"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for point, (step, to_default, to_best, sent, packs) in found.items():
        packing = "" if packs is None else packs.show(1e3, 1)
        cells = [step.show(1e3, 0), to_default.show(), to_best.show(), f"{sent / 1e6:.1f}", packing]
        shown.add_row(name(point), *(cell.replace("[", r"\[") for cell in cells))
    Console(width=130).print(shown)


def draw(found: Table, title: str, path: Path) -> None:
    figure, axes = bucket_report.pyplot().subplots(figsize=(8.4, 4.6), layout="constrained")
    points = [point for point in found if point.variant != LOCAL][::-1]
    steps = [found[point][0] for point in points]
    reach = [[(s.median - s.low) * 1e3 for s in steps], [(s.high - s.median) * 1e3 for s in steps]]
    colors = [PALETTE[point.variant.partition("-")[0]] for point in points]
    bars = axes.barh(range(len(points)), [s.median * 1e3 for s in steps], xerr=reach, color=colors, ecolor="#555b66")
    labels = [f"{s.median * 1e3:.0f} ms, {found[p][3] / 1e6:.1f} MB" for p, s in zip(points, steps, strict=True)]
    axes.bar_label(bars, labels, fontsize=8, padding=4)
    local = found[Point(LOCAL)][0].median * 1e3
    axes.axvline(local, color="#555b66", linewidth=1, linestyle=":")
    axes.set_ylim(bottom=-1.0)
    axes.text(local, -0.85, " no communication", fontsize=8, color="#555b66")
    axes.set_yticks(range(len(points)), [name(point) for point in points], fontsize=9)
    axes.set_xlim(right=max(s.high for s in steps) * 1e3 * 1.25)
    axes.set_xlabel("ms per step; MB that a rank's interface has sent")
    best = min(points, key=lambda point: found[point][0].median)
    text = f"{title}: {name(best)} makes the shortest step,\n{found[best][1].median:.2f} of that with torch's default"
    axes.set_title(text, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def measure(arguments: argparse.Namespace, model: str) -> None:
    keys = ("engine", "ranks", "link", "threads", "steps")
    settings = {"model": model, **{key: getattr(arguments, key) for key in keys}}
    link = arguments.link or ("shared memory" if arguments.engine == "shm" else "loopback")
    stem = f"wire-{model}-{arguments.engine}-{arguments.ranks}ranks-{link.replace(' ', '-')}"
    sweep = Sweep(arguments.output / f"{stem}.json", settings, arguments.fresh)
    sweep.run([p for p in POINTS if p in (Point(LOCAL), TORCH) or p.variant in arguments.variants], arguments.rounds)
    found = table(sweep)
    title = f"{model}, {arguments.ranks} ranks, {link}"
    print_table(found, title)
    draw(found, title, arguments.output / f"{stem}.png")


# ---- what it costs

SEEDS = range(5)
LEARNED = ("float32", "bf16", "fp16", "int8", "int8 without feedback")


def _digits(seed: int, rank: int, world_size: int) -> tuple[Any, Any, Any, Any]:
    """A classifier of handwritten digits: model, optimizer, ``loss(ddp)`` of a batch, ``final(model)`` of all."""
    import torch

    inputs, labels = harness.digits()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    loss_of = torch.nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shard = torch.arange(len(labels))[rank::world_size]

    def loss(ddp: Any) -> Any:
        picked = shard[torch.randint(len(shard), (32,), generator=generator)]
        return loss_of(ddp(inputs[picked]), labels[picked])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, loss, lambda model: loss_of(model(inputs), labels)


def _gpt(seed: int, rank: int, world_size: int) -> tuple[Any, Any, Any, Any]:
    """Tutorial 10's GPT on the standard library's sources, smaller: the same four."""
    import torch

    sys.path.insert(0, str(_TUTORIALS))
    nanogpt: Any = importlib.import_module("10_nanogpt")
    nanogpt.WIDTH, nanogpt.LAYERS, nanogpt.CONTEXT, nanogpt.BATCH = 32, 2, 32, 8
    training, held_out = nanogpt.read_corpus()
    torch.manual_seed(seed)
    model = nanogpt.GPT()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    fixed = torch.Generator().manual_seed(7)
    examples = [nanogpt.draw(held_out, fixed) for _ in range(40)]

    def final(model: Any) -> Any:
        return torch.stack([model(*example) for example in examples]).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, lambda ddp: ddp(*nanogpt.draw(training, generator)), final


TASKS = {"digits": _digits, "gpt": _gpt}


def learn(rank: int, world_size: int, task: str, wire: str, seed: int, steps: int) -> float:
    """The loss after ``steps`` steps: of the training set (digits), or of held-out text (gpt)."""
    import torch

    import minddp

    model, optimizer, loss, final = TASKS[task](seed, rank, world_size)
    options = {"float32": None, "int8 without feedback": minddp.Wire("int8", error_feedback=False)}
    ddp = minddp.DistributedDataParallel(model, wire=options.get(wire, wire))
    for _ in range(steps):
        optimizer.zero_grad()
        loss(ddp).backward()
        optimizer.step()
    with torch.no_grad():
        return float(final(model))


def learning(arguments: argparse.Namespace) -> None:
    losses: dict[str, dict[str, list[float]]] = {task: {} for task in TASKS}
    with harness.Ranks(arguments.ranks, "gloo") as ranks:
        for task, wire in itertools.product(TASKS, LEARNED):
            found = [ranks.run(learn, task, wire, seed, arguments.learning_steps)[0] for seed in SEEDS]
            losses[task][wire] = found
            spread = f"{statistics.mean(found):.5f} [{min(found):.5f}, {max(found):.5f}]"
            print(f"{task:8s}{wire:36s} loss {spread} of {len(SEEDS)} seeds", flush=True)
    facts = {"command": harness.command(), "machine": harness.machine(), "steps": arguments.learning_steps}
    harness.write_json(arguments.output / "wire-learning.json", {**facts, "losses": losses})


# ---- command line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=["mlp38"], help="see benchmarks/models.py")
    known = sorted({point.variant for point in POINTS})
    parser.add_argument("--variants", type=harness.names, default=known, help=f"beside torch's: {','.join(known)}")
    parser.add_argument("--engine", default="gloo", choices=("gloo", "shm"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", help="bandwidth between ranks, such as 1gbit; needs root")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a visit")
    parser.add_argument("--learning", action="store_true", help="train, instead of measuring steps")
    parser.add_argument("--learning-steps", type=int, default=2000)
    parser.add_argument("--fresh", action="store_true", help="start over instead of going on")
    parser.add_argument("--output", type=Path, default=harness.OUTPUT, help="folder for the results")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2:
        raise harness.BenchmarkError("--ranks must be at least 2: one rank sends nothing")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments: Any = parse(argv)
    if arguments.learning:
        learning(arguments)
        return 0
    for model in arguments.models:
        measure(arguments, model)
    return 0


if __name__ == "__main__":
    harness.run_main(main)
