"""tutorials/mini_ddp.py: both classes have the gradients of the real one, bit for bit, and MiniDDP its buckets."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn

import minddp
from minddp.buckets import assign_buckets
from tests.on_ranks import on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tutorials"))


@on_ranks(2)
def test_equal_to_the_real_one(rank: int, world_size: int) -> None:
    """Weights that differ at first, several buckets, and gradients of three backwards of which one is sent."""
    from mini_ddp import MiniDDP, NaiveDDP, assign

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    real = minddp.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
    naive, mini = NaiveDDP(copy.deepcopy(model)), MiniDDP(model, bucket_cap_mb=0.002)
    assert len(mini.buckets) > 2
    index = {parameter: i for i, parameter in enumerate(model.parameters())}
    for _ in range(3):
        x = torch.randn(3, 4, 8)
        for net in (real, mini):
            net.zero_grad()
            with net.no_sync():
                net(x[0]).square().mean().backward()
                net(x[1]).square().mean().backward()
            net(x[2]).square().mean().backward()
        for a, b in zip(real.parameters(), mini.parameters(), strict=True):
            assert torch.equal(a, b) and torch.equal(a.grad, b.grad)
        for net in (real, naive):
            net.zero_grad()
            net(x[2]).square().mean().backward()
        for a, b in zip(real.parameters(), naive.parameters(), strict=True):
            assert torch.equal(a, b) and torch.equal(a.grad, b.grad)
    assert [[index[p] for p in bucket.parameters] for bucket in mini.buckets] == real.reducer.buckets()
    for sizes in ([7, 1, 3, 40, 2, 2, 9, 1, 1], [5] * 9, [100, 1, 1, 1, 90, 6, 7]):
        parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
        place = {parameter: i for i, parameter in enumerate(parameters)}
        for cap in (16, 40, 128, 1000):
            own = [[place[p] for p in group] for group in assign(parameters, cap)]
            nbytes, order = [4 * size for size in sizes], range(len(sizes))[::-1]
            assert own == assign_buckets(nbytes, [0] * len(sizes), order, [cap])
