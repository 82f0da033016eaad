"""The emulator as a device: a Session whose kernels run on NumPy."""

from __future__ import annotations

import math

from greenfast.device.gpu import Executable
from greenfast.device.session import Block, RunResult, same_bits
from greenfast.emulator.grid import GridResult, Step, run_chain, run_grid
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import DeviceInfo, KernelCounts
from greenfast.spec.problem import Case

#: Up to this many threads a case is run once per repeat, each in another order of warps; larger ones once, for time.
REPEAT_THREADS = 4096

_NO_TIME = "the emulator executes a kernel's PTX; it says nothing about time"


class EmulatorSession:
    """A Session on the emulator."""

    #: A kernel cannot end this process or hold it: endless loops and faults are found and reported.
    emulates = True

    def __init__(self, ordinal: int = 0) -> None:
        """Take a number as a GPU's session does; there is one emulator."""

    def info(self) -> DeviceInfo:
        """The emulator as a device."""
        return DeviceInfo(
            kind="emulated",
            name="PTX emulator",
            compute_capability="",
            cuda_version="",
            driver="",
        )

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case; small ones ``repeats`` times with differently shuffled warps, whose bits must agree."""
        threads = sum(math.prod(plan.grid) * math.prod(image.block) for image, plan in executable.steps)
        orders = range(repeats if threads <= REPEAT_THREADS else 1)
        results = [_run(executable, case, seed) for seed in orders]
        first = results[0]
        violations = list(first.input_writes.values())
        violations += [
            f"{count} bytes of {name!r} were never written" for name, count in first.unwritten.items() if count
        ]
        repeatable = all(same_bits(first.outputs, r.outputs) for r in results[1:])
        return RunResult(first.outputs, violations, repeatable, first.counts.record())

    def prepare(self, key: str, executable: Executable, case: Case, warmup: int) -> None:
        """Refuse: nothing can be timed here."""
        raise MachineError(_NO_TIME)

    def time(self, key: str, warmup: int, iters: int, cold: bool) -> Block:
        """Refuse: nothing can be timed here."""
        raise MachineError(_NO_TIME)

    def finish(self, key: str) -> RunResult:
        """Refuse: nothing can be timed here."""
        raise MachineError(_NO_TIME)

    def phases(self, executable: Executable, case: Case, repeats: int) -> dict[str, float]:
        """Refuse: nothing can be timed here."""
        raise MachineError(_NO_TIME)

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """What each phase of an instrumented build executes; "outside": what lies before the first and after the last.

        Raises UsageError where its phases cannot be told apart.
        """
        ((image, plan),) = executable.steps
        result = run_grid(
            image.ptx,
            image.entry,
            image.block,
            image.dynamic_smem_bytes,
            plan,
            case.inputs,
            case.outputs,
            phases=image.phases,
        )
        return {name: counts.record() for name, counts in result.phases.items()}


def _run(executable: Executable, case: Case, seed: int) -> GridResult:
    steps = [Step(i.ptx, i.entry, i.block, i.dynamic_smem_bytes, plan) for i, plan in executable.steps]
    return run_chain(steps, case.inputs, case.outputs, workspaces=executable.workspaces, seed=seed)
