"""Differentiable collectives on a GPU: NCCL alone, with a Gloo group for headers, and Gloo on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minddp import functional as F
from tests.functional import gradcheck
from tests.ranks_pool import run_ranks

pytestmark = pytest.mark.cuda


def programs(size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "all_gather": lambda x: F.all_gather(x),
        "gather": lambda x: F.gather(x),
        "broadcast": lambda x: F.broadcast(x),
        "scatter": lambda x: F.scatter(x),
        "all_to_all": lambda x: F.all_to_all(x, [0] * (size - 1) + [len(x)]),
    }
    if size == 1:  # with more ranks their losses here differ
        found["replicated"] = lambda x: F.all_reduce(x, loss="replicated")
    for op in ("sum", "avg", "product", "min", "max"):
        found[f"all_reduce {op}"] = lambda x, op=op: F.all_reduce(x, op)
        found[f"reduce_scatter {op}"] = lambda x, op=op: F.reduce_scatter(x, op)
        found[f"reduce {op}"] = lambda x, op=op: F.reduce(x, op=op)
    return found


def on_the_gpu(rank: int, size: int) -> dict[str, Tensor]:
    """Every program checked by finite differences on the GPU; its results, to be compared with the CPU's."""
    torch.cuda.set_device(0)
    x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).cuda()
    results = {}
    for name, program in programs(size).items():
        results[name] = program(x)
        assert results[name].is_cuda
        gradcheck.check(lambda y, p=program: (p(y) ** 3).sum() * (rank + 1), x)
    assert F.all_gather(x.to(torch.complex64)).dtype is torch.complex64
    assert F.broadcast(x.bfloat16() if rank == 0 else None).is_cuda
    return {name: result.cpu() for name, result in results.items()}


def on_the_cpu(rank: int, size: int) -> dict[str, Tensor]:
    x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return {name: program(x) for name, program in programs(size).items()}


@pytest.mark.parametrize("backend, size", [("nccl", 1), ("gloo", 2)])
def test_collectives_on_cuda(backend: str, size: int) -> None:
    gpu, cpu = run_ranks(on_the_gpu, size, backend=backend), run_ranks(on_the_cpu, size)
    for found, want in zip(gpu, cpu, strict=True):
        assert found.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(found[name], want[name], msg=name)


def cpu_tensor_on_nccl(rank: int, size: int) -> str:
    torch.cuda.set_device(0)
    with pytest.raises(F.CollectiveError) as caught:
        F.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_cpu_tensor_on_nccl_is_an_error() -> None:
    assert "which the group's backend 'nccl' cannot reach" in run_ranks(cpu_tensor_on_nccl, 1, backend="nccl")[0]
