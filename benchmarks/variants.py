"""What is compared: one training step (zero gradients, forward, backward, gradients averaged) per variant.

``make_step("torch-views", work, device)`` wraps a workload's module and returns a :class:`Step` to call.

Implementations (the part before the dash):
    local          no communication at all: what the step costs by itself
    torch          torch.nn.parallel.DistributedDataParallel
    minddp         minddp.DistributedDataParallel
    naive          after backward, one blocking allreduce for each parameter
    flat           after backward, all gradients copied to one buffer, one allreduce, copied back
    late           the same with buffers of at most bucket_cap_mb, all launched before any is awaited
    per-parameter  an allreduce for each parameter as its gradient arrives, awaited after backward
Options of the two DDP classes (after the dash): views, static, batched, lazy, unused. Torch has lazy from 2.15 on.
"shm" among them: the class gets a process group on minddp's shared memory, whatever the default group is on.
Options of minddp: bf16, fp16, int8 (wire=), ordered. Of both: fp16hook, bf16hook, powersgd1, powersgd4, which are
torch's communication hooks.
"""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import BenchmarkError, prepare_engine
from models import Workload

__all__ = [
    "IMPLEMENTATIONS", "MIB", "OPTIONS", "Step", "ddp_class", "group_by_cap", "make_step", "raw_collectives",
    "sent_bytes", "supported", "timed", "with_option",
]  # fmt: skip

MIB = 1 << 20

IMPLEMENTATIONS = ("minddp", "torch", "naive", "flat", "late", "per-parameter", "local")
HOOKS = ("fp16hook", "bf16hook", "powersgd1", "powersgd4")
OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
    "lazy": {"lazy_bucket_allocation": True},
    "unused": {"find_unused_parameters": True},
    "bf16": {"wire": "bf16"},
    "fp16": {"wire": "fp16"},
    "int8": {"wire": "int8"},
    "ordered": {"ordered": True},
    "shm": {},
    **{name: {} for name in HOOKS},
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
        return _BY_HAND[variant](work, **arguments)
    package, *options = variant.split("-")
    unknown = [option for option in options if option not in OPTIONS]
    if package not in ("torch", "minddp") or unknown:
        raise BenchmarkError(
            f"variant {variant!r} is not known: implementations are {', '.join(IMPLEMENTATIONS)}, "
            f"options of torch and minddp are {', '.join(OPTIONS)}, joined by dashes"
        )
    if not supported(variant):
        raise BenchmarkError(f"variant {variant!r} needs another torch: {torch.__version__} has no such argument")
    for option in options:
        arguments |= OPTIONS[option]
    if "shm" in options:
        prepare_engine("shm", dist.get_world_size())
        arguments["process_group"] = dist.new_group(backend="shm")
    if device.type == "cuda":
        arguments["device_ids"] = [device.index]
    wrapped = ddp_class(package)(work.module, **arguments)
    for option in options:
        if option in HOOKS:
            _register(wrapped, option)
    return Step(work, wrapped)


def _register(wrapped: Any, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "fp16hook":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16hook":
        # torch's class refuses it by its name without NCCL, though Gloo has what it does.
        wrapped.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    else:
        rank = int(name.removeprefix("powersgd"))
        # From the third step on, so that no measured step is of the warm-up.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def supported(variant: str) -> bool:
    """Whether the installed torch's class takes the arguments of ``variant``."""
    package, *options = variant.split("-")
    names = {name for option in options for name in OPTIONS.get(option, {})}
    return package != "torch" or names <= set(inspect.signature(ddp_class("torch")).parameters)


def _naive(work: Workload) -> Step:
    parameters, world_size = work.parameters(), dist.get_world_size()

    def finish() -> None:
        for parameter in reversed(parameters):
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)

    return Step(work, work.module, finish, work.sizes()[::-1])


def _late(work: Workload, bucket_cap_mb: float = math.inf) -> Step:
    world_size = dist.get_world_size()
    every = work.parameters()
    parameters = [[every[index] for index in group] for group in group_by_cap(work.sizes(), bucket_cap_mb)]
    buffers = [torch.empty(sum(p.numel() for p in group), device=group[0].device) for group in parameters]
    views = [
        [piece.view_as(p) for piece, p in zip(buffer.split([p.numel() for p in group]), group, strict=True)]
        for buffer, group in zip(buffers, parameters, strict=True)
    ]

    def finish() -> None:
        handles = []
        for buffer, pieces, group in zip(buffers, views, parameters, strict=True):
            torch._foreach_copy_(pieces, [p.grad for p in group])
            handles.append(dist.all_reduce(buffer, async_op=True))
        for handle, buffer, pieces, group in zip(handles, buffers, views, parameters, strict=True):
            handle.wait()
            buffer.div_(world_size)
            torch._foreach_copy_([p.grad for p in group], pieces)

    return Step(work, work.module, finish, [buffer.nbytes for buffer in buffers])


def group_by_cap(sizes: list[int], cap_mb: float) -> list[list[int]]:
    """Parameter indices in uniform buckets: in reverse order, a bucket closed when it holds ``cap_mb`` MiB."""
    groups: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(sizes))):
        if groups[-1] and filled >= cap_mb * MIB:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += sizes[index]
    return groups


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


_BY_HAND: dict[str, Callable[..., Step]] = {
    "naive": _naive, "flat": _late, "late": _late, "per-parameter": _per_parameter,
}  # fmt: skip


def with_option(step: Step, option: str) -> tuple[Callable[[], None], int]:
    """What to time for ``option``, and how many training steps one call of it is.

    ``""``: the step itself. ``"skip-4"``: gradients are synchronized in every 4th step only.
    ``"groups-3"``: buckets are reduced by 3 process groups in turn (before the first step only).
    """
    kind, _, number = option.partition("-")
    if kind == "skip":
        return lambda: _accumulate(step, int(number)), int(number)
    if kind == "groups":
        groups = [dist.new_group() for _ in range(int(number))]
        step.wrapped.register_comm_hook(groups, _reduce_in_turn)
    return step, 1


def _accumulate(step: Step, length: int) -> None:
    step.zero_grad()
    with step.wrapped.no_sync():
        for _ in range(length - 1):
            step.forward_backward()
    step.forward_backward()


def _reduce_in_turn(groups, bucket):  # unannotated: DDP checks annotations, and a string is none it knows
    """A comm hook: the mean of bucket ``i`` is taken by group ``i mod n``, so that they can run side by side."""
    group = groups[bucket.index() % len(groups)]
    buffer = bucket.buffer().div_(group.size())
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def raw_collectives(sizes: list[int], device: torch.device) -> Callable[[], None]:
    """A function that launches one allreduce for each of ``sizes`` (bytes) and awaits them all."""
    buffers = [torch.zeros(max(nbytes // 4, 1), device=device) for nbytes in sizes]

    def launch() -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return launch


def sent_bytes() -> int:
    """What this process's network interfaces have sent so far, headers included (Linux)."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


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
