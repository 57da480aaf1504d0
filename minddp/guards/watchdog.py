"""Reports and reads for this process, on a thread of its own: nothing else here waits for the store.

Each process with a wrapper has one watchdog for its default group. A rank that waits for others says so each second
(:meth:`Watchdog.waits`), and reads what the thread has found until then (:meth:`Watchdog.facts`). Both return at
once, since the store may be gone, or its host stopped. The thread has a connection of its own, keeps no process group
alive, and ends with the group, the store or the interpreter.

A process that ends reports so (``atexit``), with the exception that ended it if one did. If an exception has ended
the main thread, which trained, and other threads hold the process, the watchdog's thread sees that. A process that is
killed cannot report.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from .. import environment
from ..logs import log
from . import location, times
from .evidence import Fact, Place, Wait
from .processes import Process, here, look
from .reports import Report, Reports

_EXIT_SECONDS = 1.0
_TEXT_SECONDS = 0.25  # in which an exception that nobody catches ends the program, and is reported with its text


_GARBAGE = (
    "Rank %d hears nothing of the other ranks from now on, and tells them nothing: something else than a rank of "
    "minddp's has written to its keys in the process group's store (%s)."
)


class _Thread(threading.Thread):
    """A program that joins all threads at its end need not wait for this one, which lives as long as the group."""

    def join(self, timeout: float | None = None) -> None:
        if timeout is not None:
            super().join(timeout)


class Watchdog:
    """This process's, for one default group. What several threads change is changed with :attr:`_lock` held.

    Attributes:
        reports: how it reports and reads.
        processes: by rank of the default group, as far as known.
        failures: what ranks have reported and not taken back, by rank and wrapper; ``""``: the program's end.
        client: of the group's store, once it is there.
        heard: when the last turn began that has read what ranks have reported.
        lost: the thread has ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.processes: dict[int, Process] = {rank: here()}
        self.failures: dict[int, dict[str, Report]] = {}
        self._ended: dict[int, float] = {}  # when this has first seen that a rank has failed or is gone
        self.client: dist.Store | None = None
        self.lost = self._stopping = self._heeds = False
        self._store = weakref.ref(store, lambda _: self._end_with_the_store())
        self.reports = Reports(store, rank, size, self.processes)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._sent = threading.Condition()
        self._outbox: list[Report] = []
        self._told: dict[str, str] = {}  # what this rank has reported and not taken back: words, by wrapper
        self._later: dict[str, tuple[float, str]] = {}  # when what is to be reported, by wrapper
        self._constructors: dict[str, int] = {}  # how many have failed here since all ranks were in one, by group
        self._inspectors: dict[int, weakref.ref[Any]] = {}  # StallInspectors, one a wrapper
        self._wait: tuple[float, Wait] | None = None  # when this rank was last known to wait, and for what
        self.words = ""  # of the last exception that the program may have handled, for those who ask
        self._trains = threading.main_thread()  # who has run the last forward
        self._turn_began = time.monotonic()
        self.heard = float("-inf")
        self._thread = _Thread(target=self._run, args=([store],), name="minddp: watchdog", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads: it trains without
            self.lost = True
            log.warning("Rank %d hears nothing of the other ranks, and tells them nothing: %s", rank, error)
        _living.add(self)

    # --- for any thread: at once ---

    def know(self, processes: dict[int, Process]) -> None:
        with self._lock:
            self.processes.update(processes)

    def add(self, inspector: Any) -> None:
        """Until it is gone, it is asked for its ``place()`` when somebody wants to know. If its wrapper's backward
        waits for nobody (``has_streams``), its ``heed_loss()`` is called in each turn in which a rank has ended."""
        key = id(inspector)
        self._inspectors[key] = weakref.ref(inspector, lambda _: self._inspectors.pop(key, None))

    def inspectors(self) -> list[Any]:
        found = [inspector() for inspector in list(self._inspectors.values())]
        return [inspector for inspector in found if inspector is not None]

    def note_forward(self) -> None:
        """A forward begins on this thread: where that is will be where this rank is. What it waited for is over."""
        self._trains, self._wait = threading.current_thread(), None

    def tell(self, words: str, *wrappers: str, because: Sequence[int] = (), wait: float = 0.0) -> None:
        """Reports to all ranks that this one will not come. The first words stand.

        Args:
            words: why.
            wrappers: whose iterations have failed: nobody else's, since the program may go on; none: it ends.
            because: the ranks whose failure this one follows from.
            wait: at most so many seconds until it has been reported: the process may be about to end.
        """
        with self._lock:
            for wrapper in wrappers or list(self._later):
                self._later.pop(wrapper, None)
            for wrapper in sorted(set(wrappers)) or [""]:
                if wrapper not in self._told and "" not in self._told:
                    words = words if wrapper else next(iter(self._told.values()), words)
                    self._told[wrapper] = words
                    self._outbox.append(self._message(words, wrapper, because, ends=not wrapper))
        self._wake.set()
        if wait and threading.current_thread() is not self._thread:
            with self._sent:
                self._sent.wait_for(lambda: self.lost or not self._outbox, wait)

    def tell_later(self, words: str, wrapper: str, seconds: float = _TEXT_SECONDS) -> None:
        """:meth:`tell`, unless more is known in a moment: the exception may end the program, and has a text then."""
        with self._lock:
            self._later[wrapper] = time.monotonic() + seconds, words
        self._wake.set()

    def take_back(self, wrapper: str) -> None:
        """What was told of ``wrapper`` has passed."""
        with self._lock:
            self._later.pop(wrapper, None)
            if self._told.pop(wrapper, None) is not None:
                self._outbox.append(self._message("", wrapper, over=True))
        self._wake.set()

    # Ranks may fail in a constructor alike, and try again: what one of them reports must not end the next attempt of
    # another. So failures are numbered, and a rank that has failed n times heeds another rank's failure n + 1 alone.

    def constructor_of(self, group: str, number: int = 0) -> str:
        """The name under which ranks report that a constructor in ``group`` has failed, for the ``number``-th time
        since all ranks were in one together; 0: once more than on this rank."""
        return f"{group}/constructor {number or self._constructors.get(group, 0) + 1}"

    def constructor_begins(self, group: str) -> None:
        """Others may wait for this one: what earlier ones have reported has passed."""
        for number in range(self._constructors.get(group, 0)):
            self.take_back(self.constructor_of(group, number + 1))

    def constructor_is_met(self, group: str) -> None:
        """All ranks are in one."""
        self._constructors.pop(group, None)

    def constructor_failed(self, group: str, error: BaseException) -> None:
        """Reported unless the program tries again soon."""
        words = f"its constructor of DistributedDataParallel ended with {location.exception_text(error)}"
        self._constructors[group] = self._constructors.get(group, 0) + 1
        for number in range(self._constructors[group]):
            self.tell_later(words, self.constructor_of(group, number + 1), times.SETTLED * times.look)

    def waits(self, wait: Wait) -> None:
        """This rank waits, as of now."""
        if self._waited() is None:
            self._wake.set()
        self._wait = time.monotonic(), wait

    def read_now(self) -> None:
        """What the other ranks have reported is read at once, and not at the next turn."""
        self._wake.set()

    def waits_no_more(self) -> None:
        self._wait = None

    def facts(self, wait: Wait) -> list[Fact]:
        """What is known about the ranks that are waited for, without asking anybody but this machine's kernel."""
        with self._lock:
            return [self._fact(rank, wait.fails_as or wait.awaited.wrapper) for rank in wait.others]

    def _fact(self, rank: int, wrapper: str) -> Fact:
        process, failure = self.processes.get(rank), self._failure(rank, wrapper)
        sight = None if process is None else look(process)
        if failure is not None or (sight is not None and sight.state == "gone"):
            ended_at = self._ended.setdefault(rank, time.monotonic())
        else:
            ended_at = math.inf
        return Fact(rank, process, sight, *self.reports.of(rank), failure, ended_at)

    def _failure(self, rank: int, wrapper: str) -> Report | None:
        found = self.failures.get(rank, {})
        program = found.get("")
        return program if program and not program["left"] else found.get(wrapper, program)

    def has_settled(self, facts: Sequence[Fact]) -> bool:
        """One of these has ended so long ago that what it had sent has arrived, and where the others are was asked
        anew."""
        seconds = times.SETTLED * times.look + times.ANEW * self.reports.interval
        return any(time.monotonic() - fact.ended_at >= seconds for fact in facts)

    def store_is_silent(self) -> bool:
        longest = self.reports.patience + self.reports.interval
        return self.lost or time.monotonic() - self._turn_began > max(longest, 1.0)

    # --- the thread ---

    def _run(self, stores: list[dist.Store]) -> None:
        """Empties ``stores``: a store that somebody holds keeps its port, or its file, from the next group."""
        reports = self.reports
        try:
            if not reports.has_store():
                return  # a clone would make it anew
            self.client = stores.pop().clone()  # type: ignore[attr-defined]  # torch's stub forgets it
            reports.open(self.client)
            reports.publish(self._report())
            while not self._stopping and self._group_is_there() and reports.has_store():
                self._turn()
                due = min((at for at, _ in list(self._later.values())), default=math.inf) - time.monotonic()
                self._wake.wait(0.1 * times.look if self._outbox else min(max(due, 0.0), reports.interval))
                self._wake.clear()
            if not self._stopping and "" not in self._told:
                self._leave("it has destroyed its process group")
            if self._outbox and reports.takes_a_last_word():
                self._send()
        except (dist.DistError, RuntimeError, OSError):
            pass  # the store is gone, and with it all that could be said here
        except (ValueError, LookupError, TypeError) as error:
            log.warning(_GARBAGE, reports.rank, error)
        finally:
            self.lost, self.client = True, None
            reports.close()
            with self._sent:
                self._sent.notify_all()

    def _end_with_the_store(self) -> None:
        """The program has let go of it: the thread's own goes as well. A store's host is asked for nothing that soon:
        it may be ending."""
        if not self.lost and self.reports.port is None and threading.current_thread() is not self._thread:
            self._wake.set()
            self._thread.join(_EXIT_SECONDS)

    def _group_is_there(self) -> bool:
        store = self._store()
        return store is not None and dist.is_initialized() and dist.distributed_c10d._get_default_store() is store

    def _turn(self) -> None:
        self._turn_began = time.monotonic()
        if self._trains is threading.main_thread() and not (self._trains.is_alive() or "" in self._told):
            self._tell_of_exception()
        self._tell_what_is_due(self._turn_began)
        self._send()
        self.reports.turn(self._report, self._waited() is not None or self._heeds, self._hear)
        self.heard = self._turn_began
        on_devices = [inspector for inspector in self.inspectors() if inspector.has_streams]
        with self._lock:
            has_ended = [rank for rank in self.processes if on_devices and self._fact(rank, "").has_ended]
        self._heeds = bool(on_devices and (has_ended or self.failures))
        for inspector in on_devices if self._heeds else ():
            inspector.heed_loss()

    def _hear(self, entries: list[Report]) -> None:
        with self._lock:
            for entry in entries:
                of_rank = self.failures.setdefault(entry["rank"], {})
                of_rank[entry["wrapper"]] = entry
                if entry["over"]:
                    del of_rank[entry["wrapper"]]
                if not of_rank:
                    del self.failures[entry["rank"]]
                    self._ended.pop(entry["rank"], None)

    def _tell_what_is_due(self, now: float) -> None:
        with self._lock:
            for wrapper, (due, words) in list(self._later.items()):
                if due <= now:
                    self.tell(words, wrapper)

    def _leave(self, words: str) -> None:
        """Without an exception; after one that the program has caught, that has a part in it."""
        self._tell_what_is_due(math.inf)
        self._outbox.append(self._message("; before, ".join([words, *set(self._told.values())]), left=True))

    def _send(self) -> None:
        while self._outbox:
            self.reports.tell(self._outbox[0])
            del self._outbox[0]
        with self._sent:
            self._sent.notify_all()

    def _waited(self) -> Wait | None:
        """What this rank waits for."""
        wait = self._wait
        return wait[1] if wait is not None and time.monotonic() - wait[0] < times.FRESH * times.look else None

    def places(self) -> dict[str, Place]:
        """Where this process's wrappers are, by their names."""
        found = [(inspector.key, inspector.place()) for inspector in self.inspectors()]
        return {key: place for key, place in found if place is not None}

    def _report(self) -> Report:
        wait = self._waited()
        line, is_in_collective = location.of_thread(self._trains)
        return {
            "wait": None if wait is None else wait.awaited,
            "places": self.places(),
            "line": line,
            "collective": is_in_collective,
            "words": self.words,
        }

    def _message(self, words: str, wrapper: str = "", because: Sequence[int] = (), **flags: bool) -> Report:
        """``ends``: the program ends with an exception. ``over``: the wrapper's failure has passed. ``left``: without
        one."""
        message = {"words": words, "wrapper": wrapper, "because": list(because), "places": self.places()}
        return {**message, "ends": False, "over": False, "left": False, **flags}

    def end(self) -> None:
        """The interpreter ends: says so, and lets the thread end before it does.

        A thread that comes back from a request to a stopped host while Python shuts down would abort the process.
        """
        if not self.lost and not self.store_is_silent() and "" not in self._told and not self._tell_of_exception():
            first = "" if self._group_is_there() else "it has destroyed its process group, and "
            self._leave(f"{first}its program has ended")
        self._stopping = True
        self._wake.set()
        self._thread.join(_EXIT_SECONDS if self.lost or not self.store_is_silent() else 0.0)
        if self._thread.is_alive() and self.reports.port is not None:
            _cut_connections(self.reports.port)
            self._thread.join(_EXIT_SECONDS)

    def _tell_of_exception(self) -> bool:
        """Of the one that has ended the program, if one did."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or environment.prompts():
            return False
        self.tell(f"its program ended with {location.exception_text(error)}")
        return True


def _cut_connections(port: int) -> None:
    """Ends this process's connections to a port, and with them the requests that wait there for a stopped host."""
    for fd in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed meanwhile, or no socket, or not connected
            link = socket.socket(fileno=fd)
            try:
                if link.getpeername()[1] == port:
                    link.shutdown(socket.SHUT_RDWR)
            finally:
                link.detach()


_current: Watchdog | None = None
_living: weakref.WeakSet[Watchdog] = weakref.WeakSet()  # that of a group before may not have seen yet that it is gone


def current(group: Any) -> Watchdog | None:
    """The watchdog of the default group that there is now, made at the first call; ``None``: nobody can be asked."""
    global _current
    if type(group) is not dist.ProcessGroup or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    if dist.get_world_size() == 1:
        return None
    if _current is None or _current._store() is not store:
        _current = Watchdog(store, dist.get_rank(), dist.get_world_size())
    return _current


def introduce(group: Any, processes: Sequence[Process]) -> None:
    """All ranks of ``group`` are in a constructor. Keeps who they are, by rank: while somebody is missing the store
    may not answer."""
    dog = current(group)
    if dog is not None:
        dog.constructor_is_met(group.group_name)
        dog.know(dict(zip(dist.get_process_group_ranks(group), processes)))


@atexit.register
def _last_words() -> None:
    for dog in list(_living):
        with suppress(Exception):
            dog.end()
