"""``docs/performance.md``, written from ``benchmarks/results``: ``python benchmarks/page.py``.

Each table is what the command above it has printed and stored last.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import bucket_report
import harness
import overhead
import simulate
import wire
from sweep import Point, Sweep

PAGE = harness.RESULTS.parents[1] / "docs" / "performance.md"
SWEEPS = {"mlp38": "MLP, 38 MB", "gpt2-small": "GPT-2, 6 layers"}

_HEAD = """# Performance

`python benchmarks/page.py` writes this page from `benchmarks/results`. Each table is the last stored result of the
command above it. The line below that command gives the machine. Variants took turns within one run. A cell is median
[quartiles]. The machine was shared, so compare figures within one run only. `overhead.py` and `bucket_size.py`
compare medians; `shm.py` and `wire.py` give the median of each round's ratio. [Benchmarks](../benchmarks/README.md)
describes the scripts.
"""

_STEPS = """
## A step

The model many-small has 400 small parameters, and mlp67 is an MLP of 67 MB. `benchmarks/models.py` describes all
models. Both classes have their default arguments, unless the variant's name says more. Ratios have a 95 % interval.

- "local" is the step without any wrapper.
- "raw" is the bare collectives of the step's buckets.
- "floor" is the local step, followed by these collectives. A reducer that costs nothing and overlaps nothing takes
  that long.

On one rank minddp is at the floor, or within two hundredths of it. The reducer runs no tensor operation per
parameter, and on one rank it copies nothing: the gradients are the averages. Torch's class copies them. With more
ranks minddp copies each gradient once into its bucket and once back. A gradient that is alone in its bucket is not
copied back. Two ranks on two cores compute and move data on the same processors, so larger models stay above the
floor there.

The second run also had `--output benchmarks/results/overhead-large.json`. The third run was in an environment with
torch 2.15. Its baseline is the fastest mode of torch 2.15's class: gradient views with batched copies. "lazy" adds
lazy buckets to it. Variants whose names end in `shm` use minddp's shared-memory process group. All others use Gloo.
"""

_MEMORY = """
## Memory

Bytes of gradients and buckets for each byte of parameters, on two ranks. By default minddp needs {ours} with
gradients and {ours_zeroed} without them. That is as much as torch's class needs, because `.grad` stays this rank's
own gradient until backward ends. With `gradient_as_bucket_view=True` minddp needs {views} and {views_zeroed}, and
torch's class needs {torchs} and {torchs_zeroed}. `minddp.release_buckets(ddp)` frees what is left.
"""

_BUCKETS = """
## Bucket sizes

Two ranks, joined by a 1 Gbit/s link. Each sweep has seven uniform caps. The first table compares the medians of the
sweeps below it. The command also writes a report (`.html`) with all of it.
"""

_WIRES = """
## Fewer bytes

The time of a step, by the type in which gradients travel ([arguments](arguments.md#fewer-bytes)). "MB sent" counts
the bytes that a rank's network interface has sent in a step. PowerSGD runs under minddp's class, since with torch's
class over Gloo its buckets wait for each other. The last two tables are losses: of a classifier of handwritten
digits in training, and of a small GPT on held-out text.
"""

_WIRE_POINTS = (wire.TORCH, wire.DEFAULT, *(Point(f"minddp-{dtype}", "default") for dtype in ("bf16", "int8")))
_LINKS = """
The same over other links, for two models and up to 4 ranks on 2 cores: the step, and its ratio to torch's default. On
one machine without a link (loopback) fewer bytes save nothing. `make lab ARGS="results wire"` measures all of them.
"""

_SIMULATOR = """
## The simulator

From one measured backward the simulator computes the step with other buckets. For the default and six sizes its
error is at most {worst} %, median {median} %. It also computes steps on other networks, and with up to 4,096 ranks
([plot](../benchmarks/results/simulate-mlp38-scaling.png)):
`python benchmarks/simulate.py --model mlp38 --link 1gbit --hop 5us,100gbit --speedup 40`.
"""

_PAPER = """
## The paper

`python benchmarks/paper.py --models mlp38,gpt2-small --rounds 3 --link 1gbit` tests the claims of the 2020 paper on
PyTorch's DDP, one by one ([plot](../benchmarks/results/paper.png)).
"""

_SHARED_MEMORY = """
## Shared memory beside Gloo

Two ranks on one machine. In shared memory an all-reduce of 32 MB is {shm} times as fast as over Gloo. It is {shared}
times as fast where the tensor itself lies in shared memory, as buckets do.
"""


_GPU = """
## On a GPU

One {gpu}, one rank through NCCL. There is no other rank, so these are the costs of the class itself: launches,
copies, the host's time. They say nothing about overlap between GPUs. "added" is the time of a step beyond the local
one, with variants that take turns; "ours" counts launches of minddp's kernel. "device" is the time between two
events around a step, "enqueue" the host's until it has enqueued it. There the variants ran one after the other, so
differences below a tenth say little.
"""


def read(name: str) -> dict[str, Any]:
    return dict(harness.read_json(harness.RESULTS / f"{name}.json"))


def ran(result: dict[str, Any]) -> str:
    machine = result["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}"
    command = result.get("command")
    return f"`{command}`\n({where})\n" if command else f"({where})\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def steps() -> str:
    parts = [_STEPS]
    for name in ("overhead", "overhead-large", "overhead-torch-2.15"):
        result = read(name)
        parts.append(f"\n{ran(result)}")
        for case in result["results"]:
            rows = [
                [variant, harness.Spread(**row["step"]).show(1e3), overhead.show_ratio(row.get("step_ratio"))]
                for variant, row in case["rows"].items()
            ]
            ranks = f"{case['world_size']} rank" + "s" * (case["world_size"] > 1)
            parts.append("\n" + table([f"{case['model']}, {ranks}", "ms", f"of {result['baseline']}"], rows))
    return "".join(parts)


def memory() -> str:
    result = read("memory")
    rows = [
        [variant, *(f"{row[key]:.2f}" if key in row else "" for key in ("steady", "zeroed", "released"))]
        for variant, row in result["bytes_per_parameter_byte"].items()
    ]
    heads = [result["model"], "with gradients", "after zero_grad()", "after release_buckets()"]
    values = {}
    for name, variant in (("ours", "minddp"), ("views", "minddp-views"), ("torchs", "torch-views")):
        case = result["bytes_per_parameter_byte"][variant]
        values |= {name: f"{case['steady']:.2f}", f"{name}_zeroed": f"{case['zeroed']:.2f}"}
    return f"{_MEMORY.format(**values)}\n{ran(result)}\n{table(heads, rows)}"


def comparisons(summary: bucket_report.Summary) -> dict[str, float]:
    """By what is compared, how much longer the one takes than the other, in percent."""
    times = {
        (variant, cap): summary.times[Point(variant, cap)].median
        for variant, cap in (("minddp", "auto"), ("minddp", "default"), ("minddp", 25.0), ("torch", "default"))
    }
    auto, default, torchs = times["minddp", "auto"], times["minddp", "default"], times["torch", "default"]
    best, torchs_best = summary.best("minddp"), summary.best("torch")
    predicted = bucket_report.predicted_seconds(summary, Point("minddp", "auto"))
    assert best is not None and torchs_best is not None and predicted is not None
    pairs = {
        '`"auto"` against the best uniform cap': (auto, best[1].median),
        '`"auto"` against torch\'s best uniform cap': (auto, torchs_best[1].median),
        '`"auto"` against 25 MiB': (auto, times["minddp", 25.0]),
        '`"auto"` against torch\'s default': (auto, torchs),
        "minddp's default against torch's default": (default, torchs),
        "the planner's prediction against the measured step": (predicted, auto),
    }
    return {title: 100 * (a / b - 1) for title, (a, b) in pairs.items()}


def bucket_sizes() -> str:
    summaries = {}
    for model in SWEEPS:
        name = f"buckets-{model}-gloo-2ranks-1gbit"
        path = harness.RESULTS / f"{name}.json"
        summaries[name] = bucket_report.summarize(Sweep(path, read(name)["settings"]))
    columns = [comparisons(summary) for summary in summaries.values()]
    compared = [[title, *(f"{column[title]:+.1f} %" for column in columns)] for title in columns[0]]
    parts = [_BUCKETS, "\n", table(["", *SWEEPS.values()], compared)]
    for name, summary in summaries.items():
        result = read(name)
        heads, rows = bucket_report.rows(summary)
        said = "".join(f"- {line}\n" for line in bucket_report.findings(summary))
        picture = f"../benchmarks/results/{name}.png"
        parts.append(
            f"\n### {bucket_report.title(summary)}\n\n{ran(result)}\n{table(heads, rows)}\n{said}\n"
            f"![Step time against bucket size]({picture})\n"
        )
    return "".join(parts)


def simulation() -> str:
    result = read("simulate-mlp38")
    sweep = simulate.Sweep(result)
    rows = [
        [name, sweep.measured(name).show(1e3, 1), f"{1e3 * sweep.predicted(name):.1f}", f"{sweep.error(name):+.1%}"]
        for name in sweep.steps
    ]
    errors = sorted(abs(sweep.error(name)) for name in sweep.steps)
    worst, median = f"{100 * errors[-1]:.1f}", f"{100 * statistics.median(errors):.1f}"
    said = _SIMULATOR.format(worst=worst, median=median)
    return f"{said}\n{ran(result)}\n{table(['buckets', 'measured ms', 'predicted ms', 'error'], rows)}"


def shared_memory() -> str:
    result = read("shm")
    (large,) = [case["rows"] for case in result["collectives"] if (case["bytes"], case["ranks"]) == (32 * 2**20, 2)]
    speedups = {name: f"{large[name]['speedup']['median']:.1f}" for name in ("shm", "shared")}
    parts = [f"{_SHARED_MEMORY.format(**speedups)}\n{ran(result)}"]
    cases = [(f"all-reduce of {case['bytes']:,} bytes", case, 1e6, "µs") for case in result["collectives"]]
    cases.append((f"a step of {result['steps']['model']}", result["steps"], 1e3, "ms"))
    for title, case, scale, unit in cases:
        rows = [
            [name, harness.Spread(**row["seconds"]).show(scale), harness.Spread(**row["speedup"]).show()]
            for name, row in case["rows"].items()
        ]
        parts.append("\n" + table([f"{title}, {case['ranks']} ranks", unit, "Gloo / this"], rows))
    return "".join(parts)


def wires() -> str:
    whole = read("wire-mlp38-gloo-2ranks-1gbit")
    found = wire.table(Sweep(harness.RESULTS / "wire-mlp38-gloo-2ranks-1gbit.json", whole["settings"]))
    rows = [
        [wire.name(point), step.show(1e3, 0), to_default.show(), f"{sent / 1e6:.1f}"]
        for point, (step, to_default, _, sent, _) in found.items()
    ]
    parts = [_WIRES, f"\n{ran(whole)}\n{table(['mlp38, 2 ranks, 1gbit', 'ms', 'of torch', 'MB sent'], rows)}"]
    parts.append("\n![Step time by what travels](../benchmarks/results/wire-mlp38-gloo-2ranks-1gbit.png)\n")
    parts.append(f"{_LINKS}\n{table(['', *(wire.name(point) for point in _WIRE_POINTS), 'MB sent'], links())}")
    learned = read("wire-learning")
    what = {"digits": "digits, training loss", "gpt": "a small GPT, held-out loss"}
    for task, by_wire in learned["losses"].items():
        rows = [
            [name, f"{statistics.mean(losses):.5f}", f"{min(losses):.5f}", f"{max(losses):.5f}"]
            for name, losses in by_wire.items()
        ]
        heads = [f"{what[task]}, {learned['steps']:,} steps, 5 seeds", "mean", "least", "largest"]
        parts.append(f"\n{ran(learned)}\n{table(heads, rows)}")
    return "".join(parts)


def links() -> list[list[str]]:
    """By model, ranks and link: milliseconds and the ratio to torch's default, and what the last has sent."""
    rows: list[tuple[tuple[bool, int, float], list[str]]] = []
    for path in harness.RESULTS.glob("wire-*ranks-*.json"):
        settings = read(path.stem)["settings"]
        found = wire.table(Sweep(path, settings))
        link = settings["link"] or "loopback"
        cells = [
            f"{found[point][0].median * 1e3:.0f} ms, {found[point][1].show()}" if point in found else ""
            for point in _WIRE_POINTS
        ]
        sent = f"{found[_WIRE_POINTS[-1]][3] / 1e6:.1f} of {found[wire.TORCH][3] / 1e6:.1f}"
        order = settings["model"] != "mlp38", settings["ranks"], -found[wire.TORCH][0].median
        rows.append((order, [f"{settings['model']}, {settings['ranks']} ranks, {link}", *cells, sent]))
    return [cells for _, cells in sorted(rows)]


def gpu() -> str:
    """What ``gpu_check.py C`` has printed."""
    result = read("gpu-check-c")
    parts = [_GPU.format(gpu=result["gpu"]), f"\n`{result['command']}`\n"]
    for name in ("many-small", "resnet50", "gpt2", "7B layers", "bandwidth", "blocks", "wire"):
        measured = result["parts"][name]["measured"]
        both = [*measured.get("beside", {}).get("table", []), *measured["table"]]
        parts.append("\n```\n" + "\n".join(dict.fromkeys(both)) + "\n```\n")
    return "".join(parts)


def page() -> str:
    """The page's text."""
    parts = [steps, memory, bucket_sizes, wires, simulation, lambda: _PAPER, shared_memory, gpu]
    return _HEAD + "".join(part() for part in parts)


def main() -> None:
    PAGE.write_text(page())
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
