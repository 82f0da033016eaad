"""EVIDENCE: the instructions in the machine code against the promises of the rung. Needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from greenfast.device import assembler
from greenfast.device.compiler import CompiledKernel
from greenfast.device.machine_code import disassemble, early_launch_faults
from greenfast.emulator.dependence import find_early_reads, find_written_pointers
from greenfast.emulator.grid import load_program
from greenfast.judge.implementation import (
    BASELINE,
    CANDIDATE,
    BuiltProgram,
    BuiltSide,
    build_side,
    count_side_instructions,
)
from greenfast.judge.pipeline import Gate, GateRun, conclude_checks
from greenfast.judge.record_schema import GateResult, Record, Run, Status, largest_named_shape
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.facts import counts_section
from greenfast.judge.report.formatting import Section
from greenfast.judge.task import Rung
from greenfast.spec.errors import DamagedCodeError, GreenfastError, UsageError
from greenfast.spec.facts import KernelCounts
from greenfast.spec.kernel import Launch, find_pointers, find_tensor_maps


def _check(run: GateRun) -> GateResult:
    request, candidate = run.request, run.built(CANDIDATE)
    assert candidate is not None  # The gates before this one compiled all implementations.
    counts = run.correctness.counts
    emulated = format_emulated_counts(counts.get(BASELINE, {}), counts.get(CANDIDATE, {}), run.least_work())
    try:
        result = check_promises(candidate, *_build_predecessor(run), emulated)
    except DamagedCodeError as e:
        return GateResult(gate="EVIDENCE", status="FAIL", summary="machine code that cannot be read", reasons=[str(e)])
    files: list[str] = []
    note = "not asked for" if run.profile is None else request.cannot_time()
    if note is None and run.status("CORRECTNESS") != "PASS":
        note = "not taken: CORRECTNESS did not pass"
    if note is None and run.profile is not None:
        run.progress("EVIDENCE")(0.5, "Nsight Compute")
        files, note = run.profile(request, run.implementations[CANDIDATE], run.stamp)
    status: Status = "PASS" if files else "PENDING"
    result.checks.append(("Nsight Compute profile", "taken where ncu is there", ", ".join(files) or note or "", status))
    return result


def _build_predecessor(run: GateRun) -> tuple[Rung | None, BuiltSide | None]:
    """Return the candidate's rung, and the compiled rung before it for the same shapes and format.

    The rung is None for a solution and for toggles that belong to no rung.
    """
    request, config = run.request, run.request.task.config
    rung = run.implementations[CANDIDATE].rung
    if rung is None or rung.after is None:
        return rung, None
    before = config.rung_variant(config.rung(rung.after))
    family, shapes = request.task.family, request.shapes
    try:
        return rung, build_side("predecessor", family, before, request.format, shapes, request.target, rejections={})
    except UsageError:  # The rung before it supports none of the shapes.
        return rung, None


def check_promises(
    candidate: BuiltSide, rung: Rung | None, predecessor: BuiltSide | None, emulated: str = ""
) -> GateResult:
    """Check the candidate's machine code against its rung's promises and against the rules of an early launch.

    rung: the candidate's rung; None if it has none and thus no promises.
    predecessor: the rung before it, compiled for the same shapes; None if no promise compares with it.
    emulated: counts from the emulator as text for the summary. No promise covers them.
    """
    if not all(kernel.cubin for side in (candidate, predecessor) if side for _, kernel in side.distinct):
        return GateResult(gate="EVIDENCE", status="PENDING", summary=f"no machine code to look at: {assembler.MISSING}")
    counts = count_side_instructions(candidate)
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    predecessor_counts = count_side_instructions(predecessor) if predecessor else {}

    def check_promise(shape: str, counter: str, target: str, actual: int, held: bool) -> None:
        checks.append((f"{shape}: {counter}", target, str(actual), "PASS" if held else "FAIL"))
        if not held:
            reasons.append(f"{shape}: {counter} is {actual}, promised {target}")

    seen = set()
    for shape, program in candidate.programs.items():
        hashes = tuple(kernel.kernel_hash for kernel in program.kernels)
        if rung is None or hashes in seen:
            continue
        seen.add(hashes)
        actual = sum((Counter(counts[kernel_hash]) for kernel_hash in hashes), Counter())
        for counter, minimum in rung.promises.at_least.items():
            check_promise(shape, counter, f">= {minimum}", actual[counter], actual[counter] >= minimum)
        for counter, maximum in rung.promises.at_most.items():
            check_promise(shape, counter, f"<= {maximum}", actual[counter], actual[counter] <= maximum)
        if predecessor is not None and shape in predecessor.programs:
            kernels = predecessor.programs[shape].kernels
            earlier = sum((Counter(predecessor_counts[kernel.kernel_hash]) for kernel in kernels), Counter())
            for counter in rung.promises.more_than_predecessor:
                target = f"> {earlier[counter]} ({predecessor.variant.name})"
                check_promise(shape, counter, target, actual[counter], actual[counter] > earlier[counter])
    early: dict[str, list[str]] = {}  # reasons of early launches: their shapes
    for shape, program in candidate.programs.items():
        for kernel, step in zip(program.kernels, program.program.steps, strict=True):
            if not step.launch.early:
                continue
            early_loads, constant_loads = _loads_only_inputs(program, kernel, step.launch)
            faults = early_launch_faults(
                disassemble(kernel.cubin, kernel.source.entry), early_loads=early_loads, constant_loads=constant_loads
            )
            checks.append((f"{shape}: accesses before the wait", "0", str(len(faults)), "FAIL" if faults else "PASS"))
            if faults:
                more = f"; {len(faults) - 1} more accesses alike" if len(faults) > 1 else ""
                early.setdefault(f"{kernel.source.entry} begins early, with {faults[0]}{more}", []).append(shape)
    for text, shapes in early.items():
        reasons.append(f"{shapes[0]}: {text}" + (f"; {len(shapes) - 1} more shapes alike" if shapes[1:] else ""))
    first_program = next(iter(candidate.programs.values()))
    first_counts = sum((Counter(counts[kernel.kernel_hash]) for kernel in first_program.kernels), Counter())
    text = ", ".join(f"{n} {name}" for name, n in first_counts.items() if n and name != "total")
    summary = f"{candidate.variant.name}: {text or 'none counted'}"
    if rung is None:
        summary += " (no rung, so nothing is promised)"
    if emulated:
        summary += f"; {emulated}"
    return GateResult(
        gate="EVIDENCE", status="FAIL" if reasons else "PASS", summary=summary, reasons=reasons, checks=checks
    )


def _loads_only_inputs(program: BuiltProgram, kernel: CompiledKernel, launch: Launch) -> tuple[bool, bool]:
    """Return whether a kernel's PTX reads, before its wait, only buffers that no launch of its program may write.

    The second value is the same for its loads of constant memory. Both are False without PTX.
    """
    try:
        functions = [load_program(k.ptx, k.source.entry)[1].function for k in program.kernels]
        function = load_program(kernel.ptx, kernel.source.entry)[1].function
    except GreenfastError:  # no PTX, or PTX that the emulator does not read
        return False, False
    written = set()
    for written_by, step in zip(functions, program.program.steps, strict=True):
        names = find_written_pointers(written_by)
        for parameter, argument in zip(written_by.params, step.launch.args, strict=False):
            if not isinstance(argument, str) or parameter.name in names:
                written |= {name for _, name in find_pointers(argument)}
                written |= {tensor.buffer for _, tensor in find_tensor_maps(argument)}
    plain = {p.name: a for p, a in zip(function.params, launch.args, strict=False) if isinstance(a, str)}
    inputs = {name for name, buffer in plain.items() if buffer not in written}
    before, constant = find_early_reads(function, {(name, 0) for name in plain})
    return before <= inputs, constant <= inputs


def format_emulated_counts(
    baseline: Mapping[str, KernelCounts],
    candidate: Mapping[str, KernelCounts],
    least_work: Mapping[str, Mapping[str, int]],
) -> str:
    """Format the candidate's counts from the emulator, beside the baseline's and the problem's minimum.

    The shape is the task's shape with the most executed instructions.
    baseline, candidate, least_work: by shape. The text is empty if the kernels did not run on the emulator.
    """
    if not candidate:
        return ""
    shape = largest_named_shape(candidate)
    counts, baseline_counts, minima = candidate[shape], baseline.get(shape), least_work.get(shape, {})

    def compare(name: str) -> str:
        text = f"{getattr(counts, name)}"
        return f"{text} (baseline {getattr(baseline_counts, name)})" if baseline_counts else text

    parts = [f"{compare('warp_instructions')} instructions", f"{compare('conflicts')} bank conflicts"]
    parts += [f"{name} {getattr(counts, name) / value:.2f}x the least" for name, value in minima.items() if value]
    return f"emulated {shape}: " + ", ".join(parts)


def _conclude(record: Run, result: GateResult) -> GateResult:
    """Take the counts of the rows from the builds of the record's last implementation."""

    def count(check: str, stored: str) -> str:
        shape, _, counter = check.partition(": ")
        launched = [b for b in builds for launch in b.launches if launch.partition(" launch ")[0] == shape]
        if not launched or not all(counter in build.machine_code for build in launched):
            return stored
        return str(sum(build.machine_code[counter] for build in launched))

    builds = record.sides()[-1][1].builds
    checks = [(check, target, count(check, actual), status) for check, target, actual, status in result.checks]
    return conclude_checks(msgspec.structs.replace(result, checks=checks))


def _list_sections(record: Run, plot: str | None) -> list[Section]:
    counted = counts_section(record.sides(), record.least_work)
    if not isinstance(record, Record):
        return [Section("Counts", [counted])] if counted else []
    return [Section("Evidence", [_evidence(record, counted)])]


def _evidence(record: Record, counted: str) -> str:
    builds = list(facts.list_builds(record))
    counters = sorted({counter for _, _, build in builds for counter in build.machine_code})
    lead = formatting.without_html(facts.gate_line(record, "EVIDENCE"))
    lead = f"{lead}\n\n{counted}" if counted else lead
    if not counters:
        return lead
    rows = [
        (side, formatting.dims(build.dims), *(str(build.machine_code.get(c, formatting.NONE)) for c in counters))
        for side, _, build in builds
    ]
    table = formatting.table(("side", "dims", *counters), rows, right=counters)
    return f"{lead}\n\nInstructions in the machine code:\n\n{table}"


GATE = Gate("EVIDENCE", exit_code=15, after="PERFORMANCE", check=_check, conclude=_conclude, sections=_list_sections)
