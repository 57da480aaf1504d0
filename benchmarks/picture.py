"""One step on a slow link, as a picture: which collectives does backward hide, and which are left at its end?

Trains an MLP of 11 equal layers on ranks joined by a shaped link; a barrier before each step lets the ranks begin
together. Of the steps that were recorded, the one whose length is the median is printed as a table, and drawn.

    python benchmarks/picture.py                      # two ranks, 2 Gbit/s; needs root. Draws docs/timeline.png
    python benchmarks/picture.py --link 1gbit --output step.svg
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import harness
from harness import Ranks

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "timeline.png"
MODEL, CAP_MB = "mlp46", 6.0
WARM_UP, STEPS = 4, 9


def _record(rank: int, world_size: int, path: str) -> None:
    import torch.distributed as dist
    from models import workload

    import minddp

    work = workload(MODEL, harness.rank_device("gloo", rank), rank)
    ddp = minddp.DistributedDataParallel(work.module, bucket_cap_mb=CAP_MB)

    def train(steps: int) -> None:
        for _ in range(steps):
            ddp.zero_grad()
            dist.barrier()
            work.call(ddp).backward()

    train(WARM_UP)
    with minddp.trace(path):
        train(STEPS)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="2gbit", help="bandwidth between ranks (default: 2gbit); needs root")
    parser.add_argument("--output", type=Path, default=PICTURE, help=".png or .svg")
    options = parser.parse_args()

    from minddp.timeline import load, rank_steps, table
    from minddp.timeline.picture import draw

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with Ranks(options.ranks, "gloo", options.link) as ranks:
            ranks.run(_record, str(path), timeout=300)
        trace = load(path)
    iterations = range(WARM_UP + 1, WARM_UP + STEPS + 1)
    recorded = [rank_steps(trace, iteration) for iteration in iterations]
    recorded.sort(key=lambda steps: max(step.times.step_seconds for step in steps))
    middle = recorded[len(recorded) // 2]
    print(table(middle))
    draw(middle, [options.output])
    print(f"drawn: {options.output}")


if __name__ == "__main__":
    harness.run_main(main)
