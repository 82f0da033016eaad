"""Bulk copies with and without tensor maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import TensorMap
from tests.emulator.hopper import run, tensor_map

RNG = np.random.default_rng(6)
START = """
extern __shared__ __align__(1024) u8 s[];
__shared__ u64 bar;
if (threadIdx.x == 0) { init(&bar, 1); init_fence(); }
__syncthreads();
"""
BOTH = "const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to"


def round_trip(body: str, x: np.ndarray, maps: tuple[TensorMap, TensorMap], **more: Any) -> np.ndarray:
    """Return a kernel's output with the shape of ``x``."""
    result = run(
        START + body,
        {"x": x},
        {"y": (x.shape, x.dtype.name)},
        parameters=BOTH,
        args=maps,
        dynamic=4096,
        threads=32,
        **more,
    )
    return result.outputs["y"]


ROUND_TRIP = """
if (threadIdx.x == 0) {
  expect(&bar, BYTES);
  load(s, &from, &bar, 32, 8);
  wait(&bar, 0);
  store(&to, s, 64, 0);
  store(&to, s, 0, 16);
  store_commit();
  store_wait<0>();
}
"""


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_tile_goes_through_swizzled_shared_memory(swizzle: int) -> None:
    width = swizzle or 32
    x = RNG.integers(0, 256, (32, 128)).astype(np.uint8)
    maps = (tensor_map("x", x, (16, width), swizzle), TensorMap("y", "uint8", x.shape, x.strides, (16, width), swizzle))
    result = round_trip(ROUND_TRIP.replace("BYTES", str(16 * width)), x, maps)
    tile = np.zeros((16, width), np.uint8)
    tile[:, : min(width, 96)] = x[8:24, 32 : 32 + width]
    expected = np.full((32, 128), 0xFF, np.uint8)
    expected[:16, 64 : 64 + width] = tile[:, : min(width, 64)]
    expected[16:, :width] = tile
    assert np.array_equal(result, expected)


def test_swizzle_of_shared_memory() -> None:
    """Check the bytes in shared memory, and zeros outside of the tensor on every side."""
    x = RNG.integers(1, 256, (3, 20, 128)).astype(np.uint8)
    body = """
    if (threadIdx.x == 0) {
      expect(&bar, 2 * 16 * 128);
      asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5}], [%2];" :: "r"(at(s)), "l"(&from), "r"(at(&bar)), "r"(16), "r"(-2), "r"(2) : "memory");
    }
    wait(&bar, 0);
    for (int i = threadIdx.x; i < 4096; i += 32) y[i] = s[i];
    """
    result = run(
        START + body,
        {"x": x},
        {"y": ((4096,), "uint8")},
        parameters="const __grid_constant__ CUtensorMap from, u8* y",
        args=(tensor_map("x", x, (2, 16, 128), 128), "y"),
        dynamic=4096,
        threads=32,
    )
    tile = np.zeros((2, 16, 128), np.uint8)
    tile[0, 2:, :112] = x[2, :14, 16:]
    places = np.arange(4096)
    assert np.array_equal(result.outputs["y"][places ^ (places >> 7 & 7) << 4], tile.ravel())
    assert result.counts.global_load_bytes == 14 * 112


@pytest.mark.parametrize("start", [8, 16])
def test_rows_that_end_between_chunks_of_16_bytes(start: int) -> None:
    x = RNG.integers(0, 2**16, (16, 24)).astype(np.uint16)
    short = TensorMap("x", "uint16", (16, 20), x.strides, (8, 8), 0)
    maps = (short, TensorMap("y", "uint16", x.shape, x.strides, (8, 8), 0))
    body = ROUND_TRIP.replace("BYTES", "128").replace("32, 8", f"{start}, 5").replace("64, 0", "8, 0")
    result = round_trip(body.replace("0, 16", "16, 8"), x, maps)
    tile = np.zeros((8, 8), np.uint16)
    tile[:, : 20 - start] = x[5:13, start : min(start + 8, 20)]
    expected = np.full((16, 24), 0xFFFF, np.uint16)
    expected[:8, 8:16] = tile
    expected[8:, 16:] = tile
    assert np.array_equal(result, expected)


def test_a_store_to_a_row_that_ends_between_chunks_is_refused() -> None:
    x = RNG.integers(0, 2**16, (16, 24)).astype(np.uint16)
    maps = (tensor_map("x", x, (8, 8)), TensorMap("y", "uint16", (16, 20), x.strides, (8, 8), 0))
    body = ROUND_TRIP.replace("BYTES", "128").replace("32, 8", "8, 5").replace("64, 0", "8, 0")
    assert (round_trip(body.replace("0, 16", "8, 8"), x, maps)[:8, 8:16] == x[5:13, 8:16]).all()
    with pytest.raises(KernelFaultError, match=r"a tensor store to a row that ends within 16 bytes"):
        round_trip(body.replace("0, 16", "16, 8"), x, maps)


@pytest.mark.parametrize(("old", "new"), [("&bar, 32, 8", "&bar, 3, 8"), ("s, 64, 0", "s, 1, 0")])
def test_tiles_that_begin_between_chunks_of_16_bytes_are_refused(old: str, new: str) -> None:
    x = RNG.integers(0, 2**16, (32, 128)).astype(np.uint16)
    maps = (tensor_map("x", x, (8, 8)), TensorMap("y", "uint16", x.shape, x.strides, (8, 8), 0))
    body = ROUND_TRIP.replace("BYTES", "128")
    assert np.array_equal(round_trip(body, x, maps)[:8, 64:72], x[8:16, 32:40])
    with pytest.raises(KernelFaultError, match=r"a tensor copy at [13] of the innermost dimension, .* of 16 bytes"):
        round_trip(body.replace(old, new), x, maps)


BULK = (
    START
    + """
if (threadIdx.x == 0) {
  expect(&bar, 512);
  bulk_load(s + 16, x, 512, &bar);
  wait(&bar, 0);
  bulk_store(y, s + 16, 512);
  store_commit();
  store_wait_read<0>();
}
"""
)


def test_bulk_copies_without_a_tensor_map() -> None:
    x = RNG.integers(0, 256, 512).astype(np.uint8)
    result = run(
        BULK, {"x": x}, {"y": ((512,), "uint8")}, parameters="const u8* x, u8* y", args=("x", "y"), dynamic=1024
    )
    assert np.array_equal(result.outputs["y"], x)
    assert (result.counts.global_load_sectors, result.counts.global_store_sectors) == (16, 16)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("wait(&bar, 0);", "", r"bulk read of (data that an asynchronous copy|an element that nothing)"),
        ("wait(&bar, 0);", "return;", r"ended before a bulk copy to shared memory was delivered, nothing waits"),
        (
            "init_fence(); }\n__syncthreads();",
            "}",
            r"an mbarrier with neither a fence \(mbarrier_init, proxy\.async\) nor a barrier since its init",
        ),
        ("expect(&bar, 512);", "expect(&bar, 528);", r"deadlock.*pending: 0 of 1 arrivals, 16 bytes"),
        ("bulk_load(s + 16", "bulk_load(s + 8", r"a bulk copy at byte 1032 of shared memory, .* multiple of 16"),
        ("bulk_load(s + 16", "bulk_load(s + 528", r"bulk copy of 512 bytes out of bounds at byte 1552 of 2048"),
        ("x, 512, &bar", "x + 8, 512, &bar", r"a bulk copy at byte 8 of 'x' \(512 bytes\), .* multiple of 16"),
        ("x, 512, &bar", "x + 16, 512, &bar", r"bulk read out of bounds: 0 bytes past the end of 'x'"),
        ("x, 512, &bar", "x, 500, &bar", r"bulk copy of 500 bytes, not a multiple of 16"),
        ("store_wait_read<0>();", "", r"ended while a bulk store may still read shared memory.*bulk_group"),
        (
            "store_wait_read<0>();",
            "s[20] = 1; store_wait_read<0>();",
            r"to where an asynchronous operation still reads",
        ),
        ("bulk_store(y", "s[20] = 1; bulk_store(y", r"what a store wrote with no fence\.proxy\.async since"),
        ("512, &bar);", "512, (u64*)s);", r"no mbarrier is initialised here"),
        ("wait(&bar, 0);", "wait(&bar, 0); *(u32*)&bar = 1;", r"4-byte write over an mbarrier"),
        ("wait(&bar, 0);", "wait(&bar, 0); y[0] = (u8)bar;", r"read of an mbarrier"),
        ("wait(&bar, 0);", "wait(&bar, 2);", r"a phase parity of 2, neither 0 nor 1"),
        (
            "expect(&bar, 512);",
            "arrive(&bar); expect(&bar, 512);",
            r"bulk read of (data that|an element that)",
        ),
    ],
)
def test_wrong_bulk_copies(old: str, new: str, message: str) -> None:
    x = RNG.integers(0, 256, 512).astype(np.uint8)
    body = BULK.replace(old, new, 1)
    assert body != BULK
    more: Any = {"parameters": "const u8* x, u8* y", "args": ("x", "y"), "dynamic": 1024}
    for seed in range(3):
        with pytest.raises(KernelFaultError, match=message):
            run(body, {"x": x}, {"y": ((512,), "uint8")}, seed=seed, **more)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("load(s,", "load(s + 64,", r"a bulk copy at byte 1088 of shared memory, not a multiple of 128"),
        ("load(s,", "load(s + 3968,", r"a bulk copy of 512 bytes out of bounds at byte 4992 of 5120"),
        ("load(s, &from", "load(s, (const CUtensorMap*)s", r"a tensor map in shared memory"),
        ("store_wait<0>();", "", r"ended while a bulk store"),
        ("wait(&bar, 0);", "", r"bulk read of (data that an asynchronous copy|an element that nothing)"),
    ],
)
def test_wrong_tensor_copies(old: str, new: str, message: str) -> None:
    x = RNG.integers(0, 256, (32, 128)).astype(np.uint8)
    maps = (tensor_map("x", x, (16, 32), 32), TensorMap("y", "uint8", x.shape, x.strides, (16, 32), 32))
    body = ROUND_TRIP.replace("BYTES", "512").replace(old, new, 1)
    for seed in range(3):
        with pytest.raises(KernelFaultError, match=message):
            round_trip(body, x, maps, seed=seed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strides": (120, 1)}, r"tensor map over 'x': a stride of 120 bytes; strides are multiples of 16"),
        ({"strides": (128, 2)}, r"its innermost stride must be the element's 1 bytes, not 2"),
        ({"box": (16, 264)}, r"a box extent of 264; extents are 1 to 256"),
        ({"box": (16, 24)}, r"its box is 24 bytes wide; the width must be a multiple of 16"),
        ({"box": (16, 64)}, r"its box is 64 bytes wide, more than its swizzle of 32"),
        ({"swizzle": 16}, r"a swizzle of 16; known are 0, 32, 64 and 128"),
        ({"swizzle": 64}, r"less than its swizzle of 64"),
        ({"shape": (33, 128)}, r"shape \(33, 128\) with strides \(128, 1\) needs 4224 bytes of 4096"),
        ({"box": (16,)}, r"needs 1 to 5 dimensions"),
        ({"buffer": "z"}, r"tensor map over 'z': no buffer of the case"),
    ],
)
def test_wrong_tensor_maps(changed: dict[str, Any], message: str) -> None:
    x = np.zeros((32, 128), np.uint8)
    right: dict[str, Any] = {"buffer": "x", "dtype": "uint8", "shape": (32, 128), "strides": (128, 1)}
    right |= {"box": (16, 32), "swizzle": 32}
    good = TensorMap(**right)
    with pytest.raises(UsageError, match=message):
        round_trip(ROUND_TRIP.replace("BYTES", "512"), x, (TensorMap(**{**right, **changed}), good))
