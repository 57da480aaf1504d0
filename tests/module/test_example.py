"""A test in ten lines, which CONTRIBUTING.md shows."""

import torch

from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks


@on_ranks(2)
def test_gradients_are_the_average(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    ddp(torch.full((1, 1), float(rank))).backward()
    assert ddp.module.weight.grad.item() == 0.5  # of 0 and 1
