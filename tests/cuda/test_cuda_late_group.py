"""Every mode beside a process group whose all-reduces end late, on a GPU: a missing wait shows in the values."""

from __future__ import annotations

import pytest

from minddp.testing import run_ranks
from tests.lab.streams import programs

pytestmark = pytest.mark.cuda


def _late(rank: int, world_size: int, names: list[str]) -> list[str]:
    return programs.check_late(names, "cuda")


def test_a_group_that_ends_late() -> None:
    assert run_ranks(_late, 1, programs.LATE_PROGRAMS, backend=None) == [[]]
