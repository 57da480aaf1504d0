"""Every rank starts from the same model: compare first, then broadcast.

Models that differ would otherwise fail one rank and leave the others waiting, or, where only the sizes
agree, train on mixed-up parameters. So the ranks exchange what they are about to synchronize before
anything is sent, and all of them raise the same error when it does not match.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from . import _C
from .messages import gather_objects, wait_for
from .parameters import all_parameters, plainly

Signature = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]


def signature(named: Sequence[tuple[str, torch.Tensor]]) -> Signature:
    """(name, shape, dtype, strides) of every tensor, in order. The dtype's text also names a layout without
    strides, and what has no memory."""
    with plainly():
        bare = {*_C.unreadable([t for _, t in named])}
        return [
            (
                name,
                tuple(t.shape),
                str(t.dtype)
                + (f" {t.layout}" if t.layout is not torch.strided else "")
                + (" on meta" if t.is_meta else " without memory" if i in bare else ""),
                tuple(t.stride()) if t.layout is torch.strided else (),
            )
            for i, (name, t) in enumerate(named)
        ]


def verify_same_start(
    arguments: dict[str, Any],
    parameters: Sequence[tuple[str, torch.Tensor]],
    parameter_names: Iterable[str],
    buffers: Sequence[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup,
    sent: Sequence[Any] = (),
) -> tuple[str, list[list[Any]]]:
    """Raises on every rank when their arguments or models differ. Collective: one all-gather if nothing does.

    Names may differ by rank without harm. But where all ranks have the same ones, those in the same place must be of
    one name: else a rank's tensor would be averaged with another one's.

    Args:
        arguments: what decides the ranks' collectives.
        parameters, buffers: whose number, shapes, dtypes, strides and order must be the same.
        parameter_names: of all of the module's, of which ``parameters`` may be a part.
        sent: what observers send along, one entry for each that sends something.

    Returns:
        A token that all ranks have, and nothing else has; and for each entry of ``sent`` those of all ranks.

    Raises:
        ValueError: names the arguments that differ, with each rank's value.
        RuntimeError: names the first tensor that differs, with each rank's shape, dtype and strides.
    """
    given = {name: repr(value) for name, value in arguments.items()}
    mine = [given, signature(parameters), sorted(parameter_names), signature(buffers)]
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=12).hexdigest()
    answers = gather_objects((digest, secrets.token_hex(8), list(sent)), group)
    if len({theirs for theirs, *_ in answers}) > 1:
        _compare(*zip(*gather_objects(mine, group)))
    return str(answers[0][1]), [[theirs[2][i] for theirs in answers] for i in range(len(sent))]


def _compare(given: Sequence[Any], parameters: Sequence[Any], names: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Of each rank: raises what :func:`verify_same_start` does."""
    if _differ(given):
        raise ValueError(_differing_arguments(given))
    known = {"parameter": names, "buffer": [sorted(name for name, *_ in theirs) for theirs in buffers]}
    for kind, signatures in (("parameter", parameters), ("buffer", buffers)):
        shapes = _differ([[entry[1:] for entry in theirs] for theirs in signatures])
        order = _differ([[entry[0] for entry in theirs] for theirs in signatures])
        if shapes or (order and not _differ(known[kind])):
            raise RuntimeError(_difference(kind, signatures, by_name=not shapes))


def _differ(everyone: Sequence[Any]) -> bool:
    return any(theirs != everyone[0] for theirs in everyone)


def _differing_arguments(everyone: Sequence[dict[str, str]]) -> str:
    differing = [name for name in everyone[0] if len({theirs[name] for theirs in everyone}) > 1]
    what = "\n".join(
        f"  {name}: " + ", ".join(f"{theirs[name]} on rank {rank}" for rank, theirs in enumerate(everyone))
        for name in differing
    )
    return (
        f"DistributedDataParallel: the ranks' arguments differ:\n{what}\nTheir collectives would not fit "
        "together: pass the same on every rank."
    )


def _difference(kind: str, signatures: Sequence[list[Any]], by_name: bool) -> str:
    counts = [len(entries) for entries in signatures]
    for position in range(min(counts)):
        entries = [signature[position] for signature in signatures]
        if len({repr(entry[0] if by_name else entry[1:]) for entry in entries}) > 1:
            what = "\n".join(
                f"  rank {rank}: '{name}' {shape} {dtype}, strides {strides}"
                for rank, (name, shape, dtype, strides) in enumerate(entries)
            )
            return (
                f"DistributedDataParallel: the ranks' models differ at {kind} {position} "
                f"('{entries[0][0]}' on rank 0):\n{what}\nConstruct the same model on every rank "
                "(same code, same configuration, same memory format"
                + (", the same order of registration, the same parameters frozen)." if by_name else ").")
            )
    named = "\n".join(
        f"  rank {rank}: {len(entries)}" + (f", the last is '{entries[-1][0]}'" if entries else "")
        for rank, entries in enumerate(signatures)
    )
    return (
        f"DistributedDataParallel expects the same model on every rank, but the number of {kind}s "
        f"differs:\n{named}\nUsual causes: requires_grad set on some ranks only, or layers that depend on the rank."
    )


def module_states(module: torch.nn.Module, ignored: set[str], buffers: bool) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with their names, detached, without the ignored names and without repeats."""
    named = [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored] if buffers else []
    return [(name, tensor.detach()) for name, tensor in (*all_parameters(module, ignored), *named)]


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
        states = module_states(module, ignored, buffers)
        broadcast_coalesced(group, [tensor for _, tensor in states], buffer_bytes, src, states)


# --- one rank's tensors to all ranks, many in one message: parameters at construction, buffers before each forward


def broadcast_coalesced(
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    buffer_bytes: int,
    src: int,
    named: Iterable[tuple[str, torch.Tensor]] = (),
) -> None:
    """Copies rank ``src``'s tensors to all ranks of ``group``, many in one message. Collective.

    A message holds tensors of one dtype on one device, in their order, and travels as bytes, so that any dtype
    (complex, bool, 8-bit floats) moves on any backend. Takes time in proportion to their number and bytes; two
    messages are under way at a time. Rank ``src``'s tensors are only read, but for those of a class of the program's
    (quantized weights): their ``copy_`` may lose something, so rank ``src`` copies back what it has sent. Where it
    refuses plain values, the tensors that ``__tensor_flatten__`` names are sent.

    Args:
        group: the process group; ``src`` is a rank in it.
        tensors: dense, any strides (expanded ones among them), any number of elements; same number, shapes and
            dtypes on every rank; written in place except on ``src``.
        buffer_bytes: a message is sent once it holds this many bytes.
        src: rank in ``group``.
        named: with their names, for errors.

    Raises:
        TypeError: the class of a tensor refuses plain values, and has no ``__tensor_flatten__``; on every rank.
        RuntimeError: a tensor is sparse, or has no memory; before anything is sent, so on every rank whose
            tensors are such.
    """
    with plainly():  # a class of the program's is not to see all tensors in one
        refused = _broadcast(group, tensors, buffer_bytes, src, named)
    # Only now, since all ranks send the same messages before one of them raises.
    inner = [part for tensor, error in refused for part in _inner(tensor, error, named)]
    if inner:
        broadcast_coalesced(group, inner, buffer_bytes, src)


_Named = Iterable[tuple[str, torch.Tensor]]
_Refused = list[tuple[torch.Tensor, Exception]]


def _broadcast(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], buffer_bytes: int, src: int, named: _Named
) -> _Refused:
    """Returns the tensors whose class refuses plain values, which it does on all ranks, with its errors."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    receives = group.rank() != src
    kinds: set[Any] = set(map(type, tensors))
    own = {kind for kind in kinds if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__}
    refused: _Refused = []
    what = f"the broadcast of rank {src}'s parameters or buffers"
    under_way: deque[tuple[Any, torch.Tensor, _Message]] = deque()

    def finish(work: Any, flat: torch.Tensor, message: _Message) -> None:
        wait_for(work, group, what)
        if receives or own:
            refused.extend(_receive(flat, message, own, receives))

    for message in _messages(tensors, buffer_bytes, named):
        flat = torch.cat(message.flat)
        under_way.append((group.broadcast([flat.view(torch.uint8)], options), flat, message))
        if len(under_way) == 2:
            finish(*under_way.popleft())
    while under_way:
        finish(*under_way.popleft())
    return refused


class _Message(NamedTuple):
    """Tensors of one dtype and device, and their elements: flat views of those that are contiguous, else copies."""

    tensors: list[torch.Tensor]
    flat: list[torch.Tensor]
    sizes: list[int]


def _receive(received: torch.Tensor, message: _Message, own: set[type], all_of_it: bool) -> _Refused:
    """``all_of_it``: otherwise only tensors of the classes ``own``, on the rank that has sent it."""
    pieces = received.split(message.sizes)
    if all_of_it and all(type(t) not in own and _is_plain(t) for t in message.tensors):
        torch._foreach_copy_(message.flat, pieces)
        return []
    refused: _Refused = []
    for tensor, piece in zip(message.tensors, pieces):
        if type(tensor) in own:
            try:
                tensor.copy_(piece.view(tensor.shape))
            except Exception as error:
                refused.append((tensor, error))
        elif all_of_it:
            _once(tensor, tensor).copy_(_once(piece.view(tensor.shape), tensor))
    return refused


def _is_plain(tensor: torch.Tensor) -> bool:
    """What may be written through a flat view."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _name(tensor: torch.Tensor, named: _Named) -> str:
    name = next((name for name, one in named if one is tensor), None)
    return f"a tensor of shape {list(tensor.shape)}" if name is None else f"'{name}'"


def _inner(tensor: torch.Tensor, error: Exception, named: _Named) -> list[torch.Tensor]:
    """The tensors of which one of the program's class is made, however deep; raises if it does not tell."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    raise TypeError(
        f"DistributedDataParallel: {_name(tensor, named)} cannot become equal on all ranks: "
        f"{type(tensor).__name__}.copy_ refuses plain values ({error}), and its class has no __tensor_flatten__, "
        "whose tensors could be sent. Give it one of the two. Or make it equal yourself, and pass init_sync=False, "
        "or name it in _ddp_params_and_buffers_to_ignore."
    ) from error


def _once(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``values`` without the repeats of an expanded ``like``: torch refuses to write an element more than once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride())):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
    return values


def _messages(tensors: Sequence[torch.Tensor], buffer_bytes: int, named: _Named) -> Iterator[_Message]:
    """The tensors in messages of one dtype and device each, closed once full."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise RuntimeError(_not_dense(tensor, named))
    for index in _C.unreadable(tensors):
        raise RuntimeError(_without_memory(tensors[index], named))
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


def _not_dense(tensor: torch.Tensor, named: _Named) -> str:
    return (
        f"DistributedDataParallel: No support for sparse tensors ({_name(tensor, named)}, {tensor.layout}) among "
        "those that are broadcast from rank to rank: parameters at construction, buffers before each forward. Make "
        "it dense, keep it elsewhere than in a buffer, or name it in _ddp_params_and_buffers_to_ignore."
    )


def _without_memory(tensor: torch.Tensor, named: _Named) -> str:
    there = 0 if tensor.is_meta else tensor.untyped_storage().nbytes()
    return (
        f"DistributedDataParallel: {_name(tensor, named)} has no values that could be broadcast to other ranks: "
        f"its {tensor.numel()} elements have {there} bytes of memory on {tensor.device}. Give its storage the size "
        "back before (parameters are broadcast at construction, buffers before each forward), or name it in "
        "_ddp_params_and_buffers_to_ignore."
    )
