"""How ranks start in tests; which tests ``make test`` runs; what a run prints at its end.

``make test`` leaves out what is marked ``all``, and ``make test-all`` runs everything. A test is marked ``all`` if

- it holds a promise that another test of ``make test`` holds: further cells of a matrix, further draws of a search;
- torch's class does by itself what it tests, so that no change of ours can make it fail;
- it starts processes as users do, and another test holds the promise without that.

A test with the parameter ``world_size`` is marked here if it runs on 3 ranks and also on 2.
"""

from __future__ import annotations

import gc
import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked, ranks_pool

ranks_pool.start_rank = forked.start_rank


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: Any, items: list[pytest.Item]) -> Iterator[None]:
    _mark_more_ranks(items)
    yield  # pytest deselects by marker
    _begin_with_long(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # what was imported and collected is not walked again


def _mark_more_ranks(items: list[pytest.Item]) -> None:
    sizes: dict[tuple[Path, str], list[tuple[int, pytest.Item]]] = {}
    for item in items:
        if ranks := getattr(item, "callspec", None) and item.callspec.params.get("world_size"):  # type: ignore[attr-defined]
            sizes.setdefault((item.path, item.originalname), []).append((ranks, item))  # type: ignore[attr-defined]
    for same in sizes.values():
        fewest = min(ranks for ranks, _ in same)
        for ranks, item in same:
            if ranks > max(fewest, 2):
                item.add_marker("all")


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", []))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")
    failed = stats.get("failed", []) + stats.get("error", [])
    if failed:
        terminalreporter.section("each of them alone")
        for report in failed:
            arguments = f"-n 0 {shlex.quote(report.nodeid)}"
            terminalreporter.write_line(f"make test-all ARGS={shlex.quote(arguments)}")
