"""Waiting for the other ranks, outside of backward, with a watcher that hears when it takes long or fails.

Each function is over when the collective is. Who watches (``guards``) registers here, since rooms know only those
below them; without a watcher, and for process groups written in Python, these are plain waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _C

# What a rank waits for that has run out of data: whatever the others send next.
SHADOWED = "what the ranks that still have data send next"
# (group, what is waited for, seconds so far, the collective's error or ""): may raise, must not block for long.
Watcher = Callable[[dist.ProcessGroup, str, float, str], None]
_watcher: Watcher | None = None


class CommunicatesInForward:
    """The base of layers that call collectives in forward, with which join() refuses uneven inputs."""


def set_watcher(watcher: Watcher) -> None:
    """From now on it is called: once a second while a wait goes on, and when one has failed."""
    global _watcher
    _watcher = watcher


def _on_stall(group: Any, what: str) -> Callable[[float, str], None] | None:
    watcher = _watcher
    if watcher is None or type(group) is not dist.ProcessGroup:
        return None
    return lambda seconds, error: watcher(group, what, seconds, error)


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
