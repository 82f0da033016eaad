"""Packed sequences without a cache: ``greenfast.varlen_attn`` beside equal sequences in ``sdpa`` and FlashAttention.

python -m benchmarks varlen [--json FILE]     on a Hopper GPU
python -m benchmarks varlen --fixed-tiles [--json FILE]     instead, what GREENFAST_BATCH_INVARIANT costs ``sdpa``

Each case is timed interleaved in one process, as graphs of calls from bfloat16 tensors. Errors are relative
(Frobenius), against attention in float64 of two heads.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.timing import time_calls
from greenfast.judge.report.formatting import table
from greenfast.kernels.attention import heuristics

#: Query heads, KV heads, head dim.
HEADS = ((32, 8, 128), (64, 8, 64), (16, 8, 256))
TOKENS = 16384
CASES = {
    "16 x 1k": (1024,) * 16,
    "4 x 4k": (4096,) * 4,
    "1 x 16k": (16384,),
    "12 of 33 to 4000": (4000, 120, 2500, 60, 900, 3100, 33, 1800, 700, 2048, 512, 611),
}
WINDOW_TOKENS, WINDOWS = 32768, (1024, 4096)
#: Batch, query heads, length: from a small part of a GPU to many times its blocks.
FIXED_TILES = ((1, 8, 1024), (1, 32, 1024), (1, 32, 4096), (4, 32, 4096), (1, 32, 16384))
_FA3 = "fa3_fwd_interface"
varlen_attn: Any = greenfast.varlen_attn


def make_tensors(heads: tuple[int, int, int], tokens: int) -> list[Tensor]:
    """Return Q, K and V, (tokens, heads, head_dim) of bfloat16."""
    torch.manual_seed(0)
    query_heads, kv_heads, head_dim = heads
    sizes = (query_heads, kv_heads, kv_heads)
    return [torch.randn(tokens, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in sizes]


def make_starts(lengths: Sequence[int]) -> Tensor:
    """Return the starts of sequences, int32 (N + 1,)."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def contenders(tensors: Sequence[Tensor], lengths: Sequence[int], causal: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls by name."""
    q, k, v = tensors
    starts, longest = make_starts(lengths), max(lengths)
    at = (starts, starts, longest, longest)
    window = (-1, 0) if causal else (-1, -1)
    calls: dict[str, Callable[[], Any]] = {
        "varlen_attn": lambda: varlen_attn(q, k, v, *at, enable_gqa=True, window_size=window),
        "torch flash bf16": lambda: torch.ops.aten._flash_attention_forward(q, k, v, *at, 0.0, causal, False),
    }
    if len(set(lengths)) == 1:
        dense = [x.view(len(lengths), longest, *x.shape[1:]).transpose(1, 2) for x in tensors]
        calls["sdpa"] = lambda: greenfast.sdpa(dense[0], dense[1], dense[2], is_causal=causal, enable_gqa=True)
    if importlib.util.find_spec(_FA3):
        fa3 = importlib.import_module(_FA3)
        calls["FA3 bf16"] = lambda: fa3.flash_attn_varlen_func(q, k, v, *at, causal=causal)
    return calls


def measure_error(tensors: Sequence[Tensor], lengths: Sequence[int]) -> float:
    """Return the relative error of two heads under a causal mask."""
    q, k, v = tensors
    group = q.shape[1] // k.shape[1]
    starts, longest = make_starts(lengths), max(lengths)
    out = varlen_attn(q, k, v, starts, starts, longest, longest, enable_gqa=True, window_size=(-1, 0))
    difference = norm = 0.0
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        for head in (0, q.shape[1] - 1):
            a, b, c = q[rows, head].double(), k[rows, head // group].double(), v[rows, head // group].double()
            scores = (a @ b.T / math.sqrt(q.shape[2])).masked_fill(
                torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -math.inf
            )
            wanted = torch.softmax(scores, -1) @ c
            difference += float((out[rows, head].double() - wanted).square().sum())
            norm += float(wanted.square().sum())
    return math.sqrt(difference / norm)


def time_fixed_tiles(batch: int, heads: int, length: int, head_dim: int, causal: bool) -> dict[str, Any]:
    """Time ``sdpa`` with the tiles that are chosen for the call, and with those that any batch has."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: dict[str, Callable[[], Any]] = {}
    for name, fixed, scale in (("chosen", False, 0.1), ("fixed", True, 0.11)):  # two scales are two plans
        heuristics.BATCH_INVARIANT = fixed
        calls[name] = partial(greenfast.sdpa, q, k, v, is_causal=causal, scale=scale)
        calls[name]()
    heuristics.BATCH_INVARIANT = False
    return {"shape": [batch, heads, length, head_dim], "causal": causal, "us": time_calls(calls)}


def render_fixed_tiles(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the times with fixed tiles, as multiples of those with chosen ones, and its source."""
    parts = []
    for record in records:
        ratios = {(*row["shape"], row["causal"]): row["us"]["fixed"] / row["us"]["chosen"] for row in record["rows"]}
        shapes = dict.fromkeys(shape[:3] for shape in ratios)
        kinds = dict.fromkeys(shape[3:] for shape in ratios)
        header = ("batch, heads, length", *(f"D {dim}{', causal' if causal else ''}" for dim, causal in kinds))
        rows = [(" x ".join(map(str, shape)), *(f"{ratios[shape + kind]:.2f}" for kind in kinds)) for shape in shapes]
        sha = record["git"]["sha"][:10]
        parts.append(f"{table(header, rows)}\n\nMeasured on {record['device']}; commit {sha}.")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times, and write the record if asked to."""
    parser = make_parser("varlen", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--fixed-tiles", action="store_true", help="time sdpa with the tiles of any batch instead")
    args = parser.parse_args(argv)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    if args.fixed_tiles:
        rows = []
        for (batch, head_count, length), head_dim, causal in product(FIXED_TILES, (64, 128, 256), (False, True)):
            rows.append(time_fixed_tiles(batch, head_count, length, head_dim, causal))
            print(rows[-1], flush=True)
        return write_measurements(args.json, "fixed_tiles", torch.cuda.get_device_name(), rows=rows)
    times, windows, errors = [], [], []
    for heads in HEADS:
        tensors = make_tensors(heads, TOKENS)
        for case, lengths in CASES.items():
            for causal in (True, False):
                row = {"heads": heads, "lengths": case, "causal": causal}
                times.append(row | {"us": time_calls(contenders(tensors, lengths, causal))})
                print(times[-1], flush=True)
        errors.append({"heads": heads, "error": round(measure_error(tensors, CASES["12 of 33 to 4000"]), 4)})
        q, k, v = make_tensors(heads, WINDOW_TOKENS)
        at = (*[make_starts([WINDOW_TOKENS])] * 2, WINDOW_TOKENS, WINDOW_TOKENS)
        calls: dict[str, Any] = {
            str(width or "causal"): lambda left=width - 1, q=q, k=k, v=v, at=at: varlen_attn(
                q, k, v, *at, enable_gqa=True, window_size=(left, 0)
            )
            for width in (0, *WINDOWS)
        }
        windows.append({"heads": heads, "us": time_calls(calls)})
        print(windows[-1], errors[-1], flush=True)
        torch.cuda.empty_cache()
    write_measurements(args.json, "varlen", torch.cuda.get_device_name(), times=times, windows=windows, errors=errors)
