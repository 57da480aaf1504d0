"""static_graph: what a rank, or all of them, had no gradient of in the first iteration.

Most here: backward comes to a parameter, and a function of autograd's gives None for it.
"""

import pytest
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp import DistributedDataParallel as DDP
from tests.on_ranks import on_ranks
from tests.programs.beside_torch import batch


class Skips(torch.autograd.Function):
    """``x`` times the sum of ``book``; backward gives None for ``book`` unless told otherwise."""

    @staticmethod
    def forward(ctx, x, book, brings):
        ctx.save_for_backward(x, book)
        ctx.brings = brings
        return x * book.sum()

    @staticmethod
    def backward(ctx, gradient):
        x, book = ctx.saved_tensors
        own = (gradient * x).sum().expand_as(book).clone() if ctx.brings else None
        return gradient * book.sum(), own, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.book, self.last = nn.Linear(4, 4), nn.Parameter(torch.ones(3)), nn.Linear(4, 2)

    def forward(self, x, brings=False):
        return self.last(Skips.apply(self.first(x), self.book, brings)).pow(2).sum()


def made(rank):
    """Two steps without a gradient for ``book``: it is known to get none."""
    ddp = DDP(Net(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        ddp(batch(rank, step)).backward()
        optimizer.step()
    assert ddp.module.book.grad is None
    return ddp, optimizer


@on_ranks(2)
def test_a_gradient_that_comes_later_raises(rank, world_size):
    ddp, _ = made(rank)
    with pytest.raises(RuntimeError, match="training graph has changed.*'book' got a gradient"):
        ddp(batch(rank, 2), brings=True).backward()
    minddp.abort_iteration(ddp)


@pytest.mark.parametrize("past", [False, True], ids=["no_sync", "past_the_wrapper"])
@on_ranks(2)
def test_a_local_gradient_of_it_is_not_taken_for_an_average(rank, world_size, past):
    """A local gradient of it, and a backward that sends the others'."""
    ddp, optimizer = made(rank)
    if past:
        ddp.module(batch(rank, 2), brings=True).backward()
        ddp.module.first.zero_grad()
        ddp.module.last.zero_grad()
    else:
        with ddp.no_sync():
            ddp(batch(rank, 2), brings=True).backward()
    ddp(batch(rank, 3)).backward()
    with pytest.raises(RuntimeError, match="never averaged, of 'book'"):
        optimizer.step()
    optimizer.zero_grad()
    ddp(batch(rank, 4)).backward()
    optimizer.step()
    minddp.check_replicas(ddp)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, branches):
        x = self.first(x)
        return (self.branch(x) if branches else x).pow(2).sum()


def _used_elsewhere(rank, wrap):
    """Rank 0 alone uses ``branch`` when it synchronizes; rank 1 once under no_sync."""
    ddp = wrap(Branch(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            with ddp.no_sync():
                ddp(batch(rank, step), True).backward()
        ddp(batch(rank, step), rank == 0).backward()
        optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


@on_ranks(2)
def test_a_local_gradient_of_what_another_rank_uses_is_averaged(rank, world_size):
    torch.testing.assert_close(*(_used_elsewhere(rank, wrap) for wrap in (DDP, TorchDDP)))


@pytest.mark.parametrize(("steps", "there"), [({0}, [0, 1, 1, 1]), ({0, 2}, [0, 1, 0, 1]), ({1}, [1, 1, 1, 1])])
@on_ranks(2)
def test_a_gradient_that_a_hook_removes_on_one_rank(rank, world_size, steps, there):
    """Rank 0 alone uses ``branch``; in some steps a hook there removes its gradients. ``there``: where it has one."""
    torch.manual_seed(0)
    net, step, found = Branch(), 0, []

    def removes(parameter):
        if step in steps:
            parameter.grad = None

    for parameter in net.branch.parameters():
        parameter.register_post_accumulate_grad_hook(removes)
    ddp = DDP(net, static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch(rank, step), rank == 0).backward()
        optimizer.step()
        found.append(net.branch.weight.grad is not None)
    minddp.check_replicas(ddp)
    assert found == there
