"""Convert a Python function to a program on a machine without a GPU: record its Triton launches, fills and copies.

The function runs on labelled CPU tensors (``greenfast.emulator.triton``), and its kernels are recorded in place of
being run. As after a capture on a GPU, the result is data that another process launches on other memory. What PyTorch
computes from constants alone, such as packed weights, becomes the contents of a workspace. What it computes from the
inputs would be kernels of PyTorch, which only a capture on a GPU can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from greenfast.emulator.dependence import find_written_pointers
from greenfast.emulator.grid import load_program
from greenfast.emulator.triton.activation import Activation
from greenfast.emulator.triton.cuda_tensors import replace_attribute
from greenfast.emulator.triton.driver import Binder, LoadedFunction, make_launch, without_modes
from greenfast.emulator.triton.storage import MemoryRegion
from greenfast.judge.solution.capture import MAX_STATE_BYTES, WARM_UP, match_results, uint
from greenfast.judge.solution.languages.compiled import parse_exclusive_target, without_folders
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.kernel import Argument, KernelSource, Launch, Packed, Program, Step, Workspace

_THREADS = 256
_UNITS = ((1, "unsigned char"), (2, "unsigned short"), (4, "unsigned"), (16, "uint4"))


def _loop(entry: str, parameters: str, statement: str) -> KernelSource:
    """Return a kernel that executes a statement for each i below ``count``."""
    text = f"""extern "C" __global__ void {entry}({parameters}, unsigned long long count) {{
  const unsigned long long step = gridDim.x * {_THREADS}ull;
  for (unsigned long long i = blockIdx.x * {_THREADS}ull + threadIdx.x; i < count; i += step) {statement};
}}
"""
    return KernelSource(entry, text, f"{entry}.cu", (), (_THREADS, 1, 1))


_aten = torch.ops.aten
#: Operations that leave their result uninitialised, and such that use the shape and type of a tensor alone.
_BLANK = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_LIKE = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full}
#: Operations with a view as their result, although their schema does not declare it.
_VIEWS = {_aten._unsafe_view, _aten.lift_fresh}
#: Fills by the bytes of an element, and copies by the bytes of a unit. Unlike the kernels of ``capture``, they compare
#: no bits of addresses: the emulator tries both outcomes of such a comparison.
_FILLS = {size: _loop("fill", f"{kind}* to, unsigned value", f"to[i] = ({kind})value") for size, kind in _UNITS[:3]}
_COPIES = {size: _loop("copy", f"const {kind}* from, {kind}* to", "to[i] = from[i]") for size, kind in _UNITS}
_REFUSED = "; a machine without a GPU repeats its Triton kernels, fills and copies"


@dataclass
class _Buffer:
    """A storage, kept alive so that addresses are unique. data: its first contents, None if it is uninitialised."""

    name: str
    storage: Any
    data: bytes | None = None


@dataclass
class _RecordedCall:
    """One call of the function: its steps, the storages that they use, by address, and the names of written ones."""

    steps: list[Step] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    buffers: dict[int, _Buffer] = field(default_factory=dict)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records fills and copies of memory that depends on the inputs, and refuses other operations on it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recording, operation = self._recording, func.overloadpacket
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = [t for t in given if recording.is_recorded(t)]
        if operation in _BLANK:
            result = func(*args, **kwargs)
            recording.blank[_key(result)] = result.untyped_storage()
            return result
        if operation in _LIKE or not known or operation in _VIEWS or _is_view(func):
            result = func(*args, **kwargs)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    recording.blank.pop(_key(value), None)
            return result
        if operation in (_aten.fill_, _aten.zero_):
            recording.add_fill(func, args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if operation is _aten.copy_:
            recording.add_copy(func, args[1], args[0])
            return args[0]
        if operation in (_aten.clone, _aten._to_copy):
            result = func(*args, **kwargs)
            recording.blank[_key(result)] = result.untyped_storage()
            recording.add_copy(func, args[0], result)
            return result
        if operation is _aten._local_scalar_dense:
            raise UsageError("its calls cannot be captured: it reads a value of its inputs on the host")
        raise MachineError(f"PyTorch computes {func} from its inputs{_REFUSED}")


def _is_view(func: Any) -> bool:
    """Return whether an operation returns a view of an argument and writes nothing."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Recording(Activation):
    """An activation that records launches."""

    def __init__(self, target: str) -> None:
        super().__init__(target, cuda_tensors_as_cpu=True, benchmarks="skip")
        self._call = _RecordedCall()
        self.blank: dict[int, Any] = {}
        self._stale: dict[int, Any] = {}
        assert self.tensors is not None
        self.tensors.mode.before_host_copy = self._refuse_host_copy
        for module in ("load", "load_inline"):
            reason = "a PyTorch extension is built and captured on a GPU, and there is none here"
            self._stack.enter_context(replace_attribute(cpp_extension, module, _raising(reason)))

    def __enter__(self) -> Recording:
        return self

    def record(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> Program:
        """Return the program of ``function(*arguments)``; the parameters and errors are those of ``capture``.

        Raises MachineError for work that only a capture on a GPU can read.
        """
        for _ in range(WARM_UP + 1):
            changed = {key for key, buffer in self._call.buffers.items() if buffer.name in self._call.written}
            self._stale |= {key: self._call.buffers[key].storage for key in changed}
            self._call = _RecordedCall()
            for name, tensor in {**outputs, **inputs}.items():
                self._stale.pop(_key(tensor), None)
                self._call.buffers[_key(tensor)] = _Buffer(name, tensor.untyped_storage())
            with _Operations(self):
                results = match_results(function(*arguments), outputs)
        names = self._return(results)
        if not self._call.steps:
            raise UsageError("it launched nothing on the GPU while it was captured")
        given = {*inputs, *outputs, *names.values()}
        spaces = {
            buffer.name: Workspace(buffer.storage.nbytes(), data=buffer.data or b"")
            for buffer in self._call.buffers.values()
            if buffer.name not in given and names.get(buffer.name, buffer.name) not in given and buffer.storage.nbytes()
        }
        if sum(len(space.data) for space in spaces.values()) > MAX_STATE_BYTES:
            raise UsageError(f"it keeps more than {MAX_STATE_BYTES >> 20} MiB beyond the problem's buffers")
        steps = tuple(replace(step, launch=_rename(step.launch, names)) for step in self._call.steps)
        return Program(steps, spaces)

    def _refuse_host_copy(self, tensor: torch.Tensor) -> None:
        if self.is_recorded(tensor):
            raise UsageError("its calls cannot be captured: it copies a tensor that depends on its inputs to the host")

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Return whether the contents of a tensor depend on the inputs."""
        return tensor.layout == torch.strided and _key(tensor) in self._call.buffers

    def add_fill(self, func: Any, tensor: torch.Tensor, value: Any) -> None:
        """Record a fill of a contiguous tensor."""
        with without_modes():
            content = torch.full((1,), value, dtype=tensor.dtype).view(torch.uint8).numpy().tobytes()
            whole = tensor.is_contiguous()
        if len(content) == 8 and content[:4] == content[4:]:
            content = content[:4]
        if not whole or len(content) > 4:
            raise MachineError(f"PyTorch fills a part of a tensor, or with a long value ({func}){_REFUSED}")
        if tensor.numel():
            arguments = (self._address(tensor), uint(int.from_bytes(content, "little"), 4))
            size = len(content)
            self._call.steps.append(Step(_FILLS[size], _launch_loop(tensor.nbytes // size, arguments)))
            self._call.written.add(self._buffer(tensor.untyped_storage()).name)

    def add_copy(self, func: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Record a copy between contiguous tensors of one type."""
        same = (source.shape, source.dtype) == (target.shape, target.dtype)
        if not (same and source.is_contiguous() and target.is_contiguous()):
            raise MachineError(f"PyTorch converts or rearranges its inputs ({func}){_REFUSED}")
        if source.numel():
            self._copy(source.nbytes, self._address(source), self._address(target))
            self._call.written.add(self._buffer(target.untyped_storage()).name)

    def launch(
        self,
        source: Any,
        metadata: Any,
        function: LoadedFunction,
        grid: tuple[int, int, int],
        args: Sequence[Any],
        scratch: Sequence[Any],
    ) -> None:
        """Record a launch."""
        with without_modes():
            binder = Binder(source, metadata)
            regions, parameters = binder.bind(args, scratch)
            names = {region.name: self._find(binder.found, region).name for region in regions.regions}
        ptx = without_folders(function.ptx)
        kernel = KernelSource(
            entry=function.name,
            source=ptx,
            name=f"{function.name}.ptx",
            include_dirs=(),
            block=(32 * metadata.num_warps, 1, 1),
            dynamic_smem_bytes=metadata.shared,
            requires=parse_exclusive_target(ptx),
            language="ptx",
        )
        launch = _rename(make_launch(metadata, grid, parameters), names)
        parsed = load_program(ptx, function.name)[1].function
        written = find_written_pointers(parsed)
        for parameter, argument in zip(parsed.params, launch.args, strict=True):
            if parameter.name in written and isinstance(argument, Packed):
                self._call.written.update(name for _, name, _ in argument.pointers)
        self._call.steps.append(Step(kernel, launch))

    def _find(self, found: Sequence[MemoryRegion], region: MemoryRegion) -> _Buffer:
        """Return the buffer of a region, a new one for memory that no step has used before."""
        owner = next(r for r in found if r.start == region.start)
        if owner.end != region.end:
            raise MachineError(f"{owner.name} overlaps the storage of another argument{_REFUSED}")
        return self._buffer(owner.storage)

    def _buffer(self, storage: Any) -> _Buffer:
        key = int(storage.data_ptr())
        if key not in self._call.buffers:
            if key in self._stale:
                raise MachineError(f"it reads memory that an earlier call wrote{_REFUSED} of one call")
            data = None if key in self.blank else MemoryRegion("", key, key + storage.nbytes()).view().tobytes()
            self._call.buffers[key] = _Buffer(f"memory {len(self._call.buffers)}", storage, data)
        return self._call.buffers[key]

    def _copy(self, nbytes: int, source: Packed, target: Packed) -> None:
        """Add a copy, in units of 16 bytes if both places and the size allow it: buffers begin at a multiple of 16."""
        offsets = source.pointers[0][2] | target.pointers[0][2] | nbytes
        unit = 1 if offsets % 16 else 16
        self._call.steps.append(Step(_COPIES[unit], _launch_loop(nbytes // unit, (source, target))))

    def _address(self, tensor: torch.Tensor) -> Packed:
        storage = tensor.untyped_storage()
        return Packed(bytes(8), ((0, self._buffer(storage).name, tensor.data_ptr() - storage.data_ptr()),))

    def _return(self, results: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Give the results the names of the outputs, or copy them there. Return the new names by the old ones."""
        names: dict[str, str] = {}
        for name, tensor in results.items():
            buffer = self._buffer(tensor.untyped_storage())
            own = buffer.name.startswith("memory ") and buffer.name not in names and buffer.data is None
            if own and tensor.nbytes == buffer.storage.nbytes():
                names[buffer.name] = name
            elif tensor.numel():
                self._copy(tensor.nbytes, self._address(tensor), Packed(bytes(8), ((0, name, 0),)))
        return names


def _launch_loop(count: int, arguments: tuple[Packed, ...]) -> Launch:
    return Launch((max(1, min(1024, -(-count // _THREADS))), 1, 1), (*arguments, uint(count, 8)))


def _rename(launch: Launch, names: Mapping[str, str]) -> Launch:
    def renamed(argument: Argument) -> Argument:
        if not isinstance(argument, Packed):
            return argument
        return replace(argument, pointers=tuple((at, names.get(n, n), offset) for at, n, offset in argument.pointers))

    return replace(launch, args=tuple(map(renamed, launch.args)))


def _raising(reason: str) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise MachineError(reason)

    return fail
