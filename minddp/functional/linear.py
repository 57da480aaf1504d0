"""Collectives as linear maps with adjoints: the only place that autograd sees.

Overview
    Put the tensors of all ranks in one long vector x = (x_0, .., x_{N-1}). A collective that only moves
    and adds is a matrix A with entries 0 and 1: y = A x. When every rank has a loss of its own and their
    sum is differentiated, the chain rule for one process holds as it stands: with g_r = dL/dy_r,

        dL/dx = A^T g

    and A^T is again a collective: of a broadcast it is a sum to the root, of an all_gather a
    reduce_scatter, of an all_to_all the one that sends everything back. So each class below names its
    adjoint, one ``autograd.Function`` serves them all, and the adjoint runs through that Function as well:
    second and higher derivatives come with the first. Products, minima and maxima are not linear;
    ``minddp.functional`` composes them of these maps and of local operations.

Replicated values
    Sometimes all ranks go on to compute the *same* loss, which is to be counted once. Then y is one
    value, held N times, and so is its gradient g. All_reduce maps N different values to one:
    y = x_0 + .. + x_{N-1}, dL/dx_r = g, the *identity*. Its adjoint takes one replicated value and
    hands it to N different places; the adjoint of that sums over the ranks: all_reduce again. The pairs
    (all_reduce, identity), (all_gather, take my part), (broadcast, keep at the root) are exact at every
    order for as long as a replicated value is used identically on all ranks. (They are the f and g of
    Shoeybi et al., "Megatron-LM", 2019, section 3.)

What always holds
    ``run`` returns a new tensor, or an untouched input; a map runs on all ranks of its group or on none.
    If one rank's output requires grad then so does everybody's, or backward's collective would be
    missing a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from . import agreement, transport


@dataclass(frozen=True)
class LinearMap:
    """A collective on dense tensors whose first dimension counts rows, and its transpose."""

    group: Any

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def adjoint(self) -> LinearMap:
        raise NotImplementedError

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


def apply(linear: LinearMap, x: Tensor, needs_grad: bool, tie: Tensor | None = None) -> Tensor:
    """``linear`` of ``x``; the result requires grad if ``needs_grad``, whether or not ``x`` does.

    ``tie`` is an empty tensor to hang the result's node on in a graph where ``x`` may be a constant.
    """
    if not needs_grad:
        return _run(linear, x)
    if tie is None and not x.requires_grad:
        tie = torch.empty(0, requires_grad=True)
    result: Tensor = _Apply.apply(x, tie, linear)[0]
    return result


class _Apply(torch.autograd.Function):
    """Runs a linear map; backward applies its adjoint.

    Ties keep the ranks' graphs alike where their programs are not. A rank whose input needs no gradient has a
    node all the same. And a rank whose loss is linear in y, so that its incoming gradient is a constant,
    still runs the node again in a second backward: its dL/dx is tied to the node by the node's own second
    output, an empty tensor. Without it the ranks whose losses are not linear would wait for ever.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor | None, linear: LinearMap) -> tuple[Tensor, Tensor]:
        own_tie = x.new_empty(0)
        ctx.linear = linear
        ctx.save_for_backward(own_tie)
        return _run(linear, x), own_tie

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # With create_graph grad mode is on, everywhere: some rank's second derivative comes through here.
        (own_tie,) = ctx.saved_tensors
        return apply(ctx.linear.adjoint(), grad, torch.is_grad_enabled(), own_tie), None, None


def why_not_differentiated(x: Tensor) -> str:
    """What is wrong with an ``x`` whose derivatives would be lost here without a word; else an empty text."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (
            "is inside a torch.func transform (grad, jvp, vmap, jacrev, ...), which cannot see what other ranks "
            "contribute; use backward() or torch.autograd.grad"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return (
            "carries a forward-mode tangent (torch.autograd.forward_ad), which collectives do not carry on; use "
            "backward() or torch.autograd.grad"
        )
    return ""


def _run(linear: LinearMap, x: Tensor) -> Tensor:
    if reason := why_not_differentiated(x):  # in backward: forward has looked at its arguments
        raise agreement.CollectiveError(f"minddp.functional: the gradient in {type(linear).__name__} {reason}")
    return linear.run(transport.dense(x))


def _row(x: Tensor) -> int:
    """Elements in a row."""
    return x.shape[1:].numel()


def _scaled(rows: Sequence[int], row: int) -> list[int]:
    return [count * row for count in rows]


@dataclass(frozen=True)
class SumToAll(LinearMap):
    """y_r = sum over s of x_s. A is all ones, and symmetric: its own adjoint."""

    def run(self, x: Tensor) -> Tensor:
        return transport.sum_to_all(x, self.group)

    def adjoint(self) -> LinearMap:
        return self


@dataclass(frozen=True)
class SumToReplica(SumToAll):
    """One replicated y = sum over s of x_s; dL/dx_s = dL/dy."""

    def adjoint(self) -> LinearMap:
        return ReplicaToAll(self.group)


@dataclass(frozen=True)
class ReplicaToAll(LinearMap):
    """y_r = x for one replicated x: nothing moves."""

    def run(self, x: Tensor) -> Tensor:
        agreement.require_replicated(x, self.group)
        return x

    def adjoint(self) -> LinearMap:
        return SumToReplica(self.group)


@dataclass(frozen=True)
class Gather(LinearMap):
    """y_r = (x_0, .., x_{N-1}) on every rank; rank s brings ``rows[s]`` rows."""

    rows: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        flat = transport.all_gather(x.reshape(-1), _scaled(self.rows, _row(x)), self.group)
        return flat.view(sum(self.rows), *x.shape[1:])

    def adjoint(self) -> LinearMap:
        return SumScatter(self.group, self.rows)


@dataclass(frozen=True)
class SumScatter(LinearMap):
    """y_r = sum over s of the r-th part of x_s, of ``rows[r]`` rows."""

    rows: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        flat = transport.sum_scatter(x.reshape(-1), _scaled(self.rows, _row(x)), self.group)
        return flat.view(self.rows[self.rank], *x.shape[1:])

    def adjoint(self) -> LinearMap:
        return Gather(self.group, self.rows)


@dataclass(frozen=True)
class GatherToReplica(Gather):
    """One replicated y = (x_0, .., x_{N-1}); dL/dx_r is the r-th part of dL/dy."""

    def adjoint(self) -> LinearMap:
        return PartOfReplica(self.group, self.rows)


@dataclass(frozen=True)
class PartOfReplica(LinearMap):
    """y_r = the r-th part of one replicated x: nothing moves."""

    rows: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        agreement.require_replicated(x, self.group)
        begin = transport.offsets(self.rows)[self.rank]
        return x[begin : begin + self.rows[self.rank]].clone()

    def adjoint(self) -> LinearMap:
        return GatherToReplica(self.group, self.rows)


@dataclass(frozen=True)
class Exchange(LinearMap):
    """All_to_all: ``send[r]`` rows go to rank r, ``receive[r]`` come from it. A permutation, so the
    adjoint is the inverse: everything goes back where it came from."""

    send: tuple[int, ...]
    receive: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        row = _row(x)
        flat = transport.all_to_all(x.reshape(-1), _scaled(self.send, row), _scaled(self.receive, row), self.group)
        return flat.view(sum(self.receive), *x.shape[1:])

    def adjoint(self) -> LinearMap:
        return Exchange(self.group, self.receive, self.send)


@dataclass(frozen=True)
class FromRoot(LinearMap):
    """Broadcast: y_r = x_root. A has one column of ones; transposed, one row: a sum to the root."""

    root: int

    def run(self, x: Tensor) -> Tensor:
        return transport.broadcast(x, self.root, self.group)

    def adjoint(self) -> LinearMap:
        return SumToRoot(self.group, self.root)


@dataclass(frozen=True)
class SumToRoot(LinearMap):
    """y_root = sum over s of x_s; zeros elsewhere."""

    root: int

    def run(self, x: Tensor) -> Tensor:
        return transport.sum_to_one(x, self.root, self.group)

    def adjoint(self) -> LinearMap:
        return FromRoot(self.group, self.root)


@dataclass(frozen=True)
class RootToReplica(FromRoot):
    """One replicated y = x_root; dL/dx_root = dL/dy, and zero elsewhere."""

    def adjoint(self) -> LinearMap:
        return ReplicaToRoot(self.group, self.root)


@dataclass(frozen=True)
class ReplicaToRoot(LinearMap):
    """y_root = one replicated x; zeros elsewhere: nothing moves."""

    root: int

    def run(self, x: Tensor) -> Tensor:
        agreement.require_replicated(x, self.group)
        return x if self.rank == self.root else torch.zeros_like(x)

    def adjoint(self) -> LinearMap:
        return RootToReplica(self.group, self.root)
