"""The computation of one rank: quantization of its keys, attention of its queries over some keys, and LSE merge.

On the CPU it is the kernels' arithmetic in PyTorch; on a GPU it is the kernels, from ``greenfast.parallel.cuda``.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention.config import QUERY_BLOCK, ROW_BLOCK, padded_keys
from greenfast.ops import reference
from greenfast.ops.quantized import QuantizedQKV, build_config
from greenfast.parallel.quantized_kv import QuantizedKV


@cache
def load_cuda() -> Any:
    """Import ``greenfast.parallel.cuda`` at the first CUDA tensor."""
    return importlib.import_module("greenfast.parallel.cuda")


def quantize_keys(key: Tensor, value: Tensor, samples: Tensor, precision: str, into: QuantizedKV) -> Tensor:
    """Write the codes of a rank's keys and values. Return the rotated mean that was subtracted, float32 (B, HK, D).

    samples: (B, HK, 32, head_dim), the keys of all ranks for the estimate of the mean.
    """
    if key.is_cuda:
        mean: Tensor = load_cuda().quantize_keys(key, value, samples, precision, into)
        return mean
    codes = quantize(key[:, :, :0], key, value, samples, precision)
    for name in ("key", "value", "key_scale", "value_scale"):
        getattr(into, name).copy_(getattr(codes, name))
    return codes.tensors()[-1]


def quantize(query: Tensor, key: Tensor, value: Tensor, samples: Tensor, precision: str) -> QuantizedQKV:
    """Quantize a rank's queries, keys and values, with the mean of ``samples`` subtracted from the keys."""
    if query.is_cuda:
        quantized: QuantizedQKV = load_cuda().quantize(query, key, value, samples, precision)
        return quantized
    config = build_config(query.shape[3], query.dtype, precision)
    return reference.quantize(query, key, value, config, samples)


def attend(
    query: Tensor, keys: QuantizedKV, count: int, precision: str, causal: int, scale: float, sum_unrounded_p: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries (B, H, S, D), of any strides, over the first ``count`` keys.

    Returns the output, contiguous and of the queries' dtype, and the natural log-sum-exp of the scores without the mean
    of the keys, float32 (B, H, S). sum_unrounded_p: sum the weights before rounding. Otherwise the sum is the divisor
    of the output, as a merge needs it.
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
    """Combine quantized queries with the codes of the first ``count`` keys."""
    blocks = -(-count // ROW_BLOCK)
    return replace(
        queries,
        key=keys.key[:, :, :count].contiguous(),
        value=keys.value[..., : padded_keys(count)].contiguous(),
        key_scale=keys.key_scale[:, :, :blocks].contiguous(),
        value_scale=keys.value_scale[:, :, :blocks].contiguous(),
        key_mean=None,
        key_length=count,
    )


def can_send_quantized(chunk: int) -> bool:
    """Return whether quantized chunks of this many rows equal the quantized whole: no scale block spans two chunks."""
    return chunk % max(QUERY_BLOCK, ROW_BLOCK) == 0


class LseMerge:
    """Merges results of the same queries over different keys, one after another, in float32.

    count: the number of results. The sum has the results' dtype for the first result and at the end, otherwise float32;
    the kernels write 16-bit results. ``out``: (B, H, S, D); ``lse``: float32 (B, H, S).
    """

    def __init__(self, count: int) -> None:
        self._remaining = count
        self.out: Tensor
        self.lse: Tensor

    def add(self, out: Tensor, lse: Tensor, first: int = 0) -> None:
        """Add a result of the rows from ``first`` on; the first result has all rows."""
        self._remaining -= 1
        if not hasattr(self, "out"):
            self.out, self.lse = out, lse
            return
        dtype = torch.float32 if self._remaining else out.dtype
        into = self.out if self.out.dtype == dtype else torch.empty_like(self.out, dtype=dtype)
        if out.is_cuda:
            self.lse = load_cuda().merge(self.out, self.lse, out, lse, first, into)
        else:
            self.lse = _merge(self.out, self.lse, out, lse, first, into)
        self.out = into


def _merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, first: int, into: Tensor) -> Tensor:
    """Merge as ``kernels/merge/merge.cuh`` does: write the output and return the log-sum-exp."""
    lse = lse_a.clone()
    lse[..., first:] = torch.logaddexp(lse_a[..., first:], lse_b)
    if into is not a:
        into[:, :, :first] = a[:, :, :first]
    base = lse[..., first:].masked_fill(lse[..., first:] == -math.inf, 0.0)
    shares = (torch.exp(x - base).unsqueeze(-1) for x in (lse_a[..., first:], lse_b))
    into[:, :, first:] = sum(share * x.float() for share, x in zip(shares, (a[:, :, first:], b), strict=True))
    return lse
