"""Machine code of the two sides next to each other, aligned by opcode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from markupsafe import Markup

from greenfast.judge.report.webpage.page import paragraph, part


@dataclass(frozen=True)
class ListedInstruction:
    """One instruction: its address in hexadecimal, its text, its opcode (the first word, such as HMMA.16816.F32).

    kind: the unit that executes it: matrix, special (function unit), memory, or empty.
    """

    address: str
    text: str
    opcode: str
    kind: str


@dataclass(frozen=True)
class Window:
    """A window of a kernel's machine code. where: its size and position, in words."""

    role: str
    variant: str
    where: str
    instructions: tuple[ListedInstruction, ...]


@dataclass(frozen=True)
class HotCode:
    """Windows of one or two implementations for one shape. If there are none, ``missing`` is the reason."""

    shape: str = ""
    windows: tuple[Window, ...] = ()
    missing: str = "the kernels were not built again"


def section(code: HotCode) -> list[Markup]:
    """Return the windows, or the reason why there are none."""
    if not code.windows:
        return [paragraph(f"Not shown: {code.missing}.")]
    lead = (
        f"A part of each side's kernel for {code.shape}: the one with the most instructions for the matrix units, the "
        "special function units and memory, in the loop that has most of them. They are counted in the code, not "
        "measured: an instruction that rarely runs counts like any other. Lines without a tint have the same opcode "
        "on both sides."
    )
    return [
        paragraph(lead),
        part("listing", windows=code.windows, rows=rows(*(window.instructions for window in code.windows))),
    ]


def rows(
    left: Sequence[ListedInstruction], right: Sequence[ListedInstruction] = ()
) -> list[tuple[bool, ListedInstruction | None, ListedInstruction | None]]:
    """Align two windows. Return per line: True if the opcodes are equal, and the instructions (None for a gap)."""
    lines: list[tuple[bool, ListedInstruction | None, ListedInstruction | None]] = []
    matcher = SequenceMatcher(a=_opcodes(left), b=_opcodes(right), autojunk=False)
    for operation, a, a_end, b, b_end in matcher.get_opcodes():
        lines += [(operation == "equal", *pair) for pair in zip_longest(left[a:a_end], right[b:b_end])]
    return lines


def _opcodes(instructions: Sequence[ListedInstruction]) -> list[str]:
    """Return the opcodes without modifiers, because two kernels seldom have equal modifiers."""
    return [one.opcode.partition(".")[0] for one in instructions]
