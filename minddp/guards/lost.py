"""What ends a wait for another rank: its error, and the group that is given up.

A rank that raises, dies, is stopped or takes another branch leaves the others waiting for the group's timeout (30
minutes by default), or with "Connection closed by peer". So a rank that waits is called each look, by the thread that
waits, to see what the watchdog has heard. One line ends a wait that goes on, in :func:`look_into`, and for two
reasons, which :meth:`Watchdog.verdict` knows: a rank has told that it does not finish it, or a call has found that a
rank is gone while all others are there. Everything else is logged, and waited for until the group's own timeout.

On a device with streams (NCCL) nobody waits in backward: a collective is over for the host when it is enqueued. There
the program waits for the device once it reads something (``loss.item()``). So where a rank has told that it does not
finish an iteration, the watchdog itself gives the group up, which ends that wait, and the next step and forward raise
(:meth:`Watch.heed`).

Costs nothing while collectives end within a look.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .. import _C, messages
from .._C import guards as cases
from ..logs import log
from . import texts, times, watchdog
from .location import exception_text
from .roll import Place, Wait
from .watchdog import Verdict, Watchdog

# After each of the reducer's moments. A forward belongs to the iteration that its backward begins.
_PHASES = ("in forward", "past forward", "in backward", "in backward", "between")
_LOST_PEER = re.compile(
    r"connection|socket|broken pipe|reset by peer|timed? ?out|has died|gave up|has left|did not take part|aborted|"
    r"no route|unreachable",
    re.IGNORECASE,
)

_PARTIAL_SUMS = (
    " A step of an optimizer that was enqueued after that backward may have used partial sums: from now on "
    "optimizer.step(), forward and ddp.state_dict() raise. Start again from a checkpoint."
)
# Reducers of one group are made in the same order on most programs' ranks: a name until they agree on one.
_counters: dict[str, itertools.count[int]] = {}


class LostPeer(RuntimeError):
    """Another rank will not take part in what this one waits for: it has raised, or is gone; or it did not come
    within the group's timeout.

    The group is given up then. ``lost_ranks``: of the default group, those that this rank has given up.
    """

    lost_ranks: list[int]


@dataclass
class Progress:
    """How far this rank is with one wrapper; outlives it.

    Attributes:
        key: the name by which all ranks know the wrapper.
        first_key: before they agreed on that.
        moments: its reducer's case that counts backwards.
        earlier: backwards of the reducers before.
        collectives: outside of backward, that are over.
    """

    key: str
    first_key: str
    moments: Any
    earlier: int = 0
    collectives: int = 0

    def last(self) -> Place:
        """Where it was when the wrapper went."""
        begun, done = (self.earlier + count for count in self.moments.counts())
        return Place(begun, done, self.collectives, "past its last step of the wrapper")


class Watch:
    """Watches the waits of one reducer. REQUIRES: a default process group.

    Args:
        group: the reducer's group.
        reducer: asked where it is; by other threads too.
        moments: the reducer's case that counts its backwards.
        has_streams: backward need not wait for its collectives: :meth:`heed` is called.
        before: that of the wrapper's reducer before; waits are counted on.

    Attributes:
        earlier: backwards of the reducers before.
        hook: the communication hook's name.
        lost: why the group was given up, where the device may use what that has left.
    """

    def __init__(
        self, group: dist.ProcessGroup, reducer: Any, moments: Any, has_streams: bool, before: Watch | None = None
    ):
        name = str(group.group_name if messages.is_torchs(group) else id(group))
        self.group, self.has_streams, self.hook = group, has_streams, ""
        self._reducer = weakref.ref(reducer)
        if before is None:
            key = f"{name}/{next(_counters.setdefault(name, itertools.count()))}"
            self.progress = Progress(key, key, moments)
        else:
            now = before.progress
            self.progress = Progress(now.key, now.first_key, moments, before.begun(), now.collectives)
        self.earlier = self.progress.earlier
        self._told = self.earlier  # the last backward that is no concern any more: this rank does not finish it
        self._forward_ended_ns = -1  # by an exception, which the reducer does not see
        self.lost: LostPeer | None = None
        self._dog = watchdog.current(group)
        if self._dog is not None:
            self._dog.add(self)

    @property
    def dog(self) -> Watchdog | None:
        """By which ranks talk of this wrapper; None: nobody can be asked, or the group is destroyed."""
        return self._dog if messages.is_torchs(self.group) else None

    @property
    def key(self) -> str:
        return self.progress.key

    def begun(self) -> int:
        """The number of the last synchronized backward that has begun, counted over the wrapper's reducers."""
        reducer = self._reducer()
        return self.earlier + (0 if reducer is None else int(reducer.iteration()))

    def place(self) -> Place | None:
        """Where this wrapper's iteration is."""
        reducer = self._reducer()
        if reducer is None:
            return None
        position, moments, begun = reducer.position(), reducer.moments(), self.begun()
        latest = max(range(len(moments)), key=lambda i: moments[i])
        phase = "between" if moments[latest] < 0 else _PHASES[latest]
        if position["phase"] == _C.Phase.INCOMPLETE:
            phase = "in backward"
        elif position["phase"] == _C.Phase.LAUNCHED:  # the program's own time, until finalize_backward()
            phase = "between"
        elif phase == "in forward" and self._forward_ended_ns > moments[latest]:
            phase = "between"
        words = f"{phase} of iteration {begun + (phase != 'in backward')}"
        if phase == "between":
            words = f"between iterations {begun} and {begun + 1}"
        return Place(begun, begun - (phase == "in backward"), self.progress.collectives, words)

    def wait(self, kind: str, number: int, what: str) -> Wait:
        return _wait(self.group, f"{self.key} {kind}", number, what, self.hook)

    # --- what this rank tells ---

    def report_failure(self, error: BaseException | str) -> None:
        """This rank will not finish its backward: tells the others why, in the words of the first who knows."""
        number = self._unfinished()
        if self.dog is not None and number:
            self._tell(error, self.wait("backward", number, "its backward"))
        elif self.dog is not None and isinstance(error, BaseException):  # the program may go on, or end
            self.dog.words = exception_text(error)

    def _tell(self, error: BaseException | str, wait: Wait) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if self.dog is not None:
            self.dog.tell(text, wait, getattr(error, "lost_ranks", ()), seconds=1.0)

    def report_collective(self, error: BaseException | str) -> None:
        """This rank takes no part in the wrapper's next collective outside of backward."""
        self.progress.collectives += 1
        if self.dog is not None:
            self._tell(error, self.wait("collective", self.progress.collectives, "a collective"))

    def report_interrupted(self, why: str) -> None:
        """An exception has ended this rank's backward, of which the reducer knows ``why`` or nothing."""
        if why:
            return self.report_failure(why)
        number = self._unfinished()
        if self.dog is not None and number:
            self.dog.tell_later("an exception ended its backward", self.wait("backward", number, "its backward"))

    def _unfinished(self) -> int:
        """The number of the backward that this rank does not finish; 0: none is under way, and the program may go on
        to the next one; or this rank has told so, or knows that others have."""
        place = self.place()
        if place is None or place.done == place.begun or self._told >= place.begun:
            return 0
        self._told = place.begun
        return self._told

    def note_words(self, error: BaseException) -> None:
        """An exception has ended forward. The program may handle it: said to those who ask where this rank is."""
        self._forward_ended_ns = time.monotonic_ns()
        if self.dog is not None:
            self.dog.words = exception_text(error)

    # --- what it waits for ---

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Inside, this thread's waits are those of a collective outside of backward. All ranks begin one."""
        number = self.progress.collectives + 1
        outer, _own.wait = _own.wait, (f"{self.key} collective", number)
        try:
            yield
        finally:
            _own.wait = outer
        self.progress.collectives = number

    def on_stall(self, seconds: float, bucket: int, error: str) -> None:
        """Called once a look while the collective of ``bucket`` does not end, and when it has failed with ``error``.

        ``seconds`` is -1 when the program's own exception (Ctrl-C) has ended the wait.

        Raises:
            LostPeer: another rank will not take part; says which, and why.
        """
        reducer = self._reducer()
        dog = self.dog
        if dog is None or reducer is None:
            return
        name = f"bucket {bucket}" if bucket < len(reducer.buckets()) else "what follows the last bucket"
        number = self.begun()
        wait = self.wait("backward", number, f"the reduction of {name} of iteration {number}")
        look_into(dog, self.group, wait, seconds, error)

    def heed(self) -> None:
        """Gives the group up where another rank has told that it does not finish an iteration that this one has
        launched as a whole: the program may wait for the device. Called by the watchdog, on its thread."""
        reducer, place, dog = self._reducer(), self.place(), self.dog
        if reducer is None or place is None or dog is None or self.lost is not None:
            return
        _, _, begin, end, _ = reducer.moments()
        is_launched = end >= begin and reducer.position()["phase"] != _C.Phase.INCOMPLETE
        launched = place.begun - (not is_launched)
        told = dog.told_of(f"{self.key} backward")
        for number in [number for number in [*told, launched] if self._told < number <= launched]:
            wait = self.wait("backward", number, f"the reduction of iteration {number}")
            verdict = dog.verdict(wait, found=False)
            if verdict is not None:
                error = _given_up(dog, self.group, wait, None, verdict, "")
                log.error("%s The process group is given up; the next step and forward raise.", error)
                return

    def check_lost(self) -> None:
        """Before what uses gradients, or parameters, that a device may have made with a group that was given up."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)


class _Own(threading.local):
    wait: tuple[str, int] | None = None  # the wrapper's collective in which this thread waits


_own = _Own()


def _wait(group: dist.ProcessGroup, name: str, number: int, what: str, hook: str = "") -> Wait:
    ranks = dist.get_process_group_ranks(group)
    here = ranks[group.rank()]
    others = tuple(sorted(rank for rank in ranks if rank != here))
    return Wait(name, number, what, here, others, what == messages.SHADOWED, hook, group.group_name)


def _watch(group: dist.ProcessGroup, what: str, number: int, seconds: float, error: str) -> None:
    """A wait outside of a reducer's backward: construction, buffers, checks."""
    dog = watchdog.current(group)
    if dog is not None:
        name, count = _own.wait or (f"{group.group_name} {what} ", number)
        look_into(dog, group, _wait(group, name, count, what), seconds, error)


messages.set_watcher(_watch)


def look_into(dog: Watchdog, group: dist.ProcessGroup, wait: Wait, seconds: float, error: str) -> None:
    """One look at a wait that has lasted ``seconds``, or ended with ``error``: :meth:`Watch.on_stall`."""
    if seconds < 0:  # what is under way would hold up the process's end
        dog.waits_no_more()
        return _abandon(group)
    dog.waits(wait, seconds)
    if error:
        return _name_the_lost(dog, group, wait, seconds, error)
    if (verdict := dog.verdict(wait)) is not None:
        raise _given_up(dog, group, wait, seconds, verdict, "")
    if dog.warns_alone(seconds):
        log.warning(texts.slow(wait, seconds, {}, store_is_silent=True))


def _name_the_lost(dog: Watchdog, group: dist.ProcessGroup, wait: Wait, seconds: float, error: str) -> None:
    """A collective has failed. Where that looks like a lost peer, finds out which, and raises instead of it."""
    is_suspicious = _LOST_PEER.search(error) is not None
    begin, slept = time.monotonic(), 0.0  # counted: a test library may stop the clock
    patience = max(times.NAMING * max(times.look, dog.interval), 2.0) * is_suspicious
    if is_suspicious:
        dog.call_now()
    while True:
        dog.waits(wait, seconds + max(time.monotonic() - begin, slept))
        verdict, suspects = dog.verdict(wait), dog.suspects(wait)
        # A rank's last words are still to be read, if nothing was read since the rank was seen to be gone.
        if verdict is None and suspects is not None and dog.has_read_since(suspects.ranks):
            verdict = suspects
        if verdict is not None or dog.lost or max(time.monotonic() - begin, slept) >= patience:
            break
        if suspects is not None:
            dog.read_now()
        time.sleep(0.05)
        slept += 0.05
    if verdict is None and is_suspicious:
        verdict = suspects or dog.silent_ones(wait)
    if verdict is not None:
        raise _given_up(dog, group, wait, seconds, verdict, error)
    dog.waits_no_more()


def _given_up(
    dog: Watchdog, group: dist.ProcessGroup, wait: Wait, seconds: float | None, verdict: Verdict, error: str
) -> LostPeer:
    """Gives ``group`` up; returns why. On a device its wrappers know that first: a program that waits there goes on
    as soon as the group is aborted, with gradients that are no averages."""
    on_device = [each for each in dog.watches() if each.group is group and each.has_streams]
    # Programs look for these words in an error to skip a batch: another rank's lack of memory is none here.
    words = re.sub(r"(?i)out of memory", "out-of-memory", verdict.words)
    text = texts.lost(wait, seconds, verdict.ranks, words, error, verdict.left)
    why = LostPeer(text + _PARTIAL_SUMS * bool(on_device))
    why.lost_ranks = verdict.lost
    for each in on_device:
        each.lost = each.lost or why
    for each in dog.watches():
        if each.group is group and wait.name == f"{each.key} backward":
            each._told = max(each._told, wait.number)
    if not verdict.follows:
        dog.tell(str(why), wait, why.lost_ranks, group.group_name, seconds=0.5)
    dog.waits_no_more()
    _abandon(group)
    return why


_abandoned: set[int] = set()
_abandoning = threading.Lock()  # by the program, and by the watchdog


def _abandon(group: dist.ProcessGroup) -> None:
    """Gives up what is under way in ``group``, without waiting for it: on a thread that never asks for the GIL.

    Gloo has no way to do so, and its destructor waits for its last collective, which may never end: the process could
    not exit. So that destructor never runs; the process takes the threads and connections with it.
    """
    with _abandoning:
        if id(group) in _abandoned:
            return
        _abandoned.add(id(group))
    if _waits_in_its_end(group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    else:  # another may get its number
        weakref.finalize(group, _abandoned.discard, id(group)).atexit = False
    with suppress(RuntimeError):  # the process may have no more threads
        cases.abort(group)


def _waits_in_its_end(group: dist.ProcessGroup) -> bool:
    with suppress(Exception):
        return any(group._get_backend(device).name() != "shm" for device in group._device_types)
    return True
