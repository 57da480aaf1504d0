"""What it costs a processor to make gradients smaller, as ``wire=`` does, and float32 again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _C
from ..planner.backward_profile import WIRE_BYTES

__all__ = ["COPY", "Casts", "measure_casts"]

COPY = "copy"  # into a bucket and back, as gradients of more than one parameter travel without ``wire=``
_NUMEL = 1 << 20
_REPEATS = 5


class Casts(NamedTuple):
    """Seconds for each byte of float32.

    Attributes:
        pack: while backward runs.
        unpack: after it.
    """

    pack: float
    unpack: float


def measure_casts() -> dict[str, Casts]:
    """By ``wire``, and for a plain copy, what this process takes now; some milliseconds."""
    gradient, average = torch.linspace(-1, 1, _NUMEL), torch.zeros(_NUMEL)
    buffers = {COPY: torch.zeros(_NUMEL), "bf16": torch.zeros(_NUMEL, dtype=torch.bfloat16)}
    blocks = torch.zeros(int(4 * _NUMEL * WIRE_BYTES["int8"]), dtype=torch.uint8)
    lost = torch.zeros_like(blocks)
    found = {
        name: Casts(
            _seconds_per_byte(_C.scaled_copy, gradient, buffer, 0.5),
            _seconds_per_byte(_C.scaled_copy, buffer, average, 1.0),
        )
        for name, buffer in buffers.items()
    }
    found["int8"] = Casts(
        _seconds_per_byte(_C.quantize, gradient, 0.5, lost, blocks),
        _seconds_per_byte(_C.dequantize, blocks, 1.0, average),
    )
    return found


def _seconds_per_byte(cast: Callable[..., None], *arguments: Any) -> float:
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        cast(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / (4 * _NUMEL)
