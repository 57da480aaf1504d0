"""What is the gradient of a collective? The table, with 2 and 3 ranks."""

import math

import pytest
import torch

from minddp import functional as F
from minddp.functional import gradcheck
from minddp.testing import run_ranks


def _gradient(program, rank):
    """``program`` of xx = (rank + 2) * x at x = 1: its value and x.grad, checked by finite differences."""
    gradcheck.check(lambda x: program((rank + 2) * x), torch.ones((), dtype=torch.float64), order=1)
    x = torch.ones((), requires_grad=True)
    y = program((rank + 2) * x)
    y.backward()
    return y.item(), x.grad.item()


def _table(rank, size):
    return {
        "square": _gradient(lambda xx: F.all_reduce(xx) ** 2, rank),
        "square, replicated": _gradient_of_one_loss(lambda xx: F.all_reduce(xx, loss="replicated") ** 2, rank),
        "square, divided": _gradient(lambda xx: F.all_reduce(xx) ** 2 / size, rank),
        "local factor": _gradient(lambda xx: (rank + 2) * F.all_reduce(xx), rank),
        "product": _gradient(lambda xx: (rank + 2) * F.all_reduce(xx, "product"), rank),
        "one rank's loss": _gradient(lambda xx: F.all_reduce(xx) * rank, rank),
    }


def _gradient_of_one_loss(program, rank):
    x = torch.ones((), requires_grad=True)
    y = program((rank + 2) * x)
    y.backward()
    return y.item(), x.grad.item()


@pytest.mark.parametrize("size", [2, 3])
def test_the_table(size):
    factors = [rank + 2 for rank in range(size)]  # x = 1, so these are the xx
    total, product = sum(factors), math.prod(factors)
    tables = run_ranks(_table, size)
    for rank, (table, factor) in enumerate(zip(tables, factors, strict=True)):
        # Every rank's loss is total**2: size losses, each with derivative 2 * total * factor.
        assert table["square"] == (total**2, size * 2 * total * factor)
        assert table["square, replicated"] == (total**2, 2 * total * factor)
        assert table["square, divided"] == pytest.approx((total**2 / size, 2 * total * factor))
        assert table["local factor"] == (factor * total, total * factor)
        assert table["product"] == (factor * product, total * product)
        assert table["one rank's loss"] == (rank * total, sum(range(size)) * factor)
    if size == 2:  # the numbers as the question had them
        assert [t["square"] for t in tables] == [(25, 40), (25, 60)]
        assert sum(t["square, replicated"][1] for t in tables) == 50
        assert [t["local factor"][1] for t in tables] == [10, 15]
        assert [t["product"][1] for t in tables] == [30, 30]
        assert [t["one rank's loss"][1] for t in tables] == [2, 3]


def _distance_from_the_mean(rank, size):
    """w = 1, data 100, 200, ..: loss = w d - mean over ranks of w d. All losses add up to 0, whatever w."""
    d = 100.0 * (rank + 1)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = w * d - F.all_reduce(w * d / size)
    loss.backward()
    return loss.item(), w.grad.item()


@pytest.mark.parametrize("size", [2, 3])
def test_losses_that_add_up_to_zero_have_no_gradient(size):
    results = run_ranks(_distance_from_the_mean, size)
    data = [100.0 * (rank + 1) for rank in range(size)]
    assert [r[0] for r in results] == pytest.approx([d - sum(data) / size for d in data])
    assert [r[1] for r in results] == pytest.approx([0.0] * size, abs=1e-12)
    if size == 2:
        assert results == [(-50.0, 0.0), (50.0, 0.0)]
