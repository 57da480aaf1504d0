"""What does it cost to copy rank 0's buffers to all ranks before each forward?

Models of one small Linear with many buffers: 5,000 of 16 floats, and ResNet-152's 465 (two of float32 and one
int64 counter for each of 155 batch norms). Two things are timed, torch's and minddp's in turn, in rounds:

broadcast   the coalesced broadcast alone (``torch.distributed._broadcast_coalesced``, ``broadcast_coalesced``)
forward     the whole forward of the wrapper, which begins with that broadcast

A round's time is that of its slowest rank. Printed are medians with quartiles, and the ratio of the medians.

    python benchmarks/buffers.py
    python benchmarks/buffers.py --ranks 3 --rounds 50
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import harness
from harness import Ranks, spread

KINDS = ("5000 small", "ResNet-152's 465")
_LIMIT = 250 << 20  # bytes in a message: both wrappers' own


def _module(kind: str):  # type: ignore[no-untyped-def]
    import torch

    class Buffered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            if kind == KINDS[0]:
                buffers = [torch.randn(16) for _ in range(5000)]
            else:
                channels = [64, 256, 512, 1024, 2048] * 31
                buffers = [b for c in channels for b in (torch.randn(c), torch.rand(c), torch.tensor(0))]
            for i, buffer in enumerate(buffers):
                self.register_buffer(f"b{i}", buffer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    return Buffered()


def measure(rank: int, world_size: int, kind: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round."""
    import torch
    import torch.distributed as dist

    import minddp
    from minddp.start import broadcast_coalesced

    group = dist.group.WORLD
    buffers = list(_module(kind).buffers())
    theirs = torch.nn.parallel.DistributedDataParallel(_module(kind))
    ours = minddp.DistributedDataParallel(_module(kind))
    x = torch.randn(2, 4)
    calls: dict[str, Callable[[], object]] = {
        "broadcast torch": lambda: dist._broadcast_coalesced(group, buffers, _LIMIT, 0),
        "broadcast minddp": lambda: broadcast_coalesced(group, buffers, _LIMIT, 0),
        "forward torch": lambda: theirs(x),
        "forward minddp": lambda: ours(x),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for order in [list(calls), *harness.rounds(list(calls), rounds)]:
        for name in order:
            dist.barrier()
            with torch.set_grad_enabled(name.startswith("forward")):
                begin = time.perf_counter()
                result = calls[name]()
                samples[name].append(time.perf_counter() - begin)
            if isinstance(result, torch.Tensor):
                result.sum().backward()
    return {name: times[1:] for name, times in samples.items()}


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=30)
    given: argparse.Namespace = arguments.parse_args()
    with Ranks(given.ranks) as ranks:
        for kind in KINDS:
            parts = ranks.run(measure, kind, given.rounds)
            slowest = {name: [max(row) for row in zip(*(part[name] for part in parts))] for name in parts[0]}
            for what in ("broadcast", "forward"):
                torch_s, ours = (spread(slowest[f"{what} {whose}"]) for whose in ("torch", "minddp"))
                print(
                    f"{kind:18} {what:10} torch {torch_s.show(1e3)} ms   minddp {ours.show(1e3)} ms   "
                    f"ratio {ours.median / torch_s.median:.2f}"
                )


if __name__ == "__main__":
    harness.run_main(main)
