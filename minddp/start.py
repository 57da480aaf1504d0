"""Every rank starts from the same model: compare first, then broadcast.

Models that differ would otherwise fail one rank and leave the others waiting, or, where only the sizes
agree, train on mixed-up parameters. So the ranks exchange what they are about to synchronize before
anything is sent, and all of them raise the same error when it does not match.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .broadcast import broadcast_coalesced
from .members import all_parameters
from .messages import gather_objects

Signature = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]


def signature(named: Iterable[tuple[str, torch.Tensor]]) -> Signature:
    """(name, shape, dtype, strides) of every tensor, in order. The dtype's text also names a layout without
    strides, and the meta device."""
    return [
        (
            name,
            tuple(t.shape),
            str(t.dtype)
            + (f" {t.layout}" if t.layout is not torch.strided else "")
            + (" on meta" if t.is_meta else ""),
            tuple(t.stride()) if t.layout is torch.strided else (),
        )
        for name, t in named
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
    models = {"parameter": signature(parameters), "buffer": signature(buffers)}
    known = {"parameter": sorted(parameter_names), "buffer": sorted(name for name, _ in buffers)}
    digests = {kind: _digests(models[kind], known[kind]) for kind in models}
    answers = gather_objects((_digest(given), digests, secrets.token_hex(8), list(sent)), group)
    if len({theirs for theirs, *_ in answers}) > 1:
        raise ValueError(_differing_arguments(gather_objects(given, group)))
    for kind, mine in models.items():
        shapes, order, names = (len(set(theirs)) == 1 for theirs in zip(*(answer[1][kind] for answer in answers)))
        if not shapes or (names and not order):
            raise RuntimeError(_difference(kind, gather_objects(mine, group), by_name=shapes))
    return str(answers[0][2]), [[theirs[3][i] for theirs in answers] for i in range(len(sent))]


def _digests(mine: Signature, known: Sequence[str]) -> tuple[str, str, str]:
    return _digest([entry[1:] for entry in mine]), _digest([entry[0] for entry in mine]), _digest(known)


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()


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


def _difference(kind: str, signatures: list[list[Any]], by_name: bool) -> str:
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
    named = itertools.chain(all_parameters(module), module.named_buffers() if buffers else ())
    return [(name, tensor.detach()) for name, tensor in named if name not in ignored]


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
        names, tensors = [name for name, _ in states], [tensor for _, tensor in states]
        broadcast_coalesced(group, tensors, buffer_bytes, src, names)
