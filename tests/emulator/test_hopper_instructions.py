"""Single instructions of Hopper kernels against NumPy: fragments, barriers, elections, clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from tests.emulator.hopper import run
from tests.emulator.kernels import SEEDS

RNG = np.random.default_rng(8)


def one(body: str, count: int = 32, dtype: str = "uint32", x: Any = None, threads: int = 32, **more: Any) -> np.ndarray:
    """Return the words that some threads write to ``y`` from the bytes ``x``."""
    result = run(
        body,
        {"x": np.zeros(16, np.uint8) if x is None else x.view(np.uint8).ravel()},
        {"y": ((count,), dtype)},
        threads=threads,
        **more,
    )
    return result.outputs["y"]


def test_barrier_reductions() -> None:
    result = one(
        "int p = threadIdx.x % 3 == 0;"
        "y[threadIdx.x] = __syncthreads_count(p) * 4 + __syncthreads_or(p) * 2 + __syncthreads_and(p);",
        64,
        threads=64,
    )
    assert (result == 22 * 4 + 2).all()


def test_a_barrier_reduces_a_negated_predicate() -> None:
    body = """
    u32 any, all;
    asm volatile("{.reg .pred p, q; setp.lt.u32 p, %1, 63; bar.red.or.pred q, 1, !p; selp.u32 %0, 1, 0, q;}"
      : "=r"(any) : "r"(threadIdx.x));
    asm volatile("{.reg .pred p, q; setp.lt.u32 p, %1, 63; barrier.cta.red.and.pred q, 2, 64, !p;"
      "selp.u32 %0, 1, 0, q;}" : "=r"(all) : "r"(threadIdx.x));
    y[threadIdx.x] = any * 2 + all;
    """
    assert (one(body, 64, threads=64) == 2).all()


def test_a_block_declares_registers_by_their_number() -> None:
    body = """
    u32 v = threadIdx.x, w;
    asm volatile("{.reg .b32 %%q<2>, a<2>; add.u32 %%q0, %0, 1; add.u32 a1, %%q0, 1; mov.u32 %0, a1;}" : "+r"(v));
    asm volatile("{.reg .b64 a<2>; .reg .b32 %%q<1>; cvt.u64.u32 a1, %1; shl.b64 a1, a1, 33; shr.u64 a1, a1, 32;"
      "cvt.u32.u64 %%q0, a1; mov.u32 %0, %%q0;}" : "=r"(w) : "r"(v));
    y[threadIdx.x] = w;
    """
    assert one(body).tolist() == [2 * (n + 2) for n in range(32)]


PING_PONG = """
__shared__ int order[16], next;
int group = threadIdx.x / 128;
if (threadIdx.x == 0) next = 0;
__syncthreads();
if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
for (int i = 0; i < 4; ++i) {
  if (group == 0) asm volatile("bar.sync 1, 256;" ::: "memory"); else asm volatile("barrier.sync 2, 256;" ::: "memory");
  if (threadIdx.x % 128 == 0) order[next++] = group;
  if (group == 0) asm volatile("bar.arrive 2, 256;" ::: "memory"); else if (i < 3) { LAST }
}
__syncthreads();
if (threadIdx.x < 8) y[threadIdx.x] = order[threadIdx.x];
"""


@SEEDS
def test_two_warpgroups_ping_pong(seed: int) -> None:
    body = PING_PONG.replace("LAST", 'asm volatile("barrier.arrive 1, 256;" ::: "memory");')
    assert one(body, 8, threads=256, seed=seed).tolist() == [0, 1] * 4
    with pytest.raises(KernelFaultError, match=r"deadlock.*32 threads of warp 0 wait at k\.cu:\d+ \(.*1, 256\)"):
        one(PING_PONG.replace("LAST", ""), 8, threads=256, seed=seed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('asm volatile("bar.sync 1, %0;" :: "r"(x[0] + 48));', r"64 threads at barrier 1; it expects 48"),
        (
            'if (threadIdx.x < 64) asm volatile("bar.sync 1, 128;"); else asm volatile("bar.sync 1, 96;");',
            r"barrier 1 with (96|128) threads, where others came with (96|128)",
        ),
        ('asm volatile("bar.sync %0;" :: "r"(16));', r"barrier 16, of 16"),
    ],
)
def test_barrier_faults(body: str, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message):
        one(body + "y[threadIdx.x] = 1;", 128, threads=128)


def test_threads_of_a_warp_wait_for_each_other() -> None:
    """After a wait of one thread, a shuffle does not require the other threads to wait."""
    body = """
    __shared__ u64 bar;
    if (threadIdx.x == 0) { init(&bar, 1); init_fence(); }
    __syncthreads();
    u32 v = threadIdx.x;
    if (threadIdx.x == 3) { wait(&bar, 0); v = 100; }
    if (threadIdx.x == 32) arrive(&bar);
    __syncwarp();
    y[threadIdx.x] = __shfl_sync(~0u, v, 3);
    """
    for seed in range(3):
        assert one(body, 64, threads=64, seed=seed).tolist() == [100] * 32 + [35] * 32


def test_a_state_token_and_test_wait() -> None:
    body = """
    __shared__ u64 bar;
    if (threadIdx.x == 0) init(&bar, 64);
    __syncthreads();
    u64 state; u32 done = 0, rounds = 0;
    for (int phase = 0; phase < 3; ++phase) {
      asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(&bar)) : "memory");
      do asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(at(&bar)), "l"(state) : "memory"); while (!done);
      ++rounds;
    }
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(&bar)) : "memory");
    __syncthreads();
    bar = 5;
    y[threadIdx.x] = rounds + bar;
    """
    assert (one(body, 64, threads=64) == 8).all()


def test_a_wait_whose_result_is_ignored_is_found() -> None:
    body = """
    __shared__ u64 bar; __shared__ u32 v[32];
    if (threadIdx.x == 0) init(&bar, 32);
    __syncthreads();
    if (threadIdx.x < 32) { v[threadIdx.x] = 1; arrive(&bar); }
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;}" :: "r"(at(&bar)) : "memory");
    y[threadIdx.x] = v[threadIdx.x % 32];
    """
    result = 0
    for seed in range(16):
        try:
            one(body, 64, threads=64, seed=seed)
        except KernelFaultError as e:
            result += "nothing has written" in str(e)
    assert result


def test_a_cluster_of_one_block() -> None:
    body = """
    __shared__ u32 v;
    u32 rank, blocks, remote, value;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at(&v)), "r"(rank));
    for (int i = 0; i < 3; ++i) {
      if (threadIdx.x == 63) v = 7 + i;
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote));
      if (value != 7 + i) blocks = 99;
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
    y[threadIdx.x] = value * 10 + blocks + rank;
    """
    for seed in range(3):
        assert (one(body, 64, threads=64, seed=seed) == 91).all()
    with pytest.raises(KernelFaultError, match=r"deadlock, nothing can go on: .*barrier\.cluster\.wait"):
        one(
            'if (threadIdx.x < 32) asm volatile("barrier.cluster.arrive; barrier.cluster.wait;");'
            'else { asm volatile("bar.sync 3, 64;"); } y[threadIdx.x] = 1;',
            64,
            threads=64,
        )


def test_cache_hints_and_dependent_launches_change_nothing() -> None:
    body = """
    u64 policy; u32 v, w;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(v) : "l"(x), "l"(policy));
    asm volatile("ld.global.L1::evict_last.L2::128B.u32 %0, [%1];" : "=r"(w) : "l"(x + 4));
    asm volatile("prefetch.global.L2 [%0];" :: "l"(x));
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" :: "l"(y + threadIdx.x), "r"(v + w), "l"(policy));
    """
    assert (one(body, x=np.array([5, 6, 0, 0], np.uint32)) == 11).all()


@pytest.mark.parametrize(
    ("which", "first", "last"), [("eq", 0, 1), ("lt", -32, 0), ("le", -32, 1), ("ge", 0, 32), ("gt", 1, 32)]
)
def test_masks_of_lanes(which: str, first: int, last: int) -> None:
    """Lane n's mask holds the lanes n + first to n + last - 1."""
    result = one(f'u32 v; asm volatile("mov.u32 %0, %%lanemask_{which};" : "=r"(v)); y[threadIdx.x] = v;')
    for n in range(32):
        assert result[n] == sum(1 << b for b in range(max(0, n + first), min(32, n + last)))
