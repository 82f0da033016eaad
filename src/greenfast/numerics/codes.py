"""Codes as the attention kernels read them: with scales per block or channel, and V transposed."""

from __future__ import annotations

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUP, KEY_ORDER, padded_keys
from greenfast.numerics.formats import encode


def transposed_values(codes: Tensor) -> Tensor:
    """V as the attention kernels read it: uint8 (heads, kv_len, head_dim) to (heads, head_dim, padded_keys), reordered.

    The padding keys are zeros. The result is on the device of ``codes``.
    """
    heads, kv_len, head_dim = codes.shape
    padded = padded_keys(kv_len)
    whole = torch.nn.functional.pad(codes, (0, 0, 0, padded - kv_len))
    grouped = whole.view(heads, padded // KEY_GROUP, KEY_GROUP, head_dim)[:, :, list(KEY_ORDER)]
    return grouped.reshape(heads, padded, head_dim).transpose(1, 2).contiguous()


def quantize_blocks(x: Tensor, fmt: str, rows: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Codes and scales of x * factor, x (heads, length, head_dim), with one scale per ``rows`` rows.

    Scales are (heads, blocks).
    """
    heads, length, head_dim = x.shape
    blocks = -(-length // rows)
    whole = torch.nn.functional.pad(x, (0, 0, 0, blocks * rows - length)).reshape(heads * blocks, rows, head_dim)
    codes, scale = encode(whole, fmt, factor)
    return codes.view(heads, blocks * rows, head_dim)[:, :length].contiguous(), scale.view(heads, blocks)


def quantize_values(v: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of v (heads, kv_len, head_dim) with a scale per channel: scales (heads, head_dim)."""
    codes, scale = quantize_blocks(v.transpose(1, 2), fmt, 1)
    return codes.transpose(1, 2).contiguous(), scale
