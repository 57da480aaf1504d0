"""The roll call: what ranks tell each other through the process group's store, however many they are.

==============  ====================================================  ==============================================
key             holds                                                 is read by
==============  ====================================================  ==============================================
``notices/<n>`` never changed: a rank does not finish a wait, its     all, once
                program has ended by an exception, it is gone; or
                what a call has found. Deleted when all are past that
                wait
``end/<rank>``  how far a rank has come that has left, and why        who calls, or sees that its process is gone
``call/<n>``    for which wait; deleted when that is over             all, when the counter has moved
``at/<rank>``   where a rank is that a call concerns; overwritten     who has called
``host/<id>/n`` the processes of one host, in the order in which      that host's
                they came
==============  ====================================================  ==============================================

``notices``, ``ends``, ``calls`` and ``host/<id>`` are counters. Each rank reads them in one request, each
:attr:`Roll.interval`. That is all, while nothing is wrong.

A *wait* is one wrapper's backwards, or its other collectives. Its number is the same on all ranks, so a notice stays
true: another iteration is another number.

A launcher that starts ranks anew may give them the store of those before. A process that is known from a
constructor's exchange is believed by its identity, another one of this machine if it wrote after this process began,
and nobody else. No clock of another machine is read. Everything is JSON: nothing that comes from a peer is executed.

Every call here may wait for the store, and raise when it is gone: for the watchdog's thread only.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from . import processes, times
from .processes import Process

RANKS_A_SECOND = 2000  # that may look at the store
_AT_ONCE = 64  # keys in a request
_FIRST = 16  # ranks that tell of one wait, or of an end
_FILE_TIMEOUT = timedelta(seconds=5)  # a request to a file that was removed looks for it so long
_COUNTERS = ("notices", "ends", "calls")

Entry = dict[str, Any]


class Wait(NamedTuple):
    """What a rank waits for. Ranks wait for the same if ``name`` and ``number`` are equal.

    ``name``: whose, and which kind. ``what``: in words. ``here``: this rank in the default group, whose numbers all
    texts use. ``others``: those that take part. ``joins``: this rank has no data, and takes part in whatever the
    others send. ``hook``: the communication hook that sends what is waited for. ``group``: the process group's name.
    """

    name: str
    number: int
    what: str
    here: int
    others: tuple[int, ...]
    joins: bool = False
    hook: str = ""
    group: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.number

    @property
    def owner(self) -> str:
        """The wrapper's key."""
        return parted(self.name)[0]


def parted(name: str) -> tuple[str, str]:
    """The wrapper's key, and the kind of wait: "backward", "collective", or another one."""
    owner, _, kind = name.rpartition(" ")
    return owner, kind


class Place(NamedTuple):
    """How far a rank is with a wrapper. Travels as JSON.

    ``begun``: the last backward that has begun. ``done``: the last one that is over. ``collectives``: how many of its
    other collectives are over. ``words``: "in forward of iteration 3".
    """

    begun: int
    done: int
    collectives: int
    words: str


def has_done(places: dict[str, Any], key: tuple[str, int]) -> bool:
    """Whether a rank at these ``places`` has sent its part of the wait."""
    (owner, kind), number = parted(key[0]), key[1]
    if owner not in places:
        return False
    _, done, collectives, _ = places[owner]
    return 0 < number <= {"backward": done, "collective": collectives}.get(kind, 0)


class Roll:
    """One rank's view of the keys.

    Args:
        client: of the store, the watchdog's own: the program blocks it with no request.
        rank: of the default group.
        size: of the default group.
        known: processes by rank, this one's among them; grows.

    Attributes:
        store: below the era's prefix; for the questions before a step (``words.py``), too.
        interval: seconds between two looks.
        patience: seconds between two calls of a wait.
        told: this rank's notices that are in the store: of which wait, their numbers, and when.
    """

    def __init__(self, client: Any, rank: int, size: int, known: dict[int, Process]):
        self.rank, self.known = rank, known
        me = known[rank]
        # What ranks have left on a store in an earlier default group says nothing about this one. A process that
        # takes another's place counts as those do that have gone on, if the store is a new one.
        era = client.add(f"minddp/roll/groups/{rank}/{me.pid}/{me.started}", 1)
        if isinstance(bare(client), dist.FileStore):
            client.set_timeout(_FILE_TIMEOUT)
        self.store = dist.PrefixStore(f"minddp/roll/{era}", client)
        self.interval = max(times.look, size / RANKS_A_SECOND)
        self.patience = max(5 * times.look, size / (RANKS_A_SECOND / 10))  # in which a call has a result
        self._host = f"host/{me.machine or f'of {rank} alone'}"
        self._counts: dict[str, int] = {}
        self._read: dict[str, int] = {}  # of each list
        self._absent: dict[str, tuple[str, int]] = {}  # of each list, what was announced and not there, how often
        self.called: dict[tuple[str, int], int] = {}  # how many claims of a wait this rank has tried
        self._claims: list[str] = []
        self.told: list[tuple[tuple[str, int], int, float]] = []
        for counter in (*_COUNTERS, self._host):
            self.store.add(counter, 0)
        self._append(self._host, {})

    # --- each turn ---

    def look(self) -> None:
        """Reads the counters."""
        names = (*_COUNTERS, self._host)
        self._counts = dict(zip(names, map(int, self._get(names))))

    def ends(self) -> int:
        """How many ranks have left."""
        return self._counts.get("ends", 0)

    def notices(self) -> list[Entry]:
        """New ones."""
        return self._new("notices")

    def calls(self) -> list[Entry]:
        """New ones, of waits in which this rank takes part."""
        return [each for each in self._new("calls", "call") if self.rank in listed(each["ranks"])]

    def meet(self) -> list[int]:
        """Ranks of this host that have come since, in their order. Their processes are known from now on."""
        found = []
        for entry in self._new(self._host):
            self.known.setdefault(entry["by"], Process(*entry["process"]))
            found.append(entry["by"])
        return found

    def _new(self, counter: str, name: str = "") -> list[Entry]:
        found: list[Entry] = []
        while (read := self._read.get(counter, 0)) < (count := self._counts.get(counter, 0)):
            keys = [f"{name or counter}/{n}" for n in range(read + 1, min(read + _AT_ONCE, count) + 1)]
            there = keys if self.store.check(keys) else [key for key in keys if self.store.check([key])]
            missing = next((i for i, key in enumerate(keys) if key not in there), None)
            if missing is not None and name != "call":  # announced, not there yet: its writer may be gone
                before, count_before = self._absent.get(counter, ("", 0))
                times_absent = count_before + 1 if before == keys[missing] else 1
                self._absent[counter] = keys[missing], times_absent
                if times_absent < 5:
                    self._read[counter] = read + missing
                    return found + self._entries(keys[:missing])
            self._read[counter] = read + len(keys)
            found += self._entries(there)
        return found

    # --- what this rank tells ---

    def tell(self, notice: Entry) -> None:
        number = self._append("notices", notice)
        if notice["wait"] is not None:
            self.told.append((tuple(notice["wait"]), number, time.monotonic()))

    def forget_notices(self, places: dict[str, Place]) -> None:
        """Deletes what this rank has told of a wait, once it has done the next one, as all have, at these ``places``,
        and some time after all have read it. Who was stopped meanwhile passes over it."""
        before = time.monotonic() - max(times.FRESH * times.look, 3 * self.interval)
        over = [each for each in self.told if each[2] < before and has_done(places, (each[0][0], each[0][1] + 1))]
        for key, number, _ in over:
            self.delete(self.store, f"notices/{number}")
            self.delete(self.store, f"first/{key}")
        self.told = [each for each in self.told if each not in over]

    def leave(self, end: Entry) -> None:
        self.store.set(f"end/{self.rank}", self._signed(end))
        self.store.add("ends", 1)

    def answer(self, call: int, where: Entry) -> None:
        self.store.set(f"at/{self.rank}", self._signed({"call": call, **where}))

    def claims(self, what: str) -> bool:
        """Whether this rank is the first that claims it."""
        return bool(self.store.add(f"claim/{what}", 1) == 1)

    def is_among_first(self, what: str) -> bool:
        """Whether this rank is one of the first that tell of it: each rank reads each notice, and one is enough."""
        return bool(self.store.add(f"first/{what}", 1) <= _FIRST)

    def call(self, wait: Wait) -> int:
        """Asks all ranks of ``wait`` where they are; the call's number, or 0 if another rank has asked meanwhile."""
        number = self.called[wait.key] = self.called.get(wait.key, 0) + 1
        claim = f"{wait.name}/{wait.number}/{number}"
        if not self.claims(claim):
            return 0
        call = self._append("calls", {"wait": wait.key, "ranks": runs(wait.others)}, "call")
        self._claims += [f"claim/{claim}", f"call/{call}"]
        return call

    def forget_claims(self) -> None:
        """The wait is over in which this rank has called. All have read its calls, or will pass over them."""
        while self._claims:
            self.delete(self.store, self._claims.pop())
        self.called.clear()

    def _append(self, counter: str, entry: Entry, name: str = "") -> int:
        number = int(self.store.add(counter, 1))
        self.store.set(f"{name or counter}/{number}", self._signed({"number": number, **entry}))
        return number

    def _signed(self, entry: Entry) -> str:
        return json.dumps({"by": self.rank, "process": self.known[self.rank], "at": processes.now(), **entry})

    # --- what the others have told ---

    def answers(self, ranks: Sequence[int]) -> dict[int, Entry]:
        """What each of these has answered last, to whatever call."""
        return self._of("at", ranks)

    def left(self, ranks: Sequence[int]) -> dict[int, Entry]:
        """Those that have left, and what they have said."""
        return self._of("end", ranks)

    def _of(self, kind: str, ranks: Sequence[int]) -> dict[int, Entry]:
        there = self._there([f"{kind}/{rank}" for rank in ranks])
        return {entry["by"]: entry for entry in self._entries(there)}

    def _there(self, keys: list[str]) -> list[str]:
        """Those of ``keys`` that exist. One that need not exist is never waited for."""
        if not keys or self.store.check(keys):
            return keys
        half = len(keys) // 2
        return self._there(keys[:half]) + self._there(keys[half:]) if half else []

    def _entries(self, keys: Sequence[str]) -> list[Entry]:
        texts = [text for i in range(0, len(keys), _AT_ONCE) for text in self._get(keys[i : i + _AT_ONCE])]
        return [entry for entry in map(json.loads, texts) if self.is_believed(entry)]

    def is_believed(self, entry: Entry) -> bool:
        """Whether a rank of this group has written ``entry``, and not one of before that had its number."""
        rank, process, mine = entry["by"], Process(*entry["process"]), self.known[self.rank]
        if rank in self.known:
            return process == self.known[rank]
        return process.machine == mine.machine != "" and entry["at"] >= processes.began(mine)

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self.store.has_extended_api():  # type: ignore[attr-defined]  # torch's stub forgets it
            return list(self.store.multi_get(list(keys)))
        return [self.store.get(key) for key in keys]

    @staticmethod
    def delete(store: dist.Store, key: str) -> None:
        with suppress(RuntimeError, NotImplementedError):  # a store that deletes nothing
            store.delete_key(key)


def runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """``ranks``, which rise, as ranges: what all ranks read must not grow with their number."""
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, stop, step = found[-1] if found else (0, 0, 0)
        if found and (step == 0 or rank == stop - 1 + step):
            found[-1] = first, rank + 1, step or rank - first
        else:
            found.append((rank, rank + 1, 0))
    return found


def listed(ranges: Sequence[Sequence[int]]) -> list[int]:
    """:func:`runs`, undone."""
    return [rank for first, stop, step in ranges for rank in range(first, stop, step or 1)]


def bare(store: Any) -> Any:
    """Below the prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def carries(store: Any) -> bool:
    """Whether the roll call can lie in ``store``: one of torch's own."""
    return type(bare(store)) in (dist.TCPStore, dist.HashStore, dist.FileStore)


def is_there(store: Any) -> bool:
    """Whether there is still what the store lies in: a request would make a file anew that was removed."""
    store = bare(store)
    return not isinstance(store, dist.FileStore) or os.path.exists(store.path)  # type: ignore[attr-defined]


def listens(store: Any) -> bool:
    """Whether the store's host still does. After its end torch's client writes a C++ stack to stderr."""
    store = bare(store)
    if isinstance(store, dist.TCPStore):
        try:
            socket.create_connection((store.host, store.port), timeout=1.0).close()
        except OSError:
            return False
    return is_there(store)
