"""Ranks whose collectives fit, though one goes another way: its own hook, head or loss, an all-reduce by hand."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.programs.beside_torch import MODES, SummedInBackward, batch, mlp, those_that_differ, trained


def hook_on_one_rank(cls, rank, **args):
    ddp = cls(mlp(), **args)
    if rank == 0:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return trained(ddp, rank, steps=4)


def hook_on_one_rank_later(cls, rank, **args):
    ddp = cls(mlp(), **args)
    seen = trained(ddp, rank, steps=4)
    if rank == 0:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return seen + trained(ddp, rank, steps=4, first=4)


def all_reduce_by_hand(cls, rank, **args):
    """A rank without a batch sends zeros for its one bucket."""
    ddp = cls(mlp(), **args)
    seen = trained(ddp, rank, steps=4)
    ddp.zero_grad()
    if rank == 0:
        everything = torch.zeros(sum(p.numel() for p in ddp.parameters()))
        dist.all_reduce(everything)
        return [*seen, everything.sum()]
    ddp(torch.ones(5, 4)).square().sum().backward()
    return [*seen, *(p.grad.clone() for p in ddp.parameters())]


def hook_in_a_thread(cls, rank, **args):
    """Its all-reduces are called when backward may have reached its end, and other ranks' sooner."""
    with ThreadPoolExecutor(1) as thread:

        def hook(_, bucket):
            future, buffer = torch.futures.Future(), bucket.buffer()

            def send():
                time.sleep(0.01 * rank)
                dist.all_reduce(buffer)
                future.set_result(buffer.div_(dist.get_world_size()))

            thread.submit(send)
            time.sleep(0.02 * (rank == 0))
            return future

        ddp = cls(mlp(), **args)
        ddp.register_comm_hook(None, hook)
        return trained(ddp, rank, steps=4)


def other_default_dtypes(cls, rank, **args):
    ddp = cls(mlp(), **args)
    torch.set_default_dtype([torch.float32, torch.float64][rank % 2])
    try:
        return trained(ddp, rank, steps=4)
    finally:
        torch.set_default_dtype(torch.float32)


class _Heads(nn.Module):
    def __init__(self, width=800):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.first = nn.Linear(width, 400)  # more than 1 MiB: with torch's class all else is one bucket
        self.second = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x, uses_second, zero):
        x = self.body(x)
        second = self.second(x).square().sum() if uses_second else 0
        first = self.first(SummedInBackward.apply(x)).square().mean()
        if not uses_second and zero:  # made last, so its gradients come first
            second = sum(0 * p.sum() for p in self.second.parameters())
        return first + second


def _head_of_one_rank(cls, rank, zero, **args):
    ddp = cls(_Heads(), **args)
    seen = []
    for i in range(3):
        ddp.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * i + rank))
        ddp(x, rank == 0, zero).backward()
        seen += [p.grad.clone() for p in ddp.module.parameters()]
    return seen


def head_of_one_rank(cls, rank, **args):
    """Where it is not used its bucket is complete before the module's own collective, elsewhere after it."""
    return _head_of_one_rank(cls, rank, zero=False, find_unused_parameters=True, **args)


def term_times_zero(cls, rank, **args):
    """The same, of gradients that are zero."""
    return _head_of_one_rank(cls, rank, zero=True, **args)


def _replaced(cls, rank, replacement, **args):
    """One rank's loss goes past the wrapper's outputs, in the iteration that the others' go through: a loss that was
    not finite and is replaced by a zero term of the parameters, an image without boxes, a retry through ``.module``.
    """
    ddp = cls(mlp(), **args)

    def loss(i, output):
        if i in (0, 2) and rank == 1:
            return replacement(ddp, batch(rank, i))
        return output.pow(2).mean()

    return trained(ddp, rank, 4, loss)


def a_zero_term(cls, rank, **args):
    return _replaced(cls, rank, lambda ddp, x: 0.0 * sum(p.sum() for p in ddp.parameters()), **args)


def a_retry_through_the_module(cls, rank, **args):
    return _replaced(cls, rank, lambda ddp, x: ddp.module(0.5 * x).pow(2).mean(), **args)


@pytest.mark.parametrize("world_size", [2, 3])
def test_they_meet_as_with_torchs_class(world_size):
    programs = [hook_on_one_rank, hook_on_one_rank_later, hook_in_a_thread, other_default_dtypes]
    modes = {mode: MODES[mode] for mode in ("default", "views", "small")}
    assert not those_that_differ(programs, world_size, modes)
    assert not those_that_differ([all_reduce_by_hand], world_size)
    modes = {mode: MODES[mode] for mode in ("default", "views")}
    assert not those_that_differ([head_of_one_rank, term_times_zero], world_size, modes)
    modes["find_unused"] = MODES["find_unused"]
    assert not those_that_differ([a_zero_term, a_retry_through_the_module], world_size, modes)
