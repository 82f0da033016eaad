"""The blocks that run together: their threads, memory, position in the grid, and faults.

Threads are ordered [warp of its block][block][lane], so that one warp index over all blocks is a slice.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.faults import KernelFaultError, Location
from greenfast.emulator.machine.in_flight import Products
from greenfast.emulator.machine.launch_order import LaunchOrder
from greenfast.emulator.machine.mbarriers import Mbarriers
from greenfast.emulator.machine.memory import (
    NO_ALLOCATION,
    UNWRITTEN,
    UNWRITTEN_READ,
    Arena,
    BadAccessError,
    GlobalMemory,
    explain_pointer,
)
from greenfast.emulator.ptx.names import describe_element
from greenfast.emulator.ptx.syntax import Function, Instruction, Register, Vector
from greenfast.emulator.ptx.unsupported import LimitError
from greenfast.spec.facts import FORMAL, Finding

WARP = 32
#: The threads that execute an instruction: a slice if they are adjacent whole warps, else sorted indices.
ThreadSet: TypeAlias = "slice | NDArray[np.intp]"
Values: TypeAlias = NDArray[Any]


def lane_indices(lanes: ThreadSet) -> NDArray[np.intp]:
    """Return the indices of the threads of a selection."""
    return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes


def are_whole_warps(lanes: ThreadSet) -> bool:
    """Return whether these are all threads of some warps, for a number of threads that could be."""
    return isinstance(lanes, slice) or bool((lanes[WARP - 1 :: WARP] - lanes[::WARP] == WARP - 1).all())


def lane_count(lanes: ThreadSet) -> int:
    """Return how many threads a selection holds."""
    return int(lanes.stop - lanes.start) if isinstance(lanes, slice) else len(lanes)


def selection(indices: NDArray[np.intp]) -> ThreadSet:
    """Convert sorted thread indices to a slice if they are adjacent whole warps.

    NumPy is several times faster with a slice.
    """
    count = len(indices)
    if count and count % WARP == 0:
        start = int(indices[0])
        if start % WARP == 0 and int(indices[-1]) - start == count - 1:
            return slice(start, start + count)
    return indices


def distinct(values: Values) -> list[int]:
    """Return the distinct values in their order; most often there is one."""
    if len(values) and (values == values[0]).all():
        return [int(values[0])]
    result: list[int] = np.unique(values).tolist()
    return result


@dataclass(frozen=True)
class Geometry:
    """Grid and block of a launch, and the cluster: how many blocks share their shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def order(self) -> NDArray[np.int64]:
        """Return the linear indices of all blocks, a cluster's next to each other, by their rank in it."""
        index = np.arange(self.blocks)
        if self.cluster_size == 1:
            return index
        position = unflatten(index, self.grid)
        clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))
        which = [x // c for x, c in zip(position, self.cluster, strict=True)]
        within = [x % c for x, c in zip(position, self.cluster, strict=True)]
        number = which[0] + clusters[0] * (which[1] + clusters[1] * which[2])
        rank = within[0] + self.cluster[0] * (within[1] + self.cluster[1] * within[2])
        return np.lexsort((rank, number))


def unflatten(index: Any, dims: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """Return the (x, y, z) of a linear index, x fastest."""
    return index % dims[0], index // dims[0] % dims[1], index // (dims[0] * dims[1])


@dataclass(kw_only=True)
class BlockState:
    """The state that access checks share: threads, memory and position of the resident blocks.

    blocks: their linear indices in the grid. shared_layout, local_layout: offsets of variables. launches: the chain of
    launches. findings: by kind and source line, the findings that do not end the run; None: raise the first one.
    races_found: by source line, data races, after which the run goes on; None: raise the first one.
    """

    function: Function
    geometry: Geometry
    blocks: NDArray[np.int64]
    shared_layout: Mapping[str, int]
    shared_bytes: int
    local_layout: Mapping[str, int]
    local_bytes: int
    memory: GlobalMemory
    launches: LaunchOrder | None = None
    shared_sizes: Mapping[str, int] = field(default_factory=dict)
    findings: dict[tuple[str, str], Finding] | None = None
    races_found: dict[str, KernelFaultError] | None = None

    def __post_init__(self) -> None:
        self.warps = -(-self.geometry.threads // WARP)
        self.threads_per_warp_slot = len(self.blocks) * WARP
        self.lanes = self.warps * self.threads_per_warp_slot
        # A block's shared memory starts at a multiple of its padded size.
        self.shared_stride = max(16, -(-self.shared_bytes // 16) * 16)
        self.shared = Arena(self.shared_stride * len(self.blocks), UNWRITTEN)
        self.local_stride = -(-self.local_bytes // 16) * 16
        self.local = Arena(self.local_stride * self.lanes, UNWRITTEN)
        index = np.arange(self.lanes)
        self.block_of = index % self.threads_per_warp_slot // WARP  # position in ``blocks``
        self.thread_of = index // self.threads_per_warp_slot * WARP + index % WARP
        self.exists = self.thread_of < self.geometry.threads
        self.shared_start = self.block_of * self.shared_stride
        self.local_start = index * self.local_stride
        self.mbarriers = Mbarriers(len(self.shared.data) // 8)
        #: Threads that have ended or do not exist.
        self.ended = ~self.exists
        products = [i for i in self.function.code if i.name == "wgmma" and i.parts[0] == "mma_async"]
        fragments = [o for i in products for o in i.operands[:2] if isinstance(o, Vector)]
        registers = {r.name for o in fragments for r in o.items if isinstance(r, Register)}
        self.products = Products(self.lanes, registers) if products else None
        #: Threads that are past a griddepcontrol.wait, or that have synchronized with such a thread since.
        self.after_pdl_wait = np.zeros(self.lanes, np.bool_)
        self.current: Instruction = self.function.code[0]
        #: The threads of the current access to memory, in the order of its elements.
        self.access_lanes: ThreadSet = slice(0, 0)

    def fault(self, reason: str, lane: int, location: str = "") -> KernelFaultError:
        """Return the fault of a thread at the current instruction; place: the memory of an access."""
        i = self.current
        text = f"{self.function.name}: {reason} at {i.place}, {self.describe_thread(lane)} (in: {i.short_text})"
        fault = KernelFaultError(text)
        block = unflatten(int(self.blocks[self.block_of[lane]]), self.geometry.grid)
        thread = unflatten(int(self.thread_of[lane]), self.geometry.block)
        fault.kernel, fault.reason = self.function.name, reason
        fault.location = Location(i.source, i.text, block, thread, location)
        return fault

    def limit(self, reason: str, lane: int) -> LimitError:
        """Return the error for an emulator limit, at the current instruction of a thread."""
        return LimitError(str(self.fault(reason, lane)))

    def report_formal(self, name: str, reason: str, lane: int) -> None:
        """Keep a formal finding of a thread. Raises KernelFaultError if formal findings end the run."""
        fault = self.fault(reason, lane)
        fault.level = FORMAL
        if self.findings is None:
            raise fault
        where = str(self.current.source or "unknown line")
        self.findings.setdefault((name, where), Finding(level=FORMAL, name=name, text=str(fault), location=where))

    def report_race(self, fault: KernelFaultError) -> None:
        """Keep a data race. Raises it if races end the run."""
        if self.races_found is None:
            raise fault
        self.races_found.setdefault(str(self.current.source or "unknown line"), fault)

    def block_name(self, block: int) -> str:
        """Return a block of the grid by its index."""
        return f"block {unflatten(block, self.geometry.grid)}"

    def describe_thread(self, lane: int) -> str:
        """Return a thread by block and thread index."""
        block = self.block_name(int(self.blocks[self.block_of[lane]]))
        return f"{block}, thread {unflatten(int(self.thread_of[lane]), self.geometry.block)}"

    def describe_shared(self, offset: int, of: str = "") -> str:
        """Describe a byte of shared memory by its offset in the block's memory and by its variable."""
        own = offset % self.shared_stride
        text = f"byte {own} {of}of shared memory"
        below = [(start, name) for name, start in self.shared_layout.items() if start <= own]
        if not below:
            return text
        start, name = max(below)
        size = self.shared_sizes.get(name, 0)
        return f"{text} ({describe_element(name, own - start, size, self.function.shapes)})"

    @contextlib.contextmanager
    def accessing(self, lanes: ThreadSet, space: str) -> Iterator[None]:
        """Turn a failed memory access into the fault of its thread; ``lanes``: the threads of the access in order."""
        self.access_lanes = lanes
        try:
            yield
        except BadAccessError as bad:
            raise self._access_fault(bad, lane_indices(lanes), space) from None

    def _access_fault(self, bad: BadAccessError, lanes: NDArray[np.intp], space: str) -> KernelFaultError:
        if space in ("global", "const"):
            where = self.memory.describe(bad.address)
        elif space == "param":
            where = f"byte {bad.address} of the kernel's parameters"
        elif space == "shared":
            where = self.describe_shared(bad.address, f"of {self.shared_bytes} ")
        else:
            where = f"byte {bad.address % max(self.local_stride, 1)} of {self.local_bytes} of local memory"
        reason, pointer = bad.reason, ""
        if where == NO_ALLOCATION:
            reason = re.sub("^misaligned (.*)", r"\1 out of bounds", reason)  # alignment is not the cause
            pointer = explain_pointer(bad.address + self.memory.base)
        fault = self.fault(f"{reason}: {where}{pointer}", int(lanes[bad.position]), where)
        fault.unwritten = space in ("shared", "local", "global") and bad.reason.endswith(UNWRITTEN_READ)
        return fault
