"""The new values' way to the other ranks: their owners broadcast them, a piece while the next one is stepped."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..messages import wait_for
from . import layout

WHAT = "the parameters that their owners have stepped (minddp.Owned.step)"
_ALONE_BYTES = 64 << 10  # from here on a parameter is sent from its own memory, which spares two copies


class Piece:
    """What each rank sends together: large parameters as they are, the small ones packed behind one another."""

    def __init__(self, by_rank: Sequence[Sequence[torch.Tensor]], rank: int):
        self._messages: list[tuple[int, torch.Tensor]] = []  # (owner, a parameter or small ones packed)
        self._large_of_others: list[torch.Tensor] = []
        self._packs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # (into the message, from mine)
        self._unpacks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # (into others', from messages)
        for owner, theirs in enumerate(by_rank):
            large = [p for p in theirs if _goes_alone(p)]
            alone = {id(p) for p in large}
            small = [p for p in theirs if id(p) not in alone]
            self._messages += [(owner, p) for p in large]
            begins = layout.offsets(small)
            if small:
                message = torch.zeros(begins[-1], dtype=torch.uint8, device=small[0].device)
                views = [_view(message, begin, p) for begin, p in zip(begins, small)]
                self._messages.append((owner, message))
                targets, sources = self._packs if owner == rank else self._unpacks
                targets += views if owner == rank else small
                sources += small if owner == rank else views
            if owner != rank:
                self._large_of_others += large

    def send(self, group: dist.ProcessGroup) -> list[Any]:
        """Starts the broadcasts of what is in the parameters now; the same ones in the same order on all ranks."""
        _copy(*self._packs)
        works = []
        for owner, message in self._messages:
            options = dist.BroadcastOptions()
            options.rootRank = owner
            # Detached now, since a program may have given the parameter other memory (`p.data = ...`).
            works.append(group.broadcast([message.detach()], options))
        return works

    def unpack(self) -> None:
        """Writes what the other ranks have sent. REQUIRES: the broadcasts are over."""
        _copy(*self._unpacks)
        for parameter in self._large_of_others:
            torch.autograd.graph.increment_version(parameter)  # as a step does; the broadcast has not


def _goes_alone(parameter: torch.Tensor) -> bool:
    large = layout.nbytes(parameter) >= _ALONE_BYTES
    return large and parameter.is_contiguous() and not parameter.is_complex()


def _view(memory: torch.Tensor, begin: int, parameter: torch.Tensor) -> torch.Tensor:
    return memory[begin : begin + layout.nbytes(parameter)].view(parameter.dtype).view(parameter.shape)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


class Exchange:
    """All pieces of a step.

    Args:
        pieces: for each piece, for each rank, the parameters whose values it sends.
        group: the wrapper's process group.
    """

    def __init__(self, pieces: Sequence[Sequence[Sequence[torch.Tensor]]], group: dist.ProcessGroup):
        self._group = group
        self._pieces = [Piece(piece, group.rank()) for piece in pieces]
        self._under_way: deque[tuple[Piece, list[Any]]] = deque()

    def send(self, index: int) -> None:
        """Piece ``index`` has been stepped: sends it."""
        self._under_way.append((self._pieces[index], self._pieces[index].send(self._group)))

    def finish(self) -> None:
        """Waits until every parameter is whole."""
        while self._under_way:
            piece, works = self._under_way.popleft()
            for work in works:
                wait_for(work, self._group, WHAT)
            piece.unpack()
