"""Processes that run one program after another, each rank a process, joined by Gloo on loopback.

What always holds: a run ends within ``seconds``; what still runs then is killed by process id, and the next run
has new processes. A group that carried an exception is not used again. Processes are forked (`tests/forked.py`), so
that new ones cost some hundredths of a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from minddp.testing import Process
from tests.forked import start_rank

__all__ = ["RankProcesses"]

RUN_SECONDS = 20
START_SECONDS = 10
START_ATTEMPTS = 6


def _serve(rank: int, world: int, port: int, prefix: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Torch's C++ writes a warning a program; only what the parent reads matters.
    if "MINDDP_FUZZ_STDERR" not in os.environ:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch
    import torch.distributed as dist

    from minddp.guards import times

    from .interpreter import GROUP_SECONDS, class_named, run_program

    times.look = 0.2  # groups give up after some seconds here; who asks the other ranks hears of them sooner
    torch.set_num_threads(1)
    wait_for = timedelta(seconds=GROUP_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=wait_for)
    store = dist.PrefixStore(prefix, store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait_for)
    gc.collect()
    gc.freeze()  # what was imported is not walked again after every program
    pipe.send("ready")
    while True:
        try:
            program, name, apart = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        result = run_program(program, class_named(name), rank, apart)
        gc.collect()
        try:
            pipe.send(result)
        except OSError:
            os._exit(0)
        if name == "torch" and result["end"] != "ok":
            os._exit(0)  # its peers need not wait for the group's timeout


class RankProcesses:
    """``world`` ranks; :meth:`run` gives each rank's result of one program with one class, within ``seconds``."""

    def __init__(self, world: int, seconds: float = RUN_SECONDS):
        import torch.distributed as dist

        self.world = world
        self.seconds = seconds
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30))
        self._generation = 0
        self._processes: list[Process] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        """Until all ranks have met: on a busy machine one of them may wait in vain for the store's first answer."""
        for _ in range(START_ATTEMPTS):
            self._generation += 1
            for rank in range(self.world):
                ours, theirs = multiprocessing.Pipe()
                arguments = (rank, self.world, self._store.port, f"generation{self._generation}")
                self._processes.append(start_rank(_serve, arguments, rank, theirs))
                self._pipes.append(ours)
            if self._have_met():
                return
            self.close()
        raise RuntimeError(f"{self.world} ranks did not meet in {START_ATTEMPTS} attempts")

    def _have_met(self) -> bool:
        try:
            return all(pipe.poll(START_SECONDS) and pipe.recv() == "ready" for pipe in self._pipes)
        except (EOFError, OSError):
            return False

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def run(self, program: dict[str, Any], name: str, apart: bool = False) -> list[dict[str, Any]]:
        """Each rank's result, as ``interpreter.run_program`` gives it; ``end`` may also be ``hung`` or ``died``."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            try:
                pipe.send((program, name, apart))
            except OSError:
                pass  # it has died: reading says so
        results: list[Any] = [None] * self.world
        deadline = time.monotonic() + self.seconds
        pending = dict(zip(self._pipes, range(self.world)))
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    results[rank] = {"end": "died", "at": -1, "error": "the process died", "observations": []}
            if not ready:
                for rank in pending.values():
                    error = f"did not end in {self.seconds:g} s"
                    results[rank] = {"end": "hung", "at": -1, "error": error, "observations": []}
                break
        if any(result["end"] != "ok" or result["left_over"] for result in results):
            self.close()
        return results
