"""When each gradient is ready in a backward: the profiles that the page "How DDP works" computes with.

Each model takes steps on one rank, which sends nothing. Of each time (when a gradient was ready, how long forward,
backward and the rest took) the smallest over all steps is kept, since a shared machine only ever makes a step slower.

    python benchmarks/backward_profiles.py                       # writes docs/website/how.json
    python benchmarks/backward_profiles.py --models mlp38 --output profile.json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
from harness import Ranks

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "website" / "how.json"


def measure(rank: int, world_size: int, model: str, steps: int) -> dict[str, Any]:
    """Runs on the one rank: the smallest of each time over ``steps`` steps, to the microsecond."""
    from models import MODELS, workload
    from optimum.backward_profile import BackwardProfile, StepTimes

    import minddp

    work = workload(model, harness.rank_device("gloo", rank), rank)
    ddp = minddp.DistributedDataParallel(work.module)
    seen = []
    for step in range(steps + 3):
        ddp.zero_grad()
        work.call(ddp).backward()
        if step >= 3:
            seen.append(StepTimes.from_last_step(ddp.reducer.last_step()))
    smallest = [min(column) for column in zip(*(times.row() for times in seen), strict=True)]
    profile, _ = BackwardProfile.from_times(seen[0].with_row(smallest), work.sizes())
    numbers = {name: _microseconds(value) for name, value in asdict(profile).items() if name != "nbytes"}
    return {"title": MODELS[model][0], "nbytes": profile.nbytes, **numbers}


def _microseconds(value: Any) -> Any:
    return [round(x, 6) for x in value] if isinstance(value, list) else round(value, 6)


def main(argv: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=["mlp38", "resnet50", "gpt2"])
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each model")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options: argparse.Namespace = parser.parse_args(argv)
    facts = {"command": harness.command(), "machine": harness.machine(), "steps": options.steps}
    profiles = {}
    for model in options.models:
        with Ranks(1) as ranks:
            profiles[model] = ranks.run(measure, model, options.steps, timeout=600)[0]
        found = profiles[model]
        print(f"{model}: {len(found['nbytes'])} gradients, {sum(found['nbytes']) / 1e6:.0f} MB, "
              f"backward {1e3 * found['backward_seconds']:.0f} ms")  # fmt: skip
    harness.write_json(options.output, {**facts, "profiles": profiles})
    return 0


if __name__ == "__main__":
    harness.run_main(main)
