"""A constructor that fails on one rank: the others wait, since the program may try again, until it ends."""

import time

import pytest
import torch
from torch import nn

import minddp
from minddp.guards import times
from tests.faults.test_watchdog import LOOK, _group, _run, _store_host

FROZEN = "doesn't have any parameter that requires a gradient"


def _fails():
    with pytest.raises(RuntimeError, match=FROZEN):
        minddp.DistributedDataParallel(nn.Linear(4, 4).requires_grad_(False))


def _tries_again_at_once(rank, ddp_class):
    """One rank alone has failed: the others wait in the same constructor still."""
    if rank == 1:
        _fails()
        time.sleep(2 * LOOK)
    return ddp_class(nn.Linear(4, 4))


def _all_fail_and_one_comes_late(rank, ddp_class):
    """The others wait in their second constructor while the first one's failure has been reported."""
    for _ in range(2):
        _fails()
    if rank == 1:
        time.sleep(4 * times.SETTLED * LOOK)
    return ddp_class(nn.Linear(4, 4))


def _healthy(rank, world_size, port):
    with _group(rank, world_size, port, "healthy"):
        for wrap in (_tries_again_at_once, _all_fail_and_one_comes_late, _tries_again_at_once):
            wrap(rank, minddp.DistributedDataParallel)(torch.ones(1, 4)).sum().backward()


def _one_leaves(rank, world_size, port):
    with _group(rank, world_size, port, "away"):
        _all_fail_and_one_comes_late(rank, minddp.DistributedDataParallel)
        if rank == 1:
            _fails()
            return
        text = "rank 1 will not take part in what all ranks tell each other.* it has destroyed its process group"
        with pytest.raises(minddp.LostPeer, match=text):
            minddp.DistributedDataParallel(nn.Linear(4, 4))


@pytest.mark.parametrize("scenario", [_healthy, _one_leaves], ids=lambda each: each.__name__.strip("_"))
def test_a_constructor_that_fails(scenario):
    with _store_host() as (_, port):
        _run(scenario, port)
