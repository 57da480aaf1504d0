"""What programs write themselves: classes of their own around DDP's, modules that tell odd things, odd outputs.

``subclass(base, kind)``: a wrapper's class. ``run``, ``pre``, ``post`` override one of forward's steps, ``forward``
all of it; ``patched`` replaces a step of each instance. Each changes the numbers: one that is not called shows.

``tell(net, kind)``: the module's ``named_parameters()`` yields each ``twice``, or ``hides`` what its first part has.

``wrapped(pair, kind)``: a forward's two outputs in something of the program's own; ``unwrapped`` gives them back.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MOVES", "OUTPUTS", "OWN", "move_gradient", "subclass", "tell", "unwrapped", "wrapped"]

OWN = ("run", "pre", "post", "forward", "patched")
OUTPUTS = ("namedtuple", "nested", "shared", "many", "slots")
MOVES = ("scale", "replace", "main_grad", "drop")
Named = collections.namedtuple("Named", "a b")


@dataclass
class Output:
    a: torch.Tensor
    b: torch.Tensor


class Slots:
    """Nothing in it can be seen from outside by walking containers."""

    __slots__ = ("a", "b")

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        self.a, self.b = a, b


def wrapped(pair: tuple[torch.Tensor, torch.Tensor], kind: str) -> Any:
    a, b = pair
    if kind == "nested":
        return [[a, ["text"]], {"b": (b, None)}]
    if kind == "shared":
        both = [a, b]
        return {"first": both, "again": [both, both]}
    if kind == "many":
        return [a, b, *({"score": a.detach()[0], "label": i} for i in range(50))]
    if kind in ("tuple", "dict"):
        return pair if kind == "tuple" else {"a": a, "b": b}
    return {"namedtuple": Named, "dataclass": Output, "slots": Slots}[kind](a, b)


def unwrapped(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(output, (Named, Output, Slots)):
        return output.a, output.b
    if isinstance(output, dict):
        return (output["a"], output["b"]) if "a" in output else output["first"]
    if isinstance(output[0], list):
        return output[0][0], output[1]["b"][0]
    return output[0], output[1]


def _more(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] * 1.5, *inputs[1:])


def subclass(base: Any, kind: str) -> Any:
    """``base`` with one of forward's steps overridden."""

    def run(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*_more(inputs), **kwargs)

    def pre(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = base._pre_forward(self, *inputs, **kwargs)
        return _more(inputs), kwargs

    def post(self: Any, output: Any) -> Any:
        output = base._post_forward(self, output)
        return output * 1.5 if isinstance(output, torch.Tensor) else output

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return base.forward(self, *_more(inputs), **kwargs)

    def init(self: Any, *arguments: Any, **kwargs: Any) -> None:
        base.__init__(self, *arguments, **kwargs)
        self._run_ddp_forward = types.MethodType(run, self)

    steps = {"run": ("_run_ddp_forward", run), "pre": ("_pre_forward", pre), "post": ("_post_forward", post)}
    steps |= {"forward": ("forward", forward), "patched": ("__init__", init)}
    return type("Own", (base,), dict([steps[kind]]))


def tell(net: nn.Module, kind: str) -> None:
    """Gives ``net`` a class of its own."""
    base: Any = type(net)

    class Odd(base):
        def named_parameters(self, *arguments: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            found = list(base.named_parameters(self, *arguments, **kwargs))
            return iter(2 * found if kind == "twice" else [one for one in found if not one[0].startswith("parts.0.")])

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
        parameter.main_grad = getattr(parameter, "main_grad", 0) + grad.detach().clone()
    if kind in ("main_grad", "drop"):
        parameter.grad = None
