"""The options of an attention, typed, and the sizes and strides of its tensors.

A shape of a task sets an option by a dimension in addition to B, H, S and D, such as CAUSAL=1; see each field below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np

from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Argument

#: Keys of V^T are permuted in groups of 16, to the order in which mma accumulators hold 16 columns.
KEY_GROUP = 16
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)

#: Rows that share a block scale: of Q, and of K and V.
QUERY_BLOCK, ROW_BLOCK = 16, 128
#: Fine scales per ROW_BLOCK keys: keys 2 g and 2 g + 1 of each 8 belong to group g.
KEY_GROUPS = 4
#: The format of V and P, for any format of Q and K.
VALUE_FORMAT = "e4m3"

FORMATS = ("e4m3", "int8")


class Mask(IntEnum):
    """The keys that query i, counted from 0, attends to."""

    NONE = 0  # all of them
    UPPER_LEFT = 1  # keys 0 .. i
    LOWER_RIGHT = 2  # keys 0 .. i + kv_len - q_len: the last query attends to all


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """All options of an attention. With ``Sizes`` they determine its kernels; equal options give equal kernels.

    A field's metadata map dimensions of a task's shape to its values: {dimension: {number: value}}.

    head_dim: columns of Q, K and V in the kernels; narrower tensors are padded with zeros.
    columns: columns of the caller's tensors, a multiple of 8 up to head_dim; 0 means head_dim.
    format: "e4m3" or "int8", the number format of Q and K. V has VALUE_FORMAT.
    dtype: "float16" or "bfloat16", the type of the output, and of tensors that a kernel quantizes.
    mask: the keys that a query attends to.
    log_sum_exp: the kernel also writes LSE, the natural logarithm of each row's sum of exponentials.
    score_max: it also writes each row's largest score, and pairs of both numbers: ``lse`` has a last dimension of 2.
    sum_quantized_p: that sum is of P after its rounding, the divisor of the output. Faster, and needed for a merge
    with results over other keys. For rows with few keys it is off by up to 3 %.
    query_scales, key_scales: "head", a scale per head and batch; "block", a scale per QUERY_BLOCK rows of Q and per
    ROW_BLOCK rows of K; or "fine", a scale per row of Q and for each of KEY_GROUPS groups of ROW_BLOCK rows of K.
    value_scales: the same for V, in blocks of ROW_BLOCK keys, or "channel", a scale per column of a head.
    softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2 (Gemma Team, 2024); 0: no softcap.
    fuse_q_quant: Q is unquantized, and the attention kernel quantizes it in blocks (fused quantization).
    key_mean: K is quantized minus an estimate of its mean over the keys. This does not change the softmax.
    rotate: Q and K are multiplied by an orthogonal matrix before quantization.
    scheduled: the work tiles come from a schedule made on the device (kernels/attention/schedule.py), as needed by the
    options after it. window: row i attends to no key before i + a shift. sinks: each head has the logit of one more
    key, without a value. listed: each block of ROW_BLOCK rows attends to a list of tiles of ROW_BLOCK keys. skip: tiles
    of ROW_BLOCK keys with weights below a threshold in 64 rows are skipped, after BLASST (Yuan et al., 2025).

    Raises UsageError for values that are not listed here, and for combinations that no kernel supports.
    """

    head_dim: int
    columns: int = 0
    format: str = "e4m3"
    dtype: str = field(default="float16", metadata={"BF16": {1: "bfloat16"}})
    mask: Mask = field(default=Mask.NONE, metadata={"CAUSAL": {1: Mask.UPPER_LEFT, 2: Mask.LOWER_RIGHT}})
    log_sum_exp: bool = field(default=False, metadata={"LSE": {1: True}})
    score_max: bool = False
    sum_quantized_p: bool = False
    query_scales: str = field(default="head", metadata={"QBLOCK": {QUERY_BLOCK: "block", 1: "fine"}})
    key_scales: str = field(default="head", metadata={"KBLOCK": {ROW_BLOCK: "block", ROW_BLOCK // KEY_GROUPS: "fine"}})
    value_scales: str = field(default="head", metadata={"VBLOCK": {ROW_BLOCK: "block"}, "VCHANNEL": {1: "channel"}})
    softcap: float = field(default=0.0, metadata={"SOFTCAP": {30: 30.0, 50: 50.0}})
    fuse_q_quant: bool = False
    key_mean: bool = False
    rotate: bool = False
    scheduled: bool = False
    window: bool = False
    sinks: bool = False
    listed: bool = False
    skip: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self.columns or self.head_dim)
        for name, allowed in (("format", FORMATS), *_ALLOWED.items()):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}: {getattr(self, name)!r}; allowed are {', '.join(map(repr, allowed))}")
        if not 0.0 <= self.softcap < math.inf:
            raise UsageError(f"softcap: {self.softcap}; 0 or a positive number is needed")
        if self.columns % 8 or not 8 <= self.columns <= self.head_dim:
            raise UsageError(f"columns: {self.columns}; a multiple of 8 up to head_dim {self.head_dim} is needed")
        if self.key_scales == "head" and "block" in (self.query_scales, self.value_scales):
            raise UsageError("scales of blocks of Q or V (QBLOCK, VBLOCK) go with scales of blocks of K (KBLOCK)")
        for name in ("sum_quantized_p", "score_max"):
            if getattr(self, name) and not self.log_sum_exp:
                raise UsageError(f"{name}: it goes with the log-sum-exp; set log_sum_exp too")
        if (self.query_scales == "fine") != (self.key_scales == "fine"):
            raise UsageError("fine scales of Q (QBLOCK=1) go with fine scales of K (KBLOCK=32)")

    def __str__(self) -> str:
        """Return the options that differ from the defaults, as in 'head_dim 64, format e4m3, mask UPPER_LEFT'."""
        chosen = {name: getattr(self, name) for name in ("head_dim", "format", *self.beyond("head_dim", "format"))}
        return ", ".join(f"{name} {value.name if isinstance(value, Mask) else value}" for name, value in chosen.items())

    @property
    def sum_unrounded_p(self) -> bool:
        """Whether row sums are of P before its rounding."""
        return self.log_sum_exp and not self.sum_quantized_p

    @property
    def causal(self) -> bool:
        """Whether there is a mask."""
        return self.mask != Mask.NONE

    def beyond(self, *supported: str) -> list[str]:
        """Return the names of options that differ from their defaults and are not in ``supported``."""
        plain = AttentionConfig(head_dim=self.head_dim)
        names = (f.name for f in fields(self) if f.name not in supported)
        return [name for name in names if getattr(self, name) != getattr(plain, name)]


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention: Q is (batch, heads, q_len, ...), K and V are (batch, kv_heads, kv_len, ...)."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    def shift(self, mask: Mask) -> int:
        """Return the shift of a mask: query i attends to keys 0 .. i + shift."""
        return self.kv_len - self.q_len if mask == Mask.LOWER_RIGHT else 0


#: Strides of batch, head and row in elements; columns are contiguous.
Stride3 = tuple[int, ...]


@dataclass(frozen=True)
class Strides:
    """Strides of the caller's tensors; None for a contiguous tensor.

    out: multiples of 8. query, key, value: rows are aligned to 16 bytes.
    """

    query: Stride3 | None = None
    key: Stride3 | None = None
    value: Stride3 | None = None
    out: Stride3 | None = None


@dataclass(frozen=True)
class MaskLists:
    """The sizes of the tile lists of a mask: for each of ``batch`` and ``heads``, or one for all; ``masks`` in bits."""

    batch: int
    heads: int
    masks: int

    def arguments(self) -> tuple[Argument, ...]:
        """Return the fields of the kernels' TileLists."""
        step = self.heads if self.batch > 1 else 0
        return ("counts", "entries", "bits", *(np.int32(n) for n in (self.masks, self.heads, step)))


def contiguous_strides(heads: int, length: int, columns: int) -> Stride3:
    """Return the strides of a contiguous (batch, heads, length, columns)."""
    return (heads * length * columns, length * columns, columns)


def output_arguments(config: AttentionConfig, sizes: Sizes, strides: Stride3 | None) -> tuple[Argument, ...]:
    """Return the fields of the kernels' OutputRows, the layout of O, (batch, heads, q_len, columns)."""
    batch, head, row = strides or contiguous_strides(sizes.heads, sizes.q_len, config.columns)
    gap = batch - sizes.heads * head if sizes.batch > 1 else 0
    return (np.int64(gap), np.int64(head), np.int64(row), np.int32(sizes.heads), np.int32(config.columns))


def softmax_scale(config: AttentionConfig, scale: float | None) -> np.float32:
    """Return the scale of the scores: ``scale``, or 1 / sqrt(head_dim) if it is None."""
    return np.float32(1.0 / math.sqrt(config.head_dim) if scale is None else scale)


def padded_keys(kv_len: int) -> int:
    """Return the keys of V^T: kv_len rounded up to KEY_GROUP."""
    return -(-kv_len // KEY_GROUP) * KEY_GROUP


#: Field -> the dimensions that set it, each with its numbers other than 0 and their values.
_SPELLED = {f.name: f.metadata for f in fields(AttentionConfig) if f.metadata}
_DIMENSIONS = {key: (0, *numbers) for spelled in _SPELLED.values() for key, numbers in spelled.items()}
_ALLOWED = {
    f.name: (f.default, *(value for of in f.metadata.values() for value in of.values()))
    for f in fields(AttentionConfig)
    if f.metadata and f.name != "softcap"
}


def read_dims(dims: Mapping[str, int], fmt: str) -> tuple[AttentionConfig, Sizes]:
    """Return the options and sizes of a task's shape in a format.

    dims: B, H, S and D, and perhaps HK heads of K and V (default H), KV keys (default S) and the fields' dimensions.
    Raises UsageError for missing and unknown ones and for such that do not fit together.
    """
    known = ("B", "H", "S", "D", "HK", "KV", *_DIMENSIONS)
    missing, unknown = [d for d in "BHSD" if d not in dims], [d for d in dims if d not in known]
    if missing or unknown or min(dims.values()) < 0 or min(dims[d] for d in "BHSD") < 1:
        raise UsageError(
            f"an attention shape needs B, H, S, D >= 1 and may have {', '.join(known[4:])}; got {dict(dims)}"
        )
    kv_heads = dims.get("HK", dims["H"])
    if kv_heads < 1 or dims["H"] % kv_heads:
        raise UsageError(f"H={dims['H']} query heads cannot share HK={kv_heads} heads of K and V evenly")
    for key, numbers in _DIMENSIONS.items():
        if dims.get(key, 0) not in numbers:
            raise UsageError(f"{key}={dims[key]}: allowed are {', '.join(map(str, numbers))}")
    chosen: dict[str, Any] = {}
    for name, spelled in _SPELLED.items():
        keys = [key for key in spelled if dims.get(key)]
        if len(keys) > 1:
            raise UsageError(f"{' and '.join(keys)}: both set {name}; give one of them")
        if keys:
            chosen[name] = spelled[keys[0]][dims[keys[0]]]
    config = AttentionConfig(head_dim=dims["D"], format=fmt, **chosen)
    return config, Sizes(dims["B"], dims["H"], kv_heads, dims["S"], dims.get("KV", dims["S"]))
