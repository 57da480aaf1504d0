"""Runs the CUDA kernels of csrc: on a GPU where there is one, and emulated on the CPU everywhere.

Tests marked ``cuda`` are skipped where there is no GPU, or no CUDA in the extension.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from minddp import _extension

ROOT = Path(__file__).resolve().parents[2]
_NAMES = "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool".split()
SCALAR_TYPES = {getattr(torch, name): number for number, name in enumerate(_NAMES)} | {torch.bfloat16: 15}


def _reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU"
    if _extension.build_record()["cuda"] is None:
        return "minddp was built without CUDA"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_to_skip()
    for item in items:
        if reason is not None and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


class Segment(ctypes.Structure):
    _fields_ = [("src", ctypes.c_void_p), ("dst", ctypes.c_void_p), ("numel", ctypes.c_int64)]


def compile_kernels(source: str, target: Path, *flags: str) -> None:
    """A file of this folder, with the kernels' headers."""
    compiler = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
    torch_libraries = Path(torch.__file__).parent / "lib"
    command = [compiler, "-std=c++20", "-O0", *flags]
    command += [f"-I{path}" for path in [str(ROOT / "csrc"), *cpp_extension.include_paths()]]
    command += [str(Path(__file__).with_name(source)), "-o", str(target)]
    subprocess.run([*command, f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}", "-lc10"], check=True)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """emulated_kernel.cpp, compiled."""
    target = tmp_path_factory.mktemp("kernel") / "emulated_kernel.so"
    # A GPU faults where a vector is not aligned to its size; a CPU does only if told to.
    flags = ["-shared", "-fPIC", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    # Where the compiler adds its standard library to it, that one stays inside.
    compile_kernels("emulated_kernel.cpp", target, *flags, "-Wl,--exclude-libs,ALL")
    library = ctypes.CDLL(str(target))
    library.emulate.argtypes = [ctypes.POINTER(Segment), ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    library.emulate.argtypes += [ctypes.c_double, ctypes.c_int64]
    library.error.restype = ctypes.c_char_p
    library.emulate_largest_table.restype = ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.emulate_quantize.argtypes = [pointer, ctypes.c_int, number, ctypes.c_double, pointer, pointer]
    library.emulate_dequantize.argtypes = [pointer, ctypes.c_double, pointer, ctypes.c_int, number]
    library.emulate_add_quantized.argtypes = [pointer, ctypes.c_int, number, pointer]
    return library


@dataclass
class Emulated:
    """The kernel on the CPU, with at most ``capacity`` segments to a launch."""

    library: ctypes.CDLL
    capacity: int = 100_000
    device: str = "cpu"
    launches: int = 0  # of the last call

    def __call__(
        self,
        sources: Sequence[torch.Tensor | None],
        destinations: Sequence[torch.Tensor],
        src_dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        segments = [
            Segment(None if src is None else src.data_ptr(), dst.data_ptr(), dst.numel())
            for src, dst in zip(sources, destinations)
        ]
        self.launches = self.library.emulate(
            (Segment * len(segments))(*segments),
            len(segments),
            SCALAR_TYPES[src_dtype],
            SCALAR_TYPES[destinations[0].dtype],
            scale,
            self.capacity,
        )
        if self.launches < 0:
            raise RuntimeError(self.library.error().decode())


@dataclass
class OnGpu:
    """The same interface, on the GPU."""

    device: str = "cuda"

    def __call__(self, sources: Sequence[torch.Tensor | None], *arguments: Any) -> None:
        _extension.load().scaled_copy(list(sources), *arguments)


@pytest.fixture
def emulated(emulator: ctypes.CDLL) -> Emulated:
    return Emulated(emulator)


@pytest.fixture
def gpu() -> OnGpu:
    return OnGpu()


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.cuda)])
def kernel(request: pytest.FixtureRequest) -> Emulated | OnGpu:
    """``kernel(sources, destinations, src_dtype, scale)`` for tensors on ``kernel.device``."""
    found: Emulated | OnGpu = request.getfixturevalue(request.param)
    return found
