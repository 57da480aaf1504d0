"""The argument ``wire``: what gradients travel as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8}  # of the buffer


@dataclass(frozen=True)
class Wire:
    """How gradients travel: the argument ``wire`` of :class:`minddp.DistributedDataParallel`, in full.

    Args:
        dtype: ``"bf16"``, ``"fp16"``: a cast. ``"int8"``: blocks of 256 codes with one float32 scale, 260 bytes.
        exact: ``exact(name, parameter)`` is true for further parameters whose gradients travel as they are, beside
            those with fewer than two dimensions. Must answer the same on all ranks, and each time. A wrapper that is
            pickled needs one that can be: a function of a module.
        error_feedback: with ``"int8"``, each rank adds what rounding has lost to what it sends next. Takes as many
            bytes as travel.
        stochastic: with ``"int8"``, round up or down at random, so that the expected value is exact.
        seed: of that.

    Raises:
        ValueError, TypeError: an argument makes no sense; named.
    """

    dtype: str
    exact: Callable[[str, torch.Tensor], bool] | None = None
    error_feedback: bool = True
    stochastic: bool = False
    seed: int = 0

    @property
    def range_hint(self) -> str:
        """For messages about what is not finite."""
        return ' Or they are too large for wire="fp16", which ends at 65504.' if self.dtype == "fp16" else ""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"wire must be {', '.join(map(repr, DTYPES))} or None, got {self.dtype!r}")
        if self.exact is not None and not callable(self.exact):
            raise TypeError(f"Wire(exact=) must be a function of a name and a parameter, got {self.exact!r}")
        for name in ("error_feedback", "stochastic"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Wire({name}=) must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"Wire(seed=) must be an integer from 0 to 2**64 - 1, got {self.seed!r}")
        if self.stochastic and self.dtype != "int8":
            raise ValueError(f"Wire(stochastic=True) goes with int8; {self.dtype} is rounded to nearest")


def make_wire(value: Any) -> Wire | None:
    """The argument as a :class:`Wire`; raises TypeError or ValueError."""
    if value is None or isinstance(value, Wire):
        return value
    if not isinstance(value, str):
        raise TypeError(f"wire must be a str, a minddp.Wire or None, got {value!r}")
    return Wire(value)
