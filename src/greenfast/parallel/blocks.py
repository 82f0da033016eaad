"""What a rank computes: codes of its keys, attention on some of its queries over some keys, and the merge of results.

On the CPU the kernels' arithmetic in PyTorch; on a GPU the kernels, from ``greenfast.parallel.cuda``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUPS, QUERY_BLOCK, ROW_BLOCK, padded_keys
from greenfast.ops import reference
from greenfast.ops.quantized import FINE, QuantizedQKV, build_config, pad_head_dim_size

_ALIGNMENT = 256  # bytes, of what lies in a buffer that travels


@cache
def load_cuda() -> Any:
    """``greenfast.parallel.cuda``, imported for the first CUDA tensor."""
    return importlib.import_module("greenfast.parallel.cuda")


@dataclass(frozen=True)
class QuantizedKV:
    """Codes and scales of K and V of a rank, in one ``buffer``, uint8, which travels as it is.

    key: uint8 (B, HK, KV, D); value: uint8 (B, HK, D, KV rounded up to 16); the scales: float32 (B, HK, blocks of 128
    keys), those of K with precision "int8_fine" (B, HK, blocks, 4). D is the kernels' head dim.
    """

    buffer: Tensor
    key: Tensor
    value: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @staticmethod
    def like(key: Tensor, precision: str) -> QuantizedKV:
        """Memory for the codes of keys (B, HK, KV, D) and as many values."""
        batch, heads, length, head_dim = key.shape
        width, blocks = pad_head_dim_size(head_dim), -(-length // ROW_BLOCK)
        value_scale_shape = (batch, heads, blocks)
        key_scale_shape = (*value_scale_shape, KEY_GROUPS) if precision == FINE else value_scale_shape
        codes = (batch, heads, length, width), (batch, heads, width, padded_keys(length))
        shapes = (*codes, key_scale_shape, value_scale_shape)
        dtypes = (torch.uint8, torch.uint8, torch.float32, torch.float32)
        return QuantizedKV(*allocate_buffer(shapes, dtypes, key.device))


def get_aligned_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in a buffer, up to where the next one begins."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def allocate_buffer(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[Tensor, ...]:
    """An uninitialized uint8 buffer, and tensors of these shapes and dtypes in it, each at a multiple of 256 bytes."""
    specs = list(zip(shapes, dtypes, strict=True))
    buffer = torch.empty(sum(get_aligned_nbytes(*each) for each in specs), dtype=torch.uint8, device=device)
    tensors, offset = [buffer], 0
    for shape, dtype in specs:
        tensors.append(buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        offset += get_aligned_nbytes(shape, dtype)
    return tuple(tensors)


def quantize_keys(key: Tensor, value: Tensor, samples: Tensor, precision: str, into: QuantizedKV) -> Tensor:
    """Write the codes of a rank's keys and values; returns the mean that was subtracted, float32 (B, HK, D), rotated.

    samples: (B, HK, 32, head_dim), the keys of all ranks by which the mean is estimated.
    """
    if key.is_cuda:
        mean: Tensor = load_cuda().quantize_keys(key, value, samples, precision, into)
        return mean
    codes = quantize(key[:, :, :0], key, value, samples, precision)
    for name in ("key", "value", "key_scale", "value_scale"):
        getattr(into, name).copy_(getattr(codes, name))
    return codes.tensors()[-1]


def quantize(query: Tensor, key: Tensor, value: Tensor, samples: Tensor, precision: str) -> QuantizedQKV:
    """Codes of a rank's queries, keys and values, with the mean of ``samples`` subtracted from the keys."""
    if query.is_cuda:
        quantized: QuantizedQKV = load_cuda().quantize(query, key, value, samples, precision)
        return quantized
    config = build_config(query.shape[3], query.dtype, precision)
    return reference.quantize(query, key, value, config, samples)


def attend(
    query: Tensor, keys: QuantizedKV, count: int, precision: str, causal: int, scale: float, sum_unrounded_p: bool
) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, S, D), of any strides, over the first ``count`` of the keys.

    Returns the output, contiguous and of the queries' dtype, and the natural log-sum-exp of the scores without the
    mean of the keys, float32 (B, H, S). sum_unrounded_p: whether that sums P before its rounding; else
    after it, like the divisor of the output, which a merge needs.
    """
    if query.is_cuda:
        result: tuple[Tensor, Tensor] = load_cuda().attend(
            query, keys, count, precision, causal, scale, sum_unrounded_p
        )
        return result
    nothing = query.new_zeros(*keys.key.shape[:2], 0, query.shape[3])
    queries = reference.quantize(query, nothing, nothing, build_config(query.shape[3], query.dtype, precision))
    return reference.attention(slice_codes(queries, keys, count), causal, scale)


def slice_codes(queries: QuantizedQKV, keys: QuantizedKV, count: int) -> QuantizedQKV:
    """The codes of some queries with those of the first ``count`` keys."""
    blocks = -(-count // ROW_BLOCK)
    return QuantizedQKV(
        query=queries.query,
        key=keys.key[:, :, :count].contiguous(),
        value=keys.value[..., : padded_keys(count)].contiguous(),
        query_scale=queries.query_scale,
        key_scale=keys.key_scale[:, :, :blocks].contiguous(),
        value_scale=keys.value_scale[:, :, :blocks].contiguous(),
        key_mean=None,
        precision=queries.precision,
        head_dim=queries.head_dim,
        key_length=count,
        dtype=queries.dtype,
    )


def can_send_quantized(chunk: int) -> bool:
    """Whether codes of chunks of so many rows are those of the whole: no block with a scale lies in two of them."""
    return chunk % max(QUERY_BLOCK, ROW_BLOCK) == 0


class LseMerge:
    """Results of the same queries over different keys, added one by one and merged in float32.

    of: how many are to come. The sum is held in the results' dtype while it is one of them and at the end, else in
    float32; results of 16 bits are what the kernels write. ``out``: (B, H, S, D); ``lse``: float32 (B, H, S).
    """

    def __init__(self, of: int) -> None:
        self._left = of
        self.out: Tensor
        self.lse: Tensor

    def add(self, out: Tensor, lse: Tensor, first: int = 0) -> None:
        """Add a result of the rows from ``first`` on; the first one has all rows."""
        self._left -= 1
        if not hasattr(self, "out"):
            self.out, self.lse = out, lse
            return
        dtype = torch.float32 if self._left else out.dtype
        into = self.out if self.out.dtype == dtype else torch.empty_like(self.out, dtype=dtype)
        if out.is_cuda:
            self.lse = load_cuda().merge(self.out, self.lse, out, lse, first, into)
        else:
            self.lse = _merge(self.out, self.lse, out, lse, first, into)
        self.out = into


def _merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, first: int, into: Tensor) -> Tensor:
    """The merge of ``kernels/merge/merge.cuh``; writes the output and returns the log-sum-exp."""
    lse = lse_a.clone()
    lse[..., first:] = torch.logaddexp(lse_a[..., first:], lse_b)
    if into is not a:
        into[:, :, :first] = a[:, :, :first]
    base = lse[..., first:].masked_fill(lse[..., first:] == -math.inf, 0.0)
    shares = (torch.exp(x - base).unsqueeze(-1) for x in (lse_a[..., first:], lse_b))
    into[:, :, first:] = sum(share * x.float() for share, x in zip(shares, (a[:, :, first:], b), strict=True))
    return lse
