"""What a forked child can do to the shared-memory backend of its parent: nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minddp
import minddp.shm
from tests.on_ranks import on_ranks

CHILD_TIME = 250.0


def in_child(task: Callable[[], None]) -> None:
    """Runs ``task`` in a forked child; raises with its traceback when it does not return."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            task()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[-4000:])
        os._exit(1 if text else 0)
    os.close(writer)
    end = time.monotonic() + CHILD_TIME
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < end:
        time.sleep(0.005)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = os.read(reader, 4000).decode()
    os.close(reader)
    assert ended, f"the child did not end: {text}"
    assert status == 0, f"status {status}: {text}"


def still_works(world_size: int) -> None:
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100_000,), float(world_size)))


@on_ranks(3, backend="shm")
def test_a_child_that_destroys_the_group_evicts_nobody(rank: int, world_size: int) -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]  # and a worker thread
    in_child(dist.destroy_process_group)
    for work in works:
        work.wait()
    still_works(world_size)
    dist.barrier()
    in_child(dist.destroy_process_group)  # the worker sleeps
    still_works(world_size)


@on_ranks(2, backend="shm")
def test_a_child_has_none_of_the_memory(rank: int, world_size: int) -> None:
    def segments() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:minddp-shm")

    def look() -> None:
        assert segments() == 0
        backends.clear()
        gc.collect()

    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    backends = [minddp.shm._create(store, rank, world_size, timedelta(seconds=300))]
    backends[0].allreduce([torch.ones(3)]).wait()
    gc.collect()  # of other groups, before the fork: Gloo's own end hangs in a child
    assert segments() > 0
    in_child(look)
    backends[0].allreduce([torch.ones(3)]).wait()
    still_works(world_size)


@on_ranks(2, backend="shm")
def test_calls_in_a_child_raise(rank: int, world_size: int) -> None:
    tensor = torch.ones(3)
    pending = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None

    def call() -> None:
        for attempt in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.barrier(),
            lambda: dist.broadcast(tensor, 0),
            lambda: dist.send(tensor, (rank + 1) % world_size),
            lambda: dist.recv(tensor, (rank + 1) % world_size),
        ):
            with pytest.raises(dist.DistBackendError, match=f"of process {os.getppid()}, from which this one"):
                attempt()
        if pending is not None:
            with pytest.raises(dist.DistBackendError, match="it can be waited for there only"):
                pending.wait()
        own = minddp.shm._create(dist.HashStore(), 0, 1, timedelta(seconds=5))  # a group of the child's own
        own.allreduce([tensor]).wait()

    in_child(call)
    if pending is None:
        dist.all_reduce(torch.ones(1))
    else:
        pending.wait()
    still_works(world_size)


class Gradients(torch.utils.data.Dataset):
    """Samples; looks at the gradients where it runs, and writes to them there."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    assert parameter.grad.square().sum() != 0.0  # it can be read
                    parameter.grad.fill_(float("nan"))
        return torch.full((20,), float(index))


def train(workers: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Linear(300, 2))
    ddp = minddp.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    context = {"multiprocessing_context": "fork"} if workers else {}
    for _ in range(3):
        for batch in torch.utils.data.DataLoader(Gradients(model), 4, num_workers=workers, timeout=0, **context):
            ddp(batch).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2, backend="shm")
def test_dataloader_workers_forked_in_training(rank: int, world_size: int) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # which may have no children
    expected = train(0)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(2), strict=True))
