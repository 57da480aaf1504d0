"""The reducer with its planning: which buckets, when they are cut anew, how sums become means.

The work during backward is done by the C++ class (csrc/reducer.h is the place to read about it). This one
decides, between iterations, what that class is to do.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from .bucket_assignment import Buckets, agree_on_order, assign_buckets, check_buckets, ready_order
from .finite_check import FiniteCheck
from .lifetime import outlive, outlive_callbacks

MIB = 1024 * 1024


@dataclass(frozen=True)
class ReducerSettings:
    """What a reducer is made from, besides the parameters; see :class:`DistributedDataParallel`.

    ``caps``, ``last_cap``: as in :func:`assign_buckets`. ``alone_from``: bytes from which a gradient has a bucket
    of its own, in whose place it is reduced without a copy.
    """

    graph_mode: Any
    caps: Sequence[int]
    last_cap: int | None = None
    alone_from: int | None = None
    reduction: str = "mean"
    reduce_dtype: torch.dtype | None = None
    predivide_factor: float | None = None
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused: bool = False
    has_average: bool = False


class Reducer(_C.Reducer):
    """Averages the gradients of ``parameters`` over ``group`` during backward.

    Args:
        parameters: leaf tensors that require gradients.
        names: their names, for messages.
        expect_sparse: which of them get sparse gradients.
        group: the process group.
        settings: caps, reduction and modes.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        group: dist.ProcessGroup,
        settings: ReducerSettings,
    ):
        self.settings = settings
        self.group = group
        self.names = list(names)
        self._device = parameters[0].device
        self._nbytes = [p.numel() * wire_dtype(p, settings).itemsize for p in parameters]
        self.kinds: list[Hashable] = [
            (p.dtype, p.device, name if sparse else "") for p, name, sparse in zip(parameters, names, expect_sparse)
        ]
        self.has_rebuilt = False
        self._has_hook = False
        self._divisor = group.size()
        self._weights: _Weights | None = None
        options = _C.ReducerOptions()
        options.graph_mode = settings.graph_mode
        options.reduce_dtype = settings.reduce_dtype
        options.gradient_as_bucket_view = settings.gradient_as_bucket_view
        options.skip_all_reduce_unused = settings.skip_all_reduce_unused
        everything = list(reversed(range(len(parameters))))
        super().__init__(
            list(parameters), self.names, list(expect_sparse), group, options, self._assign(everything, [])
        )
        outlive(self, group)
        if settings.reduction == "weighted":
            self._weights = _Weights(group, self._device)
            self.set_weight_callbacks(self._weights.send, self._weighted_post_scale)
        self._set_scales()

    # --- buckets ---

    def _assign(self, arrived: Sequence[int], absent: Sequence[int]) -> Buckets:
        # What never arrived would hold up what did, so the two do not share buckets.
        settings = self.settings
        alone = settings.alone_from or math.inf
        kinds: list[Hashable] = [
            (kind, i) if nbytes >= alone else kind for i, (kind, nbytes) in enumerate(zip(self.kinds, self._nbytes))
        ]
        return [
            bucket
            for order in (arrived, absent)
            for bucket in assign_buckets(self._nbytes, kinds, order, settings.caps, settings.last_cap)
        ]

    def observed_order(self) -> list[int]:
        """Parameter indices by arrival in the last synchronized backward, then the absent ones."""
        arrived, absent = ready_order(self.last_step()["ready_ns"])
        return arrived + absent

    def _rebuild_buckets(self) -> bool:
        """Once, after the first synchronized backward: buckets along rank 0's order. Collective."""
        if self.has_rebuilt or not self.has_recorded() or self.phase() != _C.Phase.IDLE:
            return False
        self.has_rebuilt = True
        order = ready_order(self.last_step()["ready_ns"])
        super().set_buckets(self._assign(*agree_on_order(order, self.group, self._device)))
        return True

    def set_buckets(self, buckets: Buckets) -> None:
        """Re-plans; the caller makes all ranks do the same between the same iterations.

        Raises:
            ValueError: a parameter is missing or repeated, or a bucket mixes dtypes or devices.
            RuntimeError: a backward is not finished.
        """
        check_buckets(buckets, self.names, self.kinds)
        super().set_buckets(buckets)
        self.has_rebuilt = True

    # --- scales ---

    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        super().set_comm_hook(state, hook)
        outlive_callbacks(self, self.group)
        self._has_hook = True
        self._set_scales()

    def look_before_reduction(self, check: FiniteCheck) -> None:
        """Buckets are reduced as ever, after ``check`` has seen them."""
        itself = weakref.ref(self)  # which holds the hook

        def reduce(state: object, bucket: Any) -> Any:
            reducer = itself()
            assert reducer is not None
            return reducer._run_allreduce_hook(bucket)

        super().set_comm_hook(None, check.before(reduce))

    def set_divisor(self, divisor: int) -> None:
        """How many ranks a mean divides by: those that still have data, under ``join``."""
        if divisor != self._divisor:
            self._divisor = divisor
            self._set_scales()

    def _set_scales(self) -> None:
        """A hook gets gradients as they are and averages by itself; its result is scaled from there."""
        settings, ranks = self.settings, self.group.size()
        factor = settings.predivide_factor
        average = settings.has_average and settings.reduction == "mean" and factor is None
        average = average and self._divisor == ranks and not self._has_hook
        if self._has_hook:
            before, after = 1.0, 1.0 if settings.reduction == "mean" else float(ranks)
        elif settings.reduction == "mean":
            before, after = (1.0 / factor, factor / self._divisor) if factor else (1.0 / self._divisor, 1.0)
            before = 1.0 if average else before
        else:
            before, after = (1.0 / factor, factor) if factor else (1.0, 1.0)
        self.set_scales(before, after, average)
        self._after = after

    def add_weight(self, weight: float) -> None:
        assert self._weights is not None
        self._weights.add(weight)

    def _weighted_post_scale(self) -> float:
        assert self._weights is not None
        return self._after / self._weights.total()

    # --- a rank that ran out of data ---

    def shadow_backward(self) -> None:
        """All of a synchronized backward's collectives, with zeros. Collective."""
        if self._weights is not None:
            self._weights.add(0.0)
            self._weights.send()
        futures = [self.run_hook(bucket) for bucket in self._get_zeros_like_grad_buckets()]
        self.shadow_used_map()
        for future in futures:
            future.wait()
        if self._weights is not None:
            self._weights.total()


def wire_dtype(parameter: torch.Tensor, settings: ReducerSettings) -> torch.dtype:
    """The dtype in which a parameter's gradient travels."""
    if settings.reduce_dtype is not None and parameter.is_floating_point():
        return settings.reduce_dtype
    return parameter.dtype


class _Weights:
    """The divisor of ``reduction="weighted"``: this rank's weight, then the sum over ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        self._device = device
        self._weight: float | None = None
        self._sum: torch.Tensor | None = None
        self._work: Any = None

    def add(self, weight: float) -> None:
        self._weight = (self._weight or 0.0) + weight

    def send(self) -> None:
        # A rank without a weight sends NaN, so that every rank learns of it.
        mine = math.nan if self._weight is None else self._weight
        self._sum = torch.tensor([mine], dtype=torch.float64, device=self._device)
        self._work = self._group.allreduce([self._sum], dist.AllreduceOptions())

    def total(self) -> float:
        if self._work is None:  # every bucket was skipped as unused
            self.send()
        self._work.wait()
        self._work = None
        assert self._sum is not None
        total, mine = self._sum.item(), self._weight
        self._weight = None
        rank = self._group.rank()
        if math.isnan(total):
            who = "this rank did not call it" if mine is None else "another rank did not call it"
            raise RuntimeError(
                f'reduction="weighted" needs ddp.add_weight(n) before each synchronized backward, and {who} '
                f"[rank {rank}]"
            )
        if total <= 0:
            raise RuntimeError(
                f'reduction="weighted": the ranks\' weights add up to {total}; the sum of all '
                f"ddp.add_weight(n) must be positive [rank {rank}]"
            )
        return float(total)
