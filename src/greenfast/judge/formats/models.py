"""A KernelBench file as a problem: its Model on CPU tensors, and the tolerance that EVAL.md names for its dtype."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from greenfast.judge.formats.defined import array_of, called, unit_of_outputs
from greenfast.judge.formats.kernelbench import SEED
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array, Case, OutputSpec, References

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float64: 1e-4}


class ModelProblem:
    """``greenfast.spec.problem.Problem`` of a KernelBench file; its shape has no dimensions to choose."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        """The tensors of ``get_inputs`` under a seed, as input0, input1 ..., and outputs like the model's."""
        inputs = {f"input{n}": array_of(tensor) for n, tensor in enumerate(self._inputs(seed))}
        return Case(inputs, self._outputs)

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        """What Model computes on the CPU, and the tolerance around it."""
        found = self._forward(self._inputs(seed))
        exact = np.concatenate([tensor.double().numpy().ravel() for tensor in found])
        allowed = np.concatenate([np.full(tensor.numel(), _TOLERANCES.get(tensor.dtype, 0.0)) for tensor in found])
        outputs = [tensor.double().numpy() for tensor in found]
        return References(
            full=exact,
            exact=exact,
            bound=allowed * (1 + np.abs(exact)),
            is_run=True,
            relative=allowed * (unit_of_outputs(outputs) + np.abs(exact)),
            sizes=tuple(output.size for output in outputs),
        )

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> NDArray[np.float64]:
        """All outputs, flat, in their order."""
        return np.concatenate([outputs[name].astype(np.float64).ravel() for name in self._outputs])

    @functools.cached_property
    def _module(self) -> ModuleType:
        return _import(self._path)

    @functools.cached_property
    def _model(self) -> torch.nn.Module:
        torch.manual_seed(SEED)
        module = self._module
        model: torch.nn.Module = called(f"{self._path}: Model", lambda: module.Model(*module.get_init_inputs()).eval())
        return model

    @functools.cached_property
    def _outputs(self) -> dict[str, OutputSpec]:
        found = self._forward(self._inputs(0))
        return {
            f"output{n}": OutputSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for n, tensor in enumerate(found)
        }

    def _inputs(self, seed: int) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found: list[torch.Tensor] = called(f"{self._path}: get_inputs", lambda: list(self._module.get_inputs()))
        if not all(isinstance(value, torch.Tensor) for value in found):
            raise UsageError(f"{self._path}: get_inputs gives a value that is no tensor; put it in get_init_inputs")
        return found

    def _forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            found = called(f"{self._path}: Model", self._model, *inputs)
        return list(found) if isinstance(found, (tuple, list)) else [found]


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kernelbench_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise UsageError(f"{path} cannot be imported: {type(e).__name__}: {e}") from e
    return module
