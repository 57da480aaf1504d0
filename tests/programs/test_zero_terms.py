"""One rank's loss goes past the wrapper's outputs, in the iteration that the others' go through: a loss that was not
finite and is replaced by a zero term of the parameters, an image without boxes, a retry through ``.module``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.guards import times
from minddp.guards.local_gradients import LocalGradients
from minddp.testing import run_ranks, shutdown
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


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_numbers_are_torchs(world_size):
    modes = {mode: MODES[mode] for mode in ("default", "views", "find_unused")}
    assert not those_that_differ([fast(a_zero_term), fast(a_retry_through_the_module)], world_size, 60, modes)


@times.faster(0.1)
def _asked(rank, world_size):
    """In which iteration rank 0 first says that it sends, before rank 1 asks."""
    said = []
    note = LocalGradients.note_sending
    LocalGradients.note_sending = lambda guard, *now: (said.append(now), note(guard, *now))
    ddp = minddp.DistributedDataParallel(nn.Linear(4, 2))
    try:
        for i in range(20):
            loss = ddp(torch.ones(1, 4)).sum()
            (loss if rank != 1 else 0.0 * sum(p.sum() for p in ddp.parameters())).backward()
            everyone = torch.tensor(len(said) if rank == 0 else 0)
            dist.broadcast(everyone, 0)
            if everyone:
                return i
    finally:
        LocalGradients.note_sending = note
    return None


def test_a_rank_that_was_asked_says_so_before_the_next_question():
    try:
        first = run_ranks(_asked, 2, timeout=60)
        assert first[0] and first[0] == first[1]
    finally:
        shutdown()


class fast:
    """The program, in ranks that look more often."""

    def __init__(self, program):
        self.program, self.__name__ = program, program.__name__

    def __call__(self, cls, rank, **args):
        with times.faster(0.1):
            return self.program(cls, rank, **args)
