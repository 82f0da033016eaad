"""EVIDENCE: what the machine code contains against what the rung promises. Needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from greenfast.device import assembler
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.device.pdl import early_launch_faults
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import GateResult, Status, largest_named_shape
from greenfast.judge.task import Rung
from greenfast.spec.facts import KernelCounts


def instruction_counts(side: BuiltSide) -> dict[str, dict[str, int]]:
    """Instruction counts of each different kernel, by its hash; none of one without machine code."""
    return {
        k.kernel_hash: count_instructions(disassemble(k.cubin, k.source.entry)) if k.cubin else {}
        for _, k in side.distinct
    }


def check(candidate: BuiltSide, rung: Rung | None, predecessor: BuiltSide | None, emulated: str = "") -> GateResult:
    """Compare the candidate's machine code with its rung's promises, and with what an early launch allows.

    rung: None for toggles that are not a rung: no promises. predecessor: the rung's, built for the same shapes,
    where a promise compares with it. emulated: what was counted while the kernel ran, for the summary; no promise.
    """
    if not all(kernel.cubin for side in (candidate, predecessor) if side for _, kernel in side.distinct):
        return GateResult(gate="EVIDENCE", status="PENDING", summary=f"no machine code to look at: {assembler.MISSING}")
    counts = instruction_counts(candidate)
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    before = instruction_counts(predecessor) if predecessor else {}

    def promise(shape: str, counter: str, target: str, actual: int, held: bool) -> None:
        checks.append((f"{shape}: {counter}", target, str(actual), "PASS" if held else "FAIL"))
        if not held:
            reasons.append(f"{shape}: {counter} is {actual}, promised {target}")

    seen = set()
    for shape, program in candidate.programs.items():
        hashes = tuple(kernel.kernel_hash for kernel in program.kernels)
        if rung is None or hashes in seen:
            continue
        seen.add(hashes)
        found = sum((Counter(counts[found]) for found in hashes), Counter())
        for counter, least in rung.promises.at_least.items():
            promise(shape, counter, f">= {least}", found[counter], found[counter] >= least)
        for counter, most in rung.promises.at_most.items():
            promise(shape, counter, f"<= {most}", found[counter], found[counter] <= most)
        if predecessor is not None and shape in predecessor.programs:
            kernels = predecessor.programs[shape].kernels
            earlier = sum((Counter(before[kernel.kernel_hash]) for kernel in kernels), Counter())
            for counter in rung.promises.more_than_predecessor:
                target = f"> {earlier[counter]} ({predecessor.variant.name})"
                promise(shape, counter, target, found[counter], found[counter] > earlier[counter])
    for shape, program in candidate.programs.items():
        for kernel, step in zip(program.kernels, program.program.steps, strict=True):
            if not step.launch.early:
                continue
            faults = early_launch_faults(disassemble(kernel.cubin, kernel.source.entry))
            checks.append((f"{shape}: accesses before the wait", "0", str(len(faults)), "FAIL" if faults else "PASS"))
            reasons += [f"{shape}: it begins early, with {fault}" for fault in faults]
    first = next(iter(candidate.programs.values()))
    of_first = sum((Counter(counts[kernel.kernel_hash]) for kernel in first.kernels), Counter())
    shown = {name: n for name, n in of_first.items() if n and name != "total"}
    summary = f"{candidate.variant.name}: " + (", ".join(f"{n} {name}" for name, n in shown.items()) or "none counted")
    if rung is None:
        summary += " (no rung, so nothing is promised)"
    if emulated:
        summary += f"; {emulated}"
    return GateResult(
        gate="EVIDENCE", status="FAIL" if reasons else "PASS", summary=summary, reasons=reasons, checks=checks
    )


def emulated_counts(
    baseline: Mapping[str, KernelCounts],
    candidate: Mapping[str, KernelCounts],
    least_work: Mapping[str, Mapping[str, int]],
) -> str:
    """The candidate's counts at the task's own shape where it executes most, beside the baseline's and the least work.

    By shape; empty where the kernels did not run in the emulator.
    """
    if not candidate:
        return ""
    shape = largest_named_shape(candidate)
    found, before, least = candidate[shape], baseline.get(shape), least_work.get(shape, {})

    def against(name: str) -> str:
        return f"{getattr(found, name)}" + (f" (baseline {getattr(before, name)})" if before else "")

    parts = [f"{against('warp_instructions')} instructions", f"{against('conflicts')} bank conflicts"]
    parts += [f"{name} {getattr(found, name) / value:.2f}x the least" for name, value in least.items() if value]
    return f"emulated {shape}: " + ", ".join(parts)


def profile_check(path: Sequence[str], note: str) -> tuple[str, str, str, Status]:
    """The row that says whether a Nsight Compute profile was taken: its files, or why there is none."""
    return (
        "Nsight Compute profile",
        "taken where ncu is there",
        ", ".join(path) or note,
        "PASS" if path else "PENDING",
    )
