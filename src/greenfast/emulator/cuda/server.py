"""Serve the calls of a running program: its modules, memory, copies and launches. cudart.c is the other side."""

from __future__ import annotations

import math
import shutil
import socket
import struct
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from greenfast.device.toolchain import cuda_include_dirs
from greenfast.emulator.cuda.fatbinary import choose_ptx, read_ptx
from greenfast.emulator.cuda.launch import ProgramLauncher
from greenfast.emulator.cuda.library import CAPACITY
from greenfast.emulator.cuda.memory import DEVICE, MAKERS, MANAGED, DeviceMemory
from greenfast.emulator.findings import NOTE, UNSUPPORTED, Findings
from greenfast.emulator.grid import MULTIPROCESSORS, KernelLaunch, load_module, load_program
from greenfast.emulator.grid import THREADS as _RESIDENT
from greenfast.emulator.kernel_run import Fault, convert_error, limit_threads
from greenfast.emulator.machine.memory import FUNCTION_BASE, UNWRITTEN, WRITTEN
from greenfast.emulator.machine.observed import NOTHING, Observe
from greenfast.emulator.machine.tensormap import bind, encode
from greenfast.emulator.ptx.names import demangle, read_shapes
from greenfast.emulator.ptx.syntax import Module
from greenfast.emulator.variables import initial_value, layout_shared, pack
from greenfast.spec.errors import GreenfastError
from greenfast.spec.facts import ERROR
from greenfast.spec.kernel import Launch, Struct, TensorMap
from greenfast.spec.limits import MOST_BLOCK, MOST_GRID, MOST_THREADS

REQUEST, REPLY = struct.Struct("<II14Q"), struct.Struct("<iI6Q")
_OPERATIONS = (
    *("module", "function", "variable", "allocate", "release", "copy", "fill", "symbol", "layout", "launch"),
    *("attributes", "lookup", "refuse", "tensormap", "register"),
)
#: The calls of programs for operations that a runtime may lack.
_CALLS = {
    **{2: "a managed variable", 3: "cudaMalloc", 4: "cudaFree", 5: "cudaMemcpy", 6: "cudaMemset"},
    **{7: "a copy to or from a variable", 11: "cudaPointerGetAttributes", 13: "cuTensorMapEncodeTiled"},
    14: "cudaHostRegister",
}
#: Errors of CUDA's runtime.
_INVALID_VALUE, _OUT_OF_MEMORY, _INVALID_CONFIGURATION, _INVALID_SYMBOL, _INVALID_FUNCTION = 1, 2, 9, 13, 98
_INVALID_DIRECTION = 21
_TOO_MANY_RESOURCES, _TOO_LARGE, _NOT_SUPPORTED = 701, 720, 801
#: Shared memory of a block without and with cudaFuncAttributeMaxDynamicSharedMemorySize.
_SHARED, _MAX_SHARED = 49152, 232448
#: cudaFuncAttributeMaxDynamicSharedMemorySize.
_DYNAMIC_SHARED = 8
#: Kinds of copies by their numbers in CUDA's runtime: whether the destination and the source are on the device.
_COPIES = {0: (False, False), 1: (True, False), 2: (False, True), 3: (True, True)}
_COPY_NAMES = ("HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice", "Default")
_RELOCATABLE = 2
#: CUtensorMapDataType -> NumPy's name, by its size: the emulator copies elements without their meaning.
_MAP_TYPES = ("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "uint16")
_SWIZZLES = (0, 32, 64, 128)


@dataclass
class LoadedModule:
    """Device code of a program. addresses: of its variables. refusal: why its kernels cannot run, "" if they can."""

    ptx: str = ""
    module: Module | None = None
    symbols: dict[str, int] = field(default_factory=dict)
    refusal: str = ""


@dataclass
class KernelHandle:
    """A kernel of a program. max_shared: bytes of dynamic shared memory that it may have."""

    module: LoadedModule
    name: str
    max_shared: int = _SHARED


class CallError(Exception):
    """A call that fails with an error of CUDA's runtime."""

    def __init__(self, error: int) -> None:
        super().__init__(error)
        self.error = error


class Runtime:
    """The calls of CUDA's runtime that concern modules and kernels. Subclasses have memory and run launches."""

    #: The newest architecture for which PTX is taken.
    limit = 90

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.modules: list[LoadedModule] = []
        self.kernels: dict[int, KernelHandle] = {}
        #: The output of the last launch.
        self.printed = b""
        self.process = 0

    def answer(self, operation: int, values: list[int], payload: bytes) -> tuple[bytes, bytes]:
        """Return the reply to a request, and its payload."""
        error, results, data = 0, (0,), b""
        try:
            handle: Any = getattr(self, f"_{_OPERATIONS[operation]}", None)
            if handle is None:
                self._report("unsupported", f"{_CALLS[operation]} is not emulated here", 0, UNSUPPORTED)
                raise CallError(_NOT_SUPPORTED)
            error, results, data = handle(values, payload) or (0, (0,), b"")
        except CallError as e:
            error = e.error
        except GreenfastError as e:
            self._keep_error(e)
            error = _NOT_SUPPORTED
        padded = [v & 2**64 - 1 for v in (*results, *[0] * 6)][:6]
        return REPLY.pack(error, len(data), *padded), data

    def _keep_error(self, error: GreenfastError) -> None:
        """Keep the reason why a call was refused."""
        self.findings.add("", convert_error(error))

    def _load_variables(self, made: LoadedModule, module: Module) -> None:
        """Give the variables of a module their memory and initial values."""

    # ---- modules ----------------------------------------------------------------------------------------------------

    def _module(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        made = LoadedModule()
        self.modules.append(made)
        if values[0] == _RELOCATABLE:
            made.refusal = "relocatable device code needs a linker (compile without -rdc=true or -dc)"
            return 0, (len(self.modules) - 1,), b""
        try:
            made.ptx = choose_ptx(read_ptx(payload), self.limit)
            made.module = load_module(made.ptx)
        except GreenfastError as e:
            made.refusal = str(e)
        else:
            self._load_variables(made, made.module)
            self.findings.files.update(made.module.files)
        return 0, (len(self.modules) - 1,), b""

    def _function(self, values: list[int], payload: bytes) -> None:
        self.kernels[values[1]] = KernelHandle(self.modules[values[0]], payload.decode())

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def _kernel(self, address: int) -> KernelHandle:
        """Return a kernel that can run. Raises CallError for an unknown one, and one of a refused module."""
        kernel = self.kernels.get(address)
        if kernel is None:
            raise CallError(_INVALID_FUNCTION)
        if kernel.module.refusal:
            text = f"{demangle(kernel.name)}: {kernel.module.refusal}"
            self.findings.add(kernel.name, Fault(level=UNSUPPORTED, kind="unsupported", message=text))
            raise CallError(_NOT_SUPPORTED)
        return kernel

    def _layout(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        kernel = self._kernel(values[0])
        assert kernel.module.module is not None
        layout, end = pack(kernel.module.module.entry(kernel.name).params)
        sizes = {p.name: p.size for p in kernel.module.module.entry(kernel.name).params}
        return 0, (end,), b"".join(struct.pack("<II", start, sizes[name]) for name, start in layout.items())

    def _attributes(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        kernel = self._kernel(values[0])
        module = kernel.module.module
        assert module is not None
        function = module.entry(kernel.name)
        _, shared = layout_shared(module, function, 0)
        if values[1] == 1 + _DYNAMIC_SHARED:
            if values[2] + shared > _MAX_SHARED:
                raise CallError(_INVALID_VALUE)
            kernel.max_shared = max(values[2], _SHARED - shared)
        _, local = pack([v for v in function.variables.values() if v.space == "local"])
        constant = sum(v.size for v in module.variables.values() if v.space == "const")
        return 0, (shared, local, limit_threads(function.directives), constant, kernel.max_shared), b""

    def _launch(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        kernel = self._kernel(values[0])
        module = kernel.module.module
        assert module is not None
        x, y, z, bx, by, bz, shared, cx, cy, cz, cooperative, early, _ = values[1:14]
        grid, block, cluster = (x, y, z), (bx, by, bz), (cx, cy, cz)
        self._check(kernel, grid, block, shared)
        most = _RESIDENT // (-(-math.prod(block) // 32) * 32) * MULTIPROCESSORS
        if cooperative and math.prod(grid) > most:
            text = f"a cooperative launch of {math.prod(grid)} blocks; at most {most} of this size are resident"
            self._report_launch(kernel, text)
            raise CallError(_TOO_LARGE)
        function = module.entry(kernel.name)
        layout, _ = pack(function.params)
        arguments = tuple(
            Struct((np.frombuffer(payload[layout[p.name] : layout[p.name] + p.size], np.uint8),))
            for p in function.params
        )
        plan = Launch(grid, arguments, cluster=cluster, early=bool(early), cooperative=bool(cooperative))
        _, program = load_program(kernel.module.ptx, kernel.name)
        if not program.function.shapes:
            program.function.shapes = read_shapes([_read(path) for path in module.files])
        step = KernelLaunch(kernel.module.ptx, kernel.name, block, shared, plan)
        return 0, (self._run(kernel, step, payload),), self.printed

    def _run(self, kernel: KernelHandle, step: KernelLaunch, payload: bytes) -> int:
        """Run a launch. Its arguments are Structs of bytes. Return an error of CUDA's runtime. Sets ``printed``."""
        raise NotImplementedError

    def _check(self, kernel: KernelHandle, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> None:
        """Raise CallError for a launch that every H100 refuses."""
        assert kernel.module.module is not None
        function = kernel.module.module.entry(kernel.name)
        _, static = layout_shared(kernel.module.module, function, 0)
        limit = limit_threads(function.directives)
        error, text = 0, ""
        if min(*grid, *block) < 1 or any(
            n > m for n, m in zip((*grid, *block), (*MOST_GRID, *MOST_BLOCK), strict=True)
        ):
            limits = f"extents are at least 1, of the grid at most {MOST_GRID}, of a block at most {MOST_BLOCK}"
            error, text = _INVALID_CONFIGURATION, f"a grid of {grid} blocks of {block} threads; {limits}"
        elif math.prod(block) > MOST_THREADS:
            error, text = _INVALID_CONFIGURATION, f"blocks of {math.prod(block)} threads; at most {MOST_THREADS}"
        elif math.prod(block) > limit:
            error = _TOO_MANY_RESOURCES
            text = f"blocks of {math.prod(block)} threads; its __launch_bounds__ allow {limit}"
        elif shared and shared + static > max(kernel.max_shared + static, _SHARED):
            error = _INVALID_VALUE
            text = (
                f"{shared} bytes of dynamic and {static} of static shared memory; above {_SHARED} in sum, set "
                "cudaFuncAttributeMaxDynamicSharedMemorySize"
            )
        if error:
            self._report_launch(kernel, f"a launch with {text}")
            raise CallError(error)

    def _report_launch(self, kernel: KernelHandle, text: str) -> None:
        """Add a finding about a launch that every H100 refuses."""
        message = f"{demangle(kernel.name)}: {text}"
        self.findings.add(kernel.name, Fault(level=ERROR, kind="invalid-launch", message=message))

    def _tensormap(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        kind, rank, address, interleave, swizzle, _ = values[:6]
        numbers = struct.unpack("<10Q10I", payload)
        extents, strides, box = numbers[:rank], numbers[5 : 5 + rank - 1], numbers[10 : 10 + rank]
        if kind >= len(_MAP_TYPES) or swizzle >= len(_SWIZZLES) or interleave:
            raise CallError(_INVALID_VALUE)
        if any(step != 1 for step in numbers[15 : 15 + rank]):
            self._report("unsupported", "cuTensorMapEncodeTiled with element strides is not emulated", 0, UNSUPPORTED)
            raise CallError(_NOT_SUPPORTED)
        item = np.dtype(_MAP_TYPES[kind]).itemsize
        layout = TensorMap(
            "memory", _MAP_TYPES[kind], extents[::-1], (*strides[::-1], item), box[::-1], _SWIZZLES[swizzle]
        )
        return 0, (0,), self._encode_map(layout, address)

    def _encode_map(self, layout: TensorMap, address: int) -> bytes:
        """Return the bytes of a tensor map at an address. Raises CallError if that is no device memory."""
        raise NotImplementedError

    # ---- reports ----------------------------------------------------------------------------------------------------

    def _refuse(self, values: list[int], payload: bytes) -> None:
        name = payload.decode(errors="replace")
        self._report("unsupported", f"{name} is not emulated", values[1], UNSUPPORTED)

    def _report(self, kind: str, text: str, caller: int, level: str = ERROR) -> None:
        """Add a finding about a call of the program."""
        file, _, line = self._resolve(caller).rpartition(":")
        where = f" at {Path(file).name}:{line}" if file else ""
        number = int(line) if line.isdigit() else None
        self.findings.add("", Fault(level=level, kind=kind, message=text + where, file=file or None, line=number))

    def _resolve(self, address: int) -> str:
        return _find_line(self.process, address) if address and self.process else ""


class Server(Runtime):
    """The state of a program's device. launches and seconds: by kernel."""

    def __init__(self, findings: Findings, seed: int = 0, orders: int = 1, observe: Observe = NOTHING) -> None:
        super().__init__(findings)
        self.memory = DeviceMemory(CAPACITY)
        self.memory.resolve = self._resolve
        self.launcher = ProgramLauncher(self.memory, seed, orders, observe)
        self.variables: dict[int, tuple[int, int]] = {}
        #: Host memory of cudaHostRegister: its sizes by address. Kernels cannot reach it here.
        self.registered: dict[int, int] = {}
        self.launches: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the program ends."""
        with connection, connection.makefile("rb") as stream:
            while len(header := stream.read(REQUEST.size)) == REQUEST.size:
                operation, size, *values = REQUEST.unpack(header)
                reply, data = self.answer(operation, values, stream.read(size))
                try:
                    connection.sendall(reply + data)
                except OSError:  # the program was killed
                    return

    def _load_variables(self, made: LoadedModule, module: Module) -> None:
        """Give the variables of a module their memory and initial values."""
        made.symbols = {name: FUNCTION_BASE + 16 * n for n, name in enumerate(module.functions)}
        held = [v for v in module.variables.values() if v.space in ("global", "const") and v.size]
        for v in held:
            # Host code may access managed variables. PTX does not mark them, so their pages are opened by name.
            a = self.memory.allocate(v.size, DEVICE, name=f"variable {demangle(v.name)} of module {len(self.modules)}")
            if a is None:
                raise CallError(_OUT_OF_MEMORY)
            made.symbols[v.name] = self.memory.base + a.start
        for v in held:
            start = made.symbols[v.name] - self.memory.base
            data = initial_value(v, made.symbols).ljust(v.size, b"\0")
            self.memory.data[start : start + v.size] = np.frombuffer(data, np.uint8)
            self.memory.state[start : start + v.size] = WRITTEN

    def _variable(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        number, host, size, managed = values[:4]
        address = self.modules[number].symbols.get(payload.decode(), 0)
        self.variables[host] = (address, size)
        if managed and self.modules[number].refusal:  # the program would read it without a call
            text = f"managed variable {demangle(payload.decode())}: {self.modules[number].refusal}"
            self.findings.add("", Fault(level=UNSUPPORTED, kind="unsupported", message=text))
            raise CallError(_NOT_SUPPORTED)
        allocation = self.memory.find(address) if address else None
        if managed and allocation is not None:
            allocation.kind = MANAGED
        return 0, (address,), b""

    def _symbol(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        address, size = self.variables.get(values[0], (0, 0))
        if not address:
            raise CallError(_INVALID_SYMBOL)
        return 0, (address, size), b""

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        size, kind, caller = values[:3]
        made = self.memory.allocate(size, kind, caller)
        if made is None:
            raise CallError(_OUT_OF_MEMORY)
        return 0, (self.memory.base + made.start,), b""

    def _release(self, values: list[int], payload: bytes) -> None:
        address, kind, caller = values[:3]
        a = self.memory.find(address)
        if a is None or a.start != address - self.memory.base:
            where = self.memory.describe(address - self.memory.base)
            self._report("invalid-free", f"cudaFree of {address:#x}, not the begin of an allocation: {where}", caller)
            raise CallError(_INVALID_VALUE)
        if (a.kind == 1) != (kind == 1):
            wrong, right = ("cudaFreeHost", "cudaFree") if kind == 1 else ("cudaFree", "cudaFreeHost")
            self._report("invalid-free", f"{wrong} of memory from {MAKERS[a.kind]}; use {right}", caller)
            raise CallError(_INVALID_VALUE)
        self.memory.free(a)

    def _copy(self, values: list[int], payload: bytes) -> None:
        dst, dst_pitch, dst_slice, src, src_pitch, src_slice, width, height, planes, kind, caller = values[:11]
        name = f"a copy of {width * height * planes} bytes"
        if kind >= len(_COPY_NAMES):
            self._report("invalid-copy", f"{name} with the cudaMemcpyKind {kind}; known are 0 to 4", caller)
            raise CallError(_INVALID_DIRECTION)
        if kind in _COPIES:
            for address, wanted, role in ((dst, _COPIES[kind][0], "destination"), (src, _COPIES[kind][1], "source")):
                inside = self._is_inside(address)
                host = not inside or ((a := self.memory.find(address)) is not None and a.kind in (1, MANAGED))
                if wanted != inside and not (host and inside):
                    held = "device" if inside else "host"
                    self._report(
                        "invalid-copy", f"{name} by cudaMemcpy{_COPY_NAMES[kind]}: its {role} is {held} memory", caller
                    )
                    raise CallError(_INVALID_VALUE)
        to = self._rows(dst, dst_pitch, dst_slice, width, height, planes, f"{name} to", caller)
        origin = self._rows(src, src_pitch, src_slice, width, height, planes, f"{name} from", caller)
        state = self.memory.state
        for n in range(max(len(to), len(origin))):
            if to and origin:
                state[to[n] : to[n] + width] = state[origin[n] : origin[n] + width]
            elif to:
                state[to[n] : to[n] + width] = WRITTEN
        if origin and not to:
            unwritten = sum(int((state[row : row + width] == UNWRITTEN).sum()) for row in origin)
            if unwritten:
                where = self.memory.describe(origin[0])
                text = f"{name} to the host of {unwritten} bytes that nothing has written: from {where}"
                self._report("uninitialized-copy", text, caller, NOTE)

    def _fill(self, values: list[int], payload: bytes) -> None:
        address, pitch, plane, value, width, height, planes, caller = values[:8]
        if not self._is_inside(address):
            self._report("invalid-copy", f"cudaMemset of {address:#x}, not device memory", caller)
            raise CallError(_INVALID_VALUE)
        for row in self._rows(address, pitch, plane, width, height, planes, "cudaMemset of", caller):
            self.memory.data[row : row + width] = value
            self.memory.state[row : row + width] = WRITTEN

    def _is_inside(self, address: int) -> bool:
        return 0 <= address - self.memory.base < self.memory.capacity

    def _rows(
        self, address: int, pitch: int, plane: int, width: int, height: int, planes: int, text: str, caller: int
    ) -> list[int]:
        """Return the offsets of rows in device memory; none for host memory. Raises CallError beyond an allocation."""
        if not self._is_inside(address):
            return []
        size = (planes - 1) * plane + (height - 1) * pitch + width
        if self.memory.find(address, size) is None:
            offset = address - self.memory.base
            where = self.memory.describe(offset)
            if self.memory.find(address) is not None:
                where = f"{size} bytes from {where}"
            self._report("out-of-bounds", f"{text} memory beyond an allocation: {where}", caller)
            raise CallError(_INVALID_VALUE)
        start = address - self.memory.base
        return [start + z * plane + y * pitch for z in range(planes) for y in range(height)]

    def _register(self, values: list[int], payload: bytes) -> None:
        address, size = values[:2]
        if size:
            self.registered[address] = size
        else:
            self.registered.pop(address, None)

    def _lookup(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        a = self.memory.find(values[0])
        kind = 0 if a is None or a.kind not in (1, MANAGED) else a.kind
        return 0, (0 if a is None else self.memory.base + a.start, int(a is not None), kind, self.memory.used()), b""

    def _run(self, kernel: KernelHandle, step: KernelLaunch, payload: bytes) -> int:
        """Run a launch in the program's memory."""
        self._check_pointers(kernel, payload)
        start = time.perf_counter()
        outcome = self.launcher.launch(step, kernel.module.symbols)
        self.launches[kernel.name] += 1
        self.seconds[kernel.name] += time.perf_counter() - start  # type: ignore[assignment]
        self.findings.extend(kernel.name, outcome.faults)
        self.printed = outcome.printed.encode()
        return outcome.error

    def _check_pointers(self, kernel: KernelHandle, payload: bytes) -> None:
        """Refuse a launch with a pointer to memory of cudaHostRegister: a GPU reaches it, the emulator does not."""
        for (word,) in struct.iter_unpack("<Q", payload[: len(payload) // 8 * 8]) if self.registered else ():
            if any(start <= word < start + size for start, size in self.registered.items()):
                text = (
                    f"{demangle(kernel.name)}: kernels cannot access memory of cudaHostRegister (give cudaHostAlloc's)"
                )
                self.findings.add(kernel.name, Fault(level=UNSUPPORTED, kind="unsupported", message=text))
                raise CallError(_NOT_SUPPORTED)

    def _refuse(self, values: list[int], payload: bytes) -> None:
        if values[0]:  # an access of host code
            where = self.memory.describe(values[1] - self.memory.base)
            message = f"{payload.decode(errors='replace')}: {where}"
            self.findings.add("", Fault(level=ERROR, kind="host-access", message=message))
            return
        super()._refuse(values, payload)

    def _encode_map(self, layout: TensorMap, address: int) -> bytes:
        a = self.memory.find(address)
        if a is None:
            raise CallError(_INVALID_VALUE)
        layout = replace(layout, buffer=a.name)
        return encode(bind(layout, self.memory), address - a.start)


def _read(path: str) -> str:
    """Return a source file of the program; empty if it is not here."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@cache
def _find_line(process: int, address: int) -> str:
    """Return the source line, as FILE:LINE, of a call in a running program; empty without debug information."""
    tool = shutil.which("addr2line")
    if tool is None:
        return ""
    maps = [line.split() for line in _read(f"/proc/{process}/maps").splitlines()]
    bounds = [(row[0].partition("-"), row[5]) for row in maps if len(row) > 5]
    spans = [(int(low, 16), int(high, 16), name) for (low, _, high), name in bounds]
    path = next((path for low, high, path in spans if low <= address < high), "")
    if not path.startswith("/"):
        return ""
    base = min(low for low, _, name in spans if name == path)
    with open(path, "rb") as file:
        dynamic = file.read(18)[16] == 3
    place = address - 1 - (base if dynamic else 0)
    command = [tool, "-i", "-e", path, hex(place)]
    headers = tuple(str(folder.resolve()) for folder in cuda_include_dirs())
    for text in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
        name, _, line = text.split(" ")[0].rpartition(":")
        is_header = "/include/cuda_runtime" in name or name.startswith(headers)
        if name.startswith("/") and line.isdigit() and not is_header:
            return f"{name}:{line}"
    return ""
