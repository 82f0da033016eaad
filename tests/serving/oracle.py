"""Attention over a paged cache in float64, token by token through the block table, and caches to compare on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_ORDER

E4M3 = torch.float8_e4m3fn
NAN_CODE = 0x7F


@dataclass(frozen=True)
class Case:
    """Tensors of a paged attention by the names of the reference's arguments, and their source data."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    k_scale: Tensor
    v_scale: Tensor
    q_scale: Tensor | None
    sinks: Tensor | None
    options: dict[str, Any]
    keys: list[Tensor] = field(default_factory=list)  # of each sequence (length, kv_heads, head_dim), unquantized
    values: list[Tensor] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        names = ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale")
        return {name: getattr(self, name) for name in (*names, "q_scale", "sinks")} | self.options

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def case(
    lengths: list[tuple[int, int]], *, kv_heads: int = 2, group: int = 2, head_dim: int = 64, page_size: int = 16,
    layout: str = "grouped", scales: str = "token", strides: str = "NHD", fp8_queries: bool = False,
    sinks: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any,
) -> Case:  # fmt: skip
    """Sequences of (queries, keys) with N(0, 1) entries, on pages in random order; unwritten bytes are NaN codes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    heads = kv_heads * group
    q = normal(sum(n for n, _ in lengths), heads, head_dim)
    keys, values = ([normal(n, kv_heads, head_dim) for _, n in lengths] for _ in range(2))
    counts = [-(-n // page_size) for _, n in lengths]
    pages = sum(counts) + 3
    order = torch.randperm(pages, generator=generator).int()
    table = torch.full((len(lengths), max(counts, default=0) + 2), -1, dtype=torch.int32)
    for b, n in enumerate(counts):
        table[b, :n], order = order[:n], order[n:]
    k_rows, v_rows = (torch.full((pages, page_size, kv_heads, head_dim), NAN_CODE, dtype=torch.uint8) for _ in "kv")
    batch = len(lengths)
    shape = {"token": (pages, kv_heads, page_size), "head": (kv_heads,), "sequence": (batch, kv_heads), "one": ()}[
        scales
    ]
    k_scale, v_scale = (torch.full(shape, math.nan) for _ in "kv")
    for rows, scale, of_sequences in ((k_rows, k_scale, keys), (v_rows, v_scale, values)):
        if scales != "token":
            scale.copy_(torch.rand(shape, generator=generator) * 0.01 + 0.005)
        for b, x in enumerate(of_sequences):
            at = places(table[b], x.shape[0], page_size)
            if scales == "token":
                scale[at[0], :, at[1]] = x.float().abs().amax(-1) / 448
            rows[at] = rounded(x.float() / scales_at(scale, b, at, kv_heads).unsqueeze(-1)).view(torch.uint8)
    if strides == "HND":
        k_rows = k_rows.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "grouped":
        v_rows = grouped(v_rows)
    elif strides == "HND":
        v_rows = v_rows.transpose(1, 2).contiguous().transpose(1, 2)
    q_scale = None
    if fp8_queries:
        q_scale = torch.rand(batch, kv_heads, generator=generator) * 0.01 + 0.005
        q = rounded(q.float() / 0.01)
    cu = torch.tensor([0, *(n for n, _ in lengths)], dtype=torch.int32).cumsum(0).int()
    logits = torch.randn(heads, generator=generator) + 2 if sinks else None
    defaults = {"causal": True, "softmax_scale": head_dim**-0.5, "out_dtype": dtype}
    used = torch.tensor([n for _, n in lengths], dtype=torch.int32)
    return Case(
        q, k_rows.view(E4M3), v_rows.view(E4M3), table, cu, used, k_scale, v_scale, q_scale, logits,
        defaults | options, keys, values,
    )  # fmt: skip


def grouped(rows: Tensor) -> Tensor:
    """V bytes (pages, page_size, kv_heads, head_dim) in the layout "grouped", written out index by index."""
    pages, page_size, heads, head_dim = rows.shape
    result = torch.empty(pages, heads, page_size // 16, head_dim, 16, dtype=rows.dtype)
    for position, token in enumerate(KEY_ORDER):
        result[..., position] = rows[:, token::16].permute(0, 2, 1, 3)
    return result


def places(table: Tensor, length: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and slot of each token of a sequence."""
    tokens = torch.arange(length)
    return table[tokens // page_size].long(), tokens % page_size


def rows_at(cache: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """Numbers of tokens, float64 (tokens, kv_heads, head_dim)."""
    codes, (pages, slots) = cache.view(torch.uint8), at
    if cache.dim() == 4:
        result = codes[pages, slots]
    else:
        position = torch.tensor([KEY_ORDER.index(i) for i in range(16)])[slots % 16]
        result = codes[pages, :, slots // 16, :, position]
    return result.contiguous().view(E4M3).double()


def scales_at(scale: Tensor, b: int, at: tuple[Tensor, Tensor], kv_heads: int) -> Tensor:
    """Scales of tokens (tokens, kv_heads)."""
    if scale.dim() == 3:
        return scale[at[0], :, at[1]]
    return (scale[b] if scale.dim() == 2 else scale).expand(len(at[0]), kv_heads)


def quantized_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of codes, float64, and scales of rows, as the issue's rule has them."""
    amax = q.float().abs().amax(-1, keepdim=True)
    amax = torch.where(amax == 0, torch.full_like(amax, 448.0), amax)
    return rounded(q.float() * (torch.full_like(amax, 448.0) / amax)).double(), (amax / 448.0).double()


def visible(q_len: int, kv_len: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """bool (q_len, kv_len): whether a query attends to a key."""
    ahead = torch.arange(kv_len) - (torch.arange(q_len).unsqueeze(1) + kv_len - q_len)
    result = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        result &= ahead <= 0
    if window[0] >= 0:
        result &= -ahead <= window[0]
    if window[1] >= 0:
        result &= ahead <= window[1]
    return result


@dataclass(frozen=True)
class Exact:
    """Attention on the dequantized numbers, in float64.

    out: (total_q, heads, head_dim). lse: (heads, total_q). bound: the largest effect of rounding weights to E4M3 on
    each element of out: half a step of 3 mantissa bits, or of the smallest numbers if a row's maximum has a weight of
    56. deviation: a bound on its root of mean squares, because the errors of different keys are independent.
    """

    out: Tensor
    lse: Tensor
    bound: Tensor
    deviation: Tensor


def exact(c: Case) -> Exact:
    total, heads, head_dim = c.q.shape
    kv_heads = c.k_cache.shape[2]
    page_size, group = c.k_cache.shape[1], heads // kv_heads
    options = c.options
    out, bound, deviation = (torch.zeros(total, heads, head_dim, dtype=torch.float64) for _ in range(3))
    lse = torch.full((heads, total), -math.inf, dtype=torch.float64)
    for b, kv_len in enumerate(c.seqused_k.tolist()):
        rows = slice(int(c.cu_seqlens_q[b]), int(c.cu_seqlens_q[b + 1]))
        if rows.start == rows.stop:
            continue
        if c.q_scale is None:
            numbers, scale = quantized_queries(c.q[rows])
            q = numbers * scale
        else:
            q = c.q[rows].double() * c.q_scale[b].double().repeat_interleave(group).unsqueeze(-1)
        at = places(c.block_table[b], kv_len, page_size)
        k, v, v_scale = (
            x.repeat_interleave(group, 1).transpose(0, 1)
            for x in (
                rows_at(c.k_cache, at) * scales_at(c.k_scale, b, at, kv_heads).double().unsqueeze(-1),
                rows_at(c.v_cache, at) * scales_at(c.v_scale, b, at, kv_heads).double().unsqueeze(-1),
                scales_at(c.v_scale, b, at, kv_heads).double(),
            )
        )
        mask = visible(q.shape[0], kv_len, options["causal"], options.get("window", (-1, -1)))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * options["softmax_scale"]
        cap = options.get("softcap", 0.0)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask, -math.inf)
        logits = scores
        if c.sinks is not None:
            logits = torch.cat([scores, c.sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], 2)
        sums = torch.logsumexp(logits, -1)
        weights = torch.exp(scores - torch.where(sums == -math.inf, 0.0, sums).unsqueeze(-1))
        lse[:, rows] = sums
        out[rows] = (weights @ v).transpose(0, 1)
        if kv_len:
            # The weight times the value's scale is rounded, relative to the largest such product of the row.
            each = (v_scale if c.v_scale.dim() == 3 else torch.ones_like(v_scale)).unsqueeze(1)
            step = mask * (weights * each).amax(-1, keepdim=True) * 2.0**-10 / 56 / each
            bound[rows] = ((2.0**-4 * weights + step) @ v.abs()).transpose(0, 1)
            deviation[rows] = ((2.0**-4 * weights + step).square() @ v.square()).sqrt().transpose(0, 1)
    return Exact(out, lse, bound, deviation)


def faults(c: Case, out: Tensor, lse: Tensor) -> list[str]:
    """Return the elements of a result that differ from ``exact`` by more than rounding; empty if all agree.

    Scores up to some 30, in float32, have an absolute error of 1e-5.
    """
    wanted = exact(c)
    step = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[out.dtype]
    of_output = step * (wanted.out.abs() + wanted.bound) + 2.0**-25
    difference = (out.double() - wanted.out).abs()
    off = ~(difference <= wanted.bound * (1 + 2.0**-10) + of_output)
    result = (
        [] if not off.any() else [f"out: {int(off.sum())} of {off.numel()} off, first at {off.nonzero()[0].tolist()}"]
    )
    if not difference.norm() <= wanted.deviation.norm() + of_output.norm():
        result.append(f"out: off by {float(difference.norm())}, where rounding makes {float(wanted.deviation.norm())}")
    if not torch.equal(lse.isneginf(), wanted.lse.isneginf()):
        result.append("lse: -inf elsewhere")
    finite = wanted.lse.isfinite()
    of_lse = (lse.double() - wanted.lse)[finite].abs()
    if of_lse.numel() and not float(of_lse.max()) < 2e-5:
        result.append(f"lse: off by {float(of_lse.max())}")
    return result


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
