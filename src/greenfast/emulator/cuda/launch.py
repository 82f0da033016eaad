"""Launch a kernel of a running program in its device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from greenfast.emulator.cuda.memory import DeviceMemory
from greenfast.emulator.grid import WORKSPACE, Chain, KernelLaunch
from greenfast.emulator.kernel_run import Fault, convert_error, convert_finding
from greenfast.emulator.machine.access_log import RestartWithReadTracking
from greenfast.emulator.machine.epochs import RestartCompiled, RestartWarpByWarp
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import UNWRITTEN, Bytes
from greenfast.emulator.machine.observed import NOTHING, Observe
from greenfast.emulator.machine.redundant_loads import RedundantLoads
from greenfast.emulator.observer import Observer, add_launch
from greenfast.emulator.ptx.unsupported import InternalError
from greenfast.emulator.rerun import UninitFill, accept_benign_race, rerun_with_fills
from greenfast.emulator.result import GridResult
from greenfast.spec.errors import GreenfastError

#: Kinds of faults -> the error of CUDA's runtime that a GPU would give; others: cudaErrorLaunchFailure.
_ERRORS = {"out-of-bounds": 700, "misaligned-access": 716, "deadlock": 702, "endless-loop": 702, "unsupported": 801}
_LAUNCH_FAILURE, _ASSERT = 719, 710


@dataclass(frozen=True)
class LaunchOutcome:
    """The faults and the output of a launch. error: its code in CUDA's runtime, 0 if the launch ran to its end."""

    faults: list[Fault]
    printed: str
    error: int


class ProgramLauncher:
    """Runs the launches of a program in its device memory.

    seed: of the order of the warps. orders: in how many orders each launch runs. observe: what to observe in the first
    order of each launch; ``observer`` collects it over all launches.
    """

    def __init__(self, memory: DeviceMemory, seed: int, orders: int, observe: Observe = NOTHING) -> None:
        self.memory, self.seed, self.orders = memory, seed, orders
        self.observer = Observer(observe) if observe else None

    def launch(self, step: KernelLaunch, symbols: dict[str, int]) -> LaunchOutcome:
        """Run a launch. A data race or a read of uninitialised memory is reported, and the launch runs to its end."""
        memory = self.memory
        saved = memory.save()
        try:
            result = self._run_checked(step, symbols, saved)
        except KernelFaultError as e:
            first = convert_error(e)
            if first.kind not in ("data-race", "uninitialized-read"):
                add_launch(self.observer, e.observer)
                return LaunchOutcome([first], e.printed, _get_error_code(first))
            return self._go_on(step, symbols, saved, first)
        except GreenfastError as e:
            memory.restore(saved)
            return LaunchOutcome([convert_error(e)], "", 801)
        add_launch(self.observer, result.observer)
        faults = [convert_finding(f) for f in result.findings]
        if self.orders > 1:
            faults += self._compare_orders(step, symbols, saved)
        return LaunchOutcome(faults, result.printed, 0)

    def _go_on(
        self, step: KernelLaunch, symbols: dict[str, int], saved: list[tuple[slice, Bytes, Bytes]], first: Fault
    ) -> LaunchOutcome:
        """Run a launch again to its end, as a GPU would after such a finding, and collect all data races."""
        races: dict[str, KernelFaultError] = {}
        faults = [first]
        try:
            result = self._run(step, symbols, saved, UninitFill(0), self.seed, races)
        except GreenfastError as e:
            self.memory.poisoned = False
            add_launch(self.observer, getattr(e, "observer", None))
            last = convert_error(e)
            return LaunchOutcome([first, last], getattr(e, "printed", ""), _get_error_code(last))
        add_launch(self.observer, result.observer)
        faults += [fault for race in races.values() if (fault := convert_error(race)).line != first.line]
        self._keep_unwritten(saved)
        return LaunchOutcome([*faults, *(convert_finding(f) for f in result.findings)], result.printed, 0)

    def _keep_unwritten(self, saved: list[tuple[slice, Bytes, Bytes]]) -> None:
        """Restore bytes that nothing has written to their contents before the launch."""
        self.memory.poisoned = False
        for span, data, _ in saved:
            unwritten = self.memory.state[span] == UNWRITTEN
            self.memory.data[span][unwritten] = data[unwritten]

    def _run_checked(
        self, step: KernelLaunch, symbols: dict[str, int], saved: list[tuple[slice, Bytes, Bytes]]
    ) -> GridResult:
        """Run a launch. Accept reads of uninitialised memory and races that cannot change its results."""
        after: list[list[tuple[slice, Bytes, Bytes]]] = []

        def rerun(fill: UninitFill | RedundantLoads) -> GridResult:
            result = self._run(step, symbols, saved, fill, self.seed)
            result.outputs = self.memory.contents()
            if isinstance(fill, UninitFill):
                fill.memory = self.memory.data.copy()
            self._keep_unwritten(saved)
            after[:] = [self.memory.save()]
            return result

        try:
            return self._run(step, symbols, saved, None, self.seed)
        except KernelFaultError as fault:
            result = rerun_with_fills(rerun) if fault.unwritten else accept_benign_race(rerun, fault)
            if result is None:
                raise
            self.memory.restore(after[0])
            return result

    def _run(
        self,
        step: KernelLaunch,
        symbols: dict[str, int],
        saved: list[tuple[slice, Bytes, Bytes]],
        fill: UninitFill | RedundantLoads | None,
        seed: int,
        races: dict[str, KernelFaultError] | None = None,
    ) -> GridResult:
        """Run a launch from the saved contents of memory. Raises KernelFaultError and UnsupportedError."""
        clean = fill is None and seed == self.seed
        while True:
            if not clean:
                self.memory.restore(saved)
            clean = False
            self.memory.get_bytes(WORKSPACE)[:] = 0
            launch = Chain([step], self.memory, [symbols], fill, races_found=races)
            try:
                observer = Observer(self.observer.observe) if self.observer is not None else None
                return launch.run(seed, {}, 0, (), observer)
            except (RestartWithReadTracking, RestartCompiled, RestartWarpByWarp) as restart:
                launch.running.prepare_restart(restart)
            except GreenfastError:
                raise
            except Exception as e:
                raise InternalError(step.entry, e) from e

    def _compare_orders(
        self, step: KernelLaunch, symbols: dict[str, int], saved: list[tuple[slice, Bytes, Bytes]]
    ) -> Sequence[Fault]:
        """Run a launch in further orders of the warps. Return the allocations that differ, and further faults."""
        expected, first = self.memory.save(), self.memory.contents()
        differing: dict[str, Fault] = {}
        try:
            for n in range(1, self.orders):
                self._run(step, symbols, saved, None, self.seed + n)
                for name, content in self.memory.contents().items():
                    if not np.array_equal(content, first[name]):
                        text = f"{step.entry}: {name!r} differs between orders of the warps"
                        differing[name] = Fault(level="error", kind="depends-on-order", message=text)
        except GreenfastError as e:
            return [convert_error(e)]
        finally:
            self.memory.restore(expected)
        return list(differing.values())


def _get_error_code(fault: Fault) -> int:
    if fault.kind == "trap" and "assert" in fault.message:
        return _ASSERT
    return _ERRORS.get(fault.kind, _LAUNCH_FAILURE)
