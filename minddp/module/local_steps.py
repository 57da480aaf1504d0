"""Steps on gradients of forwards under no_sync() whose backward ran outside of it: likely a mistake.

Until a step uses them nothing is wrong: the next synchronized backward averages them, as in a pipeline whose
micro-batches are forwarded before the first goes back. Logged, since a program may have made warnings errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..guards.optimizer_guard import Guarded
from ..ranks.logs import log
from ..reduction.reducer import Reducer

_TEXT = (
    "DistributedDataParallel: optimizer.step() on rank {} uses gradients of this rank alone, of {}: their forward "
    "ran inside of no_sync(), and backward() outside of it. As in torch, where forward ran decides. Put both "
    "inside, or both outside."
)


class LocalSteps:
    """Warns once."""

    def __init__(self) -> None:
        self._has_warned = False

    def look(
        self, reducer: Reducer, stepped: Sequence[tuple[int, torch.nn.Parameter]], others: Sequence[Guarded]
    ) -> None:
        """``stepped``: what an optimizer is about to use, with indices. ``others``: who may have averaged it."""
        left = set() if self._has_warned else set(reducer.left_local())
        found = [
            reducer.names[i]
            for i, p in stepped
            if i in left and not any(other.has_averaged(p, reducer.touched_in(i)) for other in others)
        ]
        if found:
            self._has_warned = True
            log.warning(_TEXT.format(reducer.group.rank(), found[:10]))
