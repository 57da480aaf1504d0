"""Where ranks tell each other numbers before a collective: beside the device, so that nobody waits for its streams.

They travel through the group's own CPU backend. A group without one (``init_process_group("nccl")``) gets a Gloo
group of the same ranks at its first call, once all of them have said that Gloo finds a network interface. Where one
has none, the numbers travel on the device, and the log says so: each call then waits until the device comes to it.
``init_process_group("cpu:gloo,cuda:nccl")`` needs neither.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..logs import log
from ..messages import gather_objects, wait_for

__all__ = ["all_gather_ints", "ints_from_root", "supports"]

_WAITED_FOR = "the facts that ranks exchange before a collective of minddp.functional"


def all_gather_ints(values: list[int], group: Any) -> list[list[int]]:
    """Every rank's ``values``, in rank order. Collective."""
    size = dist.get_world_size(group)
    if size == 1:
        return [values]
    control = _control_group(group)
    if control is None:
        return gather_objects(values, group)
    sent = torch.tensor(values, dtype=torch.int64).repeat(size)
    received = torch.empty_like(sent)
    # An all_to_all of copies: Gloo posts all its messages at once, where its all_gather goes round a ring.
    work = dist.all_to_all_single(received, sent, group=control, async_op=True)
    wait_for(work, group, _WAITED_FOR)
    rows: list[list[int]] = received.view(size, -1).tolist()
    return rows


def ints_from_root(values: list[int] | None, root: int, group: Any) -> list[int]:
    """The root's ``values``, one for each rank of the group. Collective."""
    size = dist.get_world_size(group)
    if size == 1:
        return list(values or [])
    control = _control_group(group)
    if control is None:
        rows: list[list[int]] = gather_objects(values or [], group)
        return rows[root]
    ints = torch.tensor(values if values is not None else [0] * size, dtype=torch.int64)
    wait_for(dist.broadcast(ints, group=control, group_src=root, async_op=True), group, _WAITED_FOR)
    return list(ints.tolist())


_SELF = object()  # in place of the group: a value that refers to its key would keep the group alive for ever
_control_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _control_group(group: Any) -> Any:
    """The group, if it can move CPU tensors; else a Gloo group of the same ranks; ``None``: it cannot be made."""
    if group not in _control_groups:
        _control_groups[group] = _SELF if supports(group, "cpu") else _companion(group)
    found = _control_groups[group]
    return group if found is _SELF else found


def supports(group: Any, device: str) -> bool:
    """Whether the group has a backend for such a device."""
    try:
        group._get_backend(torch.device(device))
    except RuntimeError:
        return False
    return True


def _companion(group: Any) -> Any:
    """Made by all ranks or by none: one that could not would leave the others waiting for it."""
    refusals = gather_objects(_gloo_refuses(), group)
    reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(refusals) if reason]
    if reasons:
        log.warning(_without_gloo(reasons))
        return None
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def _gloo_refuses() -> str:
    """Why Gloo finds no way to the other ranks here; empty where it does. Talks to nobody."""
    if not dist.is_gloo_available():
        return "this torch has no Gloo"
    try:
        dist.ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _without_gloo(reasons: list[str]) -> str:
    return (
        "minddp.functional: what the group's ranks agree on before a collective travels on the device, and each call "
        f"waits for it there, since Gloo has no usable network interface ({'; '.join(reasons)}; ranks of the group). "
        "Set GLOO_SOCKET_IFNAME to the name of one, on that machine, or MINDDP_CHECK_COLLECTIVES=0 on all ranks."
    )
