"""Run a function on real ranks: spawned processes joined by a Gloo group on loopback.

Overview
    ``run_ranks(fn, 2, *args)`` calls ``fn(rank, world_size, *args)`` on two ranks, each inside an
    initialized default process group, and returns the two results in rank order.

What always holds
    * A call ends within ``timeout`` seconds, in which the start of new ranks does not count. When a rank raises, the
      others get ``grace`` seconds to end by themselves; whatever still runs then is killed, by process id.
    * Ranks whose call ended well on all of them wait for the next call (importing torch costs more than most tests);
      every call has a process group of its own. After any other end, an exception in this process included (Ctrl-C,
      a test runner's timeout), the ranks are ended, and the next call starts new ones: no call finds anything of
      one that failed, neither its answer nor half a group nor a thread.
    * The parent's exit ends the ranks.

``fn`` must be importable by name (a module-level function), and its arguments and result picklable;
tensors travel by value.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

__all__ = ["Process", "RankError", "RankPool", "Start", "free_port", "run_ranks", "shutdown", "spawn", "start_rank"]

START_SECONDS = 600.0  # in which new ranks have imported torch, on a busy machine too
CALL_SECONDS = 300.0  # in which a call ends, unless it says otherwise
GRACE_SECONDS = 120.0  # in which the others end after one has raised
END_SECONDS = 60.0  # in which a process that was killed, or has closed its pipe, has ended


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


def _rank_main(rank: int, world_size: int, threads: int, pipe: Connection) -> None:
    """A rank receives a call, runs it in a process group of its own, and answers; a call that raised is its last."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.enable()  # a rank that dies of a signal says where
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    # An interrupt from the terminal reaches every process; the parent, which it reaches too, ends the ranks.
    with suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.send((True, "here"))
        well = True
        while well and (message := pipe.recv()) is not None:
            call, store_path, backend, env = message
            saved = {name: os.environ.get(name) for name in env}
            os.environ.update(env)
            try:
                fn, args = pickle.loads(call)
                torch.manual_seed(0)
                if backend is not None:
                    store = dist.FileStore(store_path, world_size)
                    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
                    dist.barrier()  # a rank that ends at once must not close while others still connect
                answer: bytes | str = _serialize(fn(rank, world_size, *args))
                if backend is not None and dist.is_initialized():
                    dist.destroy_process_group()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # the parent raises it again, with every rank's own text
                well, answer = False, traceback.format_exc()
            finally:
                for name, value in saved.items():
                    os.environ.pop(name, None)
                    if value is not None:
                        os.environ[name] = value
            pipe.send((well, answer))


class _Ranks:
    """``world_size`` processes that are there; they take calls until one does not end well.

    Raises :class:`RankError` when a process does not start.
    """

    def __init__(self, world_size: int, threads: int, start: Start):
        # Of the ranks' stores. It stays as long as the ranks: what a rank has left of a group may end at any time,
        # its store with it, and a FileStore whose file goes in that very moment ends the process.
        self._folder = tempfile.TemporaryDirectory(prefix="minddp-ranks-", ignore_cleanup_errors=True)
        self._calls = 0
        self._processes: list[Process] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe()
                self._pipes.append(ours)
                self._processes.append(start(_rank_main, (rank, world_size, threads), rank, theirs))
            _, failures = self._answers(START_SECONDS, START_SECONDS, f"did not start within {START_SECONDS} s")
            if failures:
                raise RankError(_text(failures), failures, {})
        except BaseException:
            self.close()
            raise

    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(self, call: bytes, timeout: float, grace: float, backend: str | None, env: dict[str, str]) -> list[Any]:
        """The results in rank order. Where it raises, these ranks are of no further use."""
        self._calls += 1
        store = os.path.join(self._folder.name, f"store{self._calls}")
        for pipe in self._pipes:
            with suppress(OSError):  # it has died, as its answer says
                pipe.send((call, store, backend, env))
        answers, failures = self._answers(timeout, grace, f"did not end within {timeout} s")
        results = {}
        for rank, (well, payload) in answers.items():
            if well:
                results[rank] = _deserialize(payload)
            else:
                failures[rank] = payload
        if failures:
            raise RankError(_text(failures), failures, results)
        return [results[rank] for rank in range(len(self._pipes))]

    def _answers(self, timeout: float, grace: float, late: str) -> tuple[dict[int, Any], dict[int, str]]:
        """What each rank says next; what became of those that say nothing."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending.values()), max(deadline - time.monotonic(), 0))
            if not ready:
                self._show_where(pending)
                failures |= dict.fromkeys(pending, late)
                break
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    answers[rank] = pending.pop(rank).recv()
                    ended_well, _ = answers[rank]
                except (EOFError, OSError):
                    self._processes[rank].join(END_SECONDS)
                    failures[rank] = f"process died, exit code {self._processes[rank].exitcode}"
                    ended_well = False
                if not ended_well and time.monotonic() + grace < deadline:
                    deadline, late = time.monotonic() + grace, "did not end after another rank failed"
        return answers, failures

    def _show_where(self, stuck: Iterable[int]) -> None:
        """Each writes the stacks of its threads to stderr, and ends."""
        processes = [self._processes[rank] for rank in stuck if self._processes[rank].is_alive()]
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGABRT)
            os.kill(process.pid, signal.SIGCONT)  # a stopped one takes no other signal
        for process in processes:
            process.join(END_SECONDS)

    def close(self) -> None:
        """Ends the ranks: asks, then kills by process id."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join(END_SECONDS)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


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
        self._idle: _Ranks | None = None  # None as long as a call runs: what ends it early leaves none to the next

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = CALL_SECONDS,
        grace: float = GRACE_SECONDS,
        backend: str | None = "gloo",
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Calls ``fn(rank, world_size, *args)`` on every rank; the results in rank order.

        Raises :class:`RankError` when a rank raises, dies, or does not answer in ``timeout`` seconds.
        """
        call = pickle.dumps((fn, args))
        ranks, self._idle = self._idle, None
        if ranks is not None and not ranks.are_alive():
            ranks.close()
            ranks = None
        if ranks is None:
            ranks = _Ranks(self.world_size, self._threads, self._start_rank or start_rank)
        try:
            results = ranks.call(call, timeout, grace, backend, env or {})
        except BaseException:
            ranks.close()
            raise
        self._idle = ranks
        return results

    def close(self) -> None:
        """Ends the ranks; the next call starts new ones."""
        ranks, self._idle = self._idle, None
        if ranks is not None:
            ranks.close()


_pools: dict[tuple[int, int], RankPool] = {}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = CALL_SECONDS,
    grace: float = GRACE_SECONDS,
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
