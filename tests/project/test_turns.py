"""``--turn 2/3``: parts of the tests that take turns leave nothing out and share nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems

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
