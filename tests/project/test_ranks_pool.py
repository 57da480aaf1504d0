"""The harness itself: results in rank order, errors with every rank's text, no survivors."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import minddp
from tests import forked, ranks_pool
from tests.ranks_pool import RankError, RankPool, run_ranks, shutdown, spawn


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
        time.sleep(600)
    return os.getpid()


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_come_in_rank_order(world_size):
    expected = sum(10 + rank for rank in range(world_size))
    assert [int(v) for v in run_ranks(_sum, world_size, 10)] == [expected] * world_size


def test_a_failing_rank_is_named():
    with pytest.raises(RankError, match="rank one fails") as caught:
        run_ranks(_fail_on_one, 2)
    assert set(caught.value.failures) == {1}
    assert caught.value.results == {0: "fine"}


def test_a_hang_ends_in_time_and_the_next_call_works(capfd):
    shutdown()
    run_ranks(_sum, 2, 1)  # started here, where their stderr is looked at, and ready
    with pytest.raises(RankError, match="did not end within"):
        run_ranks(_sleep, 2, timeout=2, backend=None)
    assert "in _sleep" in capfd.readouterr().err, "who is stuck shows where"
    assert len(run_ranks(_sum, 2, 1)) == 2


def test_a_free_port_is_none_that_the_kernel_gives_to_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as stream:
        first, last = map(int, stream.read().split())
    assert not any(first <= ranks_pool.free_port() <= last for _ in range(20))


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


def _leaves_a_thread(rank, world_size):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    raise ValueError("with a thread")


def _dies(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _says_that_it_runs(rank, world_size, folder):
    (folder / str(rank)).touch()
    time.sleep(600)


def _cannot_be_read():
    raise LookupError("cannot be read")


class _Unreadable:
    def __reduce__(self):
        return _cannot_be_read, ()


def _answers_what_cannot_be_read(rank, world_size):
    return _Unreadable() if rank == 0 else None


def test_ranks_are_kept_where_all_ended_well_and_only_there(pool):
    before = pool.run(_process)
    assert pool.run(_process) == before
    for fn, says in [
        (_fail_on_one, "rank one fails"),
        (_one_raises_in_a_wrapper, "rank one fails"),
        (_one_is_waited_for, "rank one fails"),
        (_leaves_a_thread, "with a thread"),
        (_dies, "exit code -9"),
        (_answers_what_cannot_be_read, "cannot be read"),
    ]:
        with pytest.raises((RankError, LookupError), match=says):
            pool.run(fn)
        after = pool.run(_process)
        assert not set(after) & set(before), fn
        before = after


class _Interrupted(BaseException):
    """As Ctrl-C, or a test runner's timeout."""


def test_a_call_that_is_interrupted_leaves_the_next_nothing(pool, tmp_path):
    before = pool.run(_process)

    def interrupts(*_):
        raise _Interrupted

    def waits_and_interrupts():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, interrupts)
    interrupter = threading.Thread(target=waits_and_interrupts)
    try:
        interrupter.start()
        with pytest.raises(_Interrupted):
            pool.run(_says_that_it_runs, tmp_path)
    finally:
        interrupter.join()
        signal.signal(signal.SIGUSR1, previous)
    assert not set(pool.run(_process)) & set(before)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def _starts_late(path, *args):
    time.sleep(0.5)
    path.touch()
    ranks_pool._rank_main(*args)


def _does_not_start(path, *args):
    os._exit(3)


def test_the_start_of_a_rank_is_no_part_of_the_call(monkeypatch, tmp_path):
    """On a busy machine it may take longer than what is called."""

    def start(_, args, rank, pipe):
        return forked.start_rank(target, (tmp_path / "started", *args), rank, pipe)

    pool = RankPool(1, start=start)
    try:
        target = _starts_late
        ranks = ranks_pool._Ranks(1, 1, start)
        assert (tmp_path / "started").exists(), "it is there before a call's time begins"
        ranks.close()
        pool.run(_process)
        pool.close()
        target = _does_not_start
        with pytest.raises(RankError, match="rank 0\nprocess died, exit code 3"):
            pool.run(_process)
        target = _starts_late
        monkeypatch.setattr(ranks_pool, "START_SECONDS", 0.1)
        with pytest.raises(RankError, match="rank 0\ndid not start within 0.1 s"):
            pool.run(_process)
    finally:
        pool.close()


_imported_by: list[int] = []  # of this module


def _knows_its_parent(rank, world_size):
    return bool(_imported_by)


@pytest.mark.long
def test_spawned_ranks_do_the_same():
    """Each imports what it needs, in place of being forked."""
    pool = RankPool(2, start=spawn)
    _imported_by.append(os.getpid())
    try:
        assert pool.run(_knows_its_parent) == [False, False]
        before = pool.run(_process)
        assert pool.run(_process) == before
        with pytest.raises(RankError, match="rank one fails"):
            pool.run(_fail_on_one)
    finally:
        pool.close()
