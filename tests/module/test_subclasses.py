"""Subclasses as libraries write them, after install(): beside the same classes over torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp
from minddp.torch_base import TorchBase
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


# ---- TorchBase: what a subclass finds when it looks past DistributedDataParallel


def test_it_stands_between_torchs_class_and_ours():
    order = minddp.DistributedDataParallel.__mro__
    assert order.index(minddp.DistributedDataParallel) < order.index(TorchBase) < order.index(TorchDDP)


def test_it_initialises_a_bare_module_without_a_process_group():
    class Bare(minddp.DistributedDataParallel):
        def __init__(self):
            super(minddp.DistributedDataParallel, self).__init__()
            self.module = torch.nn.Linear(2, 3)

    bare = Bare()
    assert isinstance(bare, (TorchDDP, Joinable))
    assert list(bare.state_dict()) == ["module.weight", "module.bias"]
    assert not bare.eval().module.training
    with pytest.raises(TypeError):
        super(minddp.DistributedDataParallel, bare).__init__(torch.nn.Linear(1, 1))


def test_nothing_that_torchs_class_defines_is_reached():
    runs = (property, classmethod, staticmethod)
    named = [name for name, value in vars(TorchDDP).items() if callable(value) or isinstance(value, runs)]
    assert len(named) > 40
    for name in named:
        assert name in vars(TorchBase), name
        assert vars(TorchBase)[name] is not vars(TorchDDP)[name], name


def test_what_comes_after_torchs_class_is_there_and_the_rest_says_so():
    assert TorchBase.join_hook is Joinable.join_hook
    bare = torch.nn.Module.__new__(minddp.DistributedDataParallel)
    with pytest.raises(NotImplementedError, match="_register_accum_grad_hook is a step inside torch's own DDP"):
        super(minddp.DistributedDataParallel, bare)._register_accum_grad_hook()
