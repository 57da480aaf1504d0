"""Asks and answers for this process, on a thread of its own: nothing else here waits for the store.

Overview
    Each process with a wrapper has one watchdog for its default group. Once a second (less often where there are more
    than a hundred ranks, so that all together make at most a hundred requests a second) it looks whether anybody asks
    where this rank is, and answers: which iteration and phase, what is missing, which line of the program. A rank
    that waits for others says so each second (:meth:`Watchdog.waits`, which returns at once), and reads what the
    thread has found until then (:meth:`Watchdog.facts`; ``verdict.py`` says what follows from it).

What always holds
    The waiting thread never waits for the store: it may be gone, or its host stopped. The thread has a connection of
    its own, keeps no process group alive, and ends with the group, the store or the interpreter.

A process that ends tells so (``atexit``), with the exception that ended it if one did; one that nobody catches is
told at once, since other threads may hold the process. A process that is killed cannot.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..ranks.processes import Process, here, look
from .board import Board, port_of
from .verdict import Fact, Wait
from .whereabouts import Progress, exception_text, training_threads

REQUESTS_A_SECOND = 100  # of all ranks together, while nobody waits
_EXIT_SECONDS = 1.0

Place = Callable[[], tuple[str, dict[str, Any]] | None]  # where a wrapper is, under a name that ranks share


class Watchdog:
    """This process's, for one default group. Dictionaries change, and are gone through, with :attr:`_lock` held.

    Attributes:
        processes: by rank of the default group, as far as known.
        failures: what ranks have told and not taken back: ``{"rank", "words", "because", "over"}``, by rank.
        absent: with :meth:`listen`, ranks that have told of a failure, or whose process on this machine is gone.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.rank, self.size = rank, size
        self.processes: dict[int, Process] = {rank: here()}
        self.failures: dict[int, dict[str, Any]] = {}
        self.absent: frozenset[int] = frozenset()
        self.interval = max(1.0, size / REQUESTS_A_SECOND)
        self._store = weakref.ref(store)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._turn_over = threading.Condition()
        self._outbox: deque[dict[str, Any]] = deque()
        self._places: dict[int, Place] = {}
        self._listens = False
        self._wait: tuple[float, Wait] | None = None  # when this rank was last known to wait, and for what
        self._urgent = False
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}
        self._question = -1  # the last one that this rank has answered
        self._asked = float("-inf")  # when somebody last asked
        self._asked_since: float | None = None  # since when this rank has been asking, without a pause
        self._asked_for = ""
        self._gone: dict[int, float] = {}
        self._stopped: dict[int, float] = {}  # since when it has been seen so
        self._words = ""
        self._told = self._thread_ended = False
        self._trains: dict[threading.Thread, float] = {}  # who has run forwards, and when the last of each began
        self._progress = Progress()
        self._turn_began = time.monotonic()
        self._stopping = self.lost = False
        self._heard = float("-inf")  # when the last turn began that has read what was told
        self._port = port_of(store)
        self._thread = threading.Thread(target=self._run, args=(store,), name="minddp: watchdog", daemon=True)
        self._thread.start()

    @property
    def patience(self) -> float:
        """Seconds in which a rank that can answer does."""
        return 2 * self.interval + 2

    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def same_group(self, store: dist.Store) -> bool:
        return self._store() is store

    # --- for any thread: at once ---

    def know(self, processes: dict[int, Process]) -> None:
        with self._lock:
            self.processes.update(processes)

    def add_place(self, place: Place) -> Callable[[], None]:
        """``place`` is asked for when somebody wants to know; returns what takes it away again."""
        key = id(place)
        self._places[key] = place
        return lambda: self._places.pop(key, None) and None

    def listen(self) -> None:
        """From now on :attr:`absent` is looked after, also while nobody waits: one more request a turn."""
        if not self._listens:
            self._listens = True
            self.interval = max(1.0, 2 * self.size / REQUESTS_A_SECOND)

    def note_thread(self) -> None:
        """A forward begins on this thread: where that is will be where this rank is. What it waited for is over."""
        thread = threading.current_thread()
        if thread not in self._trains:
            self._trains = {old: began for old, began in self._trains.items() if old.is_alive()}
        self._trains[thread] = time.monotonic()
        self._wait = None
        self._thread_ended = False

    def note_uncaught(self, error: BaseException) -> None:
        """An exception has ended this thread, and not the process where other threads hold that.

        Without the main thread a program is over; without another one it may begin again.
        """
        thread = threading.current_thread()
        if thread is not max(list(self._trains), key=self._trains.__getitem__, default=None):
            return
        if thread is threading.main_thread():
            self.tell(_ended_with(error))
        else:
            self.note_words(f"{exception_text(error)}, which ended the thread that trained")
            self._thread_ended = True

    def note_words(self, words: str) -> None:
        """Of an exception that the program may handle: told only to those who ask where this rank is."""
        self._words = words

    def tell(self, words: str, because: Sequence[int] = (), over: bool = False, wait: float = 0.0) -> None:
        """Tells all ranks that this one will not come, or (``over``) that this has passed. The first words stand.

        Args:
            words: why.
            because: the ranks whose failure this one follows from.
            over: what was told before holds no more.
            wait: at most so many seconds until it has been told: the process may be about to end.
        """
        if self._told and not over:
            return
        self._told = not over
        self._outbox.append(_message(words, because, over))
        self._wake.set()
        if wait and threading.current_thread() is not self._thread:
            with self._turn_over:
                self._turn_over.wait_for(lambda: self.lost or not self._outbox, wait)

    def waits(self, wait: Wait, urgent: bool) -> None:
        """This rank waits, as of now. ``urgent``: it has lost a peer, and wants to know whom."""
        self._wait, self._urgent = (time.monotonic(), wait), urgent
        self._wake.set()

    def waits_no_more(self) -> None:
        self._wait, self._urgent = None, False

    def facts(self, ranks: Sequence[int]) -> list[Fact]:
        """What is known about ``ranks`` (of the default group) without asking anybody but this machine's kernel."""
        now, facts = time.monotonic(), []
        with self._lock:
            for rank in ranks:
                process = self.processes.get(rank)
                when, place = self._answers.get(rank, (float("-inf"), None))
                fresh = now - when < 2 * self.patience
                since = max(when, now if self._asked_since is None else self._asked_since)
                sight = None if process is None else look(process)
                if sight is not None and sight.state == "stopped":
                    since = self._stopped.setdefault(rank, now)
                else:
                    self._stopped.pop(rank, None)
                distant = process is not None and process.network != self.processes[self.rank].network
                known = (rank, process, sight, self.failures.get(rank), place if fresh else None, distant)
                facts.append(Fact(*known, lasts=now - since))
        return facts

    def first_seen_gone(self, ended: Sequence[Any]) -> float:
        """Seconds since the first of these facts was handed out with its rank gone."""
        now = time.monotonic()
        return max(now - self._gone.setdefault(fact.rank, now) for fact, _ in ended)

    def has_asked_for(self, seconds: float) -> bool:
        """Whether the store works, and ranks have had ``seconds`` to answer."""
        since = self._asked_since
        return not self.store_is_silent() and since is not None and time.monotonic() - since > seconds

    def has_heard_since(self, when: float) -> bool:
        """Whether what ranks have told was read in a turn that began later."""
        return self._heard > when

    def store_is_silent(self) -> bool:
        return self.lost or time.monotonic() - self._turn_began > self.patience + self.interval

    # --- the thread ---

    def _run(self, store: dist.Store | None) -> None:
        try:
            assert store is not None
            mine, store = store.clone(), None  # type: ignore[attr-defined]  # torch's stub forgets it
            board = Board(mine, self.rank, self.processes[self.rank])
            board.introduce(self.processes[self.rank])
            while not self._stopping and self._group_is_there() and board.has_store():
                self._turn(board)
                self._wake.wait(self._pause())
                self._wake.clear()
            if not self._stopping and not self._told:
                self._outbox.append(_message("it has destroyed its process group", left=True))
            if board.has_store():
                self._send(board)
        except (dist.DistError, RuntimeError, OSError, ValueError):
            pass  # the store is gone, and with it all that could be said here
        finally:
            self.lost = True
            with self._turn_over:
                self._turn_over.notify_all()

    def _group_is_there(self) -> bool:
        store = self._store()
        return store is not None and dist.is_initialized() and dist.distributed_c10d._get_default_store() is store

    def _pause(self) -> float:
        if self._outbox or self._urgent:
            return 0.1
        return self.interval

    def _turn(self, board: Board) -> None:
        self._turn_began = time.monotonic()
        self._send(board)
        question = board.asked()
        if question != self._question:
            self._question, self._asked = question, time.monotonic()
            board.answer({"question": question, **self._place()})
        if self._listens or self._is_waiting():
            self._hear(board)
        if self._is_waiting():
            self._ask(board)
        else:
            self._asked_since = None

    def _send(self, board: Board) -> None:
        while self._outbox:
            board.tell(self._outbox[0])
            self._outbox.popleft()
        with self._turn_over:
            self._turn_over.notify_all()

    def _hear(self, board: Board) -> None:
        for entry in board.news():
            with self._lock:
                self.failures[entry["rank"]] = entry
                if entry["over"]:
                    del self.failures[entry["rank"]]
        self._heard = self._turn_began
        if self._listens:
            with self._lock:
                others = [(rank, process) for rank, process in self.processes.items() if rank != self.rank]
                gone = {rank for rank, process in others if (sight := look(process)) and sight.state == "gone"}
                self.absent = frozenset(gone | self.failures.keys())

    def _is_waiting(self) -> bool:
        wait = self._wait
        return wait is not None and time.monotonic() - wait[0] < 3

    def _ask(self, board: Board) -> None:
        now, wait = time.monotonic(), self._wait
        others = self.others()
        if self._asked_since is None or (wait is not None and wait[1].key != self._asked_for):
            self._asked_since, self._asked_for = now, wait[1].key if wait is not None else ""
            self._asked = float("-inf")
            before = board.places(others)  # which says nothing about this wait
            with self._lock:
                self._answers = {rank: (float("-inf"), place) for rank, place in before.items()}
        if now - self._asked > 2 * self.interval:
            self._asked = now
            board.ask()
        for rank in others:
            if rank not in self.processes and (process := board.process(rank)) is not None:
                self.know({rank: process})
        for rank, place in board.places(others).items():
            with self._lock:
                last = self._answers.get(rank)
                if last is None or last[1] != place:
                    self._answers[rank] = (now, place)

    def _place(self) -> dict[str, Any]:
        wait = self._wait
        found = [place() for place in list(self._places.values())]
        places = dict(place for place in found if place is not None)
        line, collective, inside, stacks, used = training_threads(self._trains)
        last = max(self._trains.values(), default=0.0)
        return {
            "wait": wait[1].key if wait is not None and self._is_waiting() else None,
            "places": places,
            "line": line,
            "collective": collective,
            "inside": inside,
            "ended": self._thread_ended,
            "still": self._progress.rests((stacks, places, last), used),
            "words": self._words,
        }

    def end(self) -> None:
        """The interpreter ends: says so, and lets the thread end before it does.

        A thread that comes back from a request to a stopped host while Python shuts down would abort the process.
        """
        if not self.lost and not self.store_is_silent():
            self._say_goodbye()
        self._stopping = True
        self._wake.set()
        self._thread.join(0.0 if self.store_is_silent() else _EXIT_SECONDS)
        if self._thread.is_alive() and self._port is not None:
            _cut_connections(self._port)
            self._thread.join(_EXIT_SECONDS)

    def _say_goodbye(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._told:
            pass
        elif error is not None:
            self._outbox.append(_message(_ended_with(error)))
        else:
            first = "" if self._group_is_there() else "it has destroyed its process group, and "
            self._outbox.append(_message(f"{first}its program has ended", left=True))


def _message(words: str, because: Sequence[int] = (), over: bool = False, left: bool = False) -> dict[str, Any]:
    return {"words": words, "because": list(because), "over": over, "left": left}


def _ended_with(error: BaseException) -> str:
    return f"its program ended with {exception_text(error)}"


def _cut_connections(port: int) -> None:
    """Ends this process's connections to a store, and with them the requests that wait there for a stopped host."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as mine:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername()[1] == port:
                mine.shutdown(socket.SHUT_RDWR)


_current: Watchdog | None = None


def current(group: Any) -> Watchdog | None:
    """The watchdog of the default group that there is now, made at the first call; ``None``: nobody can be asked."""
    global _current
    if type(group) is not dist.ProcessGroup or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    if dist.get_world_size() == 1:
        return None
    if _current is None:
        _hear_uncaught()
    if _current is None or not _current.same_group(store):
        _current = Watchdog(store, dist.get_rank(), dist.get_world_size())
    return _current


def _hear_uncaught() -> None:
    """From now on, before what else is called then. Who sets these hooks later may call what was there before."""
    of_main, of_threads = sys.excepthook, threading.excepthook

    def main_ends(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if _current is not None and not hasattr(sys, "ps1") and not _is_called_by_the_program():
            with suppress(Exception):
                _current.note_uncaught(error)
        of_main(kind, error, trace)

    def thread_ends(arguments: Any) -> None:
        ends_well = isinstance(arguments.exc_value, (SystemExit, type(None)))
        if _current is not None and not ends_well:
            with suppress(Exception):
                _current.note_uncaught(arguments.exc_value)
        of_threads(arguments)

    sys.excepthook, threading.excepthook = main_ends, thread_ends


def _is_called_by_the_program() -> bool:
    """``sys.excepthook``, to show an exception, after which the program goes on: its own frames are still there."""
    return any(frame.f_code.co_name == "<module>" for frame, _ in traceback.walk_stack(sys._getframe()))


def introduce(group: Any, processes: Sequence[Process]) -> None:
    """Keeps who the ranks of ``group`` are, by rank: while somebody is missing the store may not answer."""
    dog = current(group)
    if dog is not None:
        dog.know(dict(zip(dist.get_process_group_ranks(group), processes)))


@atexit.register
def _last_words() -> None:
    if _current is not None:
        with suppress(Exception):
            _current.end()
