"""Are the ranks' replicas still one model? Every tensor's bits, compared by name.

Data-parallel training has no shared copy of the model: ranks that start alike and add the same gradients stay alike.
Whatever breaks this (a checkpoint loaded on one rank, an edit of ``.data``, optimizers in different states) goes
unnoticed, since each rank goes on by itself. A digest a tensor makes it visible at the price of reading the model.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..messages import gather_objects, indented, ranks_text, wait_for


def digest(tensor: torch.Tensor) -> str:
    """A digest of shape, dtype and bits: any two tensors with the same one are equal, NaNs and signed zeros too.

    A ``DTensor``'s is that of this rank's shard. Reads the tensor once, on the host.
    """
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if _C.unreadable([local]):
        return "no memory"
    local = local.cpu().contiguous()
    hashed = hashlib.blake2b(f"{tuple(local.shape)} {local.dtype}".encode(), digest_size=16)
    if local.nbytes:
        hashed.update((ctypes.c_ubyte * local.nbytes).from_address(local.data_ptr()))
    return hashed.hexdigest()


def check_replicas(
    named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, device: torch.device | None = None
) -> None:
    """Raises on every rank when a tensor's bits differ between ranks. Collective.

    Where they are the same, that is one collective of two integers on ``device``; only else names are exchanged.

    Raises:
        RuntimeError: names the tensors that differ, and which ranks hold the same.
    """
    mine = {name: digest(tensor) for name, tensor in named}
    if _same_everywhere(mine, group, device or torch.device("cpu")):
        return
    everyone = gather_objects(mine, group)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    differing = [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]
    lines = [f"'{name}': {_camps([theirs.get(name) for theirs in everyone])}" for name in differing]
    raise RuntimeError(
        f"DistributedDataParallel: the ranks' replicas differ in {len(differing)} of {len(names)} tensors:\n"
        + indented(lines)
        + "\nSomething has changed them on some ranks only: a checkpoint loaded on one rank, an edit of .data, "
        "optimizers with different settings or states, parameters outside of the wrapper's care. Construct with "
        "check_replicas_every=1 to find when. minddp.repair_replicas(ddp, rank) gives all ranks that rank's."
    )


def _same_everywhere(mine: dict[str, str], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same digests: the largest number that stands for them is the smallest, too."""
    number = int.from_bytes(hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=7).digest(), "little")
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # the stub forgets that it converts
    wait_for(group.allreduce([bounds], options), group, "the comparison of replicas")
    largest, smallest = bounds.tolist()
    return bool(largest == -smallest)


def _camps(values: Sequence[Any]) -> str:
    camps: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        camps.setdefault(value, []).append(rank)
    return " | ".join(ranks_text(ranks) + " lack it" * (value is None) for value, ranks in camps.items())
