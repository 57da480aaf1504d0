"""The exercises' tests pass with the solutions, and fail with nothing written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("solutions", "expected"), [("1", {"passed": 6}), ("0", {"failed": 6})])
def test_exercises(solutions, expected):
    environment = {**os.environ, "SOLUTIONS": solutions, "PYTHONPATH": str(ROOT)}
    options = ["-o", "addopts=-p no:cacheprovider", "--tb=no"]  # with -q twice there would be no count
    command = [sys.executable, "-m", "pytest", *options, "exercises/test_exercises.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = run.stdout.splitlines()[-1]
    found = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", last)}
    assert found == expected, run.stdout + run.stderr
