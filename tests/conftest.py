"""``--turn 2/3``: the second of three parts of the tests, for a machine with little time."""

from __future__ import annotations

import re
from typing import Any

import pytest

import minddp.testing
from tests import zygote

minddp.testing.start_rank = zygote.start_rank


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--turn takes the like of 2/3, got {text!r}")
    return int(found[1]), int(found[2])


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--turn", metavar="I/N", help="only every N-th test file, from the I-th one on")


def pytest_collection_modifyitems(config: Any, items: list[pytest.Item]) -> None:
    """By files, since a file's tests share the ranks that they start."""
    if config.getoption("--turn") is None:
        return
    which, parts = _part(config.getoption("--turn"))
    files = sorted({item.path for item in items})
    chosen = set(files[which - 1 :: parts])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]
