"""The shared-memory transport: a process-group backend for ranks on one machine.

Importing this module registers the backends ``"shm"`` and ``"auto"``::

    import torch.distributed as dist
    import minddp.shm

    dist.init_process_group("shm")              # or dist.new_group(ranks, backend="shm")
    dist.init_process_group("auto")             # "shm" where the ranks can share memory, Gloo otherwise

Collectives and point-to-point messages on CPU tensors pass through memory that the ranks share, where
Gloo sends them through a socket. All ranks must run on one machine, in one PID namespace, as one user;
otherwise every rank raises when the group is made. Nothing appears in ``/dev/shm``, whose size does not
matter, and nothing is left behind, however the processes end. No other user can map the memory.

``"auto"`` carries CPU tensors, too. Where the ranks cannot share memory (several machines, containers, users) it is
Gloo, on all of them, and rank 0 warns with the reason; a rank that does not come at all is an error all the same.

What always holds
    A reduction gives the same bits on every rank; for two ranks those of Gloo. A rank that dies, leaves,
    calls another collective or does not come within the group's timeout makes the others raise
    :class:`torch.distributed.DistBackendError`, which names it; the group is broken then, and what the
    tensors of that call hold is undefined, but no rank changes another's any more.
    MIN and MAX are IEEE 754's minimum and maximum: a NaN on any rank gives a NaN, and -0 is less than +0.

After a fork
    A forked child (a DataLoader's worker, say) is no rank: calls on the group raise there, and
    ``destroy_process_group()`` ends the child's copy only. It may read the tensors of :func:`empty`, and
    a parameter's gradient that lies there, and sees what the parent has there at that moment; what it
    writes is its own.

The native half is ``csrc/shm/``; its ``shm_backend.h`` gives the reading order.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import warnings
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from .._extension import load

__all__ = ["AUTO_BACKEND", "BACKEND", "empty", "is_available", "is_shared"]

BACKEND = "shm"
"""The name under which the backend is registered."""

AUTO_BACKEND = "auto"
"""The name of the one that falls back to Gloo."""

# What csrc/shm/meeting.cpp says where no other transport would help.
_NOT_FOR_WANT_OF_MEMORY = ("did not come to join the group", "another process joins this group")

_MOST_ELEMENTS = 2**63 - 1
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def is_available() -> bool:
    """Whether the transport is part of this build: it is on Linux, unless built with ``MINDDP_SHM=0``."""
    return _load() is not None


def _load() -> Any:
    """``minddp._shm``; None: it is not part of this build."""
    load()  # or raises, if what was built does not go with this torch
    spec = importlib.util.find_spec("minddp._shm")
    return None if spec is None else importlib.import_module("minddp._shm")


def _native() -> Any:
    extension = _load()
    if extension is None:
        raise RuntimeError(
            f'minddp was built without the backend "shm", which needs Linux (this is {platform.system()}): '
            'use backend "gloo"'
        )
    return extension


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    try:
        extension = _native()
    except Exception as error:
        _tell_others(store, rank, error)
        raise
    return extension.backend(store, rank, size, timeout)


def _create_auto(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Of one mind with the other ranks, since a group that cannot be made raises the same error on all of them."""
    try:
        return _create(store, rank, size, timeout)
    except Exception as error:
        if any(words in str(error) for words in _NOT_FOR_WANT_OF_MEMORY):
            raise
        reason = str(error)
    if rank == 0:
        warnings.warn(f'backend "auto" is Gloo here, since "shm" cannot be: {reason}', RuntimeWarning, stacklevel=2)
    return dist.ProcessGroupGloo(dist.PrefixStore("minddp-auto-gloo", store), rank, size, timeout)


def _tell_others(store: Any, rank: int, error: Exception) -> None:
    """The note of ``csrc/shm/meeting.cpp``, for a rank on which that cannot be called."""
    attempt = store.add(f"minddp-shm/attempt/{rank}", 1)
    store.set("minddp-shm/failed", f"{attempt} {rank} {type(error).__name__}: {error}")
    store.add("minddp-shm/events", 1)


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
        dtype: any but quantized ones; default: torch's default dtype.
        group: a group with this backend; default: the default group.

    Raises:
        TypeError: the dtype is none, or a quantized one, whose values need a scale.
        ValueError: the group has another backend, or a size is negative.
        MemoryError: the group's shared memory (together the machine's) cannot hold that much.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    if any(length < 0 for length in shape):
        raise ValueError(f"minddp.shm.empty: a size must not be negative, got {tuple(shape)}")
    numel = prod(shape)
    if numel > _MOST_ELEMENTS:
        raise MemoryError(f"minddp.shm.empty: shape {tuple(shape)} has {numel} elements, more than can be addressed")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
        raise TypeError(
            f"minddp.shm.empty: dtype must be a torch.dtype that is not quantized, or None, got {dtype!r}"
        )
    tensor: torch.Tensor = _native().empty(_backend_of(group), numel, dtype)
    return tensor.view(shape)


def is_shared(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the tensor lies in this rank's part of the group's shared memory and is contiguous."""
    return bool(_native().is_shared(_backend_of(group), tensor))


def _register() -> None:
    for name, create in ((BACKEND, _create), (AUTO_BACKEND, _create_auto)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])


_register()
