"""PyTorch extensions with CUDA kernels without a GPU: ``load_inline`` and ``load`` of torch.utils.cpp_extension.

nvcc and the host's compiler build the extension against PyTorch's headers. Its C++ code runs natively and launches
through the library of whole CUDA programs (emulator/cuda), in this process. It gets tensors that report a CUDA device
and share the memory of the labelled CPU tensors. PyTorch's operations on them go back to the CPU tensors.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from greenfast.device.toolchain import cuda_include_dirs
from greenfast.emulator.cuda.extension import AttachedLibrary
from greenfast.emulator.cuda.library import build_library
from greenfast.emulator.cuda.memory import DEVICE
from greenfast.emulator.cuda.program import LIBRARIES, find_nvcc
from greenfast.emulator.cuda.server import CallError, KernelHandle, LoadedModule, Runtime
from greenfast.emulator.findings import Findings
from greenfast.emulator.grid import KernelLaunch
from greenfast.emulator.kernel_run import Fault
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import GLOBAL_BASE
from greenfast.emulator.machine.tensormap import encode, lay_out
from greenfast.emulator.ptx.names import demangle
from greenfast.emulator.triton.cuda_tensors import LabelMode, parse_device, replace_attribute, without_modes
from greenfast.emulator.triton.storage import MemoryRegion, Regions, StorageMap
from greenfast.emulator.variables import initial_value
from greenfast.spec.errors import CompileError, GreenfastError, MachineError, UnsupportedError, UsageError
from greenfast.spec.facts import ERROR
from greenfast.spec.kernel import Argument, Packed, Struct, TensorMap

#: Headers that replace PyTorch's for CUDA, because the CPU build lacks their library.
HEADERS, SMALL_HEADERS = Path(__file__).with_name("include"), Path(__file__).with_name("include_small")
#: A header of a library without PTX. cuRAND's headers for kernels begin with curand_.
_INCLUDE = re.compile(rf'^\s*#\s*include\s*[<"](?!curand_)(({"|".join(LIBRARIES)})[^>"]*)', re.MULTILINE)
#: Options of nvcc that choose an architecture or a standard. The emulator and PyTorch's headers determine both.
_CHOSEN = re.compile(r"-{1,2}(arch|gpu-architecture|gencode|generate-code|code|gpu-code|std|cudart|rdc|dlto)\b.*")
#: Operations in place on the extents of a tensor, or on its storage.
_REFUSED = frozenset({"resize_", "set_", "squeeze_", "t_", "transpose_", "unsqueeze_", "as_strided_", "swapaxes_"})
#: Kinds of devices in DLPack.
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_INVALID_VALUE, _INVALID_SYMBOL, _LAUNCH_FAILURE = 1, 13, 719
#: Bytes above the begin of the memory of a launch that count as its addresses.
_ADDRESSES = 1 << 36


class ExtensionMemory:
    """The storages that extensions can reach, by address."""

    def __init__(self) -> None:
        self._sizes = StorageMap[int]()
        #: Storages of cudaMalloc by address.
        self.allocated: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Add the storage of a CPU tensor."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._sizes.put(storage.data_ptr(), storage, storage.nbytes())

    def find(self, address: int) -> tuple[Any, int] | None:
        """Return the storage that holds an address, and the offset there; None if no storage holds it."""
        for start, reference, size in self._sizes.list_living():
            if start <= address < start + size:
                return torch.UntypedStorage._new_with_weak_ptr(reference.cdata), address - start
        return None

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a CPU tensor at an address. Raises UnsupportedError if no storage holds all of it."""
        with without_modes():
            if 0 in shape:
                return torch.empty_strided(shape, strides, dtype=dtype)
            found = self.find(address)
            size = dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
            if found is None or found[1] + size > found[0].nbytes() or found[1] % dtype.itemsize:
                raise UnsupportedError("an extension uses a CUDA tensor on memory that PyTorch did not allocate")
            storage, offset = found
            return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, strides)


def _relabel(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that reports a CUDA device, on the same memory. Its operations exist only under CudaMode."""
    with without_modes():
        try:
            capsule = torch._C._to_dlpack(tensor.detach())
        except (BufferError, RuntimeError) as e:
            raise UnsupportedError(f"a tensor of {tensor.dtype} for an extension: {e}") from e
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        kind = ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
        assert kind.value == _DLPACK_CPU
        kind.value = _DLPACK_CUDA
        return torch._C._from_dlpack(capsule)


class CudaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs PyTorch's operations on the tensors of an extension on the CPU tensors in the same memory."""

    def __init__(self, labels: LabelMode, memory: ExtensionMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels, self._memory = labels, memory

    def to_cuda(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that an extension gets for a labelled CPU tensor."""
        with without_modes():
            if tensor.layout != torch.strided:
                raise UnsupportedError("a tensor for an extension that is not strided")
            self._memory.add(tensor)
            self._labels.unwritten.discard(tensor)  # an extension's operations are not followed
        return _relabel(tensor)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the labelled CPU tensor on the memory of an extension's tensor."""
        with without_modes():
            address, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        result = self._memory.view(address, shape, strides, tensor.dtype)
        with without_modes():
            self._labels.labels.put(result, torch.device("cuda", 0))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = parse_device(kwargs["device"]) if kwargs.get("device") is not None else None
        given = {id(t): t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_cuda}
        if not given and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ in _REFUSED:
            raise UnsupportedError(f"{func} of a CUDA tensor in an extension is not emulated")
        own: dict[int, torch.Tensor] = {}

        def replace_tensor(value: Any) -> Any:
            if id(value) not in given:
                return value
            result = self.to_cpu(value)
            own[id(result)] = value
            return result

        cpu_args, cpu_kwargs = tree_map(replace_tensor, (args, kwargs))
        if kwargs.get("device") is not None:
            cpu_kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            cpu_kwargs["pin_memory"] = False
        to_host = target is not None and target.type == "cpu"
        if to_host or (func is torch.ops.aten.copy_.default and not args[0].is_cuda):
            for tensor in tree_iter((cpu_args, cpu_kwargs)):
                if id(tensor) in own:
                    self._labels.before_host_copy(tensor)
        with torch._C.DisableTorchFunction():
            result = func(*cpu_args, **cpu_kwargs)

        def replace_result(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or to_host:
                return value
            return own[id(value)] if id(value) in own else self.to_cuda(value)

        return tree_map(replace_result, result)


@dataclass
class ExtensionVariable:
    """A variable of an extension's module. content: the memory that cudaMemcpyToSymbol writes; None before that."""

    module: LoadedModule
    name: str
    size: int
    content: torch.Tensor | None = None

    def holds(self, address: int) -> bool:
        """Return whether an address is in the contents."""
        return self.content is not None and 0 <= address - self.content.data_ptr() < self.size

    def is_named_in(self, kernel: KernelHandle) -> bool:
        """Return whether a kernel names the variable, or may call a function that does."""
        text = kernel.module.ptx
        start = text.find(f".entry {kernel.name}")
        if ".func" not in text:
            text = text[start : text.find("\n}", start)]
        pattern = rf"(?m)^(?!\s*(?:\.visible|\.weak|\.const|\.global)).*{re.escape(self.name)}\b"
        return kernel.module is self.module and re.search(pattern, text) is not None

    def set_initial_value(self) -> None:
        """Declare the variable with its contents in the module's PTX, for the launches from now on."""
        assert self.content is not None
        with without_modes():
            data = ", ".join(map(str, self.content.tolist()))
        declaration = re.compile(
            rf"^(\s*(?:\.visible\s+|\.weak\s+)?\.(?:const|global)\s+)(?:\.align\s+(\d+)\s+)?\.\w+\s+"
            rf"{re.escape(self.name)}(?:\[\d*\])?(?:\s*=[^;]*)?;",
            re.MULTILINE,
        )
        text, count = declaration.subn(rf"\1.align 16 .b8 {self.name}[{self.size}] = {{{data}}};", self.module.ptx)
        if count != 1:
            raise UnsupportedError(f"a copy to the variable {self.name} of an extension is not emulated")
        self.module.ptx = text


class ExtensionRuntime(Runtime):
    """CUDA's runtime of all extensions of this process. They register their kernels once, when they are loaded."""

    limit = 1000  # an extension is built for one target

    def __init__(self) -> None:
        super().__init__(Findings())
        self.folder = build_library()
        (path,) = (path for path in self.folder.iterdir() if path.name.startswith("libcudart.so."))
        self.memory = ExtensionMemory()
        self.variables: dict[int, ExtensionVariable] = {}
        #: Runs a launch; None outside of an activation.
        self.execute: Callable[..., None] | None = None
        self.before_host_copy: Callable[[torch.Tensor], None] = lambda tensor: None
        self.library = AttachedLibrary(path, self)

    def _keep_error(self, error: GreenfastError) -> None:
        self.library.failure = self.library.failure or error

    def _variable(self, values: list[int], payload: bytes) -> None:
        number, host, size, managed = values[:4]
        if managed:
            raise UnsupportedError(f"the managed variable {payload.decode()} of an extension is not emulated")
        self.variables[host] = ExtensionVariable(self.modules[number], payload.decode(), size)

    def _symbol(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        """Return the place of a variable: a tensor. Its contents become the variable's initial value."""
        variable = self.variables.get(values[0])
        if variable is None:
            raise CallError(_INVALID_SYMBOL)
        if variable.content is None:
            module = variable.module.module
            assert module is not None
            data = initial_value(module.variables[variable.name], variable.module.symbols)
            variable.content = torch.frombuffer(bytearray(data.ljust(variable.size, b"\0")), dtype=torch.uint8)
            self.memory.add(variable.content)
        return 0, (variable.content.data_ptr(), variable.size), b""

    def _run(self, kernel: KernelHandle, step: KernelLaunch, payload: bytes) -> int:
        """Run a launch. Its pointers become buffers, one per storage, with the number of the parameter as name."""
        if self.execute is None:
            raise UsageError("an extension's kernel was launched after the end of the activation")
        regions: list[MemoryRegion] = []
        contents: list[tuple[bytes, list[tuple[int, int]]]] = []
        for number, argument in enumerate(step.plan.args, 1):
            assert isinstance(argument, Struct)
            (data,) = argument.fields
            assert isinstance(data, np.ndarray)
            pointers = []
            for start in range(0, data.nbytes - 7, 8):
                address = int(data[start : start + 8].view(np.uint64)[0])
                found = self.memory.find(address) if address >= 4096 else None
                if found is not None:
                    begin = address - found[1]
                    regions.append(MemoryRegion(f"parameter {number}", begin, begin + found[0].nbytes(), found[0]))
                    pointers.append((start, address))
            contents.append((data.tobytes(), pointers))
        contents_of = {v.content.data_ptr(): v for v in self.variables.values() if v.content is not None}
        pointed = [contents_of[region.start] for region in regions if region.start in contents_of]
        for region in regions:
            if region.start in contents_of:
                region.name = f"variable {contents_of[region.start].name}"
        if named := [variable for variable in pointed if variable.is_named_in(kernel)]:
            text = f"{demangle(kernel.name)} uses the variable {named[0].name} and gets its address too"
            self._keep_error(UnsupportedError(f"{text}: that is not emulated in an extension"))
            return _LAUNCH_FAILURE
        placed = Regions(regions)
        arguments: list[Argument] = []
        for content, pointers in contents:
            places = [(start, placed.locate(address)) for start, address in pointers]
            arguments.append(Packed(content, tuple((start, *place) for start, place in places if place is not None)))
        try:
            step = replace(step, plan=replace(step.plan, args=tuple(arguments)))
            self.execute(step, placed, lambda name, data: self._keep(kernel, name, data))
            for variable in pointed:
                variable.set_initial_value()
        except BaseException as e:
            self.library.failure = e
            return _LAUNCH_FAILURE
        return 0

    def _keep(self, kernel: KernelHandle, name: str, data: bytes) -> None:
        """Give a variable that a launch changed its contents for later launches."""
        own = [v for v in self.variables.values() if v.module is kernel.module and v.name == name]
        variable = own[0] if own else ExtensionVariable(kernel.module, name, len(data))
        words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
        if ((words >= GLOBAL_BASE) & (words < GLOBAL_BASE + _ADDRESSES)).any():
            label = f"{demangle(kernel.name)} stores an address in the variable {demangle(name)}"
            raise UnsupportedError(f"{label}: no later launch could use it in an extension")
        with without_modes():
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if variable.content is None:
                variable.content = content
                self.memory.add(content)
            else:
                variable.content.copy_(content)
        variable.set_initial_value()

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        size, kind = values[:2]
        make = torch.empty if kind == DEVICE else torch.zeros  # host code may write to the others at any time
        tensor = make(size, dtype=torch.uint8)
        self.memory.add(tensor)
        self.memory.allocated[tensor.data_ptr()] = tensor
        return 0, (tensor.data_ptr(),), b""

    def _release(self, values: list[int], payload: bytes) -> None:
        if self.memory.allocated.pop(values[0], None) is None:
            text = f"cudaFree of {values[0]:#x}, not the begin of an allocation"
            self._report("invalid-free", text, values[2])
            raise CallError(_INVALID_VALUE)

    def _rows(self, address: int, pitch: int, plane: int, extent: tuple[int, int, int]) -> torch.Tensor | None:
        """Return rows of bytes on PyTorch's memory; None for other host memory."""
        if self.memory.find(address) is None:
            return None
        _, height, width = extent
        return self.memory.view(address, extent, (plane or width * height, pitch or width, 1), torch.uint8)

    def _copy(self, values: list[int], payload: bytes) -> None:
        """Copy with PyTorch, so that a recording sees it. The library then copies the same bytes again."""
        dst, dst_pitch, dst_plane, src, src_pitch, src_plane, width, height, planes = values[:9]
        extent = planes, height, width
        target, source = self._rows(dst, dst_pitch, dst_plane, extent), self._rows(src, src_pitch, src_plane, extent)
        if target is None:
            if source is not None:
                self.before_host_copy(source)
            return
        if source is None:
            span = (planes - 1) * src_plane + (height - 1) * src_pitch + width
            data = torch.frombuffer(bytearray(ctypes.string_at(src, span)), dtype=torch.uint8)
            source = data.as_strided(extent, (src_plane or width * height, src_pitch or width, 1))
        for variable in self.variables.values():
            if variable.holds(dst):
                self.before_host_copy(source)  # the contents become a constant
                target.copy_(source)
                variable.set_initial_value()
                return
        target.copy_(source)

    def _fill(self, values: list[int], payload: bytes) -> None:
        address, pitch, plane, value, width, height, planes = values[:7]
        target = self._rows(address, pitch, plane, (planes, height, width))
        if target is None:
            self._report("invalid-copy", f"cudaMemset of {address:#x}, not device memory", values[7])
            raise CallError(_INVALID_VALUE)
        target.fill_(value)
        for variable in self.variables.values():
            if variable.holds(address):
                variable.set_initial_value()

    def _lookup(self, values: list[int], payload: bytes) -> tuple[int, tuple[int, ...], bytes]:
        found = self.memory.find(values[0])
        used = sum(tensor.nbytes for tensor in self.memory.allocated.values())
        return 0, (values[0] - found[1] if found else 0, int(found is not None), 0, used), b""

    def _encode_map(self, layout: TensorMap, address: int) -> bytes:
        return encode(lay_out(layout), address)


#: The activations, the innermost last.
_ACTIVE: list[Extensions] = []


@functools.cache
def get_runtime() -> ExtensionRuntime:
    """Return the runtime of this process. Raises MachineError if its library cannot be built."""
    return ExtensionRuntime()


@dataclass(eq=False)
class Extensions:
    """Builds extensions, and runs their functions, during an activation.

    target: such as "90a". execute: runs a launch. faults: receives findings about calls of CUDA's runtime.
    """

    labels: LabelMode
    target: str
    execute: Callable[..., None]
    faults: list[Fault]

    def replace(self, stack: ExitStack) -> None:
        """Replace the parts of torch.utils.cpp_extension that build and import an extension."""
        for name, value in {
            "_get_build_directory": lambda name, verbose: tempfile.mkdtemp(prefix=f"greenfast-{name}-"),
            "_write_ninja_file_and_build_library": self._build,
            "_import_module_from_library": self._import,
            "CUDA_HOME": "/nowhere",  # scripts look whether there is one
        }.items():
            stack.enter_context(replace_attribute(cpp_extension, name, value))
        _ACTIVE.append(self)
        stack.callback(_ACTIVE.remove, self)

    def _import(self, name: str, path: str, is_python_module: bool) -> Any:
        if not is_python_module:
            raise UnsupportedError(f"extension {name}: is_python_module=False (torch.ops of a library) is not emulated")
        with self._running():
            try:
                module = _IMPORT(name, path, is_python_module)
            except ImportError as error:
                symbol = re.search(r"undefined symbol: (\w+)", str(error))
                if symbol is None:
                    raise
                text = f"extension {name} calls {demangle(symbol[1])}; PyTorch's CPU build lacks it"
                raise UnsupportedError(f"{text}, and so does the emulator") from None
        for attribute, value in vars(module).items():
            if inspect.isbuiltin(value):
                setattr(module, attribute, _wrap(value))
        return module

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call an extension's function with labelled CPU tensors, and return such tensors."""
        mode = CudaMode(self.labels, get_runtime().memory)

        def to_cuda(value: Any) -> Any:
            is_gpu = isinstance(value, torch.Tensor) and self.labels.get_device(value).type == "cuda"
            return mode.to_cuda(value) if is_gpu else value

        def to_cpu(value: Any) -> Any:
            return mode.to_cpu(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

        given, named = tree_map(to_cuda, (args, kwargs))
        with self._running(), mode:
            result = function(*given, **named)
        with torch._C.DisableTorchFunction():
            return tree_map(to_cpu, result)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let this activation run the launches. When the extension's function has ended, raise their error."""
        runtime = get_runtime()
        runtime.findings, before = Findings(), runtime.execute
        runtime.execute, runtime.before_host_copy = self.execute, self.labels.before_host_copy
        try:
            yield
        except Exception:
            self._raise_failure(runtime)
            raise
        finally:
            runtime.execute = before
        self._raise_failure(runtime)

    def _raise_failure(self, runtime: ExtensionRuntime) -> None:
        failure = runtime.library.failure
        runtime.library.reset()
        failing = runtime.findings.failures()
        self.faults += runtime.findings.all
        if failure is not None:
            raise failure from None
        if failing and failing[0].level == ERROR:
            raise KernelFaultError(failing[0].message)
        if failing:
            raise UnsupportedError(failing[0].message)

    # ---- building ---------------------------------------------------------------------------------------------------

    def _build(
        self,
        *,
        name: str,
        sources: Sequence[str],
        build_directory: str,
        extra_cflags: Sequence[str] = (),
        extra_cuda_cflags: Sequence[str] = (),
        extra_ldflags: Sequence[str] = (),
        extra_include_paths: Sequence[str] = (),
        **_: Any,
    ) -> None:
        """Compile and link an extension. Raises CompileError, and MachineError without a compiler."""
        for source in sources:
            header = _INCLUDE.search(Path(source).read_text(errors="replace"))
            if header is not None:
                raise UnsupportedError(f"extension {name} includes {header[1]}: {LIBRARIES[header[2]]} is not emulated")
        compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        if compiler is None:
            raise MachineError(f"extension {name}: no C++ compiler was found; install g++")
        runtime = get_runtime()
        folder, torch_folder = Path(build_directory), Path(str(torch.__file__)).parent
        includes = [f"-I{path}" for path in (HEADERS, *extra_include_paths)]
        system = (
            *(torch_folder / "include", torch_folder / "include" / "torch" / "csrc" / "api" / "include"),
            *(sysconfig.get_paths()["include"], *cuda_include_dirs()),
        )
        for path in system:
            includes += ["-isystem", str(path)]
        defines = [f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_C10D_NCCL=0"]
        commands, objects = [], []
        for number, source in enumerate((*sources, str(HEADERS / "device_guard.cpp"))):
            target = str(folder / f"{number}-{Path(source).stem}.o")
            objects.append(target)
            if Path(source).suffix == ".cu":
                options = [option for option in _chosen(extra_cuda_cflags) if not option.startswith("-lineinfo")]
                embed = ["-gencode", f"arch=compute_{self.target},code=compute_{self.target}", "-no-compress"]
                command = [str(find_nvcc()), *embed, *_CUDA_FLAGS, *options]
            else:
                options = _chosen(extra_cflags)
                command = [compiler, "-std=c++20", "-fPIC", "-w", *options]
            commands.append([*command, *defines, *includes, "-c", source, "-o", target])
        small = [[*command[:1], f"-I{SMALL_HEADERS}", *command[1:]] for command in commands]
        failing = [n for n, output in enumerate(_run_all(small)) if output is not None]
        _check_compiled(name, _run_all([commands[n] for n in failing]))
        libraries = ["-L", str(runtime.folder), "-l:libcudart.so", "-L", str(torch_folder / "lib")]
        link = [compiler, "-shared", *objects, *_chosen(extra_ldflags), *libraries]
        wanted = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _check_compiled(name, _run_all([[*link, *wanted, "-o", str(folder / f"{name}.so")]]))


_IMPORT: Callable[..., Any] = cpp_extension._import_module_from_library
_CUDA_FLAGS = (
    *("-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__"),
    *("-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "--expt-relaxed-constexpr", "-w", "-lineinfo", "-std=c++20"),
    *("-cudart", "shared", "-Xcompiler", "-fPIC"),
)


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that the current activation calls: a module is imported once for all activations."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _ACTIVE:
            raise UsageError(f"{function.__name__} of an extension was called after the end of the activation")
        return _ACTIVE[-1].call(function, args, kwargs)

    return call


def _chosen(options: Sequence[str]) -> list[str]:
    """Return options without those that choose an architecture, a standard or a runtime, and their values.

    A text may hold several options or none: PyTorch hands them to a shell.
    """
    result: list[str] = []
    skips = False
    for option in (word for text in options for word in shlex.split(text)):
        if skips:
            skips = False
        elif _CHOSEN.fullmatch(option):
            skips = "=" not in option
        elif option not in ("-lcudart", "-lcuda"):
            result.append(option)
    return result


def _run_all(commands: Sequence[Sequence[str]]) -> list[str | None]:
    """Run commands at the same time. Return the messages of each that fails, None for the others."""
    pipes: Mapping[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    return [output if process.returncode else None for process, output in zip(processes, outputs, strict=True)]


def _check_compiled(name: str, outputs: Sequence[str | None]) -> None:
    for output in outputs:
        if output is not None:
            raise CompileError(f"extension {name} does not compile:\n{output.strip()[:4000]}")
