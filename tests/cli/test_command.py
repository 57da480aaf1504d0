"""The command ``minddp``: each part answers ``--help`` with an example, and ``doctor`` takes a step on real ranks."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import minddp as package
from minddp.cli import command, doctor
from tests import forked

ROOT = Path(__file__).resolve().parents[2]


def minddp(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run_module("minddp", *arguments)


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_has_an_example(name: str) -> None:
    done = minddp(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"\n    minddp {name} " in done.stdout + done.stderr


def test_without_a_command_the_list_is_shown() -> None:
    done = minddp()
    assert done.returncode == 2
    assert all(f"minddp {name} " in done.stderr for name in command.COMMANDS)
    assert minddp("--help").returncode == 0
    for name in ("trian", "bench", "simulate"):
        refusal = minddp(name).stderr
        assert f"there is no command {name!r}" in refusal and "python benchmarks/" in refusal


@pytest.mark.parametrize("option", ["--slurm", "--mpi"])
def test_run_starts_no_ranks(option: str) -> None:
    done = minddp("run", option, "train.py")
    assert done.returncode == 2
    assert f"there is no option {option!r} (SLURM, MPI: docs/launching.md)" in done.stderr


def test_version_is_the_packages() -> None:
    assert minddp("--version").stdout == f"minddp {package.__version__}\n"


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(5):
    ddp(torch.ones(1, 2)).sum().backward()
print(type(ddp).__module__)
"""
MODEL = "import torch\ndef make(): return torch.nn.Linear(2, 2)\n"


@pytest.mark.long
def test_the_clones_command_runs_each_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make` writes as `.venv/bin/minddp`: parts that start ranks by `spawn` run it again in each of them."""
    script, path = runpy.run_path(str(ROOT / ".ci/clone.py")), tmp_path / "minddp"
    script["write_command"](path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "models.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    traced = {**os.environ, "MINDDP_TRACE": "trace.json"}  # not set here: ranks that are started meanwhile inherit it
    tune = "tune --model models:make --input 2x2 --ranks 2 --laps 1 --iterations 1 --out plan.json"
    expected = {
        "doctor": "gloo, 2 ranks: ok, the same gradients",
        "run train.py": "minddp.ddp",
        "timeline trace.json": "backward",
        "report trace.json": "rank",
        tune: "written to plan.json",
    }
    assert {line.split()[0] for line in expected} == set(command.COMMANDS)
    for line, text in expected.items():
        if line in ("doctor", "run train.py"):
            done = subprocess.run([path, *line.split()], capture_output=True, text=True, timeout=600, env=traced)
        else:
            done = forked.run(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", *line.split())
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert text in done.stdout, (line, done.stdout, done.stderr)
        if line == "doctor":
            assert "shm, 2 ranks: ok, the same gradients" in done.stdout
            assert done.stdout.count("one step, beside torch's class") == 1  # not once more on each rank


@pytest.mark.parametrize("full", [False, True])
def test_an_output_that_nobody_reads_ends_the_command(
    full: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As behind `| head -1`; or on a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(OSError), open("/dev/full" if full else writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert command.main(["doctor", "--no-step"]) == 1
        print("what comes after goes nowhere", flush=True)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", None)
        assert command.main(["--version"]) == 0
    said = ["minddp: the output could not be written: No space left on device"]
    assert capfd.readouterr().err.splitlines() == said * full


def _no_route(rank: int, device: str) -> list[str]:
    raise RuntimeError("no route to host")


def _other(rank: int, device: str) -> list[str]:
    return ["0.weight"] * rank


def _stuck(rank: int, device: str) -> list[str]:
    time.sleep(600)
    raise AssertionError


@pytest.mark.parametrize(
    "step, said",
    [
        (_no_route, r"failed\. rank [01]: RuntimeError: no route to host"),
        (_other, r"other gradients than torch's: \{1: \['0.weight'\]\}"),
        (_stuck, r"too slow to tell: not all ranks have ended within 1 s"),
    ],
)
def test_doctor_tells_what_does_not_work(
    step: Callable[..., list[str]], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_trials", lambda: [("gloo", 2)])
    monkeypatch.setattr(doctor, "_STEP_SECONDS", 1.0 if step is _stuck else doctor._STEP_SECONDS)
    monkeypatch.setattr(doctor, "_step", step)
    monkeypatch.setattr(doctor, "_START_METHOD", "forkserver")
    with forked.servers[0].lent():
        assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert re.search(f"^  gloo, 2 ranks: {said}$", printed, re.MULTILINE), printed


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_doctor_tries_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank over NCCL, where there is a GPU; two where there are two."""
    monkeypatch.setattr(doctor, "_try_step", lambda backend, ranks: "ok")
    monkeypatch.setattr(doctor, "_gpus", lambda: f"{gpus} of them")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    over_nccl = [f"  nccl, {ranks} rank{'s' * (ranks > 1)}: ok" for ranks in (1, 2) if ranks <= gpus]
    assert [line for line in lines if line.startswith("  nccl")] == over_nccl
