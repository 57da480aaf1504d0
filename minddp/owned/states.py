"""Optimizer state between ranks: it travels as bytes of ``torch.save``, and nothing is executed to read them."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..messages import broadcast_from, device_of, gather_objects

_PIECE_BYTES = 64 << 20
_WHAT = "the optimizer's state of all ranks (minddp.Owned.consolidate_state_dict)"


class Share(collections.defaultdict[torch.Tensor, Any]):
    """This rank's states, by parameter.

    Attributes:
        elsewhere: other ranks may have some, so this is true without any, too. torch.distributed.checkpoint takes a
            step to make states where ``state`` is false, which must be so on all ranks or on none.
    """

    elsewhere = False

    def __bool__(self) -> bool:
        return self.elsewhere or len(self) > 0

    def clear(self) -> None:
        super().clear()
        self.elsewhere = False  # a program clears it on all ranks


class Whole:
    """All ranks' states as they were gathered, on the host, beside ``state``, this rank's at that moment."""

    def __init__(self, gathered: dict[torch.Tensor, Any], state: Any):
        self.gathered, self._state = gathered, state
        self._seen = self._look(state)

    @staticmethod
    def _look(state: Any) -> tuple[bool, list[int]]:
        return bool(state), [id(key) for key in state]

    def is_stale(self, state: Any, is_mine: Callable[[torch.Tensor], bool]) -> bool:
        """Whether ``state``, this rank's of now, was replaced or edited since. Reads all of it."""
        if state is not self._state or self._look(state) != self._seen:
            return True
        return not all(_alike(state[p], self.gathered.get(p)) for p in state if is_mine(p))


def _alike(one: Any, other: Any) -> bool:
    """Bit for bit, wherever they are."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (type(one), one.dtype, one.shape) != (type(other), other.dtype, other.shape):
            return False
        if hasattr(one, "__tensor_flatten__"):
            return all(_alike(getattr(one, name), getattr(other, name)) for name in one.__tensor_flatten__()[0])
        plain = (t.detach().cpu().to_dense().contiguous().view(-1).view(torch.uint8) for t in (one, other))
        return torch.equal(*plain)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def packed(mine: Any) -> memoryview:
    """What travels.

    Raises:
        TypeError: ``mine`` holds what would not be read.
    """
    stream = io.BytesIO()
    torch.save(mine, stream)
    try:
        unpacked(stream.getbuffer())
    except Exception as error:
        raise TypeError(
            "minddp.Owned.consolidate_state_dict: a state or a group holds what is not sent to another rank. Tensors,"
            f" numbers, texts, and dictionaries, lists and tuples of these are. What torch.load says: {error}"
        ) from error
    return stream.getbuffer()


def unpacked(data: Any) -> Any:
    """With its tensors on the host."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def gather(mine: memoryview, group: dist.ProcessGroup | None, to: int | None) -> list[Any]:
    """What each rank has packed, in rank order, on rank ``to`` or on all; empty on the others. Collective.

    One rank after the other sends, in pieces of 64 MiB: a rank that keeps nothing never holds more than one of them.
    """
    if group is None or group.size() == 1:
        return [unpacked(mine)]
    everyone, keeps = [], to in (None, group.rank())
    own = torch.frombuffer(mine, dtype=torch.uint8)
    for owner, size in enumerate(gather_objects(len(own), group)):
        received = bytearray()
        for begin in range(0, size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, size - begin)
            piece = own[begin : begin + count] if owner == group.rank() else torch.empty(count, dtype=torch.uint8)
            broadcast_from(group, piece := piece.to(device_of(group), copy=True), owner, _WHAT)
            if keeps:
                received += piece.cpu().numpy().tobytes()
        if keeps:
            everyone.append(unpacked(received))
    return everyone
