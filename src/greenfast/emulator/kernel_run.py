"""Run one kernel of any CUDA or PTX source, without a task: ``emulator.run`` and ``greenfast emulate``.

Python's ``run`` takes arrays and writes the results into them, as a launch on a GPU does. The command line describes
buffers in words (arguments.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from greenfast.device.compiler import compile_kernel, entries, to_ptx
from greenfast.emulator.arguments import Arguments, bind_arguments, check_parameters, read_array
from greenfast.emulator.grid import load_program, run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.observed import NOTHING, Line, Observe, Observed
from greenfast.emulator.program import Program
from greenfast.emulator.ptx.names import demangle, read_shapes
from greenfast.emulator.ptx.syntax import Module
from greenfast.emulator.ptx.unsupported import InternalError
from greenfast.emulator.result import GridResult
from greenfast.emulator.watches import insert_watches
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, GreenfastError, MachineError, UnsupportedError, UsageError, unknown
from greenfast.spec.facts import FORMAL, Finding, KernelCounts, Resources
from greenfast.spec.files import read_file
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.limits import MOST_BLOCK, MOST_GRID, MOST_THREADS, most_shared
from greenfast.spec.problem import Array

Extent = tuple[int, int, int]

#: Default number of runs of a small case, each in another order of its warps. Larger cases run once, for time.
ORDERS, REPEAT_THREADS = 3, 4096
#: Further launches in the same memory if a kernel changes a variable of its module.
LAUNCHES = 2
DEFAULT_TARGET = "sm_90a"


@dataclass(frozen=True)
class KernelRequest:
    """A request to run a kernel.

    source: a .cu or .ptx file, or the text of one. kernel: its name, mangled or not; None for the only kernel.
    arch: None for DEFAULT_TARGET, or the target of PTX. orders: number of runs, each in another order of the warps;
    None: chosen by size. defines: NAME or NAME=VALUE. formal: whether formal findings are failures. observe: what to
    observe in the first order.
    """

    source: Path | str
    kernel: str | None
    grid: Extent
    block: Extent
    smem: int = 0
    arch: str | None = None
    seed: int = 0
    orders: int | None = None
    defines: Sequence[str] = ()
    includes: Sequence[Path] = ()
    formal: bool = True
    observe: Observe = NOTHING

    @property
    def name(self) -> str:
        """The file, as messages name it."""
        if isinstance(self.source, Path):
            return str(self.source)
        return "kernel.ptx" if _IS_PTX.match(self.source) else "kernel.cu"


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """An output buffer. min, max and mean are over elements that are not NaN; None if all are NaN.

    unwritten_bytes: bytes that the kernel never wrote; None for an initialised buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    bytes: int
    unwritten_bytes: int | None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of the kernel, or of its outputs.

    level: error, formal, or unsupported for a limit of the emulator. kind: the kind of fault, in words with hyphens.
    place: the accessed memory. file, line, function: the line to check first. stack: the innermost line first, with
    its call sites. Unknown or inapplicable fields are None or empty.
    """

    level: str
    kind: str
    message: str
    file: str | None = None
    line: int | None = None
    function: str = ""
    stack: list[Line] = []
    instruction: str = ""
    place: str = ""
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run. ``faults`` give the reasons for a failure, ``failures`` the same as text.

    Both are empty if no fault was found. ``failures`` omit formal findings if these are only reported. A fault that
    ends the run gives no outputs and no counts. observed: the observations that ``observe`` selected, up to a fault.
    saved: the files of the outputs, from ``greenfast emulate --save``.
    """

    file: str
    kernel: str
    target: str
    grid: Extent
    block: Extent
    dynamic_smem_bytes: int
    resources: Resources | None
    seed: int
    orders: int
    seconds: float
    outputs: list[Output]
    printed: str
    counts: KernelCounts | None
    faults: list[Fault]
    failures: list[str]
    observed: Observed | None = None
    saved: list[str] = []


@dataclass(frozen=True)
class LoadedKernel:
    """A compiled kernel. resources: the compiler's report; None for PTX. sources: texts by file name."""

    ptx: str
    entry: str
    target: str
    resources: Resources | None
    program: Program
    sources: Mapping[str, str]


def run(
    source: Path | str,
    kernel: str | None = None,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[object] = (),
    smem: int = 0,
    arch: str | None = None,
    seed: int = 0,
    orders: int | None = None,
    defines: Sequence[str] = (),
    includes: Sequence[Path] = (),
    formal: bool = True,
    check: bool = True,
    observe: Observe = NOTHING,
) -> KernelReport:
    """Run a kernel on the PTX emulator, as a launch on a GPU would, and report its faults and counts.

    source: a .cu or .ptx file, or the text of one. kernel: its name; None for the only kernel. grid, block: extents in
    x, y, z. args: one value per parameter: a NumPy array or a CPU tensor of PyTorch, read and changed in place;
    ``In(array)``, ``Out(array)``; a number, of the parameter's type if it is Python's; None for a null pointer. smem:
    bytes of dynamic shared memory. arch: target of a CUDA source (default: sm_90a). orders: number of runs, each in
    another order of the warps (default: 3, or 1 for more than 4096 threads), drawn from ``seed``. defines: NAME or
    NAME=VALUE. formal: whether formal findings (docs/emulator.md) are failures. check: raise a fault instead of
    returning it in the report. observe: what to observe in the first order, for ``report.observed``.

    Returns the report. The arrays hold the results, unless a fault ended the run. Raises KernelFaultError if the kernel
    has a fault and ``check`` is True, UsageError for a wrong request, CompileError, and UnsupportedError for limits of
    the emulator.
    """
    if isinstance(source, str) and "\n" not in source and source.endswith((".cu", ".cuh", ".ptx")):
        source = Path(source)
    request = KernelRequest(
        source, kernel, _parse_extent("grid", grid), _parse_extent("block", block), smem, arch, seed, orders,
        tuple(defines), tuple(includes), formal, observe,
    )  # fmt: skip
    loaded = load_kernel(request)
    arguments, arrays = bind_arguments(loaded.program.function, args)
    try:
        report, outputs = run_kernel(request, loaded, arguments)
    except KernelFaultError as e:
        if check:
            raise
        return describe_error(request, e)
    for name, array in arrays.items():
        array[...] = outputs[name]
    if check and report.failures:
        raise KernelFaultError(f"{loaded.entry}: {'; '.join(report.failures).removeprefix(f'{loaded.entry}: ')}")
    return report


def _parse_extent(name: str, extent: int | Sequence[int]) -> Extent:
    sizes = tuple(extent) if isinstance(extent, Sequence) else (extent,)
    whole = all(isinstance(size, int | np.integer) and size > 0 for size in sizes)
    if not whole or not 1 <= len(sizes) <= 3:
        raise UsageError(f"{name}={extent!r}: give one to three whole numbers from 1 up, x first")
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z


def load_kernel(request: KernelRequest) -> LoadedKernel:
    """Compile and parse a kernel. Raises UsageError for a wrong request, CompileError and UnsupportedError."""
    _check_launch(request)
    text = _read_source(request)
    ptx, entry, target, resources = _compile(request, text)
    module, program = _load_program(request, ptx, entry)
    _check_bounds(request, entry, limit_threads(program.function.directives))
    sources = _read_sources(request, text, module)
    defines = [f"#define {define.replace('=', ' ', 1)}" for define in request.defines]
    program.function.shapes = read_shapes([*defines, *sources.values()])
    return LoadedKernel(ptx, entry, target or module.target, resources, program, sources)


def run_kernel(
    request: KernelRequest,
    kernel: LoadedKernel,
    arguments: Arguments,
    expected: Mapping[str, Array] | None = None,
    tolerance: float = 0.0,
) -> tuple[KernelReport, dict[str, Array]]:
    """Run a loaded kernel. Return the report and the contents of the outputs.

    expected: contents of outputs; an element may differ by ``tolerance``. Raises KernelFaultError for a fault that
    ends the run, and UnsupportedError for limits of the emulator.
    """
    start = time.perf_counter()
    check_parameters(kernel.program.function, arguments, request.kernel or kernel.entry)
    threads = math.prod(request.grid) * math.prod(request.block)
    orders = request.orders or (ORDERS if threads <= REPEAT_THREADS else 1)
    first, races = _run_orders(request, kernel, arguments, orders)
    unwritten = {n: count for n, count in first.unwritten.items() if count and n not in arguments.inputs}
    faults = [
        *(
            ("input-written", f"{message}; give {arguments.changeable.format(n)} if it may")
            for n, message in first.input_writes.items()
        ),
        *(
            (
                "output-unwritten",
                f"{count} of {first.outputs[n].nbytes} bytes of {n!r} were never written; give "
                f"{arguments.changeable.format(n)} if they need not be",
            )
            for n, count in unwritten.items()
        ),
        *(("depends-on-launches", text) for text in _compare_later_launches(first)),
        *(("depends-on-order", text) for text in races),
        *(
            ("unexpected-value", text)
            for name, want in (expected or {}).items()
            for text in _compare(name, first.outputs[name], want, tolerance)
        ),
    ]
    report = KernelReport(
        file=request.name,
        kernel=kernel.entry,
        target=kernel.target,
        grid=request.grid,
        block=request.block,
        dynamic_smem_bytes=request.smem,
        resources=kernel.resources,
        seed=request.seed,
        orders=orders,
        seconds=round(time.perf_counter() - start, 3),
        outputs=[
            _summarize(n, a, None if n in arguments.inputs else first.unwritten[n]) for n, a in first.outputs.items()
        ],
        printed=first.printed,
        counts=first.counts.record(),
        observed=first.observed,
        faults=[
            *(Fault(level="error", kind=kind, message=text) for kind, text in faults),
            *map(convert_finding, first.findings),
        ],
        failures=[
            *(text for _, text in faults),
            *(f"formal finding: {f.text}" for f in first.findings if f.level == FORMAL and request.formal),
        ],
    )
    return report, first.outputs


#: Kinds of faults by patterns of their reasons; the first match counts.
_KINDS = {
    "data-race": r"data race",
    "deadlock": r"deadlock",
    "endless-loop": r"endless loop|no end of",
    "misaligned-access": r"misaligned",
    "out-of-bounds": r"out of bounds|is in no memory",
    "uninitialized-read": r"nothing has written",
    "state-of-a-launch": r"earlier launch left",
    "missing-proxy-fence": r"fence\.proxy\.async",
    "asynchronous-access": r"asynchronous|bulk|wgmma|mbarrier|not delivered",
    "barrier": r"barrier|membermask|by only some threads",
    "trap": r"trap|brkpt|assert",
}


#: Kinds of errors that are no faults, with their level.
_ERRORS: dict[type[GreenfastError], tuple[str, str]] = {
    UnsupportedError: ("unsupported", "unsupported"),
    CompileError: ("error", "does-not-compile"),
    UsageError: ("error", "wrong-request"),
    MachineError: ("unsupported", "unsupported"),
}
#: The line that a message of the compiler or about an instruction names.
_LINE = re.compile(r"(?:^| at )([\w.-]+)(?::|\()(\d+)", re.MULTILINE)


def describe_error(request: KernelRequest, error: GreenfastError) -> KernelReport:
    """Return the report of a run that ended with a fault, or that was refused."""
    return KernelReport(
        file=request.name,
        kernel=getattr(error, "kernel", "") or request.kernel or "",
        target=request.arch or "",
        grid=request.grid,
        block=request.block,
        dynamic_smem_bytes=request.smem,
        resources=None,
        seed=request.seed,
        orders=request.orders or ORDERS,
        seconds=0.0,
        outputs=[],
        printed=getattr(error, "printed", ""),
        counts=None,
        observed=getattr(error, "observed", None),
        faults=[convert_error(error)],
        failures=[str(error)],
    )


def convert_error(error: GreenfastError) -> Fault:
    """Return a fault that ended a run, or the reason of a refusal, as data."""
    more: dict[str, Any] = {}
    if isinstance(error, KernelFaultError):
        where = error.location
        reason = error.reason or str(error)
        level, kind = (
            error.level,
            next((kind for kind, pattern in _KINDS.items() if re.search(pattern, reason)), "fault"),
        )
        if where is not None:
            more = {
                "instruction": where.instruction,
                "place": where.place,
                "block": where.block,
                "thread": where.thread,
            }
        if where is not None and where.source is not None:
            shown = where.source.shown
            more |= {"file": shown.file, "line": shown.line, "function": demangle(shown.function)}
            more["stack"] = [
                Line(file=f.file, line=f.line, function=demangle(f.function)) for f in where.source.stack or (shown,)
            ]
    else:
        level, kind = next((k for of, k in _ERRORS.items() if isinstance(error, of)), ("error", "error"))
        if place := _LINE.search(str(error)):
            more = {"file": place[1], "line": int(place[2])}
    return Fault(level=level, kind=kind, message=str(error), **more)


def convert_finding(finding: Finding) -> Fault:
    """Return a finding that did not end the run, in the form of a fault."""
    file, _, line = finding.location.rpartition(":")
    number = int(line) if line.isdigit() else None
    return Fault(level=finding.level, kind=finding.name, message=finding.text, file=file or None, line=number)


def _check_launch(request: KernelRequest) -> None:
    """Raise UsageError for a launch that every GPU refuses, and for a number of orders below 1."""
    if request.orders is not None and request.orders < 1:
        raise UsageError(f"--orders {request.orders}: give at least 1")
    threads = math.prod(request.block)
    if threads > MOST_THREADS or any(size > limit for size, limit in zip(request.block, MOST_BLOCK, strict=True)):
        raise UsageError(
            f"--block {_format_extent(request.block)}: a block has at most {MOST_THREADS} threads, and at most "
            f"{_format_extent(MOST_BLOCK)} in x, y, z"
        )
    if any(size > limit for size, limit in zip(request.grid, MOST_GRID, strict=True)):
        raise UsageError(
            f"--grid {_format_extent(request.grid)}: at most {_format_extent(MOST_GRID)} blocks in x, y, z"
        )
    if request.observe.trace is not None:
        index, warp = request.observe.trace
        warps = -(-threads // 32)
        inside = all(0 <= n < size for n, size in zip(index, request.grid, strict=True)) and 0 <= warp < warps
        if not inside:
            raise UsageError(
                f"--trace-warp {_format_extent(index)}:{warp}: the grid is {_format_extent(request.grid)}, and a block "
                f"has {warps} warps"
            )


def limit_threads(directives: str) -> int:
    """Return the threads that a block of a kernel with these directives can have."""
    match = re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", directives)
    return math.prod(int(size) for size in match[1].split(",")) if match else MOST_THREADS


def _check_bounds(request: KernelRequest, entry: str, maximum: int) -> None:
    """Raise UsageError where the block has more threads than the kernel's __launch_bounds__."""
    if math.prod(request.block) > maximum:
        raise UsageError(
            f"--block {_format_extent(request.block)}: __launch_bounds__ of {entry} allows {maximum} threads"
        )


def _format_extent(extent: Extent) -> str:
    return ",".join(map(str, extent))


#: PTX begins with its version, after comments.
_IS_PTX = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*\.version\b", re.DOTALL)


def _read_source(request: KernelRequest) -> str:
    if isinstance(request.source, str):
        return request.source
    try:
        return read_file(request.source).decode()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "not a text"
        raise UsageError(f"{request.source}: cannot be read ({why})") from e


def _compile(request: KernelRequest, text: str) -> tuple[str, str, str, Resources | None]:
    """Return the PTX, the kernel's name in it, the target, and the compiler's resource usage for a CUDA source."""
    name = Path(request.name)
    if name.suffix == ".ptx":
        if request.arch or request.defines or request.includes or request.observe.watch:
            raise UsageError(
                "--arch, --define, --include and --watch are for a CUDA source; a PTX file is compiled already"
            )
        return text, _choose_entry(request, entries(text)), "", None
    defines = [_format_define(text) for text in request.defines]
    text = insert_watches(text, name.name, request.observe.watch)
    if defines:  # messages keep the lines of the file
        text = "\n".join([*defines, f'#line 1 "{name.name}"', text])
    folders = (*((name.resolve().parent,) if isinstance(request.source, Path) else ()), *request.includes)
    source = KernelSource(request.kernel or "", text, name.name, folders, request.block, request.smem)
    target = Target.parse(request.arch or DEFAULT_TARGET)
    try:
        ptx = to_ptx(source, target, isolated=True)
    except CompileError as e:
        if request.observe.watch:
            e.args = (f"{e}\n(with --watch: its expressions must be valid where the line begins)",)
        raise
    entry = _choose_entry(request, entries(ptx))
    resources = compile_kernel(dataclasses.replace(source, entry=entry), target, isolated=True).resources
    limit = most_shared(target)
    if resources.smem_bytes > limit:
        raise UsageError(
            f"--smem {request.smem}: with {resources.static_smem_bytes} bytes of static shared memory that is more "
            f"than the {limit} bytes that a block of {target.name} can have"
        )
    return ptx, entry, target.name, resources


def _load_program(request: KernelRequest, ptx: str, entry: str) -> tuple[Module, Program]:
    """Return the kernel's program. Raise UsageError for PTX that was truncated or edited."""
    try:
        return load_program(ptx, entry)
    except (AssertionError, AttributeError, IndexError, KeyError, ValueError) as e:
        if not request.name.endswith(".ptx"):
            raise InternalError(entry, e) from e
        raise UsageError(f"{request.name}: {entry} cannot be read as PTX; is the file whole?") from None


def _read_sources(request: KernelRequest, text: str, module: Module) -> dict[str, str]:
    """Return the texts of the kernel's source and of the headers beside it; none of a PTX file's missing files."""
    own = {} if request.name.endswith(".ptx") else {Path(request.name).name: text}
    paths = {Path(name) for name in module.files if Path(name).is_absolute()}
    headers = {p.name: p.read_text(errors="replace") for p in sorted(paths) if p.suffix != ".ptx" and p.is_file()}
    return {**headers, **own}


def _format_define(text: str) -> str:
    match = re.fullmatch(r"([A-Za-z_]\w*)(?:=([^\n]*))?", text)
    if match is None:
        raise UsageError(f"--define {text!r}: give NAME or NAME=VALUE")
    return f"#define {match[1]} {'1' if match[2] is None else match[2]}"


def _choose_entry(request: KernelRequest, names: Sequence[str]) -> str:
    """Return the requested kernel's name as the file spells it. Raises UsageError with the names of all kernels."""
    if not names:
        raise UsageError(f"{request.name} holds no kernel; a template needs an explicit instantiation in the file")
    if request.kernel is None:
        fitting = list(names)
    elif request.kernel in names:
        fitting = [request.kernel]
    else:  # a mangled name holds the name after its length (Itanium C++ ABI, 5.1.5)
        part = re.compile(rf"_Z(?:.*\D)?{len(request.kernel)}{re.escape(request.kernel)}")
        fitting = [name for name in names if part.match(name)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise unknown(f"kernel of {request.name}", request.kernel or "", names)
    raise UsageError(f"{request.name} holds several kernels; name one with --kernel: {', '.join(fitting)}")


def _run_orders(
    request: KernelRequest, kernel: LoadedKernel, arguments: Arguments, orders: int
) -> tuple[GridResult, list[str]]:
    """Return the result of the first order of warps, and how others differ from it."""
    plan = Launch(request.grid, tuple(arguments.launch), cooperative=True)
    results = []
    for n in range(orders):
        try:
            results.append(
                run_grid(
                    kernel.ptx,
                    kernel.entry,
                    request.block,
                    request.smem,
                    plan,
                    arguments.inputs,
                    arguments.outputs,
                    seed=request.seed + n,
                    later=() if n else [request.seed] * LAUNCHES,
                    always=False,
                    may_read_left=True,
                    keep_formal=True,
                    structs=arguments.structs,
                    observe=NOTHING if n else request.observe,
                )
            )
        except KernelFaultError as e:
            if n == 0:
                raise
            e.args = (f"{e}; only in the order of the warps that --seed {request.seed} --orders {n + 1} ends with",)
            raise
    first, *others = results
    known = {(f.name, f.location) for f in first.findings}
    for other in others:
        first.findings += [f for f in other.findings if (f.name, f.location) not in known]
        known |= {(f.name, f.location) for f in other.findings}
    return first, [
        f"{name!r} differs between {orders} orders of the warps, by up to {_max_error(differences):g}: a race, a "
        "missing fence, or atomics that round differently in another order"
        for name, data in first.outputs.items()
        if (
            differences := [
                _absolute_error(data, o.outputs[name]) for o in others if not _equal_bits(data, o.outputs[name])
            ]
        )
    ]


def _compare_later_launches(first: GridResult) -> list[str]:
    """Describe how later launches in the same memory, with the variables of the first one, differ from it."""
    names = ", ".join(sorted({name for _, name in first.changed}))
    result = []
    for name, data in first.outputs.items():
        errors = [
            _absolute_error(data, later.outputs[name])
            for later in first.later
            if not _equal_bits(data, later.outputs[name])
        ]
        if errors:
            missing = max(later.unwritten[name] for later in first.later) - first.unwritten[name]
            change = f"has {missing} bytes more that are never written" if missing > 0 else "differs"
            by = f", by up to {_max_error(errors):g}" if missing <= 0 else ""
            result.append(f"{name!r} {change} in a later launch{by}, with {names} changed by an earlier launch")
    return result


def _equal_bits(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


def _absolute_error(a: Array, b: Array) -> NDArray[np.float64]:
    """Return absolute differences of elements; 0 where both are NaN."""
    with np.errstate(all="ignore"):
        error: NDArray[np.float64] = np.abs(a.astype(np.float64) - b.astype(np.float64))
    error[(a == b) | ((a != a) & (b != b))] = 0.0
    return error


def _max_error(errors: Sequence[NDArray[np.float64]]) -> float:
    """Return the largest error; infinite if one is NaN."""
    largest = [float(error.max()) for error in errors]
    return max(value if value == value else math.inf for value in largest)


def load_expected(name: str, path: Path, arguments: Arguments) -> Array:
    """Load the expected values of an output. Raise UsageError for another shape or an unknown output."""
    if name not in arguments.outputs:
        raise unknown("output in --expect", name, arguments.outputs)
    want = read_array(path, f"--expect {name}")
    shape = arguments.outputs[name].shape
    if want.shape != shape:
        raise UsageError(f"--expect {name}: {path} has shape {list(want.shape)}, the buffer has {list(shape)}")
    return want


def _compare(name: str, got: Array, want: Array, tolerance: float) -> list[str]:
    """Describe the difference between an output and its expected values; empty if they agree. NaN agrees with NaN."""
    error = _absolute_error(got, want)
    bad = ~(error <= tolerance) if tolerance else ~((got == want) | ((got != got) & (want != want)))
    if not bad.any():
        return []
    first = np.unravel_index(int(bad.argmax()), got.shape)
    location = f"{name}[{', '.join(map(str, first))}]"
    return [
        f"{int(bad.sum())} of {got.size} elements of {name!r} are wrong by more than {tolerance:g}, "
        f"at most by {_max_error([error]):g}; the first is {location} = {got[first]}, expected {want[first]}"
    ]


def _summarize(name: str, data: Array, unwritten: int | None) -> Output:
    numbers = data[data == data]
    some = numbers.size > 0
    with np.errstate(all="ignore"):
        return Output(
            name=name,
            dtype=data.dtype.name,
            shape=data.shape,
            min=float(numbers.min()) if some else None,
            max=float(numbers.max()) if some else None,
            mean=float(numbers.mean(dtype=np.float64)) if some else None,
            nan=data.size - numbers.size,
            bytes=data.nbytes,
            unwritten_bytes=unwritten,
        )
