"""One rank's loss goes past the wrapper's outputs, in the iteration that the others' go through: a loss that was not
finite and is replaced by a zero term of the parameters, an image without boxes, a retry through ``.module``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.programs.beside_torch import MODES, those_that_differ


def _trained(cls, rank, replaced, **args):
    torch.manual_seed(0)
    ddp = cls(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), **args)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), 0.1), []
    for i in range(4):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * i + rank))
        loss = ddp(x).pow(2).mean()
        optimizer.zero_grad()
        if i in (0, 2) and rank == 1:
            loss = replaced(ddp, x)
        loss.backward()
        seen += [p.grad.clone() for p in ddp.parameters()]
        optimizer.step()
    return seen


def a_zero_term(cls, rank, **args):
    return _trained(cls, rank, lambda ddp, x: 0.0 * sum(p.sum() for p in ddp.parameters()), **args)


def a_retry_through_the_module(cls, rank, **args):
    return _trained(cls, rank, lambda ddp, x: ddp.module(0.5 * x).pow(2).mean(), **args)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_numbers_are_torchs(world_size):
    modes = {mode: MODES[mode] for mode in ("default", "views", "find_unused")}
    assert not those_that_differ([a_zero_term, a_retry_through_the_module], world_size, modes)
