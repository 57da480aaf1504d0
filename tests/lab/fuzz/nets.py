"""The models of drawn programs: a row of small blocks, of width 4, and one or two heads.

``forward(x, rank)`` takes ``[batch, 4]`` float32. Blocks (``kind``, and what else they take):

``linear``, ``bare`` (no bias), ``frozen``, ``idle`` (never used), ``twice`` (applied two times)
    a linear layer; ``branch`` with ``ranks`` is used by these ranks only.
``same`` with ``net``, ``block``
    the block of an earlier net, the same object.
``scale`` (a scalar), ``double``, ``complex``, ``half`` (bfloat16)
    a parameter of that dtype.
``embedding`` with ``sparse``, ``bn``, ``dropout``
    as their names say.
``checkpoint`` with ``reentrant``
    a linear layer under activation checkpointing.
``collective``
    an all_reduce in forward and one in backward, as SyncBatchNorm has.
``scripted``
    a linear layer by ``torch.jit.script``.

``out`` says what two heads come in, ``tells`` what ``named_parameters()`` leaves out or repeats: see ``own.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import own

__all__ = ["Net", "Planned", "head_of"]

WIDTH = 4


class Planned(Exception):
    """Raised where the program says, and caught by it."""


class AllReduce(torch.autograd.Function):
    """Sum over ranks in forward, and of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.detach().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Box(nn.Module):
    """One parameter."""

    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.p = nn.Parameter(value)


def _part(spec: dict[str, Any]) -> nn.Module:
    kind = spec["kind"]
    if kind == "embedding":
        return nn.Embedding(5, WIDTH, sparse=spec.get("sparse", False))
    if kind == "bn":
        return nn.BatchNorm1d(WIDTH)
    if kind == "dropout":
        return nn.Dropout(0.3)
    if kind == "scale":
        return Box(torch.rand(()) + 0.5)
    if kind in ("double", "complex", "half"):
        usual = torch.get_default_dtype()
        dtype = {"double": torch.float64, "complex": usual.to_complex(), "half": torch.bfloat16}[kind]
        return Box(torch.randn(WIDTH, dtype=usual if kind == "half" else dtype).to(dtype))
    if kind == "collective":
        return nn.Identity()
    layer = nn.Linear(WIDTH, WIDTH, bias=kind != "bare")
    if kind == "scripted":
        return torch.jit.script(layer)
    if kind == "frozen":
        layer.requires_grad_(False)
    return layer


class Net(nn.Module):
    """See the module's text. ``earlier`` are the nets that ``same`` blocks refer to."""

    def __init__(self, spec: dict[str, Any], earlier: list[Net]):
        super().__init__()
        self.out = spec.get("out", "tensor")
        self.specs: list[dict[str, Any]] = []
        self.parts = nn.ModuleList()
        self.group: Any = None
        for block in spec["blocks"]:
            part = None
            if block["kind"] == "same":
                other = earlier[block["net"]]
                index = block["block"] % len(other.specs)
                block, part = other.specs[index], other.parts[index]
            self.specs.append(block)
            self.parts.append(_part(block) if part is None else part)
        if self.out != "tensor":
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH)
        if "tells" in spec:
            own.tell(self, spec["tells"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}

    def forward(self, x: torch.Tensor, rank: int = 0, fail: bool = False) -> Any:
        h = x
        for spec, part in zip(self.specs, self.parts):
            h = self._block(spec, part, h, x, rank)
        if fail:
            raise Planned("in forward")
        if self.out == "tensor":
            return h
        return own.wrapped((self.a(h), self.b(h)), self.out)

    def _block(self, spec: dict[str, Any], part: Any, h: torch.Tensor, x: torch.Tensor, rank: int) -> torch.Tensor:
        kind = spec["kind"]
        if kind == "idle" or (kind == "branch" and rank not in spec["ranks"]):
            return h
        if kind == "twice":
            h = torch.tanh(part(h))
        if kind == "embedding":
            # Scaled, since torch's class divides a sparse gradient in place, and without the product its values are
            # the very tensor that goes on into the gradient of h: then torch's gradients of earlier layers are wrong.
            return h + 0.5 * part((x.detach()[:, 0].abs() * 2).long().clamp(0, 4))
        if kind in ("bn", "dropout"):
            return part(h)
        if kind in ("scale", "double", "complex", "half"):
            product = (h.bfloat16() if kind == "half" else h) * part.p
            # Contiguous: torch's class may clone outputs, and a sum over other strides rounds otherwise.
            return (product.real if product.is_complex() else product).to(torch.get_default_dtype()).contiguous()
        if kind == "checkpoint":
            return torch.tanh(checkpoint(part, h, use_reentrant=spec.get("reentrant", False)))
        if kind == "collective":
            return torch.tanh(h + 0.1 * AllReduce.apply(h, self.group))
        return torch.tanh(part(h))


def head_of(output: Any, head: str) -> torch.Tensor:
    """The tensor that ``head`` (``a``, ``b`` or ``both``) of a net's output means."""
    if isinstance(output, torch.Tensor):
        return output
    a, b = own.unwrapped(output)
    return {"a": a, "b": b}[head] if head != "both" else a + b
