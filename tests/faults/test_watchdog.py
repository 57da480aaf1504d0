"""Ranks that do not come: named with their place and line, given up where they cannot come, else waited for."""

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
import minddp.shm
from minddp.guards import stall_inspector
from minddp.testing import RankPool, free_port


class Slow(nn.Module):
    """Sleeps in forward so long as it is told."""

    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return x * 1.0


def _net():
    return nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 4))


@contextmanager
def _group(rank, world_size, port, name, backend="gloo", timeout=60):
    """A default group, with what is warned about meanwhile."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    dist.destroy_process_group()


def _train(ddp, steps):
    for _ in range(steps):
        ddp(torch.ones(1, 4)).sum().backward()


def _stands_still_in_forward(rank, world_size, port):
    with _group(rank, world_size, port, "forward"):
        ddp = minddp.DistributedDataParallel(_net(), desync_timeout=3)
        _train(ddp, 2)
        if rank == 1:
            ddp.module[1].seconds = 12
            with pytest.raises(RuntimeError, match="rank 0 will not take part.*Rank 0 .* says: rank 1 will not"):
                _train(ddp, 3)  # what rank 0 had begun before it gave up still ends
            return
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            _train(ddp, 1)
        assert time.monotonic() - begin < 11.5
    text = str(caught.value)
    assert re.search(r"rank 1 will not take part in the reduction of bucket 0 of iteration 3", text)
    where = r"Rank 1 \(process \d+ on \S+\) is in forward of iteration 3, at faults/test_watchdog.py:\d+ in forward"
    assert re.search(where + "; it never produced (0|2).(weight|bias), ", text), text


def _is_busy_between_iterations(rank, world_size, port):
    """An evaluation on one rank, which takes longer than desync_timeout: a warning, and training goes on."""
    with _group(rank, world_size, port, "busy") as caught:
        ddp = minddp.DistributedDataParallel(_net(), desync_timeout=2)
        _train(ddp, 2)
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                ddp.module[1].forward = lambda x: 1 // 0
                ddp(torch.ones(1, 4))
            del ddp.module[1].forward
            time.sleep(8)
        ddp.zero_grad()
        ddp(torch.full((1, 4), float(rank))).sum().backward()
        assert torch.equal(ddp.module[2].bias.grad, torch.ones(4))
    told = [str(w.message) for w in caught if "has waited" in str(w.message)]
    assert bool(told) == (rank == 0)
    if rank == 0:
        assert "Ranks [1] have not reported waiting" in told[0]
        assert "is between iterations 2 and 3, at faults/test_watchdog.py:" in told[0], told[0]
        assert "Its last error: ZeroDivisionError" in told[0], told[0]


def _runs_another_collective(rank, world_size, port):
    with _group(rank, world_size, port, "elsewhere"):
        other = dist.new_group(timeout=timedelta(seconds=14))
        ddp = minddp.DistributedDataParallel(_net(), desync_timeout=3)
        _train(ddp, 2)
        if rank == 1:
            with pytest.raises(RuntimeError):
                dist.barrier(other)  # which rank 0 never enters
            return
        with pytest.raises(RuntimeError, match=r"in torch\.distributed's barrier"):
            _train(ddp, 1)


def _leaves(rank, world_size, port):
    with _group(rank, world_size, port, "leaves"):
        ddp = minddp.DistributedDataParallel(_net())
        _train(ddp, 2)
        if rank == 0:
            with pytest.raises(RuntimeError, match="rank 1 will not.*has destroyed its process group"):
                _train(ddp, 1)


def _all_wait(rank, world_size, port):
    """Everybody is there, and the network is slow: nobody gives up."""
    with _group(rank, world_size, port, "slow") as caught:
        ddp = minddp.DistributedDataParallel(_net(), desync_timeout=2)
        _train(ddp, 1)

        def hook(state, bucket):
            future = torch.futures.Future()
            import threading

            threading.Timer(11.0, future.set_result, [bucket.buffer()]).start()
            return future

        ddp.register_comm_hook(None, hook)
        _train(ddp, 1)
    told = [str(w.message) for w in caught if "has waited" in str(w.message)]
    assert told and all("all ranks are there" in text for text in told), told


def _scenarios(rank, world_size, port, names):
    stall_inspector.WARN_SECONDS = 5
    for name in names:
        globals()[name](rank, world_size, port)
    return True


@contextmanager
def _store_host():
    """A process that does nothing else."""
    port = free_port()
    source = (
        "import time, torch.distributed as d; "
        f"s = d.TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False); print('up', flush=True); "
        "time.sleep(300)"
    )
    host = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout.readline() == "up\n"
        yield host, port
    finally:
        host.kill()
        host.wait()


def _run(fn, *args, world_size=2):
    pool = RankPool(world_size)
    try:
        return pool.run(fn, *args, backend=None, timeout=120, grace=60)
    finally:
        pool.close()


def test_ranks_that_do_not_come():
    names = [
        "_stands_still_in_forward", "_is_busy_between_iterations", "_all_wait", "_leaves", "_runs_another_collective",
    ]  # fmt: skip
    with _store_host() as (_, port):
        assert _run(_scenarios, port, names) == [True, True]


def _store_stops(rank, world_size, port, host, backend):
    """The store's host is stopped, and a rank does not come: the group's own timeout ends the wait."""
    with _group(rank, world_size, port, backend, backend, timeout=5) as caught:
        ddp = minddp.DistributedDataParallel(_net(), desync_timeout=None)
        _train(ddp, 2)
        if rank == 1:
            time.sleep(14)
            return
        os.kill(host, signal.SIGSTOP)
        begin = time.monotonic()
        try:
            with pytest.raises(RuntimeError, match="(?i)timed out|did not take part"):
                _train(ddp, 1)
            assert time.monotonic() - begin < 13
        finally:
            os.kill(host, signal.SIGCONT)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_stopped_store_hides_no_timeout(backend):
    with _store_host() as (host, port):
        _run(_store_stops, port, host.pid, backend)


_UNEVEN = """
import sys, torch, torch.distributed as dist, minddp
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3 + rank):
    ddp(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
"""


def test_a_rank_that_has_fewer_batches_and_ends_well_has_ended_and_join_is_named():
    with _store_host() as (_, port):
        ranks = [
            subprocess.Popen([sys.executable, "-c", _UNEVEN, str(rank), str(port)], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            told = [rank.communicate(timeout=60)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert ranks[0].returncode == 0, told[0]
    assert re.search(
        r"LostPeer: rank 0 will not .* does not come any more: it has destroyed its process group", told[1]
    )
    assert "with ddp.join():" in told[1]


def _waits_for_a_stopped_rank(rank, world_size, wait, text):
    """Rank 1 is stopped until the others' ``wait()`` has raised ``text``."""
    pids = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    try:
        with pytest.raises(minddp.LostPeer, match=text) as told:
            wait()
        assert told.value.lost_ranks == [1]
    finally:
        if rank == 0:
            time.sleep(1.5)
            os.kill(pids[1], signal.SIGCONT)


def _stopped(rank, world_size, port):
    with _group(rank, world_size, port, "stopped"):
        ddp = minddp.DistributedDataParallel(_net(), desync_timeout=3)
        _train(ddp, 2)
        text = r"Rank 1 \(process \d+ on \S+\) is stopped \(SIGSTOP"
        _waits_for_a_stopped_rank(rank, world_size, lambda: _train(ddp, 1), text)


def test_a_stopped_rank_is_named_by_all():
    with _store_host() as (_, port):
        _run(_stopped, port, world_size=3)
