"""The attention block: norm and RoPE of Q and K, then attention, fused with quantization and by torch.compile.

python -m benchmarks block [--json FILE] [--cases NAME ...]     on a Hopper GPU

Each case is timed interleaved in one process, as graphs of calls from bfloat16 tensors (B, S, H, D). In all backends
but ``block`` and ``block_int8``, torch.compile fuses norm and RoPE, and for the 8-bit libraries also the conversion of
Q, K and V to E4M3 with scales of the current tensors. torchao has kernels of its own for RoPE and conversion.
``prologue`` is norm and RoPE by torch.compile alone, ``quantize`` the fused pass alone, ``copy`` a copy that moves as
many bytes as it. Errors are relative (Frobenius), of sampled rows of two heads against float64.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from torch import Tensor

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.registry import GREENFAST, TORCH, BoundCall, Suite, time_backends
from benchmarks.sdpa_backends import FP8, build_cudnn_fp8
from greenfast.judge.report.formatting import table

_FA3 = ("fa3_fwd_interface", "fa3-fwd")
_EPS = 1e-6
_SAMPLED_ROWS, _MAX_ERROR = 256, 0.15
block: Any = greenfast.attention_block
quantize: Any = greenfast.quantize
sdpa: Any = greenfast.sdpa
torch_sdpa: Any = torch.nn.functional.scaled_dot_product_attention
_compile: Any = torch.compile


@dataclass(frozen=True)
class BlockCase:
    """A block of a model. interleaved: RoPE of diffusers, with tables in float32; else of transformers, in bfloat16.

    text: the first tokens, which have tensors and norms of their own, as in Flux's double blocks; in none of them, 0.
    layer: LayerNorm with biases, else RMSNorm. over_heads: the norm is over all heads. head_tables: each head has its
    own tables.
    """

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    causal: bool = False
    interleaved: bool = False
    rope: bool = True
    text: int = 0
    layer: bool = False
    over_heads: bool = False
    head_tables: bool = False


CASES = {
    "Wan-like": BlockCase(1, 40, 40, 32760, 128, interleaved=True),
    "Flux-like": BlockCase(1, 24, 24, 4608, 128, interleaved=True),
    "Flux-like, text and image": BlockCase(1, 24, 24, 4608, 128, interleaved=True, text=512),
    "video": BlockCase(1, 24, 24, 16384, 128, interleaved=True),
    "Llama-like, 8k": BlockCase(2, 32, 8, 8192, 128, causal=True),
    "Llama-like, 2k": BlockCase(8, 32, 8, 2048, 128, causal=True),
    "gpt-oss-like": BlockCase(2, 64, 8, 8192, 64, causal=True),
    "Gemma-like": BlockCase(2, 16, 8, 8192, 256, causal=True),
    "SD3-like": BlockCase(4, 24, 24, 4096, 64, rope=False),
    "LTX-like": BlockCase(1, 32, 32, 5120, 64, interleaved=True, over_heads=True, head_tables=True),
    "CogVideoX-like": BlockCase(1, 48, 48, 17776, 64, interleaved=True, layer=True),
    "16 x 1k": BlockCase(16, 16, 16, 1024, 128),
    "16 x 1k, causal": BlockCase(16, 16, 16, 1024, 128, causal=True),
}


class PartInputs(NamedTuple):
    """Tensors (B, S_i, H, D) of a part of a sequence, and the weights of its norms; with biases these are LayerNorm."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    q_norm_bias: Tensor | None = None
    k_norm_bias: Tensor | None = None


@dataclass(frozen=True)
class BlockInputs:
    """One or two parts of a sequence, and tables (S, D) or (S, H, D) for all of it or None."""

    case: BlockCase
    parts: tuple[PartInputs, ...]
    rope: tuple[Tensor, Tensor] | None

    @property
    def heads_first(self) -> list[Any]:
        """Q, K and V as (B, H, S, D), each a list if there are two parts."""
        turned = [[x.transpose(1, 2) for x in xs] for xs in tuple(zip(*self.parts, strict=True))[:3]]
        return turned if len(self.parts) > 1 else [xs[0] for xs in turned]

    def options(self) -> dict[str, Any]:
        """Return the options of ``attention_block`` and ``quantize``."""
        norms = {name: [getattr(part, name) for part in self.parts] for name in PartInputs._fields[3:]}
        rope = self.rope
        if rope is not None and self.case.head_tables:
            rope = rope[0].transpose(0, 1).unsqueeze(0), rope[1].transpose(0, 1).unsqueeze(0)
        return {
            **{name: xs[0] if len(xs) == 1 or xs[0] is None else xs for name, xs in norms.items()},
            "norm": "layer" if self.case.layer else "rms", "norm_eps": _EPS, "rope": rope,
            "rope_interleaved": self.case.interleaved,
        }  # fmt: skip


def make_inputs(case: BlockCase, device: str) -> BlockInputs:
    """Return random inputs in bfloat16."""
    torch.manual_seed(0)
    parts = []
    for tokens in (case.text, case.tokens - case.text) if case.text else (case.tokens,):
        q, k, v = (
            torch.randn(case.batch, tokens, n, case.head_dim, device=device, dtype=torch.bfloat16)
            for n in (case.heads, case.kv_heads, case.kv_heads)
        )
        shape = (case.heads, case.head_dim) if case.over_heads else (case.head_dim,)
        weights = torch.rand(2, *shape, device=device, dtype=torch.bfloat16) + 0.5
        biases = torch.randn(2, *shape, device=device, dtype=torch.bfloat16) / 5 if case.layer else (None, None)
        parts.append(PartInputs(q, k, v, weights[0], weights[1], biases[0], biases[1]))
    rope = None
    if case.rope:
        frequencies = 1e4 ** -torch.linspace(0.0, 1.0, case.head_dim // 2, device=device)
        angles = torch.outer(torch.arange(case.tokens, device=device), frequencies)
        if case.head_tables:
            angles = angles.unsqueeze(1) / torch.arange(1, case.heads + 1, device=device).unsqueeze(1)
        angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat([angles, angles], -1)
        dtype = torch.float32 if case.interleaved else torch.bfloat16
        rope = angles.cos().to(dtype), angles.sin().to(dtype)
    return BlockInputs(case, tuple(parts), rope)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor] | None, interleaved: bool) -> Tensor:
    """Rotate x (B, S, H, D) as models do, for torch.compile."""
    if rope is None:
        return x
    cos, sin = (table if table.dim() == 3 else table.unsqueeze(1) for table in rope)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([-b, a], -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute LayerNorm of x (B, S, H, D) with a bias, RMSNorm without, over the dimensions of the weight."""
    if bias is None:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, _EPS)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, _EPS)


def normalize_and_rotate(
    parts: Sequence[PartInputs], rope: tuple[Tensor, Tensor] | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize Q and K of each part, join the parts, and rotate Q and K. Return Q, K and V (B, S, H, D)."""
    normalized = [
        (normalize(p.q, p.q_norm, p.q_norm_bias), normalize(p.k, p.k_norm, p.k_norm_bias), p.v) for p in parts
    ]
    q, k, v = normalized[0] if len(parts) == 1 else (torch.cat(xs, 1) for xs in zip(*normalized, strict=True))
    return rotate(q, rope, interleaved), rotate(k, rope, interleaved), v


def to_e4m3(x: Tensor, scales: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Return codes of x (B, S, H, D), and scales in float32.

    There is one, (1, 1, 1, 1), if whole, else (B, scales), each of H / scales heads.
    """
    grouped = torch.unflatten(x.float(), 2, (scales, -1))
    peak = grouped.abs().amax().expand(1, 1, 1, 1) if whole else grouped.abs().amax((1, 3, 4))
    scale = peak.clamp_min(1e-12) / torch.finfo(FP8).max
    codes = grouped / (scale if whole else scale[:, None, :, None, None])
    return codes.flatten(2, 3).to(FP8), scale


def convert(
    parts: Sequence[PartInputs], rope: tuple[Tensor, Tensor] | None, interleaved: bool, whole: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Normalize and rotate Q and K, and return the E4M3 codes and the scales of Q, K and V: see ``to_e4m3``."""
    kv_heads = parts[0].k.shape[2]
    pairs = [to_e4m3(x, kv_heads, whole) for x in normalize_and_rotate(parts, rope, interleaved)]
    return [codes for codes, _ in pairs], [scale for _, scale in pairs]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for its exact sizes."""
    compiled: Callable[..., Any] = _compile(function, fullgraph=True, dynamic=False)
    return compiled


def _prologue(inputs: BlockInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and K after norm and RoPE, and V, as (B, S, H, D)."""
    rotated: tuple[Tensor, Tensor, Tensor] = _compiled(normalize_and_rotate)(
        inputs.parts, inputs.rope, inputs.case.interleaved
    )
    return rotated


def _convert(inputs: BlockInputs, whole: bool) -> tuple[list[Tensor], list[Tensor]]:
    converted: tuple[list[Tensor], list[Tensor]] = _compiled(convert)(
        inputs.parts, inputs.rope, inputs.case.interleaved, whole
    )
    return converted


#: All backends by name.
BACKENDS = Suite()
_register = BACKENDS.register


@_register("block", "attention_block, fp8", "fp8", GREENFAST, precision="fp8")
@_register("block_int8", "attention_block, int8", "int8", GREENFAST, precision="int8")
def _block(inputs: BlockInputs, precision: str) -> BoundCall:
    q, k, v = inputs.heads_first
    return BoundCall(lambda: block(q, k, v, inputs.case.causal, precision=precision, **inputs.options()))


@_register("sdpa", "sdpa, fp8", "fp8", GREENFAST, attend=sdpa)
@_register("torch", "PyTorch bf16", "bf16", TORCH, attend=torch_sdpa)
def _separate(inputs: BlockInputs, attend: Any) -> BoundCall:
    """Bind attention after the compiled prologue."""

    def call() -> Any:
        q, k, v = (x.transpose(1, 2) for x in _prologue(inputs))
        return attend(q, k, v, is_causal=inputs.case.causal, enable_gqa=inputs.case.heads != inputs.case.kv_heads)

    return BoundCall(call)


@_register("fa3_bf16", "FlashAttention-3 bf16", "bf16", _FA3)
def _fa3_bf16(inputs: BlockInputs) -> BoundCall:
    return BoundCall(lambda: _attend_by_fa3(inputs, *_prologue(inputs)))


@_register("fa3", "FlashAttention-3 FP8", "fp8", _FA3)
def _fa3(inputs: BlockInputs) -> BoundCall:
    def call() -> Tensor:
        codes, scales = _convert(inputs, whole=False)
        return _attend_by_fa3(inputs, *codes, **dict(zip(_DESCALES, scales, strict=True)))

    return BoundCall(call)


@_register("torchao", "torchao's RoPE and conversion, FlashAttention-3 FP8", "fp8", ("torchao", "torchao"))
def _torchao(inputs: BlockInputs) -> BoundCall:
    """Bind the kernels of torchao's fp8_fa3_rope_sdpa. Its own call needs FlashAttention-3 built with gradients."""
    rope = inputs.rope
    if rope is None:
        raise ValueError("the case has no RoPE")
    if inputs.case.head_tables:
        raise ValueError("its tables are the same for all heads")
    kernels = importlib.import_module("torchao.prototype.attention.quantization.triton_rope_qkv_quantization")

    def call() -> Tensor:
        normalized = _compiled(normalize_and_rotate)(inputs.parts, None, False)
        *codes, q_scale, k_scale, v_scale = kernels.triton_fp8_rope_sdpa_quantize(
            *normalized, *rope, rope_interleaved=inputs.case.interleaved
        )
        scales = dict(zip(_DESCALES, (q_scale, k_scale, v_scale), strict=True))
        return _attend_by_fa3(inputs, *(x.transpose(1, 2) for x in codes), **scales)

    return BoundCall(call)


_DESCALES = ("q_descale", "k_descale", "v_descale")


def _attend_by_fa3(inputs: BlockInputs, *tensors: Tensor, **scales: Tensor) -> Tensor:
    """Call FlashAttention-3 on (B, S, H, D); return (B, H, S, D)."""
    result = importlib.import_module(_FA3[0]).flash_attn_func(*tensors, causal=inputs.case.causal, **scales)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


@_register("sage", "SageAttention 2++", "int8", ("sageattention", "sageattention"))
def _sage(inputs: BlockInputs) -> BoundCall:
    """Bind SageAttention's kernel for Hopper.

    It launches on the default stream, which no graph can capture. A build from source that launches on the current
    stream can be timed.
    """
    attend: Any = importlib.import_module("sageattention").sageattn_qk_int8_pv_fp8_cuda_sm90

    def call() -> Tensor:
        out: Tensor = attend(*_prologue(inputs), tensor_layout="NHD", is_causal=inputs.case.causal)
        return out.transpose(1, 2)

    return BoundCall(call)


@_register("cudnn", "cuDNN FP8", "fp8", ("cudnn", "nvidia-cudnn-frontend"))
def _cudnn(inputs: BlockInputs) -> BoundCall:
    """Bind cuDNN's FP8 attention. Its output is E4M3, and a model needs bfloat16: the conversion is timed too."""
    codes, _ = _convert(inputs, whole=True)
    attend = build_cudnn_fp8([x.view(torch.uint8).transpose(1, 2) for x in codes], inputs.case.causal)

    def call() -> Tensor:
        codes, scales = _convert(inputs, whole=True)
        unit = 2.0 * scales[2]
        out = attend([x.view(torch.uint8).transpose(1, 2) for x in codes], scales, unit.reciprocal())
        decoded: Tensor = _compiled(_decode)(out, unit)
        return decoded

    return BoundCall(call)


def _decode(x: Tensor, unit: Tensor) -> Tensor:
    return (x.float() * unit).bfloat16()


@_register("prologue", "norm and RoPE alone", "none", TORCH, attention=False)
def _norm_and_rope(inputs: BlockInputs) -> BoundCall:
    return BoundCall(lambda: _prologue(inputs))


@_register("quantize", "fused pass alone", "none", GREENFAST, attention=False)
def _quantize(inputs: BlockInputs) -> BoundCall:
    q, k, v = inputs.heads_first
    return BoundCall(lambda: quantize(q, k, v, **inputs.options()).query)


@_register("copy", "copy of as many bytes", "none", TORCH, attention=False)
def _copy(inputs: BlockInputs) -> BoundCall:
    moved = 3 * sum(x.numel() for part in inputs.parts for x in part[:3])
    if inputs.rope is not None and inputs.case.head_tables:  # shared tables are a few percent, and not counted
        moved += sum(x.nbytes for x in inputs.rope)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=inputs.parts[0].q.device)
    target = torch.empty_like(source)
    return BoundCall(lambda: target.copy_(source))


def measure_error(inputs: BlockInputs, out: Tensor) -> float:
    """Return the relative error of sampled rows of the first and last head of the last sequence. out: (B, H, S, D)."""
    case = inputs.case
    rows = torch.arange(0, case.tokens, -(-case.tokens // _SAMPLED_ROWS), device=out.device)
    tables = None if inputs.rope is None else (inputs.rope[0].double(), inputs.rope[1].double())
    exact = [
        PartInputs(*(x[-1:].double() for x in p[:3]), *(x if x is None else x.double() for x in p[3:]))
        for p in inputs.parts
    ]
    every = normalize_and_rotate(exact, tables, case.interleaved)
    difference = norm = 0.0
    for head in (0, case.heads - 1):
        kv_head = head * case.kv_heads // case.heads
        q, k, v = (x[0, :, n] for x, n in zip(every, (head, kv_head, kv_head), strict=True))
        scores = q[rows] @ k.T / math.sqrt(case.head_dim)
        if case.causal:
            scores = scores.masked_fill(torch.arange(case.tokens, device=out.device) > rows[:, None], -math.inf)
        wanted = torch.softmax(scores, -1) @ v
        difference += float((out[-1, head, rows].double() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return math.sqrt(difference / norm)


#: Columns of the table: name of the backend, heading.
_COLUMNS = (
    ("block", "attention_block fp8"), ("block_int8", "int8"), ("sdpa", "sdpa fp8"), ("torch", "PyTorch bf16"),
    ("fa3_bf16", "FA3 bf16"), ("fa3", "FA3 FP8"), ("torchao", "torchao, FA3 FP8"), ("cudnn", "cuDNN FP8"),
    ("sage", "SageAttention 2++"),
)  # fmt: skip
_BASELINES = ("torch", "fa3_bf16")


def compare_with_bf16(us: Mapping[str, float | None], name: str) -> float | None:
    """Return the speed of a backend compared with the faster one of PyTorch and FlashAttention-3 in bfloat16."""
    times = [time for baseline in _BASELINES if (time := us.get(baseline))]
    own = us.get(name)
    return min(times) / own if times and own else None


def render_page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of kept records, and where each was measured."""
    parts = []
    for record in records:
        rows = []
        for row in record["times"]:
            us, gain = row["us"], compare_with_bf16(row["us"], "block")
            times = [f"{us[name]:.0f}" if us.get(name) else "-" for name, _ in _COLUMNS]
            bandwidth = f"{us['copy'] / us['quantize']:.0%}" if us.get("copy") and us.get("quantize") else "-"
            rows.append(
                (row["case"], *times, f"{gain:.2f}x" if gain else "-", bandwidth, f"{row['error']['block']:.3f}")
            )
        header = ("block, µs", *(label for _, label in _COLUMNS), "speed", "of copy bandwidth", "error")
        versions = f"commit {record['git']['sha'][:10]}; torch {record['environment']['torch']}"
        parts += [table(header, rows), f"Measured on {record['device']}; {versions}."]
    return "\n\n".join(parts)


#: Bars of the picture: name of the backend, label, colour.
_BARS = (
    ("block", "greenfast.attention_block, FP8", "#2a9d5c"),
    ("sdpa", "compiled norm and RoPE, greenfast.sdpa", "#9fd8b6"),
    ("fa3", "compiled norm, RoPE and conversion, FlashAttention-3 FP8", "#0072B2"),
    ("cudnn", "the same with cuDNN FP8", "#56B4E9"),
)


def picture(records: Sequence[Mapping[str, Any]]) -> str:
    """Draw the speed of each case compared with the faster attention in bfloat16, as SVG. records: of one device."""
    rows = [row for record in records for row in record["times"]]
    commits = ", ".join(record["git"]["sha"][:10] for record in records)
    with rc_context({"svg.hashsalt": "greenfast", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(_BARS)
        for n, (name, label, color) in enumerate(_BARS):
            speeds = [compare_with_bf16(row["us"], name) or 0.0 for row in rows]
            bars = axes.bar(
                [i + (n + 0.5) * width - 0.4 for i in range(len(rows))], speeds, width * 0.95, label=label, color=color
            )
            if name == "block":
                axes.bar_label(bars, [f"{speed:.2f}" if speed else "" for speed in speeds], fontsize=8, padding=1)
        axes.axhline(1.0, color="#444444", linewidth=0.8)
        labels = [row["case"].replace("-like, ", "-like\n").replace("-like", "\n-like") for row in rows]
        axes.set_xticks(range(len(rows)), [label.replace("x 1k, ", "x 1k\n") for label in labels], fontsize=8)
        axes.set_ylabel("speed, best 16-bit attention = 1")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
        figure.supxlabel(f"{records[0]['device']}, commit {commits}", fontsize=8)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times, and write the record if asked to."""
    parser = make_parser("block", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="the cases to time")
    args = parser.parse_args(argv)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    times: list[dict[str, Any]] = []
    for name in args.cases:
        torch.compiler.reset()  # each case has sizes of its own, and eight of them would be the limit
        inputs = make_inputs(CASES[name], "cuda")
        measured = time_backends(BACKENDS, inputs, list(BACKENDS), partial(measure_error, inputs), _MAX_ERROR)
        times.append({"case": name, **measured})
        gain = compare_with_bf16(measured["us"], "block")
        print(f"{name}: {gain and round(gain, 3)}x of the best bf16; {measured}", flush=True)
        torch.cuda.empty_cache()
        if args.json:
            write_measurements(args.json, "block", torch.cuda.get_device_name(), times=times)
    versions = {name: backend.describe().version for name, backend in BACKENDS.items()}
    write_measurements(args.json, "block", torch.cuda.get_device_name(), times=times, versions=versions)
