"""Files of KernelBench and folders of robust-kbench as tasks and solutions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from greenfast.judge.formats import kernelbench, robust_kbench
from greenfast.judge.formats.defined import ModelProblem, RobustProblem
from greenfast.judge.formats.kernelbench import NEW_MODEL, is_kernelbench
from greenfast.judge.formats.registry import CONVERTED, import_problem, read_solution
from greenfast.judge.solution.schema import find_solution
from greenfast.judge.task import load_task
from greenfast.spec.errors import UsageError

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 8)

    def forward(self, x, y):
        return torch.relu(self.layer(x)), x + y

def get_inputs():
    return [torch.randn(4, 16), torch.randn(4, 16)]

def get_init_inputs():
    return [16]
"""


def written(tmp_path: Path, text: str = PROBLEM) -> Path:
    path = tmp_path / "1_linear.py"
    path.write_text(text)
    return path


def test_a_problem_becomes_a_task_whose_baseline_is_its_model(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert is_kernelbench(path)
    assert not is_kernelbench(path, NEW_MODEL)
    earlier = tmp_path / "task" / CONVERTED / "1_linear"  # a problem of robust-kbench with this name
    (earlier / "evidence").mkdir(parents=True)
    for name in ("settings.json", "evidence/record.json"):
        (earlier / name).write_text("{}")
    folder = Path(import_problem(str(path), tmp_path / "task"))
    assert folder == earlier
    assert not (folder / "settings.json").exists()
    assert (folder / "evidence/record.json").exists()
    config = load_task(folder).config
    assert config.name == "1_linear"
    found = find_solution(folder / config.defaults.baseline)
    assert (found.config.language, found.config.launches[0].kernel) == ("callable", "run")
    assert {file.name for file in (folder / "reference").iterdir()} == {"entry.py", "original.py", "solution.json"}


def test_its_references_are_what_the_model_computes(tmp_path: Path) -> None:
    problem = ModelProblem(written(tmp_path))
    case, references = problem.make_case({}, 3, ""), problem.references({}, 3, "")
    assert {name: spec.shape for name, spec in case.outputs.items()} == {"output0": (4, 8), "output1": (4, 16)}
    x, y = case.inputs.values()
    assert np.array_equal(references.exact[32:], (x + y).ravel().astype(np.float64))
    assert np.allclose(references.bound, 1e-4 * (1 + np.abs(references.exact)), rtol=1e-15, atol=0)
    outputs = {"output0": references.exact[:32].reshape(4, 8), "output1": references.exact[32:].reshape(4, 16)}
    assert np.array_equal(problem.decode(outputs, ""), references.exact)
    assert problem.make_case({}, 3, "").digest == case.digest != problem.make_case({}, 4, "").digest


def test_inputs_on_a_gpu_are_cpu_tensors_here(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    text = PROBLEM.replace("torch.randn(4, 16)]", 'torch.randn(4, 16, device="cuda")]').replace(
        "16), torch", "16).cuda(), torch"
    )
    assert text.count("cuda") == 2
    problem, plain = ModelProblem(written(tmp_path, text)), ModelProblem(written(folder))
    assert problem.make_case({}, 3, "").digest == plain.make_case({}, 3, "").digest
    assert np.array_equal(problem.references({}, 3, "").exact, plain.references({}, 3, "").exact)


def test_a_new_model_becomes_a_callable(tmp_path: Path) -> None:
    problem, mine = Path(import_problem(str(written(tmp_path)), tmp_path / "task")), tmp_path / "mine.py"
    mine.write_text(PROBLEM.replace("class Model", "class ModelNew"))
    assert is_kernelbench(mine, NEW_MODEL)
    (tmp_path / "out/converted_solutions/mine").mkdir(parents=True)
    (tmp_path / "out/converted_solutions/mine/left.py").write_text("of an earlier solution of this name")
    made = read_solution(mine, problem, tmp_path / "out")
    folder = made.folder
    assert {path.name for path in folder.iterdir()} == {"entry.py", "new_model.py", "original.py", "solution.json"}
    assert made.config.name == "mine"
    entry = (folder / "entry.py").read_text()
    assert "from new_model import ModelNew as Model" in entry
    compile(entry, "entry.py", "exec")


def test_a_file_that_lacks_a_function_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no function get_init_inputs"):
        kernelbench.import_problem(written(tmp_path, PROBLEM.partition("def get_init")[0]), tmp_path / "task")


def test_an_input_that_is_no_tensor_is_refused_in_words(tmp_path: Path) -> None:
    text = PROBLEM.replace("return [torch.randn(4, 16), torch.randn(4, 16)]", "return [3]")
    with pytest.raises(UsageError, match="a value that is no tensor"):
        ModelProblem(written(tmp_path, text)).make_case({}, 0, "")


ROBUST = """
import torch
import torch.nn as nn

def forward_fn(x, weight, scale):
    return scale * (x @ weight.t())

class Model(nn.Module):
    def __init__(self, width=8, out=3, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width))
        self.scale = scale

    def forward(self, x, fn=forward_fn):
        return fn(x, self.weight, self.scale)

def get_inputs(batch=2, width=8):
    return [torch.randn(batch, width)]

input_names = ["x"]
"""
KERNEL = "#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n"


def write_robust(folder: Path, settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "func_forward.py").write_text(ROBUST)
    (folder / "config_forward.json").write_text(json.dumps(settings))
    return folder


def test_settings_of_robust_kbench_become_shapes(tmp_path: Path) -> None:
    settings = {
        "single_init_configs": [{"out": 4}],
        "single_input_configs": [{"batch": 5}],
        "single_shared_configs": [{"width": 16}],
        "multi_init_configs": [{"out": 4}, {"out": 6, "scale": 2.0}],
        "multi_input_configs": [{"batch": 5}],
        "multi_shared_configs": [{"width": 16}],
    }
    folder = write_robust(tmp_path / "linear", settings)
    for name in (folder, folder / "func_forward.py"):
        task = Path(import_problem(str(name), tmp_path / "out"))
    config = load_task(task).config
    assert (config.name, len(config.shapes), len(config.defaults.shapes)) == ("linear", 3, 1)
    problem = RobustProblem(task / "original.py", task / "settings.json")
    dims = config.shapes[2].dims
    case = problem.make_case(dims, 3, "")
    assert case.inputs["input0"].shape == (5, 16)
    assert case.outputs["output0"].shape == (5, 6)
    references = problem.references(dims, 3, "")
    assert np.allclose(references.bound, 1e-5 * (1 + np.abs(references.exact)), rtol=1e-15, atol=0)
    (tmp_path / "mine.cu").write_text(KERNEL)
    solution = read_solution(tmp_path / "mine.cu", task, tmp_path / "out")
    assert solution.config.launches[0].args == ["input0", "int64(problem)"]
    entry = (solution.folder / "entry.py").read_text()
    assert "fn=_forward" in entry
    assert "fn=" not in (task / "reference" / "entry.py").read_text()
    compile(entry, "entry.py", "exec")
    assert (solution.folder / "kernel.cu").read_text() == KERNEL


def test_settings_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for number, settings in enumerate(({}, [], {"single_init_configs": [{}]}, {"single_init_configs": 3})):
        folder = write_robust(tmp_path / str(number), settings)
        with pytest.raises(UsageError, match="single_init_configs"):
            robust_kbench.import_problem(folder, tmp_path / "task")
