"""Conversion of foreign problems and solutions to folders that the judge reads: the original files and two short ones.

Formats: FlashInfer-Trace with its extension SOL-ExecBench (a definition, workloads, solutions), and KernelBench (its
README and EVAL.md): a problem is a Python file with Model, get_inputs and get_init_inputs; a solution has ModelNew.
Both models make their parameters on the CPU after ``torch.manual_seed``. robust-kbench: a problem is a folder with
func_forward.py (Model, forward_fn, get_inputs) and config_forward.json; a solution is a CUDA file with ``forward``.
TritonBench: a problem is a reference program and its test; a solution has the same functions (``tritonbench``).

A converted problem is an ordinary task folder. So records refer to it, freshness checks and cached timings work, and
its author can extend it (shapes, bounds, ranges).
"""

from __future__ import annotations

import ast
import glob
import importlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from greenfast.judge.formats.schema import (
    DEFINITION,
    REFERENCE,
    SEED,
    SETTING,
    WORKLOADS,
    Definition,
    ForeignSolution,
    RobustSetting,
    ScalarInput,
    Workload,
    evaluate_dims,
    read_definition,
    read_foreign_solution,
    read_settings,
    read_workloads,
    safe_name,
)
from greenfast.judge.formats.tritonbench import (
    ENTRY,
    PROGRAM,
    TEST,
    is_tritonbench,
    is_tritonbench_answer,
    read_answers,
    split_problem,
)
from greenfast.judge.store import write_files
from greenfast.judge.task import CONFIG_NAME
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

#: The folders, next to the results, of problems and of solutions that were converted: no solution, whatever its name,
#: writes into a problem.
CONVERTED, SOLUTIONS = "converted", "converted_solutions"
#: The only format of such a problem. Its tensors are not quantized.
FORMAT = "as_given"
#: A limit that never fails: only the tolerance decides.
_OPEN = 1e300
_PROBLEM = '''"""{name}: read from {definition}, by its own reference; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.defined import DefinedProblem

_problem = DefinedProblem(Path(__file__).parent, Path({root!r}))
make_case, references, decode = _problem.make_case, _problem.references, _problem.decode
'''
_EXTENSION = '''"""Builds the solution's sources as a PyTorch extension, with nvcc, when it is imported."""

from pathlib import Path

from torch.utils.cpp_extension import load

_folder = Path(__file__).parent
_sources = [str(_folder / name) for name in {sources!r}]
_built = load(name="solution", sources=_sources, extra_include_paths=[str(_folder)])
{function} = _built.{function}
'''


#: The files of a converted solution's folder by name.
Files: TypeAlias = "dict[str, str | bytes]"


def import_problem(name: str, out: Path, workloads: Path | None = None) -> str:
    """Return the task of a problem: ``name`` itself, or the folder below ``out`` with the converted foreign problem.

    Raises UsageError for a problem that cannot be judged, and for workloads of a problem that takes none.
    """
    path = Path(name)
    if is_definition(path):
        return str(convert_definition(find_workloads(path, workloads), out / CONVERTED))
    if workloads is not None:
        raise UsageError(f"--workloads {workloads}: only for a definition of FlashInfer-Trace or SOL-ExecBench")
    robust = find_robust_problem(path)
    if robust is not None:
        return str(convert_robust_problem(robust, out / CONVERTED))
    if is_tritonbench(path):
        return str(convert_tritonbench_problem(path, out / CONVERTED))
    return str(convert_problem(path, out / CONVERTED)) if is_kernelbench(path) else name


def import_solution(path: Path, problem: Path, out: Path) -> Path:
    """Return a solution's path: ``path`` itself, or the folder that a foreign one is converted to.

    problem: the folder of the task that it is judged by. Raises UsageError if the two do not belong together.
    """
    name = safe_name(path.stem)
    if is_foreign_solution(path):
        name, files = convert_solution(path, problem)
    elif is_robust_solution(path, problem):
        files = convert_robust_solution(path, problem, name)
    elif is_kernelbench(path, NEW_MODEL) and (problem / ORIGINAL).is_file():
        files = convert_model(path, problem, name)
    elif path.is_file() and is_tritonbench_answer(path, problem):
        files = convert_tritonbench_answer(path, problem, name)
    else:
        return path
    folder = out / SOLUTIONS / name
    shutil.rmtree(folder, ignore_errors=True)  # of a solution of the same name with more files
    return write_files(folder, files)


@dataclass(frozen=True)
class DefinitionFiles:
    """A definition's file, its workloads' file, and the root of the data set that they are in."""

    definition: Path
    workloads: Path
    root: Path


def is_definition(path: Path) -> bool:
    """Return True if a file is a definition of FlashInfer-Trace or SOL-ExecBench."""
    return _has(path, ("axes", "inputs", "outputs", "reference"))


def is_foreign_solution(path: Path) -> bool:
    """Return True if a file is a solution of FlashInfer-Trace or SOL-ExecBench."""
    return _has(path, ("definition", "spec", "sources"))


def find_workloads(definition: Path, workloads: Path | None = None) -> DefinitionFiles:
    """Find a definition's workloads next to it or in the data set's folder of workloads.

    Raises UsageError with the searched path.
    """
    if workloads is not None:
        return DefinitionFiles(definition, workloads, workloads.parent)
    name = re.sub(r"[/\0]", "_", read_definition(definition).name)[:200]
    places = [definition.with_name("workload.jsonl"), definition.with_name(f"{name}.jsonl")]
    for root in definition.resolve().parents:
        if (root / "workloads").is_dir():
            places += sorted((root / "workloads").rglob(f"{glob.escape(name)}.jsonl"))
            for place in places:
                if place.is_file():
                    return DefinitionFiles(definition, place, root)
            break
    for place in places:
        if place.is_file():
            return DefinitionFiles(definition, place, place.parent)
    raise UsageError(f"{definition}: no workloads: {places[0]} is not there; --workloads FILE names them")


def convert_definition(files: DefinitionFiles, parent: Path) -> Path:
    """Write the task folder of a definition below ``parent`` and return it. The baseline is the definition's reference.

    Raises UsageError for a definition or workloads that cannot be judged.
    """
    definition, workloads = read_definition(files.definition), read_workloads(files.workloads)
    names = {"name": safe_name(definition.name), "definition": safe_name(files.definition.name)}
    shapes = _shapes(definition, workloads)
    return _write_problem(
        parent / safe_name(definition.name),
        {
            DEFINITION: files.definition.read_bytes(),
            WORKLOADS: files.workloads.read_bytes(),
            "problem.py": _PROBLEM.format(**names, root=str(files.root.resolve())),
            CONFIG_NAME: task_config(definition.name, definition.description or "", shapes),
            f"{REFERENCE}/reference.py": definition.reference + "\n",
            f"{REFERENCE}/solution.json": _solution(
                REFERENCE, "reference.py", "run", definition, workloads, writes=False
            ),
        },
    )


def convert_solution(path: Path, problem: Path) -> tuple[str, Files]:
    """Convert a solution of a definition. Return its name and files.

    problem: the folder of the converted definition. Raises UsageError if it is another task's or another definition's,
    and for a solution in a language that is not judged.
    """
    if not (problem / DEFINITION).is_file():
        raise UsageError(f"{path}: solves a definition of FlashInfer-Trace; --problem names that definition's file")
    definition, workloads = read_definition(problem / DEFINITION), read_workloads(problem / WORKLOADS)
    given = read_foreign_solution(path)
    if given.definition != definition.name:
        raise UsageError(
            f"{path}: solves {given.definition}, the problem is {definition.name}; --problem takes the file of its "
            "definition, or correct its key definition"
        )
    file, _, function = given.spec.entry_point.partition("::")
    files: Files = {source.path: source.content for source in given.sources}
    if Path(file).suffix != ".py":
        file = "greenfast_extension.py"
        files[file] = _extension(path, given, function)
    name = safe_name(given.name)
    writes = given.spec.destination_passing_style
    files["solution.json"] = _solution(name, file, function, definition, workloads, writes, given.author)
    return name, files


def _write_problem(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write a converted problem; return its folder. An earlier problem of the same name may have another format.

    Its files would decide which solutions are taken, so they are removed. Other files stay, such as kept records.
    """
    for name in (DEFINITION, WORKLOADS, ORIGINAL, KEPT_SETTINGS, TEST):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / REFERENCE, ignore_errors=True)
    return write_files(folder, files)


def _extension(path: Path, given: ForeignSolution, function: str) -> str:
    if given.spec.binding != "torch":
        raise UsageError(
            f"{path}: spec.binding: {given.spec.binding or 'tvm-ffi (the default)'}; extensions with binding torch are "
            "judged"
        )
    sources = [s.path for s in given.sources if Path(s.path).suffix in (".cu", ".cpp", ".cc", ".cxx")]
    return _EXTENSION.format(sources=sources, function=function)


def _shapes(definition: Definition, workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for number, workload in enumerate(workloads, 1):
        axes = "_".join(f"{axis}{value}" for axis, value in workload.axes.items())
        name = safe_name(f"{axes}_{workload.uuid[:8]}" if axes else workload.uuid[:8])
        if any(shape["name"] == name for shape in made):  # as of workload-1 and workload-2
            name = f"{name}_{number}"
        made.append(
            {"name": name, "dims": evaluate_dims(definition, workloads, number), "purpose": f"workload {workload.uuid}"}
        )
    return made


def task_config(
    name: str,
    description: str,
    shapes: Sequence[Mapping[str, Any]],
    defaults: int | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """Return a task's config with three seeds, and gates that only apply the tolerance.

    defaults: how many of the shapes are judged by default (default: all). left_out: what is not judged, and why.
    """
    error = {"max_abs_err": _OPEN, "mean_abs_err": _OPEN, "pct_bad": 100.0, "bad_abs_err": _OPEN}
    names = [shape["name"] for shape in shapes[:defaults]]
    return _json(
        {
            "name": safe_name(name),
            "description": f"{description or name} (tolerance only: no bound is derived)",
            **({"left_out": list(left_out)} if left_out else {}),
            "problem": "problem.py",
            "shapes": list(shapes),
            "seeds": [0, 1, 2],
            "formats": {FORMAT: {"error": error, "kernel_error": {"relative_error": _OPEN, "bound_factor": 1.0}}},
            "defaults": {
                "baseline": REFERENCE,
                "shapes": names,
                "format": FORMAT,
                "arch": "sm_90a",
                "results": safe_name(name),
            },
        }
    )


def _solution(
    name: str,
    file: str,
    function: str,
    definition: Definition,
    workloads: Sequence[Workload],
    writes: bool,
    author: str = "",
) -> str:
    """Return the solution.json of a callable. Raises UsageError if workloads have different values of a scalar."""
    args = []
    for key, tensor in definition.inputs.items():
        if tensor.shape is not None:
            args.append(key)
            continue
        values = {w.inputs[key].value for w in workloads if isinstance(w.inputs.get(key), ScalarInput)}  # type: ignore[union-attr]
        if len(values) != 1:
            raise UsageError(f"{definition.name}: the scalar {key} has {len(values)} values; judge one at a time")
        (value,) = values
        kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float64"
        args.append(f"{kind}({int(value) if isinstance(value, bool) else value!r})")
    args += list(definition.outputs) if writes else []
    launch = {"kernel": function, "args": args}
    return callable_config(name, file, author, launch)


def callable_config(name: str, file: str, author: str, launch: Mapping[str, Any]) -> str:
    """Return the solution.json of a Python function."""
    return _json({"name": name, "language": "callable", "file": file, "author": author, "launches": [launch]})


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


def _has(path: Path, keys: Sequence[str]) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and all(key in data for key in keys)


MODEL, NEW_MODEL = "Model", "ModelNew"
#: The file as it was given, in a converted problem's and solution's folder.
ORIGINAL = "original.py"

_MODEL_PROBLEM = '''"""{name}: a problem of KernelBench; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.defined import ModelProblem

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
        raise UsageError(f"{path}: has no function {', '.join(sorted(missing))}; a KernelBench problem has it")
    shape = {"name": "as_given", "dims": {SETTING: 1}, "purpose": "the shape that get_inputs makes"}
    reference = _model_files(REFERENCE, text, "original", MODEL)
    return _write_problem(
        parent / safe_name(path.stem),
        {
            ORIGINAL: text,
            "problem.py": _MODEL_PROBLEM.format(name=safe_name(path.stem), original=ORIGINAL),
            CONFIG_NAME: task_config(path.stem, "", [shape]),
            **{f"{REFERENCE}/{name}": content for name, content in reference.items()},
        },
    )


def convert_model(path: Path, problem: Path, name: str) -> Files:
    """Convert a solution with ModelNew. problem: the folder of the converted problem."""
    files = _model_files(name, read_file(problem / ORIGINAL), "new_model", NEW_MODEL)
    return {"new_model.py": read_file(path), **files}


def _model_files(name: str, problem: bytes, module: str, model: str) -> Files:
    return {
        ORIGINAL: problem,
        "entry.py": _ENTRY.format(module=module, model=model, seed=SEED),
        "solution.json": callable_config(name, "entry.py", "", {"kernel": "run"}),
    }


FUNCTION, SETTINGS = "func_forward.py", "config_forward.json"
#: The settings in a converted folder. Its own config has their name.
KEPT_SETTINGS, KERNEL = "settings.json", "kernel.cu"
_ROBUST_PROBLEM = '''"""{name}: a problem of robust-kbench; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.defined import RobustProblem

_problem = RobustProblem(Path(__file__).with_name("{original}"), Path(__file__).with_name("{settings}"))
make_case, references, decode = _problem.make_case, _problem.references, _problem.decode
'''
_ROBUST_ENTRY = '''"""Makes the model as robust-kbench does, and calls it{use}."""

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
#: robust-kbench compares by torch.allclose, which takes a tensor of one element for a scalar.
_CALL_SOLUTION = """result = _models[setting](*inputs, fn=_forward)
        expected = Model(**_SETTINGS[setting - 1]).to("meta")(*(torch.empty_like(x, device="meta") for x in inputs))
        return result.view(expected.shape) if result.numel() == 1 else result"""
_ROBUST_BUILD = """from pathlib import Path

from torch.utils.cpp_extension import load

_source = str(Path(__file__).with_name("{kernel}"))
_forward = load(name="solution", sources=[_source], extra_cuda_cflags=["-O3", "--use_fast_math"]).forward
"""


def find_robust_problem(path: Path) -> Path | None:
    """Return the folder of a problem of robust-kbench that a path names; None for another path."""
    folder = path.parent if path.name == FUNCTION else path
    return folder if (folder / FUNCTION).is_file() and (folder / SETTINGS).is_file() else None


def is_robust_solution(path: Path, problem: Path) -> bool:
    """Return whether a file is a CUDA file with a Python binding, for the converted problem of robust-kbench."""
    return (problem / KEPT_SETTINGS).is_file() and path.suffix == ".cu" and b"PYBIND11_MODULE" in read_file(path)


def convert_robust_problem(folder: Path, parent: Path) -> Path:
    """Write the task folder of a problem of robust-kbench below ``parent`` and return it.

    The baseline is its forward_fn. The "multi" settings are shapes that ``--shapes`` names.
    """
    settings, single = read_settings(folder / SETTINGS)
    text = read_file(folder / FUNCTION)
    shapes: list[dict[str, Any]] = []
    for number, setting in enumerate(settings, 1):
        values = "_".join(f"{key}{value}" for key, value in {**setting.init, **setting.inputs}.items())
        shape = safe_name(f"{number}_{values}" if values else str(number))[:60].strip("_.+-")
        purpose = "its default" if number <= single else "a further setting"
        shapes.append({"name": shape, "dims": {SETTING: number}, "purpose": purpose})
    name, reference = safe_name(folder.resolve().name), _robust_files(REFERENCE, text, settings, "")
    return _write_problem(
        parent / name,
        {
            ORIGINAL: text,
            KEPT_SETTINGS: read_file(folder / SETTINGS),
            "problem.py": _ROBUST_PROBLEM.format(name=name, original=ORIGINAL, settings=KEPT_SETTINGS),
            CONFIG_NAME: task_config(name, "", shapes, single),
            **{f"{REFERENCE}/{file}": content for file, content in reference.items()},
        },
    )


def convert_robust_solution(path: Path, problem: Path, name: str) -> Files:
    """Convert a CUDA file. problem: the folder of the converted problem."""
    settings, _ = read_settings(problem / KEPT_SETTINGS)
    files = _robust_files(name, read_file(problem / ORIGINAL), settings, _ROBUST_BUILD.format(kernel=KERNEL))
    return {KERNEL: read_file(path), **files}


def _robust_files(name: str, problem: bytes, settings: Sequence[RobustSetting], build: str) -> Files:
    assigned = [s for s in ast.parse(problem).body if isinstance(s, ast.Assign)]
    names = [s.value for s in assigned if ast.unparse(s.targets[0]) == "input_names"]
    if not names or not isinstance(names[-1], ast.List):
        raise UsageError(f"{FUNCTION}: has no list input_names; a problem of robust-kbench names its inputs there")
    args = [f"input{n}" for n in range(len(names[-1].elts))]
    entry = _ROBUST_ENTRY.format(
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


_CALL_PROBLEM = '''"""{name}: a problem of TritonBench; only a tolerance is known of its errors."""

from pathlib import Path

from greenfast.judge.formats.test_calls import CallProblem

_problem = CallProblem(Path(__file__).parent)
make_case, references, decode = _problem.make_case, _problem.references, _problem.decode
'''


def convert_tritonbench_problem(path: Path, parent: Path) -> Path:
    """Write the task folder of a problem below ``parent`` and return it. The baseline is its reference.

    Runs the reference and its test, kernels in the emulator. Raises UsageError if no call of the test can be judged.
    """
    program, test = split_problem(read_file(path).decode(errors="replace"))
    if not test.strip():
        raise UsageError(f"{path}: has no test after its line of #; a problem of TritonBench has one")
    name = safe_name(path.stem)
    folder = _write_problem(parent / name, {f"{REFERENCE}/{PROGRAM}": program, TEST: test})
    problem = importlib.import_module("greenfast.judge.formats.test_calls").CallProblem(folder)  # it imports PyTorch
    return write_files(
        folder,
        {
            "problem.py": _CALL_PROBLEM.format(name=name),
            CONFIG_NAME: task_config(name, f"TritonBench's {name}", problem.shapes, left_out=problem.left_out),
            f"{REFERENCE}/{ENTRY}": problem.entry,
            f"{REFERENCE}/solution.json": _call_solution(REFERENCE, problem.arguments),
        },
    )


def convert_tritonbench_answer(path: Path, problem: Path, name: str) -> Files:
    """Convert an answer. problem: the folder of the converted problem.

    Raises UsageError for a JSONL file without an answer to it.
    """
    if path.suffix == ".jsonl":
        programs = [code for file, code in read_answers(path) if safe_name(Path(file).stem) == problem.name]
        if not programs:
            raise UsageError(f"{path}: has no answer to {problem.name}")
        program = programs[0]
    else:
        program, _ = split_problem(read_file(path).decode(errors="replace"))
    reference = problem / REFERENCE
    arguments = json.loads(read_file(reference / "solution.json"))["launches"][0]["args"]
    entry = read_file(reference / ENTRY)
    return {PROGRAM: program, ENTRY: entry, "solution.json": _call_solution(name, arguments)}


def _call_solution(name: str, arguments: Sequence[str]) -> str:
    return callable_config(name, ENTRY, "", {"kernel": "run", "args": list(arguments)})
