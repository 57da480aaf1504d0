"""Modules that change after they were wrapped.

Where no gradient of what has changed stays local, or no optimizer steps it, the numbers are torch's. A step that
would use one that differs between ranks is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.programs.beside_torch import MODES, those_that_differ
from tests.programs.test_own_classes import batch, trained


class Frozen(nn.Module):
    """One layer is frozen when it is wrapped. ``use``: what comes between the two others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8)
        self.b = nn.Linear(8, 2)
        self.frozen.requires_grad_(False)
        self.use: Callable[..., torch.Tensor] = lambda x: self.frozen(x)

    def forward(self, x):
        return self.b(self.use(self.a(x)).tanh())


# --- no gradient would stay local


def a_cast_for_a_last_evaluation(cls, rank, **args):
    ddp = cls(Frozen(), **args)
    seen = trained(ddp, rank)
    ddp.module.double()
    return [*seen, ddp(batch(rank).double()).detach()]


def unfrozen_for_a_penalty_that_is_looked_at(cls, rank, **args):
    """autograd.grad() puts nothing into ``.grad``; the graph that is frozen again leads to the layer still."""
    ddp = cls(Frozen(), **args)
    seen = trained(ddp, rank)
    ddp.zero_grad()
    ddp.module.frozen.requires_grad_(True)
    loss = ddp(batch(rank)).square().sum()
    seen += torch.autograd.grad(loss, list(ddp.module.frozen.parameters()), retain_graph=True)
    ddp.module.frozen.requires_grad_(False)
    loss.backward()
    return [*seen, *(p.grad for p in ddp.module.parameters()), *trained(ddp, rank)]


def unfrozen_where_its_features_are_detached(cls, rank, **args):
    ddp = cls(Frozen(), **args)
    seen = trained(ddp, rank)
    ddp.module.use = lambda x: x + ddp.module.frozen(x).detach()
    ddp.module.frozen.requires_grad_(True)
    return [*seen, *trained(ddp, rank), *(p.grad for p in ddp.module.frozen.parameters())]


def a_layer_for_later(cls, rank, **args):
    ddp = cls(Frozen(), **args)
    seen = trained(ddp, rank)
    ddp.module.later = nn.Linear(8, 8)
    seen += trained(ddp, rank)
    del ddp.module.later
    return [*seen, *trained(ddp, rank)]


def unfrozen_and_its_own(cls, rank, **args):
    """Each rank's own layer, on purpose: it trains under no_sync."""
    ddp = cls(Frozen(), **args)
    seen = trained(ddp, rank)
    ddp.zero_grad()
    ddp.module.frozen.requires_grad_(True)
    with ddp.no_sync():
        ddp(batch(rank)).square().sum().backward()
    seen += [p.grad for p in ddp.module.frozen.parameters()]
    ddp.module.frozen.requires_grad_(False)
    ddp.zero_grad()
    return [*seen, *trained(ddp, rank)]


HEALTHY = [
    a_cast_for_a_last_evaluation, unfrozen_for_a_penalty_that_is_looked_at, unfrozen_where_its_features_are_detached,
    a_layer_for_later, unfrozen_and_its_own,
]  # fmt: skip


def test_what_stays_local_nowhere_goes_on():
    assert not those_that_differ(HEALTHY, 2, {mode: MODES[mode] for mode in ("default", "views", "find_unused")})


# --- a gradient would stay local


def _plain(ddp, x):
    ddp.module.frozen.requires_grad_(True)
    return ddp(x)


def _within_forward(ddp, x):
    """Frozen again before anybody looks at it from outside, but for the gradient."""
    ddp.module.frozen.requires_grad_(False)

    def use(x):
        ddp.module.frozen.requires_grad_(True)
        return ddp.module.frozen(x)

    ddp.module.use = use
    return ddp(x)


def _in_a_reentrant_checkpoint(ddp, x):
    ddp.module.frozen.requires_grad_(True)
    ddp.module.use = lambda x: checkpoint(ddp.module.frozen, x, use_reentrant=True)
    return ddp(x)


def _freeze_all_others(ddp):
    ddp.module.requires_grad_(False)
    ddp.module.frozen.requires_grad_(True)


def _all_others_are_frozen(ddp, x):
    _freeze_all_others(ddp)
    return ddp(x)


def _all_others_are_frozen_and_the_output_is_hidden(ddp, x):
    _freeze_all_others(ddp)
    hook = ddp.module.register_forward_hook(lambda module, inputs, output: lambda: output)
    out = ddp(x)()
    hook.remove()
    return out


CASES = [
    _plain, _within_forward, _in_a_reentrant_checkpoint, _all_others_are_frozen,
    _all_others_are_frozen_and_the_output_is_hidden,
]  # fmt: skip


def _averaged(ddp):
    return all_alike(*(p.grad for p in ddp.parameters() if p.requires_grad))


@on_ranks(2)
def test_a_step_that_would_use_a_local_gradient_is_refused(rank, world_size):
    for forward in CASES:
        ddp = minddp.DistributedDataParallel(Frozen())
        trained(ddp, rank)
        ddp.zero_grad()
        forward(ddp, batch(rank)).square().sum().backward()
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        before = ddp.module.frozen.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"since it was wrapped:\n  'frozen.weight' requires a gradient now"):
            optimizer.step()
        assert torch.equal(ddp.module.frozen.weight, before), forward.__name__
        minddp.abort_iteration(ddp)
        ddp.zero_grad()
        minddp.refresh(ddp)
        forward(ddp, batch(rank)).square().sum().backward()
        assert _averaged(ddp), forward.__name__


@on_ranks(2)
def test_what_was_mended_goes_on(rank, world_size):
    """One layer alone is cast for evaluations, and back. After each forward one parameter is looked at."""
    ddp = minddp.DistributedDataParallel(Frozen())
    trained(ddp, rank)
    layer = ddp.module.b
    ddp.module.use = lambda x: x.to(layer.weight.dtype)
    for _ in range(4):
        layer.double()
        for _ in range(4):  # all are looked at
            ddp(batch(rank))
        layer.float()
        ddp.zero_grad()
        ddp(batch(rank)).square().sum().backward()
        assert _averaged(ddp)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight + weight.T


@on_ranks(2)
def test_a_parametrization_registered_while_wrapped_keeps_its_parameters_hook(rank, world_size):
    ddp = minddp.DistributedDataParallel(Frozen().requires_grad_(True))
    trained(ddp, rank)
    register_parametrization(ddp.module.frozen, "weight", Symmetric())
    ddp.zero_grad()
    ddp(batch(rank)).square().mean().backward()
    assert _averaged(ddp)
