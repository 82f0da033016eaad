"""The emulator as a device: a Session that runs kernels on NumPy."""

from __future__ import annotations

import importlib
import math
from typing import Any, NoReturn

from greenfast.device.session import Executable, KernelImage, RunResult, same_bits
from greenfast.emulator.grid import KernelLaunch, load_program, run_chain, run_grid
from greenfast.emulator.kernel_run import REPEAT_THREADS
from greenfast.emulator.program import Program
from greenfast.emulator.result import GridResult
from greenfast.spec.errors import MachineError, UnsupportedError, UsageError
from greenfast.spec.facts import FORMAL, DeviceInfo, KernelCounts
from greenfast.spec.problem import Case

_NO_TIME = "the emulator executes a kernel's PTX; it cannot measure time"


class EmulatorSession:
    """A Session on the emulator."""

    #: A kernel cannot end this process or hold it: endless loops and faults are found and reported.
    emulates = True

    def __init__(self, ordinal: int = 0) -> None:
        """Accept the ``ordinal`` of a GPU's session, and ignore it: there is one emulator."""

    def info(self) -> DeviceInfo:
        """Describe the emulator as a device."""
        return DeviceInfo(kind="emulated", name="PTX emulator", compute_capability="", cuda_version="", driver="")

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case. Small cases run ``repeats`` times with differently shuffled warps, and must give equal bits.

        All runs use the same memory, with the initial inputs and outputs. Large cases run again only if the first run
        changed a variable of the module.
        """
        threads = sum(math.prod(plan.grid) * math.prod(image.block) for image, plan in executable.steps)
        drawn = int(case.digest[:8], 16)  # another order for each case, the same in every process
        later = range(1 + drawn, repeats + drawn)
        first = _run(executable, case, later=later, always=threads <= REPEAT_THREADS, explore=True, keep_formal=True)
        unwritten = [(name, count, "") for name, count in first.unwritten.items()]
        unwritten += [
            (name, count, " in a later launch")
            for result in first.later
            for name, count in result.unwritten.items()
            if count != first.unwritten[name]
        ]
        violations = list(first.input_writes.values())
        violations += [
            f"{count} bytes of {name!r} were never written{when}" for name, count, when in unwritten if count
        ]
        violations += first.differences
        violations += [
            f"variable '{image.entry}: {name}' of its module was changed"
            for n, (image, _) in enumerate(executable.steps)
            for name in (*image.variables, *image.tables)
            if (n, name) in first.changed
        ]
        violations += [f"formal finding: {f.text}" for f in first.findings if f.level == FORMAL]
        repeatable = all(same_bits(first.outputs, r.outputs) for r in first.later)
        names = ", ".join(dict.fromkeys(operation.name for operation in executable.operations))
        notes = [*first.notes, *([f"computed by PyTorch on the CPU: {names}"] if names else [])]
        return RunResult(first.outputs, violations, repeatable, first.counts.record(), notes, first.findings)

    def sample(self, executable: Executable, case: Case, blocks: int) -> int:
        """Run some blocks of a launch, for their faults alone, and return how many ran.

        Raises UnsupportedError for several launches, and for blocks that may wait for others.
        """
        if len(executable.steps) != 1 or executable.steps[0][1].cooperative or executable.operations:
            raise UnsupportedError("only blocks of a single, not cooperative launch can be run separately")
        ((image, plan),) = executable.steps
        if _program(image).polling:
            raise UnsupportedError("blocks that may wait for others cannot be run separately")
        _run(executable, case, sample=blocks)
        return min(blocks, math.prod(plan.grid))

    def check_memory(self, executable: Executable, case: Case) -> RunResult:
        """Raise MachineError: the emulator checks memory in every run."""
        raise MachineError("the emulator checks each access in every run")

    def refuse_timing(self, *_: object) -> NoReturn:
        """Raise MachineError: nothing can be timed here."""
        raise MachineError(_NO_TIME)

    prepare = time = finish = phases = refuse_timing

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """Return the counts of each phase of an instrumented build.

        The phase "outside" is before the first and after the last one.

        Raises UsageError if its phases cannot be separated.
        """
        ((image, plan),) = executable.steps
        kernel = (image.ptx, image.entry, image.block, image.dynamic_smem_bytes)
        result = run_grid(*kernel, plan, case.inputs, case.outputs, phases=image.phases)
        return {name: counts.record() for name, counts in result.phases.items()}


def _program(image: KernelImage) -> Program:
    """Return the program of a kernel. Raises UnsupportedError for PTX that cannot be read or lacks the kernel."""
    try:
        return load_program(image.ptx, image.entry)[1]
    except UsageError as e:
        raise UnsupportedError(str(e)) from e


def _run(executable: Executable, case: Case, **how: Any) -> GridResult:
    for image, _ in executable.steps:
        _program(image)
    steps = [KernelLaunch(i.ptx, i.entry, i.block, i.dynamic_smem_bytes, plan) for i, plan in executable.steps]
    operations: dict[int, list[Any]] = {}
    if executable.operations:
        # only now, because it imports PyTorch
        runner = importlib.import_module("greenfast.judge.solution.tensor_operations").OperationRunner
        for operation in executable.operations:
            operations.setdefault(operation.step, []).append(runner(operation))
    return run_chain(steps, case.inputs, case.outputs, workspaces=executable.workspaces, operations=operations, **how)
