"""Torch's class with a fault each: what the comparison must find."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ForgetsNoSync", "RaisesLate", "ScalesOne", "Stale", "WaitsForever"]


class ScalesOne(DistributedDataParallel):
    """The last parameter's gradient is one percent too large."""

    def __init__(self, module: Any, **arguments: Any):
        super().__init__(module, **arguments)
        last = [p for p in module.parameters() if p.requires_grad][-1]
        last.register_hook(lambda grad: grad * 1.01)


class ForgetsNoSync(DistributedDataParallel):
    """no_sync is ignored."""

    def no_sync(self) -> Any:
        return torch.enable_grad()


class RaisesLate(DistributedDataParallel):
    """The fourth forward raises on rank 1, so that rank 0 waits for it."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.calls = self.__dict__.get("calls", 0) + 1
        if self.calls == 4 and torch.distributed.get_rank() == 1:
            raise RuntimeError("planted")
        return super().forward(*inputs, **keywords)


class Stale(DistributedDataParallel):
    """Leaves a collective behind on rank 0."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if torch.distributed.get_rank() == 0 and "left" not in self.__dict__:
            self.__dict__["left"] = torch.distributed.all_reduce(torch.ones(3, dtype=torch.float64), async_op=True)
        return super().forward(*inputs, **keywords)


class WaitsForever(DistributedDataParallel):
    """Rank 0's second forward never returns."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.calls = self.__dict__.get("calls", 0) + 1
        while self.calls == 2 and torch.distributed.get_rank() == 0:
            pass
        return super().forward(*inputs, **keywords)
