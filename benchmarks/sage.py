"""The arithmetic of SageAttention 2++ in PyTorch, to compare errors on machines without the library.

Q K^T in int8, a scale for each 4 rows of Q and 16 rows of K that one thread holds, and the mean of K subtracted
(SageAttention2, Zhang et al., 2024, arXiv:2411.10958); P V in E4M3 with ranges so narrow that the products of 64 keys
can be summed in half precision (SageAttention2++, Zhang et al., 2025, arXiv:2505.21136, and in its library
``sageattn_qk_int8_pv_fp8_cuda`` with ``pv_accum_dtype="fp32+fp16"``). The tensor cores' own rounding of sums is not
modelled. It is not a model of the speed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from greenfast.numerics.formats import CODE_MAX

#: Rows of Q per warp, keys per tile, and the period of a thread's rows.
_WARP_ROWS, _TILE, _REPEAT = 32, 64, 8
#: Largest code of a weight and of a channel of V; a sum of 64 products fits into half precision.
_WEIGHTS, _VALUES = 448.0, 2.25
_ROWS = 256  # query rows at a time, to limit memory


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute softmax(Q K^T / sqrt(D)) V with the roundings of SageAttention 2++, in q's dtype.

    q: (B, H, S, D), k and v: (B, HK, KV, D), where HK divides H. causal: query i attends to keys 0 .. i.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    length, dtype = k.shape[2], q.dtype
    q, k, v = (x.float() for x in (q, k, v))
    k = k - k.mean(dim=2, keepdim=True)
    more = -length % _TILE
    k, v = (pad(x, (0, 0, 0, more)) for x in (k, v))
    k_codes, k_scale = _codes(k, k.view(*k.shape[:2], -1, _TILE // _REPEAT, 4, 2, k.shape[3]), (3, 5, 6))
    wide = pad(q, (0, 0, 0, -q.shape[2] % _WARP_ROWS))
    grouped = wide.view(*wide.shape[:2], -1, _WARP_ROWS // _REPEAT, _REPEAT, wide.shape[3])
    q_codes, q_scale = _codes(wide, grouped, (3, 5))
    q_scale = q_scale * (math.log2(math.e) / math.sqrt(q.shape[3]))
    v_scale = v.abs().amax(dim=2, keepdim=True) / _VALUES
    v_scale = v_scale.masked_fill(v_scale == 0, 1.0)
    values = (v / v_scale).to(torch.float8_e4m3fn).float().view(*v.shape[:2], -1, _TILE, v.shape[3])
    out = torch.empty_like(q)
    keys = torch.arange(k.shape[2], device=k.device)
    for first in range(0, q.shape[2], _ROWS):
        rows = slice(first, min(first + _ROWS, q.shape[2]))
        scores = q_codes[:, :, rows] @ k_codes.transpose(2, 3) * q_scale[:, :, rows] * k_scale.transpose(2, 3)
        last = torch.arange(rows.start, rows.stop, device=k.device) if causal else torch.tensor([length - 1])
        scores = scores.masked_fill(keys > last.to(k.device).unsqueeze(1).clamp(max=length - 1), -math.inf)
        out[:, :, rows] = _weighted(scores.view(*scores.shape[:3], -1, _TILE), values)
    return (out * v_scale).to(dtype)


def _codes(x: Tensor, grouped: Tensor, within: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Quantize to int8 codes (as floats) with a scale per row: the largest magnitude over some dims of ``grouped``."""
    scale = grouped.abs().amax(dim=within, keepdim=True) / CODE_MAX["int8"]
    row_scale = scale.masked_fill(scale == 0, 1.0).expand(*grouped.shape[:-1], 1).reshape(*x.shape[:3], 1)
    return (x / row_scale).round(), row_scale


def _weighted(scores: Tensor, values: Tensor) -> Tensor:
    """Compute rows of O from base-2 scores (B, H, rows, tiles, keys) and the codes of V (B, H, tiles, keys, D)."""
    largest = scores.amax(dim=4).cummax(dim=3).values
    base = largest.masked_fill(largest == -math.inf, 0.0)  # rows without a key so far have weights of 0
    weights = torch.exp2(scores - base.unsqueeze(4))
    codes = (weights * _WEIGHTS).to(torch.float8_e4m3fn).float()
    sums = torch.einsum("bhrtk,bhtkd->bhrtd", codes, values).half().float() / _WEIGHTS
    share = torch.exp2(base - base[..., -1:])
    return (sums * share.unsqueeze(4)).sum(dim=3) / (weights.sum(dim=4) * share).sum(dim=3, keepdim=True)
