"""Mean, sum or weighted: which reduction gives the whole batch's gradient, and where the division happens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import minddp
from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def share(data: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return data.chunk(world_size)[rank]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@on_ranks(2, 3)
def test_which_reduction_gives_the_whole_batchs_gradient(rank: int, world_size: int) -> None:
    data = batch(4 * world_size)
    alone = net()
    begin, end = rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2  # one sample, two, and the last rank the rest
    shares = {"even": share(data, rank, world_size), "uneven": data[begin : end if rank < world_size - 1 else None]}

    def truth(mean: bool) -> list[torch.Tensor]:
        alone.zero_grad()
        losses = alone(data).pow(2).sum(1)
        (losses.mean() if mean else losses.sum()).backward()
        return gradients(alone)

    def ours(reduction: str, mean: bool, mine: torch.Tensor) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(copy.deepcopy(alone), reduction=reduction)
        if reduction == "weighted":
            minddp.add_weight(ddp, len(mine))
        losses = ddp(mine).pow(2).sum(1)
        (losses.mean() if mean else losses.sum()).backward()
        return gradients(ddp)

    torch.testing.assert_close(ours("mean", True, shares["even"]), truth(mean=True))
    # Averaging summed losses: world_size times smaller than the whole batch's sum.
    torch.testing.assert_close(ours("mean", False, shares["even"]), [g / world_size for g in truth(mean=False)])
    torch.testing.assert_close(ours("sum", False, shares["even"]), truth(mean=False))
    torch.testing.assert_close(ours("sum", False, shares["uneven"]), truth(mean=False))
    torch.testing.assert_close(ours("weighted", False, shares["uneven"]), truth(mean=True))
    wrong = ours("mean", True, shares["uneven"])
    assert any(not torch.allclose(a, b) for a, b in zip(wrong, truth(mean=True), strict=True))


@on_ranks(2, 3)
def test_where_the_division_is_decides_the_range(rank: int, world_size: int) -> None:
    """float16 ends at 65,504: the sum of 40,000s is beyond it, their mean is not."""
    mean = pytest.approx(40_000, rel=1e-2)
    cases = [(40_000.0, None, mean), (40_000.0, 2.0, mean), (40_000.0, 1.0, float("inf")), (2e-7, 1024.0, 0.0)]
    for value, factor, expected in [*cases, (2e-7, None, pytest.approx(2e-7, rel=0.5))]:
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).half(), predivide_factor=factor)
        ddp(torch.full((1, 1), value, dtype=torch.float16)).sum().backward()
        assert ddp.module.weight.grad.item() == expected, (value, factor)
