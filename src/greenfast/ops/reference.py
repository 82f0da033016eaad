"""The kernels' arithmetic in PyTorch, on any device: quantization, attention on codes, and gradients."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from greenfast.kernels.attention.config import (
    KEY_GROUP,
    KEY_ORDER,
    QUERY_BLOCK,
    ROW_BLOCK,
    VALUE_FORMAT,
    AttentionConfig,
)
from greenfast.kernels.quantize.qkv import MEAN_GROUP, MEAN_KEYS
from greenfast.numerics import formats
from greenfast.numerics.formats import quantize_blocks, quantize_groups, scales_of_keys, transposed_values
from greenfast.ops.layout import synchronized
from greenfast.ops.quantized import FINE, QuantizedQKV, get_precision

#: The largest weight of a row in ROW_BLOCK keys is scaled to E4M3's largest number, unless it is below the largest
#: weight so far by more than this. It is twice the largest drop of the Hopper kernel's base between two tiles.
_LARGEST, _MAX_BASE_DROP = 448.0, 16 * math.log(2.0)
_ROWS = 1024  # query rows at a time, so that their scores stay small
#: Rows that skip a tile together.
SKIP_ROWS = 64


def quantize(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, samples: Tensor | None = None
) -> QuantizedQKV:
    """Quantize tensors that ``check_tensors`` accepts.

    samples: (B, HK, MEAN_KEYS, D), the keys for the mean if ``key`` is only a part of the sequence.
    """
    padding = config.head_dim - config.columns
    inputs = (query, key, value, key if samples is None else samples)
    dense = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in inputs)
    q, k, v, sampled = (torch.nn.functional.pad(x, (0, padding)) for x in dense)
    # The numbers are scaled down first, so that the sums of the rotation and k - mean cannot overflow.
    factor = 2.0
    if config.rotate:
        factor *= math.sqrt(q.shape[-1])
        matrix = build_rotation(q.shape[-1]).to(q.device) / factor
        q, k = q @ matrix, k @ matrix
        sampled = k if samples is None else sampled @ matrix
    else:
        q, k, sampled = q / factor, k / factor, sampled / factor
    mean = None
    if config.key_mean:
        mean = _estimate_mean(sampled)
        k = k - mean.unsqueeze(2)
        mean = mean * factor
    fmt = config.format
    q_codes, q_scale = _quantize_rows(q, fmt, {"head": 0, "block": QUERY_BLOCK, "fine": 1}[config.query_scales], factor)
    if config.key_scales == "fine":
        codes, scale = quantize_groups(k.flatten(0, 1), fmt, factor)
        k_codes, k_scale = codes.view(k.shape), scale.view(*k.shape[:2], *scale.shape[1:])
    else:
        k_codes, k_scale = _quantize_rows(k, fmt, ROW_BLOCK if config.key_scales == "block" else 0, factor)
    if config.value_scales == "channel":
        v_codes, v_scale = _quantize_rows(v.transpose(2, 3), VALUE_FORMAT, 1)
        v_codes, v_scale = v_codes.transpose(2, 3), v_scale.unsqueeze(2)
    else:
        v_codes, v_scale = _quantize_rows(v, VALUE_FORMAT, ROW_BLOCK if config.value_scales == "block" else 0)
    v_t = transposed_values(v_codes.flatten(0, 1))
    return QuantizedQKV(
        query=q_codes,
        key=k_codes,
        value=v_t.view(*v.shape[:2], *v_t.shape[1:]),
        query_scale=q_scale,
        key_scale=k_scale,
        value_scale=v_scale,
        key_mean=mean,
        precision=get_precision(config),
        head_dim=config.columns,
        key_length=key.shape[2],
        dtype=query.dtype,
    )


def _estimate_mean(k: Tensor) -> Tensor:
    """Estimate the mean (B, HK, D) of k (B, HK, KV, D), robust to outliers; 0 without keys.

    The keys are divided into MEAN_KEYS ranges and one key is sampled from each. The estimate is, per channel, the
    median over the means of MEAN_GROUP consecutive samples; means that are not finite count as 0.
    """
    if k.shape[2] == 0:
        return k.new_zeros(*k.shape[:2], k.shape[3])
    i = torch.arange(MEAN_KEYS, device=k.device)
    indices = (i * MEAN_KEYS + i * 19 % MEAN_KEYS) * k.shape[2] // MEAN_KEYS**2
    samples = k[:, :, indices] / MEAN_GROUP
    means = samples.view(*k.shape[:2], MEAN_KEYS // MEAN_GROUP, MEAN_GROUP, k.shape[3]).sum(dim=3)
    ordered = means.masked_fill(~torch.isfinite(means), 0.0).sort(dim=2).values / 2
    middle = ordered.shape[2] // 2
    return ordered[:, :, middle - 1] + ordered[:, :, middle]


def _quantize_rows(x: Tensor, fmt: str, rows: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x * factor, x (B, H, length, D).

    There is one scale per ``rows`` rows, (B, H, blocks), or with 0 one per head, (B, H).
    """
    blocks = [-(-x.shape[2] // rows)] if rows else []
    if x.numel() == 0:
        return torch.zeros_like(x, dtype=torch.uint8), torch.ones(
            *x.shape[:2], *blocks, dtype=torch.float32, device=x.device
        )
    flat = x.flatten(0, 1)
    codes, scale = quantize_blocks(flat, fmt, rows, factor) if rows else formats.encode(flat, fmt, factor)
    return codes.view(x.shape), scale.view(*x.shape[:2], *blocks)


def build_rotation(size: int) -> Tensor:
    """Build the orthogonal matrix that multiplies rows of Q and K, float32 (size, size); size is a power of two.

    It is Sylvester's Hadamard matrix with row signs from a bent function (Rothaus, 1976; for 7 bits, of 6 of them), so
    that equal channels do not add up to one large number.
    """
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    bit = [torch.arange(size) >> n & 1 for n in range(8)]
    odd = (bit[0] & bit[1]) ^ (bit[2] & bit[5]) ^ (bit[3] & bit[4]) ^ (bit[6] & bit[7])
    return (1 - 2 * odd).unsqueeze(1) * matrix / math.sqrt(size)


def dequantize_keys(quantized: QuantizedQKV) -> Tensor:
    """Return the dequantized K, float32 (B, HK, KV, D), without the mean."""
    scale, length = quantized.key_scale, quantized.key_length
    each = scales_of_keys(scale, length).unsqueeze(-1) if scale.dim() == 4 else _expand_scales(scale, length, ROW_BLOCK)
    return _decode(quantized.key, quantized.format) * each


def dequantize_queries(quantized: QuantizedQKV) -> Tensor:
    """Return the dequantized Q, float32 (B, H, S, D)."""
    rows = 1 if quantized.precision == FINE else QUERY_BLOCK
    each = _expand_scales(quantized.query_scale, quantized.query.shape[2], rows)
    return _decode(quantized.query, quantized.format) * each


def _expand_scales(scale: Tensor, length: int, rows: int) -> Tensor:
    """Expand scales per head, (B, H), or per ``rows`` rows, (B, H, blocks), to rows: (B, H, 1 or length, 1)."""
    each = scale.unsqueeze(-1) if scale.dim() == 2 else scale.repeat_interleave(rows, -1)[..., :length]
    return each.unsqueeze(-1)


def dequantize_values(quantized: QuantizedQKV) -> Tensor:
    """Return the dequantized V, float32 (B, HK, KV, D), with its keys in their original order."""
    codes = quantized.value
    order = torch.empty(KEY_GROUP, dtype=torch.long, device=codes.device)
    order[list(KEY_ORDER)] = torch.arange(KEY_GROUP, device=codes.device)
    grouped = codes.view(*codes.shape[:-1], codes.shape[-1] // KEY_GROUP, KEY_GROUP)[..., order]
    rows = grouped.flatten(-2)[..., : quantized.key_length].transpose(-1, -2).contiguous()
    scale = quantized.value_scale
    is_per_channel = scale.dim() == 4
    return _decode(rows, VALUE_FORMAT) * (
        scale if is_per_channel else _expand_scales(scale, quantized.key_length, ROW_BLOCK)
    )


def _decode(codes: Tensor, fmt: str) -> Tensor:
    return codes.view(torch.float8_e4m3fn if fmt == "e4m3" else torch.int8).float()


def attention(
    quantized: QuantizedQKV, causal: int, scale: float, softcap: float = 0.0, sinks: Tensor | None = None,
    mask: Tensor | None = None, skip_threshold: float = 0.0,
    tile_order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax(scale * Q K^T) V with weights rounded to E4M3, as the kernels round them.

    causal: a Mask of ``kernels.attention.config``. softcap: scores s become softcap * tanh(s /
    softcap); 0: they do not. sinks: (H,), the logit of one more key of each row, without a value. mask: bool,
    broadcastable to (B, H, S, KV), False for keys that a query does not attend to. skip_threshold, tile_order: as for
    ``find_skipped_tiles``, but tile_order is (B or 1, H or 1, blocks of ROW_BLOCK rows, tiles).

    Returns (B, H, S, head_dim) of the caller's dtype and the natural log-sum-exp of each row's scores, float32 (B, H,
    S), without the contribution of the keys' mean.
    """
    q, k, v = dequantize_queries(quantized), dequantize_keys(quantized), dequantize_values(quantized)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    unknown = v.isnan().any(dim=-1).unsqueeze(-2)  # per key; even a weight of 0 times NaN would be NaN
    v = v.nan_to_num(0.0)
    out = torch.empty(q.shape, dtype=quantized.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for rows in _split_rows(q.shape[2]):
        scores = q[:, :, rows] @ k.transpose(-1, -2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = _mask_scores(scores, rows, q.shape[2], causal, mask)
        seen = (unknown & (scores > -math.inf)).any(dim=-1, keepdim=True)
        if skip_threshold:
            order = None if tile_order is None else tile_order.repeat_interleave(ROW_BLOCK, 2)[:, :, rows]
            skipped = find_skipped_tiles(scores, skip_threshold, order).repeat_interleave(ROW_BLOCK, -1)
            skipped = skipped.repeat_interleave(SKIP_ROWS, -2)[..., : scores.shape[-2], : scores.shape[-1]]
            scores = scores.masked_fill(skipped & ~scores.isnan(), -math.inf)  # NaN is seen in skipped tiles too
        out[:, :, rows], lse[:, :, rows] = _apply_softmax(scores, v, sinks)
        if unknown.any():
            out[:, :, rows] = out[:, :, rows].masked_fill(seen, math.nan)
    return out[..., : quantized.head_dim].contiguous(), lse


def find_skipped_tiles(scores: Tensor, threshold: float, tile_order: Tensor | None = None) -> Tensor:
    """Return the tiles that the kernels skip, bool (B, H, groups of SKIP_ROWS rows, tiles of ROW_BLOCK keys).

    A group skips a tile if each of its rows has a weight of at least 1 in an earlier tile, relative to which the tile's
    weights are below ``threshold``, or attends to no key of the tile. scores: (B, H, S, KV), -inf for keys that a row
    does not attend to. tile_order: (B or 1, H or 1, S, tiles), the tiles from the first to the last; by default they
    ascend.
    """
    tops = _split_tiles(scores).amax(dim=-1).nan_to_num(0.0, neginf=-math.inf)  # the kernels' codes of NaN are 0
    order = None if tile_order is None else tile_order.expand(tops.shape)
    tops = tops if order is None else tops.gather(-1, order)
    earlier = torch.nn.functional.pad(tops.cummax(dim=-1).values, (1, 0), value=-math.inf)[..., :-1]
    small = tops < (earlier + math.log(threshold)).clamp(min=torch.finfo(torch.float32).min)
    if order is not None:
        small = torch.empty_like(small).scatter(-1, order, small)
    small = torch.nn.functional.pad(small, (0, 0, 0, -small.shape[2] % SKIP_ROWS), value=True)
    return small.view(*small.shape[:2], small.shape[2] // SKIP_ROWS, SKIP_ROWS, -1).all(dim=3)


def _split_tiles(scores: Tensor) -> Tensor:
    """Split scores (..., KV) into tiles (..., tiles, ROW_BLOCK). The last tile is padded with -inf."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % ROW_BLOCK), value=-math.inf)
    return padded.view(*scores.shape[:-1], padded.shape[-1] // ROW_BLOCK, ROW_BLOCK)


def _split_rows(count: int) -> list[slice]:
    return [slice(first, min(first + _ROWS, count)) for first in range(0, count, _ROWS)]


def _mask_scores(scores: Tensor, rows: slice, q_len: int, causal: int, mask: Tensor | None = None) -> Tensor:
    """Set scores (..., rows, KV) to -inf for keys that a query does not attend to."""
    if mask is not None:
        scores = scores.masked_fill(mask[..., rows, :].logical_not(), -math.inf)
    if not causal:
        return scores
    keys = torch.arange(scores.shape[-1], device=scores.device)
    own = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
    if causal != 1:
        own = own + scores.shape[-1] - q_len
    return scores.masked_fill(keys > own, -math.inf)


def _apply_softmax(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of O and their log-sum-exp, from scores (B, H, rows, KV)."""
    if scores.shape[-1] == 0:
        zeros = scores.new_zeros(*scores.shape[:-1], v.shape[-1])
        lse = scores.new_full(scores.shape[:-1], -math.inf)
        return zeros, lse if sinks is None else lse.maximum(sinks.unsqueeze(-1))
    tiles = _split_tiles(scores)
    tops = tiles.amax(dim=-1, keepdim=True)
    so_far = tops.cummax(dim=-2).values
    bases = torch.maximum(tops, so_far - _MAX_BASE_DROP)
    bases = bases.masked_fill(bases == -math.inf, 0.0)
    rounded = (torch.exp(tiles - bases) * _LARGEST).clamp(max=_LARGEST).to(torch.float8_e4m3fn).float()
    base = so_far[..., -1:, :].masked_fill(so_far[..., -1:, :] == -math.inf, 0.0)
    weights = (rounded * torch.exp(bases - base)).flatten(-2)[..., : scores.shape[-1]]
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(-1, 1, 1) - base.squeeze(-1)) * _LARGEST  # may be infinite: then O is 0
    out = weights / total.clamp(min=torch.finfo(torch.float32).tiny) @ v  # sums of weights times v could overflow
    base = base.squeeze(-1)
    lse = (torch.log(torch.exp(scores - base).sum(dim=-1, keepdim=True)) + base).squeeze(-1)
    return out, lse if sinks is None else torch.logaddexp(lse, sinks.unsqueeze(-1))


@cache
def _build_inverse_rotation(size: int, device: torch.device) -> Tensor:
    """Build the inverse of ``build_rotation``, float64. It is cached, so that a CUDA graph may capture its use."""
    return synchronized(build_rotation(size).T.double().to(device))


def compute_mean_scores(query: Tensor, key_mean: Tensor, *, rotated: bool) -> Tensor:
    """Return the product of each query with the mean of the keys, float32 (B, H, S).

    query: (B, H, S, D), unquantized: the quantization error of a large product would be too large. key_mean: float32
    (B, HK, D or more), rotated or not. No float32 matrix product is used, since it may be rounded to fewer bits
    (torch.set_float32_matmul_precision).
    """
    share = query.shape[1] // key_mean.shape[1]
    mean = _rotate_back(key_mean, query.shape[-1]) if rotated else key_mean[..., : query.shape[-1]]
    return (query * mean.repeat_interleave(share, 1).unsqueeze(-2)).sum(-1)


def center_keys(query: Tensor, key: Tensor, lse: Tensor, key_mean: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the keys minus their mean, of key's dtype and strides, and the log-sum-exp of their scores.

    lse: of scores with the keys minus ``key_mean``. key_mean: as for compute_mean_scores, rotated. It is an estimate.
    If its error stayed in the keys, the gradient of Q would err by 4.5 % on uniform inputs instead of 0.5 %.
    """
    mean = key.mean(-2, dtype=torch.float32)
    # The product is of 16 bits. Without the scale it could overflow float16 although the scores do not.
    shift = ((mean - _rotate_back(key_mean, key.shape[-1])) * scale).to(query.dtype)
    scores = query @ shift.repeat_interleave(query.shape[1] // key.shape[1], 1).unsqueeze(-1)
    centered = torch.sub(key, mean.unsqueeze(-2), out=torch.empty_like(key))  # the difference is of float32
    return centered, lse - scores.squeeze(-1)


def _rotate_back(key_mean: Tensor, head_dim: int) -> Tensor:
    mean = key_mean.double() @ _build_inverse_rotation(key_mean.shape[-1], key_mean.device)
    return mean[..., :head_dim].float()


def add_mean_scores(lse: Tensor, scores: Tensor, causal: int, scale: float) -> Tensor:
    """Add the contribution of the keys' mean to the log-sum-exp. A row without keys stays -inf.

    Only a mask aligned at the last key (``causal`` 2) can have such rows; their queries may be NaN or infinite.
    """
    if causal != 2:
        return lse.add(scores, alpha=scale)  # one operation, because each costs the host about 20 µs
    return lse + (scores * scale).masked_fill(lse == -math.inf, 0.0)


def add_packed_mean_scores(lse: Tensor, query: Tensor, key_mean: Tensor, cu_seq_q: Tensor, scale: float) -> Tensor:
    """Add the contribution of the keys' means to the log-sum-exp (H, total_q) of packed sequences.

    query: (total_q, H, D). key_mean: float32 (N, HK, D or more), rotated. Rows without keys stay -inf.
    """
    share, mean = query.shape[1] // key_mean.shape[1], _rotate_back(key_mean, query.shape[-1])
    rows = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    sequence = torch.bucketize(rows, cu_seq_q[1:], right=True).clamp_(max=key_mean.shape[0] - 1)
    scores = (query * mean.repeat_interleave(share, 1)[sequence]).sum(-1).transpose(0, 1)
    return lse + (scores * scale).masked_fill(lse == -math.inf, 0.0)


def compute_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: int, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention in float32, from its inputs and the gradient ``grad`` of its output.

    query, grad: (B, H, S, D); key, value: (B, HK, KV, D). mask: as for ``attention``. Returns the gradients of
    query, key and value, with their dtypes and strides. A row that attends to no key contributes none.
    """
    return compute_score_gradients(grad, query, key, value, None, causal, scale, mask)[:3]


def compute_score_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, causal: int, scale: float,
    mask: Tensor | None = None, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of attention with sinks (H,) and softcap. The last one is the sinks', empty without them.

    The other arguments and results are as in ``compute_gradients``.
    """
    share = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(share, 1) for x in (key, value))
    grad_q = torch.zeros_like(query)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    grad_sinks = query.new_zeros(0 if sinks is None else query.shape[1], dtype=torch.float32)
    sink_logits = k.new_tensor(-math.inf) if sinks is None else sinks.float().view(1, -1, 1, 1)
    for rows in _split_rows(query.shape[2] if key.numel() else 0):
        q, g = query[:, :, rows].float(), grad[:, :, rows].float()
        scores = q @ k.transpose(-1, -2) * scale
        slope: Tensor | float = scale
        if softcap:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, scale * (1.0 - capped.square())
        scores = _mask_scores(scores, rows, query.shape[2], causal, mask)
        top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink_logits)
        top = torch.where(top == -math.inf, torch.zeros_like(top), top)
        weights = torch.exp(scores - top)
        of_sinks = torch.exp(sink_logits - top)
        total = (weights.sum(dim=-1, keepdim=True) + of_sinks).clamp(min=torch.finfo(torch.float32).tiny)
        weights /= total
        grad_v += weights.transpose(-1, -2) @ g
        by_weights = g @ v.transpose(-1, -2)
        mean = (weights * by_weights).sum(-1, keepdim=True)
        by_scores = weights * (by_weights - mean) * slope
        grad_q[:, :, rows] = (by_scores @ k).to(query.dtype)
        grad_k += by_scores.transpose(-1, -2) @ q
        if sinks is not None:
            grad_sinks -= (of_sinks / total * mean).sum((0, 2, 3))

    def sum_group(x: Tensor, like: Tensor) -> Tensor:
        return torch.empty_like(like).copy_(x.view(*like.shape[:2], share, *like.shape[2:]).sum(2))

    return grad_q, sum_group(grad_k, key), sum_group(grad_v, value), grad_sinks
