"""All ranks' parts of a trace, brought to rank 0 through the process group's store."""

from __future__ import annotations

import json
import os
import platform
import time
import zlib
from typing import Any

import torch.distributed as dist

from ..logs import log
from .step_times import wrong_part
from .store import NoAnswer, ask, comes, forget

_AT_ONCE = 1.0  # seconds that a trace's begin may take
_HAND_IN = 10.0


def clock_identity() -> str:
    """Equal in two processes only if they read the same CLOCK_MONOTONIC."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # no Linux: never taken for another process's clock
        return f"{platform.node()} {os.getpid()}"


class Ranks:
    """The ranks of the default group, whose store is kept: the group may be gone when the trace closes.

    Args:
        path: the trace's. Ranks of one trace name the same file.
        alone: there is no group.
    """

    def __init__(self, path: str, alone: bool = False):
        self.rank, self.world_size = 0, 1
        self._store: Any = None
        if alone:
            return
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._prefix = f"minddp/trace/{os.path.basename(path)}"
        if self.world_size > 1:
            # An earlier trace of this name may have left this rank's part behind, if nobody has waited for it.
            self._ask(lambda store: forget(store, [str(self.rank)]), _AT_ONCE)

    def _ask(self, errand: Any, seconds: float) -> Any:
        """What the errand returns; ``None`` where the store does not answer, which is logged."""
        try:
            if self._store is None:
                self._store = dist.distributed_c10d._get_default_store()
            return ask(self._store, self._prefix, seconds, errand)
        except (NoAnswer, LookupError, ValueError) as error:  # a group that is written in Python may have no store
            log.warning("trace: rank %d does not reach the other ranks: %s", self.rank, error)
            return None

    def gather(self, modules: list[dict[str, Any]], patience: float) -> list[dict[str, Any]]:
        """On rank 0 its own part, and those that came within ``patience`` seconds; nothing on the other ranks."""
        place = {"host": platform.node(), "pid": os.getpid(), "clock": clock_identity()}
        part: dict[str, Any] = {"rank": self.rank, **place, "modules": modules}
        if self.rank > 0:
            data = zlib.compress(json.dumps(part).encode())
            self._ask(lambda store: store.set(str(self.rank), data), _HAND_IN)
            return []
        parts = [part]
        if self.world_size > 1:
            self._ask(lambda store: self._receive(store, parts, patience), patience + _HAND_IN)
        return parts

    def _receive(self, store: Any, parts: list[dict[str, Any]], patience: float) -> None:
        deadline = time.monotonic() + patience
        for rank in range(1, self.world_size):
            if not comes(store, [str(rank)], deadline - time.monotonic(), 1):
                continue
            try:
                theirs = json.loads(zlib.decompress(store.get(str(rank))))
                why = wrong_part(theirs)
            except (ValueError, zlib.error) as error:
                why = str(error)
            if why:
                log.warning("trace: rank %d's part cannot be read: %s", rank, why)
            else:
                parts.append(theirs)
            forget(store, [str(rank)])
