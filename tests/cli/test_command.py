"""The command ``minddp``: each part answers ``--help`` with an example, and ``doctor`` takes a step on real ranks."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from minddp import testing
from minddp.cli import command, doctor
from tests import forked


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


def test_doctor_takes_a_step_beside_torch(capfd: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    printed = capfd.readouterr().out
    assert "gloo, 2 ranks: ok, the same gradients" in printed
    assert "shm, 2 ranks: ok, the same gradients" in printed


def test_doctor_tells_what_does_not_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object, **__: object) -> None:
        raise testing.RankError("", {1: "Traceback\nRuntimeError: no route to host"}, {})

    monkeypatch.setattr(doctor, "run_ranks", fails)
    assert doctor.main([]) == 1
    assert "gloo, 2 ranks: failed. rank 1: RuntimeError: no route to host" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "run_ranks", lambda *_, **__: [[], ["0.weight"]])
    assert doctor.main([]) == 1
    assert "other gradients than torch's: {1: ['0.weight']}" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_doctor_tries_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank over NCCL through its group, where it would take none; two where there are two GPUs."""
    tried = []

    def takes(function: object, ranks: int, device: str, backend: str, env: dict[str, str], **_: object) -> list[Any]:
        tried.append((backend, ranks, device, env.get("MINDDP_ALWAYS_REDUCE")))
        return [[] for _ in range(ranks)]

    monkeypatch.setattr(doctor, "run_ranks", takes)
    monkeypatch.setattr(doctor, "_gpus", lambda: f"{gpus} of them")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert doctor.main([]) == 0
    over_nccl = [("nccl", ranks, "cuda", "1") for ranks in (1, 2) if ranks <= gpus]
    assert [trial for trial in tried if trial[0] == "nccl"] == over_nccl
    assert ("nccl, 1 rank: ok" in capsys.readouterr().out) == (gpus > 0)
