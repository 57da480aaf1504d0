"""How often is the late rank named? Delays in each phase of each rank, and runs without any.

    python benchmarks/straggler.py                       # 5 runs of each case, and as many without a delay
    python benchmarks/straggler.py --runs 1              # half a minute

Three ranks train a network whose forward and backward sleep, so that two processors are enough. In each run one rank
sleeps longer, by 10 % of the step, in its input, forward, backward or communication hook. ``minddp.report`` is right
if it names that rank and that phase. Without a delay it is right if it names nobody.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import harness
from harness import Ranks

WORLD_SIZE = 3
PHASES = ("input", "forward", "backward", "hook")
SLEEPS = {"input": 0.004, "forward": 0.012, "backward": 0.018, "hook": 0.002}  # seconds; a step has some more
STEP = 0.044
STEPS = 26
LAYERS = 6

Case = tuple[int, str] | None  # rank and phase; None: no delay


def _network(sleeps: dict[str, float]) -> Any:
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(sleeps["backward"] / LAYERS)
            return gradient

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(LAYERS))

        def forward(self, x: Any) -> Any:
            time.sleep(sleeps["forward"])
            for layer in self.layers:
                x = Sleep.apply(torch.relu(layer(x)))
            return x

    return Network()


def _train(rank: int, world_size: int, case: Case, delay: float) -> dict[str, Any]:
    """One run, and its report as a dictionary."""
    import torch
    import torch.distributed as dist

    import minddp

    sleeps = dict(SLEEPS)
    if case is not None and case[0] == rank:
        sleeps[case[1]] += delay
    ddp = minddp.DistributedDataParallel(_network(sleeps), bucket_cap_mb=0.15)
    buckets = LAYERS / 2

    def hook(state, bucket):  # of its types only torch's own are allowed
        time.sleep(sleeps["hook"] / buckets)
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for _ in range(STEPS):
        time.sleep(sleeps["input"])
        optimizer.zero_grad()
        ddp(torch.ones(2, 128)).sum().backward()
        optimizer.step()
    return dict(minddp.report(ddp).to_dict())


def _outcome(report: dict[str, Any]) -> dict[str, Any]:
    late = report["straggler"]
    return {
        "late": late and [late["rank"], late["phase"]],
        "seconds": late and round(late["seconds"], 5),
        "step_seconds": round(report["step_seconds"], 5),
    }


def measure_delays(runs: int, share: float) -> dict[str, Any]:
    """``runs`` of each rank and phase with a delay, and as many in all without one, in random order."""
    cases: list[Case] = [*itertools.product(range(WORLD_SIZE), PHASES)] * runs
    cases += [None] * len(cases)
    random.Random(0).shuffle(cases)
    results = []
    with Ranks(WORLD_SIZE) as ranks:
        for number, case in enumerate(cases):
            reports = ranks.run(_train, case, share * STEP, timeout=120)
            assert all(report == reports[0] for report in reports)
            results.append({"case": case and list(case), **_outcome(reports[0])})
            told = f"rank {case[0]} is late in {case[1]}" if case else "nobody is late"
            late = results[-1]["late"]
            named = f"rank {late[0]}, {late[1]}" if late else "nobody"
            print(f"{number + 1:3}/{len(cases)}  {told:26} named: {named}", flush=True)
    delayed = [r for r in results if r["case"]]
    balanced = [r for r in results if not r["case"]]
    return {
        "share": share,
        "delayed_runs": len(delayed),
        "rank_and_phase_right": sum(r["late"] == r["case"] for r in delayed),
        "rank_right": sum(bool(r["late"]) and r["late"][0] == r["case"][0] for r in delayed),
        "balanced_runs": len(balanced),
        "false_alarms": sum(r["late"] is not None for r in balanced),
        "runs": results,
    }


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--runs", type=int, default=5, help="of each case (default: 5)")
    arguments.add_argument("--share", type=float, default=0.1, help="the delay, as a part of a step (default: 0.1)")
    options = arguments.parse_args()
    found = measure_delays(options.runs, options.share)
    print(f"rank and phase named right: {found['rank_and_phase_right']} of {found['delayed_runs']}")
    print(f"rank named right: {found['rank_right']} of {found['delayed_runs']}")
    print(f"false alarms: {found['false_alarms']} of {found['balanced_runs']}")
    facts = {"command": harness.command(), "machine": harness.machine()}
    harness.write_json(harness.OUTPUT / "straggler.json", facts | found)


if __name__ == "__main__":
    harness.run_main(main)
