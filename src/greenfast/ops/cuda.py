"""The operators on a GPU: kernel choice, memory, and launch plans per shape.

A call looks up its plan by shapes, strides and dtypes. It is checked once for each combination. Then it costs the host
two allocations and its launches. Calls that skip the dispatcher are found earlier, in ``CallCache``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention import ada, choice, hopper, packed, schedule
from greenfast.kernels.attention import block_mask as mask_kernels
from greenfast.kernels.attention.config import (
    KEY_GROUPS,
    QUERY_BLOCK,
    ROW_BLOCK,
    AttentionConfig,
    Mask,
    MaskLists,
    Sizes,
    Strides,
    padded_keys,
)
from greenfast.kernels.attention.heuristics import Tiling, tiling
from greenfast.kernels.quantize import qkv
from greenfast.ops import reference
from greenfast.ops.arguments import MASKED_ON_HOPPER, PACKED_ON_HOPPER, has_key_mean
from greenfast.ops.launch_plans import (
    LaunchPlan,
    LaunchStep,
    build_plan,
    get_target,
    put_bounded,
    require_hopper,
)
from greenfast.ops.layout import (
    allocate_mask,
    empty_rows,
    fill_without_keys,
    is_aligned,
    joined_strides,
    make_tma_compatible,
    row_strides,
)
from greenfast.ops.quantized import FINE, build_config, check_tensors, pad_head_dim_size
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Choice, KernelSource, Launch

_MAX_PLANS = 4096
_PLANS: dict[tuple[Any, ...], LaunchPlan] = {}
ATTENTION_BUFFERS = ("q_codes", "k_codes", "v_codes", "q_scale", "k_scale", "v_scale", "out", "lse")

_build_config = lru_cache(maxsize=1024)(build_config)  # eager calls repeat their options

Shape = tuple[int, ...]
Extras = tuple[Tensor | None, ...]


def _make_plan_key(kind: str, stats: int, *args: Any) -> tuple[Any, ...]:
    """Return the key of the plan of an operator's call: kinds of its tensors, and its other arguments."""
    kinds = [(x.shape, x.stride(), x.dtype, x.get_device()) if isinstance(x, Tensor) else x for x in args]
    return (kind, int(stats), *kinds)


def choose_kernel(target: Target, config: AttentionConfig, sizes: Sizes) -> Choice:
    """Choose the attention kernel for a call. Raises NotImplementedError if the target has none."""
    try:
        return choice.choose_kernel(target, config, sizes)
    except UsageError as e:
        raise NotImplementedError(str(e)) from None


def build_sdpa_config(
    target: Target, head_dim: int, dtype: torch.dtype, precision: str, mask: int, *, stats: int = 0
) -> AttentionConfig:
    """Return the config of ``sdpa`` on a target: block scales and fused quantization of Q if the kernel supports them.

    stats: numbers that the kernel writes of each row: 1, the log-sum-exp; 2, also the largest score.
    Raises NotImplementedError for a precision without a kernel on the target.
    """
    blocks = target.name == hopper.TARGET.name
    if precision == FINE and not blocks:
        raise NotImplementedError(
            f"precision: {FINE!r} has kernels for Hopper GPUs, this is {target.name}; 'int8' runs"
        )
    config = build_config(head_dim, dtype, precision, blocks, "block" if blocks else "head")
    return replace(config, mask=Mask(mask), log_sum_exp=stats > 0, score_max=stats > 1, fuse_q_quant=blocks)


def get_sizes(query: Shape, key: Shape) -> Sizes:
    """Return the sizes of a call from the shapes of query and key (or quantized key)."""
    return Sizes(query[0], query[1], key[1], query[2], key[2])


def build_quantize_step(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, prologue: qkv.Prologue | None = None
) -> LaunchStep:
    """Build the launch that quantizes tensors with these shapes and strides; of two parts, these are the first ones."""
    sizes = _get_joined_sizes(query, key, prologue)
    strides = Strides(query.stride()[:3], key.stride()[:3], value.stride()[:3])
    return LaunchStep(
        qkv.kernel(config, sizes, prologue=prologue), qkv.launch(config, sizes, strides, prologue=prologue)
    )


def build_quantize_steps(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, prologue: qkv.Prologue | None
) -> tuple[LaunchStep, ...]:
    """Build the launches that normalize, rotate and quantize: one, or two if a norm is over all heads."""
    quantizing = build_quantize_step(query, key, value, config, prologue)
    if prologue is None or not prologue.across_heads:
        return (quantizing,)
    sizes, strides = get_sizes(query.shape, key.shape), Strides(query.stride()[:3], key.stride()[:3])
    kernel = qkv.norms_kernel(config, centered=prologue.centered)
    return LaunchStep(kernel, qkv.norms_launch(config, sizes, strides, prologue.eps)), quantizing


def _get_norm_bytes(query: Tensor, key: Tensor, prologue: qkv.Prologue | None) -> dict[str, int]:
    """Return the bytes of the buffers between these launches."""
    if prologue is None or not prologue.across_heads:
        return {}
    of_row = 8 if prologue.centered else 4
    return {f"{name}_moments": of_row * x.shape[0] * x.shape[2] for name, x in (("q", query), ("k", key))}


def _get_joined_sizes(query: Tensor, key: Tensor, prologue: qkv.Prologue | None) -> Sizes:
    """Return the sizes of a call, with two parts of the whole sequence. query, key: the first part."""
    sizes = get_sizes(query.shape, key.shape)
    if prologue is None or prologue.second is None:
        return sizes
    second = prologue.second
    return replace(sizes, q_len=sizes.q_len + second.q_rows, kv_len=sizes.kv_len + second.kv_rows)


def build_attention_step(
    config: AttentionConfig,
    sizes: Sizes,
    scale: float,
    target: Target,
    strides: Strides = Strides(),  # noqa: B008
) -> LaunchStep:
    """Build the launch of attention on quantized K and V. Q is quantized too, or is 16-bit with these strides."""
    names = {"k": "k_codes", "v_t": "v_codes"} | ({} if config.fuse_q_quant else {"q": "q_codes"})
    if choose_kernel(target, config, sizes).rung == "ada":
        return LaunchStep(ada.kernel(config), ada.launch(config, sizes, scale, strides), names)
    size = target.multiprocessors
    source, launch = hopper.kernel(config, sizes, size), hopper.launch(config, sizes, scale, strides, size)
    return LaunchStep(source, launch, names)


def build_sdpa_steps(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, scale: float, target: Target
) -> tuple[LaunchStep, LaunchStep]:
    """Build the launches of ``sdpa`` on tensors with these shapes and strides: quantization, then attention."""
    strides = Strides(query=query.stride()[:3], out=row_strides(query, query.shape[3])[:3])
    attending = build_attention_step(config, get_sizes(query.shape, key.shape), scale, target, strides)
    return build_quantize_step(query, key, value, config), attending


def get_quantized_shapes(query: Shape, key: Shape, config: AttentionConfig) -> dict[str, Shape]:
    """Return the shapes of the codes (uint8), the scales and the mean (float32) of tensors with these shapes."""
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query, key
    padded, blocks = config.head_dim, -(-kv_len // ROW_BLOCK)
    query_scale_shapes: dict[str, Shape] = {"block": (-(-q_len // QUERY_BLOCK),), "head": (), "fine": (q_len,)}
    key_scale_shapes: dict[str, Shape] = {"block": (blocks,), "head": (), "fine": (blocks, KEY_GROUPS)}
    value_scale_shapes: dict[str, Shape] = {"block": (blocks,), "head": (), "channel": (1, padded)}
    return {
        "q_codes": (batch, heads, q_len, padded),
        "k_codes": (batch, kv_heads, kv_len, padded),
        "v_codes": (batch, kv_heads, padded, padded_keys(kv_len)),
        "q_scale": (batch, heads, *query_scale_shapes[config.query_scales]),
        "k_scale": (batch, kv_heads, *key_scale_shapes[config.key_scales]),
        "v_scale": (batch, kv_heads, *value_scale_shapes[config.value_scales]),
        "k_mean": (batch, kv_heads, padded) if config.key_mean else (0,),
    }


def _count_code_bytes(query: Shape, key: Shape, config: AttentionConfig) -> dict[str, int]:
    """Return the bytes of the buffers of ``get_quantized_shapes``."""
    shapes = get_quantized_shapes(query, key, config)
    return {name: prod(shape) * get_buffer_dtype(name).itemsize for name, shape in shapes.items()}


def get_buffer_dtype(name: str) -> torch.dtype:
    """Return the dtype of a buffer of ``get_quantized_shapes``."""
    return torch.uint8 if name.endswith("codes") else torch.float32


def quantize(query: Tensor, key: Tensor, value: Tensor, *choices: Any) -> tuple[Tensor, ...]:
    """Compute ``torch.ops.greenfast.quantize`` of CUDA tensors. choices: its arguments after the tensors."""
    check_tensors(query, key, value)
    config = _build_config(query.shape[3], query.dtype, *choices)
    if query.numel() == 0 or key.numel() == 0 or config.value_scales != "block":
        return reference.quantize(query, key, value, config).tensors()
    compatible = make_tma_compatible(query), make_tma_compatible(key), make_tma_compatible(value)
    return quantize_block(compatible, None, *choices)


def quantize_block(tensors: Extras, prologue: qkv.Prologue | None, *choices: Any) -> tuple[Tensor, ...]:
    """Compute ``torch.ops.greenfast.quantize_block`` and ``quantize_parts`` of CUDA tensors, with scales of blocks.

    tensors: of the operator, in its order. They are checked and not empty, and kernels can read them. choices: as for
    ``quantize``.
    """
    query, key, value = _get_first_part(tensors)
    device, choices = query.get_device(), (query.shape[3], query.dtype, *choices)
    config = _build_config(*choices)
    shapes = get_quantized_shapes(*_get_joined_shapes(query, key, prologue), config)
    buffers = {name: query.new_empty(shape, dtype=get_buffer_dtype(name)) for name, shape in shapes.items()}
    plan_key = _make_plan_key("quantize", False, *tensors, prologue, *choices)
    plan = _PLANS.get(plan_key)
    if plan is None:
        names = ("q", "k", "v", *(() if prologue is None else prologue.buffers()), *buffers)
        steps = build_quantize_steps(query, key, value, config, prologue)
        built = build_plan(device, steps, names, _get_norm_bytes(query, key, prologue))
        plan = put_bounded(_PLANS, plan_key, built, _MAX_PLANS)
    plan.launch([x.data_ptr() for x in (*(x for x in tensors if x is not None), *buffers.values())])
    return tuple(buffers.values())


def _get_first_part(tensors: Extras) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors[:3]
    if query is None or key is None or value is None:
        raise AssertionError
    return query, key, value


def _get_joined_shapes(query: Tensor, key: Tensor, prologue: qkv.Prologue | None) -> tuple[Shape, Shape]:
    """Return the shapes of Q and K of a whole sequence. query, key: of its first part."""
    sizes = _get_joined_sizes(query, key, prologue)
    rows = (query, sizes.q_len), (key, sizes.kv_len)
    of_query, of_key = ((*x.shape[:2], n, x.shape[3]) for x, n in rows)
    return of_query, of_key


def attention(query: Tensor, *args: Any) -> Tensor:
    """Compute ``torch.ops.greenfast.attention`` of CUDA tensors."""
    return attend_codes(False, query, *args)[0]


def attend_codes(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    precision: str, head_dim: int, key_length: int, dtype: torch.dtype, causal: int, scale: float,
    strides: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.attention`` and ``attention_lse`` of CUDA tensors.

    strides: the strides of the output; contiguous by default. The log-sum-exp is without the mean of the keys.
    """
    device, shape = query.get_device(), query.shape
    out_shape = (*shape[:3], head_dim)
    if strides is None:
        out = query.new_empty(out_shape, dtype=dtype)
    else:
        out = query.new_empty_strided(out_shape, strides, dtype=dtype)
    sums = query.new_empty(shape[:3], dtype=torch.float32) if lse else query_scale
    plan_key = (
        "codes", shape, key.shape, query_scale.shape, key_scale.shape, value_scale.shape, head_dim, key_length,
        precision, dtype, causal, scale, lse, device, strides,
    )  # fmt: skip
    plan = _PLANS.get(plan_key)
    if plan is None:
        if out.numel() == 0 or key_length == 0:
            return fill_without_keys(out, torch.empty_like(sums))
        blocks, values = query_scale.dim() == 3, {2: "head", 3: "block", 4: "channel"}[value_scale.dim()]
        config = build_config(head_dim, dtype, precision, blocks, values)
        config = replace(config, mask=Mask(causal), log_sum_exp=lse)
        sizes, rows = get_sizes(shape, (*key.shape[:2], key_length)), Strides(out=out.stride()[:3])
        step = build_attention_step(config, sizes, scale, get_target(device), rows)
        plan = put_bounded(_PLANS, plan_key, LaunchPlan(device, (step,), ATTENTION_BUFFERS), _MAX_PLANS)
    codes = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not is_aligned(codes[0] | codes[1] | codes[2]):
        return attend_codes(
            lse, query.clone(), key.clone(), value.clone(), query_scale, key_scale, value_scale, precision, head_dim,
            key_length, dtype, causal, scale, strides,
        )  # fmt: skip
    plan.launch([*codes, *[x.data_ptr() for x in (query_scale, key_scale, value_scale, out, sums)]])
    return out, sums


def sdpa(query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float) -> Tensor:
    """Compute ``torch.ops.greenfast.sdpa`` of CUDA tensors."""
    return _sdpa(0, query, key, value, precision, causal, scale)[0]


def sdpa_lse(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ``torch.ops.greenfast.sdpa_lse`` of CUDA tensors."""
    out, extras = _sdpa(1, query, key, value, precision, causal, scale)
    if len(extras) == 1:
        return out, extras[0]
    lse, mean = extras  # log-sum-exp without the mean of the keys; the rotated mean
    return out, reference.add_mean_scores(lse, reference.compute_mean_scores(query, mean, rotated=True), causal, scale)


def sdpa_kept(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``torch.ops.greenfast.sdpa_kept`` of CUDA tensors.

    The log-sum-exp lacks the contribution of the keys' mean: computing it would take PyTorch a pass over Q in float32,
    and the backward pass adds the contribution of another mean anyway.
    """
    if bits == 8:
        require_hopper(get_target(query.get_device()), "sdpa_kept for a backward pass in 8 bits")
    stats = 2 if bits == 8 else 1
    return _add_zero_mean(query, key, *_sdpa(stats, query, key, value, precision, causal, scale))


def _add_zero_mean(
    query: Tensor, key: Tensor, out: Tensor, results: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the numbers of each row and the mean of the keys; results of no keys lack it."""
    if len(results) == 1:
        shape = (*key.shape[:2], pad_head_dim_size(query.shape[3]))
        results = (*results, query.new_zeros(shape, dtype=torch.float32))
    return out, *results  # type: ignore[return-value]


def get_sdpa_plan(
    query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> LaunchPlan | None:
    """Return the plan of ``sdpa`` for such tensors, or None if their launch needed copies."""
    return _PLANS.get(_plan_key(0, query, key, value, precision, causal, scale))


def _plan_key(
    stats: int, query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Any, ...]:
    return (
        stats, precision, causal, scale, query.get_device(), key.get_device(), value.get_device(), query.dtype,
        key.dtype, value.dtype, query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
    )  # fmt: skip


def _sdpa(
    stats: int, query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output, and with ``stats`` these of each row and the mean of the keys, as the kernels write them.

    stats: as of ``build_sdpa_config``; two are float32 (B, H, S, 2).
    """
    device, shape = query.get_device(), query.shape
    try:
        plan_key = _plan_key(stats, query, key, value, precision, causal, scale)
    except RuntimeError:  # sparse
        check_tensors(query, key, value)
        raise
    plan = _PLANS.get(plan_key)
    if plan is None:
        check_tensors(query, key, value)
        if query.numel() == 0 or key.numel() == 0:
            return empty_rows(query, shape[3]).zero_(), (_new_stats(query, stats).fill_(-float("inf")),)
        q, k, v = make_tma_compatible(query, unique_rows=True), make_tma_compatible(key), make_tma_compatible(value)
        if q is not query or k is not key or v is not value:
            return _sdpa(stats, q, k, v, precision, causal, scale)
        config = build_sdpa_config(get_target(device), shape[3], query.dtype, precision, causal, stats=stats)
        if config.key_scales == "head":
            return _sdpa_unfused(query, key, value, config, scale)
        plan = put_bounded(_PLANS, plan_key, _build_sdpa_plan(query, key, value, config, scale), _MAX_PLANS)
    addresses = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not is_aligned(addresses[0] | addresses[1] | addresses[2]):
        q, k, v = make_tma_compatible(query), make_tma_compatible(key), make_tma_compatible(value)
        return _sdpa(stats, q, k, v, precision, causal, scale)
    return _launch_attention(plan, stats, query, key, addresses)


def _launch_attention(
    plan: LaunchPlan, stats: int, query: Tensor, key: Tensor, addresses: Iterable[int]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output, and with ``stats`` these of each row and the mean of the keys. addresses: of the inputs."""
    out = query.new_empty_strided(query.shape, plan.out_strides)
    results: tuple[Tensor, ...] = ()
    if stats:
        results = (_new_stats(query, stats), query.new_empty((*key.shape[:2], plan.head_dim), dtype=torch.float32))
    plan.launch([*addresses, out.data_ptr(), *[x.data_ptr() for x in results]])
    return out, results


def _new_stats(query: Tensor, stats: int) -> Tensor:
    """Allocate the log-sum-exp, (B, H, S), or two numbers of each row, (B, H, S, 2)."""
    return query.new_empty((*query.shape[:3], 2) if stats > 1 else query.shape[:3], dtype=torch.float32)


def _sdpa_unfused(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute ``_sdpa`` with one scale per head. PyTorch quantizes in several passes."""
    choose_kernel(get_target(query.get_device()), config, get_sizes(query.shape, key.shape))  # raise before any work
    codes, lse = reference.quantize(query, key, value, config), config.log_sum_exp
    out, sums = attend_codes(
        lse, codes.query, codes.key, codes.value, codes.query_scale, codes.key_scale, codes.value_scale,
        codes.precision, query.shape[3], key.shape[2], query.dtype, int(config.mask), scale,
        row_strides(query, query.shape[3]),
    )  # fmt: skip
    return out, (sums, codes.tensors()[-1]) if lse else ()


def has_block_scales(device: int) -> bool:
    """Return whether a GPU's attention kernel reads scales of blocks."""
    return get_target(device).name == hopper.TARGET.name


def block(
    tensors: Extras, prologue: qkv.Prologue, precision: str, causal: int, scale: float
) -> tuple[Tensor, LaunchPlan]:
    """Compute ``torch.ops.greenfast.block`` and ``block_parts`` of CUDA tensors, on a GPU with scales of blocks.

    tensors: as for ``quantize_block``. Returns the plan of the launches too.
    """
    query, key, value = _get_first_part(tensors)
    plan_key = _make_plan_key("block", False, *tensors, prologue, precision, causal, scale)
    plan = _PLANS.get(plan_key)
    if plan is None:
        config = build_sdpa_config(get_target(query.get_device()), query.shape[3], query.dtype, precision, causal)
        plan = put_bounded(_PLANS, plan_key, _build_block_plan(query, key, value, config, prologue, scale), _MAX_PLANS)
    out = query.new_empty_strided(_get_joined_shapes(query, key, prologue)[0], plan.out_strides)
    plan.launch([x.data_ptr() for x in (*(x for x in tensors if x is not None), out)])
    return out, plan


def _build_block_plan(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, prologue: qkv.Prologue, scale: float
) -> LaunchPlan:
    """Build the plan of norm, RoPE and quantization in one launch, and of attention on its codes."""
    device, config = query.get_device(), replace(config, fuse_q_quant=False)
    sizes, out_strides = _get_joined_sizes(query, key, prologue), row_strides(query, config.columns)
    if prologue.second is not None:
        out_strides = joined_strides(query, sizes.q_len)
    steps = (
        *build_quantize_steps(query, key, value, config, prologue),
        build_attention_step(config, sizes, scale, get_target(device), Strides(out=out_strides[:3])),
    )
    code_bytes = _count_code_bytes(*_get_joined_shapes(query, key, prologue), config)
    norm_bytes = _get_norm_bytes(query, key, prologue)
    names = ("q", "k", "v", *prologue.buffers(), "out")
    return build_plan(device, steps, names, code_bytes | norm_bytes, config.head_dim, out_strides)


def varlen(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None,
    sinks: Tensor | None, max_q: int, max_k: int, precision: str, left: int, right: int, softcap: float, scale: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.varlen`` and ``varlen_lse`` of CUDA tensors. out: contiguous, for the output."""
    out = query.new_empty(query.shape) if out is None else out
    lengths = [x for x in (cu_seq_q, cu_seq_k, seqused_k, sinks) if x is not None]
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32) if lse else out
    options: tuple[Any, ...] = (max_q, max_k, precision, left, right, softcap, scale)
    plan_key = _make_plan_key("varlen", lse, query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks, *options)
    plan = _PLANS.get(plan_key)
    centered = has_key_mean(softcap, sinks)
    if plan is None:
        if query.numel() == 0 or key.numel() == 0 or cu_seq_q.shape[0] == 1:
            if lse:
                sums.fill_(-float("inf")) if sinks is None else sums.copy_(sinks.unsqueeze(1))
            return out.zero_(), sums
        tensors = [_make_packed_tma_compatible(x) for x in (query, key, value)]
        starts = [x if x is None else x.contiguous() for x in (cu_seq_q, cu_seq_k, seqused_k, sinks)]
        given = (query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks)
        if any(x is not y for x, y in zip(given, (*tensors, *starts), strict=True)):
            copied: tuple[Any, ...] = (*tensors, *starts, *options, out)
            return varlen(lse, *copied)
        plan = put_bounded(_PLANS, plan_key, _build_varlen_plan(lse, *given, *options), _MAX_PLANS)
    addresses = [x.data_ptr() for x in (query, key, value)]
    if not is_aligned(addresses[0] | addresses[1] | addresses[2]):
        copied = (query.clone(), key.clone(), value.clone(), cu_seq_q, cu_seq_k, seqused_k, sinks, *options, out)
        return varlen(lse, *copied)
    extras: tuple[Tensor, ...] = (sums,) if lse else ()
    if lse and centered:
        mean = query.new_empty((cu_seq_q.shape[0] - 1, key.shape[1], plan.head_dim), dtype=torch.float32)
        extras = (sums, mean)
    plan.launch([*addresses, *[x.data_ptr() for x in (*lengths, out, *extras)]])
    if lse and centered:
        sums = reference.add_packed_mean_scores(sums, query, mean, cu_seq_q, scale)
    return out, sums


def get_varlen_plan(lse: bool, *args: Any) -> LaunchPlan | None:
    """Return the plan of ``varlen`` for such arguments, or None if their launch needed copies."""
    return _PLANS.get(_make_plan_key("varlen", lse, *args))


def _make_packed_tma_compatible(x: Tensor) -> Tensor:
    """Return x, (tokens, heads, head_dim), or a copy if kernels cannot read its rows."""
    batched = x.transpose(0, 1).unsqueeze(0)
    compatible = make_tma_compatible(batched, unique_rows=True)
    return x if compatible is batched else compatible.squeeze(0).transpose(0, 1)


def _build_varlen_plan(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None,
    sinks: Tensor | None, max_q: int, max_k: int, precision: str, left: int, right: int, softcap: float, scale: float,
) -> LaunchPlan:  # fmt: skip
    """Build the plan of the schedule, quantization and attention of packed sequences."""
    seen = max_k if left < 0 else min(max_k, left + max_q if right < 0 else left + right + 1)
    sizes = packed.PackedSizes(
        cu_seq_q.shape[0] - 1, query.shape[1], key.shape[1], query.shape[0], key.shape[0], max_q, seen
    )
    target = get_target(query.get_device())
    require_hopper(target, PACKED_ON_HOPPER)
    mask = Mask.NONE if right < 0 else Mask.LOWER_RIGHT
    config = replace(
        build_sdpa_config(target, query.shape[2], query.dtype, precision, mask, stats=int(lse)),
        scheduled=True, window=left >= 0, sinks=sinks is not None, softcap=softcap,
        key_mean=has_key_mean(softcap, sinks),
    )  # fmt: skip
    window, used = (max(0, left), max(0, right)), seqused_k is not None
    tiles = sizes.tiling(config, target.multiprocessors)
    columns = config.columns
    strides = Strides(query=(0, *query.stride()[1::-1]), out=(0, columns, sizes.heads * columns))
    max_tiles = sizes.max_tiles(tiles)
    scheduling = LaunchStep(
        schedule.packed_kernel(),
        schedule.launch(packed.schedule_arguments(sizes, used=used), config, tiles, sizes.batch, max_tiles, window),
    )
    quantizing = LaunchStep(
        packed.quantize_kernel(config, sizes),
        packed.quantize_launch(sizes, (key.stride(0), key.stride(1)), (value.stride(0), value.stride(1))),
    )
    attending = LaunchStep(
        hopper.kernel(config, sizes.as_sizes(), target.multiprocessors, tiles=tiles),
        hopper.launch(
            config,
            sizes.as_sizes(),
            scale,
            strides,
            target.multiprocessors,
            tiles=tiles,
            max_tiles=max_tiles,
            window=window,
        ),
        {"k": "k_codes", "v_t": "v_codes"},
    )
    buffers = packed.buffer_shapes(config, sizes, tiles).items()
    buffer_bytes = {name: prod(shape) * getattr(torch, dtype).itemsize for name, (dtype, shape) in buffers}
    given = [name for name, has in (("seqused_k", used), ("sinks", config.sinks)) if has]
    results = ("out", *(["lse"] if lse else []), *(["k_mean"] if lse and config.key_mean else []))
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *given, *results)
    steps = (scheduling, quantizing, attending)
    return build_plan(query.get_device(), steps, names, buffer_bytes, config.head_dim)


def masked(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    sinks: Tensor | None, counts: Tensor | None, entries: Tensor | None, bits: Tensor | None, precision: str,
    alignment: int, left: int, right: int, softcap: float, skip_threshold: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.masked`` and ``masked_lse`` of CUDA tensors."""
    options = (precision, alignment, left, right, softcap, skip_threshold, scale)
    out, results = _masked(int(lse), query, key, value, kv_lengths, kv_rows, sinks, counts, entries, bits, *options)
    if not lse:
        return out, out
    if len(results) == 1 or not has_key_mean(softcap, sinks):
        return out, results[0]
    scores = reference.compute_mean_scores(query, results[1], rotated=True)
    return out, reference.add_mean_scores(results[0], scores, 2, scale)  # rows may have no key


def masked_kept(
    query: Tensor, key: Tensor, value: Tensor, precision: str, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    alignment: int, left: int, right: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.masked_kept`` of CUDA tensors. The numbers of each row are as in ``sdpa_kept``.

    The mean of a sequence without keys is uninitialised.
    """
    options = (precision, alignment, left, right, 0.0, 0.0, scale)
    results = _masked(2, query, key, value, kv_lengths, kv_rows, None, None, None, None, *options)
    return _add_zero_mean(query, key, *results)


def _masked(
    stats: int, query: Tensor, key: Tensor, value: Tensor, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    sinks: Tensor | None, counts: Tensor | None, entries: Tensor | None, bits: Tensor | None, precision: str,
    alignment: int, left: int, right: int, softcap: float, skip_threshold: float, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Return the output, and with ``stats`` these of each row and the mean of the keys, as for ``_sdpa``."""
    shape = query.shape
    extras = (kv_lengths, kv_rows, sinks, counts, entries, bits)
    options = (precision, alignment, left, right, softcap, skip_threshold, scale)
    given = [x for x in extras if x is not None]
    plan_key = _make_plan_key("masked", stats, query, key, value, *extras, *options)
    plan = _PLANS.get(plan_key)
    centered = has_key_mean(softcap, sinks)
    if plan is None:
        if query.numel() == 0 or key.numel() == 0:
            out, empty = fill_without_keys(empty_rows(query, shape[3]), _new_stats(query, stats), sinks)
            return out, (empty,)
        compatible: list[Any] = [make_tma_compatible(query, unique_rows=True)]
        compatible += [make_tma_compatible(x) for x in (key, value)]
        compatible += [x if x is None else x.contiguous() for x in extras]
        if any(x is not y for x, y in zip((query, key, value, *extras), compatible, strict=True)):
            return _masked(stats, *compatible, *options)  # type: ignore[call-arg]
        target = get_target(query.get_device())
        require_hopper(target, MASKED_ON_HOPPER)
        mask = Mask.NONE if right < 0 else Mask.LOWER_RIGHT
        config = replace(
            build_sdpa_config(target, shape[3], query.dtype, precision, mask, stats=stats), key_mean=centered,
            scheduled=True, window=left >= 0, sinks=sinks is not None, softcap=softcap, listed=counts is not None,
            skip=skip_threshold > 0.0,
        )  # fmt: skip
        lists = _get_lists(counts, bits)
        built = _build_masked_plan(
            query, key, value, config, (left, right), key.shape[2] - shape[2] if alignment == 2 else 0, lists, scale,
            skip_threshold, lengths=kv_lengths is not None, gathered=kv_rows is not None,
        )  # fmt: skip
        plan = put_bounded(_PLANS, plan_key, built, _MAX_PLANS)
    addresses = [x.data_ptr() for x in (query, key, value)]
    if not is_aligned(addresses[0] | addresses[1] | addresses[2]):
        copies = [make_tma_compatible(x) for x in (query, key, value)]
        return _masked(stats, *copies, *extras, *options)  # type: ignore
    return _launch_attention(plan, stats, query, key, [*addresses, *[x.data_ptr() for x in given]])


def _get_lists(counts: Tensor | None, bits: Tensor | None) -> MaskLists | None:
    """Return the sizes of a BlockMask's tensors."""
    if counts is None or bits is None:
        return None
    return MaskLists(counts.shape[0], counts.shape[1], bits.shape[0])


def get_masked_plan(lse: bool, *args: Any) -> LaunchPlan | None:
    """Return the plan of ``masked`` for such arguments, or None if their launch needed copies."""
    return _PLANS.get(_make_plan_key("masked", lse, *args))


def masked_codes(
    lse: bool, query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    kv_lengths: Tensor | None, sinks: Tensor | None, counts: Tensor | None, entries: Tensor | None,
    bits: Tensor | None, precision: str, head_dim: int, key_length: int, dtype: torch.dtype, alignment: int, left: int,
    right: int, softcap: float, skip_threshold: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.masked_codes`` and ``masked_codes_lse`` of CUDA tensors."""
    extras = (kv_lengths, sinks, counts, entries, bits)
    options = (precision, head_dim, key_length, dtype, alignment, left, right, softcap, skip_threshold, scale)
    codes = (query, key, value, query_scale, key_scale, value_scale)
    shape = query.shape
    out = query.new_empty((*shape[:3], head_dim), dtype=dtype)
    sums = query.new_empty(shape[:3], dtype=torch.float32) if lse else query_scale
    plan_key = _make_plan_key("masked_codes", lse, *codes, *extras, *options)
    plan = _PLANS.get(plan_key)
    if plan is None:
        if out.numel() == 0 or key_length == 0:
            return fill_without_keys(out, query.new_empty(shape[:3], dtype=torch.float32), sinks)
        window, shift = (left, right), key_length - shape[2] if alignment == 2 else 0
        target = get_target(query.get_device())
        require_hopper(target, MASKED_ON_HOPPER)
        lists = _get_lists(counts, bits)
        config = replace(
            build_config(head_dim, dtype, precision), mask=Mask.NONE if right < 0 else Mask.LOWER_RIGHT,
            log_sum_exp=lse, key_mean=False, scheduled=True, window=left >= 0, sinks=sinks is not None,
            softcap=softcap, listed=lists is not None, skip=skip_threshold > 0.0,
        )  # fmt: skip
        sizes = get_sizes(shape, (*key.shape[:2], key_length))
        built = _build_codes_plan(
            config, sizes, window, shift, lists, scale, skip_threshold, target, query.get_device(),
            lengths=kv_lengths is not None,
        )  # fmt: skip
        plan = put_bounded(_PLANS, plan_key, built, _MAX_PLANS)
    if not is_aligned(query.data_ptr() | key.data_ptr() | value.data_ptr()):
        codes = (query.clone(), key.clone(), value.clone(), *codes[3:])
    given = [x.contiguous() for x in extras if x is not None]
    plan.launch([x.data_ptr() for x in (*codes, *given, out, *([sums] if lse else []))])
    return out, sums


def _build_codes_plan(
    config: AttentionConfig, sizes: Sizes, window: tuple[int, int], shift: int, lists: MaskLists | None, scale: float,
    skip_threshold: float, target: Target, device: int, *, lengths: bool,
) -> LaunchPlan:  # fmt: skip
    """Build the plan of the schedule and of attention on codes."""
    tiles, limits = _tile_window(config, sizes, window, target)
    steps = _build_scheduled_steps(
        config, sizes, tiles, Strides(), limits, shift, lists, scale, skip_threshold, target, lengths=lengths
    )
    names = (*ATTENTION_BUFFERS[:6], *_list_inputs(config, lengths), "out", *(("lse",) if config.log_sum_exp else ()))
    return build_plan(device, steps, names, schedule.buffer_bytes(schedule.max_tiles(sizes, tiles)), config.head_dim)


def _list_inputs(config: AttentionConfig, lengths: bool, gathered: bool = False) -> tuple[str, ...]:
    """Return the names of the inputs of a mask, in the order of the operators."""
    given = (("kv_lengths", lengths), ("kv_rows", gathered), ("sinks", config.sinks))
    lists = ("counts", "entries", "bits") if config.listed else ()
    return (*(name for name, has in given if has), *lists)


def _tile_window(
    config: AttentionConfig, sizes: Sizes, window: tuple[int, int], target: Target
) -> tuple[Tiling, tuple[int, int]]:
    """Return the tiles for the keys in reach of a window, and its limits for the kernels."""
    left, right = window
    seen = sizes.kv_len if left < 0 else min(sizes.kv_len, left + (sizes.q_len if right < 0 else right + 1))
    tiles = tiling(config, replace(sizes, kv_len=max(1, seen)), target.multiprocessors)[0]
    return tiles, (max(0, left), max(0, right))


def _build_scheduled_steps(
    config: AttentionConfig, sizes: Sizes, tiles: Tiling, strides: Strides, limits: tuple[int, int], shift: int,
    lists: MaskLists | None, scale: float, skip_threshold: float, target: Target, *, lengths: bool,
) -> tuple[LaunchStep, LaunchStep]:  # fmt: skip
    """Build the launches of the schedule and of attention."""
    scheduling = LaunchStep(
        schedule.batch_kernel(lengths=lengths, listed=lists is not None),
        schedule.batch_launch(config, sizes, tiles, shift, lengths=lengths, window=limits, lists=lists),
    )
    attending = LaunchStep(
        hopper.kernel(config, sizes, target.multiprocessors, tiles=tiles),
        hopper.launch(
            config, sizes, scale, strides, target.multiprocessors, tiles=tiles,
            max_tiles=schedule.max_tiles(sizes, tiles), window=limits, lists=lists, skip_threshold=skip_threshold,
        ),
        {"k": "k_codes", "v_t": "v_codes"} | ({} if config.fuse_q_quant else {"q": "q_codes"}),
    )  # fmt: skip
    return scheduling, attending


def _build_masked_plan(
    query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, window: tuple[int, int], shift: int,
    lists: MaskLists | None, scale: float, skip_threshold: float = 0.0, *, lengths: bool, gathered: bool,
) -> LaunchPlan:  # fmt: skip
    """Build the plan of quantization, the schedule and attention.

    The schedule is made while the quantizer ends, and the attention kernel starts after both.
    """
    device, sizes = query.get_device(), get_sizes(query.shape, key.shape)
    target = get_target(device)
    tiles, limits = _tile_window(config, sizes, window, target)
    out_strides = row_strides(query, config.columns)
    quantizing = LaunchStep(
        qkv.kernel(config, sizes, lengths=lengths, gathered=gathered),
        qkv.launch(
            config, sizes, Strides(query.stride()[:3], key.stride()[:3], value.stride()[:3]), lengths=lengths,
            gathered=gathered,
        ),
    )  # fmt: skip
    scheduled = _build_scheduled_steps(
        config, sizes, tiles, Strides(query=query.stride()[:3], out=out_strides[:3]), limits, shift, lists, scale,
        skip_threshold, target, lengths=lengths,
    )  # fmt: skip
    code_bytes = _count_code_bytes(query.shape, key.shape, config)
    schedule_bytes = schedule.buffer_bytes(schedule.max_tiles(sizes, tiles))
    results = ("out", "lse", "k_mean") if config.log_sum_exp else ("out",)
    names = ("q", "k", "v", *_list_inputs(config, lengths, gathered), *results)
    steps = (quantizing, *scheduled)
    return build_plan(device, steps, names, code_bytes | schedule_bytes, config.head_dim, out_strides)


def _build_sdpa_plan(query: Tensor, key: Tensor, value: Tensor, config: AttentionConfig, scale: float) -> LaunchPlan:
    """Build the plan of quantization and attention, with the quantized tensors in a workspace."""
    device = query.get_device()
    steps = build_sdpa_steps(query, key, value, config, scale, get_target(device))
    code_bytes, strides = _count_code_bytes(query.shape, key.shape, config), row_strides(query, config.columns)
    names = ("q", "k", "v", "out", *(("lse", "k_mean") if config.log_sum_exp else ()))
    return build_plan(device, steps, names, code_bytes, config.head_dim, strides)


def block_mask(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``torch.ops.greenfast.block_mask`` of a CUDA tensor."""
    plan_key = ("block_mask", mask.shape, mask.stride(), mask.dtype, mask.get_device())
    sizes = mask_kernels.MaskSizes(*mask.shape)
    packing = partial(mask_kernels.pack_launch, sizes, mask.stride())
    return _pack_mask(plan_key, sizes, mask_kernels.pack_kernel, packing, {"mask": mask})


def segment_mask(q_segments: Tensor, kv_segments: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``torch.ops.greenfast.segment_mask`` of CUDA tensors."""
    dtype = torch.promote_types(q_segments.dtype, kv_segments.dtype)
    segments = {"q_segments": q_segments, "kv_segments": kv_segments}
    segments = {name: x.to(dtype).contiguous() for name, x in segments.items()}
    plan_key = ("segment_mask", q_segments.shape, kv_segments.shape, dtype, causal, q_segments.get_device())
    sizes = mask_kernels.MaskSizes(q_segments.shape[0], 1, q_segments.shape[1], kv_segments.shape[1])
    kernel = partial(mask_kernels.segments_kernel, str(dtype).removeprefix("torch."))
    return _pack_mask(plan_key, sizes, kernel, partial(mask_kernels.segments_launch, sizes, causal=causal), segments)


def _pack_mask(
    plan_key: tuple[Any, ...], sizes: mask_kernels.MaskSizes, kernel: Callable[[], KernelSource],
    launch: Callable[[], Launch], inputs: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pack the bits of a mask by a kernel, and list its tiles. inputs: the buffers that the kernel reads."""
    like = next(iter(inputs.values()))
    blocks = (sizes.batch, sizes.heads, sizes.row_blocks)
    counts, entries, bits = allocate_mask(like, blocks, sizes.key_tiles, max(1, sizes.tiles))
    plan = _PLANS.get(plan_key)
    if plan is None:
        if not sizes.tiles:
            return counts.zero_(), entries, bits.zero_()
        packing = LaunchStep(kernel(), launch())
        listing = LaunchStep(mask_kernels.list_kernel(), mask_kernels.list_launch(prod(blocks), sizes.key_tiles))
        names = (*inputs, "counts", "entries", "bits")
        built = build_plan(like.get_device(), (packing, listing), names, {"tiles": 4 * sizes.tiles})
        plan = put_bounded(_PLANS, plan_key, built, _MAX_PLANS)
    plan.launch([x.data_ptr() for x in (*inputs.values(), counts, entries, bits)])
    return counts, entries, bits


def block_lists(list_counts: Tensor, indices: Tensor, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``torch.ops.greenfast.block_lists`` of CUDA tensors."""
    if list_counts.dtype != indices.dtype:
        list_counts = list_counts.to(torch.int64)
        indices = indices.to(torch.int64)
    list_counts, indices = list_counts.contiguous(), indices.contiguous()
    counts, entries, bits = allocate_mask(list_counts, list_counts.shape, -(-kv_len // mask_kernels.TILE), 1)
    plan_key = ("block_lists", indices.shape, kv_len, indices.dtype, indices.get_device())
    plan = _PLANS.get(plan_key)
    if plan is None:
        kernel = mask_kernels.blocks_kernel(str(indices.dtype).removeprefix("torch."))
        step = LaunchStep(kernel, mask_kernels.blocks_launch(list_counts.numel(), indices.shape[3], kv_len))
        names = ("list_counts", "indices", "counts", "entries", "bits")
        plan = put_bounded(_PLANS, plan_key, LaunchPlan(indices.get_device(), (step,), names), _MAX_PLANS)
    plan.launch([x.data_ptr() for x in (list_counts, indices, counts, entries, bits)])
    return counts, entries, bits
