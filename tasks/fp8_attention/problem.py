"""The attention problem: inputs, references and error bounds for the shapes of ``kernels.attention.config``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.kernels.attention.config import (
    QUERY_BLOCK,
    ROW_BLOCK,
    VALUE_FORMAT,
    AttentionConfig,
    Mask,
    Sizes,
    read_dims,
)
from greenfast.numerics.attention import (
    E4M3_POLYNOMIAL_WEIGHTS,
    E4M3_WEIGHTS,
    HALF_WEIGHTS,
    attention,
    attention_with_bounds,
    compute_scores,
)
from greenfast.numerics.formats import (
    dequantize,
    quantize,
    quantize_blocks,
    quantize_groups,
    quantize_values,
    scales_of_keys,
    transposed_values,
)
from greenfast.numerics.inputs import VARIANTS as VARIANTS
from greenfast.numerics.inputs import standard_normal, varied
from greenfast.spec.problem import Array, Case, OutputSpec, References

#: What the log-sum-exp is multiplied by where it is compared, and its value for a row without a key.
_SUM_UNIT, _NO_KEY = 2.0**-8, -100.0


def _tensors(config: AttentionConfig, sizes: Sizes, seed: int, variant: str = "normal") -> list[Tensor]:
    """Unquantized q (batch * heads, q_len, head_dim), k and v (batch * kv_heads, kv_len, head_dim), float16."""
    q_shape = (sizes.batch * sizes.heads, sizes.q_len, config.head_dim)
    kv_shape = (sizes.batch * sizes.kv_heads, sizes.kv_len, config.head_dim)
    if q_shape == kv_shape:  # as the ladder draws its inputs, together
        return varied(standard_normal(q_shape, 3, seed), variant, seed)
    apart = [*standard_normal(q_shape, 1, seed), *standard_normal(kv_shape, 2, seed + 1_000_000)]
    return varied(apart, variant, seed)


def mask_of(mask: Mask, sizes: Sizes) -> Tensor | None:
    """Return the mask (q_len, kv_len), True if a query attends to a key; None without a mask."""
    if mask == Mask.NONE:
        return None
    return torch.arange(sizes.kv_len) <= torch.arange(sizes.q_len).unsqueeze(1) + sizes.shift(mask)


def _rows_of_a_scale(config: AttentionConfig) -> dict[str, int]:
    """Return how many rows of q, k and v share a scale; 0: all rows of a head (v: of a channel, k: of a group)."""
    return {
        "q": {"head": 0, "block": QUERY_BLOCK, "fine": 1}[config.query_scales],
        "k": ROW_BLOCK if config.key_scales == "block" else 0,
        "v": ROW_BLOCK if config.value_scales == "block" else 0,
    }


def quantized(tensors: list[Tensor], config: AttentionConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Quantize q, k and v at the config's granularity."""
    found = {}
    for (name, rows), x in zip(_rows_of_a_scale(config).items(), tensors, strict=True):
        of = VALUE_FORMAT if name == "v" else config.format
        if name == "v" and config.value_scales == "channel":
            found[name] = quantize_values(x, of)
        elif name == "k" and config.key_scales == "fine":
            found[name] = quantize_groups(x, of)
        else:
            found[name] = quantize_blocks(x, of, rows) if rows else quantize(x, of)
    return found


@lru_cache(maxsize=1)  # a case is made, then its references
def _quantized_inputs(
    config: AttentionConfig, sizes: Sizes, seed: int, variant: str
) -> tuple[list[Tensor], dict[str, tuple[Tensor, Tensor]]]:
    tensors = _tensors(config, sizes, seed, variant)
    return tensors, quantized(tensors, config)


def dequantized(codes: Mapping[str, tuple[Tensor, Tensor]], config: AttentionConfig) -> list[Tensor]:
    """The values of the codes and scales of q, k and v, in float64."""
    rows = _rows_of_a_scale(config)
    found = []
    for name, (code, scale) in codes.items():
        unit = dequantize(code, torch.ones(len(code)), VALUE_FORMAT if name == "v" else config.format)
        if rows[name]:
            each = scale.double().repeat_interleave(rows[name], 1)[:, : code.shape[1], None]
        elif name == "v" and config.value_scales == "channel":
            each = scale.double()[:, None, :]
        elif name == "k" and config.key_scales == "fine":
            each = scales_of_keys(scale.double(), code.shape[1]).unsqueeze(2)
        else:
            each = scale.double()[:, None, None]
        found.append(unit * each)
    return found


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Codes q, k, v (uint8), v_t (V transposed, see transposed_values) and float32 scales; output out, optionally lse.

    out is float16, or with BF16 bfloat16 bits as uint16; lse is float32.
    """
    inputs: dict[str, Array] = {}
    config, sizes = read_dims(dims, fmt)
    for name, (codes, scale) in _quantized_inputs(config, sizes, seed, variant)[1].items():
        inputs[name] = codes.numpy().copy()
        inputs[f"{name}_scale"] = scale.numpy().copy()
        if name == "v":
            inputs["v_t"] = transposed_values(codes).numpy()
    return Case(inputs, output_specs(config, sizes))


def output_specs(config: AttentionConfig, sizes: Sizes) -> dict[str, OutputSpec]:
    """The outputs of an attention."""
    rows = (sizes.batch * sizes.heads, sizes.q_len)
    specs = {"out": OutputSpec((*rows, config.head_dim), "uint16" if config.dtype == "bfloat16" else "float16")}
    return specs | {"lse": OutputSpec(rows, "float32")} if config.log_sum_exp else specs


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """Attention on the unquantized and the dequantized inputs, and error bounds for P in half and in E4M3."""
    config, sizes = read_dims(dims, fmt)
    scale, mask = 1.0 / math.sqrt(config.head_dim), mask_of(config.mask, sizes)
    tensors, codes = _quantized_inputs(config, sizes, seed, variant)
    unquantized, exact = _per_query_head(tensors, sizes), _per_query_head(dequantized(codes, config), sizes)
    names = {"": HALF_WEIGHTS, "e4m3": E4M3_WEIGHTS, "e4m3_polynomial": E4M3_POLYNOMIAL_WEIGHTS}
    roundings = tuple(names.values())
    if not config.log_sum_exp:
        out, found = attention_with_bounds(*exact, scale, mask, roundings, config.softcap)
        full = attention(*unquantized, scale, mask, config.softcap).numpy()
        bounds = {name: bound.numpy() for name, bound in zip(names, found, strict=True)}
        return References(full=full, exact=out.numpy(), bound=bounds.pop(""), bounds=bounds)
    # A column of ones in V: the bound on it is at least the error of a row's sum, relative to that sum.
    q, k, v = exact
    out, found = attention_with_bounds(
        q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), scale, mask, roundings, config.softcap
    )
    sums = _log_sum_exp(q, k, config, sizes)
    bounds = {}
    for name, bound in zip(names, found, strict=True):
        error = bound[..., -1].numpy()
        error = error / (1 - np.minimum(error, 0.9)) + 2.0**-21 * (1 + np.abs(sums))
        error = np.where(np.isneginf(sums), 0.0, error)
        bounds[name] = np.concatenate([bound[..., :-1].numpy().ravel(), _SUM_UNIT * error.ravel()])
    return References(
        full=_joined(
            attention(*unquantized, scale, mask, config.softcap).numpy(),
            _log_sum_exp(unquantized[0], unquantized[1], config, sizes),
        ),
        exact=_joined(out[..., :-1].numpy(), sums),
        bound=bounds.pop(""),
        bounds=bounds,
        sizes=(out[..., :-1].numel(), sums.size),
    )


def _joined(out: NDArray[np.float64], sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The output and the log-sum-exp, flat. The latter is scaled so that the former decides the relative error.

    A row without a key has _NO_KEY in place of minus infinity.
    """
    sums = np.where(np.isneginf(sums), _NO_KEY, sums)
    return np.concatenate([out.ravel(), _SUM_UNIT * sums.ravel()])


def _per_query_head(tensors: list[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors
    share = sizes.heads // sizes.kv_heads
    return q, k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)


def log_sum_exp(dims: Mapping[str, int], seed: int, fmt: str) -> NDArray[np.float64]:
    """The reference for ``lse``, (batch * heads, q_len): natural logarithm, -inf for a row that attends to no key."""
    config, sizes = read_dims(dims, fmt)
    q, k, _ = _per_query_head(dequantized(_quantized_inputs(config, sizes, seed, "normal")[1], config), sizes)
    return _log_sum_exp(q, k, config, sizes)


def _log_sum_exp(q: Tensor, k: Tensor, config: AttentionConfig, sizes: Sizes) -> NDArray[np.float64]:
    scores = compute_scores(q, k, 1.0 / math.sqrt(config.head_dim), config.softcap)
    mask = mask_of(config.mask, sizes)
    found: NDArray[np.float64] = torch.logsumexp(
        scores if mask is None else scores.masked_fill(~mask, -math.inf), -1
    ).numpy()
    return found


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (batch * heads, q_len, head_dim); with a log-sum-exp both, flat (``_joined``)."""
    out = outputs["out"]
    if out.dtype == np.uint16:  # bfloat16
        out = (out.astype(np.uint32) << 16).view(np.float32)
    values = out.astype(np.float64)
    return _joined(values, outputs["lse"].astype(np.float64)) if "lse" in outputs else values


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Two products of 2 D operations and one exponential for each unmasked score."""
    config, sizes = read_dims(dims, VALUE_FORMAT)
    mask = mask_of(config.mask, sizes)
    per_head = sizes.q_len * sizes.kv_len if mask is None else int(mask.sum())
    scores = sizes.batch * sizes.heads * per_head
    return {"matrix_flops": 4 * scores * config.head_dim, "exponentials": scores}
