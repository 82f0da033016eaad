"""Correct kernels, and kernels that the emulator cannot run: neither is a fault of the kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.device.session import Executable, KernelImage
from greenfast.emulator import grid, rerun
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.result import GridResult
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.spec.errors import UnsupportedError
from greenfast.spec.kernel import Launch, Packed, Struct, TensorMap
from greenfast.spec.problem import OutputSpec
from tests.emulator.hopper import HOPPER, request
from tests.emulator.hopper import run as run_hopper
from tests.emulator.kernels import run
from tests.emulator.test_ptx_text import HEAD

X = np.linspace(-2, 5, 64, dtype=np.float32)


def masked(body: str, n: int, before: str = "") -> np.ndarray:
    """Return y of 64 threads; only the first ``n`` threads have an element."""
    result = run(
        body,
        {"x": X, "y": np.zeros(64, np.float32)},
        {"y": (64, "float32")},
        parameters="const float* x, float* y, int n",
        args=("x", "y", np.int32(n)),
        before=before,
        threads=64,
    )
    return result.outputs["y"]


PADDING = """
__shared__ float s[64];
int t = threadIdx.x;
if (t < n) s[t] = x[t];
__syncthreads();
float v = s[t], r = 1;
"""


@pytest.mark.parametrize("n", [0, 1, 31, 35, 64])
@pytest.mark.parametrize(
    "body",
    [
        # Loops with a trip count from a padding thread's uninitialised values; they change only that thread's
        # registers.
        "int m = v != v || v == 0 ? 1 : 5;\n#pragma unroll 1\nfor (int i = 0; i < m; i++) r = r * v + i;",
        "#pragma unroll 1\nfor (int i = 0; i < ((int)__float_as_uint(v) & 7); i++) r = r * v + i;",
        "if (v > 1) { r = __fdividef(1.f, v); } else if (v < -1) { r = sqrtf(-v); } else r = v * v;",
    ],
)
def test_padding_threads_may_branch_on_what_nothing_has_written(body: str, n: int) -> None:
    result = masked(f"{PADDING}{body}\nif (t < n) y[t] = r;", n)
    whole = masked(f"{PADDING}{body}\nif (t < n) y[t] = r;", 64)
    assert (result[:n] == whole[:n]).all()
    assert not result[n:].any()


@pytest.mark.parametrize(
    "body",
    [
        "if (v > 1) r = 2; y[t] = r;",
        "if (v > 1) atomicAdd(y, 1.f);",
        "if (t < n) y[t] = r; if (t >= n && v > 1) y[t] = 0;",
        "if (t < n) y[t] = r; if (t >= n && v > 1) __threadfence(), atomicAdd(y, 0.f);",
        "float w = __shfl_down_sync(~0u, v, 1); if (t < n) y[t] = w;",
    ],
)
def test_garbage_that_reaches_memory_is_a_fault(body: str) -> None:
    with pytest.raises(KernelFaultError, match="read of an element that nothing has written"):
        masked(PADDING + body, 35)


def test_how_often_a_thread_polls_is_no_effect() -> None:
    """It depends on the order of threads: a decode kernel of serving/ polls more often with other garbage."""
    polls = ("mbarrier.try_wait.parity", "mbarrier.test_wait.parity", "ld.acquire.gpu", "bra")
    effects = ("mbarrier.arrive", "st.shared", "bar", "wgmma.mma_async")
    counts: Any = SimpleNamespace(counts=SimpleNamespace(threads=dict.fromkeys((*polls, *effects), 3)))
    assert rerun._effects(counts) == dict.fromkeys(effects, 3)


def outputs(body: str, n: int = 40) -> GridResult:
    """Run 64 threads with two uninitialised outputs."""
    return run(
        "int t = threadIdx.x; volatile float* a = y;\n" + body,
        {},
        {"y": (64, "float32"), "z": (64, "float32")},
        parameters="float* y, float* z, int n",
        args=("y", "z", np.int32(n)),
        threads=64,
    )


def test_a_discarded_read_of_an_output_that_nothing_has_written_is_no_fault() -> None:
    result = outputs("if (t < n) y[t] = t; __syncthreads(); float v = a[t]; if (t < n) z[t] = v;")
    assert (result.outputs["z"][:40] == np.arange(40)).all()
    assert result.unwritten == {"y": 96, "z": 96}


@pytest.mark.parametrize(
    "body",
    [
        "if (t < n) y[t] = t; __syncthreads(); z[t] = a[t];",
        "y[t] = 0; atomicAdd(z + t, 1.f);",
        "y[t] = 1; if (a[63 - t % 2] > z[t]) z[t] = 2;",
        "if (a[t] != 7) y[t] = 7; z[t] = 1;",
    ],
)
def test_a_read_of_an_output_that_matters_is_a_fault(body: str) -> None:
    with pytest.raises(KernelFaultError, match="that nothing has written: byte"):
        outputs(body)


@pytest.mark.parametrize("n", [33, 64, 65, 128, 150, 192])
def test_the_owner_of_an_address_is_the_thread_that_stores_to_it(n: int) -> None:
    """Threads beyond the end load the last element, which its owner, a higher thread, updates."""
    y = np.arange(192, dtype=np.float32)
    result = run(
        "float v[3]; for (int u = 0; u < 3; u++) v[u] = y[min(n - 1, (int)threadIdx.x + u * (int)blockDim.x)];\n"
        "for (int u = 0; u < 3; u++) { int i = threadIdx.x + u * blockDim.x; if (i < n) y[i] = v[u] * 2; }",
        {"y": y},
        {"y": (192, "float32")},
        parameters="float* y, int n",
        args=("y", np.int32(n)),
        threads=64,
    )
    assert (result.outputs["y"] == np.where(np.arange(192) < n, 2 * y, y)).all()


def test_a_clamped_load_that_matters_is_a_race() -> None:
    with pytest.raises(KernelFaultError, match="data race"):
        run(
            "float v = y[min(n - 1, (int)threadIdx.x)]; if (threadIdx.x < n) y[threadIdx.x] = v * 2;"
            "if (threadIdx.x >= n) y[threadIdx.x] = v;",
            {"y": X},
            {"y": (64, "float32")},
            parameters="float* y, unsigned n",
            args=("y", np.uint32(40)),
            threads=64,
        )


@pytest.mark.parametrize("back", [4, 8, 64, 256])
@pytest.mark.parametrize("access", ["shared", "generic"])
def test_shared_addresses_of_32_bits_wrap(back: int, access: str) -> None:
    ptx = f"""{HEAD}.visible .entry k(.param .u64 out) {{
    .shared .align 16 .b8 tile[64]; .reg .u64 p; .reg .u32 r, v; .reg .v4 .u32 q;
    ld.param.u64 p, [out]; mov.u32 r, tile; st.shared.u32 [r], 7; sub.u32 r, r, {back};
    st.shared.u32 [r+{back + 4}], 8; ld.shared.v2.u32 {{q.x, q.y}}, [r+{back}];
    {"atom.shared.add.u32 v, [r+" + str(back) + "], 1;" if access == "shared" else "mov.u32 v, q.x;"}
    st.global.v2.u32 [p], {{v, q.y}}; ret; }}"""
    y = run_grid(ptx, "k", (1, 1, 1), 0, Launch((1, 1, 1), ("y",)), {}, {"y": OutputSpec((2,), "uint32")}).outputs["y"]
    assert y.tolist() == [7, 8]


def test_a_shared_address_that_does_not_wrap_back_is_out_of_bounds() -> None:
    ptx = f"""{HEAD}.visible .entry k(.param .u64 out) {{
    .shared .align 16 .b8 tile[64]; .reg .u32 r, v; mov.u32 r, tile; sub.u32 r, r, 8; ld.shared.u32 v, [r+4]; ret; }}"""
    with pytest.raises(KernelFaultError, match="access out of bounds: byte 4294967292 of 64"):
        run_grid(ptx, "k", (1, 1, 1), 0, Launch((1, 1, 1), ("y",)), {}, {"y": OutputSpec((2,), "uint32")})


# ---- Hopper ---------------------------------------------------------------------------------------------------------

ROWS = np.arange(256, dtype=np.float32).reshape(8, 32)
LOAD = """
__shared__ __align__(128) float s[8][32]; __shared__ u64 bar;
if (threadIdx.x == 0) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&bar))); FENCE }
BARRIER
if (threadIdx.x == 0) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(at(&bar)));
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0}], [%2];"
               :: "r"(at(s)), "l"(MAP), "r"(at(&bar)) : "memory");
}
asm volatile("{ .reg .pred q;\\nL: mbarrier.try_wait.parity.shared::cta.b64 q, [%0], 0;\\n@!q bra L; }"
             :: "r"(at(&bar)) : "memory");
for (int i = 0; i < 8; i++) y[i * 32 + threadIdx.x] = s[i][threadIdx.x];
"""
SMALL = ("float32", (8, 32), (128, 4), (4, 32), 0)
WHOLE = TensorMap("x", "float32", (8, 32), (128, 4), (8, 32), 0)
CLUSTER = 'asm volatile("barrier.cluster.arrive%s; barrier.cluster.wait;" ::: "memory");'


def loaded(parameters: str, args: tuple[Any, ...], of: str = "&m", barrier: str = "__syncthreads();") -> Any:
    """Return the tile that a kernel copies through a tensor map."""
    body = LOAD.replace("FENCE", "").replace("BARRIER", barrier).replace("MAP", of)
    result = run_hopper(
        body,
        {"x": ROWS, "m": np.zeros(192, np.uint8)},
        {"y": ((8, 32), "float32"), "s": ((32,), "uint32")},
        parameters=f"{parameters}, float* y",
        args=(*args, "y"),
        before="struct P { int n; CUtensorMap m; };\nstruct Both { P p; CUtensorMap m[2]; };\n",
        threads=32,
        structs={"m": STRUCT},
    )
    return result.outputs["y"]


PARAMETER = "const __grid_constant__ CUtensorMap m"


def test_a_cluster_barrier_makes_mbarriers_visible() -> None:
    assert (loaded(PARAMETER, (WHOLE,), barrier=CLUSTER % "") == ROWS).all()
    with pytest.raises(KernelFaultError, match="neither a fence") as raised:
        loaded(PARAMETER, (WHOLE,), barrier=CLUSTER % ".relaxed")
    assert raised.value.level == "formal"


STRUCT = Struct((np.int32(5), WHOLE))


@pytest.mark.parametrize(
    ("parameters", "args", "of"),
    [
        ("const __grid_constant__ CUtensorMap maps", (WHOLE,), "&maps"),
        ("const __grid_constant__ P p", (STRUCT,), "&p.m"),
        ("const P* p", ("m",), "&p->m"),
        ("const __grid_constant__ Both b", (Struct((STRUCT, Struct((TensorMap("y", *SMALL), WHOLE)))),), "&b.m[1]"),
    ],
)
def test_tensor_maps_may_be_in_parameters_structs_and_buffers(parameters: str, args: tuple[Any, ...], of: str) -> None:
    assert (loaded(parameters, args, of) == ROWS).all()


COPIED = """if (threadIdx.x < 32) ((u32*)to)[threadIdx.x] = ((const u32*)&m)[threadIdx.x];
__threadfence(); __syncthreads(); %s"""
ACQUIRE = 'asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(to) : "memory");'


def test_a_tensor_map_that_a_kernel_writes_needs_a_fence() -> None:
    parameters, args = f"{PARAMETER}, CUtensorMap* to", (WHOLE, "s")
    assert (loaded(parameters, args, "to", barrier=COPIED % ACQUIRE) == ROWS).all()
    with pytest.raises(KernelFaultError, match=r"used without a fence\.proxy\.tensormap::generic\.acquire") as raised:
        loaded(parameters, args, "to", barrier=COPIED % "")
    assert raised.value.level == "formal"


def test_what_is_no_tensor_map() -> None:
    with pytest.raises(UnsupportedError, match=r"a tensor map at address 0x20.*the 128 bytes there are none"):
        loaded("const P* p", ("x",), "&p->m")
    with pytest.raises(UnsupportedError, match=r"a tensor map at address 0x1d.*the 128 bytes there are none"):
        loaded("const __grid_constant__ P p", (Packed(bytes(192)),), "&p.m")
    with pytest.raises(KernelFaultError, match=r"no tensor map at address 0x1000: this address is in no memory"):
        loaded(PARAMETER, (WHOLE,), "0x1000ull")
    with pytest.raises(KernelFaultError, match=r"a tensor map at address .*: nothing has written its 128 bytes"):
        loaded("const CUtensorMap* to", ("s",), "to")
    with pytest.raises(KernelFaultError, match=r"a tensor map in shared memory; it must be in a parameter"):
        loaded(PARAMETER, (WHOLE,), "s")
    with pytest.raises(KernelFaultError, match=r"not a multiple of 64"):
        loaded("const P* p", ("m",), "((const char*)&p->m - 8)")
    with pytest.raises(KernelFaultError, match=r"a copy of 2 dimensions .* tensor map has 3; \.dim is the number"):
        loaded(PARAMETER, (TensorMap("x", "float32", (1, 8, 32), (0, 128, 4), (1, 8, 32), 0),))


def test_a_stride_of_an_extent_of_1_may_be_0() -> None:
    flat = TensorMap("x", "float32", (1, 32), (0, 4), (1, 32), 0)
    body = LOAD.replace("FENCE", "").replace("BARRIER", "__syncthreads();").replace("MAP", "&m").replace("1024", "128")
    result = run_hopper(
        body.replace("i < 8", "i < 1"),
        {"x": ROWS},
        {"y": ((32,), "float32")},
        parameters=f"{PARAMETER}, float* y",
        args=(flat, "y"),
        threads=32,
    )
    assert (result.outputs["y"] == ROWS[0]).all()


STORE = """
__shared__ __align__(128) float s[32];
s[threadIdx.x] = x[threadIdx.x];
asm volatile("fence.proxy.async;" ::: "memory");
__syncwarp();
if (threadIdx.x == 0) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" :: "l"(y), "r"(at(s)) : "memory");
  asm volatile("cp.async.bulk.commit_group;");
  WAIT
}
"""


def stored(wait: str, **how: Any) -> GridResult:
    return run_hopper(STORE.replace("WAIT", wait), {"x": ROWS[0]}, {"y": ((32,), "float32")}, threads=32, **how)


def test_a_bulk_store_that_nothing_waits_for_is_a_formal_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored('asm volatile("cp.async.bulk.wait_group.read 0;");').findings == []
    with pytest.raises(KernelFaultError, match="ended while a bulk store may still read") as raised:
        stored("")
    assert raised.value.level == "formal"
    monkeypatch.setattr("tests.emulator.kernels.run_grid", lambda *a, **k: grid.run_grid(*a, **k, keep_formal=True))
    result = stored("")
    assert (result.outputs["y"] == ROWS[0]).all()
    (finding,) = result.findings
    assert (finding.level, finding.name) == ("formal", "bulk-store-not-awaited")
    assert finding.location.startswith("k.cu:")
    assert finding.text.startswith("k: ended while a bulk store may still read shared memory")


def test_the_judge_counts_a_formal_finding_as_a_violation() -> None:
    asked = request(STORE.replace("WAIT", ""), {"x": ROWS[0]}, {"y": ((32,), "float32")}, threads=32)
    image = KernelImage(b"", "k", (32, 1, 1), 0, (), to_ptx(asked.kernel, HOPPER, assemble=False))
    result = EmulatorSession().run(Executable(((image, asked.plan),)), asked.case, 3)
    assert (result.outputs["y"] == ROWS[0]).all()
    assert [f.name for f in result.findings] == ["bulk-store-not-awaited"]
    assert [v[:62] for v in result.violations] == ["formal finding: k: ended while a bulk store may still read sha"]


@pytest.mark.parametrize(
    "body",
    [
        "long long begin = clock64(), c = 0; while (clock64() - begin < 100000000) c++; y[0] = c;",
        'unsigned begin; asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(begin)); unsigned now = begin, c = 0;'
        'while (now - begin < 1u << 30) { asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(now)); c++; } y[0] = c;',
    ],
)
def test_a_wait_for_a_time_is_too_long_and_no_fault(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.emulator.scheduler.MAX_SILENT_INSTRUCTIONS", 20_000)
    with pytest.raises(UnsupportedError, match=r"no end of a loop after .* it may wait for a time at k\.cu:1"):
        masked(body, 1)
