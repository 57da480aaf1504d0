"""setup.py's choices, without a build."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
TORCH_CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"


@pytest.fixture
def cuda_archs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """setup.py's function, for torch's own list and the GPUs in sight."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("MINDDP_CUDA", "0")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    function: Any = runpy.run_path(str(SETUP))["cuda_archs"]

    def call(own: str, seen: tuple[tuple[int, int], ...] = ()) -> str:
        monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: own, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: seen[index])
        chosen: str = function()
        return chosen

    return call


@pytest.mark.parametrize(
    ("own", "seen", "chosen"),
    [
        (TORCH_CU130, (), "7.5;8.0;8.6;9.0;10.0;12.0+PTX"),
        ("sm_50 sm_60 sm_70 sm_80 sm_90a sm_100f compute_100", (), "7.0;8.0;9.0;10.0+PTX"),
        (TORCH_CU130, ((9, 0), (8, 0), (9, 0)), "8.0;9.0+PTX"),
        ("sm_80", ((6, 1),), "8.0+PTX"),
    ],
)
def test_architectures(
    cuda_archs: Callable[..., str], own: str, seen: tuple[tuple[int, int], ...], chosen: str
) -> None:
    assert cuda_archs(own, seen) == chosen


def test_no_architecture_is_left(cuda_archs: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match="MINDDP_CUDA=0"):
        cuda_archs("sm_50 sm_60")


def test_the_variable_decides(cuda_archs: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert cuda_archs(TORCH_CU130, ((8, 0),)) == "9.0a"
