"""Which process a rank is, and what has become of it, as far as this machine can see (Linux's ``/proc``)."""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from typing import NamedTuple

# Fields of /proc/<pid>/stat after the name; proc(5) counts from 3 there.
_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
_UNREAPED = ("Z", "X")
_STOPPED = ("T", "t")


class Process(NamedTuple):
    """A process, to be recognized from elsewhere.

    ``machine`` is the same where process ids and boot times mean the same, and empty where nobody can tell.
    ``started`` tells the process from a later one with its number.
    """

    host: str
    machine: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Sight(NamedTuple):
    """``state``: "running", "stopped", "gone", or "elsewhere" for what cannot be seen from here; ``how`` it ended."""

    state: str
    how: str = ""


def here() -> Process:
    """This process."""
    machine, started = "", 0
    try:
        if os.readlink("/proc/self") == str(os.getpid()):  # else /proc is another PID namespace's
            machine, started = _machine(), int(_stat(os.getpid())[_STARTED])
    except OSError:
        pass
    return Process(socket.gethostname(), machine, os.getpid(), started)


def began(process: Process) -> float:
    """When a process of this machine did, in seconds since the machine has started; 0 where nobody can tell."""
    return process.started / os.sysconf("SC_CLK_TCK")


def now() -> float:
    """On the same clock, which all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        spaces = [name for name in ("pid", "time") if os.path.lexists(f"/proc/self/ns/{name}")]
        return " ".join([file.read().strip(), *(os.readlink(f"/proc/self/ns/{name}") for name in spaces)])


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:  # a name may be any bytes
        return file.read().rpartition(b")")[2].decode().split()


def _is_hidden(pid: int) -> bool:
    """It runs, though ``/proc`` shows only this user's processes (mounted with ``hidepid``)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return not os.path.exists(f"/proc/{pid}")


def _has_threads(pid: int) -> bool:
    """Its first thread alone has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def look(process: Process) -> Sight:
    """What has become of it. Asks this machine's kernel only, and never waits."""
    try:
        if not process.machine or process.machine != _machine():
            return Sight("elsewhere")
        fields = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return Sight("elsewhere" if _is_hidden(process.pid) else "gone")
    except OSError:
        return Sight("elsewhere")
    if int(fields[_STARTED]) != process.started:
        return Sight("gone")
    if fields[_STATE] in _UNREAPED and not _has_threads(process.pid):
        return Sight("gone", _how(int(fields[_EXIT_CODE])))
    return Sight("stopped" if fields[_STATE] in _STOPPED else "running")


def _how(status: int) -> str:
    """A wait status in words; 0 is also what a reader without the right to know sees."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}" if status else ""
