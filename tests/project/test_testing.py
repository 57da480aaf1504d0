"""The harness itself: results in rank order, errors with every rank's text, no survivors."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from minddp.testing import RankError, run_ranks, shutdown


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
        run_ranks(_sleep, 2, timeout=4)
    assert "in _sleep" in capfd.readouterr().err, "who is stuck shows where"
    assert time.monotonic() - start < 20
    assert len(run_ranks(_sum, 2, 1)) == 2
