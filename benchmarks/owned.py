"""What does it bring that each parameter has one owner? `minddp.Owned` beside the plain optimizers and torch's
ZeroRedundancyOptimizer, in the same ranks, in turn.

    muon     Muon on the matrices and AdamW on the biases of the 38 MB MLP
    adamw    fused AdamW on all of it, and alone an all-gather of what the owners send

Each variant trains a model of its own. A step is zero_grad, forward, backward and the optimizer's step. Counted are
the slowest rank's wall time of a whole step, its processor time within the optimizer's step, and the bytes of state
that a rank keeps. ZeroRedundancyOptimizer takes one class for all parameters: its "muon" is Muon on the matrices, and
a plain AdamW on the biases.

    python benchmarks/owned.py                    # 2 ranks over loopback, and 4
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Ranks

CASES = ("muon", "adamw")
VARIANTS = ("plain", "owned", "zero")


@dataclass
class Training:
    """One model with its wrapper and optimizers."""

    name: str
    ddp: Any
    optimizers: list[Any]
    batch: Any
    in_step: float = 0.0  # processor time of the last optimizer step

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.ddp(self.batch).square().mean().backward()
        began = time.process_time()
        for optimizer in self.optimizers:
            optimizer.step()
        self.in_step = time.process_time() - began

    def state_bytes(self) -> int:
        import torch

        inner = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]
        values = [v for optimizer in inner for state in optimizer.state.values() for v in state.values()]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor) and v.numel() > 1)


def make(case: str, variant: str, rank: int) -> Training:
    import models
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    import minddp
    from minddp.owned import Owned

    torch.manual_seed(0)
    module = models.workload("mlp38", torch.device("cpu"), rank).module
    ddp = minddp.DistributedDataParallel(module)
    matrices = [p for p in module.parameters() if p.dim() == 2]
    rest = [p for p in module.parameters() if p.dim() != 2]
    entries: list[Any] = [(list(module.parameters()), torch.optim.AdamW, {"lr": 1e-4, "fused": True})]
    if case == "muon":
        entries = [(matrices, torch.optim.Muon, {"lr": 1e-4}), (rest, torch.optim.AdamW, {"lr": 1e-4})]
    if variant == "owned":
        optimizers: list[Any] = [Owned(ddp, entries)]
    elif variant == "zero":
        optimizers = [Zero(entries[0][0], entries[0][1], **entries[0][2])]
        optimizers += [kind(params, **settings) for params, kind, settings in entries[1:]]
    else:
        optimizers = [kind(params, **settings) for params, kind, settings in entries]
    batch = torch.randn(256, 1024, generator=torch.Generator().manual_seed(rank))
    return Training(variant, ddp, optimizers, batch)


def gather_alone(rank: int, world_size: int, nbytes: int) -> Callable[[], None]:
    """An all-gather of as many bytes as all parameters have, in the pieces in which the owners send them."""
    import torch
    import torch.distributed as dist

    from minddp.owned.layout import PIECE_BYTES

    share = -(-nbytes // world_size)
    count = max(1, share // PIECE_BYTES)
    mine = torch.ones(share // count, dtype=torch.uint8)
    everyone = torch.empty(share // count * world_size, dtype=torch.uint8)

    def run() -> None:
        for _ in range(count):
            dist.all_gather_into_tensor(everyone, mine)

    return run


def measure(rank: int, world_size: int, case: str, count: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by variant: ``wall`` of a step, ``processor`` within the optimizer's step; and ``state`` in bytes."""
    import torch
    import torch.distributed as dist

    trainings = {variant: make(case, variant, rank) for variant in VARIANTS}
    parameters = list(trainings["plain"].ddp.parameters())
    gather = gather_alone(rank, world_size, sum(p.numel() * p.element_size() for p in parameters))
    for training in trainings.values():
        for _ in range(2):
            training.step()
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "processor": []} for name in (*VARIANTS, "gather")}
    for order in harness.rounds((*VARIANTS, "gather"), count):
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            gather() if name == "gather" else trainings[name].step()
            found[name]["wall"].append(time.perf_counter() - began)
            found[name]["processor"].append(0.0 if name == "gather" else trainings[name].in_step)
    for name, training in trainings.items():
        found[name]["state"] = [float(training.state_bytes())]
    same = all(torch.equal(p, q) for p, q in zip(parameters, trainings["owned"].ddp.parameters()))
    found["owned"]["same"] = [float(same)]
    return found


def summary(everyone: list[dict[str, dict[str, list[float]]]], case: str, ranks: int) -> dict[str, Any]:
    """Of the slowest rank in each round; ratios are of the same round."""
    walls = {
        name: [max(times) for times in zip(*(theirs[name]["wall"] for theirs in everyone))] for name in everyone[0]
    }
    steps = {
        name: [max(times) for times in zip(*(theirs[name]["processor"] for theirs in everyone))] for name in VARIANTS
    }
    state = {name: max(theirs[name]["state"][0] for theirs in everyone) for name in VARIANTS}

    def over(times: dict[str, list[float]], name: str) -> dict[str, float]:
        return harness.spread(mine / plain for mine, plain in zip(times[name], times["plain"])).to_json()

    beyond = [(own - plain) / gather for own, plain, gather in zip(walls["owned"], walls["plain"], walls["gather"])]
    return {
        "case": case,
        "ranks": ranks,
        "same_bits": all(theirs["owned"]["same"][0] == 1.0 for theirs in everyone),
        "plain_ms": harness.spread(1e3 * wall for wall in walls["plain"]).to_json(),
        "gather_ms": harness.spread(1e3 * wall for wall in walls["gather"]).to_json(),
        "step_over_plain": {name: over(walls, name) for name in VARIANTS[1:]},
        "processor_over_plain": {name: over(steps, name) for name in VARIANTS[1:]},
        "beyond_plain_in_gathers": harness.spread(beyond).to_json(),
        "state_over_plain": {name: state[name] / state["plain"] for name in VARIANTS[1:]},
    }


def show(row: dict[str, Any]) -> str:
    def text(value: dict[str, float]) -> str:
        return f"{value['median']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"

    plain = f"plain step {row['plain_ms']['median']:.0f} ms, the same bits: {row['same_bits']}"
    lines = [f"{row['case']}, {row['ranks']} ranks: {plain}"]
    for name in VARIANTS[1:]:
        lines.append(
            f"  {name:6} step {text(row['step_over_plain'][name])} x, optimizer's processor time "
            f"{text(row['processor_over_plain'][name])} x, state {row['state_over_plain'][name]:.2f} x"
        )
    lines.append(
        f"  owned beyond plain: {text(row['beyond_plain_in_gathers'])} of an all-gather of the values "
        f"({row['gather_ms']['median']:.0f} ms)"
    )
    return "\n".join(lines)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--cases", type=harness.names, default=list(CASES), metavar="NAMES", help=", ".join(CASES))
    parser.add_argument("--ranks", type=harness.numbers, default=[2, 4], metavar="NUMBERS")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--link", help="a tc rate such as 1gbit; default: loopback")
    parser.add_argument("--output", type=Path, default=harness.OUTPUT / "owned.json")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        with Ranks(ranks, link=options.link) as pool:
            for case in options.cases:
                rows.append(summary(pool.run(measure, case, options.rounds), case, ranks))
                print(show(rows[-1]), flush=True)
    facts = {"command": harness.command(), "machine": harness.machine(), "link": options.link or "loopback"}
    harness.write_json(options.output, {**facts, "rows": rows})
    return 0


if __name__ == "__main__":
    harness.run_main(main)
