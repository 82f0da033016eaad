"""Q, K and V as the kernels take them, and which tensors can become that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from greenfast.families.qkv_quantizer import Quantization

#: Precision -> the format of Q and K; V is E4M3 in each.
PRECISIONS = {"fp8": "e4m3", "int8": "int8"}
#: What has a scale of V: each 128 keys, each head, or each channel of a head.
VALUE_SCALES = ("block", "head", "channel")
#: Head dims of the kernels; others are padded with zeros to the next of them.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Recipe:
    """How tensors are quantized: precision, and what is chosen beside it (see ``greenfast.quantize``).

    blocks: whether each 16 rows of Q and each 128 of K have a scale, or each head. values: what has one of V, a choice
    of VALUE_SCALES; "block" goes with blocks.
    """

    precision: str = "fp8"
    blocks: bool = True
    values: str = "block"
    key_mean: bool = True
    rotate: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for scales of V that there are not, or that do not go with those of Q and K."""
        check_choice("value_scales", self.values, VALUE_SCALES)
        if self.values == "block" and not self.blocks:
            raise ValueError("value_scales: 'block' goes with scales='block', not 'head'")

    @property
    def format(self) -> str:
        """The number format of Q and K."""
        return PRECISIONS[self.precision]

    def kernel_for(self, head_dim: int, dtype: torch.dtype) -> Quantization:
        """The quantization kernel of tensors of that head dim and dtype."""
        return Quantization(
            head_dim=head_dim,
            padded_dim=padded_head_dim(head_dim),
            dtype=str(dtype).removeprefix("torch."),
            fmt=self.format,
            key_mean=self.key_mean,
            rotate=self.rotate,
        )


def padded_head_dim(head_dim: int) -> int:
    """The smallest head dim of a kernel that is not below ``head_dim``."""
    return next(d for d in HEAD_DIMS if d >= head_dim)


@dataclass(frozen=True)
class QuantizedQKV:
    """Codes and scales of one attention.

    query: uint8 (B, H, S, D). key: uint8 (B, HK, KV, D). value: uint8 (B, HK, D, KV rounded up to 16), transposed with
    its keys in the kernels' order. D is one of HEAD_DIMS; ``head_dim`` is the caller's, without the padding.
    query_scale: float32 (B, H, blocks) with a scale for each 16 rows, or (B, H). key_scale: (B, HK, blocks) with one
    for each 128 rows, or (B, HK).
    value_scale: the same as key_scale, or (B, HK, 1, D) with a scale for each channel.
    key_mean: float32 (B, HK, D), what was subtracted from every key, or None. It changes no weight: a query's scores
    all move by the same amount, which the log-sum-exp takes back.
    dtype: that of the caller's tensors and of the output.
    mean_scores: float32 (B, H, S), the product of each query, unquantized, with key_mean, or None: what the log-sum-exp
    is given back, in ``attention(..., return_lse=True)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor
    key_scale: Tensor
    value_scale: Tensor
    key_mean: Tensor | None
    precision: str
    head_dim: int
    key_length: int
    dtype: torch.dtype
    mean_scores: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for codes that are not contiguous: kernels read them by their addresses."""
        for name in ("query", "key", "value", "query_scale", "key_scale", "value_scale"):
            tensor = getattr(self, name)
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: it is not contiguous, strides {tensor.stride()}; call .contiguous() on it")

    @property
    def format(self) -> str:
        """The number format of Q and K."""
        return PRECISIONS[self.precision]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Codes, scales and the mean, which is empty where there is none: the results of the operator ``quantize``."""
        mean = self.query_scale.new_empty(0) if self.key_mean is None else self.key_mean
        return (self.query, self.key, self.value, self.query_scale, self.key_scale, self.value_scale, mean)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises as quantize does for tensors that make no attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: a torch.Tensor is needed, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: its dtype is {x.dtype}; allowed are {', '.join(map(str, DTYPES))}")
        if x.dim() != 4:
            raise ValueError(f"{name}: its shape is {tuple(x.shape)}; (batch, heads, length, head_dim) is needed")
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: its dtype is {x.dtype}, that of query {query.dtype}; they must agree")
        if x.device != query.device:
            raise ValueError(f"{name}: it is on {x.device}, query on {query.device}; they must agree")
    if key.shape != value.shape:
        raise ValueError(f"value: its shape is {tuple(value.shape)}, that of key {tuple(key.shape)}; they must agree")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key: its shape is {tuple(key.shape)}, that of query {tuple(query.shape)}; batch and head_dim must agree"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key: it has {key.shape[1]} heads, query {query.shape[1]}; the heads of query must be a multiple of them"
        )
    head_dim = query.shape[3]
    if head_dim % 8 or not 8 <= head_dim <= HEAD_DIMS[-1]:
        raise NotImplementedError(
            f"query: its head_dim is {head_dim}; the kernels take multiples of 8 up to {HEAD_DIMS[-1]}. "
            "torch.nn.functional.scaled_dot_product_attention takes any"
        )


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raises ValueError unless ``value`` is one of those that an argument may have."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}; allowed are {', '.join(map(repr, allowed))}")
