"""Every code of the small formats, and rounding into them, against their definitions bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from greenfast.emulator.instructions.convert import E4M3_VALUES, E5M2_VALUES, encode
from greenfast.emulator.instructions.formats import decode
from greenfast.emulator.instructions.rounding import narrow, widen

#: Format -> its values, bits of fraction, exponent bias, the largest number, PyTorch's dtype.
EIGHT_BITS = {
    "e4m3": (E4M3_VALUES, 3, 7, 448.0, torch.float8_e4m3fn),
    "e5m2": (E5M2_VALUES, 2, 15, 57344.0, torch.float8_e5m2),
}
NAN_CODES = {"e4m3": {0x7F, 0xFF}, "e5m2": {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}}


def by_its_bits(code: int, name: str) -> float:
    """Decode a code by OCP's 8-bit floating point specification."""
    _, fraction_bits, bias, largest, _ = EIGHT_BITS[name]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code & 0x7F) >> fraction_bits, code & ((1 << fraction_bits) - 1)
    if code in NAN_CODES[name]:
        return math.nan
    hidden = (1 << fraction_bits) if exponent else 0
    size = math.ldexp(hidden + fraction, max(exponent, 1) - bias - fraction_bits)
    return sign * (size if size <= largest else math.inf)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_all_codes(name: str) -> None:
    expected = np.array([by_its_bits(code, name) for code in range(256)], np.float32)
    for result in (EIGHT_BITS[name][0], decode(np.arange(256, dtype=np.uint8), name)):
        assert result.dtype == np.float32
        assert np.array_equal(result, expected, equal_nan=True)
        assert np.array_equal(np.signbit(result), np.arange(256) >= 128), "of zeros and NaN too"


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_rounding_at_and_around_every_tie(name: str) -> None:
    largest = EIGHT_BITS[name][3]
    codes = [c for c in range(128) if by_its_bits(c, name) <= largest]
    values = np.array([by_its_bits(c, name) for c in codes], np.float32)
    ties = (values[1:] + values[:-1]) / 2  # exact: one bit more
    even = np.array([c + c % 2 for c in codes[:-1]], np.uint8)
    infinity = np.float32(np.inf)
    for x, expected in (
        (values, codes),
        (ties, even),
        (np.nextafter(ties, infinity), codes[1:]),
        (np.nextafter(ties, -infinity), codes[:-1]),
    ):
        wanted = np.array(expected, np.uint8)
        assert np.array_equal(encode(x, name), wanted)
        assert np.array_equal(encode(-x, name), wanted | 0x80)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_beyond_the_largest_and_nan(name: str) -> None:
    values, _, _, largest, dtype = EIGHT_BITS[name]
    top = int(np.argmax(values == largest))
    above = np.array([largest, np.nextafter(np.float32(largest), np.float32(np.inf)), 1e5, 1e30, np.inf], np.float32)
    assert encode(above, name).tolist() == [top] * 5
    assert encode(-above, name).tolist() == [top | 0x80] * 5
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert encode(nan, name).tolist() == [0x7F] * 4
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    inside = halves[np.abs(halves) <= largest]
    expected = torch.from_numpy(inside.astype(np.float32)).to(dtype).view(torch.uint8).numpy()
    assert np.array_equal(encode(inside, name), expected)


def test_all_patterns_of_bfloat16() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    wide = bits.astype(np.uint32) << np.uint32(16)  # float32 patterns, NaN with sign and payload
    assert np.array_equal(decode(bits.view(np.uint8), "bf16").view(np.uint32), wide)
    with np.errstate(invalid="ignore"):  # signalling NaN becomes quiet
        values, expected = widen(bits, "bf16"), wide.view(np.float32).astype(np.float64)
    assert values.dtype == np.float64
    assert np.array_equal(values, expected, equal_nan=True)
    number = ~np.isnan(values)
    assert np.array_equal(narrow(values, "bf16")[number], bits[number])
    assert set(narrow(values, "bf16")[~number]) == {0x7FFF}, "an instruction's own NaN"


def test_float64_is_rounded_to_bfloat16_once() -> None:
    """Rounding to float32 first would turn the first value into a tie, and then into 1."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 3 * 2.0**-8])
    assert widen(narrow(x, "bf16"), "bf16").tolist() == [1 + 2.0**-7, 1.0, 1 + 2.0**-7, 1 + 2.0**-6]
