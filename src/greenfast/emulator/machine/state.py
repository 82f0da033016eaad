"""The state of some blocks of a grid while they run: registers, memories, faults.

Threads are laid out [warp of its block][block][lane], so that one warp of every block at once is a slice.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.access_log import GlobalRecord
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.environment import USUAL, WARPS, Surroundings
from greenfast.emulator.machine.faults import KernelFaultError, Location
from greenfast.emulator.machine.in_flight import BulkLoad, BulkStore, Products
from greenfast.emulator.machine.launch_order import LaunchOrder
from greenfast.emulator.machine.mbarriers import Mbarriers
from greenfast.emulator.machine.memory import (
    NO_ALLOCATION,
    UNWRITTEN,
    UNWRITTEN_READ,
    WRITTEN,
    Arena,
    BadAccessError,
    GlobalMemory,
    explain_pointer,
)
from greenfast.emulator.machine.ordering import Ordering
from greenfast.emulator.machine.proxies import Proxies
from greenfast.emulator.machine.races import Races
from greenfast.emulator.machine.stack import Stack
from greenfast.emulator.ptx.names import describe_element
from greenfast.emulator.ptx.syntax import Function, Instruction, Register, Vector
from greenfast.spec.errors import UnsupportedError, UsageError
from greenfast.spec.facts import FORMAL, Finding
from greenfast.spec.kernel import MAP_BYTES

if TYPE_CHECKING:
    from greenfast.emulator.machine.phases import PhaseCounts
    from greenfast.emulator.machine.redundant_loads import RedundantLoads

#: Which threads an instruction runs for: a slice where they are whole warps next to each other, else sorted indices.
ThreadSet: TypeAlias = "slice | NDArray[np.intp]"
#: What an instruction does; it returns the threads that have to stay at it until something changes, if there are any.
Operation: TypeAlias = "Callable[[ResidentBlocks, ThreadSet], NDArray[np.intp] | None]"
Values: TypeAlias = NDArray[Any]

WARP = 32
#: Addresses in the shared memory of another block of the cluster have its rank, counted from 1, above these bits.
RANK_BITS = 24
_FULL = np.uint64(0xFFFFFFFF)
_BITS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64, "16x2": np.uint32}


def lane_indices(lanes: ThreadSet) -> NDArray[np.intp]:
    """The indices of the threads of a selection."""
    return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes


def lane_count(lanes: ThreadSet) -> int:
    """How many threads a selection holds."""
    return int(lanes.stop - lanes.start) if isinstance(lanes, slice) else len(lanes)


def selection(indices: NDArray[np.intp]) -> ThreadSet:
    """Threads, by their sorted indices, as what they run for: NumPy is several times faster with a slice."""
    count = len(indices)
    if count and count % WARP == 0:
        start = int(indices[0])
        if start % WARP == 0 and int(indices[-1]) - start == count - 1:
            return slice(start, start + count)
    return indices


@dataclass
class Copy:
    """A cp.async in flight: which threads, where to, what, and the group that it belongs to, per thread.

    number: how many were issued before it.
    """

    lanes: NDArray[np.intp]
    offsets: NDArray[np.int64]
    values: NDArray[np.uint8]
    groups: NDArray[np.int64]
    number: int
    instruction: Instruction


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
        """The linear indices of all blocks, a cluster's next to each other, by their rank in it."""
        index = np.arange(self.blocks)
        if self.cluster_size == 1:
            return index
        at = unflatten(index, self.grid)
        clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))
        which = [x // c for x, c in zip(at, self.cluster, strict=True)]
        within = [x % c for x, c in zip(at, self.cluster, strict=True)]
        number = which[0] + clusters[0] * (which[1] + clusters[1] * which[2])
        rank = within[0] + self.cluster[0] * (within[1] + self.cluster[1] * within[2])
        return np.lexsort((rank, number))


def unflatten(index: Any, dims: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """The (x, y, z) of a linear index, x fastest."""
    return index % dims[0], index // dims[0] % dims[1], index // (dims[0] * dims[1])


@dataclass
class ResidentBlocks:
    """Some blocks of a grid.

    blocks: their linear indices. shared_layout, local_layout: offsets of variables. dynamic_bytes: shared memory that
    the launch asks for, among shared_bytes. params: each parameter's bytes.
    workspace: address of what cooperative groups synchronize a grid with, 0 for none. record: the accesses to global
    memory of all blocks of the grid. launches: the chain that this one belongs to. synchronizes: whether threads may do
    so through memory.
    counts: where what runs now is counted. phases: where it is counted by phase, in an instrumented build.
    compared: which threads have had the result that ``surroundings`` force.
    findings: by kind and place, those that do not end the run; None to end it at the first formal one.
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
    dynamic_bytes: int = 0
    workspace: int = 0
    record: GlobalRecord | None = None
    launches: LaunchOrder | None = None
    synchronizes: bool = False
    seed: int = 0
    surroundings: Surroundings = USUAL
    compared: NDArray[np.bool_] | None = None
    shared_sizes: Mapping[str, int] = field(default_factory=dict)
    findings: dict[tuple[str, str], Finding] | None = None

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
        self.copies: list[Copy] = []
        self.copies_issued = 0
        self.copy_groups = np.zeros(self.lanes, np.int64)
        self.mbarriers = Mbarriers(len(self.shared.data) // 8)
        #: Which mbarrier (8-byte word of shared memory) a thread that waits for one waits for.
        self.awaited = np.full(self.lanes, -1, np.int64)
        #: Threads that do not run any more, or that never were.
        self.ended = ~self.exists
        self.cluster_arrivals = np.zeros(self.lanes, np.int64)
        self.cluster_waits = np.zeros(self.lanes, np.int64)
        #: Threads whose last arrival at the cluster barrier was relaxed: it orders nothing.
        self.cluster_relaxed = np.zeros(self.lanes, np.bool_)
        #: Of each cluster, how often its threads have met, and the last access before that.
        self.cluster_phases, self.cluster_met_at = np.zeros(
            (2, -(-len(self.blocks) // self.geometry.cluster_size)), np.int64
        )
        #: Blocks that know that the others of their cluster have begun.
        self.cluster_met = np.zeros(len(self.blocks), np.bool_)
        self.bulk_groups = np.zeros(self.lanes, np.int64)
        self.stores: list[BulkStore] = []
        #: Bulk copies that the scheduler has yet to deliver.
        self.arriving: list[BulkLoad] = []
        #: Threads at a wait for a group that have let others go first.
        self.yielded = np.zeros(self.lanes, np.bool_)
        products = [i for i in self.function.code if i.name == "wgmma" and i.parts[0] == "mma_async"]
        fragments = [o for i in products for o in i.operands[:2] if isinstance(o, Vector)]
        registers = {r.name for o in fragments for r in o.items if isinstance(r, Register)}
        self.products = Products(self.lanes, registers) if products else None
        #: Counts what may let a waiting thread go on.
        self.events = 0
        #: Threads whose next wait, if it may, gives up, as nothing else can go on.
        self.impatient = np.zeros(self.lanes, np.bool_)
        self.random = random.Random(0)
        self.stack = Stack(self.lanes)
        self._lay_parameters()
        record = self.record or GlobalRecord(self.memory, frozenset())
        asynchronous = bool(products) or any(i.name == "cp" and "bulk" in i.parts for i in self.function.code)
        proxies = asynchronous and self.geometry.cluster_size == 1
        size = self.geometry.cluster_size
        self.races = Races(self, record, Ordering(len(self.blocks), self.warps, self.synchronizes, proxies, size))
        self.proxies = Proxies(self) if asynchronous else None
        if self.proxies is not None:
            self.shared.watch_asynchronous_reads()
            self.shared.on_generic = self.proxies.touched
        self.shared.on_read, self.shared.on_write = self.races.shared_read, self.races.shared_write
        self.memory.on_read, self.memory.on_write = self.races.global_read, self.races.global_write
        #: Which threads are past a griddepcontrol.wait, theirs or of a thread that they have waited for since.
        self.behind_wait = np.zeros(self.lanes, np.bool_)
        #: Loads of which only one thread of a block may use what it gets; None for no such question.
        self.spare: RedundantLoads | None = None
        self.executed = 0
        self.current: Instruction = self.function.code[0]
        self.specials = self._specials()

    def forget(self) -> None:
        """Let go of everything, once nothing runs on it: its parts refer to it, and its registers take much memory."""
        vars(self.races).clear()
        vars(self).clear()

    def _lay_parameters(self) -> None:
        """Give the parameters addresses, at which a tensor map may be."""
        self.param_layout: dict[str, int] = {}
        end = 0
        for name, data in self.params.items():
            self.param_layout[name] = -(-end // MAP_BYTES) * MAP_BYTES
            end = self.param_layout[name] + len(data)
        self.param_memory = Arena(end, UNWRITTEN)
        for name, data in self.params.items():
            start = self.param_layout[name]
            self.param_memory.data[start : start + len(data)] = np.frombuffer(data, np.uint8)
            self.param_memory.state[start : start + len(data)] = WRITTEN

    def shared_of(self, found: NDArray[np.int64], lanes: ThreadSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Addresses in shared memory as offsets in a block's, and where that block's begins in the arena.

        An address that mapa made names the block of the cluster in its bits from RANK_BITS on, counted from 1.
        """
        named = found >> RANK_BITS
        if self.geometry.cluster_size == 1 or not (named > 0).any():
            return found, self.shared_start[lanes]
        indices, size = lane_indices(lanes), self.geometry.cluster_size
        own = self.block_of[indices]
        target = np.where(named > 0, own // size * size + named - 1, own)
        for at in np.flatnonzero(named > size):
            raise self.fault(f"an address in block {named[at] - 1} of a cluster of {size} blocks", int(indices[at]))
        running = np.zeros(len(self.blocks), np.bool_)
        running[self.block_of[np.flatnonzero(~self.ended)]] = True
        for at in np.flatnonzero(~running[target]):
            gone = unflatten(int(self.blocks[target[at]]), self.geometry.grid)
            raise self.fault(f"access to the shared memory of block {gone}, which has ended", int(indices[at]))
        for at in np.flatnonzero((target != own) & ~self.cluster_met[own]):
            new = unflatten(int(self.blocks[target[at]]), self.geometry.grid)
            why = "which may not have begun: no barrier.cluster.wait before it"
            raise self.fault(f"access to the shared memory of block {new}, {why}", int(indices[at]))
        return np.where(named > 0, found & ((1 << RANK_BITS) - 1), found), target * self.shared_stride

    @property
    def changes(self) -> int:
        """Grows whenever a waiting thread may find that it can go on."""
        return self.events + self.mbarriers.changes

    def _specials(self) -> dict[str, Values]:
        block = self.blocks[self.block_of]
        # What tells the warps of a block apart is their place on a multiprocessor, which it may share with others.
        slot = (self.thread_of // WARP + 3 + self.warps * block) % WARPS
        found: dict[str, Values] = {"%laneid": np.arange(self.lanes) % WARP}
        lane = np.arange(self.lanes, dtype=np.uint64) % np.uint64(WARP)
        below, own = (np.uint64(1) << lane) - np.uint64(1), np.uint64(1) << lane
        found |= {"%lanemask_eq": own, "%lanemask_lt": below, "%lanemask_le": below | own}
        found |= {
            "%lanemask_ge": ~below & np.uint64(0xFFFFFFFF),
            "%lanemask_gt": ~(below | own) & np.uint64(0xFFFFFFFF),
        }
        cluster, size = self.geometry.cluster, self.geometry.cluster_size
        found |= {"%cluster_ctarank": self.block_of % size, "%cluster_nctarank": np.full(self.lanes, size)}
        around = self.surroundings
        found["%warpid"] = around.warp_slot_of(slot)
        found |= {"%smid": around.multiprocessor_of(block), "%nsmid": np.full(self.lanes, around.multiprocessors)}
        place = unflatten(block, self.geometry.grid)
        for name, value in (
            ("%nwarpid", WARPS),
            ("%gridid", around.grid + self.seed),
            ("%is_explicit_cluster", int(size > 1)),
            ("%dynamic_smem_size", self.dynamic_bytes),
            ("%total_smem_size", self.shared_bytes),
            ("%aggr_smem_size", self.shared_bytes),
            ("%clock_hi", around.ticks.get("%clock_hi", (0, 0))[0]),
            ("%globaltimer_hi", around.ticks.get("%globaltimer_hi", (0, 0))[0]),
        ):
            found[name] = np.full(self.lanes, value)
        found["%envreg1"], found["%envreg2"] = (
            np.full(self.lanes, self.workspace >> shift & 0xFFFFFFFF) for shift in (32, 0)
        )
        for name, values in (
            ("%tid", unflatten(self.thread_of, self.geometry.block)),
            ("%ctaid", unflatten(block, self.geometry.grid)),
            ("%ntid", self.geometry.block),
            ("%nctaid", self.geometry.grid),
            ("%clusterid", tuple(at // c for at, c in zip(place, cluster, strict=True))),
            ("%nclusterid", tuple(n // c for n, c in zip(self.geometry.grid, cluster, strict=True))),
            ("%cluster_ctaid", tuple(at % c for at, c in zip(place, cluster, strict=True))),
            ("%cluster_nctaid", cluster),
        ):
            for axis, value in zip("xyz", values, strict=True):
                found[f"{name}.{axis}"] = np.broadcast_to(np.asarray(value), self.lanes)
        return {name: np.ascontiguousarray(values, dtype=np.uint32) for name, values in found.items()}

    def register(self, name: str) -> Values:
        """All threads' values of a register, as unsigned integers of its width (bool for a predicate).

        One that nothing has set holds -1, which is NaN too, as a zero would make an unset sum right.
        """
        found = self.registers.get(name)
        if found is None:
            kind = self.register_type(name)
            unset = not self.seed if kind is np.bool_ else np.iinfo(kind).max
            found = self.registers[name] = np.full(self.lanes, unset, kind)
        return found

    def register_type(self, name: str) -> Any:
        """The NumPy type that holds a register."""
        kind = self.function.register_kind(name)
        if kind is None:
            raise UsageError(f"PTX: the register {name} is not declared in {self.function.name}")
        return np.bool_ if kind == "pred" else _BITS[kind.lstrip("busf")]

    def clock(self, register: str, instruction: Instruction, lanes: ThreadSet) -> Values:
        """What these threads read from a clock: executed instructions, monotonic and repeatable, and no time.

        While phases are counted, what tells them apart (see PhaseCounts).
        """
        if self.phases is None:
            return np.asarray(self.surroundings.clock(register, self.executed))
        values, self.counts = self.phases.read(instruction, lanes)
        return values

    def fault(self, reason: str, lane: int, place: str = "") -> KernelFaultError:
        """Return the fault of a thread at the current instruction; place: the memory of an access."""
        i = self.current
        text = f"{self.function.name}: {reason} at {i.place}, {self.place(lane)} (in: {i.text})"
        fault = KernelFaultError(text)
        block = unflatten(int(self.blocks[self.block_of[lane]]), self.geometry.grid)
        thread = unflatten(int(self.thread_of[lane]), self.geometry.block)
        fault.kernel, fault.reason = self.function.name, reason
        fault.location = Location(i.source, i.text, block, thread, place)
        return fault

    def limit(self, reason: str, lane: int) -> UnsupportedError:
        """Return the error for what the emulator cannot run, at the current instruction of a thread."""
        return UnsupportedError(str(self.fault(reason, lane)))

    def report_formal(self, name: str, reason: str, lane: int) -> None:
        """Keep a formal finding of a thread. Raises KernelFaultError if these end the run."""
        fault = self.fault(reason, lane)
        fault.level = FORMAL
        if self.findings is None:
            raise fault
        where = str(self.current.source or "unknown line")
        self.findings.setdefault((name, where), Finding(level=FORMAL, name=name, text=str(fault), location=where))

    def block_name(self, block: int) -> str:
        """A block of the grid by its index."""
        return f"block {unflatten(block, self.geometry.grid)}"

    def place(self, lane: int) -> str:
        """A thread by block and thread index."""
        block = self.block_name(int(self.blocks[self.block_of[lane]]))
        return f"{block}, thread {unflatten(int(self.thread_of[lane]), self.geometry.block)}"

    def shared_place(self, offset: int, of: str = "") -> str:
        """A byte of shared memory, by its offset in the block's, and by the variable that it belongs to."""
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
        self.races.accessing = lanes
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
            where = self.shared_place(bad.address, f"of {self.shared_bytes} ")
        else:
            where = f"byte {bad.address % max(self.local_stride, 1)} of {self.local_bytes} of local memory"
        reason, pointer = bad.reason, ""
        if where == NO_ALLOCATION:
            reason = re.sub("^misaligned (.*)", r"\1 out of bounds", reason)  # alignment is not why it failed
            pointer = explain_pointer(bad.address + self.memory.base)
        fault = self.fault(f"{reason}: {where}{pointer}", int(lanes[bad.position]), where)
        fault.unwritten = space in ("shared", "local", "global") and bad.reason.endswith(UNWRITTEN_READ)
        return fault
