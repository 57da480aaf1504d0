"""DDP, SyncBatchNorm and minddp.functional in one model, each over a group of its own.

The truth is one process that runs all ranks' shares as autograd sees them: statistics and sums over the group's
members, the mean over ranks of the losses. Torch's class wraps the same model in the same run.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import minddp
from minddp import functional
from tests.on_ranks import on_ranks

STEPS = 4


class Mixed(torch.nn.Module):
    """Batch norm over ``norm_group``, a feature shared over ``share_group`` by a differentiable sum."""

    def __init__(self, norm_group, share_group):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 4)
        self.norm = minddp.SyncBatchNorm(4, process_group=norm_group)
        self.second = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(8, 2)
        self.share_group = share_group

    def forward(self, x):
        h = self.second(torch.tanh(self.norm(self.first(x))))
        shared = functional.all_reduce(h.mean(0), "avg", self.share_group).expand_as(h)
        return self.head(torch.cat([h, shared], 1))


class Whole(Mixed):
    """The same on all ranks' shares at once; ``norm_sets`` and ``share_sets`` are the groups' members."""

    def __init__(self, norm_sets, share_sets):
        super().__init__(None, None)
        self.norm_sets, self.share_sets = norm_sets, share_sets

    def forward(self, shares):
        first = [self.first(x) for x in shares]
        normed = list(first)
        for members in self.norm_sets:
            sizes = [len(first[r]) for r in members]
            whole = torch.cat([first[r] for r in members])
            y = F.batch_norm(whole, None, None, self.norm.weight, self.norm.bias, True, 0.0, self.norm.eps)
            for r, part in zip(members, y.split(sizes)):
                normed[r] = part
        hidden = [self.second(torch.tanh(x)) for x in normed]
        outputs = list(hidden)
        for members in self.share_sets:
            shared = torch.stack([hidden[r].mean(0) for r in members]).mean(0)
            for r in members:
                outputs[r] = self.head(torch.cat([hidden[r], shared.expand_as(hidden[r])], 1))
        return outputs


def _sets(world_size):
    """Who normalizes together, and who shares: other partitions of the ranks."""
    pairs = [[0, 1]] if world_size == 2 else [[0], [1, 2]]
    return pairs, [list(range(world_size))]


def _own_group(sets, rank):
    """This rank's group of ``sets``; every rank makes all of them."""
    groups = [dist.new_group(members) for members in sets]
    return next(group for group, members in zip(groups, sets) if rank in members)


def _shares(step, world_size):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3 + rank, 3, generator=generator) for rank in range(world_size)]


def _train(wrap, model, rank, world_size):
    ddp = wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(_shares(step, world_size)[rank]).square().mean().backward()
        gradients.append([p.grad.clone() for p in ddp.parameters()])
        optimizer.step()
    return gradients


def _truth(world_size, norm_sets, share_sets):
    whole = Whole(norm_sets, share_sets)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([y.square().mean() for y in whole(_shares(step, world_size))]).mean().backward()
        gradients.append([p.grad.clone() for p in whole.parameters()])
        optimizer.step()
    return gradients


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=lambda options: next(iter(options), "default"),
)  # fmt: skip
@on_ranks(2, 3)
def test_gradients_are_those_of_one_process(rank, world_size, options):
    norm_sets, share_sets = _sets(world_size)
    truth = _truth(world_size, norm_sets, share_sets)
    norm_group, share_group = _own_group(norm_sets, rank), _own_group(share_sets, rank)
    reduce_group = dist.new_group()
    for wrap in (torch.nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel):
        found = _train(
            lambda model: wrap(model, process_group=reduce_group, bucket_cap_mb_list=[1e-5] * 2, **options),
            Mixed(norm_group, share_group), rank, world_size,
        )  # fmt: skip
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5, msg=lambda text: f"{wrap.__module__}: {text}")
