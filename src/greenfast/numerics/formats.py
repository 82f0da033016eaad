"""The two 8-bit number formats, with a float32 scale per head, block or channel.

A code c with scale s represents value(c) * s. ``e4m3`` codes are ``torch.float8_e4m3fn`` bits with scale amax / 448;
``int8`` codes are symmetric two's-complement integers with scale amax / 127; zero is exact. All-zero input has scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUP, KEY_GROUPS, KEY_ORDER, ROW_BLOCK, padded_keys
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
    """Quantize x * factor. The product may exceed float32 and may be infinite or NaN.

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
    """Return the exact values (float64, shape of ``codes``) of uint8 codes with per-head float32 scales."""
    if fmt not in CODE_MAX:
        raise unknown("format", fmt, CODE_MAX)
    values = codes.view(torch.float8_e4m3fn if fmt == "e4m3" else torch.int8).double()
    return values * scale.double().view(-1, *[1] * (codes.dim() - 1))


def transposed_values(codes: Tensor) -> Tensor:
    """Transpose and reorder V for the kernels: uint8 (heads, kv_len, head_dim) to (heads, head_dim, padded_keys).

    The padding keys are zeros. The result is on the device of ``codes``.
    """
    heads, kv_len, head_dim = codes.shape
    padded = padded_keys(kv_len)
    whole = torch.nn.functional.pad(codes, (0, 0, 0, padded - kv_len))
    grouped = whole.view(heads, padded // KEY_GROUP, KEY_GROUP, head_dim)[:, :, list(KEY_ORDER)]
    return grouped.reshape(heads, padded, head_dim).transpose(1, 2).contiguous()


def quantize_blocks(x: Tensor, fmt: str, rows: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Quantize x * factor, x (heads, length, head_dim), with one scale per ``rows`` rows.

    Scales are (heads, blocks).
    """
    heads, length, head_dim = x.shape
    blocks = -(-length // rows)
    whole = torch.nn.functional.pad(x, (0, 0, 0, blocks * rows - length)).reshape(heads * blocks, rows, head_dim)
    codes, scale = encode(whole, fmt, factor)
    return codes.view(heads, blocks * rows, head_dim)[:, :length].contiguous(), scale.view(heads, blocks)


def quantize_groups(x: Tensor, fmt: str, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Quantize keys x * factor, x (heads, length, head_dim), with a scale per group of each block.

    Scales are (heads, blocks, KEY_GROUPS). If a value of a block is not finite, all scales of the block are NaN.
    """
    heads, length, head_dim = x.shape
    blocks = -(-length // ROW_BLOCK)
    whole = torch.nn.functional.pad(x, (0, 0, 0, blocks * ROW_BLOCK - length))
    rows = ROW_BLOCK // KEY_GROUPS
    grouped = whole.view(heads, blocks, rows // 2, KEY_GROUPS, 2, head_dim).transpose(2, 3)
    codes, scale = encode(grouped.reshape(heads * blocks * KEY_GROUPS, rows, head_dim), fmt, factor)
    scale = scale.view(heads, blocks, KEY_GROUPS)
    unknown = scale.isnan().any(dim=2)
    codes = codes.view(grouped.shape).transpose(2, 3).reshape(heads, blocks, ROW_BLOCK, head_dim)
    codes = codes.masked_fill(unknown.view(heads, blocks, 1, 1), 0)
    codes = codes.view(heads, blocks * ROW_BLOCK, head_dim)[:, :length].contiguous()
    return codes, scale.masked_fill(unknown.unsqueeze(2), torch.nan)


def scales_of_keys(scale: Tensor, length: int) -> Tensor:
    """Expand scales of groups, (..., blocks, KEY_GROUPS), to scales of keys, (..., length)."""
    per_key = scale.unsqueeze(-2).repeat_interleave(ROW_BLOCK // KEY_GROUPS // 2, -2).repeat_interleave(2, -1)
    return per_key.flatten(-3)[..., :length]


def quantize_values(v: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize v (heads, kv_len, head_dim) with a scale per channel; scales are (heads, head_dim)."""
    codes, scale = quantize_blocks(v.transpose(1, 2), fmt, 1)
    return codes.transpose(1, 2).contiguous(), scale
