"""Communication hooks: what may be registered, and when."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist

from . import _C

BUILTIN_HOOK_DTYPES = {"FP16_COMPRESS": torch.float16, "ALLREDUCE": None}


def builtin_dtype(hook: Any) -> torch.dtype | None:
    """The dtype in which gradients travel with one of torch's built-in hooks; None: another hook, or their own."""
    return BUILTIN_HOOK_DTYPES[hook.name] if isinstance(hook, dist.BuiltinCommHookType) else None


def name_of(hook: Any) -> str:
    """A hook's name, for the log and messages."""
    is_builtin = isinstance(hook, dist.BuiltinCommHookType)
    return str(hook) if is_builtin else getattr(hook, "__qualname__", type(hook).__name__)


def waits_in_callbacks(state: object) -> bool:
    """Whether the hook of this state is PowerSGD, which sends more, and waits for it, once a collective is over.

    On the CPU it does so on the process group's own threads: with several buckets under way none is left to send
    anything, and what they send has another order on each rank. There one bucket goes after the other.
    """
    module = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    return module is not None and isinstance(state, module.PowerSGDState)


def check_signature(hook: Any) -> None:
    """Raises TypeError or ValueError unless ``hook`` may be called as ``hook(state, bucket)``."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {hook!r}.")
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ValueError(
            f"Communication hook must be hook(state, bucket), got parameters {list(signature.parameters)}."
        )
    annotation = signature.parameters["bucket"].annotation
    if annotation not in (inspect._empty, dist.GradBucket, _C.GradBucket, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (inspect._empty, future, "torch.futures.Future[torch.Tensor]"):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
