"""A session on a GPU: run kernels on cases, check them, time them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenfast.device.gpu import Gpu
from greenfast.device.helper_kernels import Instruments
from greenfast.device.memory_check import check_memory
from greenfast.device.rotating_buffers import Rotation
from greenfast.device.session import Block, Executable, RunResult, Started, output_digest, same_bits
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import DeviceInfo, KernelCounts
from greenfast.spec.kernel import PHASE_BUFFER
from greenfast.spec.problem import Case


class GpuSession:
    """Kernels on one GPU. Every method can be called through a Worker. ``EmulatorSession`` has the same methods."""

    def __init__(self, ordinal: int) -> None:
        self._start(Gpu(ordinal))

    def _start(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._instruments: Instruments | None = None
        self._timed: dict[str, Rotation] = {}

    def info(self) -> DeviceInfo:
        """Describe the device."""
        return self._gpu.info()

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case ``repeats`` times, each in separate memory, and compare the outputs bit by bit."""
        # Allocate all before freeing any, or the second would get the first one's addresses.
        bounds = [self._gpu.bind(executable, case) for _ in range(repeats)]
        results = [bound.run() for bound in bounds]
        violations = list(dict.fromkeys(v for bound in bounds for v in bound.violations()))
        for bound in bounds:
            bound.free()
        return RunResult(results[0], violations, all(same_bits(results[0], other) for other in results[1:]))

    def check_memory(self, executable: Executable, case: Case) -> RunResult:
        """Run a case between unmapped pages and with different uninitialized memory."""
        return check_memory(self._gpu, self._own_kernels(), executable, case)

    def _own_kernels(self) -> Instruments:
        """Return the judge's own kernels, loaded at the first call."""
        if self._instruments is None:
            self._instruments = Instruments(self._gpu)
        return self._instruments

    def prepare(self, key: str, executable: Executable, cases: Sequence[Case], warmup: int, seed: int) -> Started:
        """Bind cases under a key for timing, launch each, and warm up. seed: as in ``time``."""
        self._timed[key] = rotation = Rotation(self._gpu, self._own_kernels(), executable, cases)
        digests = [output_digest(outputs) for outputs in rotation.outputs]
        return Started(digests, rotation.wrong or rotation.time(warmup, 0, cold=False, seed=seed)[2])

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        """Time one block of launches, each with one of the key's cases. seed: of all random draws."""
        return Block(*self._timed[key].time(warmup, iters, cold=cold, seed=seed))

    def finish(self, key: str) -> None:
        """Free the memory of a bound program."""
        self._timed.pop(key).free()

    def phases(self, executable: Executable, case: Case, repeats: int) -> dict[str, float]:
        """Return the mean SM cycles per block and phase of an instrumented build, after one run to warm up."""
        bound = self._gpu.bind(executable, case)
        bound.run()
        cycles = np.mean([bound.run()[PHASE_BUFFER].mean(axis=0) for _ in range(repeats)], axis=0)
        bound.free()
        return dict(zip(executable.phases, map(float, cycles), strict=True))

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """Raise MachineError: a GPU counts cycles per phase, not instructions."""
        raise MachineError("instructions are counted by phase in the emulator only")
