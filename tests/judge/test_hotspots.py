"""The stretch of machine code that paces a kernel, and when none is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import disassemble
from greenfast.judge.pages import find_hot_code, find_window
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import Record
from greenfast.judge.task import load
from greenfast.judge.validate import validate
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import render_program
from tests.cli.command_line import ROOT
from tests.fakes import Watcher, request, rungs, shipped


def listing(*lines: str) -> str:
    """A listing as nvdisasm prints it: an address for each instruction, labels on lines of their own."""
    text, address = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(text) + "\n"


PLAIN = ["IADD3 R1, R1, 0x1, RZ"] * 100


def test_the_window_lies_in_the_loop_that_has_most() -> None:
    sass = listing(
        *["LDG.E R0, [R2]"] * 30,
        ".L_x_0:",
        *PLAIN,
        *["HMMA.16816.F32 R0, R4, R6, R0"] * 10,
        "@P0 BRA `(.L_x_0)",
        ".L_x_1:",
        "LDS R0, [R1]",
        "@!P0 BRA `(.L_x_1)",
        "EXIT",
        "BRA `(.L_x_2)",
        ".L_x_2:",
    )
    found = find_window("candidate", "x", sass)
    assert found.where == "72 of 111 instructions of a loop, 145 in all"
    kinds = [one.kind for one in found.instructions]
    assert kinds.count("matrix") == 10
    assert "memory" not in kinds
    assert found.instructions[0].address == f"{16 * (30 + found.instructions.index(found.instructions[0]) + 38):04x}"


def test_an_inner_loop_with_most_of_the_weight_is_taken() -> None:
    sass = listing(
        ".L_x_0:", *PLAIN, ".L_x_1:", *["@P1 MUFU.EX2 R0, R1"] * 5, "@P0 BRA `(.L_x_1)", *PLAIN, "BRA `(.L_x_0)", "NOP"
    )
    found = find_window("candidate", "x", sass)
    assert found.where == "6 of 6 instructions of a loop, 207 in all"
    assert [one.opcode for one in found.instructions] == ["MUFU.EX2"] * 5 + ["BRA"]
    assert {one.kind for one in found.instructions[:5]} == {"special"}


def test_without_a_loop_the_densest_stretch() -> None:
    found = find_window("candidate", "x", listing(*PLAIN, *["STG.E [R2], R0"] * 3, *PLAIN))
    assert found.where == "72 of 203 instructions, 203 in all"
    assert sum(one.kind == "memory" for one in found.instructions) == 3


def test_what_is_no_listing_is_refused() -> None:
    with pytest.raises(UsageError, match="could not be read"):
        find_window("candidate", "x", "nothing here")


def kept() -> Record:
    record = read_record(ROOT / "evidence/h100/fp8_sdpa-e4m3-stage2")
    assert isinstance(record, Record)
    return record


def test_both_sides_of_a_record_whose_kernels_are_todays() -> None:
    found = find_hot_code(kept(), load("fp8_sdpa"))
    assert found.shape == "b1_h8_s512_d64"
    assert [(w.role, w.variant) for w in found.windows] == [("baseline", "stage1"), ("candidate", "stage2")]
    for one in found.windows:
        assert any(i.kind == "matrix" for i in one.instructions)


def test_other_machine_code_is_not_shown_as_the_records() -> None:
    record = kept()
    builds = [msgspec.structs.replace(build, code_hash="of another kernel") for build in record.candidate.builds]
    other = msgspec.structs.replace(record, candidate=msgspec.structs.replace(record.candidate, builds=builds))
    found = find_hot_code(other, load("fp8_sdpa"))
    assert (found.windows, found.missing) == (
        (), "candidate: the kernel of today has other machine code than the record's"
    )  # fmt: skip


def test_of_several_launches_the_one_that_paces_them(tmp_path: Path) -> None:
    task = shipped("serving_attention")
    asked = request(tmp_path, task=task, shapes=["b2_q1_s130_h4_hk1_d64"], arch="sm_90a", device=None)
    record = validate(asked, *rungs(asked, "few_rows", "few_rows"), Watcher()).record
    evidence = next(gate for gate in record.gates if gate.gate == "EVIDENCE")
    assert "8 qgmma" in evidence.summary
    found = find_hot_code(record, task)
    attention = (
        render_program(task.family, task.config.variant("few_rows").values, "e4m3", asked.shapes[0].dims)
        .steps[1]
        .kernel
    )
    kernel = compile_kernel(attention, Target("sm_90a"), isolated=True)
    wanted = find_window("candidate", "few_rows", disassemble(kernel.cubin, attention.entry))
    assert [(one.where, one.instructions) for one in found.windows] == [(wanted.where, wanted.instructions)] * 2


def test_every_instruction_of_a_real_kernel_is_read() -> None:
    task = load("fp8_sdpa")
    variant, shape = task.config.variant("stage2"), task.config.shape("mission")
    kernel = compile_kernel(task.family.kernel(variant.values, "e4m3", shape.dims), Target("sm_90a"), isolated=True)
    sass = disassemble(kernel.cubin, kernel.source.entry)
    addresses = sum(line.lstrip().startswith("/*") for line in sass.splitlines())
    nops = sum(" NOP" in line for line in sass.splitlines())
    assert find_window("candidate", "stage2", sass).where.endswith(f"{addresses - nops} in all")
