"""Facts from the device, the compiler and the emulator, as records store them; units are in the names.

They are dataclasses, so that the operator does not need msgspec. msgspec reads and writes them like its structs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """The device that ran the kernels. ``kind`` is "gpu" or "emulated".

    memory_gb_s: bandwidth from the memory's clock and width, in 10^9 bytes a second; 0 if unknown.
    """

    kind: str
    name: str
    compute_capability: str
    cuda_version: str
    driver: str
    sm_count: int = 0
    sm_clock_mhz: int = 0
    memory_bytes: int = 0
    l2_bytes: int = 0
    memory_gb_s: float = 0.0

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor) compute capability of a GPU."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The compiler's report on one kernel.

    global_bytes: of variables that can keep state across launches
    (``device.variables.variable_bytes``). constant_bytes: of its ``__constant__`` variables, written or not.
    """

    registers: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    global_bytes: int = 0
    constant_bytes: int = 0

    @property
    def smem_bytes(self) -> int:
        """Static and dynamic shared memory per block."""
        return self.static_smem_bytes + self.dynamic_smem_bytes

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and loads."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """The facts of a launch, from ``device.identity.launch_facts``.

    dims: of the shape. arguments: in order, separated by semicolons, as "buffer 0" (numbered by first use), "int32 512"
    or a tensor map with its extents.
    """

    dims: dict[str, int]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    cluster: tuple[int, int, int]
    early: bool
    arguments: str
    cooperative: bool = False


#: Levels of findings. An error ends a run. A formal finding breaks a rule of the PTX ISA; its effect depends on the
#: timing of the hardware.
ERROR, FORMAL = "error", "formal"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding that does not end the run.

    level: FORMAL. name: the kind, in words with hyphens. text: with kernel, place and thread. location: the
    source line as file:line.
    """

    level: str
    name: str
    text: str
    location: str


@dataclass(frozen=True, kw_only=True)
class KernelCounts:
    """The counts of one launch over all blocks, from the emulator's PTX.

    instructions: per warp, by opcode. matrix_flops: of matrix instructions, a multiply-add counted as two.
    exponentials: per thread. barriers: warp arrivals. sectors: 32-byte sectors per warp access. shared_passes: passes
    over shared memory; conflicts: passes beyond the minimum for the access width. shared_bytes, bank_conflicts: of
    loads and stores, by source line.
    """

    instructions: dict[str, int]
    matrix_instructions: int
    matrix_flops: int
    exponentials: int
    barriers: int
    global_load_bytes: int
    global_store_bytes: int
    global_load_sectors: int
    global_store_sectors: int
    shared_load_bytes: int
    shared_store_bytes: int
    shared_passes: int
    shared_load_conflicts: int
    shared_store_conflicts: int
    shared_bytes: dict[str, int]
    bank_conflicts: dict[str, int]

    @property
    def warp_instructions(self) -> int:
        """All instructions executed, counted per warp."""
        return sum(self.instructions.values())

    @property
    def conflicts(self) -> int:
        """Bank conflicts of loads and stores."""
        return self.shared_load_conflicts + self.shared_store_conflicts
