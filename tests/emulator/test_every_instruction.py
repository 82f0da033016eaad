"""Every supported instruction on edge cases and random operands, compared with its definition in Python's integers.

benchmarks/emulator_instructions.py runs the same kernels on a GPU and compares the hardware's results.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel, to_ptx
from greenfast.emulator.program import BUILDERS
from greenfast.spec.arch import Target
from tests.emulator.instructions.case import Case, emulate, kernel_source
from tests.emulator.instructions.catalog import CASES, units
from tests.emulator.instructions.compare import compare, row_text

TARGET = Target("sm_90a")
#: A multiple of the block; half of them edges. Tests below show that they tell an instruction from its neighbours.
ROWS = 384
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("rows", [ROWS, pytest.param(8 * ROWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", units(), ids=lambda unit: f"{unit[0].name}-to-{unit[-1].name}")
def test_results_are_those_of_the_definition(unit: tuple[Case, ...], rows: int) -> None:
    ptx = to_ptx(kernel_source(unit), TARGET, assemble=False)
    wrong = []
    for case in unit:
        operands = case.operands(rows)
        result, expected = case.unpack(emulate(case, ptx, case.pack(operands))), case.expected(operands)
        faults = np.flatnonzero(compare(case, operands, result, expected).wrong)
        wrong += [f"{case.name}: {row_text(case, int(n), operands, result, expected)}" for n in faults[:2]]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("unit", units(), ids=lambda unit: f"{unit[0].name}-to-{unit[-1].name}")
def test_the_assembler_takes_them_all(unit: tuple[Case, ...]) -> None:
    assert compile_kernel(kernel_source(unit), TARGET).cubin


def test_every_opcode_is_tried() -> None:
    elsewhere = {
        "call": ("test_faults.py", "printf("),
        "fence": ("hopper.py", "fence.proxy.async"),
        "griddepcontrol": ("corpus/ptx_modules.py", "griddepcontrol.wait"),
        "mbarrier": ("hopper.py", "mbarrier.try_wait"),
        "membar": ("corpus/ptx_modules.py", "membar.cta"),
        "tensormap": ("test_hopper_copies.py", "tensormap.replace"),
        "wgmma": ("hopper.py", "wgmma.mma_async"),
    }
    tried = {case.name.split(".")[0] for case in CASES} | {
        word.split(".")[0] for case in CASES for word in case.body.replace('"', " ").split() if "." in word
    }
    assert set(BUILDERS) - tried == set(elsewhere)
    for file, words in elsewhere.values():
        assert words in (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert len({case.entry for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("add.rn.f32", "add.rz.f32"),
        ("add.rz.f32", "add.rm.f32"),
        ("add.rm.f32", "add.rp.f32"),
        ("add.rn.f32", "add.rn.ftz.f32"),
        ("add.rn.f32", "add.rn.sat.f32"),
        ("mul.rm.f64", "mul.rz.f64"),
        ("fma.rn.f32", "fma.rz.f32"),
        ("fma.rn.f16", "fma.rn.ftz.f16"),
        ("sqrt.rn.f32", "sqrt.rz.f32"),
        ("min.f32", "min.NaN.f32"),
        ("setp.ne.f32", "setp.neu.f32"),
        ("setp.lt.f32", "setp.lt.ftz.f32"),
        ("cvt.rni.s32.f32", "cvt.rzi.s32.f32"),
        ("cvt.rn.f16.f32", "cvt.rz.f16.f32"),
        ("cvt.rna.tf32.f32", "cvt.rn.tf32.f32"),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.relu.e4m3x2.f32"),
        ("shf.l.clamp.b32", "shf.l.wrap.b32"),
        ("mul.hi.u64", "mul.hi.s64"),
        ("bfe.u64", "bfe.s64"),
        ("dp4a.s32.u32", "dp4a.u32.s32"),
        ("atom.global.add.f32", "atom.shared.add.f32"),
        ("shfl.sync.bfly.b32 0x1f", "shfl.sync.idx.b32 0x1f"),
    ],
)
def test_the_operands_tell_an_instruction_from_its_neighbour(one: str, other: str) -> None:
    a, b = BY_NAME[one], BY_NAME[other]
    operands = a.operands(ROWS)
    assert compare(a, operands, b.expected(operands), a.expected(operands)).wrong.any()


def test_a_result_that_is_off_by_one_bit_is_found() -> None:
    case = BY_NAME["fma.rn.f32"]
    operands = case.operands(ROWS)
    right = case.expected(operands)
    off = [right[0].copy()]
    off[0][7] ^= np.uint64(1)
    assert np.flatnonzero(compare(case, operands, off, right).wrong).tolist() == [7]


def test_a_bound_allows_so_much_and_no_more() -> None:
    case = BY_NAME["ex2.approx.f32"]
    operands = [np.array([0x4000_0000, 0x4000_0000, 0x4000_0000, 0x4000_0000], np.uint64)]
    right = [np.full(4, 0x4080_0000, np.uint64)]
    values = [right[0] + np.array([0, 2, 3, 1 << 31], np.uint64)]
    result = compare(case, operands, values, right)
    assert result.wrong.tolist() == [False, False, True, True]
    assert result.max_ulp == 2


def test_another_nan_is_wrong_only_where_the_isa_fixes_it() -> None:
    open_case = BY_NAME["cvt.f64.f32"]
    quiet, other = (np.array([bits], np.uint64) for bits in (0x7FF8_0000_0000_0000, 0xFFF8_0000_0000_0000))
    operands = [np.array([0x7FC0_0000], np.uint64)]
    assert compare(open_case, operands, [other], [quiet]).other_nan.tolist() == [True]
    assert compare(replace(open_case, any_nan=False), operands, [other], [quiet]).wrong.tolist() == [True]


def test_division_by_zero_is_left_open_and_nothing_else() -> None:
    case = BY_NAME["div.u32"]
    operands = [np.array([5, 5], np.uint64), np.array([0, 2], np.uint64)]
    result = compare(case, operands, [np.array([7, 7], np.uint64)], [np.array([1, 1], np.uint64)])
    assert (result.undefined.tolist(), result.wrong.tolist()) == ([True, False], [False, True])
