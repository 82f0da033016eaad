"""The backends of comparisons: greenfast's kernels and sdpa, FlashAttention-3, cuDNN, and torch's own backends.

All backends read the same random inputs. FlashAttention-3 (Shah et al., 2024) in FP8 reads greenfast's codes with one
scale per head. cuDNN's FP8 attention has one scale per tensor, so the inputs are quantized again for it. The other
backends read bfloat16. For SageAttention 2++ only its arithmetic is included (sage.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import sage
from benchmarks.registry import GREENFAST, KERNEL, TORCH, Backend, BoundCall, Suite
from benchmarks.sdpa_inputs import Inputs
from greenfast.numerics.formats import quantize
from greenfast.ops import sdpa as operator
from greenfast.ops.quantized import Precision

FP8 = torch.float8_e4m3fn
#: cuDNN's scale of the softmax weights (at most 1) before rounding to E4M3 (at most 448).
_CUDNN_WEIGHT_SCALE = 256.0


#: All backends by name.
BACKENDS = Suite()
_register = BACKENDS.register
BACKENDS[KERNEL] = Backend(KERNEL, "greenfast FP8", "fp8", GREENFAST, None, same_codes=True)
_FA3 = ("fa3_fwd_interface", "fa3-fwd")
_PLAIN = {"subtract_key_mean": False, "rotate": False}


@_register("fa3_bf16", "FA3 bf16", "bf16", _FA3, codes=False)
@_register("fa3", "FA3 FP8", "fp8", _FA3, same_codes=True, codes=True)
def _flash_attention_3(inputs: Inputs, codes: bool) -> BoundCall:
    """Bind FlashAttention-3 of the fa3-fwd wheel on E4M3 codes or bfloat16; the output is bfloat16."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    scales = {}
    if codes:
        q, k, v = (inputs.length_first(inputs.codes[name]).view(FP8) for name in "qkv")
        scales = {f"{name}_descale": inputs.by_batch(inputs.scales[name]) for name in "qkv"}
    else:
        q, k, v = (inputs.length_first(inputs.values[name].bfloat16()) for name in "qkv")
    causal = bool(inputs.config.causal)
    if causal and inputs.sizes.q_len != inputs.sizes.kv_len:
        raise ValueError("FlashAttention-3 aligns a causal mask at the last key, the other backends at the first")

    def call() -> Tensor:
        result = fa3.flash_attn_func(q, k, v, causal=causal, **scales)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # some releases return the LSE too
        return out.transpose(1, 2)

    return BoundCall(call)


@cache
def _cudnn_handle() -> Any:
    return importlib.import_module("cudnn").create_handle()


@_register("cudnn", "cuDNN FP8", "fp8", ("cudnn", "nvidia-cudnn-frontend"))
def _cudnn_fp8(inputs: Inputs) -> BoundCall:
    """Return cuDNN's FP8 attention (sdpa_fp8 of its frontend). Its output on Hopper is E4M3."""
    if inputs.grouped or inputs.sizes.q_len != inputs.sizes.kv_len:
        raise ValueError("cuDNN's graph is made for equal lengths and heads here")
    codes, scales = [], []
    for name in "qkv":
        whole, scale = quantize(inputs.values[name].unsqueeze(0), "e4m3")  # one scale for the whole tensor
        codes.append(inputs.length_first(whole[0]).transpose(1, 2))
        scales.append(scale.view(1, 1, 1, 1))
    attend = build_cudnn_fp8(codes, bool(inputs.config.causal))
    # An output is a mean of rows of V, so twice V's scale is enough for any rounding of the softmax weights.
    unit = 2.0 * scales[2]
    return BoundCall(lambda: attend(codes, scales, 1.0 / unit), float(unit))


def build_cudnn_fp8(codes: Sequence[Tensor], causal: bool) -> Callable[[Sequence[Tensor], Sequence[Tensor], Any], Any]:
    """Build cuDNN's graph of FP8 attention for codes of Q, K and V, (B, H, S, D) in any layout.

    Returns a function of such codes, of their scales in float32, (1, 1, 1, 1) each, and of the factor of the output
    before it is rounded to E4M3; it returns the output, (B, H, S, D) of E4M3. The next call overwrites it.
    """
    cudnn = importlib.import_module("cudnn")
    types, handle, device = cudnn.data_type, _cudnn_handle(), codes[0].device
    batch, heads, q_len, head_dim = codes[0].shape
    out = torch.empty(batch, q_len, heads, head_dim, device=device, dtype=torch.uint8).transpose(1, 2)
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )

    def one(value: float) -> Tensor:
        return torch.full((1, 1, 1, 1), value, device=device)

    def add_input(x: Tensor, kind: Any) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)

    number = one(1.0)
    code_nodes = [add_input(x, types.FP8_E4M3) for x in codes]
    scale_nodes = [add_input(number, types.FLOAT) for _ in codes]
    descale_s, scale_s, scale_o = (add_input(number, types.FLOAT) for _ in range(3))
    nodes = graph.sdpa_fp8(
        **dict(zip("qkv", code_nodes, strict=True)),
        **{f"descale_{name}": node for name, node in zip("qkv", scale_nodes, strict=True)},
        descale_s=descale_s,
        scale_s=scale_s,
        scale_o=scale_o,
        attn_scale=1.0 / math.sqrt(head_dim),
        is_inference=True,
        use_causal_mask=causal,
    )
    kept = {descale_s: one(1.0 / _CUDNN_WEIGHT_SCALE), scale_s: one(_CUDNN_WEIGHT_SCALE)}
    for node, x, kind in (
        (nodes[0], out, types.FP8_E4M3), (nodes[2], one(0.0), types.FLOAT), (nodes[3], one(0.0), types.FLOAT)
    ):  # fmt: skip
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
        kept[node] = x
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device=device, dtype=torch.uint8)
    decoded = out.view(FP8)

    def call(codes: Sequence[Tensor], scales: Sequence[Tensor], out_factor: Tensor) -> Tensor:
        if device.type == "cuda":
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        given = zip([*code_nodes, *scale_nodes, scale_o], [*codes, *scales, out_factor], strict=True)
        graph.execute(kept | dict(given), workspace, handle=handle)
        return decoded

    return call


@_register("torch", "torch bf16", "bf16", TORCH, backend=None)
@_register("torch_cudnn", "torch cuDNN bf16", "bf16", TORCH, backend=SDPBackend.CUDNN_ATTENTION)
@_register("torch_flash", "torch flash bf16", "bf16", TORCH, backend=SDPBackend.FLASH_ATTENTION)
def _torch(inputs: Inputs, backend: SDPBackend | None) -> BoundCall:
    """Bind torch's scaled_dot_product_attention on bfloat16, with this SDPBackend or with torch's choice."""
    q, k, v = inputs.bfloat16
    causal, grouped = bool(inputs.config.causal), inputs.grouped
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> Tensor:
        if backend is None:
            return attend(q, k, v, is_causal=causal, enable_gqa=grouped)
        with sdpa_kernel(backend):
            return attend(q, k, v, is_causal=causal, enable_gqa=grouped)

    return BoundCall(call)


@_register("sage", "SageAttention 2++, its arithmetic", "int8", TORCH)
def _sage(inputs: Inputs) -> BoundCall:
    """Bind the arithmetic of SageAttention 2++ on bfloat16."""
    (q, k, v), causal = inputs.bfloat16, bool(inputs.config.causal)
    return BoundCall(lambda: sage.attend(q, k, v, causal))


@_register("sdpa_int8_fine", "sdpa int8_fine", "int8", GREENFAST, precision="int8_fine")
@_register("sdpa_int8", "sdpa int8", "int8", GREENFAST, precision="int8")
@_register("sdpa_fp8", "sdpa fp8", "fp8", GREENFAST, precision="fp8")
def _sdpa(inputs: Inputs, precision: Precision) -> BoundCall:
    """Bind greenfast.sdpa on bfloat16, including quantization."""
    (q, k, v), causal, grouped = inputs.bfloat16, bool(inputs.config.causal), inputs.grouped
    return BoundCall(lambda: operator.sdpa(q, k, v, is_causal=causal, enable_gqa=grouped, precision=precision))


@_register("int8_plain", "int8, not rotated, no mean", "int8", GREENFAST, precision="int8", **_PLAIN)
@_register("fp8_plain", "fp8, not rotated, no mean", "fp8", GREENFAST, **_PLAIN)
@_register("fp8_channel", "fp8, a scale for each channel of V", "fp8", GREENFAST, value_scales="channel")
@_register("attention_fp8", "fp8, on kept codes", "fp8", GREENFAST)
def _on_codes(inputs: Inputs, **choices: Any) -> BoundCall:
    """Bind greenfast.attention on codes that are quantized once. choices: options of greenfast.quantize."""
    codes, causal = operator.quantize(*inputs.bfloat16, **choices), bool(inputs.config.causal)
    return BoundCall(lambda: operator.attention(codes, is_causal=causal))


@_register("quantize_fp8", "quantize fp8", "none", GREENFAST, attention=False)
def _quantize(inputs: Inputs) -> BoundCall:
    """Bind greenfast.quantize alone."""
    q, k, v = inputs.bfloat16
    return BoundCall(lambda: operator.quantize(q, k, v))


@_register("copy", "copy", "none", TORCH, attention=False)
def _copy(inputs: Inputs) -> BoundCall:
    """Bind a copy of as many bytes as quantization moves: two read and one written per element."""
    moved = torch.empty(
        3 * sum(x.numel() for x in inputs.values.values()), dtype=torch.uint8, device=inputs.values["q"].device
    )
    target, source = moved[: len(moved) // 2], moved[len(moved) - len(moved) // 2 :]
    return BoundCall(lambda: target.copy_(source))
