"""The stretch of a kernel's machine code that paces it, of each side of a record: for the page of a run.

Nothing runs. The kernels are those that the run has built; for a saved record they are compiled again (or taken from
the cache), and shown if they are still those of the record.
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
from greenfast.judge.report.webpage.listing import HotCode, Instruction, Window
from greenfast.judge.report.webpage.run import speedups_of
from greenfast.judge.tasks import LoadedTask
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.kernel import program_of

#: Instructions of a window.
_LENGTH = 72
# What opcodes keep busy, by their first word.
_KINDS = {
    "matrix": {"HMMA", "IMMA", "QMMA", "DMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA"},
    "special": {"MUFU"},
    "memory": set(
        ["LD", "ST", "LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LDGSTS", "ATOM", "ATOMG", "ATOMS"]
    ),
}
#: How much an instruction counts: one of the matrix units is busy for longer.
_WEIGHTS = {"matrix": 4, "special": 1, "memory": 1, "": 0}
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;|^(\.L\w+):", re.MULTILINE)
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_BRANCH = re.compile(r"BRA.*`\((\.L\w+)\)")


def hot_code(record: Record | BenchRecord, task: LoadedTask, built: Sequence[BuiltSide] = ()) -> HotCode:
    """The windows of each side's kernel for the shape that decides; without any, the reason.

    built: the sides as the run of the record has built them.
    """
    shape = _shape_of(record)
    programs = {side.role: side.programs for side in built}
    windows = []
    for role, side in record.sides():
        try:
            kernels: Sequence[CompiledKernel]
            if shape in programs.get(role, {}):
                kernels = programs[role][shape].kernels
            else:
                kernels = _kernels(record, side, shape, task)
            if not all(kernel.cubin for kernel in kernels):
                raise UsageError(assembler.MISSING)
            listings = [disassemble(kernel.cubin, kernel.source.entry) for kernel in kernels]
            # Of several launches the one with most pacing instructions.
            windows.append(window(role, side.variant, max(listings, key=_weight)))
        except GreenfastError as e:
            return HotCode(missing=f"{role}: {str(e).splitlines()[0].rstrip('.:')}")
    return HotCode(shape=shape, windows=tuple(windows))


def _shape_of(record: Run) -> str:
    """The first shape that decides; else the first one for which there are kernels."""
    rows = facts.deciding_speedups(speedups_of(record))
    shapes = [row.shape for row in rows]
    shapes += [name for _, side in record.sides() for build in side.builds for name in build.shapes]
    return next(iter(shapes), "")


def _kernels(record: Run, side: Side, shape: str, task: LoadedTask) -> list[CompiledKernel]:
    """A side's kernels, built again; raises UsageError where one is not, or no longer, the record's."""
    only = side.builds if len(side.builds) == 1 else []  # older records do not say which shapes
    builds = {build.entry: build for build in side.builds if shape in build.shapes} or {b.entry: b for b in only}
    if not builds:
        raise UsageError(f"the record does not say which kernel {shape or 'a shape'} ran")
    toggles = task.config.toggle_values(side.toggles)
    program = program_of(task.family, toggles, record.format, task.config.shape(shape).dims)
    kernels = []
    for source in dict.fromkeys(step.kernel for step in program.steps):
        then = builds.get(source.entry)
        if then is None:
            raise UsageError(f"the record has no kernel {source.entry}")
        if then.compiler != compiler_version():
            raise UsageError(f"its kernel was compiled by {then.compiler}, and this is {compiler_version()}")
        kernels.append(compile_kernel(source, Target.parse(then.arch), isolated=True))
        if then.code_hash != code_hash(kernels[-1]):
            raise UsageError("the kernel of today has other machine code than the record's")
    return kernels


def _weight(sass: str) -> int:
    return sum(_WEIGHTS[one.kind] for one in _read(sass)[0])


def window(role: str, variant: str, sass: str) -> Window:
    """The stretch of a listing with the most pacing instructions, inside of the loop that has most of them."""
    instructions, labels = _read(sass)
    if not instructions:
        raise UsageError("the machine code could not be read")
    sums = [0, *accumulate(_WEIGHTS[one.kind] for one in instructions)]
    first, last = _hottest_loop(instructions, labels, sums)
    starts = range(first, max(first, last - _LENGTH) + 1)
    start = max(starts, key=lambda at: sums[min(at + _LENGTH, last)] - sums[at])
    end = min(start + _LENGTH, last)
    whole = (first, last) == (0, len(instructions))
    where = f"{end - start} of {last - first} instructions{'' if whole else ' of a loop'}, {len(instructions)} in all"
    return Window(role, variant, where, tuple(instructions[start:end]))


def _read(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a listing, and the number of the one that each label stands before."""
    instructions: list[Instruction] = []
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
        instructions.append(Instruction(address, " ".join(text.split()), word, kind))
    return instructions, labels


def _hottest_loop(instructions: list[Instruction], labels: dict[str, int], sums: list[int]) -> tuple[int, int]:
    """The smallest loop with at least half of the weight that the heaviest one has; all of the code where none has any.

    A branch back makes a loop of what lies between its label and itself.
    """
    loops = [span for span in _loops(instructions, labels) if sums[span[1]] > sums[span[0]]]
    if not loops:
        return 0, len(instructions)
    most = max(sums[end] - sums[start] for start, end in loops)
    return min((s for s in loops if 2 * (sums[s[1]] - sums[s[0]]) >= most), key=lambda span: span[1] - span[0])


def _loops(instructions: list[Instruction], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    for at, one in enumerate(instructions):
        branch = _BRANCH.search(one.text)
        if branch and labels.get(branch[1], at + 1) <= at:
            yield labels[branch[1]], at + 1
