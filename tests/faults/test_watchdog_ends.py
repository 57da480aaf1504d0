"""What the watchdog's thread leaves behind: nothing."""

import gc
import os
import socket
import tempfile
import threading
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from minddp import DistributedDataParallel as DDP
from minddp.guards import times, watchdog
from tests.faults.logged import logged
from tests.on_ranks import on_ranks
from tests.ranks_pool import RankPool, free_port, run_ranks

SECONDS = 120  # less than a store's own timeout


def _wrapped(rank, world_size):
    DDP(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.path


def _watchdogs_left(rank, world_size):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        left = [t for t in threading.enumerate() if t.name == "minddp: watchdog"]
        if not left:
            break
        time.sleep(0.1)
    return len(left)


def test_threads_end_with_their_group():
    """Each of three groups has a watchdog, which looks into the group's store once a second."""
    pool = RankPool(2)
    try:
        for _ in range(3):
            path, _ = pool.run(_wrapped)  # which ends the group
        assert pool.run(_watchdogs_left, backend=None) == [0, 0]
        assert os.path.exists(os.path.dirname(path))  # a store's file may be read until its ranks end
    finally:
        pool.close()
    assert not os.path.exists(os.path.dirname(path))


def _left_at_the_end(rank, world_size):
    before = [t for t in threading.enumerate() if t.name == "minddp: watchdog"]
    watchdog._last_words()  # as `atexit` calls it
    return sum(thread.is_alive() for thread in before)


def test_python_ends_after_the_threads_of_all_groups():
    """One that is in a request to its store while Python shuts down ends the process: also that of a group that was
    destroyed a moment ago, with a new one since."""
    pool = RankPool(2)
    try:
        for _ in range(2):
            pool.run(_wrapped)
        assert pool.run(_left_at_the_end, backend=None) == [0, 0]
    finally:
        pool.close()


@on_ranks(2)
def test_a_file_that_is_removed_is_not_made_anew(rank, world_size):
    path = _wrapped(rank, world_size)
    dist.barrier()
    if rank == 0:
        os.remove(path)
    assert _watchdogs_left(rank, world_size) == 0
    assert not os.path.exists(path)  # nor made anew


def _groups_at_one_address(rank, world_size, port, folder):
    """The ranks meet between two groups; then nobody of the old one is there."""
    met = dist.FileStore(f"{folder}/met", world_size)
    for number in range(4):
        if number >= 2:
            store = dist.FileStore(f"{folder}/group", world_size)
        else:
            store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=SECONDS))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        DDP(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
        del store
        gc.collect()
        met.add(f"{number}", 1)
        while int(met.add(f"{number}", 0)) < world_size:
            time.sleep(0.002)
    return number


def test_a_group_may_have_the_address_of_the_one_before(tmp_path):
    """Its port and its file are free as soon as it is gone: a watchdog holds neither."""
    arguments = free_port(), str(tmp_path)
    ended = run_ranks(_groups_at_one_address, 2, *arguments, backend=None, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert ended == [3, 3]


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _host_ends_first(rank, world_size, port):
    """What rank 1 writes to stderr at its end; rank 0's process holds the store, and has ended it."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    with mock.patch.object(times, "look", 60.0), tempfile.TemporaryFile() as said:  # no turn comes in between
        ddp = DDP(nn.Linear(2, 2))
        ddp(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            end = time.monotonic() + SECONDS
            while rank == 1 and _listens(port) and time.monotonic() < end:
                time.sleep(0.01)
            dist.destroy_process_group()
            del ddp
            gc.collect()
            watchdog._last_words()  # as `atexit` calls it
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        said.seek(0)
        return said.read().decode()


def test_a_host_that_ends_first_is_asked_for_nothing():
    """Torch's store would write a C++ stack to stderr at the end of a healthy program."""
    assert run_ranks(_host_ends_first, 2, free_port(), backend=None, env={"GLOO_SOCKET_IFNAME": "lo"}) == ["", ""]


@on_ranks(2)
def test_garbage_in_the_store_ends_a_watchdog_with_a_word_and_nothing_else(rank, world_size):
    with times.faster(0.05), logged() as texts:
        ddp = DDP(nn.Linear(4, 4))
        dog, store = watchdog.current(dist.group.WORLD), dist.distributed_c10d._get_default_store()
        store.set("minddp/roll/1/calls", "garbage")
        while not dog.lost:
            time.sleep(0.05)
        for _ in range(3):
            ddp(torch.ones(1, 4)).sum().backward()
    assert "has written to its keys" in texts[0]
