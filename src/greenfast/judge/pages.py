"""The HTML page of a record, with data that today's task and compiler add.

Hotspots are the window of machine code with most of a kernel's work, per implementation. Nothing is executed. The
kernels come from the run. For a saved record they are compiled again (or taken from the cache) and shown only if their
machine code equals the record's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from greenfast.device import assembler
from greenfast.device.compiler import CompiledKernel, compile_kernel, compiler_version
from greenfast.device.identity import code_hash
from greenfast.device.machine_code import disassemble
from greenfast.judge.implementation import BuiltSide
from greenfast.judge.record_io import RECORD
from greenfast.judge.record_schema import AnyRecord, BenchRecord, PhaseRecord, Record, Run, Side
from greenfast.judge.report import facts
from greenfast.judge.report.webpage.listing import HotCode, ListedInstruction, Window
from greenfast.judge.report.webpage.roofline import Work
from greenfast.judge.report.webpage.run import run_page
from greenfast.judge.store import write_whole
from greenfast.judge.task import LoadedTask, load
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.kernel import render_program
from greenfast.spec.problem import least_work

#: Reason why the page of a saved record has no machine code for a solution.
_NOT_BUILT = (
    "a solution's code does not run to show a saved record; the command under 'Repeat it' with --html FILE writes a "
    "page with the machine code"
)


def write_page(
    file: Path | None, record: AnyRecord, run: Path, task: LoadedTask | None = None, built: Sequence[BuiltSide] = ()
) -> None:
    """Write the page of a record. run: the record's file or folder. Do nothing if no file is named."""
    if file is not None:
        write_whole(file, record_page(record, digest(run), task, built))


def record_page(
    record: AnyRecord, sha256: str = "", task: LoadedTask | None = None, built: Sequence[BuiltSide] = ()
) -> str:
    """Return the page of a record. sha256: of its file. task: the record's; searched for by its name if it is None.

    built: the sides of the run, if it has just ended; else the kernels are compiled again unless the cache has them.
    Nothing runs.
    """
    code = HotCode(missing="an instrumented build has other code")
    if not isinstance(record, PhaseRecord):
        try:
            task = task or _load_task(record)
            code = find_hot_code(record, task, built)
        except GreenfastError as e:
            code = HotCode(missing=str(e).splitlines()[0].rstrip(".:"))
        if not built and any(side.solution for _, side in record.sides()):
            code = HotCode(missing=_NOT_BUILT)
    return run_page(record, work=find_work(record, task), code=code, sha256=sha256)


def digest(run: Path) -> str:
    """Return the SHA-256 of a record's file. The argument is the file or its folder."""
    return hashlib.sha256((run / RECORD if run.is_dir() else run).read_bytes()).hexdigest()


def _load_task(record: Run) -> LoadedTask:
    """Return the task that a record names. Raises UsageError for one that is not known by its name.

    A record must not choose a folder from which code is loaded.
    """
    if not re.fullmatch(r"[\w-]+", record.task):
        raise UsageError("the record names no task")
    return load(record.task)


def find_work(record: Run, task: LoadedTask | None) -> dict[str, Work]:
    """Return the problem's minimum work by timed shape, from the record, else from today's task."""
    dims = {row.shape: row.dims for _, side in record.sides() for row in side.timing}
    rows = [row for _, side in record.sides() for row in side.correctness]
    moved = {row.shape: row.case_bytes for row in rows if row.case_bytes}
    work = {}
    for name, sizes in dims.items():
        known = task if task is not None and _has(task, name, sizes) else None
        least = record.least_work.get(name) or (least_work(known.problem, sizes) if known else {})
        nbytes = moved.get(name) or (known.problem.make_case(sizes, 0, record.format).nbytes if known else 0)
        work[name] = Work(least, nbytes)
    return work


def _has(task: LoadedTask, shape: str, dims: Mapping[str, int]) -> bool:
    """Return True if the task has this shape with these dimensions. A record must not cause other computations."""
    try:
        return task.config.shape(shape).dims == dims
    except UsageError:
        return False


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
    rows = facts.deciding_speedups(facts.get_speedups(record))
    shapes = [row.shape for row in rows]
    shapes += [name for _, side in record.sides() for build in side.builds for name in build.shapes]
    return next(iter(shapes), "")


def _rebuild_kernels(record: Run, side: Side, shape: str, task: LoadedTask) -> list[CompiledKernel]:
    """Compile an implementation's kernels again. Raises UsageError if one differs from the record's."""
    builds = {build.entry: build for build in side.builds if shape in build.shapes}
    if not builds:
        raise UsageError(f"the record does not name the kernel that {shape or 'a shape'} ran")
    toggles = task.config.toggle_values(side.toggles)
    program = render_program(task.family, toggles, record.format, task.config.shape(shape).dims)
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
