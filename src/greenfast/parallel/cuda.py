"""``greenfast.parallel.blocks`` on a GPU: launch plans of the kernels, one per shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import ROW_BLOCK, AttentionConfig, Mask, Sizes, Strides, contiguous_strides
from greenfast.kernels.merge import merge as merge_kernel
from greenfast.kernels.quantize import qkv
from greenfast.ops import cuda
from greenfast.ops.cuda import get_sizes
from greenfast.ops.launch_plans import LaunchPlan, LaunchStep, get_target, put_bounded
from greenfast.ops.layout import make_tma_compatible
from greenfast.ops.quantized import QuantizedQKV, build_config
from greenfast.parallel.quantized_kv import QuantizedKV
from greenfast.spec.arch import Target

#: CTAs of the attention kernel per SM. NCCL's kernels occupy some SMs for a part of the time.
CTAS_PER_SM = 4
_MAX_PLANS = 4096
_PLANS: dict[tuple[Any, ...], LaunchPlan] = {}

_build_config = lru_cache(maxsize=1024)(build_config)


def _get_target(device: int) -> Target:
    target = get_target(device)
    if target.name != hopper.TARGET.name:
        raise NotImplementedError(
            f"context_parallel: its kernels are for Hopper (compute capability 9.0), this is {target.name}; "
            "torch.distributed.tensor.experimental.context_parallel runs there"
        )
    return target


def _launch(device: int, key: tuple[Any, ...], step: Callable[[], LaunchStep], buffers: dict[str, Tensor]) -> None:
    plan = _PLANS.get(key)
    if plan is None:
        plan = put_bounded(_PLANS, key, LaunchPlan(device, (step(),), tuple(buffers)), _MAX_PLANS)
    plan.launch([x.data_ptr() for x in buffers.values()])


def _launch_quantizer(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, buffers: dict[str, Tensor]) -> None:
    """Launch the quantizer on TMA-compatible tensors, with the buffer ``samples`` and the output buffers."""
    device = k.get_device()
    _get_target(device)
    inputs = {"q": q, "k": k, "v": v}
    key = ("quantize", config, device, *(x.shape for x in inputs.values()), *(x.stride() for x in inputs.values()))

    def step() -> LaunchStep:
        sizes, strides = get_sizes(q.shape, k.shape), Strides(q.stride()[:3], k.stride()[:3], v.stride()[:3])
        return LaunchStep(qkv.kernel(config, sizes, sampled=True), qkv.launch(config, sizes, strides, sampled=True))

    _launch(device, key, step, {**inputs, **buffers})


def quantize_keys(key: Tensor, value: Tensor, samples: Tensor, precision: str, into: QuantizedKV) -> Tensor:
    """Compute ``blocks.quantize_keys`` of CUDA tensors."""
    key, value = make_tma_compatible(key), make_tma_compatible(value)
    config = replace(_build_config(key.shape[3], key.dtype, precision), fuse_q_quant=True)  # no Q here
    mean = into.key_scale.new_empty(*key.shape[:2], into.key.shape[3])
    written = {
        "k_codes": into.key, "v_codes": into.value, "k_scale": into.key_scale, "v_scale": into.value_scale,
        "k_mean": mean, "samples": samples,
    }  # fmt: skip
    _launch_quantizer(config, key, key, value, written)
    return mean


def quantize(query: Tensor, key: Tensor, value: Tensor, samples: Tensor, precision: str) -> QuantizedQKV:
    """Compute ``blocks.quantize`` of CUDA tensors."""
    query, key, value = make_tma_compatible(query), make_tma_compatible(key), make_tma_compatible(value)
    config = _build_config(query.shape[3], query.dtype, precision)
    shapes = cuda.get_quantized_shapes(query.shape, key.shape, config)
    outputs = {name: query.new_empty(shape, dtype=cuda.get_buffer_dtype(name)) for name, shape in shapes.items()}
    _launch_quantizer(config, query, key, value, {**outputs, "samples": samples})
    q, k, v, q_scale, k_scale, v_scale, mean = outputs.values()
    return QuantizedQKV(q, k, v, q_scale, k_scale, v_scale, mean, precision, query.shape[3], key.shape[2], query.dtype)


def attend(
    query: Tensor, keys: QuantizedKV, count: int, precision: str, causal: int, scale: float, sum_unrounded_p: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``blocks.attend`` of CUDA tensors."""
    batch, heads, length, head_dim = query.shape
    config = _build_config(head_dim, query.dtype, precision)
    config = replace(
        config, mask=Mask(causal), log_sum_exp=True, sum_quantized_p=not sum_unrounded_p, fuse_q_quant=True
    )
    query = make_tma_compatible(query, unique_rows=True)
    blocks = -(-count // ROW_BLOCK)
    out = query.new_empty(query.shape)
    lse = query.new_empty((batch, heads, length), dtype=torch.float32)
    buffers = {
        "q": query,
        "k_codes": keys.key,
        "v_codes": keys.value,
        "k_scale": keys.key_scale[:, :, :blocks].contiguous(),
        "v_scale": keys.value_scale[:, :, :blocks].contiguous(),
        "out": out,
        "lse": lse,
    }
    sizes = Sizes(batch, heads, keys.key.shape[1], length, count)
    _launch_attention(config, sizes, scale, query.stride()[:3], keys.key.shape[2], buffers)
    return out, lse


def attend_codes(codes: QuantizedQKV, causal: int, scale: float, with_lse: bool) -> tuple[Tensor, Tensor]:
    """Compute attention on quantized Q, K and V, as ``torch.ops.greenfast.attention``, while NCCL's kernels may run."""
    config = _build_config(codes.head_dim, codes.dtype, codes.precision)
    config = replace(config, mask=Mask(causal), log_sum_exp=with_lse)
    batch, heads, length, _ = codes.query.shape
    out = torch.empty((batch, heads, length, codes.head_dim), dtype=codes.dtype, device=codes.device)
    lse = codes.query_scale.new_empty((batch, heads, length) if with_lse else (0,))
    buffers = dict(zip(cuda.ATTENTION_BUFFERS, (*codes.tensors()[:6], out, lse), strict=True))
    sizes = get_sizes(codes.query.shape, codes.key.shape)
    _launch_attention(
        config, sizes, scale, contiguous_strides(heads, length, codes.head_dim), codes.key_length, buffers
    )
    return out, lse


def _launch_attention(
    config: AttentionConfig,
    sizes: Sizes,
    scale: float,
    query: tuple[int, ...],
    kv_len_allocated: int,
    buffers: dict[str, Tensor],
) -> None:
    device = buffers["out"].get_device()
    target = _get_target(device)

    def step() -> LaunchStep:
        size = target.multiprocessors
        launch = hopper.launch(
            config, sizes, scale, Strides(query=query), size, kv_len_allocated=kv_len_allocated, ctas_per_sm=CTAS_PER_SM
        )
        names = {"k": "k_codes", "v_t": "v_codes"} | ({} if config.fuse_q_quant else {"q": "q_codes"})
        # The preceding work on the stream may be a wait for NCCL instead of the quantizer.
        return LaunchStep(hopper.kernel(config, sizes, size), replace(launch, early=False), names)

    _launch(device, ("attend", config, sizes, scale, device, query, kv_len_allocated), step, buffers)


def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, first: int, into: Tensor) -> Tensor:
    """Merge ``b`` into ``a``: write ``into`` and return the log-sum-exp."""
    device, in_place = a.get_device(), into is a
    lse = torch.empty_like(lse_a)
    shape, strides = tuple(a.shape), tuple(x.stride()[:3] for x in (a, b, into))
    names = [str(x.dtype).removeprefix("torch.") for x in (a, b, into)]

    def step() -> LaunchStep:
        source = merge_kernel.kernel(shape[3], *names, in_place=in_place)
        return LaunchStep(source, merge_kernel.launch(shape, first, *strides))

    buffers = {"a": a, "b": b, "out": into, "lse_a": lse_a, "lse_b": lse_b, "lse_out": lse}
    _launch(device, ("merge", *names, in_place, device, shape, first, *strides), step, buffers)
    return lse
