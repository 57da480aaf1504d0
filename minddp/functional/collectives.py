"""The eight collectives. What is common to their gradients stands in the room's text, the derivation in linear.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import environment
from . import agreement, arguments, control, linear, transport
from .agreement import APART, EXPECTED, TOLD, Call
from .calls import eager, settle


@eager
def all_reduce(x: Tensor, op: Any = "sum", group: Any = None, loss: str = "per_rank") -> Tensor:
    r"""Reduces ``x`` over the ranks; every rank gets the result.

    With ``g_s`` the gradient that comes back to rank s, and ``G``, the sum of all ``g_s``, for
    ``loss="per_rank"`` or ``G = g`` (the same on all ranks) for ``loss="replicated"``:

    * sum: y = sum_s x_s, so dL/dx_r = G. avg: y = sum_s x_s / N, so dL/dx_r = G / N.
    * product: dL/dx_r = G * conj(product of the others). It is computed as that product, never as
      y / x_r: right with one zero (only the rank that holds it gets a gradient), with several (nobody
      does), and where y overflows.
    * min, max: y_i is held by k_i >= 1 ranks. Each of them gets G_i / k_i, as ``torch.amin`` shares
      ties: the middle of the subgradients, and the same whatever the ranks' order. NaN wins, as in torch.

    Product, min and max reduce one share of the elements on each rank (all_to_all, then local), and gather
    the shares: the traffic of a ring all_reduce, memory of a few times ``x``, and local derivatives.

    Args:
        x: any shape, the same on all ranks.
        op: ``"sum"``, ``"avg"``, ``"product"``, ``"min"``, ``"max"``, or a ``torch.distributed.ReduceOp``.
        group: the process group; the default one by default.
        loss: ``"per_rank"`` or ``"replicated"``, see the module's text.

    Returns:
        A tensor like ``x``, equal on all ranks.

    Raises:
        CollectiveError: on every rank, if the ranks' calls differ in anything but values, an argument is not
            one of the above, or ``x`` has a dtype that ``op`` is not defined for; in backward, if
            ``loss="replicated"`` and the incoming gradients differ between ranks.
    """
    group = arguments.member(group)
    call = arguments.checked("all_reduce", lambda: _reduction(x, "all_reduce", op, group, loss=loss))
    needs_grad, _ = settle(call, group)
    replicated = loss == "replicated"
    if call.op in ("sum", "avg"):
        summed = linear.SumToReplica(group) if replicated else linear.SumToAll(group)
        return _averaged(linear.apply(summed, x, needs_grad), call.op, group)
    counts = tuple(transport.even_counts(x.numel(), dist.get_world_size(group)))
    share = _reduced_share(x.reshape(-1), call.op, counts, group, needs_grad)
    gather = linear.GatherToReplica if replicated else linear.Gather
    return linear.apply(gather(group, counts), share, needs_grad).reshape(x.shape)


@eager
def reduce_scatter(
    x: Tensor | Sequence[Tensor], op: Any = "sum", group: Any = None, *, splits: Sequence[int] | None = None
) -> Tensor:
    """Reduces over the ranks; rank r gets the r-th part of the rows.

    y_r = op over s of x_s[part r]. For sum, dL/dx_s[part r] = g_r: everybody's gradients, gathered; a
    N-th of them for avg. Product, min and max: as :func:`all_reduce` with G = g_r, on part r.

    Args:
        x: ``(rows, ...)``, the same shape on all ranks; or a list with one ``(rows_r, ...)`` for each rank.
        op: as for :func:`all_reduce`.
        group: the process group.
        splits: rows for each rank; equal shares by default. The same on all ranks.

    Returns:
        ``(splits[r], ...)`` on rank r.

    Raises:
        CollectiveError: on every rank, as :func:`all_reduce`; also if the rows do not divide.
    """
    group = arguments.member(group)

    def build() -> tuple[Call, Tensor]:
        rows, counts = arguments.joined(x, group, splits)
        return _reduction(rows, "reduce_scatter", op, group, rows=counts), rows

    call, rows = arguments.checked_with("reduce_scatter", build)
    needs_grad, _ = settle(call, group)
    if call.op in ("sum", "avg"):
        part = linear.apply(linear.SumScatter(group, call.rows), rows, needs_grad)
        return _averaged(part, call.op, group)
    return _reduced_share(rows, call.op, call.rows, group, needs_grad)


@eager
def reduce(
    x: Tensor, dst: int | None = None, op: Any = "sum", group: Any = None, *, global_dst: int | None = None
) -> Tensor:
    """Reduces ``x`` over the ranks; rank ``dst`` gets the result, the others zeros.

    y_dst = op over s of x_s, so the gradients are those of :func:`all_reduce` with G = g_dst; the zeros are
    constants, and what comes back to them is dropped. They require grad all the same, because backward needs
    every rank: give each rank a loss that contains its result, ``loss = f(y) if rank == dst else y.sum()``.

    Args:
        x: any shape, the same on all ranks.
        dst: a rank in the group; 0 by default.
        op: as for :func:`all_reduce`.
        group: the process group.
        global_dst: the same rank as one of the default group, instead of ``dst``.

    Returns:
        A tensor like ``x``.

    Raises:
        CollectiveError: on every rank, as :func:`all_reduce`; also if the rank is outside the group.
    """
    group = arguments.member(group)

    def build() -> Call:
        root = arguments.root_rank(dst, global_dst, group, "dst")
        return _reduction(x, "reduce", op, group, root=root)

    call = arguments.checked("reduce", build)
    needs_grad, _ = settle(call, group)
    if call.op in ("sum", "avg"):
        return _averaged(linear.apply(linear.SumToRoot(group, call.root), x, needs_grad), call.op, group)
    counts = tuple(transport.even_counts(x.numel(), dist.get_world_size(group)))
    share = _reduced_share(x.reshape(-1), call.op, counts, group, needs_grad)
    at_root = linear.apply(_to_root(counts, call.root, group), share, needs_grad)
    if dist.get_rank(group) == call.root:
        return at_root.reshape(x.shape)
    # Nothing arrived: zeros, tied to the graph through a sum over no elements.
    return at_root.sum(dtype=x.dtype).expand(x.shape).contiguous()


@eager
def all_gather(
    x: Tensor,
    group: Any = None,
    *,
    concat: bool = True,
    sizes: Sequence[int] | None = None,
    loss: str = "per_rank",
) -> Any:
    """Everybody's ``x``, in rank order, on every rank.

    y_r = (x_0, .., x_{N-1}), so dL/dx_s = sum over r of the s-th part of g_r: a reduce_scatter. With
    ``loss="replicated"`` it is the s-th part of the one g.

    Args:
        x: ``(rows, ...)``; rows may differ between ranks and be 0, the rest may not. A 0-dimensional tensor
            is one row.
        group: the process group.
        concat: one tensor (the default), or a list with one for each rank.
        sizes: everybody's rows, if known: then nothing has to be exchanged (with the checks off nothing is).
        loss: ``"per_rank"`` or ``"replicated"``, see the module's text.

    Returns:
        ``(sum of rows, ...)``, or the list of ``(rows_r, ...)``.

    Raises:
        CollectiveError: on every rank, if dtypes or dimensions after the first differ, or ``sizes`` is wrong.
    """
    group = arguments.member(group)
    call = arguments.checked("all_gather", lambda: _gathering(x, "all_gather", group, sizes=sizes, loss=loss))
    needs_grad, calls = settle(call, group, learns=sizes is None)
    rows = call.rows or tuple(map(_rows_of, calls))
    mapping = (linear.GatherToReplica if loss == "replicated" else linear.Gather)(group, rows)
    return _parts(linear.apply(mapping, _as_rows(x), needs_grad), rows, x, concat)


@eager
def gather(
    x: Tensor,
    dst: int | None = None,
    group: Any = None,
    *,
    concat: bool = True,
    global_dst: int | None = None,
) -> Any:
    """Everybody's ``x``, in rank order, on rank ``dst``; no rows elsewhere.

    y_dst = (x_0, .., x_{N-1}), so dL/dx_s is the s-th part of g_dst: a scatter. The empty results of the
    other ranks require grad as well, because backward needs every rank: ``y.sum()`` of no rows is a loss.

    Args:
        x: ``(rows, ...)``; rows may differ between ranks. A 0-dimensional tensor is one row.
        dst: a rank in the group; 0 by default.
        group: the process group.
        concat: one tensor (the default), or a list with one for each rank.
        global_dst: the same rank as one of the default group, instead of ``dst``.

    Returns:
        ``(sum of rows, ...)`` on ``dst``, ``(0, ...)`` elsewhere; or the list of ``(rows_r, ...)``, of
        ``(0, ...)`` elsewhere.

    Raises:
        CollectiveError: on every rank, if dtypes or dimensions after the first differ, or the rank is
            outside the group.
    """
    group = arguments.member(group)

    def build() -> Call:
        root = arguments.root_rank(dst, global_dst, group, "dst")
        return _gathering(x, "gather", group, root=root)

    call = arguments.checked("gather", build)
    needs_grad, calls = settle(call, group, learns=True)
    rows = tuple(map(_rows_of, calls))
    result = linear.apply(_to_root(rows, call.root, group), _as_rows(x), needs_grad)
    at_root = dist.get_rank(group) == call.root
    return _parts(result, rows if at_root else (0,) * len(rows), x, concat)


@eager
def broadcast(
    x: Tensor | None,
    src: int | None = None,
    group: Any = None,
    *,
    global_src: int | None = None,
    loss: str = "per_rank",
) -> Tensor:
    """Rank ``src``'s ``x`` on every rank.

    y_r = x_src, so dL/dx_src = sum over r of g_r, and zero for the others' ``x``. With
    ``loss="replicated"`` it is the one g.

    Args:
        x: any shape; on the other ranks None, or a tensor of the same shape and dtype, whose values do not
            matter.
        src: a rank in the group; 0 by default.
        group: the process group.
        global_src: the same rank as one of the default group, instead of ``src``.
        loss: ``"per_rank"`` or ``"replicated"``, see the module's text.

    Returns:
        A tensor like rank ``src``'s; for None, on this rank's current device of the same type.

    Raises:
        CollectiveError: on every rank, if tensors differ in shape or dtype, the rank is outside the group, or
            rank ``src`` (with the checks off: any rank) brings None.
    """
    group = arguments.member(group)

    def build() -> Call:
        root = arguments.root_rank(src, global_src, group, "src")
        if x is None and (dist.get_rank(group) == root or not environment.check_collectives()):
            raise ValueError("x is None on rank src; with MINDDP_CHECK_COLLECTIVES=0 no rank may pass None")
        if x is not None and dist.get_rank(group) == root:
            arguments.announceable(x, group)
        return _described(x, "broadcast", group, root=root, loss=arguments.loss_name(loss))

    call = arguments.checked("broadcast", build)
    needs_grad, calls = settle(call, group)
    mapping = (linear.RootToReplica if loss == "replicated" else linear.FromRoot)(group, call.root)
    mine = calls[call.root].empty() if x is None else x
    return linear.apply(mapping, mine, needs_grad)


@eager
def scatter(
    x: Tensor | Sequence[Tensor] | None,
    src: int | None = None,
    group: Any = None,
    *,
    splits: Sequence[int] | None = None,
    global_src: int | None = None,
) -> Tensor:
    """Rank r gets the r-th part of the rows that rank ``src`` holds.

    y_r = x_src[part r], so dL/dx_src = (g_0, .., g_{N-1}): a gather.

    Args:
        x: on ``src``: ``(rows, ...)``, or a list with one ``(rows_r, ...)`` for each rank. Elsewhere None, or
            any dense tensor: its values do not matter and its gradient is zero.
        src: a rank in the group; 0 by default.
        group: the process group.
        splits: on ``src``: rows for each rank; equal shares by default.
        global_src: the same rank as one of the default group, instead of ``src``.

    Returns:
        ``(splits[r], ...)`` on rank r, on its current device of the type of ``src``'s tensor.

    Raises:
        CollectiveError: on every rank, if the rows do not divide, or the rank is outside the group.
    """
    group = arguments.member(group)

    def build() -> tuple[Call, tuple[Any, Any]]:
        root = arguments.root_rank(src, global_src, group, "src")
        if dist.get_rank(group) == root:
            rows, counts = arguments.joined(x, group, splits)
            arguments.announceable(rows, group)
            first = TOLD if len(set(counts)) == 1 else APART
            return _described(rows, "scatter", group, root=root, first=first), (rows, counts)
        if isinstance(x, Tensor):
            arguments.tensor(x, group)
        return _described(None, "scatter", group, root=root), (None, None)

    call, parsed = arguments.checked_with("scatter", build)
    needs_grad, calls = settle(call, group, learns=True)
    rows, counts = parsed
    announced, size = calls[call.root], len(calls)
    if dist.get_rank(group) != call.root:
        rows, counts = _no_rows(announced.empty(), x), (0,) * size
    if announced.first == TOLD:
        receive = tuple(_rows_of(announced) // size if rank == call.root else 0 for rank in range(size))
    else:
        receive = control.exchange(counts, group)
    return linear.apply(linear.Exchange(group, counts, receive), rows, needs_grad)


@eager
def all_to_all(
    x: Tensor | Sequence[Tensor],
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    group: Any = None,
) -> Any:
    """Rank r gets the r-th part of every rank's rows, in rank order.

    y_r = (x_0[part r], .., x_{N-1}[part r]): a permutation of all ranks' rows, whose transpose is its
    inverse. The gradients go back the way the rows came.

    Args:
        x: ``(rows, ...)``, or a list with one ``(rows_r, ...)`` for each rank. Rows may differ between ranks.
        input_splits: rows to send to each rank; equal shares by default.
        output_splits: rows to receive from each rank. Learned from the others if not given; with the checks
            off, what is sent if neither is given.
        group: the process group.

    Returns:
        ``(sum(output_splits), ...)``; for a list, the list of what came from each rank.

    Raises:
        CollectiveError: on every rank, if dtypes or dimensions after the first differ, rows do not divide, or
            what a rank expects is not what the others send (the error has both).
    """
    group = arguments.member(group)

    def build() -> tuple[Call, tuple[Any, Any, Any]]:
        rows, counts = arguments.joined(x, group, input_splits, "input_splits")
        wanted = arguments.output_counts(output_splits, group)
        first = EXPECTED if wanted else APART if uneven else TOLD
        return _described(rows, "all_to_all", group, first=first), (rows, counts, wanted)

    uneven = input_splits is not None or not isinstance(x, Tensor)
    call, parsed = arguments.checked_with("all_to_all", build)
    needs_grad, calls = settle(call, group, learns=uneven and output_splits is None)
    rows, send, wanted = parsed
    receive = _received(send, wanted, calls, group) if calls else (wanted or send)
    result = linear.apply(linear.Exchange(group, send, receive), rows, needs_grad)
    return result if isinstance(x, Tensor) else list(result.split(receive))


def _described(x: Any, collective: str, group: Any, **options: Any) -> Call:
    if x is None:
        return Call(collective, grad=arguments.grad_mode(None), **options)
    x = arguments.tensor(x, group)
    return Call(
        collective,
        dtype=str(x.dtype),
        device=x.device.type,
        shape=tuple(x.shape),
        grad=arguments.grad_mode(x),
        **options,
    )


def _reduction(x: Any, collective: str, op: Any, group: Any, loss: str = "per_rank", **options: Any) -> Call:
    arguments.tensor(x, group)
    name, loss = arguments.op_name(op, x.dtype), arguments.loss_name(loss)
    return _described(x, collective, group, op=name, loss=loss, **options)


def _gathering(x: Any, collective: str, group: Any, sizes: Sequence[int] | None = None, **options: Any) -> Call:
    rows = _as_rows(arguments.tensor(x, group)).shape[0]
    known = () if sizes is None else arguments.whole_numbers(sizes, "sizes")
    if sizes is not None and (len(known) != dist.get_world_size(group) or known[dist.get_rank(group)] != rows):
        raise ValueError(f"sizes={list(known)} does not give this rank its {rows} rows")
    if "loss" in options:
        arguments.loss_name(options["loss"])
    return _described(x, collective, group, rows=known, first=APART if known else TOLD, **options)


def _no_rows(like: Tensor, x: Any) -> Tensor:
    """No rows like ``like``'s; cut from ``x`` if that is a tensor, so that its gradient is zero, not None."""
    if not isinstance(x, Tensor):
        return like[:0]
    return x.reshape(-1)[:0].to(like).reshape(0, *like.shape[1:])


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def _rows_of(call: Call) -> int:
    return call.shape[0] if call.shape else 1


def _parts(result: Tensor, rows: Sequence[int], x: Tensor, concat: bool) -> Any:
    """The gathered rows as asked for: one tensor, or each rank's."""
    if concat:
        return result
    parts = result.split(list(rows))
    return [part.reshape(()) if x.dim() == 0 and part.numel() else part for part in parts]


def _averaged(total: Tensor, op: str, group: Any) -> Tensor:
    return total / dist.get_world_size(group) if op == "avg" else total


def _to_root(rows: Sequence[int], root: int, group: Any) -> linear.Exchange:
    """Gather as an exchange in which only the root receives."""
    rank, size = dist.get_rank(group), len(rows)
    send = tuple(rows[rank] if other == root else 0 for other in range(size))
    return linear.Exchange(group, send, tuple(rows) if rank == root else (0,) * size)


def _reduced_share(rows: Tensor, op: str, counts: tuple[int, ...], group: Any, needs_grad: bool) -> Tensor:
    """This rank's part of the rows, reduced over the ranks by local, differentiable operations."""
    mine, size = counts[dist.get_rank(group)], len(counts)
    received = linear.apply(linear.Exchange(group, counts, (mine,) * size), rows, needs_grad)
    stacked = received.reshape(size, mine, *rows.shape[1:])
    if op == "product":
        # One factor after the other: its derivatives are the others' products, with no division.
        return functools.reduce(torch.mul, stacked.unbind(0))
    return stacked.amin(0) if op == "min" else stacked.amax(0)


def _received(
    send: Sequence[int], expected: Sequence[int] | None, calls: Sequence[Call], group: Any
) -> tuple[int, ...]:
    """Rows that every rank sends to this one; raises on every rank if one expects anything else."""
    if all(call.first == TOLD for call in calls):
        return tuple(_rows_of(call) // len(calls) for call in calls)
    receive, error = control.exchange(send, group), ""
    if expected is not None and receive != tuple(expected):
        error = (
            f"all_to_all: rank {dist.get_rank(group)} of the group passes output_splits={list(expected)}, but "
            f"ranks 0 to {len(calls) - 1} send it {list(receive)} rows; without output_splits they are learned"
        )
    if any(call.first == EXPECTED for call in calls):
        agreement.agree(Call("all_to_all", error=error), group)
    return receive
