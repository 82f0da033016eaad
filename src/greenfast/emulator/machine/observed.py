"""Requests for observations of a run, and the observations: by source line, watched values, a warp's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import msgspec

Extent = tuple[int, int, int]

#: Steps that an observation holds at most: of a trace, and of watched lines.
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Observe:
    """A selection of what to observe in a run.

    lines: count executions, sectors and bank conflicts by source line. watch: expressions to evaluate when a
    thread reaches a line, as "LINE:EXPRESSION,..." or "FILE:LINE:EXPRESSION,..."; for CUDA sources. trace: a block's
    index and the number of its warp, to record the warp's instructions.
    """

    lines: bool = False
    watch: Sequence[str] = ()
    trace: tuple[Extent, int] | None = None

    def __bool__(self) -> bool:
        return self.lines or bool(self.watch) or self.trace is not None


NOTHING = Observe()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a source and the function that it is in, empty if it is not known."""

    file: str
    line: int
    function: str


class LineAccesses(msgspec.Struct, kw_only=True):
    """Accesses of a line. requests: one per warp and instruction.

    transactions: 32-byte sectors of global memory, or passes over shared memory. ideal: the fewest transactions for the
    same bytes; for global memory the sectors that the distinct bytes of each request fill.
    """

    requests: int = 0
    transactions: int = 0
    ideal: int = 0


class BranchSide(msgspec.Struct, frozen=True, kw_only=True):
    """A side of the conditional branches of a line.

    to_line: the line that runs next, 0 for the end of the kernel. threads: how often threads took this side.
    """

    to_line: int
    threads: int


class LineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a source line that has instructions; zeros if no thread reached it.

    threads: different threads that executed the line or code inlined from it. instructions: executed by warps,
    thread_instructions: by threads; both without the code inlined from calls in this line. code: its PTX instructions;
    executed_code: those that at least one thread executed. global_loads, ...: its memory accesses. sides: of its
    conditional branches. stacks: the call sites that it was inlined at, innermost first.
    """

    file: str
    line: int
    function: str
    threads: int
    instructions: int
    thread_instructions: int
    code: int
    executed_code: int
    global_loads: LineAccesses
    global_stores: LineAccesses
    shared_loads: LineAccesses
    shared_stores: LineAccesses
    sides: list[BranchSide]
    stacks: list[list[Line]]


class WarpStep(msgspec.Struct, frozen=True, kw_only=True):
    """An instruction that a warp executed, or a watched line that it reached.

    mask: bit n for its thread n. instruction: PTX; empty for a watched line. values: by register, after the
    instruction, or by watched expression; one value per thread of the mask, the lowest thread first.
    """

    file: str
    line: int
    function: str
    block: Extent
    warp: int
    mask: int
    instruction: str
    values: dict[str, list[Any]]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The observations of a run, in the first order of its warps. A fault ends them.

    omitted: the number of steps beyond MAX_STEPS, missing in ``watched`` and ``trace``.
    """

    lines: list[LineCounts]
    watched: list[WarpStep]
    trace: list[WarpStep]
    omitted: int


class Recorder(Protocol):
    """Records a run: ``greenfast.emulator.observer.Observer``."""

    def observed(self) -> Observed:
        """Return the observations."""


def format_values(values: Sequence[Any]) -> str:
    """Return the values of a warp's threads in short: one for equal values, a range for equal steps, else all."""
    first = values[0]
    if all(value == first or (value != value and first != first) for value in values):
        return _format_value(first)
    steps = {b - a for a, b in pairwise(values)} if not isinstance(first, bool) else set()
    if len(values) > 2 and len(steps) == 1 and values[0] == values[0]:
        step = steps.pop()
        return f"{_format_value(first)}..{_format_value(values[-1])}" + (
            f" step {_format_value(step)}" if step != 1 else ""
        )
    return " ".join(map(_format_value, values))


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return hex(value) if value >= 1 << 32 else str(value)
    return f"{value:.9g}"


def format_step(step: WarpStep) -> str:
    """Return a step as a line of text."""
    values = ", ".join(f"{name} = {format_values(items)}" for name, items in step.values.items())
    location = f"{step.file}:{step.line}"
    if not step.instruction:
        where = f"block {','.join(map(str, step.block))} warp {step.warp}"
        return f"{location}  {where}  {step.mask:08x}  {values}"
    return f"{location:20} {step.mask:08x}  {step.instruction:48}  {values}".rstrip()
