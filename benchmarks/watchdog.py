"""What the watchdog costs while nothing waits: its thread's processor time, beside a step over 400 parameters.

    python benchmarks/watchdog.py --seconds 20 --ranks 2

Processor time, not wall time: a machine that is busy with other work does not change it much.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PARAMETERS = 400


def _thread_seconds(native_id: int) -> float:
    """User and system time; ``schedstat`` counts nanoseconds."""
    return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[0]) / 1e9


def _measure(rank: int, world_size: int, seconds: float) -> tuple[float, float, int]:
    import torch
    from torch import nn

    import minddp

    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(PARAMETERS // 2)))
    ddp = minddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(4, 32)
    (watchdog,) = [thread for thread in threading.enumerate() if thread.name == "minddp: watchdog"]
    assert watchdog.native_id is not None
    for _ in range(5):
        ddp(x).sum().backward()
        optimizer.step()
    steps, begin, cpu, idle = 0, time.monotonic(), time.process_time(), _thread_seconds(watchdog.native_id)
    go = torch.ones(1)
    while go.item():
        for _ in range(10):
            optimizer.zero_grad()
            ddp(x).sum().backward()
            optimizer.step()
        steps += 10
        go.fill_(float(rank != 0 or time.monotonic() - begin < seconds))
        torch.distributed.broadcast(go, 0)
    return time.process_time() - cpu, _thread_seconds(watchdog.native_id) - idle, steps


def main() -> None:
    from minddp.testing import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    results = run_ranks(_measure, options.ranks, options.seconds, timeout=options.seconds + 120)
    for rank, (whole, thread, steps) in enumerate(results):
        print(
            f"rank {rank}: {steps} steps of {1e3 * whole / steps:.2f} ms processor time, of which the watchdog's "
            f"{1e6 * thread / steps:.2f} us ({100 * thread / whole:.3f} %)"
        )


if __name__ == "__main__":
    main()
