"""A communication hook on some ranks only is refused on all of them if it gives another mean."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import minddp
from minddp.guards import times
from tests.on_ranks import on_ranks

LOOK = 0.05


def _own_hook(state, bucket):
    return allreduce_hook(None, bucket)


def _trained(ddp, steps=1):
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4) * (1 + dist.get_rank())).square().sum().backward()
        optimizer.step()
    return ddp


def _same_everywhere(ddp):
    everyone = [torch.zeros(4, 4) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ddp.module.weight.detach())
    return all(torch.equal(each, everyone[0]) for each in everyone)


@on_ranks(2)
def test_hooks_on_all_ranks_go_on(rank, world_size):
    with times.faster(LOOK):
        ddp = minddp.DistributedDataParallel(nn.Linear(4, 4))
        if rank == 0:
            ddp(torch.ones(2, 4))  # alone
        ddp.register_comm_hook(None, (allreduce_hook, _own_hook)[rank])
        assert _same_everywhere(_trained(ddp, 3))
        late = _trained(minddp.DistributedDataParallel(nn.Linear(4, 4)), 3)
        if rank == 1:
            time.sleep(10 * LOOK)
        late.register_comm_hook(None, (allreduce_hook, _own_hook)[rank])
        assert _same_everywhere(_trained(late, 20))
        with late.join():
            _trained(late, 1 + rank)


def _signs(state, bucket):
    return allreduce_hook(None, bucket).then(lambda future: future.value().sign_())


@on_ranks(3)
def test_a_hook_on_one_rank_that_gives_another_mean_is_refused_before_the_first_step(rank, world_size):
    ddp = minddp.DistributedDataParallel(nn.Linear(4, 4))
    before = ddp.module.weight.clone()
    if rank == 1:
        ddp.register_comm_hook(None, _signs)
    with pytest.raises(RuntimeError, match=r"only some ranks have a communication hook: rank 1 \(_signs\)"):
        _trained(ddp)
    assert torch.equal(ddp.module.weight, before)


@on_ranks(2)
def test_a_late_hook_on_one_rank_is_refused_within_a_few_steps(rank, world_size):
    with times.faster(LOOK):
        ddp = _trained(minddp.DistributedDataParallel(nn.Linear(4, 4)), 2)
        if rank == 1:
            ddp.register_comm_hook(None, _signs)
        with pytest.raises(RuntimeError, match="ranks have a communication hook: rank 1, from iteration 3 on"):
            for _ in range(100):
                _trained(ddp)
                time.sleep(LOOK)


@on_ranks(2)
def test_a_hook_on_one_rank_that_gives_the_mean_goes_on(rank, world_size):
    with times.faster(LOOK):
        ddp = minddp.DistributedDataParallel(nn.Linear(4, 4))
        late = _trained(minddp.DistributedDataParallel(nn.Linear(4, 4)), 2)
        if rank == 1:
            ddp.register_comm_hook(None, _own_hook)
            late.register_comm_hook(None, _own_hook)
        for _ in range(30):
            _trained(ddp)
            _trained(late)
            time.sleep(LOOK / 5)
        assert _same_everywhere(ddp) and _same_everywhere(late)
