"""minddp on a GPU: NCCL at world size 1 (streams, launches), Gloo with CUDA tensors at world size 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.ranks_pool import run_ranks

pytestmark = pytest.mark.cuda

# One rank alone goes through its group, too: else no collective of the reducer's would run at world size 1.
THROUGH_NCCL = {"MINDDP_ALWAYS_REDUCE": "1"}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb_list": [0.01] * 2},
]


def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def make_model() -> nn.Module:
    """Convolutions in channels-last, float16 beside float32 parameters, many small ones.

    Orthogonal layers keep what flows back as large as it came: by default it is below any tolerance after 20 layers.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten()]
    layers += [nn.Linear(72, 64)] + [nn.Linear(64, 64) for _ in range(20)]
    model = nn.Sequential(*layers, HalfLinear(64, 5)).to(device())
    for layer in model:
        if type(layer) is nn.Linear:
            nn.init.orthogonal_(layer.weight)
    return model.to(memory_format=torch.channels_last)


class HalfLinear(nn.Linear):
    """A float16 layer; its input and output are float32."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half()).float()


def batches(seed: int, count: int = 4) -> Iterator[torch.Tensor]:
    """All on the device before the first is used: a copy in between would wait for what a test has delayed."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(4, 3, 8, 8, generator=generator).to(device()) for _ in range(count)]
    torch.cuda.synchronize()
    return iter(made)


def train(model: nn.Module, inputs: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of every iteration, the parameters changing in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return seen


def all_close(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """To rounding: the library may choose another algorithm on another stream."""
    return len(found) == len(want) and all(
        bool((a - b).abs().max() <= (1e-2 if a.dtype == torch.float16 else 1e-4) * b.abs().max())
        for a, b in zip(found, want)
    )


def nccl_alone(rank: int, world_size: int) -> list[str]:
    """The variants whose gradients differ from the bare module's: alone, the mean changes nothing."""
    want = train(make_model(), batches(seed=1))
    assert all(bool(g.abs().max() > 1e-3) for g in want), "too small to be compared"
    wrong = []
    for options in VARIANTS:
        found = train(minddp.DistributedDataParallel(make_model(), device_ids=[0], **options), batches(seed=1))
        if not all_close(found, want):
            wrong.append(str(options))
    return wrong


def test_nccl_at_world_size_1() -> None:
    assert run_ranks(nccl_alone, 1, backend="nccl", env=THROUGH_NCCL) == [[]]


def gloo_pair(rank: int, world_size: int) -> list[str]:
    """Names of the variants whose first gradients are not the ranks' mean."""
    local = make_model()
    local(next(batches(seed=rank))).square().mean().backward()
    means = []
    for p in local.parameters():
        mean = p.grad.double().cpu()
        dist.all_reduce(mean)
        means.append((mean / world_size).to(p.grad))
    wrong = []
    for options in VARIANTS:
        model = minddp.DistributedDataParallel(make_model(), device_ids=[0], **options)
        for _ in range(3):
            model.zero_grad()
            model(next(batches(seed=rank))).square().mean().backward()
            if not all_close([p.grad for p in model.parameters()], means):
                wrong.append(str(options))
    return wrong


def test_gloo_with_cuda_tensors_at_world_size_2() -> None:
    assert run_ranks(gloo_pair, 2, timeout=900) == [[], []]


def side_stream(rank: int, world_size: int) -> bool:
    """A step on a stream of the user's own, the device being late: gradients equal the default stream's."""
    want = train(make_model(), batches(seed=1))
    inputs = batches(seed=1)
    model = minddp.DistributedDataParallel(make_model(), device_ids=[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = train(model, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return all_close(found, want)


def test_on_a_side_stream() -> None:
    assert run_ranks(side_stream, 1, backend="nccl", env=THROUGH_NCCL) == [True]
