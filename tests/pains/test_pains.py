"""Every pain ends as its row says: with torch's class as it hurts, with minddp's right or told."""

import re

import pytest

from . import outcome
from .page import PAGE, TORCH, page
from .programs import PAINS

ROWS = [pytest.param(index, id=pain.program.__name__) for index, pain in enumerate(PAINS)]


@pytest.mark.parametrize("index", ROWS)
def test_with_minddp(index):
    ours, pain = outcome.run(index, "minddp", outcome.PATIENCE), PAINS[index]
    assert ours.kind == pain.ours, ours
    assert ours.kind in ("right", "warns", "raises")
    assert re.search(pain.says, ours.text), ours


@pytest.mark.all
@pytest.mark.skipif(f"class of torch {TORCH} " not in PAGE.read_text(), reason="the page tells of another torch")
@pytest.mark.parametrize("index", ROWS)
def test_with_torch(index):
    pain = PAINS[index]
    theirs = outcome.run(index, "torch", outcome.SURELY if pain.torch == "waits" else outcome.PATIENCE)
    assert theirs.kind == pain.torch, theirs


def test_the_page_has_every_row():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "---" not in line][1:]
    nothing = outcome.Outcome("right", "")
    expected = page([(nothing, nothing)] * len(PAINS)).splitlines()
    titles = [line.split(" |")[0] for line in expected if line.startswith("| ") and "---" not in line][1:]
    assert [row.split(" |")[0] for row in rows] == titles
