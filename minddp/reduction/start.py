"""Every rank starts from the same model: compare first, then broadcast.

Models that differ would otherwise fail one rank and leave the others waiting, or, where only the sizes
agree, train on mixed-up parameters. So the ranks exchange what they are about to synchronize before
anything is sent, and all of them raise the same error when it does not match.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..guards import watchdog
from ..ranks.broadcast import broadcast_coalesced
from ..ranks.messages import gather_objects
from ..ranks.processes import Process, here

Signature = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]


def signature(named: Iterable[tuple[str, torch.Tensor]]) -> Signature:
    """(name, shape, dtype, strides) of every tensor, in order; a layout without strides stands beside the dtype."""
    return [
        (name, tuple(t.shape), str(t.dtype), tuple(t.stride()))
        if t.layout is torch.strided
        else (name, tuple(t.shape), f"{t.dtype} {t.layout}", ())
        for name, t in named
    ]


def verify_same_model(
    kind: str, named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, names: Iterable[str] | None = None
) -> None:
    """Raises on every rank when the tensors' number, shapes, dtypes, strides or order differ. Collective.

    Names may differ by rank without harm. But where all ranks have the same ones, those in the same place must be of
    one name: else a rank's tensor would be averaged with another one's.

    Args:
        names: all names of the kind in the module, of which ``named`` may be a part; default: those of ``named``.

    Raises:
        RuntimeError: names the first tensor that differs, with each rank's shape, dtype and strides.
    """
    mine = signature(named)
    everyone = gather_objects(
        (
            _digest([entry[1:] for entry in mine]),
            _digest([entry[0] for entry in mine]),
            _digest(sorted(names if names is not None else [entry[0] for entry in mine])),
        ),
        group,
    )
    shapes, order, known = (len(set(digests)) == 1 for digests in zip(*everyone))
    if not shapes or (known and not order):
        raise RuntimeError(_difference(kind, gather_objects(mine, group), by_name=shapes))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def verify_same_arguments(arguments: dict[str, Any], group: dist.ProcessGroup) -> str:
    """Raises on every rank when the ranks pass different values of what decides their collectives. Collective.

    Returns:
        A token that all ranks have, and nothing else has.

    Raises:
        ValueError: names the arguments that differ, with each rank's value.
    """
    watchdog.current(group)  # from now on this rank can be asked where it is
    mine = {name: repr(value) for name, value in arguments.items()}
    answers = gather_objects((mine, secrets.token_hex(8), here()), group)
    everyone = [theirs for theirs, _, _ in answers]
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
    watchdog.introduce(group, [Process(*process) for _, _, process in answers])
    return str(answers[0][1])


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
