"""What is compared: one training step (zero gradients, forward, backward, gradients averaged) per variant.

``make_step("torch-views", work, device)`` wraps a workload's module and returns a :class:`Step` to call.

Implementations (the part before the dash):
    local          no communication at all: what the step costs by itself
    torch          torch.nn.parallel.DistributedDataParallel
    minddp         minddp.DistributedDataParallel
    naive          after backward, one blocking allreduce for each parameter
    flat           after backward, all gradients copied to one buffer, one allreduce, copied back
    per-parameter  an allreduce for each parameter as its gradient arrives, awaited after backward
Options of the two DDP classes (after the dash): views, static, batched, unused.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import BenchmarkError
from models import Workload

__all__ = ["IMPLEMENTATIONS", "OPTIONS", "Step", "ddp_class", "make_step", "raw_collectives", "timed"]

IMPLEMENTATIONS = ("minddp", "torch", "naive", "flat", "per-parameter", "local")
OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "unused": {"find_unused_parameters": True},
}


class Step:
    """One training step of ``work`` through ``wrapped``; ``finish`` runs after backward and sends
    collectives of ``sizes`` bytes (a DDP class knows its own)."""

    def __init__(
        self,
        work: Workload,
        wrapped: torch.nn.Module,
        finish: Callable[[], None] | None = None,
        sizes: list[int] | None = None,
    ):
        self.work = work
        self.wrapped = wrapped
        self._finish = finish
        self._sizes = sizes or []
        self._parameters = work.parameters()
        self._cuda = self._parameters[0].is_cuda

    def __call__(self) -> None:
        self.zero_grad()
        self.forward_backward()

    def zero_grad(self) -> None:
        """Frees the gradients, as optimizers do by default."""
        for parameter in self._parameters:
            parameter.grad = None

    def forward_backward(self) -> None:
        """Forward, backward and the averaging of gradients; returns when the gradients are there."""
        self.work.call(self.wrapped).backward()
        if self._finish is not None:
            self._finish()
        if self._cuda:
            torch.cuda.synchronize()

    def bucket_bytes(self) -> list[int]:
        """Sizes of the collectives in launch order, after at least two steps."""
        if not isinstance(self.wrapped, torch.nn.parallel.DistributedDataParallel):
            return self._sizes
        data = self.wrapped._get_ddp_logging_data()
        text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return [int(size) for size in str(text).split(", ")]


def ddp_class(package: str) -> Any:
    """The class DistributedDataParallel of ``"torch"`` or ``"minddp"``."""
    if package == "torch":
        return torch.nn.parallel.DistributedDataParallel
    module = importlib.import_module("minddp")
    if not hasattr(module, "DistributedDataParallel"):
        raise BenchmarkError("minddp is not built here: run make, or leave the minddp variants out")
    return module.DistributedDataParallel


def make_step(variant: str, work: Workload, device: torch.device, **arguments: Any) -> Step:
    """The step of ``variant`` (``implementation[-option…]``); ``arguments`` go to the DDP class."""
    if variant == "local":
        return Step(work, work.module)
    if variant in _BY_HAND:
        return _BY_HAND[variant](work)
    package, *options = variant.split("-")
    unknown = [option for option in options if option not in OPTIONS]
    if package not in ("torch", "minddp") or unknown:
        raise BenchmarkError(
            f"variant {variant!r} is not known: implementations are {', '.join(IMPLEMENTATIONS)}, "
            f"options of torch and minddp are {', '.join(OPTIONS)}, joined by dashes"
        )
    for option in options:
        arguments |= OPTIONS[option]
    if device.type == "cuda":
        arguments["device_ids"] = [device.index]
    return Step(work, ddp_class(package)(work.module, **arguments))


def _naive(work: Workload) -> Step:
    parameters, world_size = work.parameters(), dist.get_world_size()

    def finish() -> None:
        for parameter in reversed(parameters):
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)

    return Step(work, work.module, finish, work.sizes()[::-1])


def _flat(work: Workload) -> Step:
    parameters, world_size = work.parameters(), dist.get_world_size()
    buffer = torch.empty(sum(p.numel() for p in parameters), device=parameters[0].device)
    pieces = buffer.split([p.numel() for p in parameters])
    views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]

    def finish() -> None:
        gradients = [p.grad for p in parameters]
        torch._foreach_copy_(views, gradients)
        dist.all_reduce(buffer)
        buffer.div_(world_size)
        torch._foreach_copy_(gradients, views)

    return Step(work, work.module, finish, [sum(work.sizes())])


def _per_parameter(work: Workload) -> Step:
    world_size = dist.get_world_size()
    pending: list[tuple[Any, torch.Tensor]] = []

    def launch(parameter: torch.Tensor) -> None:
        pending.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    def finish() -> None:
        for handle, parameter in pending:
            handle.wait()
            parameter.grad.div_(world_size)
        pending.clear()

    for parameter in work.parameters():
        parameter.register_post_accumulate_grad_hook(launch)
    return Step(work, work.module, finish, work.sizes()[::-1])


_BY_HAND = {"naive": _naive, "flat": _flat, "per-parameter": _per_parameter}


def raw_collectives(sizes: list[int], device: torch.device) -> Callable[[], None]:
    """A function that launches one allreduce for each of ``sizes`` (bytes) and awaits them all."""
    buffers = [torch.zeros(max(nbytes // 4, 1), device=device) for nbytes in sizes]

    def launch() -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return launch


def timed(call: Callable[[], None], count: int) -> list[float]:
    """Seconds of ``count`` calls, each begun by all ranks together, after one that is not counted."""
    call()
    seconds = []
    for _ in range(count):
        dist.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds
