"""Libraries and tools built around torch's DDP, each driven by an unmodified user's script.

Every script runs by torchrun on two ranks twice, once as it is and once under ``minddp.run``; the first run
shows that the script asks for torch's class, the second that it got minddp's, and both must end with the same
losses and weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import CLASS, run


def both(tmp_path: Path, script: str, *arguments: str, **options: Any) -> tuple[Any, Any]:
    """The script's reports with torch's class and with minddp's."""
    reports = []
    for impl in ("torch", "minddp"):
        folder = tmp_path / impl
        folder.mkdir()
        reports.append(run(impl, script, folder / "report.json", *arguments, **options))
    return reports[0], reports[1]


def assert_same(theirs: Any, ours: Any, keys: tuple[str, ...] = ("losses", "weights")) -> None:
    for key in keys:
        assert len(theirs[key]) > 0
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    theirs, ours = both(tmp_path, "accelerate_script.py")
    assert (theirs["class"], ours["class"]) == (CLASS["torch"], CLASS["minddp"])
    assert theirs["unwrapped"] == ours["unwrapped"] == "Sequential"
    assert theirs["no_sync_is_local"]
    assert ours["no_sync_is_local"]
    assert ours["losses"][-1] < ours["losses"][0]
    assert_same(theirs, ours)


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.all)])
def test_lightning(tmp_path: Path, torchrun: bool) -> None:
    """Also where Lightning's own launcher starts the second rank, by ``python script.py``."""
    pytest.importorskip("lightning")
    theirs, ours = both(tmp_path, "lightning_script.py", torchrun=torchrun)
    for mode in ("automatic", "manual"):
        assert (theirs[mode]["class"], ours[mode]["class"]) == (CLASS["torch"], CLASS["minddp"])
        assert_same(theirs[mode], ours[mode])


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs, ours = both(tmp_path, "transformers_script.py")
    assert (theirs["class"], ours["class"]) == (CLASS["torch"], CLASS["minddp"])
    assert ours["losses"][-1] < ours["losses"][0]
    assert_same(theirs, ours)


def checkpoint(phase: str, impl: str, folder: Path, ranks: int) -> Any:
    report = folder.with_name(f"{folder.name}-{phase}-{impl}.json")
    return run(impl, "checkpoint_script.py", report, phase, str(folder), ranks=ranks)


@pytest.mark.parametrize("saved_by, readers", [("torch", ["minddp"]), ("minddp", ["minddp", "torch"])])
def test_distributed_checkpoint_saved_by_2_loaded_by_3(tmp_path: Path, saved_by: str, readers: list[str]) -> None:
    """The saving run trains on after it has saved; a run that loads must train on in the same way."""
    saved = checkpoint("save", saved_by, tmp_path / "checkpoint", ranks=2)
    assert (saved["class"], saved["world_size"]) == (CLASS[saved_by], 2)
    assert saved["keys"][0] == "0.bias", "the keys must be the plain module's, without the wrapper's prefix"
    for loaded_by in readers:
        loaded = checkpoint("load", loaded_by, tmp_path / "checkpoint", ranks=3)
        assert (loaded["class"], loaded["world_size"]) == (CLASS[loaded_by], 3)
        assert loaded["keys"] == saved["keys"]
        assert_same(saved, loaded)


def test_zero_redundancy_optimizer(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, "zero_script.py")
    assert (theirs["class"], ours["class"]) == (CLASS["torch"], CLASS["minddp"])
    assert_same(theirs, ours, ("plain", "uneven"))


def test_trainers_train_with_owned_parameters_as_with_the_plain_optimizer(tmp_path: Path) -> None:
    report = run("minddp", "owned_script.py", tmp_path / "report.json")
    for trainer, (plain, owned) in report.items():
        assert owned == plain, trainer


def test_elastic_restart_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = run("minddp", "elastic_script.py", tmp_path / "whole.json", str(tmp_path / "whole.pt"), "unbroken")
    killed = run(
        "minddp",
        "elastic_script.py",
        tmp_path / "killed.json",
        str(tmp_path / "killed.pt"),
        "killed",
        restarts=1,
    )
    assert (whole["began"], killed["began"]) == (0, 4), "the broken run must resume from its checkpoint"
    assert killed["class"] == CLASS["minddp"]
    assert killed["weights"] == whole["weights"]
