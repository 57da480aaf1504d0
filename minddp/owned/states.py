"""Optimizer state on its way between ranks and dictionaries.

A state travels as the bytes of ``torch.save``, and is read back with ``weights_only=True``: nothing is executed.
"""

from __future__ import annotations

import io
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ..messages import broadcast_from, gather_objects

_PIECE_BYTES = 64 << 20
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_WHAT = "the optimizer's state of all ranks (minddp.Owned.consolidate_state_dict)"


def to_host(value: Any) -> Any:
    """A copy of a state with its tensors on the host; dictionaries, lists and tuples are followed."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: to_host(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_host(entry) for entry in value)
    if isinstance(value, numpy.generic):
        return value.item()
    if value is None or isinstance(value, _PLAIN):
        return value
    raise TypeError(
        f"minddp.Owned.consolidate_state_dict: a state or a group holds a {type(value).__name__} ({value!r:.60}), "
        "which is not sent to another rank. Tensors, numbers, texts, and dictionaries, lists and tuples of these are."
    )


def gather(mine: Any, group: dist.ProcessGroup | None, to: int) -> list[Any] | None:
    """Each rank's ``mine`` on rank ``to``, in rank order; None on the others. Collective.

    One rank after the other sends, in pieces of 64 MiB: no rank but ``to`` ever holds more than one piece of others.

    Args:
        mine: what ``torch.load(weights_only=True)`` reads: tensors, numbers, texts, and containers of these.
    """
    if group is None or group.size() == 1:
        return [mine]
    stream = io.BytesIO()
    torch.save(mine, stream)
    data = stream.getvalue()
    sizes = gather_objects(len(data), group)
    everyone: list[Any] = []
    types = group._device_types
    device = torch.device("cpu") if torch.device("cpu") in types else torch.device(types[0].type)
    for rank, size in enumerate(sizes):
        received = bytearray()
        for begin in range(0, size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, size - begin)
            piece = torch.zeros(count, dtype=torch.uint8)
            if rank == group.rank():
                piece = torch.frombuffer(bytearray(data[begin : begin + count]), dtype=torch.uint8)
            broadcast_from(group, piece := piece.to(device), rank, _WHAT)
            if group.rank() == to:
                received += piece.cpu().numpy().tobytes()
        if group.rank() == to:
            everyone.append(mine if rank == to else torch.load(io.BytesIO(received), weights_only=True))
    return everyone if group.rank() == to else None
