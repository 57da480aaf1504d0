"""What ranks tell each other before, between and after collectives, and how a message names ranks.

It travels as JSON: nothing of it is executed.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import waiting


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of every rank of ``group``, in rank order. Collective.

    Args:
        value: what JSON can hold. A tuple comes back as a list.
    """
    mine = json.dumps(value).encode()
    if group.size() == 1:
        return [json.loads(mine)]
    return [json.loads(data) for data in _gather_bytes(mine, group)]


_FIRST, _LENGTH = 512, 8  # bytes


def _gather_bytes(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """In one collective, and in a second one what of anybody's does not fit into that."""
    parts = _gather_equal((len(mine).to_bytes(_LENGTH, "little") + mine)[:_FIRST].ljust(_FIRST, b"\0"), group)
    sizes = [int.from_bytes(part[:_LENGTH], "little") for part in parts]
    firsts, room = [part[_LENGTH:] for part in parts], _FIRST - _LENGTH
    rests = [b""] * len(sizes)
    if (longest := max(sizes)) > room:
        rests = _gather_equal(mine[room:].ljust(longest - room, b"\0"), group)
    return [(first + rest)[:size] for first, rest, size in zip(firsts, rests, sizes)]


def _gather_equal(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Of the same length on all ranks."""
    # Copied, since a group's thread may be the last one to hold it: no Python object is to be behind it.
    tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device_of(group), copy=True)
    everyone = [torch.empty_like(tensor) for _ in range(group.size())]
    waiting.all_gather(group, everyone, tensor, "what all ranks tell each other")
    return [data.cpu().numpy().tobytes() for data in everyone]


# By the group's name, since Python's object of one of torch's groups may be made anew; by the group where its class
# is one in Python, which may have no name.
_devices: dict[str, torch.device] = {}
_devices_of_own: MutableMapping[dist.ProcessGroup, torch.device] = weakref.WeakKeyDictionary()


def work_on(group: dist.ProcessGroup, device: torch.device) -> None:
    """What ranks of ``group`` tell each other travels on ``device``, where its backend does not work on the host, and
    where nobody knows: a group whose class in Python registers no backend.

    Without it on the current one, which is the first one on all ranks where nobody has set another.
    """
    if type(group) is dist.ProcessGroup:
        _devices[group.group_name] = device
    else:
        _devices_of_own[group] = device


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group's backend works, the host if it can."""
    torchs = type(group) is dist.ProcessGroup
    noted = _devices.get(group.group_name) if torchs else _devices_of_own.get(group)
    types = group._device_types
    if torch.device("cpu") in types:
        return torch.device("cpu")
    if noted is not None and (not types or noted.type == types[0].type):
        return noted
    return torch.device(types[0].type if types else "cpu")


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2": for messages."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def indented(lines: Sequence[str], at_most: int = 20) -> str:
    """The first lines of a message's list, one below the other, and how many more there are."""
    more = [f"and {len(lines) - at_most} more"] if len(lines) > at_most else []
    return "\n".join(f"  {line}" for line in [*lines[:at_most], *more])
