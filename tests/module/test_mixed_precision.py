"""Mixed precision with more than one graph at a time: the gradients are those of a wrapper without it.

The low precision is float64 here, so that only a lost or a local gradient makes a difference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks

DOUBLE = _MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, reentrant: bool | None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))
        self.reentrant = reentrant

    def inner(self, x):
        return torch.tanh(self.middle(x[..., None])[..., 0] * self.scale)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(x)


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def saliency(ddp, x, other):
    x.requires_grad_()
    loss = _loss(ddp(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def penalty(ddp, x, other):
    x.requires_grad_()
    loss = _loss(ddp(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()


def kept_graph(ddp, x, other):
    with ddp.no_sync():
        loss = _loss(ddp(x))
        loss.backward(retain_graph=True)
        loss.backward()
    _loss(ddp(other)).backward()


def two_graphs(ddp, x, other):
    with ddp.no_sync():
        first = _loss(ddp(x))
    second = _loss(ddp(other))
    first.backward()
    second.backward()


def evaluated_between(ddp, x, other):
    loss = _loss(ddp(x))
    with torch.no_grad():
        ddp(other), ddp(other)
    assert {p.dtype for p in ddp.parameters()} == {torch.float32}
    loss.backward()


def probed_between(ddp, x, other):
    loss = _loss(ddp(x))
    with ddp.no_sync():
        torch.autograd.grad(_loss(ddp(other)), list(ddp.parameters()))
    loss.backward()


def one_loss_of_two(ddp, x, other):
    loss = _loss(ddp(x))
    with torch.no_grad():
        ddp(other)
    (loss + _loss(ddp(other))).backward()


def step_after_a_dropped_loss(ddp, x, other):
    _loss(ddp(x)).backward()
    _loss(ddp(other))
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter -= 0.1
    torch.testing.assert_close(ddp.state_dict()["module.scale"], ddp.module.scale.detach().float())


PROGRAMS = (
    saliency, penalty, kept_graph, two_graphs, evaluated_between, probed_between, one_loss_of_two,
    step_after_a_dropped_loss,
)  # fmt: skip


def _grads(program, rank: int, reentrant: bool | None, **options: Any) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(Net(reentrant), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found = []
    for i in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * i + rank)
        program(ddp, torch.randn(6, 4), torch.randn(6, 4))
        found += [p.grad.detach().float().clone() for p in ddp.parameters()]
        optimizer.step()
    return found + [value.clone() for value in ddp.state_dict().values()]


@pytest.mark.parametrize("reentrant", [None, False, True])
@on_ranks(2)
def test_as_without_it(rank, world_size, reentrant):
    for program in PROGRAMS:
        if reentrant and program in (saliency, penalty, probed_between):
            continue  # autograd.grad() cannot go through a reentrant checkpoint
        for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            plain = _grads(program, rank, reentrant, **options)
            mixed = _grads(program, rank, reentrant, mixed_precision=DOUBLE, **options)
            torch.testing.assert_close(mixed, plain, msg=lambda text: f"{program.__name__}, {options}: {text}")
