"""Modules that several tests wrap."""

from __future__ import annotations

import torch
from torch import nn


class OneOf(nn.ModuleDict):
    """The layer that is asked for by its name."""

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        found: torch.Tensor = self[which](x)
        return found
