"""TorchBase: what a subclass finds when it looks past DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp
from minddp.torch_base import TorchBase


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
