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
from typing import Any

import torch
import torch.distributed as dist

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


def sync_module_states(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    buffer_bytes: int,
    src: int,
    ignored: set[str],
    buffers: bool,
) -> None:
    """Copies rank ``src``'s parameters (and buffers) to every rank of ``group``, but for ``ignored``. Collective."""
    named: list[tuple[str, torch.Tensor]] = [*all_parameters(module, ignored)]
    if buffers:
        named += [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]
    with torch.no_grad():
        detached = [(name, tensor.detach()) for name, tensor in named]
        broadcast_coalesced(group, [tensor for _, tensor in detached], buffer_bytes, src, detached)


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
    messages are under way at a time. Of a tensor whose class tells by ``__tensor_flatten__`` what it is made of
    (quantized weights), that is sent. Rank ``src``'s tensors are only read, but for those of another class of the
    program's: their ``copy_`` may lose something, so rank ``src`` copies back what it has sent.

    Args:
        group: the process group; ``src`` is a rank in it.
        tensors: dense, any strides (expanded ones among them), any number of elements; same number, shapes, dtypes
            and classes on every rank; written in place except on ``src``.
        buffer_bytes: a message is sent once it holds this many bytes.
        src: rank in ``group``.
        named: with their names, for errors.

    Raises:
        TypeError: the class of a tensor refuses plain values, and has no ``__tensor_flatten__``; on every rank.
        RuntimeError: a tensor is sparse, or has no memory; before anything is sent, so on every rank whose
            tensors are such.
    """
    options = dist.BroadcastOptions()
    options.rootRank = src
    takes = group.rank() != src or any(map(_is_own, tensors))
    refused: list[tuple[torch.Tensor, Exception]] = []
    under_way: deque[tuple[Any, torch.Tensor, _Tensors, _Tensors]] = deque()

    def finish(work: Any, sent: torch.Tensor, message: _Tensors, flat: _Tensors) -> None:
        wait_for(work, group, f"the broadcast of rank {src}'s parameters or buffers")
        if takes:
            refused.extend(_receive(sent, message, flat, group.rank() == src))

    with plainly():  # a class of the program's is not to see all tensors in one
        for message in _messages(tensors, buffer_bytes, named):
            # Views of those that are contiguous, else copies.
            flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in message]
            sent = torch.cat(flat)
            under_way.append((group.broadcast([sent.view(torch.uint8)], options), sent, message, flat))
            if len(under_way) == 2:
                finish(*under_way.popleft())
        while under_way:
            finish(*under_way.popleft())
    for tensor, error in refused:  # only now, since all ranks send the same messages before one of them raises
        raise TypeError(_refusal(tensor, error, named)) from error


_Tensors = list[torch.Tensor]
_Named = Iterable[tuple[str, torch.Tensor]]


def _messages(tensors: Sequence[torch.Tensor], buffer_bytes: int, named: _Named) -> Iterator[_Tensors]:
    """The tensors in messages of one dtype and device each, closed once full. Nothing is sent for what is empty."""
    groups: dict[Any, _Tensors] = {}
    for tensor in tensors:
        for part in _parts(tensor) if _is_own(tensor) else (tensor,):
            if not isinstance(part, torch.Tensor):
                raise RuntimeError(_no_tensor(tensor, part, named))
            if part.layout is not torch.strided:
                raise RuntimeError(_not_dense(part, named))
            if part.is_meta:  # on all ranks: it has no values
                continue
            groups.setdefault((part.dtype, part.device), []).append(part)
    for group in groups.values():
        for index in _C.unreadable(group):
            raise RuntimeError(_without_memory(group[index], named))
    for group in groups.values():
        message: _Tensors = []
        held = 0
        for tensor in group:
            message.append(tensor)
            held += tensor.nbytes
            if held >= buffer_bytes:
                yield message
                message, held = [], 0
        if held:
            yield message


def _is_own(tensor: torch.Tensor) -> bool:
    """Of a class of the program's, which decides what torch's operators do."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _parts(tensor: Any) -> Iterator[Any]:
    """What a tensor is made of, however deep; itself, if its class does not tell. Of classes of torch's (DTensor)
    something is no tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _receive(
    sent: torch.Tensor, message: _Tensors, flat: _Tensors, is_src: bool
) -> Iterator[tuple[torch.Tensor, Exception]]:
    """Writes what has come; on rank ``src`` only where it may have lost something. Returns the tensors whose class
    refuses plain values, which it does on all ranks, with its errors."""
    pieces = sent.split([piece.numel() for piece in flat])
    if not is_src and all(map(_is_plain, message)):
        torch._foreach_copy_(flat, pieces)
        return
    for tensor, piece in zip(message, pieces):
        own = _is_own(tensor)
        if is_src and not own:
            continue
        try:
            _once(tensor, tensor).copy_(_once(piece.view(tensor.shape), tensor))
        except Exception as error:
            if not own:
                raise
            yield tensor, error


def _is_plain(tensor: torch.Tensor) -> bool:
    """What may be written through a flat view."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or _is_own(tensor))


def _once(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``values`` without the repeats of an expanded ``like``: torch refuses to write an element more than once."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride())):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
    return values


def _name(tensor: torch.Tensor, named: _Named) -> str:
    name = next((name for name, one in named if one is tensor), None)
    return f"a tensor of shape {list(tensor.shape)}" if name is None else f"'{name}'"


def _refusal(tensor: torch.Tensor, error: Exception, named: _Named) -> str:
    return (
        f"DistributedDataParallel: {_name(tensor, named)} cannot become equal on all ranks: "
        f"{type(tensor).__name__}.copy_ refuses plain values ({error}), and its class has no __tensor_flatten__, "
        "whose tensors could be sent. Give it one of the two. Or make it equal yourself, and pass init_sync=False, "
        "or name it in _ddp_params_and_buffers_to_ignore."
    )


def _no_tensor(tensor: torch.Tensor, part: Any, named: _Named) -> str:
    return (
        f"DistributedDataParallel: {_name(tensor, named)} cannot be broadcast to other ranks: a "
        f"{type(tensor).__name__} is made of a {type(part).__name__}, too, which is no tensor. Keep it elsewhere "
        "than in a buffer, or name it in _ddp_params_and_buffers_to_ignore."
    )


def _not_dense(tensor: torch.Tensor, named: _Named) -> str:
    return (
        f"DistributedDataParallel: No support for sparse tensors ({_name(tensor, named)}, {tensor.layout}) among "
        "those that are broadcast from rank to rank: parameters at construction, buffers before each forward. Make "
        "it dense, keep it elsewhere than in a buffer, or name it in _ddp_params_and_buffers_to_ignore."
    )


def _without_memory(tensor: torch.Tensor, named: _Named) -> str:
    return (
        f"DistributedDataParallel: {_name(tensor, named)} has no values that could be broadcast to other ranks: its "
        f"{tensor.numel()} elements have {tensor.untyped_storage().nbytes()} bytes of memory on {tensor.device}. "
        "Give its storage the size back before (parameters are broadcast at construction, buffers before each "
        "forward), or name it in _ddp_params_and_buffers_to_ignore."
    )
