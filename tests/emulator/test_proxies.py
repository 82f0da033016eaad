"""Fences between the generic and the asynchronous proxy: what lacks one is found, what needs none is not accused.

Which pattern needs one, by what text: docs/emulator-details.md, "Fences between proxies".
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from tests.emulator.hopper import run, wgmma
from tests.emulator.kernels import SEEDS

X = np.arange(512, dtype=np.uint32)
WITHOUT = r"no fence\.proxy\.async since"


def result(body: str, *, threads: int = 64, seed: int = 0, before: str = "") -> np.ndarray:
    """Return 512 words from a kernel with 128 words of shared memory and two mbarriers of one arrival."""
    start = """
    __shared__ __align__(128) u32 s[128]; __shared__ u64 full, empty;
    const int t = threadIdx.x, lane = t % 32;
    if (t == 0) { init(&full, 1); init(&empty, 1); init_fence(); }
    __syncthreads();
    """
    y = {"y": ((512,), "uint32")}
    return run(start + body, {"x": X}, y, threads=threads, seed=seed, before=before).outputs["y"]


#: A thread of warp 0 brings four tiles to one place, warp 1 reads them.
READ_BEFORE_LOAD = """
if (t == 0) for (int r = 0; r < 4; ++r) {
  wait(&empty, r % 2 ^ 1); PRODUCER
  expect(&full, 512); bulk_load(s, x + 128 * r, 512, &full);
}
if (t >= 32) for (int r = 0; r < 4; ++r) {
  wait(&full, r % 2);
  u32 found[4];
  for (int i = 0; i < 4; ++i) READ;
  CONSUMER
  __syncwarp();
  if (lane == 0) { LEADER arrive(&empty); AFTER }
  for (int i = 0; i < 4; ++i) y[128 * r + 32 * i + lane] = found[i];
}"""


def reading(**parts: str) -> str:
    body = READ_BEFORE_LOAD
    for name in ("PRODUCER", "CONSUMER", "LEADER", "AFTER"):
        body = body.replace(name, parts.get(name, ""))
    return body.replace("READ;", parts.get("READ", "found[i] = s[32 * i + lane]") + ";")


@SEEDS
@pytest.mark.parametrize("place", ["CONSUMER", "LEADER", "PRODUCER"])
def test_a_fence_between_loads_and_a_bulk_copy_over_them(place: str, seed: int) -> None:
    """The fence is in the reading threads, in a thread synchronized with them, or in the copying thread after that."""
    values = result(reading(**{place: "proxy_fence();"}), seed=seed)
    assert np.array_equal(values, X)


@SEEDS
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"AFTER": "proxy_fence();"},
        {"READ": "{ if (i == 0) proxy_fence(); found[i] = s[32 * i + lane]; }"},
        {"READ": "found[i] = ((volatile u32*)s)[32 * i + lane]"},
        {"READ": "found[i] = atomicOr(s + 32 * i + lane, 0)"},
        {
            "READ": 'if (i == 0) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" '
            ': "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3]) : "r"(at(s + 4 * lane)))'
        },
    ],
    ids=["none", "after the arrival", "before the loads", "volatile", "atomic", "ldmatrix"],
)
def test_no_fence_between_loads_and_a_bulk_copy_over_them(parts: dict[str, str], seed: int) -> None:
    with pytest.raises(KernelFaultError, match=WITHOUT):
        result(reading(**parts), seed=seed)


def test_the_fault_names_both_accesses_and_where_the_fence_goes() -> None:
    with pytest.raises(KernelFaultError) as caught:
        result(reading())
    assert re.search(
        r"bulk write over what a load read with no fence\.proxy\.async since: byte \d+ of shared memory \(.*\), "
        r"the load at k\.cu:14 \(in: ld\.shared\.u32 .*\) by warp 1 of block \(0, 0, 0\).* "
        r"put the fence after the load, before .*found at k\.cu:\d+ \[\S+ at hopper\.cuh:\d+, k at "
        r"k\.cu:\d+\], block \(0, 0, 0\), "
        r"thread \(0, 0, 0\) \(in: cp\.async\.bulk\.",
        str(caught.value),
    )


#: All threads read a tile, and thread 0 copies the next one after a barrier of the block.
READ_BEFORE_BARRIER = """
for (int r = 0; r < 4; ++r) {
  if (t == 0) { AFTER expect(&full, 512); bulk_load(s, x + 128 * r, 512, &full); }
  wait(&full, r % 2);
  for (int i = t; i < 128; i += blockDim.x) y[128 * r + i] = s[i];
  BEFORE
  __syncthreads();
}"""
#: All threads write a tile, and thread 0 stores it.
WRITE_BEFORE_STORE = """
for (int r = 0; r < 4; ++r) {
  for (int i = t; i < 128; i += blockDim.x) s[i] = x[128 * r + i];
  BEFORE
  __syncthreads();
  if (t == 0) { AFTER bulk_store(y + 128 * r, s, 512); store_commit(); store_wait_read<0>(); }
  __syncthreads();
}"""
#: All threads write, and thread 0 brings something else to the same place.
WRITE_BEFORE_LOAD = """
s[t] = 7; s[t + 64] = 8;
BEFORE
__syncthreads();
if (t == 0) { AFTER expect(&full, 512); bulk_load(s, x, 512, &full); }
wait(&full, 0);
for (int i = t; i < 512; i += blockDim.x) y[i] = i < 128 ? s[i] : i;
"""
#: Copies by cp.async (generic proxy), and a bulk store of the copied data.
COPY_BEFORE_STORE = """
for (int r = 0; r < 4; ++r) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\\ncp.async.wait_all;"
    :: "r"(at(s + 2 * t)), "l"(x + 128 * r + 2 * t) : "memory");
  BEFORE
  __syncthreads();
  if (t == 0) { AFTER bulk_store(y + 128 * r, s, 512); store_commit(); store_wait_read<0>(); }
  __syncthreads();
}"""
BARRIER = {
    "loads, bulk load": READ_BEFORE_BARRIER,
    "stores, bulk store": WRITE_BEFORE_STORE,
    "stores, bulk load": WRITE_BEFORE_LOAD,
    "cp.async, bulk store": COPY_BEFORE_STORE,
}


@SEEDS
@pytest.mark.parametrize("before", [True, False], ids=["each thread", "the one that copies"])
@pytest.mark.parametrize("pattern", BARRIER)
def test_a_fence_on_either_side_of_a_barrier(pattern: str, before: bool, seed: int) -> None:
    fence = "proxy_fence();"
    body = BARRIER[pattern].replace("BEFORE", fence * before).replace("AFTER", fence * (not before))
    assert np.array_equal(result(body, seed=seed), X)


@SEEDS
@pytest.mark.parametrize("before", ["", "if (t == 0) proxy_fence();"], ids=["none", "of one thread for all"])
@pytest.mark.parametrize("pattern", BARRIER)
def test_a_barrier_is_no_fence(pattern: str, before: str, seed: int) -> None:
    """One thread's fence before the barrier is on the path of what its own warp did, and of nobody else's."""
    with pytest.raises(KernelFaultError, match=f"{WITHOUT}.* by warp 1 of block" if before else WITHOUT):
        result(BARRIER[pattern].replace("BEFORE", before).replace("AFTER", ""), seed=seed)


def test_a_fence_that_another_warp_executes_is_on_no_path() -> None:
    body = reading().replace("if (t >= 32)", "if (t >= 64) proxy_fence(); else if (t >= 32)")
    with pytest.raises(KernelFaultError, match=WITHOUT):
        result(body, threads=96)


@SEEDS
def test_what_is_asynchronous_first_needs_no_fence(seed: int) -> None:
    """Load data of a bulk copy, store over data of a bulk store, bulk copy over a bulk copy."""
    body = """
    if (t == 0) for (int r = 0; r < 3; ++r) {
      expect(&full, 512); bulk_load(s, x + 128 * r, 512, &full); wait(&full, r % 2);
      bulk_store(y + 128 * r, s, 512); store_commit(); store_wait_read<0>();
    }
    __syncthreads();
    for (int i = t; i < 128; i += blockDim.x) { u32 found = s[i]; s[i] = found + 128; y[384 + i] = s[i]; }
    """
    assert np.array_equal(result(body, seed=seed), X)


#: Warp 1 to 4 read ``s`` and multiply tiles of ones; a wait for a product is followed by an implicit fence.
PRODUCT = """
__shared__ __align__(1024) u8 tile[64 * 32];
if (t >= 128) for (int i = t - 128; i < 64 * 32; i += 128) tile[i] = 0x38;
proxy_fence();
__syncthreads();
if (t == 0) { expect(&full, 512); bulk_load(s, x, 512, &full); wait(&full, 0);
  wait(&empty, 0); expect(&full, 512); bulk_load(s, x + 128, 512, &full); wait(&full, 1); }
if (t >= 128) {
  float d[4] = {};
  wait(&full, 0);
  u32 found = 0;
  FIRST
  mma_fence();
  mma(d, descriptor(tile, 128, 256, 0), descriptor(tile, 128, 256, 0), 0);
  mma_commit();
  SECOND
  mma_wait<0>();
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (t == 128) arrive(&empty);
  for (int i = t - 128; i < 512; i += 128) y[i] = found + (u32)d[0];
}"""


@pytest.mark.parametrize("before", [True, False])
def test_a_product_that_is_waited_for_fences_what_came_before_it(before: bool) -> None:
    read = "found = s[t - 128];"
    body = PRODUCT.replace("FIRST", read * before).replace("SECOND", read * (not before))
    mma = wgmma("mma", 8, "k32", "f32.e4m3.e4m3")
    if before:
        assert np.array_equal(result(body, threads=256, before=mma), np.tile(X[:128], 4) + 32)
    else:
        with pytest.raises(KernelFaultError, match=WITHOUT):
            result(body, threads=256, before=mma)


#: 128 threads bring both operands and multiply.
MULTIPLIED = """
__shared__ __align__(1024) u32 tile[512];
float d[4] = {0, 0, 0, 0};
for (int i = t; i < 512; i += 128) BRING
asm volatile("cp.async.wait_all;" ::: "memory");
__syncthreads();
mma_fence();
mma(d, descriptor(tile, 128, 256, 0), descriptor(tile, 128, 256, 0), 0);
mma_commit();
mma_wait<0>();
for (int i = t; i < 512; i += 128) y[i] = (u32)d[0];
"""
COPY = 'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(tile + i)), "l"(x + i) : "memory");'


def test_a_product_of_what_cp_async_brought_needs_no_fence_and_one_of_stores_does() -> None:
    """This is more lenient than the PTX ISA: CUTLASS's and Triton's kernels omit the fence."""
    mma = wgmma("mma", 8, "k32", "f32.e4m3.e4m3")
    result(MULTIPLIED.replace("BRING", COPY), threads=128, before=mma)
    result(MULTIPLIED.replace("BRING", "{ tile[i] = 0x38383838; proxy_fence(); }"), threads=128, before=mma)
    with pytest.raises(KernelFaultError, match=WITHOUT):
        result(MULTIPLIED.replace("BRING", "tile[i] = 0x38383838;"), threads=128, before=mma)
