"""Run a function on real ranks: spawned processes joined by a Gloo group on loopback.

Overview
    ``run_ranks(fn, 2, *args)`` calls ``fn(rank, world_size, *args)`` on two ranks, each inside an
    initialized default process group, and returns the two results in rank order. The processes are
    kept between calls (importing torch costs more than most tests), the process group is not: every
    call gets a new one.

What always holds
    A call ends within ``timeout`` seconds, in which the start of new ranks does not count. When a rank raises, the
    others get ``grace`` seconds to end by themselves; what still runs then is killed, by process id, and the next
    call starts anew. Ranks that have all answered are kept, also where one raised, if each says that it is clean: its
    process groups are destroyed, no call to them is under way, and a call that raised has left no thread.
    The parent's exit ends the ranks.

``fn`` must be importable by name (a module-level function), and its arguments and result picklable;
tensors travel by value.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

__all__ = ["Process", "RankError", "RankPool", "Start", "free_port", "run_ranks", "shutdown", "spawn", "start_rank"]

START_SECONDS = 120.0  # in which new ranks have imported torch, on a busy machine too
CLEAN_SECONDS = 10.0  # in which a rank that has answered ends its groups; else it is not used again
THREADS_SECONDS = 3.0  # of these, for threads to end


class RankError(AssertionError):
    """At least one rank raised, died, or did not end in time.

    ``failures`` maps a rank to the text of what happened there (a traceback, or how it died);
    ``results`` maps the ranks that ended well to their results.
    """

    def __init__(self, message: str, failures: dict[int, str], results: dict[int, Any]):
        super().__init__(message)
        self.failures = failures
        self.results = results


def _text(failures: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank}\n{failures[rank]}" for rank in sorted(failures))


def _next_word(pipe: Connection, deadline: float) -> Any:
    """What a rank says next; None: nothing by then. Raises EOFError or OSError where it has died."""
    return pipe.recv() if pipe.poll(max(deadline - time.monotonic(), 0)) else None


class Process(Protocol):
    """What a pool needs of a rank's process; ``multiprocessing``'s have it."""

    pid: int | None
    exitcode: int | None

    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


# start(target, args, rank, pipe): calls target(*args, pipe) in a new process, and closes the pipe's end in this one.
Start = Callable[[Callable[..., None], tuple[Any, ...], int, Connection], Process]


def spawn(target: Callable[..., None], args: tuple[Any, ...], rank: int, pipe: Connection) -> Process:
    """A new Python, which imports what it needs (``multiprocessing``'s ``spawn``)."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*args, pipe), daemon=True)
    process.start()
    pipe.close()
    return process  # type: ignore[return-value]


# How ranks start where a pool does not say. A test suite may put a quicker way here, for all its pools.
start_rank: Start = spawn


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago.

    It is none of those that the kernel gives to connections, which come and go meanwhile.
    """
    import secrets
    import socket

    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as stream:
            end = int(stream.read().split()[0])
    except OSError:
        end = 32768
    begin = min(10000, end - 1)
    for _ in range(100):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", begin + secrets.randbelow(end - begin)))
            return int(sock.getsockname()[1])
    raise RuntimeError(f"free_port: none of a hundred ports from {begin} to {end - 1} is free")


def _serialize(value: Any) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _deserialize(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _threads() -> int:
    """How many this process has, those of libraries included where the system tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


def _threads_are_gone(before: int) -> bool:
    """Whether there is no thread that was not there before a call that raised: one that waits for a rank in a
    collective, a server, a user's own. Those of groups end soon after the last reference to their group."""
    gc.collect()  # what the failure's frames held
    deadline = time.monotonic() + THREADS_SECONDS
    while _threads() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    return _threads() <= before


def _groups_are_gone() -> bool:
    """Whether this rank's next group will have the name that the others' has: torch counts those that could not be
    made, too, and ranks that count differently wait for each other for ever."""
    import torch.distributed as dist

    return bool(dist.distributed_c10d._world.group_count == 0)


def _rank_main(rank: int, world_size: int, threads: int, pipe: Connection) -> None:
    """The loop of one rank: receive a call, run it in a process group of its own, answer, say whether it is clean."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.enable()  # a rank that dies of a signal says where
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    pipe.send("here")
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        if message is None:
            return
        call, store_path, backend, env = message
        saved = {name: os.environ.get(name) for name in env}
        os.environ.update(env)
        before = _threads()
        try:
            fn, args = pickle.loads(call)
            torch.manual_seed(0)
            if backend is not None:
                store = dist.FileStore(store_path, world_size)
                dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
                dist.barrier()  # a rank that ends at once must not close while others still connect
            answer: tuple[bool, bytes | str] = (True, _serialize(fn(rank, world_size, *args)))
        except BaseException as error:  # the parent raises it again, with every rank's own text
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                return
            answer = (False, traceback.format_exc())
        finally:
            for name, value in saved.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        try:
            pipe.send(answer)
            well, _ = answer
            if dist.is_initialized() and (backend is not None or not well):
                dist.destroy_process_group()
            pipe.send(well or (_groups_are_gone() and _threads_are_gone(before)))
        except (BrokenPipeError, OSError):
            return


class RankPool:
    """``world_size`` processes that run one function at a time, together.

    Args:
        world_size: how many.
        threads: intra-op threads of each.
        start: how a rank's process starts; None: as ``start_rank`` says.
    """

    def __init__(self, world_size: int, threads: int = 1, start: Start | None = None):
        self.world_size = world_size
        self._threads = threads
        self._start_rank = start
        self._processes: list[Process] = []
        self._pipes: list[Connection] = []
        # Of the ranks' stores. As long as the ranks: what a rank has left of a group may end at any time, its store
        # with it, and a FileStore whose file goes in that very moment ends the process.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0
        self._dirty = False  # the ranks have answered a call, and not been asked yet whether they left it behind

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minddp-ranks-", ignore_cleanup_errors=True)
        start = self._start_rank or start_rank
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(start(_rank_main, (rank, self.world_size, self._threads), rank, theirs))
            self._pipes.append(ours)
        deadline = time.monotonic() + START_SECONDS
        late = {}
        for rank, pipe in enumerate(self._pipes):
            with suppress(EOFError, OSError):  # it has died: the call says so
                if _next_word(pipe, deadline) is None:
                    late[rank] = f"did not start within {START_SECONDS} s"
        if late:
            self._show_where(late)
            self.close()
            raise RankError(_text(late), late, {})

    def _is_clean(self) -> bool:
        """Whether every rank is there, and has left its last call behind."""
        deadline = time.monotonic() + CLEAN_SECONDS
        try:
            for pipe in self._pipes if self._dirty else []:
                if not _next_word(pipe, deadline):
                    return False
        except (EOFError, OSError):
            return False
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Ends the ranks: asks, then kills by process id."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._dirty = [], [], False
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 5.0,
        backend: str | None = "gloo",
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Calls ``fn(rank, world_size, *args)`` on every rank; the results in rank order.

        Raises :class:`RankError` when a rank raises, dies, or does not answer in ``timeout`` seconds.
        """
        if not self._is_clean():
            self.close()  # a test killed one, or it kept something of its call
        if not self._processes:
            self._start()
        assert self._folder is not None
        self._runs += 1
        store = os.path.join(self._folder.name, f"store{self._runs}")
        message = (pickle.dumps((fn, args)), store, backend, env or {})
        for pipe in self._pipes:
            with suppress(OSError):  # it has died
                pipe.send(message)
        results, failures, answered = self._collect(timeout, grace)
        self._dirty = True
        if not answered:
            self.close()
        if failures:
            raise RankError(_text(failures), failures, results)
        return [results[rank] for rank in range(self.world_size)]

    def _show_where(self, stuck: Iterable[int]) -> None:
        """Each writes the stacks of its threads to stderr, and ends."""
        for process in (self._processes[rank] for rank in stuck):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
                process.join(2)

    def _collect(self, timeout: float, grace: float) -> tuple[dict[int, Any], dict[int, str], bool]:
        """Results, failures, and whether every rank has answered."""
        answered = True
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout
        while pending:
            left = deadline - time.monotonic()
            ready = wait(list(pending.values()), max(left, 0))
            if not ready:
                why = "did not end after another rank failed" if failures else f"did not end within {timeout} s"
                answered = False
                self._show_where(pending)
                failures |= dict.fromkeys(pending, why)
                break
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                pipe = pending.pop(rank)
                try:
                    ok, payload = pipe.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    answered = False
                    ok, payload = False, f"process died, exit code {self._processes[rank].exitcode}"
                if ok:
                    results[rank] = _deserialize(payload)
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + grace)
                    failures[rank] = payload
        return results, failures, answered


_pools: dict[tuple[int, int], RankPool] = {}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 5.0,
    backend: str | None = "gloo",
    env: dict[str, str] | None = None,
    threads: int = 1,
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` on ``world_size`` real ranks; see the module's text.

    Args:
        fn: a module-level function.
        world_size: how many ranks.
        args: picklable arguments, the same for every rank.
        timeout: seconds after which the call fails and the ranks are killed; without the start of new ranks.
        grace: seconds that the other ranks get after one has raised.
        backend: the default group's backend; ``None`` makes no group.
        env: environment variables set during the call.
        threads: intra-op threads of each rank.

    Returns:
        The ranks' results, in rank order.

    Raises:
        RankError: a rank raised, died or did not end; ``failures`` has each rank's text.
    """
    pool = _pools.setdefault((world_size, threads), RankPool(world_size, threads))
    return pool.run(fn, *args, timeout=timeout, grace=grace, backend=backend, env=env)


@atexit.register
def shutdown() -> None:
    """Ends every rank that ``run_ranks`` keeps."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
