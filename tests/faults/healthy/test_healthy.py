"""No healthy program is ended: each trains to the numbers of torch's class, with warnings in the log."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.guards import times, watchdog
from tests.faults.healthy.programs import (
    EVENTS,
    PLACES,
    WAYS,
    busy_ranks,
    goes_on_with_a_destroyed_groups_wrapper,
    train,
)
from tests.faults.logged import logged
from tests.on_ranks import all_alike, on_own_ranks, on_ranks
from tests.ranks_pool import RankError, run_ranks

LOOK = 0.006  # seconds, in place of one
THREE_WARNINGS = 150 * LOOK  # after 10, 60 and 120 looks, where the machine is not busy

PROGRAMS = [
    *((place, "sleep") for place in PLACES),
    *(("forward", way) for way in WAYS),
    *(("gradient's hook", way) for way in WAYS if way not in ("traced", "throttled")),
]
# No rank waits there for the late one, or not that long.
QUIET = {"constructor", "receive of another group", "barrier of another group", "all-reduce by hand"}


def _both(rank, world_size, program, *args):
    theirs = program(torch.nn.parallel.DistributedDataParallel, rank, *args, 0.01)
    with times.faster(LOOK), logged() as told:
        ours = program(minddp.DistributedDataParallel, rank, *args, THREE_WARNINGS)
    alike = torch.equal if world_size == 2 else torch.allclose  # more ranks' sums depend on the buckets' lengths
    equal = all(alike(a, b) for a, b in zip(theirs, ours, strict=True))
    return equal, [text for text in told if "has waited" in text]


@pytest.mark.parametrize(("place", "way"), PROGRAMS)
def test_a_slow_rank_is_waited_for(place, way):
    (same, told), (also, _) = run_ranks(_both, 2, _train, place, way)
    assert same and also
    if place not in QUIET:
        assert any("rank 1 did not come yet" in text for text in told), told


def _event(rank, world_size, event):
    return _both(rank, world_size, lambda *args: [p.detach().clone() for p in event(*args).parameters()])


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_not_the_end(event):
    (same, told), (also, _) = run_ranks(_event, 2, event)
    assert same and also and told
    assert not any("SystemExit" in text for text in told), told  # is how a thread ends that has done its work


@on_ranks(2)
def test_a_wrapper_goes_on_when_its_group_is_destroyed(rank, world_size):
    """Not beside torch's class, whose end can hang there."""
    with times.faster(LOOK):
        ddp = goes_on_with_a_destroyed_groups_wrapper(minddp.DistributedDataParallel, rank, THREE_WARNINGS)
    assert all_alike(*ddp.parameters())


def _chain(rank, world_size):
    """Rank 0 writes a checkpoint, rank 1 waits for that in a barrier of theirs, rank 2 goes on to its backward; at
    the end rank 1 has what it needs, and leaves."""
    with times.faster(LOOK):
        pair = dist.new_group([0, 1])
        ddp = minddp.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        for step in range(3):
            if step == 2 and rank == 0:
                time.sleep(THREE_WARNINGS)
            if step == 2 and rank < 2:
                dist.barrier(pair)
            ddp(torch.ones(3, 2)).sum().backward()
        ddp.eval()
        if rank == 1:
            time.sleep(THREE_WARNINGS)
        ddp(torch.ones(3, 2))
        if rank == 2:
            watchdog.current(dist.group.WORLD).end()
    return True


def test_who_waits_for_a_slow_rank_is_waited_for_and_who_has_done_its_part_may_go():
    assert on_own_ranks(_chain, 3) == [True] * 3


def _leaves_without_a_word(rank, world_size):
    """As a program does whose libraries hang in their destructors."""
    with times.faster(LOOK):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        ddp = minddp.DistributedDataParallel(net, find_unused_parameters=True)
        for _ in range(4):
            ddp(torch.ones(3, 2)).sum().backward()
        if rank == 1:
            os._exit(0)
        time.sleep(30 * LOOK)
        return [bool(p.grad.isfinite().all()) for p in ddp.parameters()]


def test_a_rank_may_end_after_its_last_backward():
    """Nothing of its part is still under way: not the map of used parameters either."""
    with pytest.raises(RankError) as told:
        on_own_ranks(_leaves_without_a_word)
    assert told.value.results == {0: [True] * 4}


@on_ranks(2)
def test_a_program_that_makes_warnings_errors_is_not_ended_by_one(rank, world_size):
    with times.faster(LOOK), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(minddp.DistributedDataParallel, rank, "data", "sleep", THREE_WARNINGS)


def _train(ddp_class, rank, place, way, seconds):
    return train(ddp_class, rank, place, way, seconds)


def test_more_ranks_than_processors():
    assert all(same for same, _ in run_ranks(_both, 8, busy_ranks))
