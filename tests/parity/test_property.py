"""Random small models, caps, branches and no_sync patterns against a plain per-parameter average.

Every case is drawn from one integer, so that all ranks build the same one: parameters that are shared, frozen, unused
or sparse; branches that depend on the rank; any bucket caps and modes; iterations with and without synchronization.
The truth is computed beside it, one all_reduce a parameter.

``MINDDP_EXAMPLES`` sets how many cases ``make test-all`` draws.
"""

import copy
import os
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks

EXAMPLES = int(os.environ.get("MINDDP_EXAMPLES", "500"))


class RandomNet(nn.Module):
    """Layers in a row; each may be shared, frozen, skipped by some ranks, or a table with sparse gradients."""

    def __init__(self, draw: random.Random):
        super().__init__()
        width = draw.choice([2, 3, 8])
        self.width = width
        pool = [nn.Linear(width, width, bias=draw.random() < 0.7) for _ in range(draw.randint(1, 4))]
        self.layers = nn.ModuleList(pool)
        self.order = [draw.randrange(len(pool)) for _ in range(draw.randint(1, 5))]
        self.skipped_by = [{r for r in range(3) if draw.random() < 0.25} for _ in self.order]
        self.table = nn.Embedding(5, width, sparse=draw.random() < 0.5) if draw.random() < 0.4 else None
        self.scale = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.ones(width, dtype=torch.float64)) if draw.random() < 0.3 else None
        for layer in pool:
            if draw.random() < 0.15:
                layer.weight.requires_grad_(False)

    @property
    def may_be_unused(self):
        return any(self.skipped_by) or len(set(self.order)) < len(self.layers)

    def forward(self, x, rank):
        if self.table is not None:
            x = x + self.table((x[:, 0].abs() * 2).long().clamp(0, 4))
        for layer, skipped in zip(self.order, self.skipped_by):
            if rank not in skipped:
                x = torch.tanh(self.layers[layer](x))
        x = x * self.scale
        return x if self.wide is None else x.double() * self.wide


def _average(model, world_size, used):
    """The plain truth: a gradient that no rank made stays; one that some made is averaged on all."""
    for p, mine in zip(model.parameters(), used):
        if not p.requires_grad:
            continue
        anyone = torch.tensor([float(mine)])
        dist.all_reduce(anyone)
        if not anyone.item():
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        dist.all_reduce(grad)
        p.grad = grad / world_size


def _one_case(seed, rank, world_size):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = RandomNet(draw)
    truth = copy.deepcopy(net)
    arguments = {
        "find_unused_parameters": net.may_be_unused or draw.random() < 0.3,
        "gradient_as_bucket_view": draw.random() < 0.5,
        "bucket_cap_mb": draw.choice([None, 1e-5, 5e-5, 2e-4, 1]),
    }
    ddp = DistributedDataParallel(net, **arguments)
    accumulated = [False] * len(list(truth.parameters()))
    synchronize = True
    for step in range(draw.randint(2, 5)):
        to_none = draw.random() < 0.7 or net.table is not None
        if synchronize and draw.random() < 0.8:
            for model in (ddp, truth):
                model.zero_grad(set_to_none=to_none)
        synchronize = draw.random() < 0.7
        torch.manual_seed(1000 * seed + 10 * step + rank)
        x = torch.randn(draw.choice([1, 4]), net.width)
        ddp.require_backward_grad_sync = synchronize
        ddp(x, rank).pow(2).sum().backward()
        truth(x, rank).pow(2).sum().backward()
        accumulated = [a or _took_part(truth, p, rank) for a, p in zip(accumulated, truth.parameters())]
        if synchronize:
            _average(truth, world_size, accumulated)
            accumulated = [False] * len(accumulated)
        for (name, ours), theirs in zip(ddp.module.named_parameters(), truth.parameters()):
            assert (ours.grad is None) == (theirs.grad is None), (name, step)
            if ours.grad is not None:
                torch.testing.assert_close(
                    ours.grad.to_dense(), theirs.grad.to_dense(), msg=lambda m: f"{name}, step {step}: {m}"
                )


def _took_part(model, parameter, rank):
    for layer, skipped in zip(model.order, model.skipped_by):
        if rank not in skipped and any(parameter is p for p in model.layers[layer].parameters()):
            return parameter.requires_grad
    return not any(parameter is p for p in model.layers.parameters())


@pytest.mark.parametrize("cases", [25, pytest.param(EXAMPLES, marks=pytest.mark.all)])
@pytest.mark.timeout(1800 + EXAMPLES)
@on_ranks(2, 3)
def test_any_model_gets_the_plain_average(rank, world_size, cases):
    for seed in range(cases):
        try:
            _one_case(seed, rank, world_size)
        except Exception as error:
            raise AssertionError(f"seed {seed} on rank {rank}: {error}") from error
