"""Thousands of steps, through wrappers made and made again; memory, threads and files must not grow.

Every wrapper trains some steps with its own options and goes. Between them come what a long run may hold: refreshed
parameters, buckets re-planned while measuring, communication hooks, accumulation under no_sync, an exception in a
backward and abort_iteration, uneven inputs, replicas compared and repaired, copies, groups made and destroyed. With
``--minutes`` a rank is late once a minute, long enough for the others to call it and to log that.

Ends with 1 where a rank's second half holds more than its second quarter did: resident memory by more than
``SLACK_MIB``, or one thread, one open file, or one key of minddp's in the process group's store.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import minddp
from tests.ranks_pool import run_ranks, shutdown

STEPS_OF_A_WRAPPER = 200
SAMPLE_EVERY = 200
SLACK_MIB = 8.0  # an allocator's own unrest
LATE_SECONDS = 16.0  # the others call after 10, and log what they hear after 2.5 more


class Sample(NamedTuple):
    step: int
    rss_mib: float
    threads: int
    files: int
    keys: int


def sample(step: int) -> Sample:
    """Of this process, as the kernel counts; and of the store, which all ranks share."""
    with open("/proc/self/status", errors="replace") as file:  # a name may be any bytes
        status = dict(line.split(":", 1) for line in file)
    rss = int(status["VmRSS"].split()[0]) / 1024
    store: Any = dist.distributed_c10d._get_default_store()
    keys = sum("minddp" in key for key in store.list_keys()) if hasattr(store, "list_keys") else 0
    return Sample(step, rss, int(status["Threads"]), len(os.listdir("/proc/self/fd")), keys)


def growth(samples: Sequence[Sample]) -> str:
    """What the second half holds more than the second quarter; empty: nothing."""
    quarter = len(samples) // 4
    before, after = samples[quarter : 2 * quarter], samples[2 * quarter :]
    if not before:
        return f"{len(samples)} samples are too few to tell"
    found = []
    more = statistics.median(s.rss_mib for s in after[-quarter:]) - statistics.median(s.rss_mib for s in before)
    if more > SLACK_MIB:
        found.append(f"{more:.1f} MiB")
    for what in ("threads", "files", "keys"):
        most = max(getattr(s, what) for s in before)
        if after[-1]._asdict()[what] > most:
            found.append(f"{after[-1]._asdict()[what] - most} {what}")
    return ", ".join(found)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64)
        self.side, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, side: bool = True) -> torch.Tensor:
        h = self.norm(self.first(x)).relu()
        return self.last(h + self.side(h) if side else h)


# What wrappers are made with, in turn.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True, "check_finite": "skip"},
    {"find_unused_parameters": True, "check_replicas_every": 50},
    {"static_graph": True, "bucket_cap_mb_list": [0.001] * 2},
    {"bucket_cap_mb": "auto"},
    {"reduction": "weighted", "lazy_bucket_allocation": True},
    {"reduction": "sum", "gradient_as_bucket_view": True, "bucket_cap_mb_list": [0.01] * 2},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb_list": [0.001] * 2},
)


class Wrapper:
    """One wrapper's life."""

    def __init__(self, number: int, rank: int, world_size: int):
        self.rank, self.options = rank, OPTIONS[number % len(OPTIONS)]
        self.group = dist.new_group(list(range(world_size))) if number % 3 == 1 else None
        torch.manual_seed(number)
        self.ddp = minddp.DistributedDataParallel(Net(), process_group=self.group, **self.options)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=1e-3, foreach=False)
        self.weighted = self.options.get("reduction") == "weighted"
        if self.options == {}:
            self._register(number)

    def _register(self, number: int) -> None:
        hooks: list[tuple[Any, Callable[..., Any]]] = [
            (None, default_hooks.fp16_compress_hook),
            (powerSGD_hook.PowerSGDState(self.group, matrix_approximation_rank=1), powerSGD_hook.powerSGD_hook),
        ]
        self.ddp.register_comm_hook(*hooks[number // len(OPTIONS) % 2])

    def step(self, i: int) -> None:
        self.optimizer.zero_grad()
        side = not (self.options.get("find_unused_parameters") and i % 3 == 0)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * i + self.rank))
        if i % 7 == 0:
            with self.ddp.no_sync():
                self._backward(x, side)
        self._backward(x, side)
        self.optimizer.step()

    def _backward(self, x: torch.Tensor, side: bool) -> None:
        if self.weighted:
            minddp.add_weight(self.ddp, len(x))
        self.ddp(x, side).square().mean().backward()

    def interrupt(self) -> None:
        """An exception in backward that the program survives, on all ranks."""

        def fail(_: Any) -> None:
            raise ValueError("on purpose")

        handle = self.ddp.module.first.weight.register_hook(fail)
        try:
            self.step(1)
        except ValueError:
            minddp.abort_iteration(self.ddp)
        else:
            raise AssertionError("the hook did not raise")
        finally:
            handle.remove()
        self.optimizer.zero_grad()
        dist.barrier()

    def uneven(self) -> None:
        with self.ddp.join():
            for i in range(1 + self.rank % 2):
                self.step(i + 1)

    def rest(self, number: int) -> None:
        """What happens now and then."""
        events: list[Callable[[], Any]] = [
            self.interrupt, self.uneven, lambda: minddp.refresh(self.ddp), lambda: minddp.repair_replicas(self.ddp, 0)
        ]  # fmt: skip
        events[number % len(events)]()
        if self.group is None and number % 5 == 0:
            twin = copy.deepcopy(self.ddp)
            if self.weighted:
                minddp.add_weight(twin, 8)
            twin(torch.ones(8, 16)).sum().backward()

    def end(self) -> None:
        del self.ddp, self.optimizer
        if self.group is not None:
            dist.destroy_process_group(self.group)


def minutes_since(began: float) -> float:
    """By the clock of rank 0, so that all ranks decide alike."""
    passed = torch.tensor([(time.monotonic() - began) / 60])
    dist.broadcast(passed, 0)
    return float(passed)


def soak(rank: int, world_size: int, steps: int, of_a_wrapper: int, every: int, minutes: float = 0.0) -> list[Sample]:
    """One rank; its samples. Ends after so many steps, or with ``minutes`` after these."""
    warnings.simplefilter("ignore")
    samples, done, number, late, began = [], 0, 0, 1, time.monotonic()
    while (passed := minutes_since(began)) < minutes if minutes else done < steps:
        wrapper = Wrapper(number, rank, world_size)
        if minutes and passed >= late:
            late += 1
            if rank == late % world_size:
                time.sleep(LATE_SECONDS)
        for i in range(of_a_wrapper if minutes else min(of_a_wrapper, steps - done)):
            wrapper.step(i)
            done += 1
            if i == of_a_wrapper // 2:
                wrapper.rest(number)
            if done % every == 0:
                gc.collect()
                samples.append(sample(done))
        wrapper.end()
        number += 1
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="for each backend, in place of --steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["gloo", "shm"])
    options = parser.parse_args(arguments)
    grown = False
    for backend in options.backends:
        began = time.monotonic()
        ranks = run_ranks(
            soak, options.ranks, options.steps, STEPS_OF_A_WRAPPER, SAMPLE_EVERY, options.minutes, backend=backend,
            timeout=120 + (options.minutes * 60 or options.steps),
        )  # fmt: skip
        shutdown()
        steps = ranks[0][-1].step
        print(f"{backend}: {steps} steps, {steps // STEPS_OF_A_WRAPPER} wrappers, {time.monotonic() - began:.0f} s")
        for rank, samples in enumerate(ranks):
            picked = [samples[round(k * (len(samples) - 1) / 4)] for k in range(5)]
            print(f"  rank {rank}: " + "; ".join(
                f"step {s.step}: {s.rss_mib:.0f} MiB, {s.threads} threads, {s.files} files, {s.keys} keys"
                for s in picked
            ))  # fmt: skip
            more = growth(samples)
            grown = grown or bool(more)
            print("    grew by " + more if more else "    flat")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
