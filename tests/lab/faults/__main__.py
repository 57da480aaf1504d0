"""Every fault of a rank at every place of training, torch's class beside minddp's; ``--page`` writes the table.

    make lab ARGS="faults --json build/faults.json --page docs/faults.md"   # all cells: an hour or two
    make lab ARGS="faults --only killed,forward,gloo,2"                     # the cells with all of these words
    make lab ARGS="faults --sample 20"                                      # cells drawn at random
    make lab ARGS="faults --ci"                                             # the cells of tests/faults/test_matrix.py

The exit status is 1 if a cell is lost.

Each rank is a process forked from this one, which has imported torch and has no threads yet; what it raises reaches
the top, as in any program. Where links are cut each rank has a network namespace of its own.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.ranks_pool import free_port

from .program import FAULTS, PLACES, STEPS, Rank
from .table import WELL, page, summary

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))


def given_up(facts: dict[str, Any]) -> float:
    """Seconds after the fault at which what still runs is killed, and counts as stuck."""
    return float(facts["group timeout"] + 25)


def continued(facts: dict[str, Any]) -> float:
    """Seconds after which a stopped process goes on."""
    return 0.8 * float(facts["group timeout"])


# (fault, place, ranks, faulty, backend): at least one of each fault, place, number of ranks and backend.
CI_CELLS = [
    ("killed", "construction", 2, 1, "gloo"),
    ("killed", "comm hook", 3, 0, "gloo"),
    ("killed", "mid-backward", 3, 1, "shm"),
    ("killed", "finalize", 2, 0, "shm"),
    ("exception", "forward", 2, 1, "gloo"),
    ("exception", "optimizer", 3, 0, "gloo"),
    ("exception", "before the first bucket", 2, 1, "shm"),
    ("swallowed", "mid-backward", 2, 0, "gloo"),
    ("swallowed", "forward", 2, 1, "gloo"),
    ("out of memory", "checkpoint", 2, 0, "gloo"),
    ("stopped", "between iterations", 2, 0, "gloo"),
    ("cut", "forward", 2, 1, "gloo"),
]


def all_cells() -> Iterator[dict[str, Any]]:
    for fault, place, ranks, backend in product(FAULTS, PLACES, (2, 3), ("gloo", "shm")):
        if fault == "cut" and backend == "shm":  # which has no link
            continue
        for faulty in (0, 1):
            for kind in ("minddp", "torch"):
                yield cell(fault, place, ranks, faulty, backend, kind)


def cell(fault: str, place: str, ranks: int, faulty: int, backend: str, kind: str = "minddp") -> dict[str, Any]:
    return {"fault": fault, "place": place, "ranks": ranks, "faulty": faulty, "backend": backend, "class": kind}


@contextlib.contextmanager
def in_parent(manager: Any) -> Iterator[Any]:
    """``manager``, left by the process that entered it, and not by those forked from it."""
    entered, owner = manager.__enter__(), os.getpid()
    try:
        yield entered
    finally:
        if os.getpid() == owner:
            manager.__exit__(None, None, None)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    path, owner = tempfile.mkdtemp(prefix="minddp-faults-"), os.getpid()
    try:
        yield Path(path)
    finally:
        if os.getpid() == owner:
            shutil.rmtree(path)


class InChild(Exception):
    """Carries a forked rank's work to the top of the program, with none of this file's handlers below it."""

    def __init__(self, rank: Rank):
        self.rank = rank


class Cell:
    """One cell, while it runs: :meth:`start`, :meth:`look` until that says that it is over, :meth:`end`."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts
        self.pids: dict[int, int] = {}
        self.exits: dict[int, tuple[float, int]] = {}
        self._stack = contextlib.ExitStack()
        self._network: Any = None
        self._fault_at: float | None = None
        self._cut = self._continued = False

    def start(self) -> None:
        self.folder = self._stack.enter_context(_folder())
        if self.facts["fault"] == "cut":
            from links import ShapedNetwork

            self._network = self._stack.enter_context(in_parent(ShapedNetwork("1gbit", self.facts["ranks"])))
        self._began = time.time()
        ends = [self._network.endpoint(rank) for rank in range(self.facts["ranks"])] if self._network else []
        address = ends[0].address if ends else "127.0.0.1"
        port = free_port()
        for rank in range(self.facts["ranks"]):
            pid = os.fork()
            if pid == 0:
                self._become(rank, ends[rank] if ends else None)
                raise InChild(Rank(self.facts, rank, self.folder, address, port))
            self.pids[rank] = pid

    def _become(self, rank: int, end: Any) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if end is not None:
            from links import enter

            enter(end.namespace)
            os.environ["GLOO_SOCKET_IFNAME"] = end.interface
        out = os.open(self.folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)

    def note(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def look(self) -> bool:
        """Does to the faulty rank what is due. Whether all is over, or taken for stuck."""
        self._reap()
        faulty = self.facts["faulty"]
        self._fault_at = self._fault_at or self.note(faulty).get("fault_at")
        since = time.time() - self._fault_at if self._fault_at else -1.0
        if since >= 0 and self._network is not None and not self._cut:
            end = self._network.endpoint(faulty)
            subprocess.run(["ip", "-n", end.namespace, "link", "set", end.interface, "down"], check=True)
            (self.folder / "cut").touch()
            self._cut = True
        if since > continued(self.facts) and self.facts["fault"] == "stopped" and not self._continued:
            os.kill(self.pids[faulty], signal.SIGCONT)
            self._continued = True
        stuck = since > given_up(self.facts) or time.time() - self._began > given_up(self.facts) + 60
        return stuck or len(self.exits) == len(self.pids)

    def end(self) -> dict[str, Any]:
        """Ends what still runs. The cell's result."""
        try:
            self._kill_all()
            return self._result()
        finally:
            self._stack.close()

    def _reap(self) -> None:
        for rank, pid in self.pids.items():
            if rank not in self.exits:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.exits[rank] = (time.time(), status)

    def _kill_all(self) -> None:
        self._reap()
        for rank, pid in self.pids.items():
            if rank not in self.exits:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _result(self) -> dict[str, Any]:
        faulty = self.facts["faulty"]
        fault_at = self.note(faulty).get("fault_at")
        survivors = []
        for rank in sorted(set(self.pids) - {faulty}):
            note = self.note(rank)
            told = note.get("raised_at")
            error = note.get("error", "")
            exit_at = self.exits.get(rank, (None, None))[0]
            survivors.append(
                {
                    "rank": rank,
                    "told": None if told is None or fault_at is None else round(told - fault_at, 2),
                    "named": re.search(rf"rank {faulty}\b", error, re.IGNORECASE) is not None,
                    "error": error,
                    "exited": None if exit_at is None else round(exit_at - (told or fault_at or exit_at), 2),
                    "finished": "ended_at" in note,
                    "digests": note.get("digests", []),
                }
            )
        return {
            **self.facts,
            "survivors": survivors,
            "fault_happened": fault_at is not None,
            "faulty_exited": faulty in self.exits,
            "digests": self.note(faulty).get("digests", []),
            "seconds": None if fault_at is None else round(time.time() - fault_at, 1),
        }


def verdict(result: dict[str, Any]) -> str:
    """ "told" within the bounds, with the rank's name, or "unharmed": all ended, and alike. Else what is wrong."""
    if not result["fault_happened"]:
        return "no fault"
    for survivor in result["survivors"]:
        if survivor["exited"] is None:
            return "stuck"
        if survivor["told"] is None and survivor["finished"]:
            alike = survivor["digests"][-1:] == result["digests"][-1:]
            return "unharmed" if alike else "replicas differ"
        if survivor["told"] is None:
            return "not told"
        if survivor["told"] > bound(result):
            return "late"
        if not survivor["named"]:
            return "not named"
    return "told"


def bound(result: dict[str, Any]) -> float:
    """Ten seconds; where a link is cut, the group's timeout, and as long again to find out."""
    return float(result["group timeout"] + 10) if result["fault"] == "cut" else 10.0


def wrong_weights(result: dict[str, Any], unbroken: Sequence[str]) -> bool:
    """Whether a survivor's weights after a completed step are not those of a run without a fault.

    A rank that swallows an exception gives the others its next batch: the mean is another one then, as with torch's.
    """
    if result["fault"] == "swallowed":
        return False
    return any(survivor["digests"] != unbroken[: len(survivor["digests"])] for survivor in result["survivors"])


def run_all(cells: Sequence[dict[str, Any]], jobs: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each cell's index and result, as they come; ``jobs`` at a time."""
    waiting = list(enumerate(cells))[::-1]
    running: dict[int, Cell] = {}
    owner = os.getpid()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, facts = waiting.pop()
                running[index] = Cell(facts)
                running[index].start()
            time.sleep(0.02)
            for index in [index for index, one in running.items() if one.look()]:
                yield index, running.pop(index).end()
    finally:
        for one in running.values() if os.getpid() == owner else ():
            one.end()


def run_cells(cells: Sequence[dict[str, Any]], keep: Any, jobs: int = 1) -> list[dict[str, Any]]:
    """``keep(results)`` after each."""

    def healthy(facts: dict[str, Any]) -> tuple[Any, ...]:
        return facts["class"], facts["ranks"], facts["backend"], facts["place"] in ("comm hook", "finalize")

    without = {healthy(facts): {**facts, "fault": "none", "faulty": 0} for facts in cells}
    unbroken: dict[tuple[Any, ...], list[str]] = {}
    for index, result in run_all(list(without.values()), jobs):
        unbroken[list(without)[index]] = result["digests"]
        assert len(result["digests"]) == STEPS, f"a run without a fault did not end: {result}"
    results = []
    for index, result in run_all(cells, jobs):
        result["verdict"] = verdict(result)
        if wrong_weights(result, unbroken[healthy(cells[index])]):
            result["verdict"] = "wrong weights"
        results.append(result)
        keep(results)
        told = [survivor["told"] for survivor in result["survivors"]]
        exited = [survivor["exited"] for survivor in result["survivors"]]
        what = " / ".join(str(result[name]) for name in ("class", "fault", "place", "ranks", "faulty", "backend"))
        print(f"{what}: {result['verdict']}; told after {told} s, exited {exited} s later", flush=True)
    return results


def merged(before: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last result of each cell."""
    names = list(cell("", "", 0, 0, ""))
    return list({tuple(result[name] for name in names): result for result in [*before, *results]}.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words that a cell must all have, separated by commas")
    parser.add_argument("--without", default="", help="leave out cells with this word")
    parser.add_argument("--sample", type=int, help="so many cells, drawn at random, each with both classes")
    parser.add_argument("--ci", action="store_true", help="the cells that run with the tests")
    parser.add_argument("--json", type=Path, help="results, added to those of the file")
    parser.add_argument("--page", type=Path, help="write the table of --json here")
    parser.add_argument("--jobs", type=int, default=4, help="so many cells at a time: most of it is waiting")
    parser.add_argument("--group-timeout", type=int, default=15, help="seconds; all other times are counted in it")
    options = parser.parse_args()
    cells = [cell(*facts) for facts in CI_CELLS] if options.ci else list(all_cells())
    words = [word for word in options.only.split(",") if word]
    cells = [facts for facts in cells if all(word in map(str, facts.values()) for word in words)]
    cells = [facts for facts in cells if options.without not in facts.values()]
    if options.sample:
        drawn = random.Random(0).sample([facts for facts in cells if facts["class"] == "minddp"], options.sample)
        cells = [{**facts, "class": kind} for facts in drawn for kind in ("minddp", "torch")]
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else []

    def keep(results: list[dict[str, Any]]) -> None:
        if options.json:
            options.json.write_text(json.dumps(merged(before, results), indent=1))

    cells = [{**facts, "group timeout": options.group_timeout} for facts in cells]
    results = merged(before, run_cells(cells, keep, options.jobs))
    if options.page:
        any_cell = {"fault": "cut", "group timeout": options.group_timeout}
        options.page.write_text(page(results, options.group_timeout, bound(any_cell), given_up(any_cell)))
    print(summary(results))
    lost = [result for result in results if result["class"] == "minddp" and result["verdict"] not in WELL]
    return 1 if lost else 0


def _end_ranks_at_once(parent: int) -> None:
    """Taking the interpreter apart costs a forked rank half a second of processor."""
    if os.getpid() != parent:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_value") else 0)


if __name__ == "__main__":
    import tests.preloaded  # noqa: F401

    if "--ci" in sys.argv:  # registered before all others, so it is called after them
        atexit.register(_end_ranks_at_once, os.getpid())
    try:
        code = main()
    except InChild as child:
        rank: Rank | None = child.rank
    else:
        rank = None
    if rank is not None:
        rank.run()
    else:
        sys.exit(code)
