"""Every mode beside a process group whose all-reduces end late, on a GPU: a missing wait shows in the values."""

from __future__ import annotations

import pytest

from tests.lab.streams import programs
from tests.ranks_pool import run_ranks

pytestmark = pytest.mark.cuda


def _late(rank: int, world_size: int, names: list[str]) -> list[str]:
    return programs.check_late(names, "cuda")


def test_a_group_that_ends_late() -> None:
    assert run_ranks(_late, 1, programs.LATE_PROGRAMS, backend=None) == [[]]
