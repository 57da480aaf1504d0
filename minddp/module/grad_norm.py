"""Norms of gradients: clipping, and the gradient noise scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .. import _C
from ..ranks.messages import gather_objects


class NoiseScale(NamedTuple):
    """What :meth:`DistributedDataParallel.gradient_noise_scale` gives, in examples.

    Attributes:
        examples: the noise scale: far smaller batches waste no example, far larger ones waste most of theirs.
        variance: the estimated sum of the variances of one example's gradient.
        square: the estimated squared norm of the true gradient.
    """

    examples: float
    variance: float
    square: float


@dataclass
class _Averages:
    """Of the two estimates, over calls: each is noisy, and their quotient is biased."""

    variance: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def add(self, variance: float, square: float, decay: float) -> None:
        self.variance = decay * self.variance + (1 - decay) * variance
        self.square = decay * self.square + (1 - decay) * square
        self.weight = decay * self.weight + (1 - decay)


class GradNorm:
    """The part of :class:`DistributedDataParallel` that knows the gradients' norms."""

    _minddp_engine: Any
    _minddp_config: Any

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scales all gradients of the module so that their total norm is at most ``max_norm``.

        Does what ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), ...)`` does. On the CPU one call of C++ reads all
        gradients for the 2-norm, and gradients that need no scaling are not written. Torch's functions compute the
        rest: other norms, other devices, sparse and complex gradients, and norms that are not finite. Call it on all
        ranks alike; it is no collective.

        Args:
            max_norm: at most this, in the gradients' unit.
            norm_type: of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: raise where the total norm is NaN or infinite.
            foreach: as torch's, and left to torch if it is given.

        Returns:
            The total norm before, a tensor without dimensions, as torch's function.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is true.
        """
        total = self._minddp_total_norm(norm_type, error_if_nonfinite, foreach)
        on_host = total.device.type == "cpu" and isinstance(max_norm, (int, float))
        if not on_host or not max_norm / (total.item() + 1e-6) >= 1.0:
            clip_grads_with_norm_(self.parameters(), max_norm, total, foreach)  # type: ignore[attr-defined]
        return total

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The total norm of the module's gradients, a tensor without dimensions: 0 where there are none.

        What :meth:`clip_grad_norm_` would return; changes nothing.
        """
        return self._minddp_total_norm(norm_type, False, None)

    def gradient_noise_scale(self, batch_size: int, decay: float = 0.95) -> NoiseScale | None:
        """How many examples a batch can hold before more of them stop to pay: the simple noise scale of McCandlish et
        al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.

        Estimated from the norms of each rank's own gradient and of their mean. Call it after each synchronized
        backward, on all ranks: a collective of a few bytes. It averages over the calls, so a loss scale must stay as
        it is.

        Args:
            batch_size: examples of each rank that the gradient is a mean of; the same on all ranks.
            decay: of the moving averages; 0 for this step alone.

        Returns:
            The scale; None after the first call, which begins to measure, and where a gradient cannot be measured.

        Raises:
            ValueError: fewer than 2 ranks, ``reduction="weighted"``, delayed parameters, or arguments out of range.
        """
        engine = self._minddp_engine
        if engine is None or engine.group.size() < 2 or self._minddp_config.reduction == "weighted":
            raise ValueError(
                "gradient_noise_scale() compares the gradients of ranks with their mean. It needs at least 2 ranks, "
                'and neither reduction="weighted" nor every parameter delayed.'
            )
        norms, ranks = engine.reducer.noise_norms(), engine.group.size()
        engine.reducer.ask_noise()
        answers = gather_objects([batch_size, decay, norms], engine.group)
        _check([answer[:2] for answer in answers])
        if not all(found for *_, found in answers):
            return None
        small, large = batch_size, ranks * batch_size
        own = math.fsum(before for *_, (before, _) in answers) / ranks
        mean = answers[0][2][1] / (ranks**2 if self._minddp_config.reduction == "sum" else 1)
        square = (large * mean - small * own) / (large - small)
        variance = (own - mean) / (1 / small - 1 / large)
        averages = self.__dict__.setdefault("_minddp_noise", _Averages())
        averages.add(variance, square, decay)
        variance, square = averages.variance / averages.weight, averages.square / averages.weight
        return NoiseScale(variance / square if square > 0 else math.inf, variance, square)

    def _minddp_total_norm(
        self, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        grads = [p.grad for p in self.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        square = _C.norm_squared(grads) if norm_type == 2 and foreach is None else None
        if square:
            dtype = functools.reduce(torch.promote_types, {grad.dtype for grad in grads})
            norm = torch.tensor(math.sqrt(square), dtype=dtype)
            if math.isfinite(norm.item()):
                return norm
        return get_total_norm(grads, norm_type, error_if_nonfinite, foreach)


def _check(given: Sequence[Sequence[float]]) -> None:
    """Of all ranks, so that all of them raise."""
    batch_size, decay = given[0]
    if any(answer != given[0] for answer in given):
        raise ValueError(f"gradient_noise_scale: (batch_size, decay) must be the same on all ranks, got {given}")
    if batch_size < 1 or not 0 <= decay < 1:
        raise ValueError(
            f"gradient_noise_scale: batch_size must be at least 1, and 0 <= decay < 1; got {batch_size}, {decay}"
        )
