"""Hooks and programs that drop ``.grad``, or fill it before they wrap: the same numbers as with torch's class."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn

import minddp
from tests.faults.logged import logged
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import MODES, batch, gradients, those_that_differ
from tests.ranks_pool import run_ranks

# In the first iteration of a static graph torch's class takes gradients at the end only.
AS_THEY_ARRIVE = {mode: MODES[mode] for mode in MODES if mode != "static"}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients_before(cls, rank, **args):
    """Of a backward before the module is wrapped; who asks for ``.grad`` then, holds what later backwards fill."""
    module = net()
    module(batch(rank)).square().sum().backward()
    ddp = cls(module, **args)
    held, seen = [p.grad for p in ddp.parameters()], gradients(ddp)
    for i in range(3):
        ddp(batch(rank, i)).square().sum().backward()
        seen += gradients(ddp)
        if args.get("gradient_as_bucket_view") and i == 0:
            seen += [torch.tensor(float(g is p.grad)) for g, p in zip(held, ddp.parameters())]
    return seen


def flat_gradients_before(cls, rank, **args):
    """Windows on a buffer of the program's own, which it fills after wrapping: they are the module's no more."""
    module = net()
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    offset = 0
    for p in module.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    ddp = cls(module, **args)
    flat.fill_(1.0)
    ddp(batch(rank)).square().sum().backward()
    return gradients(ddp)


def test_the_numbers_are_torchs():
    assert not those_that_differ([gradients_before], 2, MODES)
    assert not those_that_differ([flat_gradients_before], 2, AS_THEY_ARRIVE)


@on_ranks(2)
def test_a_module_without_values_is_refused_on_every_rank(rank, world_size):
    texts = []
    for on_meta in (True, rank == 1):
        try:
            minddp.DistributedDataParallel(nn.Linear(2, 2, device="meta" if on_meta else "cpu"))
        except RuntimeError as error:
            texts.append(str(error))
    all_of_them, one_of_them = texts
    assert "'weight', 'bias'" in all_of_them and "meta" in all_of_them
    assert "on meta" in one_of_them and "rank 1" in one_of_them


def _pipeline(rank, world_size, order):
    """Two stages, two micro-batches, the first under no_sync in forward; then a step."""
    first, second = minddp.DistributedDataParallel(net()), minddp.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    losses = {}
    with logged() as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        for what in order.split():
            if what[0] == "f":
                with first.no_sync() if what == "f0" else contextlib.nullcontext():
                    with second.no_sync() if what == "f0" else contextlib.nullcontext():
                        losses[what[1]] = second(first(batch(rank, int(what[1])))).square().sum()
            elif what[0] == "b":
                losses[what[1]].backward()
            else:
                optimizer.step()
    return seen


SILENT = ["f0 b0 f1 b1 step", "f0 f1 b0 b1 step", "f0 f1 b1 b0 f1 b1 step"]
TOLD = ["f0 b0 step step", "f0 f1 b1 b0 step"]


@pytest.mark.parametrize("order", [*SILENT, *TOLD])
def test_a_pipeline_is_told_of_steps_on_local_gradients_alone(order):
    for texts in run_ranks(_pipeline, 2, order):
        assert len(texts) == 2 * (order in TOLD) and all("no_sync" in text for text in texts)  # each wrapper once
        assert order in SILENT or "'0.weight'" in texts[0]
