"""Attention as PyTorch users call it: on their tensors, or on codes that they keep."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from greenfast.operator import cuda, ops
from greenfast.operator.quantized import PRECISIONS, QuantizedQKV, check_choice, check_tensors

Precision = Literal["fp8", "int8"]
Alignment = Literal["upper_left", "lower_right"]

_overridden: Any = handle_torch_function  # for subclasses of Tensor, modes, and torch.fx, which traces the call so
_CAUSAL = {"upper_left": 1, "lower_right": 2}
_ALTERNATIVE = "torch.nn.functional.scaled_dot_product_attention has it"


@overload
def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, precision: Precision = ...,
    causal_alignment: Alignment = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, precision: Precision = ...,
    causal_alignment: Alignment = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: Precision = "fp8",
    causal_alignment: Alignment = "upper_left",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FP8 attention with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    query: (B, H, S, D); key and value: (B, HK, KV, D), where HK divides H with ``enable_gqa`` and is H without; float16
    or bfloat16, of any strides, D a multiple of 8 up to 256. is_causal: query i attends to keys 0 .. i; with
    ``causal_alignment="lower_right"`` to keys 0 .. i + KV - S. scale: positive, 1 / sqrt(D) by default.
    precision: "fp8" computes both products in E4M3, "int8" Q K^T in int8 and P V in E4M3. Q and K are rotated by a
    Hadamard matrix, and the mean of K is subtracted, before they are quantized: neither changes the result.

    Returns (B, H, S, D) of the inputs' dtype; with ``return_lse`` also the natural log-sum-exp of each row's scores,
    float32 (B, H, S). A row that attends to nothing is 0, its log-sum-exp -inf. NaN or infinity in a query makes its
    block of 16 rows NaN, in a key or value the rows that attend to its block of 128, and some beside them. Gradients
    are those of attention on the unquantized tensors, which the backward pass computes again in 16 bits; there is no
    forward mode and no second derivative, and a gradient that reaches the log-sum-exp raises NotImplementedError.

    Raises TypeError for dtypes, ValueError for shapes, devices and choices that do not fit, and NotImplementedError for
    ``attn_mask``, ``dropout_p``, head dims and GPUs that no kernel is for; each names the argument and what is allowed.
    """
    if has_torch_function_variadic(query, key, value):
        return _overridden(  # type: ignore[no-any-return]
            sdpa, (query, key, value), query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            precision=precision, causal_alignment=causal_alignment, return_lse=return_lse,
        )  # fmt: skip
    if attn_mask is not None or dropout_p or precision not in PRECISIONS:
        _refuse(attn_mask, dropout_p, precision)
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() != 4 or key.dim() != 4:
        check_tensors(query, key, value)
    shape = query.shape
    if not enable_gqa and shape[1] != key.shape[1]:
        raise ValueError(
            f"key: it has {key.shape[1]} heads, query {shape[1]}; enable_gqa=True lets query heads share them"
        )
    device = "cuda" if query.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(ops.autocast_dtype(x)) for x in (query, key, value))
    factor = _factor(scale, shape[3])
    causal = causal_of(is_causal, causal_alignment)
    if return_lse:
        found: tuple[Tensor, Tensor] = ops.SDPA_LSE(query, key, value, precision, causal, factor)
        return found
    op = cuda.sdpa if ops.undisturbed(query, key, value) else ops.SDPA
    return op(query, key, value, precision, causal, factor)


def quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    precision: Precision = "fp8",
    scales: Literal["block", "head"] = "block",
    value_scales: Literal["block", "head", "channel"] | None = None,
    subtract_key_mean: bool = True,
    rotate: bool = True,
    log_sum_exp: bool = False,
) -> QuantizedQKV:
    """Quantize attention inputs, for callers who keep them.

    query: (B, H, S, D); key and value: (B, HK, KV, D) with HK a divisor of H; float16 or bfloat16, of any strides, D a
    multiple of 8 up to 256. precision: "fp8" is E4M3 for Q, K and V, "int8" int8 for Q and K. scales: "block"
    gives each 16 rows of Q and each 128 of K one, "head" each head. value_scales: of V, "block" for each 128 keys,
    "head", or "channel" for each channel of a head; by default as ``scales``. One kernel quantizes where all scales are
    of blocks, else PyTorch in several passes.
    subtract_key_mean: takes from every key the mean of 32 of them, which changes no weight; it helps where channels are
    biased (SageAttention, Zhang et al. 2024, with the mean of all). rotate: multiplies Q and K by a Hadamard matrix,
    which changes no score and spreads outliers over all channels (QuaRot, Ashkboos et al. 2024). log_sum_exp: also
    keeps what ``attention(..., return_lse=True)`` adds back for the mean, which takes one more pass over Q. A gradient
    that reaches the results raises NotImplementedError in the backward pass.

    Raises TypeError for what is no floating tensor of these dtypes, ValueError for shapes, devices and choices that do
    not fit, NotImplementedError for a head dim that no kernel has.
    """
    if has_torch_function_variadic(query, key, value):
        return _overridden(  # type: ignore[no-any-return]
            quantize, (query, key, value), query, key, value, precision=precision, scales=scales,
            value_scales=value_scales, subtract_key_mean=subtract_key_mean, rotate=rotate, log_sum_exp=log_sum_exp,
        )  # fmt: skip
    check_choice("precision", precision, PRECISIONS)
    check_choice("scales", scales, ("block", "head"))
    values = scales if value_scales is None else value_scales
    check_tensors(query, key, value)
    q, k, v, q_scale, k_scale, v_scale, mean = ops.QUANTIZE(
        query, key, value, precision, scales == "block", values, subtract_key_mean, rotate
    )
    return QuantizedQKV(
        query=q,
        key=k,
        value=v,
        query_scale=q_scale,
        key_scale=k_scale,
        value_scale=v_scale,
        key_mean=mean if subtract_key_mean else None,
        precision=precision,
        head_dim=query.shape[3],
        key_length=key.shape[2],
        dtype=query.dtype,
        mean_scores=ops.MEAN_SCORES(query, mean, rotate) if log_sum_exp and subtract_key_mean else None,
    )


@overload
def attention(
    quantized: QuantizedQKV, *, is_causal: bool = ..., causal_alignment: Alignment = ..., scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    quantized: QuantizedQKV, *, is_causal: bool = ..., causal_alignment: Alignment = ..., scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    quantized: QuantizedQKV,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "upper_left",
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V of quantized inputs; arguments, results and errors are those of ``sdpa``.

    return_lse: raises ValueError for codes that ``quantize`` took the mean of the keys from without ``log_sum_exp``. A
    gradient that reaches the results raises NotImplementedError in the backward pass: none flows to codes.
    """
    if has_torch_function_variadic(quantized):
        return _overridden(  # type: ignore[no-any-return]
            attention, (quantized,), quantized, is_causal=is_causal, causal_alignment=causal_alignment, scale=scale,
            return_lse=return_lse,
        )  # fmt: skip
    factor = _factor(scale, quantized.head_dim)
    causal = causal_of(is_causal, causal_alignment)
    args = (
        quantized.query, quantized.key, quantized.value, quantized.query_scale, quantized.key_scale,
        quantized.value_scale, quantized.precision, quantized.head_dim, quantized.key_length, quantized.dtype, causal,
        factor,
    )  # fmt: skip
    if not return_lse:
        op = cuda.attention if ops.undisturbed(*args[:6]) else ops.ATTENTION
        return op(*args)
    if quantized.key_mean is not None and quantized.mean_scores is None:
        raise ValueError(
            "return_lse: these codes lack what the mean of the keys adds to each row's scores; quantize with "
            "log_sum_exp=True, or with subtract_key_mean=False"
        )
    out, lse = ops.ATTENTION_LSE(*args)
    return out, lse if quantized.mean_scores is None else lse + quantized.mean_scores * factor


def _refuse(attn_mask: Tensor | None, dropout_p: float, precision: str) -> None:
    if attn_mask is not None:
        raise NotImplementedError(f"attn_mask: the FP8 kernels know causal masks alone; {_ALTERNATIVE}")
    if dropout_p:
        raise NotImplementedError(f"dropout_p: {dropout_p}; the FP8 kernels have no dropout; {_ALTERNATIVE}")
    check_choice("precision", precision, PRECISIONS)


def _factor(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    factor = float(scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(f"scale: {scale}; a positive, finite number is needed")
    return factor


def causal_of(is_causal: bool, alignment: str) -> int:
    """The mask as CAUSAL of ``fast_problem``. Raises ValueError for an alignment that there is not."""
    check_choice("causal_alignment", alignment, _CAUSAL)
    return _CAUSAL[alignment] if is_causal else 0
