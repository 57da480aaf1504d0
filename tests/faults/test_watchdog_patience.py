"""Ranks whose words come late, and processes whose store stops."""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
import minddp.shm
from tests.faults.test_watchdog import LOOK, TIMEOUT, _group, _net, _run, _short, _store_host, _train
from tests.forked import Program
from tests.on_ranks import on_ranks


def _in_a_thread(rank, world_size, port):
    with _group(rank, world_size, port, "thread"):
        ddp = minddp.DistributedDataParallel(_net(), process_group=_short())
        errors = []

        def train():
            try:
                _train(ddp, 2)
                if rank == 1:
                    ddp.module[1].forward = lambda x: (time.sleep(1.5 * TIMEOUT), x * 1.0)[1]
                _train(ddp, 1)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    if rank == 0:
        where = r"Rank 1 \(.*\) is in forward of iteration 3, at faults/test_watchdog_patience.py:\d+ in <lambda>"
        assert re.search(where, errors[0]), errors


def test_the_thread_that_trains_is_looked_at():
    with _store_host() as (_, port):
        _run(_in_a_thread, port)


def _one_is_stopped_for_a_while(rank, world_size, port):
    with _group(rank, world_size, port, "patient") as told:
        ddp = minddp.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), _net()))
        other = minddp.DistributedDataParallel(_net(), process_group=dist.new_group([0, 1]))
        beside = threading.Thread(target=_train, args=(other, 3))
        for step in range(4):
            if step == 2 and rank == 0:
                subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            if step == 2:
                beside.start()
            ddp(torch.randn(2, 4)).sum().backward()
        beside.join()
        time.sleep(TIMEOUT * (rank == 1))
        minddp.DistributedDataParallel(_net())
    late = [text for text in told if "has waited" in text and "rank 0 (" in text and "is stopped" in text]
    waits = [text.partition("s for ")[2] for text in late]
    # Two threads have waited. Each is logged after 10 and 60 looks.
    assert rank == 0 or (len({*waits}) == 2 and max(map(waits.count, waits)) <= 2), told


def test_a_rank_that_is_only_late_is_waited_for_and_logged():
    with _store_host() as (_, port):
        _run(_one_is_stopped_for_a_while, port)


_ENDS_EARLY = """
import sys, time, torch, torch.distributed as dist, minddp, minddp.shm
rank, port, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
minddp.guards.times.set_look(float(sys.argv[4]))
store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=2)
ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(5):
    if step == 3 and rank == 1:
        raise ValueError("the label file of shard 1 is truncated")
    if step == 3:
        time.sleep(20 * float(sys.argv[4]))  # until rank 1 has been gone for long
    ddp(torch.ones(1, 4)).sum().backward()
"""


def started(source, port, where):
    """Two ranks as a user starts them: how a program ends is known where it is the process's own."""
    arguments = [[str(rank), str(port), where, str(LOOK)] for rank in range(2)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", source, *one], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for one in arguments
    ]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_words_are_read_long_after_they_were_left(backend):
    with _store_host() as (_, port):
        told = [rank.communicate()[1] for rank in started(_ENDS_EARLY, port, backend)]
    assert "Rank 1 (" in told[0]
    assert "says: its program ended with ValueError: the label file of shard 1 is truncated" in told[0], told[0]


_STORE_STOPS = """
import os, signal, sys, time, torch, torch.distributed as dist, minddp, minddp.shm
rank, port, backend, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
dist.init_process_group(backend, store=store, rank=rank, world_size=2)

class Slow:
    sleep = staticmethod(time.sleep)
    def __del__(self):  # while Python shuts down
        self.sleep(1)

minddp.guards.times.set_look(float(sys.argv[6]))
ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
ddp(torch.ones(1, 4)).sum().backward()
dist.barrier()
if rank == 0:
    kept = Slow()
    os.kill(host, signal.SIGSTOP)
    time.sleep(float(sys.argv[5]))
    print("ends", flush=True)
else:
    time.sleep(3000)
"""


@pytest.mark.parametrize("seconds", [0.1, pytest.param(1.0, marks=pytest.mark.all)])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_process_ends_though_its_store_is_stopped_and_comes_back(backend, seconds):
    """A thread that is in a request to it then would abort the process."""
    with _store_host() as (host, port):
        arguments = str(port), backend, str(host.pid), str(seconds), str(LOOK)
        with Program(_STORE_STOPS, "0", *arguments) as first, Program(_STORE_STOPS, "1", *arguments, rank=1):
            try:
                assert first.stdout.readline() == "ends\n"
                time.sleep(1.5)  # at exit it waits for its thread, then Python shuts down
            finally:
                os.kill(host.pid, signal.SIGCONT)
            told = first.communicate()[1]
    assert first.returncode == 0, told


def _gives_up_and_lets_go(rank, world_size, port):
    with _group(rank, world_size, port, "given up", "shm"):
        group = weakref.ref(dist.group.WORLD)
        ddp = minddp.DistributedDataParallel(nn.Linear(4, 4))
        if rank == 1:
            ddp.module.forward = lambda x: 1 // 0
        with pytest.raises(ZeroDivisionError if rank == 1 else RuntimeError):
            _train(ddp, 1)
            if rank == 0:
                raise RuntimeError("unharmed")
        del ddp
    end = time.monotonic() + 250
    while group() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.1)
    return group() is None


def test_a_group_of_shared_memory_that_was_given_up_goes():
    with _store_host() as (_, port):
        assert _run(_gives_up_and_lets_go, port)[0]


@on_ranks(2)
def test_two_wrappers_checks_under_one_optimizer(rank, world_size):
    """One has NaN on rank 0 only, the other on rank 1 only; what ranks tell of one is not taken for the other's."""
    trials = []
    for _ in range(8):
        kept = [object() for _ in range(random.Random(rank).randrange(50))]  # other addresses on each rank
        nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
        wrapped = [minddp.DistributedDataParallel(net, check_finite="warn") for net in nets]
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1)
        for index, ddp in enumerate(wrapped):
            ddp(torch.full((1, 2), float("nan") if index == rank else 1.0)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        trials.append([re.findall(r"on rank \d", str(one.message)) for one in caught])
        del kept
    assert trials == [[["on rank 0"], ["on rank 1"]]] * 8
