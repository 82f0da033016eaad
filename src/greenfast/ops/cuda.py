"""The operators on a GPU: which kernels a call takes, their memory, and launches that are prepared once per shape.

What a call needs is looked up by shapes, strides and dtypes, and checked once for each combination; then it costs the
host two allocations and its launches. Calls that skip the dispatcher are found at their entry already, by ``Repeats``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention import ada, family, hopper
from greenfast.kernels.attention.config import (
    KEY_GROUPS,
    QUERY_BLOCK,
    ROW_BLOCK,
    AttentionConfig,
    Mask,
    Sizes,
    Strides,
    padded_keys,
)
from greenfast.kernels.quantize import qkv
from greenfast.ops import reference
from greenfast.ops.launch_plans import ALIGNMENT, LaunchPlan, LaunchStep, get_target, put_bounded
from greenfast.ops.layout import empty_rows, is_aligned, make_tma_compatible, row_strides
from greenfast.ops.quantized import FINE, build_config, check_tensors
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice

_MAX_PLANS = 4096
_PLANS: dict[tuple[Any, ...], LaunchPlan] = {}
_ATTENTION_BUFFERS = ("q_codes", "k_codes", "v_codes", "q_scale", "k_scale", "v_scale", "out", "lse")

_build_config = lru_cache(maxsize=1024)(build_config)  # eager calls repeat their options; making a config takes longer

Shape = tuple[int, ...]


def choose_kernel(target: Target, config: AttentionConfig, sizes: Sizes) -> Choice:
    """The attention kernel for a call. Raises NotImplementedError where there is none."""
    try:
        choice = family.choose_kernel(target, config, sizes)
    except UsageError as e:
        raise NotImplementedError(str(e)) from None
    if choice.rung not in ("hopper", "ada"):
        raise NotImplementedError(
            f"greenfast's operator has kernels for compute capability 8.9 and up, this is {target.name}; "
            "torch.nn.functional.scaled_dot_product_attention runs there"
        )
    return choice


def build_sdpa_config(
    target: Target, head_dim: int, dtype: torch.dtype, precision: str, mask: int, *, lse: bool = False
) -> AttentionConfig:
    """How ``sdpa`` computes on a target: block scales where the kernel reads them, and then Q quantized inside it.

    Raises NotImplementedError for a precision that the target has no kernel for.
    """
    blocks = target.name == hopper.TARGET.name
    if precision == FINE and not blocks:
        raise NotImplementedError(
            f"precision: {FINE!r} has kernels for Hopper GPUs, this is {target.name}; 'int8' runs"
        )
    config = build_config(head_dim, dtype, precision, blocks, "block" if blocks else "head")
    return replace(config, mask=Mask(mask), log_sum_exp=lse, fuse_q_quant=blocks)


def get_sizes(query: Shape, key: Shape) -> Sizes:
    """The sizes of a call on tensors, or codes of K, of these shapes."""
    return Sizes(query[0], query[1], key[1], query[2], key[2])


def build_quantize_step(query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig) -> LaunchStep:
    """The launch that quantizes tensors like these."""
    sizes = get_sizes(query.shape, key.shape)
    strides = Strides(query.stride()[:3], key.stride()[:3], value.stride()[:3])
    return LaunchStep(qkv.kernel(config, sizes), qkv.launch(config, sizes, strides))


def build_attention_step(
    config: AttentionConfig,
    sizes: Sizes,
    scale: float,
    target: Target,
    strides: Strides = Strides(),  # noqa: B008
) -> LaunchStep:
    """The launch that computes attention on codes of K and V, and on codes of Q or unquantized Q with these strides."""
    names = {"k": "k_codes", "v_t": "v_codes"} | ({} if config.fuse_q_quant else {"q": "q_codes"})
    if choose_kernel(target, config, sizes).rung == "ada":
        return LaunchStep(ada.kernel(config), ada.launch(config, sizes, scale, strides), names)
    size = target.multiprocessors
    source, launch = hopper.kernel(config, sizes, size), hopper.launch(config, sizes, scale, strides, size)
    return LaunchStep(source, launch, names)


def build_sdpa_steps(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, scale: float, target: Target
) -> tuple[LaunchStep, LaunchStep]:
    """The launches of ``sdpa`` on tensors like these: quantization, and attention, which quantizes Q where it can."""
    strides = Strides(query=query.stride()[:3], out=row_strides(query, query.shape[3])[:3])
    attending = build_attention_step(config, get_sizes(query.shape, key.shape), scale, target, strides)
    return build_quantize_step(query, key, value, config), attending


def get_quantized_shapes(query: Shape, key: Shape, config: AttentionConfig) -> dict[str, Shape]:
    """Shapes of the codes (uint8) and scales and mean (float32) of tensors of these shapes."""
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query, key
    padded, blocks = config.head_dim, -(-kv_len // ROW_BLOCK)
    of_queries: dict[str, Shape] = {"block": (-(-q_len // QUERY_BLOCK),), "head": (), "fine": (q_len,)}
    of_keys: dict[str, Shape] = {"block": (blocks,), "head": (), "fine": (blocks, KEY_GROUPS)}
    of_values: dict[str, Shape] = {"block": (blocks,), "head": (), "channel": (1, padded)}
    return {
        "q_codes": (batch, heads, q_len, padded),
        "k_codes": (batch, kv_heads, kv_len, padded),
        "v_codes": (batch, kv_heads, padded, padded_keys(kv_len)),
        "q_scale": (batch, heads, *of_queries[config.query_scales]),
        "k_scale": (batch, kv_heads, *of_keys[config.key_scales]),
        "v_scale": (batch, kv_heads, *of_values[config.value_scales]),
        "k_mean": (batch, kv_heads, padded) if config.key_mean else (0,),
    }


def get_buffer_dtype(name: str) -> torch.dtype:
    """The dtype of a buffer of ``get_quantized_shapes``."""
    return torch.uint8 if name.endswith("codes") else torch.float32


def quantize(
    query: Tensor, key: Tensor, value: Tensor, precision: str, blocks: bool, values: str, key_mean: bool, rotate: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``torch.ops.greenfast.quantize`` of CUDA tensors."""
    check_tensors(query, key, value)
    choices = (query.shape[3], query.dtype, precision, blocks, values, key_mean, rotate)
    config = _build_config(*choices)
    if query.numel() == 0 or key.numel() == 0 or values != "block":
        return reference.quantize(query, key, value, config).tensors()
    device = query.get_device()
    query, key, value = make_tma_compatible(query), make_tma_compatible(key), make_tma_compatible(value)
    shapes = get_quantized_shapes(query.shape, key.shape, config)
    found = {name: query.new_empty(shape, dtype=get_buffer_dtype(name)) for name, shape in shapes.items()}
    given = (query, key, value)
    at = (choices, device, *(x.shape for x in given), *(x.stride() for x in given))
    plan = _PLANS.get(at)
    if plan is None:
        step = build_quantize_step(query, key, value, config)
        plan = put_bounded(_PLANS, at, LaunchPlan(device, (step,), ("q", "k", "v", *found)), _MAX_PLANS)
    plan.launch([x.data_ptr() for x in (*given, *found.values())])
    return tuple(found.values())


def attention(query: Tensor, *rest: Any) -> Tensor:
    """``torch.ops.greenfast.attention`` of CUDA tensors."""
    return _attention(False, query, *rest)[0]


def attention_lse(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.greenfast.attention_lse`` of CUDA tensors; keys are without their mean."""
    return _attention(True, query, *rest)


def _attention(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    precision: str, head_dim: int, key_length: int, dtype: torch.dtype, causal: int, scale: float,
    strides: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """strides: of the output, which is contiguous by default."""
    device, shape = query.get_device(), query.shape
    out_shape = (*shape[:3], head_dim)
    if strides is None:
        out = query.new_empty(out_shape, dtype=dtype)
    else:
        out = query.new_empty_strided(out_shape, strides, dtype=dtype)
    sums = query.new_empty(shape[:3], dtype=torch.float32) if lse else query_scale
    at = (
        "codes", shape, key.shape, query_scale.shape, key_scale.shape, value_scale.shape, head_dim, key_length,
        precision, dtype, causal, scale, lse, device, strides,
    )  # fmt: skip
    plan = _PLANS.get(at)
    if plan is None:
        if out.numel() == 0 or key_length == 0:
            return _fill_without_keys(out, sums)
        blocks, values = query_scale.dim() == 3, {2: "head", 3: "block", 4: "channel"}[value_scale.dim()]
        config = build_config(head_dim, dtype, precision, blocks, values)
        config = replace(config, mask=Mask(causal), log_sum_exp=lse)
        sizes, rows = get_sizes(shape, (*key.shape[:2], key_length)), Strides(out=out.stride()[:3])
        step = build_attention_step(config, sizes, scale, get_target(device), rows)
        plan = put_bounded(_PLANS, at, LaunchPlan(device, (step,), _ATTENTION_BUFFERS), _MAX_PLANS)
    codes = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not is_aligned(codes[0] | codes[1] | codes[2]):
        return _attention(
            lse, query.clone(), key.clone(), value.clone(), query_scale, key_scale, value_scale, precision, head_dim,
            key_length, dtype, causal, scale, strides,
        )  # fmt: skip
    plan.launch([*codes, *[x.data_ptr() for x in (query_scale, key_scale, value_scale, out, sums)]])
    return out, sums


def _fill_without_keys(out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The results where there are no keys: zeros, and a log-sum-exp of -inf."""
    return out.zero_(), torch.full_like(sums, -float("inf"))


def sdpa(query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float) -> Tensor:
    """``torch.ops.greenfast.sdpa`` of CUDA tensors."""
    return _sdpa(False, query, key, value, precision, causal, scale)[0]


def sdpa_lse(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``torch.ops.greenfast.sdpa_lse`` of CUDA tensors."""
    out, more = _sdpa(True, query, key, value, precision, causal, scale)
    if len(more) == 1:
        return out, more[0]
    lse, mean = more  # the log-sum-exp of scores without the mean of the keys; that mean, which the kernel has rotated
    return out, reference.add_mean_scores(lse, reference.compute_mean_scores(query, mean, rotated=True), causal, scale)


def get_sdpa_plan(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> LaunchPlan | None:
    """What ``sdpa`` launched for such tensors, if it took them as they are."""
    return _PLANS.get(_plan_key(False, query, key, value, precision, causal, scale))


def replay_sdpa(plan: LaunchPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """``sdpa`` by a plan for such tensors; None where their addresses need a copy."""
    q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not is_aligned(q | k | v):
        return None
    if query.stride() == plan.out_strides:
        out = torch.empty_like(query)  # at half the cost of the other
    else:
        out = query.new_empty_strided(query.shape, plan.out_strides)
    plan.launch((q, k, v, out.data_ptr()))
    return out


def _plan_key(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Any, ...]:
    return (
        lse, precision, causal, scale, query.get_device(), key.get_device(), value.get_device(), query.dtype, key.dtype,
        value.dtype, query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
    )  # fmt: skip


def _sdpa(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and with ``lse`` the log-sum-exp and the mean of the keys as the kernels write them."""
    device, shape = query.get_device(), query.shape
    try:
        at = _plan_key(lse, query, key, value, precision, causal, scale)
    except RuntimeError:  # sparse
        check_tensors(query, key, value)
        raise
    plan = _PLANS.get(at)
    if plan is None:
        check_tensors(query, key, value)
        if query.numel() == 0 or key.numel() == 0:
            return empty_rows(query, shape[3]).zero_(), (query.new_full(shape[:3], -float("inf"), dtype=torch.float32),)
        q, k, v = make_tma_compatible(query, unique_rows=True), make_tma_compatible(key), make_tma_compatible(value)
        if q is not query or k is not key or v is not value:
            return _sdpa(lse, q, k, v, precision, causal, scale)
        config = build_sdpa_config(get_target(device), shape[3], query.dtype, precision, causal, lse=lse)
        if config.key_scales == "head":
            return _sdpa_unfused(query, key, value, config, scale)
        plan = put_bounded(_PLANS, at, _build_sdpa_plan(query, key, value, config, scale), _MAX_PLANS)
    given = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not is_aligned(given[0] | given[1] | given[2]):
        return _sdpa(
            lse,
            make_tma_compatible(query),
            make_tma_compatible(key),
            make_tma_compatible(value),
            precision,
            causal,
            scale,
        )
    out = query.new_empty_strided(shape, plan.out_strides)
    more: tuple[Tensor, ...] = ()
    if lse:
        sums = query.new_empty(shape[:3], dtype=torch.float32)
        more = (sums, query.new_empty((*key.shape[:2], plan.head_dim), dtype=torch.float32))
    plan.launch([*given, out.data_ptr(), *[x.data_ptr() for x in more]])
    return out, more


def _sdpa_unfused(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``_sdpa`` where the attention kernel takes one scale per head, which PyTorch computes in several passes."""
    choose_kernel(get_target(query.get_device()), config, get_sizes(query.shape, key.shape))  # before any work is done
    codes, lse = reference.quantize(query, key, value, config), config.log_sum_exp
    out, sums = _attention(
        lse, codes.query, codes.key, codes.value, codes.query_scale, codes.key_scale, codes.value_scale,
        codes.precision, query.shape[3], key.shape[2], query.dtype, int(config.mask), scale,
        row_strides(query, query.shape[3]),
    )  # fmt: skip
    return out, (sums, codes.tensors()[-1]) if lse else ()


def _build_sdpa_plan(query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, scale: float) -> LaunchPlan:
    """Quantization, then attention, with the codes in a workspace."""
    device = query.get_device()
    steps = build_sdpa_steps(query, key, value, config, scale, get_target(device))
    used = set().union(*(step.buffers() for step in steps))
    work, size = {}, 0
    for name, shape in get_quantized_shapes(query.shape, key.shape, config).items():
        if name not in used or (config.log_sum_exp and name == "k_mean"):
            continue  # the attention kernel quantizes Q, or the caller allocates the mean
        work[name] = size
        size += -(-torch.Size(shape).numel() * get_buffer_dtype(name).itemsize // ALIGNMENT) * ALIGNMENT
    strides = row_strides(query, config.columns)
    names = ("q", "k", "v", "out", *(("lse", "k_mean") if config.log_sum_exp else ()))
    return LaunchPlan(device, steps, names, work, size, config.head_dim, strides)
