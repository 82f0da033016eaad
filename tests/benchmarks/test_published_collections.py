"""Readers, comparison and record of the trial on published collections."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import published_readers as collections
from benchmarks.published_verdicts import (
    ProgramOutcome,
    clopper_pearson,
    compare,
    count_errors,
    find_difference,
    judge,
    render_bounds,
    render_extensions,
    render_table,
)
from greenfast.judge.formats.tritonbench import SEPARATOR

ROOT = Path(__file__).parents[2]


def outcome(**arrays: np.ndarray) -> ProgramOutcome:
    facts = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    return ProgramOutcome({"facts": facts, "launches": 1}, arrays)


def test_each_distinct_answer_is_read_once_with_its_test(tmp_path: Path) -> None:
    problem = "def f(): ...\n" + SEPARATOR + "\nresult = f()\n"
    (tmp_path / "data/TritonBench_G_v1").mkdir(parents=True)
    (tmp_path / "data/TritonBench_G_v1/one.py").write_text(problem)
    (tmp_path / "data/TritonBench_G_v1.json").write_text(json.dumps([{"file": "one.py", "output": "def f(): ..."}]))
    folder = tmp_path / "LLM_generated/Bench_G_general"
    folder.mkdir(parents=True)
    for model, text in (
        ("a", "Here:\n```python\nx = 1\n```\nDone."),
        ("b", "x = 2<|im_end|>"),
        ("c", "```\nx = 2\n```"),
    ):
        row = {"prompt": "", "predict": text, "label": "def f(): ..."}
        (folder / f"{model}.jsonl").write_text(json.dumps(row) + "\n")
    programs = collections.read_tritonbench(tmp_path)
    assert [(p.identifier, p.source.strip()) for p in programs] == [
        ("G/a/one", "x = 1"),
        ("G/b/one", "x = 2"),
        ("G/c/one", "x = 2"),
    ]
    assert programs[0].test.strip() == "result = f()"


def test_exploits_become_solutions_with_a_right_and_a_wrong_kernel(tmp_path: Path) -> None:
    (tmp_path / "exploits").mkdir()
    (tmp_path / "exploits/submission_x.py").write_text('w = torch.ones(3, device="cuda")\ndef kernel(y, x): pass\n')
    assert collections.write_exploits(tmp_path, tmp_path / "out") == 1
    wrong = (tmp_path / "out/x_wrong.py").read_text()
    compile(wrong, "x_wrong.py", "exec")
    assert "tl.zeros" in wrong
    assert 'device="cpu"' in wrong
    assert "tl.load" in (tmp_path / "out/x_right.py").read_text()


@pytest.mark.parametrize(
    ("output", "expected", "text"),
    [
        ([1.0, 2.0], [1.0, 2.001], ""),
        ([1.0, 2.0], [1.0, 2.1], "1 of 2 differ, 2 for 2.1"),
        ([1.0, np.nan], [1.0, np.nan], ""),
        ([1.0, np.inf], [1.0, 2.0], "1 of 2 elements are not finite on one side"),
        ([1.0], [1.0, 2.0], "has shape [1], expected [2]"),
    ],
)
def test_differences_are_named(output: list[float], expected: list[float], text: str) -> None:
    assert find_difference(np.array(output), np.array(expected), 2e-3) == text


def test_elements_that_the_reference_does_not_determine_are_not_compared() -> None:
    reference, second = outcome(y=np.array([1.0, 5.0])), outcome(y=np.array([1.0, 9.0]))
    assert compare(outcome(y=np.array([1.0, 0.0])), reference, second) == ""
    assert compare(outcome(y=np.array([2.0, 0.0])), reference, second) != ""
    assert compare(outcome(y=np.array([1.0, 0.0])), reference, None) != ""
    assert compare(outcome(y=np.array([1.0])), outcome(y=np.array([1.0])), outcome(y=np.array([2.0]))) is None


def test_a_verdict_has_its_reason() -> None:
    def verdict(**facts: object) -> tuple[str, str]:
        return judge(ProgramOutcome({"launches": 1, "message": "m"} | facts, {}), lambda: "")

    assert verdict() == ("accepted", "")
    assert verdict(launches=0)[0] == "no kernel"
    assert verdict(ended="time") == ("undecided", "time limit")
    assert verdict(error="CompilationError") == ("refused", "Triton does not compile it")
    assert verdict(error="UnsupportedError")[0] == "undecided"
    missing = "extension x does not compile:\nk.cu:8:10: fatal error: cutlass/cutlass.h: No such file or directory"
    assert verdict(error="CompileError", message=missing)[0] == "undecided"
    assert verdict(error="CompileError", message="expected a ;")[0] == "refused"
    assert verdict(error="RuntimeError", message="unsupported shape")[0] == "undecided"
    assert verdict(error="X", faults=["data-race: ..."]) == ("refused", "fault: data-race: ...")


def test_undecided_programs_count_as_neither_right_nor_wrong() -> None:
    rows = [
        {"verdict": "accepted", "independent": "right"},
        {"verdict": "undecided", "independent": "right"},
        {"verdict": "accepted", "independent": "out of bounds", "inspected": "right: the interpreter is wrong"},
        {"verdict": "refused", "independent": "unknown"},
        {"verdict": "accepted", "independent": "wrong"},
    ]
    errors = count_errors(rows)
    assert (errors["false accepts"]["number"], errors["false accepts"]["of"]) == (1, 1)
    assert (errors["false refusals"]["number"], errors["false refusals"]["of"]) == (0, 2)


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    assert clopper_pearson(0, 22) == pytest.approx((0.0, 1 - 0.025 ** (1 / 22)))
    assert clopper_pearson(5, 5) == pytest.approx((0.025 ** (1 / 5), 1.0))


def test_the_page_has_the_tables_of_the_record() -> None:
    record = json.loads((ROOT / "evidence/published-collections.json").read_text())
    page = (ROOT / "docs/trial.md").read_text()
    assert render_table(record) in page
    assert render_bounds(record) in page
    assert render_extensions(record) in page
