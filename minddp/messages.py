"""What ranks send each other outside of backward, waits for it, and how a message names ranks.

Objects travel as JSON: nothing of them is executed. A wait is over when the collective is. Its watcher is called when
it takes long or fails (``guards`` registers one). Without a watcher, and for a program's own process groups, waits
are plain.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _C


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
    all_gather(group, everyone, tensor, "what all ranks tell each other")
    return [data.cpu().numpy().tobytes() for data in everyone]


_devices: dict[int, torch.device] = {}  # by the group's id: a class of the program's may have no hash


def work_on(group: dist.ProcessGroup, device: torch.device) -> None:
    """What ranks of ``group`` tell each other travels on ``device``, where its backend does not work on the host, and
    where nobody knows: a group whose class in Python registers no backend.

    Without it on the current one, which is the first one on all ranks where nobody has set another.
    """
    if id(group) not in _devices:
        weakref.finalize(group, _devices.pop, id(group), None).atexit = False
    _devices[id(group)] = device


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group's backend works, the host if it can."""
    noted, types = _devices.get(id(group)), group._device_types
    if torch.device("cpu") in types:
        return torch.device("cpu")
    if noted is not None and (not types or noted.type == types[0].type):
        return noted
    return torch.device(types[0].type if types else "cpu")


def is_torchs(group: Any) -> bool:
    """Whether ``group`` is one of torch's, and its tables hold it: only then they may be asked about it.

    Otherwise it was destroyed (:func:`was_destroyed`); or it is the program's own, made by hand or of a class in
    Python: that may have no name or any, no hash, do anything, and change its size.
    """
    return type(group) is dist.ProcessGroup and group in dist.distributed_c10d._world.pg_map


def was_destroyed(group: Any) -> bool:
    """Whether torch's tables held ``group`` once: torch names and describes the groups that it makes."""
    is_described = type(group) is dist.ProcessGroup and "" not in (group.group_name, group.group_desc)
    return is_described and not is_torchs(group)


def global_ranks(group: Any) -> list[int] | None:
    """The number in the default group of each rank of ``group``; None: nobody knows (:func:`is_torchs`)."""
    return dist.get_process_group_ranks(group) if is_torchs(group) else None


def backend_of(group: Any) -> str:
    """The backend's name: torch's table's, or what a group says itself that it does not hold."""
    return dist.get_backend(group) if is_torchs(group) else str(group.name())


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2": for messages. The first ones, and how many more there are."""
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:20]))}{more}"


def indented(lines: Sequence[str], at_most: int = 20) -> str:
    """The first lines of a message's list, one below the other, and how many more there are."""
    more = [f"and {len(lines) - at_most} more"] if len(lines) > at_most else []
    return "\n".join(f"  {line}" for line in [*lines[:at_most], *more])


# --- waits

# What a rank waits for that has run out of data: whatever the others send next.
SHADOWED = "what the ranks that still have data send next"
# (group, what is waited for, for which time in this group, seconds so far, the collective's error or ""): may raise,
# must not block for long.
Watcher = Callable[[dist.ProcessGroup, str, int, float, str], None]
_waits: dict[tuple[str, str], int] = {}  # in each group, of each kind: ranks wait for the same if both are alike
_watcher: Watcher | None = None


class CommunicatesInForward:
    """The base of layers that call collectives in forward, with which join() refuses uneven inputs."""


def set_watcher(watcher: Watcher) -> None:
    """From now on it is called: once a second while a wait goes on, and when one has failed."""
    global _watcher
    _watcher = watcher


def _on_stall(group: Any, what: str) -> Callable[[float, str], None] | None:
    watcher = _watcher
    if watcher is None or not is_torchs(group):
        return None
    kind = group.group_name, what
    number = _waits[kind] = _waits.get(kind, 0) + 1
    return lambda seconds, error: watcher(group, what, number, seconds, error)


def wait_for(work: Any, group: Any, what: str) -> None:
    """``work.wait()``."""
    _C.wait_for(work, _on_stall(group, what))


def wait_for_future(future: Any, group: Any, what: str) -> None:
    """``future.wait()``, of a collective of ``group``."""
    _C.wait_for_future(future, _on_stall(group, what))


def broadcast_from(group: Any, tensor: torch.Tensor, src: int, what: str) -> None:
    """Rank ``src``'s tensor on all ranks of ``group``. Collective."""
    _C.group_broadcast(group, tensor, src, _on_stall(group, what))


def all_gather(group: Any, outputs: Sequence[torch.Tensor], mine: torch.Tensor, what: str) -> None:
    """Every rank's tensor, in rank order. Collective."""
    _C.group_allgather(group, outputs, mine, _on_stall(group, what))
