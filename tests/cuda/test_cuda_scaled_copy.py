"""csrc/copy/cuda/scaled_copy.h against ATen's arithmetic, on the GPU and emulated.

Every destination lies between guard elements, which must not change.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
# Around a vector's width, a block's threads and a chunk (4,096 elements); none and several chunks.
SIZES = [1, 2, 3, 5, 8, 17, 255, 1027, 4095, 4096, 4097, 0, 8192, 12289]
GUARD = 3


def random_tensor(numel: int, dtype: torch.dtype, device: str, offset: int) -> torch.Tensor:
    """A contiguous tensor that begins ``offset`` elements behind a 16-byte border."""
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        values = torch.randn(numel + offset, dtype=wide).to(dtype)
    else:
        values = torch.randint(0, 2 if dtype == torch.bool else 100, (numel + offset,)).to(dtype)
    return values.to(device)[offset:]


class Destination:
    """Memory to write to, ``offset`` elements behind a 16-byte border, between guards."""

    def __init__(self, numel: int, dtype: torch.dtype, device: str, offset: int = 0):
        before = 16 + offset
        storage = torch.ones(before + numel + GUARD, dtype=dtype, device=device)
        self.tensor = storage[before : before + numel]
        self._guards = [storage[:before], storage[before + numel :]]

    def check(self, want: torch.Tensor) -> None:
        torch.testing.assert_close(self.tensor, want, rtol=0, atol=0, equal_nan=True)
        assert all(bool((guard == 1).all()) for guard in self._guards), "wrote outside the destination"


def expected(source: torch.Tensor | None, like: torch.Tensor, scale: float) -> torch.Tensor:
    """ATen's ``(source * scale).to(like.dtype)``, in float or, where either type is double, in double."""
    if source is None:
        return torch.zeros_like(like)
    if source.dtype == like.dtype and scale == 1.0:
        return source.clone()
    wide = torch.promote_types(torch.promote_types(source.dtype, like.dtype), torch.float32)
    return (source.to(wide) * scale).to(like.dtype)


def check_copy(kernel: Any, src: torch.dtype, dst: torch.dtype, scale: float) -> None:
    """Every size at nine pairs of alignments, in one call, with missing sources among them."""
    shapes = [(numel, a, b) for numel in SIZES for a in (0, 1, 2) for b in (0, 2, 4)]
    sources: list[Any] = [random_tensor(numel, src, kernel.device, offset) for numel, offset, _ in shapes]
    sources[5] = sources[-1] = None
    destinations = [Destination(numel, dst, kernel.device, offset) for numel, _, offset in shapes]
    kernel(sources, [d.tensor for d in destinations], src, scale)
    for source, destination in zip(sources, destinations):
        destination.check(expected(source, destination.tensor, scale))


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dst", FLOATING)
@pytest.mark.parametrize("src", FLOATING)
def test_floating_pairs(kernel: Any, src: torch.dtype, dst: torch.dtype, scale: float) -> None:
    check_copy(kernel, src, dst, scale)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("src", COMPLEX)
@pytest.mark.parametrize("dst", COMPLEX)
def test_complex_pairs(kernel: Any, src: torch.dtype, dst: torch.dtype, scale: float) -> None:
    check_copy(kernel, src, dst, scale)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_copied(kernel: Any, dtype: torch.dtype) -> None:
    check_copy(kernel, dtype, dtype, 1.0)


@pytest.mark.parametrize("dst", FLOATING)
@pytest.mark.parametrize("src", FLOATING)
def test_special_values(kernel: Any, src: torch.dtype, dst: torch.dtype) -> None:
    """Infinities, NaN, zeros of both signs, subnormals and overflow become what ATen's casts make."""
    values = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-7, 65504.0, 65520.0, 3e38]
    source = torch.tensor(values * 3, dtype=torch.float64).to(src).to(kernel.device)
    destination = Destination(source.numel(), dst, kernel.device)
    kernel([source], [destination.tensor], src, 0.5)
    want = expected(source, destination.tensor, 0.5)
    destination.check(want)
    known = ~want.isnan()
    assert torch.equal(destination.tensor[known].signbit(), want[known].signbit())


@pytest.mark.parametrize("dtype", FLOATING)
def test_scale_one_moves_any_bits(kernel: Any, dtype: torch.dtype) -> None:
    """NaNs with their payloads too."""
    pattern = torch.randint(0, 256, (4099 * dtype.itemsize,), dtype=torch.uint8, device=kernel.device)
    source = pattern.view(dtype)
    for offset in (0, 1):
        destination = Destination(source.numel(), dtype, kernel.device, offset)
        kernel([source], [destination.tensor], dtype, 1.0)
        assert torch.equal(destination.tensor.clone().view(torch.uint8), pattern)


@pytest.mark.parametrize("dtype", FLOATING + COMPLEX)
def test_in_place(kernel: Any, dtype: torch.dtype) -> None:
    tensors = [random_tensor(numel, dtype, kernel.device, offset) for numel in SIZES for offset in (0, 1)]
    want = [expected(tensor.clone(), tensor, 1 / 3) for tensor in tensors]
    kernel(tensors, tensors, dtype, 1 / 3)
    for tensor, result in zip(tensors, want):
        torch.testing.assert_close(tensor, result, rtol=0, atol=0)


def many_segments(kernel: Any, count: int) -> None:
    """``count`` segments of very different sizes out of one storage into one buffer without gaps."""
    generator = random.Random(count)
    sizes = [generator.choice([0, 1, 3, 64, 100, 999]) for _ in range(count)]
    sizes[generator.randrange(count)] = 100_003
    storage = torch.randn(sum(sizes), device=kernel.device)
    buffer = Destination(sum(sizes), torch.bfloat16, kernel.device)
    kernel(storage.split(sizes), list(buffer.tensor.split(sizes)), torch.float32, 0.25)
    buffer.check(expected(storage, buffer.tensor, 0.25))


# 126 and 1,022 segments fit into the kernel's parameters; more travel in an uploaded table.
@pytest.mark.parametrize("count", [1, 126, 127, 1022, 1023, 5000])
def test_many_segments(kernel: Any, count: int) -> None:
    many_segments(kernel, count)


@pytest.mark.parametrize("capacity", [1, 126])
def test_a_table_in_several_launches(emulated: Any, capacity: int) -> None:
    emulated.capacity = capacity
    many_segments(emulated, 1000)
    assert emulated.launches > 1000 // capacity // 2


@pytest.mark.parametrize(
    ("src", "dst", "scale", "message"),
    [
        (torch.int32, torch.int32, 2.0, "cannot scale Int by 2"),
        (torch.int32, torch.float32, 1.0, "cannot scale Int by 1 into Float"),
        (torch.float32, torch.int32, 1.0, "cannot cast Float to Int"),
        (torch.complex64, torch.float32, 1.0, "cannot cast ComplexFloat to Float"),
    ],
)
def test_refusals(kernel: Any, src: torch.dtype, dst: torch.dtype, scale: float, message: str) -> None:
    source, destination = (torch.ones(4, dtype=dtype, device=kernel.device) for dtype in (src, dst))
    with pytest.raises(RuntimeError, match=message):
        kernel([source], [destination], src, scale)


def test_nothing_to_do_launches_nothing(emulated: Any) -> None:
    tensor = torch.ones(10)
    emulated([tensor, tensor[:0]], [tensor, tensor[:0]], torch.float32, 1.0)
    assert emulated.launches == 0
    emulated([tensor], [tensor], torch.float32, 0.5)
    assert emulated.launches == 1


@pytest.mark.parametrize("covered", [True, False])
def test_a_device_that_the_build_has_no_code_for(emulated: Any, covered: bool) -> None:
    """It is asked about once, and named once with the way out; the copy then takes torch's operators."""
    asked, warned = divmod(emulated.library.ask_coverage(covered, 5), 100)
    assert (asked, warned) == (1, 0 if covered else 1)
    if not covered:
        assert "cuda:1, of capability 7.0" in emulated.library.error().decode()
        assert "TORCH_CUDA_ARCH_LIST=7.0" in emulated.library.error().decode()


@pytest.mark.parametrize(
    "driver, major, most", [(12000, 9, 126), (12010, 9, 1022), (13000, 7, 1022), (13000, 6, 126)]
)
def test_an_old_driver_gets_small_parameters(emulated: Any, driver: int, major: int, most: int) -> None:
    """It may be older than the toolkit: CUDA allows any of the same major version. A larger launch would fail."""
    assert emulated.library.emulate_largest_table(driver, major) == most


# --- how the GPU is used ---------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1, 126, 127, 1022, 1023, 5000])
def test_one_launch_for_any_number(gpu: Any, count: int) -> None:
    tensors = list(torch.randn(count * 8, device="cuda").split(8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gpu(tensors, tensors, torch.float32, 0.5)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "scaled_copy_kernel" in event.name]
    assert len(kernels) == 1, kernels


@pytest.mark.cuda
def test_follows_the_current_stream(gpu: Any) -> None:
    """Ordered after what the stream was given before, however long that takes."""
    stream = torch.cuda.Stream()
    source, destination = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(3.0)
        gpu([source], [destination], torch.float32, 2.0)
    stream.synchronize()
    assert bool((destination == 6).all())


@pytest.mark.cuda
def test_uploads_follow_each_other(gpu: Any) -> None:
    """Tables of successive calls share memory from torch's caches: none is overwritten while in use."""
    tensors = list(torch.ones(2000 * 4, device="cuda").split(4))
    reverse = tensors[::-1]
    for _ in range(50):
        gpu(tensors, tensors, torch.float32, 2.0)
        gpu(reverse, reverse, torch.float32, 0.5)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [3, 500, 3000])
def test_captured_into_a_graph(gpu: Any, count: int) -> None:
    source = torch.zeros(count * 8, device="cuda")
    destination = torch.zeros(count * 8, dtype=torch.bfloat16, device="cuda")
    sources, destinations = source.split(8), list(destination.split(8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu(sources, destinations, torch.float32, 0.5)
    for value in (2.0, 8.0):
        source.fill_(value)
        graph.replay()
        assert bool((destination == value / 2).all())


@pytest.mark.cuda
@pytest.mark.parametrize("count", [100, 3000])
def test_does_not_wait_for_the_device(gpu: Any, count: int) -> None:
    tensors = list(torch.ones(count * 4, device="cuda").split(4))
    gpu(tensors, tensors, torch.float32, 2.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)  # some half a second
        gpu(tensors, tensors, torch.float32, 2.0)
        assert not torch.cuda.current_stream().query(), "the call waited for the work before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
