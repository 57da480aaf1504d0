"""Ranks that do not come: named with their place and line; given up when gone, or at the group's timeout."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
import minddp.shm
from minddp.guards import times
from tests.faults.logged import logged
from tests.forked import Program
from tests.on_ranks import on_own_ranks
from tests.ranks_pool import free_port

LOOK = 0.05  # of the guards, in seconds
TIMEOUT = 100 * LOOK  # longer than a healthy rank's step takes on a machine with much else to do


class Slow(nn.Module):
    """Sleeps in forward so long as it is told."""

    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return x * 1.0


def _net():
    return nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 4))


@contextmanager
def _group(rank, world_size, port, name, backend="gloo", timeout=300):
    """A default group, with what is logged meanwhile, and time that runs faster."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()
    with times.faster(LOOK), logged() as told:
        yield told
    dist.destroy_process_group()


def _short():
    """A group of all ranks with a timeout that a test waits for."""
    return dist.new_group(timeout=timedelta(seconds=TIMEOUT))


def _train(ddp, steps):
    for _ in range(steps):
        ddp(torch.ones(1, 4)).sum().backward()


def _stands_still_in_forward(rank, world_size, port):
    with _group(rank, world_size, port, "forward"):
        ddp = minddp.DistributedDataParallel(_net(), process_group=_short())
        _train(ddp, 2)
        if rank == 1:
            ddp.module[1].seconds = 1.5 * TIMEOUT
            with pytest.raises(RuntimeError, match="rank 0 will not take part.*Rank 0 .* says: rank 1 will not"):
                _train(ddp, 3)  # what rank 0 had begun before it gave up still ends
            return
        with pytest.raises(RuntimeError) as caught:
            _train(ddp, 1)
    text = str(caught.value)
    assert re.search(r"rank 1 will not take part in the reduction of bucket 0 of iteration 3", text)
    where = r"Rank 1 \(process \d+ on \S+\) is in forward of iteration 3, at faults/test_watchdog.py:\d+ in forward"
    assert re.search(where, text), text


def _runs_another_collective(rank, world_size, port):
    with _group(rank, world_size, port, "elsewhere"):
        other = dist.new_group(timeout=timedelta(seconds=3 * TIMEOUT))
        ddp = minddp.DistributedDataParallel(_net(), process_group=_short())
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
    with _group(rank, world_size, port, "slow") as told, times.faster(5 * LOOK):
        ddp = minddp.DistributedDataParallel(_net(), process_group=_short())
        _train(ddp, 1)

        def hook(state, bucket):
            future = torch.futures.Future()
            threading.Timer(75 * LOOK, future.set_result, [bucket.buffer()]).start()
            return future

        ddp.register_comm_hook(None, hook)
        _train(ddp, 1)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, told)
    texts = [text for told in everyone for text in told]  # one rank has called, for all
    assert texts and all("all ranks are there" in text for text in texts), texts


def _scenarios(rank, world_size, port, names):
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
        "time.sleep(3000)"
    )
    with Program(source) as host:
        assert host.stdout.readline() == "up\n"
        yield host, port


def _run(fn, *args, world_size=2):
    return on_own_ranks(fn, world_size, *args, backend=None, grace=60)


def test_ranks_that_do_not_come():
    names = [
        "_stands_still_in_forward", "_all_wait", "_leaves", "_runs_another_collective",
    ]  # fmt: skip
    with _store_host() as (_, port):
        assert _run(_scenarios, port, names) == [True, True]


def _store_stops(rank, world_size, port, host, backend):
    """The store's host is stopped, and a rank does not come: the group's own timeout ends the wait."""
    with _group(rank, world_size, port, backend, backend, timeout=5) as told, times.faster(LOOK / 5):
        ddp = minddp.DistributedDataParallel(_net())
        _train(ddp, 2)
        if rank == 1:
            time.sleep(12)
            return
        os.kill(host, signal.SIGSTOP)
        begin = time.monotonic()
        try:
            with pytest.raises(RuntimeError, match="(?i)timed out|did not take part"):
                _train(ddp, 1)
            assert time.monotonic() - begin < 120  # a store gives up after 300
        finally:
            os.kill(host, signal.SIGCONT)
    assert any("store does not answer" in text for text in told), told


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
        with Program(_UNEVEN, "0", str(port)) as first, Program(_UNEVEN, "1", str(port), rank=1) as second:
            told = [program.communicate()[1] for program in (first, second)]
    assert first.returncode == 0, told[0]
    assert re.search(
        r"LostPeer: rank 0 will not .* does not come any more: it has destroyed its process group", told[1]
    )
    assert "with ddp.join():" in told[1]


def _late_for_all(rank, world_size, port):
    """At the group's timeout the one rank is named that did not come, by all, however late they came themselves."""
    with _group(rank, world_size, port, "late", timeout=5):
        store = dist.distributed_c10d._get_default_store()
        ddp = minddp.DistributedDataParallel(_net())
        _train(ddp, 2)
        if rank == 1:
            store.wait(["0 is told", "2 is told"])
            return
        time.sleep(0.5 * rank)
        with pytest.raises(minddp.LostPeer, match="Rank 1 .* is between iterations 2 and 3") as told:
            _train(ddp, 1)
        store.set(f"{rank} is told", "")
        assert told.value.lost_ranks == [1], str(told.value)


def test_at_the_groups_timeout_the_rank_that_did_not_come_is_named():
    with _store_host() as (_, port):
        _run(_late_for_all, port, world_size=3)


_SPAWNS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp, minddp

def train(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp(torch.ones(1, 4)).sum().backward()
    if rank == 1 and sys.argv[2] == "raises":
        raise ValueError("no such file")
    if rank == 1:
        return
    try:
        ddp(torch.ones(1, 4)).sum().backward()
    except minddp.LostPeer as lost:
        print(lost, flush=True)

try:
    raise KeyError("a first attempt")
except KeyError:
    context = mp.start_processes(train, (int(sys.argv[1]),), 2, join=False, start_method="fork")
for process in context.processes:
    process.join()  # ProcessContext.join() would end the other rank at once
"""


@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_a_spawned_rank_that_ends_is_named(ends):
    """With or without its exception, and not with the one that its parent was handling."""
    with Program(_SPAWNS, str(free_port()), ends) as program:
        told, errors = program.communicate()
    assert "rank 1 will not take part" in told, told + errors
    assert "a first attempt" not in told


_HELD = """
import sys, threading, time, torch, torch.distributed as dist, minddp
from minddp.guards import times

rank, port = int(sys.argv[1]), sys.argv[2]
times.set_look(0.2)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
ddp(torch.ones(1, 4)).sum().backward()
if rank == 1:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("no such file")
ddp(torch.ones(1, 4)).sum().backward()
"""


def test_a_rank_whose_process_another_thread_holds_is_named_with_its_exception():
    port = str(free_port())
    held = subprocess.Popen([sys.executable, "-c", _HELD, "1", port], stderr=subprocess.DEVNULL)
    try:
        command = [sys.executable, "-c", _HELD, "0", port]
        waits = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert held.poll() is None
    finally:
        held.kill()
        held.wait()
    assert "LostPeer: rank 1 will not take part" in waits.stderr
    assert "says: its program ended with ValueError: no such file" in waits.stderr
