"""The harness itself: results in rank order, errors with every rank's text, no survivors."""

import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp import testing
from minddp.testing import RankError, RankPool, run_ranks, shutdown, spawn
from tests import zygote


def _sum(rank, world_size, base):
    value = torch.tensor([base + rank])
    dist.all_reduce(value)
    return value


def _fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one fails")
    return "fine"


def _sleep(rank, world_size):
    if rank == 0:
        time.sleep(60)
    return os.getpid()


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_come_in_rank_order(world_size):
    expected = sum(10 + rank for rank in range(world_size))
    assert [int(v) for v in run_ranks(_sum, world_size, 10)] == [expected] * world_size


def test_a_failing_rank_is_named_and_the_rest_is_kept():
    with pytest.raises(RankError, match="rank one fails") as caught:
        run_ranks(_fail_on_one, 2)
    assert set(caught.value.failures) == {1}
    assert caught.value.results == {0: "fine"}


def test_a_hang_ends_in_time_and_the_next_call_works(capfd):
    shutdown()
    run_ranks(_sum, 2, 1)  # started here, where their stderr is looked at, and ready
    start = time.monotonic()
    with pytest.raises(RankError, match="did not end within"):
        run_ranks(_sleep, 2, timeout=1)
    assert "in _sleep" in capfd.readouterr().err, "who is stuck shows where"
    assert time.monotonic() - start < 20
    assert len(run_ranks(_sum, 2, 1)) == 2


def test_a_free_port_is_none_that_the_kernel_gives_to_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as stream:
        first, last = map(int, stream.read().split())
    assert not any(first <= testing.free_port() <= last for _ in range(20))


@pytest.fixture
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def _process(rank, world_size):
    dist.all_reduce(torch.ones(1))
    return os.getpid()


def _one_raises_in_a_wrapper(rank, world_size):
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp(torch.ones(2, 3)).sum().backward()
    _fail_on_one(rank, world_size)


def _one_is_waited_for(rank, world_size):
    _fail_on_one(rank, world_size)
    dist.all_reduce(torch.ones(1))


def _leaves_a_group(rank, world_size, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
    dist.barrier()  # who is still connecting to a rank that goes could not make its group
    raise ValueError("in a group of its own")


def _cannot_make_a_group(rank, world_size):
    """As where the other rank has gone in the middle of it."""
    with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", side_effect=ValueError("has half a group")):
        if rank == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=world_size)
    raise ValueError("has no group")


def _leaves_a_thread(rank, world_size):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    raise ValueError("with a thread")


def _dies(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_have_all_answered_are_kept(pool, tmp_path):
    before = pool.run(_process)
    for fn in (_fail_on_one, _one_raises_in_a_wrapper, _one_is_waited_for, _leaves_a_group):
        own = [str(tmp_path / "store")] if fn is _leaves_a_group else []
        with pytest.raises(RankError, match="rank one fails|of its own"):
            pool.run(fn, *own, backend=None if own else "gloo")
        assert pool.run(_process) == before, fn


CANNOT_GO_ON = [
    (_leaves_a_thread, "with a thread"),
    (_cannot_make_a_group, "has half a group"),
    (_dies, "exit code -9"),
]


@pytest.mark.parametrize("fn, says", CANNOT_GO_ON)
def test_ranks_that_cannot_go_on_are_not(pool, fn, says):
    before = pool.run(_process)
    with pytest.raises(RankError, match=says):
        pool.run(fn, backend=None)
    assert not set(pool.run(_process)) & set(before)


def _starts_late(path, *args):
    time.sleep(0.5)
    path.touch()
    testing._rank_main(*args)


def _does_not_start(path, *args):
    os._exit(3)


def test_the_start_of_a_rank_is_no_part_of_the_call(monkeypatch, tmp_path):
    """On a busy machine it may take longer than what is called."""

    def start(_, args, rank, pipe):
        return zygote.start_rank(target, (tmp_path / "started", *args), rank, pipe)

    pool = RankPool(1, start=start)
    try:
        target = _starts_late
        pool._start()  # before a call's time begins
        assert (tmp_path / "started").exists()
        pool.run(_process)
        pool.close()
        target = _does_not_start
        with pytest.raises(RankError, match="rank 0\nprocess died, exit code 3"):
            pool.run(_process)
        target = _starts_late
        monkeypatch.setattr(testing, "START_SECONDS", 0.1)
        with pytest.raises(RankError, match="rank 0\ndid not start within 0.1 s"):
            pool.run(_process)
    finally:
        pool.close()


@pytest.mark.long
def test_spawned_ranks_do_the_same():
    """What users get, who have no zygote."""
    pool = RankPool(2, start=spawn)
    try:
        before = pool.run(_process)
        with pytest.raises(RankError, match="rank one fails"):
            pool.run(_fail_on_one)
        assert pool.run(_process) == before
    finally:
        pool.close()
