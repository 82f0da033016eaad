"""Attention in float64, and how far rounding can take a kernel from it."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_ROUNDING = 2.0**-11  # half of the spacing of normal halves, relative
_HALF_SUBNORMAL = 2.0**-25  # half of the spacing of subnormal halves, absolute
_FLOAT_STEP = 2.0**-23  # one float32 spacing: tensor cores may truncate where FMAs round


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v in float64. q, k, v: (heads, seq_len, head_dim); the result has the same shape."""
    weights = torch.softmax(q.double() @ k.double().transpose(-1, -2) * scale, dim=-1)
    return weights @ v.double()


def attention_rounding_bound(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Per element, the largest error of an attention kernel that keeps P in half and everything else in float32.

    q, k, v: (heads, seq_len, head_dim), the exact (dequantized) inputs. Returns float64 of that shape.

    With weights p_j off by e_j, and the divisor summed over the same rounded weights, the output is off by exactly
    sum_j e_j (v_j - o) / sum_j (p_j + e_j). Each e_j has a relative part (the rounding of p_j to half, ex2, and the
    float32 error of its score) and an absolute one (a p_j among the subnormal halves, where the row's largest is 1).
    On top come float32 accumulation over the keys, one rescale per tile of 32 keys, and the rounding of the output to
    half.
    """
    q, k, v = q.double(), k.double(), v.double()
    head_dim, seq_len = q.shape[-1], k.shape[-2]
    scores = q @ k.transpose(-1, -2) * scale
    top = scores.amax(dim=-1, keepdim=True)
    p = torch.exp(scores - top)
    total = p.sum(dim=-1, keepdim=True)
    out = (p @ v) / total

    # A float32 score: head_dim additions of exact products; scaling and the subtraction of the maximum round 4 times.
    score_err = _FLOAT_STEP * (
        head_dim * (q.abs() @ k.abs().transpose(-1, -2)) * scale + 4 * (scores.abs() + top.abs())
    )
    weight_err = p * (_HALF_ROUNDING + 2.0**-21 + score_err) + _HALF_SUBNORMAL
    from_weights = (weight_err @ v.abs() + weight_err.sum(dim=-1, keepdim=True) * out.abs()) / total

    tiles = -(-seq_len // 32)
    from_accumulation = _FLOAT_STEP * (seq_len + 4 * tiles) * ((p @ v.abs()) / total + out.abs())
    from_output = (_HALF_ROUNDING + 4 * _FLOAT_STEP) * out.abs() + _HALF_SUBNORMAL
    # Second-order terms: an error e_j in the divisor as well, and the products of the parts above.
    return 1.01 * (from_weights + from_accumulation + from_output)
