"""Fresh ranks in hundredths of a second: two fork servers of ``multiprocessing`` have imported torch, and fork.

Each process that wants ranks (a worker of pytest) has two servers of its own, which end with it. They have different
hash seeds, so that sets of strings are walked in other orders on rank 0 than on rank 1. A rank gets what a spawned
one gets: its starter's environment, folder, ``sys.path``, standard output and error. Only what libraries read of the
environment while they are imported is the server's: ``OMP_NUM_THREADS`` is 1.

Real starts (``spawn``, torchrun, ``python script.py``) stay where the start itself is the subject.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock

from tests.ranks_pool import Process

_starting = threading.Lock()


class Server:
    """A process that imports ``module`` once, before any thread is there, and forks.

    Args:
        module: what it imports.
        variables: environment variables of the server's own.
    """

    def __init__(self, module: str, **variables: str):
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([module])
        self._variables = variables

    def start(self, target: Callable[..., None], args: tuple[Any, ...], streams: tuple[int, int] = (1, 2)) -> Process:
        """Starts ``target(*args)``, with this process's environment and folder.

        ``streams`` become its standard output and error; they stay this process's, too.
        """
        arguments = (dict(os.environ), _Streams(*streams), target, args)
        process = multiprocessing.get_context("forkserver").Process(target=_live, args=arguments, daemon=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with self.lent():
            process.start()
        return process  # type: ignore[return-value]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, what ``multiprocessing`` starts by "forkserver" is forked by this server."""
        path = os.pathsep.join(filter(None, sys.path))
        with _starting:
            with mock.patch.dict(os.environ, {**self._variables, "PYTHONPATH": path}):
                self._server.ensure_running()
            with mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
                yield

    def close(self) -> None:
        """Ends the server. What it has started goes on."""
        self._server._stop()  # type: ignore[attr-defined]


def children_of(pid: int) -> list[int]:
    """The process ids of ``pid``'s children, and of theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children_of(child)]
    return found


class _Streams:
    """File descriptors that a started process has, too."""

    def __init__(self, *streams: int):
        self.streams = streams

    def __reduce__(self) -> Any:
        return list, ([DupFd(stream) for stream in self.streams],)


def _live(environment: dict[str, str], streams: list[Any], target: Any, args: Any) -> None:
    for number, stream in enumerate(streams, 1):
        descriptor = stream.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start others
    target(*args)
    atexit._run_exitfuncs()


servers = [Server("tests.preloaded", PYTHONHASHSEED=seed, OMP_NUM_THREADS="1") for seed in "12"]


def start_rank(
    target: Callable[..., None],
    args: tuple[Any, ...],
    rank: int,
    pipe: Connection,
    streams: tuple[int, int] = (1, 2),
) -> Process:
    """Starts ``target(*args, pipe)`` in a new process; ``pipe`` is this process's no longer.

    Args:
        target: a module-level function.
        args: picklable.
        rank: which of a group it is: neighbours have other hash seeds.
        pipe: the child's end of a pipe.
        streams: as for :meth:`Server.start`.
    """
    process = servers[rank % 2].start(target, (*args, pipe), streams)
    pipe.close()
    return process


class Program:
    """``python -c source arguments...``, forked, with the methods of ``subprocess.Popen`` that tests call.

    At its end the interpreter is taken apart, as of any Python program.

    Args:
        source: a program's text; it finds ``sys.argv`` and ``__name__ == "__main__"`` as usual.
        arguments: of the command line.
        rank: which of a group it is: neighbours have other hash seeds.
    """

    def __init__(self, source: str, *arguments: str, rank: int = 0):
        ours, unused = multiprocessing.Pipe()
        ours.close()
        read, write = os.pipe()
        self.stdout = os.fdopen(read)
        self._stderr = tempfile.TemporaryFile("w+")
        try:
            streams = (write, self._stderr.fileno())
            self._process: Any = start_rank(_run_program, (source, arguments), rank, unused, streams)
        finally:
            os.close(write)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; the rest of what it has written to stdout (some pages at most), and all of stderr."""
        self.wait(timeout)
        self._stderr.seek(0)
        return self.stdout.read(), self._stderr.read()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """It is killed if it still runs."""
        self._process.kill()
        self.wait()
        self.stdout.close()
        self._stderr.close()


def _run_program(source: str, arguments: tuple[str, ...], pipe: Connection) -> None:
    pipe.close()
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    code: Any = 0
    try:
        exec(compile(source, "<string>", "exec"), program.__dict__)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.last_value = error  # as the interpreter does it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    ctypes.pythonapi.Py_Exit(code or 0)


def run(source: str, *arguments: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """``python -c source arguments...`` in a forked process, in this process's folder; its end and what it wrote."""
    with Program(source, *arguments) as program:
        out, err = program.communicate(timeout)
        return subprocess.CompletedProcess(["-c", *arguments], program.wait(), out, err)


def run_module(name: str, *arguments: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """The same of ``python -m name arguments...``."""
    source = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return run(source, *arguments, timeout=timeout)
