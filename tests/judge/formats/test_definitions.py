"""Definitions, workloads and solutions of FlashInfer-Trace and SOL-ExecBench as tasks and solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenfast.judge.error_metrics import worst_bound_ratio
from greenfast.judge.formats.converted import FORMAT
from greenfast.judge.formats.defined import DefinedProblem
from greenfast.judge.formats.flashinfer_trace import (
    evaluate_dims,
    find_workloads,
    is_definition,
    is_foreign_solution,
    read_definition,
    read_workloads,
)
from greenfast.judge.formats.registry import import_problem, read_solution
from greenfast.judge.solution.schema import find_solution
from greenfast.judge.task import load_task
from greenfast.spec.errors import UsageError

REFERENCE = """
import torch

def run(x, w, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)
"""
SCALED = {
    "name": "scaled norm/h64",
    "op_type": "norm",
    "axes": {"rows": {"type": "var"}, "h": {"type": "const", "value": 64}},
    "inputs": {
        "x": {"shape": ["rows", "h"], "dtype": "bfloat16"},
        "w": {"shape": ["h"], "dtype": "float16", "description": "weights"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["rows", "h"], "dtype": "bfloat16"}},
    "reference": REFERENCE,
    "constraints": ["rows % 2 == 1"],
    "tags": ["any"],
}
EPS = {"type": "scalar", "value": 1e-6}


def workload(rows: int, **more: Any) -> dict[str, Any]:
    inputs = {"x": {"type": "random"}, "w": {"type": "random"}, "eps": EPS}
    return {"uuid": f"{rows:08d}-aaaa", "axes": {"rows": rows}, "inputs": inputs, **more}


def data_set(folder: Path, definition: dict[str, Any], *workloads: dict[str, Any]) -> Path:
    """A data set laid out as FlashInfer-Trace's; returns the definition's file."""
    path = folder / "definitions" / "norm" / "scaled.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(definition))
    lines = folder / "workloads" / "norm" / f"{definition['name'].replace('/', '_')}.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_text("\n".join(json.dumps(w) for w in workloads) + "\n")
    return path


def named(definition: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**definition, "name": "scaled_norm", **changes}


def converted(tmp_path: Path, definition: dict[str, Any], *workloads: dict[str, Any]) -> tuple[Path, DefinedProblem]:
    path = data_set(tmp_path / "set", definition, *workloads)
    folder = Path(import_problem(str(path), tmp_path / "task"))
    return folder, DefinedProblem(folder, tmp_path / "set")


def first(problem: DefinedProblem) -> dict[str, int]:
    return evaluate_dims(problem.definition, problem.workloads, 1)


def test_a_definition_becomes_a_task_whose_baseline_is_its_reference(tmp_path: Path) -> None:
    folder, problem = converted(tmp_path, named(SCALED), workload(3), workload(5))
    config = load_task(folder).config
    assert [shape.dims for shape in config.shapes] == [
        {"rows": 3, "h": 64, "workload": 1},
        {"rows": 5, "h": 64, "workload": 2},
    ]
    assert "tolerance only" in config.description
    found = find_solution(folder / config.defaults.baseline)
    assert found.config.language == "callable"
    assert found.config.launches[0].args == ["x", "w", "float64(1e-06)"]
    case = problem.make_case(config.shapes[0].dims, 1, FORMAT)
    assert {name: (a.dtype.name, a.shape) for name, a in case.inputs.items()} == {
        "x": ("bfloat16", (3, 64)),
        "w": ("float16", (64,)),
    }
    assert case.digest != problem.make_case(config.shapes[0].dims, 2, FORMAT).digest
    assert case.digest == problem.make_case(config.shapes[0].dims, 1, FORMAT).digest


def test_the_references_are_what_the_reference_computes(tmp_path: Path) -> None:
    _, problem = converted(tmp_path, named(SCALED), workload(3))
    dims = first(problem)
    case, references = problem.make_case(dims, 0, FORMAT), problem.references(dims, 0, FORMAT)
    x, w = (a.astype(np.float64) for a in case.inputs.values())
    right = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    assert np.abs(references.exact - right).max() < 0.02
    assert np.array_equal(references.bound, np.maximum(0.01, 0.01 * np.abs(references.exact)))
    y = torch.from_numpy(references.exact).bfloat16().view(torch.uint8).numpy().view(case.inputs["x"].dtype)
    assert np.array_equal(problem.decode({"y": y}, FORMAT), references.exact)


def test_sol_execbench_adds_its_tolerances_and_allows_outliers(tmp_path: Path) -> None:
    tolerance = {"max_atol": 0.5, "max_rtol": 0.25, "required_matched_ratio": 0.9, "max_error_cap": 8.0}
    asked = workload(3, tolerance=tolerance)
    _, problem = converted(tmp_path, named(SCALED, custom_inputs_entrypoint=None), asked)
    references = problem.references(first(problem), 0, FORMAT)
    assert np.array_equal(references.bound, 0.5 + 0.25 * np.abs(references.exact))

    def ratio(wrong: int, by: float) -> float:
        actual = references.exact.copy()
        actual.flat[:wrong] += by
        return worst_bound_ratio(
            actual, references.exact, references.bound, matched=references.matched, most=references.most
        )

    outliers = references.exact.size // 10
    assert ratio(outliers, 7.0) == 0
    assert ratio(outliers + 1, 7.0) > 1
    assert ratio(1, 9.0) == np.inf


def test_a_definition_without_op_type_is_sol_execbenchs(tmp_path: Path) -> None:
    """FlashInfer-Trace asks for it; older entries of SOL-ExecBench lack it, and may lack custom inputs too."""
    path = tmp_path / "definition.json"
    for definition, is_sol in ((SCALED, False), ({k: v for k, v in SCALED.items() if k != "op_type"}, True)):
        path.write_text(json.dumps(definition))
        assert read_definition(path).is_sol is is_sol


def test_custom_inputs_come_from_the_definition(tmp_path: Path) -> None:
    source = (
        REFERENCE + "\ndef made(axes, device):\n    return {'x': torch.full((axes['rows'], axes['h']), 2.0).bfloat16()}"
    )
    asked = workload(3)
    asked["inputs"]["x"] = {"type": "custom"}
    _, problem = converted(tmp_path, named(SCALED, reference=source, custom_inputs_entrypoint="made"), asked)
    assert (problem.make_case(first(problem), 0, FORMAT).inputs["x"].astype(np.float32) == 2).all()


def test_an_infinity_that_both_have_is_no_error(tmp_path: Path) -> None:
    source = "import torch\ndef run(x, w, eps):\n    return torch.full_like(x, float('-inf'))"
    _, problem = converted(tmp_path, named(SCALED, reference=source), workload(3))
    references = problem.references(first(problem), 0, FORMAT)
    y = np.full(references.exact.shape, -np.inf, np.float32)
    assert np.array_equal(problem.decode({"y": y}, FORMAT), references.exact)
    assert np.isfinite(references.exact).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reference": "def other(): pass"}, "reference: has no function run"),
        ({"reference": "def run(:"}, "reference: line 1"),
        ({"axes": {}}, "x: shape names axis rows"),
        ({"outputs": {"y": {"shape": ["rows"], "dtype": "float4_e2m1"}}}, "dtype float4_e2m1 is not judged"),
        ({"inputs": 3}, r"Expected `object`, got `int` - at `\$.inputs`"),
    ],
)
def test_a_definition_that_cannot_be_judged_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = data_set(tmp_path, named(SCALED, **changes), workload(3))
    with pytest.raises(UsageError, match=says):
        read_definition(path)


def test_a_workload_must_meet_the_constraints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not meet the constraint 'rows % 2 == 1'"):
        converted(tmp_path, named(SCALED), workload(4))


def test_workloads_are_read_plain_and_wrapped_in_traces(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    wrapped = {"definition": "scaled", "workload": workload(5), "solution": None, "evaluation": None}
    path.write_text(json.dumps(workload(3)) + "\n\n" + json.dumps(wrapped) + "\n")
    assert [w.axes["rows"] for w in read_workloads(path)] == [3, 5]
    path.write_text(json.dumps(workload(3)) + "\n{}\n")
    with pytest.raises(UsageError, match="line 2: Object missing required field `uuid`"):
        read_workloads(path)


def solution(**spec: Any) -> dict[str, Any]:
    return {
        "name": "mine v1",
        "definition": "scaled_norm",
        "author": "someone",
        "spec": {"language": "python", "target_hardware": ["cuda"], "entry_point": "main.py::go", **spec},
        "sources": [{"path": "main.py", "content": "def go(x, w, eps, y): pass"}],
    }


@pytest.mark.parametrize("style", [True, False])
def test_a_solution_becomes_a_callable(tmp_path: Path, style: bool) -> None:
    folder, _ = converted(tmp_path, named(SCALED), workload(3))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(solution(destination_passing_style=style)))
    assert is_foreign_solution(path)
    assert not is_definition(path)
    found = read_solution(path, folder, tmp_path / "out").config
    assert (found.name, found.author, found.file) == ("mine_v1", "someone", "main.py")
    assert found.launches[0].args == ["x", "w", "float64(1e-06)"] + (["y"] if style else [])
    assert is_definition(folder / "definition.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"definition": "other"}, "solves other, the problem is scaled_norm"),
        ({"sources": [{"path": "../main.py", "content": ""}]}, "names no file of sources"),
        ({"sources": [{"path": "main.py", "content": ""}, {"path": "../x", "content": ""}]}, "outside of the solution"),
        ({"sources": [{"path": "main.py", "content": ""}, {"path": "a\0", "content": ""}]}, "is no path"),
        ({"spec": {"language": "cuda", "entry_point": "k.cu::go"}, "sources": [{"path": "k.cu", "content": ""}]},
         "binding: tvm-ffi"),
    ],
)  # fmt: skip
def test_a_solution_that_cannot_be_judged_is_refused_in_words(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    folder, _ = converted(tmp_path, named(SCALED), workload(3))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**solution(), **change}))
    with pytest.raises(UsageError, match=says):
        read_solution(path, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing half-written"


def test_a_solution_has_no_files_of_another(tmp_path: Path) -> None:
    problem = data_set(tmp_path / "set", named(SCALED, name="solution-mine_v1"), workload(3))
    folder = Path(import_problem(str(problem), tmp_path))
    path = tmp_path / "mine.json"
    more = {"path": "problem.py", "content": "1 / 0"}
    for sources in ([*solution()["sources"], more], solution()["sources"]):
        path.write_text(json.dumps({**solution(), "definition": "solution-mine_v1", "sources": sources}))
        made = read_solution(path, folder, tmp_path)
    assert "1 / 0" not in (folder / "problem.py").read_text()
    assert sorted(file.name for file in made.folder.iterdir()) == ["main.py", "solution.json"]


def test_a_definition_without_workloads_says_where_they_were_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    path.write_text(json.dumps(named(SCALED)))
    with pytest.raises(UsageError, match=r"workload\.jsonl is not there; --workloads FILE names them"):
        find_workloads(path)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no\\nmore')", r"run raises ValueError: no \(reference\.py, line 2\)"),
        ("pass", r"run gives y, made a tensor: raises RuntimeError: Could not infer dtype of NoneType"),
        ("return x[:1]", r"run gives y of shape \(1, 64\), the definition has \(3, 64\)"),
        ("return x, x", r"run gives 2 outputs, the definition has y"),
    ],
)
def test_what_a_reference_does_wrong_is_one_line(tmp_path: Path, body: str, says: str) -> None:
    _, problem = converted(tmp_path, named(SCALED, reference=f"def run(x, w, eps):\n    {body}"), workload(3))
    with pytest.raises(UsageError, match=says) as error:
        problem.references(first(problem), 0, FORMAT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ['../a"""b\\u\0', "[", "a" * 3000])
def test_a_name_of_any_characters(tmp_path: Path, name: str) -> None:
    path = tmp_path / "definition.json"
    path.write_text(json.dumps(named(SCALED, name=name)))
    with pytest.raises(UsageError, match="no workloads"):
        find_workloads(path)
    (tmp_path / "workload.jsonl").write_text(json.dumps(workload(3)))
    folder = Path(import_problem(str(path), tmp_path / "task"))
    compile((folder / "problem.py").read_text(), "problem.py", "exec")
    assert load_task(folder).config.shapes


def test_workloads_whose_names_begin_alike(tmp_path: Path) -> None:
    folder, _ = converted(tmp_path, named(SCALED), workload(3, uuid="workload-1"), workload(3, uuid="workload-2"))
    assert [shape.name for shape in load_task(folder).config.shapes] == ["rows3_workload", "rows3_workload_2"]


@pytest.mark.parametrize("rows", [0, -1, 2**40 + 1, 10**30])
def test_a_size_that_no_array_has(tmp_path: Path, rows: int) -> None:
    with pytest.raises(UsageError, match=r"line 1: (Expected `int`|Integer value out of range)"):
        converted(tmp_path, named(SCALED), {**workload(3), "axes": {"rows": rows}})
