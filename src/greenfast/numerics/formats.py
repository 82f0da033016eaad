"""The two 8-bit number formats: one byte per element and one float32 scale per head.

A code c with scale s represents value(c) * s. ``e4m3`` codes are ``torch.float8_e4m3fn`` bits with scale amax / 448;
``int8`` codes are symmetric two's-complement integers with scale amax / 127; zero is exact. All-zero input has scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenfast.spec.errors import UsageError, unknown

#: Format -> the largest magnitude of a code.
CODE_MAX = {"e4m3": 448.0, "int8": 127.0}

#: The smallest scale: its inverse, even times a factor of up to 32, is a finite float32.
LEAST_SCALE = 2.0**-122


def quantize(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize each leading slice of ``x`` with a separate scale.

    x: (heads, ...) of any floating dtype. Returns uint8 codes of x's shape and float32 scales of shape (heads,).
    The quotient x / scale is taken in float32 and rounded to nearest even, saturating.
    Raises UsageError for an unknown format and for input that is not finite.
    """
    if not bool(torch.isfinite(x.float()).all()):
        raise UsageError("quantize: the input holds NaN or infinity; a scale cannot be chosen for it")
    return encode(x, fmt)


def encode(x: Tensor, fmt: str, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Quantize x * factor, which may exceed float32 and may be infinite or NaN.

    A slice with NaN or infinity gets a NaN scale and zero codes.
    """
    if fmt not in CODE_MAX:
        raise unknown("format", fmt, CODE_MAX)
    wide = x.float()
    amax = wide.abs().flatten(1).amax(dim=1)
    scale = torch.where(amax == 0.0, torch.ones_like(amax), (amax / CODE_MAX[fmt] * factor).clamp(min=LEAST_SCALE))
    scale = scale.masked_fill(~torch.isfinite(amax), torch.nan)
    quotient = (wide / (scale / factor).view(-1, *[1] * (x.dim() - 1))).clamp(-CODE_MAX[fmt], CODE_MAX[fmt])
    quotient = quotient.nan_to_num(0.0)
    codes = quotient.to(torch.float8_e4m3fn) if fmt == "e4m3" else quotient.round().to(torch.int8)
    return codes.view(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """The exact values (float64, shape of ``codes``) of uint8 codes with per-head float32 scales."""
    if fmt not in CODE_MAX:
        raise unknown("format", fmt, CODE_MAX)
    values = codes.view(torch.float8_e4m3fn if fmt == "e4m3" else torch.int8).double()
    return values * scale.double().view(-1, *[1] * (codes.dim() - 1))
