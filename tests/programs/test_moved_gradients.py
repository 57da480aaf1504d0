"""Hooks and programs that move, drop or change ``.grad``: the same numbers as with torch's class.

A gradient is taken when it arrives, in the first iteration as in later ones: what is done to it after that, by
another parameter's hook or between two backwards, comes too late.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn

import minddp
from minddp.testing import run_ranks
from tests.faults.logged import logged
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import MODES, those_that_differ

DEFAULTS = {mode: MODES[mode] for mode in ("default", "find_unused", "small")}
# In the first iteration of a static graph torch's class takes gradients at the end only.
AS_THEY_ARRIVE = {mode: MODES[mode] for mode in MODES if mode != "static"}


def batch(rank, i=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * i + rank))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients(ddp):
    return [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]


def main_grad(cls, rank, **args):
    """Megatron: a hook adds each gradient to a buffer of its own, and drops it."""
    ddp, seen = cls(net(), **args), []

    def move(p):
        p.main_grad.add_(p.grad)
        p.grad = None

    for p in ddp.parameters():
        p.main_grad = torch.zeros_like(p)
        p.register_post_accumulate_grad_hook(move)
    for i in range(4):
        ddp.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        seen += [p.main_grad.clone() for p in ddp.parameters()] + gradients(ddp)
    return seen


def main_grad_of_some(cls, rank, **args):
    """And with gradient accumulation."""
    ddp, seen = cls(net(), **args), []
    for p in list(ddp.parameters())[::2]:
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for i in range(3):
        ddp.zero_grad()
        for j in range(2):
            ddp(batch(rank, 10 * i + j)).square().sum().backward()
            seen += gradients(ddp)
    return seen


def scales_another(cls, rank, by=3.0, how="in place", **args):
    """A hook of the first layer, whose gradient comes last, changes the last one's."""
    ddp, seen = cls(net(), **args), []
    late, early = ddp.module[0].weight, ddp.module[4].weight

    def change(_):
        if how == "in place":
            early.grad.mul_(by)
        elif how == "replaced":
            early.grad = early.grad * by
        else:
            early.grad = None

    late.register_post_accumulate_grad_hook(change)
    for i in range(4):
        ddp.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        seen += gradients(ddp)
    return seen


def replaces_another(cls, rank, **args):
    return scales_another(cls, rank, how="replaced", **args)


def drops_another(cls, rank, **args):
    return scales_another(cls, rank, how="dropped", **args)


def two_parts(cls, rank, **args):
    """Two outputs, a backward each: the program changes what the first one brought."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    ddp, seen = cls(Heads(), **args), []
    for i in range(3):
        ddp.zero_grad()
        a, b = ddp(batch(rank, i))
        a.square().sum().backward()
        ddp.module.a.weight.grad.mul_(5)
        b.square().sum().backward()
        seen += gradients(ddp)
    return seen


def shared_layer(cls, rank, **args):
    """Its gradient arrives whole: autograd adds before it accumulates."""
    torch.manual_seed(0)
    ddp, seen = cls(nn.Sequential(layer := nn.Linear(4, 4), nn.Tanh(), layer), **args), []
    for i in range(3):
        ddp.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        seen += gradients(ddp)
    return seen


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


STATIC = [main_grad, main_grad_of_some, gradients_before, shared_layer]
WHOLE = [scales_another, replaces_another, drops_another]


def test_the_numbers_are_torchs():
    assert not those_that_differ(STATIC, 2, MODES)


def test_each_is_taken_when_it_arrives():
    assert not those_that_differ(WHOLE, 2, DEFAULTS)
    assert not those_that_differ([two_parts], 2, {"default": {}, "views": MODES["views"]})
    assert not those_that_differ([flat_gradients_before], 2, AS_THEY_ARRIVE)


def _iterations_alike(rank, world_size):
    """With one batch and unchanged weights every iteration gives the same."""
    seen = {}
    for mode, args in MODES.items():
        for how in ("in place", "replaced", "dropped"):
            ddp = minddp.DistributedDataParallel(net(), **args)
            late, early = ddp.module[0].weight, ddp.module[4].weight

            def change(_, early=early, how=how):
                if how == "in place":
                    early.grad.mul_(3)
                else:
                    early.grad = early.grad * 3 if how == "replaced" else None

            late.register_post_accumulate_grad_hook(change)
            each = []
            for _ in range(3):
                ddp.zero_grad()
                ddp(batch(rank)).square().sum().backward()
                each.append(torch.cat([g.flatten() for g in gradients(ddp)]))
            seen[mode, how] = all(torch.allclose(each[0], one) for one in each)
    return seen


def test_the_first_iteration_is_like_the_others():
    for seen in run_ranks(_iterations_alike, 2):
        # In a bucket of its own, as a view, it is the memory that is sent: changed in time or not, as with torch's.
        assert {key for key, alike in seen.items() if not alike} <= {("small views", "in place")}


@on_ranks(2)
def test_a_gradient_that_comes_twice_at_first(rank, world_size):
    """A gradient that comes twice in the first iteration, from two nested graphs: both are in the average."""
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.first(x)
            for _ in range(2):
                h = checkpoint(self.layer, h, use_reentrant=True).tanh()
            return h

    one = Twice()
    for r in range(world_size):
        (one(batch(r)).square().sum() / world_size).backward()
    wrong = []
    for mode, args in MODES.items():
        ddp = minddp.DistributedDataParallel(Twice(), **args)
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(rank)).square().sum().backward()
            if not all(torch.allclose(p.grad, q.grad, atol=1e-5) for p, q in zip(ddp.parameters(), one.parameters())):
                wrong.append(mode)
    assert not wrong


def _meta(rank, world_size):
    texts = []
    for on_meta in (True, rank == 1):
        try:
            minddp.DistributedDataParallel(nn.Linear(2, 2, device="meta" if on_meta else "cpu"))
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_a_module_without_values_is_refused_on_every_rank():
    for all_of_them, one_of_them in run_ranks(_meta, 2):
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


@pytest.mark.parametrize("order", ["f0 b0 f1 b1 step", "f0 f1 b0 b1 step", "f0 f1 b1 b0 f1 b1 step"])
def test_a_pipeline_whose_gradients_are_averaged_warns_of_nothing(order):
    assert run_ranks(_pipeline, 2, order) == [[], []]


@pytest.mark.parametrize("order", ["f0 b0 step step", "f0 f1 b1 b0 step"])
def test_a_step_on_local_gradients_warns(order):
    for texts in run_ranks(_pipeline, 2, order):
        assert len(texts) == 2 and all("no_sync" in text for text in texts)  # each wrapper once
        assert "'0.weight'" in texts[0]
