"""Clusters of several blocks: their shared memory, barriers, multicast copies and asynchronous stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import UsageError
from tests.emulator.hopper import HOPPER, request, run, tensor_map
from tests.emulator.kernels import SEEDS

BEFORE = r"""
__device__ __forceinline__ u32 special(int which) {
  u32 v;
  switch (which) {
    case 0: asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v)); break;
    case 1: asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(v)); break;
    case 2: asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(v)); break;
    case 3: asm volatile("mov.u32 %0, %%clusterid.y;" : "=r"(v)); break;
    case 4: asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(v)); break;
    case 5: asm volatile("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(v)); break;
    case 6: asm volatile("mov.u32 %0, %%nclusterid.y;" : "=r"(v)); break;
    default: asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(v)); break;
  }
  return v;
}
__device__ __forceinline__ void sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 map(u32 address, u32 rank) {
  u32 v; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank)); return v;
}
"""


def test_special_registers() -> None:
    result = run(
        "if (threadIdx.x < 8) y[(blockIdx.x + gridDim.x * blockIdx.y) * 8 + threadIdx.x] = special(threadIdx.x);",
        {},
        {"y": ((6, 4, 8), "uint32")},
        before=BEFORE,
        grid=(4, 6, 1),
        cluster=(2, 3, 1),
        threads=32,
    ).outputs["y"]
    for y in range(6):
        for x in range(4):
            expected = [x % 2 + 2 * (y % 3), 6, x // 2, y // 3, x % 2, y % 3, 2, 2]
            assert result[y, x].tolist() == expected


@pytest.mark.parametrize("how", ["mapped", "generic", "cooperative groups"])
def test_blocks_read_and_write_each_other(how: str) -> None:
    """Each block reads its right neighbour's tile, writes to its left one, and adds to a counter of block 0."""
    access = {
        "mapped": "u32 from = map(at(tile + t), (r + 1) % 4), to = map(at(given + t), (r + 3) % 4), v; "
        'asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(from)); '
        'asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to), "r"(v * 2) : "memory"); '
        'asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], 1;" :: "r"(map(at(&count), 0)) : "memory");',
        "generic": "u64 from, to, all; "
        'asm volatile("mapa.u64 %0, %1, %2;" : "=l"(from) : "l"(tile + t), "r"((r + 1) % 4)); '
        'asm volatile("mapa.u64 %0, %1, %2;" : "=l"(to) : "l"(given + t), "r"((r + 3) % 4)); '
        'asm volatile("mapa.u64 %0, %1, 0;" : "=l"(all) : "l"(&count)); '
        "u32 v = *(volatile u32*)from; *(volatile u32*)to = v * 2; atomicAdd((u32*)all, 1);",
        "cooperative groups": "auto c = cooperative_groups::this_cluster(); "
        "u32 v = c.map_shared_rank(tile, (r + 1) % 4)[t]; c.map_shared_rank(given, (r + 3) % 4)[t] = v * 2; "
        "atomicAdd(c.map_shared_rank(&count, 0), 1);",
    }[how]
    wait = "cooperative_groups::this_cluster().sync();" if how.startswith("coop") else "sync();"
    result = run(
        f"__shared__ u32 tile[64], given[64], count; u32 t = threadIdx.x, r = special(0); "
        f"tile[t] = blockIdx.x * 100 + t; if (t == 0) count = 0; {wait} {access} {wait} "
        "y[blockIdx.x * 64 + t] = given[t]; if (t == 0) z[blockIdx.x] = count;",
        {},
        {"y": ((8, 64), "uint32"), "z": ((8,), "uint32")},
        before=("#include <cooperative_groups.h>\n" if how.startswith("coop") else "") + BEFORE,
        blocks=8,
        cluster=(4, 1, 1),
        threads=64,
    ).outputs
    t = np.arange(64)
    # Each block holds data from its right neighbour, which read the tile of its own right neighbour.
    expected = [[2 * ((b // 4 * 4 + (b + 2) % 4) * 100 + n) for n in t] for b in range(8)]
    assert result["y"].tolist() == expected
    assert result["z"].tolist() == [256, 0, 0, 0] * 2


def test_the_barrier_of_a_cluster_orders_its_blocks() -> None:
    """Other blocks read global and shared memory that a block wrote before the barrier."""
    result = run(
        "__shared__ u32 s[32]; u32 t = threadIdx.x, r = special(0), v = 0; "
        "for (int n = 0; n < 3; ++n) { s[t] = n + r; z[blockIdx.x * 32 + t] = 5 * r + n; sync(); "
        'u32 w; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w) : "r"(map(at(s + t), r ^ 1)) : "memory"); '
        "v = v * 100 + w * 10 + z[(blockIdx.x ^ 1) * 32 + t]; sync(); } y[blockIdx.x * 32 + t] = v;",
        {},
        {"y": ((4, 32), "uint32"), "z": ((128,), "uint32")},
        before=BEFORE,
        blocks=4,
        cluster=(2, 1, 1),
        threads=32,
    ).outputs["y"]
    assert result.tolist() == [[152637] * 32, [1122] * 32] * 2


def test_getctarank() -> None:
    result = run(
        "__shared__ u32 s; u32 r; u64 g; "
        'asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(r) : "r"(map(at(&s), threadIdx.x % 2))); '
        'asm volatile("mapa.u64 %0, %1, %2;" : "=l"(g) : "l"(&s), "r"((threadIdx.x + 1) % 2)); '
        'u32 q; asm volatile("getctarank.u64 %0, %1;" : "=r"(q) : "l"(g)); '
        'u32 own; asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(own) : "r"(at(&s))); '
        "y[blockIdx.x * 32 + threadIdx.x] = r * 100 + q * 10 + own;",
        {},
        {"y": ((2, 32), "uint32")},
        before=BEFORE,
        blocks=2,
        cluster=(2, 1, 1),
        threads=32,
    ).outputs["y"]
    assert result.tolist() == [[t % 2 * 100 + (t + 1) % 2 * 10 + b for t in range(32)] for b in range(2)]


def test_arrivals_at_the_mbarrier_of_another_block() -> None:
    """Block 0 waits for all threads of the cluster at its own mbarrier."""
    result = run(
        "__shared__ __align__(8) u64 bar; __shared__ u32 data[4]; u32 r = special(0); "
        "if (threadIdx.x == 0) { init(&bar, 3 * 32); init_fence(); } sync(); "
        "if (r) { if (threadIdx.x == 0) "
        '{ asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(map(at(data + r), 0)), "r"(r * 7) : "memory"); } '
        "__syncwarp(); "
        'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(map(at(&bar), 0)) '
        ': "memory"); } '
        "else { wait(&bar, 0); if (threadIdx.x > 0 && threadIdx.x < 4) y[threadIdx.x - 1] = data[threadIdx.x]; } "
        "sync();",
        {},
        {"y": ((3,), "uint32")},
        before=BEFORE,
        blocks=4,
        cluster=(4, 1, 1),
        threads=32,
    ).outputs["y"]
    assert result.tolist() == [7, 14, 21]


def test_a_tile_for_several_blocks() -> None:
    """Each block fetches a quarter of a tile for all: a multicast lands, and counts, in each block of its mask."""
    x = np.arange(64 * 16, dtype=np.uint32).reshape(64, 16)
    result = run(
        "extern __shared__ __align__(128) u32 tile[]; __shared__ __align__(8) u64 bar; u32 r = special(0); "
        "if (threadIdx.x == 0) { init(&bar, 1); init_fence(); expect(&bar, 64 * 16 * 4 / 2); } sync(); "
        "if (threadIdx.x == 0) { unsigned short mask = 5u << (r & 1); "
        'asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster '
        '[%0], [%1, {%3, %4}], [%2], %5;" :: "r"(at(tile + r * 256)), "l"(&map_), "r"(at(&bar)), "r"(0), '
        '"r"(int(r) * 16), "h"(mask) : "memory"); } '
        "wait(&bar, 0); for (int n = threadIdx.x; n < 512; n += 32) { int q = r % 2 * 256 + n / 256 * 512 + n % 256; "
        "y[r * 512 + n] = tile[q]; } sync();",
        {"x": x},
        {"y": ((4, 512), "uint32")},
        parameters="const __grid_constant__ CUtensorMap map_, u32* y",
        args=(tensor_map("x", x, (16, 16)), "y"),
        before=BEFORE,
        blocks=4,
        cluster=(4, 1, 1),
        threads=32,
        dynamic=4096,
    ).outputs["y"]
    quarters = x.reshape(4, 256)
    for r in range(4):
        assert np.array_equal(result[r], np.concatenate([quarters[r % 2], quarters[r % 2 + 2]]))


STORES = (
    "__shared__ __align__(8) u64 bar; __shared__ __align__(16) u32 data[128]; u32 t = threadIdx.x, r = special(0); "
    "if (t == 0) { init(&bar, 1); init_fence(); expect(&bar, 512); } sync(); "
    "u32 to = map(at(data + 4 * t), r ^ 1), there = map(at(&bar), r ^ 1); "
    'asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" '
    ':: "r"(to), "r"(t), "r"(r * 1000 + t), "r"(7), "r"(blockIdx.x), "r"(there) : "memory"); '
)


@SEEDS
def test_asynchronous_stores(seed: int) -> None:
    result = run(
        STORES
        + "wait(&bar, 0); for (int n = 0; n < 4; ++n) y[blockIdx.x * 128 + 4 * t + n] = data[4 * t + n]; sync();",
        {},
        {"y": ((4, 32, 4), "uint32")},
        before=BEFORE,
        blocks=4,
        cluster=(2, 1, 1),
        threads=32,
        seed=seed,
    ).outputs["y"]
    for b in range(4):
        other = b ^ 1
        assert result[b].tolist() == [[t, other % 2 * 1000 + t, 7, other] for t in range(32)]


@pytest.mark.parametrize(
    ("body", "cluster", "message"),
    [
        (STORES + "y[t] = data[4 * t]; wait(&bar, 0); sync();", 2, "that an asynchronous copy has not delivered"),
        ("map(0, 2);", 2, "mapa to block 2 of a cluster of 2 blocks"),
        ("map(0, 1);", 1, "mapa to block 1 of a cluster of 1 block"),
        (
            # Threads that have ended count as arrived at the second barrier.
            "__shared__ u32 s; s = 1; sync(); if (special(0) == 0) return; sync(); u32 v; "
            'asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(map(at(&s), 0))); y[0] = v;',
            2,
            r"access to the shared memory of block \(0, 0, 0\) after its end",
        ),
        ('asm volatile("barrier.cluster.arrive;\\nbarrier.cluster.arrive;");', 2, "second arrival at the cluster"),
    ],
)  # fmt: skip
def test_what_clusters_must_not_do(body: str, cluster: int, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message):
        run(body, {}, {"y": ((32,), "uint32")}, before=BEFORE, blocks=2, cluster=(cluster, 1, 1), threads=32)


@pytest.mark.parametrize(
    ("grid", "cluster"), [((3, 1, 1), (2, 1, 1)), ((32, 1, 1), (32, 1, 1)), ((2, 2, 1), (1, 1, 2))]
)
def test_a_cluster_that_does_not_divide_the_grid_is_refused(
    grid: tuple[int, int, int], cluster: tuple[int, int, int]
) -> None:
    with pytest.raises(UsageError, match="they have 1 to 16 blocks and divide the grid"):
        run("y[0] = 1;", {}, {"y": ((1,), "uint32")}, grid=grid, cluster=cluster)


def test_the_launch_may_say_the_cluster() -> None:
    asked = request(
        "y[blockIdx.x] = special(1) * 10 + special(0);",
        {},
        {"y": ((4,), "uint32")},
        before=BEFORE,
        blocks=4,
        threads=32,
    )
    ptx = to_ptx(asked.kernel, HOPPER, assemble=False)
    plan = replace(asked.plan, cluster=(2, 1, 1))
    result = run_grid(ptx, "k", (32, 1, 1), 0, plan, {}, asked.case.outputs)
    assert result.outputs["y"].tolist() == [20, 21, 20, 21]
    own = ptx.replace(")\n{", ")\n.reqnctapercluster 4\n{", 1)
    assert run_grid(own, "k", (32, 1, 1), 0, asked.plan, {}, asked.case.outputs).outputs["y"].tolist() == [
        40,
        41,
        42,
        43,
    ]
    with pytest.raises(UsageError, match=r"built for clusters of \(4, 1, 1\) blocks, its launch asks for \(2, 1, 1\)"):
        run_grid(own, "k", (32, 1, 1), 0, plan, {}, asked.case.outputs)


RACES = {
    "a block's own": ("tile[t] = 2 * t; y[blockIdx.x * 64 + t] = tile[63 - t];", "tile[t] = t; sync();"),
    "a read of another's write": ("{store} {arrive} y[blockIdx.x * 64 + t] = tile[t]; {wait}", "tile[t] = 1; sync();"),
    "a write over another's read": (
        'u32 w; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w) : "r"(map(at(tile + t), r ^ 1)) : "memory"); '
        "tile[t] = 7; y[blockIdx.x * 64 + t] = w;",
        "tile[t] = t; sync();",
    ),
    "a read after a barrier of each block": ("{store} __syncthreads(); y[t] = tile[t];", "tile[t] = 1; sync();"),
    "a write after a barrier of each block": (
        'u32 w; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w) : "r"(map(at(tile + t), r ^ 1)) : "memory"); '
        "__syncthreads(); tile[t] = w + 1;",
        "tile[t] = t; sync();",
    ),
    "an atomic addition": (
        'asm volatile("red.shared::cluster.add.u32 [%0], 1;" :: "r"(map(at(tile + t), r ^ 1)) : "memory"); '
        "__syncthreads(); y[t] = tile[t];",
        "tile[t] = 1; sync();",
    ),
}
_PARTS = {
    "{store}": 'asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(map(at(tile + t), r ^ 1)), "r"(t) : "memory");',
    "{arrive}": 'asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");',
    "{wait}": 'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");',
}


@pytest.mark.parametrize("name", RACES)
def test_races_in_the_shared_memory_of_a_cluster(name: str) -> None:
    body, first = RACES[name]
    body = f"__shared__ u32 tile[64]; u32 t = threadIdx.x, r = special(0); {first} {body} sync();"
    for part, text in _PARTS.items():
        body = body.replace(part, text)
    how: dict[str, Any] = {"before": BEFORE, "blocks": 4, "cluster": (2, 1, 1), "threads": 64}
    for seed in range(3):
        with pytest.raises(KernelFaultError, match=r"a data race on byte \d+ of shared memory"):
            run(body, {}, {"y": ((4, 64), "uint32")}, seed=seed, **how)


def test_a_flag_in_the_shared_memory_of_another_block_orders_its_blocks() -> None:
    body = """__shared__ u32 tile[64], flag; u32 t = threadIdx.x, r = special(0); flag = 0; sync();
    if (r) {
      asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(map(at(tile + t), 0)), "r"(t) : "memory");
      __threadfence(); __syncthreads();
      if (t == 0) asm volatile("atom.shared::cluster.exch.b32 %0, [%1], 1;" : "=r"(r) : "r"(map(at(&flag), 0)));
    } else {
      if (t == 0) while (*(volatile u32*)&flag == 0);
      __syncthreads();
      y[t] = tile[63 - t];
    }
    sync();"""
    how: dict[str, Any] = {"before": BEFORE, "blocks": 2, "cluster": (2, 1, 1), "threads": 64}
    for seed in range(3):
        result = run(body, {}, {"y": ((64,), "uint32")}, seed=seed, **how).outputs["y"]
        assert result.tolist() == [*range(63, -1, -1)]


_RING = r"""
__shared__ u32 stage[2][64];
__shared__ u64 full[2], empty[2];
u32 t = threadIdx.x, r = special(0);
auto arrive = [](u32 bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
};
auto wait = [](u32 bar, u32 parity) {
  u32 done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
                  "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  while (!done);
};
if (t < 2) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" ::"r"(at(full + t)));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" ::"r"(at(empty + t)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
sync();
for (u32 k = 0; k < 6; ++k) {
  u32 s = k % 2;
  if (r == 0) {
    if (k >= 2) wait(at(empty + s), (k / 2 + 1) % 2);
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map(at(&stage[s][t]), 1)), "r"(100 * k + t) : "memory");
    arrive(map(at(full + s), 1));
  } else {
    wait(at(full + s), k / 2 % 2);
    y[k * 64 + t] = stage[s][63 - t];
    arrive(map(at(empty + s), 0));
  }
}
sync();
"""


def test_a_ring_between_two_blocks() -> None:
    """An arrival before another block's wait orders earlier accesses before later ones."""
    how: dict[str, Any] = {"before": BEFORE, "blocks": 2, "cluster": (2, 1, 1), "threads": 64}
    expected = [[100 * k + 63 - t for t in range(64)] for k in range(6)]
    for seed in range(3):
        result = run(_RING, {}, {"y": ((6, 64), "uint32")}, seed=seed, **how).outputs["y"]
        assert result.tolist() == expected
