"""The one-pass copy against its readable version, and against what torch computes."""

import math

import pytest
import torch

from minddp import _C

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SIZES = [0, 1, 3, 7, 8, 31, 1000, 4097]


def _values(dtype, size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator, dtype=torch.float64) * 100
    if dtype.is_complex:
        x = torch.complex(x, x.flip(0))
    return x.to(dtype)


def _copy(src, dst_dtype, scale, reference):
    dst = torch.full((src.numel(),), 77.0).to(dst_dtype)
    _C.scaled_copy([src], [dst], src.dtype, scale, reference)
    return dst


@pytest.mark.parametrize("src", FLOATS)
@pytest.mark.parametrize("dst", FLOATS)
def test_agrees_with_the_reference_bit_for_bit(src, dst):
    for size in SIZES:
        for scale in (1.0, 0.5, 1 / 3, -2.0, 1e-3):
            values = _values(src, size)
            assert torch.equal(_copy(values, dst, scale, False), _copy(values, dst, scale, True)), (size, scale)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers(dtype):
    values = _values(dtype, 1001)
    assert torch.equal(_copy(values, dtype, 1.0, False), values)
    torch.testing.assert_close(_copy(values, dtype, 1 / 3, False), values / 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_scale_is_applied_as_torch_multiplies(dtype):
    values = _values(dtype, 999)
    assert torch.equal(_copy(values, dtype, 1 / 3, False), values * (1 / 3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_survive(dtype):
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, 65504.0]).to(dtype)
    for dst in FLOATS:
        for scale in (1.0, 0.5):
            ours, reference = _copy(values, dst, scale, False), _copy(values, dst, scale, True)
            torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(torch.signbit(ours[3:5]), torch.tensor([False, True]))


def test_in_place():
    values = _values(torch.float32, 100)
    expected = values * 0.25
    _C.scaled_copy([values], [values], values.dtype, 0.25)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_large_copies_at_any_alignment(dtype, scale):
    """From 1 MiB on, stores go past the caches; nothing before or after the piece may change."""
    size = (1 << 20) // dtype.itemsize + 13
    values = _values(dtype, size + 8)
    for start in (0, 1, 3):
        for shift in (0, 1, 2):
            src = values[start : start + size]
            dst = torch.full((size + 8,), 77.0).to(dtype)
            _C.scaled_copy([src], [dst[shift : shift + size]], dtype, scale)
            assert torch.equal(dst[shift : shift + size], _copy(src, dtype, scale, True)), (start, shift)
            assert (dst[:shift] == 77).all() and (dst[shift + size :] == 77).all()
            in_place = src.clone()
            _C.scaled_copy([in_place], [in_place], dtype, scale)
            assert torch.equal(in_place, _copy(src, dtype, scale, True))
