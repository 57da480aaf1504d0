"""The emulated kernels on drawn shapes, under sanitizers. The program by hand: 600 rounds take some ten seconds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cuda.conftest import compile_kernels


@pytest.mark.long
def test_drawn_tensors_are_read_and_written_within_their_memory(tmp_path: Path) -> None:
    program = tmp_path / "drawn_kernel"
    compile_kernels("drawn_kernel.cpp", program, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = subprocess.run([program, "100", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "100 rounds\n"), done.stdout + done.stderr
