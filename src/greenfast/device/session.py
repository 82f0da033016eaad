"""A compiled program, and the results of running it on a device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from greenfast.spec.facts import Finding, KernelCounts
from greenfast.spec.kernel import Allocation, Launch, TensorOperation, Workspace
from greenfast.spec.problem import Array


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel: cubin, entry, block, dynamic shared memory, phase names, and PTX for the emulator.

    variables: of its module; no launch may change them. tables: read-only variables by its PTX; they are compared too
    if the driver returns their addresses.
    """

    cubin: bytes
    entry: str
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    phases: tuple[str, ...] = ()
    ptx: str = ""
    variables: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Executable:
    """A compiled program: its kernels with their launches, its scratch buffers, allocations and tensor operations."""

    steps: tuple[tuple[KernelImage, Launch], ...]
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] = ()
    operations: tuple[TensorOperation, ...] = ()

    @classmethod
    def single(cls, image: KernelImage, plan: Launch) -> Executable:
        """Return the executable of one launch of one kernel."""
        return cls(((image, plan),))

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phase counters of an instrumented build (with one launch); else empty."""
        return self.steps[0][0].phases


@dataclass(frozen=True)
class RunResult:
    """The outputs of one case, memory violations, and whether repeats agreed bit by bit.

    counts: executed instructions; None if the device does not count, as on a GPU. notes: observations that are no
    violation. findings: of the emulator; formal findings are violations too.
    """

    outputs: dict[str, Array]
    violations: list[str] = field(default_factory=list)
    repeatable: bool = True
    counts: KernelCounts | None = None
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class WrongLaunch:
    """A launch with a wrong result: its number from 1, the number of launches, the case from 0, and the fault."""

    number: int
    of: int
    case: int
    fault: str

    def __str__(self) -> str:
        return f"launch {self.number} of {self.of} {self.fault}"


@dataclass(frozen=True)
class Started:
    """The result of the launches before the timing.

    digests: of each case's first outputs. wrong: first wrong launch.
    """

    digests: list[str]
    wrong: WrongLaunch | None = None


@dataclass(frozen=True)
class Block:
    """Consecutive timed launches of one kernel: device times in microseconds, and the clocks halfway.

    wrong: the first launch with other bits than the first launch of its case.
    """

    samples_us: list[float]
    clocks: dict[str, float]
    wrong: WrongLaunch | None = None


def same_bits(a: dict[str, Array], b: dict[str, Array]) -> bool:
    """Return whether two sets of outputs are equal bit by bit (including NaN)."""
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


def output_digest(outputs: dict[str, Array]) -> str:
    """Return the SHA-256 of the bits of all outputs."""
    h = hashlib.sha256()
    for name in sorted(outputs):
        h.update(name.encode() + outputs[name].tobytes())
    return h.hexdigest()
