"""Measure the kernel error by the number of keys, with one and with two levels of accumulation. Needs a Hopper GPU.

python -m benchmarks accumulation_error [--device 0] [--json FILE]

One head of 512 queries, inputs N(0, 1) as E4M3 codes; the error is relative (Frobenius), against attention in float64
on the codes. With one level the tensor cores accumulate P V over all tiles, keeping about 14 bits; with two they
accumulate one tile, and the tiles are summed in float32. At head dim 128 the tensor cores also sum the weights; at 256
with one level they are summed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage
from greenfast.kernels.attention import heuristics, hopper
from greenfast.kernels.attention.config import AttentionConfig, read_dims
from greenfast.kernels.attention.heuristics import Tiling
from greenfast.numerics.attention import attention
from greenfast.spec.problem import Case
from tasks.fp8_attention import problem as attention_problem

QUERIES = 512
LENGTHS = (512, 2048, 8192, 16384, 32768, 131072)
#: By head dim, the kernel with two levels; with one level it is the same at 128, and the overlapped kernel at 256.
TWO_LEVELS = {128: Tiling(128, 2, 4, 128, True, 8, overlap=True), 256: Tiling(128, 2, 2, 128, True)}
ONE_LEVEL = {
    128: replace(TWO_LEVELS[128], two_levels=False),
    256: Tiling(128, 2, 3, 256, overlap=True, two_levels=False),
}


@dataclass(frozen=True)
class ErrorRow:
    """The errors of both kernels at one number of keys."""

    head_dim: int
    keys: int
    one_level: float
    two_levels: float


def compute_reference(dims: Mapping[str, int], case: Case) -> torch.Tensor:
    """Compute attention in float64 on the codes of the case."""
    config, _ = read_dims(dims, "e4m3")
    codes = {
        name: (torch.from_numpy(case.inputs[name]), torch.from_numpy(case.inputs[f"{name}_scale"])) for name in "qkv"
    }
    q, k, v = (x.cuda() for x in attention_problem.dequantized(codes, config))
    return attention(q, k, v, config.head_dim**-0.5).cpu()


def measure_error(gpu: Gpu, dims: Mapping[str, int], case: Case, tiles: Tiling, wanted: torch.Tensor) -> float:
    """Measure the relative error of the kernel with these tiles."""

    def only(config: AttentionConfig, kv_len: int) -> tuple[Tiling, ...]:
        return (tiles,)

    with mock.patch.object(heuristics, "_candidates", only):
        attention_of = read_dims(dims, "e4m3")
        source, plan = hopper.kernel(*attention_of), hopper.launch(*attention_of)
    compiled = compile_kernel(source, hopper.TARGET)
    image = KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)
    bound = gpu.bind(Executable.single(image, plan), case)
    out = torch.from_numpy(bound.run()["out"].astype(np.float64))
    bound.free()
    return float((out - wanted).norm() / wanted.norm())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table and optionally write a record."""
    parser = make_parser("accumulation_error", __doc__)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    gpu = Gpu(args.device)
    rows = []
    print(f"{'head dim':>8} {'keys':>7} {'one level':>10} {'two levels':>10}")
    for head_dim in TWO_LEVELS:
        for keys in LENGTHS:
            dims = {"B": 1, "H": 1, "S": QUERIES, "KV": keys, "D": head_dim}
            case = attention_problem.make_case(dims, 0, "e4m3")
            wanted = compute_reference(dims, case)
            one, two = (measure_error(gpu, dims, case, tiles[head_dim], wanted) for tiles in (ONE_LEVEL, TWO_LEVELS))
            rows.append(ErrorRow(head_dim, keys, one, two))
            print(f"{head_dim:8d} {keys:7d} {one:10.5f} {two:10.5f}", flush=True)
    write_measurements(args.json, "accumulation_error", gpu.info(), queries=QUERIES, rows=rows)
