"""Run a kernel of a PTX module on a whole grid."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from greenfast.device.toolchain import include_dirs
from greenfast.emulator.compiled.stretches import bind_stretches
from greenfast.emulator.dependence import find_dependence
from greenfast.emulator.lockstep import LockstepScheduler
from greenfast.emulator.machine.access_log import GlobalRecord, RestartWithReadTracking
from greenfast.emulator.machine.blocks import WARP, Geometry
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.environment import OTHER, USUAL, Surroundings
from greenfast.emulator.machine.epochs import RestartCompiled, RestartWarpByWarp
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.launch_order import LaunchOrder
from greenfast.emulator.machine.memory import FUNCTION_BASE, GLOBAL_BASE, LEFT, UNWRITTEN, WRITTEN, GlobalMemory
from greenfast.emulator.machine.observed import NOTHING, Observe
from greenfast.emulator.machine.phases import PhaseCounts
from greenfast.emulator.machine.redundant_loads import RedundantLoads
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.machine.tensormap import bind, encode
from greenfast.emulator.observer import ObservedScheduler, Observer
from greenfast.emulator.program import Program
from greenfast.emulator.ptx.inlining import inline_calls
from greenfast.emulator.ptx.parser import parse
from greenfast.emulator.ptx.syntax import Function, Module
from greenfast.emulator.ptx.unsupported import InternalError
from greenfast.emulator.rerun import MemorySnapshot, UninitFill, accept_benign_race, rerun_with_fills
from greenfast.emulator.result import GridResult
from greenfast.emulator.scheduler import Scheduler
from greenfast.emulator.variables import initial_value, layout_shared, list_shared, pack
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import GreenfastError, UnsupportedError, UsageError
from greenfast.spec.facts import Finding
from greenfast.spec.kernel import (
    MAP_BYTES,
    PHASE_BUFFER,
    Argument,
    Launch,
    Packed,
    Struct,
    TensorMap,
    Workspace,
    find_pointers,
    value_bytes,
)
from greenfast.spec.problem import Array, OutputSpec, to_dtype

#: Threads that run at once. More would need more memory (some hundred bytes of registers each) and gain little.
MAX_LANES = 16_384
#: Resident blocks of a kernel with blocks that may wait for each other, as on an H100: multiprocessors, and for each
#: the threads, blocks and bytes of shared memory (CUDA C++ Programming Guide, "Compute Capabilities").
MULTIPROCESSORS, THREADS, BLOCKS, SHARED = 132, 2048, 32, 233_472
#: The runtime's allocation through which a grid of cooperative groups synchronizes: its size and a barrier.
WORKSPACE, _WORKSPACE_BYTES = "cooperative groups' workspace", 8
#: Blocks of a cluster; more than 8 are an option of the launch on Hopper.
_MOST_BLOCKS = 16


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel of a PTX text, and how it is launched."""

    ptx: str
    entry: str
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    plan: Launch


class HostOperation(Protocol):
    """An operation of host code between launches, on the memory of a run."""

    @property
    def name(self) -> str:
        """The name for messages."""

    def run(self, memory: GlobalMemory) -> Collection[str]:
        """Run it. Return the buffers that it wrote. Raises KernelFaultError and UnsupportedError."""


#: Its values are bytes. For old compilers, CUTLASS (before CUDA 12.5) and Triton (up to PTX 8.5) divide them by 16.
_STRIDE = "tensormap.replace.tile.global_stride"


@lru_cache(maxsize=32)
def load_program(ptx: str, entry: str) -> tuple[Module, Program]:
    """Return the parsed module and the kernel's program. An unknown instruction raises when it is executed.

    Raises UnsupportedError for PTX that cannot be read, and UsageError for an unknown kernel.
    """
    module = load_module(ptx)
    return module, Program(inline_calls(module, module.entry(entry)), defer=True)


@lru_cache(maxsize=8)
def load_module(ptx: str) -> Module:
    """Return the parsed module. Raises UnsupportedError for PTX that cannot be read."""
    # Headers with instruction wrappers (of the toolkit, this project and Triton): messages name their callers.
    folders = (*include_dirs(), KERNEL_DIR / "ptx")
    library = [f"{path}/" for folder in folders for path in (folder, folder.resolve())]  # NVRTC follows links
    version = re.search(r"\.version\s+(\d+)\.(\d+)", ptx)
    if version is not None and (int(version[1]), int(version[2])) <= (8, 5) and _STRIDE in ptx:
        raise UnsupportedError(f"{_STRIDE} in PTX {version[1]}.{version[2]}: up to 8.5, compilers differ in its unit")
    return parse(ptx, (*library, "triton/language/"))


def run_grid(
    ptx: str,
    entry: str,
    block: tuple[int, int, int],
    dynamic_smem_bytes: int,
    plan: Launch,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, OutputSpec],
    *,
    phases: Sequence[str] = (),
    **options: Any,
) -> GridResult:
    """Run every block of a kernel's grid. phases: the phases of an instrumented build. options: as for ``run_chain``.

    Raises the errors of ``run_chain``, and UsageError if phases cannot be separated.
    """
    outputs = dict(outputs)
    if phases:
        outputs[PHASE_BUFFER] = OutputSpec((math.prod(plan.grid), len(phases)), "int64")
    step = KernelLaunch(ptx, entry, block, dynamic_smem_bytes, plan)
    result = run_chain([step], inputs, outputs, phases=phases, **options)
    if phases and result.unwritten[PHASE_BUFFER]:
        raise UsageError(f"{entry} left {result.unwritten[PHASE_BUFFER]} bytes of its phases' sums unwritten")
    return result


def run_chain(
    steps: Sequence[KernelLaunch],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, OutputSpec],
    *,
    workspaces: Mapping[str, Workspace] | None = None,
    seed: int = 0,
    poison: int = 0xFF,
    phases: Sequence[str] = (),
    later: Sequence[int] = (),
    always: bool = True,
    explore: bool = False,
    may_read_left: bool = False,
    keep_formal: bool = False,
    sample: int = 0,
    structs: Mapping[str, Struct | Packed] | None = None,
    observe: Observe = NOTHING,
    operations: Mapping[int, Sequence[HostOperation]] | None = None,
    unwritten: Mapping[str, NDArray[np.bool_]] | None = None,
) -> GridResult:
    """Run launches one after the other on the same buffers, and add up their counts.

    Unwritten output bytes read as ``poison``. A name in both inputs and outputs is one initialised buffer that the
    kernels may change. phases: the phases of an instrumented build, to count each.

    Raises KernelFaultError for a fault of a kernel, and UnsupportedError for an unknown instruction and for a failure
    of the emulator itself.

    A launch that may begin early (Launch.early) is a fault in two cases. It accesses bytes of earlier launches with no
    griddepcontrol.wait. It reads bytes that they write by a load that the compiler may move before the wait.

    explore: if the kernels read values that PTX does not define (clocks, %smid, ...) or use the bits of addresses, run
    again with other such values, and force the other outcome of each comparison that depends on them.

    sample: the number of blocks to run of each launch, spread over the grid; 0 for all.

    structs: contents of inputs by name, of the same size: pointers to buffers, tensor maps.

    later: seeds of further runs in the same memory, with the initial buffers and with the module's variables unchanged.
    Reading a value that an earlier run stored there is a fault unless ``may_read_left``. Without ``always``, later runs
    happen only if the first run changed a variable.

    keep_formal: keep formal findings in the result and go on; else the first one is raised as a fault.

    observe: what to observe in the first run, not in later ones. A fault carries the observations before it.

    operations: of host code, by the number of the launch that they precede; those after the last launch by their count.

    unwritten: of inputs by name, the bytes that nothing has written.
    """

    def run(fill: UninitFill | RedundantLoads | None, around: Surroundings, later: Sequence[int]) -> GridResult:
        while True:
            try:
                memory, variables, symbols = _build_memory(
                    steps, inputs, {**outputs, **(workspaces or {})}, around, structs or {}, unwritten or {}
                )
                chain = Chain(
                    steps,
                    memory,
                    symbols,
                    fill,
                    around,
                    sample,
                    read_only=inputs.keys() - outputs.keys(),
                    unwritten=unwritten or {},
                    operations=operations or {},
                    findings={} if keep_formal else None,
                )
                snapshot = MemorySnapshot(memory, [allocation for names in variables for allocation in names.values()])
                result = chain.run(seed, outputs, poison, phases, Observer(observe) if observe else None)
                for other in later if always or snapshot.dirty() else ():
                    snapshot.restore(WRITTEN if may_read_left else LEFT)
                    try:
                        result.later.append(chain.run(other, outputs, poison, ()))
                    except KernelFaultError as e:
                        if may_read_left:
                            e.args = (f"{e}; only in a later launch, with variables that an earlier launch changed",)
                        raise
                result.findings = list((chain.findings or {}).values())
                if isinstance(fill, UninitFill):
                    fill.memory = memory.data
                changed = snapshot.changed()
                result.changed = {
                    (n, name): memory.get_bytes(allocation).tobytes()
                    for n, names in enumerate(variables)
                    for name, allocation in names.items()
                    if allocation in changed
                }
                return result
            except (RestartWithReadTracking, RestartCompiled, RestartWarpByWarp) as restart:
                chain.running.prepare_restart(restart)
            except GreenfastError:
                raise
            except Exception as e:
                raise InternalError(steps[0].entry if steps else "PyTorch", e) from e

    def attempt(around: Surroundings, later: Sequence[int] = ()) -> GridResult:
        def rerun(fill: UninitFill | RedundantLoads | None) -> GridResult:
            return run(fill, around, later)

        try:
            return rerun(None)
        except KernelFaultError as fault:
            accepted = rerun_with_fills(rerun) if fault.unwritten else accept_benign_race(rerun, fault)
            if accepted is None:
                raise
            return accepted

    result = attempt(USUAL, later)
    if explore:
        _explore(steps, result, attempt)
    return result


#: How many comparisons are forced at most.
_MOST_FORCED = 6


def _explore(steps: Sequence[KernelLaunch], result: GridResult, attempt: Callable[[Surroundings], GridResult]) -> None:
    """Run with other undefined values, and add the differences to the result.

    A trap is no difference: kernels end a wait that takes too long by a trap.
    """
    forced: list[tuple[Surroundings, str]] = []
    differs = False
    for n, step in enumerate(steps):
        function = load_program(step.ptx, step.entry)[1].function
        pointers = {
            (parameter.name, offset)
            for parameter, argument in zip(function.params, step.plan.args, strict=False)
            for offset, _ in find_pointers(argument)
        }
        dependence = find_dependence(function, pointers)
        differs |= dependence.addresses or dependence.undefined
        for pc, registers in dependence.comparisons.items():
            note = f"{function.name}: a comparison depends on {', '.join(registers)} at {function.code[pc].source}"
            forced.append((replace(OTHER, name=f"the other outcome where {note}", forced=(n, pc)), note))
        for pc in dependence.bits:
            note = f"{function.name}: a comparison depends on bits of an address at {function.code[pc].source}"
            around = replace(OTHER, name=f"the other outcome where {note}", forced=(n, pc), is_possible=False)
            forced.append((around, note))
    todo = [*([(OTHER, "")] if differs else []), *forced[:_MOST_FORCED]]
    for around, note in todo:
        outcome, before = "both outcomes were run", len(result.differences)
        try:
            other = attempt(around)
        except KernelFaultError as e:
            impossible = not around.is_possible and "out of bounds" not in str(e)
            if "trap was executed" not in str(e) and not impossible:
                result.differences.append(f"{e}; only with {around.name}")
            elif not impossible:
                outcome = "one of the two outcomes ends by a trap"
        except UnsupportedError as e:
            outcome = f"one of the two outcomes could not be run: {e}"
        else:
            same = all(other.outputs[n].tobytes() == data.tobytes() for n, data in result.outputs.items())
            if around.is_possible and not same:
                result.differences.append(f"the outputs are other bits with {around.name}")
        if len(result.differences) == before and (note or not outcome.startswith("both")):
            result.notes.append(f"{note or around.name}; {outcome}")
    result.notes += [f"{note}; one of the two outcomes was not run" for _, note in forced[_MOST_FORCED:]]
    for texts in (result.differences, result.notes):
        texts[:] = dict.fromkeys(texts)  # a line may have several comparisons


def _build_memory(
    steps: Sequence[KernelLaunch],
    inputs: Mapping[str, Array],
    changed: Mapping[str, OutputSpec | Workspace],
    around: Surroundings,
    structs: Mapping[str, Struct | Packed],
    unwritten: Mapping[str, NDArray[np.bool_]],
) -> tuple[GlobalMemory, list[dict[str, str]], list[dict[str, int]]]:
    """Return the memory of a chain. For each launch, return the allocations of variables, and addresses of symbols."""
    sizes = {name: a.nbytes for name, a in inputs.items()}
    sizes |= {name: spec.nbytes for name, spec in changed.items()}
    variables: list[dict[str, str]] = []
    for n, step in enumerate(steps):
        module, _ = load_program(step.ptx, step.entry)
        held = {v.name: v for v in module.variables.values() if v.space in ("global", "const") and v.size}
        of = f" of launch {n}" if n else ""
        variables.append({name: f"variable {name}{of}" for name in held})
        sizes |= {f"variable {name}{of}": v.size for name, v in held.items()}
    sizes[WORKSPACE] = _WORKSPACE_BYTES
    # Nothing promises an order in memory, so it is the opposite one for every second set of inputs.
    backwards = zlib.crc32(b"".join(a.reshape(-1)[:1024].tobytes() for a in inputs.values())) & 1
    memory = GlobalMemory(dict(reversed(sizes.items())) if backwards else sizes, GLOBAL_BASE + around.memory)
    memory.fill(WORKSPACE, bytes(_WORKSPACE_BYTES))
    for name, spec in changed.items():
        if spec.zeros:
            memory.fill(name, bytes(spec.nbytes))
        if isinstance(spec, Workspace) and spec.data:
            memory.fill(name, spec.data)
    if missing := structs.keys() - inputs.keys():
        listed = ", ".join(map(repr, sorted(missing)))
        raise UsageError(f"structs name {listed}; allowed are the inputs: {', '.join(inputs) or 'none'}")
    for name, a in inputs.items():
        content = _encode_value(structs[name], memory) if name in structs else a.tobytes()
        if len(content) != a.nbytes:
            raise UsageError(
                f"the struct for input {name!r} has {len(content)} bytes, the input has {a.nbytes} bytes; "
                "give an input of the struct's size"
            )
        memory.fill(name, content)
        if name in unwritten:
            memory.get_states(name)[unwritten[name]] = UNWRITTEN
    symbols: list[dict[str, int]] = []
    for step, names in zip(steps, variables, strict=True):
        module, _ = load_program(step.ptx, step.entry)
        functions = {name: FUNCTION_BASE + 16 * n for n, name in enumerate(module.functions)}
        symbols.append({**functions, **{name: memory.address(allocation) for name, allocation in names.items()}})
        for name, allocation in names.items():  # zero if they have no initial value
            v = module.variables[name]
            memory.fill(allocation, initial_value(v, symbols[-1]).ljust(v.size, b"\0"))
    return memory, variables, symbols


@dataclass
class Chain:
    """Launches in one memory, and the state of their execution.

    symbols: by launch, the addresses of variables and functions. read_only: inputs that the launches must not write.
    unwritten, operations: see ``run_chain``. findings, races_found: those that do not end the run; None: the first one
    ends it.
    """

    steps: Sequence[KernelLaunch]
    memory: GlobalMemory
    symbols: Sequence[Mapping[str, int]]
    fill: UninitFill | RedundantLoads | None = None
    around: Surroundings = USUAL
    sample: int = 0
    read_only: Set[str] = frozenset()
    unwritten: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    operations: Mapping[int, Sequence[HostOperation]] = field(default_factory=dict)
    findings: dict[tuple[str, str], Finding] | None = field(default_factory=dict)
    races_found: dict[str, KernelFaultError] | None = None

    def __post_init__(self) -> None:
        self.input_writes: dict[str, str] = {}
        if isinstance(self.fill, UninitFill):
            self.fill.fill_outputs(self.memory)

    def run(
        self,
        seed: int,
        outputs: Mapping[str, OutputSpec],
        poison: int,
        phases: Sequence[str],
        observer: Observer | None = None,
    ) -> GridResult:
        """Run the launches, one after the other."""
        self.observer = observer
        several = len(self.steps) > 1
        self.launches = LaunchOrder(self.memory, [step.entry for step in self.steps]) if several else None
        self.counts = observer.make_counts() if observer is not None else Counts()
        self.printed: list[str] = []
        self.by_phase: PhaseCounts | None = None
        for n, step in enumerate(self.steps):
            self.run_operations(n)
            self.launch(n, step, seed, phases)
        self.run_operations(len(self.steps))
        return self.result(outputs, poison, phases)

    def run_operations(self, number: int) -> None:
        """Run the operations of host code before a launch."""
        for operation in self.operations.get(number, ()):
            for name in self.read_only & set(operation.run(self.memory)):
                self.input_writes.setdefault(name, f"{operation.name} writes to the input {name!r}")

    def launch(self, number: int, step: KernelLaunch, seed: int, phases: Sequence[str]) -> None:
        """Run every block of one launch."""
        module, self.running = load_program(step.ptx, step.entry)
        program, memory, plan = self.running, self.memory, step.plan
        if self.around.forced is not None and self.around.forced[0] == number:
            program = program.forcing(self.around.forced[1])
        function = program.function
        shared_layout, shared_bytes = layout_shared(module, function, step.dynamic_smem_bytes)
        local_layout, local_bytes = pack([v for v in function.variables.values() if v.space == "local"])
        geometry = Geometry(plan.grid, step.block, _check_cluster(function, plan))
        record = GlobalRecord(memory, self.running.tracked, self.read_only, program.scoped)
        record.input_writes = self.input_writes
        by_phase = self.by_phase = PhaseCounts(function) if phases else None
        one_warp = geometry.threads <= WARP
        apart = one_warp or geometry.cluster_size > 1 or by_phase is not None or self.fill is not None
        apart = apart or self.observer is not None
        lockstep_units = None if apart else program.lockstep_units
        per_batch = count_resident_blocks(program, geometry, shared_bytes)
        if self.launches is not None:
            self.launches.begin(number, plan.early)
        with np.errstate(all="ignore"):
            batches = _split_batches(geometry, per_batch, seed, bool(program.polling))
            for blocks in [sample_blocks(geometry, self.sample)] if self.sample else batches:
                machine = ResidentBlocks(
                    function=function,
                    geometry=geometry,
                    blocks=blocks,
                    shared_layout=shared_layout,
                    shared_bytes=shared_bytes,
                    local_layout=local_layout,
                    local_bytes=local_bytes,
                    memory=memory,
                    symbols=self.symbols[number],
                    params=_encode_parameters(function, plan, memory),
                    workspace=memory.address(WORKSPACE) if plan.cooperative else 0,
                    record=record,
                    launches=self.launches,
                    synchronizes=program.synchronizes or geometry.cluster_size > 1,
                    counts=self.counts,
                    phases=by_phase,
                    dynamic_bytes=step.dynamic_smem_bytes,
                    seed=seed,
                    surroundings=self.around,
                    lockstep_units=lockstep_units,
                    shared_sizes={v.name: v.size for v in list_shared(module, function)},
                    findings=self.findings,
                    races_found=self.races_found,
                )
                try:
                    self._run_blocks(number, machine, program, seed)
                finally:
                    machine.release()

    def _run_blocks(self, number: int, machine: ResidentBlocks, program: Program, seed: int) -> None:
        """Run blocks of a launch that are resident together."""
        if self.fill is not None:
            self.fill.begin(number, machine)
        if isinstance(self.fill, RedundantLoads):
            machine.redundant_loads = self.fill
        if self.by_phase:
            self.by_phase.begin(machine.lanes)
        try:
            order = seed + int(machine.blocks[0]), seed
            if self.observer is not None:
                ObservedScheduler(machine, program, *order, self.observer).run()
            else:
                scheduler = (LockstepScheduler if machine.lockstep_units else Scheduler)(machine, program, *order)
                scheduler.compiled = compiled = bind_stretches(machine, program)
                scheduler.run()
                if compiled is not None:
                    compiled.flush()
            program.laggards |= machine.races.laggards
        except (RestartWithReadTracking, RestartCompiled, RestartWarpByWarp):
            raise
        except Exception as e:
            if machine.lockstep_units:  # the next run finds and describes a fault
                raise RestartWarpByWarp from e
            if isinstance(e, KernelFaultError):
                e.printed = "".join([*self.printed, *machine.output])
                e.observer = self.observer
            if isinstance(e, GreenfastError):
                raise
            i = machine.current
            raise InternalError(f"{program.function.name} at {i.source or 'unknown line'} (in: {i.text})", e) from e
        if self.fill is not None:
            self.fill.end(number, machine)
        if self.by_phase:
            self.by_phase.end()
        self.printed += machine.output

    def result(self, outputs: Mapping[str, OutputSpec], poison: int, phases: Sequence[str]) -> GridResult:
        """Return the outputs and counts after all launches."""
        memory = self.memory
        arrays, unwritten, unwritten_bytes = {}, {}, {}
        for name, o in outputs.items():
            data, states = memory.get_bytes(name), memory.get_states(name)
            unwritten[name] = int((states == UNWRITTEN).sum())
            if name in self.unwritten:
                unwritten_bytes[name] = states == UNWRITTEN
            data[states == UNWRITTEN] = poison
            arrays[name] = data.copy().view(to_dtype(o.dtype)).reshape(o.shape)
        result = GridResult(arrays, unwritten, self.input_writes, self.counts, "".join(self.printed))
        result.observer, result.unwritten_bytes = self.observer, unwritten_bytes
        result.findings = list((self.findings or {}).values())
        if self.by_phase is not None and not unwritten[PHASE_BUFFER]:
            result.phases = self.by_phase.by_phase(phases, arrays[PHASE_BUFFER])
            for part in result.phases.values():
                self.counts.add(part)
        return result


#: How many parts the blocks of a grid run in where their order is drawn.
_PARTS = 3


def _split_batches(geometry: Geometry, limit: int, seed: int, together: bool) -> list[NDArray[np.int64]]:
    """Return the blocks of a grid that run together, at most ``most``, whole clusters, one batch after the other.

    With seed 0 they begin in their order. Other seeds draw one, and begin in smaller parts unless blocks may wait for
    each other.
    """
    clusters = geometry.order().reshape(-1, geometry.cluster_size)
    count, limit = len(clusters), max(1, limit // geometry.cluster_size)
    if seed and not together:
        clusters = clusters[np.random.default_rng(seed).permutation(count)]
        limit = min(limit, max(1, -(-count // _PARTS)))
    return [clusters[start : start + limit].ravel() for start in range(0, count, limit)]


def sample_blocks(geometry: Geometry, count: int) -> NDArray[np.int64]:
    """Return about ``count`` blocks of a grid in whole clusters: the first, the last, and others evenly between."""
    clusters = geometry.order().reshape(-1, geometry.cluster_size)
    some = np.linspace(0, len(clusters) - 1, max(1, min(count, len(clusters)))).astype(int)
    return np.asarray(clusters[np.unique(some)].ravel())


def _check_cluster(function: Function, plan: Launch) -> tuple[int, int, int]:
    """Return the extents of a cluster, from the kernel or the launch."""
    directive = re.search(r"\.reqnctapercluster\s+([\d, ]+)", function.directives)
    extents = [int(n) for n in directive[1].split(",")] if directive else []
    x, y, z, *_ = *extents, 1, 1, 1
    own = x, y, z
    cluster = own if directive else plan.cluster
    if directive and plan.cluster not in ((1, 1, 1), own):
        raise UsageError(f"{function.name} is built for clusters of {own} blocks, its launch asks for {plan.cluster}")
    if (
        min(cluster) < 1
        or math.prod(cluster) > _MOST_BLOCKS
        or any(g % c for g, c in zip(plan.grid, cluster, strict=True))
    ):
        reason = (
            f"clusters of {cluster} blocks; they have 1 to {_MOST_BLOCKS} blocks and divide the grid in each dimension"
        )
        raise UsageError(f"{function.name}: a grid of {plan.grid} blocks in {reason}")
    return cluster


def count_resident_blocks(program: Program, geometry: Geometry, shared_bytes: int) -> int:
    """Return how many blocks of a grid run together; all others begin when these have ended.

    If blocks can wait for each other, it is the number that an H100 holds. PTX has no register counts, so registers are
    ignored.
    """
    threads = -(-geometry.threads // 32) * 32
    if not program.polling:
        return max(1, MAX_LANES // threads)
    each = min(THREADS // threads, BLOCKS, SHARED // (shared_bytes + 1024))  # 1 KiB of each block is the system's
    return MULTIPROCESSORS * max(1, each)


def _resolve_pointer(name: str, memory: GlobalMemory) -> int:
    """Return the address of a buffer; null for the phases' buffer if phases are not counted."""
    if name not in memory.starts and name != PHASE_BUFFER:
        names = ", ".join(sorted(key for key in memory.starts if key.isidentifier()))
        raise UsageError(f"launch argument {name!r} is not a buffer of the case; its buffers are {names}")
    return memory.address(name) if name in memory.starts else 0


def _encode_value(argument: Argument, memory: GlobalMemory) -> bytes:
    """Return the bytes of an argument, with addresses of this memory."""
    return value_bytes(
        argument, lambda name: _resolve_pointer(name, memory), lambda layout: encode(bind(layout, memory), memory.base)
    )


def _encode_parameters(function: Function, plan: Launch, memory: GlobalMemory) -> dict[str, bytes]:
    if len(plan.args) != len(function.params):
        raise UsageError(f"{function.name} has {len(function.params)} parameters, its launch gives {len(plan.args)}")
    packed: dict[str, bytes] = {}
    for parameter, argument in zip(function.params, plan.args, strict=True):
        if isinstance(argument, TensorMap) and parameter.size != MAP_BYTES:
            raise UsageError(f"{function.name}: a tensor map for {parameter.name} of {parameter.size} bytes")
        value = _encode_value(argument, memory)
        if len(value) != parameter.size:
            raise UsageError(
                f"{function.name}: parameter {parameter.name} has {parameter.size} bytes, its launch gives {len(value)}"
            )
        packed[parameter.name] = value
    return packed
