"""KernelBench (its README and EVAL.md): a problem is a Python file with Model, a solution one with ModelNew.

A problem has get_inputs and get_init_inputs too. Both models make their parameters on the CPU after
``torch.manual_seed``.
"""

from __future__ import annotations

import ast
from pathlib import Path

from greenfast.judge.formats.converted import (
    ORIGINAL,
    REFERENCE,
    SEED,
    SETTING,
    Files,
    callable_config,
    render_problem_module,
    safe_name,
    task_config,
    write_problem,
)
from greenfast.judge.task import CONFIG_NAME
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

MODEL, NEW_MODEL = "Model", "ModelNew"

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
    """Return whether a Python file defines the class ``Model`` (problem) or ``ModelNew`` (solution). It is not run."""
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return model in {statement.name for statement in body if isinstance(statement, ast.ClassDef)}


def import_problem(path: Path, parent: Path) -> Path | None:
    """Write the task folder of a problem below ``parent`` and return it; None for a file of another format.

    The baseline is its Model. Raises UsageError for a file without get_inputs or get_init_inputs.
    """
    if not is_kernelbench(path):
        return None
    text = read_file(path)
    missing = {"get_inputs", "get_init_inputs"} - {
        s.name for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)
    }
    if missing:
        raise UsageError(f"{path}: has no function {', '.join(sorted(missing))}; a KernelBench problem has it")
    shape = {"name": "as_given", "dims": {SETTING: 1}, "purpose": "the shape that get_inputs makes"}
    name = safe_name(path.stem)
    model = f'Path(__file__).with_name("{ORIGINAL}")'
    return write_problem(
        parent / name,
        {
            ORIGINAL: text,
            "problem.py": render_problem_module(f"{name}: a problem of KernelBench", "defined", "ModelProblem", model),
            CONFIG_NAME: task_config(path.stem, "", [shape]),
        },
        reference=_model_files(REFERENCE, text, "original", MODEL),
    )


def import_solution(path: Path, problem: Path) -> tuple[str, Files] | None:
    """Convert a solution with ModelNew. Return its name and files; None for a file of another format.

    problem: the folder of the converted problem.
    """
    if not is_kernelbench(path, NEW_MODEL) or not (problem / ORIGINAL).is_file():
        return None
    name = safe_name(path.stem)
    files = _model_files(name, read_file(problem / ORIGINAL), "new_model", NEW_MODEL)
    return name, {"new_model.py": read_file(path), **files}


def _model_files(name: str, problem: bytes, module: str, model: str) -> Files:
    return {
        ORIGINAL: problem,
        "entry.py": _ENTRY.format(module=module, model=model, seed=SEED),
        "solution.json": callable_config(name, "entry.py", "", {"kernel": "run"}),
    }
