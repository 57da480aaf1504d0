"""What it costs a processor to make gradients smaller, as ``wire=`` does, to sum them, and to undo it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _C
from ..planner.backward_profile import WIRE_BYTES

__all__ = ["COPY", "Casts", "measure_casts", "quantized_sum", "seconds_of"]

COPY = "copy"  # into a bucket and back, as gradients of more than one parameter travel without ``wire=``
_NUMEL = 1 << 20
_REPEATS = 5
_PIECES = 16  # more than a cache next to a core holds: a model's gradients are not there either


class Casts(NamedTuple):
    """Seconds for each byte of float32.

    Attributes:
        pack: while backward runs.
        unpack: after it.
        add: in the background, of what all ranks have sent.
    """

    pack: float
    unpack: float
    add: float = 0.0


def measure_casts() -> dict[str, Casts]:
    """By ``wire``, and for a plain copy, what this process takes now; some tens of milliseconds."""
    gradients = [torch.linspace(-1, 1, _NUMEL) for _ in range(_PIECES)]
    averages = [torch.zeros(_NUMEL) for _ in range(_PIECES)]
    found = {}
    for name, dtype in ((COPY, torch.float32), ("bf16", torch.bfloat16)):
        buffers = [torch.zeros(_NUMEL, dtype=dtype) for _ in range(_PIECES)]
        mine, theirs = buffers[0].chunk(2)
        found[name] = Casts(
            _per_byte(lambda gradient, buffer: _C.scaled_copy(gradient, buffer, 0.5), gradients, buffers),
            _per_byte(lambda buffer, average: _C.scaled_copy(buffer, average, 1.0), buffers, averages),
            # The process group's own sums are its allreduces'.
            seconds_of(mine.add_, theirs) / (4 * _NUMEL) if name != COPY else 0.0,
        )
    blocks, left = ([_blocks() for _ in range(_PIECES)] for _ in range(2))
    found["int8"] = Casts(
        _per_byte(lambda gradient, rest, codes: _C.quantize(gradient, 0.5, rest, codes), gradients, left, blocks),
        _per_byte(lambda codes, average: _C.dequantize(codes, 1.0, average), blocks, averages),
        seconds_of(quantized_sum()) / (4 * _NUMEL),
    )
    return found


def quantized_sum() -> Callable[[], None]:
    """Sums the halves of ``_NUMEL`` codes, as a rank of two does; without the GIL."""
    pieces = _blocks().chunk(2)
    return lambda: _C.add_quantized(pieces, None)


def _blocks() -> torch.Tensor:
    return torch.zeros(int(4 * _NUMEL * WIRE_BYTES["int8"]), dtype=torch.uint8)


def seconds_of(work: Callable[..., object], *arguments: Any) -> float:
    """The median of a few runs."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _per_byte(work: Callable[..., object], *pieces: Sequence[torch.Tensor]) -> float:
    """Of the first ones' bytes in float32; the median of the pieces."""
    times = []
    for arguments in zip(*pieces, strict=True):
        begin = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / (4 * _NUMEL)
