"""Gradients of attention by 8-bit products on Hopper: ``sdpa(..., backward="8bit")``.

``compute_gradients`` calls ``quantize``, to convert Q, K, V and dO to codes, and ``launch``, to compute the gradients
from them. ``encode`` defines the codes, by PyTorch's operators on any device. docs/training-kernels.md describes the
formats and their errors.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from greenfast.kernels.attention import backward as kernels
from greenfast.kernels.attention.config import KEY_ORDER, Stride3, padded_keys
from greenfast.ops.launch_plans import LaunchPlan, LaunchStep
from greenfast.ops.layout import make_tma_compatible, synchronized
from greenfast.ops.reference import build_rotation

_LOG2_E = math.log2(math.e)
_INT8_MAX, _E4M3_MAX = 127.0, 448.0
#: The code of dS for a weight with the code 1 and a difference as large as the bound.
_LARGEST_SLOPE = 224.0
#: Float bits of 1.5 * 2^23. If an integer accumulator starts there, its bits as a float are that number plus the sum.
_MAGIC_BITS = 0x4B400000
#: The least factor of the scores, so that a start is less than 2^22 units away from _MAGIC_BITS.
_LEAST_FACTOR = 2.0**-16
#: Start of the scores of a query without a gradient, or after the last query. It makes P 0.
_NO_QUERY = _MAGIC_BITS - 2**22
_CODES = ("q", "k", "v", "grad", "q_t", "k_t", "grad_t", "tables", "factors", "row_factors")
_OUTPUTS = ("dq", "dk", "dv")


def encode(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, grad: Tensor, scale: float,
    mean: Tensor | None = None, kv_lengths: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the buffers that the backward kernels read (kernels/attention/backward.py).

    query, out, grad: (B, H, S, D); key, value: (B, HK, KV, D); HK divides H. row_stats: log-sum-exp and largest of a
    row's scores, float32 (B, H, S, 2). scale: of the scores. mean: the vector that is subtracted from the keys,
    (B, HK, D); by default their mean. kv_lengths: (B,), the keys of each sequence; those after them do not count, and
    their codes are zeros.

    Int8 codes are of rows that are rotated by ``build_rotation``. Scales: one for each 64 queries of Q, for each head
    of K and V, for each row of dO. E4M3 codes are of rows that are not rotated. Codes of K have the scale of K. Codes
    of Q and dO are multiplied by the factor that P and dS lack, in a unit for each 64 queries.
    """
    q, k, v, o, g = (x.flatten(0, 1).float() for x in (query, key, value, out, grad))
    q_len, head_dim = q.shape[1:]
    kv_len = key.shape[2]
    lengths = q.new_tensor([kv_len] * key.shape[0]) if kv_lengths is None else kv_lengths
    lengths = lengths.repeat_interleave(key.shape[1]).view(-1, 1, 1)
    padding = torch.arange(kv_len, device=k.device).unsqueeze(1) >= lengths
    k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    means = k.sum(-2, keepdim=True) / lengths.clamp(min=1) if mean is None else mean.flatten(0, 1).unsqueeze(1)
    k = (k - means).to(key.dtype).float().masked_fill(padding, 0.0)
    rotation = _get_rotation(head_dim, q.device)
    rotated_q, rotated_k, rotated_v, rotated_g = (x @ rotation for x in (q, k, v, g))

    k_scale, v_scale = (_make_scale(x.abs().amax((-2, -1))) for x in (rotated_k, rotated_v))
    group = len(q) // len(k)
    q_means, q_v_scale = means.repeat_interleave(group, 0), v_scale.repeat_interleave(group).unsqueeze(-1)
    of_scores = k_scale.repeat_interleave(group).unsqueeze(-1) * (scale * _LOG2_E)  # (heads, 1)
    tiles = -(-q_len // kernels.ROWS)
    q_scale = _make_scale(_split_rows(rotated_q, tiles).abs().amax((-2, -1)))  # (heads, tiles)
    int8_scale = torch.maximum(q_scale, _LEAST_FACTOR / of_scores)
    score_factor = int8_scale * of_scores
    g_max = rotated_g.abs().amax(-1) / _INT8_MAX
    g_scale = _make_scale(rotated_g.abs().amax(-1))
    lse, score_max = row_stats.flatten(0, 1).unbind(-1)
    undefined = g_scale.isnan() | ~(lse < math.inf)
    has_weights = (g_max > 0.0) & (lse > -math.inf)
    norm = (rotated_g / (g_max * _INT8_MAX).unsqueeze(-1)).norm(dim=-1) / head_dim**0.5
    log2_weight = ((score_max - lse) * _LOG2_E).clamp(max=0.0)
    exponent = _get_weight_exponent(log2_weight, norm)
    # The weight with the code 1, times the scale of dO.
    row_scale = torch.exp2(log2_weight - exponent).mul(g_scale).where(has_weights | undefined, 0.0)

    def expand(x: Tensor) -> Tensor:
        return x.repeat_interleave(kernels.ROWS, 1)[:, :q_len]

    top = (score_max - (q * q_means).sum(-1) * scale) * _LOG2_E - exponent
    starts = torch.where(has_weights, _round_starts(top / expand(score_factor)), _NO_QUERY)
    weight = (g * o).sum(-1) / (g_scale * q_v_scale)
    tables = q.new_zeros((len(q), tiles, kernels.TABLE_WORDS), dtype=torch.int32)
    half = kernels.ROWS
    tables[..., :half] = _lay_out_starts(starts, tiles, _NO_QUERY)
    tables[..., half : 2 * half] = _lay_out_starts(_round_starts(weight), tiles, _MAGIC_BITS)
    undefined_tiles = _split_rows(undefined.float().unsqueeze(-1), tiles).amax((-2, -1)) > 0.0
    largest = _split_rows(row_scale.unsqueeze(-1), tiles).amax((-2, -1))
    key_unit, value_unit = (_find_unit(x) for x in (largest * q_scale, largest))
    tables[..., 2 * half] = score_factor.masked_fill(undefined_tiles, math.nan).float().view(torch.int32)
    tables[..., 2 * half + 1], tables[..., 2 * half + 2] = key_unit, value_unit
    code_factor = _get_factor(head_dim)
    # A bound of |dP - delta| in units of the codes, and a margin of 1/16 for their roundings.
    bound = (2.125 * _INT8_MAX * head_dim**0.5) * (rotated_v.norm(dim=-1).amax(-1) / v_scale)
    bound = bound.clamp(min=1.0)
    slope_scale = v_scale * bound * (scale / _LARGEST_SLOPE)
    factors = [_LARGEST_SLOPE / bound, slope_scale / code_factor, torch.full_like(bound, 1.0 / code_factor)]
    row_factors = row_scale * (slope_scale * k_scale / code_factor).repeat_interleave(group).unsqueeze(-1)
    return {
        "q": _encode_int8(rotated_q, expand(int8_scale)),
        "k": _encode_int8(rotated_k, k_scale.unsqueeze(-1)),
        "v": _encode_int8(rotated_v, v_scale.unsqueeze(-1)),
        "grad": _encode_int8(rotated_g, g_scale),
        "q_t": _encode_transposed(q, row_scale * expand(_get_inverse(key_unit)), KEY_ORDER),
        "k_t": _encode_transposed(k, 1.0 / k_scale.unsqueeze(-1), kernels.PAIR_ORDER),
        "grad_t": _encode_transposed(g, row_scale / g_scale * expand(_get_inverse(value_unit)), KEY_ORDER),
        "tables": tables,
        "factors": torch.stack(factors, -1).float().contiguous(),
        "row_factors": row_factors.float(),
    }


def _get_factor(head_dim: int) -> float:
    """Return the factor of E4M3 codes: a row can have a number sqrt(head_dim) times larger than any after rotation."""
    return 0.25 if head_dim <= 128 else 0.125


def _get_weight_exponent(log2_weight: Tensor, norm: Tensor) -> Tensor:
    """Return log2 of the factors of P before its rounding, 0 to 7.

    log2_weight: of the largest weight m of a row. norm: of its codes of dO, over that of a row of 127. A weight is at
    most m, and all but the largest one at most 1 - m. So |dS| is at most min(m, 1 - m) norm times the bound of
    differences, and the second number keeps codes of dS, times _LARGEST_SLOPE over that bound, below 448. The first
    number leaves sqrt(m) to the codes of Q^T and dO^T, so that queries with one large weight do not make those of flat
    ones too small.
    """
    m = torch.exp2(log2_weight)
    largest_slope = norm * ((1.0 - m).clamp(min=0.0) / m).clamp(max=1.0)
    return torch.minimum(7.0 + 0.5 * log2_weight, 1.0 - torch.log2(largest_slope)).clamp(0.0, 7.0)


@cache
def _get_rotation(head_dim: int, device: torch.device) -> Tensor:
    return synchronized(build_rotation(head_dim).to(device))


@cache
def _get_order(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)


def _find_unit(largest: Tensor) -> Tensor:
    """Return the least multiple of 6 whose power of 2 exceeds these numbers, at least -120; NO_UNIT for zeros.

    A coarse grid, because the kernel multiplies its sums whenever the unit changes from one tile to the next.
    """
    exponent = torch.frexp(largest.nan_to_num(1.0, 1.0)).exponent.clamp(-120, 126)
    unit = -(-exponent).div(6, rounding_mode="floor") * 6
    return unit.where(largest != 0.0, kernels.NO_UNIT).to(torch.int32)


def _get_inverse(unit: Tensor) -> Tensor:
    """Return 2^-unit, 0 for NO_UNIT."""
    return torch.exp2(-unit.double()).masked_fill(unit == kernels.NO_UNIT, 0.0).float()


def _make_scale(amax: Tensor) -> Tensor:
    """Return the scales of int8 codes for these largest magnitudes: 1 for zeros, NaN if one is not finite."""
    scale = torch.where(amax == 0.0, 1.0, amax / _INT8_MAX)
    return scale.masked_fill(~(amax < math.inf), math.nan)


def _split_rows(x: Tensor, tiles: int) -> Tensor:
    """Return (heads, tiles, rows of a tile, columns), with zeros after the last row."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, tiles * kernels.ROWS - x.shape[1]))
    return padded.reshape(len(x), tiles, kernels.ROWS, -1)


def _encode_int8(x: Tensor, row_scale: Tensor) -> Tensor:
    codes = (x / row_scale.unsqueeze(-1)).round().clamp(-_INT8_MAX, _INT8_MAX).nan_to_num(0.0)
    return codes.to(torch.int8).view(torch.uint8)


def _encode_transposed(x: Tensor, row_factor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return E4M3 codes (heads, head_dim, rows) of rows times row_factor, in this order within groups of 16."""
    group = len(order)
    scaled = (x * (_get_factor(x.shape[2]) * row_factor).unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX)
    padded = torch.nn.functional.pad(scaled, (0, 0, 0, -x.shape[1] % group))
    codes = padded.to(torch.float8_e4m3fn).view(torch.uint8).reshape(len(x), -1, group, x.shape[2])
    return codes.index_select(2, _get_order(order, x.device)).flatten(1, 2).transpose(1, 2).contiguous()


def _round_starts(x: Tensor) -> Tensor:
    """Return _MAGIC_BITS - x as integers."""
    return _MAGIC_BITS - x.round().clamp(-(2**22), 2**22).nan_to_num(0.0).to(torch.int32)


def _lay_out_starts(starts: Tensor, tiles: int, padding: int) -> Tensor:
    """Return the starts of queries in the order of QueryTable, (heads, tiles, words)."""
    padded = torch.nn.functional.pad(starts, (0, tiles * kernels.ROWS - starts.shape[1]), value=padding)
    halves = padded.reshape(len(starts), tiles, -1, 2, 4, 2)  # of each 16 queries, four pairs of each half
    return halves.transpose(3, 4).flatten(2)


def _get_code_shapes(
    heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of the buffers of ``encode``, and of the buffers between the quantizer's kernels."""
    of_queries, of_keys = (heads, q_len), (kv_heads, kv_len)
    rows = {"q": of_queries, "k": of_keys, "v": of_keys, "grad": of_queries}
    columns = {"q_t": of_queries, "k_t": of_keys, "grad_t": of_queries}
    codes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        **{name: ((count, length, dim), torch.uint8) for name, (count, length) in rows.items()},
        **{name: ((count, dim, padded_keys(length)), torch.uint8) for name, (count, length) in columns.items()},
    }
    return codes | {
        "tables": ((heads, -(-q_len // kernels.ROWS), kernels.TABLE_WORDS), torch.int32),
        "factors": ((kv_heads, 3), torch.float32),
        "row_factors": (of_queries, torch.float32),
        "k_sums": ((kv_heads, kernels.count_chunks(kv_len), dim), torch.float32),
        **{name: ((kv_heads, dim), torch.float32) for name in ("k_mean", "mean_shift")},
        **{
            name: ((kv_heads, kernels.count_blocks(kv_len, dim)), torch.float32)
            for name in ("k_amax", "v_amax", "v_norm")
        },
    }


@cache
def _make_quantize_plan(
    device: int, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int, scale: float,
    strides: tuple[Stride3, ...], lengths: bool,
) -> LaunchPlan:  # fmt: skip
    launches = kernels.encode_launches(
        head_dim, batch, heads, kv_heads, q_len, kv_len, scale, strides, lengths=lengths
    )  # fmt: skip
    sources = kernels.encode_kernels(head_dim, lengths=lengths)
    steps = tuple(LaunchStep(*pair) for pair in zip(sources, launches, strict=True))
    names = (
        *kernels.INPUTS,
        "row_stats",
        "lse_mean",
        "rotation",
        *(("kv_lengths",) if lengths else ()),
        *_get_code_shapes(batch * heads, batch * kv_heads, q_len, kv_len, head_dim),
    )
    return LaunchPlan(device, steps, names)


def quantize(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, lse_mean: Tensor, grad: Tensor,
    scale: float, kv_lengths: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the buffers of ``encode``, on a Hopper GPU, and six that its kernels share.

    Tensors of bfloat16 with contiguous columns and rows aligned to 16 bytes. row_stats: contiguous, of scores with keys
    minus lse_mean. lse_mean: float32 (B, HK, D), rotated. kv_lengths: int32 (B,) or None, as for ``encode``.
    """
    inputs = (query, key, value, out, grad)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    shapes = _get_code_shapes(batch * heads, batch * kv_heads, q_len, kv_len, head_dim)
    buffers = {name: torch.empty(shape, dtype=dtype, device=query.device) for name, (shape, dtype) in shapes.items()}
    strides = tuple(x.stride()[:3] for x in inputs)
    plan = _make_quantize_plan(
        query.get_device(), batch, heads, kv_heads, q_len, kv_len, head_dim, scale, strides, kv_lengths is not None
    )
    given = [*inputs, row_stats, lse_mean, _get_rotation(head_dim, query.device)]
    given += [] if kv_lengths is None else [kv_lengths]
    plan.launch([x.data_ptr() for x in (*given, *buffers.values())])
    return buffers


def compute_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, lse_mean: Tensor,
    mask: kernels.BackwardMask, scale: float, kv_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and dV, bfloat16, of the shapes of Q, K and V, on a Hopper GPU. Arguments are as for ``quantize``.

    kv_lengths: of a mask with lengths.
    """
    codes = quantize(query, key, value, out, row_stats, lse_mean, grad, scale, kv_lengths)
    dq, dk, dv = launch(codes, query.shape[2], key.shape[2], mask, kv_lengths=kv_lengths)
    return dq.view(query.shape), dk.view(key.shape), dv.view(value.shape)


def sdpa_kept_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, lse_mean: Tensor,
    causal: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.sdpa_kept_backward`` of CUDA tensors: gradients with the inputs' strides.

    causal: as in ``torch.ops.greenfast.sdpa``. Several heads of Q may share one of K and V.
    """
    right = 0 if causal else -1
    return masked_kept_backward(grad, query, key, value, out, row_stats, lse_mean, None, None, causal, -1, right, scale)


def masked_kept_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, lse_mean: Tensor,
    kv_lengths: Tensor | None, kv_rows: Tensor | None, alignment: int, left: int, right: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.masked_kept_backward`` of CUDA tensors: gradients with the inputs' strides.

    kv_lengths, kv_rows, alignment, left, right: as in ``MaskSpec``; kv_rows names each key once.
    """
    by_query, by_key, by_value = (torch.empty_like(x) for x in (query, key, value))
    if not (query.numel() and key.numel()):
        return by_query.zero_(), by_key.zero_(), by_value.zero_()
    rows = None if kv_rows is None else kv_rows.long()[:, None, :, None].expand_as(key)
    if rows is not None:
        key, value = key.gather(2, rows), value.gather(2, rows)
    g, q, k, v, o = (make_tma_compatible(x, unique_rows=True) for x in (grad, query, key, value, out))
    mask = kernels.make_mask(alignment, left, right, query.shape[2], key.shape[2], lengths=kv_lengths is not None)
    lengths = None if kv_lengths is None else kv_lengths.contiguous()
    dq, dk, dv = compute_gradients(g, q, k, v, o, row_stats.contiguous(), lse_mean.contiguous(), mask, scale, lengths)
    if rows is not None:
        return by_query.copy_(dq), by_key.scatter_(2, rows, dk), by_value.scatter_(2, rows, dv)
    return by_query.copy_(dq), by_key.copy_(dk), by_value.copy_(dv)


@cache
def _make_plan(
    device: int, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int,
    mask: kernels.BackwardMask, parts: str,
) -> LaunchPlan:  # fmt: skip
    steps, sizes = [], (heads, kv_heads, q_len, kv_len, mask, batch)
    for part in kernels.split_heads(heads, kv_heads, q_len, kv_len, mask):
        if "keys" in parts:
            for tiles in kernels.KEYS_TILINGS[head_dim]:
                steps.append(LaunchStep(kernels.keys_kernel(tiles, mask), kernels.keys_launch(tiles, *sizes, part)))
        if "queries" in parts:
            tiles = kernels.QUERIES_TILINGS[head_dim]
            launch = kernels.queries_launch(tiles, *sizes, part)
            steps.append(LaunchStep(kernels.queries_kernel(tiles, mask), launch))
    return LaunchPlan(device, tuple(steps), (*_CODES, "ds", *_OUTPUTS, *(("kv_lengths",) if mask.lengths else ())))


def allocate_ds(codes: dict[str, Tensor], q_len: int, kv_len: int, mask: kernels.BackwardMask) -> Tensor:
    """Allocate the codes of dS of as many heads as a launch has (kernels/attention/backward.py).

    Raises NotImplementedError for more than MOST_HEAD_BYTES of one head: a compiled graph for any length is routed
    without knowing the length.
    """
    heads, kv_heads = len(codes["q"]), len(codes["k"])
    of_head = kernels.stored_bytes(heads // kv_heads, q_len, kv_len, mask)
    if of_head > kernels.MOST_HEAD_BYTES:
        raise NotImplementedError(f'backward="8bit": {kernels.describe_excess(of_head)}')
    part = kernels.split_heads(heads, kv_heads, q_len, kv_len, mask)[0]
    count = (part.stop - part.first) * heads // kv_heads
    return codes["q"].new_empty(kernels.stored_shape(count, q_len, kv_len, mask))


def launch(
    codes: dict[str, Tensor], q_len: int, kv_len: int, mask: kernels.BackwardMask, parts: str = "keys, queries",
    kv_lengths: Tensor | None = None, ds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dQ, dK and dV, bfloat16 (heads, length, D), from the buffers of ``encode``, on a Hopper GPU.

    dK and dV are sums over the heads of Q that share a head of K and V. kv_lengths: of a mask with lengths, int32
    (batch,). parts: the kernels to launch; the gradients of the others are uninitialised. ds: of ``allocate_ds``, which
    the kernels of dK write and that of dQ reads; by default it is freed afterwards.
    """
    heads, kv_heads, device, head_dim = len(codes["q"]), len(codes["k"]), codes["q"].get_device(), codes["q"].shape[2]
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    grads = [codes["q"].new_empty((*shape, head_dim), dtype=torch.bfloat16) for shape in shapes]
    ds = allocate_ds(codes, q_len, kv_len, mask) if ds is None else ds
    given = [] if kv_lengths is None else [kv_lengths]
    addresses = [x.data_ptr() for x in (*(codes[name] for name in _CODES), ds, *grads, *given)]
    batch = 1 if kv_lengths is None else len(kv_lengths)
    _make_plan(device, batch, heads, kv_heads, q_len, kv_len, head_dim, mask, parts).launch(addresses)
    return grads[0], grads[1], grads[2]
