"""Blocks of 8-bit codes on a GPU: the kernel's bits are the CPU's, emulated, too. Whole steps with ``wire=``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minddp
from minddp import _C, Wire
from tests.cuda.conftest import SCALAR_TYPES
from tests.ranks_pool import run_ranks
from tests.reducer.test_wire import Given, averages, gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BYTES = 260
SIZES = [1, 255, 256, 257, 5 * 256 + 3, 40 * 256]


@dataclass
class OnCpu:
    """``minddp._C`` on tensors of its device."""

    device: str = "cpu"

    def quantize(self, src: Tensor, scale: float, lost: Tensor | None, blocks: Tensor) -> None:
        _C.wire.quantize(src, scale, lost, blocks)

    def dequantize(self, blocks: Tensor, scale: float, dst: Tensor) -> None:
        _C.wire.dequantize(blocks, scale, dst)

    def add_quantized(self, pieces: Tensor, lost: Tensor | None) -> None:
        _C.wire.add_quantized(list(pieces), lost)


@dataclass
class EmulatedBlocks:
    """The kernel on the CPU."""

    library: ctypes.CDLL
    device: str = "cpu"

    def quantize(self, src: Tensor, scale: float, lost: Tensor | None, blocks: Tensor) -> None:
        self.library.emulate_quantize(
            src.data_ptr(), SCALAR_TYPES[src.dtype], src.numel(), scale, _address(lost), blocks.data_ptr()
        )

    def dequantize(self, blocks: Tensor, scale: float, dst: Tensor) -> None:
        self.library.emulate_dequantize(
            blocks.data_ptr(), scale, dst.data_ptr(), SCALAR_TYPES[dst.dtype], dst.numel()
        )

    def add_quantized(self, pieces: Tensor, lost: Tensor | None) -> None:
        self.library.emulate_add_quantized(pieces.data_ptr(), len(pieces), pieces.shape[1] // BYTES, _address(lost))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.cuda)])
def kernel(request: pytest.FixtureRequest) -> Any:
    if request.param == "gpu":
        return OnCpu("cuda")
    return EmulatedBlocks(request.getfixturevalue("emulator"))


def numbers(numel: int, dtype: torch.dtype, special: bool, generator: torch.Generator) -> Tensor:
    """Blocks of very different magnitudes, one of them below what is encoded, one of the largest float."""
    made = torch.randn(numel, generator=generator)
    for block, exponent in enumerate((-3, 4, 0, -35, 1)):
        made[256 * block : 256 * (block + 1)] *= 10.0**exponent
    if numel > 6 * 256:
        made[6 * 256] = torch.finfo(torch.float32).max
        made[7 * 256 : 8 * 256] = 0.0
        if special:
            made[9 * 256 + 5], made[10 * 256 + 7], made[11 * 256 + 9] = torch.inf, -torch.inf, torch.nan
            made[12 * 256 : 13 * 256] = -torch.inf
    return made.to(dtype)


def blocks(numel: int) -> int:
    return -(-numel // 256)


def run(on: Any, dtype: torch.dtype, numel: int, special: bool, offset: int) -> list[Tensor]:
    """Encodings with feedback and without, a sum of three that feeds back, one without, and what they decode to."""
    generator = torch.Generator().manual_seed(numel)
    count, results = blocks(numel), []
    lost = torch.zeros(count * BYTES, dtype=torch.uint8, device=on.device)
    pieces = torch.empty(3, count * BYTES, dtype=torch.uint8, device=on.device)
    for piece, feedback in zip(pieces, (None, lost, lost)):
        memory = torch.zeros(numel + offset, dtype=dtype)
        memory[offset:] = numbers(numel, dtype, special, generator)
        memory = memory.to(on.device)
        on.quantize(memory[offset:], 1 / 3, feedback, piece)
        results += [piece.clone(), lost.clone()]
    on.add_quantized(pieces, lost)
    results += [pieces[0].clone(), lost]
    on.add_quantized(pieces[1:], None)
    results.append(pieces[1].clone())
    decoded = torch.full((numel + offset,), 7.0, dtype=dtype, device=on.device)
    on.dequantize(pieces[0].contiguous(), 0.5, decoded[offset:])
    return [result.cpu() for result in [*results, decoded]]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("offset", [0, 1])  # of elements: then the source is aligned to nothing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_the_cpu(kernel: Any, dtype: torch.dtype, offset: int, special: bool) -> None:
    for numel in SIZES:
        found, want = (run(on, dtype, numel, special, offset) for on in (kernel, OnCpu()))
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) or _both_nan(a, b), (numel, i)


def _both_nan(a: Tensor, b: Tensor) -> bool:
    """A NaN's bits are the processor's own."""
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


# ---- whole steps, one rank through NCCL: what it sends to itself is rounded twice


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 2e-3},
    "lazy": {"lazy_bucket_allocation": True, "bucket_cap_mb": 2e-3},
    "find_unused": {"find_unused_parameters": True},
    "views beside it": {"gradient_as_bucket_view": True},
}
WIRES: dict[str, Any] = {
    "int8": "int8", "int8 without feedback": Wire("int8", error_feedback=False), "bf16": "bf16", "fp16": "fp16",
    "ordered": None,
}  # fmt: skip


def _steps(rank: int, world_size: int, device: str, delays: bool) -> dict[str, list[Tensor]]:
    """All gradients of four iterations by wire and mode, one with a backward under no_sync; feedback at the end."""
    found = {}
    for wire_name, wire in WIRES.items():
        for mode, options in MODES.items():
            module: nn.Module = Given().to(device)
            ddp = minddp.DistributedDataParallel(module, wire=wire, ordered=wire is None, **options)
            seen: list[Tensor] = []
            for iteration in range(4):
                given = {name: g.to(device) for name, g in gradients(rank, iteration).items()}
                ddp.zero_grad()
                if delays:
                    torch.cuda._sleep(20_000_000)
                if iteration == 2:
                    with ddp.no_sync():
                        ddp(given).backward()
                ddp(given).backward()
                seen += averages(ddp).values()
            if wire_name == "int8":
                seen += [blocks for *_, blocks in minddp.wire_state(ddp).values()]
            found[f"{wire_name}, {mode}"] = [tensor.cpu() for tensor in seen]
    return found


THROUGH_THE_GROUP = {"MINDDP_ALWAYS_REDUCE": "1"}


@pytest.mark.cuda
def test_steps_through_nccl_are_those_of_the_cpu() -> None:
    """NCCL's all-to-alls, their streams, and the blocks' kernels; the device is late."""
    found = run_ranks(_steps, 1, "cuda", True, backend="nccl", env=THROUGH_THE_GROUP)[0]
    want = run_ranks(_steps, 1, "cpu", False, env=THROUGH_THE_GROUP)[0]
    assert found.keys() == want.keys()
    for name in want:
        assert all(torch.equal(a, b) for a, b in zip(found[name], want[name], strict=True)), name


def test_one_rank_alone_rounds_where_it_is_told_to_send() -> None:
    """What the test above compares with is not the gradients as they were."""
    found = run_ranks(_steps, 1, "cpu", False, env=THROUGH_THE_GROUP)[0]
    exact = found["ordered, default"]
    for name, seen in found.items():
        assert torch.equal(seen[0], exact[0]) == name.startswith("ordered"), name
