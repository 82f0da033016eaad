"""KernelBench: a problem is a Python file with Model, get_inputs and get_init_inputs; a solution has ModelNew.

Source: KernelBench, README and EVAL.md. Parameters are made on the CPU after ``torch.manual_seed``, alike for both
models. Outputs are compared as ``torch.allclose`` does, with EVAL.md's tolerance for the output's dtype.
"""

from __future__ import annotations

import ast
from pathlib import Path

from greenfast.judge.formats.convert import REFERENCE, callable_config, safe_name, task_config
from greenfast.judge.store import write_files
from greenfast.judge.task import CONFIG_NAME
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

MODEL, NEW_MODEL = "Model", "ModelNew"
#: The file as it was given, in a converted problem's and solution's folder.
ORIGINAL = "original.py"
#: Of the parameters of both models.
SEED = 42

_PROBLEM = '''"""{name}: a problem of KernelBench; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.models import ModelProblem

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


def is_kernelbench(path: Path, model: str = MODEL) -> bool:
    """Whether a Python file defines the class ``Model`` (a problem) or ``ModelNew`` (a solution). Does not run it."""
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return model in {statement.name for statement in body if isinstance(statement, ast.ClassDef)}


def convert_problem(path: Path, parent: Path) -> Path:
    """Write the task folder of a KernelBench file below ``parent`` and return it. The baseline is its Model."""
    text = read_file(path)
    missing = {"get_inputs", "get_init_inputs"} - {
        s.name for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)
    }
    if missing:
        raise UsageError(f"{path}: has no function {', '.join(sorted(missing))}, which a KernelBench problem has")
    shape = {"name": "as_given", "dims": {"problem": 1}, "purpose": "the shape that get_inputs makes"}
    reference = _model_files(REFERENCE, text, "original", MODEL)
    return write_files(
        parent / safe_name(path.stem),
        {
            ORIGINAL: text,
            "problem.py": _PROBLEM.format(name=safe_name(path.stem), original=ORIGINAL),
            CONFIG_NAME: task_config(path.stem, "", [shape]),
            **{f"{REFERENCE}/{name}": content for name, content in reference.items()},
        },
    )


def convert_model(path: Path, problem: Path, parent: Path) -> Path:
    """Write the folder of a solution with ModelNew for a problem's file below ``parent`` and return it."""
    name = safe_name(path.stem)
    files = _model_files(name, read_file(problem), "new_model", NEW_MODEL)
    return write_files(parent / name, {"new_model.py": read_file(path), **files})


def _model_files(name: str, problem: bytes, module: str, model: str) -> dict[str, str | bytes]:
    return {
        ORIGINAL: problem,
        "entry.py": _ENTRY.format(module=module, model=model, seed=SEED),
        "solution.json": callable_config(name, "entry.py", "", {"kernel": "run"}),
    }
