"""Each thing that the emulator must find, shown by a kernel that does it, and one that does not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from greenfast.emulator import scheduler
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import UnsupportedError
from tests.emulator.kernels import SEEDS, run

X = np.arange(64, dtype=np.float32)
HEADER = '#include "ptx/cp_async.cuh"\n'


def output(body: str, *, threads: int = 64, before: str = "", seed: int = 0) -> np.ndarray:
    """Return the 64 floats that 64 threads compute from 64 floats."""
    result = run(body, {"x": X}, {"y": (64, "float32")}, threads=threads, before=before, seed=seed)
    return result.outputs["y"]


NULL, UNSET = r"a null pointer", r"a register that nothing has written"


@pytest.mark.parametrize("space", [".global", ""])
@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        ("mov.b64 %rd1, 0;", NULL),
        ("mov.b64 %rd1, 2;", NULL),
        ("", UNSET),
        ("add.s64 %rd1, %rd1, 64;", UNSET),
        ("mov.b64 %rd1, 0x12345678abcdef1;", "no allocation|in no memory"),
    ],
)
def test_a_pointer_to_no_allocation_is_not_called_misaligned(space: str, pointer: str, message: str) -> None:
    asm = f"{{.reg .b64 %rd<2>; {pointer} ld{space}.f32 %0, [%rd1];}}"
    asm = asm.replace("%rd", "%%rd")
    body = f'float value; asm volatile("{asm}" : "=f"(value)); y[threadIdx.x] = value;'
    with pytest.raises(KernelFaultError, match=message) as fault:
        output(body)
    assert "misaligned" not in str(fault.value)
    assert (message in (NULL, UNSET)) == bool(re.search(f"{NULL}|{UNSET}", str(fault.value)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y[threadIdx.x] = x[threadIdx.x + 1];", r"4-byte read out of bounds: 0 bytes past the end of 'x' .*k\.cu:1"),
        ("y[threadIdx.x] = x[(int)threadIdx.x - 1];", r"read out of bounds: 4 bytes in front of 'x'"),
        ("y[threadIdx.x + 1] = x[threadIdx.x];", r"write out of bounds: 0 bytes past the end of 'y'"),
        (
            "y[threadIdx.x] = *(const float*)((const char*)x + 2);",
            r"misaligned 4-byte read: byte 2 of 'x' .*k\.cu:1, block \(0, 0, 0\), thread \(0, 0, 0\)",
        ),
        ("*(float4*)(y + 1) = make_float4(x[0], x[1], x[2], x[3]);", r"misaligned 16-byte write: byte 4 of 'y'"),
        (
            "y[threadIdx.x] = *(const float*)0x1234;",
            r"generic address 0x1234 is in no memory \(.*: a null pointer with an offset\) at k\.cu:1",
        ),
        (
            "extern __shared__ float s[]; s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[threadIdx.x];",
            r"byte 0 of 0 of shared memory",
        ),
        (
            "__shared__ float s[64];\ny[threadIdx.x] = s[threadIdx.x] + x[0];",
            r"read of an element that nothing has written: byte 0 of 256 of shared memory \(s \+ 0\) at k\.cu:2",
        ),
        ("y[threadIdx.x] = y[threadIdx.x] + x[0];", r"element that nothing has written: byte 0 of 'y'"),
        (
            'if (threadIdx.x < 48) __syncthreads(); else asm volatile("bar.sync 1, 64;");'
            "y[threadIdx.x] = x[threadIdx.x];",
            r"deadlock, a barrier that not all threads reach: .*16 threads of warp 1 wait at .*bar\.sync 1, 64",
        ),
        (
            'if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); else asm volatile("bar.sync 2, 64;");'
            "y[threadIdx.x] = x[threadIdx.x];",
            r"deadlock.*32 threads of warp 0 wait at .*bar\.sync 1, 64.*32 threads of warp 1 wait",
        ),
        ('asm volatile("trap;");', r"trap was executed at k\.cu:1"),
    ],
)
def test_a_fault_is_named_with_its_place(body: str, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message):
        output(body)


def test_a_kernel_that_executes_too_much_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "INSTRUCTION_LIMIT", 2000)
    with pytest.raises(UnsupportedError, match=r"no end after 2000 instructions: too long .*k\.cu:"):
        output('for (int i = 0; i < 4000; ++i) { asm volatile(""); y[0] = x[0]; }')


REVERSE = """__shared__ float s[64];
s[threadIdx.x] = x[threadIdx.x];
{barrier}
y[threadIdx.x] = s[63 - threadIdx.x];"""


def test_a_missing_barrier_shows_in_some_order_of_the_warps() -> None:
    result = 0
    for seed in range(4):
        assert (output(REVERSE.format(barrier="__syncthreads();"), seed=seed) == X[::-1]).all()
        try:
            output(REVERSE.format(barrier=""), seed=seed)
        except KernelFaultError as e:
            result += "nothing has written" in str(e)
    assert result == 4  # the first warp reads values that the other has not written yet


COPY = """__shared__ __align__(16) float s[64];
if (threadIdx.x < 16) greenfast::ptx::cp_async_16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
greenfast::ptx::cp_async_commit();
{wait}
__syncthreads();
y[threadIdx.x] = s[threadIdx.x];"""


def test_asynchronous_copies_land_at_the_wait() -> None:
    waited = COPY.format(wait="greenfast::ptx::cp_async_wait<0>();")
    assert (output(waited, before=HEADER) == X).all()
    for wait in ("", "greenfast::ptx::cp_async_wait<1>();"):
        with pytest.raises(KernelFaultError, match="asynchronous copy has not delivered"):
            output(COPY.format(wait=wait), before=HEADER)


ARRIVE = """__shared__ __align__(16) float s[64];
__shared__ greenfast::ptx::Mbarrier landed;
if (threadIdx.x == 0) landed.init(32);
__syncthreads();
if (threadIdx.x < 32) {{
  if (threadIdx.x < 16) greenfast::ptx::cp_async_16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
  {arrive}
}} else {{
  {wait}
  y[threadIdx.x] = s[threadIdx.x];
  y[threadIdx.x - 32] = s[threadIdx.x - 32];
}}"""


@SEEDS
def test_asynchronous_copies_arrive_at_an_mbarrier_when_they_have_landed(seed: int) -> None:
    header = '#include "ptx/cp_async.cuh"\n#include "ptx/cp_async_mbarrier.cuh"\n'
    arrive, wait = "greenfast::ptx::cp_async_arrive(landed);", "greenfast::ptx::mbarrier_wait(landed, 0);"
    assert (output(ARRIVE.format(arrive=arrive, wait=wait), before=header, seed=seed) == X).all()
    with pytest.raises(KernelFaultError, match=r"asynchronous copy has not delivered|nothing has written"):
        output(ARRIVE.format(arrive=arrive, wait=""), before=header, seed=seed)
    with pytest.raises(
        KernelFaultError, match=r"asynchronous copy has not delivered"
    ):  # they have arrived, the data not
        output(ARRIVE.format(arrive="landed.arrive();", wait=wait), before=header, seed=seed)
    with pytest.raises(KernelFaultError, match=r"deadlock.*mbarrier.*32 of 32 arrivals"):
        output(ARRIVE.format(arrive="", wait=wait), before=header, seed=seed)


def test_unwritten_outputs_are_counted_and_poisoned() -> None:
    result = run("if (threadIdx.x < 60) y[threadIdx.x] = x[threadIdx.x];", {"x": X}, {"y": (64, "float32")}, threads=64)
    assert result.unwritten == {"y": 16}
    assert np.isnan(result.outputs["y"][60:]).all()


@pytest.mark.parametrize(
    ("body", "byte"),
    [
        pytest.param("x[threadIdx.x] = 0;", 0, id="changed"),
        pytest.param(
            "if (threadIdx.x == 3) { float v = x[9]; x[9] = v + 1; __threadfence(); x[9] = v; }", 36, id="restored"
        ),
        pytest.param("if (threadIdx.x == 3) ((volatile float*)x)[7] = 7;", 28, id="with what it held"),
        pytest.param("if (threadIdx.x == 3) atomicAdd(x + 2, 0.f);", 8, id="atomically"),
        pytest.param("if (threadIdx.x == 3) *(float4*)(x + 4) = make_float4(4, 5, 6, 7);", 16, id="a vector"),
    ],
)
def test_a_write_to_an_input_is_named_with_line_and_thread(body: str, byte: int) -> None:
    result = run(
        f"{body}\ny[threadIdx.x] = 1;",
        {"x": X},
        {"y": (64, "float32")},
        threads=64,
        parameters="float* x, float* y",
        args=("x", "y"),
    )
    assert list(result.input_writes) == ["x"]
    where = rf"byte {byte} of 'x' \(256 bytes\) at k\.cu:1, block \(0, 0, 0\), thread \([03], 0, 0\) \(in: "
    assert re.match(f"k: a write to an input: {where}", result.input_writes["x"])


def test_a_write_to_what_is_input_and_output_is_none() -> None:
    result = run("y[threadIdx.x] += 1;", {"y": X}, {"y": (64, "float32")}, threads=64)
    assert (result.input_writes, result.outputs["y"].tolist()) == ({}, (X + 1).tolist())


def test_an_unknown_instruction_is_named_with_its_line() -> None:
    with pytest.raises(
        UnsupportedError, match=r"PTX instruction stacksave\.u64 is not known to the emulator at k\.cu:1"
    ):
        output('long long r; asm volatile("stacksave.u64 %0;" : "=l"(r)); y[threadIdx.x] = x[0] + r;')


def test_printf_takes_widths_and_returns_the_number_of_its_arguments() -> None:
    body = (
        'y[threadIdx.x] = printf("%*d|%-*d|%.*f|%hhd %hu\\n", 5, 42, 3, 7, 2, 1.23456, 300, 65541);'
        'y[2 + threadIdx.x] = printf("none\\n");'
    )
    result = run(f"if (threadIdx.x < 2) {{ {body} }}", {"x": X}, {"y": (4, "float32")})
    assert result.printed == "   42|7  |1.23|44 5\n" * 2 + "none\n" * 2
    assert result.outputs["y"].tolist() == [5, 5, 0, 0]
    with pytest.raises(UnsupportedError, match=r"printf of '%a': a specifier unknown to the emulator.* at k\.cu:1"):
        run('if (threadIdx.x == 0) printf("%a", x[0]); y[0] = 0;', {"x": X}, {"y": (1, "float32")})


def test_what_no_check_foresaw_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(Counts, "access", broken)
    message = r"k at k\.cu:1 \(in: ld\.global.*\): a bug in the emulator: ValueError: shapes do not match"
    with pytest.raises(UnsupportedError, match=message):
        output("y[threadIdx.x] = x[threadIdx.x];")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "y[0] = x[threadIdx.x];",
            r"4-byte write of different values to one place by several threads in one instruction: byte 0 of 'y'",
        ),
        (
            'if (threadIdx.x % 2)\nasm volatile("bar.sync 0; // 1");\n'
            'else asm volatile("bar.sync 0; // 2");\ny[0] = 1;',
            r"a barrier of whole warps while others of this warp wait at k\.cu:[23], at k\.cu:[23]",
        ),
    ],
)
def test_what_threads_of_one_warp_may_not_do(body: str, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message):
        output(body, threads=32)
