"""Disassembling and counting the instructions of real machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from greenfast.device import machine_code, tool_process, toolchain
from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import count_instructions, disassemble, find_unawaited_stores
from greenfast.judge.task import Counter
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import KernelSource

pytestmark = pytest.mark.usefixtures("cache_folder")

# An E4M3 mma, one cp.async, one exp2, barriers; and a second kernel that must not be counted.
TILE = """extern "C" __global__ void tile(float* out, const void* in, unsigned a, unsigned b) {
    __shared__ char stage[256];
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(stage));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(in) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a), "r"(b));
    unsigned m0;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(m0) : "r"(address));
    out[threadIdx.x] = exp2f(c0) + c1 + c2 + c3 + stage[threadIdx.x] + m0 + __syncthreads_count(b > 1);
}
extern "C" __global__ void other(float* out, int n) {
    float v[64];
    for (int i = 0; i < 64; ++i) v[(i * n) & 63] = out[i];
    out[0] = v[n & 63];
}
"""
WMMA = """#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void wmma_tile(const half* a, const half* b, float* c, signed char* d, int* e) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
    wmma::fragment<wmma::matrix_a, 16, 16, 16, signed char, wmma::row_major> ga;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, signed char, wmma::col_major> gb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, int> gc;
    wmma::fill_fragment(gc, 0);
    wmma::load_matrix_sync(ga, d, 16);
    wmma::load_matrix_sync(gb, d + 256, 16);
    wmma::mma_sync(gc, ga, gb, gc);
    wmma::store_matrix_sync(e, gc, 16, wmma::mem_row_major);
}
"""
WGMMA = """extern "C" __global__ void wgmma_tile(float* out, unsigned long long a, unsigned long long b) {
    float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, 1, 1, 1;"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "l"(a), "l"(b));
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    out[threadIdx.x] = c0 + c1 + c2 + c3;
}
"""


def sass(text: str, entry: str, target: str) -> str:
    kernel = compile_kernel(KernelSource(entry, text, "k.cu", (), (128, 1, 1)), Target(target))
    return disassemble(kernel.cubin, entry)


def test_ada_tile() -> None:
    counts = count_instructions(sass(TILE, "tile", "sm_89"))
    assert counts.keys() == {*get_args(Counter), "total"}
    assert (counts["cp_async"], counts["qmma"], counts["hmma"], counts["mufu_ex2"], counts["ldsm"]) == (1, 1, 0, 1, 1)
    assert counts["bar_sync"] == 2
    assert counts["local_memory"] == 0
    assert 20 < counts["total"] < 200


def test_hopper_has_no_warp_level_fp8_mma() -> None:
    # ptxas unpacks the E4M3 operands to half and uses two HMMA: only wgmma computes in FP8 there.
    counts = count_instructions(sass(TILE, "tile", "sm_90a"))
    assert (counts["cp_async"], counts["qmma"], counts["hmma"]) == (1, 0, 2)


def test_wgmma() -> None:
    counts = count_instructions(sass(WGMMA, "wgmma_tile", "sm_90a"))
    assert (counts["qgmma"], counts["hgmma"]) == (1, 1)


def test_wmma() -> None:
    counts = count_instructions(sass(WMMA, "wmma_tile", "sm_89"))
    assert counts["hmma"] == 2
    assert counts["imma"] >= 2


def test_only_the_kernel_asked_for() -> None:
    counts = count_instructions(sass(TILE, "other", "sm_89"))
    assert counts["local_memory"] > 0
    assert counts["cp_async"] == counts["qmma"] == 0


@pytest.mark.parametrize("size", [None, 1])
def test_kernels_of_a_small_module_are_listed_together(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's module may have thousands, which take nvdisasm many seconds: it lists one."""
    listings = []
    if size:
        monkeypatch.setattr(machine_code, "_SMALL_CUBIN", size)

    def run(*args: Any, **options: Any) -> Any:
        listings.append(ran(*args, **options))
        return listings[-1]

    ran = tool_process.run_tool
    monkeypatch.setattr(machine_code, "run_tool", run)
    text = f"{TILE}// {size}"
    other = sass(text, "other", "sm_90a")
    assert ".text.other," in listings[0].output
    assert (".text.tile," in listings[0].output) == (size is None)
    assert ".text.tile," in sass(text, "tile", "sm_90a")
    assert ".text.tile," not in other
    assert len(listings) == 1 + bool(size)


def test_counts_instructions_not_text() -> None:
    listing = """
        //## File "LDGSTS.cu", line 3
.L_x_1:
        /*0000*/                   MOV R1, c[0x0][0x28] ;            /* 0x00000a0000017a02 */
                                                                     /* 0x000fe40000000f00 */
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R11], desc[UR6][R2.64] ;
        /*0020*/              @UP1 UIADD3 UR4, UP0, UR4, 0xc, URZ ;
        /*0030*/               @P6 LDL.LU R4, [R1+0x8] ;
        /*0040*/                   STL.64 [R1], R2 ;
        /*0050*/                   BAR.ARV 0x1, 0x80 ;
        /*0060*/                   MUFU.EX2.F16 R3, R3 ;
        /*0070*/                   MUFU.RCP R3, R3 ;
        /*10080*/                  LDLX R3 ;
        /*10090*/                  NOP;
        // HMMA.16816.F32
"""
    counts = count_instructions(listing)
    assert counts["total"] == 9
    assert {name: n for name, n in counts.items() if n and name != "total"} == {
        "cp_async": 1,
        "local_memory": 2,
        "mufu_ex2": 1,
    }


def test_sass_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compile_kernel(KernelSource("tile", TILE, "tile.cu", (), (128, 1, 1)), Target("sm_89"))
    first = disassemble(kernel.cubin, "tile")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("disassembled twice")

    monkeypatch.setattr(machine_code, "run_tool", fail)
    assert disassemble(kernel.cubin, "tile") == first


def test_failures_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="nvdisasm cannot read the machine code of 'k': "):
        disassemble(b"not a cubin", "k")
    kernel = compile_kernel(KernelSource("tile", TILE, "tile.cu", (), (128, 1, 1)), Target("sm_89"))
    with pytest.raises(MachineError, match="the machine code has no kernel 'til'"):
        disassemble(kernel.cubin, "til")
    monkeypatch.setattr(toolchain, "find_nvidia_binary_utility", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"pip: nvidia-cuda-nvdisasm, part of 'greenfast\[judge\]'"):
        disassemble(kernel.cubin, "tile")


LISTING = """	.section	.text.k,"ax",@progbits
.text.k:
        /*0000*/              @P0 BRA `(.L_x_1) ;
        /*0010*/                  {store} ;
        /*0020*/                  UTMACMDFLUSH ;
.L_x_1:
        /*0030*/                  {wait} ;
        /*0040*/                  EXIT ;
"""


@pytest.mark.parametrize(
    "store", ["UBLKCP.G.S [UR6], [UR4], UR5", "UTMASTG.2D [UR4], [UR6]", "UBLKRED.G.S.ADD [UR6], [UR4], UR5"]
)
def test_a_bulk_store_that_machine_code_does_not_await_is_found(store: str) -> None:
    awaited = LISTING.format(store=store, wait="DEPBAR.LE SB0, 0x0")
    assert find_unawaited_stores(awaited) == []
    for wait in ("NOP", "DEPBAR.LE SB0, 0x1", "BAR.SYNC 0x0"):
        assert find_unawaited_stores(LISTING.format(store=store, wait=wait)) == [f"{store.split()[0]} at 0010"]
    assert find_unawaited_stores(LISTING.format(store="UBLKCP.S.G [UR6], [UR4], UR5", wait="NOP")) == []
