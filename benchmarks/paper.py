"""The questions of the paper on PyTorch's DDP, asked of minddp on this machine.

The paper: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", PVLDB
13(12), 2020. It measured on up to 256 GPUs; here are two ranks and a link of set bandwidth, so shapes are
compared, not numbers. One command measures, draws, and says claim by claim what holds here:

    python benchmarks/paper.py --link 1gbit              # needs root; without --link on loopback
    python benchmarks/paper.py --models mlp38 --rounds 1 --link 1gbit

Results: paper.json (verdicts), paper.svg, .png, .html, and a resumable file of measurements per model and
engine. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bucket_report
import harness
from bucket_report import Summary
from harness import BenchmarkError, Spread
from sweep import LOCAL, RAW, Point, Sweep

CAPS = (0.001, 1.0, 5.0, 10.0, 25.0, 50.0, 1000.0)  # MiB; the first gives each parameter its own bucket
SKIPS = (1, 2, 4, 8)
GROUPS = (1, 3, 5)
DDP = Point("minddp", "default")
EARLY, LATE = Point("minddp", 25.0), Point("late", 25.0)  # the same buckets: launched in backward, and after it
HOLDS, FAILS = "holds here", "does not hold here"
UNCLEAR, UNTESTED = "too close to tell", "cannot be tested here"


def skip(length: int) -> Point:
    return DDP if length == 1 else Point("minddp", "default", f"skip-{length}")


def groups(number: int) -> Point:
    return Point("minddp", 5.0, f"groups-{number}")


def points() -> list[Point]:
    """Everything that a round visits, for one model on one engine."""
    caps = [Point(variant, cap) for variant in ("minddp", RAW) for cap in CAPS]
    others = [LATE, *(skip(n) for n in SKIPS), *(groups(n) for n in GROUPS)]
    return [Point(LOCAL), *caps, *others]


# ---- skipping synchronization and learning


LEARNING_RATES = {8: 0.02, 256: 0.06}  # by batch per rank


def learn(rank: int, world_size: int, batch: int, skip_length: int, steps: int) -> dict[str, float]:
    """Trains a small classifier of handwritten digits, gradients synchronized every ``skip_length`` steps.

    Gradients add up between synchronizations, and the optimizer steps with each synchronization. Returns
    the final training loss (over the whole training set) and held-out accuracy.
    """
    import contextlib

    import torch

    import minddp

    inputs, labels = harness.digits()
    train = torch.arange(len(labels)) % 5 != 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    ddp = minddp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATES[batch])
    loss_of = torch.nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(1 + rank)
    shard = torch.nonzero(train).flatten()[rank::world_size]
    for step in range(1, steps + 1):
        picked = shard[torch.randint(len(shard), (batch,), generator=generator)]
        synchronizes = step % skip_length == 0
        with contextlib.nullcontext() if synchronizes else ddp.no_sync():
            loss_of(ddp(inputs[picked]), labels[picked]).backward()
        if synchronizes:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss = float(loss_of(model(inputs[train]), labels[train]))
        accuracy = float((model(inputs[~train]).argmax(1) == labels[~train]).float().mean())
    return {"loss": loss, "accuracy": accuracy}


def learning_curves(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """``learn`` for small and large batches and every skip length."""
    found = []
    with harness.Ranks(arguments.ranks, "gloo") as ranks:
        for batch in LEARNING_RATES:
            for length in SKIPS:
                result = ranks.run(learn, batch, length, arguments.learning_steps)[0]
                found.append({"batch": batch, "skip": length, **result})
    return found


# ---- claims


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper (its section), and what was seen here."""

    section: str
    claim: str
    verdict: str
    evidence: str


def compare(faster: Spread, slower: Spread) -> str:
    """HOLDS when ``faster`` lies below ``slower``, quartiles apart; FAILS when above; of 3 rounds or more."""
    if min(faster.count, slower.count) < 3:
        return UNCLEAR
    if faster.high < slower.low:
        return HOLDS
    return FAILS if faster.low > slower.high else UNCLEAR


def both(verdicts: Sequence[str]) -> str:
    """One verdict for a claim asked of several models: it holds if it holds for each."""
    if all(verdict == HOLDS for verdict in verdicts):
        return HOLDS
    return FAILS if FAILS in verdicts else UNCLEAR


def gain(fast: Spread, slow: Spread) -> str:
    return f"{1 - fast.median / slow.median:+.1%}"


def claim_overlap(cases: Sequence[Summary]) -> Verdict:
    seen = [(case, case.times[EARLY], case.times[LATE]) for case in cases]
    return Verdict(
        "5.1", "overlapping communication with backward shortens the step, for every model and engine",
        both([compare(on, off) for _, on, off in seen]),
        "; ".join(f"{label(case)}: {gain(on, off)}" for case, on, off in seen),
    )  # fmt: skip


def claim_small_collectives(cases: Sequence[Summary]) -> Verdict:
    seen = [(case, case.times[Point(RAW, CAPS[-1])], case.times[Point(RAW, CAPS[0])]) for case in cases]
    return Verdict(
        "2.3", "the same bytes take longer in one collective per parameter than in few large ones",
        both([compare(large, small) for _, large, small in seen]),
        "; ".join(f"{label(c)}: {ms(small)} ms in small ones, {ms(large)} in one" for c, large, small in seen),
    )  # fmt: skip


def claim_best_between(cases: Sequence[Summary]) -> Verdict:
    """Too small costs latency, too large costs overlap."""
    verdicts, evidence = [], []
    for case in cases:
        curve = case.curve("minddp")
        cap, best = min(curve, key=lambda pair: pair[1].median)
        ends = (curve[0][1], curve[-1][1])
        verdicts.append(both([compare(best, end) for end in ends]))
        evidence.append(
            f"{label(case)}: best {cap:g} MiB, {ms(best)} ms; one bucket a parameter {ms(ends[0])}, "
            f"one for all {ms(ends[1])}"
        )
    return Verdict("5.2", "the best bucket size lies between one bucket a parameter and one for all",
                   both(verdicts), "; ".join(evidence))  # fmt: skip


def claim_best_depends(cases: Sequence[Summary]) -> Verdict:
    claim = "the best bucket size differs between models and engines, so that it must be tuned"
    best = {label(case): min(case.curve("minddp"), key=lambda pair: pair[1].median)[0] for case in cases}
    evidence = "; ".join(f"{name}: {cap:g} MiB" for name, cap in best.items())
    if len(best) < 2:
        return Verdict("5.2", claim, UNTESTED, f"needs two models or engines; {evidence}")
    return Verdict("5.2", claim, HOLDS if len(set(best.values())) > 1 else FAILS, evidence)


def claim_skip(cases: Sequence[Summary]) -> Verdict:
    seen = [(case, [case.times[skip(n)] for n in SKIPS]) for case in cases]
    return Verdict(
        "5.4", "synchronizing every 8th step only shortens the average iteration",
        both([compare(row[-1], row[0]) for _, row in seen]),
        "; ".join(
            f"{label(case)}: " + ", ".join(f"{ms(t)} ms" for t in row) + f" for every {SKIPS} steps"
            for case, row in seen
        ),
    )  # fmt: skip


def claim_groups(cases: Sequence[Summary]) -> Verdict:
    seen = [(case, [case.times[groups(n)] for n in GROUPS]) for case in cases]
    return Verdict(
        "5.5", "several process groups in turn shorten the step where one cannot fill the link",
        both([compare(min(row[1:], key=lambda t: t.median), row[0]) for _, row in seen]),
        "; ".join(
            f"{label(case)}: " + ", ".join(f"{n}: {ms(t)} ms" for n, t in zip(GROUPS, row, strict=True))
            for case, row in seen
        ),
    )  # fmt: skip


def claims_learning(curves: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Small batches bear skipping, large ones less: judged by the loss after the same number of steps."""

    def row(batch: int) -> list[dict[str, Any]]:
        return [curve for curve in curves if curve["batch"] == batch]

    def text(batch: int) -> str:
        return ", ".join(f"every {c['skip']}: loss {c['loss']:.3f}, {c['accuracy']:.1%}" for c in row(batch))

    def worsens(batch: int) -> bool:
        accuracies = [c["accuracy"] for c in row(batch)]
        return min(accuracies) < accuracies[0] - 0.02

    return [
        Verdict("5.4", "with a small batch, synchronizing every 8th step costs no more than 2 points of accuracy",
                FAILS if worsens(8) else HOLDS, f"batch 8: {text(8)}"),
        Verdict("5.4", "with a large batch and an untouched learning rate, skipping hurts",
                HOLDS if worsens(256) else FAILS, f"batch 256: {text(256)}"),
    ]  # fmt: skip


def claims_untested(arguments: argparse.Namespace) -> list[Verdict]:
    found = [
        Verdict("5.3", "near-linear scaling to 256 GPUs; a step gets slower as ranks are added", UNTESTED,
                f"{arguments.ranks} ranks here; benchmarks/simulate.py draws 2 to 4,096"),
        Verdict("5.3", "a shared cluster's step times spread more with more machines", UNTESTED, "one machine"),
    ]  # fmt: skip
    if "nccl" not in arguments.engines:
        text = "NCCL saturates at far larger messages than Gloo and is several times faster"
        found.append(Verdict("2.3", text, UNTESTED, "no GPU per rank here"))
    return found


MEASURED_CLAIMS: tuple[Callable[[Sequence[Summary]], Verdict], ...] = (
    claim_small_collectives, claim_overlap, claim_best_between, claim_best_depends, claim_skip, claim_groups,
)  # fmt: skip


def judge(cases: Sequence[Summary], curves: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[Verdict]:
    """Every claim, in the paper's order."""
    found = [claim(cases) for claim in MEASURED_CLAIMS] + claims_learning(curves) + claims_untested(arguments)
    return sorted(found, key=lambda verdict: verdict.section)


def label(case: Summary) -> str:
    return f"{case.sweep.settings['model']}/{case.sweep.settings['engine']}"


def ms(time: Spread) -> str:
    return f"{time.median * 1e3:.0f}"


# ---- report


def print_figures(cases: Sequence[Summary]) -> None:
    """One table: a row per measured point, a column per model and engine."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=r"step, ms: median \[quartiles]; skipped: per iteration", title_justify="left")
    table.add_column("")
    for case in cases:
        table.add_column(label(case), justify="right", no_wrap=True)
    for point in points():
        table.add_row(name(point), *(case.times[point].show(1e3, 0) for case in cases))
    Console(width=130).print(table)


def name(point: Point) -> str:
    """A point in the reader's words."""
    if point.option:
        kind, number = point.option.split("-")
        return f"1 step of {number} synchronized" if kind == "skip" else f"{number} groups in turn, 5 MiB"
    cap = {CAPS[0]: "one per parameter", CAPS[-1]: "one for all"}.get(point.cap_mb, f"{point.cap_mb} MiB")
    words = {LOCAL: "no communication", "late": "no overlap, 25 MiB buckets", RAW: f"collectives alone, {cap}"}
    return words.get(point.variant, "default arguments" if point.cap_mb == "default" else f"buckets: {cap}")


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        print(f"[{verdict.verdict}] section {verdict.section}: {verdict.claim}\n    {verdict.evidence}")


def draw(cases: Sequence[Summary], curves: Sequence[dict[str, Any]], paths: Sequence[Path]) -> str:
    """The figures, one panel a question; returns SVG text."""
    figure, panels = bucket_report.pyplot().subplots(2, 3, figsize=(14, 7.6), layout="constrained")
    _bars(panels[0, 0], cases, [("no overlap", LATE), ("overlap", EARLY)], "Overlap (5.1)")
    _draw_caps(panels[0, 1], cases, "minddp", "Bucket size (5.2)")
    _draw_caps(panels[0, 2], cases, RAW, "Collectives alone (2.3)")
    _bars(panels[1, 0], cases, [(f"every {n}", skip(n)) for n in SKIPS], "Skipped synchronization (5.4)")
    _bars(panels[1, 1], cases, [(f"{n} group(s)", groups(n)) for n in GROUPS], "Groups in turn (5.5)")
    _draw_learning(panels[1, 2], curves)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        if panel is not panels[1, 2]:
            panel.set_ylim(bottom=0)
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return bucket_report.save(figure, paths)


PALETTE = ("#1b6ca8", "#d1495b", "#2a9d8f", "#edae49")


def _bars(axes: Any, cases: Sequence[Summary], bars: Sequence[tuple[str, Point]], title: str) -> None:
    width = 0.8 / len(cases)
    for number, case in enumerate(cases):
        times = [case.times[point] for _, point in bars]
        medians = [t.median * 1e3 for t in times]
        reach = [[(t.median - t.low) * 1e3 for t in times], [(t.high - t.median) * 1e3 for t in times]]
        places = [i + (number + 0.5) * width - 0.4 for i in range(len(bars))]
        style = {"color": PALETTE[number % 4], "ecolor": "#555b66", "label": label(case)}
        axes.bar(places, medians, width * 0.92, yerr=reach, **style)
        axes.bar_label(axes.containers[-1], fmt="%.0f", fontsize=7, padding=2)
    axes.set_xticks(range(len(bars)), [text for text, _ in bars])
    axes.set_ylabel("ms per iteration")
    axes.set_title(title, loc="left", fontsize=10)


def _draw_caps(axes: Any, cases: Sequence[Summary], variant: str, title: str) -> None:
    for number, case in enumerate(cases):
        times = [time for _, time in case.curve(variant)]
        color, at = PALETTE[number % 4], range(len(times))
        low, high = [t.low * 1e3 for t in times], [t.high * 1e3 for t in times]
        axes.plot(at, [t.median * 1e3 for t in times], marker="o", color=color, label=label(case))
        axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xticks(range(len(CAPS)), ["per\nparam.", *(f"{cap:g}" for cap in CAPS[1:-1]), "all"])
    axes.set_xlabel("bucket, MiB")
    axes.set_ylabel("ms")
    axes.set_title(title, loc="left", fontsize=10)


def _draw_learning(axes: Any, curves: Sequence[dict[str, Any]]) -> None:
    for batch, marker in zip(LEARNING_RATES, "os", strict=True):
        row = [curve for curve in curves if curve["batch"] == batch]
        at, style = range(len(row)), {"marker": marker, "color": "#555b66"}
        axes.plot(at, [c["accuracy"] * 100 for c in row], label=f"batch {batch}", **style)
        axes.set_xticks(at, [f"every {c['skip']}" for c in row])
    axes.set_ylabel("held-out accuracy, %")
    axes.set_title("Skipping and learning (5.4), digits", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="best")


def as_html(verdicts: Sequence[Verdict], picture: str, command: str) -> str:
    heads = ["section", "claim", "verdict", "what was seen"]
    cells = [[v.section, v.claim, v.verdict, v.evidence] for v in verdicts]
    title = "The VLDB 2020 paper's questions, asked here"
    body = [
        f"<h1>{title}</h1>", picture, bucket_report.html_table(heads, cells),
        f"<p><code>{html.escape(command)}</code></p>",
    ]  # fmt: skip
    return bucket_report.html_page(title, body)


# ---- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=["resnet50", "bert-small"])
    parser.add_argument("--engines", type=harness.names, default=["gloo"], help="of gloo, shm, nccl")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", help="bandwidth between ranks, such as 1gbit; needs root")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a visit")
    parser.add_argument("--learning-steps", type=int, default=2000)
    parser.add_argument("--fresh", action="store_true", help="start over instead of going on")
    parser.add_argument("--output", type=Path, default=harness.OUTPUT, help="folder for the results")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2:
        raise BenchmarkError("--ranks must be at least 2: every question is about communication")
    return arguments


def measure(arguments: argparse.Namespace, model: str, engine: str) -> Summary:
    """Runs (or continues) one model's sweep on one engine."""
    link = arguments.link if engine != "shm" else None  # shared memory has no link
    settings = {"model": model, "engine": engine, "link": link}
    settings |= {name: getattr(arguments, name) for name in ("ranks", "threads", "steps")}
    path = arguments.output / f"paper-{model}-{engine}{f'-{link}' if link else ''}.json"
    sweep = Sweep(path, settings, arguments.fresh)
    sweep.run(points(), arguments.rounds)
    return bucket_report.summarize(sweep)


def main(argv: list[str] | None = None) -> int:
    """The command. An interrupt leaves the measurements; the same command goes on."""
    arguments = parse(argv)
    command = harness.command()
    cases = [measure(arguments, model, engine) for engine in arguments.engines for model in arguments.models]
    curves = learning_curves(arguments)
    verdicts = judge(cases, curves, arguments)
    print_figures(cases)
    print_verdicts(verdicts)
    output = arguments.output
    picture = draw(cases, curves, [output / "paper.svg", output / "paper.png"])
    harness.write_text(output / "paper.html", as_html(verdicts, picture, command))
    facts = {"command": command, "machine": harness.machine(), "learning": curves}
    harness.write_json(output / "paper.json", {**facts, "verdicts": [asdict(verdict) for verdict in verdicts]})
    print(f"written: {output / 'paper'}.{{json,svg,png,html}}")
    return 0


if __name__ == "__main__":
    harness.run_main(main)
