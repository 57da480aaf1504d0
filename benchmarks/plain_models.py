"""Models of the size that trains on a GPU, in plain torch: a lent machine has no other library.

Each builder returns (module, prepare) as ``models.py`` wants them. Random weights, random inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["gpt2", "layers_7b", "resnet50"]


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width

        def conv(a: int, b: int, size: int, step: int = 1) -> list[nn.Module]:
            return [nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b)]

        self.body = nn.Sequential(
            *conv(inputs, width, 1), nn.ReLU(True), *conv(width, width, 3, stride), nn.ReLU(True),
            *conv(width, outputs, 1),
        )  # fmt: skip
        self.down = nn.Sequential(*conv(inputs, outputs, 1, stride)) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + (x if self.down is None else self.down(x)))


def resnet50(image: int, batch: int) -> tuple[nn.Module, Any]:
    """He et al. (2016), channels last, forward under autocast to bfloat16."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, 64 << stage, 2 if stage and not block else 1))
            inputs = 256 << stage
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))

    def prepare(device: torch.device) -> Callable[[nn.Module], Tensor]:
        x = torch.randn(batch, 3, image, image, device=device).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=device)

        def call(wrapped: nn.Module) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return F.cross_entropy(wrapped(x), labels)

        return call

    return module.to(memory_format=torch.channels_last), prepare


class _Block(nn.Module):
    """A transformer's layer: attention, then a feed-forward net; gated, and without biases, as in a 7B model."""

    def __init__(self, width: int, hidden: int, heads: int, gated: bool):
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.heads, self.gated = heads, gated
        self.before, self.between = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=not gated)
        self.out = nn.Linear(width, width, bias=not gated)
        self.up = nn.Linear(width, hidden, bias=not gated)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.down = nn.Linear(hidden, width, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.between(x)
        up = self.up(h)
        return x + self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(h)) * up)


class _Gpt2(nn.Module):
    def __init__(self, words: int, tokens: int, width: int, depth: int, heads: int):
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[_Block(width, 4 * width, heads, gated=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word(ids) + self.place.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.word.weight)


def gpt2(tokens: int, batch: int) -> tuple[nn.Module, Any]:
    """Radford et al. (2019), the small one of 124 million parameters, under autocast to bfloat16."""
    words = 50257
    module = _Gpt2(words, 1024, 768, 12, 12)

    def prepare(device: torch.device) -> Callable[[nn.Module], Tensor]:
        ids = torch.randint(words, (batch, tokens), device=device)

        def call(wrapped: nn.Module) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return F.cross_entropy(wrapped(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        return call

    return module, prepare


def layers_7b(layers: int, tokens: int, batch: int) -> tuple[nn.Module, Any]:
    """Layers of 202 million parameters each, as in Llama 2 7B (Touvron et al., 2023), in bfloat16."""
    blocks = [_Block(4096, 11008, 32, gated=True) for _ in range(layers)]
    module = nn.Sequential(*blocks).to(torch.bfloat16)

    def prepare(device: torch.device) -> Callable[[nn.Module], Tensor]:
        x = torch.randn(batch, tokens, 4096, device=device, dtype=torch.bfloat16)
        return lambda wrapped: wrapped(x).float().square().mean()

    return module, prepare
