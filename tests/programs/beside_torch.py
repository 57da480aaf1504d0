"""One program twice in the same processes: with torch's class, and with minddp's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.testing import run_ranks

# Called with the class and the rank; returns weights, or gradients, which may be missing.
Program = Callable[[Any, int], list[torch.Tensor | None]]


def _both(rank: int, world_size: int, programs: Sequence[Program]) -> dict[str, tuple[Any, Any]]:
    warnings.simplefilter("ignore")
    return {f.__name__: (f(TorchDDP, rank), f(minddp.DistributedDataParallel, rank)) for f in programs}


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def differ(theirs: Sequence[torch.Tensor | None], ours: Sequence[torch.Tensor | None]) -> bool:
    return len(theirs) != len(ours) or not all(map(_same, theirs, ours))


def those_that_differ(programs: Sequence[Program], world_size: int, timeout: float) -> list[str]:
    """The names of the programs whose answers are not the same with both, on some rank."""
    return [
        f"{name}, rank {rank}"
        for rank, seen in enumerate(run_ranks(_both, world_size, programs, timeout=timeout))
        for name, (theirs, ours) in seen.items()
        if differ(theirs, ours)
    ]
