"""The serving problem: causal attention of sequences of several lengths over their pages of an E4M3 cache.

Its bound follows the roundings of kernels/serving: a weight times its value's scale is rounded to E4M3 next to a
maximum that a row's largest may exceed 8 times; the divisor is summed before that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.judge.task import import_file
from greenfast.kernels.serving.attention import ServingSizes
from greenfast.numerics.attention import E4M3_SUM
from greenfast.numerics.inputs import VARIANTS as VARIANTS
from greenfast.numerics.inputs import standard_normal, varied
from greenfast.numerics.serving import WEIGHT_LOG2, e4m3, grouped_values, quantize_rows, rows_of_pages
from greenfast.spec.problem import Array, Case, OutputSpec, References

_family = import_file(Path(__file__).with_name("family.py"))

#: Of bytes that no sequence's key or value has: NaN in E4M3.
_UNWRITTEN = 0x7F
#: Half a step of E4M3: relative, and of numbers below 2^-6 absolute.
_WEIGHT, _SMALLEST = 2.0**-4, 2.0**-10
#: A score is scaled, has log2 of a value's scale (below 2^32, above 2^-32) added, a maximum subtracted, and goes
#: through ex2.
_SCORE = 8 * 2.0**-24
#: Float32 sums of at most some thousand weights, and of chunks' results.
_SUMS = 2.0**-14
_HALF_OUTPUT, _HALF_OUTPUT_SMALLEST = 2.0**-11, 2.0**-25


@dataclass(frozen=True)
class _Batch:
    """q (tokens, H, D) and of each sequence k, v (keys, HK, D), float16, unquantized; and where a cache has them."""

    sizes: ServingSizes
    starts: list[int]
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    table: Tensor


def _batch(dims: Mapping[str, int], seed: int, fmt: str, variant: str) -> _Batch:
    d, sizes = _family.read_dims(dims, fmt), _family.sizes_of(dims, fmt)
    order = np.random.Generator(np.random.PCG64([seed, 2]))
    lengths = [d["S"], *order.integers(1, d["S"], d["B"] - 1, endpoint=True).tolist()]
    rows = standard_normal((d["H"], sizes.tokens, d["D"]), 1, seed)
    rows += standard_normal((d["HK"], sum(lengths), d["D"]), 2, seed + 1_000_000)
    q, k, v = (x.transpose(0, 1) for x in varied(rows, variant, seed))
    pages = torch.from_numpy(order.permutation(sizes.pages).astype(np.int32))
    table = torch.full((d["B"], sizes.table_entries), -1, dtype=torch.int32)
    for row, length in zip(table, lengths, strict=True):
        count = -(-length // sizes.page)
        row[:count], pages = pages[:count], pages[count:]
    starts = [0, *accumulate(_family.query_lengths(d["B"], d["Q"]))]
    return _Batch(sizes, starts, q, list(torch.split(k, lengths)), list(torch.split(v, lengths)), table)


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Q, and a cache as ``greenfast.PagedKVCache`` has it; of the sequences, the first has S keys, the others 1 to S.

    q: float16 (tokens, H, D). k_cache, v_cache: E4M3 codes as uint8, (pages, PAGE, HK, D), V in groups, (pages, HK,
    PAGE / 16, D, 16), without VROWS; k_scale, v_scale: float32 (pages, HK, PAGE), or (HK,) with HEADSCALE. block_table:
    int32 (B, entries), -1 behind a sequence's last page. cu_seqlens_q, seqused_k: int32. What no sequence has is NaN.
    Output out: float16, as q.
    """
    return _case(dims, fmt, _batch(dims, seed, fmt, variant))


def _case(dims: Mapping[str, int], fmt: str, batch: _Batch) -> Case:
    d, sizes = _family.read_dims(dims, fmt), batch.sizes
    lengths = [len(x) for x in batch.keys]
    inputs: dict[str, Array] = {
        "q": batch.q.contiguous().numpy(),
        "block_table": batch.table.numpy(),
        "cu_seqlens_q": np.array(batch.starts, np.int32),
        "seqused_k": np.array(lengths, np.int32),
    }
    for name, sequences in (("k", batch.keys), ("v", batch.values)):
        cache = torch.full((sizes.pages, sizes.page, sizes.kv_heads, d["D"]), _UNWRITTEN, dtype=torch.uint8)
        scale = torch.full((sizes.pages, sizes.kv_heads, sizes.page), math.nan)
        of_heads = torch.stack([x.float().abs().amax((0, 2)) for x in sequences]).amax(0) / 448
        for row, x in zip(batch.table, sequences, strict=True):
            tokens = torch.arange(len(x))
            at = row[tokens // sizes.page].long(), tokens % sizes.page
            if d["HEADSCALE"]:
                codes = e4m3(x.float() / of_heads.unsqueeze(1))
            else:
                codes, scale[at[0], :, at[1]] = quantize_rows(x)
            cache[at] = codes.view(torch.uint8)
        if name == "v" and not d["VROWS"]:
            cache = grouped_values(cache)
        inputs[f"{name}_cache"] = cache.numpy()
        inputs[f"{name}_scale"] = (of_heads if d["HEADSCALE"] else scale).numpy()
    return Case(inputs, {"out": OutputSpec(tuple(batch.q.shape), "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """Attention in float64 on the unquantized tensors, and on what the cache holds, page by page; and its bound."""
    batch = _batch(dims, seed, fmt, variant)
    inputs = {name: torch.from_numpy(x) for name, x in _case(dims, fmt, batch).inputs.items()}
    codes, scales = quantize_rows(inputs["q"])
    q = codes.double() * scales.double().unsqueeze(-1)
    full, exact, bound = (torch.zeros(q.shape, dtype=torch.float64) for _ in range(3))
    group = batch.sizes.group
    for n, (first, last) in enumerate(pairwise(batch.starts)):
        k, v, each = _sequence(inputs, batch.sizes, n)
        unquantized = batch.keys[n].double(), batch.values[n].double()
        mask = torch.arange(len(k)) <= torch.arange(first - last, 0).unsqueeze(1) + len(k)
        for head in range(batch.sizes.heads):
            at, of = (slice(first, last), head), head // group
            full[at] = _weighted(batch.q[at].double(), unquantized[0][:, of], mask) @ unquantized[1][:, of]
            exact[at], bound[at] = _with_bound(q[at], k[:, of], v[:, of], each[:, of], mask)
    return References(full=full.numpy(), exact=exact.numpy(), bound=bound.numpy())


def _sequence(inputs: Mapping[str, Tensor], sizes: ServingSizes, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cached keys and values of a sequence, (keys, HK, D), and the unit of a value's rounding, (keys, HK).

    The unit is the value's scale with a scale per token, else 1.
    """
    length = int(inputs["seqused_k"][n])
    pages = inputs["block_table"][n, : -(-length // sizes.page)]
    found = []
    for name in ("k", "v"):
        rows = rows_of_pages(inputs[f"{name}_cache"].view(torch.float8_e4m3fn), pages)[:length]
        scale = inputs[f"{name}_scale"]
        of_tokens = scale[pages.long()].transpose(1, 2).flatten(0, 1)[:length] if scale.dim() == 3 else scale
        found.append((rows.double() * of_tokens.double().unsqueeze(-1), of_tokens.double()))
    (k, _), (v, scales) = found
    return k, v, scales if scales.dim() == 2 else torch.ones(v.shape[:2], dtype=torch.float64)


def _weighted(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The softmax of a head's scores, zeros in a row that attends to no key."""
    scores = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


def _with_bound(q: Tensor, k: Tensor, v: Tensor, each: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention of a head, and each element's largest error from the kernels' roundings."""
    scale = q.shape[-1] ** -0.5
    p = _weighted(q, k, mask)
    out, sizes = p @ v, v.abs()
    scores = (q @ k.T * scale).abs()
    # Of a score, absolute, and so of its weight and the maximum's, relative.
    off = E4M3_SUM * (q.abs() @ k.abs().T * scale) + _SCORE * (scores + (scores * mask).amax(-1, keepdim=True) + 32)
    off = p * torch.expm1(off)
    # Numbers that are rounded are weights times `each`; the smallest ones are off by the same everywhere.
    steps = _SMALLEST / 2.0**WEIGHT_LOG2 * (p * each).amax(-1, keepdim=True)
    top = (_WEIGHT + E4M3_SUM + _SUMS) * (p @ sizes) + (1 + _WEIGHT) * (off @ sizes)
    top += steps * (mask.double() @ (sizes / each.unsqueeze(1)))
    total = off.sum(-1, keepdim=True) + _SUMS
    bound = (top + out.abs() * total) / (1 - total.clamp(max=0.9))
    return out, bound * (1 + _HALF_OUTPUT) + _HALF_OUTPUT * out.abs() + _HALF_OUTPUT_SMALLEST


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (tokens, H, D)."""
    return outputs["out"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Of the first sequence alone, as the others' keys depend on the seed: two products and an exponential a score."""
    d = _family.read_dims(dims, "e4m3")
    scores = d["H"] * sum(max(0, d["S"] - i) for i in range(d["Q"]))
    return {"matrix_flops": 4 * scores * d["D"], "exponentials": scores}
