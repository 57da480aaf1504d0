"""All ranks' parts of a trace, and the offsets of their clocks, brought to rank 0 through a store."""

from __future__ import annotations

import json
import os
import platform
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..logs import log

_PINGS = 16


def this_process() -> dict[str, Any]:
    """Where this process runs, and whose clock it reads."""
    return {"host": platform.node(), "pid": os.getpid(), "clock": clock_identity()}


def clock_identity() -> str:
    """Equal in two processes only if they read the same CLOCK_MONOTONIC."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # no Linux: never taken for another process's clock
        return f"{platform.node()} {os.getpid()}"


@dataclass
class Ranks:
    """All ranks' parts, brought to rank 0 through a store; ``store`` is None for a single process."""

    store: Any
    rank: int
    world_size: int

    def announce(self) -> None:
        """Publishes whose clock this rank reads, so that nobody has to wait for it later. An earlier trace of the
        same name may have left this rank's part behind, if nobody has waited for it."""
        self.store.delete_key(f"part{self.rank}")
        self.store.set(f"clock{self.rank}", clock_identity())

    def gather(self, part: dict[str, Any], timeout: timedelta) -> list[dict[str, Any]] | None:
        """On rank 0 the parts that came within ``timeout``, with ``offset_ns`` and ``error_ns`` of each
        rank's clock from rank 0's; None on other ranks, which wait only to have their clocks measured."""
        part = {**part, "rank": self.rank, "offset_ns": 0, "error_ns": 0}
        if self.world_size == 1:
            return [part]
        if self.rank == 0:
            return [part, *self._receive(timeout)]
        try:
            self.store.set(f"part{self.rank}", zlib.compress(json.dumps(part).encode()))
            self._answer_pings(timeout)
        except RuntimeError as error:  # rank 0, and the store with it, has gone
            log.warning("trace: rank %d could not hand in its part: %s", self.rank, error)
        return None

    def _receive(self, timeout: timedelta) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + timeout.total_seconds()
        for rank in range(1, self.world_size):
            left = timedelta(seconds=deadline - time.monotonic())
            if not self._came(f"part{rank}", left):
                continue
            part = json.loads(zlib.decompress(self._take(f"part{rank}")))
            if part["clock"] != clock_identity():
                part["offset_ns"], part["error_ns"] = self._ping(rank, left)
            yield part

    def _take(self, key: str) -> bytes:
        """The value of ``key``, which is gone then: a later trace of the same name must not find it."""
        value: bytes = self.store.get(key)
        self.store.delete_key(key)
        return value

    def _came(self, key: str, timeout: timedelta) -> bool:
        if timeout <= timedelta(milliseconds=1):  # which stores take for no limit
            return bool(self.store.check([key]))
        try:
            self.store.wait([key], timeout)
        except RuntimeError:  # FileStore raises no DistError
            return False
        return True

    def _ping(self, rank: int, timeout: timedelta) -> tuple[int | None, int | None]:
        """``rank``'s clock minus this one's and the bound on its error; None where no answer came."""
        best: tuple[int, int] | None = None
        for turn in range(_PINGS):
            begin = time.monotonic_ns()
            self.store.set(f"ping{rank}.{turn}", b"")
            if not self._came(f"pong{rank}.{turn}", timeout):
                break
            trip = time.monotonic_ns() - begin
            theirs = int(self._take(f"pong{rank}.{turn}"))
            if best is None or trip / 2 < best[1]:
                best = theirs - (begin + trip // 2), trip // 2 + 1
        return best or (None, None)

    def _answer_pings(self, timeout: timedelta) -> None:
        if not self._came("clock0", timeout) or self.store.get("clock0").decode() == clock_identity():
            return
        for turn in range(_PINGS):
            if not self._came(f"ping{self.rank}.{turn}", timeout):
                return
            now = time.monotonic_ns()
            self.store.set(f"pong{self.rank}.{turn}", str(now))
            self.store.delete_key(f"ping{self.rank}.{turn}")
