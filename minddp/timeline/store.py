"""What ranks exchange through the process group's store for a report or a trace: in a limited time, or not at all.

A request to a store has no end where its host is stopped, its file is gone, or another thread waits on the same
connection. So requests run on a thread of their own, over a connection of their own, and the program's thread waits
for a limited time. There is one such thread at most. The connection is kept: for each new one torch's store asks for
the name of its address (DNS), on the one thread on which it answers all ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from .. import lifetime

__all__ = ["NoAnswer", "ask", "comes", "forget"]

Answer = TypeVar("Answer")
_LEAST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds, between two looks
_RANKS_A_SECOND = 20_000  # so many looks a second the store's host has to answer
_EXIT_SECONDS = 1.0

_EARLIER = "the store has not answered an earlier request yet"

_kept: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()  # by store: process, connection
_turn = threading.Lock()  # of who looks at _thread, and begins another one
_thread: threading.Thread | None = None
_port: int | None = None  # of the store's host that the thread asks


class NoAnswer(Exception):
    """The store has not answered, and why."""


def ask(base: dist.Store, prefix: str, seconds: float, errand: Callable[[Any], Answer]) -> Answer:
    """What ``errand(store)`` returns, where ``store`` has the keys of ``base`` below ``prefix``.

    Raises:
        NoAnswer: it did not end within ``seconds``, or raised something, which is the cause.
    """
    global _thread, _port
    end = time.monotonic() + seconds
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(errand(dist.PrefixStore(prefix, _connection(base))))
        except Exception as error:
            _kept.pop(base, None)
            errors.append(error)

    mine = threading.Thread(target=run, name="minddp: what ranks exchange", daemon=True)
    if not _turn.acquire(timeout=max(0.0, seconds)):
        raise NoAnswer(_EARLIER)
    try:
        if _thread is not None:
            _thread.join(max(0.0, end - time.monotonic()))
            if _thread.is_alive():
                raise NoAnswer(_EARLIER)
        _port, _thread = None, None
        mine.start()
        _thread = mine
    except RuntimeError as error:  # the process may have no more threads
        raise NoAnswer(str(error)) from error
    finally:
        _turn.release()
    mine.join(max(0.0, end - time.monotonic()))
    if errors:
        raise NoAnswer(str(errors[0])) from errors[0]
    if not answers:
        raise NoAnswer(f"the store has not answered within {seconds:.1f} s")
    return answers[0]


def _connection(base: Any) -> Any:
    """The store's own for this thread, if it has connections."""
    global _port
    store = base
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.FileStore) and not os.path.exists(store.path):  # type: ignore[attr-defined]
        raise NoAnswer(f"the store's file {store.path} is gone")  # type: ignore[attr-defined]
    if not isinstance(store, dist.TCPStore):
        return base
    _port = store.port
    process, kept = _kept.get(base, (0, None))
    if process != os.getpid():
        kept = base.clone()
        _kept[base] = os.getpid(), kept
    return kept


def comes(store: Any, keys: Sequence[str], seconds: float, ranks: int) -> bool:
    """Whether ``keys`` are there in time; ``ranks`` of them look at the same time, each ever more seldom."""
    pause, longest = _LEAST_PAUSE, max(_LONGEST_PAUSE, ranks / _RANKS_A_SECOND)
    while not store.check(keys):
        if seconds <= 0:  # counted in pauses, since a clock may stand still
            return False
        time.sleep(pause)
        seconds, pause = seconds - pause, min(2 * pause, longest)
    return True


def forget(store: Any, keys: Sequence[str]) -> None:
    """Deletes ``keys``, if the store can."""
    for key in keys:
        with suppress(RuntimeError, NotImplementedError):
            store.delete_key(key)


@atexit.register
def _end() -> None:
    """A thread that comes back from a request while the interpreter ends would abort the process."""
    if _thread is not None and _thread.is_alive():
        if _port is not None:
            lifetime.cut_connections(_port)
        _thread.join(_EXIT_SECONDS)
