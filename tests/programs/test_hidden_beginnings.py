"""Backwards whose beginning is hard to see: the outputs' nodes are gone, or the first gradient is a nested graph's.

Each program runs with torch's class and with minddp's, and gives the gradients or weights of its last step. Torch is
right in all of them.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.programs.beside_torch import (
    batch,
    differ,
    gradients,
    mlp,
    other_collective,
    those_that_differ,
    trained,
    weights,
)


def descend(module):
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.1 * p.grad


class Experts(nn.Module):
    """One of three, chosen by the caller; the output is a view."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

    def forward(self, x, which):
        return self.experts[which](x).view(-1, 4)


def experts_changed_in_place(wrap, rank):
    """The in-place operation gives the output, a view, another node; which experts rest depends on the rank."""
    torch.manual_seed(0)
    body = wrap(nn.Linear(4, 4, bias=False), bucket_cap_mb_list=[1e-5] * 2)
    experts = wrap(Experts(), find_unused_parameters=True, bucket_cap_mb_list=[1e-5] * 2)
    for i in range(4):
        body.zero_grad()
        experts.zero_grad()
        out = experts(body(batch(rank, i)), 2 if rank == 1 else 0)
        out *= 0.5
        out.pow(2).sum().backward()
    return gradients(body, experts)


class StatisticThenExperts(nn.Module):
    """A collective of its own before the experts, as a SyncBatchNorm's; flattened at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

    def forward(self, x, which):
        return self.experts[which](other_collective(self.body(x))).flatten()


def a_collective_of_the_model(wrap, rank):
    model = wrap(StatisticThenExperts(), find_unused_parameters=True, bucket_cap_mb_list=[1e-5] * 2)
    for _ in range(4):
        model.zero_grad()
        out = model(batch(0)[:4] * (rank + 1), 2 if rank == 1 else 0)
        out[0] = 0.0
        out.pow(2).sum().backward()
    return gradients(model)


class CheckpointedView(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=True).view(-1)


def a_checkpoints_view_in_place(wrap, rank):
    return trained(wrap(CheckpointedView()), rank, loss=lambda i, out: out.mul_(2.0).pow(2).mean())


class KeptFeatures(nn.Module):
    """The loss takes what forward kept, and not what it returned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = checkpoint(self.a, x.clone().requires_grad_(), use_reentrant=True)
        self.features = checkpoint(self.b, hidden, use_reentrant=True)
        return {"logits": self.features * 1.0}


def features_and_a_step_by_hand(wrap, rank):
    model = wrap(KeptFeatures())
    for i in range(3):
        model.zero_grad()
        model(batch(rank, i))
        model.module.features.pow(2).mean().backward()
        descend(model)
    return weights(model)


class _Reversible(torch.autograd.Function):
    """Its backward runs a forward and a backward."""

    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        ctx.save_for_backward(x)
        with torch.no_grad():
            return net(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.net(x), g)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return _Reversible.apply(self.body(x), self.block)[:, :2]


def a_reversible_block(wrap, rank):
    def loss(i, out):
        out[0] = 0.0
        return out.pow(2).mean()

    return trained(wrap(Reversible()), rank, loss=loss)


def a_forward_that_waits(wrap, rank):
    """A backward goes past it; its parameters are another wrapper's, too, which may be made again. What comes next is
    under no_sync: with a static graph torch's class goes on waiting, and takes it."""
    seen = []
    for static, again in ((False, False), (False, True), (True, False), (True, True)):
        shared = mlp()
        inner = nn.Sequential(shared)
        first, second = wrap(shared, static_graph=static), wrap(inner)
        first(batch(rank))
        second(batch(rank)).sum().backward()
        if again:
            second = wrap(inner)
        with first.no_sync():
            out = first(batch(rank, 1))
        out.sum().backward()
        seen += gradients(shared)
    return seen


def a_penalty_past_a_forward_that_waits(wrap, rank):
    """All of the module's gradients past the wrapper, while a forward waits: torch averages them, too."""
    model = wrap(mlp())
    for i in range(3):
        model.zero_grad()
        model(batch(rank, i + 1))
        model.module(batch(rank, i)).pow(2).sum().backward()
        descend(model)
    return weights(model)


PROGRAMS = [
    experts_changed_in_place, a_collective_of_the_model, a_checkpoints_view_in_place, features_and_a_step_by_hand,
    a_reversible_block, a_penalty_past_a_forward_that_waits, a_forward_that_waits,
]  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_as_with_torch(world_size):
    assert those_that_differ(PROGRAMS, world_size) == []


# ---- where torch has no answer: beside one process that has all ranks' shares


@on_ranks(2, 3)
def test_a_penalty_on_an_expert_that_rests(rank, world_size):
    """A penalty on one expert's weights in the same loss: on some ranks all of its gradient."""
    torch.manual_seed(0)
    body, experts = nn.Linear(4, 4, bias=False), Experts()
    alone_body, alone_experts = copy.deepcopy(body), Experts()
    first = minddp.DistributedDataParallel(body, bucket_cap_mb_list=[1e-5] * 2)
    second = minddp.DistributedDataParallel(experts, find_unused_parameters=True, bucket_cap_mb_list=[1e-5] * 2)

    def loss(body, experts, other, i):
        return experts(body(batch(other, i)), 2 if other == 1 else 0).pow(2).sum()

    for i in range(4):
        for module in (first, second, alone_body, alone_experts):
            module.zero_grad()
        (loss(first, second, rank, i) + 0.1 * experts.experts[0].weight.pow(2).sum()).backward()
        everyone = sum(loss(alone_body, alone_experts, other, i) for other in range(world_size))
        (everyone / world_size + 0.1 * alone_experts.experts[0].weight.pow(2).sum()).backward()
        assert not differ(gradients(body, experts), gradients(alone_body, alone_experts))


class LossInside(StatisticThenExperts):
    """Keeps its loss to itself, and returns features."""

    def forward(self, x, which):
        features = self.body(x)
        self.loss = self.experts[which](other_collective(features)).pow(2).sum()
        return features


@on_ranks(2, 3)
def test_a_loss_inside_of_the_model(rank, world_size):
    """Backward begins at no output, with an expert's gradient: then which experts rest must be known already."""
    module, alone = LossInside(), LossInside()
    model = minddp.DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb_list=[1e-5] * 2)
    for i in range(4):
        model.zero_grad()
        alone.zero_grad()
        model(batch(rank, i), 2 if rank == 1 else 0)
        module.loss.backward()
        total = sum(alone.body(batch(other, i)) for other in range(world_size))
        everyone = sum(alone.experts[2 if other == 1 else 0](total).pow(2).sum() for other in range(world_size))
        (everyone / world_size).backward()
        assert not differ(gradients(module), gradients(alone))


@on_ranks(2)
def test_local_steps_on_what_nobody_can_see(rank, world_size):
    """Under no_sync, the output in an object of the user's, all gradients nested: local on purpose."""

    class Box:
        def __init__(self, value):
            self.value = value

    class Hidden(CheckpointedView):
        def forward(self, x):
            return Box(super().forward(x))

    ddp, alone = minddp.DistributedDataParallel(Hidden()), Hidden()
    optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in (ddp, alone)]
    for i in range(3):
        for module, optimizer in zip((ddp, alone), optimizers):
            optimizer.zero_grad()
            with ddp.no_sync():
                module(batch(rank, i)).value.pow(2).mean().backward()
            optimizer.step()
    assert all(map(torch.equal, weights(ddp), weights(alone)))


# ---- sums that are added to


STEPS = ([(0, 0, 0), (1, 1, 1)], [(0, 0, 0), (0, 1, 1)], [(0, 1, 1), (0, 1, 1)], [(1, 1, 1), (1, 1, 1)])


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
@pytest.mark.parametrize("views", [False, True])
@on_ranks(2, 3)
def test_sums_of_experts_over_micro_batches(rank, world_size, reduction, views):
    """Two micro-batches a step, the first under no_sync; which expert is used depends on batch and rank."""
    ddp = minddp.DistributedDataParallel(
        nn.ModuleDict({"e": nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])}),
        find_unused_parameters=True, gradient_as_bucket_view=views, reduction=reduction,
    )  # fmt: skip
    ddp.module.forward = lambda x, which: ddp.module["e"][which](x)
    for step in STEPS:
        for i, micro in enumerate(step):
            if reduction == "weighted":
                minddp.add_weight(ddp, 1)
            with contextlib.nullcontext() if i else ddp.no_sync():
                ddp(torch.ones(1, 2), micro[rank]).sum().backward()
        for which, p in enumerate(ddp.parameters()):
            uses = sum(micro[r] == which for micro in step for r in range(world_size))
            divisor = 1 if reduction == "sum" else 2 * world_size
            assert (0.0 if p.grad is None else float(p.grad[0, 0])) == pytest.approx(uses / divisor)
        ddp.zero_grad()


# ---- optimizers of the user's


class _TakesModel(torch.optim.SGD):
    def step(self, model):
        assert type(model) is nn.Linear
        model.eval()
        super().step()
        return "stepped"


class _TakesArguments(torch.optim.SGD):
    def step(self, closure):
        loss = closure(True)
        super().step()
        return float(loss)


@on_ranks(2)
def test_optimizers_with_arguments_of_their_own(rank, world_size):
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    assert _TakesModel(ddp.parameters(), 0.1).step(ddp.module) == "stepped"
    optimizer = _TakesArguments(ddp.parameters(), 0.1)

    def closure(zero):
        if zero:
            optimizer.zero_grad()
        loss = ddp(torch.ones(1, 2)).sum()
        loss.backward()
        return loss.detach()

    assert all_alike(torch.tensor(optimizer.step(closure)))
