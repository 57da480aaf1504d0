"""Where ranks tell each other facts before a collective: beside the device, so that nobody waits for its streams.

They travel through the group's own CPU backend. A group without one (``init_process_group("nccl")``) gets a Gloo
group of the same ranks at its first call; ``init_process_group("cpu:gloo,cuda:nccl")`` needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..messages import gather_objects, wait_for

__all__ = ["CollectiveError", "compare", "everyone", "exchange", "supports"]

_WAITED_FOR = "the facts that ranks exchange before a collective of minddp.functional"


class CollectiveError(RuntimeError):
    """The ranks of a group cannot run a collective together; raised on all of them with the same text."""


def compare(text: str, flags: Sequence[bool], group: Any) -> tuple[bool, list[bool]]:
    """Whether all ranks gave the same ``text``, and for each flag whether any rank has set it. Collective.

    One maximum of a few integers: a digest is the same everywhere where its largest is its smallest. What it costs a
    rank in bytes and in Python does not grow with the number of ranks.
    """
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    values = [digest, -digest, *map(int, flags)]
    if dist.get_world_size(group) > 1:
        control = _control_group(group)
        with torch._C._DisableFuncTorch():  # inside of a transform these are the ranks' words all the same
            most = torch.tensor(values, dtype=torch.int64, device="cpu")
            wait_for(dist.all_reduce(most, dist.ReduceOp.MAX, control, async_op=True), group, _WAITED_FOR)
            values = most.tolist()
    return values[0] == -values[1], [value == 1 for value in values[2:]]


def everyone(value: Any, group: Any) -> list[Any]:
    """Every rank's ``value``, which JSON can hold, in rank order. Collective."""
    with torch._C._DisableFuncTorch():
        return gather_objects(value, _control_group(group))


def exchange(counts: Sequence[int], group: Any) -> tuple[int, ...]:
    """What each rank has in this one's place of its ``counts``, one for each rank. Collective."""
    with torch._C._DisableFuncTorch():
        sent = torch.tensor(counts, dtype=torch.int64, device="cpu")
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=_control_group(group), async_op=True)
        wait_for(work, group, _WAITED_FOR)
        return tuple(received.tolist())


_SELF = object()  # in place of the group: a value that refers to its key would keep the group alive for ever
_control_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _control_group(group: Any) -> Any:
    """The group, if it can move CPU tensors; else a Gloo group of the same ranks."""
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
        raise CollectiveError(
            "minddp.functional: the group's ranks compare their calls through Gloo, which has no usable network "
            f"interface ({'; '.join(reasons)}; ranks of the group). Set GLOO_SOCKET_IFNAME to the name of one, on "
            "that machine, or MINDDP_CHECK_COLLECTIVES=0 on all ranks."
        )
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
