"""Gradients that are local, or no whole averages: what is certain raises, what is suspected is logged once. Beside
each, its healthy neighbour: the same act in a program that trains right with torch's class."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.faults.logged import logged
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import MODES, batch, differ, gradients, mlp, those_that_differ, weights


class _Heads(nn.Module):
    """A trunk that all heads use; with ``zero`` its first layer gets gradients that are zero."""

    def __init__(self, zero=False):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
        if zero:
            nn.init.zeros_(self.trunk[1].weight)

    def forward(self, x):
        features = self.trunk(x)
        return [head(features).square().mean() for head in self.heads]


def _mean_of_two(ddp, rank, i=0):
    """Of the sum of both losses: the gradients' mean over two ranks."""
    found = []
    for other in range(2):
        found.append(torch.autograd.grad(sum(ddp.module(batch(other, i))), list(ddp.parameters())))
    return [(a + b) / 2 for a, b in zip(*found, strict=True)]


# ---- an iteration of several backwards


def _removed(parameters):
    for p in parameters:
        p.grad = None


def _zeroed(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad.zero_()


def _by_two_optimizers(parameters):
    for half in parameters[::2], parameters[1::2]:
        torch.optim.SGD(half, 0.1).zero_grad(set_to_none=False)


@pytest.mark.parametrize("takes", [_removed, _zeroed, _by_two_optimizers])
@pytest.mark.parametrize("before", ["", "12", "+"])
@on_ranks(2)
def test_what_was_taken_between_backwards_of_one_iteration_is_missed(rank, world_size, takes, before):
    """In the first iteration, and after one of as many backwards, or of one."""
    ddp = minddp.DistributedDataParallel(_Heads())
    for what in before:
        if what != "2":
            losses = ddp(batch(rank, 1))
        {"1": losses[0], "2": losses[1], "+": sum(losses)}[what].backward(retain_graph=True)
    ddp.zero_grad()
    losses = ddp(batch(rank))
    losses[0].backward(retain_graph=True)
    takes(list(ddp.parameters()))
    with pytest.raises(
        RuntimeError, match=r"'trunk.*mark a variable ready only once|only once.*'trunk.*\[rank"
    ) as said:
        losses[1].backward()
    assert "find_unused_parameters=True" in str(said.value)


def _untouched(parameters, kept):
    pass


def _scaled(parameters, kept):
    nn.utils.clip_grad_norm_(parameters, 1e9)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(2).mul_(0.5)


def _put_aside_and_back(parameters, kept):
    kept += [p.grad for p in parameters]
    _removed(parameters)
    for p, gradient in zip(parameters, kept, strict=True):
        p.grad = gradient


def _copied(parameters, kept):
    for p in parameters:
        p.grad = None if p.grad is None else p.grad.clone()


@pytest.mark.parametrize("between", [_untouched, _scaled, _put_aside_and_back, _copied])
@on_ranks(2)
def test_what_was_not_taken_is_averaged(rank, world_size, between):
    for zero in (False, True):  # gradients that are zero have not been taken
        ddp = minddp.DistributedDataParallel(_Heads(zero))
        for i in range(3):
            expected = _mean_of_two(ddp, rank, i)
            ddp.zero_grad()
            losses = ddp(batch(rank, i))
            losses[0].backward(retain_graph=True)
            between(list(ddp.parameters()), [])
            losses[1].backward()
            assert not differ(expected, gradients(ddp)), (zero, i)


def tasks_whose_gradients_are_put_aside(wrap, rank, **args):
    """With find_unused_parameters each backward's gradients are averages."""
    ddp = wrap(_Heads(), find_unused_parameters=True, **args)
    kept = [torch.zeros_like(p) for p in ddp.parameters()]
    for i in range(3):
        for which in range(2):
            loss = ddp(batch(rank, i))[which]
            ddp.zero_grad()
            loss.backward()
            for k, p in zip(kept, ddp.parameters(), strict=True):
                k.add_(0 if p.grad is None else p.grad)
    return kept


def towers_put_aside(wrap, rank, **args):
    """Each gradient comes once: the average brings it back."""
    ddp = wrap(nn.ModuleList([mlp(), mlp()]), **args)
    ddp.module.forward = lambda x: [tower(x).square().mean() for tower in ddp.module]
    seen = []
    for i in range(3):
        for p in ddp.parameters():
            p.grad = None
        first, second = ddp(batch(rank, i))
        first.backward()
        ddp.zero_grad()
        second.backward()
        seen += gradients(ddp)
    return seen


def a_gan_of_two_backwards(wrap, rank, **args):
    """The discriminator's two forwards, each with its backward; a step of the generator through it; zeros between."""
    torch.manual_seed(0)
    generator, critic = wrap(nn.Linear(4, 4), **args), wrap(nn.Linear(4, 1), **args)
    optimizers = [torch.optim.SGD(ddp.parameters(), 0.1) for ddp in (generator, critic)]
    for i in range(3):
        optimizers[1].zero_grad()
        critic(batch(rank, i)).mean().backward()
        fake = generator(batch(rank, i + 1))
        (-critic(fake.detach()).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(fake).square().mean().backward()
        optimizers[0].step()
    return [*weights(generator), *weights(critic)]


def gradients_that_hooks_take(wrap, rank, **args):
    """Within each backward, not between two."""
    ddp = wrap(mlp(), **args)
    moved = {}

    def move(p):
        moved[p] = moved.get(p, 0) + p.grad
        p.grad = None

    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(move)
    for i in range(3):
        ddp(batch(rank, i)).sum().backward()
    return list(moved.values())


def a_retry_after_an_exception(wrap, rank, **args):
    """All ranks meet it before anything was sent."""
    ddp = wrap(mlp(), **args)
    for i in range(3):
        handle = ddp.module[2].weight.register_hook(_raises)
        with contextlib.suppress(ValueError):
            ddp.module(batch(rank, i)).sum().backward()
        handle.remove()
        ddp.zero_grad()
        ddp(batch(rank, i)).sum().backward()
        torch.optim.SGD(ddp.parameters(), 0.1).step()
    return weights(ddp)


def _raises(_):
    raise ValueError


def test_neighbours_train_as_with_torchs_class():
    programs = [towers_put_aside, a_gan_of_two_backwards, gradients_that_hooks_take, a_retry_after_an_exception]
    assert not those_that_differ(programs, 2, {mode: MODES[mode] for mode in ("default", "views")})
    assert not those_that_differ([tasks_whose_gradients_are_put_aside], 2)


# ---- gradients that no backward brought


def _step_on(ddp, gradients_of, steps=3):
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with logged() as seen:
        for i in range(steps):
            optimizer.zero_grad()
            gradients_of(i)
            optimizer.step()
    return seen


def _assign(parameters, found):
    for p, gradient in zip(parameters, found, strict=True):
        p.grad = gradient


@on_ranks(2)
def test_gradients_that_no_backward_brought_are_logged_once(rank, world_size):
    ddp = minddp.DistributedDataParallel(mlp())
    parameters = list(ddp.parameters())

    def local(i):
        dist.barrier()
        _assign(parameters, torch.autograd.grad(ddp(batch(rank, i)).square().sum(), parameters))

    (said,) = _step_on(ddp, local)
    assert "'0.weight'" in said and "no backward has brought them" in said


@on_ranks(2)
def test_gradients_that_no_backward_brought_are_nobodys_fault(rank, world_size):
    """Local steps under no_sync, or without an optimizer; averages, and a forward that no backward follows."""
    ddp = minddp.DistributedDataParallel(mlp())
    parameters = list(ddp.parameters())

    def local(i):
        return torch.autograd.grad(ddp(batch(rank, i)).square().sum(), parameters)

    def under_no_sync(i):
        with ddp.no_sync():
            _assign(parameters, local(i))

    def by_hand(i):
        for p, gradient in zip(parameters, local(i), strict=True):
            p.data -= 0.1 * gradient

    def kept(i):
        ddp(batch(rank, i)).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        ddp(batch(rank, i))

    for program in (under_no_sync, by_hand, kept):
        fresh = minddp.DistributedDataParallel(ddp.module)
        ddp, parameters = fresh, list(fresh.parameters())
        ddp(batch(rank)).sum().backward()
        assert not _step_on(ddp, program), program.__name__


# ---- second derivatives


@on_ranks(2)
def test_a_graph_of_gradients_is_told_of_once(rank, world_size):
    ddp = minddp.DistributedDataParallel(mlp())
    parameters = list(ddp.parameters())
    with logged() as seen:
        for i in range(2):
            ddp.zero_grad()
            ddp(batch(rank, i)).square().sum().backward(create_graph=True)
            products = torch.autograd.grad(
                [p.grad for p in parameters], parameters, [torch.ones_like(p) for p in parameters]
            )
    (said,) = seen
    assert "create_graph=True" in said and "minddp.functional.all_reduce" in said
    means = [minddp.functional.all_reduce(product, "avg") for product in products]
    everyone = torch.cat([batch(other, 1) for other in range(world_size)])
    loss = ddp.module(everyone).square().sum() / world_size
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    expected = torch.autograd.grad(first, parameters, [torch.ones_like(p) for p in parameters])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(means, expected, strict=True))


@on_ranks(2)
def test_a_gradient_penalty_makes_no_graph_of_parameters_gradients(rank, world_size):
    """Of inputs, by autograd.grad(create_graph=True); and a graph under no_sync, which is local as asked for."""
    ddp = minddp.DistributedDataParallel(mlp())
    with logged() as seen:
        for i in range(2):
            x = batch(rank, i).requires_grad_()
            out = ddp(x)
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.sum() + (gradient.norm() - 1).square()).backward()
            ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch(rank)).square().sum().backward(create_graph=True)
    assert not seen


# ---- an average, and a local gradient upon it


def _accumulates(ddp, rank, order, optimizer, between=lambda: None):
    """``order``: "s" synchronized, "l" under no_sync; "z" zeroes, "-" steps."""
    for i, what in enumerate(order):
        if what in "sl":
            with ddp.no_sync() if what == "l" else contextlib.nullcontext():
                ddp(batch(rank, i)).square().sum().backward()
            between()
        elif what == "-":
            optimizer.step()
        else:
            optimizer.zero_grad(set_to_none=what == "z")


@pytest.mark.parametrize("mode", ["default", "views", "find_unused", "static"])
@pytest.mark.parametrize("order", ["sl-zsl-z", "lsl-", "zsll-", "s-l-", "s-zlszsl-"])
@on_ranks(2)
def test_a_local_gradient_upon_an_average_is_logged_once(rank, world_size, order, mode):
    ddp = minddp.DistributedDataParallel(mlp(), **MODES[mode])
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with logged() as seen:
        for _ in range(3):
            optimizer.zero_grad()
            _accumulates(ddp, rank, order, optimizer)
    (said,) = seen
    assert "'0.weight'" in said and "has added to them since their last average" in said, said


@pytest.mark.parametrize("mode", ["default", "views"])
@pytest.mark.parametrize("order", ["lls-zlls-z", "s-zl-zl-zs-", "s-0l-0l-0s-", "sls-zs-", "s-zll-0l-"])
@on_ranks(2)
def test_local_steps_and_accumulation_are_silent(rank, world_size, order, mode):
    ddp = minddp.DistributedDataParallel(mlp(), **MODES[mode])
    with logged() as seen:
        _accumulates(ddp, rank, order, torch.optim.SGD(ddp.parameters(), 0.1))
    assert not seen


@on_ranks(2)
def test_zeros_beside_an_average_are_silent(rank, world_size):
    """Gradients zeroed through .data."""
    ddp = minddp.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with logged() as seen:
        for _ in range(2):
            optimizer.zero_grad()
            _accumulates(ddp, rank, "s", optimizer, lambda: [p.grad.data.zero_() for p in ddp.parameters()])
            _accumulates(ddp, rank, "l-", optimizer)
    assert not seen, seen
