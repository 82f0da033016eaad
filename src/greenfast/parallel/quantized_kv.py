"""Quantized K and V of a rank in one buffer, for a single exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUPS, ROW_BLOCK, padded_keys
from greenfast.ops.quantized import FINE, pad_head_dim_size

_ALIGNMENT = 256  # bytes; alignment of tensors in a buffer


@dataclass(frozen=True)
class QuantizedKV:
    """Codes and scales of K and V of a rank, in one uint8 ``buffer`` that exchanges send as it is.

    key: uint8 (B, HK, KV, D); value: uint8 (B, HK, D, KV rounded up to 16); the scales: float32 (B, HK, blocks of 128
    keys), for K with precision "int8_fine" (B, HK, blocks, 4). D is the kernels' head dim.
    """

    buffer: Tensor
    key: Tensor
    value: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @staticmethod
    def allocate_like(key: Tensor, precision: str) -> QuantizedKV:
        """Allocate memory for the codes of keys (B, HK, KV, D) and as many values."""
        batch, heads, length, head_dim = key.shape
        width, blocks = pad_head_dim_size(head_dim), -(-length // ROW_BLOCK)
        value_scale_shape = (batch, heads, blocks)
        key_scale_shape = (*value_scale_shape, KEY_GROUPS) if precision == FINE else value_scale_shape
        codes = (batch, heads, length, width), (batch, heads, width, padded_keys(length))
        shapes = (*codes, key_scale_shape, value_scale_shape)
        dtypes = (torch.uint8, torch.uint8, torch.float32, torch.float32)
        return QuantizedKV(*allocate_buffer(shapes, dtypes, key.device))


def get_aligned_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in a buffer, rounded up to the alignment."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def allocate_buffer(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[Tensor, ...]:
    """Allocate an uninitialized uint8 buffer.

    Return it and views of the shapes and dtypes, at multiples of 256 bytes.
    """
    specs = list(zip(shapes, dtypes, strict=True))
    buffer = torch.empty(sum(get_aligned_nbytes(*each) for each in specs), dtype=torch.uint8, device=device)
    tensors, offset = [buffer], 0
    for shape, dtype in specs:
        tensors.append(buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        offset += get_aligned_nbytes(shape, dtype)
    return tuple(tensors)
