"""What ranks tell each other about their state, through the process group's store: keys, and how much is asked.

=================  ==================================================================================================
key                holds
=================  ==================================================================================================
``who/<rank>``     its process; written once, when the rank makes its first wrapper
``asked``          how often somebody has asked where everybody is: what idle ranks look at, one request
``place/<rank>``   its answer to the last such question
``told``           how many failures have been told, by all ranks together: one request says that there is none new
``told/<n>``       the n-th of them
``groups/...``     how many default groups a process has had on this store: keys are apart by that number
=================  ==================================================================================================

A launcher that starts ranks anew may give them the store of those before (torchrun does): what was written before
this process began was written by no rank of its group, and is passed over.

Everything is JSON: nothing that comes from a peer is executed. Every call may wait for the store, and raise when
it is gone: for the watchdog's thread only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..ranks.processes import Process, began

# A request to a file that was removed looks for it so long.
_FILE_TIMEOUT = timedelta(seconds=5)


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def port_of(store: dist.Store) -> int | None:
    """Of the host that answers for the store; ``None`` where it lies elsewhere, or in this process."""
    inner = _innermost(store)
    return inner.port if isinstance(inner, dist.TCPStore) else None


def _is_of_earlier_ranks(when: float) -> bool:
    """Whether something was written before this process began; clocks and kernels differ by a second or so."""
    return when < began() - 2


class Board:
    """One rank's view of the keys.

    What ranks have left on a store in an earlier default group says nothing about this one. So each group has keys of
    its own, by number: how many of this process's groups there have been on the store. A process that takes another's
    place counts as those do that have gone on, if the store is a new one.

    Args:
        store: used by one thread alone.
        rank: this rank, in the default group.
        process: this one.
    """

    def __init__(self, store: dist.Store, rank: int, process: Process):
        era = store.add(f"minddp/watch/groups/{rank}/{process.pid}/{process.started}", 1)
        self._store: Any = dist.PrefixStore(f"minddp/watch/{era}", store)
        self._rank = rank
        self._read = 0
        inner = _innermost(store)
        self._file = inner.path if isinstance(inner, dist.FileStore) else None  # type: ignore[attr-defined]
        if self._file is not None:
            store.set_timeout(_FILE_TIMEOUT)
        for counter in ("asked", "told"):
            self._store.add(counter, 0)

    def has_store(self) -> bool:
        """Whether there is still what the store lies in: a request would make a file that was removed anew."""
        return self._file is None or os.path.exists(self._file)

    def introduce(self, process: Process) -> None:
        self._store.set(f"who/{self._rank}", json.dumps([time.time(), *process]))

    def process(self, rank: int) -> Process | None:
        """``None``: it has not made a wrapper yet."""
        text = self._get(f"who/{rank}")
        if text is None:
            return None
        when, *process = json.loads(text)
        return None if _is_of_earlier_ranks(when) else Process(*process)

    def asked(self) -> int:
        return int(self._store.get("asked"))

    def ask(self) -> None:
        self._store.add("asked", 1)

    def answer(self, place: dict[str, Any]) -> None:
        self._store.set(f"place/{self._rank}", json.dumps(place))

    def places(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The last answers of those of ``ranks`` that have given one."""
        keys = [f"place/{rank}" for rank in ranks]
        if self._store.has_extended_api() and self._store.check(keys):
            return {rank: json.loads(text) for rank, text in zip(ranks, self._store.multi_get(keys))}
        texts = {rank: self._get(key) for rank, key in zip(ranks, keys)}
        return {rank: json.loads(text) for rank, text in texts.items() if text is not None}

    def tell(self, failure: dict[str, Any]) -> None:
        number = self._store.add("told", 1)
        self._store.set(f"told/{number}", json.dumps({"rank": self._rank, "time": time.time(), **failure}))

    def news(self) -> list[dict[str, Any]]:
        """What has been told since the last call, by any rank."""
        number = int(self._store.get("told"))
        found: list[dict[str, Any]] = []
        while self._read < number:
            text = self._get(f"told/{self._read + 1}")
            if text is None:  # announced, not there yet
                break
            self._read += 1
            entry = json.loads(text)
            if not _is_of_earlier_ranks(entry["time"]):
                found.append(entry)
        return found

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
