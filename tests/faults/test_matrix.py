"""A dozen cells of the matrix, with every fault, place, backend and number of ranks; `tests/lab/faults` runs all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_links import links_obstacle
from tests.lab import soak
from tests.ranks_pool import run_ranks, shutdown

ROOT = Path(__file__).resolve().parents[2]


def test_everybody_is_told():
    skip = [] if links_obstacle is None else ["--without", "cut"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.faults", "--ci", "--jobs", "6", "--group-timeout", "8", *skip],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: 0" in done.stdout


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_kind_of_wrapper_lives_and_goes(backend):
    """A long run in short: `make lab ARGS=soak` has the long one."""
    steps = 8
    try:
        ranks = run_ranks(soak.soak, 2, 2 * len(soak.OPTIONS) * steps, steps, steps, backend=backend, timeout=900)
    finally:
        shutdown()
    assert [len(samples) for samples in ranks] == [2 * len(soak.OPTIONS)] * 2
