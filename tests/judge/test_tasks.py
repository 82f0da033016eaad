"""Finding tasks, and loading what their authors wrote."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.task import find_task, load, load_family, load_task, task_folders
from greenfast.judge.validate import validate
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import render_program
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder
from tests.fakes import FakeDevice, Script, Watcher, install, request, rungs
from tests.judge.small_task import FAMILY, PROBLEM, loaded, write_task

SHIPPED = {"fp8_sdpa", "fp8_quantize", "fp8_attention", "serving_attention", "sdpa_backward"}


def names() -> set[str]:
    return {load_task(folder).config.name for folder in task_folders()}


def test_the_shipped_tasks_are_found_by_name_and_by_folder() -> None:
    assert names() == SHIPPED
    assert find_task("fp8_sdpa") == find_task("fp8_sdpa_stage_c_wmma")
    for name in SHIPPED:
        assert load(name).config.name == name


def test_folders_of_the_environment_are_searched_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_task(tmp_path / "a" / "mine")
    write_task(tmp_path / "b" / "mine", name="hidden")
    write_task(tmp_path / "b" / "fp8_quantize", name="other")
    monkeypatch.setenv("GREENFAST_TASKS", os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b")]))
    assert names() == {"twice", "other", "fp8_sdpa", "fp8_attention", "serving_attention", "sdpa_backward"}
    assert find_task("mine").config.name == "twice"


def test_a_folder_is_a_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_task(tmp_path / "mine")
    assert find_task(str(tmp_path / "mine")).config.name == "twice"
    monkeypatch.chdir(tmp_path)
    assert find_task("mine").config.name == find_task("./mine").config.name == "twice"


def test_an_unknown_task_is_answered_with_the_known_ones() -> None:
    known = ", ".join(sorted(SHIPPED))
    with pytest.raises(UsageError, match=f"unknown task 'fp9'; allowed: {known}, or a task's folder"):
        find_task("fp9")


def test_a_folder_without_a_config_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config_forward\.json: cannot be read \(No such file.*a task folder holds a"):
        find_task(str(tmp_path))


def test_a_broken_config_neither_hides_other_tasks_nor_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_task(tmp_path / "broken", text="{")
    monkeypatch.setenv("GREENFAST_TASKS", str(tmp_path))
    assert find_task("fp8_sdpa").config.name == "fp8_sdpa"
    for name in ("broken", "its_config_may_have_this_name"):
        with pytest.raises(UsageError, match=r"broken/config_forward\.json: .*truncated"):
            find_task(name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": None}, r"family.py: no such file"),
        ({"problem": None}, r"problem.py: no such file"),
        ({"family": "def kernel(): pass"}, r"family 'family.py' has no function launch"),
        ({"problem": "make_case = 3"}, r"problem 'problem.py' has no function make_case, references, decode"),
        ({"family": "raise ValueError('no luck')"}, r"family 'family.py' cannot be imported: ValueError: no luck"),
        ({"problem": "import no_such_package"}, r"cannot be imported: ModuleNotFoundError: No module named 'no_such_"),
        ({"problem": "def f(:\n"}, r"problem 'problem.py' cannot be imported: SyntaxError"),
    ],
)
def test_a_module_that_does_not_serve_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    task = write_task(tmp_path / "mine", **changes)
    with pytest.raises(UsageError, match=said):
        load(task)


def test_a_module_that_is_not_installed_is_named(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "mine")
    config = json.loads((folder / "config_forward.json").read_text())
    (folder / "config_forward.json").write_text(json.dumps(config | {"family": "no_such_package.family"}))
    with pytest.raises(UsageError, match=r"family 'no_such_package.family' cannot be imported: ModuleNotFoundError"):
        load(folder)


def test_two_tasks_with_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    a = loaded(tmp_path / "a" / "mine")
    b = loaded(tmp_path / "b" / "mine", family=FAMILY.replace("twice", "thrice"))
    programs = [render_program(task.family, {"FAST": 1}, "float", {"N": 5}) for task in (a, b)]
    assert [program.steps[0].kernel.entry for program in programs] == ["twice", "thrice"]


def test_only_families_of_greenfast_are_imported_into_this_process(tmp_path: Path) -> None:
    """The file of a shipped task is imported once. A copy of it elsewhere runs in a confined process."""
    task = find_task("fp8_sdpa")
    assert load_family(task) is load_family(task) is sys.modules[ladder.__name__]
    shutil.copytree(task.folder, tmp_path / "copy")
    copied = load_family(load_task(tmp_path / "copy"))
    assert isinstance(copied, RemoteFamily)
    values, dims = task.config.variant("stage2").values, task.config.shape("small").dims
    (step,) = render_program(copied, values, "e4m3", dims).steps
    assert step.kernel.source == ladder.kernel(values, "e4m3", dims).source
    assert step.kernel.include_dirs == (tmp_path / "copy" / "kernels", KERNEL_DIR)


@pytest.mark.parametrize(("us", "decision"), [(5.0, "MERGE"), (10.0, "DEFER"), (20.0, "DEFER")])
def test_a_task_of_ones_own_goes_through_all_gates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, us: float, decision: str
) -> None:
    """Where a rung asks for no speedup, FAST is still asked for: faster beyond the noise."""
    task = loaded(tmp_path / "mine")
    asked = request(tmp_path / "out", task=task, shapes=("tiny", "page"), fmt="float")
    install(monkeypatch, FakeDevice(asked, {"plain": Script(us=10.0), "fast": Script(us=us)}))
    outcome = validate(asked, *rungs(asked, "plain", "fast"), Watcher(), profile=False)
    assert outcome.record.decision == decision
    assert outcome.record.candidate.toggles == {"FAST": 1}
    assert len(outcome.record.candidate.correctness) == 6  # with a third seed, which takes part in timing
    assert outcome.folder.parent == tmp_path / "out" / "twice"


def test_a_kernel_that_does_not_compile_names_file_and_line(tmp_path: Path) -> None:
    from_mine = loaded(tmp_path / "mine", family=FAMILY.replace("int i =", "int j ="))
    asked = request(tmp_path / "out", task=from_mine, shapes=("tiny",), fmt="float", device=None)
    record = validate(asked, *rungs(asked, "plain", "fast"), Watcher()).record
    assert record.decision == "DEFER"
    for reason in record.gates[0].reasons:
        assert 'twice.cu(3): error: identifier "i" is undefined' in reason


NAN_INPUT = PROBLEM.replace("return np.random.default_rng", "return np.nan * np.random.default_rng")
WRONG_SHAPE = PROBLEM.replace('outputs["y"].astype', 'outputs["y"][:-1].astype')
NOTHING = PROBLEM.replace('return outputs["y"].astype', 'outputs["y"].astype')
COMPLEX = PROBLEM.replace('outputs["y"].astype', '1j * outputs["y"].astype')


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (NAN_INPUT, r"references of N=5, seed 0: full\[0\] is nan; inputs must not make NaN"),
        (WRONG_SHAPE, r"tiny seed 0: decode gives an array of shape \(4,\), the references have \(5,\)"),
        (NOTHING, "tiny seed 0: decode gives NoneType; an array of float64 is asked for"),
        (COMPLEX, "tiny seed 0: decode gives complex128; an array of float64 is asked for"),
    ],
)
def test_a_problem_that_makes_no_sense_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str, said: str
) -> None:
    task = loaded(tmp_path / "mine", problem=problem)
    asked = request(tmp_path / "out", task=task, shapes=("tiny",), fmt="float")
    device = install(monkeypatch, FakeDevice(asked))
    with pytest.raises(UsageError, match=said):
        validate(asked, *rungs(asked, "plain", "fast"), Watcher())
    assert all(worker.closed for worker in device.workers)
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []
