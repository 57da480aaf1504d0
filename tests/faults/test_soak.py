"""A long run in short: `make lab ARGS=soak` has the long one."""

import pytest

from minddp.testing import run_ranks, shutdown
from tests.lab import soak


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_kind_of_wrapper_lives_and_goes(backend):
    steps = 8
    try:
        ranks = run_ranks(soak.soak, 2, 2 * len(soak.OPTIONS) * steps, steps, steps, backend=backend, timeout=900)
    finally:
        shutdown()
    assert [len(samples) for samples in ranks] == [2 * len(soak.OPTIONS)] * 2
