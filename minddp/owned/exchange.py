"""The new values' way to the other ranks: their owners broadcast them, a piece while the next one is stepped."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..messages import wait_for

WHAT = "the parameters that their owners have stepped (minddp.Owned.step)"
_PACKED_BYTES = 64 << 20  # under way at a time, at most; a link of 400 Gbit/s carries less in a millisecond


class _Message(NamedTuple):
    work: Any
    memory: torch.Tensor
    packed: int  # bytes of memory of its own; 0 where it is a parameter's
    into: list[torch.Tensor]  # the parameters that get the values; none on their owner


class Exchange:
    """The messages of one step: one for each owner, piece and dtype, the same ones in the same order on all ranks.

    Parameters are packed into a message when it leaves, and its memory lives until it has arrived. One that is alone
    in its message is sent from its own memory, which spares two copies.

    Args:
        group: the wrapper's process group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._rank = group, group.rank()
        self._under_way: deque[_Message] = deque()
        self._packed = 0  # bytes under way

    def send(self, piece: Sequence[Sequence[torch.Tensor]]) -> None:
        """Starts the broadcasts of a piece: for each rank, the parameters that it has stepped. Waits for earlier ones
        if much is under way."""
        for owner, theirs in enumerate(piece):
            for parameters in _by_dtype(theirs):
                self._broadcast(owner, parameters)

    def _broadcast(self, owner: int, parameters: list[torch.Tensor]) -> None:
        first, is_mine = parameters[0], owner == self._rank
        alone = len(parameters) == 1 and first.is_contiguous()
        if alone:  # as it is now: a program may have given it other memory (`p.data = ...`)
            memory = first.detach().view(-1)
        elif is_mine:
            memory = torch.cat([p.reshape(-1) for p in parameters])
        else:
            memory = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        options = dist.BroadcastOptions()
        options.rootRank = owner
        work = self._group.broadcast([memory.view(torch.uint8)], options)  # a backend need not know the dtype
        packed = 0 if alone else memory.nbytes
        self._under_way.append(_Message(work, memory, packed, [] if is_mine else parameters))
        self._packed += packed
        while self._packed > _PACKED_BYTES:
            self._arrive()

    def finish(self) -> None:
        """Waits until every parameter is whole."""
        while self._under_way:
            self._arrive()

    def _arrive(self) -> None:
        work, memory, packed, into = self._under_way.popleft()
        wait_for(work, self._group, WHAT)
        self._packed -= packed
        if packed and into:
            parts = memory.split([p.numel() for p in into])
            torch._foreach_copy_(into, [part.view(p.shape) for part, p in zip(parts, into)])
        elif into:
            torch.autograd.graph.increment_version(into[0])  # as a step does; the broadcast has not


def _by_dtype(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel():
            found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())
