"""What programs write themselves: classes of their own around DDP's, modules that tell odd things, odd outputs.

``subclass(base, kind)``: a wrapper's class. ``run``, ``pre``, ``post`` override one of forward's steps, ``forward``
all of it; ``patched`` replaces a step of the instance. Each changes the numbers: one that is not called shows.

``tell(net, kind)``: the module's ``named_parameters()`` yields each ``twice``, or ``hides`` what its first part has.

``wrapped(pair, kind)``: a forward's two outputs in something of the program's own; ``unwrapped`` gives them back.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["MOVES", "OUTPUTS", "OWN", "move_gradient", "subclass", "tell", "unwrapped", "wrapped"]

OWN = ("run", "pre", "post", "forward", "patched")
OUTPUTS = ("namedtuple", "nested", "shared", "many", "slots")
MOVES = ("scale", "replace", "main_grad", "drop")
Pair = collections.namedtuple("Pair", "a b")


class Slots:
    """Nothing in it can be seen from outside by walking containers."""

    __slots__ = ("a", "b")

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        self.a, self.b = a, b


def wrapped(pair: tuple[torch.Tensor, torch.Tensor], kind: str) -> Any:
    a, b = pair
    if kind == "namedtuple":
        return Pair(a, b)
    if kind == "nested":
        return [[a, ["text"]], {"b": (b, None)}]
    if kind == "shared":
        both = [a, b]
        return {"first": both, "again": [both, both]}
    if kind == "many":
        return [a, b, *({"score": a.detach()[0], "label": i} for i in range(50))]
    return Slots(a, b)


def unwrapped(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(output, dict):
        return tuple(output["first"])  # type: ignore[return-value]
    if isinstance(output, (Pair, Slots)):
        return output.a, output.b
    if isinstance(output[0], list):
        return output[0][0], output[1]["b"][0]
    return output[0], output[1]


def _more(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] * 1.5, *inputs[1:])


@functools.cache
def subclass(base: type, kind: str) -> type:
    """With one of forward's steps overridden."""

    class Own(base):  # type: ignore[misc,valid-type]
        pass

    if kind == "run":

        def run(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*_more(inputs), **kwargs)

        Own._run_ddp_forward = run  # type: ignore[attr-defined]
    if kind == "pre":

        def pre(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = base._pre_forward(self, *inputs, **kwargs)  # type: ignore[attr-defined]
            return _more(inputs), kwargs

        Own._pre_forward = pre  # type: ignore[attr-defined]
    if kind == "post":

        def post(self: Any, output: Any) -> Any:
            output = base._post_forward(self, output)  # type: ignore[attr-defined]
            return output * 1.5 if isinstance(output, torch.Tensor) else output

        Own._post_forward = post  # type: ignore[attr-defined]
    if kind == "forward":

        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            return base.forward(self, *_more(inputs), **kwargs)  # type: ignore[attr-defined]

        Own.forward = forward  # type: ignore[attr-defined]
    return Own


def patch(ddp: Any) -> None:
    """A step of this instance alone."""

    def run(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*_more(inputs), **kwargs)

    ddp._run_ddp_forward = types.MethodType(run, ddp)


def tell(net: nn.Module, kind: str) -> None:
    """Gives ``net`` a class of its own."""
    base = type(net)

    class Odd(base):  # type: ignore[misc,valid-type]
        def named_parameters(
            self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, nn.Parameter]]:
            found = list(nn.Module.named_parameters(self, prefix, recurse, remove_duplicate))
            if kind == "twice":
                yield from found
            yield from (one for one in found if kind == "twice" or not one[0].startswith("parts.0."))

    net.__class__ = Odd


def move_gradient(kind: str, parameter: torch.Tensor) -> None:
    """What a post-accumulate hook does to its parameter's gradient."""
    grad = parameter.grad
    if grad is None:
        return
    if kind == "scale":
        grad.mul_(0.5)
    if kind == "replace":
        parameter.grad = grad * 2
    if kind == "main_grad":
        parameter.main_grad = getattr(parameter, "main_grad", 0) + grad.detach().clone()  # type: ignore[attr-defined]
    if kind in ("main_grad", "drop"):
        parameter.grad = None
