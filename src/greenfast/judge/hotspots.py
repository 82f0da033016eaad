"""Hotspots for the page of a run: the window of machine code with most of a kernel's work, per implementation.

Nothing is executed. The kernels come from the run. For a saved record they are compiled again (or taken from the cache)
and shown only if their machine code equals the record's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from greenfast.device import assembler
from greenfast.device.compiler import CompiledKernel, compile_kernel, compiler_version
from greenfast.device.identity import code_hash
from greenfast.device.machine_code import disassemble
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import BenchRecord, Record, Run, Side
from greenfast.judge.report import facts
from greenfast.judge.report.webpage.listing import HotCode, ListedInstruction, Window
from greenfast.judge.report.webpage.run import get_speedups
from greenfast.judge.tasks import LoadedTask
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.kernel import program_of

#: Number of instructions in a window.
_LENGTH = 72
# The unit that executes an opcode, by its first word.
_KINDS = {
    "matrix": {"HMMA", "IMMA", "QMMA", "DMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA"},
    "special": {"MUFU"},
    "memory": set(
        ["LD", "ST", "LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LDGSTS", "ATOM", "ATOMG", "ATOMS"]
    ),
}
#: Weight of an instruction. A matrix instruction keeps its unit busy for longer.
_WEIGHTS = {"matrix": 4, "special": 1, "memory": 1, "": 0}
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;|^(\.L\w+):", re.MULTILINE)
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_BRANCH = re.compile(r"BRA.*`\((\.L\w+)\)")


def find_hot_code(record: Record | BenchRecord, task: LoadedTask, built: Sequence[BuiltSide] = ()) -> HotCode:
    """Return the window of each implementation's kernel for the deciding shape, or the reason why there is none.

    built: the compiled implementations of the record's run.
    """
    shape = _choose_shape(record)
    programs = {side.role: side.programs for side in built}
    windows = []
    for role, side in record.sides():
        try:
            kernels: Sequence[CompiledKernel]
            if shape in programs.get(role, {}):
                kernels = programs[role][shape].kernels
            else:
                kernels = _rebuild_kernels(record, side, shape, task)
            if not all(kernel.cubin for kernel in kernels):
                raise UsageError(assembler.MISSING)
            listings = [disassemble(kernel.cubin, kernel.source.entry) for kernel in kernels]
            # Show the launch with the largest weight.
            windows.append(find_window(role, side.variant, max(listings, key=_compute_weight)))
        except GreenfastError as e:
            return HotCode(missing=f"{role}: {str(e).splitlines()[0].rstrip('.:')}")
    return HotCode(shape=shape, windows=tuple(windows))


def _choose_shape(record: Run) -> str:
    """Return the first shape that decides, else the first shape with kernels."""
    rows = facts.deciding_speedups(get_speedups(record))
    shapes = [row.shape for row in rows]
    shapes += [name for _, side in record.sides() for build in side.builds for name in build.shapes]
    return next(iter(shapes), "")


def _rebuild_kernels(record: Run, side: Side, shape: str, task: LoadedTask) -> list[CompiledKernel]:
    """Compile an implementation's kernels again. Raises UsageError if one differs from the record's."""
    only = side.builds if len(side.builds) == 1 else []  # Older records do not list the shapes of a kernel.
    builds = {build.entry: build for build in side.builds if shape in build.shapes} or {b.entry: b for b in only}
    if not builds:
        raise UsageError(f"the record does not say which kernel {shape or 'a shape'} ran")
    toggles = task.config.toggle_values(side.toggles)
    program = program_of(task.family, toggles, record.format, task.config.shape(shape).dims)
    kernels = []
    for source in dict.fromkeys(step.kernel for step in program.steps):
        build = builds.get(source.entry)
        if build is None:
            raise UsageError(f"the record has no kernel {source.entry}")
        if build.compiler != compiler_version():
            raise UsageError(f"its kernel was compiled by {build.compiler}, and this is {compiler_version()}")
        kernels.append(compile_kernel(source, Target.parse(build.arch), isolated=True))
        if build.code_hash != code_hash(kernels[-1]):
            raise UsageError("the kernel of today has other machine code than the record's")
    return kernels


def _compute_weight(sass: str) -> int:
    return sum(_WEIGHTS[instruction.kind] for instruction in _parse_listing(sass)[0])


def find_window(role: str, variant: str, sass: str) -> Window:
    """Return the window with the largest weight inside the hottest loop of a listing."""
    instructions, labels = _parse_listing(sass)
    if not instructions:
        raise UsageError("the machine code could not be read")
    sums = [0, *accumulate(_WEIGHTS[instruction.kind] for instruction in instructions)]
    first, last = _find_hottest_loop(instructions, labels, sums)
    starts = range(first, max(first, last - _LENGTH) + 1)
    start = max(starts, key=lambda n: sums[min(n + _LENGTH, last)] - sums[n])
    end = min(start + _LENGTH, last)
    is_loop = (first, last) != (0, len(instructions))
    extent = (
        f"{end - start} of {last - first} instructions{' of a loop' if is_loop else ''}, {len(instructions)} in all"
    )
    return Window(role, variant, extent, tuple(instructions[start:end]))


def _parse_listing(sass: str) -> tuple[list[ListedInstruction], dict[str, int]]:
    """Return the instructions of a listing, and the index of the instruction after each label."""
    instructions: list[ListedInstruction] = []
    labels: dict[str, int] = {}
    for address, text, label in _LINE.findall(sass):
        if label:
            labels[label] = len(instructions)
            continue
        opcode = _OPCODE.match(text)
        word = opcode[1] if opcode else ""
        if word == "NOP":
            continue
        base = word.partition(".")[0]
        kind = next((kind for kind, opcodes in _KINDS.items() if base in opcodes), "")
        instructions.append(ListedInstruction(address, " ".join(text.split()), word, kind))
    return instructions, labels


def _find_hottest_loop(
    instructions: list[ListedInstruction], labels: dict[str, int], sums: list[int]
) -> tuple[int, int]:
    """Return the smallest loop with at least half of the heaviest loop's weight, or all code if no loop has weight."""
    loops = [span for span in _find_loops(instructions, labels) if sums[span[1]] > sums[span[0]]]
    if not loops:
        return 0, len(instructions)
    heaviest = max(sums[end] - sums[start] for start, end in loops)
    return min((s for s in loops if 2 * (sums[s[1]] - sums[s[0]]) >= heaviest), key=lambda span: span[1] - span[0])


def _find_loops(instructions: list[ListedInstruction], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yield the first instruction and the end of each loop: the code from a label to a backward branch to it."""
    for n, instruction in enumerate(instructions):
        branch = _BRANCH.search(instruction.text)
        if branch and labels.get(branch[1], n + 1) <= n:
            yield labels[branch[1]], n + 1
