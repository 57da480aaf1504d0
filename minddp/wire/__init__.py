"""The argument ``wire``: what gradients travel as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..functions import refuse_left

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8}  # of the buffer
_LEFT = {
    "exact": 'Gradients with fewer than two dimensions travel as they are; for others wire="bf16" rounds less.',
    "stochastic": "Codes are rounded to nearest, and error feedback sends what that has lost in the next step.",
    "seed": "Nothing is rounded at random.",
}


@dataclass(frozen=True)
class Wire:
    """How gradients travel: the argument ``wire`` of :class:`minddp.DistributedDataParallel`, in full.

    Args:
        dtype: ``"bf16"``, ``"fp16"``: a cast. ``"int8"``: blocks of 256 codes with one float32 scale, 260 bytes.
        error_feedback: with ``"int8"``, each rank adds what rounding has lost to what it sends next. Takes as many
            bytes as travel.

    Raises:
        ValueError, TypeError: an argument makes no sense; named.
    """

    dtype: str
    error_feedback: bool = True

    def __new__(cls, *_: Any, **given: Any) -> Wire:
        refuse_left("minddp.Wire", given.keys() - {"dtype", "error_feedback"}, _LEFT)
        return super().__new__(cls)

    @property
    def range_hint(self) -> str:
        """For messages about what is not finite."""
        return ' Or they are too large for wire="fp16", which ends at 65504.' if self.dtype == "fp16" else ""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"wire must be {', '.join(map(repr, DTYPES))} or None, got {self.dtype!r}")
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"Wire(error_feedback=) must be True or False, got {self.error_feedback!r}")


def make_wire(value: Any) -> Wire | None:
    """The argument as a :class:`Wire`; raises TypeError or ValueError."""
    if value is None or isinstance(value, Wire):
        return value
    if not isinstance(value, str):
        raise TypeError(f"wire must be a str, a minddp.Wire or None, got {value!r}")
    return Wire(value)
