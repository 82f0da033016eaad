"""Problems and answers of TritonBench as tasks and solutions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from greenfast.cli.main import main
from greenfast.judge.formats.registry import import_problem, read_solution
from greenfast.judge.formats.test_calls import CallProblem
from greenfast.judge.formats.tritonbench import SEPARATOR, is_tritonbench
from greenfast.judge.task import load_task
from greenfast.spec.errors import UsageError

#: Results, memory that is written in place and memory that is new, views, plain values, fixed and drawn numbers.
REFERENCE = """
import torch

def double(x, bias=0.5, *, out=None):
    y = 2 * x + bias
    if out is None:
        return y
    out.copy_(y)

def add_in_place(x, columns, other):
    x[:, columns] += other["y"]
    return x.sum(0), x.argmax()

def drop(x):
    return torch.nn.functional.dropout(x)

def product(x, w):
    return x @ w

def add_scaled(x, y, factor):
    x += factor * y

def blank(x):
    return torch.empty_like(x)
"""
TEST = """
import torch, double_problem
def test_all():
    torch.manual_seed(3)
    results = {}
    fixed = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    results["fixed"] = double(fixed)
    assert torch.allclose(results["fixed"], 2 * fixed + 0.5)
    out = torch.empty(4, 3, device="cuda")
    double(torch.randn(4, 3, device="cuda"), float("inf") * 0 + 1, out=out) if False else None
    double_problem.double(torch.randn(4, 3, device="cuda").half(), bias=1, out=out)
    grid = torch.randn(5, 4, device="cuda")
    results["sum"] = add_in_place(grid.t(), [0, 2], {"y": grid[:2].t().clone()})
    results["random"] = drop(grid)
    x = torch.randn(2, 3, device="cuda", requires_grad=True)
    w = torch.randn(3, 2, device="cuda", requires_grad=True)
    product(x, w).sum().backward()
    results["none"] = double(torch.zeros(0, device="cuda"))
    return results
result_gold = test_all()
"""


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "double_problem.py"
    path.write_text(f"{REFERENCE}\n{SEPARATOR}\n{TEST}")
    return path


def test_each_call_of_the_test_becomes_a_shape(problem: Path, tmp_path: Path) -> None:
    assert is_tritonbench(problem)
    task = Path(import_problem(str(problem), tmp_path / "out"))
    config = load_task(task).config
    assert [shape.name for shape in config.shapes] == ["1_double", "2_double", "3_add_in_place", "5_product"]
    assert config.left_out == [
        "call 4, drop (it draws random numbers)",
        "call 6, double (it returns and writes no element)",
    ]
    calls = CallProblem(task)

    fixed, other = (calls.make_case({"problem": 1}, seed, "") for seed in (0, 5))
    assert fixed.inputs["input0"].tolist() == [1, -2, 3]
    factor = other.inputs["input0"][0]
    assert 0.75 <= factor < 1
    assert np.array_equal(other.inputs["input0"], factor * fixed.inputs["input0"])
    assert np.array_equal(calls.references({"problem": 1}, 5, "").exact, 2 * other.inputs["input0"] + np.float32(0.5))
    assert other.digest == calls.make_case({"problem": 1}, 5, "").digest

    half = calls.make_case({"problem": 2}, 5, "")  # ``out`` is no input, for nothing has written it
    assert {name: (o.shape, o.dtype) for name, o in half.outputs.items()} == {"output0": ((12,), "float32")}
    assert half.inputs["input0"].dtype == np.float16

    placed = calls.make_case({"problem": 3}, 5, "")
    assert list(placed.outputs) == ["output0", "output1", "input0"]
    x = placed.inputs["input0"].reshape(5, 4).copy().T
    x[:, [0, 2]] += placed.inputs["input1"].reshape(2, 4).T  # clone keeps the strides
    outputs = {"input0": x.T.reshape(-1), "output1": x.argmax(), "output0": x.sum(0)}
    digest = placed.digest
    references = calls.references({"problem": 3}, 5, "")
    assert placed.digest == digest == calls.make_case({"problem": 3}, 5, "").digest, "the reference changed the case"
    assert np.allclose(calls.decode(outputs, ""), references.exact, rtol=1e-6)
    assert references.sizes == (5, 1, 20)
    assert references.bound[5] == 0  # the index
    rms = np.sqrt(np.mean(x.sum(0) ** 2))
    assert np.allclose(references.bound[:5], 2e-3 * (np.abs(x.sum(0)) + rms) + 1e-7, rtol=1e-5)

    gradients = calls.make_case({"problem": 4}, 5, "")
    assert [o.shape for o in gradients.outputs.values()] == [(2, 2), (2, 3), (3, 2)]
    w = gradients.inputs["input1"].reshape(3, 2)
    expected = np.cos(np.arange(4)).reshape(2, 2) @ w.T
    assert np.allclose(calls.references({"problem": 4}, 5, "").exact[4:10], expected.reshape(-1), rtol=1e-5)


def test_answers_are_files_and_rows(problem: Path, tmp_path: Path) -> None:
    data, answers = tmp_path / "data", tmp_path / "LLM_generated" / "Bench_G_general"
    data.mkdir()
    answers.mkdir(parents=True)
    rows = [{"file": "other.py", "output": "def f()"}, {"file": problem.name, "output": REFERENCE}]
    (data / "TritonBench_G_v1.json").write_text(json.dumps(rows))
    lines = [{"label": "def f()", "predict": "no"}, {"label": REFERENCE, "predict": "Here:\n```python\nyes\n```"}]
    (answers / "model.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "mine.py").write_text(f"yes\n{SEPARATOR}\n{TEST}")
    task = Path(import_problem(str(problem), tmp_path / "converted"))
    for path in (answers / "model.jsonl", tmp_path / "mine.py"):
        solution = read_solution(path, task, tmp_path / "out")
        assert (solution.folder / "program.py").read_text().strip() == "yes"
        assert solution.config.launches[0].args == ["input0", "input1", "int64(problem)"]
    (answers / "model.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(UsageError, match="has no answer to double_problem"):
        read_solution(answers / "model.jsonl", task, tmp_path / "out")
    (answers / "model.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="its rows have the key predict"):
        read_solution(answers / "model.jsonl", task, tmp_path / "out")


def test_a_write_that_changes_nothing_is_a_write(tmp_path: Path) -> None:
    test = (
        "import torch\nfor f in (0, 1):\n    add_scaled(torch.ones(2, device='cuda'), torch.ones(2, device='cuda'), f)"
    )
    (tmp_path / "one.py").write_text(f"{REFERENCE}\n{SEPARATOR}\n{test}\n")
    calls = CallProblem(Path(import_problem(str(tmp_path / "one.py"), tmp_path / "out")))
    assert [list(calls.make_case({"problem": n}, 0, "").outputs) for n in (1, 2)] == [["input0"], ["input0"]]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("", "has no test after its line"),
        ("x = 1", "calls no function of the reference"),
        ("double(object())", r"call 1, double \(an argument is a object\)"),
        ("import nowhere", "after 0 calls the test raises ModuleNotFoundError"),
        ("import torch\ndouble(torch.full((2,), float('nan')))", "a result is NaN"),
        ("import torch\nproduct(torch.ones(2, 2), torch.ones(2, 2, device='cuda'))", "on the CPU and on the GPU"),
        ("import torch\ndouble(torch.ones(2).cfloat())", "complex64"),
        ("import torch\nblank(torch.ones(2, device='cuda'))", "leaves elements unwritten"),
    ],
)
def test_a_test_without_a_call_to_judge_is_refused_in_words(tmp_path: Path, test: str, message: str) -> None:
    path = tmp_path / "one.py"
    path.write_text(f"{REFERENCE}\n{SEPARATOR}\n{test}\n")
    with pytest.raises(UsageError, match=message):
        Path(import_problem(str(path), tmp_path / "out"))


KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def scale(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, 3 * tl.load(x + i, mask=i < n), mask=i < n)

def triple(x):
    y = torch.empty_like(x)
    scale[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), B=64)
    return y
"""


@pytest.mark.slow
def test_an_answer_gets_a_verdict_of_correctness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test of the right answer in its own file runs at its import; the wrong one knows the test's numbers."""
    pytest.importorskip("triton", reason="needs greenfast[triton]")
    own = 'x = torch.ones(3, device="cuda")\nassert torch.equal(triple(x), 3 * x)\n'
    numbers = "[1.0, -2.0, 5.0]"
    test = f'import torch\nresult = triple(torch.tensor({numbers}, device="cuda"))\n'
    (tmp_path / "triple.py").write_text(f"{KERNEL}\n{SEPARATOR}\n{test}")
    table = f'def triple(x):\n    return x * 0 + 3 * torch.tensor({numbers}, device="cuda")\n'
    codes = {}
    for name, text in {"right": KERNEL + own, "wrong": f"import torch\n{table}"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        arguments = [str(tmp_path / f"{name}.py"), "--problem", str(tmp_path / "triple.py"), "--out", str(tmp_path)]
        codes[name] = main(["judge", *arguments])
        assert f"CORRECTNESS {'PASS' if name == 'right' else 'FAIL'}" in capsys.readouterr().out
    assert codes == {"right": 4, "wrong": 13}
