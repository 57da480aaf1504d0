"""Moving tensors with c10d: nothing here knows gradients, nothing here changes its input.

What always holds
    Every function returns a new contiguous tensor. Tensors move as bytes, so that every dtype moves on
    every backend; only sums are computed by the backend, and only for dtypes that each backend adds.
    Counts are numbers of elements of flat tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..messages import wait_for

# torch 2.13 renames the two, and warns at the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What both Gloo and NCCL add; the rest (int16, say) is added here after an all_to_all.
_ADDED_BY_BACKENDS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip


def _wait(work: Any, group: Any) -> None:
    wait_for(work, group, "a collective of minddp.functional or SyncBatchNorm")


def dense(x: Tensor) -> Tensor:
    """``x`` without strides, conjugate or negative bits; may be ``x`` itself."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _bytes(flat: Tensor) -> Tensor:
    # as_strided: a single element may have stride 0 and count as contiguous, but is no bytes to view().
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _numbers(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones: what a backend can add."""
    return torch.view_as_real(x) if x.is_complex() else x


def even_counts(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` shares that differ by one at most, the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def offsets(counts: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    return [0, *accumulate(counts)]


def all_to_all(flat: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    """Sends ``send[r]`` elements to rank r, receives ``receive[r]`` from it, in rank order."""
    out = flat.new_empty(sum(receive))
    item = flat.element_size()
    work = dist.all_to_all_single(
        _bytes(out),
        _bytes(flat),
        [count * item for count in receive],
        [count * item for count in send],
        group=group,
        async_op=True,
    )
    _wait(work, group)
    return out


def all_gather(flat: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Everybody's elements in rank order; rank r has ``counts[r]``.

    Uneven shares are padded to the largest: c10d's own uneven all_gather aborts the process on Gloo.
    """
    longest, ranks = max(counts), len(counts)
    if longest == 0:
        return flat.new_empty(0)
    padded = flat
    if flat.numel() < longest:
        padded = torch.cat([flat, flat.new_zeros(longest - flat.numel())])
    out = flat.new_empty(longest * ranks)
    gather_rows(_bytes(out), _bytes(padded), group)
    if all(count == longest for count in counts):
        return out
    return torch.cat([out[r * longest : r * longest + count] for r, count in enumerate(counts)])


def gather_rows(out: Tensor, row: Tensor, group: Any) -> None:
    """Everybody's flat ``row``, one after the other, into the contiguous ``out``: without a copy for each rank."""
    _wait(_all_gather_single(out.view(-1), row, group=group, async_op=True), group)


def broadcast(x: Tensor, src: int, group: Any) -> Tensor:
    out = x.clone()
    if out.numel():
        flat = _bytes(out.reshape(-1))
        _wait(dist.broadcast(flat, group=group, group_src=src, async_op=True), group)
    return out


def sum_to_all(x: Tensor, group: Any) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    if x.dtype not in _ADDED_BY_BACKENDS:
        counts = even_counts(x.numel(), dist.get_world_size(group))
        return all_gather(sum_scatter(x.reshape(-1), counts, group), counts, group).view(x.shape)
    out = x.clone()
    _wait(dist.all_reduce(_numbers(out), group=group, async_op=True), group)
    return out


def sum_to_one(x: Tensor, dst: int, group: Any) -> Tensor:
    """The sum on rank ``dst``, zeros elsewhere (c10d leaves partial sums there)."""
    if x.dtype in _ADDED_BY_BACKENDS and x.numel():
        out = x.clone()
        _wait(dist.reduce(_numbers(out), group=group, group_dst=dst, async_op=True), group)
    else:
        out = sum_to_all(x, group)
    return out if dist.get_rank(group) == dst else torch.zeros_like(out)


def sum_scatter(flat: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Rank r gets the sum of everybody's r-th part, of ``counts[r]`` elements.

    On NCCL its own reduce_scatter where parts are even. Elsewhere an all_to_all and a sum of what came:
    it moves what a reduce_scatter moves, where Gloo's is an all_reduce of everything.
    """
    rank, ranks = dist.get_rank(group), len(counts)
    if _is_nccl(flat, group) and len(set(counts)) == 1 and flat.dtype in _ADDED_BY_BACKENDS and counts[0]:
        out = flat.new_empty(counts[rank])
        work = _reduce_scatter_single(_numbers(out), _numbers(flat), group=group, async_op=True)
        _wait(work, group)
        return out
    rows = all_to_all(flat, counts, [counts[rank]] * ranks, group).view(ranks, counts[rank])
    return rows.sum(0, dtype=flat.dtype)


def _is_nccl(x: Tensor, group: Any) -> bool:
    return x.is_cuda and "nccl" in dist.get_backend(group)
