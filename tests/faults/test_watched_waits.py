"""Waits outside of a backward's own: each tells who is lost, and ends."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
import minddp.functional
from minddp.guards import times
from tests.faults.test_watchdog import LOOK, TIMEOUT, _group, _net, _run, _short, _store_host, _train
from tests.faults.test_watchdog_patience import started
from tests.on_ranks import on_own_ranks


def _in_join(ddp):
    with ddp.join():
        _train(ddp, 3)


def _without_data(ddp):
    with ddp.join():
        _train(ddp, 0 if dist.get_rank() == 0 else 3)


def _functional(_):
    minddp.functional.all_reduce(torch.ones(2))


def _in_another_group(ddp):  # which has no wrapper of its own
    minddp.functional.all_reduce(torch.ones(2), group=ddp.another)


def _wrapped(place):
    if place == "SyncBatchNorm":
        net = nn.Sequential(nn.Linear(4, 4), minddp.SyncBatchNorm(4))
        return minddp.DistributedDataParallel(net, broadcast_buffers=False)
    if place == "delayed":
        net = nn.Linear(4, 4)
        return minddp.DistributedDataParallel(
            net, delay_all_reduce_named_params=list(net.named_parameters()),
            param_to_hook_all_reduce=net.weight,
        )  # fmt: skip
    return minddp.DistributedDataParallel(_net())


PLACES = {
    "backward": lambda ddp: _train(ddp, 1),
    "join": _in_join,
    "without data": _without_data,
    "SyncBatchNorm": lambda ddp: _train(ddp, 1),
    "functional": _functional,
    "another group": _in_another_group,
    "delayed": lambda ddp: _train(ddp, 1),
}


def _waits_for_a_stopped_rank(rank, world_size, wait, text):
    """Rank 1 is stopped until the others' ``wait()`` has raised ``text``."""
    store, pids = dist.distributed_c10d._get_default_store(), [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    try:
        with pytest.raises(minddp.LostPeer, match=text) as told:
            wait()
        assert told.value.lost_ranks == [1]
    finally:
        store.set(f"{rank} is told", "")
        if rank == 0:
            store.wait([f"{other} is told" for other in range(world_size) if other != 1])
            os.kill(pids[1], signal.SIGCONT)


def _one_is_stopped(rank, world_size, port, place, backend):
    with _group(rank, world_size, port, f"{place}{backend}", backend, timeout=TIMEOUT):
        ddp = _wrapped(place)
        ddp.another = _short()
        _train(ddp, 2)
        text = r"[Rr]ank 1 \(process \d+ on \S+\) is stopped"
        _waits_for_a_stopped_rank(rank, world_size, lambda: PLACES[place](ddp), text)


@pytest.mark.parametrize(("place", "backend"), [*((place, "gloo") for place in PLACES), ("without data", "shm")])
def test_a_stopped_rank_is_named(place, backend):
    with _store_host() as (_, port):
        _run(_one_is_stopped, port, place, backend, world_size=3)


def _stands_still_in_another_wrappers_forward(rank, world_size, port):
    with _group(rank, world_size, port, "two"):
        group, net = _short(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        first = minddp.DistributedDataParallel(_net(), process_group=group)
        second = minddp.DistributedDataParallel(net, process_group=group)
        for _ in range(2):
            _train(first, 1)
            second(torch.ones(2, 4)).sum().backward()
        if rank == 1:
            first.module[1].seconds = 1.5 * TIMEOUT
            with pytest.raises(RuntimeError, match="says: rank 1 will not take part"):
                _train(first, 3)
            return
        where = r"(?s)rank 1 will not.*Rank 1 .* iterations 2 and 3, at faults/test_watchdog.py:\d+ in forward"
        with pytest.raises(minddp.LostPeer, match=where):
            second(torch.ones(2, 4))  # which begins with the buffers of rank 0, which waits for the others to come
            second(torch.ones(2, 4)).sum().backward()


def _is_named_by_its_number_among_all(rank, world_size, port):
    with _group(rank, world_size, port, "subgroup"):
        group = dist.new_group([1, 2], timeout=timedelta(seconds=TIMEOUT))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.wait(["told"])
            return
        ddp = minddp.DistributedDataParallel(_net(), process_group=group)
        _train(ddp, 2)
        if rank == 2:
            ddp.module[1].seconds = 1.5 * TIMEOUT
            with pytest.raises(RuntimeError):
                _train(ddp, 3)
            return
        text = (
            "rank 2 will not take part in .*, for which rank 1 has waited .* Rank 2 .* is in forward of iteration 3"
        )
        with pytest.raises(minddp.LostPeer, match=text) as told:
            _train(ddp, 1)
        store.set("told", "")
        assert told.value.lost_ranks == [2]


def _an_interrupted_wait_holds_no_process(rank, world_size, port):
    with _group(rank, world_size, port, "interrupted"):
        ddp = minddp.DistributedDataParallel(_net())
        _train(ddp, 2)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["interrupted"])
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            _train(ddp, 1)
        dist.destroy_process_group()
        del ddp
        store.set("interrupted", "")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the end destroys


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        (_stands_still_in_another_wrappers_forward, 2),
        (_is_named_by_its_number_among_all, 3),
        (_an_interrupted_wait_holds_no_process, 2),
    ],
)
def test_a_rank_that_does_not_come(program, world_size):
    with _store_host() as (_, port):
        _run(program, port, world_size=world_size)


_RAISES = """
import datetime, sys, threading, time, torch, torch.distributed as dist, minddp
rank, port, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
minddp.guards.times.set_look(float(sys.argv[4]))
store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
patience = datetime.timedelta(seconds=200 * float(sys.argv[4]))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))

def train():
    for step in range(6):
        if step == 3 and rank == 1:
            raise KeyError("no such batch")
        ddp(torch.ones(1, 4)).sum().backward()

def writes_a_checkpoint():
    time.sleep(1000)

if rank == 1:
    threading.Thread(target=writes_a_checkpoint).start()
if where == "main":
    train()
else:
    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    time.sleep(1000 * rank)
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("main", "its program ended with KeyError: 'no such batch'"),
        ("thread", "is between iterations 3 and 4"),
    ],
)
def test_an_exception_that_leaves_the_process_alive_is_told(where, words):
    with _store_host() as (_, port):
        ranks = started(_RAISES, port, where)
        try:
            told = ranks[0].communicate()[1]
            assert ranks[1].poll() is None
        finally:
            ranks[1].kill()
            ranks[1].communicate()
    assert re.search(rf"LostPeer: rank 1 will not .*{words}", told), told


def _another_thread_trains_on(rank, world_size):
    with times.faster(LOOK):
        ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))

        def fails():
            ddp(torch.ones(1, 2)).sum().backward()
            raise ValueError("on all ranks")

        for _ in range(2):
            thread = threading.Thread(target=fails)
            thread.start()
            thread.join()
        time.sleep(LOOK if rank else 20 * LOOK)
        ddp(torch.ones(1, 2)).sum().backward()


def test_a_thread_that_ends_holds_nobody_from_training_on():
    on_own_ranks(_another_thread_trains_on)
