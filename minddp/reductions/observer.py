"""What gradients are multiplied with, on each side of the collective, and the dtype in which they are added up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .. import events
from .._C.reductions import EarlierSums
from ..reducer import Plan, Stage, weakly
from .weights import Weights

REDUCTIONS = ("mean", "sum", "weighted")
_REDUCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Settings(NamedTuple):
    reduction: str
    reduce_dtype: torch.dtype | None


class Reductions(events.Observer):
    """Sums, weighted means and factors of one wrapper.

    Attributes:
        weights: with ``reduction="weighted"``, what the program has given so far.
    """

    name = "reductions"
    options = {"reduction": "mean", "reduce_dtype": None}
    left = {
        "predivide_factor": "reduce_dtype=torch.float32 adds up in float32; or divide yourself what "
        'reduction="sum" gives.'
    }
    arguments = """
        reduction: ``"mean"`` over ranks, ``"sum"``, or ``"weighted"``: the sum of gradients over the sum
            of what every rank passed to :func:`minddp.add_weight`, exactly the large batch's gradient for
            losses summed over samples, however uneven the shares.
        reduce_dtype: dtype in which low-precision gradients travel and are added (``torch.float32``).
    """
    settings: Settings

    def __init__(self, ddp: Any, settings: Settings):
        super().__init__(ddp, settings)
        self.weights: Weights | None = None
        self._is_out_of_data = False

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        reduction, dtype = values["reduction"], values["reduce_dtype"]
        if reduction not in REDUCTIONS:
            raise ValueError(f'reduction must be "mean", "sum" or "weighted", got {reduction!r}')
        if dtype is not None and dtype not in _REDUCE_DTYPES:
            names = ", ".join(map(str, _REDUCE_DTYPES))
            raise TypeError(f"reduce_dtype must be a dtype that ranks can add up ({names}), or None, got {dtype!r}")
        return Settings(reduction, dtype)

    def compared(self, parameters: Any) -> Mapping[str, Any]:
        return {"reduction": self.settings.reduction, "reduce_dtype": self.settings.reduce_dtype}

    def planning(self, plan: Plan) -> None:
        reduction, dtype = self.settings
        if dtype is not None:
            if plan.config.gradient_as_bucket_view and any(p.dtype != dtype for p in plan.parameters):
                raise ValueError(
                    "reduce_dtype and gradient_as_bucket_view=True contradict each other: a gradient cannot be a "
                    "window on a bucket of another dtype. Leave one of them out."
                )
            plan.reduce_dtype = plan.reduce_dtype or dtype
        # The sum over one rank may hold what it likes; a weight divides each time.
        summed = reduction == "sum" and plan.group.size() > 1
        if reduction == "weighted" or summed:
            plan.add(EarlierSums(), Stage.GRADIENTS)

    def reducer_made(self, reducer: Any, before: Any) -> None:
        if self.settings.reduction == "weighted":
            self.weights = Weights(self.averager.group, self.averager.parameters.device)
            reducer.set_callbacks(post_scale=weakly(self.weights.post_scale))
        self.averager.set_scale_rule(weakly(self._scales))

    def _scales(self, divisor: int, ranks: int, hooked: bool) -> tuple[float, float]:
        """What gradients are multiplied with while packing and while unpacking.

        =========  =============  =====================  =============================
        reduction  while packing  while unpacking        the same with a hook
        =========  =============  =====================  =============================
        mean       1 / divisor    1                      1 and 1: it averages by itself
        sum        1              1                      1 and ranks
        weighted   1              1 / sum of weights     1 and ranks / sum of weights
        =========  =============  =====================  =============================
        """
        is_mean = self.settings.reduction == "mean"
        scales = (1.0 / divisor if is_mean and not hooked else 1.0, float(ranks) if hooked and not is_mean else 1.0)
        if self.weights is not None:
            self.weights.scale = scales[1]
        return scales

    def hooking(self, steps: bool) -> None:
        if self.settings.reduce_dtype is not None:
            raise RuntimeError("a communication hook decides the dtype itself: leave out reduce_dtype")

    def after_last_launch(self) -> None:
        if self.weights is not None:
            if self._is_out_of_data:
                self.weights.add(0.0)
            self.weights.send()

    def joined(self, now: bool) -> None:
        self._is_out_of_data = now

    def shadowed(self, synchronized: bool, by_all: bool) -> None:
        if self.weights is not None and synchronized:
            self.weights.post_scale()

    def aborting(self) -> None:
        if self.weights is not None:
            self.weights.forget()


OBSERVER = Reductions
