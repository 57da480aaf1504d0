"""What ranks tell each other about their state, through the process group's store: keys, and who asks whom.

=================  ===================================================================================================
key                holds
=================  ===================================================================================================
``asked``          how often somebody has asked all ranks where they are
``failures``       how many failures have been reported, by all ranks together; ``failures/<n>`` is the n-th
``summary``        where all ranks are, as one of those that wait has read it
``report/<rank>``  a rank's process, and its answer to the last question
``groups/...``     how many default groups a process has had on this store: keys are apart by that number
=================  ===================================================================================================

A turn of a rank is one request, for the first three keys. Of the ranks that wait one asks, the lowest as far as they
know: it reads all reports in one request more, and writes the summary that the others read. So all ranks together
make at most :data:`REQUESTS_A_SECOND`, however many wait.

A launcher that starts ranks anew may give them the store of those before. A process that is known from the
constructor's exchange is believed by its identity, another one of this machine if it wrote after this process began,
and nobody else. No clock of another machine is read.

Everything is JSON: nothing that comes from a peer is executed. Every call may wait for the store, and raise when it
is gone: for the watchdog's thread only.
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
_LISTED = 16  # absent ranks whose reports stand in a summary

Report = dict[str, Any]


class Reports:
    """One rank's view of the keys. Until :meth:`open` and after :meth:`close` nobody has said anything.

    Args:
        store: where the keys will lie; is not kept.
        rank, size: of the default group.
        known: processes by rank, this one's among them; grows.
        clock: seconds, of this process alone.
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
        self._rank, self._size, self._clock, self._known = rank, size, clock, known
        self.interval = max(times.look, 2 * size / REQUESTS_A_SECOND)  # a request and an answer a turn
        self.patience = 2 * (self.interval + times.look)  # in which a rank that can answer does
        self._question, self._read = 0, 0
        self._asks: list[
            tuple[float, int]
        ] = []  # when this rank has asked without a pause, and the questions' numbers
        self._waits_since: float | None = None
        self._summary_text, self._summary_since = "", float("-inf")
        self._summary: dict[str, Any] = {}

    def open(self, client: dist.Store) -> None:
        """``client``: of the store, this thread's own: the program blocks it with no request.

        What ranks have left on a store in an earlier default group says nothing about this one. A process that takes
        another's place counts as those do that have gone on, if the store is a new one.
        """
        process = self._known[self._rank]
        era = client.add(f"minddp/watch/groups/{self._rank}/{process.pid}/{process.started}", 1)
        if self._file is not None:
            client.set_timeout(_FILE_TIMEOUT)
        self._store = dist.PrefixStore(f"minddp/watch/{era}", client)
        for counter in ("asked", "failures"):
            self._store.add(counter, 0)
        self._store.compare_set("summary", "", "{}")

    def close(self) -> None:
        self._store = self._waits_since = None

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
        """Answers who asks, asks where nobody does for the ranks that wait, and gives ``hear`` new failures.

        A rank that gives up tells why, and waits no more: ``hear`` has its failure before :meth:`of` says that it
        does not wait.
        """
        asked, failures, summary = self._get("asked", "failures", "summary")
        if int(asked) != self._question:
            self._question = int(asked)
            self.publish(report())
        hear(self._news(int(failures)))
        if waits:
            self._follow_or_ask(summary.decode(), hear)
        else:
            self._waits_since = None
            self._asks.clear()

    def publish(self, report: Report) -> None:
        mine = {"question": self._question, "process": self._known[self._rank], "at": processes.now(), **report}
        self._store.set(f"report/{self._rank}", json.dumps(mine))

    def tell(self, failure: Report) -> None:
        number = self._store.add("failures", 1)
        mine = {"rank": self._rank, "process": self._known[self._rank], "at": processes.now(), **failure}
        self._store.set(f"failures/{number}", json.dumps(mine))

    def of(self, rank: int) -> tuple[Report | None, bool]:
        """What the summary says of a rank: its report, and whether it is silent."""
        if self._waits_since is None or self._summary_since < self._waits_since:
            return None, False
        for wait, ranks in self._summary["waiting"]:
            if any(first <= rank <= last for first, last in ranks):
                return {"wait": wait, "places": {}, "line": "", "words": ""}, False
        return self._summary["absent"].get(str(rank)), rank in self._summary["silent"]

    def has_summary(self) -> bool:
        """Whether ranks have had time to answer since this one waits."""
        return self._waits_since is not None and self._summary_since >= self._waits_since and self._summary["settled"]

    # --- who asks ---

    def _follow_or_ask(self, summary: str, hear: Callable[[list[Report]], None]) -> None:
        now = self._clock()
        if self._waits_since is None:
            self._waits_since, self._summary_text = now, summary
        if summary != self._summary_text:
            self._take(summary)
        heard = self._summary_since >= self._waits_since
        follows = heard and self._summary["by"] < self._rank
        # The lowest begins at once, the others one after the other, where nobody has begun.
        patience = 3 * self.interval * (1.0 if follows else self._rank / self._size)
        if now - max(self._summary_since, self._waits_since) >= patience or (self._asks and not follows):
            self._ask(now, hear)
        else:
            self._asks.clear()

    def _take(self, summary: str) -> None:
        self._summary_text, self._summary, self._summary_since = summary, json.loads(summary), self._clock()
        for rank, process in self._summary["strangers"].items():
            self._known.setdefault(int(rank), Process(*process))

    def _ask(self, now: float, hear: Callable[[list[Report]], None]) -> None:
        if not self._asks or now - self._asks[-1][0] >= 2 * self.interval:
            self._asks.append((now, self._store.add("asked", 1)))
        first = self._asks[0][1]
        due = max((number for asked, number in self._asks if now - asked > self.patience), default=-1)
        waiting: dict[str, list[list[int]]] = {}
        absent: dict[int, Report | None] = {}
        strangers: dict[int, list[Any]] = {}
        silent: list[int] = []
        for rank, report in enumerate(self._all_reports()):
            if report is not None and not self.is_believed(rank, report):
                report = None
            if report is not None and len(strangers) < _LISTED and rank not in self._known:
                strangers[rank] = report["process"]
            answered = -1 if report is None else report["question"]
            if answered < due:
                silent.append(rank)
            elif report is not None and report["wait"] and answered >= first:
                _add_to_ranges(waiting.setdefault(json.dumps(report["wait"]), []), rank)
                continue
            if len(absent) < _LISTED:
                absent[rank] = report if answered >= first else None
        said = [(json.loads(wait), ranks) for wait, ranks in waiting.items()]
        facts = {"by": self._rank, "turn": now, "waiting": said, "absent": absent, "silent": silent}
        facts["strangers"] = strangers
        hear(self._news(int(*self._get("failures"))))
        self._take(json.dumps(facts | {"settled": due >= 0}))
        self._store.set("summary", self._summary_text)

    def _all_reports(self) -> list[Report | None]:
        keys = [f"report/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            return [json.loads(text) for text in self._get(*keys)]
        return [json.loads(*self._get(key)) if self._store.check([key]) else None for key in keys]

    # --- failures ---

    def _news(self, number: int) -> list[Report]:
        found: list[Report] = []
        while self._read < number:
            key = f"failures/{self._read + 1}"
            if not self._store.check([key]):  # announced, not there yet
                break
            self._read += 1
            entry = json.loads(*self._get(key))
            if entry["rank"] != self._rank:
                found.append(entry)
        return [entry for entry in found if self.is_believed(entry["rank"], entry)]

    def is_believed(self, rank: int, entry: Report) -> bool:
        """Whether a rank of this group has written ``entry``, and not one of before that had its number."""
        process, mine = Process(*entry["process"]), self._known[self._rank]
        if rank == self._rank:
            return True
        if rank in self._known:
            return process == self._known[rank]
        return process.machine == mine.machine != "" and entry["at"] >= processes.began(mine)

    def _get(self, *keys: str) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(list(keys)))
        return [self._store.get(key) for key in keys]


def _add_to_ranges(ranges: list[list[int]], rank: int) -> None:
    if ranges and ranges[-1][1] == rank - 1:
        ranges[-1][1] = rank
    else:
        ranges.append([rank, rank])
