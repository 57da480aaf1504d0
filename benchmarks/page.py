"""``docs/performance.md``, with its plots, and ``docs/measurements.md``: ``python benchmarks/page.py``.

Both are made from ``benchmarks/results``. Each table is what the command above it has printed and stored last.
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

DOCS = harness.RESULTS.parents[1] / "docs"
SWEEPS = {"mlp38": "MLP, 38 MB", "gpt2-small": "GPT-2, 6 layers"}

_FRONT = """# Performance

Three plots, from runs that are stored in `benchmarks/results`; `python benchmarks/page.py` draws them. [All
measurements](measurements.md) has the tables, with machines and commands. The machines have two shared cores and no
GPU, so compare figures within one plot only.

## What does the class itself cost?

![Time of a step, as a part of torch's](../benchmarks/results/performance-steps.png)

*`python benchmarks/overhead.py`. A dot is the median of a step's time with minddp, divided by that with torch's
class; the bar is its 95 % interval. The circle is the floor: the model's own step, followed by the bare collectives.
On one rank minddp copies nothing, and is at the floor. On two ranks that share two cores it copies each gradient
once into its bucket and once back.*

## Which bucket size?

![Step time against bucket size](../benchmarks/results/performance-buckets.png)

*`python benchmarks/bucket_size.py`, two ranks, 1 Gbit/s: medians of three rounds, with their quartiles. On this link
small buckets are best: a large last bucket leaves when no backward is left to hide it. Where a bar is long, others
used the machine. The dashed line is `bucket_cap_mb="auto"`: {autos} beside the best of the sizes, found without this
sweep.*

## When do fewer bytes pay?

![Step time by link and wire](../benchmarks/results/performance-wires.png)

*`python benchmarks/wire.py`, two ranks. The step's time, divided by that with torch's default arguments: over a slow
link it falls with the bytes, over loopback there is nothing to gain. (The MLP in float32 was not measured at 100
Mbit/s.) What `wire="int8"` costs in loss is in [the tables](measurements.md#fewer-bytes): nothing that five seeds
could show.*

## The rest, in a sentence each

- **Memory.** With `gradient_as_bucket_view=True` gradients and buckets need {views} bytes for each byte of
  parameters, and {views_zeroed} after `zero_grad()`; torch's class needs {torchs} and {torchs_zeroed}. By default
  both need {ours} ([table](measurements.md#memory)).
- **Shared memory.** Between ranks on one machine an all-reduce of 32 MB is {shm} times as fast as over Gloo
  ([table](measurements.md#shared-memory-beside-gloo)).
- **One GPU.** Beside a step of 400 small parameters torch's class makes 800 more launches, minddp 2
  ([tables](measurements.md#on-a-gpu)). Several ranks over NCCL [have not run yet](gpus.md).
"""

_HEAD = """# All measurements

`python benchmarks/page.py` writes this page from `benchmarks/results`; [Performance](performance.md) has what
follows from it. Each table is the last stored result of the command above it. The line below that command gives the
machine. Variants took turns within one run. A cell is median [quartiles]. The machine was shared, so compare figures
within one run only. `overhead.py` and `bucket_size.py` compare medians; `shm.py` and `wire.py` give the median of
each round's ratio. [Benchmarks](../benchmarks/README.md) describes the scripts.
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

Two ranks on one machine. In shared memory an all-reduce of 32 MB is {shm} times as fast as over Gloo.
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


def memory_values() -> dict[str, str]:
    values = {}
    for name, variant in (("ours", "minddp"), ("views", "minddp-views"), ("torchs", "torch-views")):
        case = read("memory")["bytes_per_parameter_byte"][variant]
        values |= {name: f"{case['steady']:.2f}", f"{name}_zeroed": f"{case['zeroed']:.2f}"}
    return values


def memory() -> str:
    result = read("memory")
    rows = [
        [variant, *(f"{row[key]:.2f}" if key in row else "" for key in ("steady", "zeroed", "released"))]
        for variant, row in result["bytes_per_parameter_byte"].items()
    ]
    heads = [result["model"], "with gradients", "after zero_grad()", "after release_buckets()"]
    return f"{_MEMORY.format(**memory_values())}\n{ran(result)}\n{table(heads, rows)}"


def comparisons(summary: bucket_report.Summary) -> dict[str, float]:
    """By what is compared, how much longer the one takes than the other, in percent."""
    times = {
        (variant, cap): summary.times[Point(variant, cap)].median
        for variant, cap in (("minddp", "auto"), ("minddp", "default"), ("minddp", 25.0), ("torch", "default"))
    }
    auto, default, torchs = times["minddp", "auto"], times["minddp", "default"], times["torch", "default"]
    best, torchs_best = summary.best("minddp"), summary.best("torch")
    computed = [point for point in (bucket_report.OPTIMUM, Point("minddp", "auto")) if point in summary.times]
    predicted = bucket_report.predicted_seconds(summary, computed[0])
    assert best is not None and torchs_best is not None and predicted is not None
    pairs = {
        '`"auto"` against the best uniform cap': (auto, best[1].median),
        '`"auto"` against torch\'s best uniform cap': (auto, torchs_best[1].median),
        '`"auto"` against 25 MiB': (auto, times["minddp", 25.0]),
        '`"auto"` against torch\'s default': (auto, torchs),
        "minddp's default against torch's default": (default, torchs),
        "the planner's prediction against the measured step": (predicted, summary.times[computed[0]].median),
    }
    return {title: 100 * (a / b - 1) for title, (a, b) in pairs.items()}


def bucket_summaries() -> dict[str, bucket_report.Summary]:
    names = [f"buckets-{model}-gloo-2ranks-1gbit" for model in SWEEPS]
    paths = [harness.RESULTS / f"{name}.json" for name in names]
    return {n: bucket_report.summarize(Sweep(path, read(n)["settings"])) for n, path in zip(names, paths)}


def bucket_sizes() -> str:
    summaries = bucket_summaries()
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


def speedups() -> dict[str, str]:
    """Of an all-reduce of 32 MB through shared memory."""
    cases = read("shm")["collectives"]
    (large,) = [case["rows"] for case in cases if (case["bytes"], case["ranks"]) == (32 * 2**20, 2)]
    return {"shm": f"{large['shm']['speedup']['median']:.1f}"}


def shared_memory() -> str:
    result = read("shm")
    parts = [f"{_SHARED_MEMORY.format(**speedups())}\n{ran(result)}"]
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


def measurements() -> str:
    """The text of the page with all tables."""
    parts = [steps, memory, bucket_sizes, wires, simulation, lambda: _PAPER, shared_memory, gpu]
    return _HEAD + "".join(part() for part in parts)


# --- the page of plots


def front() -> str:
    best = '`"auto"` against the best uniform cap'
    autos = [f"{comparisons(summary)[best]:+.1f} %" for summary in bucket_summaries().values()]
    return _FRONT.format(autos=" and ".join(autos), **memory_values(), **speedups())


_BLUE, _ORANGE, _GREEN, _GREY = "#3d84d6", "#d98a3d", "#3f9d5c", "#8a8f98"


def draw_steps(axes: Any) -> None:
    """A row for each model and number of ranks: minddp's time as a part of torch's, with the floor."""
    cases = [case for name in ("overhead", "overhead-large") for case in read(name)["results"]]
    cases.sort(key=lambda case: case["world_size"])
    for row, case in enumerate(cases):
        low, median, high = case["rows"]["minddp"]["step_ratio"]
        axes.errorbar(median, row, xerr=[[median - low], [high - median]], fmt="o", color=_BLUE, capsize=3)
        axes.plot(case["rows"]["floor"]["step_ratio"][1], row, "o", mfc="none", color=_GREY, markersize=11)
    axes.axvline(1.0, color=_ORANGE)
    axes.text(1.005, -0.4, "torch's class", color=_ORANGE, va="center")
    ranks = [f"{case['model']}, {case['world_size']} rank{'s' * (case['world_size'] > 1)}" for case in cases]
    axes.set(yticks=range(len(cases)), yticklabels=ranks, xlim=(0.7, 1.08), xlabel="time of a step / torch's")
    axes.invert_yaxis()
    parts = [case["rows"]["minddp"]["step_ratio"][1] for case in cases]
    text = f"A step with minddp takes {min(parts):.2f} to {max(parts):.2f} of the time with torch's class"
    axes.set_title(text, loc="left")


def draw_buckets(panels: Sequence[Any]) -> None:
    """A panel for each model: step time against the uniform cap."""
    changes = []
    for axes, summary, title in zip(panels, bucket_summaries().values(), SWEEPS.values()):
        for variant, colour in (("torch", _ORANGE), ("minddp", _BLUE)):
            caps, found = zip(*summary.curve(variant))
            middle = [1e3 * spread.median for spread in found]
            around = [[1e3 * abs(getattr(s, end) - s.median) for s in found] for end in ("low", "high")]
            axes.errorbar(caps, middle, yerr=around, fmt="o-", color=colour, capsize=2, label=variant)
        auto = 1e3 * summary.times[Point("minddp", "auto")].median
        axes.axhline(auto, color=_BLUE, linestyle="--", label='minddp, "auto"')
        ours, torchs = (1e3 * summary.times[Point(variant, "default")].median for variant in ("minddp", "torch"))
        changes.append(f"{100 * (1 - ours / torchs):.0f} %")
        axes.set(title=title, xscale="log", xlabel="bucket_cap_mb, MiB", ylabel="ms a step")
        axes.set_xticks(caps, [f"{cap:g}" for cap in caps])
        axes.legend(frameon=False)
    panels[0].figure.suptitle(f"Over 1 Gbit/s minddp's default takes {' and '.join(changes)} less time than torch's")


def draw_wires(panels: Sequence[Any]) -> None:
    """A panel for each model: bars by link, a colour for each wire."""
    links = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "loopback": "loopback"}
    kinds = [("float32", "minddp", _GREY), ("bf16", "minddp-bf16", _ORANGE), ("int8", "minddp-int8", _GREEN)]
    for axes, (model, title) in zip(panels, SWEEPS.items()):
        for place, link in enumerate(links):
            path = harness.RESULTS / f"wire-{model}-gloo-2ranks-{link}.json"
            found = wire.table(Sweep(path, read(path.stem)["settings"]))
            for number, (name, variant, colour) in enumerate(kinds):
                if (point := Point(variant, "default")) not in found:
                    continue
                ratio = found[point][1]
                ends = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
                label = name if place == 1 else None
                axes.bar(place + 0.27 * (number - 1), ratio.median, 0.25, yerr=ends, color=colour, label=label)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=title, xticks=range(len(links)), xticklabels=links.values(), ylabel="time of a step / torch's")
        axes.set_ylim(0, 1.35)
        axes.legend(frameon=False, title="minddp, by wire", loc="upper center", ncols=3)
    named = "wire-mlp38-gloo-2ranks-1gbit"
    found = wire.table(Sweep(harness.RESULTS / f"{named}.json", read(named)["settings"]))
    part = found[Point("minddp-int8", "default")][1].median
    panels[0].figure.suptitle(f"Over 1 Gbit/s int8 brings a step of the MLP to {part:.2f} of torch's time")


def plot() -> None:
    plt = bucket_report.pyplot()
    for name, draw, panels, height in (
        ("steps", draw_steps, 1, 3.4),
        ("buckets", draw_buckets, 2, 4.2),
        ("wires", draw_wires, 2, 4.2),
    ):
        figure, axes = plt.subplots(1, panels, figsize=(9.5, height), layout="constrained")
        draw(axes)
        for each in [axes] if panels == 1 else axes:
            each.spines[["top", "right"]].set_visible(False)
        figure.savefig(harness.RESULTS / f"performance-{name}.png", dpi=110, metadata={"Software": None})
        plt.close(figure)


def main() -> None:
    plot()
    for name, text in (("performance", front()), ("measurements", measurements())):
        (DOCS / f"{name}.md").write_text(text)
        print(f"written: {DOCS / name}.md")


if __name__ == "__main__":
    main()
