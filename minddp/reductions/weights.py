"""The divisor of ``reduction="weighted"``: what a program gives, this rank's weight, then the sum over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .. import messages
from ..functions import wrapper_of

_LEAST = 2.0**-126  # it and its inverse are normal numbers of float32, with which gradients are multiplied


class Weights:
    """What :meth:`add` was given since the last synchronized backward, on all ranks.

    Args:
        group: the reducer's process group.
        device: where its collectives work.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        self._device = device
        self._weight: float | None = None
        self._sent: float | None = None
        self._sum: torch.Tensor | None = None
        self._work: Any = None
        self.scale = 1.0  # besides the division

    def add(self, weight: float) -> None:
        self._weight = (self._weight or 0.0) + weight

    def forget(self) -> None:
        """The iteration was given up."""
        self._weight, self._sent, self._work = None, None, None

    def send(self) -> None:
        """Begins the sum over ranks. Collective."""
        # What is added from here on is the next backward's. A rank without a weight sends NaN, so that every rank
        # learns of it.
        self._sent, self._weight = self._weight, None
        mine = math.nan if self._sent is None else self._sent
        self._sum = torch.full((1,), mine, dtype=torch.float64, device=self._device)
        self._work = self._group.allreduce([self._sum], dist.AllreduceOptions())

    def post_scale(self) -> float:
        """What reduced buckets are multiplied by. Waits for the sum.

        Raises:
            RuntimeError: on every rank, where a rank gave no weight, or the weights' sum is not positive, or it or
                its inverse is too large. The weights are forgotten.
        """
        messages.wait_for(self._work, self._group, "the sum of all ranks' weights")
        assert self._sum is not None
        total, mine = self._sum.item(), self._sent
        rank = self._group.rank()
        if math.isnan(total):
            who = "this rank did not call it" if mine is None else "another rank did not call it"
            raise RuntimeError(
                f'reduction="weighted" needs minddp.add_weight(ddp, n) before each synchronized backward, and {who}. '
                f"Nothing was averaged: zero the gradients, and go on. [rank {rank}]"
            )
        if not _LEAST <= total <= 1 / _LEAST:
            raise RuntimeError(
                f'reduction="weighted": the ranks\' weights add up to {total}; the sum of all that '
                "minddp.add_weight(ddp, n) was given must be positive, and neither it nor its inverse too large for "
                f"float32. Nothing was averaged: zero the gradients, and go on. [rank {rank}]"
            )
        return self.scale / total


def add_weight(ddp: torch.nn.Module, weight: float) -> None:
    """Adds this micro-batch's weight (samples, tokens) to the divisor of ``reduction="weighted"``.

    Call it before the micro-batch's backward, under ``no_sync`` too; weights add up until the next
    synchronized backward, which divides by their sum over all ranks.

    Raises:
        RuntimeError: ``reduction`` is not ``"weighted"``.
        TypeError: ``weight`` is no number.
        ValueError: ``weight`` is negative or not finite.
    """
    weights = _weights_of(ddp, "add_weight")
    try:
        weight = float(weight)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        given = repr(weight)[:100]
        raise TypeError(f"minddp.add_weight: weight must be a number, got {given}") from None
    if not 0 <= weight < math.inf:
        raise ValueError(f"minddp.add_weight: weight must be finite and not negative, got {weight}")
    weights.add(weight)


def _weights_of(ddp: torch.nn.Module, function: str) -> Weights:
    reductions = wrapper_of(ddp, function)._minddp_observers.get("reductions")
    if reductions is None or reductions.weights is None:
        reduction = "mean" if reductions is None else reductions.settings.reduction
        raise RuntimeError(f'minddp.{function} needs reduction="weighted", and this wrapper has {reduction!r}')
    weights: Weights = reductions.weights
    return weights
