"""What the watchdog costs while nothing waits: its thread's processor time, beside a step over 400 parameters.

    python benchmarks/watchdog.py --seconds 20 --ranks 2
    python benchmarks/watchdog.py --load 2,8,16            # its threads, files and store requests

Processor time, not wall time: a machine that is busy with other work does not change it much.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


class Counted:
    """A store that counts requests."""

    def __init__(self, store: Any):
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        self.requests += callable(found) and name != "has_extended_api"
        return found


def _load(rank: int, world_size: int, port: int, seconds: float) -> tuple[int, int, float, float]:
    """What this process has more than before its first wrapper: threads, files; its requests a second between two
    steps, and while all wait for rank 1."""
    import torch
    import torch.distributed as dist

    import minddp
    from minddp.guards import watchdog

    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(32, 32))
    time.sleep(2)
    threads, files = threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files
    dog: Any = watchdog.current(dist.group.WORLD)
    roll: Any = dog.run(lambda roll: roll, seconds)
    counted = roll.store = Counted(roll.store)
    rates = []
    for late in (False, True):
        if late and rank == 1:
            time.sleep(seconds)
        begin, before = time.monotonic(), counted.requests
        while not late and time.monotonic() - begin < seconds:
            time.sleep(0.01)
        ddp(torch.ones(2, 32)).sum().backward()
        rates.append((counted.requests - before) / seconds)
    return threads, files, rates[0], rates[1]


def _print_load(sizes: Sequence[int], seconds: float) -> None:
    from tests.ranks_pool import free_port, run_ranks

    print("ranks  threads  files  requests a second, of all ranks together: in training  while all wait for one")
    for size in sizes:
        results = run_ranks(_load, size, free_port(), seconds, backend=None, timeout=4 * seconds + 120)
        threads, files, trains, waits = zip(*results)
        print(f"{size:5}  {max(threads):7}  {max(files):5}  {sum(trains):55.1f}  {sum(waits):22.1f}")


def main() -> None:
    from tests.ranks_pool import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load", type=lambda text: [int(size) for size in text.split(",")], metavar="RANKS")
    options = parser.parse_args()
    if options.load:
        return _print_load(options.load, options.seconds)
    results = run_ranks(_measure, options.ranks, options.seconds, timeout=options.seconds + 120)
    for rank, (whole, thread, steps) in enumerate(results):
        print(
            f"rank {rank}: {steps} steps of {1e3 * whole / steps:.2f} ms processor time, of which the watchdog's "
            f"{1e6 * thread / steps:.2f} us ({100 * thread / whole:.3f} %)"
        )


if __name__ == "__main__":
    main()
