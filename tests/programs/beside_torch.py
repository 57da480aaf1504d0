"""One program twice in the same processes: with torch's class, and with minddp's. And what programs are made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.ranks_pool import run_ranks

# Called with the class, the rank, and a mode's arguments; returns weights, or gradients, which may be missing.
Program = Callable[..., list[torch.Tensor | None]]
# The constructor's arguments under which a program is run: these, where a test names none.
PLAIN: dict[str, dict[str, Any]] = {"": {}}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "small": {"bucket_cap_mb_list": [1e-5] * 2},
    "small views": {"bucket_cap_mb_list": [1e-5] * 2, "gradient_as_bucket_view": True},
}


def _both(
    rank: int, world_size: int, programs: Sequence[Program], modes: dict[str, dict[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    warnings.simplefilter("ignore")
    return {
        f"{f.__name__} {mode}".strip(): (f(TorchDDP, rank, **args), f(minddp.DistributedDataParallel, rank, **args))
        for f in programs
        for mode, args in modes.items()
    }


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def differ(theirs: Sequence[torch.Tensor | None], ours: Sequence[torch.Tensor | None]) -> bool:
    return len(theirs) != len(ours) or not all(map(_same, theirs, ours))


def those_that_differ(
    programs: Sequence[Program],
    world_size: int,
    modes: dict[str, dict[str, Any]] = PLAIN,
) -> list[str]:
    """The names of the programs, with those of the modes, whose answers are not the same with both, on some rank."""
    return [
        f"{name}, rank {rank}"
        for rank, seen in enumerate(run_ranks(_both, world_size, programs, modes))
        for name, (theirs, ours) in seen.items()
        if differ(theirs, ours)
    ]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, i: int = 0) -> torch.Tensor:
    """That of a rank in its iteration ``i``, for :func:`mlp`."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * i + rank), dtype=torch.float32)


def gradients(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def trained(
    ddp: nn.Module,
    rank: int,
    steps: int = 3,
    loss: Callable[[int, Any], torch.Tensor] = lambda i, output: output.square().sum(),
    parameters: Sequence[nn.Parameter] = (),
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
) -> list[torch.Tensor | None]:
    """Every gradient of some steps, and the weights.

    Args:
        loss: of the step's number and of what forward returned.
        parameters: those of the module, where it does not name all of them.
        optimizer: plain SGD without one.
        first: the number of the first step, which chooses its batch.
    """
    parameters = list(parameters or ddp.module.parameters())
    optimizer = optimizer or torch.optim.SGD(parameters, 0.1)
    seen: list[torch.Tensor | None] = []
    for i in range(first, first + steps):
        optimizer.zero_grad()
        loss(i, ddp(batch(rank, i))).backward()
        seen += [None if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
    return seen + [p.detach().clone() for p in parameters]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


def other_collective(x: torch.Tensor) -> Any:
    """The sum over ranks, as a SyncBatchNorm takes one: on the default group, in forward and in backward."""
    return _Summed.apply(x)


class SummedInBackward(torch.autograd.Function):
    """All-reduces in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return _Summed.forward(ctx, g)
