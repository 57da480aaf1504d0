"""What the benchmarks compare does the same work: every variant ends with the same averaged gradients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.on_ranks import on_ranks

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")

CASES = (
    ("naive", {}, ""), ("flat", {}, ""), ("late", {"bucket_cap_mb": 0.01}, ""), ("per-parameter", {}, ""),
    ("torch", {"bucket_cap_mb": 0.01}, ""), ("torch-views-static", {}, ""), ("minddp", {}, ""),
    ("minddp-views", {"bucket_cap_mb": 0.01}, ""), ("minddp-static", {}, ""), ("minddp-views-lazy", {}, ""),
    ("torch-views-batched-lazy", {}, ""), ("minddp-views-shm", {}, ""),
    ("minddp", {"bucket_cap_mb": 0.01}, "groups-3"),
)  # fmt: skip


def _make(rank: int, variant: str, **arguments: Any) -> Any:
    """The step of ``variant`` on the model of 400 small parameters."""
    sys.path.insert(0, BENCHMARKS)
    import models
    import torch
    import variants

    device = torch.device("cpu")
    return variants.make_step(variant, models.workload("many-small", device, rank), device, **arguments)


@pytest.mark.long
@on_ranks(2)
def test_every_variant_averages_the_same_gradients(rank: int, world_size: int) -> None:
    """Largest difference of each variant's gradients from an average taken parameter by parameter."""
    local = _make(rank, "local")
    local()
    expected = [p.grad.clone() for p in local.work.parameters()]
    for gradient in expected:
        dist.all_reduce(gradient)
        gradient.div_(world_size)
    differences = {}
    for variant, arguments, option in CASES:
        if not sys.modules["variants"].supported(variant):
            with pytest.raises(sys.modules["harness"].BenchmarkError, match="needs another torch"):
                _make(rank, variant, **arguments)
            continue
        step = _make(rank, variant, **arguments)
        call, _ = sys.modules["variants"].with_option(step, option)
        for _ in range(2):  # buckets are rebuilt after the first
            call()
        assert sum(step.bucket_bytes()) == step.work.nbytes(), variant
        found = [p.grad for p in step.work.parameters()]
        differences[f"{variant} {option}"] = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
        )
    assert len(differences) >= len(CASES) - 1
    assert max(differences.values()) < 1e-4, differences
