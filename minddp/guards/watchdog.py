"""Takes part in the roll call for this process, on a thread of its own: nothing else here waits for the store.

Each process with a wrapper has one watchdog for its default group. A rank that waits for others says so each look
(:meth:`Watchdog.waits`), and reads what the thread has found until then (:meth:`Watchdog.verdict`). Both return at
once, since the store may be gone, or its host stopped. The thread has a connection of its own, keeps no process group
alive, and ends with the group, the store or the interpreter.

A process that ends says so (``atexit``), with the exception that ended it if one did. If an exception has ended the
main thread, which trained, and other threads hold the process, the watchdog's thread sees that. A process that is
killed cannot say anything: the next one of its host sees it.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from .. import environment
from ..lifetime import connections, cut_connections, hangs_up
from ..logs import log
from ..messages import is_torchs
from . import location, texts, times
from .processes import Process, here, look
from .roll import Entry, Place, Roll, Wait, bare, carries, has_done, is_there, listed, listens, runs

_EXIT_SECONDS = 1.0
_PAST = 32  # wrappers that are gone, whose places are known
_TEXT_SECONDS = 0.25  # in which an exception that nobody catches ends the program, and is told with its text
Answer = TypeVar("Answer")


class _Thread(threading.Thread):
    """A program that joins all threads at its end need not wait for this one, which lives as long as the group."""

    def join(self, timeout: float | None = None) -> None:
        if timeout is not None:
            super().join(timeout)


class Verdict(NamedTuple):
    """Why a wait is over. ``ranks``: those that do not come. ``lost``: those that they come down to. ``words``: of
    whom, and why. ``follows``: this rank tells nobody, since another one has, or nobody knows more. ``left``: a rank
    has ended without an exception."""

    ranks: list[int]
    lost: list[int]
    words: str
    follows: bool = True
    left: bool = False


class _Call(NamedTuple):
    """A call of this rank's that has no result yet: it has one when it is ``due``. ``warns``: that is logged."""

    number: int
    seconds: float
    due: float
    warns: bool


@dataclass
class _Waiting:
    """A wait in which one of this process's threads is.

    Attributes:
        seen: when it was last known to go on. That it has ended is known by that nobody looks any more.
        warned: how often it was logged, or might have been.
        calls_now: its collective has failed.
    """

    wait: Wait
    since: float
    seen: float
    warned: int = 0
    calls_now: bool = False
    call: _Call | None = None
    may_call_at: float = 0.0


class Watchdog:
    """This process's, for one default group. What others have told is read and changed with :attr:`_lock` held.

    Attributes:
        processes: by rank of the default group, as far as known.
        heard: when the last turn began that has read what ranks have told.
        interval: seconds from turn to turn.
        lost: the thread has ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.rank, self._size = rank, size
        self.processes: dict[int, Process] = {rank: here()}
        self.lost = self._stopping = False
        self._connects = True  # the thread, to the store
        self._store = weakref.ref(store, lambda _: self._end_with_the_store())
        self._port: int | None = getattr(bare(store), "port", None) if carries(store) else None
        self._lock, self._wake, self._done = threading.RLock(), threading.Event(), threading.Condition()
        self._outbox: list[Entry] = []
        self._told: dict[Any, str] = {}  # what this rank has told, by wait; under None of its program
        self._later: dict[tuple[str, int], tuple[float, Entry]] = {}  # when what is to be told, by wait
        self._errands: list[Callable[[Roll], None]] = []
        self._watches: dict[int, weakref.ref[Any]] = {}  # one a wrapper
        self._past: dict[str, Place] = {}  # how far this rank came with wrappers that are gone, the last ones
        self._notices: dict[Any, list[Entry]] = {}  # by wait; by rank, of its program's end
        self._gone: dict[int, tuple[float, str]] = {}  # ranks whose processes are, since when as far as seen, and how
        self._ends: dict[int, Entry] = {}  # what ranks have said that have left, as far as read
        self._left_at = math.inf  # when somebody has left for the last time, as this rank has seen
        self._left = 0
        self._on_this_host: list[int] = []
        self._announced: set[int] = set()  # of these, those whose end all ranks know
        self._waits: dict[int, _Waiting] = {}  # by thread
        self.words = ""  # of the last exception that the program may have handled, for those who ask
        self._trains = threading.main_thread()  # who has run the last forward
        self._turn_began, self.interval = time.monotonic(), times.look
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

    def add(self, watch: Any) -> None:
        """Until it is gone, it is asked for its ``place()`` when somebody calls, and its ``heed()`` is called in each
        turn once a notice has come, if its wrapper's backward need not wait (``has_streams``)."""
        key, progress = id(watch), watch.progress

        def goes(_: Any) -> None:
            self._watches.pop(key, None)
            self._past[progress.key] = progress.last()
            for old in list(self._past)[:-_PAST]:
                self._past.pop(old, None)

        self._watches[key] = weakref.ref(watch, goes)

    def watches(self) -> list[Any]:
        found = [watch() for watch in list(self._watches.values())]
        return [watch for watch in found if watch is not None]

    def note_forward(self) -> None:
        """A forward begins on this thread: where that is will be where this rank is. What it waited for is over."""
        self._trains = threading.current_thread()
        self._waits.pop(threading.get_ident(), None)

    def tell(
        self,
        words: str,
        wait: Wait | None = None,
        because: Sequence[int] = (),
        group: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Tells all ranks that this one does not finish ``wait``, or that its program ends. The first words stand.

        Args:
            words: why.
            wait: None: no wait any more.
            because: the ranks whose failure this one follows from.
            group: that this rank has given up: it takes part in nothing there any more.
            seconds: at most so many until it has been told: the process may be about to end.
        """
        key = None if wait is None else wait.key
        with self._lock:
            self._later.clear() if key is None else self._later.pop(key, None)
            if key not in self._told and None not in self._told:
                self._told[key] = words
                self._outbox.append(self._notice(words, wait, because, group))
        self._wake.set()
        self._wait_until(lambda: not self._outbox, seconds)

    def tell_later(self, words: str, wait: Wait) -> None:
        """:meth:`tell`, unless more is known in a moment: the exception may end the program, and has a text then."""
        with self._lock:
            self._later[wait.key] = time.monotonic() + _TEXT_SECONDS, self._notice(words, wait)
        self._wake.set()

    def _notice(self, words: str, wait: Wait | None, because: Sequence[int] = (), group: str = "") -> Entry:
        key = None if wait is None else wait.key
        return {"words": words, "wait": key, "because": list(because), "group": group, "places": self.places()}

    def run(self, errand: Callable[[Roll], Answer], seconds: float) -> Answer | None:
        """``errand``'s answer, from the watchdog's thread; None: the store has not answered in time, or is gone."""
        answers: list[Answer] = []

        def note(roll: Roll) -> None:
            answers.append(errand(roll))

        self._errands.append(note)
        self._wake.set()
        self._wait_until(lambda: bool(answers), seconds)
        return answers[0] if answers else None

    def _wait_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        if seconds and threading.current_thread() is not self._thread:
            with self._done:
                self._done.wait_for(lambda: self.lost or is_over(), seconds)

    def waits(self, wait: Wait, seconds: float) -> None:
        """This thread has waited so long, and goes on."""
        now, mine = time.monotonic(), self._waits.get(threading.get_ident())
        if mine is None or mine.wait.key != wait.key or now - seconds > mine.seen + times.look:
            mine = self._waits[threading.get_ident()] = _Waiting(wait, now, now)
            self._wake.set()
        mine.wait, mine.since, mine.seen = wait, now - seconds, now

    def waits_no_more(self) -> None:
        self._waits.pop(threading.get_ident(), None)

    def call_now(self) -> None:
        """The collective that this thread has waited for has failed: where are the others?"""
        if (mine := self._waits.get(threading.get_ident())) is not None:
            mine.calls_now = True
            self._wake.set()

    def read_now(self) -> None:
        """What the other ranks have told is read at once, and not at the next turn."""
        self._wake.set()

    def verdict(self, wait: Wait, found: bool = True) -> Verdict | None:
        """Whether ``wait`` is over, as the others' notices say, or (``found``) a call. Asks nobody."""
        with self._lock:
            of_wait = self._notices.get(wait.key, [])
            told = [each for each in of_wait if "found" not in each] + self._notices.get(wait.group, [])
            for rank in wait.others:
                ends = [each for each in self._notices.get(rank, []) if not has_done(each["places"], wait.key)]
                for notice in [*(each for each in told if each["by"] == rank), *ends]:
                    lost = sorted({*notice["because"]} - {self.rank} or {rank})
                    return Verdict([rank], lost, texts.says(rank, self.processes.get(rank), notice["words"]))
            for notice in of_wait if found else ():
                if notice.get("found") == "gone":
                    lost = listed(notice["lost"])
                    return Verdict(lost, lost, notice["words"], left=notice["left"])
        return None

    def suspects(self, wait: Wait) -> Verdict | None:
        """Who may be lost to ``wait``, whose collective has failed: gone, stopped, or late in the last call."""
        self._see([*wait.others])
        with self._lock:
            found = {}
            for rank in wait.others:
                process = self.processes.get(rank)
                if rank in self._gone:
                    found[rank] = self._describe_end(rank)
                elif process is not None and look(process).state == "stopped":
                    found[rank] = texts.stopped(rank, process)
            late = [n for n in self._notices.get(wait.key, []) if n.get("found") == "late"]
        if found:
            if self.lost:  # those that have died before they had said where they are may come first
                unknown = [rank for rank in wait.others if rank not in self.processes]
                found |= {rank: texts.late(rank, None, None, False, wait) for rank in unknown}
            words = texts.joined([*found.values()])
            return Verdict([*found], [*found], words, follows=False, left=self._has_left_well([*found]))
        if late:
            ranks = listed(late[-1]["lost"])
            return Verdict(ranks, ranks, late[-1]["words"], False, late[-1]["left"])
        return None

    def _has_left_well(self, ranks: Sequence[int]) -> bool:
        """Whether one of these has ended without an exception."""
        return any(rank in self._ends and not self._ends[rank]["failed"] for rank in ranks)

    def has_read_since(self, ranks: Sequence[int]) -> bool:
        """Whether all has been read that these, which are gone, may have told."""
        return self.lost or all(self.heard > self._gone.get(rank, (-math.inf, ""))[0] for rank in ranks)

    def silent_ones(self, wait: Wait) -> Verdict:
        """All others: a collective has failed, and nobody has told more."""
        words = [texts.late(rank, self.processes.get(rank), None, False, wait) for rank in wait.others]
        return Verdict([*wait.others], [*wait.others], texts.joined(words))

    def warns_alone(self, seconds: float) -> bool:
        """Whether the log's next line on this thread's wait is due and the store does not answer: nobody can be
        called."""
        mine = self._waits.get(threading.get_ident())
        if mine is None or not self.store_is_silent() or times.warnings_due(seconds) <= mine.warned:
            return False
        mine.warned = times.warnings_due(seconds)
        return True

    def store_is_silent(self) -> bool:
        return self.lost or time.monotonic() - self._turn_began > max(3 * self.interval + 2 * times.look, 1.0)

    def places(self) -> dict[str, Place]:
        """Where this process's wrappers are, by their names."""
        found = [(watch.key, watch.place()) for watch in self.watches()]
        return dict(self._past) | {key: place for key, place in found if place is not None}

    # --- the thread ---

    def _run(self, stores: list[dist.Store]) -> None:
        """Empties ``stores``: a store that somebody holds keeps its port, or its file, from the next group."""
        try:
            if not is_there(stores[0]):
                return  # a clone would make it anew
            before = connections(self._port or 0)
            client: Any = stores.pop().clone()  # type: ignore[attr-defined]  # torch's stub forgets it
            self._connects = False
            links = connections(self._port or 0) - before
            links = links if len(links) == 1 else set()  # another thread may have made one, too
            roll = Roll(client, self.rank, self._size, self.processes)
            self.interval = roll.interval
            self._turn(roll)
            self._wake.wait(roll.interval * os.urandom(1)[0] / 256)  # so that ranks do not ask all at once
            while not self._stopping and self._group_is_there() and is_there(client) and not hangs_up(links):
                self._turn(roll)
                due = min((at for at, _ in list(self._later.values())), default=math.inf) - time.monotonic()
                pause = 0.1 * times.look if self._outbox or self._errands else min(max(due, 0.0), roll.interval)
                self._wake.wait(pause)
                self._wake.clear()
            if not self._stopping and None not in self._told:
                self._leave("it has destroyed its process group")
            if self._outbox and listens(client):
                self._send(roll)
        except (dist.DistError, RuntimeError, OSError):
            pass  # the store is gone, and with it all that could be said here
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning(_GARBAGE, self.rank, error)
        finally:
            self.lost = True
            del stores[:]
            with self._done:
                self._done.notify_all()

    def _end_with_the_store(self) -> None:
        """The program has let go of it: the thread's own goes as well. A store's host is asked for nothing that soon:
        it may be ending."""
        if not self.lost and self._port is None and threading.current_thread() is not self._thread:
            self._wake.set()
            self._thread.join(_EXIT_SECONDS)

    def _group_is_there(self) -> bool:
        store = self._store()
        return store is not None and dist.is_initialized() and dist.distributed_c10d._get_default_store() is store

    def _turn(self, roll: Roll) -> None:
        now = self._turn_began = time.monotonic()
        if self._trains is threading.main_thread() and not (self._trains.is_alive() or None in self._told):
            self._tell_of_exception()
        self._tell_what_is_due(now)
        self._send(roll)
        while self._errands:
            self._errands.pop(0)(roll)
        roll.look()
        self._hear(roll.notices())
        self.heard = now
        if self._notices or self._told or roll.told:
            self._forget_what_is_over(roll)
        if roll.ends() > self._left:
            self._left, self._left_at = roll.ends(), now
        for call in roll.calls():
            roll.answer(call["number"], self._where())
        self._on_this_host += [rank for rank in roll.meet() if rank not in self._on_this_host]
        self._look_at_neighbours(roll)
        for waiting in self._waiting(times.RECENT):
            if ended := [r for r in waiting.wait.others if r in self._gone and r not in self._ends]:
                self._ends.update(roll.left(ended))
            self._call_for(roll, waiting)
        if not self._waiting():
            roll.forget_claims()
        with self._done:
            self._done.notify_all()

    def _hear(self, notices: list[Entry]) -> None:
        with self._lock:
            for notice in notices:
                if "gone" in notice:
                    self._announced.add(notice["gone"])
                    self._gone.setdefault(notice["gone"], (time.monotonic(), notice["how"]))
                elif notice["by"] != self.rank or "found" in notice:
                    key = notice["by"] if notice["wait"] is None else tuple(notice["wait"])
                    self._notices.setdefault(key, []).append(notice)
                    if notice.get("group"):
                        self._notices.setdefault(notice["group"], []).append(notice)
        for watch in self.watches() if self._notices else ():
            if watch.has_streams:
                watch.heed()

    def _forget_what_is_over(self, roll: Roll) -> None:
        """What was told of waits that this rank is past: it has taken part in the wrapper's next one since."""
        places = self.places()
        for watch in self.watches():  # before it had its name
            if watch.key in places:
                places.setdefault(watch.progress.first_key, places[watch.key])
        with self._lock:
            for known in (self._notices, self._told):
                for key in [key for key in known if isinstance(key, tuple) and has_done(places, key)]:
                    del known[key]
        roll.forget_notices(places)

    def told_of(self, name: str) -> list[int]:
        """The numbers of waits of this name that others have said they do not finish."""
        with self._lock:
            return [key[1] for key in self._notices if isinstance(key, tuple) and key[0] == name]

    def _tell_what_is_due(self, now: float) -> None:
        with self._lock:
            for key, (due, notice) in list(self._later.items()):
                if due <= now:
                    del self._later[key]
                    if key not in self._told and None not in self._told:
                        self._told[key] = notice["words"]
                        self._outbox.append(notice)

    def _leave(self, words: str) -> None:
        """Without an exception; after one that the program has caught, that has a part in it."""
        self._tell_what_is_due(math.inf)
        with self._lock:
            self._told.setdefault(None, "")
            before = list(dict.fromkeys(self._told[key] for key in self._told if key is not None))
            self._outbox.append(
                {"end": "; before, ".join([words, *before]), "failed": False, "places": self.places()}
            )

    def _send(self, roll: Roll) -> None:
        while self._outbox:
            entry = self._outbox[0]
            because, wait = entry.get("because"), entry.get("wait")
            if "end" in entry:
                roll.leave(entry)
            elif wait is None:
                if not because and roll.is_among_first("the end"):  # else it is no news: who calls reads it
                    roll.tell(entry)
                roll.leave({"end": entry["words"], "failed": True, "places": entry["places"]})
            elif roll.is_among_first(f"{wait}") and (not because or roll.claims(f"told/{because}/{wait}")):
                roll.tell(entry)  # for all that it follows from the same, since each rank reads each notice
            del self._outbox[0]
        with self._done:
            self._done.notify_all()

    def _where(self) -> Entry:
        return {
            "waits": [(*each.wait.key, each.wait.what, each.wait.joins) for each in self._waiting()],
            "places": self.places(),
            "line": location.of_thread(self._trains),
            "words": self.words,
        }

    def _waiting(self, looks: int = times.FRESH) -> list[_Waiting]:
        """In what this process's threads are."""
        now = time.monotonic()
        for thread, each in list(self._waits.items()):
            if now - each.seen > times.FRESH * times.look:
                self._waits.pop(thread, None)
        return [each for each in list(self._waits.values()) if now - each.seen < looks * times.look]

    # --- processes ---

    def _look_at_neighbours(self, roll: Roll) -> None:
        """At the next one of this host that runs; at all of them once this rank has waited for two looks. Who sees
        first that one is gone, and has not left, tells all ranks."""
        ranks, now = self._on_this_host, time.monotonic()
        if self.rank not in ranks:
            return
        mine = ranks.index(self.rank)
        everyone = any(now - waiting.since > 2 * times.look for waiting in self._waiting())
        for rank in ranks[mine + 1 :] + ranks[:mine]:
            process = self.processes[rank]
            sight = None if rank in self._announced else look(process)
            if sight is not None and sight.state == "gone":
                self._announced.add(rank)
                with self._lock:
                    self._gone.setdefault(rank, (time.monotonic(), sight.how))
                self._ends.update(roll.left([rank]))
                if rank not in self._ends and roll.claims(f"gone/{process.pid}/{process.started}"):
                    roll.tell({"gone": rank, "how": sight.how, "wait": None})
            elif sight is not None and sight.state == "running" and not everyone:
                return

    def _see(self, ranks: Sequence[int]) -> None:
        """Which of these this host's kernel does not know any more."""
        for rank in ranks:
            process = self.processes.get(rank)
            if process is not None and rank not in self._gone:
                sight = look(process)
                if sight.state == "gone":
                    with self._lock:
                        self._gone.setdefault(rank, (time.monotonic(), sight.how))

    # --- calls ---

    def _call_for(self, roll: Roll, mine: _Waiting) -> None:
        """A rank that waits calls the others: now and then, to log who is late; and when a rank is gone or has left,
        once what that had sent must have arrived."""
        now = time.monotonic()
        wait, seconds, call = mine.wait, now - mine.since, mine.call
        if call is not None:
            if now >= call.due:
                mine.call = None
                self._conclude(roll, mine, call)
            return
        warns = times.warnings_due(seconds) > mine.warned
        ended = [at for rank, (at, _) in self._gone.items() if rank in wait.others]
        if roll.ends():
            ended.append(self._left_at)
        settled = bool(ended) and now - max(min(ended), now - seconds) >= times.SETTLED * times.look
        if not (warns or ((settled or mine.calls_now) and now >= mine.may_call_at)):
            return
        mine.warned = times.warnings_due(seconds)
        mine.may_call_at = now + roll.patience
        number = roll.call(wait)
        if number:
            mine.call = _Call(number, seconds, now + 2 * roll.interval + 0.5 * times.look, warns)

    def _conclude(self, roll: Roll, mine: _Waiting, call: _Call) -> None:
        """Reads where the others are. Tells all that wait if some are gone and all others are there; or logs."""
        wait = mine.wait
        answers = roll.answers(wait.others)
        late = [rank for rank in wait.others if not self._is_there(answers.get(rank), call.number, wait)]
        self._ends.update(roll.left(late))
        late = [rank for rank in late if rank not in self._ends or not has_done(self._ends[rank]["places"], wait.key)]
        self._see(late)
        gone = [rank for rank in late if rank in self._ends or rank in self._gone]
        words = {rank: self._describe(rank, answers.get(rank), call.number, wait) for rank in late}
        if gone and gone == late:
            self._find("gone", roll, wait, words, self._has_left_well(gone))
        elif late and mine.calls_now:  # those that are on their way have answered
            silent = [rank for rank in late if answers.get(rank, {}).get("call", 0) < call.number]
            self._find("late", roll, wait, {rank: words[rank] for rank in silent or late}, False)
        if call.warns:
            log.warning(texts.slow(wait, call.seconds, words, False))

    def _find(self, what: str, roll: Roll, wait: Wait, words: dict[int, str], left: bool) -> None:
        text = texts.joined([*words.values()])
        roll.tell({"found": what, "wait": wait.key, "lost": runs([*words]), "words": text, "left": left})

    def _is_there(self, answer: Entry | None, call: int, wait: Wait) -> bool:
        if answer is None:
            return False
        if has_done(answer["places"], wait.key):
            return True
        waits = answer["waits"] if answer["call"] >= call else []
        return any((name, number) == wait.key or joins or wait.joins for name, number, _, joins in waits)

    def _describe_end(self, rank: int) -> str:
        process, how = self.processes.get(rank), self._gone.get(rank, (0.0, ""))[1]
        if rank in self._ends:
            return texts.left(rank, process, self._ends[rank]["end"] + (f" ({how})" if how else ""))
        return texts.gone(rank, process, how)

    def _describe(self, rank: int, answer: Entry | None, call: int, wait: Wait) -> str:
        process = self.processes.get(rank)
        if rank in self._ends or rank in self._gone:
            return self._describe_end(rank)
        if process is not None and look(process).state == "stopped":
            return texts.stopped(rank, process)
        is_fresh = answer is not None and answer["call"] >= call
        return texts.late(rank, process, answer, is_fresh, wait)

    # --- the end ---

    def end(self) -> None:
        """The interpreter ends: says so, and lets the thread end before it does.

        A thread that comes back from a request to a stopped host while Python shuts down would abort the process. So
        its connection is cut, and then it is waited for, however slow the machine is.
        """
        if not self.lost and not self.store_is_silent() and None not in self._told and not self._tell_of_exception():
            first = "" if self._group_is_there() else "it has destroyed its process group, and "
            self._leave(f"{first}its program has ended")
        self._stopping = True
        self._wake.set()
        self._thread.join(_EXIT_SECONDS if self.lost or not self.store_is_silent() else 0.0)
        while self._thread.is_alive():
            store = self._store()
            if self._connects and (store is None or not listens(store)):
                return  # it tries to reach a host that has died until the store's timeout: it does not come back
            if self._port is not None:
                cut_connections(self._port)
            self._thread.join(_EXIT_SECONDS)

    def _tell_of_exception(self) -> bool:
        """Of the one that has ended the program, if one did."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or environment.prompts():
            return False
        words = f"its program ended with {location.exception_text(error)}"
        self.tell(words, because=getattr(error, "lost_ranks", ()))
        return True


_GARBAGE = (
    "Rank %d hears nothing of the other ranks from now on, and tells them nothing: something else than a rank of "
    "minddp's has written to its keys in the process group's store (%s)."
)


_current: Watchdog | None = None
_living: weakref.WeakSet[Watchdog] = weakref.WeakSet()  # that of a group before may not have seen yet that it is gone
_has_warned = False


def current(group: Any) -> Watchdog | None:
    """The watchdog of the default group that there is now, made at the first call; ``None``: nobody can be asked."""
    global _current, _has_warned
    if not is_torchs(group) or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    if _current is None or _current._store() is not store:
        if not carries(store):
            if not _has_warned:
                _has_warned = True
                log.info(_NO_STORE, dist.get_rank(), type(store).__name__)
            return None
        _current = Watchdog(store, dist.get_rank(), dist.get_world_size())
    return _current


_NO_STORE = (
    "Rank %d hears nothing of the other ranks' failures, and tells them nothing: a %s carries no roll call, but a "
    "TCPStore, FileStore or HashStore."
)


def introduce(group: Any, processes: Sequence[Process]) -> None:
    """All ranks of ``group`` are in a constructor. Keeps who they are, by rank: while somebody is missing the store
    may not answer."""
    dog = current(group)
    if dog is not None:
        dog.know(dict(zip(dist.get_process_group_ranks(group), processes)))


@atexit.register
def _last_words() -> None:
    for dog in list(_living):
        with suppress(Exception):
            dog.end()
