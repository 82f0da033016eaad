"""The state of some blocks of a grid while they run: registers, memories, faults.

Threads are laid out [warp of its block][block][lane], so that one warp of every block at once is a slice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.access_log import GlobalRecord
from greenfast.emulator.machine.blocks import WARP, BlockState, ThreadSet, Values, lane_indices, unflatten
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.environment import USUAL, WARPS, Surroundings
from greenfast.emulator.machine.epochs import EpochRaces
from greenfast.emulator.machine.in_flight import BulkLoad, BulkStore
from greenfast.emulator.machine.memory import UNWRITTEN, WRITTEN, Arena
from greenfast.emulator.machine.ordering import Ordering
from greenfast.emulator.machine.phases import PhaseCounts
from greenfast.emulator.machine.proxies import Proxies
from greenfast.emulator.machine.races import Races
from greenfast.emulator.machine.redundant_loads import RedundantLoads
from greenfast.emulator.machine.stack import Stack
from greenfast.emulator.ptx.syntax import Instruction
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import MAP_BYTES

#: An instruction. It returns the threads that are blocked at it until a state changes, if any.
Operation: TypeAlias = "Callable[[ResidentBlocks, ThreadSet], NDArray[np.intp] | None]"
#: Addresses in the shared memory of another block of the cluster have its rank, counted from 1, above these bits.
RANK_BITS = 24
_BITS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64, "16x2": np.uint32}


@dataclass
class Copy:
    """A cp.async in flight: its threads, and for each thread the destination, the bytes and the copy group.

    number: how many were issued before it.
    """

    lanes: NDArray[np.intp]
    offsets: NDArray[np.int64]
    values: NDArray[np.uint8]
    groups: NDArray[np.int64]
    number: int
    instruction: Instruction


@dataclass(kw_only=True)
class ResidentBlocks(BlockState):
    """The blocks that run together: registers, memory, barriers, asynchronous operations and races.

    dynamic_bytes: dynamic shared memory of the launch, included in shared_bytes. params: the bytes of each parameter.
    workspace: address of the grid synchronization workspace of cooperative groups, 0 for none. record: the log of
    accesses to global memory by the whole grid. synchronizes: whether threads may synchronize through memory. counts:
    the current counters. lockstep_units: bytes of the smallest access by space if warps run in lockstep (epochs.py).
    phases: the counters per phase of an instrumented build. compared: threads that have executed the comparison that
    ``surroundings`` force.
    """

    symbols: Mapping[str, int]
    params: Mapping[str, bytes]
    counts: Counts
    output: list[str] = field(default_factory=list)
    phases: PhaseCounts | None = None
    dynamic_bytes: int = 0
    workspace: int = 0
    record: GlobalRecord | None = None
    synchronizes: bool = False
    seed: int = 0
    surroundings: Surroundings = USUAL
    lockstep_units: Mapping[str, int] | None = None
    compared: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.registers: dict[str, Values] = {}
        self.copies: list[Copy] = []
        self.copies_issued = 0
        self.copy_groups = np.zeros(self.lanes, np.int64)
        #: Per thread: the mbarrier (8-byte word of shared memory) that it waits for, -1 for none.
        self.waiting_mbarrier = np.full(self.lanes, -1, np.int64)
        self.cluster_arrivals = np.zeros(self.lanes, np.int64)
        self.cluster_waits = np.zeros(self.lanes, np.int64)
        #: Threads with a relaxed last arrival at the cluster barrier; it orders nothing.
        self.cluster_relaxed = np.zeros(self.lanes, np.bool_)
        #: Per cluster: the number of completed cluster barriers, and the last access before the latest one.
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
        self.has_yielded = np.zeros(self.lanes, np.bool_)
        #: Counts events that may let a waiting thread go on.
        self.events = 0
        #: Threads that give up their next wait because no other thread can run.
        self.timing_out = np.zeros(self.lanes, np.bool_)
        self.random = random.Random(0)
        self.stack = Stack(self.lanes)
        self._lay_parameters()
        record = self.record or GlobalRecord(self.memory, frozenset())
        asynchronous = self.products is not None or any(
            i.name == "cp" and "bulk" in i.parts for i in self.function.code
        )
        proxies = asynchronous and self.geometry.cluster_size == 1
        size = self.geometry.cluster_size
        ordering = Ordering(len(self.blocks), self.warps, self.synchronizes, proxies, size)
        self.races = (
            EpochRaces(self, record, ordering, self.lockstep_units)
            if self.lockstep_units
            else Races(self, record, ordering)
        )
        self.proxies = Proxies(self, self.races) if asynchronous else None
        if self.proxies is not None:
            self.shared.watch_asynchronous_reads()
            self.shared.on_generic = self.proxies.record_access
        self.shared.on_read, self.shared.on_write = self.races.read_shared, self.races.write_shared
        self.memory.on_read, self.memory.on_write = self.races.read_global, self.races.write_global
        #: Loads with poison values for all threads except one per block; None outside of such a rerun.
        self.redundant_loads: RedundantLoads | None = None
        self.executed = 0
        self.specials = self._specials()

    def release(self) -> None:
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

    def shared_offsets(
        self, addresses: NDArray[np.int64], lanes: ThreadSet
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Convert shared addresses to offsets in a block's memory, and return the start of this block in the arena.

        An address from mapa holds the block's rank in the cluster, counted from 1, in its bits from RANK_BITS on.
        """
        named = addresses >> RANK_BITS
        if self.geometry.cluster_size == 1 or not (named > 0).any():
            return addresses, self.shared_start[lanes]
        indices, size = lane_indices(lanes), self.geometry.cluster_size
        own = self.block_of[indices]
        target = np.where(named > 0, own // size * size + named - 1, own)
        for index in np.flatnonzero(named > size):
            raise self.fault(
                f"an address in block {named[index] - 1} of a cluster of {size} blocks", int(indices[index])
            )
        running = np.zeros(len(self.blocks), np.bool_)
        running[self.block_of[np.flatnonzero(~self.ended)]] = True
        for index in np.flatnonzero(~running[target]):
            gone = unflatten(int(self.blocks[target[index]]), self.geometry.grid)
            raise self.fault(f"access to the shared memory of block {gone} after its end", int(indices[index]))
        for index in np.flatnonzero((target != own) & ~self.cluster_met[own]):
            new = unflatten(int(self.blocks[target[index]]), self.geometry.grid)
            why = "no barrier.cluster.wait before it, so this block may not have begun"
            raise self.fault(f"access to the shared memory of block {new}, {why}", int(indices[index]))
        return np.where(named > 0, addresses & ((1 << RANK_BITS) - 1), addresses), target * self.shared_stride

    @property
    def changes(self) -> int:
        """Grows whenever a waiting thread may find that it can go on."""
        return self.events + self.mbarriers.changes

    def _specials(self) -> dict[str, Values]:
        block = self.blocks[self.block_of]
        # Warps of different blocks have different slots, because blocks may share a multiprocessor.
        slot = (self.thread_of // WARP + 3 + self.warps * block) % WARPS
        specials: dict[str, Values] = {"%laneid": np.arange(self.lanes) % WARP}
        lane = np.arange(self.lanes, dtype=np.uint64) % np.uint64(WARP)
        below, own = (np.uint64(1) << lane) - np.uint64(1), np.uint64(1) << lane
        specials |= {"%lanemask_eq": own, "%lanemask_lt": below, "%lanemask_le": below | own}
        specials |= {
            "%lanemask_ge": ~below & np.uint64(0xFFFFFFFF),
            "%lanemask_gt": ~(below | own) & np.uint64(0xFFFFFFFF),
        }
        cluster, size = self.geometry.cluster, self.geometry.cluster_size
        specials |= {"%cluster_ctarank": self.block_of % size, "%cluster_nctarank": np.full(self.lanes, size)}
        around = self.surroundings
        specials["%warpid"] = around.place_warps(slot)
        specials |= {"%smid": around.place_blocks(block), "%nsmid": np.full(self.lanes, around.multiprocessors)}
        block_index = unflatten(block, self.geometry.grid)
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
            specials[name] = np.full(self.lanes, value)
        specials["%envreg1"], specials["%envreg2"] = (
            np.full(self.lanes, self.workspace >> shift & 0xFFFFFFFF) for shift in (32, 0)
        )
        for name, values in (
            ("%tid", unflatten(self.thread_of, self.geometry.block)),
            ("%ctaid", unflatten(block, self.geometry.grid)),
            ("%ntid", self.geometry.block),
            ("%nctaid", self.geometry.grid),
            ("%clusterid", tuple(n // c for n, c in zip(block_index, cluster, strict=True))),
            ("%nclusterid", tuple(n // c for n, c in zip(self.geometry.grid, cluster, strict=True))),
            ("%cluster_ctaid", tuple(n % c for n, c in zip(block_index, cluster, strict=True))),
            ("%cluster_nctaid", cluster),
        ):
            for axis, value in zip("xyz", values, strict=True):
                specials[f"{name}.{axis}"] = np.broadcast_to(np.asarray(value), self.lanes)
        return {name: np.ascontiguousarray(values, dtype=np.uint32) for name, values in specials.items()}

    def register(self, name: str) -> Values:
        """Return the values of a register for all threads, as unsigned integers of its width (bool for a predicate).

        An unset register holds -1, a NaN as a float: a zero would hide the use of an unset value in a sum. With odd
        seeds it holds 0, so that results that depend on it differ between orders.
        """
        values = self.registers.get(name)
        if values is None:
            kind = self.register_type(name)
            unset = self.seed % 2 == 0 if kind is np.bool_ else 0 if self.seed % 2 else np.iinfo(kind).max
            values = self.registers[name] = np.full(self.lanes, unset, kind)
        return values

    def register_type(self, name: str) -> Any:
        """Return the NumPy type that holds a register."""
        kind = self.function.register_kind(name)
        if kind is None:
            raise UsageError(f"PTX: the register {name} is not declared in {self.function.name}")
        return np.bool_ if kind == "pred" else _BITS[kind.lstrip("busf")]

    def clock(self, register: str, instruction: Instruction, lanes: ThreadSet) -> Values:
        """Return the threads' clock: the number of executed instructions, monotonic and repeatable.

        While phases are counted, return the bits of PhaseCounts.
        """
        if self.phases is None:
            return np.asarray(self.surroundings.clock(register, self.executed))
        values, self.counts = self.phases.read(instruction, lanes)
        return values
