"""Ranks that run one program after another, each rank a process, in a Gloo group on loopback.

What always holds: a run ends within some seconds, and every program has a group of its own. Ranks wait for the next
program only where the last one ended well on all of them.
"""

from __future__ import annotations

import gc
import os
import tempfile
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.forked import start_rank
from tests.ranks_pool import RankError, RankPool

from .interpreter import run_program
from .program import Program

__all__ = ["Ranks"]

RUN_SECONDS = 20
GROUP_SECONDS = 4
ATTEMPTS = 3


def _run(rank: int, world: int, program: Program, name: str, apart: bool, group_seconds: float, store: str) -> Any:
    from minddp.guards import times

    # Torch's C++ writes a warning a program; only what the parent reads matters.
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    times.look = 0.2  # groups give up after some seconds here; who asks the other ranks hears of them sooner
    wait_for = timedelta(seconds=group_seconds)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=wait_for)
    result = run_program(program, name, rank, apart, wait_for)
    gc.collect()
    # Where torch's class has raised here, its peers need not wait for the group's timeout. Nothing ends ours early.
    if result["end"] == "ok" or name == "torch":
        dist.destroy_process_group()
    return result


class Ranks:
    """``world`` ranks; :meth:`run` gives each rank's result of one program with one class.

    ``patience`` multiplies the seconds that groups wait for a rank, and that a program may take.
    """

    def __init__(self, world: int, patience: float = 1):
        self.seconds, self.group_seconds = patience * RUN_SECONDS, patience * GROUP_SECONDS
        self._pool = RankPool(world, start=start_rank)
        self._world, self._runs = world, 0
        self._folder = tempfile.TemporaryDirectory(prefix="minddp-fuzz-", ignore_cleanup_errors=True)

    def close(self) -> None:
        self._pool.close()
        self._folder.cleanup()

    def run(self, program: Program, name: str, apart: bool = False) -> list[dict[str, Any]]:
        """Each rank's result, as ``interpreter.run_program`` gives it; ``end`` may also be ``hung`` or ``died``.

        A group that did not come about is made again, which a busy machine needs now and then.
        """
        for _ in range(ATTEMPTS):
            results = self._run(program, name, apart)
            if not any("wait timeout" in result["error"] for result in results):
                break
        return results

    def _run(self, program: Program, name: str, apart: bool) -> list[dict[str, Any]]:
        self._runs += 1
        arguments = program, name, apart, self.group_seconds, os.path.join(self._folder.name, f"store{self._runs}")
        try:
            results = self._pool.run(_run, *arguments, backend=None, timeout=self.seconds)
        except RankError as error:
            ended = {rank: _ended(text) for rank, text in error.failures.items()} | error.results
            return [ended[rank] for rank in range(self._world)]
        if any(result["end"] != "ok" or result["left_over"] for result in results):
            self._pool.close()
        return results


def _ended(text: str) -> dict[str, Any]:
    """The result of a rank that gave none."""
    last = text.strip().splitlines()[-1]
    end = "hung" if last.startswith("did not end") else "died"
    return {"end": end, "at": -1, "error": last, "observations": [], "left_over": ""}
