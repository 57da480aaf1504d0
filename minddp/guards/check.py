"""The wrapper's replicas: compared over ranks, now and then or at once, and made one again."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from ..functions import wrapper_of
from ..parameters import Parameters, all_parameters
from ..start import sync_module_states
from . import replicas

__all__ = ["check_replicas", "compare", "repair_replicas"]


def check_replicas(ddp: torch.nn.Module, buffers: bool = False) -> None:
    """Raises on every rank unless all ranks hold the same parameters, bit for bit. Collective.

    It reads the model once, on the host: for now and then (``check_replicas_every=``), or after each step while
    looking for a cause.

    Args:
        ddp: the wrapper.
        buffers: compare buffers too. Between the broadcasts before forward they usually differ.

    Raises:
        RuntimeError: names the tensors that differ, and which ranks hold the same.
    """
    wrapper = wrapper_of(ddp, "check_replicas")
    compare(wrapper.module, wrapper._minddp_wrapped, wrapper.process_group, buffers)


def compare(module: torch.nn.Module, parameters: Parameters, group: dist.ProcessGroup, buffers: bool = False) -> None:
    """:func:`check_replicas`, of a wrapper's module."""
    tensors = itertools.chain(all_parameters(module), module.named_buffers() if buffers else ())
    named = [(name, tensor) for name, tensor in tensors if name not in parameters.left_alone]
    replicas.check_replicas(named, group, parameters.device)


def repair_replicas(ddp: torch.nn.Module, rank: int) -> None:
    """Gives all ranks ``rank``'s parameters and buffers. Collective, between iterations.

    The optimizers' states stay each rank's own: load one rank's on all of them, or make them anew.

    Raises:
        ValueError: the group has no such rank.
    """
    wrapper = wrapper_of(ddp, "repair_replicas")
    group, size = wrapper.process_group, wrapper.process_group.size()
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"minddp.repair_replicas: rank must be one of the group's, 0 to {size - 1}, got {rank!r}")
    ignored = wrapper._minddp_wrapped.left_alone
    sync_module_states(wrapper.module, group, wrapper.broadcast_bucket_size, rank, ignored, buffers=True)
