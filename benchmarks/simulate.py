"""How would other bucket sizes, networks and numbers of ranks do? Measured here, simulated beyond.

    python benchmarks/simulate.py --model mlp38 --link 1gbit
    python benchmarks/simulate.py --from results/simulate-mlp38.json --hop 5us,100gbit --speedup 40

First a sweep of bucket sizes is measured on ranks of this machine (interleaved rounds), and the same
sweep is predicted from one backward profile (that of the default buckets) and one fitted allreduce cost:
the table shows both and the error, so that the simulator is trusted no further than it deserves. Then
step time and weak-scaling efficiency are simulated for 2 to 4,096 ranks on a ring, a double binary tree
and a hierarchy of nodes, for the default caps, the best uniform cap and planned buckets.

--hop LATENCY,RATE replaces the measured link by another; --speedup makes compute so many times faster
(a GPU in this CPU's place); --wire simulates gradients of fewer bytes; --sigma is the spread of stragglers
(log-normal, see topologies.py).
Writes simulate-MODEL.json (the measurement), and -sweep and -scaling figures as SVG and PNG.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import harness
from harness import BenchmarkError, Ranks, run_main
from links import parse_rate
from optimum import capped
from optimum.backward_profile import BackwardProfile, Burst, StepTimes, bursts, fit_bursts, simulate_step
from optimum.collective_cost import measure_allreduce
from topologies import Hierarchy, Ring, ScalingPoint, Stragglers, Topology, Tree, scaling, slowed

from minddp.planner import LinearCost, optimal_plan

MIB = 1 << 20
CAPS_MB = [0.25, 0.5, 1, 2, 3, 5, 8, 12, 18, 25, 50]
RANKS = [2**k for k in range(1, 13)]
WIRE_BYTES = {"bf16": 1 / 2, "fp16": 1 / 2, "int8": 260 / 1024}  # on the wire, for one of float32's
COLORS = {"default": "tab:red", "uniform": "tab:blue", "planned": "tab:green"}
Steps = dict[str, list[dict[str, Any]]]


# ---- measuring


def measure(rank: int, world_size: int, model: str, caps_mb: list[float], rounds: int, steps: int) -> Any:
    """Runs on a rank: ``steps`` steps of every choice of buckets in each of ``rounds`` rounds."""
    import torch
    from models import workload

    import minddp

    work = workload(model, torch.device("cpu"), rank)
    ddp = minddp.DistributedDataParallel(work.module)
    for _ in range(4):
        run_step(work, ddp)
    choices = bucket_choices(ddp, caps_mb)
    seen: dict[str, list[StepTimes]] = {name: [] for name in choices}
    for order in harness.rounds(list(choices), rounds):
        for name in order:
            ddp._minddp_averager.set_buckets(choices[name])
            for step in range(steps + 1):
                run_step(work, ddp)
                if step > 0:  # the first one allocates buffers
                    seen[name].append(StepTimes.from_last_step(ddp.reducer.last_step()))
    nbytes = [p.nbytes for p in ddp._minddp_wrapped.reduced]
    alone = measure_allreduce(max_nbytes=sum(nbytes))
    return nbytes, alone, choices, {name: [asdict(t) for t in times] for name, times in seen.items()}


def run_step(work: Any, ddp: Any) -> None:
    for parameter in work.parameters():
        parameter.grad = None
    work.call(ddp).backward()


def bucket_choices(ddp: Any, caps_mb: list[float]) -> dict[str, list[list[int]]]:
    """The default buckets, and uniform caps along the order that the reducer agreed on; no choice twice."""
    default = ddp.reducer.buckets()
    order = [index for bucket in default for index in bucket]
    nbytes = [ddp._minddp_wrapped.reduced[index].nbytes for index in order]
    kinds = [ddp._minddp_wrapped.reduced[index].dtype for index in order]
    choices = {"default": default}
    for cap in caps_mb:
        buckets = [[order[p] for p in bucket] for bucket in capped(nbytes, [int(cap * MIB)], kinds)]
        if buckets not in choices.values():
            choices[f"{cap:g} MiB"] = buckets
    return choices


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """The sweep on real ranks: what it ran on, and the slowest rank's times of every step."""
    with Ranks(options.ranks, "gloo", options.link) as ranks:
        results = ranks.run(
            measure, options.model, options.caps, options.rounds, options.steps, timeout=options.timeout
        )
    nbytes, alone, choices, _ = results[0]
    steps = {
        name: [
            asdict(StepTimes.slowest([StepTimes(**row) for row in rows]))
            for rows in zip(*(seen[name] for *_, seen in results), strict=True)
        ]
        for name in choices
    }
    facts = {"model": options.model, "ranks": options.ranks, "link": options.link or "loopback"}
    facts |= {"machine": harness.machine(), "nbytes": nbytes, "allreduce": alone}
    return {**facts, "buckets": choices, "steps": steps}


# ---- predicting


class Sweep:
    """A measured sweep, and what one profile and one cost make of it."""

    def __init__(self, data: dict[str, Any]):
        self.facts = data
        self.steps = {name: [StepTimes(**row) for row in rows] for name, rows in data["steps"].items()}
        self.cost = self._fit_cost()
        default = StepTimes.median(self.steps["default"])
        self.profile, self._order = BackwardProfile.from_times(default, data["nbytes"])
        self._position = {index: position for position, index in enumerate(self._order)}

    def _fit_cost(self) -> LinearCost:
        medians = (StepTimes.median(steps) for steps in self.steps.values())
        seen = [burst for times in medians for burst in bursts(times.collectives)]
        seen += [Burst(1, m, seconds) for m, seconds in zip(*self.facts["allreduce"], strict=True)]
        return fit_bursts(seen)

    def measured(self, name: str) -> harness.Spread:
        """The measured step seconds of a choice."""
        return harness.spread(times.step_seconds for times in self.steps[name])

    def predicted(self, name: str) -> float:
        """The simulated step seconds of a choice."""
        buckets = [[self._position[i] for i in bucket] for bucket in self.facts["buckets"][name]]
        return simulate_step(self.profile, buckets, self.cost).step_seconds

    def predicted_uniform(self, cap_mb: float) -> float:
        """The simulated step seconds of a uniform cap."""
        buckets = capped(self.profile.nbytes, [max(1, int(cap_mb * MIB))])
        return simulate_step(self.profile, buckets, self.cost).step_seconds

    def error(self, name: str) -> float:
        """(predicted - measured) / measured."""
        return self.predicted(name) / self.measured(name).median - 1

    def planned_seconds(self) -> float:
        """The simulated step with planned buckets."""
        plan = optimal_plan(self.profile.ready_seconds, self.profile.nbytes, self.cost)
        return simulate_step(self.profile, plan.buckets, self.cost).step_seconds


def print_validation(sweep: Sweep) -> None:
    facts = sweep.facts
    print(
        f"{facts['model']}, {facts['ranks']} ranks, {facts['link']}: a step without communication "
        f"{1e3 * sweep.profile.local_seconds:.1f} ms, an allreduce {1e3 * sweep.cost.latency_seconds:.3f} ms "
        f"+ {1e3 * MIB * sweep.cost.seconds_per_byte:.3f} ms/MiB\n"
    )
    print(f"{'buckets':<12}{'number':>7}  {'measured ms':<24}{'predicted ms':>12}{'error':>8}")
    for name in sweep.steps:
        count = len(facts["buckets"][name])
        measured, predicted = sweep.measured(name).show(1e3, 1), 1e3 * sweep.predicted(name)
        print(f"{name:<12}{count:>7}  {measured:<24}{predicted:>12.1f}{sweep.error(name):>8.1%}")
    errors = sorted(abs(sweep.error(name)) for name in sweep.steps)
    print(f"\nerror of the simulator: median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    print(f"planned buckets, predicted: {1e3 * sweep.planned_seconds():.1f} ms\n")


def faster(profile: BackwardProfile, speedup: float) -> BackwardProfile:
    """The profile with compute ``speedup`` times faster."""
    return replace(slowed(profile, 1 / speedup), tail_seconds=profile.tail_seconds / speedup)


def on_wire(profile: BackwardProfile, wire: str | None) -> BackwardProfile:
    """The profile with gradients of float32 that travel as ``wire`` says, ``None`` as they are."""
    if wire is None:
        return profile
    return replace(profile, nbytes=[round(nbytes * WIRE_BYTES[wire]) for nbytes in profile.nbytes])


def topologies(sweep: Sweep, options: argparse.Namespace) -> list[Topology]:
    """Ring, tree and hierarchy over the measured hop, or over the given one."""
    hop = options.hop or Ring.from_measured(sweep.cost, sweep.facts["ranks"]).hop
    return [Ring(hop), Tree(hop), Hierarchy(options.inner, hop, options.ranks_per_node)]


def parse_hop(text: str) -> LinearCost:
    """``"5us,100gbit"``: latency and rate of one hop."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)us,(.+)", text)
    if match is None:
        raise BenchmarkError(f"hop {text!r} is not understood: write latency and rate, such as 5us,100gbit")
    return LinearCost(float(match[1]) * 1e-6, 8 / parse_rate(match[2]))


def print_scaling(topology: Topology, points: list[ScalingPoint]) -> None:
    print(f"{topology.name}: efficiency (step ms)")
    print(f"{'ranks':>7}{'default':>18}{'best uniform':>26}{'planned':>26}")
    for point in points:
        best = point.uniform_seconds[point.best_cap]
        columns = [
            (point.default_seconds, ""),
            (best, f"{point.best_cap / MIB:g} MiB"),
            (point.planned_seconds, f"{point.planned_buckets} buckets"),
        ]
        shown = [f"{point.efficiency(s):.1%} ({1e3 * s:.1f}) {note}".strip() for s, note in columns]
        print(f"{point.ranks:>7}{shown[0]:>18}{shown[1]:>26}{shown[2]:>26}")
    print()


# ---- drawing


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise BenchmarkError("drawing needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=130, bbox_inches="tight", metadata={})
        print(f"wrote {path.with_suffix(suffix)}")


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Measured and predicted step time against bucket size, with the default, the plan and the floor."""
    figure, axes = pyplot().subplots(figsize=(7, 4.2))
    names = [name for name in sweep.steps if name != "default"]
    caps = [float(name.split()[0]) for name in names]
    measured = [sweep.measured(name) for name in names]
    medians = [1e3 * spread.median for spread in measured]
    bars = [[1e3 * (s.median - s.low) for s in measured], [1e3 * (s.high - s.median) for s in measured]]
    axes.errorbar(caps, medians, yerr=bars, fmt="o", color="black", capsize=3, label="measured (quartiles)")
    fine = [caps[0] * (caps[-1] / caps[0]) ** (k / 400) for k in range(401)]
    predicted = [1e3 * sweep.predicted_uniform(cap) for cap in fine]
    axes.plot(fine, predicted, color=COLORS["uniform"], label="simulated")
    default = sweep.measured("default")
    axes.axhline(1e3 * default.median, color=COLORS["default"], ls="--", label="default caps, measured")
    axes.axhline(1e3 * sweep.planned_seconds(), color=COLORS["planned"], ls="--", label="planned, simulated")
    axes.axhline(1e3 * sweep.profile.local_seconds, color="gray", ls=":", label="no communication")
    axes.set(xscale="log", xlabel="bucket size, MiB", ylabel="step, ms", ylim=(0, None))
    axes.set_xticks(caps, [f"{cap:g}" for cap in caps])
    axes.minorticks_off()
    axes.set_title("{model}, {ranks} ranks, {link}".format(**sweep.facts))
    axes.legend(fontsize=8)
    save_figure(figure, path)


def draw_scaling(title: str, results: list[tuple[Topology, list[ScalingPoint]]], nbytes: int, path: Path) -> None:
    """Above: efficiency against ranks, a column a topology. Below: step time against bucket size.

    ``nbytes``: of all gradients.
    """
    figure, rows = pyplot().subplots(2, len(results), figsize=(4.2 * len(results), 7.2), sharey="row")
    for column, (topology, points) in enumerate(results):
        draw_efficiency(rows[0][column], topology, points)
        draw_bucket_sizes(rows[1][column], points, nbytes)
    rows[0][0].set_ylabel("weak-scaling efficiency")
    rows[1][0].set_ylabel("simulated step, ms")
    rows[0][0].legend(fontsize=8)
    rows[1][len(results) // 2].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    save_figure(figure, path)


def draw_efficiency(axes: Any, topology: Topology, points: list[ScalingPoint]) -> None:
    choices = {
        "default": ("default caps", [p.default_seconds for p in points]),
        "uniform": ("best uniform cap", [p.uniform_seconds[p.best_cap] for p in points]),
        "planned": ("planned", [p.planned_seconds for p in points]),
    }
    for name, (label, seconds) in choices.items():
        efficiency = [p.efficiency(s) for p, s in zip(points, seconds, strict=True)]
        axes.plot([p.ranks for p in points], efficiency, marker=".", color=COLORS[name], label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="ranks", ylim=(0, 1.02), title=topology.name)


def draw_bucket_sizes(axes: Any, points: list[ScalingPoint], nbytes: int) -> None:
    """A line for uniform caps, and a triangle where the plan's mean bucket is."""
    shown = [p for p in points if p.ranks in (2, 16, 128, 1024, 4096)]
    for shade, point in enumerate(shown, 1):
        caps = [cap / MIB for cap in point.uniform_seconds]
        seconds = [1e3 * s for s in point.uniform_seconds.values()]
        alpha = shade / len(shown)
        axes.plot(caps, seconds, color=(0.1, 0.2, 0.9, alpha), label=f"{point.ranks} ranks, uniform")
        place = (nbytes / point.planned_buckets / MIB, 1e3 * point.planned_seconds)
        planned = "planned, at the mean of its buckets" if point is shown[-1] else None
        axes.plot(*place, marker="^", ls="", color=COLORS["planned"], alpha=alpha, label=planned)
    axes.set(xscale="log", yscale="log", xlabel="bucket size, MiB")


# ---- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="mlp38", help="see benchmarks/models.py")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to measure on")
    parser.add_argument("--link", help="rate of the link between them, such as 1gbit (needs root)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps per choice and round")
    parser.add_argument("--caps", type=lambda t: [float(x) for x in t.split(",")], default=CAPS_MB, help="MiB")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which measuring is given up")
    parser.add_argument("--from", dest="source", type=Path, help="a measurement to use again")
    parser.add_argument("--hop", help="latency and rate between ranks (or nodes), such as 5us,100gbit")
    parser.add_argument("--inner", default="3us,1600gbit", help="latency and rate inside a node")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--speedup", type=float, default=1.0, help="compute so many times faster")
    parser.add_argument("--wire", choices=WIRE_BYTES, help="what gradients travel as at other numbers of ranks")
    parser.add_argument("--sigma", type=float, default=0.02, help="spread of stragglers")
    parser.add_argument("--out", type=Path, default=harness.OUTPUT, help="folder of the results")
    parser.add_argument("--name", help="of the result files; simulate-MODEL")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.inner = parse_hop(options.inner)
    options.hop = parse_hop(options.hop) if options.hop else None
    if options.speedup <= 0:
        raise BenchmarkError(f"--speedup must be above 0, got {options.speedup}")
    pyplot()
    data = harness.read_json(options.source) if options.source else measure_all(options)
    name = options.name or f"simulate-{data['model']}"
    if options.source is None:
        harness.write_json(options.out / f"{name}.json", data)
    sweep = Sweep(data)
    print_validation(sweep)
    draw_sweep(sweep, options.out / f"{name}-sweep")
    profile = faster(on_wire(sweep.profile, options.wire), options.speedup)
    stragglers = Stragglers(options.sigma)
    caps = [int(cap * MIB) for cap in options.caps]
    results = [(t, scaling(profile, t, RANKS, caps, stragglers)) for t in topologies(sweep, options)]
    for topology, points in results:
        print_scaling(topology, points)
    hop = results[0][0].hop
    title = (
        f"{data['model']}, {options.wire or 'float32'} on the wire, compute x{options.speedup:g}, "
        f"a hop of {1e6 * hop.latency_seconds:.3g} us and {8e-9 / hop.seconds_per_byte:.3g} Gbit/s, "
        f"stragglers' sigma {options.sigma:g}"
    )
    draw_scaling(title, results, sum(profile.nbytes), options.out / f"{name}-scaling")
    return 0


if __name__ == "__main__":
    run_main(main)
