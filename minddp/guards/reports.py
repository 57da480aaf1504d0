"""What ranks report of themselves through the process group's store, and how the others read it.

=================  ===================================================================================================
key                holds
=================  ===================================================================================================
``asked``          how often a rank that waits has asked all ranks where they are
``report/<rank>``  a rank's process, and its answer to the last question
``failures``       how many failures all ranks have reported; ``failures/<n>`` is the n-th of them
``groups/...``     how many default groups a process has had on this store: keys are apart by that number
=================  ===================================================================================================

A rank reads the two counters once in each :attr:`Reports.interval`, in one request, and answers a new question. A
rank that waits reads all reports, too, and asks again if nobody has since it last looked. So a rank makes three
requests in an interval, and all ranks together make few more than :data:`REQUESTS_A_SECOND`, however many wait.

A launcher that starts ranks anew may give them the store of those before. A process that is known from the
constructor's exchange is believed by its identity, another one of this machine if it wrote after this process began,
and nobody else. No clock of another machine is read.

Everything is JSON: nothing that comes from a peer is executed. Every call may wait for the store, and raise when it
is gone: for the watchdog's thread only. :meth:`Reports.of` alone returns at once, on any thread.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import processes, times
from .processes import Process

REQUESTS_A_SECOND = 100
_FILE_TIMEOUT = timedelta(seconds=5)  # a request to a file that was removed looks for it so long

Report = dict[str, Any]


class Reports:
    """One rank's view of the keys. Until :meth:`open` and after :meth:`close` nobody has said anything.

    Args:
        store: where the keys will lie; is not kept.
        rank, size: of the default group.
        known: processes by rank, this one's among them; grows.
        clock: seconds, of this process alone.

    Attributes:
        is_settled: this rank waits, and the others have had time to answer since.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        known: dict[int, Process],
        clock: Callable[[], float] = time.monotonic,
    ):
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._file = store.path if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]
        self.port: int | None = store.port if isinstance(store, dist.TCPStore) else None
        self._host = store.host if isinstance(store, dist.TCPStore) else ""
        self._store: Any = None
        self.rank, self._size, self._clock, self._known = rank, size, clock, known
        self.interval = max(times.look, 3 * size / REQUESTS_A_SECOND)
        self.patience = 2 * (self.interval + times.look)  # in which a rank that can answer does
        self._question, self._read = 0, 0  # the last question, and how many failures this rank has read
        self._all_have_reported = False
        self._waits_no_more()

    def _waits_no_more(self) -> None:
        self._before = 0  # the last question before this rank has waited
        self._questions: list[tuple[float, int]] = []  # since then, and when it has seen each
        self._seen: dict[int, tuple[Report | None, bool]] = {}
        self.is_settled = False

    def open(self, client: dist.Store) -> None:
        """``client``: of the store, this thread's own: the program blocks it with no request.

        What ranks have left on a store in an earlier default group says nothing about this one. A process that takes
        another's place counts as those do that have gone on, if the store is a new one.
        """
        process = self._known[self.rank]
        era = client.add(f"minddp/watch/groups/{self.rank}/{process.pid}/{process.started}", 1)
        if self._file is not None:
            client.set_timeout(_FILE_TIMEOUT)
        self._store = dist.PrefixStore(f"minddp/watch/{era}", client)
        for counter in ("asked", "failures"):
            self._store.add(counter, 0)

    def close(self) -> None:
        self._store = None
        self._waits_no_more()

    def has_store(self) -> bool:
        """Whether there is still what the store lies in: a request would make a file anew that was removed."""
        return self._file is None or os.path.exists(self._file)

    def takes_a_last_word(self) -> bool:
        """Whether the store's host still listens. After its end torch's client writes a C++ stack to stderr."""
        if self.port is not None:
            try:
                socket.create_connection((self._host, self.port), timeout=1.0).close()
            except OSError:
                return False
        return self.has_store()

    def turn(self, report: Callable[[], Report], waits: bool, hear: Callable[[list[Report]], None]) -> None:
        """Answers a new question; asks and reads for a rank that waits; gives ``hear`` new failures.

        A rank that gives up reports why before it waits no more. So ``hear`` gets its failure before :meth:`of` says
        that it does not wait.
        """
        asked, failures = map(int, self._get("asked", "failures"))
        is_new, self._question = asked != self._question, asked
        if is_new:
            self.publish(report())
        if not waits:
            self._waits_no_more()
            return hear(self._news(failures))
        if not is_new:
            self._store.add("asked", 1)
        if not self._questions:
            self._before = asked - is_new
        self._questions.append((self._clock(), asked))
        reports, failures = self._all_reports()
        hear(self._news(failures))
        self._see(reports)

    def publish(self, report: Report) -> None:
        self._store.set(f"report/{self.rank}", self._signed(report | {"question": self._question}))

    def tell(self, failure: Report) -> None:
        self._store.set(f"failures/{self._store.add('failures', 1)}", self._signed(failure))

    def _signed(self, what: Report) -> str:
        return json.dumps({"rank": self.rank, "process": self._known[self.rank], "at": processes.now(), **what})

    def of(self, rank: int) -> tuple[Report | None, bool]:
        """What a rank has answered since this one waits, and whether it is silent: it has not answered for long."""
        return self._seen.get(rank, (None, False))

    def _all_reports(self) -> tuple[list[Report], int]:
        """Those that there are, and how many failures there were after they were written."""
        keys = [f"report/{rank}" for rank in range(self._size)]
        self._all_have_reported = self._all_have_reported or self._store.check(keys)
        if not self._all_have_reported:
            keys = [key for key in keys if self._store.check([key])]
        *texts, failures = self._get(*keys, "failures")
        return [json.loads(text) for text in texts], int(failures)

    def _see(self, reports: list[Report]) -> None:
        due = max((number for at, number in self._questions if self._clock() - at > self.patience), default=-1)
        seen: dict[int, tuple[Report | None, bool]] = dict.fromkeys(range(self._size), (None, due >= 0))
        for report in reports:
            rank, answered = report["rank"], report["question"]
            if self.is_believed(rank, report):
                self._known.setdefault(rank, Process(*report["process"]))
                seen[rank] = report if answered > self._before else None, answered < due
        self._seen, self.is_settled = seen, due >= 0

    # --- failures ---

    def _news(self, number: int) -> list[Report]:
        found: list[Report] = []
        while self._read < number:
            key = f"failures/{self._read + 1}"
            if not self._store.check([key]):  # announced, not there yet
                break
            self._read += 1
            found.append(json.loads(*self._get(key)))
        return [each for each in found if each["rank"] != self.rank and self.is_believed(each["rank"], each)]

    def is_believed(self, rank: int, entry: Report) -> bool:
        """Whether a rank of this group has written ``entry``, and not one of before that had its number."""
        process, mine = Process(*entry["process"]), self._known[self.rank]
        if rank == self.rank:
            return True
        if rank in self._known:
            return process == self._known[rank]
        return process.machine == mine.machine != "" and entry["at"] >= processes.began(mine)

    def _get(self, *keys: str) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(list(keys)))
        return [self._store.get(key) for key in keys]
