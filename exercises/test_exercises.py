"""The tests of the exercises. SOLUTIONS=1 tests the solutions in the place of what you have written."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

if os.environ.get("SOLUTIONS") == "1":
    sys.path.insert(0, str(Path(__file__).with_name("solutions")))
    import solutions as exercises
else:
    import exercises

from minddp.testing import run_ranks


def _averaged(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    torch.manual_seed(1 + rank)
    model(torch.randn(5, 3)).square().sum().backward()
    expected = [parameter.grad / world_size for parameter in model.parameters()]
    for gradient in expected:
        dist.all_reduce(gradient)
    calls = []
    real = dist.all_reduce

    def counted(*arguments, **keywords):
        calls.append(1)
        return real(*arguments, **keywords)

    dist.all_reduce = counted
    try:
        exercises.average_gradients(model)
    finally:
        dist.all_reduce = real
    return len(calls), all(map(torch.allclose, [parameter.grad for parameter in model.parameters()], expected))


def test_average_gradients():
    assert run_ranks(_averaged, 2) == [(1, True)] * 2, "(number of allreduces, gradients are the means)"


def test_cut():
    assert exercises.cut([4, 4, 4, 4], 8) == [[3, 2], [1, 0]]
    assert exercises.cut([4, 4, 4], 8) == [[2, 1], [0]]
    assert exercises.cut([4, 100, 4], 8) == [[2, 1], [0]]
    assert exercises.cut([], 8) == []


def test_launch_times():
    assert exercises.launch_times([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert exercises.launch_times([3.0, 1.0, 2.0, 5.0]) == [3.0, 3.0, 3.0, 5.0]
    assert exercises.launch_times([]) == []


def test_taking_part():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].bias.requires_grad_(False)
    loss = model["c"](model["a"](torch.ones(1, 2))).sum()
    assert exercises.taking_part(loss, model) == {"a.weight", "a.bias", "c.weight"}
    assert all(parameter.grad is None for parameter in model.parameters())


def _gradient(rank, world_size):
    x = torch.tensor(2.0 + rank, requires_grad=True)
    y = exercises.AllReduceSum.apply(x)
    ((rank + 1) * y**2).backward()
    return y.item(), x.grad.item()


def test_all_reduce_sum():
    """The sum of the losses is (1 + 2) * (x0 + x1)**2, with slope 2 * 3 * 5 in both."""
    assert run_ranks(_gradient, 2) == [(5.0, 30.0)] * 2


def _ring(rank, world_size):
    x = torch.arange(7, dtype=torch.float64) * (rank + 1)
    sent = []
    originals = dist.send, dist.isend

    def counting(real):
        def send(tensor, *arguments, **keywords):
            sent.append(tensor.numel())
            return real(tensor, *arguments, **keywords)

        return send

    dist.send, dist.isend = map(counting, originals)
    try:
        exercises.ring_all_reduce(x)
    finally:
        dist.send, dist.isend = originals
    return x, sum(sent)


def test_ring_all_reduce():
    for x, sent in run_ranks(_ring, 3):
        assert torch.equal(x, torch.arange(7, dtype=torch.float64) * 6)
        assert 0 < sent <= 2 * 2 * 3, "each rank sends 2 (ranks - 1) chunks of a third"
