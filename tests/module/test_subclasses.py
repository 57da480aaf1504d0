"""Subclasses as libraries write them, after install(): beside the same classes over torch's own."""

from __future__ import annotations

import torch
import torch.distributed as dist

import minddp
from tests.on_ranks import on_ranks


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)
        self.scale = torch.nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        return self.scale(self.head(self.body(x).relu()))


def _separate():
    """mmengine's MMSeparateDistributedDataParallel: each child is wrapped, the outer one only holds them."""
    from torch.nn.parallel import DistributedDataParallel

    class Wrapped(DistributedDataParallel):
        def __init__(self, module, **kwargs):
            super().__init__(module, **kwargs)
            self.wraps = True

    class Separate(DistributedDataParallel):
        def __init__(self, module, **kwargs):
            super(DistributedDataParallel, self).__init__()
            self.module = module
            for name, child in module._modules.items():
                if any(p.requires_grad for p in child.parameters()):
                    module._modules[name] = Wrapped(child, **kwargs)

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

        def train(self, mode=True):
            super(DistributedDataParallel, self).train(mode)
            self.module.train(mode)
            return self

    return Separate


def _steps(rank):
    """Gradients, state and modes of a few steps under whatever class torch.nn.parallel holds."""
    Separate = _separate()
    ddp = Separate(Net(), gradient_as_bucket_view=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    torch.manual_seed(rank + 1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(5, 4)).square().mean().backward()
        seen += [p.grad.clone() for p in ddp.parameters()]
        optimizer.step()
    modes = [module.training for module in ddp.eval().modules()]
    return seen, list(ddp.state_dict()), modes, isinstance(ddp.module.body, minddp.DistributedDataParallel)


@on_ranks(2, 3)
def test_a_subclass_that_skips_the_constructor(rank, world_size):
    theirs = _steps(rank)
    minddp.install()
    try:
        ours = _steps(rank)
    finally:
        minddp.uninstall()
    assert (theirs[3], ours[3]) == (False, True)
    assert theirs[1:3] == ours[1:3]
    torch.testing.assert_close(ours[0], theirs[0])
    dist.barrier()
