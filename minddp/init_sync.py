"""Every rank starts from the same model: compare first, then broadcast.

Models that differ would otherwise fail one rank and leave the others waiting, or, where only the sizes
agree, train on mixed-up parameters. So the ranks exchange what they are about to synchronize before
anything is sent, and all of them raise the same error when it does not match.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from . import _C

Signature = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]


def signature(named: Iterable[tuple[str, torch.Tensor]]) -> Signature:
    """(name, shape, dtype, strides) of every tensor, in order; a layout without strides stands beside the dtype."""
    return [
        (name, tuple(t.shape), str(t.dtype), tuple(t.stride()))
        if t.layout is torch.strided
        else (name, tuple(t.shape), f"{t.dtype} {t.layout}", ())
        for name, t in named
    ]


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of every rank of ``group``, in rank order. Collective."""
    if group.size() == 1:
        return [value]
    if type(group) is not dist.ProcessGroup:  # written in Python: torch.distributed does not know it
        return [pickle.loads(data) for data in _gather_bytes(pickle.dumps(value), group)]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _gather_bytes(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    _C.group_allgather(group, sizes, torch.tensor([len(mine)]))
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in sizes]
    _C.group_allgather(group, everyone, padded)
    return [bytes(data[: int(size)].tolist()) for data, size in zip(everyone, sizes)]


def ranks_text(ranks: Sequence[int]) -> str:
    """"rank 1", "ranks 0, 2": for messages."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def indented(lines: Sequence[str], at_most: int = 20) -> str:
    """The first lines of a message's list, one below the other, and how many more there are."""
    more = [f"and {len(lines) - at_most} more"] if len(lines) > at_most else []
    return "\n".join(f"  {line}" for line in [*lines[:at_most], *more])


def verify_same_model(kind: str, named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Raises on every rank when the tensors' number, shapes, dtypes or strides differ. Collective.

    Raises:
        RuntimeError: names the first tensor that differs, with each rank's shape, dtype and strides.
    """
    mine = signature(named)
    # Names may differ by rank without harm; they are exchanged for the message only.
    digest = hashlib.sha256(repr([entry[1:] for entry in mine]).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) > 1:
        raise RuntimeError(_difference(kind, gather_objects(mine, group)))


def verify_same_arguments(arguments: dict[str, Any], group: dist.ProcessGroup) -> str:
    """Raises on every rank when the ranks pass different values of what decides their collectives. Collective.

    Returns:
        A token that all ranks have, and nothing else has.

    Raises:
        ValueError: names the arguments that differ, with each rank's value.
    """
    mine = {name: repr(value) for name, value in arguments.items()}
    answers = gather_objects((mine, secrets.token_hex(8)), group)
    everyone = [theirs for theirs, _ in answers]
    differing = [name for name in arguments if len({theirs[name] for theirs in everyone}) > 1]
    if differing:
        what = "\n".join(
            f"  {name}: " + ", ".join(f"{theirs[name]} on rank {rank}" for rank, theirs in enumerate(everyone))
            for name in differing
        )
        raise ValueError(
            f"DistributedDataParallel: the ranks' arguments differ:\n{what}\nTheir collectives would not fit "
            "together: pass the same on every rank."
        )
    return str(answers[0][1])


def _difference(kind: str, signatures: list[Signature]) -> str:
    counts = [len(entries) for entries in signatures]
    for position in range(min(counts)):
        entries = [signature[position] for signature in signatures]
        if len({entry[1:] for entry in entries}) > 1:
            what = "\n".join(
                f"  rank {rank}: '{name}' {list(shape)} {dtype}, strides {list(strides)}"
                for rank, (name, shape, dtype, strides) in enumerate(entries)
            )
            return (
                f"DistributedDataParallel: the ranks' models differ at {kind} {position} "
                f"('{entries[0][0]}' on rank 0):\n{what}\nConstruct the same model on every rank "
                "(same code, same configuration, same memory format)."
            )
    named = "\n".join(
        f"  rank {rank}: {len(entries)}" + (f", the last is '{entries[-1][0]}'" if entries else "")
        for rank, entries in enumerate(signatures)
    )
    return (
        f"DistributedDataParallel expects the same model on every rank, but the number of {kind}s "
        f"differs:\n{named}\nUsual causes: requires_grad set on some ranks only, or layers that depend on the rank."
    )


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
    options = dist.BroadcastOptions()
    options.rootRank = src
    receives = group.rank() != src
    under_way: deque[tuple[Any, torch.Tensor, _Message]] = deque()
    for message in _messages(tensors, buffer_bytes):
        flat = torch.cat(message.flat)
        under_way.append((group.broadcast([flat.view(torch.uint8)], options), flat, message))
        if len(under_way) == 2:
            _receive(*under_way.popleft(), receives)
    while under_way:
        _receive(*under_way.popleft(), receives)


class _Message(NamedTuple):
    """Tensors of one dtype and device, and their elements: flat views of those that are contiguous, else copies."""

    tensors: list[torch.Tensor]
    flat: list[torch.Tensor]
    sizes: list[int]


def _receive(work: Any, received: torch.Tensor, message: _Message, receives: bool) -> None:
    _C.wait_for(work)
    if not receives:
        return
    pieces = received.split(message.sizes)
    if all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in message.tensors):
        torch._foreach_copy_(message.flat, pieces)
    else:
        for tensor, piece in zip(message.tensors, pieces):
            _once(tensor, tensor).copy_(_once(piece.view(tensor.shape), tensor))


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


def module_states(module: torch.nn.Module, ignored: set[str], buffers: bool) -> list[torch.Tensor]:
    """Parameters, then buffers, detached, without the ignored names and without repeats."""
    named = list(module.named_parameters()) + (list(module.named_buffers()) if buffers else [])
    return [tensor.detach() for name, tensor in named if name not in ignored]


def sync_module_states(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    buffer_bytes: int,
    src: int,
    ignored: set[str],
    buffers: bool,
) -> None:
    """Copies rank ``src``'s parameters (and buffers) to every rank of ``group``. Collective."""
    with torch.no_grad():
        broadcast_coalesced(group, module_states(module, ignored, buffers), buffer_bytes, src)
