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
from sweep import Sweep

PAGE = harness.RESULTS.parents[1] / "docs" / "performance.md"
SWEEPS = ("mlp38", "gpt2-small")

_HEAD = """# Performance

Written by `python benchmarks/page.py` from `benchmarks/results`: each table is what the command above it has stored
last, with the machine that it ran on. Variants took turns within one run; a cell is median [quartiles]. On a shared
machine only ratios within one run mean something. What the scripts do: [benchmarks](../benchmarks/README.md).
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
    parts = [
        "\n## A step\n\n"
        '"local" is the step without any wrapper, "raw" the bare collectives of its buckets, "floor" a local step,\n'
        "then these: what a reducer would take that costs nothing and hides nothing. Ratios have a 95 % interval.\n"
    ]
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
    return (
        "\n## Memory\n\nBytes of gradients and buckets for each byte of parameters, on two ranks.\n\n"
        f"{ran(result)}\n{table(heads, rows)}"
    )


def bucket_sizes() -> str:
    parts = ["\n## Bucket sizes\n"]
    for model in SWEEPS:
        name = f"buckets-{model}-gloo-2ranks-1gbit"
        result = read(name)
        summary = bucket_report.summarize(Sweep(harness.RESULTS / f"{name}.json", result["settings"]))
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
    return (
        "\n## The simulator\n\nFrom one measured backward it predicts the step for other buckets.\n\n"
        f"{ran(result)}\n{table(['buckets', 'measured ms', 'predicted ms', 'error'], rows)}\n"
        f"The error: median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}.\n"
    )


def shared_memory() -> str:
    result = read("shm")
    parts = [f"\n## Shared memory beside Gloo\n\n{ran(result)}"]
    cases = [(f"all-reduce of {case['bytes']:,} bytes", case, 1e6, "µs") for case in result["collectives"]]
    cases.append((f"a step of {result['steps']['model']}", result["steps"], 1e3, "ms"))
    for title, case, scale, unit in cases:
        rows = [
            [name, harness.Spread(**row["seconds"]).show(scale), harness.Spread(**row["speedup"]).show()]
            for name, row in case["rows"].items()
        ]
        parts.append("\n" + table([f"{title}, {case['ranks']} ranks", unit, "Gloo / this"], rows))
    return "".join(parts)


def page() -> str:
    """The page's text."""
    return _HEAD + steps() + memory() + bucket_sizes() + simulation() + shared_memory()


def main() -> None:
    PAGE.write_text(page())
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
