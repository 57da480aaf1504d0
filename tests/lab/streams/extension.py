"""Builds the fake device once for each torch and each text of its sources, and makes it known to torch.

A process that has loaded it has another accelerator for good: tests do so in ranks of their own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
NAME = "streams"  # the device, and a backend whose futures order streams, as NCCL's
PLAIN = "streams_plain"  # the same without that: only a collective's work does
ALONE = "streams_alone"  # the first, for tensors of the device alone, as NCCL


def folder() -> Path:
    """Where it is built, whichever copy of the repository builds it: another one when torch or the sources change."""
    texts = [path.read_bytes() for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])]
    key = hashlib.sha256(b"".join([torch.__version__.encode(), *texts])).hexdigest()[:16]
    return Path(cpp_extension.get_default_build_root()) / f"minddp_streams_{key}"


def build() -> Any:
    """The extension's module, compiled where it is not yet: half a minute on an idle machine."""
    library = folder() / "minddp_streams.so"
    if library.exists() and not (folder() / "lock").exists():  # which holds while another process builds
        spec = importlib.util.spec_from_file_location("minddp_streams", library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    folder().mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        "minddp_streams",
        [str(HERE / "extension.cpp")],
        build_directory=str(folder()),
        extra_cflags=["-O1", "-g0", "-std=c++20", "-Wno-unused-parameter"],
    )


_lists = torch.library.Library("aten", "IMPL")


def _foreach_norm(tensors: list[torch.Tensor], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    """The fallback takes no lists."""
    return [torch.linalg.vector_norm(tensor, ord) for tensor in tensors]


def _stack(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    assert dim == 0
    out = tensors[0].new_empty((len(tensors), *tensors[0].shape))
    for i, tensor in enumerate(tensors):
        out[i].copy_(tensor)
    return out


@functools.cache
def load() -> Any:
    """The extension, after which ``"streams"`` is a device and a backend of torch's."""
    extension = build()
    torch.utils.rename_privateuse1_backend(NAME)
    device = types.ModuleType(f"torch.{NAME}")
    device.is_available = lambda: True  # type: ignore[attr-defined]
    device.device_count = lambda: 1  # type: ignore[attr-defined]
    device.current_device = lambda: 0  # type: ignore[attr-defined]
    device.is_initialized = lambda: True  # type: ignore[attr-defined]
    device._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    device.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    device.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    torch._register_device_module(NAME, device)
    _lists.impl("_foreach_norm.Scalar", _foreach_norm, "PrivateUse1")
    _lists.impl("stack", _stack, "PrivateUse1")
    for backend, futures_order, devices in (
        (NAME, True, ["cpu", NAME]), (PLAIN, False, ["cpu", NAME]), (ALONE, True, [NAME])
    ):  # fmt: skip
        dist.Backend.register_backend(
            backend,
            lambda store, rank, size, timeout, orders=futures_order: extension.make_group(rank, size, orders),
            devices=devices,
        )
    return extension
