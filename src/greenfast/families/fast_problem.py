"""The attention problem of the fast kernels: masks, grouped heads and lengths beside those of the ladder's problem.

Dimensions: B, H, S and D as there; HK heads of K and V (default H), KV keys (default S), and CAUSAL: 1 lets query i
attend to keys 0 .. i, 2 to keys 0 .. i + KV - S, so that the last query sees all of them (default: no mask).
LSE=1 asks for the log-sum-exp of each row, BF16=1 for an output in bfloat16. QBLOCK=16 gives each 16 rows of Q a
scale of their own, KBLOCK=128 each 128 of K and VBLOCK=128 of V, or VCHANNEL=1 each channel of V. With VROWS=1 a kernel
reads V as its rows lie, not transposed.

Format "int8" is that of Q and K; V is E4M3 in both, as the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.numerics.attention import (
    E4M3_POLYNOMIAL_WEIGHTS,
    E4M3_WEIGHTS,
    attention,
    attention_rounding_bound,
)
from greenfast.numerics.formats import dequantize, encode, quantize
from greenfast.numerics.inputs import standard_normal
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Argument
from greenfast.spec.problem import Array, Case, OutputSpec, References

#: Keys of V^T come in groups of 16, in the order in which a tensor core's accumulators hold 16 columns.
KEY_GROUP = 16
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)

#: Rows that share a scale of Q with QBLOCK, and of K with KBLOCK or of V with VBLOCK; the format of V.
QUERY_BLOCK, ROW_BLOCK = 16, 128
VALUE_FORMAT = "e4m3"


@dataclass(frozen=True)
class Sizes:
    """The dimensions of an attention with their defaults filled in."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: int
    lse: bool = False
    bfloat16: bool = False
    query_blocks: bool = False
    key_blocks: bool = False
    value_blocks: bool = False
    channels: bool = False
    row_major: bool = False

    @property
    def shift(self) -> int:
        """With a mask, query i attends to keys 0 .. i + shift."""
        return self.kv_len - self.q_len if self.causal == 2 else 0


@dataclass(frozen=True)
class OutputRows:
    """Where a kernel writes O: (batch, heads, q_len, head_dim), in any order of its first three dimensions.

    head_dim: a multiple of 8, up to that of the kernel, which writes no further columns. strides: in elements,
    multiples of 8, those of batch, head and row; columns are neighbours.
    """

    head_dim: int
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, sizes: Sizes) -> OutputRows:
        """All heads one after the other, with the kernel's head dim."""
        of_head = sizes.q_len * sizes.head_dim
        return cls(sizes.head_dim, (sizes.heads * of_head, of_head, sizes.head_dim))

    def arguments(self, sizes: Sizes) -> tuple[Argument, ...]:
        """What the kernels' OutputRows holds."""
        batch, head, row = self.strides
        gap = batch - sizes.heads * head if sizes.batch > 1 else 0
        return (np.int64(gap), np.int64(head), np.int64(row), np.int32(sizes.heads), np.int32(self.head_dim))


#: Dimension -> the values that it may have; the first is its default.
_CHOICES = {
    "CAUSAL": (0, 1, 2),
    "LSE": (0, 1),
    "BF16": (0, 1),
    "QBLOCK": (0, QUERY_BLOCK),
    "KBLOCK": (0, ROW_BLOCK),
    "VBLOCK": (0, ROW_BLOCK),
    "VCHANNEL": (0, 1),
    "VROWS": (0, 1),
}


def sizes_of(dims: Mapping[str, int]) -> Sizes:
    """Read dimensions. Raises UsageError for missing and unknown ones and for such that do not fit together."""
    known = ("B", "H", "S", "D", "HK", "KV", *_CHOICES)
    missing, unknown = [d for d in "BHSD" if d not in dims], [d for d in dims if d not in known]
    if missing or unknown or min(dims.values()) < 0 or min(dims[d] for d in "BHSD") < 1:
        raise UsageError(
            f"an attention shape needs B, H, S, D >= 1 and may have {', '.join(known[4:])}; got {dict(dims)}"
        )
    kv_heads = dims.get("HK", dims["H"])
    if kv_heads < 1 or dims["H"] % kv_heads:
        raise UsageError(f"H={dims['H']} query heads cannot share HK={kv_heads} heads of K and V evenly")
    chosen = {name: dims.get(name, values[0]) for name, values in _CHOICES.items()}
    if chosen["CAUSAL"] not in _CHOICES["CAUSAL"]:
        raise UsageError(f"CAUSAL={chosen['CAUSAL']}: 0 is no mask, 1 aligns it at the first key, 2 at the last")
    for name, values in _CHOICES.items():
        if chosen[name] not in values:
            raise UsageError(f"{name}={chosen[name]}: allowed are {', '.join(map(str, values))}")
    if chosen["VBLOCK"] and chosen["VCHANNEL"]:
        raise UsageError("VBLOCK and VCHANNEL: V has scales of blocks or of channels, not both")
    return Sizes(
        *(dims["B"], dims["H"], kv_heads, dims["S"], dims.get("KV", dims["S"]), dims["D"], chosen["CAUSAL"]),
        *(bool(chosen[name]) for name in ("LSE", "BF16", "QBLOCK", "KBLOCK", "VBLOCK", "VCHANNEL", "VROWS")),
    )


def plain(sizes: Sizes) -> bool:
    """Whether the log-sum-exp, bfloat16, scales other than one per head and a row-major V are all left out."""
    blocks = sizes.query_blocks or sizes.key_blocks or sizes.value_blocks
    return not (sizes.lse or sizes.bfloat16 or blocks or sizes.channels or sizes.row_major)


def padded_keys(kv_len: int) -> int:
    """The keys of V^T: kv_len rounded up to KEY_GROUP."""
    return -(-kv_len // KEY_GROUP) * KEY_GROUP


def transposed_values(codes: Tensor) -> Tensor:
    """V as the fast kernels read it: uint8 (heads, kv_len, head_dim) to (heads, head_dim, padded_keys), reordered.

    The keys beyond the last are zeros. The result is on the device of ``codes``.
    """
    heads, kv_len, head_dim = codes.shape
    padded = padded_keys(kv_len)
    whole = torch.nn.functional.pad(codes, (0, 0, 0, padded - kv_len))
    grouped = whole.view(heads, padded // KEY_GROUP, KEY_GROUP, head_dim)[:, :, list(KEY_ORDER)]
    return grouped.reshape(heads, padded, head_dim).transpose(1, 2).contiguous()


def _tensors(sizes: Sizes, seed: int) -> list[Tensor]:
    """Unquantized q (batch * heads, q_len, head_dim), k and v (batch * kv_heads, kv_len, head_dim), float16."""
    q_shape = (sizes.batch * sizes.heads, sizes.q_len, sizes.head_dim)
    kv_shape = (sizes.batch * sizes.kv_heads, sizes.kv_len, sizes.head_dim)
    if q_shape == kv_shape:  # the ladder's inputs, drawn together
        return standard_normal(q_shape, 3, seed)
    return [*standard_normal(q_shape, 1, seed), *standard_normal(kv_shape, 2, seed + 1_000_000)]


def mask_of(sizes: Sizes) -> Tensor | None:
    """True where a query attends to a key; None without a mask."""
    if not sizes.causal:
        return None
    return torch.arange(sizes.kv_len) <= torch.arange(sizes.q_len).unsqueeze(1) + sizes.shift


def quantize_blocks(x: Tensor, fmt: str, rows: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Codes and scales of x * factor, x (heads, length, head_dim), with a scale for each ``rows`` rows.

    Scales are (heads, blocks).
    """
    heads, length, head_dim = x.shape
    blocks = -(-length // rows)
    whole = torch.nn.functional.pad(x, (0, 0, 0, blocks * rows - length)).reshape(heads * blocks, rows, head_dim)
    codes, scale = encode(whole, fmt, factor)
    return codes.view(heads, blocks * rows, head_dim)[:, :length].contiguous(), scale.view(heads, blocks)


def quantize_values(v: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of v (heads, kv_len, head_dim) with a scale per channel: scales (heads, head_dim)."""
    codes, scale = quantize_blocks(v.transpose(1, 2), fmt, 1)
    return codes.transpose(1, 2).contiguous(), scale


def _rows_of_a_scale(sizes: Sizes) -> dict[str, int]:
    """How many rows of q, k and v share a scale; 0: all of a head, or for v those of a channel."""
    return {
        "q": QUERY_BLOCK if sizes.query_blocks else 0,
        "k": ROW_BLOCK if sizes.key_blocks else 0,
        "v": ROW_BLOCK if sizes.value_blocks else 0,
    }


def quantized(tensors: list[Tensor], sizes: Sizes, fmt: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales of q, k and v, with the scales that the sizes ask for."""
    found = {}
    for (name, rows), x in zip(_rows_of_a_scale(sizes).items(), tensors, strict=True):
        of = VALUE_FORMAT if name == "v" else fmt
        if name == "v" and sizes.channels:
            found[name] = quantize_values(x, of)
        else:
            found[name] = quantize_blocks(x, of, rows) if rows else quantize(x, of)
    return found


def dequantized(codes: Mapping[str, tuple[Tensor, Tensor]], sizes: Sizes, fmt: str) -> list[Tensor]:
    """What the codes and scales of q, k and v stand for, in float64."""
    rows = _rows_of_a_scale(sizes)
    found = []
    for name, (code, scale) in codes.items():
        unit = dequantize(code, torch.ones(len(code)), VALUE_FORMAT if name == "v" else fmt)
        if rows[name]:
            each = scale.double().repeat_interleave(rows[name], 1)[:, : code.shape[1], None]
        elif name == "v" and sizes.channels:
            each = scale.double()[:, None, :]
        else:
            each = scale.double()[:, None, None]
        found.append(unit * each)
    return found


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """Codes q, k, v (uint8), v_t (V transposed, see transposed_values) and float32 scales; output out, and perhaps lse.

    out is float16, or with BF16 the bits of bfloat16 as uint16; lse is float32.
    """
    inputs: dict[str, Array] = {}
    sizes = sizes_of(dims)
    for name, (codes, scale) in quantized(_tensors(sizes, seed), sizes, fmt).items():
        inputs[name] = codes.numpy()
        inputs[f"{name}_scale"] = scale.numpy()
        if name == "v":
            inputs["v_t"] = transposed_values(codes).numpy()
    return Case(inputs, output_specs(dims))


def output_specs(dims: Mapping[str, int]) -> dict[str, OutputSpec]:
    """The outputs of a shape."""
    sizes = sizes_of(dims)
    rows = (sizes.batch * sizes.heads, sizes.q_len)
    specs = {"out": OutputSpec((*rows, sizes.head_dim), "uint16" if sizes.bfloat16 else "float16")}
    return specs | {"lse": OutputSpec(rows, "float32")} if sizes.lse else specs


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """Attention on the unquantized and the dequantized inputs, and what P kept in half or in E4M3 can explain."""
    sizes = sizes_of(dims)
    scale, mask = 1.0 / math.sqrt(sizes.head_dim), mask_of(sizes)
    tensors = _tensors(sizes, seed)
    unquantized, exact = _per_query_head(tensors, sizes), _dequantized_per_query_head(tensors, sizes, fmt)
    roundings = {"e4m3": E4M3_WEIGHTS, "e4m3_polynomial": E4M3_POLYNOMIAL_WEIGHTS}
    return References(
        full=attention(*unquantized, scale, mask).numpy(),
        exact=attention(*exact, scale, mask).numpy(),
        bound=attention_rounding_bound(*exact, scale, mask).numpy(),
        bounds={
            name: attention_rounding_bound(*exact, scale, mask, rounding).numpy()
            for name, rounding in roundings.items()
        },
    )


def _per_query_head(tensors: list[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors
    share = sizes.heads // sizes.kv_heads
    return q, k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)


def _dequantized_per_query_head(tensors: list[Tensor], sizes: Sizes, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    return _per_query_head(dequantized(quantized(tensors, sizes, fmt), sizes, fmt), sizes)


def log_sum_exp(dims: Mapping[str, int], seed: int, fmt: str) -> NDArray[np.float64]:
    """What ``lse`` must hold, (batch * heads, q_len): the natural logarithm, -inf for a row that attends to no key."""
    sizes = sizes_of(dims)
    q, k, _ = _dequantized_per_query_head(_tensors(sizes, seed), sizes, fmt)
    scores, mask = q @ k.transpose(-1, -2) / math.sqrt(sizes.head_dim), mask_of(sizes)
    found: NDArray[np.float64] = torch.logsumexp(
        scores if mask is None else scores.masked_fill(~mask, -math.inf), -1
    ).numpy()
    return found


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (batch * heads, q_len, head_dim)."""
    out = outputs["out"]
    if out.dtype == np.uint16:  # bfloat16
        out = (out.astype(np.uint32) << 16).view(np.float32)
    return out.astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Two products of 2 D operations and a power for each score that the mask leaves."""
    sizes = sizes_of(dims)
    mask = mask_of(sizes)
    per_head = sizes.q_len * sizes.kv_len if mask is None else int(mask.sum())
    scores = sizes.batch * sizes.heads * per_head
    return {"matrix_flops": 4 * scores * sizes.head_dim, "exponentials": scores}
