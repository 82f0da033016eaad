"""What an attention computes: sizes, mask, formats and layouts, read from the dimensions of a shape.

Dimensions: B, H, S and D as there; HK heads of K and V (default H), KV keys (default S), and CAUSAL: 1 lets query i
attend to keys 0 .. i, 2 to keys 0 .. i + KV - S, so that the last query sees all of them (default: no mask).
LSE=1 asks for the log-sum-exp of each row, BF16=1 for an output in bfloat16. QBLOCK=16 gives each 16 rows of Q a
scale of their own, KBLOCK=128 each 128 of K and VBLOCK=128 of V, or VCHANNEL=1 each channel of V. With VROWS=1 a kernel
reads V as its rows lie, not transposed.

Format "int8" is that of Q and K; V is E4M3 in both, as the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Argument

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
