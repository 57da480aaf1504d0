"""Which tests run, and in what order: ``--turn 2/3`` leaves nothing out and shares nothing; long ones begin early."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import _begin_with_long, pytest_collection_modifyitems

ITEMS = [SimpleNamespace(path=Path(f"test_{file}.py"), name=f"{file}{i}") for file in "caebd" for i in range(3)]


def _chosen(turn: str | None) -> list[str]:
    items: list[Any] = list(ITEMS)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    options = {"--turn": turn, "--tier": "all"}
    pytest_collection_modifyitems(SimpleNamespace(getoption=options.get, hook=hook), items)
    return [item.name for item in items]


def test_parts_are_whole_files_and_together_everything() -> None:
    parts = [_chosen(f"{i}/3") for i in (1, 2, 3)]
    assert parts == [["a0", "a1", "a2", "d0", "d1", "d2"], ["e0", "e1", "e2", "b0", "b1", "b2"], ["c0", "c1", "c2"]]
    assert _chosen(None) == [item.name for item in ITEMS]


@pytest.mark.parametrize("turn", ["0/3", "4/3", "third", "1/0"])
def test_another_turn_is_refused(turn: str) -> None:
    with pytest.raises(pytest.UsageError, match="like of 2/3"):
        _chosen(turn)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("long", [(), (0, 1, 2, 3), (9, 13), range(14)])
def test_each_worker_begins_with_long_ones(workers: int, long: tuple[int, ...]) -> None:
    given = [SimpleNamespace(number=i, get_closest_marker=lambda _, i=i: i in long) for i in range(14)]
    items: list[Any] = list(given)
    _begin_with_long(SimpleNamespace(workerinput={"workercount": workers}), items)
    assert sorted(item.number for item in items) == list(range(14))
    begins = [0, *(14 * i // workers for i in range(1, workers))]
    assert sum(items[begin].number in long for begin in begins) == min(workers, len(long))
