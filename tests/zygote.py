"""Fresh ranks in hundredths of a second: processes that have imported torch once, and fork.

Life cycle: who first needs a rank starts :data:`SERVERS` zygotes (``python -m tests.zygote FOLDER INDEX``), each with
a hash seed of its own, so that sets of strings are walked in other orders on rank 0 than on rank 1. The workers of
one pytest share them by :data:`FOLDER`'s sockets. A zygote ends when its last user has.

What always holds: a zygote has one thread and has run no collective when it forks; whatever starts a thread there
raises with the thread's name. A rank gets its user's environment, folder, ``sys.path``, standard input, output and
error, and a random state of its own, as a spawned process does. A :class:`Program` ends as any Python program. Only
what libraries read of the environment while they are imported is the zygote's: ``OMP_NUM_THREADS`` is 1.

Real starts (``spawn``, torchrun, ``python script.py``) stay where the start itself is the subject: `REAL_STARTS`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = [
    "REAL_STARTS", "Program", "Rank", "hash_seeds", "run_and_end", "run_module",
    "start_rank", "start_zygotes", "started",
]  # fmt: skip

# Tests that start processes as a user does, with the reason; everything else goes through `start_rank`.
REAL_STARTS = {
    "tests/benchmarks/test_gpu_check.py": "what runs without torch",
    "tests/conformance": "a zygote of its own",
    "tests/docs": "every command of the pages",
    "tests/benchmarks/test_links.py": "who holds a link, and dies",
    "tests/engines": "the engines' own starts",
    "tests/faults": "how processes end, and are told of",
    "tests/guards": "the end of a program, and a process to be told of",
    "tests/launching/test_command.py": "the program is started by the command",
    "tests/launching/test_install.py": "the start is what is changed",
    "tests/libraries": "scripts under torchrun",
    "tests/mutants": "pytest itself, in a copy",
    "tests/package": "wheels, in empty environments",
    "tests/planner/test_auto_buckets.py": "the command",
    "tests/project/test_import.py": "what an import costs and loads",
    "tests/project/test_zygote.py": "who is killed, with zygotes of its own",
    "tests/sanitizers": "other builds",
    "tests/shm/test_containers.py": "namespaces are made before the start",
    "tests/timeline/test_trace.py": "variables that are read at the start",
    "tests/timeline/test_trace_ranks.py": "a program that ends without a word",
}

FOLDER = "MINDDP_TEST_ZYGOTES"  # where the sockets are; set by the first user, found by its children
SEEDS = "MINDDP_TEST_HASH_SEEDS"  # the like of 17,4711: those of an earlier run
SERVERS = 2
START_SECONDS = 120.0
PRELOAD = (
    "numpy", "pytest", "torch", "torch._dynamo", "torch._dynamo.backends.common",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "torch.distributed.algorithms.join",
    "torch.distributed.optim", "torch.func", "torch.nn.parallel.distributed", "torch.utils.checkpoint",
    "minddp", "minddp.testing",
)  # fmt: skip
_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!q")

started = 0  # ranks that this process has had forked

# --- who wants a rank ------------------------------------------------------------------------------------


class Rank:
    """A started process: as much of ``multiprocessing.Process`` as its user needs."""

    def __init__(self, line: socket.socket, pid: int):
        self._line = line
        self.pid = pid
        self.exitcode: int | None = None

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, for ``timeout`` seconds at most."""
        if self.exitcode is None and wait([self._line], timeout):
            answer = _read(self._line, _NUMBER.size)
            self.exitcode = _NUMBER.unpack(answer)[0] if answer else 255  # the zygote itself has died
            self._line.close()

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the zygote has yet to say so
                os.kill(self.pid, signal.SIGKILL)


def start_rank(
    target: Callable[..., None],
    args: tuple[Any, ...],
    rank: int,
    pipe: Connection,
    streams: tuple[int, int, int] = (0, 1, 2),
) -> Rank:
    """``target(*args, pipe)`` in a new process; ``pipe`` is this process's no longer.

    Args:
        target: a function that can be found by its module and name.
        args: picklable.
        rank: which of a group it is: neighbours have other hash seeds.
        pipe: the child's end of a pipe.
        streams: what become its standard input, output and error; stay this process's, too.

    Returns:
        The process, running.
    """
    global started
    prepare = spawn.get_preparation_data(f"rank {rank}")
    prepare["authkey"] = bytes(prepare["authkey"])  # which pickles for spawn alone
    task = {
        "prepare": prepare,
        "environment": dict(os.environ),
        "call": pickle.dumps((target, args)),
    }
    data = pickle.dumps(task)
    line = _connect(start_zygotes() / f"{rank % SERVERS}.socket")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    socket.send_fds(line, [_LENGTH.pack(len(data))], [*streams, pipe.fileno()])
    line.sendall(data)
    pipe.close()
    answer = _read(line, _NUMBER.size)
    if not answer:
        raise RuntimeError("the zygote died; its stderr says why")
    started += 1
    return Rank(line, _NUMBER.unpack(answer)[0])


class Program:
    """``python -c source arguments...`` from a zygote, with the methods of ``subprocess.Popen`` that tests call.

    ``stdout`` and ``stderr`` are text, to be read while it runs, or by :meth:`communicate`.

    Args:
        source: a program's text; it finds ``sys.argv`` and ``__name__ == "__main__"`` as usual.
        arguments: of the command line.
        rank: which of a group it is: neighbours have other hash seeds.
    """

    def __init__(self, source: str, *arguments: str, rank: int = 0):
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        ours, theirs = multiprocessing.Pipe()
        ours.close()
        try:
            with open(os.devnull) as null:
                streams = (null.fileno(), out_end, err_end)
                self._rank = start_rank(_run_program, (source, arguments), rank, theirs, streams)
        finally:
            os.close(out_end)
            os.close(err_end)
            self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self.pid = self._rank.pid

    @property
    def returncode(self) -> int | None:
        return self._rank.exitcode

    def poll(self) -> int | None:
        self._rank.join(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._rank.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written and nobody has read, once it has ended."""
        texts = ["", ""]

        def read(index: int, stream: Any) -> None:
            texts[index] = stream.read()

        readers = [
            threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._rank.kill()


def run_module(name: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``python -m name arguments...`` from a zygote, in this process's folder; its end and what it wrote."""
    program = Program(f"from tests.zygote import run_and_end; run_and_end({name!r})", *arguments)
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess([name, *arguments], program.wait(), out, err)


def run_and_end(name: str) -> None:
    """``python -m name`` in this process, and its end, without taking the interpreter apart."""
    code: Any = None
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _end(code or 0)


def _run_program(source: str, arguments: tuple[str, ...], pipe: Connection) -> None:
    pipe.close()
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), main_module.__dict__)


def hash_seeds() -> str:
    """``SEEDS``' value that gives the zygotes of this run again; empty where none was needed."""
    if FOLDER not in os.environ:
        return ""
    seeds = sorted(Path(os.environ[FOLDER]).glob("*.seed"))
    return ",".join(seed.read_text() for seed in seeds)


_leases: dict[Path, list[socket.socket]] = {}


def start_zygotes() -> Path:
    """Starts them if none run. Returns where their sockets are. They last as long as this process."""
    if FOLDER not in os.environ:
        make_folder()
    folder = Path(os.environ[FOLDER])
    if folder not in _leases:
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder in _leases:  # another thread has just got them, and they end with the last one that is let go
                return folder
            try:
                _leases[folder] = _lease(folder)
            except (FileNotFoundError, ConnectionRefusedError):  # none yet, or the last user has just gone
                _start_zygotes(folder)
                _leases[folder] = _lease(folder)
    return folder


def _lease(folder: Path) -> list[socket.socket]:
    lines = [_connect(folder / f"{index}.socket") for index in range(SERVERS)]
    for line in lines:
        line.sendall(_LENGTH.pack(0))
    return lines


def make_folder() -> None:
    """For this process and those that it starts: pytest's workers share the zygotes."""
    os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="minddp-zygotes-")

    def remove(owner: int = os.getpid()) -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _start_zygotes(folder: Path) -> None:
    asked = os.environ.get(SEEDS)
    seeds = asked.split(",") if asked else [str(random.SystemRandom().randrange(1, 2**32)) for _ in range(SERVERS)]
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for old in folder.glob("*.socket"):
        old.unlink()
    for index, seed in enumerate(seeds):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.zygote", str(folder), str(index)]
        processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        (folder / f"{index}.seed").write_text(seed)
    deadline = time.monotonic() + START_SECONDS
    while not all((folder / f"{index}.socket").exists() for index in range(SERVERS)):
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            for process in processes:
                process.kill()
                process.wait()
            raise RuntimeError("a zygote did not start; its stderr says why")
        time.sleep(0.02)


def _connect(path: Path) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))
    return line


def _read(line: socket.socket, size: int) -> bytes:
    """``size`` bytes, or nothing where the other end has closed."""
    data = bytearray()
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


# --- the zygote ------------------------------------------------------------------------------------------


def warm() -> None:
    """Imports what forked ranks would each import, and starts no thread."""
    for name in PRELOAD:
        importlib.import_module(name)
    import torch

    # The first step of an optimizer imports a good part of torch.
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    with mock.patch("torch.cuda.is_available", return_value=False):  # to ask it starts a thread where there is a GPU
        torch.optim.Adam([parameter], foreach=False).step()
        torch.optim.SGD([parameter]).step()
    torch.func.functional_call(torch.nn.Linear(1, 1), {}, (torch.zeros(1, 1),))
    if torch.version.cuda is None:  # torch.manual_seed() keeps the caller's stack for each device that is not there
        for device in (torch.cuda, torch.xpu, torch.mtia):
            device.manual_seed_all = lambda seed: None  # type: ignore[attr-defined,method-assign]
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's operators: a tenth of a second at each rank's end, for nothing
    gc.collect()
    gc.freeze()  # neither walked nor, in the forked ranks, copied


def _threads() -> list[str]:
    tasks = Path("/proc/self/task")
    return [(task / "comm").read_text().strip() for task in tasks.iterdir()]


class _Server:
    """Forks on demand, and tells each user how its ranks ended."""

    def __init__(self, folder: Path, index: int):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / f"{index}.preparing"))
        self._listener.listen(64)
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to everybody: users end, and so do we
        self._ranks: dict[int, socket.socket] = {}
        self._leases: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        os.rename(folder / f"{index}.preparing", folder / f"{index}.socket")

    def serve(self) -> Callable[[], None] | None:
        """In a forked rank: what it is to do. In the zygote: None, once nobody needs it."""
        needed_by = time.monotonic() + START_SECONDS
        while self._leases or time.monotonic() < needed_by:
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._listener:
                    task = self._answer(self._listener.accept()[0])
                    if task is not None:
                        return task
                elif key.fileobj == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                else:
                    self._end_lease(key.fileobj)  # type: ignore[arg-type]
                    needed_by = 0
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)  # its user died without a word
        return None

    def _answer(self, line: socket.socket) -> Callable[[], None] | None:
        header, descriptors, _, _ = socket.recv_fds(line, _LENGTH.size, 4)
        size = _LENGTH.unpack(header)[0] if header else 0
        if size == 0:
            self._leases.add(line)
            self._selector.register(line, selectors.EVENT_READ)
            return None
        if len(_threads()) > 1:
            raise RuntimeError(f"threads in a zygote: {_threads()}")
        pid = os.fork()
        if pid == 0:
            data = _read(line, size)
            line.close()
            self._forget()
            return lambda: _live(data, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        line.sendall(_NUMBER.pack(pid))
        self._ranks[pid] = line
        return None

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            line = self._ranks.pop(pid)
            try:
                line.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
            except OSError:
                pass  # its user is gone
            line.close()

    def _end_lease(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        self._leases.remove(line)
        line.close()

    def _forget(self) -> None:
        """What is the zygote's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for line in [self._listener, *self._leases, *self._ranks.values()]:
            line.close()
        os.close(self._wake)
        os.close(self._woken)


def _live(data: bytes, descriptors: list[int]) -> None:
    """A forked rank becomes what a spawned one is, and does its work."""
    *streams, pipe = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    task = pickle.loads(data)
    os.environ.clear()
    os.environ.update(task["environment"])
    spawn.prepare(task["prepare"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # which Python before 3.13 leaves as it was
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    target, args = pickle.loads(task["call"])
    target(*args, Connection(pipe))
    if target is not _run_program:
        _end()


def _end(code: int = 0) -> None:
    """As multiprocessing ends what it has forked: the interpreter is not taken apart, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(folder: str, index: str) -> None:
    warm()
    task = _Server(Path(folder), int(index)).serve()
    if task is not None:
        task()


if __name__ == "__main__":
    multiprocessing.process.current_process().name = "zygote"
    main(sys.argv[1], sys.argv[2])
