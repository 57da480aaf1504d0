"""One rank's tensors to all ranks, many in one message: parameters at construction, buffers before each forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from . import waiting


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], buffer_bytes: int, src: int
) -> None:
    """Copies rank ``src``'s tensors to all ranks of ``group``, many in one message. Collective.

    A message holds tensors of one dtype on one device, in their order, and travels as bytes, so that any dtype
    (complex, bool, 8-bit floats) moves on any backend. Takes time in proportion to their number and bytes; two
    messages are under way at a time. Rank ``src``'s tensors are only read.

    Args:
        group: the process group; ``src`` is a rank in it.
        tensors: dense, any strides (expanded ones among them), any number of elements; same number, shapes and
            dtypes on every rank; written in place except on ``src``.
        buffer_bytes: a message is sent once it holds this many bytes.
        src: rank in ``group``.

    Raises:
        RuntimeError: a tensor is sparse; before anything is sent, so on every rank whose
            tensors are such.
    """
    with torch._C.DisableTorchFunction():  # a class of the program's is not to see all tensors in one
        _broadcast(group, tensors, buffer_bytes, src)


def _broadcast(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], buffer_bytes: int, src: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = src
    receives = group.rank() != src
    what = f"the broadcast of rank {src}'s parameters or buffers"
    under_way: deque[tuple[Any, torch.Tensor, _Message]] = deque()

    def finish(work: Any, flat: torch.Tensor, message: _Message) -> None:
        waiting.wait_for(work, group, what)
        if receives:
            _receive(flat, message)

    for message in _messages(tensors, buffer_bytes):
        flat = torch.cat(message.flat)
        under_way.append((group.broadcast([flat.view(torch.uint8)], options), flat, message))
        if len(under_way) == 2:
            finish(*under_way.popleft())
    while under_way:
        finish(*under_way.popleft())


class _Message(NamedTuple):
    """Tensors of one dtype and device, and their elements: flat views of those that are contiguous, else copies."""

    tensors: list[torch.Tensor]
    flat: list[torch.Tensor]
    sizes: list[int]


def _receive(received: torch.Tensor, message: _Message) -> None:
    pieces = received.split(message.sizes)
    if all(_is_plain(t) for t in message.tensors):
        torch._foreach_copy_(message.flat, pieces)
    else:
        for tensor, piece in zip(message.tensors, pieces):
            _once(tensor, tensor).copy_(_once(piece.view(tensor.shape), tensor))


def _is_plain(tensor: torch.Tensor) -> bool:
    """What may be written through a flat view. A class of the program's (quantized weights) has a ``copy_``."""
    own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or own)


def _once(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``values`` without the repeats of an expanded ``like``: torch refuses to write an element more than once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride())):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
    return values


def _messages(tensors: Sequence[torch.Tensor], buffer_bytes: int) -> Iterator[_Message]:
    """The tensors in messages of one dtype and device each, closed once full."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise RuntimeError(_not_dense(tensor))
    if not tensors:
        return
    groups = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True).values()
    # In the order of their first tensors: the groups' own depends on the device's number.
    for indices in sorted(indices for _, indices in groups):
        group = [tensors[i] for i in indices]
        sizes = [tensor.numel() for tensor in group]
        for begin, end in _cuts(sizes, buffer_bytes / group[0].element_size()):
            part = group[begin:end]
            flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in part]
            yield _Message(part, flat, sizes[begin:end])


def _cuts(sizes: list[int], limit: float) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs that end once they hold ``limit`` elements; a last one without elements is left out."""
    if 0 < sum(sizes) <= limit:
        yield 0, len(sizes)
        return
    begin, held = 0, 0
    for end, size in enumerate(sizes, 1):
        held += size
        if held >= limit or (end == len(sizes) and held):
            yield begin, end
            begin, held = end, 0


def _not_dense(tensor: torch.Tensor) -> str:
    return (
        f"DistributedDataParallel: No support for sparse tensors ({tensor.layout}, shape {list(tensor.shape)}) among "
        "those that are broadcast from rank to rank: parameters at construction, buffers before each forward. Make "
        "it dense, keep it elsewhere than in a buffer, or name it in _ddp_params_and_buffers_to_ignore."
    )
