"""How soon all ranks know that one is lost, and what the store's host pays for it, with many ranks.

    python benchmarks/watch.py --ranks 64,256,1024

Each rank is a client of the real class (``minddp.guards.roll.Roll``), with its own connection to a real TCPStore. The
store's host is a process of its own; many ranks share a process, as threads. All of them wait for the same. Printed,
for each number of ranks:

notice   seconds until half of them, and the last one, know of a notice that one rank has written
dies     one rank's process is gone: seconds until the last one knows that all others wait, so that each raises. Of
         that, 5 s are waited so that what the rank had sent has arrived, and 2.5 s for the answers to the call
leave    all leave within a second: seconds that the last one needs for it
requests of all ranks together a second, while they wait; and the processor time of the store's host meanwhile
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from watchdog import Counted

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROCESSES = 4
SETTLED = 5.0  # as in minddp/guards/times.py


def _host(port: int, ready: Any, stop: Any, told: Any) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.set()
    while not stop.wait(0.5):
        told.value = time.process_time()
    del store


class _Rank:
    """What the watchdog's thread does for a rank that waits, with the same calls; the process is this one's."""

    def __init__(self, rank: int, size: int, port: int, processes: dict[int, Any]):
        import torch.distributed as dist

        from minddp.guards import roll

        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.roll = roll.Roll(client, rank, size, processes)
        self.roll.store = self.counted = Counted(self.roll.store)
        others = tuple(other for other in range(size) if other != rank)
        self.wait = roll.Wait("ddp backward", 1, "a reduction", rank, others)
        self.rank, self.heard, self.found, self.gone_at = rank, 0.0, 0.0, 0.0
        self.call, self.due, self.may_call_at = 0, 0.0, 0.0

    def turn(self) -> None:
        roll, now = self.roll, time.time()
        roll.look()
        for notice in roll.notices():
            if "gone" in notice:
                self.gone_at = time.time()
            elif "found" in notice:
                self.found = self.found or time.time()
            else:
                self.heard = self.heard or time.time()
        for call in roll.calls():
            roll.answer(call["number"], {"waits": [(*self.wait.key, "", False)], "places": {}})
        roll.meet()
        if self.call and now >= self.due:
            answers = roll.answers(self.wait.others)
            missing = [other for other in self.wait.others if other not in answers]
            roll.left(missing)
            self.call = 0
            if missing == [1]:
                roll.tell(
                    {"found": "gone", "wait": self.wait.key, "lost": missing, "words": "is gone", "left": False}
                )
        elif self.gone_at and not self.found and now - self.gone_at >= SETTLED and now >= self.may_call_at:
            self.may_call_at = now + roll.patience
            self.call, self.due = roll.call(self.wait), now + 2.5 * roll.interval


def _ranks(which: int, size: int, port: int, phase: Any, out: Any) -> None:
    """The ranks of one process. ``phase``: 0 wait, 1 rank 0 tells, 2 rank 1 is gone, 3 all leave."""
    from minddp.guards.processes import Process

    processes = {rank: Process(f"host {rank // 8}", f"host {rank // 8}", rank, 0) for rank in range(size)}
    mine = [_Rank(rank, size, port, processes) for rank in range(which, size, PROCESSES)]
    begun, left = threading.Barrier(len(mine) + 1), [0.0] * len(mine)

    def live(index: int) -> None:
        rank = mine[index]
        begun.wait()
        time.sleep(random.random() * rank.roll.interval)
        told = False
        while phase.value < 3:
            began = time.monotonic()
            if rank.rank == 0 and phase.value == 1 and not told:
                told = True
                rank.roll.tell({"words": "an exception ended its backward", "wait": ["another", 1]})
            if not (rank.rank == 1 and phase.value >= 2):
                rank.turn()
            if rank.rank == 2 and phase.value == 2 and not rank.gone_at and not told:
                told = True
                rank.roll.tell({"gone": 1, "how": "SIGKILL", "wait": None})
            time.sleep(max(0.0, rank.roll.interval - (time.monotonic() - began)))
        rank.roll.leave({"end": "its program has ended", "failed": False, "places": {}})
        left[index] = time.time()

    threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=live, args=(i,), daemon=True) for i in range(len(mine))]
    for thread in threads:
        thread.start()
    begun.wait()
    out.put("up")
    counts = []
    for last in (1, 2, 3):
        while phase.value < last:
            time.sleep(0.02)
        counts.append((time.time(), sum(rank.counted.requests for rank in mine)))
    for thread in threads:
        thread.join(60)
    out.put((counts, [(rank.rank, rank.heard, rank.found) for rank in mine], left))


def measure(size: int, seconds: float) -> str:
    """A row of the table."""
    from tests.ranks_pool import free_port

    context, port = multiprocessing.get_context("spawn"), free_port()
    ready, stop, told = context.Event(), context.Event(), context.Value("d", 0.0)
    phase, out = context.Value("i", 0), context.Queue()
    host = context.Process(target=_host, args=(port, ready, stop, told))
    host.start()
    ready.wait()
    ranks = [context.Process(target=_ranks, args=(i, size, port, phase, out)) for i in range(PROCESSES)]
    try:
        for process in ranks:
            process.start()
        for _ in ranks:
            out.get(timeout=300)
        time.sleep(seconds)
        cpu, moments = [told.value], [time.time()]
        for number, pause in ((1, seconds), (2, seconds + SETTLED + 5.0), (3, 0.0)):
            phase.value = number
            moments.append(time.time())
            time.sleep(pause)
            cpu.append(told.value)
        results = [out.get(timeout=120) for _ in ranks]
    finally:
        stop.set()
        for process in [*ranks, host]:
            process.join(10)
            process.kill()
    known = sorted(heard - moments[1] for _, row, _ in results for rank, heard, _ in row if heard and rank != 0)
    found = sorted(at - moments[2] for _, row, _ in results for rank, _, at in row if at and rank != 1)
    left = max(at for _, _, row in results for at in row) - moments[3]
    asked = sum(counts[1][1] - counts[0][1] for counts, _, _ in results) / (moments[2] - moments[1])
    share = (cpu[1] - cpu[0]) / (moments[2] - moments[1])
    if len(known) < size - 1 or len(found) < size - 1:
        return f"{size:6}  not carried: {len(known)} of {size - 1} know of the notice, {len(found)} raise"
    return (
        f"{size:6}  {known[len(known) // 2]:5.1f} s  {known[-1]:5.1f} s  {found[-1]:6.1f} s  {left:6.1f} s  "
        f"{asked:10.0f}  {share:6.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(size) for size in text.split(",")], default=[64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    print(f"{os.cpu_count()} processors")
    print(" ranks   notice: half, last    one dies  all leave  requests/s  host's share of a core")
    for size in options.ranks:
        print(measure(size, options.seconds), flush=True)


if __name__ == "__main__":
    main()
