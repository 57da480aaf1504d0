"""Forward's outputs, joined in one node of autograd's graph: what one output alone leads to, every backward visits.

With unused parameters to find, ranks' losses may leave different outputs out. Without this node, a backward would not
come to the layers behind such an output: their hooks, and collectives of their own (SyncBatchNorm), would run on some
ranks only. With it these layers get undefined gradients, as with torch's class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .outputs import REFERENCES


class _Joined(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(clones: bool, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(output.clone() for output in outputs) if clones else outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        return tangents


class _Budget:
    """Asked of each object in an output whether it is entered no further, as a class is that pytree cannot look up.

    Containers that hold each other may have more paths than can be walked.
    """

    def __init__(self) -> None:
        self.left = 1_000_000

    def __call__(self, value: object) -> bool:
        self.left -= 1
        if self.left < 0:
            raise RecursionError
        return type(type(value)).__hash__ is not object.__hash__  # it is the program's code, or None


def join_outputs(output: Any, clones: bool) -> Any:
    """The same output, with other tensors in it where they have a graph, in the containers that torch's pytree knows.

    ``clones``: the tensors have memory of their own. The program may change them in place, and the module's stay.
    """
    if issubclass(type(output), REFERENCES):
        return type(output)(join_outputs(output.local_value(), clones)) if output.is_owner() else output
    try:
        leaves, containers = tree_flatten(output, is_leaf=_Budget())
    except RecursionError:  # torch's class raises, or walks for hours
        return output
    # isinstance() may call the program's code.
    places = [i for i, leaf in enumerate(leaves) if issubclass(type(leaf), torch.Tensor) and leaf.grad_fn is not None]
    if places:
        for i, joined in zip(places, _Joined.apply(clones, *(leaves[i] for i in places)), strict=True):
            leaves[i] = joined
    return tree_unflatten(leaves, containers)
