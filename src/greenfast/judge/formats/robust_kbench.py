"""robust-kbench: a problem is a folder with a Python file and settings; a solution is a CUDA file with ``forward``.

The Python file, func_forward.py, has Model, forward_fn and get_inputs. The settings are in config_forward.json.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenfast.judge.formats.converted import (
    ORIGINAL,
    REFERENCE,
    SEED,
    SETTING,
    SETTINGS,
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

#: The files of a problem. A converted folder has ``SETTINGS``, because its own config has the name of the settings.
FUNCTION, GIVEN_SETTINGS = "func_forward.py", "config_forward.json"
KERNEL = "kernel.cu"
_ENTRY = '''"""Makes the model as robust-kbench does, and calls it{use}."""

import torch

from original import Model

{build}_SETTINGS = {settings!r}
_models = {{}}


def run(*arguments):
    *inputs, setting = arguments
    with torch.no_grad():
        if setting not in _models:
            torch.manual_seed({seed})
            _models[setting] = Model(**_SETTINGS[setting - 1]).cuda().eval()
        {call}
'''
_CALL_REFERENCE = "return _models[setting](*inputs)"
#: robust-kbench compares by torch.allclose. It accepts a tensor of one element in place of a scalar.
_CALL_SOLUTION = """result = _models[setting](*inputs, fn=_forward)
        expected = Model(**_SETTINGS[setting - 1]).to("meta")(*(torch.empty_like(x, device="meta") for x in inputs))
        return result.view(expected.shape) if result.numel() == 1 else result"""
_BUILD = """from pathlib import Path

from torch.utils.cpp_extension import load

_source = str(Path(__file__).with_name("{kernel}"))
_forward = load(name="solution", sources=[_source], extra_cuda_cflags=["-O3", "--use_fast_math"]).forward
"""


@dataclass(frozen=True)
class RobustSetting:
    """The keyword arguments of Model and of get_inputs."""

    init: dict[str, Any]
    inputs: dict[str, Any]


def read_settings(path: Path) -> tuple[list[RobustSetting], int]:
    """Return the settings of a problem of robust-kbench, and how many of them are "single": its own default.

    Raises UsageError for a file of another form.
    """
    try:
        given = json.loads(read_file(path))
        both = [
            [
                RobustSetting({**init, **shared}, {**inputs, **shared})
                for init in given[f"{kind}_init_configs"]
                for inputs in given[f"{kind}_input_configs"]
                for shared in given[f"{kind}_shared_configs"]
            ]
            for kind in ("single", "multi")
            if f"{kind}_init_configs" in given
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UsageError(
            f"{path}: cannot be read ({type(e).__name__}: {e}); it has single_init_configs, single_input_configs and "
            "single_shared_configs, and the same with multi"
        ) from None
    settings = [setting for several in both for setting in several]
    if not settings:
        raise UsageError(f"{path}: has no setting; single_init_configs, ..._input_configs and ..._shared_configs do")
    return settings, len(both[0])


def import_problem(path: Path, parent: Path) -> Path | None:
    """Write the task folder of a problem below ``parent`` and return it; None for a path of another format.

    path: the problem's folder or its Python file. The baseline is its forward_fn. The "multi" settings are shapes that
    ``--shapes`` names.
    """
    folder = path.parent if path.name == FUNCTION else path
    if not (folder / FUNCTION).is_file() or not (folder / GIVEN_SETTINGS).is_file():
        return None
    settings, single = read_settings(folder / GIVEN_SETTINGS)
    text = read_file(folder / FUNCTION)
    shapes: list[dict[str, Any]] = []
    for number, setting in enumerate(settings, 1):
        values = "_".join(f"{key}{value}" for key, value in {**setting.init, **setting.inputs}.items())
        shape = safe_name(f"{number}_{values}" if values else str(number))[:60].strip("_.+-")
        purpose = "its default" if number <= single else "a further setting"
        shapes.append({"name": shape, "dims": {SETTING: number}, "purpose": purpose})
    name = safe_name(folder.resolve().name)
    paths = ", ".join(f'Path(__file__).with_name("{file}")' for file in (ORIGINAL, SETTINGS))
    return write_problem(
        parent / name,
        {
            ORIGINAL: text,
            SETTINGS: read_file(folder / GIVEN_SETTINGS),
            "problem.py": render_problem_module(
                f"{name}: a problem of robust-kbench", "defined", "RobustProblem", paths
            ),
            CONFIG_NAME: task_config(name, "", shapes, single),
        },
        reference=_model_files(REFERENCE, text, settings, ""),
    )


def import_solution(path: Path, problem: Path) -> tuple[str, Files] | None:
    """Convert a CUDA file with a Python binding. Return its name and files; None for a file of another format.

    problem: the folder of the converted problem.
    """
    if not (problem / SETTINGS).is_file() or path.suffix != ".cu" or b"PYBIND11_MODULE" not in read_file(path):
        return None
    name, (settings, _) = safe_name(path.stem), read_settings(problem / SETTINGS)
    files = _model_files(name, read_file(problem / ORIGINAL), settings, _BUILD.format(kernel=KERNEL))
    return name, {KERNEL: read_file(path), **files}


def _model_files(name: str, problem: bytes, settings: Sequence[RobustSetting], build: str) -> Files:
    assigned = [s for s in ast.parse(problem).body if isinstance(s, ast.Assign)]
    names = [s.value for s in assigned if ast.unparse(s.targets[0]) == "input_names"]
    if not names or not isinstance(names[-1], ast.List):
        raise UsageError(f"{FUNCTION}: has no list input_names; a problem of robust-kbench names its inputs there")
    args = [f"input{n}" for n in range(len(names[-1].elts))]
    entry = _ENTRY.format(
        use=" with the solution's function" if build else "",
        build=f"{build}\n" if build else "",
        settings=[setting.init for setting in settings],
        seed=SEED,
        call=_CALL_SOLUTION if build else _CALL_REFERENCE,
    )
    return {
        ORIGINAL: problem,
        "entry.py": entry,
        "solution.json": callable_config(name, "entry.py", "", {"kernel": "run", "args": [*args, f"int64({SETTING})"]}),
    }
