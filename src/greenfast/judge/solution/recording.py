"""Convert a Python function to a program on a machine without a GPU: record its launches and PyTorch's operations.

The function runs on labelled CPU tensors (``greenfast.emulator.triton``), and its kernels are recorded in place of
being run. As after a capture on a GPU, the result is data that another process launches on other memory. Results of
PyTorch from constants alone, such as packed weights, become contents of workspaces. Operations of PyTorch on the inputs
are recorded by name (``tensor_operations``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from greenfast.emulator.dependence import find_written_pointers
from greenfast.emulator.grid import KernelLaunch, load_program
from greenfast.emulator.triton.activation import Activation, parse_target
from greenfast.emulator.triton.cuda_tensors import without_modes
from greenfast.emulator.triton.storage import MemoryRegion, Regions
from greenfast.judge.solution.capture import MAX_STATE_BYTES, WARM_UP, match_results
from greenfast.judge.solution.languages.compiled import build_ptx_kernel, without_folders
from greenfast.judge.solution.tensor_operations import encode_values, find_written, is_repeatable
from greenfast.spec.errors import MachineError, UnsupportedError, UsageError
from greenfast.spec.kernel import (
    Argument,
    Launch,
    Packed,
    Program,
    Step,
    TensorOperation,
    TensorView,
    Workspace,
)

_aten = torch.ops.aten
#: Operations that leave their result uninitialised, and such that use the shape and type of a tensor alone.
_BLANK = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_LIKE = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full}
#: Operations with a view as their result, although their schema does not declare it.
_VIEWS = {_aten._unsafe_view, _aten.lift_fresh}
_COPY = _aten.copy_.default
_REFUSED = "; a machine without a GPU repeats its kernels and known operations of PyTorch"


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
    operations: list[TensorOperation] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    buffers: dict[int, _Buffer] = field(default_factory=dict)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on memory that depends on the inputs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recording, operation = self._recording, func.overloadpacket
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = any(recording.is_recorded(t) for t in given)
        if operation in _BLANK:
            result = func(*args, **kwargs)
            recording.blank[_key(result)] = result.untyped_storage()
            return result
        if operation in _LIKE or not known or operation in _VIEWS or _is_view(func):
            result = func(*args, **kwargs)
            for tensor in find_written(func, args, kwargs):
                recording.blank.pop(_key(tensor), None)
            return result
        if operation is _aten._local_scalar_dense:
            raise UsageError("its calls cannot be captured: it reads a value of its inputs on the host")
        return recording.run_operation(func, args, kwargs)


def _is_view(func: Any) -> bool:
    """Return whether an operation returns a view of an argument and writes nothing."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Recording(Activation):
    """An activation that records launches."""

    def __init__(self, target: str) -> None:
        super().__init__(parse_target(target), cuda_tensors_as_cpu=True, benchmarks="skip")
        self._call, self._records = _RecordedCall(), False
        self.blank: dict[int, Any] = {}
        self._stale: dict[int, Any] = {}
        assert self.tensors is not None
        self.tensors.mode.before_host_copy = self._refuse_host_copy

    def __enter__(self) -> Recording:
        return self

    def record(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> Program:
        """Return the program of ``function(*arguments)``; the parameters and errors are as in ``capture``.

        Raises MachineError for work that only a capture on a GPU can read.
        """
        for _ in range(WARM_UP + 1):
            changed = {key for key, buffer in self._call.buffers.items() if buffer.name in self._call.written}
            self._stale |= {key: self._call.buffers[key].storage for key in changed}
            self._call = _RecordedCall()
            for name, tensor in {**outputs, **inputs}.items():
                self._stale.pop(_key(tensor), None)
                self._call.buffers[_key(tensor)] = _Buffer(name, tensor.untyped_storage())
            self._records = True
            with _Operations(self):
                results = match_results(function(*arguments), outputs)
        computes = bool(self._call.steps or self._call.operations)
        names = self._return(results)
        if not computes:
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
        operations = tuple(_rename_operation(operation, names) for operation in self._call.operations)
        return Program(steps, spaces, operations=operations)

    def _refuse_host_copy(self, tensor: torch.Tensor) -> None:
        if self.is_recorded(tensor):
            raise UsageError("its calls cannot be captured: it copies a tensor that depends on its inputs to the host")

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Return whether the contents of a tensor depend on the inputs."""
        return tensor.layout == torch.strided and _key(tensor) in self._call.buffers

    def run_operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation of PyTorch on the example, and record it. Raises MachineError for an unknown one."""
        if not is_repeatable(func):
            raise MachineError(f"PyTorch computes {func} from its inputs{_REFUSED}")
        try:
            encoded, named = (encode_values(values, self._view) for values in (args, kwargs))
        except UnsupportedError as e:
            raise MachineError(f"PyTorch computes {func} with {e}{_REFUSED}") from None
        written = find_written(func, args, kwargs)
        step, writes = len(self._call.steps), tuple(map(self._view, written))
        result = func(*args, **kwargs)
        own = {id(tensor) for tensor in written}
        new = [tensor for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor) and id(tensor) not in own]
        for tensor in new:
            if self.is_recorded(tensor):  # no new memory, although the schema declares no alias
                raise MachineError(f"PyTorch gives a view by {func}{_REFUSED}")
            self.blank[_key(tensor)] = tensor.untyped_storage()
        is_out = any(argument.is_out for argument in func._schema.arguments)
        results = tuple(map(self._view, new))
        self._call.operations.append(TensorOperation(step, str(func), encoded, named, writes, is_out, results))
        self._call.written.update(view.buffer for view in (*writes, *results))
        return result

    def _view(self, tensor: torch.Tensor) -> TensorView:
        with without_modes():
            if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
                raise UnsupportedError("a tensor that is sparse, conjugated or negated by a flag")
            if not tensor.numel():
                name = next(iter(self._call.buffers.values())).name  # no bytes of it are accessed
            else:
                name = self._buffer(tensor.untyped_storage()).name
            dtype, offset = str(tensor.dtype).removeprefix("torch."), int(tensor.storage_offset()) * tensor.itemsize
            return TensorView(name, dtype, tuple(tensor.shape), tensor.stride(), offset)

    def execute(self, step: KernelLaunch, regions: Regions, keep: Callable[[str, bytes], None] | None = None) -> None:
        """Record a launch. One outside of a call, as when the solution's file tests itself, runs."""
        if not self._records:
            return super().execute(step, regions, keep)
        if pointed := [region.name for region in regions.regions if region.name.startswith("variable ")]:
            raise MachineError(f"a kernel gets the address of the {pointed[0]}{_REFUSED}")
        with without_modes():
            names = {region.name: self._find(region).name for region in regions.regions}
        ptx = without_folders(step.ptx)
        kernel = build_ptx_kernel(f"{step.entry}.ptx", step.entry, ptx, step.block, step.dynamic_smem_bytes)
        launch = _rename(step.plan, names)
        parsed = load_program(ptx, step.entry)[1].function
        written = find_written_pointers(parsed)
        for parameter, argument in zip(parsed.params, launch.args, strict=True):
            if parameter.name in written and isinstance(argument, Packed):
                self._call.written.update(name for _, name, _ in argument.pointers)
        self._call.steps.append(Step(kernel, launch))

    def _find(self, region: MemoryRegion) -> _Buffer:
        """Return the buffer of a region, a new one for memory that no step has used before."""
        if region.storage is None or region.storage.nbytes() != region.end - region.start:
            raise MachineError(f"{region.name} overlaps the storage of another argument{_REFUSED}")
        return self._buffer(region.storage)

    def _buffer(self, storage: Any) -> _Buffer:
        key = int(storage.data_ptr())
        if key not in self._call.buffers:
            if key in self._stale:
                raise MachineError(f"it reads memory that an earlier call wrote{_REFUSED} of one call")
            data = None if key in self.blank else MemoryRegion("", key, key + storage.nbytes()).view().tobytes()
            self._call.buffers[key] = _Buffer(f"memory {len(self._call.buffers)}", storage, data)
        return self._call.buffers[key]

    def _return(self, results: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Give the results the names of the outputs, or copy them there. Return the new names by the old ones."""
        names: dict[str, str] = {}
        for name, tensor in results.items():
            if not tensor.numel():
                continue
            buffer, view = self._buffer(tensor.untyped_storage()), self._view(tensor)
            own = buffer.name.startswith("memory ") and buffer.name not in names and buffer.data is None
            if own and tensor.nbytes == buffer.storage.nbytes():
                names[buffer.name] = name
                continue
            target = replace(view, buffer=name, offset=0)  # results are contiguous
            operation = TensorOperation(len(self._call.steps), str(_COPY), [target, view], {}, (target,), False, ())
            self._call.operations.append(operation)
        return names


def _rename(launch: Launch, names: Mapping[str, str]) -> Launch:
    def renamed(argument: Argument) -> Argument:
        if not isinstance(argument, Packed):
            return argument
        return replace(argument, pointers=tuple((at, names.get(n, n), offset) for at, n, offset in argument.pointers))

    return replace(launch, args=tuple(map(renamed, launch.args)))


def _rename_operation(operation: TensorOperation, names: Mapping[str, str]) -> TensorOperation:
    def renamed(value: Any) -> Any:
        if isinstance(value, TensorView):
            return replace(value, buffer=names.get(value.buffer, value.buffer))
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        return type(value)(map(renamed, value)) if isinstance(value, (list, tuple)) else value

    changed = {name: renamed(getattr(operation, name)) for name in ("args", "kwargs", "writes", "results")}
    return replace(operation, **changed)
