"""A program that is compiled, as any device takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from greenfast.spec.kernel import Allocation, Launch, Workspace


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
    """A compiled program: its kernels with their launches, its scratch buffers and its allocations."""

    steps: tuple[tuple[KernelImage, Launch], ...]
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] = ()

    @classmethod
    def single(cls, image: KernelImage, plan: Launch) -> Executable:
        """One launch of one kernel."""
        return cls(((image, plan),))

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phase counters of an instrumented build (with one launch); else empty."""
        return self.steps[0][0].phases
