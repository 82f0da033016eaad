"""The number formats: every code, every rounding rule, every refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.numerics.formats import CODE_MAX, LEAST_SCALE, dequantize, encode, quantize
from greenfast.spec.errors import UsageError

FORMATS = sorted(CODE_MAX)
ONE = torch.ones(1)
# Positive halves that count as more than zero, one per head.
HALVES = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.half).view(-1, 1)


def e4m3_by_its_bits(code: int) -> float:
    """OCP E4M3: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinity, NaN where all but the sign are ones."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


def code_values(fmt: str) -> list[float]:
    """The values of codes 0..255 at scale 1."""
    return [e4m3_by_its_bits(c) if fmt == "e4m3" else float(c - 256 if c > 127 else c) for c in range(256)]


def used_codes(fmt: str) -> list[int]:
    """The codes that quantization may return: not NaN, and not -128, which has no positive counterpart."""
    return [code for code, value in enumerate(code_values(fmt)) if abs(value) <= CODE_MAX[fmt]]


def nearest_even(x: NDArray[np.float64], fmt: str) -> NDArray[np.float64]:
    """The code with the nearest value, the even code on a tie; by search, without rounding."""
    values = code_values(fmt)
    codes = np.array([code for code in used_codes(fmt) if values[code] > 0 or code == 0])
    grid = np.array([values[code] for code in codes])
    distance = np.abs(np.abs(x)[:, None] - grid)
    tied = distance == distance.min(axis=1, keepdims=True)
    best = np.where(tied & (codes % 2 == 0), 2, tied).argmax(axis=1)
    result: NDArray[np.float64] = np.copysign(grid[best], x)
    return result


def as_codes(codes: list[int]) -> Tensor:
    return torch.tensor([codes], dtype=torch.uint8)


# Codes


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_stands_for_its_value(fmt: str) -> None:
    decoded = dequantize(as_codes(list(range(256))), ONE, fmt)
    assert decoded.dtype == torch.float64
    np.testing.assert_array_equal(decoded[0].numpy(), code_values(fmt))


def test_e4m3_equals_torchs_type() -> None:
    codes = as_codes(list(range(256)))
    torch.testing.assert_close(
        dequantize(codes, ONE, "e4m3"), codes.view(torch.float8_e4m3fn).double(), rtol=0, atol=0, equal_nan=True
    )
    assert torch.finfo(torch.float8_e4m3fn).max == CODE_MAX["e4m3"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("power", [-10, 0, 3])
def test_every_code_round_trips(fmt: str, power: int) -> None:
    codes = as_codes(used_codes(fmt))
    assert codes.numel() == {"e4m3": 254, "int8": 255}[fmt]
    x = dequantize(codes, ONE * 2.0**power, fmt)
    again, scale = quantize(x, fmt)
    assert scale.tolist() == [2.0**power]
    assert torch.equal(again, codes)
    assert torch.equal(dequantize(again, scale, fmt), x)


def test_int8_zero_is_zero() -> None:
    codes, scale = quantize(torch.tensor([[0.0, -0.0, 3.0, -3.0]]), "int8")
    assert codes.tolist() == [[0, 0, 127, 256 - 127]]
    assert dequantize(codes, scale, "int8")[0, :2].tolist() == [0.0, 0.0]


# Rounding


@pytest.mark.parametrize("fmt", FORMATS)
def test_rounds_to_nearest_even(fmt: str) -> None:
    values = np.array([v for c, v in enumerate(code_values(fmt)) if c in used_codes(fmt)])
    grid = np.unique(values)
    between = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([np.nextafter(between.astype(np.float32), np.float32(side)) for side in (-1e9, 1e9)])
    drawn = np.random.default_rng(0).uniform(-1, 1, 2000) * np.repeat([CODE_MAX[fmt], 1.0, 0.02], [1000, 500, 500])
    x = np.concatenate([[CODE_MAX[fmt]], between, near, drawn]).astype(np.float32)
    codes, scale = quantize(torch.from_numpy(x)[None], fmt)
    assert scale.tolist() == [1.0]
    np.testing.assert_array_equal(dequantize(codes, scale, fmt)[0].numpy(), nearest_even(x.astype(np.float64), fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_largest_element_always_gets_the_largest_code(fmt: str) -> None:
    top = {"e4m3": 0x7E, "int8": 127}[fmt]
    codes, scale = quantize(torch.cat([HALVES, -HALVES], dim=1), fmt)
    assert torch.equal(codes[:, 0], torch.full((len(HALVES),), top, dtype=torch.uint8))
    assert torch.equal(
        codes[:, 1], torch.full((len(HALVES),), {"e4m3": 0xFE, "int8": 256 - 127}[fmt], dtype=torch.uint8)
    )
    off = dequantize(codes, scale, fmt)[:, :1] / HALVES.double() - 1
    assert off.abs().max() <= 2.0**-23


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float32, torch.float64])
def test_error_is_half_a_step(fmt: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    codes, scale = quantize(x, fmt)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (torch.uint8, x.shape, torch.float32, (4,))
    step = scale.double().view(-1, 1, 1) * torch.ones(x.shape)
    if fmt == "e4m3":
        magnitude = (x.double() / step).abs().clamp(min=2.0**-6)
        step = step * 2.0 ** (magnitude.log2().floor() - 3)
    error = (dequantize(codes, scale, fmt) - x.double()).abs() / step
    assert 0.49 < error.max() <= 0.5 + 1e-4


# Scales


@pytest.mark.parametrize(("fmt", "code_max"), [("e4m3", 448), ("int8", 127)])
def test_scale_is_amax_over_the_largest_code(fmt: str, code_max: int) -> None:
    _, scale = quantize(torch.tensor([[0.5, -3.0], [7.0, 1.0]]), fmt)
    assert scale.tolist() == [float(np.float32(3) / np.float32(code_max)), float(np.float32(7) / np.float32(code_max))]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_head_of_zeros_has_scale_one(fmt: str) -> None:
    codes, scale = quantize(torch.tensor([[0.0, 0.0], [0.0, -0.0]]), fmt)
    assert scale.tolist() == [1.0, 1.0]
    assert not dequantize(codes, scale, fmt).any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1e-38, 3e-35, 1e-30, 1e-13, 1e13, 3e38])
def test_tiny_and_huge_heads_keep_their_digits(fmt: str, size: float) -> None:
    if fmt == "int8" and size < 127 * LEAST_SCALE:
        pytest.skip("int8 has no small numbers to make up for the least scale")
    x = torch.tensor([[1.0, -0.5, 0.25]]) * size
    codes, scale = quantize(x, fmt)
    assert torch.isfinite(1 / scale).all()
    assert scale >= LEAST_SCALE
    assert (dequantize(codes, scale, fmt) - x).abs().max() <= 0.04 * size


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_shows_only_in_its_scale(fmt: str, bad: float) -> None:
    codes, scale = encode(torch.tensor([[1.0, bad], [1.0, 2.0]]), fmt)
    assert scale.isnan().tolist() == [True, False]
    assert codes[0].tolist() == [0, 0]
    assert dequantize(codes, scale, fmt)[1].tolist() == pytest.approx([1.0, 2.0], rel=0.01)


@pytest.mark.parametrize("fmt", FORMATS)
def test_heads_do_not_see_each_other(fmt: str) -> None:
    x = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize(x, fmt)
    loud = x.clone()
    loud[1] *= 1000
    loud_codes, loud_scale = quantize(loud, fmt)
    assert torch.equal(loud_codes[[0, 2]], codes[[0, 2]])
    assert torch.equal(loud_scale[[0, 2]], scale[[0, 2]])
    assert loud_scale[1] > 999 * scale[1]
    for head in range(3):
        alone = quantize(x[head : head + 1], fmt)
        assert torch.equal(alone[0][0], codes[head])
        assert torch.equal(alone[1][0], scale[head])


@pytest.mark.parametrize("fmt", FORMATS)
def test_memory_order_does_not_matter(fmt: str) -> None:
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    codes, scale = quantize(x, fmt)
    again, same_scale = quantize(x.contiguous(), fmt)
    assert torch.equal(codes, again)
    assert torch.equal(scale, same_scale)


# Refusals


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(fmt: str, bad: float) -> None:
    x = torch.ones(2, 4, 4, dtype=torch.half)
    x[1, 3, 3] = bad
    with pytest.raises(UsageError, match="NaN or infinity"):
        quantize(x, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_beyond_float32_are_refused(fmt: str) -> None:
    with pytest.raises(UsageError, match="NaN or infinity"):
        quantize(torch.full((1, 2), 1e300, dtype=torch.float64), fmt)


@pytest.mark.parametrize("fmt", ["fp8", "E4M3", "", "e5m2", None, 8, torch.float8_e4m3fn])
def test_unknown_format_lists_the_allowed_ones(fmt: Any) -> None:
    with pytest.raises(UsageError, match="allowed: e4m3, int8") as caught:
        quantize(torch.ones(1, 1), fmt)
    assert repr(fmt) in str(caught.value)
    with pytest.raises(UsageError, match="allowed: e4m3, int8"):
        dequantize(as_codes([0]), ONE, fmt)
