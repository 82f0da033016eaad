"""The backends of comparisons: greenfast's kernels and sdpa, FlashAttention-3, cuDNN, and torch's own backends.

All backends read the same random inputs. FlashAttention-3 (Shah et al., 2024) in FP8 reads greenfast's codes with one
scale per head. cuDNN's FP8 attention has one scale per tensor, so the inputs are quantized again for it. The other
backends read bfloat16. For SageAttention 2++ only its arithmetic is included (sage.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import sage
from benchmarks.records import BackendFacts
from benchmarks.sdpa_inputs import Inputs
from greenfast.numerics.formats import quantize
from greenfast.ops import sdpa as operator
from greenfast.ops.quantized import Precision

#: The backend for a task's own kernel, built by the task's family.
KERNEL = "greenfast"
FP8 = torch.float8_e4m3fn
#: cuDNN's scale of the softmax weights (at most 1) before rounding to E4M3 (at most 448).
_CUDNN_WEIGHT_SCALE = 256.0


@dataclass(frozen=True)
class BoundCall:
    """A backend bound to inputs.

    call: queues one call on torch's current stream and returns its output; for attention a tensor (batch, heads,
    length, head_dim). unit: scale of the output. copies: number of calls after which the same memory is read again.
    """

    call: Callable[[], Any]
    unit: float = 1.0
    copies: int = 1


@dataclass(frozen=True)
class Backend:
    """A library or kernel to compare.

    module: the module to import. package: the distribution with the recorded version; "greenfast" for greenfast's own.
    prepare: binds it to inputs, with the library's own exceptions; None for a task's own kernel. same_codes: whether it
    reads greenfast's codes of the inputs. attention: whether its output is attention and is checked.
    """

    name: str
    label: str
    precision: Literal["fp8", "int8", "bf16", "none"]
    module: str
    package: str
    prepare: Callable[[Any], BoundCall] | None
    same_codes: bool = False
    attention: bool = True

    @property
    def own(self) -> bool:
        """Whether it belongs to greenfast."""
        return self.package == "greenfast"

    def describe(self) -> BackendFacts:
        """Return its facts for a record: the version, or the reason why it is missing."""
        version, missing = "", ""
        try:
            module = importlib.import_module(self.module)
            version = _version(self.package, module)
        except ModuleNotFoundError as e:
            missing = f"{self.package} is not installed (no module {e.name}): pip install {self.package}"
        except Exception as e:  # any import error, such as a missing CUDA library
            missing = f"{self.module} cannot be imported: {first_line(e)}"
        return BackendFacts(
            name=self.name, label=self.label, precision=self.precision, version=version, missing=missing
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:240]


def _version(package: str, module: Any) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "unknown"))
    return f"{package} {version}"


def _flash_attention_3(precision: Literal["fp8", "bf16"]) -> Callable[[Inputs], BoundCall]:
    """Return FlashAttention-3 of the fa3-fwd wheel on E4M3 or bfloat16; the output is bfloat16."""

    def prepare(inputs: Inputs) -> BoundCall:
        fa3 = importlib.import_module("fa3_fwd_interface")
        scales = {}
        if precision == "fp8":
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

    return prepare


@cache
def _cudnn_handle() -> Any:
    return importlib.import_module("cudnn").create_handle()


def _cudnn_fp8(inputs: Inputs) -> BoundCall:
    """Return cuDNN's FP8 attention (sdpa_fp8 of its frontend). Its output on Hopper is E4M3."""
    cudnn = importlib.import_module("cudnn")
    if inputs.grouped or inputs.sizes.q_len != inputs.sizes.kv_len:
        raise ValueError("cuDNN's graph is made for equal lengths and heads here")
    types, handle, sizes, config = cudnn.data_type, _cudnn_handle(), inputs.sizes, inputs.config
    device = inputs.values["q"].device
    codes, scales = {}, {}
    for name in "qkv":
        whole, scale = quantize(inputs.values[name].unsqueeze(0), "e4m3")  # one scale for the whole tensor
        codes[name] = inputs.length_first(whole[0]).transpose(1, 2)
        scales[name] = scale.view(1, 1, 1, 1)
    out = torch.empty(
        sizes.batch, sizes.q_len, sizes.heads, config.head_dim, device=device, dtype=torch.uint8
    ).transpose(1, 2)  # fmt: skip

    def one(value: float) -> Tensor:
        return torch.full((1, 1, 1, 1), value, device=device)

    # An output is a mean of rows of V, so twice V's scale is enough for any rounding of the softmax weights.
    unit = 2.0 * float(scales["v"])
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    feed: dict[Any, Tensor] = {}

    def add_input(x: Tensor, kind: Any) -> Any:
        node = graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        feed[node] = x
        return node

    nodes = graph.sdpa_fp8(
        **{name: add_input(codes[name], types.FP8_E4M3) for name in "qkv"},
        **{f"descale_{name}": add_input(scales[name], types.FLOAT) for name in "qkv"},
        descale_s=add_input(one(1.0 / _CUDNN_WEIGHT_SCALE), types.FLOAT),
        scale_s=add_input(one(_CUDNN_WEIGHT_SCALE), types.FLOAT),
        scale_o=add_input(one(1.0 / unit), types.FLOAT),
        attn_scale=1.0 / math.sqrt(config.head_dim),
        is_inference=True,
        use_causal_mask=bool(config.causal),
    )
    for node, x, kind in (
        (nodes[0], out, types.FP8_E4M3), (nodes[2], one(0.0), types.FLOAT), (nodes[3], one(0.0), types.FLOAT)
    ):  # fmt: skip
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
        feed[node] = x
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device=device, dtype=torch.uint8)
    decoded = out.view(FP8)

    def call() -> Tensor:
        if device.type == "cuda":
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(feed, workspace, handle=handle)
        return decoded

    return BoundCall(call, unit)


def _torch(backend: SDPBackend | None = None) -> Callable[[Inputs], BoundCall]:
    """Return torch's scaled_dot_product_attention on bfloat16, with this SDPBackend or with torch's choice."""

    def prepare(inputs: Inputs) -> BoundCall:
        q, k, v = inputs.bfloat16
        causal, attend = bool(inputs.config.causal), torch.nn.functional.scaled_dot_product_attention
        grouped = inputs.grouped

        def call() -> Tensor:
            if backend is None:
                return attend(q, k, v, is_causal=causal, enable_gqa=grouped)
            with sdpa_kernel(backend):
                return attend(q, k, v, is_causal=causal, enable_gqa=grouped)

        return BoundCall(call)

    return prepare


def _sage(inputs: Inputs) -> BoundCall:
    """Bind the arithmetic of SageAttention 2++ on bfloat16."""
    (q, k, v), causal = inputs.bfloat16, bool(inputs.config.causal)
    return BoundCall(lambda: sage.attend(q, k, v, causal))


def _sdpa(precision: Precision) -> Callable[[Inputs], BoundCall]:
    """Return greenfast.sdpa on bfloat16, including quantization."""

    def prepare(inputs: Inputs) -> BoundCall:
        (q, k, v), causal, grouped = inputs.bfloat16, bool(inputs.config.causal), inputs.grouped
        return BoundCall(lambda: operator.sdpa(q, k, v, is_causal=causal, enable_gqa=grouped, precision=precision))

    return prepare


def _on_codes(**choices: Any) -> Callable[[Inputs], BoundCall]:
    """Return greenfast.attention on codes that are quantized once. choices: options of greenfast.quantize."""

    def prepare(inputs: Inputs) -> BoundCall:
        codes, causal = operator.quantize(*inputs.bfloat16, **choices), bool(inputs.config.causal)
        return BoundCall(lambda: operator.attention(codes, is_causal=causal))

    return prepare


def _quantize(inputs: Inputs) -> BoundCall:
    """Bind greenfast.quantize alone."""
    q, k, v = inputs.bfloat16
    return BoundCall(lambda: operator.quantize(q, k, v))


def _copy(inputs: Inputs) -> BoundCall:
    """Bind a copy of as many bytes as quantization moves: two read and one written per element."""
    moved = torch.empty(
        3 * sum(x.numel() for x in inputs.values.values()), dtype=torch.uint8, device=inputs.values["q"].device
    )
    target, source = moved[: len(moved) // 2], moved[len(moved) - len(moved) // 2 :]
    return BoundCall(lambda: target.copy_(source))


_GREENFAST = ("greenfast", "greenfast")
_FA3 = ("fa3_fwd_interface", "fa3-fwd")
_TORCH = ("torch", "torch")
_PLAIN = {"subtract_key_mean": False, "rotate": False}
#: All backends by name.
BACKENDS = {
    c.name: c
    for c in (
        Backend(KERNEL, "greenfast FP8", "fp8", *_GREENFAST, None, same_codes=True),
        Backend("sdpa_fp8", "sdpa fp8", "fp8", *_GREENFAST, _sdpa("fp8")),
        Backend("sdpa_int8", "sdpa int8", "int8", *_GREENFAST, _sdpa("int8")),
        Backend("sdpa_int8_fine", "sdpa int8_fine", "int8", *_GREENFAST, _sdpa("int8_fine")),
        Backend("attention_fp8", "fp8, on kept codes", "fp8", *_GREENFAST, _on_codes()),
        Backend("fp8_channel", "fp8, a scale for each channel of V", "fp8", *_GREENFAST,
                  _on_codes(value_scales="channel")),
        Backend("fp8_plain", "fp8, not rotated, no mean", "fp8", *_GREENFAST, _on_codes(**_PLAIN)),
        Backend("int8_plain", "int8, not rotated, no mean", "int8", *_GREENFAST,
                  _on_codes(precision="int8", **_PLAIN)),
        Backend("quantize_fp8", "quantize fp8", "none", *_GREENFAST, _quantize, attention=False),
        Backend("copy", "copy", "none", *_TORCH, _copy, attention=False),
        Backend("fa3", "FA3 FP8", "fp8", *_FA3, _flash_attention_3("fp8"), same_codes=True),
        Backend("cudnn", "cuDNN FP8", "fp8", "cudnn", "nvidia-cudnn-frontend", _cudnn_fp8),
        Backend("fa3_bf16", "FA3 bf16", "bf16", *_FA3, _flash_attention_3("bf16")),
        Backend("sage", "SageAttention 2++, its arithmetic", "int8", *_TORCH, _sage),
        Backend("torch_flash", "torch flash bf16", "bf16", *_TORCH, _torch(SDPBackend.FLASH_ATTENTION)),
        Backend("torch_cudnn", "torch cuDNN bf16", "bf16", *_TORCH, _torch(SDPBackend.CUDNN_ATTENTION)),
        Backend("torch", "torch bf16", "bf16", *_TORCH, _torch()),
    )
}  # fmt: skip
