"""KernelBench: a problem is a Python file with Model, get_inputs and get_init_inputs; a solution has ModelNew.

Source: KernelBench, README and EVAL.md. Parameters are made on the CPU after ``torch.manual_seed``, alike for both
models. Outputs are compared as ``torch.allclose`` does, with EVAL.md's tolerance for the output's dtype.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from greenfast.judge.formats.convert import REFERENCE, callable_config, safe_name, task_config
from greenfast.judge.formats.defined import array_of
from greenfast.judge.store import write_whole
from greenfast.judge.task import CONFIG_NAME
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array, Case, OutputSpec, References

MODEL, NEW_MODEL = "Model", "ModelNew"
#: The file as it was given, in a converted problem's and solution's folder.
ORIGINAL = "original.py"
#: Of the parameters of both models.
SEED = 42
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2, torch.float64: 1e-4}

_PROBLEM = '''"""{name}: a problem of KernelBench; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.kernelbench import ModelProblem

_problem = ModelProblem(Path(__file__).with_name("{original}"))
make_case, references, decode = _problem.make_case, _problem.references, _problem.decode
'''
_ENTRY = '''"""Makes the model as KernelBench does, and calls it."""

import torch

from original import get_init_inputs
from {module} import {model} as Model

torch.manual_seed({seed})
_model = Model(*get_init_inputs()).cuda().eval()


def run(*inputs):
    with torch.no_grad():
        return _model(*inputs)
'''


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
        return References(full=exact, exact=exact, bound=allowed * (1 + np.abs(exact)))

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> NDArray[np.float64]:
        """All outputs, flat, in their order."""
        return np.concatenate([outputs[name].astype(np.float64).ravel() for name in self._outputs])

    @functools.cached_property
    def _module(self) -> ModuleType:
        return _import(self._path)

    @functools.cached_property
    def _model(self) -> torch.nn.Module:
        torch.manual_seed(SEED)
        model: torch.nn.Module = self._module.Model(*self._module.get_init_inputs()).eval()
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
            found = list(self._module.get_inputs())
        if not all(isinstance(value, torch.Tensor) for value in found):
            raise UsageError(f"{self._path}: get_inputs gives a value that is no tensor; put it in get_init_inputs")
        return found

    def _forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            found = self._model(*inputs)
        return list(found) if isinstance(found, (tuple, list)) else [found]


def is_kernelbench(path: Path, model: str = MODEL) -> bool:
    """Whether a Python file defines the class ``Model`` (a problem) or ``ModelNew`` (a solution). Does not run it."""
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return False
    return model in {statement.name for statement in body if isinstance(statement, ast.ClassDef)}


def convert_problem(path: Path, folder: Path) -> Path:
    """Write the task folder of a KernelBench file, whose baseline is its Model; returns it."""
    text = path.read_text()
    missing = {"get_inputs", "get_init_inputs"} - {
        s.name for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)
    }
    if missing:
        raise UsageError(f"{path}: has no function {', '.join(sorted(missing))}, which a KernelBench problem has")
    write_whole(folder / ORIGINAL, text)
    write_whole(folder / "problem.py", _PROBLEM.format(name=path.stem, original=ORIGINAL))
    shape = {"name": "as_given", "dims": {"problem": 1}, "purpose": "the shape that get_inputs makes"}
    write_whole(folder / CONFIG_NAME, task_config(path.stem, "", [shape]))
    _write_model(folder / REFERENCE, REFERENCE, text, "original", MODEL)
    return folder


def convert_model(path: Path, problem: Path, folder: Path) -> Path:
    """Write the folder of a solution with ModelNew for a problem's file; returns it."""
    write_whole(folder / "new_model.py", path.read_text())
    _write_model(folder, safe_name(path.stem), problem.read_text(), "new_model", NEW_MODEL)
    return folder


def _write_model(folder: Path, name: str, problem: str, module: str, model: str) -> None:
    write_whole(folder / ORIGINAL, problem)
    write_whole(folder / "entry.py", _ENTRY.format(module=module, model=model, seed=SEED))
    write_whole(folder / "solution.json", callable_config(name, "entry.py", "", {"kernel": "run"}))


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
