"""Run a kernel of a PTX module on a whole grid."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from greenfast.build.toolchain import cuda_include_dirs
from greenfast.emulator.counts import Counts
from greenfast.emulator.faults import KernelFaultError
from greenfast.emulator.inlining import inlined
from greenfast.emulator.machine import Geometry, Machine
from greenfast.emulator.memory import FUNCTION_BASE, UNWRITTEN, WRITTEN, GlobalMemory
from greenfast.emulator.parser import parse
from greenfast.emulator.phases import PhaseCounts
from greenfast.emulator.program import Program
from greenfast.emulator.ptx import Function, Module, Variable
from greenfast.emulator.races import GlobalRecord, TrackReads
from greenfast.emulator.scheduler import Scheduler
from greenfast.emulator.tensormap import MAP_BYTES, BoundMap, bind
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import PHASE_BUFFER, Launch, TensorMap, value_bytes
from greenfast.spec.problem import Array, OutputSpec

#: Threads that run at once. More would need more memory (some hundred bytes of registers each) and gain little.
MAX_LANES = 16_384
#: What is resident at once of a kernel whose blocks may wait for each other, as on an H100: multiprocessors, and of
#: each the threads, blocks and bytes of shared memory (CUDA C++ Programming Guide, "Compute Capabilities").
MULTIPROCESSORS, THREADS, BLOCKS, SHARED = 132, 2048, 32, 233_472
#: The allocation of the runtime's that a grid of cooperative groups synchronizes through: its size and a barrier.
WORKSPACE, _WORKSPACE_BYTES = "cooperative groups' workspace", 8


#: Blocks of a cluster; more than 8 are an option of the launch on Hopper.
_MOST_BLOCKS = 16


@dataclass
class GridResult:
    """What a grid left: output arrays, how many of each output's bytes were never written, counts and printed lines.

    phases: the counts by phase, where they were asked for; they add up to ``counts``.
    """

    outputs: dict[str, Array]
    unwritten: dict[str, int]
    changed_inputs: list[str]
    counts: Counts
    printed: str = ""
    phases: dict[str, Counts] = field(default_factory=dict)


@lru_cache(maxsize=32)
def program_of(ptx: str, entry: str) -> tuple[Module, Program]:
    """The parsed module and the kernel's program. Raises UnsupportedError, or UsageError for an unknown kernel."""
    # Wrappers of instructions, the toolkit's and this project's: what their callers do is what a reader asks for.
    module = parse(ptx, tuple(f"{folder}/" for folder in (*cuda_include_dirs(), KERNEL_DIR / "ptx")))
    return module, Program(inlined(module, module.entry(entry)))


def run_grid(
    ptx: str,
    entry: str,
    block: tuple[int, int, int],
    dynamic_smem_bytes: int,
    plan: Launch,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, OutputSpec],
    *,
    seed: int = 0,
    poison: int = 0xFF,
    phases: Sequence[str] = (),
) -> GridResult:
    """Run every block of the grid.

    Output bytes that nothing wrote read as ``poison``. A name among both the inputs and the outputs is one buffer,
    which the kernel finds filled and may change. phases: those of an instrumented build, to count each.
    Raises KernelFaultError for what the kernel does wrong, UnsupportedError for an instruction that is not known, and
    UsageError where phases cannot be told apart.
    """
    outputs = dict(outputs)
    if phases:
        outputs[PHASE_BUFFER] = OutputSpec((math.prod(plan.grid), len(phases)), "int64")
    module, program = program_of(ptx, entry)
    function = program.function
    arrays = {name: np.ascontiguousarray(a) for name, a in inputs.items()}
    sizes = {name: a.nbytes for name, a in arrays.items()}
    sizes |= {n: int(np.prod(o.shape)) * np.dtype(o.dtype).itemsize for n, o in outputs.items()}
    variables = {v.name: v for v in module.variables.values() if v.space in ("global", "const") and v.size}
    sizes |= {f"variable {name}": v.size for name, v in variables.items()}
    sizes[WORKSPACE] = _WORKSPACE_BYTES
    memory = GlobalMemory(sizes)
    functions = {name: FUNCTION_BASE + 16 * n for n, name in enumerate(module.functions)}
    memory.states_of(WORKSPACE)[:] = WRITTEN
    for name, a in arrays.items():
        memory.bytes_of(name)[:] = a.reshape(-1).view(np.uint8)
        memory.states_of(name)[:] = WRITTEN
    for name, v in variables.items():  # device variables begin as zero where they have no initial value
        memory.bytes_of(f"variable {name}")[:] = np.frombuffer(
            _initial(v, memory, functions).ljust(v.size, b"\0"), np.uint8
        )
        memory.states_of(f"variable {name}")[:] = WRITTEN
    shared_layout, shared_bytes = _layout(module, function, dynamic_smem_bytes)
    local_layout, local_bytes = _pack([v for v in function.variables.values() if v.space == "local"])
    geometry = Geometry(plan.grid, block, _cluster(function, plan))
    order, size = geometry.order(), geometry.cluster_size
    record = GlobalRecord(memory, program.tracked)
    counts = Counts()
    by_phase = PhaseCounts(function) if phases else None
    printed: list[str] = []
    per_batch = max(1, resident_blocks(program, geometry, shared_bytes) // size) * size  # whole clusters
    with np.errstate(all="ignore"):
        for start in range(0, geometry.blocks, per_batch):
            machine = Machine(
                function=function,
                geometry=geometry,
                blocks=order[start : start + per_batch],
                shared_layout=shared_layout,
                shared_bytes=shared_bytes,
                local_layout=local_layout,
                local_bytes=local_bytes,
                memory=memory,
                symbols={**functions, **{name: memory.address(f"variable {name}") for name in variables}},
                params=_parameters(function, plan, memory),
                workspace=memory.address(WORKSPACE),
                record=record,
                synchronizes=program.synchronizes,
                counts=counts,
                phases=by_phase,
                dynamic_bytes=dynamic_smem_bytes,
            )
            if by_phase:
                by_phase.begin(machine.lanes)
            try:
                Scheduler(machine, program, seed + start).run()
            except TrackReads as found:
                program.tracked |= {found.name}
                return run_grid(
                    ptx,
                    entry,
                    block,
                    dynamic_smem_bytes,
                    plan,
                    inputs,
                    outputs,
                    seed=seed,
                    poison=poison,
                    phases=phases,
                )
            except KernelFaultError as e:
                e.printed = "".join([*printed, *machine.output])
                raise
            if by_phase:
                by_phase.end()
            printed += machine.output
    found, unwritten = {}, {}
    for name, o in outputs.items():
        data, states = memory.bytes_of(name), memory.states_of(name)
        unwritten[name] = int((states == UNWRITTEN).sum())
        data[states == UNWRITTEN] = poison
        found[name] = data.copy().view(o.dtype).reshape(o.shape)
    changed = [n for n, a in arrays.items() if n not in outputs and memory.bytes_of(n).tobytes() != a.tobytes()]
    result = GridResult(found, unwritten, changed, counts, "".join(printed))
    if by_phase:
        if unwritten[PHASE_BUFFER]:
            raise UsageError(f"{entry} left {unwritten[PHASE_BUFFER]} bytes of its phases' sums unwritten")
        result.phases = by_phase.by_phase(phases, found[PHASE_BUFFER])
        for part in result.phases.values():
            counts.add(part)
    return result


def _cluster(function: Function, plan: Launch) -> tuple[int, int, int]:
    """The blocks of a cluster, as the kernel or the launch has them."""
    asked = re.search(r"\.reqnctapercluster\s+([\d, ]+)", function.directives)
    extents = [int(n) for n in asked[1].split(",")] if asked else []
    x, y, z, *_ = *extents, 1, 1, 1
    own = x, y, z
    found = own if asked else plan.cluster
    if asked and plan.cluster not in ((1, 1, 1), own):
        raise UsageError(f"{function.name} is built for clusters of {own} blocks, its launch asks for {plan.cluster}")
    if min(found) < 1 or math.prod(found) > _MOST_BLOCKS or any(g % c for g, c in zip(plan.grid, found, strict=True)):
        what = f"clusters of {found} blocks; they have 1 to {_MOST_BLOCKS} blocks and divide the grid in each dimension"
        raise UsageError(f"{function.name}: a grid of {plan.grid} blocks in {what}")
    return found


def _initial(v: Variable, memory: GlobalMemory, functions: Mapping[str, int]) -> bytes:
    """A variable's initial value, with the addresses that stand in it."""
    data = bytearray(v.data)
    for r in v.relocations:
        target = f"variable {r.symbol}"
        if target not in memory.starts and r.symbol not in functions:
            raise UsageError(f"PTX: the initial value of {v.name} names {r.symbol}, which is no variable in memory")
        address = memory.address(target) if target in memory.starts else functions[r.symbol]
        data[r.offset : r.offset + r.size] = r.value(address)
    return bytes(data)


def resident_blocks(program: Program, geometry: Geometry, shared_bytes: int) -> int:
    """How many blocks of a grid run together; all others begin when these have ended.

    Where blocks can wait for each other, as many as an H100 holds; registers, which PTX does not know, are not counted.
    """
    threads = -(-geometry.threads // 32) * 32
    if not program.polling:
        return max(1, MAX_LANES // threads)
    each = min(THREADS // threads, BLOCKS, SHARED // (shared_bytes + 1024))  # 1 KiB of each block is the system's
    return MULTIPROCESSORS * max(1, each)


def _pack(variables: Sequence[Variable], start: int = 0) -> tuple[dict[str, int], int]:
    """Offsets of variables laid one behind the other, and where the last one ends."""
    layout, end = {}, start
    for v in variables:
        end = -(-end // v.align) * v.align
        layout[v.name] = end
        end += v.size
    return layout, end


def _layout(module: Module, function: Function, dynamic_bytes: int) -> tuple[dict[str, int], int]:
    """Shared variables: the static ones, then the dynamic array (of no size of its own)."""
    shared = [v for v in (*module.variables.values(), *function.variables.values()) if v.space == "shared"]
    layout, end = _pack([v for v in shared if v.size])
    dynamic = [v for v in shared if not v.size]
    if dynamic:
        align = max(v.align for v in dynamic)
        end = -(-end // align) * align
        layout |= {v.name: end for v in dynamic}
    return layout, end + dynamic_bytes


def _pointer(name: str, memory: GlobalMemory) -> int:
    """The address of a buffer; null for that of phases, where they are not counted."""
    if name not in memory.starts and name != PHASE_BUFFER:
        raise UsageError(f"launch argument {name!r} is no buffer of the case")
    return memory.address(name) if name in memory.starts else 0


def _parameters(function: Function, plan: Launch, memory: GlobalMemory) -> dict[str, bytes | BoundMap]:
    if len(plan.args) != len(function.params):
        raise UsageError(f"{function.name} has {len(function.params)} parameters, its launch gives {len(plan.args)}")
    packed: dict[str, bytes | BoundMap] = {}
    for parameter, argument in zip(function.params, plan.args, strict=True):
        if isinstance(argument, TensorMap):
            if parameter.size != MAP_BYTES:
                raise UsageError(f"{function.name}: a tensor map for {parameter.name} of {parameter.size} bytes")
            packed[parameter.name] = bind(argument, memory)
            continue
        value = value_bytes(argument, lambda name: _pointer(name, memory))
        if len(value) != parameter.size:
            raise UsageError(
                f"{function.name}: parameter {parameter.name} has {parameter.size} bytes, its launch gives {len(value)}"
            )
        packed[parameter.name] = value
    return packed
