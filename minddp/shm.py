"""The shared-memory transport: a process-group backend for ranks on one machine.

Importing this module registers the backend ``"shm"``::

    import torch.distributed as dist
    import minddp.shm

    dist.init_process_group("shm")              # or dist.new_group(ranks, backend="shm")

Collectives and point-to-point messages on CPU tensors pass through memory that the ranks share, where
Gloo sends them through a socket. All ranks must run on one machine, in one PID namespace, as one user;
otherwise every rank raises when the group is made. Nothing appears in ``/dev/shm``, whose size does not
matter, and nothing is left behind, however the processes end.

What always holds
    A reduction gives the same bits on every rank; for two ranks those of Gloo. A rank that dies, leaves,
    calls another collective or does not come within the group's timeout makes the others raise
    :class:`torch.distributed.DistBackendError`, which names it; the group is broken then.

The native half is ``csrc/shm/``; its ``shm_backend.h`` gives the reading order.
"""

from __future__ import annotations

from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from minddp._extension import load

__all__ = ["BACKEND", "empty", "is_shared"]

BACKEND = "shm"
"""The name under which the backend is registered."""


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return load().shm_backend(store, rank, size, timeout)


def _backend_of(group: dist.ProcessGroup | None) -> Any:
    """The native backend; raises ValueError where the group has none of this kind."""
    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise ValueError("minddp.shm needs a process group: call torch.distributed.init_process_group first")
    backend = chosen._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def empty(*size: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """An uninitialized contiguous CPU tensor in memory that all ranks of the group can reach.

    An all-reduce whose tensors are such on all ranks works on them in place and copies nothing. Not
    collective; the tensor can be used like any other and may outlive the group.

    Args:
        size: the shape, as for :func:`torch.empty`.
        dtype: default: torch's default dtype.
        group: a group with this backend; default: the default group.

    Raises:
        ValueError: the group has another backend.
        MemoryError: the group's shared memory (together the machine's) is used up.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    tensor: torch.Tensor = load().shm_empty(_backend_of(group), prod(shape), dtype or torch.get_default_dtype())
    return tensor.view(shape)


def is_shared(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the tensor lies in this rank's part of the group's shared memory and is contiguous."""
    return bool(load().shm_is_shared(_backend_of(group), tensor))


def _register() -> None:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


_register()
