"""``greenfast emulate`` as a kernel's author without a GPU uses it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.cli.command_line import Ran, run_here

pytestmark = pytest.mark.usefixtures("machine")

SAXPY = """__global__ void saxpy(int n, float a, const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""
SAXPY_ARGS = ("--arg", "i32:100", "--arg", "f32:2", "--arg", "in:x=f32[100]:arange", "--arg", "inout:y=f32[100]:ones")

REDUCE = """#ifndef N
#define N 256
#endif
extern "C" __global__ void __launch_bounds__(N) reduce(const float* x, float* sums) {
  __shared__ float s[N];
  int t = threadIdx.x;
  s[t] = x[blockIdx.x * N + t];
#ifndef FIRST_MISSING
  __syncthreads();
#endif
  for (int step = N / 2; step > 0; step /= 2) {
    if (t < step) s[t] += s[t + step];
#ifndef LATER_MISSING
    __syncthreads();
#endif
  }
  if (t == 0) sums[blockIdx.x] = s[0];
}
"""
REDUCE_ARGS = ("--grid", "2", "--block", "256", "--arg", "in:x=f32[512]:normal", "--arg", "out:sums=f32[2]")

HELLO = """__global__ void hello(int n, int* y) {
  if (threadIdx.x < n) printf("thread %d says %.1f\\n", threadIdx.x, 1.5f * threadIdx.x);
  if (n == 3) y[99] = 1;
}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with these sources."""
    for name, text in (("saxpy", SAXPY), ("reduce", REDUCE), ("hello", HELLO)):
        (tmp_path / f"{name}.cu").write_text(text)
    (tmp_path / "two.cu").write_text(SAXPY + HELLO)
    return tmp_path


def emulate(capsys: pytest.CaptureFixture[str], file: Path, *options: str | Path) -> Ran:
    grid = () if "--grid" in options else ("--grid", "4", "--block", "32")
    return run_here(capsys, "emulate", file, *grid, *options)


def assert_said(ran: Ran, code: int, said: str) -> None:
    """The exit code, and one line that is on standard error only."""
    assert (ran.code, ran.out) == (code, ""), ran
    assert said in ran.err
    assert ran.err.startswith("greenfast: ")
    assert ran.err.count("\n") == 1


def test_a_right_kernel_is_0_with_its_outputs_and_counts(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    ran = emulate(capsys, files / "saxpy.cu", "--kernel", "saxpy", *SAXPY_ARGS, "--save", files / "out")
    assert (ran.code, ran.err) == (0, "")
    assert "_Z5saxpyifPKfPf, sm_90a: grid 4,1,1, block 32,1,1; 3 orders of the warps" in ran.out
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["y", "float32", "100", "1", "199", "100", "0", "filled", "before"] in rows
    assert ["warp", "instructions", "4", "fma"] in rows
    assert ["global", "bytes", "loaded", "800"] in rows
    assert ["global", "sectors", "loaded", "26"] in rows
    assert np.array_equal(np.load(files / "out" / "y.npy"), 2 * np.arange(100, dtype=np.float32) + 1)
    assert ran.out.endswith(f"{files / 'out' / 'y.npy'}\n")


def test_json_is_all_that_is_on_standard_output(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, "--json", "--arch", "sm_80", "--orders", "2")
    found = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert (found["target"], found["orders"], found["failures"]) == ("sm_80", 2, [])
    assert found["outputs"][0] == {
        "name": "y", "dtype": "float32", "shape": [100], "min": 1.0, "max": 199.0, "mean": 100.0, "nan": 0,
        "bytes": 400, "unwritten_bytes": None,
    }  # fmt: skip
    counts = found["counts"]
    assert counts["instructions"]["fma"] == 4
    assert (counts["global_load_bytes"], counts["global_store_bytes"]) == (800, 400)
    assert (counts["matrix_flops"], counts["exponentials"], counts["barriers"]) == (0, 0, 0)
    assert found["resources"]["registers"] > 0


def test_a_fault_is_1_and_says_where(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    ran = emulate(capsys, files / "saxpy.cu", "--arg", "i32:101", *SAXPY_ARGS[2:])
    assert_said(ran, 1, "4-byte read out of bounds: 0 bytes past the end of 'x' (400 bytes) at saxpy.cu:3, block (3,")
    assert "thread (4, 0, 0)" in ran.err


def test_a_missing_barrier_is_found(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    right = emulate(capsys, files / "reduce.cu", *REDUCE_ARGS)
    assert (right.code, right.err) == (0, "")
    assert "sums    float32  2" in right.out
    missing = emulate(capsys, files / "reduce.cu", *REDUCE_ARGS, "--define", "FIRST_MISSING")
    assert_said(missing, 1, "4-byte read of an element that nothing has written: byte ")
    assert "of shared memory (s[" in missing.err
    assert "]) at reduce.cu:12, block (0, 0, 0)" in missing.err
    for orders in ("3", "1"):
        later = emulate(capsys, files / "reduce.cu", *REDUCE_ARGS, "--define", "LATER_MISSING", "--orders", orders)
        assert_said(later, 1, "a data race on byte 128 of shared memory")
        assert "found at reduce.cu:12" in later.err


def test_bank_conflicts_are_listed_by_source_line(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    (files / "banks.cu").write_text(
        "__global__ void k(float* y) {\n  __shared__ float s[1024];\n  s[32 * threadIdx.x] = 1;\n  __syncwarp();\n"
        "  y[threadIdx.x] = s[32 * (31 - threadIdx.x)];\n}\n"
    )
    ran = emulate(capsys, files / "banks.cu", "--grid", "1", "--block", "32", "--arg", "out:y=f32[32]", "--orders", "1")
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["bank", "conflicts", "31", "at", "banks.cu:3"] in rows
    assert ["bank", "conflicts", "31", "at", "banks.cu:5"] in rows


def test_lines_values_and_a_trace_are_shown(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    page, trace = files / "lines.html", files / "new" / "trace.txt"
    observe = ("--lines", "--lines-html", page, "--watch", "3:i,a*i", "--trace", trace, "--trace-warp", "3:0")
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *observe)
    assert (ran.code, ran.err) == (0, "")
    # Three warps of 32 threads and one of 4: 26 sectors in 8 requests.
    row = next(line for line in ran.out.splitlines() if "|   if (i < n)" in line)
    assert row.split()[:2] == ["3", "128"]
    assert "3.2 (3.2) 3.2 (3.2)        |   if (i < n) y[i] = a * x[i] + y[i];" in row
    assert "saxpy.cu:3  block 1,0,0 warp 0  ffffffff  i = 32..63, a*i = 64..126 step 2\n" in ran.out
    assert "st.global.f32" in trace.read_text()
    assert " 0000000f " in trace.read_text()
    html = page.read_text()
    assert "if (i &lt; n) y[i] = a * x[i] + y[i];" in html
    assert '<tr class="ran"><td>3</td><td>128</td>' in html
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *observe, "--json")
    observed = json.loads(ran.out)["observed"]
    stores = {line["line"]: line["global_stores"] for line in observed["lines"]}
    assert stores[3] == {"requests": 4, "transactions": 13, "ideal": 13}
    assert len(observed["watched"]) == 4
    assert observed["trace"] == []


def test_lines_up_to_a_fault_and_lines_that_nothing_reaches(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    y = ("--grid", "1", "--block", "32", "--arg", "out:y=i32[4]")
    ran = emulate(capsys, files / "hello.cu", "--arg", "i32:0", *y, "--lines", "--watch", "3:y")
    assert "never" in ran.out
    assert "no thread reached line 3 (--watch)" not in ran.out  # the statement is reached, its branch is not taken
    ran = emulate(capsys, files / "hello.cu", "--arg", "i32:3", *y, "--lines", "--trace", files / "trace.txt")
    assert "write out of bounds" in ran.err
    assert "HELLO" not in ran.out
    assert "|   if (threadIdx.x < n) printf(" in ran.out
    assert "st.global.u32" not in (files / "trace.txt").read_text()
    assert_said(emulate(capsys, files / "hello.cu", *y, "--watch", "x"), 2, "--watch 'x': give LINE:EXPRESSION")


def test_what_the_kernel_prints_is_shown_also_before_a_fault(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    y = ("--grid", "1", "--block", "32", "--arg", "out:y=i32[4]")
    ran = emulate(capsys, files / "hello.cu", "--arg", "i32:2", *y)
    assert ran.code == 1
    assert "16 of 16 bytes of 'y' were never written; give it as inout:y=..." in ran.err
    assert "\nprinted:\nthread 0 says 0.0\nthread 1 says 1.5\n" in ran.out
    assert "16 of 16 bytes" in ran.out
    assert "never written read as 0xFF" in ran.out
    ran = emulate(capsys, files / "hello.cu", "--arg", "i32:3", *y)
    assert (ran.code, ran.out) == (1, "thread 0 says 0.0\nthread 1 says 1.5\nthread 2 says 3.0\n")
    assert "write out of bounds" in ran.err
    ran = emulate(capsys, files / "hello.cu", "--arg", "i32:3", *y, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["printed"]) == (1, "thread 0 says 0.0\nthread 1 says 1.5\nthread 2 says 3.0\n")
    assert ran.err.startswith("greenfast: _Z5helloiPi: 4-byte write out of bounds")


HEADERS = """#include "head.cuh"
constexpr int ROWS = 4;
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float pad[3], As[ROWS][2 * 8];
  put(&As[2][threadIdx.x % 8], x[threadIdx.x]);
  pad[threadIdx.x % 3] = 1;
#ifdef CALLED
  y[add(threadIdx.x)] = 1;
#else
  y[threadIdx.x] = As[2][threadIdx.x / 8];
#endif
}
"""
HEAD = """template <typename T> __device__ inline void store(T* p, T v) {
  *p = v;
}
namespace ns { __device__ inline void write(float* p, float v) { store(p, v); } }
__device__ inline void put(float* p, float v) { ns::write(p, v); }
__device__ __noinline__ int add(int i) {
  return ((volatile int*)0)[i];
}
"""


@pytest.mark.parametrize("called", [False, True])
def test_a_fault_in_a_header_shows_the_callers_line_and_the_stack(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, called: bool
) -> None:
    (tmp_path / "k.cu").write_text(HEADERS)
    (tmp_path / "head.cuh").write_text(HEAD)
    more = ("--block", "8", "--define", "CALLED") if called else ("--block", "64")
    args = ("--grid", "1", *more, "--arg", "in:x=f32[64]:normal", "--arg", "inout:y=f32[64]:zeros", "--json")
    ran = emulate(capsys, tmp_path / "k.cu", *args)
    (fault,) = json.loads(ran.out)["faults"]
    assert (ran.code, fault["level"], fault["file"]) == (1, "error", "k.cu")
    stack = [(frame["function"], frame["file"], frame["line"]) for frame in fault["stack"]]
    if called:
        assert (fault["line"], fault["function"]) == (8, "k")
        assert stack == [("add", "head.cuh", 7), ("k", "k.cu", 8)]
    else:
        assert (fault["kind"], fault["line"], fault["function"]) == ("data-race", 10, "k")
        assert fault["place"] == "byte 128 of shared memory (As[2][0])"
        assert (fault["block"], fault["thread"]) == ([0, 0, 0], [0, 0, 0])
        line = "k.cu:5 [store at head.cuh:2, ns::write at head.cuh:4, put at head.cuh:5, k at k.cu:5]"
        assert f"the write at {line} (in: st.shared.f32" in fault["message"]
        assert ran.err == f"greenfast: {fault['message']}\n"


FAULTS = {
    "out-of-bounds": "y[64 + threadIdx.x] = 1;",
    "misaligned-access": "*(double*)(y + 1) = 1;",
    "uninitialized-read": "__shared__ float s[2]; y[0] = s[threadIdx.x % 2];",
    "deadlock": "__shared__ int s; s = 0; __syncthreads(); while (*(volatile int*)&s == 0); y[0] = 1;",
    "trap": "__trap();",
    "output-unwritten": "y[threadIdx.x] = 1;",
    "input-written": "for (int i = threadIdx.x; i < 64; i += 32) { y[i] = 1; ((float*)x)[i] = 1; }",
    "depends-on-order": "atomicExch(z, threadIdx.x / 32); __syncthreads(); y[threadIdx.x] = *(volatile int*)z;",
    "depends-on-launches": "for (int i = 0; i < 64; i++) y[i] = count; __syncthreads(); count = 1;",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_json_holds_every_kind_of_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    body = FAULTS[kind]
    (tmp_path / "k.cu").write_text(
        f'__device__ int count; extern "C" __global__ void k(const float* x, float* y, int* z) {{ {body} }}'
    )
    threads = "64" if kind == "depends-on-order" else "32"
    buffers = ("--arg", "in:x=f32[64]:normal", "--arg", "out:y=f32[64]", "--arg", "inout:z=i32[1]:zeros")
    ran = emulate(capsys, tmp_path / "k.cu", "--grid", "1", "--block", threads, *buffers, "--json")
    found = json.loads(ran.out)
    assert ran.code == 1
    assert kind in [fault["kind"] for fault in found["faults"]]
    assert [fault["message"] for fault in found["faults"]] == found["failures"]
    assert all(message.splitlines()[0] in ran.err for message in found["failures"])


REFUSED = {
    "unsupported": ('y[0] = 1;\nasm volatile("multimem.red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(y));', (), 3),
    "does-not-compile": ("y[0] = 1;\ny[1] = unknown;", (), 1),
    "wrong-request": ("y[0] = 1;", ("--arg", "f32:1"), 2),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_json_holds_why_nothing_ran(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    body, more, code = REFUSED[kind]
    (tmp_path / "k.cu").write_text(f'extern "C" __global__ void k(float* y) {{ {body} }}')
    args = ("--grid", "1", "--block", "1", "--arg", "inout:y=f32[1]:zeros", *more, "--json")
    ran = emulate(capsys, tmp_path / "k.cu", *args)
    (fault,) = json.loads(ran.out)["faults"]
    assert (ran.code, fault["kind"], fault["level"]) == (code, kind, "unsupported" if code == 3 else "error")
    assert (fault["file"], fault["line"]) == (("k.cu", 2) if code != 2 else (None, None))
    assert ran.err == f"greenfast: {fault['message']}\n"


LEFT = """__device__ int count;
__device__ float table[4];
extern "C" __global__ void k(float* y) { BODY }
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("if (atomicAdd(&count, 1) == gridDim.x - 1) *y = 1;", "has 4 bytes more that are never written in a later"),
        ("*y = count; if (blockIdx.x == 0) atomicExch(&count, 5);", ""),
        ("if (blockIdx.x == 0) { *y = table[2]; table[2] = 3; }", "differs in a later launch, by up to 3"),
        ("if (blockIdx.x == 0) { *y = count == 2; count = count + 1; }", "differs in a later launch, by up to 1"),
        (
            "if (blockIdx.x == 0) { y[count] = 1; count = 100; }",
            "only in a later launch, with variables that an earlier launch changed",
        ),
        # What is put back, or makes no difference, passes.
        ("int last = atomicAdd(&count, 1) == gridDim.x - 1; if (last) { *y = 1; count = 0; }", None),
        ("if (blockIdx.x == 0) { *y = 1; if (!count) table[0] = 7; count = 1; }", None),
        ("if (blockIdx.x == 0) { table[1] = 4; *y = table[1]; }", None),
    ],
)
def test_a_launch_that_finds_what_one_before_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str, says: str | None
) -> None:
    (tmp_path / "k.cu").write_text(LEFT.replace("BODY", body))
    ran = emulate(capsys, tmp_path / "k.cu", "--grid", "2", "--block", "1", "--arg", "out:y=f32[1]")
    assert ran.code == (says is not None), ran
    assert (says or "") in ran.err


def test_an_expectation_decides(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    want = 2 * np.arange(100, dtype=np.float64) + 1
    np.save(files / "want.npy", want)
    expect = ("--expect", f"y={files / 'want.npy'}")
    assert emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *expect).code == 0
    want[[7, 9]] += (0.25, 0.5)
    np.save(files / "want.npy", want)
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *expect)
    assert ran.code == 1
    assert ran.err == (
        "greenfast: _Z5saxpyifPKfPf: 2 of 100 elements of 'y' are wrong by more than 0, at most by "
        "0.5; the first is y[7] = 15.0, expected 15.25\n"
    )
    assert emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *expect, "--tolerance", "0.3").code == 1
    assert emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *expect, "--tolerance", "0.5").code == 0
    np.save(files / "want.npy", np.where(np.arange(100) == 3, np.nan, 2 * np.arange(100) + 1))
    assert emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, *expect, "--tolerance", "0.5").code == 1


def test_an_input_that_changes_is_1(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS[:-1], "in:y=f32[100]:ones")
    assert ran.code == 1
    assert "give it as inout:y=... if it may" in ran.err


def test_a_ptx_file_runs_too(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    source = KernelSource("", SAXPY, "saxpy.cu", (), (32, 1, 1))
    text = to_ptx(source, Target("sm_80"))
    text = text.replace(".param .u64 _", ".param .u64 .ptr .global .align 4 _")  # as other compilers write them
    assert ".ptr .global" in text
    (files / "saxpy.ptx").write_text(text)
    ran = emulate(capsys, files / "saxpy.ptx", *SAXPY_ARGS, "--save", files / "out")
    assert (ran.code, ran.err) == (0, "")
    assert "_Z5saxpyifPKfPf, sm_80: " in ran.out
    assert np.load(files / "out" / "y.npy")[-1] == 199
    ran = emulate(capsys, files / "saxpy.ptx", *SAXPY_ARGS, "--arch", "sm_90")
    assert_said(ran, 2, "a PTX file is compiled already")


def test_a_damaged_ptx_file_is_a_usage_error(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    """Wherever it is truncated."""
    text = to_ptx(KernelSource("", SAXPY, "saxpy.cu", (), (32, 1, 1)), Target("sm_80"))
    for place in range(0, text.rindex("}"), 71):
        (files / "saxpy.ptx").write_text(text[:place])
        assert_said(emulate(capsys, files / "saxpy.ptx", *SAXPY_ARGS), 2, "")
    wrong = (
        ("ld.param.f32", "ld.param.f32 ,", "cannot read 'ld.param.f32 , %f"),
        (".reg .f32", ".reg f32 .", "reg f32 ."),
    )
    for right, other, said in wrong:
        (files / "saxpy.ptx").write_text(text.replace(right, other))
        assert_said(emulate(capsys, files / "saxpy.ptx", *SAXPY_ARGS), 2, said)


def test_headers_and_macros_are_found(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    (files / "inc").mkdir()
    (files / "inc" / "far.cuh").write_text("#define FAR 2\n")
    (files / "near.cuh").write_text("#define NEAR 3\n")
    text = '#include "near.cuh"\n#include "far.cuh"\n__global__ void k(int* y) { y[0] = NEAR * FAR * HERE + THERE; }\n'
    (files / "k.cu").write_text(text)
    one = ("--grid", "1", "--block", "1", "--arg", "out:y=i32[1]", "--save", files / "out")
    ran = emulate(capsys, files / "k.cu", *one, "--include", files / "inc", "--define", "HERE=7", "--define", "THERE")
    assert (ran.code, ran.err) == (0, "")
    assert np.load(files / "out" / "y.npy").tolist() == [43]


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        ("none.cu", (), "none.cu: cannot be read (No such file or directory)"),
        ("two.cu", SAXPY_ARGS, "holds several kernels; name one with --kernel: _Z5saxpyifPKfPf, _Z5helloiPi"),
        ("two.cu", ("--kernel", "sax"), "unknown kernel of "),
        ("two.cu", ("--kernel", "sax"), "'sax'; allowed: _Z5helloiPi, _Z5saxpyifPKfPf"),
        (
            "saxpy.cu",
            SAXPY_ARGS[:-2],
            "takes 4 arguments, not 3; its parameters: 1 .u32 (32-bit integer), 2 .f32 (32-bit float), "
            "3 .u64 (pointer or 64-bit integer), 4 .u64 (pointer or 64-bit integer)",
        ),
        ("saxpy.cu", ("--arg", "i64:100", *SAXPY_ARGS[2:]), "--arg 'i64:100': parameter 1 of _Z5saxpyifPKfPf is .u32"),
        (
            "saxpy.cu",
            (*SAXPY_ARGS[:2], "--arg", "i32:2", *SAXPY_ARGS[4:]),
            "'i32:2': parameter 2 of _Z5saxpyifPKfPf is .f32",
        ),
        ("saxpy.cu", ("--arg", "in:x=f32[4]:ones", *SAXPY_ARGS[2:4], "--arg", "x", "--arg", "x"), "parameter 1 of "),
        ("saxpy.cu", ("--arg", "100"), "--arg '100': allowed are TYPE:NUMBER, in:NAME=..."),
        ("saxpy.cu", ("--arch", "sm_1", *SAXPY_ARGS), "unknown target 'sm_1'; allowed: sm_100, "),
        ("saxpy.cu", ("--orders", "0", *SAXPY_ARGS), "--orders 0: give at least 1"),
        ("saxpy.cu", ("--define", "A-B", *SAXPY_ARGS), "--define 'A-B': give NAME or NAME=VALUE"),
        ("saxpy.cu", ("--grid", "1", "--block", "2048", *SAXPY_ARGS), "--block 2048,1,1: a block has at most 1024"),
        ("saxpy.cu", ("--grid", "1", "--block", "1,1,65", *SAXPY_ARGS), "at most 1024,1024,64 in x, y, z"),
        ("saxpy.cu", ("--grid", "1,65536", "--block", "1", *SAXPY_ARGS), "at most 2147483647,65535,65535 blocks"),
        ("saxpy.cu", ("--smem", "232449", *SAXPY_ARGS), "more than the 232448 bytes that a block of sm_90a can have"),
        ("saxpy.cu", ("--expect", "z=z.npy", *SAXPY_ARGS), "unknown output in --expect 'z'; allowed: y"),
        ("saxpy.cu", ("--expect", "y=z.npy", *SAXPY_ARGS), "--expect y: z.npy: No such file or directory"),
        ("reduce.cu", ("--define", "N=128", *REDUCE_ARGS), "__launch_bounds__ of reduce allows 128 threads"),
    ],
)
def test_a_wrong_request_is_2_and_one_line(
    capsys: pytest.CaptureFixture[str], files: Path, file: str, options: tuple[str, ...], said: str
) -> None:
    assert_said(emulate(capsys, files / file, *options), 2, said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--grid", "0", "--block", "1"), "argument --grid: '0': give X, X,Y or X,Y,Z, whole numbers from 1 up"),
        (("--grid", "1,1,1,1", "--block", "1"), "argument --grid: '1,1,1,1': give X"),
        (("--grid", "1", "--block", "a"), "argument --block: 'a': give whole numbers"),
        (("--grid", "1"), "the following arguments are required: --block"),
        (("--smem=-1",), "argument --smem: '-1': give a whole number from 0 up"),
        (("--expect", "y"), "argument --expect: 'y': give NAME=FILE.npy"),
        (("--tolerance", "nan"), "argument --tolerance: 'nan': give a number from 0 up"),
    ],
)
def test_a_wrong_option_is_2(
    capsys: pytest.CaptureFixture[str], files: Path, options: tuple[str, ...], said: str
) -> None:
    ran = emulate(capsys, files / "saxpy.cu", *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_the_threads_that_ptx_requires_are_the_limit(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    (files / "k.ptx").write_text(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n.reqntid 32, 1, 1\n{\n ret;\n}\n"
    )
    assert emulate(capsys, files / "k.ptx", "--grid", "1", "--block", "32").code == 0
    ran = emulate(capsys, files / "k.ptx", "--grid", "1", "--block", "64")
    assert_said(ran, 2, "--block 64,1,1: __launch_bounds__ of k allows 32 threads")


def test_an_expectation_of_another_shape_is_2(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    np.save(files / "want.npy", np.zeros((10, 10)))
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, "--expect", f"y={files / 'want.npy'}")
    assert_said(ran, 2, "want.npy has shape [10, 10], the buffer has [100]")


def test_a_struct_by_value(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    (files / "k.cu").write_text(
        "struct S { char a; double b; short c[3]; int* y; };\n"
        "__global__ void k(S s) { s.y[0] = s.a; s.y[1] = int(s.b * 4); s.y[2] = s.c[0] + 10 * s.c[2]; }\n"
    )
    out = ("--grid", "1", "--block", "1", "--save", files / "out", "--arg", "inout:y=i32[3]:zeros", "--arg", "y")
    two = "__global__ void k(int* x, int* y"
    text = (files / "k.cu").read_text().replace("__global__ void k(", f"{two}, ")
    (files / "k.cu").write_text(text)
    good = "struct:i8=-3,f64=2.5,i16=1:2:3,y"
    assert emulate(capsys, files / "k.cu", *out, "--arg", good).code == 0
    assert np.load(files / "out" / "y.npy").tolist() == [-3, 10, 31]
    for wrong, said in (
        ("i32:1", "is .b8[32] (a struct by value: give struct:FIELD,...)"),
        ("struct:i8=1", "parameter 3 of"),
        ("struct:i8=1,z", "'z' is not a field; give TYPE=NUMBER"),
        ("struct:i8=300", "int8 holds -128 to 127"),
    ):
        assert_said(emulate(capsys, files / "k.cu", *out, "--arg", wrong), 2, said)


def test_a_template_without_an_instantiation_is_reported(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    template = "template <int N> __global__ void k(int* y) { y[0] = N; }\n"
    (files / "k.cu").write_text(template)
    assert_said(emulate(capsys, files / "k.cu", "--kernel", "k"), 2, "a template needs an explicit instantiation")
    (files / "k.cu").write_text(template + "template __global__ void k<7>(int*);\n")
    one = ("--grid", "1", "--block", "1", "--arg", "out:y=i32[1]", "--save", files / "out")
    assert emulate(capsys, files / "k.cu", "--kernel", "k", *one).code == 0
    assert np.load(files / "out" / "y.npy").tolist() == [7]


def test_a_compile_error_is_1_with_file_and_line(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    (files / "k.cu").write_text("__global__ void k(int* y) {\n  y[0] = WIDTH;\n}\n")
    ran = emulate(capsys, files / "k.cu", "--kernel", "k", "--define", "OTHER=1")
    assert (ran.code, ran.out) == (1, "")
    assert 'k.cu(2): error: identifier "WIDTH" is undefined' in ran.err
    (files / "k.cu").write_text("#include <cstdint>\n#include <stdio.h>\n__global__ void k(uint32_t* y) { *y = 7; }\n")
    assert emulate(capsys, files / "k.cu", "--arg", "out:y=u32[1]").code == 0
    (files / "k.cu").write_text("#include <iostream>\n__global__ void k() {}\n")
    ran = emulate(capsys, files / "k.cu")
    assert (ran.code, ran.out) == (1, "")
    assert "keep host code and its headers inside #ifndef __CUDACC_RTC__" in ran.err


def test_an_unknown_instruction_is_3_with_its_name_and_line(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    add = 'long long r; asm volatile("stacksave.u64 %0;" : "=l"(r)); y[0] = r;'
    (files / "k.cu").write_text(f"__global__ void k(int* y) {{\n  {add}\n}}\n")
    ran = emulate(capsys, files / "k.cu", "--arg", "inout:y=i32[4]:zeros")
    assert_said(ran, 3, "PTX instruction stacksave.u64 is not known to the emulator at k.cu:2")


def test_a_folder_that_cannot_be_written_is_3(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    ran = emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS, "--save", files / "saxpy.cu" / "out")
    assert_said(ran, 3, "cannot be written (Not a directory); choose another with --save")


@pytest.mark.usefixtures("crashing_compiler")
def test_a_kernel_that_crashes_the_compiler(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    (files / "bad.cu").write_text(SAXPY + "// crash\n")
    assert_said(emulate(capsys, files / "bad.cu"), 1, "greenfast: bad.cu: the compiler, NVRTC ")
    assert emulate(capsys, files / "saxpy.cu", *SAXPY_ARGS).code == 0
