"""The attention problem of the fast kernels: masks, grouped heads and lengths beside those of the ladder's problem.

Dimensions: B, H, S and D as there; HK heads of K and V (default H), KV keys (default S), and CAUSAL: 1 lets query i
attend to keys 0 .. i, 2 to keys 0 .. i + KV - S, so that the last query sees all of them (default: no mask).
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

from greenfast.numerics.attention import E4M3_WEIGHTS, attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize, quantize
from greenfast.numerics.inputs import standard_normal
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array, Case, OutputSpec, References

#: Keys of V^T come in groups of 16, in the order in which a tensor core's accumulators hold 16 columns.
KEY_GROUP = 16
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


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

    @property
    def shift(self) -> int:
        """With a mask, query i attends to keys 0 .. i + shift."""
        return self.kv_len - self.q_len if self.causal == 2 else 0


def sizes_of(dims: Mapping[str, int]) -> Sizes:
    """Read dimensions. Raises UsageError for missing and unknown ones and for such that do not fit together."""
    known = ("B", "H", "S", "D", "HK", "KV", "CAUSAL")
    missing, unknown = [d for d in "BHSD" if d not in dims], [d for d in dims if d not in known]
    if missing or unknown or min(dims.values()) < 0 or min(dims[d] for d in "BHSD") < 1:
        raise UsageError(f"an attention shape needs B, H, S, D >= 1 and may have HK, KV, CAUSAL; got {dict(dims)}")
    kv_heads, causal = dims.get("HK", dims["H"]), dims.get("CAUSAL", 0)
    if kv_heads < 1 or dims["H"] % kv_heads:
        raise UsageError(f"H={dims['H']} query heads cannot share HK={kv_heads} heads of K and V evenly")
    if causal > 2:
        raise UsageError(f"CAUSAL={causal}: 0 is no mask, 1 aligns it at the first key, 2 at the last")
    return Sizes(dims["B"], dims["H"], kv_heads, dims["S"], dims.get("KV", dims["S"]), dims["D"], causal)


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


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """Codes q, k, v (uint8), v_t (V transposed, see transposed_values), a float32 scale per head; output out (half)."""
    inputs: dict[str, Array] = {}
    for name, x in zip("qkv", _tensors(sizes_of(dims), seed), strict=True):
        codes, scale = quantize(x, fmt)
        inputs[name] = codes.numpy()
        inputs[f"{name}_scale"] = scale.numpy()
        if name == "v":
            inputs["v_t"] = transposed_values(codes).numpy()
    return Case(inputs, {"out": OutputSpec(inputs["q"].shape, "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """Attention on the unquantized and the dequantized inputs, and what P kept in half or in E4M3 can explain."""
    sizes = sizes_of(dims)
    scale, mask = 1.0 / math.sqrt(sizes.head_dim), mask_of(sizes)
    unquantized = _tensors(sizes, seed)
    share = sizes.heads // sizes.kv_heads

    def per_query_head(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tensors
        return q, k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)

    exact = per_query_head([dequantize(*quantize(x, fmt), fmt) for x in unquantized])
    return References(
        full=attention(*per_query_head(unquantized), scale, mask).numpy(),
        exact=attention(*exact, scale, mask).numpy(),
        bound=attention_rounding_bound(*exact, scale, mask).numpy(),
        bounds={"e4m3": attention_rounding_bound(*exact, scale, mask, E4M3_WEIGHTS).numpy()},
    )


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (batch * heads, q_len, head_dim)."""
    return outputs["out"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Two products of 2 D operations and a power for each score that the mask leaves."""
    sizes = sizes_of(dims)
    mask = mask_of(sizes)
    per_head = sizes.q_len * sizes.kv_len if mask is None else int(mask.sum())
    scores = sizes.batch * sizes.heads * per_head
    return {"matrix_flops": 4 * scores * sizes.head_dim, "exponentials": scores}
