"""Who computes attention beside greenfast, and how each is called: FlashAttention-3, cuDNN, and torch's own backends.

All read the same draw of inputs. FlashAttention-3 (Shah et al., 2024) reads greenfast's codes with their scale per
head; cuDNN's FP8 attention takes one scale per tensor, so it quantizes the draw again; torch's read it as bfloat16.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from greenfast.judge.peers import OWN, PeerContender
from greenfast.kernels.attention.config import VALUE_FORMAT, AttentionConfig, Mask, Sizes, read_dims
from greenfast.numerics.formats import quantize
from greenfast.spec.errors import UsageError

FP8 = torch.float8_e4m3fn
#: Outliers as in the FlashAttention-3 paper: N(0, 1) + N(0, 100) * Bernoulli(0.001).
_OUTLIER_SIGMA, _OUTLIER_SHARE = 10.0, 0.001
#: Realistic inputs: their rank, and what signal, noise and the bias of a share of channels are multiplied by.
_RANK, _SIGNAL, _NOISE = 16, 0.8, 0.3
_BIASED_SHARE, _BIAS = 0.05, {"qk": 8.0, "v": 2.0}
_KEY_BIAS, _QUERY_CONSTANT, _LOUD_KEY, _TINY = 10.0, 10.0, 100.0, 1e-20
#: cuDNN multiplies the softmax's weights, at most 1, by this before it rounds them to E4M3, whose largest is 448.
_CUDNN_WEIGHT_SCALE = 256.0


@dataclass(frozen=True)
class Inputs:
    """One draw of q, k and v, by name: float32 values, their uint8 codes, and a float32 scale per (batch, head).

    values and codes are of shape (batch * heads, length, head_dim), scales of shape (batch * heads,).
    """

    config: AttentionConfig
    sizes: Sizes
    values: dict[str, Tensor]
    codes: dict[str, Tensor]
    scales: dict[str, Tensor]

    def by_batch(self, x: Tensor) -> Tensor:
        """(batch * heads, ...) as (batch, heads, ...)."""
        return x.view(self.sizes.batch, self.sizes.heads, *x.shape[1:])


def make_inputs(dims: Mapping[str, int], seed: int, kind: str, device: str) -> Inputs:
    """Draw on the device from N(0, 1), changed as ``kind``, a key of ``spec.operator.INPUTS``, says there.

    Raises UsageError for grouped heads and unequal lengths. The draw is that of a torch.Generator of the device with
    the seed: q, k and v in turn.
    """
    config, sizes = read_dims(dims, VALUE_FORMAT)
    if sizes.kv_heads != sizes.heads or sizes.kv_len != sizes.q_len or config.mask == Mask.LOWER_RIGHT:
        raise UsageError(f"the peers are compared on equal lengths and heads, CAUSAL 0 or 1; got {dict(dims)}")
    generator = torch.Generator(device).manual_seed(seed)
    shape = (sizes.batch * sizes.heads, sizes.q_len, config.head_dim)
    values, codes, scales = {}, {}, {}
    for name in "qkv":
        x = torch.randn(shape, generator=generator, device=device)
        if kind == "outliers":
            large = _OUTLIER_SIGMA * torch.randn(shape, generator=generator, device=device)
            x += large * (torch.rand(shape, generator=generator, device=device) < _OUTLIER_SHARE)
        elif kind == "realistic":
            x = _NOISE * x + _low_rank_and_bias(shape, name, generator)
        elif kind == "uniform":
            x = torch.rand(shape, generator=generator, device=device)
        elif kind == "tiny":
            x *= _TINY if name != "q" else 1 / _TINY
        elif kind in ("logits 4", "logits 8") and name != "v":
            x *= math.sqrt(float(kind.split()[1]))
        elif kind == "biased keys" and name == "k":
            x += _KEY_BIAS * torch.randn(shape[0], 1, shape[2], generator=generator, device=device)
        elif kind == "constant queries" and name == "q":
            x += _QUERY_CONSTANT
        elif kind == "loud key" and name == "k":
            x[:, 0] *= _LOUD_KEY
        values[name] = x
        codes[name], scales[name] = quantize(x, "e4m3")
    return Inputs(config, sizes, values, codes, scales)


def _low_rank_and_bias(shape: tuple[int, int, int], name: str, generator: torch.Generator) -> Tensor:
    device, (heads, length, head_dim) = generator.device, shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    whole = normal(heads, length, _RANK) @ normal(heads, _RANK, head_dim) * (_SIGNAL / math.sqrt(_RANK))
    biased = torch.rand(heads, 1, head_dim, generator=generator, device=device) < _BIASED_SHARE
    return whole + _BIAS["v" if name == "v" else "qk"] * normal(heads, 1, head_dim) * biased


@dataclass(frozen=True)
class Ready:
    """A contender bound to inputs.

    call: queues one call on torch's current stream and returns its output, (batch, heads, length, head_dim). unit:
    what 1 in that output stands for.
    """

    call: Callable[[], Tensor]
    unit: float = 1.0


@dataclass(frozen=True)
class Contender:
    """One who computes attention.

    module: what is imported. package: whose version counts. same_codes: whether it reads greenfast's codes. prepare:
    binds it to inputs, and raises what the library raises where it cannot; None for greenfast's own kernel.
    """

    name: str
    label: str
    precision: Literal["fp8", "bf16"]
    module: str
    package: str
    same_codes: bool
    prepare: Callable[[Inputs], Ready] | None

    def describe(self) -> PeerContender:
        """What a record says of it: its version, or why it is missing."""
        version, missing = "", ""
        try:
            module = importlib.import_module(self.module)
            version = _version(self.package, module)
        except ModuleNotFoundError as e:
            missing = f"{self.package} is not installed (no module {e.name}): pip install {self.package}"
        except Exception as e:  # whatever a library raises on import, such as for a library of CUDA that it lacks
            missing = f"{self.module} cannot be imported: {first_line(e)}"
        return PeerContender(
            name=self.name, label=self.label, precision=self.precision, version=version, missing=missing
        )


def first_line(error: BaseException) -> str:
    """An exception as one line that fits into a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:240]


def _version(package: str, module: Any) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "unknown"))
    return f"{package} {version}"


def _length_first(inputs: Inputs, x: Tensor) -> Tensor:
    """(batch * heads, length, head_dim) as contiguous (batch, length, heads, head_dim)."""
    return inputs.by_batch(x).transpose(1, 2).contiguous()


def _flash_attention_3(inputs: Inputs) -> Ready:
    """FlashAttention-3 on E4M3 with bfloat16 output, of the fa3-fwd wheel."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    q, k, v = (_length_first(inputs, inputs.codes[name]).view(FP8) for name in "qkv")
    scales = {f"{name}_descale": inputs.by_batch(inputs.scales[name]) for name in "qkv"}
    causal = bool(inputs.config.causal)

    def call() -> Tensor:
        found = fa3.flash_attn_func(q, k, v, causal=causal, **scales)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # some releases give the log-sum-exp too
        return out.transpose(1, 2)

    return Ready(call)


@cache
def _cudnn_handle() -> Any:
    return importlib.import_module("cudnn").create_handle()


def _cudnn_fp8(inputs: Inputs) -> Ready:
    """cuDNN's FP8 attention (sdpa_fp8 of its frontend), whose output on Hopper is E4M3 too."""
    cudnn = importlib.import_module("cudnn")
    types, handle, sizes, config = cudnn.data_type, _cudnn_handle(), inputs.sizes, inputs.config
    device = inputs.values["q"].device
    codes, scales = {}, {}
    for name in "qkv":
        whole, scale = quantize(inputs.values[name].unsqueeze(0), "e4m3")  # the whole tensor as one head
        codes[name] = _length_first(inputs, whole[0]).transpose(1, 2)
        scales[name] = scale.view(1, 1, 1, 1)
    out = torch.empty(
        sizes.batch, sizes.q_len, sizes.heads, config.head_dim, device=device, dtype=torch.uint8
    ).transpose(1, 2)  # fmt: skip

    def one(value: float) -> Tensor:
        return torch.full((1, 1, 1, 1), value, device=device)

    # An output is a mean of rows of V, so half of V's own range holds it whatever the softmax's weights round to.
    unit = 2.0 * float(scales["v"])
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    feed: dict[Any, Tensor] = {}

    def given(x: Tensor, kind: Any) -> Any:
        described = graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        feed[described] = x
        return described

    found = graph.sdpa_fp8(
        **{name: given(codes[name], types.FP8_E4M3) for name in "qkv"},
        **{f"descale_{name}": given(scales[name], types.FLOAT) for name in "qkv"},
        descale_s=given(one(1.0 / _CUDNN_WEIGHT_SCALE), types.FLOAT),
        scale_s=given(one(_CUDNN_WEIGHT_SCALE), types.FLOAT),
        scale_o=given(one(1.0 / unit), types.FLOAT),
        attn_scale=1.0 / math.sqrt(config.head_dim),
        is_inference=True,
        use_causal_mask=bool(config.causal),
    )
    for described, x, kind in (
        (found[0], out, types.FP8_E4M3), (found[2], one(0.0), types.FLOAT), (found[3], one(0.0), types.FLOAT)
    ):  # fmt: skip
        described.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
        feed[described] = x
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

    return Ready(call, unit)


def torch_call(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention by that backend alone."""

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def _torch(backend: SDPBackend) -> Callable[[Inputs], Ready]:
    """The same in bfloat16, of inputs."""

    def prepare(inputs: Inputs) -> Ready:
        q, k, v = (inputs.by_batch(inputs.values[name].bfloat16()) for name in "qkv")
        return Ready(torch_call(backend, q, k, v, bool(inputs.config.causal)))

    return prepare


#: By name, greenfast first.
CONTENDERS = {
    c.name: c
    for c in (
        Contender(OWN, "greenfast FP8", "fp8", "greenfast", "greenfast", True, None),
        Contender("fa3", "FA3 FP8", "fp8", "fa3_fwd_interface", "fa3-fwd", True, _flash_attention_3),
        Contender("cudnn", "cuDNN FP8", "fp8", "cudnn", "nvidia-cudnn-frontend", False, _cudnn_fp8),
        Contender("torch_flash", "torch flash bf16", "bf16", "torch", "torch", False,
                  _torch(SDPBackend.FLASH_ATTENTION)),
        Contender("torch_cudnn", "torch cuDNN bf16", "bf16", "torch", "torch", False,
                  _torch(SDPBackend.CUDNN_ATTENTION)),
    )
}  # fmt: skip
