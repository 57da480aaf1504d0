"""Are the gradients of a program that spans ranks right? Its derivatives, by finite differences.

``torch.autograd.gradcheck`` moves one input of one process. Here every element of every rank's input is
moved in turn, all ranks run their programs, and the *sum of all ranks' losses* is watched: what
``backward()`` on every rank computes if the collectives inside are differentiated rightly. Use it on
your own layers: ``check(my_loss, x)`` on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minddp.functional.arguments import member
from minddp.messages import gather_objects

__all__ = ["analytic_gradient", "check", "numerical_gradient"]

Loss = Callable[[Tensor], Tensor]


def analytic_gradient(loss: Loss, x: Tensor) -> Tensor:
    """What autograd gives this rank for its ``x`` when every rank differentiates its own ``loss(x)``."""
    leaf = x.detach().clone().requires_grad_()
    loss(leaf).backward()
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def numerical_gradient(loss: Loss, x: Tensor, group: Any = None, eps: float = 1e-6) -> Tensor:
    """Central differences of the sum over ranks of ``loss(x)``, for this rank's ``x``.

    Args:
        loss: this rank's program: ``x`` to a real scalar; may run collectives, the same on all ranks.
        x: this rank's input; float64 or complex128, or the differences are noise. Shapes may differ.
        group: the process group.
        eps: the step.

    Returns:
        A tensor like ``x``; for complex ``x``, dL/dRe + i dL/dIm, torch's convention.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = gather_objects(x.numel(), member(group))
    gradient = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for owner in range(size):
        for index in range(sizes[owner]):
            for unit in (1.0, 1j) if x.is_complex() else (1.0,):
                step = eps * unit if owner == rank else 0.0
                slope = (_total(loss, x, index, step, group) - _total(loss, x, index, -step, group)) / (2 * eps)
                if owner == rank:
                    gradient.view(-1)[index] += slope * unit
    return gradient


def _total(loss: Loss, x: Tensor, index: int, step: complex, group: Any) -> float:
    """The sum of all ranks' losses with one element of this rank's ``x`` moved by ``step``."""
    moved = x.detach().clone(memory_format=torch.contiguous_format)
    if step:
        moved.view(-1)[index] += step
    total = loss(moved.requires_grad_()).detach().double().reshape(1)
    dist.all_reduce(total, group=group)
    return float(total)


def check(
    loss: Loss,
    x: Tensor,
    group: Any = None,
    *,
    order: int = 2,
    eps: float = 1e-6,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Compares autograd with finite differences on every rank, for derivatives up to ``order``.

    The second derivative is checked along a direction that is different on each rank: as the gradient of
    ``(dL/dx * v).sum()``.

    Raises:
        AssertionError: on every rank where they differ.
    """
    generator = torch.Generator().manual_seed(1000 + dist.get_rank(group))

    def slope(base: Loss) -> Loss:
        direction = torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)

        def along(y: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(base(y), y, create_graph=True)
            return (gradient * direction.conj()).real.sum() if x.is_complex() else (gradient * direction).sum()

        return along

    for _ in range(order):
        torch.testing.assert_close(
            analytic_gradient(loss, x), numerical_gradient(loss, x, group, eps), rtol=rtol, atol=atol
        )
        loss = slope(loss)
