"""torch's own code that constructs DDP by name, on real ranks: ``torch.distributed``'s ``replicate()``."""

from __future__ import annotations

import pytest
import torch

from minddp.cli.install import install, uninstall
from minddp.testing import run_ranks


def train_replicated(rank: int, world_size: int, installed: bool) -> tuple[str, list[float]]:
    """The module of the class that ``replicate`` constructed, and the weights after three steps."""
    from torch.distributed._composable.replicate import replicate

    if installed:
        install()
    try:
        torch.manual_seed(rank)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        replicate(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            net(torch.randn(3, 4, generator=generator)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        uninstall()
    weights = torch.cat([value.detach().flatten() for value in net.parameters()])
    return type(replicate.state(net)._ddp).__module__, weights.tolist()


def test_replicate_gets_the_installed_class() -> None:
    theirs = run_ranks(train_replicated, 2, False)
    ours = run_ranks(train_replicated, 2, True)
    assert {name for name, _ in theirs} == {"torch.nn.parallel.distributed"}
    assert {name for name, _ in ours} == {"minddp.ddp"}
    for _, weights in (*theirs, *ours):
        assert weights == pytest.approx(theirs[0][1], rel=1e-5)
