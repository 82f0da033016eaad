"""The problem of the backward pass: gradients of attention from int8 and E4M3 codes of Q, K, V and dO.

``exact`` evaluates the codes and tables in float64, as kernels/attention/sm90/backward.cuh defines: weights P and
dS = P (dP - delta), both in units of a query. The bound follows the roundings of P and dS to
E4M3.

Gates of the config: gradients of standard normal inputs are within 6 % of exact ones, and their elements have a
standard deviation of 0.8 to 2 at 2,048 tokens. Of 3 to 12 million elements the largest error is 0.8 to 2.0 and 0.1 %
are bad, if P and dS are rounded in float64 as the kernels do. If the factors are rounded to E4M3, a sum of products is
off by less than 2^-4, unless they cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.judge.task import import_file
from greenfast.kernels.attention.backward import NO_UNIT, PAIR_ORDER, ROWS
from greenfast.kernels.attention.config import KEY_ORDER
from greenfast.numerics.attention import E4M3_SUM
from greenfast.numerics.inputs import VARIANTS as VARIANTS
from greenfast.numerics.inputs import standard_normal, varied
from greenfast.ops.masked import MaskSpec
from greenfast.ops.quantized_backward import encode
from greenfast.spec.problem import Case, OutputSpec, References

_family = import_file(Path(__file__).with_name("family.py"))

#: Float bits of 1.5 * 2^23, which the starts of accumulators count from, and that number.
_MAGIC_BITS, _MAGIC = 0x4B400000, 1.5 * 2.0**23
#: Half a step of E4M3: relative, and of numbers below 2^-6 absolute.
_STEP, _SMALLEST = 2.0**-4, 2.0**-10
#: The largest number of E4M3.
_LARGEST = 448.0
#: Sums by the tensor cores, and in float32.
_SUMS = E4M3_SUM + 2.0**-14
#: An exponent is a product with a factor of the scores, plus numbers below 256, rounded up to three times.
_EXPONENT, _EX2 = 2.0**-22, 2.0**-22
#: dP - delta in units of the codes: kMagic times a factor rounds by 3/4 of one in the kernel of dK.
_DIFFERENCE = 1.0
_BFLOAT16, _BFLOAT16_SMALLEST = 2.0**-9, 2.0**-134


@lru_cache(maxsize=1)  # a case is made, then its references
def _draw(dims: tuple[tuple[str, int], ...], seed: int, variant: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return Q, K, V and dO, bfloat16 (heads, length, D), and the buffers of ``encode``.

    A row of dO is larger the more keys its query attends to, and smaller the more queries attend to a key. So gradients
    of standard normal inputs are near 1 or smaller at any length, with and without a mask. With LENGTHS there is also
    ``kv_lengths``.
    """
    d = dict(dims)
    drawn = standard_normal((d["H"], d["S"], d["D"]), 2, seed)
    drawn += standard_normal((d["HK"], d["KV"], d["D"]), 2, seed + 1_000_000)
    q, g, k, v = (x.bfloat16() for x in varied(drawn, variant, seed))
    lengths = torch.randint(d["KV"] + 1, (d["HK"],), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    if not d["LENGTHS"]:
        lengths = lengths.fill_(d["KV"])
    sizes = torch.stack([_get_gradient_sizes(d, int(n)) for n in lengths]).repeat_interleave(d["H"] // d["HK"], 0)
    g = (g.float() * sizes.unsqueeze(-1)).bfloat16()
    heads = [
        _attend(d, int(lengths[n]), *(_select_head(x, n, d["HK"]) for x in (q, k, v, g)))[1:3] for n in range(d["HK"])
    ]
    out, stats = (torch.cat(x) for x in zip(*heads, strict=True))
    # Each head of K is a sequence.
    batch = [x.view(d["HK"], -1, *x.shape[1:]) for x in (q, k, v, out.bfloat16(), stats.float(), g)]
    given = lengths if d["LENGTHS"] else None
    codes = encode(batch[0], batch[1], batch[2], batch[3], batch[4], batch[5], d["D"] ** -0.5, None, given)
    return [q, k, v, g], codes if given is None else codes | {"kv_lengths": given}


def _get_gradient_sizes(d: Mapping[str, int], length: int) -> Tensor:
    """Return the factors of the rows of dO, (S,). length: the keys of the sequence."""
    keys = (~_hidden(d, length)).sum(1)  # that a query attends to
    # The weights of a key in all rows add to 1 / of_key.
    of_key = length * d["HK"] / (d["H"] * max(1, int((keys > 0).sum())))
    return (keys * min(1.0, of_key)).sqrt()


def _attend(d: Mapping[str, int], length: int, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weights of one head of K and V, (heads of Q, S, KV), the output, row_stats, and dS, in float64.

    row_stats: as of ``encode``. length: the keys of the sequence. dS lacks the factor of the scores.
    """
    q, k, v, g = (x.double() for x in tensors)
    hidden = _hidden(d, length)
    scores = (q @ k.mT * d["D"] ** -0.5).masked_fill(hidden, -math.inf)
    p = torch.softmax(scores, -1).masked_fill(hidden, 0.0)  # a row without a key is not a number
    out = p @ v
    stats = torch.stack([torch.logsumexp(scores, -1), scores.amax(-1)], -1)
    return p, out, stats, p * (g @ v.mT - (g * out).sum(-1, keepdim=True))


def _hidden(d: Mapping[str, int], length: int) -> Tensor:
    """Return which keys a query does not attend to, (S, KV). length: the keys of the sequence."""
    alignment, left, right = _family.get_limits(d)
    mask = MaskSpec(alignment, left, right, torch.tensor([length]))
    return ~mask.build_bool(d["S"], d["KV"], torch.device("cpu"))[0, 0]


def _get_length(d: Mapping[str, int], codes: Mapping[str, Tensor]) -> int:
    """Return the keys of the sequence of one head of K."""
    return int(codes["kv_lengths"]) if d["LENGTHS"] else d["KV"]


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Codes q, k, v, grad and q_t, k_t, grad_t (uint8), tables, kv_lengths (int32), factors, row_factors (float32).

    They are as kernels/attention/backward.py describes them. Outputs dq, dk and dv are bfloat16 bits as uint16.
    """
    d = _family.read_dims(dims, fmt)
    _, codes = _draw(tuple(d.items()), seed, variant)
    of_queries, of_keys = (d["H"], d["S"], d["D"]), (d["HK"], d["KV"], d["D"])
    shapes = {"dq": of_queries, "dk": of_keys, "dv": of_keys}
    inputs = {name: x.numpy().copy() for name, x in codes.items()}
    return Case(inputs, {name: OutputSpec(shape, "uint16") for name, shape in shapes.items()})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """Gradients of the unquantized tensors, and those that the codes define, with a bound: dQ, dK and dV, joined."""
    d = _family.read_dims(dims, fmt)
    tensors, codes = _draw(tuple(d.items()), seed, variant)
    full: list[list[Tensor]] = []
    exact: list[list[Tensor]] = []
    bound: list[list[Tensor]] = []
    for head in range(d["HK"]):  # one head of K and V at a time, because weights of all heads take much memory
        selected = {name: _select_head(x, head, d["HK"]) for name, x in codes.items()}
        length = _get_length(d, selected)
        full.append(_compute_exact(d, length, *(_select_head(x, head, d["HK"]) for x in tensors)))
        for results, gradients in zip((exact, bound), compute_from_codes(d, selected), strict=True):
            results.append(gradients)
    joined = [[torch.cat(x) for x in zip(*gradients, strict=True)] for gradients in (full, exact, bound)]
    names = [_join(gradients) for gradients in joined]
    return References(full=names[0], exact=names[1], bound=names[2], sizes=tuple(x.numel() for x in joined[0]))


def _select_head(x: Tensor, head: int, kv_heads: int) -> Tensor:
    """Return the part of a tensor (heads, ...) that belongs to a head of K and V."""
    group = len(x) // kv_heads
    return x[head * group : (head + 1) * group]


def _compute_exact(d: Mapping[str, int], length: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """Return dQ, dK and dV of the unquantized tensors of one head of K and V, in float64."""
    p, _, _, ds = _attend(d, length, q, k, v, g)
    ds = ds * d["D"] ** -0.5
    return [ds @ k.double(), (ds.mT @ q.double()).sum(0, keepdim=True), (p.mT @ g.double()).sum(0, keepdim=True)]


def compute_from_codes(d: Mapping[str, int], codes: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return dQ, dK and dV of the codes of one head of K and V, and each element's largest error from the roundings."""
    q, k, v, grad = (codes[name].view(torch.int8).double() for name in ("q", "k", "v", "grad"))
    q_t, grad_t = (_read_columns(codes[f"{name}_t"], KEY_ORDER)[:, : d["S"]] for name in ("q", "grad"))
    k_t = _read_columns(codes["k_t"], PAIR_ORDER)[:, : d["KV"]]
    tables = codes["tables"]
    starts = [
        (_read_starts(tables[..., first : first + ROWS]) - _MAGIC_BITS)[:, : d["S"]].double() for first in (0, ROWS)
    ]
    words = tables[..., 2 * ROWS :].repeat_interleave(ROWS, 1)[:, : d["S"]]
    factor = words[..., :1].contiguous().view(torch.float32).double()  # (heads, S, 1)
    units = words[..., 1:3].double().masked_fill(words[..., 1:3] == NO_UNIT, 0.0)
    q_t, grad_t = q_t * torch.exp2(units[..., :1]), grad_t * torch.exp2(units[..., 1:])
    slope, by_key, by_value = codes["factors"][0].double()
    by_query = codes["row_factors"].double().unsqueeze(-1)

    hidden = _hidden(d, _get_length(d, codes))
    exponent = (q @ k.mT + starts[0].unsqueeze(-1)) * factor
    p = torch.exp2(exponent.masked_fill(hidden, -math.inf))
    # Rounding saturates: where scores are so large that int8 moves them beyond the row's largest score, P exceeds 448.
    ds = (p * (grad @ v.mT + starts[1].unsqueeze(-1)) * slope).clamp(-_LARGEST, _LARGEST)
    error_of_ds = _DIFFERENCE * (p * slope).clamp(max=_LARGEST)
    p = p.clamp(max=_LARGEST)
    exact = [by_query * (ds @ k_t), by_key * _sum_heads(ds.mT @ q_t), by_value * _sum_heads(p.mT @ grad_t)]

    relative = _STEP + _SUMS + _EX2 + torch.expm1(math.log(2) * _EXPONENT * (_MAGIC * factor + 256))
    smallest = _SMALLEST * ~hidden  # numbers below 2^-6 have an absolute error
    error_of_p, error_of_ds = relative * p + smallest, relative * ds.abs() + error_of_ds + smallest
    bound = [
        by_query * (error_of_ds @ k_t.abs()),
        by_key * _sum_heads(error_of_ds.mT @ q_t.abs()),
        by_value * _sum_heads(error_of_p.mT @ grad_t.abs()),
    ]
    return exact, [b + _BFLOAT16 * (x.abs() + b) + _BFLOAT16_SMALLEST for x, b in zip(exact, bound, strict=True)]


def _sum_heads(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True)


def _read_columns(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the values of transposed E4M3 codes (heads, D, padded), as (heads, padded, D). order: of 16 rows."""
    heads, dim, padded = codes.shape
    values = codes.view(torch.float8_e4m3fn).double().transpose(1, 2)
    permuted = values.reshape(heads, padded // len(order), len(order), dim)
    rows = torch.empty_like(permuted)
    rows[:, :, torch.tensor(order)] = permuted
    return rows.flatten(1, 2)


def _read_starts(words: Tensor) -> Tensor:
    """Return the words of tables (heads, tiles, 64) in the order of the queries, (heads, queries)."""
    return words.reshape(*words.shape[:2], 4, 4, 2, 2).transpose(3, 4).flatten(1)


def _join(gradients: list[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([x.numpy().ravel() for x in gradients])


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The gradients as float64, flat: dQ, dK, dV."""
    bits = np.concatenate([outputs[name].ravel() for name in ("dq", "dk", "dv")])
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Five products of 2 D operations and one exponential for each unmasked score; of half the keys with LENGTHS."""
    d = _family.read_dims(dims, "int8")
    scores = d["H"] * int((~_hidden(d, d["KV"])).sum()) // (2 if d["LENGTHS"] else 1)
    return {"matrix_flops": 10 * scores * d["D"], "exponentials": scores}
