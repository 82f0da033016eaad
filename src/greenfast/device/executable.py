"""A program that is compiled, as any device takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from greenfast.spec.kernel import Allocation, Launch, Workspace


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel: cubin, entry, block, dynamic shared memory, phase names, and PTX for the emulator.

    variables: of its module, which no launch may change. tables: such variables that its PTX shows to be only read;
    they are compared too, as far as the driver gives their addresses.
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
    """A program that is compiled: its kernels with their launches, its scratch buffers, and what it allocates."""

    steps: tuple[tuple[KernelImage, Launch], ...]
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] = ()

    @classmethod
    def single(cls, image: KernelImage, plan: Launch) -> Executable:
        """One launch of one kernel."""
        return cls(((image, plan),))

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phase counters of an instrumented build, which has one launch; else empty."""
        return self.steps[0][0].phases
