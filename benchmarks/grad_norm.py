"""What does clipping cost, where nothing is clipped?

Two models (400 small parameters; a 67 MB MLP), two ranks. Steps without an optimizer, visited in rounds:

plain      no clipping
torch      ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)`` after backward
minddp     ``ddp.clip_grad_norm_(1e9)``

all with minddp's wrapper. Printed are medians with quartiles, of the call and of the whole step. A round's time is
that of its slowest rank.

    python benchmarks/grad_norm.py
    python benchmarks/grad_norm.py --link 1gbit
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import harness
from harness import Ranks, Spread, spread

MODELS = ("many-small", "mlp67")
WAYS = ("plain", "torch", "minddp")
_STEPS = 3  # in a visit, of which the first does not count


def measure(rank: int, world_size: int, model: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """By way: seconds of the call and of the step, a pair for each step."""
    import torch
    import torch.distributed as dist
    from models import workload

    import minddp

    work = workload(model, torch.device("cpu"), rank)
    ddp = minddp.DistributedDataParallel(work.module)
    clips = {
        "plain": lambda: None,
        "torch": lambda: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9),
        "minddp": lambda: ddp.clip_grad_norm_(1e9),
    }
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for order in [list(WAYS), *harness.rounds(WAYS, rounds)]:
        for way in order:
            for step in range(_STEPS):
                ddp.zero_grad(set_to_none=True)
                dist.barrier()
                begin = time.perf_counter()
                work.call(ddp).backward()
                called = time.perf_counter()
                clips[way]()
                end = time.perf_counter()
                if step:
                    samples[way].append((end - called, end - begin))
    first = _STEPS - 1
    return {way: rows[first:] for way, rows in samples.items()}


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--models", default=",".join(MODELS))
    arguments.add_argument("--link", help="bandwidth between ranks, such as 1gbit; needs root")
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--output", type=Path, default=harness.RESULTS / "grad-norm.json")
    given: argparse.Namespace = arguments.parse_args()
    found: dict[str, Any] = {}
    with Ranks(2, link=given.link) as ranks:
        for model in harness.names(given.models):
            parts = ranks.run(measure, model, given.rounds)
            found[model] = {
                what: {
                    way: spread(max(row[index] for row in rows) for rows in zip(*(part[way] for part in parts)))
                    for way in WAYS
                }
                for index, what in enumerate(("call", "step"))
            }
            show(model, **found[model])
    facts = {"command": harness.command(), "machine": harness.machine()}
    rows = {
        model: {what: {way: s.to_json() for way, s in ways.items()} for what, ways in by_what.items()}
        for model, by_what in found.items()
    }
    harness.write_json(given.output, {**facts, "seconds": rows})


def show(model: str, call: dict[str, Spread], step: dict[str, Spread]) -> None:
    """Prints a model's times."""
    print(f"{model:10} call   " + "   ".join(f"{way} {call[way].show(1e3)} ms" for way in WAYS[1:]))
    print(f"{model:10} call   minddp / torch = {call['minddp'].median / call['torch'].median:.3f}")
    print(f"{model:10} step   " + "   ".join(f"{way} {step[way].show(1e3)} ms" for way in WAYS))
    added = [1e3 * (step[way].median - step["plain"].median) for way in WAYS[1:]]
    print(f"{model:10} step   added: torch {added[0]:.2f} ms, minddp {added[1]:.2f} ms", flush=True)


if __name__ == "__main__":
    harness.run_main(main)
