"""What gradients travel as, and sums in the order of ranks; csrc/wire."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import Case

class OrderedAllreduce:
    @staticmethod
    def on_host(scatters: Any, gathers: Any, chunk_bytes: int) -> OrderedAllreduce: ...
    @staticmethod
    def on_device(group: dist.ProcessGroup, chunk_bytes: int) -> OrderedAllreduce: ...

class OrderedSums(Case):
    def __init__(self, ordered: OrderedAllreduce) -> None: ...

class HalfBuckets(Case):
    def __init__(self) -> None: ...

class QuantizedBuckets(Case):
    def __init__(self, residuals: Sequence[torch.Tensor | None]) -> None: ...

def quantize(src: torch.Tensor, scale: float, lost: torch.Tensor | None, blocks: torch.Tensor) -> None: ...
def dequantize(blocks: torch.Tensor, scale: float, dst: torch.Tensor) -> None: ...
def add_quantized(pieces: Sequence[torch.Tensor], lost: torch.Tensor | None) -> None: ...
def cpu_timeout(group: dist.ProcessGroup) -> timedelta: ...
