"""The task of docs/adding-a-task.md: it runs, its references and bound hold, and the page quotes it as it is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.cli.main import main, parser
from greenfast.device.compiler import compile_kernel
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.record_schema import Record
from greenfast.judge.task import TaskConfig, load
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import render_program
from tests.fakes import emulate_here, import_families_here

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "row_softmax"
PAGE = (ROOT / "docs" / "adding-a-task.md").read_text()
#: The list of keys and counters that the page links.
KEYS = (ROOT / "docs" / "judge-details.md").read_text().split("\n## Keys of a config\n")[1].split("\n## ")[0]
TASK = load(FOLDER)
CONFIG, FAMILY, PROBLEM = TASK.config, TASK.family, TASK.problem
GATES = CONFIG.gates("fp16")
SHAPES = {shape.name: shape.dims for shape in CONFIG.shapes}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILES = {"json": "config_forward.json", "cuda": "row_softmax.cu"}


def blocks(language: str) -> list[str]:
    """The page's code blocks in a language."""
    return [text for kind, text in _BLOCK.findall(PAGE) if kind == language]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator and the family run in the process of the test."""
    emulate_here(monkeypatch)
    import_families_here(monkeypatch)


# The task


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_every_rung_builds_inside_its_budget_with_what_it_promises(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rung in CONFIG.rungs:
        argv = ["judge", str(FOLDER), "--candidate", rung.name, "--arch", target, "--device", "none", "--json"]
        assert main([*argv, "--out", str(tmp_path)]) == 4
        record = msgspec.json.decode(capsys.readouterr().out, type=Record)
        assert [g.status for g in record.gates] == ["PASS", "PASS", "PENDING", "PENDING", "PASS"], record.reasons
        assert record.arch == target


def test_each_vector_width_has_a_shape() -> None:
    def width(rung: str, dims: dict[str, int]) -> int:
        (step,) = render_program(FAMILY, CONFIG.rung_variant(CONFIG.rung(rung)).values, "fp16", dims).steps
        source = step.kernel.source
        (found,) = re.findall(r"kVector = (\d);", source)
        return int(found)

    assert {name: width("warp", dims) for name, dims in SHAPES.items()} == {
        "small": 8,
        "even": 2,
        "odd": 1,
        "one": 1,
        "wide": 8,
    }
    assert {width("naive", dims) for dims in SHAPES.values()} == {1}


def test_a_block_has_the_threads_that_its_bounds_promise() -> None:
    for rung in CONFIG.rungs:
        (step,) = render_program(FAMILY, CONFIG.rung_variant(rung).values, "fp16", SHAPES["small"]).steps
        source = step.kernel
        lanes = 32 if rung.toggles else 1
        assert source.block == (32 * lanes, 1, 1)
        assert compile_kernel(source, Target("sm_90a")).resources.smem_bytes == 0
    toggles = CONFIG.toggle_values({})
    programs = [render_program(FAMILY, toggles, "fp16", {"R": rows, "C": 4}) for rows in (1, 32, 33, 64, 65)]
    assert [program.steps[0].launch.grid[0] for program in programs] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("fmt", "dims", "instrumented", "message"),
    [
        ("e4m3", {"R": 1, "C": 1}, False, "unknown format 'e4m3'; allowed: fp16"),
        ("fp16", {"R": 1}, False, "needs C"),
        ("fp16", {"R": 1, "C": 1}, True, "no instrumented build"),
    ],
)
def test_what_makes_no_kernel_is_refused(fmt: str, dims: dict[str, int], instrumented: bool, message: str) -> None:
    toggles = CONFIG.toggle_values({})
    with pytest.raises(UsageError, match=message):
        render_program(FAMILY, toggles, fmt, dims, instrumented=instrumented)


@pytest.mark.gpu
def test_every_rung_is_right_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["judge", str(FOLDER), "--seeds", "0", "--iters", "20", "--processes", "3", "--no-profile", "--json"]
    main([*argv, "--out", str(tmp_path)])  # the speedup is not what this asks for
    record = msgspec.json.decode(capsys.readouterr().out, type=Record)
    assert record.gate_status("CORRECTNESS") == "PASS", record.reasons
    assert record.gate_status("EVIDENCE") == "PASS", record.reasons
    for side in (record.baseline, record.candidate):
        ratios = [row.bound_ratio for row in side.correctness]
        assert {row.shape for row in side.correctness} >= set(SHAPES)
        assert max(ratio for ratio in ratios if ratio is not None) > 0.2  # a bound that is never near stops nothing


@pytest.mark.usefixtures("one_process")
def test_a_shape_whose_answer_is_constant_is_judged_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The softmax of a row of one number is 1, so that a constant is right there, and nowhere else."""
    argv = ["judge", str(FOLDER), "--seeds", "0,1", "--no-profile", "--json", "--device", "emulator"]
    for shapes, status in (("one,odd", "PASS"), ("one", "PENDING")):
        main([*argv, "--shapes", shapes, "--out", str(tmp_path)])
        record = msgspec.json.decode(capsys.readouterr().out, type=Record)
        assert record.gate_status("CORRECTNESS") == status, record.reasons
    assert "one cannot be judged: a constant would pass" in record.reasons[0]


# The problem


def test_cases_are_deterministic_and_differ_by_seed() -> None:
    def digest(seed: int) -> str:
        return PROBLEM.make_case(SHAPES["odd"], seed, "fp16").digest

    assert digest(0) == digest(0)
    assert len({digest(seed) for seed in CONFIG.seeds}) == len(CONFIG.seeds)


@pytest.mark.parametrize("shape", SHAPES)
def test_references_are_those_of_torch(shape: str) -> None:
    x = PROBLEM.make_case(SHAPES[shape], 0, "fp16").inputs["x"]
    references = PROBLEM.references(SHAPES[shape], 0, "fp16")
    expected = torch.softmax(torch.from_numpy(x).double(), dim=1).numpy()
    np.testing.assert_allclose(references.exact, expected, rtol=1e-13)
    assert (references.full == references.exact).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_no_kernel_within_the_bound_misses_another_gate(shape: str) -> None:
    for seed in CONFIG.seeds:
        references = PROBLEM.references(SHAPES[shape], seed, "fp16")
        worst = error_stats(references.exact + references.bound, references.exact, GATES.error.bad_abs_err)
        assert worst.max_abs_err <= GATES.error.max_abs_err
        assert worst.mean_abs_err <= GATES.error.mean_abs_err
        assert worst.pct_bad == 0
        assert worst.relative_error <= GATES.kernel_error.relative_error


def simulated(x: NDArray[np.float16]) -> NDArray[np.float32]:
    """The kernel's result before it is rounded to half, in float32 steps."""
    wide = x.astype(np.float32)
    weights = np.exp2((wide - wide.max(axis=1, keepdims=True)) * np.float32(1.4426950408889634))
    return np.asarray(weights * (np.float32(1) / weights.sum(axis=1, keepdims=True, dtype=np.float32)))


def truncated(y: NDArray[np.float32]) -> NDArray[np.float16]:
    """To half towards zero."""
    nearest = y.astype(np.float16)
    return np.where(nearest.astype(np.float32) > y, np.nextafter(nearest, np.float16(0)), nearest)


def sum_in_half(x: NDArray[np.float16]) -> NDArray[np.float16]:
    weights = np.exp(x.astype(np.float32) - x.max(axis=1, keepdims=True)).astype(np.float16)
    total = np.zeros((x.shape[0], 1), np.float16)
    for column in range(x.shape[1]):
        total += weights[:, column : column + 1]
    return np.asarray(weights / total)


WRONG: dict[str, Callable[[NDArray[np.float16]], NDArray[np.float16]]] = {
    "zeros": lambda x: np.zeros_like(x),
    "truncates to half": lambda x: truncated(simulated(x)),
    "sums in half": sum_in_half,
    "leaves the last column out of the sum": lambda x: (
        simulated(x) / simulated(x)[:, :-1].sum(axis=1, keepdims=True)
    ).astype(np.float16),
    "rows and columns mixed up": lambda x: simulated(x.T.copy()).T.astype(np.float16),
}


def ratio(y: NDArray[np.float16], shape: str, seed: int) -> float:
    references = PROBLEM.references(SHAPES[shape], seed, "fp16")
    return worst_bound_ratio(PROBLEM.decode({"y": y}, "fp16"), references.exact, references.bound)


@pytest.mark.parametrize("shape", ["small", "even", "odd", "one", "wide"])
def test_the_bound_lets_a_right_kernel_through_and_is_not_far_from_it(shape: str) -> None:
    x = PROBLEM.make_case(SHAPES[shape], 0, "fp16").inputs["x"]
    found = ratio(simulated(x).astype(np.float16), shape, 0)
    assert found <= GATES.kernel_error.bound_factor
    if shape != "one":
        assert found > 0.8


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_the_bound_stops_a_wrong_kernel(what: str, shape: str) -> None:
    x = PROBLEM.make_case(SHAPES[shape], 0, "fp16").inputs["x"]
    assert ratio(WRONG[what](x), shape, 0) > GATES.kernel_error.bound_factor


# The page


@pytest.mark.parametrize("language", ["json", "python", "cuda"])
def test_every_quotation_is_in_the_files(language: str) -> None:
    files = [FOLDER / _FILES[language]] if language in _FILES else sorted(FOLDER.glob("*.py"))
    texts = [path.read_text() for path in files]
    quoted = blocks(language)
    assert quoted
    for block in quoted:
        assert any(block in text for text in texts), block


def test_the_files_are_those_that_the_page_lists() -> None:
    listed = re.findall(r"^  (\S+) ", blocks("")[0], re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in FOLDER.iterdir() if path.is_file())


def without_numbers(text: str) -> list[str]:
    return [re.sub(r"\d+", "#", line).rstrip() for line in text.splitlines()]


def test_every_command_is_one_and_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    commands = 0
    for block in blocks("console"):
        for command, shown in re.findall(r"^\$ greenfast (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            argv = shlex.split(command)
            parser().parse_args(argv)
            commands += 1
            if shown:
                assert main([*argv, "--out", str(tmp_path)]) == 4  # two gates are open
                printed = without_numbers(capsys.readouterr().out)
                assert [line for line in without_numbers(shown) if line not in printed] == []
    assert commands == 3


def test_the_list_names_every_key_of_the_config() -> None:
    keys: set[str] = set()
    for definition in msgspec.json.schema(TaskConfig)["$defs"].values():
        keys |= set(definition["properties"])
    # A key stands in code font, alone or at the end of a path such as rungs[].after.
    named = {part for code in re.findall(r"`([^`]+)`", KEYS) for part in re.findall(r"\w+", code)}
    assert keys - named == set()


def test_the_list_names_every_counter() -> None:
    counters = json.dumps(msgspec.json.schema(TaskConfig)["$defs"]["Promises"])
    for counter in re.findall(r'"(\w+)"', re.search(r'"enum": \[([^]]*)\]', counters)[1]):  # type: ignore[index]
        assert f"`{counter}`" in KEYS


def test_the_modules_need_nothing_that_an_author_has_not() -> None:
    """The example imports NumPy and the data floor, and no other part of the package but its headers' folder."""
    for module in ("family.py", "problem.py"):
        source = (FOLDER / module).read_text()
        imported = re.findall(r"^from (greenfast[\w.]*)", source, re.MULTILINE)
        assert {name for name in imported if not name.startswith("greenfast.spec.")} <= {"greenfast.kernels"}
