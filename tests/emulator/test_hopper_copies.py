"""Bulk copies with and without tensor maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.emulator.grid import load_module
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import UnsupportedError, UsageError
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


@pytest.mark.parametrize("place", ["16, 16", "24, 0", "-8, 0", "0, -8"])
def test_a_store_of_a_box_outside_of_the_tensor_writes_nothing(place: str) -> None:
    x = RNG.integers(0, 2**16, (16, 24)).astype(np.uint16)
    maps = (tensor_map("x", x, (8, 8)), TensorMap("y", "uint16", x.shape, x.strides, (8, 8), 0))
    body = ROUND_TRIP.replace("BYTES", "128").replace("32, 8", "8, 5").replace("64, 0", "8, 0")
    result = round_trip(body.replace("0, 16", place), x, maps)
    expected = np.full((16, 24), 0xFFFF, np.uint16)
    expected[:8, 8:16] = x[5:13, 8:16]
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
    result = run(BULK, {"x": x}, {"y": ((512,), "uint8")}, dynamic=1024)
    assert np.array_equal(result.outputs["y"], x)
    assert (result.counts.global_load_sectors, result.counts.global_store_sectors) == (16, 16)


def test_a_bulk_copy_over_an_mbarrier_that_nothing_used() -> None:
    """Triton 3.6 allocates tiles over such mbarriers, without mbarrier.inval."""
    x = RNG.integers(0, 256, 512).astype(np.uint8)
    body = BULK.replace("init_fence();", "init((u64*)(s + 16), 1); init_fence();", 1)
    result = run(body, {"x": x}, {"y": ((512,), "uint8")}, dynamic=1024)
    assert np.array_equal(result.outputs["y"], x)


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
        ("expect(&bar, 512);", "((u32*)&bar)[1] = 1; expect(&bar, 512);", r"an mbarrier that was overwritten"),
        ("expect(&bar, 512);", "y[0] = (u8)bar; expect(&bar, 512);", r"read of an mbarrier"),
        ("wait(&bar, 0);", "wait(&bar, 2);", r"a phase parity of 2, neither 0 nor 1"),
        ("expect(&bar, 512);", "arrive(&bar); expect(&bar, 512);", r"bulk read of (data that|an element that)"),
    ],
)
def test_wrong_bulk_copies(old: str, new: str, message: str) -> None:
    x = RNG.integers(0, 256, 512).astype(np.uint8)
    body = BULK.replace(old, new, 1)
    assert body != BULK
    for seed in range(3):
        with pytest.raises(KernelFaultError, match=message):
            run(body, {"x": x}, {"y": ((512,), "uint8")}, seed=seed, dynamic=1024)


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
        ({"box": (16,)}, r"2 extents, 2 strides and 1 extents of the box; each has one entry for each"),
        ({"dtype": "bf16"}, r"unknown dtype 'bf16'; NumPy's names"),
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


MADE = """
__shared__ __align__(128) u8 map[128];
((u32*)map)[threadIdx.x] = COPY;
__syncwarp();
if (threadIdx.x == 0) {
  u64 at_map = (u64)map;
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" :: "l"(at_map), "l"(x + 64));
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" :: "l"(at_map), "r"(5));
  OTHERS
}
__syncwarp();
asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
  :: "l"(out), "l"((u64)map) : "memory");
FENCE
if (threadIdx.x == 0) {
  expect(&bar, 8 * 16 * 4);
  load(s, (const CUtensorMap*)out, &bar, 16, 2);
  wait(&bar, 0);
}
__syncthreads();
for (int i = threadIdx.x; i < 128; i += 32) y[i] = ((const float*)s)[i];
"""
OTHERS = """
asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 1;" :: "l"(at_map));  // less one
asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 7;" :: "l"(at_map));
asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" :: "l"(at_map), "r"(64));
asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" :: "l"(at_map), "l"(256ull));
asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 0, %1;" :: "l"(at_map), "r"(16));
asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], 1, %1;" :: "l"(at_map), "r"(8));
asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 0, %1;" :: "l"(at_map), "r"(1));
asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], 1, %1;" :: "l"(at_map), "r"(1));
asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;" :: "l"(at_map));
asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 2;" :: "l"(at_map));
asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" :: "l"(at_map));
"""
FENCE = 'asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(out) : "memory");'


def load_by_made_map(others: str, copied: str = "0", fence: str = FENCE) -> np.ndarray:
    """Return the tile of 8 x 16 at row 2, column 16 that a kernel loads by the map that it makes: 5 rows from row 1."""
    x = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    body = MADE.replace("OTHERS", others).replace("COPY", copied).replace("FENCE", fence)
    result = run(
        START + body,
        {"x": x},
        {"y": ((8, 16), "float32"), "out": ((128,), "uint8")},
        parameters="const float* x, const __grid_constant__ CUtensorMap given, u8* out, float* y",
        args=("x", TensorMap("x", "float32", (8, 64), (256, 4), (8, 16), 64), "out", "y"),
        dynamic=4096,
        threads=32,
    )
    return result.outputs["y"]


def test_a_map_that_a_kernel_makes() -> None:
    """From zeros, and from a given map with another begin and height. Rows of 64 bytes are swizzled."""
    x = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    expected = np.zeros((8, 16), np.float32)
    expected[:3] = x[3:6, 16:32]
    rows, chunks = np.meshgrid(np.arange(8), np.arange(4), indexing="ij")
    swizzled = np.zeros_like(expected).reshape(8, 4, 4)
    swizzled[rows, chunks ^ rows // 2 % 4] = expected.reshape(8, 4, 4)
    for others, copied in ((OTHERS, "0"), ("", "((const u32*)&given)[threadIdx.x]")):
        assert np.array_equal(load_by_made_map(others, copied), swizzled.reshape(8, 16))


@pytest.mark.parametrize(
    ("before", "after", "error", "message"),
    [
        (".b32 [%0], 7;", ".b32 [%0], 8;", UnsupportedError, "sets .elemtype to another value than 0, 1, 2"),
        (
            "fill_mode.shared::cta.b1024.b32 [%0], 0",
            "fill_mode.shared::cta.b1024.b32 [%0], 1",
            UnsupportedError,
            "fill_",
        ),
        ('"l"(256ull)', '"l"(250ull)', KernelFaultError, "a stride of 250 bytes; strides are multiples of 16"),
        (
            '.b32 [%0], 1;" :: "l"(at_map));  //',
            '.b32 [%0], 2;" :: "l"(at_map));  //',
            KernelFaultError,
            "kernel made: shape",
        ),
        (FENCE, "", KernelFaultError, r"used without a fence\.proxy\.tensormap::generic\.acquire"),
        ('"l"(at_map), "r"(16)', '"l"(at_map + 4), "r"(16)', KernelFaultError, "not a multiple of 64"),
    ],
)
def test_a_made_map_that_is_wrong(before: str, after: str, error: type[Exception], message: str) -> None:
    assert (OTHERS + FENCE).count(before) == 1
    with pytest.raises(error, match=message):
        load_by_made_map(OTHERS.replace(before, after), fence=FENCE.replace(before, after))


def test_strides_in_old_ptx_have_a_unit_that_is_not_known() -> None:
    stride = "tensormap.replace.tile.global_stride.global.b1024.b64 [%rd1], 0, %rd1;"
    head = ".target sm_90a\n.address_size 64\n.visible .entry k()\n{\n.reg .b64 %rd<2>;\nret;\n"
    load_module(f".version 8.6\n{head}{stride}\n}}\n")
    with pytest.raises(UnsupportedError, match=r"PTX 8\.5: up to 8\.5, compilers differ"):
        load_module(f".version 8.5\n{head}{stride}\n}}\n")
