"""Control flow that depends on what PTX does not define: found, and both outcomes are run."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.device.session import Executable, KernelImage, RunResult
from greenfast.emulator.dependence import find_dependence
from greenfast.emulator.grid import load_program
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.spec.errors import UnsupportedError
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import Case, OutputSpec

PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 px, .param .u64 py)
{
.reg .b32 %%r<20>; .reg .b64 %%rd<20>; .reg .pred %%p<9>; .reg .f32 %%f<9>;
.local .align 8 .b8 own[8];
ld.param.u64 %%rd1, [px];
ld.param.u64 %%rd2, [py];
mov.u32 %%r1, %%tid.x;
mul.wide.u32 %%rd3, %%r1, 4;
add.u64 %%rd4, %%rd1, %%rd3;
add.u64 %%rd5, %%rd2, %%rd3;
ld.global.u32 %%r2, [%%rd4];
%s
st.global.u32 [%%rd5], %%r2;
ret;
}
"""
#: Writes something else where %p1 holds.
WRONG = "@%p1 add.u32 %r2, %r2, 1;"


def run(body: str) -> RunResult:
    """Run a kernel of 32 threads that copies x to y, with more in it."""
    image = KernelImage(b"", "k", (32, 1, 1), 0, (), PTX % body)
    case = Case({"x": np.arange(32, dtype=np.uint32)}, {"y": OutputSpec((32,), "uint32")})
    return EmulatorSession().run(Executable.single(image, Launch((1, 1, 1), ("x", "y"))), case, 2)


@pytest.mark.parametrize(
    ("body", "register"),
    [
        ("mov.u64 %rd8, %globaltimer; shr.u64 %rd8, %rd8, 50; setp.ne.u64 %p1, %rd8, 0;", "%globaltimer"),
        ("mov.u32 %r8, %globaltimer_hi; setp.gt.u32 %p1, %r8, 1000;", "%globaltimer_hi"),
        ("mov.u32 %r8, %globaltimer_lo; and.b32 %r8, %r8, 1; setp.eq.u32 %p1, %r8, 7;", "%globaltimer_lo"),
        ("mov.u64 %rd8, %clock64; setp.gt.u64 %p1, %rd8, 1000000000;", "%clock64"),
        ("mov.u32 %r8, %clock_hi; setp.eq.u32 %p1, %r8, 77;", "%clock_hi"),
        ("mov.u32 %r8, %smid; setp.eq.u32 %p1, %r8, 100;", "%smid"),
        ("mov.u32 %r8, %nsmid; setp.ne.u32 %p1, %r8, 132;", "%nsmid"),
        ("mov.u32 %r8, %warpid; setp.eq.u32 %p1, %r8, 50;", "%warpid"),
        ("mov.u64 %rd8, %gridid; setp.gt.u64 %p1, %rd8, 1000;", "%gridid"),
        ("mov.u32 %r8, %smid; mul.lo.u32 %r9, %r8, 3; setp.eq.u32 %p2, %r9, 300; mov.pred %p1, %p2;", "%smid"),
        ("mov.u32 %r8, %smid; setp.eq.u32 %p1|%p2, %r8, 100;", "%smid"),
        ("mov.u32 %r8, %smid; setp.eq.u32 %p2, %r8, 100; selp.u32 %r9, 1, 0, %p2; setp.ne.u32 %p1, %r9, 0;", "%smid"),
    ],
)
def test_both_outcomes_are_run_and_reported(body: str, register: str) -> None:
    result = run(f"{body} {WRONG}")
    assert any("other bits with" in text for text in result.violations)
    reports = [text for text in (*result.violations, *result.notes) if f"a comparison depends on {register}" in text]
    assert len(reports) == 1, "a difference is not noted again"
    harmless = run(f"{body} @%p1 mov.u32 %r9, 5;")
    assert harmless.violations == []
    assert any("both outcomes were run" in note for note in harmless.notes)


def test_a_clock_that_went_through_memory_is_another_one() -> None:
    body = "mov.u64 %rd8, %globaltimer; st.local.u64 [own], %rd8; ld.local.u64 %rd9, [own];"
    result = run(f"{body} setp.gt.u64 %p1, %rd9, 1000000000000; {WRONG}")
    assert any("other bits with other clocks" in text for text in result.violations)


@pytest.mark.parametrize("bits", ["shr.u64 %rd8, %rd1, 25; and.b64 %rd8, %rd8, 16383;", "bfe.u64 %rd8, %rd1, 30, 6;"])
def test_bits_of_an_address_are_other_ones(bits: str) -> None:
    result = run(f"{bits} setp.ne.u64 %p1, %rd8, 0; {WRONG}")
    assert any("other bits with other clocks, multiprocessors and addresses" in text for text in result.violations)
    harmless = run(f"and.b64 %rd8, %rd1, 256; setp.gt.u64 %p1, %rd8, 256; {WRONG}")
    assert harmless.violations == [], "no address has such bits"
    assert any("a comparison depends on bits of an address" in note for note in harmless.notes)


@pytest.mark.parametrize(
    "bits", ["and.b64 %rd8, %rd1, 2097151;", "shr.u64 %rd8, %rd1, 12;", "cvt.u32.u64 %r8, %rd2; cvt.u64.u32 %rd8, %r8;"]
)
def test_memory_behind_an_address_that_no_run_has_is_reached(bits: str) -> None:
    result = run(f"{bits} setp.eq.u64 %p1, %rd8, 4096; @%p1 ld.global.u32 %r9, [%rd1+-4];")
    assert any("out of bounds" in text and "bits of an address" in text for text in result.violations)
    vectors = run(
        "and.b64 %rd8, %rd4, 15; setp.eq.u64 %p1, %rd8, 0; @%p1 ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd4];"
    )
    assert not any("misaligned" in text for text in vectors.violations)


@pytest.mark.parametrize(
    ("bits", "is_defined"),
    [
        ("and.b64 %rd8, %rd4, 15;", True),
        ("cvt.u32.u64 %r8, %rd1; neg.s32 %r8, %r8; and.b32 %r9, %r8, 12; cvt.u64.u32 %rd8, %r9;", True),
        ("and.b64 %rd8, %rd4, 511;", False),
        ("and.b64 %rd8, %rd4, -16;", False),
        ("mov.b64 {%r8, %r9}, %rd1; and.b32 %r9, %r9, 15; cvt.u64.u32 %rd8, %r9;", False),
        ("cvt.u32.u64 %r8, %rd1; shl.b32 %r9, %r1, %r8; and.b32 %r9, %r9, 15; cvt.u64.u32 %rd8, %r9;", False),
        ("shr.u64 %rd8, %rd1, 20; and.b64 %rd8, %rd8, 15;", False),
        ("cvt.rn.f32.u64 %f1, %rd1; mov.b32 %r9, %f1; and.b32 %r9, %r9, 15; cvt.u64.u32 %rd8, %r9;", False),
    ],
)
def test_the_alignment_of_an_address_is_defined(bits: str, is_defined: bool) -> None:
    _, program = load_program(PTX % f"{bits} setp.ne.u64 %p1, %rd8, 0; {WRONG}", "k")
    assert bool(find_dependence(program.function, {("px", 0), ("py", 0)}).bits) != is_defined


def test_the_end_of_a_buffer_is_no_bits_of_an_address() -> None:
    body = "add.u64 %rd8, %rd1, 128; setp.lt.u64 %p1, %rd4, %rd8; @%p1 add.u32 %r9, %r1, 1;"
    _, program = load_program(PTX % body, "k")
    result = find_dependence(program.function, {("px", 0), ("py", 0)})
    assert result.addresses
    assert result.bits == ()


def test_an_outcome_that_traps_is_no_fault() -> None:
    result = run("mov.u64 %rd8, %clock64; setp.gt.u64 %p1, %rd8, 1000000000; @%p1 trap;")
    assert result.violations == []
    assert any("one of the two outcomes ends by a trap" in note for note in result.notes)


def test_what_is_not_compared_is_not_reported() -> None:
    result = run("mov.u64 %rd8, %clock64; setp.eq.u32 %p1, %r1, 3; @%p1 mov.u64 %rd9, %rd8;")
    assert (result.violations, result.notes) == ([], [])


def test_only_what_comes_from_a_clock_counts() -> None:
    body = "mov.u32 %r8, %smid; setp.eq.u32 %p1, %r8, 1; setp.eq.u32 %p2, %r1, 1; setp.lt.u64 %p3, %rd4, %rd5;"
    _, program = load_program(PTX % body, "k")
    result = find_dependence(program.function, {("px", 0), ("py", 0)})
    (pc,) = result.comparisons
    assert program.function.code[pc].text.startswith("setp.eq.u32 %p1")
    assert result.undefined
    assert result.addresses
    assert not find_dependence(program.function, set()).addresses


def test_an_unknown_instruction_counts_where_it_is_executed() -> None:
    unknown = "tensormap.replace.tile.fill_mode.global.b1024.b32 [%rd2], 1;"
    result = run(f"setp.gt.u32 %p1, %r1, 32; @%p1 bra dead; bra.uni on; dead: {unknown} on:")
    assert result.violations == []
    guarded = run(f"setp.gt.u32 %p1, %r1, 32; @%p1 {unknown}")
    assert guarded.outputs["y"].tolist() == list(range(32))
    with pytest.raises(UnsupportedError, match="tensormap"):
        run(f"setp.eq.u32 %p1, %r1, 31; @%p1 {unknown}")
    forced = run(f"mov.u32 %r8, %smid; setp.eq.u32 %p1, %r8, 200; @%p1 {unknown}")
    assert any("one of the two outcomes could not be run: PTX instruction tensormap" in note for note in forced.notes)
