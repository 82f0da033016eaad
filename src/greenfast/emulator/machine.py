"""The state of some blocks of a grid while they run: registers, memories, faults.

Threads are laid out [warp of its block][block][lane], so that one warp of every block at once is a slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.counts import Counts
from greenfast.emulator.faults import KernelFaultError
from greenfast.emulator.memory import UNWRITTEN, Arena, BadAccessError, GlobalMemory
from greenfast.emulator.ptx import Function, Instruction

if TYPE_CHECKING:
    from greenfast.emulator.phases import PhaseCounts

#: Which threads an instruction runs for: a slice where a whole set runs together, else sorted indices.
Lanes: TypeAlias = "slice | NDArray[np.intp]"
Operation: TypeAlias = "Callable[[Machine, Lanes], None]"
Values: TypeAlias = NDArray[Any]

WARP = 32
_BITS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64, "16x2": np.uint32}


def lane_indices(lanes: Lanes) -> NDArray[np.intp]:
    """The indices of the threads of a selection."""
    return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes


def lane_count(lanes: Lanes) -> int:
    """How many threads a selection holds."""
    return int(lanes.stop - lanes.start) if isinstance(lanes, slice) else len(lanes)


@dataclass
class Copy:
    """A cp.async under way: which threads, where to, what, and the group that it belongs to, per thread."""

    lanes: NDArray[np.intp]
    offsets: NDArray[np.int64]
    values: NDArray[np.uint8]
    groups: NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """Grid and block of a launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


def unflatten(index: Any, dims: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """The (x, y, z) of a linear index, x fastest."""
    return index % dims[0], index // dims[0] % dims[1], index // (dims[0] * dims[1])


@dataclass
class Machine:
    """Some blocks of a grid.

    blocks: their linear indices. shared_layout, local_layout: offsets of variables. params: the parameters' bytes.
    counts: where what runs now is counted. phases: where it is counted by phase, in an instrumented build.
    """

    function: Function
    geometry: Geometry
    blocks: NDArray[np.int64]
    shared_layout: Mapping[str, int]
    shared_bytes: int
    local_layout: Mapping[str, int]
    local_bytes: int
    memory: GlobalMemory
    symbols: Mapping[str, int]
    params: Mapping[str, bytes]
    counts: Counts
    output: list[str] = field(default_factory=list)
    phases: PhaseCounts | None = None

    def __post_init__(self) -> None:
        self.warps = -(-self.geometry.threads // WARP)
        self.set_size = len(self.blocks) * WARP
        self.lanes = self.warps * self.set_size
        # A block's shared memory starts at a multiple of its padded size.
        self.shared_stride = max(16, -(-self.shared_bytes // 16) * 16)
        self.shared = Arena(self.shared_stride * len(self.blocks), UNWRITTEN)
        self.local_stride = -(-self.local_bytes // 16) * 16
        self.local = Arena(self.local_stride * self.lanes, UNWRITTEN)
        index = np.arange(self.lanes)
        self.block_of = index % self.set_size // WARP  # position in ``blocks``
        self.thread_of = index // self.set_size * WARP + index % WARP
        self.exists = self.thread_of < self.geometry.threads
        self.shared_start = self.block_of * self.shared_stride
        self.local_start = index * self.local_stride
        self.registers: dict[str, Values] = {}
        self.call_arguments: dict[str, Values] = {}
        self.copies: list[Copy] = []
        self.copy_groups = np.zeros(self.lanes, np.int64)
        self.executed = 0
        self.current: Instruction = self.function.code[0]
        self.specials = self._specials()

    def _specials(self) -> dict[str, Values]:
        block = self.blocks[self.block_of]
        found: dict[str, Values] = {"%laneid": np.arange(self.lanes) % WARP, "%warpid": self.thread_of // WARP}
        for name, values in (
            ("%tid", unflatten(self.thread_of, self.geometry.block)),
            ("%ctaid", unflatten(block, self.geometry.grid)),
            ("%ntid", self.geometry.block),
            ("%nctaid", self.geometry.grid),
        ):
            for axis, value in zip("xyz", values, strict=True):
                found[f"{name}.{axis}"] = np.broadcast_to(np.asarray(value), self.lanes)
        return {name: np.ascontiguousarray(values, dtype=np.uint32) for name, values in found.items()}

    def register(self, name: str) -> Values:
        """All threads' values of a register, as unsigned integers of its width (bool for a predicate)."""
        found = self.registers.get(name)
        if found is None:
            found = self.registers[name] = np.zeros(self.lanes, self.register_type(name))
        return found

    def register_type(self, name: str) -> Any:
        """The NumPy type that holds a register."""
        kinds = self.function.registers
        kind = kinds.get(name) or kinds.get(name.rstrip("0123456789"))
        if kind is None:
            raise KernelFaultError(f"{self.function.name}: register {name} is not declared")
        return np.bool_ if kind == "pred" else _BITS[kind.lstrip("busf")]

    def clock(self, instruction: Instruction, lanes: Lanes) -> Values:
        """What these threads read from a clock: executed instructions, monotonic and repeatable, and no time.

        While phases are counted, what tells them apart (see PhaseCounts).
        """
        if self.phases is None:
            return np.asarray(self.executed)
        values, self.counts = self.phases.read(instruction, lanes)
        return values

    def fault(self, reason: str, lane: int) -> KernelFaultError:
        """The fault of a thread at the current instruction."""
        return KernelFaultError(
            f"{self.function.name}: {reason} at {self.current.source or 'unknown line'}, {self.place(lane)} "
            f"(in: {self.current.text})"
        )

    def place(self, lane: int) -> str:
        """A thread by block and thread index."""
        block = unflatten(int(self.blocks[self.block_of[lane]]), self.geometry.grid)
        return f"block {block}, thread {unflatten(int(self.thread_of[lane]), self.geometry.block)}"

    @contextlib.contextmanager
    def accessing(self, lanes: Lanes, space: str) -> Iterator[None]:
        """Turn a failed memory access into the fault of its thread; ``lanes``: the threads of the access in order."""
        try:
            yield
        except BadAccessError as bad:
            raise self._access_fault(bad, lane_indices(lanes), space) from None

    def _access_fault(self, bad: BadAccessError, lanes: NDArray[np.intp], space: str) -> KernelFaultError:
        if space == "global":
            where = self.memory.describe(bad.address)
        elif space == "shared":
            where = f"byte {bad.address % self.shared_stride} of {self.shared_bytes} of shared memory"
        else:
            where = f"byte {bad.address % max(self.local_stride, 1)} of {self.local_bytes} of local memory"
        return self.fault(f"{bad.reason}: {where}", int(lanes[bad.position]))
