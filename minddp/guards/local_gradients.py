"""Steps on gradients that only this rank has.

A backward through the wrapped module itself, past the wrapper, leaves local gradients, as in torch, and waits for
nobody. An optimizer that uses them takes another step on each rank, and the replicas drift apart. But a gradient that
every rank computes alike is nobody's mistake: a penalty on the weights, say. The difference shows only beside the
other ranks, so they are asked, through the store, and only where such gradients are about to be used.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# So long may another rank come later to its own step before it counts as one that has no such gradients.
PATIENCE_SECONDS = 10.0
_TOLERANCE = 1e-4  # relative: kernels need not add in the same order on every rank


class LocalGradients:
    """Compares gradients that were made past one wrapper.

    Args:
        group: the wrapper's process group.
        store: carries the answers; ``None``: nobody can be asked.
        key: tells this wrapper's answers from others'.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store | None, key: str):
        self._rank, self._size = group.rank(), group.size()
        self._store = None if store is None else dist.PrefixStore(f"minddp/local/{key}", store)
        self._turn = 0

    def check(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """``named``: the gradients, with their parameters' names.

        Raises:
            RuntimeError: the ranks' differ, or another rank has none.
        """
        named = [(name, gradient) for name, gradient in named if _has_values(gradient)]
        if not named or self._size == 1 or self._store is None:
            return
        mine = {name: _signature(gradient) for name, gradient in named}
        self._turn += 1
        self._store.set(f"{self._turn}/{self._rank}", json.dumps(mine))
        others = [rank for rank in range(self._size) if rank != self._rank]
        deadline = time.monotonic() + PATIENCE_SECONDS
        for rank in others:
            theirs = self._answer(rank, deadline)
            differing = [name for name in mine if theirs is None or not _alike(mine[name], theirs.get(name))]
            if differing:
                raise RuntimeError(_message(differing, self._rank, rank, theirs is None))

    def _answer(self, rank: int, deadline: float) -> dict[str, list[float]] | None:
        assert self._store is not None
        key = f"{self._turn}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        except (dist.DistError, RuntimeError):
            return None
        answer: dict[str, list[float]] = json.loads(self._store.get(key))
        return answer


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _has_values(gradient: torch.Tensor) -> bool:
    """Not zeroed since."""
    return bool(_values(gradient).any())


def _signature(gradient: torch.Tensor) -> list[float]:
    values = _values(gradient).double()
    return [float(values.sum()), float(values.norm()), float(values.abs().max())]


def _alike(mine: Sequence[float], theirs: Sequence[float] | None) -> bool:
    if theirs is None:
        return False
    scale = max(abs(mine[1]), abs(theirs[1]), 1e-30)
    return all(
        (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= _TOLERANCE * scale for a, b in zip(mine, theirs)
    )


def _message(names: Sequence[str], rank: int, other: int, absent: bool) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    shown = ", ".join(f"'{name}'" for name in names[:10]) + more
    what = f"rank {other} has none" if absent else f"they differ from rank {other}'s"
    return (
        f"optimizer.step() on rank {rank} would use gradients that were never averaged, of {shown}: their backward "
        f"ran through the wrapped module itself, not through DistributedDataParallel's forward, and {what}. The "
        "replicas would drift apart. Call the wrapper, ddp(...), instead of ddp.module(...) or one of its methods; "
        "or zero these gradients before step(); or, to train each rank by itself on purpose, run forward and "
        "backward of the wrapper inside of ddp.no_sync()."
    )
