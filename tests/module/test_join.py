"""Uneven inputs, and what comes after them on ranks that have counted another number of backwards of their own."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.ranks_pool import run_ranks

OPTIONS = {"default": {}, "static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}


def _net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _train(wrap, rank, batches, options):
    """As many joined batches as the rank has, then three of all ranks."""
    model = wrap(_net(), bucket_cap_mb_list=[1e-4] * 2, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * i + rank))
        model(x).pow(2).mean().backward()
        optimizer.step()

    with model.join(divide_by_initial_world_size=False):
        for i in range(batches[rank]):
            step(i)
    for i in range(3):
        step(i + 20)
    return model


def _joined(rank, world_size, batches, options):
    theirs = None
    # Torch's class sends something else from a rank that never had a backward under static_graph: Gloo aborts.
    if not (options.get("static_graph") and 0 in batches):
        theirs = [p.detach().clone() for p in _train(TorchDDP, rank, batches, options).parameters()]
    ours = _train(minddp.DistributedDataParallel, rank, batches, options)
    return theirs, [p.detach().clone() for p in ours.parameters()], ours.reducer.iteration()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("batches", [(0, 3), (3, 0), (1, 3), (0, 1), (2, 0, 3)], ids=str)
def test_after_uneven_inputs(batches, options):
    ranks = run_ranks(_joined, len(batches), batches, options)
    without = run_ranks(_joined, len(batches), batches, {}) if ranks[0][0] is None else ranks
    for (_, ours, iterations), (theirs, _, _) in zip(ranks, without, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        assert iterations == max(batches) + 3  # the same on all ranks: what they ask each other goes by it


@on_ranks(3)
def test_local_gradients_are_compared_after_uneven_inputs(rank, world_size):
    """Alike on all ranks; ranks compare such gradients by the number of the iteration."""
    model = _train(minddp.DistributedDataParallel, rank, (1, 3, 2), {})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.zero_grad()
    model.module[0].weight.pow(2).sum().backward()
    optimizer.step()
    assert all_alike(model.module[0].weight)


@on_ranks(2)
def test_ranks_meet_after_uneven_inputs(rank, world_size):
    """A forward waits for its backward, and one under no_sync takes its place, on all ranks alike."""
    model = _train(minddp.DistributedDataParallel, rank, (1, 3), {"find_unused_parameters": True})
    model.zero_grad()
    model(torch.ones(1, 4))
    with model.no_sync():
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()
    assert all_alike(*(p.grad for p in model.parameters()))


@on_ranks(2)
def test_after_uneven_inputs_no_forward_waits_for_other_ranks(rank, world_size):
    model = _train(minddp.DistributedDataParallel, rank, (1, 3), {})
    if rank == 0:  # with torch's class it counts the ranks still training, and waits
        model(torch.ones(1, 4)).detach()
    assert model._minddp_averager.divisor == 2


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, both):
        return self.left(x) + self.right(x) if both else self.left(x)


@on_ranks(2)
def test_what_nobody_who_still_trains_has_used_keeps_its_gradient(rank, world_size):
    """As the last batch of those ranks; docs/differences.md, unused-by-all-who-still-train."""
    grads = []
    for wrap in (TorchDDP, minddp.DistributedDataParallel):
        model = wrap(_Branches(), find_unused_parameters=True)
        with model.join():
            for i in range(1 if rank == 0 else 3):
                model.zero_grad()
                model(torch.full((1, 4), 1.0 + rank), both=i < 2).sum().backward()
        grads.append(model.module.right.bias.grad)
    theirs, ours = grads
    assert rank == 0 or (ours is None and theirs is not None and not theirs.any())


def _buffers_after(rank, world_size, joins):
    """What running_mean is after ``joins``, (batches of each rank, enable) pairs, and two forwards."""
    means = []
    for wrap in (TorchDDP, minddp.DistributedDataParallel):
        torch.manual_seed(3)
        model = wrap(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        generator = torch.Generator().manual_seed(rank)
        for batches, enable in joins:
            with model.join(enable=enable):
                for _ in range(batches[rank]):
                    model(torch.randn(3, 4, generator=generator)).sum().backward()
        for _ in range(2):
            model(torch.randn(3, 4, generator=generator)).sum().backward()
        means.append(model.module[0].running_mean)
    return means


@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("enable", [[True], [True, False], [False]], ids=str)
def test_buffers_after_uneven_inputs_are_torchs(batches, enable):
    """The last rank's from then on, until a join(enable=False)."""
    joins = [(batches if uneven else (1,) * len(batches), uneven) for uneven in enable]
    for theirs, ours in run_ranks(_buffers_after, len(batches), joins):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
