"""Q, K and V as the kernels take them, and how a caller's tensors become that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from greenfast.families.fast_problem import (
    KEY_BLOCK,
    VALUE_FORMAT,
    quantize_keys,
    quantize_values,
    transposed_values,
)
from greenfast.numerics import formats

#: Precision -> the format of Q and K; V is E4M3 in each.
PRECISIONS = {"fp8": "e4m3", "int8": "int8"}
#: Head dims of the kernels; others are padded with zeros to the next of them.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Scales = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class QuantizedQKV:
    """Codes and scales of one attention.

    query: uint8 (B, H, S, D). key: uint8 (B, HK, KV, D). value: uint8 (B, HK, D, KV rounded up to 16), transposed with
    its keys in the kernels' order. D is one of HEAD_DIMS; ``head_dim`` is the caller's, without the padding.
    query_scale: float32 (B, H). key_scale: (B, HK), or (B, HK, blocks) with a scale for each KEY_BLOCK keys.
    value_scale: (B, HK), or (B, HK, D) with a scale for each channel.
    key_mean: float32 (B, HK, D), what was subtracted from every key, or None. It changes no weight: a query's scores
    all move by the same amount, which the log-sum-exp takes back.
    dtype: that of the caller's tensors and of the output.
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

    @property
    def format(self) -> str:
        """The number format of Q and K."""
        return PRECISIONS[self.precision]


def quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    precision: Literal["fp8", "int8"] = "fp8",
    key_scales: Literal["head", "block"] = "head",
    value_scales: Literal["head", "channel"] = "head",
    subtract_key_mean: bool = False,
    rotate: bool = False,
) -> QuantizedQKV:
    """Quantize attention inputs, for callers who keep them.

    query: (B, H, S, D); key and value: (B, HK, KV, D) with HK a divisor of H; float16, bfloat16 or float32, of any
    strides, D a multiple of 8 up to 256. precision: "fp8" is E4M3 for Q, K and V, "int8" int8 for Q and K. key_scales:
    one per head, or one for each 128 keys. value_scales: one per head, or one per channel.
    subtract_key_mean: takes the mean over the keys from each channel of K, which changes no weight; it helps where
    channels are biased (SageAttention, Zhang et al. 2024). rotate: multiplies Q and K by a Hadamard matrix, which
    changes no score and spreads outliers over all channels (QuaRot, Ashkboos et al. 2024).

    Raises TypeError for what is no floating tensor of these dtypes, ValueError for shapes, devices and choices that do
    not fit, NotImplementedError for a head dim that no kernel has, UsageError for values that are not finite.
    """
    check_tensors(query, key, value)
    _check_choice("precision", precision, tuple(PRECISIONS))
    _check_choice("key_scales", key_scales, ("head", "block"))
    _check_choice("value_scales", value_scales, ("head", "channel"))
    head_dim = query.shape[-1]
    padding = next(d for d in HEAD_DIMS if d >= head_dim) - head_dim
    q, k, v = (torch.nn.functional.pad(x.float(), (0, padding)) for x in (query, key, value))
    mean = None
    if subtract_key_mean and k.shape[2] > 0:
        mean = k.mean(dim=2)
        k = k - mean.unsqueeze(2)
    if rotate:
        matrix = hadamard(q.shape[-1]).to(q.device)
        q, k = q @ matrix, k @ matrix
        mean = None if mean is None else mean @ matrix
    fmt = PRECISIONS[precision]

    def whole(x: Tensor, number: str) -> Scales:
        return formats.quantize(x, number)

    k_codes, k_scale = _per_head(k, quantize_keys if key_scales == "block" else whole, fmt)
    v_codes, v_scale = _per_head(v, quantize_values if value_scales == "channel" else whole, VALUE_FORMAT)
    q_codes, q_scale = _per_head(q, whole, fmt)
    batch, kv_heads = v.shape[:2]
    v_t = transposed_values(v_codes.flatten(0, 1))
    return QuantizedQKV(
        query=q_codes,
        key=k_codes,
        value=v_t.view(batch, kv_heads, *v_t.shape[1:]),
        query_scale=q_scale,
        key_scale=k_scale,
        value_scale=v_scale,
        key_mean=mean,
        precision=precision,
        head_dim=head_dim,
        key_length=key.shape[2],
        dtype=query.dtype,
    )


def _per_head(x: Tensor, quantizer: Callable[[Tensor, str], Scales], fmt: str) -> Scales:
    """Codes (B, H, length, D) and scales (B, H, ...) of x (B, H, length, D); scales (B, H) where x has no element."""
    if x.numel() == 0:
        return torch.zeros_like(x, dtype=torch.uint8), torch.ones(x.shape[:2], device=x.device)
    codes, scale = quantizer(x.flatten(0, 1), fmt)
    return codes.view(x.shape), scale.view(*x.shape[:2], *scale.shape[1:])


def hadamard(size: int) -> Tensor:
    """The orthogonal Hadamard matrix of Sylvester's construction, float32 (size, size); size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def dequantized_keys(quantized: QuantizedQKV) -> Tensor:
    """What the codes of K stand for, float32 (B, HK, KV, D), without the mean."""
    scale = quantized.key_scale
    each = (
        scale.unsqueeze(-1) if scale.dim() == 2 else scale.repeat_interleave(KEY_BLOCK, -1)[..., : quantized.key_length]
    )
    return _values(quantized.key, quantized.format) * each.unsqueeze(-1)


def dequantized_queries(quantized: QuantizedQKV) -> Tensor:
    """What the codes of Q stand for, float32 (B, H, S, D)."""
    return _values(quantized.query, quantized.format) * quantized.query_scale[..., None, None]


def _values(codes: Tensor, fmt: str) -> Tensor:
    return codes.view(torch.float8_e4m3fn if fmt == "e4m3" else torch.int8).float()


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


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}; allowed are {', '.join(map(repr, allowed))}")
