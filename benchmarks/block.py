"""The attention block: RMSNorm and RoPE of Q and K, then attention, fused with quantization and by torch.compile.

python -m benchmarks block [--json FILE] [--cases NAME ...]     on a Hopper GPU

Each case is timed interleaved in one process, as graphs of calls from bfloat16 tensors (B, S, H, D). ``prologue`` is
norm and RoPE by torch.compile alone, ``quantize`` the fused pass alone, ``copy`` a copy that moves as many bytes as it.
Errors are relative (Frobenius), of the block of two heads, against float64.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.timing import time_calls

_FA3 = "fa3_fwd_interface"
_EPS = 1e-6
block: Any = greenfast.attention_block
quantize: Any = greenfast.quantize
sdpa: Any = greenfast.sdpa
torch_sdpa: Any = torch.nn.functional.scaled_dot_product_attention
_compile: Any = torch.compile


@dataclass(frozen=True)
class BlockCase:
    """A block of a model. interleaved: RoPE of diffusers, with tables in float32; else of transformers, in bfloat16."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    causal: bool = False
    interleaved: bool = False
    rope: bool = True


CASES = {
    "Wan-like": BlockCase(1, 40, 40, 32760, 128, interleaved=True),
    "Flux-like": BlockCase(1, 24, 24, 4608, 128, interleaved=True),
    "video": BlockCase(1, 24, 24, 16384, 128, interleaved=True),
    "Llama-like, 8k": BlockCase(2, 32, 8, 8192, 128, causal=True),
    "Llama-like, 2k": BlockCase(8, 32, 8, 2048, 128, causal=True),
    "gpt-oss-like": BlockCase(2, 64, 8, 8192, 64, causal=True),
    "Gemma-like": BlockCase(2, 16, 8, 8192, 256, causal=True),
    "SD3-like": BlockCase(4, 24, 24, 4096, 64, rope=False),
    "16 x 1k": BlockCase(16, 16, 16, 1024, 128),
    "16 x 1k, causal": BlockCase(16, 16, 16, 1024, 128, causal=True),
}


@dataclass(frozen=True)
class BlockInputs:
    """Tensors (B, S, H, D), the weights of the norms, and tables (S, D) or None."""

    case: BlockCase
    q: Tensor
    k: Tensor
    v: Tensor
    weights: tuple[Tensor, Tensor]
    rope: tuple[Tensor, Tensor] | None

    def options(self) -> dict[str, Any]:
        """Return the options of ``attention_block`` and ``quantize``."""
        return {
            "q_norm": self.weights[0], "k_norm": self.weights[1], "norm_eps": _EPS, "rope": self.rope,
            "rope_interleaved": self.case.interleaved,
        }  # fmt: skip


def make_inputs(case: BlockCase, device: str) -> BlockInputs:
    """Return random inputs in bfloat16."""
    torch.manual_seed(0)
    sizes = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (
        torch.randn(case.batch, case.tokens, n, case.head_dim, device=device, dtype=torch.bfloat16) for n in sizes
    )
    weights = torch.rand(2, case.head_dim, device=device, dtype=torch.bfloat16) + 0.5
    rope = None
    if case.rope:
        frequencies = 1e4 ** -torch.linspace(0.0, 1.0, case.head_dim // 2, device=device)
        angles = torch.outer(torch.arange(case.tokens, device=device), frequencies)
        angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat([angles, angles], -1)
        dtype = torch.float32 if case.interleaved else torch.bfloat16
        rope = angles.cos().to(dtype), angles.sin().to(dtype)
    return BlockInputs(case, q, k, v, (weights[0], weights[1]), rope)


def normalize_and_rotate(x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor] | None, interleaved: bool) -> Tensor:
    """Normalize and rotate x (B, S, H, D) as models do, for torch.compile."""
    x = torch.nn.functional.rms_norm(x, (x.shape[3],), weight, _EPS)
    if rope is None:
        return x
    cos, sin = (table.unsqueeze(1) for table in rope)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([-b, a], -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def contenders(inputs: BlockInputs) -> dict[str, Callable[[], Any]]:
    """Return the calls by name."""
    case, rope = inputs.case, inputs.rope
    torch.compiler.reset()  # each case has sizes of its own, and eight of them would be the limit
    transform = _compile(normalize_and_rotate, fullgraph=True, dynamic=False)

    def prologue() -> tuple[Tensor, Tensor, Tensor]:
        q, k = (
            transform(x, w, rope, case.interleaved) for x, w in zip((inputs.q, inputs.k), inputs.weights, strict=True)
        )
        return q, k, inputs.v

    def heads_first(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(x.transpose(1, 2) for x in tensors)

    q, k, v = heads_first((inputs.q, inputs.k, inputs.v))
    prologue()  # compiles, which a graph cannot capture
    source = torch.empty((q.numel() + k.numel() + v.numel()) * 3 // 2, dtype=torch.uint8, device=q.device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {
        "attention_block": lambda: block(q, k, v, case.causal, **inputs.options()),
        "prologue, sdpa": lambda: sdpa(*heads_first(prologue()), is_causal=case.causal, enable_gqa=True),
        "prologue, torch": lambda: torch_sdpa(*heads_first(prologue()), is_causal=case.causal, enable_gqa=True),
        "prologue": prologue,
        "quantize": lambda: quantize(q, k, v, **inputs.options()).query,
        "copy": lambda: target.copy_(source),
    }
    if importlib.util.find_spec(_FA3):
        fa3 = importlib.import_module(_FA3)
        calls["prologue, FA3 bf16"] = lambda: fa3.flash_attn_func(*prologue(), causal=case.causal)
    return calls


def measure_error(inputs: BlockInputs) -> float:
    """Return the relative error of the first and last head of the block, of up to 4,096 tokens."""
    case = inputs.case
    rows = slice(0, 4096)
    kv_heads = [0, case.kv_heads - 1]
    q, k, v = (
        x[:1, rows, kept].contiguous()
        for x, kept in ((inputs.q, [0, case.heads - 1]), (inputs.k, kv_heads), (inputs.v, kv_heads))
    )
    rope = None if inputs.rope is None else (inputs.rope[0][rows], inputs.rope[1][rows])
    out = block(*(x.transpose(1, 2) for x in (q, k, v)), case.causal, **inputs.options() | {"rope": rope})
    tables = None if rope is None else (rope[0].double(), rope[1].double())
    wide = [
        normalize_and_rotate(x.double(), w.double(), tables, case.interleaved)
        for x, w in zip((q, k), inputs.weights, strict=True)
    ]
    wanted = torch_sdpa(*(x.transpose(1, 2) for x in (*wide, v.double())), is_causal=case.causal)
    return float((out.double() - wanted).norm() / wanted.norm())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times, and write the record if asked to."""
    parser = make_parser("block", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="the cases to time")
    args = parser.parse_args(argv)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    times = []
    for name in args.cases:
        inputs = make_inputs(CASES[name], "cuda")
        us = time_calls(contenders(inputs))
        row = {"case": name, "error": round(measure_error(inputs), 4), "us": us}
        row["copy_share"] = round(us["copy"] / us["quantize"], 3)
        times.append(row)
        print(row, flush=True)
        torch.cuda.empty_cache()
    write_measurements(args.json, "block", torch.cuda.get_device_name(), times=times)
