"""Same seed, same model, same data: torch's DDP and minddp's side by side over several iterations.

With two ranks a sum has one order, so everything must agree bit for bit; with three the buckets' borders
decide the order of additions, so the results agree to rounding.
"""

import copy
import inspect
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp import DistributedDataParallel
from tests.ranks_pool import run_ranks


class Mlp(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 64, dtype=dtype), nn.Tanh(), nn.Linear(64, 33, dtype=dtype), nn.Linear(33, 5, dtype=dtype)
        )

    def forward(self, x):
        return self.net(x)


class Conv(nn.Module):
    def __init__(self, channels_last=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4 * 5 * 5, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x.view(-1, 3, 5, 5))))
        return self.head(self.conv2(x).flatten(1))


class Shared(nn.Module):
    """One layer used three times, one parameter frozen, one with no elements."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 10)
        self.b = nn.Linear(10, 10)
        self.b.weight.requires_grad_(False)
        self.empty = nn.Linear(0, 10)

    def forward(self, x):
        y = self.a(self.b(self.a(self.a(x))))
        return y + self.empty(x[:, :0])


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 20)
        self.b = nn.Linear(20, 4, dtype=torch.float64)

    def forward(self, x):
        return self.b(self.a(x).double())


class Embed(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=sparse)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.table((x.abs() * 5).long().clamp(0, 19)).mean(1))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


MODELS = {
    "mlp": Mlp,
    "mlp64": lambda: Mlp(torch.float64),
    "mlp_bf16": lambda: Mlp(torch.bfloat16),
    "mlp_f16": lambda: Mlp(torch.float16),
    "conv": Conv,
    "conv_channels_last": lambda: Conv(True),
    "shared": Shared,
    "two_dtypes": TwoDtypes,
    "embedding": lambda: Embed(False),
    "sparse": lambda: Embed(True),
    "complex": Complex,
}
ARGUMENTS = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb_list": [0.0005] * 2},
    {"bucket_cap_mb_list": [0.0005] * 2, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "bucket_cap_mb_list": [0.0005] * 2},
    {"batched_grad_copy": True},
]


def _train(ddp, rank, dtype, set_to_none, iterations=5):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.0)
    sparse = any(getattr(m, "sparse", False) for m in ddp.modules())
    for iteration in range(iterations):
        torch.manual_seed(1000 * iteration + rank)
        x = torch.randn(6, 75 if isinstance(ddp.module, Conv) else 10, dtype=dtype)
        optimizer.zero_grad(set_to_none=set_to_none or sparse)
        ddp(x).float().pow(2).mean().backward()
        optimizer.step()
    grads = [None if p.grad is None else p.grad.detach().to_dense().clone() for p in ddp.module.parameters()]
    return [p.detach().clone() for p in ddp.module.parameters()], grads


class _GlooOfOneThread(dist.ProcessGroupGloo):
    def __init__(self, store, rank, size, timeout, **_):  # torch 2.15 gives more
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._threads, options._timeout = 1, timeout
        super().__init__(store, rank, size, options)


def _group_for_sparse():
    """For torch's class, whose sparse all-reduce corrupts the heap where the group's two threads end operations at
    once (csrc/torch_surface/sparse_allreduce.h)."""
    with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", _GlooOfOneThread):
        return dist.new_group()


def _compare(rank, world_size, name, arguments):
    """Trains both; returns the largest difference, -1 where they agree bit for bit."""
    warnings.simplefilter("ignore")
    worst = -1.0
    for set_to_none in (True, False):
        torch.manual_seed(7)
        base = MODELS[name]()
        dtype = next(base.parameters()).dtype
        dtype = dtype if dtype.is_floating_point else torch.float32
        results = []
        for wrapper in (TorchDDP, DistributedDataParallel):
            known = inspect.signature(wrapper).parameters  # of torch's class, an older one's
            given = {name: arguments[name] for name in arguments if name in known}
            if name == "sparse" and wrapper is TorchDDP:
                given["process_group"] = _group_for_sparse()
            ddp = wrapper(copy.deepcopy(base), **given)
            results.append(_train(ddp, rank, dtype, set_to_none))
        for theirs, ours in zip(results[0][0] + results[0][1], results[1][0] + results[1][1]):
            if theirs is None or ours is None:
                assert theirs is None and ours is None
            elif not torch.equal(theirs, ours):
                worst = max(worst, (theirs - ours).abs().max().item() / (1 + theirs.abs().max().item()))
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_agree_bit_for_bit(name):
    for arguments in ARGUMENTS:
        differences = run_ranks(_compare, 2, name, arguments)
        assert differences == [-1.0, -1.0], (arguments, differences)


@pytest.mark.all
@pytest.mark.parametrize("name", ["mlp", "conv", "shared", "two_dtypes", "complex", "sparse"])
def test_three_ranks_agree_to_rounding(name):
    for arguments in ARGUMENTS[:4]:
        for difference in run_ranks(_compare, 3, name, arguments):
            assert difference < 1e-5, (arguments, difference)
