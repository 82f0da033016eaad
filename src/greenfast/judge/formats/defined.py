"""Problems in foreign formats: a definition with its workloads, or a KernelBench file.

The reference is the problem's own source on CPU tensors. There is no derived bound, only the data set's tolerance.
FlashInfer-Bench accepts an element within the absolute or the relative tolerance. SOL-ExecBench accepts an element
within their sum, and requires this for a share of the elements.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from greenfast.emulator.triton.cuda_tensors import CudaTensors
from greenfast.judge.formats.converted import DEFINITION, SEED, SETTING, WORKLOADS
from greenfast.judge.formats.flashinfer_trace import (
    WORKLOAD,
    Allowed,
    CustomInput,
    FileInput,
    ScalarInput,
    Tensor,
    Workload,
    read_definition,
    read_workloads,
)
from greenfast.judge.formats.robust_kbench import read_settings
from greenfast.judge.task import import_file
from greenfast.spec.errors import GreenfastError, UsageError, too_large
from greenfast.spec.problem import Array, Case, OutputSpec, References, to_dtype

#: FlashInfer-Bench's defaults.
_ATOL = _RTOL = 1e-2
_SCALES = {"int8": (-128, 128), "int16": (-1024, 1024), "int32": (-1024, 1024), "int64": (-1024, 1024)}
#: Replaces -inf in arrays, so that norms stay finite.
_MINUS_INFINITY = -1e150


class DefinedProblem:
    """``greenfast.spec.problem.Problem`` of a folder with a definition and its workloads.

    root: the base of relative paths of tensors in files.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.definition = read_definition(folder / DEFINITION)
        self.workloads = read_workloads(folder / WORKLOADS)
        self._root = root
        self._source = compile(self.definition.reference, str(folder / "reference.py"), "exec")

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        """Return the inputs of a workload. Scalars are not buffers. Raises UsageError if a file lacks a tensor."""
        workload, sizes = self._select(dims)
        tensors = self._tensors(workload, sizes, seed)
        outputs = {
            name: OutputSpec(_shape(tensor, sizes), tensor.dtype) for name, tensor in self.definition.outputs.items()
        }
        return Case({name: to_array(tensor) for name, tensor in tensors.items()}, outputs)

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        """Return the result of the reference and the tolerance around it."""
        workload, sizes = self._select(dims)
        tensors = self._tensors(workload, sizes, seed)
        arguments = [tensors[n] if n in tensors else self.scalar(workload, n) for n in self.definition.inputs]
        with torch.no_grad():
            results = call(f"{self.definition.name}: workload {workload.uuid}: run", self._function("run"), *arguments)
        outputs = self._outputs(results, workload, sizes)
        allowed = workload.tolerance or Allowed()
        is_sum = self.definition.is_sol or workload.tolerance is not None
        atol, rtol = (allowed.max_atol, allowed.max_rtol) if is_sum else (_ATOL, _RTOL)
        if not is_sum:
            return build_tolerances(outputs, atol, rtol, np.maximum)
        cap = math.inf if allowed.max_error_cap is None else allowed.max_error_cap
        return replace(build_tolerances(outputs, atol, rtol, np.add), matched=allowed.required_matched_ratio, most=cap)

    def _outputs(self, results: Any, workload: Workload, sizes: Mapping[str, int]) -> list[NDArray[np.float64]]:
        """Return the results of ``run`` in the order of the outputs. Raises UsageError for other results."""
        values = list(results.values()) if isinstance(results, dict) else results
        values = values if isinstance(values, (tuple, list)) else [values]
        where, wanted = f"{self.definition.name}: workload {workload.uuid}: run gives", self.definition.outputs
        if len(values) != len(wanted):
            raise UsageError(f"{where} {len(values)} outputs, the definition has {', '.join(wanted)}")
        arrays = []
        for value, (name, tensor) in zip(values, wanted.items(), strict=True):
            array = call(f"{where} {name}, made a tensor:", lambda v=value: torch.as_tensor(v).double().numpy())
            if array.shape != _shape(tensor, sizes):
                raise UsageError(f"{where} {name} of shape {array.shape}, the definition has {_shape(tensor, sizes)}")
            arrays.append(array)
        return arrays

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> NDArray[np.float64]:
        """Return the outputs in their order. A single one keeps its shape; several are flattened and concatenated."""
        return _joined([outputs[name].astype(np.float64) for name in self.definition.outputs])

    def scalar(self, workload: Workload, name: str) -> bool | int | float:
        """Return the value of a scalar input. Raises UsageError if the workload has none."""
        given = workload.inputs.get(name)
        if not isinstance(given, ScalarInput):
            raise UsageError(f"{self.definition.name}: workload {workload.uuid} gives no value for the scalar {name}")
        return given.value

    def _select(self, dims: Mapping[str, int]) -> tuple[Workload, dict[str, int]]:
        workload = self.workloads[dims[WORKLOAD] - 1]
        return workload, self.definition.sizes(workload.axes)

    def _tensors(self, workload: Workload, sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        custom = self._custom(workload, sizes, seed)
        tensors = {}
        for name, tensor in self.definition.inputs.items():
            if tensor.shape is None:
                continue
            source = workload.inputs.get(name)
            shape = _shape(tensor, sizes)
            if isinstance(source, FileInput):
                value = self._from_file(source)
            elif isinstance(source, CustomInput):
                value = custom[name]
            else:
                value = _random(tensor.dtype, shape, generator)
            wanted = getattr(torch, tensor.dtype)
            if tuple(value.shape) != shape or value.dtype != wanted:
                raise UsageError(
                    f"{self.definition.name}: workload {workload.uuid}: {name} is {value.dtype} {tuple(value.shape)}, "
                    f"the definition has {wanted} {shape}"
                )
            tensors[name] = value.contiguous()
        return tensors

    def _custom(self, workload: Workload, sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
        wanted = [name for name, given in workload.inputs.items() if isinstance(given, CustomInput)]
        if not wanted:
            return {}
        name = self.definition.custom_inputs_entrypoint
        if not isinstance(name, str):
            raise UsageError(f"{self.definition.name}: {', '.join(wanted)}: custom, and no custom_inputs_entrypoint")
        scalars = {n: given.value for n, given in workload.inputs.items() if isinstance(given, ScalarInput)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            label = f"{self.definition.name}: workload {workload.uuid}: {name}"
            inputs: dict[str, torch.Tensor] = call(
                label, self._function(name), {**sizes, **scalars}, torch.device("cpu")
            )
        if missing := [
            n for n in wanted if not isinstance(inputs, dict) or not isinstance(inputs.get(n), torch.Tensor)
        ]:
            raise UsageError(f"{label} gives no tensor {', '.join(missing)}")
        return inputs

    def _from_file(self, source: FileInput) -> torch.Tensor:
        try:
            from safetensors import safe_open
        except ImportError:
            raise UsageError("tensors in files need the package safetensors: pip install safetensors") from None
        path = self._root / source.path
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(source.tensor_key)
        except Exception as e:
            raise UsageError(f"{path}: {source.tensor_key}: {e}") from None
        return tensor

    def _function(self, name: str) -> Callable[..., Any]:
        function = self._namespace.get(name)
        if not callable(function):
            raise UsageError(f"{self.definition.name}: reference has no function {name}")
        return cast(Callable[..., Any], function)

    @functools.cached_property
    def _namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "reference"}
        # The source is trusted like a problem.py.
        call(f"{self.definition.name}: reference", exec, self._source, namespace)
        return namespace


def build_tolerances(
    outputs: list[NDArray[np.float64]],
    atol: float | NDArray[np.float64],
    rtol: float | NDArray[np.float64],
    combine: Callable[..., NDArray[np.float64]],
) -> References:
    """Return the references for the results of a run. combine: of the absolute and the relative tolerance."""
    exact = _joined(outputs)
    relative = rtol * np.abs(exact)
    return References(
        full=exact,
        exact=exact,
        bound=combine(atol, relative),
        is_run=True,
        relative=combine(atol * unit_of_outputs(outputs).reshape(exact.shape), relative),
        sizes=tuple(output.size for output in outputs),
    )


def unit_of_outputs(outputs: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return for each element, flat, the root mean square of its output's finite values; at most 1."""
    units = []
    for output in outputs:
        finite = output[np.abs(output) < -_MINUS_INFINITY]
        mean = float(np.mean(np.square(finite))) if finite.size else 0.0
        units.append(np.full(output.size, min(1.0, math.sqrt(mean))))
    return np.concatenate([*units, np.zeros(0)])


def call(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the problem's author. Convert its exceptions to UsageError with a one-line message."""
    try:
        return function(*arguments)
    except Exception as e:
        if isinstance(e, GreenfastError):
            raise
        message = (str(e).splitlines() or [""])[0]
        frame = traceback.extract_tb(e.__traceback__)[-1]
        text = f"{label} raises {type(e).__name__}: {message} ({Path(frame.filename).name}, line {frame.lineno})"
        raise too_large(label, e) or UsageError(text) from e


def _shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] for axis in tensor.shape or ())


def _random(dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor as FlashInfer-Bench does: N(0, 1), clamped to 2 for FP8; integers from a range by type."""
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        values = torch.randn(shape, generator=generator)
        return (values.clamp(-2.0, 2.0) if dtype.startswith("float8") else values).to(kind)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    low, high = _SCALES[dtype]
    return torch.randint(low, high, shape, generator=generator).to(kind)


def to_array(tensor: torch.Tensor) -> Array:
    """Convert a CPU tensor to an array of the same dtype, including the dtypes of ml_dtypes."""
    name = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return bits.view(to_dtype(name)).reshape(tuple(tensor.shape))


def _joined(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    joined = values[0] if len(values) == 1 else np.concatenate([value.ravel() for value in values])
    if joined.size and joined.min() == -np.inf:  # NaN is refused elsewhere.
        return np.where(np.isneginf(joined), _MINUS_INFINITY, joined)
    return joined


_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float64: 1e-4}


def _without_gpu() -> CudaTensors:
    """Return a context in which ``.cuda()`` and ``device="cuda"`` give CPU tensors: problems name their device."""
    return CudaTensors(90)


class ModelProblem:
    """``greenfast.spec.problem.Problem`` of a KernelBench file; its shape has no dimensions to choose."""

    #: The absolute and relative tolerance, by the dtype of an output.
    tolerances: Mapping[torch.dtype, float] = _TOLERANCES

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models: dict[int, torch.nn.Module] = {}
        self._outputs: dict[int, dict[str, OutputSpec]] = {}

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        """Return the tensors of ``get_inputs`` under a seed, as input0, input1 ..., and outputs like the model's."""
        number = dims.get(SETTING, 1)
        inputs = {f"input{n}": to_array(tensor) for n, tensor in enumerate(self._inputs(number, seed))}
        return Case(inputs, self._find_outputs(number))

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        """Return the result of Model on the CPU and the tolerance around it."""
        number = dims.get(SETTING, 1)
        tensors = self._forward(number, self._inputs(number, seed))
        outputs = [tensor.double().numpy() for tensor in tensors]
        allowed = _joined([np.full(tensor.shape, self.tolerances.get(tensor.dtype, 0.0)) for tensor in tensors])
        return build_tolerances(outputs, allowed, allowed, np.add)

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> NDArray[np.float64]:
        """Return the outputs as ``DefinedProblem.decode`` does."""
        return _joined([outputs[f"output{n}"].astype(np.float64) for n in range(len(outputs))])

    def make_model(self, module: ModuleType, number: int) -> torch.nn.Module:
        """Return the model of a setting, from 1."""
        model: torch.nn.Module = module.Model(*module.get_init_inputs())
        return model

    def make_inputs(self, module: ModuleType, number: int) -> Sequence[Any]:
        """Return the inputs of a setting, from 1."""
        return list(module.get_inputs())

    @functools.cached_property
    def _module(self) -> ModuleType:
        try:
            with _without_gpu():
                return import_file(self._path)
        except Exception as e:
            raise UsageError(f"{self._path} cannot be imported: {type(e).__name__}: {e}") from e

    def _find_outputs(self, number: int) -> dict[str, OutputSpec]:
        if number not in self._outputs:
            tensors = self._forward(number, self._inputs(number, 0))
            self._outputs[number] = {
                f"output{n}": OutputSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for n, tensor in enumerate(tensors)
            }
        return self._outputs[number]

    def _inputs(self, number: int, seed: int) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make = functools.partial(self.make_inputs, self._module, number)
            with _without_gpu():
                values: list[torch.Tensor] = call(f"{self._path}: get_inputs", lambda: list(make()))
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise UsageError(f"{self._path}: get_inputs gives a value that is no tensor; put it in get_init_inputs")
        return values

    def _forward(self, number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if number not in self._models:
            torch.manual_seed(SEED)
            make = functools.partial(self.make_model, self._module, number)
            with _without_gpu():
                self._models[number] = call(f"{self._path}: Model", lambda: make().eval())
        with torch.no_grad(), _without_gpu():
            result = call(f"{self._path}: Model", self._models[number], *inputs)
        return list(result) if isinstance(result, (tuple, list)) else [result]


class RobustProblem(ModelProblem):
    """``greenfast.spec.problem.Problem`` of robust-kbench: a shape for each setting of its file."""

    tolerances: Mapping[torch.dtype, float] = dict.fromkeys(_TOLERANCES, 1e-5)

    def __init__(self, path: Path, settings: Path) -> None:
        super().__init__(path)
        self._settings, _ = read_settings(settings)

    def make_model(self, module: ModuleType, number: int) -> torch.nn.Module:
        """Return the model of a setting, from 1."""
        model: torch.nn.Module = module.Model(**self._settings[number - 1].init)
        return model

    def make_inputs(self, module: ModuleType, number: int) -> Sequence[Any]:
        """Return the inputs of a setting, from 1."""
        return list(module.get_inputs(**self._settings[number - 1].inputs))
