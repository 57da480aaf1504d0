"""Who outlives whom: process groups, reducers and the interpreter.

Gloo's threads destroy a collective once it has ended, and take the GIL for that when its tensors are known to
Python. Three things follow. Nobody may join those threads while holding the GIL. They must be gone before
the interpreter is: one that asks for the GIL while Python shuts down is ended in the middle of a C++
destructor, and the process aborts ("terminate called without an active exception"). And none of them may be
the last to release its own group: it would join itself, and the process aborts too. That happens with
communication hooks whose callbacks know the group (PowerSGD's do): backward is over when a callback has run,
and the thread frees it a moment later. A group that was given to ``dist.destroy_process_group()`` ends with its
last reference, so nothing here may keep one much beyond that.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Its functions take the default group as a default argument, evaluated where the module is imported, and
# torch imports it at the first forward or optimizer. Imported here, usually before there is a group, it keeps none.
import torch.distributed.nn.functional  # noqa: F401

from . import _C
from .messages import is_torchs

# In seconds, without the GIL: for a thread to destroy a group's last collective, and what came with it.
_MOMENT = 0.02
# Of a thread's own processor time, which does not pass while it waits for the processor: who has had more than that
# computes for the program.
_PATIENCE = 1.0
_LONGEST = 120.0  # if the system gives a thread no processor at all
_MOMENT_FOR_CALLBACKS = 0.1

_leaving: set[threading.Thread] = set()
_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id: one may have no hash
_ever = threading.Event()


def end_in_order(wrapper: Any) -> None:
    """When the interpreter ends, ``wrapper`` releases its group in time, and threads of groups come to rest."""
    _ever.set()
    _wrappers[id(wrapper)] = wrapper


def outlive(reducer: _C.Reducer, group: dist.ProcessGroup) -> None:
    """Keeps ``group`` until after the reducer's C++ half is gone.

    That half dies under the GIL, and must not be the last to release the group. Released from Python, a
    group is destroyed without the GIL.
    """
    weakref.finalize(reducer, id, group).atexit = False


def outlive_callbacks(reducer: _C.Reducer, group: dist.ProcessGroup) -> None:
    """Keeps ``group`` until a moment after ``reducer``: for hooks' callbacks that hold it too."""
    weakref.finalize(reducer, _let_go_later, group).atexit = False


def _let_go_later(group: dist.ProcessGroup) -> None:
    thread = threading.Thread(
        target=lambda group: time.sleep(_MOMENT_FOR_CALLBACKS),
        args=[group],  # which the thread drops at its end
        name="minddp: the end of a group",
        daemon=True,
    )
    with suppress(RuntimeError):  # no new threads while Python shuts down: the moment is over then
        thread.start()
        _leaving.difference_update([other for other in _leaving if not other.is_alive()])
        _leaving.add(thread)


def _rest() -> None:
    """Until this process's other threads have had nothing to do for a moment: on a busy machine one that wants to run
    waits for the processor, for as long as that takes."""
    deadline = time.monotonic() + _LONGEST
    begin, quiet = dict(_running()), 0
    while quiet < 4 and time.monotonic() < deadline:
        time.sleep(_MOMENT / 4)
        waiting = [thread for thread, ran in _running() if ran - begin.setdefault(thread, ran) < _PATIENCE]
        quiet = 0 if waiting else quiet + 1


def _running() -> Iterator[tuple[str, float]]:
    """This process's threads that have or want the processor, with their seconds of it so far. Without those that the
    program has started in Python. Linux says so; elsewhere nobody is asked."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("Dummy-")]
    pythons = {str(thread.native_id) for thread in threads}
    pythons.add(str(threading.get_native_id()))  # in a forked process its object still has the parent's number
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            state, *numbers = stat.read_bytes().rpartition(b")")[2].split()
            if stat.parent.name not in pythons and state == b"R":
                yield stat.parent.name, sum(map(int, numbers[10:12])) / os.sysconf("SC_CLK_TCK")  # user and system


def connections(port: int) -> set[int]:
    """The descriptors of this process's connections to a port."""
    found = set()
    for fd in map(int, os.listdir("/dev/fd")):
        with suppress(OSError, LookupError), _borrowed(fd) as link:  # closed meanwhile, no socket, or without a port
            if link.getpeername()[1] == port:
                found.add(fd)
    return found


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """As an object that neither closes the descriptor nor changes how it blocks."""
    link = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=fd)
    try:
        yield link
    finally:
        link.detach()


def cut_connections(port: int) -> None:
    """Ends this process's connections to a port, and with them the requests that wait there for a stopped host."""
    for fd in connections(port):
        with suppress(OSError), _borrowed(fd) as link:
            link.shutdown(socket.SHUT_RDWR)


def hangs_up(fds: Iterable[int]) -> bool:
    """Whether the other end of one of these connections is closed: its process has ended, or lets go of it."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, getattr(select, "POLLRDHUP", 0))  # Linux; elsewhere the next request finds it
    return bool(poll.poll(0))


@atexit.register
def _settle_groups() -> None:
    """Before the interpreter goes: groups that were destroyed end, and the threads of all groups come to rest, also
    of those whose wrappers are gone."""
    modules = list(_wrappers.values())  # kept by global variables or reference cycles
    destroyed = [ddp for ddp in modules if not is_torchs(ddp.process_group)]
    if _ever.is_set():
        _rest()
    if any(ddp._minddp_averager is not None and ddp._minddp_averager.hook for ddp in destroyed):
        time.sleep(_MOMENT_FOR_CALLBACKS)
    for ddp in destroyed:
        ddp._minddp_let_go()
    for thread in list(_leaving):
        thread.join()
