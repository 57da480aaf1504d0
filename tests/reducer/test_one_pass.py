"""A gradient whose memory is one piece goes to its bucket in the bucket's own pass, not by operators of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.on_ranks import on_ranks

MIXED = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, dict[str, Any]] = {
    "strides of size-1 dimensions": {},
    "the same, as views": {"gradient_as_bucket_view": True},
    "mixed precision": {"mixed_precision": MIXED},
}


def _module(case: str) -> nn.Module:
    torch.manual_seed(0)
    if "mixed" in case:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 3, 1)).to(memory_format=torch.channels_last)


def _other_strides(grad: torch.Tensor) -> torch.Tensor:
    """The same memory; strides where the size is 1 say something else."""
    strides = [1000 + d if size == 1 else stride for d, (size, stride) in enumerate(zip(grad.shape, grad.stride()))]
    return grad.as_strided(grad.shape, strides)


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_no_operator_of_its_own(rank: int, world_size: int, case: str) -> None:
    """Multiplications in a step, and how far its gradients are from the ranks' mean."""
    plain, model = _module(case), _module(case)
    shape = (3, 6) if "mixed" in case else (2, 4, 5, 5)
    for p in model.parameters():
        if p.dim() == 4:
            p.register_hook(_other_strides)
    ddp = minddp.DistributedDataParallel(model, **CASES[case])
    counts: Counter[str] = Counter()
    for iteration in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(10 * iteration + rank))
        ddp.zero_grad()
        plain.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(x).float().sum().backward()
        counts = Counter(event.name for event in profile.events())
        plain(x).sum().backward()
    worst = 0.0
    for p, q in zip(ddp.parameters(), plain.parameters()):
        dist.all_reduce(q.grad)
        worst = max(worst, float((p.grad - q.grad / world_size).abs().max()))
    assert counts["aten::mul_"] + counts["aten::mul"] == 0
    assert worst < (0.1 if "mixed" in case else 1e-5)
