"""What ``precision="fp8_token"`` costs: times and errors beside the other precisions and bfloat16, with a causal mask.

python -m benchmarks token_scales [--json FILE]     on a Hopper GPU

Each shape is timed interleaved in one process, as graphs of eager calls. Errors are relative (Frobenius), against
attention in float64 on a sample of rows of the unquantized inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.sdpa_inputs import INPUTS, make_inputs, reference
from benchmarks.timing import time_calls

#: Batch, query heads, KV heads, length, head dim.
SHAPES = (
    (4, 32, 32, 4096, 64), (1, 32, 32, 16384, 64), (4, 16, 16, 4096, 128), (1, 16, 16, 16384, 128),
    (4, 32, 8, 4096, 128), (4, 8, 8, 4096, 256), (1, 8, 8, 16384, 256),
)  # fmt: skip
ERROR_LENGTH, ERROR_DIMS = 2048, (64, 128)
PRECISIONS = ("fp8", "int8", "int8_fine", "fp8_token")
_SAMPLED_ROWS = 256
_torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def time_shape(shape: tuple[int, ...]) -> dict[str, float]:
    """Return the median microseconds of a call by contender; (B, H, S, D) is a view of (B, S, H, D), as models have."""
    batch, heads, kv_heads, length, head_dim = shape
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, length, n, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    gqa = heads != kv_heads
    calls: dict[str, Any] = {
        name: lambda name=name: greenfast.sdpa(q, k, v, is_causal=True, enable_gqa=gqa, precision=name)
        for name in PRECISIONS
    }

    def by(backend: SDPBackend) -> Any:
        def call() -> Any:
            with sdpa_kernel(backend):
                return _torch_sdpa(q, k, v, is_causal=True, enable_gqa=gqa)

        return call

    calls |= {"torch cuDNN bf16": by(SDPBackend.CUDNN_ATTENTION), "torch flash bf16": by(SDPBackend.FLASH_ATTENTION)}
    return time_calls(calls)


def errors(kind: str, head_dim: int) -> dict[str, float]:
    """Return the relative error of each precision on inputs of a kind."""
    dims = {"B": 1, "H": 8, "HK": 8, "S": ERROR_LENGTH, "KV": ERROR_LENGTH, "D": head_dim, "CAUSAL": 1}
    inputs = make_inputs(dims, 0, kind, "cuda")
    expected = reference(inputs, _SAMPLED_ROWS, codes=False)
    tensors = inputs.bfloat16
    relative_errors = {}
    for name in PRECISIONS:
        out = greenfast.sdpa(*tensors, is_causal=True, precision=name)  # type: ignore[call-overload]
        relative_errors[name] = round(expected.check(out[0].float(), same_codes=False).error or 0.0, 4)
    return relative_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write the record if asked to."""
    parser = make_parser("token_scales", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    args = parser.parse_args(argv)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    times, error_rows = [], []
    for shape in SHAPES:
        us = time_shape(shape)
        times.append({"shape": shape, "us": us})
        print(shape, us, flush=True)
        torch.cuda.empty_cache()
    for kind in INPUTS:
        for head_dim in ERROR_DIMS:
            error_rows.append({"inputs": kind, "head_dim": head_dim, "errors": errors(kind, head_dim)})
            print(error_rows[-1], flush=True)
    write_measurements(args.json, "token_scales", torch.cuda.get_device_name(), times=times, errors=error_rows)
