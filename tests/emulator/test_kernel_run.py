"""``emulator.run`` with values of Python, and the pytest fixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenfast import emulator
from greenfast.device.compiler import to_ptx
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource

pytest_plugins = ["pytester"]

SAXPY = """extern "C" __global__ void saxpy(int n, float a, const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""
COPY = """extern "C" __global__ void copy(const float* x, float* y, int n) {
  if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
"""
X = np.random.default_rng(0).normal(3, 2, 100).astype(np.float32)


def test_arrays_are_changed_in_place_and_numbers_take_their_parameters_types() -> None:
    y = np.ones(100, np.float32)
    report = emulator.run(SAXPY, grid=4, block=(32,), args=[100, 2, emulator.In(X), y])
    assert np.array_equal(y, 2 * X + 1)
    assert (report.kernel, report.orders, report.faults, report.file) == ("saxpy", 3, [], "kernel.cu")
    assert report.counts is not None
    assert report.counts.global_store_bytes == 400


def test_a_file_its_defines_and_ptx_text_are_sources(tmp_path: Path) -> None:
    file = tmp_path / "copy.cu"
    file.write_text(COPY.replace("= x[", "= SCALE * x["))
    y = np.zeros(32, np.float32)
    emulator.run(str(file), "copy", grid=1, block=32, args=[X[:32], emulator.Out(y), 32], defines=["SCALE=4"])
    assert np.array_equal(y, 4 * X[:32])
    ptx = to_ptx(KernelSource("copy", COPY, "copy.cu", (), (32, 1, 1), 0), Target("sm_80"))
    report = emulator.run(ptx, grid=1, block=32, args=[X[:32], emulator.Out(y), 32])
    assert np.array_equal(y, X[:32])
    assert report.target == "sm_80"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_of_any_dtype_are_memory(dtype: torch.dtype) -> None:
    source = """extern "C" __global__ void copy(const unsigned char* x, unsigned char* y, int n) {
      for (int i = threadIdx.x; i < n; i += 32) y[i] = x[i];
    }"""
    x = torch.from_numpy(X).to(dtype)
    y = torch.zeros_like(x)
    emulator.run(source, grid=1, block=32, args=[emulator.In(x), y, x.nbytes])
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


def test_a_fault_raises_or_is_returned_and_leaves_the_arrays() -> None:
    y = np.full(40, 7, np.float32)
    with pytest.raises(emulator.KernelFaultError, match=r"out of bounds.*args\[0\].*kernel\.cu:2"):
        emulator.run(COPY, grid=1, block=64, args=[X[:39].copy(), y, 40])
    report = emulator.run(COPY, grid=1, block=64, args=[X[:39].copy(), y, 40], check=False)
    assert (y == 7).all()
    assert [(fault.kind, fault.line) for fault in report.faults] == [("out-of-bounds", 2)]
    assert report.outputs == []


def test_unwritten_outputs_and_changed_inputs_are_failures() -> None:
    y = np.zeros(40, np.float32)
    with pytest.raises(emulator.KernelFaultError, match=r"128 of 160 bytes of 'args\[1\]' .*; give the array"):
        emulator.run(COPY, grid=1, block=64, args=[X, emulator.Out(y), 8])
    with pytest.raises(
        emulator.KernelFaultError, match=r"^copy: a write to an input.*'args\[1\]'.* without In or Out, if it may"
    ):
        emulator.run(COPY, grid=1, block=64, args=[X, emulator.In(y), 8])


def test_results_that_depend_on_an_unset_register_differ_between_orders() -> None:
    ptx = """.version 8.4
    .target sm_90
    .address_size 64
    .visible .entry k(.param .u64 y) {
      .reg .b32 %r<3>; .reg .pred %p; .reg .b64 %d;
      ld.param.u64 %d, [y];
      SET
      add.u32 %r2, %r1, 1;
      st.global.u32 [%d], %r2;
      ret;
    }"""
    y = np.zeros(1, np.uint32)
    emulator.run(ptx.replace("SET", "mov.u32 %r1, 5;"), grid=1, block=1, args=[y])
    assert y[0] == 6
    for unset in ("", "@%p mov.u32 %r1, 5;"):
        with pytest.raises(emulator.KernelFaultError, match="differs between 3 orders"):
            emulator.run(ptx.replace("SET", unset), grid=1, block=1, args=[y])


@pytest.mark.parametrize("threads", [32, 40])
def test_results_that_depend_on_an_absent_thread_of_a_shuffle_differ_between_orders(threads: int) -> None:
    body = """extern "C" __global__ void k(const int* x, int* y) {
        int v = x[threadIdx.x];
        if (threadIdx.x < 24) {
            for (int d = 16; d; d /= 2) v += __shfl_down_sync(MASK, v, d, WIDTH);
        } else if (threadIdx.x >= 32) {
            for (int d = 16; d; d /= 2) v += __shfl_down_sync(0xff, v, d, WIDTH);
        }
        if (threadIdx.x % 32 == 0) atomicAdd(y, v);
    }"""
    x, y = np.arange(64, dtype=np.int32), np.zeros(1, np.int32)
    for width, right in ((32, False), (8, True)):
        source = body.replace("MASK", "0xffffff").replace("WIDTH", str(width))
        if right:
            emulator.run(source, grid=1, block=threads, args=[x, y])
        else:
            with pytest.raises(emulator.KernelFaultError, match="differs between 3 orders"):
                emulator.run(source, grid=1, block=threads, args=[x, y])


def test_one_array_twice_is_one_buffer_and_none_is_a_null_pointer() -> None:
    z = np.arange(32, dtype=np.float32)
    emulator.run(SAXPY, grid=1, block=32, args=[32, 1.0, z, z])
    assert np.array_equal(z, 2 * np.arange(32))
    with pytest.raises(emulator.KernelFaultError, match="a null pointer"):
        emulator.run(SAXPY, grid=1, block=32, args=[32, 1.0, None, z])
    emulator.run(SAXPY, grid=1, block=32, args=[0, 1.0, np.zeros(0, np.float32), z])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([X, X, 1.5], r"args\[2\]: 1\.5 for \.u32"),
        ([X, X, 2**32], r"args\[2\]: 4294967296 does not fit into \.u32"),
        ([X, X, np.int64(3)], r"args\[2\]: parameter 3 of copy is \.u32"),
        ([X[:50], X[20:], 3], r"args\[1\]: overlaps args\[0\]"),
        ([X[::2], X, 3], r"args\[0\]: strides \(8,\); give a contiguous array"),
        ([torch.zeros(4, 4).T, X, 3], r"args\[0\]: a tensor on cpu, strides \(1, 4\)"),
        ([[1.0], X, 3], r"args\[0\]: list; allowed are NumPy arrays"),
        ([X, X], r"copy takes 3 arguments, not 2"),
    ],
)
def test_a_wrong_argument_is_named(args: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        emulator.run(COPY, grid=1, block=32, args=args)


@pytest.mark.parametrize("extent", [0, (1, 2, 3, 4), (), (2.0,)])
def test_a_wrong_extent_is_named(extent: Any) -> None:
    with pytest.raises(UsageError, match=r"grid=.* give one to three whole numbers"):
        emulator.run(COPY, grid=extent, block=32, args=[X, X, 3])


@pytest.mark.parametrize("orders", [0, -1])
def test_a_number_of_orders_is_at_least_one(orders: int) -> None:
    with pytest.raises(UsageError, match=f"orders {orders}: give at least 1"):
        emulator.run(COPY, grid=1, block=32, args=[X, X, 3], orders=orders)


def test_extents_are_numpys_numbers_too() -> None:
    y = np.zeros(64, np.float32)
    grid: Any = np.int64(1)
    block: Any = (np.int32(64), 1)
    emulator.run(COPY, grid=grid, block=block, args=[X[:64], y, 64])
    assert np.array_equal(y, X[:64])


def test_the_fixture_fails_a_test_with_the_location_of_the_fault(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["greenfast.emulator.pytest_plugin"]')
    pytester.makepyfile(
        f"""
        import numpy as np
        SOURCE = {COPY!r}
        def test_right(emulate):
            assert emulate(SOURCE, grid=1, block=32, args=[np.ones(8, "f4"), np.ones(8, "f4"), 8]).orders == 5
        def test_wrong(emulate):
            emulate(SOURCE, grid=1, block=32, args=[np.ones(8, "f4"), np.ones(8, "f4"), 9])
        """
    )
    result = pytester.runpytest_inprocess("--emulator-orders", "5", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*out of bounds*kernel.cu:2*"])
    result.stdout.no_fnmatch_line("*Traceback*")
