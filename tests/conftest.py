"""Fresh ranks from a zygote; which tests run; what a run says at its end.

``make test`` leaves out what is marked ``all``; ``make test-rest`` runs that; ``--tier all`` everything. The
criterion is what a test is for, not how long it takes. ``all`` is for

- the same promise once more: on 3 ranks where 2 have it, further cells of a matrix, further draws of a search;
- what torch's class does by itself: no change of ours can make it fail;
- starts as users do them, where another test holds the promise without (`tests/zygote.py` lists them).

Every promise, every capability on 2 ranks and every defect's regression is in both.

``--turn 2/3``: the second of three parts of the tests, for a machine with little time.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import minddp.testing
from tests import zygote

minddp.testing.start_rank = zygote.start_rank

_starts: dict[str, int] = {}


def _count_starts(event: str, _: Any) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        _starts[event] = _starts.get(event, 0) + 1


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--turn takes the like of 2/3, got {text!r}")
    return int(found[1]), int(found[2])


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--turn", metavar="I/N", help="only every N-th test file, from the I-th one on")
    tiers = ["test", "rest", "all"]
    parser.addoption("--tier", choices=tiers, default="all", help="rest: what `make test` leaves out")


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput") and zygote.FOLDER not in os.environ:
        zygote.make_folder()  # the workers share the zygotes
    sys.addaudithook(_count_starts)


def pytest_collection_modifyitems(config: Any, items: list[pytest.Item]) -> None:
    _choose_tier(config, items)
    _choose_turn(config, items)
    _begin_with_long(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # what was imported and collected is not walked again


def _choose_tier(config: Any, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "all":
        return
    fewest: dict[Any, int] = {}
    for item in items:
        if (ranks := _ranks(item)) is not None:
            fewest[_function(item)] = min(ranks, fewest.get(_function(item), ranks))
    more = {id(item) for item in items if (ranks := _ranks(item)) and ranks > max(fewest[_function(item)], 2)}
    again = [item for item in items if item.get_closest_marker("all") or id(item) in more]
    kept = again if tier == "rest" else [item for item in items if item not in set(again)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _function(item: pytest.Item) -> tuple[Path, str]:
    return item.path, getattr(item, "originalname", item.name)


def _ranks(item: pytest.Item) -> int | None:
    """On how many ranks it is parametrized to run."""
    return getattr(item, "callspec", None) and item.callspec.params.get("world_size")  # type: ignore[attr-defined]


def _choose_turn(config: Any, items: list[pytest.Item]) -> None:
    """By files, since a file's tests share the ranks that they start."""
    if config.getoption("--turn") is None:
        return
    which, parts = _part(config.getoption("--turn"))
    files = sorted({item.path for item in items})
    chosen = set(files[which - 1 :: parts])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]


def _begin_with_long(config: Any, items: list[pytest.Item]) -> None:
    """Each of pytest's workers begins with some of the tests that are marked ``long``: what begins last is short."""
    if not hasattr(config, "workerinput"):
        return
    workers = config.workerinput["workercount"]
    long = [item for item in items if item.get_closest_marker("long")]
    rest = iter([item for item in items if not item.get_closest_marker("long")])
    dealt: list[pytest.Item] = []
    for worker in range(workers):  # as `worksteal` deals them: the same number of neighbours to each
        head = long[worker::workers]
        number = (len(items) - len(dealt)) // (workers - worker)
        dealt += [*head, *itertools.islice(rest, max(0, number - len(head)))]
    items[:] = dealt


# --- what a run says at its end ---------------------------------------------------------------------------


def _started() -> dict[str, int]:
    return {"ranks from the zygotes": zygote.started, "others": sum(_starts.values())}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["started"] = _started()


_of_workers: list[dict[str, int]] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    _of_workers.append(getattr(node, "workeroutput", {}).get("started", {}))


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    sums: dict[str, int] = {}
    for counted in _of_workers or [_started()]:
        for name, number in counted.items():
            sums[name] = sums.get(name, 0) + number
    words = ", ".join(f"{number} {name}" for name, number in sums.items())
    terminalreporter.write_line(f"processes started: {words}")
    failed = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
    if failed:
        seeds = zygote.hash_seeds()
        before = f"{zygote.SEEDS}={seeds} " if seeds else ""
        terminalreporter.section("each of them alone")
        for report in failed:
            arguments = f"--tier all -n 0 {shlex.quote(report.nodeid)}"
            terminalreporter.write_line(f"{before}make test ARGS={shlex.quote(arguments)}")
