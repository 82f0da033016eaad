"""The serving kernels' attention over a paged E4M3 cache, on CPU tensors.

Products of codes are summed in float64, where every sum of E4M3 products is exact. Everything else is float32, element
by element, so a row's result depends only on its query and its keys, as in the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUP, KEY_ORDER
from greenfast.numerics.formats import CODE_MAX, LEAST_SCALE

#: Keys that share a step of the running maximum, and keys that are summed before they join the row's result. Both
#: begin at fixed positions of a sequence.
TILE_KEYS, CHUNK_KEYS = 128, 512
#: A running maximum is updated by a tile of keys only if the tile exceeds it by more than this, in units of log2.
SLACK = 3.0
#: log2 of the weight of a score at a row's maximum: P is rounded to E4M3 with the largest number 448.
WEIGHT_LOG2 = math.log2(448.0) - SLACK
_LOG2_E = math.log2(math.e)
_WIDEST = 2**31  # of a window: wider than any sequence; near 2**63, sums with positions would overflow
_TILES = CHUNK_KEYS // TILE_KEYS
_MOST_SCORES = 1 << 22  # at a time, so that they stay in memory that is small


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of x: codes are float8_e4m3fn of x's shape, scales float32 without the last dimension.

    x: (..., head_dim) of any floating dtype. The scale is amax / 448, and 1 for a row of zeros. NaN or infinity in a
    row makes codes or scale NaN or infinite.
    """
    wide = x.float()
    largest = CODE_MAX["e4m3"]
    amax = wide.abs().amax(dim=-1).clamp(min=0.0)
    amax = torch.where(amax == 0.0, torch.full_like(amax, largest), amax.clamp(min=largest * LEAST_SCALE))
    # A quotient of tensors: PyTorch computes 448 / x of a number as a product with 1 / x, so it is rounded twice.
    return e4m3(wide * (torch.full_like(amax, largest) / amax).unsqueeze(-1)), amax / largest


def e4m3(x: Tensor) -> Tensor:
    """Round to the nearest even float8_e4m3fn, saturating; NaN stays NaN."""
    return x.clamp(-CODE_MAX["e4m3"], CODE_MAX["e4m3"]).to(torch.float8_e4m3fn)


def grouped_values(rows: Tensor) -> Tensor:
    """Return V in the layout "grouped", (pages, kv_heads, groups, head_dim, 16).

    rows: V, (pages, page_size, kv_heads, head_dim).
    """
    pages, page_size, heads, head_dim = rows.shape
    groups = _bytes(rows).view(pages, page_size // KEY_GROUP, KEY_GROUP, heads, head_dim)[:, :, list(KEY_ORDER)]
    return groups.permute(0, 3, 1, 4, 2).contiguous().view(rows.dtype)


def rows_of_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """Return the rows of pages in order, (tokens, kv_heads, head_dim), of a K or V cache in either layout.

    cache: float8_e4m3fn (pages, page_size, kv_heads, head_dim), or "grouped" with five dimensions.
    """
    values = _bytes(cache)[pages.long()]
    if cache.dim() == 4:
        return values.flatten(0, 1).contiguous().view(cache.dtype)
    places = torch.tensor(KEY_ORDER).argsort()
    rows = values[..., places].permute(0, 2, 4, 1, 3)
    return rows.flatten(0, 2).contiguous().view(cache.dtype)


def _bytes(x: Tensor) -> Tensor:
    """Return codes as uint8, so that PyTorch can index them."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    k_scale: Tensor,
    v_scale: Tensor,
    q_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each sequence's queries over its keys in a paged cache, on CPU tensors.

    q: (total_q, heads, head_dim) of float16 or bfloat16, quantized here per row; or float8_e4m3fn, with q_scale,
    float32 (batch, kv_heads). k_cache: float8_e4m3fn (pages, page_size, kv_heads, head_dim) of any strides. v_cache:
    the same, or "grouped": (pages, kv_heads, page_size / 16, head_dim, 16), see ``grouped_values``.
    block_table: int32 (batch, max_pages); entries after a sequence's last page are not read. cu_seqlens_q: int32
    (batch + 1,). seqused_k: int32 (batch,), keys of each sequence.
    k_scale, v_scale: float32 (), (kv_heads,) or (batch, kv_heads); or (pages, kv_heads, page_size), one per token.
    sinks: (heads,), a logit of each head that takes part in the softmax and has no value.
    causal: aligned at the last query and key. window: keys (left, right) of a query's position, -1 for all. softcap:
    scores s become softcap * tanh(s / softcap), 0 leaves them. softmax_scale: factor of the scores.

    Returns the output, (total_q, heads, head_dim) of ``out_dtype``, and the natural log-sum-exp of each row's scores
    and sink, float32 (heads, total_q). Rows without a key, and rows after cu_seqlens_q[-1], are 0; their log-sum-exp is
    the sink, or -inf without sinks. NaN in a key or value affects only the rows that attend to it.
    """
    total, heads, head_dim = q.shape
    kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    group = heads // kv_heads
    out = torch.zeros(total, heads, head_dim, dtype=out_dtype)
    lse = torch.full((heads, total), -math.inf, dtype=torch.float32)
    options = _Options(causal, window, softcap, softmax_scale)
    for b, length in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[b : b + 2].tolist()
        if first == last:
            continue
        pages = block_table[b, : -(-length // page_size)].long()
        codes, scale = _queries(q[first:last], None if q_scale is None else q_scale[b].repeat_interleave(group))
        k, v = (_padded(rows_of_pages(x, pages)[:length].double().transpose(0, 1)) for x in (k_cache, v_cache))
        k_scales, v_scales = (_scales(x, b, pages, length, kv_heads) for x in (k_scale, v_scale))
        keys = _Keys(k, v, k_scales, v_scales, length)
        rows_out, sums = _sequence(codes, scale, keys, sinks, options)
        out[first:last] = rows_out.to(out_dtype)
        lse[:, first:last] = sums
    return out, lse


@dataclass(frozen=True)
class _Options:
    causal: bool
    window: tuple[int, int]
    softcap: float
    softmax_scale: float

    def limits(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first key of each position, and the end of its keys (exclusive)."""
        left, right = self.window
        left, right = min(left, _WIDEST), 0 if self.causal else min(right, _WIDEST)
        first = torch.zeros_like(positions) if left < 0 else (positions - left).clamp(min=0)
        last = torch.full_like(positions, length) if right < 0 else (positions + right + 1).clamp(0, length)
        return first, last


@dataclass(frozen=True)
class _Keys:
    """The keys and values of one sequence: codes as numbers, float64 (kv_heads, keys of whole chunks, head_dim).

    Scales are float32 (kv_heads, 1), or (kv_heads, keys of whole chunks) with a scale per token.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    length: int


def _padded(x: Tensor, value: float = 0.0) -> Tensor:
    """Pad the keys of x (kv_heads, keys, ...) to a multiple of CHUNK_KEYS."""
    more = -x.shape[1] % CHUNK_KEYS
    return torch.cat([x, x.new_full((x.shape[0], more, *x.shape[2:]), value)], dim=1)


def _scales(scale: Tensor, b: int, pages: Tensor, length: int, kv_heads: int) -> Tensor:
    if scale.dim() == 3:
        return _padded(scale[pages].transpose(0, 1).flatten(1)[:, :length], 1.0)
    return (scale[b] if scale.dim() == 2 else scale.expand(kv_heads)).unsqueeze(1)


def _queries(q: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Q's codes as numbers, float64 (heads, tokens, head_dim), and their scales, float32 (heads, tokens)."""
    if scale is None:
        codes, scales = quantize_rows(q)
        return codes.double().transpose(0, 1), scales.T.contiguous()
    return q.double().transpose(0, 1), scale.unsqueeze(1).expand(-1, q.shape[0])


def _sequence(
    codes: Tensor, scale: Tensor, keys: _Keys, sinks: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """Return the output (tokens, heads, head_dim), float32, and the log-sum-exp (heads, tokens) of one sequence."""
    heads, tokens, head_dim = codes.shape
    kv_heads = keys.k.shape[0]
    out = torch.empty(heads, tokens, head_dim, dtype=torch.float32)
    top, total = (torch.empty(heads, tokens, dtype=torch.float32) for _ in range(2))
    step = max(1, _MOST_SCORES // (heads * max(keys.k.shape[1] // _TILES, 1)))
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        positions = torch.arange(rows.start, rows.stop) + keys.length - tokens
        shape = (kv_heads, heads // kv_heads * positions.numel())
        merged = _merged(
            codes[:, rows].reshape(*shape, head_dim),
            scale[:, rows].reshape(shape),
            keys,
            positions.repeat(heads // kv_heads),
            options,
        )
        out[:, rows] = merged[0].view(heads, -1, head_dim)
        top[:, rows], total[:, rows] = (x.view(heads, -1) for x in merged[1:])
    if sinks is not None:
        logit = (sinks.float() * _LOG2_E).unsqueeze(1)
        base = _finite(torch.maximum(top, logit))
        factor = _exp2(top - base)
        out = out * factor.unsqueeze(-1)
        total = total * factor + _exp2(WEIGHT_LOG2 + logit - base)
        top = base
    out = out / torch.where(total == 0.0, torch.ones_like(total), total).unsqueeze(-1)
    if keys.v_scale.shape[1] == 1:
        out = out * keys.v_scale.repeat_interleave(heads // kv_heads, 0).unsqueeze(-1)
    lse = (_log2(total) - WEIGHT_LOG2 + top) / _LOG2_E
    return out.transpose(0, 1), lse


def _merged(
    q: Tensor, q_scale: Tensor, keys: _Keys, positions: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for rows q (kv_heads, rows, head_dim) the sums of weighted values, the maximum, and the sum of weights.

    The maximum is of the scores in units of log2, including the values' scales if there is one per token.
    """
    first, last = options.limits(positions, keys.length)
    begin = min(int(first.min()) // CHUNK_KEYS, keys.k.shape[1] // CHUNK_KEYS)
    end = max(-(-int(last.max()) // CHUNK_KEYS), begin)
    out = q.new_zeros(q.shape, dtype=torch.float32)
    top = torch.full(q.shape[:2], -math.inf, dtype=torch.float32)
    total = torch.zeros(q.shape[:2], dtype=torch.float32)
    if begin == end:
        return out, top, total
    of_chunks = _chunks(q, q_scale, keys, (first, last), slice(begin, end), options)
    for o, m, w in zip(*(x.unbind(2) for x in of_chunks), strict=True):
        base = _finite(torch.maximum(top, m))
        old, new = _exp2(top - base), _exp2(m - base)
        out = out * old.unsqueeze(-1) + o * new.unsqueeze(-1)
        total = total * old + w * new
        top = torch.maximum(top, m)
    return out, top, total


def _exp2(x: Tensor) -> Tensor:
    """Return 2^x, by float64: PyTorch's float32 result depends in the last bit on the element's place in the tensor."""
    return torch.exp2(x.double()).float()


def _log2(x: Tensor) -> Tensor:
    """Return log2(x), by float64 like ``_exp2``."""
    return torch.log2(x.double()).float()


def _finite(top: Tensor) -> Tensor:
    """Return the maximum to subtract: 0 for a row without a key so far."""
    return torch.where(top == -math.inf, torch.zeros_like(top), top)


def _chunks(
    q: Tensor, q_scale: Tensor, keys: _Keys, limits: tuple[Tensor, Tensor], chunks: slice, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``_merged`` for each chunk by itself: (kv_heads, rows, chunks, ...)."""
    count = chunks.stop - chunks.start

    def tiles(x: Tensor) -> Tensor:
        """View x (kv_heads, keys, ...) as (kv_heads, chunks, tiles, keys of a tile, ...)."""
        return x.view(x.shape[0], -1, _TILES, TILE_KEYS, *x.shape[2:])[:, chunks]

    k, v = tiles(keys.k), tiles(keys.v)
    out = torch.zeros(*q.shape[:2], count, q.shape[2], dtype=torch.float32)
    top = torch.full(out.shape[:3], -math.inf, dtype=torch.float32)
    total = torch.zeros(out.shape[:3], dtype=torch.float32)
    rows_q = q_scale.view(*q_scale.shape, 1, 1)
    key_ids = torch.arange(chunks.start * CHUNK_KEYS, chunks.stop * CHUNK_KEYS).view(count, _TILES, TILE_KEYS)
    first, last = (x.view(-1, 1, 1) for x in limits)
    for j in range(_TILES):
        raw = (q @ k[:, :, j].flatten(1, 2).transpose(1, 2)).float().view(*q.shape[:2], count, TILE_KEYS)
        k_scale = (tiles(keys.k_scale)[:, :, j] if keys.k_scale.shape[1] > 1 else keys.k_scale.unsqueeze(1)).unsqueeze(
            1
        )
        t = _exponents(raw, rows_q, k_scale, options)
        divisor = torch.ones((), dtype=torch.float32)
        if keys.v_scale.shape[1] > 1:
            divisor = tiles(keys.v_scale)[:, None, :, j]
            t = t + _log2(divisor)
        seen = (key_ids[:, j] >= first) & (key_ids[:, j] < last)  # (rows, chunks, keys)
        t = t.masked_fill(~seen, -math.inf)
        tile_max = t.amax(dim=-1)
        new = torch.where(tile_max > top + SLACK, tile_max, top)
        base = _finite(new)
        weights = _exp2(t - base.unsqueeze(-1) + WEIGHT_LOG2)
        factor = _exp2(top - base)
        out = out * factor.unsqueeze(-1) + _weighted(e4m3(weights).double(), v[:, :, j], seen)
        # A key that a row does not attend to may have a scale of NaN.
        total = total * factor + _sum((weights / divisor).masked_fill(~seen, 0.0))
        top = new
    return out, top, total


def _exponents(raw: Tensor, q_scale: Tensor, k_scale: Tensor, options: _Options) -> Tensor:
    """Return the scores in units of log2: a weight is 2 to this power."""
    if options.softcap:
        cap = options.softcap
        return torch.tanh((raw * (q_scale * options.softmax_scale * k_scale) / cap).double()).float() * (cap * _LOG2_E)
    return raw * (q_scale * (options.softmax_scale * _LOG2_E) * k_scale)


def _weighted(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return P V of a tile of each chunk, float32 (kv_heads, rows, chunks, head_dim).

    NaN in a value is NaN in its column, for the rows that attend to its key (``seen``).
    """
    unknown = v.isnan()
    weights = weights.transpose(1, 2)
    if not bool(unknown.any()):
        return (weights @ v).transpose(1, 2).float()
    products = (weights @ v.nan_to_num(0.0)).transpose(1, 2).float()
    reached = (seen.transpose(0, 1).double() @ unknown.double()).transpose(1, 2) > 0
    return products.masked_fill(reached, math.nan)


def _sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, in an order that depends only on its size."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)
