"""A dozen cells of the matrix, with every fault, place, backend and number of ranks; `tests/lab/faults` runs all."""

import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.test_links import links_obstacle

ROOT = Path(__file__).resolve().parents[2]


def test_everybody_is_told():
    skip = [] if links_obstacle is None else ["--without", "cut"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.faults", "--ci", "--jobs", "6", "--group-timeout", "8", *skip],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: 0" in done.stdout
