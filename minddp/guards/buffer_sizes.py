"""Noticing that buffers have other sizes than when all ranks' were alike: one that grows with its longest batch, say.

Before a forward one rank's buffers are copied to all others, as bytes. Where sizes differ, parts land elsewhere,
or Gloo ends the process. A rank whose own sizes have changed asks the others
(:meth:`minddp.guards.local_gradients.LocalGradients.check_buffers`); no collective is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch

Sizes = dict[str, list[object]]  # by name: the bytes, and the shape in words


class BufferSizes:
    """Compares the buffers of ``module`` with what they were at the last look. ``named``: those that are copied."""

    def __init__(self, module: torch.nn.Module, named: Callable[[torch.nn.Module], Mapping[str, torch.Tensor]]):
        self._module, self._named = module, named
        self._registers = [m._buffers.values() for m in module.modules()]
        self._shapes, self._sizes = self._now(), self._of_named()

    def _now(self) -> list[torch.Size | None]:
        return [None if buffer is None else buffer.shape for buffer in chain.from_iterable(self._registers)]

    def _of_named(self) -> Sizes:
        return {
            name: [b.numel() * b.element_size(), str(list(b.shape))] for name, b in self._named(self._module).items()
        }

    def look(self) -> tuple[Sizes, Sizes] | None:
        """What they were and are, if that is not the same."""
        shapes, before = self._now(), self._sizes
        if shapes == self._shapes:
            return None
        self._shapes, self._sizes = shapes, self._of_named()
        return None if before == self._sizes else (before, self._sizes)
