"""Who is missing when a collective does not end, or ends with a lost connection.

A rank that raises, dies, is stopped or takes another branch leaves the others waiting for the group's timeout (30
minutes by default), or with "Connection closed by peer". So a rank that waits is called each second, by the thread
that waits, to look at what the watchdog has found. What is certain (``evidence.py``) it raises, with the culprit's
name, place and words. What is suspected it logs, and goes on waiting, until the group's own timeout.

On a device with streams (NCCL) nobody waits in backward: a collective is over for the host when it is enqueued. There
the program waits for the device once it reads something (``loss.item()``), and the group's own timeout is half an
hour. So where a rank is certainly lost the watchdog itself gives the group up, which ends that wait, and the next
step and forward raise (:meth:`StallInspector.heed_loss`).

Costs nothing while collectives end within a second.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from .. import _C, environment, messages
from .._C import guards as cases
from ..logs import log
from . import times, watchdog
from .evidence import (
    CERTAIN,
    Awaited,
    Judged,
    Kind,
    Place,
    Wait,
    absent,
    culprits,
    describe,
    has_gone_on,
    judge,
    lost,
    lost_ranks,
    slow,
)  # fmt: skip
from .local_gradients import Word
from .location import exception_text
from .watchdog import Watchdog

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


class Moments(cases.Moments):
    """When the last moments of the wrapper's steps were, for whoever asks while they run on other threads."""

    moments = cases.Moments.last


class StallInspector:
    """Watches the waits of one reducer. REQUIRES: a default process group, whose store carries what ranks tell.

    An exception is reported as this wrapper's: the program may catch it, and go on with another one.

    Args:
        group: the reducer's group.
        reducer: asked where it is; by other threads too.
        names: the parameters'.
        desync_timeout: seconds after which a rank that is only suspected is waited for no more; ``None``: warns only.
        has_streams: backward does not wait for its collectives: :meth:`heed_loss` is called.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        reducer: Any,
        names: Sequence[str],
        desync_timeout: float | None,
        has_streams: bool,
    ):
        ranks = messages.global_ranks(group)
        # One that is written in Python may have no name, or any.
        name = str(group.group_name if type(group) is dist.ProcessGroup else id(group))
        self.group = group
        self.desync_timeout = desync_timeout
        self.hook = ""  # the communication hook's name
        self.rename(f"{name}/{next(_counters.setdefault(name, itertools.count()))}")
        self._reducer = weakref.ref(reducer)
        self._names = names
        # In the default group, by rank in this one.
        self._ranks = tuple(range(group.size()) if ranks is None else ranks)
        self._reported_as = ""
        self._given_up = 0  # an iteration
        self.has_streams = has_streams
        self.lost: LostPeer | None = None  # why the group was given up, where the device may use what that has left
        self._has_warned = False  # heed_loss(), of ranks that may be lost
        self._begun = -math.inf, -math.inf  # when the last two forwards began
        self._collectives = 0  # outside of backward, that have ended on this rank
        self._forward_ended_ns = -1  # by an exception, which the reducer does not see
        self._dog: Watchdog | None = watchdog.current(group)
        if self._dog is not None:
            self._dog.add(self)

    def rename(self, key: str) -> str:
        """From now on all ranks know this wrapper under ``key``."""
        self.key = key
        return key

    # --- what this rank tells ---

    def report_failure(self, error: BaseException | str) -> None:
        """This rank will not finish its backward: tells the others why, in the words of the first who knows."""
        self.note_given_up()
        if self._reported_as or self._dog is None:
            return
        self._reported_as = self.key
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._dog.tell(text, self.key, because=getattr(error, "lost_ranks", ()), wait=1.0)

    def report_interrupted(self, why: str) -> None:
        """An exception has ended this rank's backward, of which the reducer knows ``why`` or nothing."""
        self.note_given_up()
        if why:
            self.report_failure(why)
        elif not self._reported_as and self._dog is not None:
            self._reported_as = self.key
            self._dog.tell_later("an exception ended its backward", self.key)

    def note_forward(self) -> None:
        """A forward begins, on this thread. What this rank has reported is over."""
        if self._reported_as:
            self.take_back()
        self._begun = self._begun[1], time.monotonic()
        if self._dog is not None:
            self._dog.note_forward()

    def note_words(self, error: BaseException) -> None:
        """An exception has ended forward. The program may handle it: reported to those who ask where this rank is."""
        self._forward_ended_ns = time.monotonic_ns()
        if self._dog is not None:
            self._dog.words = exception_text(error)

    def note_given_up(self) -> None:
        """Without a word: another rank may have reported the same iteration."""
        self._given_up = self._iteration()

    def take_back(self) -> None:
        """What this rank has reported is over. Costs nothing where it has reported nothing."""
        if self._reported_as and self._dog is not None:
            self._dog.take_back(self._reported_as)
            self._reported_as = ""

    def place(self) -> Place | None:
        """Where this wrapper's iteration is."""
        reducer = self._reducer()
        if reducer is None:
            return None
        position = reducer.position() | {"moments": reducer.moments()}
        moments, begun, missing = position["moments"], position["iteration"], position["missing"]
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
        if phase == "in backward" and missing:
            names = ", ".join(self._names[index] for index in missing[:3])
            words += f", in which it has not produced {names}" + f" and {len(missing) - 3} more" * (len(missing) > 3)
        return Place(begun, begun - (phase == "in backward"), self._collectives, words)

    # --- what it waits for ---

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Inside, this thread's waits are those of a collective outside of backward. All ranks begin one."""
        number = self._collectives + 1
        with waits_of((self.key, number), self.desync_timeout):
            yield
        self._collectives = number

    def on_stall(self, seconds: float, bucket: int, error: str) -> None:
        """Called once a look while the collective of ``bucket`` does not end, and when it has failed with ``error``.

        ``seconds`` is -1 when the program's own exception (Ctrl-C) has ended the wait.

        Raises:
            RuntimeError: another rank will not take part; says which, and why.
        """
        reducer = self._reducer()
        if self._dog is None or reducer is None or _is_destroyed(self.group):
            return
        iteration = reducer.iteration()
        name = f"bucket {bucket}" if bucket < len(reducer.buckets()) else "what follows the last bucket"
        wait = self._wait(f"the reduction of {name} of iteration {iteration}", iteration)
        look_into(self._dog, self.group, wait, seconds, error, self.desync_timeout)

    def _wait(self, what: str, iteration: int = 0) -> Wait:
        return _wait(self.group, Awaited(self.key, iteration, what=what), self.hook, self._given_up)

    def word_of(self, rank: int, seconds: float) -> Word:
        """Whether a rank of the group, for whose word on its gradients this one has waited so long, will say it.

        Asks it where it is, and logs that it is late: to be called each second or so.

        Raises:
            LostPeer: it has failed, or is gone without having left.
        """
        if self._dog is None or self._reducer() is None:
            return Word.OPEN
        everyone = self._wait("the others' word on their gradients")
        wait = Wait(everyone.awaited, everyone.here, (self._ranks[rank],))
        (fact,) = self._dog.facts(wait)
        if fact.has_left:
            return Word.LEFT
        look_into(self._dog, self.group, wait, seconds, "", None)  # it may step later, or never
        return Word.PASSED if has_gone_on(fact, self._dog.places()) else Word.OPEN

    def client(self) -> dist.Store | None:
        """The watchdog's own of the group's store."""
        return None if self._dog is None else self._dog.client

    def heed_loss(self) -> None:
        """Gives the group up where another rank is certainly lost to the last iteration that this one has launched as
        a whole: the program may wait for the device. Lost is a rank that has reported an exception in that iteration,
        or before, or that was gone before its forward began. One that is gone since, without a word, may have done
        its part, and nobody knows whether this rank waits at all: that is logged, once. Called by the watchdog, on
        its thread, while a rank has failed or is gone."""
        reducer, dog = self._reducer(), self._dog
        if reducer is None or dog is None or self.lost is not None:
            return
        position = reducer.position() | {"moments": reducer.moments()}
        forward, _, begin, end, _ = position["moments"]
        is_launched = end >= begin and position["phase"] != _C.Phase.INCOMPLETE
        iteration = int(position["iteration"]) - (not is_launched)
        if iteration <= 0:
            return
        wait = self._wait(f"the reduction of iteration {iteration}", iteration)
        judged = judge(dog.facts(wait), wait)
        # A hook may leave ranks out.
        begun = self._begun[forward < begin] if is_launched and not self.hook else -math.inf
        causes: Judged = []
        for fact, kind in judged:
            if kind is Kind.FAILED and fact.place(self.key) is not None:
                causes.append((fact, kind))
            elif fact.ended_at < begun and kind is not Kind.HERE:
                causes.append((fact, Kind.ENDED if kind is Kind.GONE else kind))
        if causes:
            error = _given_up(dog, self.group, wait, None, culprits(causes, judged), "")
            log.error("%s The process group is given up; the next step and forward raise.", error)
            return
        gone = [(fact, kind) for fact, kind in judged if fact.is_gone and not fact.failure and kind is not Kind.HERE]
        if dog.has_settled([fact for fact, _ in gone]) and not self._has_warned:
            self._has_warned = True
            who = "; ".join(describe(fact, kind, self.key) for fact, kind in gone)
            log.warning(_SUSPICION, who, wait.here, wait.awaited.what)

    def check_lost(self) -> None:
        """Before what uses gradients, or parameters, that a device may have made with a group that was given up."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    def _iteration(self) -> int:
        reducer = self._reducer()
        return 0 if reducer is None else reducer.iteration()


_SUSPICION = (
    "%s. If rank %d waits for its device, it may wait for the part of %s that is missing, until the process group's "
    "own timeout. If not, the forward after its next backward raises LostPeer."
)


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    """Its wrappers may go on, on its connections; nobody watches their waits."""
    return group not in dist.distributed_c10d._world.pg_map


def _wait(group: dist.ProcessGroup, awaited: Awaited, hook: str = "", given_up: int = 0) -> Wait:
    ranks = dist.get_process_group_ranks(group)
    here = ranks[group.rank()]
    return Wait(awaited, here, tuple(rank for rank in ranks if rank != here), hook, given_up)


def _watch(group: dist.ProcessGroup, what: str, seconds: float, error: str) -> None:
    """A wait outside of a reducer's backward: construction, buffers, checks."""
    dog = watchdog.current(group)
    if dog is None or _is_destroyed(group):
        return
    patient: Any = _owner.patience  # where nobody says whose wait it is, the most patient of the wrappers decides
    patient = (
        patient or [inspector.desync_timeout for inspector in dog.inspectors()] or [environment.desync_timeout()]
    )
    timeout = None if None in patient else max(patient)
    wrapper, number = _owner.collective or (group.group_name, 0)
    awaited = Awaited(wrapper, collective=number, what=what, joins=what == messages.SHADOWED)
    fails_as = dog.constructor_of(group.group_name) if _owner.constructs else ""
    look_into(dog, group, _wait(group, awaited)._replace(fails_as=fails_as), seconds, error, timeout)


class _Owner(threading.local):
    """Which wrapper's collective this thread waits in, by name and number, or whether that wrapper is being made; and
    its ``desync_timeout``."""

    collective: tuple[str, int] | None = None
    constructs = False
    patience: tuple[float | None, ...] = ()


_owner = _Owner()


@contextmanager
def waits_of(collective: tuple[str, int] | None, desync_timeout: float | None) -> Iterator[None]:
    """Inside, this thread's waits are those of ``collective``, by its wrapper's name and its number, or of a wrapper
    that is being made (None); and as patient as that wrapper's ``desync_timeout`` says."""
    outer = _owner.collective, _owner.constructs, _owner.patience
    _owner.collective, _owner.constructs, _owner.patience = collective, collective is None, (desync_timeout,)
    try:
        yield
    finally:
        _owner.collective, _owner.constructs, _owner.patience = outer


messages.set_watcher(_watch)


def look_into(
    dog: Watchdog, group: dist.ProcessGroup, wait: Wait, seconds: float, error: str, timeout: float | None
) -> None:
    """One look at a wait that has lasted ``seconds``, or ended with ``error``: :meth:`StallInspector.on_stall`."""
    if seconds < 0:  # what is under way would hold up the process's end
        dog.waits_no_more()
        return _abandon(group)
    if error:
        return _name_the_lost(dog, group, wait, seconds, error)
    dog.waits(wait)
    judged = judge(dog.facts(wait), wait)
    settled = dog.has_settled([fact for fact, kind in judged if kind is Kind.ENDED])
    causes: Judged = [
        (fact, kind) for fact, kind in judged if kind is Kind.FAILED or (kind is Kind.ENDED and settled)
    ]
    if not causes and timeout is not None and seconds >= timeout and dog.reports.is_settled:
        causes = absent(judged)
    if causes:
        raise _given_up(dog, group, wait, seconds, culprits(causes, judged), "")
    if times.warning_is_due(seconds):
        log.warning(slow(wait, seconds, judged, dog.store_is_silent()))


def _name_the_lost(dog: Watchdog, group: dist.ProcessGroup, wait: Wait, seconds: float, error: str) -> None:
    """A collective has failed. Where that looks like a lost peer, finds out which, and raises instead of it."""
    suspicious = _LOST_PEER.search(error) is not None
    begin, slept = time.monotonic(), 0.0  # counted: a test library may stop the clock

    while True:
        dog.waits(wait)
        judged = judge(dog.facts(wait), wait)
        causes = [(fact, kind) for fact, kind in judged if kind in {*CERTAIN, Kind.GONE, Kind.STOPPED}]
        # A rank's last report is still to be read, if nothing was read since the rank was seen to be gone.
        unread = any(fact.failure is None and dog.heard <= fact.ended_at for fact, _ in causes)
        patience = times.NAMING * times.look * suspicious
        if (causes and not unread) or dog.lost or max(time.monotonic() - begin, slept) >= patience:
            break
        if unread:
            dog.read_now()
        time.sleep(0.05)
        slept += 0.05
    if not causes and suspicious:
        causes = absent(judged)
    if causes:
        raise _given_up(dog, group, wait, seconds, culprits(causes, judged), error)
    dog.waits_no_more()


class LostPeer(RuntimeError):
    """Another rank will not take part in what this one waits for: it has raised, or is gone; or it did not come
    within the group's timeout, or ``desync_timeout``.

    The group is given up then. ``lost_ranks``: of the default group, those that this rank has given up.
    """

    lost_ranks: list[int]


def _given_up(
    dog: Watchdog, group: dist.ProcessGroup, wait: Wait, seconds: float | None, causes: Judged, error: str
) -> LostPeer:
    """Gives ``group`` up; returns why. On a device its wrappers know that first: a program that waits there goes on
    as soon as the group is aborted, with gradients that are no averages."""
    here = [each for each in dog.inspectors() if each.group is group]
    on_device = [each for each in here if each.has_streams]
    why = LostPeer(lost(wait, seconds, causes, error) + _PARTIAL_SUMS * bool(on_device))
    why.lost_ranks = lost_ranks(causes, wait.here)
    for each in on_device:
        each.lost = each.lost or why
    # Of what goes through this group; the program may go on in another one.
    names = wait.awaited.wrapper, group.group_name, *(each.key for each in here)
    dog.tell(str(why), *names, because=why.lost_ranks, wait=0.5)
    dog.waits_no_more()  # Once it has told why: a rank that does not wait, and has said nothing, would be suspected.
    _abandon(group)
    return why


_abandoned: set[int] = set()
_abandoning = threading.Lock()  # by the program, and by the watchdog


def _abandon(group: dist.ProcessGroup) -> None:
    """Gives up what is under way in ``group``, without waiting for it.

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
        threading.Thread(target=_abort, args=(group,), name="minddp: abort", daemon=True).start()


def _waits_in_its_end(group: dist.ProcessGroup) -> bool:
    with suppress(Exception):
        return any(group._get_backend(device).name() != "shm" for device in group._device_types)
    return True


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(Exception):
        group.abort()
