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
        buffer = allocate_buffers(1, shapes, dtypes, key.device)
        return QuantizedKV(buffer[0], *(x[0] for x in view_buffers(buffer, shapes, dtypes)))


def _get_aligned_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in a buffer, rounded up to the alignment."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def allocate_buffers(
    count: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> Tensor:
    """Allocate uninitialized buffers, uint8 (count, bytes), each for tensors of these shapes and dtypes."""
    width = sum(map(_get_aligned_nbytes, shapes, dtypes))
    return torch.empty(count, width, dtype=torch.uint8, device=device)


def view_buffers(buffers: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """View buffers as tensors (count, *shape), which begin at multiples of 256 bytes of each buffer."""
    views, offset = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        views.append(torch.unflatten(buffers[:, offset : offset + size].view(dtype), 1, tuple(shape)))
        offset += _get_aligned_nbytes(shape, dtype)
    return tuple(views)
