"""Machine code side by side: aligned by opcode, nothing lost."""

from __future__ import annotations

from greenfast.judge.report.webpage.listing import ListedInstruction, rows


def code(*opcodes: str) -> list[ListedInstruction]:
    return [ListedInstruction(f"{16 * i:04x}", f"{opcode} R{i}", opcode, "") for i, opcode in enumerate(opcodes)]


def shown(left: list[ListedInstruction], right: list[ListedInstruction]) -> list[tuple[bool, str, str]]:
    return [(equal, a.opcode if a else "", b.opcode if b else "") for equal, a, b in rows(left, right)]


def test_equal_opcodes_stand_side_by_side() -> None:
    assert shown(code("LDS", "FMUL", "HMMA", "BRA"), code("LDS.128", "HMMA", "STS", "BRA")) == [
        (True, "LDS", "LDS.128"),  # what follows the dot does not count
        (False, "FMUL", ""),
        (True, "HMMA", "HMMA"),
        (False, "", "STS"),
        (True, "BRA", "BRA"),
    ]


def test_different_stretches_share_their_lines() -> None:
    assert shown(code("A", "B", "C"), code("X", "Y")) == [(False, "A", "X"), (False, "B", "Y"), (False, "C", "")]


def test_one_side_alone() -> None:
    assert shown(code("A", "B"), []) == [(False, "A", ""), (False, "B", "")]
