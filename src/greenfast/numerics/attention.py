"""Attention in float64, and a bound on a kernel's rounding error against it.

A GPU computes it if there is one, in float64 too: hundreds of times faster than a core. Results are on q's device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

_FLOAT_STEP = 2.0**-23  # one float32 spacing: tensor cores may truncate where FMAs round


@dataclass(frozen=True)
class Rounding:
    """How a kernel rounds: relative and absolute error of a weight (a row's largest is 1), and of a sum of products.

    A sum's error is relative to the sum of the products' magnitudes. second_order: a factor for products of errors.
    """

    weight: float
    smallest_weight: float
    sum: float
    second_order: float


#: P in half precision with subnormals 2^-24 apart. Sums in float32.
HALF_WEIGHTS = Rounding(2.0**-11, 2.0**-25, _FLOAT_STEP, 1.01)
#: Relative error of a sum of E4M3 products on Hopper. Its tensor cores add 32 products at a time to the sum so far, and
#: cut each off 13 bits below the largest. The number is typical of numbers of either sign, and not the largest possible
#: error. Weights depend on differences of such sums (docs/correctness.md).
E4M3_SUM = 2.0**-12
#: P times 2^8 in E4M3, with 3 mantissa bits and a subnormal spacing of 2^-9.
E4M3_WEIGHTS = Rounding(2.0**-4 + 2.0**-9, 2.0**-18, E4M3_SUM, 1.15)

#: The same with powers from a half-precision polynomial (exp2_halves in kernels/ptx/e4m3.cuh), off by up to 0.9 %.
E4M3_POLYNOMIAL_WEIGHTS = Rounding(2.0**-4 + 2.0**-6, 2.0**-18, E4M3_SUM, 1.15)

#: Relative error of tanh.approx.f32 (PTX ISA).
_TANH = 2.0**-11
_HALF_OUTPUT, _HALF_OUTPUT_SMALLEST = 2.0**-11, 2.0**-25
#: The limit of a score's error. Rows without a key have scores with infinite errors and weights of 0.
_MOST_OFF = 64.0
#: Scores that are held at once: with several arrays of them a processor's caches are too small for more. A GPU needs
#: more to be at work.
_AT_ONCE, _AT_ONCE_ELSEWHERE = 1 << 18, 1 << 24
#: Bytes of a GPU's memory that a process may keep for its next call: several processes share the GPU.
_KEPT = 1 << 30


def compute_scores(q: Tensor, k: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Compute scale * q k^T in float64, or with a softcap: softcap * tanh(scale * q k^T / softcap)."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, softcap: float = 0.0
) -> Tensor:
    """Compute softmax(scores) v in float64, with the scores of ``compute_scores``.

    q: (heads, q_len, head_dim), k and v: (heads, kv_len, head_dim).
    mask: bool (q_len, kv_len), True if a query attends to a key; a query that attends to no key gives 0. The result
    has the shape of q.
    """
    out = torch.empty_like(q, dtype=torch.float64)
    for place, (q_block, k_block, v_block), mask_block in _blocks(q, k, v, mask):
        out[place] = _weights(compute_scores(q_block, k_block, scale, softcap), mask_block)[0] @ v_block
    return out


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Iterator[tuple[tuple[slice, slice], tuple[Tensor, Tensor, Tensor], Tensor | None]]:
    """Yield as many heads and queries as are computed at once, as slices, with their q, k, v in float64 and mask."""
    device = torch.device("cuda") if q.is_cpu and torch.cuda.is_available() else q.device
    rows = max(1, (_AT_ONCE if device.type == "cpu" else _AT_ONCE_ELSEWHERE) // max(1, k.shape[-2]))
    heads = max(1, rows // max(1, q.shape[-2]))
    for head, row in product(range(0, len(q), heads), range(0, q.shape[-2], rows)):
        place = slice(head, head + heads), slice(row, row + rows)
        q_block, k_block, v_block = (x.to(device, torch.float64) for x in (q[place], k[place[0]], v[place[0]]))
        yield place, (q_block, k_block, v_block), None if mask is None else mask[place[1]].to(device)
    if device.type == "cuda" and torch.cuda.memory_reserved(device) > _KEPT:
        torch.cuda.empty_cache()


def _weights(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax of scores, its numerators (a row's largest is 1), and the row maxima."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    top = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    p = torch.exp(scores - top)
    return p / p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny), p, top


def attention_rounding_bound(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, rounding: Rounding = HALF_WEIGHTS,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the largest error per element of a kernel that rounds P and sums this way, and the rest to float32.

    q, k, v, mask: as in ``attention``, the exact (dequantized) inputs. Returns float64 of the shape of q.

    With weights p_j off by e_j, and the divisor summed over the same rounded weights, the output is off by exactly
    sum_j e_j (v_j - o) / sum_j (p_j + e_j); a divisor summed before the rounding only drops the term of o. Each e_j has
    a relative part (the rounding of p_j, ex2, and exp(d) - 1 for a score off by d) and an absolute one (a subnormal
    p_j). Added
    to this are accumulation over the keys, one rescale per tile of at least 32 keys, and the rounding of the output to
    half.
    """
    return attention_with_bounds(q, k, v, scale, mask, (rounding,), softcap)[1][0]


def attention_with_bounds(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None,
    roundings: Sequence[Rounding] = (HALF_WEIGHTS,), softcap: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Compute ``attention`` and ``attention_rounding_bound`` for several roundings, with shared products.

    Bounds with equal exactness of sums also share the products of scores.
    """
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float64)
    bounds = [torch.empty_like(out) for _ in roundings]
    for place, tensors, mask_block in _blocks(q, k, v, mask):
        out[place], block_bounds = _with_bounds(*tensors, scale, mask_block, roundings, softcap)
        for bound, block in zip(bounds, block_bounds, strict=True):
            bound[place] = block
    return out, bounds


def _with_bounds(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, roundings: Sequence[Rounding], softcap: float
) -> tuple[Tensor, list[Tensor]]:
    head_dim, kv_len = q.shape[-1], k.shape[-2]
    scores = compute_scores(q, k, scale, softcap)
    _, p, top = _weights(scores, mask)
    total = p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    out = (p @ v) / total
    # Errors of the weights are summed with |v|, for the output, and with 1, for the divisor.
    summed = torch.cat([v.abs(), torch.ones_like(v[..., :1])], dim=-1)
    sizes = p @ summed
    # A score is a sum of exact products; scaling and subtracting the maximum round 4 times.
    products = q.abs() @ k.abs().transpose(-1, -2) * scale
    # The derivative of a softcap is at most 1.
    magnitudes = (4 * _FLOAT_STEP + (_TANH if softcap else 0.0)) * (scores.abs_() + top.abs())
    # Not p > 0: devices differ in whether they flush subnormal numbers.
    weights = (p > torch.finfo(torch.float64).tiny).double() @ summed
    sums_of = [max(head_dim * _FLOAT_STEP, rounding.sum) for rounding in roundings]
    # An error d of a score makes its weight wrong by exp(d) - 1. Steep scores have errors of some tenths.
    from_scores = {
        sums: (p * torch.expm1((sums * products + magnitudes).clamp(max=_MOST_OFF))) @ summed for sums in set(sums_of)
    }

    bounds = []
    for rounding, sums in zip(roundings, sums_of, strict=True):
        errors = (rounding.weight + 2.0**-21) * sizes + from_scores[sums] + rounding.smallest_weight * weights
        from_weights = (errors[..., :-1] + errors[..., -1:] * out.abs()) / total
        tiles = -(-kv_len // 32)
        accumulation = _FLOAT_STEP * (kv_len + 4 * tiles) + (rounding.sum if rounding.sum > _FLOAT_STEP else 0.0)
        from_accumulation = accumulation * (sizes[..., :-1] / total + out.abs())
        from_output = (_HALF_OUTPUT + 4 * _FLOAT_STEP) * out.abs() + _HALF_OUTPUT_SMALLEST
        # Second-order terms: an error e_j in the divisor as well, and the products of the parts above.
        bounds.append(rounding.second_order * (from_weights + from_accumulation + from_output))
    return out, bounds
