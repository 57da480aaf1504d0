"""The exercises' tests pass with the solutions, and name what is wrong with the usual wrong answers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRONG = """
import torch, torch.distributed as dist

def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

def cut(nbytes, cap):
    return [[2, 1], [0]]

def launch_times(ready):
    return ready

def taking_part(loss, model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

class AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient

def ring_all_reduce(x):
    dist.all_reduce(x)
"""
HINTS = [
    "took 4 all-reduces", "filled from the last parameter on", "another rank would add it",
    "requires a gradient and gets none", "only your own loss's part", "nothing was sent",
]  # fmt: skip


@pytest.mark.parametrize(("answers", "expected"), [("", {"passed": 6}), (WRONG, {"failed": 6})])
def test_exercises(answers, expected, tmp_path):
    (tmp_path / "solutions.py").write_text(answers)
    environment = {**os.environ, "SOLUTIONS": str(tmp_path) if answers else "1", "PYTHONPATH": str(ROOT)}
    options = ["-o", "addopts=-p no:cacheprovider", "--tb=short"]  # with -q twice there would be no count
    command = [sys.executable, "-m", "pytest", *options, "exercises/test_exercises.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = run.stdout.splitlines()[-1]
    found = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", last)}
    assert found == expected, run.stdout + run.stderr
    assert [hint for hint in HINTS if hint in run.stdout] == (HINTS if answers else [])
