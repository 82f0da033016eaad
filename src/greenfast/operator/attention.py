"""Attention on quantized inputs in PyTorch: the numbers of the kernels, on any device."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from greenfast.families.fast_problem import KEY_GROUP, KEY_ORDER
from greenfast.operator.quantized import QuantizedQKV, dequantized_keys, dequantized_queries

#: A row's largest weight is kept as E4M3's largest number.
_LARGEST = 448.0
_ROWS = 1024  # query rows at a time, so that their scores stay small
_ALIGNMENTS = ("upper_left", "lower_right")


def attention(
    quantized: QuantizedQKV,
    *,
    is_causal: bool = False,
    causal_alignment: Literal["upper_left", "lower_right"] = "upper_left",
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V with weights rounded to E4M3, as the kernels round them.

    is_causal: query i attends to keys 0 .. i, with causal_alignment "lower_right" to keys 0 .. i + KV - S. scale: a
    positive number, 1 / sqrt(head_dim) by default. Returns (B, H, S, head_dim) of the caller's dtype, and with
    return_lse the natural logarithm of each row's sum of exponentials, float32 (B, H, S). A row that attends to no key
    is 0, its logarithm -inf.

    Raises ValueError for a scale that is not positive and finite, and for an unknown alignment.
    """
    if causal_alignment not in _ALIGNMENTS:
        allowed = ", ".join(map(repr, _ALIGNMENTS))
        raise ValueError(f"causal_alignment: {causal_alignment!r}; allowed are {allowed}")
    factor = 1.0 / math.sqrt(quantized.head_dim) if scale is None else float(scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(f"scale: {scale}; a positive, finite number is needed")
    q, k, v = dequantized_queries(quantized), dequantized_keys(quantized), _values(quantized)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    shift = quantized.key_length - q.shape[2] if causal_alignment == "lower_right" else 0
    out = torch.empty(q.shape, dtype=quantized.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    keys = torch.arange(quantized.key_length, device=q.device)
    for first in range(0, q.shape[2], _ROWS):
        rows = slice(first, min(first + _ROWS, q.shape[2]))
        scores = q[:, :, rows] @ k.transpose(-1, -2) * factor
        if is_causal:
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            scores = scores.masked_fill(keys > queries.unsqueeze(1) + shift, -math.inf)
        out[:, :, rows], lse[:, :, rows] = _weighted(scores, v, exact_sums=return_lse)
    out = out[..., : quantized.head_dim]
    if not return_lse:
        return out
    if quantized.key_mean is not None:
        lse += factor * (q @ quantized.key_mean.repeat_interleave(share, 1).unsqueeze(-1)).squeeze(-1)
    return out, lse


def _weighted(scores: Tensor, v: Tensor, *, exact_sums: bool) -> tuple[Tensor, Tensor]:
    """The rows of O and their log-sum-exp, of scores (B, H, rows, KV); the sums of the weights exact or as rounded."""
    if scores.shape[-1] == 0:
        nothing = scores.new_zeros(*scores.shape[:-1], v.shape[-1])
        return nothing, scores.new_full(scores.shape[:-1], -math.inf)
    top = scores.amax(dim=-1, keepdim=True)
    base = torch.where(top == -math.inf, torch.zeros_like(top), top)
    exact = torch.exp(scores - base) * _LARGEST
    weights = exact.clamp(max=_LARGEST).to(torch.float8_e4m3fn).float()
    total = (exact if exact_sums else weights).sum(dim=-1, keepdim=True)
    out = weights @ v / total.clamp(min=torch.finfo(torch.float32).tiny)
    return out, (torch.log(exact.sum(dim=-1, keepdim=True) / _LARGEST) + base).squeeze(-1)


def _values(quantized: QuantizedQKV) -> Tensor:
    """What the codes of V stand for, float32 (B, HK, KV, D), its keys in their own order again."""
    codes = quantized.value
    places = torch.empty(KEY_GROUP, dtype=torch.long, device=codes.device)
    places[list(KEY_ORDER)] = torch.arange(KEY_GROUP, device=codes.device)
    grouped = codes.view(*codes.shape[:-1], codes.shape[-1] // KEY_GROUP, KEY_GROUP)[..., places]
    v = (
        grouped.flatten(-2)[..., : quantized.key_length]
        .transpose(-1, -2)
        .contiguous()
        .view(torch.float8_e4m3fn)
        .float()
    )
    scale = quantized.value_scale
    return v * (scale[..., None, None] if scale.dim() == 2 else scale.unsqueeze(-2))
