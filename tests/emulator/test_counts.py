"""Counts: of memory accesses, of WMMA's against its machine code, of a whole kernel against an H100."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel, to_ptx
from greenfast.device.machine_code import disassemble
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.counts import Counts
from greenfast.judge.record_io import read_content
from greenfast.judge.task import load
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.emulator.kernels import run

ROOT = Path(__file__).parents[2]
MEASURED = {
    row["variant"]: row["hardware"]
    for row in read_content(ROOT / "evidence/emulator-h200.json")["rows"]
    if row["shape"] == "b1_h8_s512_d64"
}


def counted(body: str, elements: int = 32, *, threads: int = 32, before: str = "") -> Counts:
    return run(
        body,
        {"x": np.arange(elements, dtype=np.float32)},
        {"y": (elements, "float32")},
        parameters="const float* x, float* y",
        args=("x", "y"),
        threads=threads,
        before=before,
    ).counts


@pytest.mark.parametrize(("stride", "conflicts", "sectors"), [(1, 0, 4), (2, 1, 8), (32, 31, 32), (33, 0, 32)])
def test_bank_conflicts_and_sectors_of_a_stride(stride: int, conflicts: int, sectors: int) -> None:
    result = counted(
        f"__shared__ float s[32 * {stride}]; s[threadIdx.x * {stride}] = x[threadIdx.x]; __syncwarp();\n"
        f"y[threadIdx.x * {stride}] = s[threadIdx.x * {stride}];",
        32 * stride,
    )
    assert (result.shared_load_conflicts, result.shared_store_conflicts) == (conflicts, conflicts)
    assert result.bank_conflicts == ({"k.cu:1": conflicts, "k.cu:2": conflicts} if conflicts else {})
    assert result.global_store_sectors == sectors
    assert (result.shared_load_bytes, result.global_load_bytes) == (128, 128)


def test_warps_of_many_patterns_count_like_one_by_one() -> None:
    """Data may decide the addresses, and warps may not be whole: each is counted here word by word."""
    rng = np.random.default_rng(3)
    for size in (1, 4, 8, 16):
        threads = np.sort(rng.permutation(256)[:200]) if size < 8 else np.arange(256)
        offsets = rng.integers(0, 64, len(threads)) * max(size, 4)
        result = Counts()
        result.access("shared", False, offsets, threads, size, None)
        wanted = 0
        lanes_per_part = 32 * 4 // max(size, 4)
        for part in set(threads // lanes_per_part):
            words: set[int] = set()
            for offset in offsets[threads // lanes_per_part == part]:
                words |= {int(offset) // 4 + n for n in range(max(size // 4, 1))}
            wanted += max(sum(word % 32 == bank for word in words) for bank in range(32)) - 1
        assert result.shared_load_conflicts == wanted > 0


def test_asynchronous_copies_count_in_both_memories() -> None:
    result = counted(
        "__shared__ __align__(16) float s[128]; int i = 4 * threadIdx.x; greenfast::ptx::cp_async_16(s + i, x + i, 16);"
        "greenfast::ptx::cp_async_commit(); greenfast::ptx::cp_async_wait<0>(); y[threadIdx.x] = s[i];",
        128,
        before='#include "ptx/cp_async.cuh"',
    )
    assert (result.global_load_bytes, result.global_load_sectors, result.shared_store_bytes) == (512, 16, 512)


WMMA = """__shared__ __align__(32) half a[16 * 32];
__shared__ __align__(32) float c[16 * 32];
for (int i = threadIdx.x; i < 512; i += 32) {{ a[i] = x[i]; c[i] = x[i]; }}
__syncthreads();
wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::{a}_major> fa;
wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::{b}_major> fb;
wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
wmma::load_matrix_sync(fa, a, {pitch_a});
wmma::load_matrix_sync(fb, a, {pitch_a});
wmma::load_matrix_sync(fc, c, {pitch_c}, wmma::mem_{c}_major);
wmma::mma_sync(fc, fa, fb, fc);
__syncthreads();
wmma::store_matrix_sync(c, fc, {pitch_c}, wmma::mem_{c}_major);
__syncthreads();
for (int i = threadIdx.x; i < 512; i += 32) y[i] = c[i];"""
WMMA_HEADER = "#include <mma.h>\nusing namespace nvcuda;"


@pytest.mark.parametrize(
    ("a", "b", "c"),  # each pair of layouts
    [
        *(("row", "col", "col"), ("col", "row", "col")),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("row", "row", "row"), ("col", "col", "row"))),
    ],
)
def test_wmma_accesses_are_those_of_the_machine_code(a: str, b: str, c: str) -> None:
    """Layouts of the WMMA counts: ldmatrix for halves, pairs of a row (or single elements) for floats."""
    body = WMMA.format(a=a, b=b, c=c, pitch_a=24, pitch_c=20)
    source = f'{WMMA_HEADER}\nextern "C" __global__ void k(const float* x, float* y) {{\n{body}\n}}'
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (32, 1, 1))
    for target in ("sm_89", "sm_90a"):
        sass = disassemble(compile_kernel(kernel, Target(target)).cubin, "k")
        transposed = (a == "col") + (b == "row")
        assert len(re.findall(r"LDSM\.16\.M88\.4", sass)) == 2 - transposed
        assert len(re.findall(r"LDSM\.16\.MT88\.4", sass)) == transposed
        assert len(re.findall(r"STS\.64 ", sass)) == len(re.findall(r"LDS\.64 ", sass)) == (4 if c == "row" else 0)
        if c == "row":  # 8 rows on, 8 columns on, and both, of a pitch of 20 floats
            result = re.findall(r"STS\.64 \[[^\]]*?(?:\+0x(\w+))?\]", sass)
            offsets = [int(offset or "0", 16) for offset in result]
            assert [offset - offsets[0] for offset in offsets] == [0, 8 * 20 * 4, 8 * 4, 8 * 20 * 4 + 8 * 4]


@pytest.mark.parametrize(
    ("layout", "pitch_a", "pitch_c", "loads", "stores"),
    [
        # Eight rows of 48 bytes begin in eight different groups of four banks. Of 24 floats, four rows of 8 banks each
        # begin at banks 0, 24, 16 and 8.
        ("row", 24, 24, 0, 0),
        # Eight rows of 64 bytes share two groups of banks: 4 passes for 1, in 2 x 4 matrices. Four rows of 32 floats
        # share 8 banks: 4 passes for 1, in 4 accesses of two halves of a warp.
        ("row", 32, 32, 2 * 4 * 3 + 4 * 2 * 3, 4 * 2 * 3),
        # Stored by columns, an element is at column * pitch + row: columns 0, 2, 4 and 6 of 24 floats begin at banks 0,
        # 16, 0 and 16: 2 passes for 1, in 8 accesses.
        ("col", 24, 24, 8, 8),
    ],
)
def test_bank_conflicts_of_wmma(layout: str, pitch_a: int, pitch_c: int, loads: int, stores: int) -> None:
    body = WMMA.format(a="row", b="col", c=layout, pitch_a=pitch_a, pitch_c=pitch_c)
    result = counted(body, 512, before=WMMA_HEADER)
    lines = {line: n for line, n in result.bank_conflicts.items() if line in ("k.cu:8", "k.cu:9", "k.cu:10", "k.cu:13")}
    assert lines.pop("k.cu:13", 0) == stores
    assert sum(lines.values()) == loads


@pytest.mark.slow
def test_store_conflicts_and_sectors_are_the_measured_ones() -> None:
    """Use a rung with WMMA and without cp.async, because its copies disturb other accesses unpredictably."""
    task = load("fp8_sdpa")
    toggles, dims = task.config.variant("wmma_qk").values, task.config.shape("mission").dims
    source = task.family.kernel(toggles, "e4m3", dims)
    case = task.problem.make_case(dims, 0, "e4m3")
    result = run_grid(
        to_ptx(source, Target("sm_90a"), assemble=False),
        source.entry,
        source.block,
        source.dynamic_smem_bytes,
        task.family.launch(toggles, "e4m3", dims),
        case.inputs,
        case.outputs,
    ).counts
    measured = MEASURED["wmma_qk"]

    def sum_of(metric: str) -> float:
        return float(measured[f"l1tex__{metric}.sum"].replace(",", ""))

    assert result.shared_store_conflicts == sum_of("data_bank_conflicts_pipe_lsu_mem_shared_op_st")
    assert result.global_load_sectors == sum_of("t_sectors_pipe_lsu_mem_global_op_ld")
    assert result.global_store_sectors == sum_of("t_sectors_pipe_lsu_mem_global_op_st")
