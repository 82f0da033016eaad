"""mbarriers, tensor copies, wgmma and named barriers together: producers, consumers, ping-pong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.emulator.instructions.convert import E4M3_VALUES
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.result import GridResult
from tests.emulator.hopper import run, tensor_map, wgmma
from tests.emulator.kernels import SEEDS

RNG = np.random.default_rng(4)
N, TILES, STAGES = 32, 7, 2
A = (RNG.integers(0, 2, (128 * 3, 64)) * 128 + RNG.integers(0, 80, (128 * 3, 64))).astype(np.uint8)
B = (RNG.integers(0, 2, (N * TILES, 64)) * 128 + RNG.integers(0, 80, (N * TILES, 64))).astype(np.uint8)

# One producer warpgroup with one loading thread; two consumer warpgroups with 64 rows each; sums over all tiles.
PIPELINE = """
extern __shared__ __align__(1024) u8 s[];
__shared__ u64 full[STAGES], empty[STAGES], ready;
u8 *sa = s, *sb = s + 128 * 64;
if (threadIdx.x == 0) {
  init(&ready, 1);
  for (int i = 0; i < STAGES; ++i) { init(&full[i], 1); init(&empty[i], 2); }
  init_fence();
}
__syncthreads();
if (threadIdx.x >= 256) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  if (threadIdx.x == 256) {
    expect(&ready, 128 * 64);
    load(sa, &ma, &ready, 0, 128 * blockIdx.x);
    for (int t = 0; t < TILES; ++t) {
      int stage = t % STAGES;
      wait(&empty[stage], t / STAGES % 2 ^ 1);
      expect(&full[stage], N * 64 EXTRA);
      load(sb + stage * N * 64, &mb, &full[stage], 0, t * N);
    }
  }
} else {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  float d[N / 2], sum[N / 2];
  for (int i = 0; i < N / 2; ++i) sum[i] = 0;
  wait(&ready, 0);
  const u8* mine = sa + threadIdx.x / 128 * 64 * 64;
  for (int t = 0; t < TILES; ++t) {
    int stage = t % STAGES;
    FULL_WAIT
    mma_fence();
    for (int k = 0; k < 64; k += 32)
      mma(d, descriptor(mine + k, 16, 512, 64), descriptor(sb + stage * N * 64 + k, 16, 512, 64), k > 0);
    mma_commit();
    EARLY
    mma_wait<0>();
    RELEASE
    for (int i = 0; i < N / 2; ++i) sum[i] += d[i] * (t + 1);
  }
  for (int r = 0; r < N / 2; ++r) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r / 2 % 2 * 8;
    int column = r / 4 * 8 + threadIdx.x % 4 * 2 + r % 2;
    y[(128 * blockIdx.x + row) * N + column] = sum[r];
  }
}
"""
RELEASE = "if (threadIdx.x % 128 == 0) arrive(&empty[stage]);"


def pipeline(seed: int, full_wait: str = "", release: str = RELEASE, early: str = "", extra: str = "") -> GridResult:
    body = PIPELINE.replace("FULL_WAIT", full_wait or "wait(&full[stage], t / STAGES % 2);")
    body = body.replace("RELEASE", release).replace("EARLY", early).replace("EXTRA", extra)
    return run(
        body,
        {"a": A, "b": B},
        {"y": ((len(A), N), "float32")},
        parameters="const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb, float* y",
        args=(tensor_map("a", A, (128, 64), 64), tensor_map("b", B, (N, 64), 64), "y"),
        threads=384,
        blocks=3,
        before=f"constexpr int N = {N}, TILES = {TILES}, STAGES = {STAGES};\n"
        + wgmma("mma", N, "k32", "f32.e4m3.e4m3"),
        dynamic=128 * 64 + STAGES * N * 64,
        seed=seed,
    )


@SEEDS
def test_producer_and_two_consumers(seed: int) -> None:
    weights = np.repeat(np.arange(1, TILES + 1), N)[:, None] * E4M3_VALUES[B]
    expected = E4M3_VALUES[A] @ weights.reshape(TILES, N, 64).sum(axis=0).T
    result = pipeline(seed)
    assert np.allclose(result.outputs["y"], expected, rtol=1e-4, atol=1e-2)
    assert result.counts.instructions["setmaxnreg"] == 3 * 12
    assert result.counts.global_load_bytes == 3 * (128 * 64 + TILES * N * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"full_wait": ";"},
            r"wgmma operand read of (data|an element)|write is not ordered after a wgmma.wait_group",
            id="no wait for the tile",
        ),
        pytest.param(
            {"release": ""},
            r"deadlock.*1 threads of warp 8 wait at k\.cu:18 \[wait at hopper\.cuh:\d+, k at k\.cu:18\] "
            r"\(mbarrier\.try_wait.*for the mbarrier at byte \d+ "
            r"of shared memory \(empty \+ 0\), in phase 0, pending: 2 of 2 arrivals, 0 bytes",
            id="no release",
        ),
        pytest.param(
            {"full_wait": "wait(&full[stage], t / STAGES % 2 ^ 1);"},
            r"wgmma operand read of (data|an element)|deadlock.*of warp 0 wait at.*\(full",
            id="wrong parity",
        ),
        pytest.param(
            {"extra": "+ 16"},
            r"deadlock.*32 threads of warp 0 wait.*for the mbarrier.*"
            r"full \+ 0\), in phase 0, pending: 0 of 1 arrivals, 16 bytes of transactions",
            id="too many bytes expected",
        ),
        pytest.param(
            {"extra": "- 16"},
            r"deadlock.*pending: 0 of 1 arrivals, -16 bytes of transactions \(more came than were expected\)",
            id="too few bytes expected",
        ),
        pytest.param(
            {"early": RELEASE, "release": ""},
            r"(bulk write to where an asynchronous operation still reads|not ordered after a wgmma.wait_group for the "
            r"wgmma at k\.cu:\d+ \[mma at hopper\.cuh.*released too early).*cp\.async\.bulk\.tensor",
            id="released before the product is done",
        ),
        pytest.param(
            {"full_wait": "if (threadIdx.x < 32 || threadIdx.x >= 128) wait(&full[stage], t / STAGES % 2);"},
            r"wgmma operand read of|a data race on .* this read and the write .*cp\.async\.bulk\.tensor",
            id="one warp of four waits for the tile",
        ),
        pytest.param(
            {"early": 'asm volatile("add.f32 %0, %1, %1;" : "=f"(sum[0]) : "f"(d[0]));'},
            r"read of a wgmma's accumulator before a wgmma\.wait_group that covers it",
            id="accumulator before its wait",
        ),
        pytest.param(
            {"release": RELEASE.replace("% 128 == 0", "% 64 == 0")},
            r"bulk write to where|deadlock|wgmma operand read of|more arrivals than the phase expects",
            id="too many releases",
        ),
    ],
)
def test_a_broken_pipeline_is_found_in_every_order(change: dict[str, str], message: str) -> None:
    for seed in range(3):
        with pytest.raises(KernelFaultError, match=message):
            pipeline(seed, **change)


# ---- a stage that is given back before its reads are over -----------------------------------------------------------

# One warpgroup multiplies; a second one overwrites its operand after an mbarrier completes.
STAGE = """
extern __shared__ __align__(1024) u8 s[];
__shared__ u64 ready, empty;
if (threadIdx.x == 0) { init(&ready, 1); init(&empty, 128); init_fence(); }
__syncthreads();
if (threadIdx.x == 0) {
  expect(&ready, 64 * 64 + N * 64);
  load(s, &ma, &ready, 0, 0); load(s + 64 * 64, &mb, &ready, 0, 0);
}
if (threadIdx.x < 128) {
  float d[N / 2], e[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = e[i] = 0;
  wait(&ready, 0);
  mma_fence();
  mma(d, descriptor(s, 16, 512, 64), descriptor(s + 64 * 64, 16, 512, 64), 1);
  mma_commit();
  RELEASE
  for (int i = 0; i < N / 2; ++i) y[i * 128 + threadIdx.x] = d[i] + e[i];
} else {
  wait(&empty, 0);
  s[64 * 64 + threadIdx.x] = 1;
}"""


@SEEDS
@pytest.mark.parametrize(
    ("release", "right"),
    [
        ("mma_wait<0>(); arrive(&empty);", True),
        ("arrive(&empty); mma_wait<0>();", False),
        ("mma_wait<0>(); mma_fence(); mma(e, descriptor(s, 16, 512, 64), descriptor(s + 64 * 64, 16, 512, 64), 1);"
         "mma_commit(); arrive(&empty); mma_wait<0>();", False),
        ("mma_fence(); mma(e, descriptor(s, 16, 512, 64), descriptor(s + 64 * 64, 16, 512, 64), 1); mma_commit();"
         "mma_wait<1>(); arrive(&empty); mma_wait<0>();", False),
        ("mma_fence(); mma(e, descriptor(s, 16, 512, 64), descriptor(s, 16, 512, 64), 1); mma_commit();"
         "mma_wait<1>(); arrive(&empty); mma_wait<0>();", True),
    ],
    ids=["after the wait", "before the wait", "a product later", "one product too early", "the other operand"],
)  # fmt: skip
def test_a_stage_is_released_after_the_wait_for_its_product(release: str, right: bool, seed: int) -> None:
    def launch() -> GridResult:
        return run(
            STAGE.replace("RELEASE", release),
            {"a": A, "b": B},
            {"y": ((N // 2 * 128,), "float32")},
            parameters="const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb, float* y",
            args=(tensor_map("a", A, (64, 64), 64), tensor_map("b", B, (N, 64), 64), "y"),
            threads=256,
            before=f"constexpr int N = {N};\n" + wgmma("mma", N, "k32", "f32.e4m3.e4m3"),
            dynamic=128 * 64 + N * 64,
            seed=seed,
        )

    if right:
        launch()
    else:
        with pytest.raises(KernelFaultError, match=r"not ordered after a wgmma\.wait_group|still reads"):
            launch()


# Warp 0 sums what warp 1 copies, and one of its threads releases the stage.
RELEASED = """
__shared__ __align__(128) int s[32]; __shared__ u64 full, empty;
if (threadIdx.x == 0) { init(&full, 1); init(&empty, 1); init_fence(); }
__syncthreads();
if (threadIdx.x < 32) {
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    wait(&full, i % 2);
    sum += s[31 - threadIdx.x];
    proxy_fence();
    SYNC
    if (threadIdx.x == 7) arrive(&empty);
  }
  y[threadIdx.x] = sum;
} else if (threadIdx.x == 32) {
  for (int i = 0; i < 3; ++i) { wait(&empty, i % 2 ^ 1); expect(&full, 128); bulk_load(s, x + 32 * i, 128, &full); }
}"""


@SEEDS
@pytest.mark.parametrize(
    ("sync", "right"),
    [
        ("__syncwarp();", True),
        ('asm volatile("bar.sync 1, 32;" ::: "memory");', True),
        ("", False),
        ("__syncwarp(threadIdx.x < 16 ? 0xffff : 0xffff0000);", False),
        ("__shfl_sync(~0u, sum, 0);", False),
    ],
    ids=["warp", "barrier", "none", "half a warp", "shuffle"],
)
def test_one_thread_releases_a_stage_after_the_reads_of_its_warp(sync: str, right: bool, seed: int) -> None:
    def launch() -> GridResult:
        x = np.arange(96, dtype=np.int32)
        return run(RELEASED.replace("SYNC", sync), {"x": x}, {"y": ((32,), "int32")}, threads=64, seed=seed)

    if right:
        assert (launch().outputs["y"] == np.arange(96).reshape(3, 32).sum(axis=0)[::-1]).all()
    else:
        with pytest.raises(KernelFaultError, match=r"data race .* this write and the read .*ld\.shared"):
            launch()


# Thread 0 copies two tiles, each with an mbarrier.
TWO_TILES = """
__shared__ __align__(128) int s[2][32]; __shared__ u64 full[2];
if (threadIdx.x == 0) { init(full, 1); init(full + 1, 1); init_fence(); }
__syncthreads();
if (threadIdx.x == 0) for (int i = 0; i < 2; ++i) { expect(full + i, 128); bulk_load(s[i], x, 128, full + i); }
WAIT
y[threadIdx.x] = s[0][threadIdx.x % 32] + s[1][threadIdx.x % 32];"""


@pytest.mark.parametrize("tile", [0, 1])
def test_a_wait_for_another_tile_is_none_in_the_first_order(tile: int) -> None:
    x, y = np.arange(32, dtype=np.int32), {"y": ((64,), "int32")}
    both = TWO_TILES.replace("WAIT", "wait(full, 0); wait(full + 1, 0);")
    assert run(both, {"x": x}, y, threads=64).outputs["y"].tolist() == [*range(0, 64, 2)] * 2
    for seed in range(0, 8, 2):
        with pytest.raises(KernelFaultError, match="that an asynchronous copy has not delivered"):
            run(TWO_TILES.replace("WAIT", f"wait(full + {tile}, 0);"), {"x": x}, y, seed=seed, threads=64)


# A warp copies each tile over the one before.
OVERWRITTEN = """
__shared__ __align__(128) int s[128]; __shared__ u64 full;
if (threadIdx.x == 0) { init(&full, 1); init_fence(); }
__syncwarp();
int sum = 0;
for (int i = 0; i < 2; ++i) {
  COPY
  for (int k = 0; k < 4; ++k) sum += s[127 - 4 * threadIdx.x - k];
  proxy_fence();
  SYNC
}
y[threadIdx.x] = sum;"""
OVERWRITES = {
    "cp.async": 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\\ncp.async.wait_all;" '
    ':: "r"(at(s + 4 * threadIdx.x)), "l"(x + 128 * i + 4 * threadIdx.x) : "memory"); __syncwarp();',
    "bulk copy": "if (threadIdx.x == 0) { expect(&full, 512); bulk_load(s, x + 128 * i, 512, &full); } wait(&full, i);",
}


@SEEDS
@pytest.mark.parametrize("copy", OVERWRITES.values(), ids=OVERWRITES)
def test_a_copy_over_a_tile_that_other_threads_of_the_warp_read_needs_a_syncwarp(copy: str, seed: int) -> None:
    x = np.arange(256, dtype=np.int32)
    body, y = OVERWRITTEN.replace("COPY", copy), {"y": ((32,), "int32")}
    how: dict[str, Any] = {"threads": 32, "seed": seed}
    expected = x.reshape(2, 32, 4).sum(axis=(0, 2))[::-1]
    assert (run(body.replace("SYNC", "__syncwarp();"), {"x": x}, y, **how).outputs["y"] == expected).all()
    with pytest.raises(KernelFaultError, match=r"data race .* this write and the read"):
        run(body.replace("SYNC", ""), {"x": x}, y, **how)


# The threads of warp 1 leave values for warp 0, and one of them arrives; the others end.
HANDED = """
__shared__ __align__(128) int s[32], more[32]; __shared__ u64 full;
if (threadIdx.x < 32) more[threadIdx.x] = 0;
if (threadIdx.x == 0) { init(&full, 1); init_fence(); }
__syncthreads();
if (threadIdx.x >= 32) {
  LEAVE
  SYNC
  if (threadIdx.x == 32) { ARRIVE }
} else {
  wait(&full, 0);
  y[threadIdx.x] = more[31 - threadIdx.x];
}"""


@SEEDS
@pytest.mark.parametrize("leave", ["more[threadIdx.x - 32] = threadIdx.x;", "atomicAdd(more + threadIdx.x % 4, 1);"])
@pytest.mark.parametrize("arrive", ["arrive(&full);", "expect(&full, 128); bulk_load(s, x, 128, &full);"])
def test_one_thread_arrives_after_the_writes_of_its_warp(leave: str, arrive: str, seed: int) -> None:
    def launch(sync: str) -> GridResult:
        return run(
            HANDED.replace("LEAVE", leave).replace("SYNC", sync).replace("ARRIVE", arrive),
            {"x": np.arange(32, dtype=np.int32)},
            {"y": ((32,), "int32")},
            threads=64,
            seed=seed,
        )

    expected = range(63, 31, -1) if "=" in leave else [0] * 28 + [8] * 4
    assert launch("__syncwarp();").outputs["y"].tolist() == list(expected)
    with pytest.raises(KernelFaultError, match=r"data race .* this read and the (write|atomic access)"):
        launch("")


BULK_STORE = """
__shared__ __align__(128) float s[32];
s[threadIdx.x % 32] = 1;
proxy_fence();
__syncthreads();
if (threadIdx.x == 0) {
  bulk_store(y, s, 128); store_commit();
  BEFORE
}
__syncthreads();
if (threadIdx.x == 32) s[0] = 2;
if (threadIdx.x == 0) { AFTER }"""


@SEEDS
@pytest.mark.parametrize(
    ("before", "after", "right"),
    [
        ("store_wait_read<0>();", "", True),
        ("", "store_wait_read<0>();", False),
        ("store_wait_read<1>();", "store_wait<0>();", False),
    ],
)  # fmt: skip
def test_the_source_of_a_bulk_store_is_free_after_its_wait(before: str, after: str, right: bool, seed: int) -> None:
    def launch() -> GridResult:
        body = BULK_STORE.replace("BEFORE", before).replace("AFTER", after)
        return run(body, {}, {"y": ((32,), "float32")}, threads=64, seed=seed)

    if right:
        assert (launch().outputs["y"] == 1).all()
    else:
        with pytest.raises(KernelFaultError, match=r"data race|still reads"):
            launch()


# ---- a warp that lags -----------------------------------------------------------------------------------------------

# Warp 0 fills two stages, warp 1 empties them, warp 2 looks on.
ONLOOKER = """
__shared__ int s[STAGES][32]; __shared__ u64 full[STAGES], empty[STAGES]; __shared__ int seen;
int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
if (threadIdx.x == 0) {
  for (int i = 0; i < STAGES; ++i) { init(&full[i], 32); init(&empty[i], EMPTIED); }
}
__syncthreads();
if (warp == 0) {
  for (int i = 0; i < TILES; ++i) {
    wait(&empty[i % STAGES], (i / STAGES + 1) % 2);
    s[i % STAGES][lane] = i;
    arrive(&full[i % STAGES]);
  }
} else if (warp == 1) {
  int sum = 0;
  for (int i = 0; i < TILES; ++i) {
    wait(&full[i % STAGES], i / STAGES % 2);
    sum += s[i % STAGES][lane];
    arrive(&empty[i % STAGES]);
  }
  y[lane] = sum;
} else {
  ONLOOKER
}"""
LOOKS_ON = "for (int i = 0; i < TILES; ++i) { wait(&full[i % STAGES], i / STAGES % 2); ARRIVES }"


def look_on(onlooker: str, emptied: int, stages: int, threads: int, seed: int) -> None:
    body = ONLOOKER.replace("ONLOOKER", onlooker).replace("EMPTIED", str(emptied))
    before = f"constexpr int TILES = 6, STAGES = {stages};"
    outputs = {"y": ((32,), "int32")}
    result = run(body, {}, outputs, threads=threads, before=before, seed=seed)
    assert (result.outputs["y"] == 15).all()


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("threads", [96, 128])
def test_a_warp_that_no_barrier_counts_may_lag_for_ever(stages: int, threads: int) -> None:

    def look_on_in_all_orders() -> None:
        for seed in range(3):
            look_on(LOOKS_ON.replace("ARRIVES", ""), 32, stages, threads, seed)

    with pytest.raises(KernelFaultError, match=r"deadlock.*of warp [23] wait at"):
        look_on_in_all_orders()


@pytest.mark.parametrize(
    ("onlooker", "emptied"),
    [
        (LOOKS_ON.replace("ARRIVES", "arrive(&empty[i % STAGES]);"), 64),
        ("wait(&full[TILES % STAGES], (TILES / STAGES + 1) % 2);", 32),
    ],
    ids=["counted", "the last phase alone"],
)  # fmt: skip
def test_a_warp_that_is_counted_does_not(onlooker: str, emptied: int) -> None:
    for seed in range(5):
        look_on(onlooker, emptied, 2, 96, seed)
