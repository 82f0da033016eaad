"""The exam: which cases are asked, what is drawn, and that less than all of it is no MERGE."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from greenfast.device.session import RunResult
from greenfast.judge.exam import Cell, Plan, draw, plan
from greenfast.judge.gates.correctness import _row
from greenfast.judge.quote import Kept, completes
from greenfast.judge.record import CorrectnessRow, Record
from greenfast.judge.request import Request, examined
from greenfast.judge.task import Shape, load_task
from greenfast.judge.tasks import LoadedTask, load
from greenfast.judge.validate import validate
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import program_of
from greenfast.spec.problem import case_of, references_of
from tests.fakes import L4, Behaviour, Call, FakeDevice, Script, Watcher, install, request, right, shipped
from tests.judge.small_task import FAMILY, PROBLEM, write_task

ROOT = Path(__file__).parents[2]
TASKS = ("fp8_sdpa", "fp8_attention", "fp8_quantize", "serving_attention")
RANGES = {"N": {"min": 1, "max": 3000}, "FLAG": [0, 0, 7]}

#: The doubling problem with variants, which refuses multiples of 3.
VARIED = PROBLEM.replace("def _x(dims, seed):", "def _x(dims, seed, variant):").replace(
    "seed, fmt)", "seed, fmt, variant='normal')"
)
VARIED = VARIED.replace("_x(dims, seed)", "_x(dims, seed, variant)").replace(
    '    return np.random.default_rng(seed).standard_normal(dims["N"], dtype=np.float32)',
    """    if dims["N"] % 3 == 0:
        raise UsageError(f"N={dims['N']} is a multiple of 3")
    x = np.random.default_rng(seed).standard_normal(dims["N"], dtype=np.float32)
    return x + np.float32({"shifted": 100, "outliers": 7}.get(variant, 0))""",
)
VARIED = "from greenfast.spec.errors import UsageError\nVARIANTS = ('shifted', 'outliers')\n" + VARIED


def doubling(folder: Path, family: str = FAMILY, **drawing: Any) -> LoadedTask:
    """The doubling task, with ranges and variants."""
    changes: dict[str, Any] = {"drawing": {"ranges": RANGES, "max_size_emulated": 50} | drawing}
    shapes = [{"name": "page", "dims": {"N": 1024}}, {"name": "tiny", "dims": {"N": 5}}]
    return load(load_task(write_task(folder, problem=VARIED, family=family, shapes=shapes, **changes)))


def shapes_drawn(task: LoadedTask, seed: int = 1, emulated: bool = False) -> list[dict[str, int]]:
    return [s.dims for s in draw(task.config, task.problem, "float", seed, rung=None, emulated=emulated)]


# What is drawn


def test_what_is_drawn_lies_in_the_ranges_and_is_of_the_seed(tmp_path: Path) -> None:
    task = doubling(tmp_path, count=40)
    found = shapes_drawn(task)
    assert found == shapes_drawn(task)
    assert found != shapes_drawn(task, 2)
    assert len(found) == 40
    assert all(1 <= dims["N"] <= 3000 and dims["N"] % 3 for dims in found), "what the problem refuses is drawn again"
    assert {dims.get("FLAG") for dims in found} == {None, 7}, "a 0 leaves the dimension out"
    assert min(dims["N"] for dims in found) < 20
    assert max(dims["N"] for dims in found) > 2000
    assert all(dims["N"] <= 50 for dims in shapes_drawn(doubling(tmp_path / "small"), emulated=True))


def test_half_of_what_is_drawn_is_as_small_as_a_dimension_can_be(tmp_path: Path) -> None:
    sized = {"N": {"min": 1, "max": 3000}, "M": {"min": 2, "max": 900}, "FLAG": [0, 7]}
    task = doubling(tmp_path, ranges=sized)
    for seed in range(12):
        first, second, *rest = shapes_drawn(task, seed)
        assert first["N"] == 1 or first["M"] == 2
        assert second["N"] == 1 or second["M"] == 2
        assert (first["N"] == 1 and second["M"] == 2) or (first["M"] == 2 and second["N"] == 1)
        assert len(rest) == 2
    beyond = doubling(tmp_path / "refused", ranges={"N": {"min": 3, "max": 3000}})
    assert all(dims["N"] > 3 for dims in shapes_drawn(beyond)), "the least is refused, so none has it"
    assert len(shapes_drawn(beyond)) == 4


def test_ranges_in_which_nothing_fits_are_the_tasks_fault(tmp_path: Path) -> None:
    task = doubling(tmp_path, ranges={"N": {"min": 3, "max": 3}})
    with pytest.raises(UsageError, match=r"task twice: drawing: .* N=3 is a multiple of 3"):
        shapes_drawn(task)


@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_ranges_hold_shapes_enough(name: str) -> None:
    task = shipped(name)
    for emulated in (True, False):
        found = draw(task.config, task.problem, task.config.defaults.format, 3, rung=None, emulated=emulated)
        assert len({tuple(s.dims.items()) for s in found}) == task.config.drawing.count


def test_every_rung_takes_what_is_drawn_for_it() -> None:
    for name in TASKS:
        task = shipped(name)
        config, fmt = task.config, task.config.defaults.format
        for rung in config.rungs:
            for seed in range(3):
                for shape in draw(config, task.problem, fmt, seed, rung=rung, emulated=True):
                    program_of(task.family, config.rung_variant(rung).values, fmt, shape.dims)
            for shape in config.shapes:
                if rung.answers_for(shape.dims):
                    program_of(task.family, config.rung_variant(rung).values, fmt, shape.dims)


# What is asked


def asked(
    task: LoadedTask, shapes: tuple[str, ...], seeds: tuple[int, ...], seed: int | None, emulated: bool = False
) -> Plan:
    chosen = [task.config.shape(name) for name in shapes]
    return plan(task.config, task.problem, "float", chosen, seeds, rung=None, seed=seed, emulated=emulated)


def test_the_whole_exam_has_every_shape_and_seed_and_drawn_ones(tmp_path: Path) -> None:
    task = doubling(tmp_path)
    found = asked(task, ("page", "tiny"), (0, 1), 77)
    assert found.missing == ()
    assert [str(c) for c in found.cells[:4]] == ["page seed 0", "page seed 1", "tiny seed 0", "tiny seed 1"]
    assert all(c.format_is_judged for c in found.cells[:4])
    assert [str(c) for c in found.cells[4:8]] == [
        "page seed 77", "page seed 77 shifted", "page seed 77 outliers", "tiny seed 77 shifted",
    ]  # fmt: skip
    assert [c.shape for c in found.cells[8:]] == list(found.drawn)
    assert not any(c.format_is_judged for c in found.cells[4:])
    assert found.small.name == "page", "on five elements all variants are much alike"
    smallest = min(found.drawn, key=lambda shape: shape.dims["N"])
    assert found.emulated == (found.small, smallest), "where a GPU runs all, as shapes of the task hide what tails do"
    assert smallest.dims["N"] == 1
    assert asked(task, ("page", "tiny"), (0, 1), None).emulated == (found.small,)
    emulated = asked(task, ("page", "tiny"), (0, 1), 77, emulated=True)
    assert [str(c) for c in emulated.cells[4:-4]] == ["page seed 77", "page seed 77 shifted", "page seed 77 outliers"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    task = doubling(tmp_path)
    assert asked(task, ("tiny",), (0,), None).missing == ("1 of 2 shapes", "1 of 2 seeds", "nothing drawn")
    assert asked(task, ("tiny", "page"), (0, 1), None).missing == ("nothing drawn",)
    other = asked(task, ("tiny",), (0, 1, 5), 9)
    assert other.missing == ("1 of 2 shapes",)
    assert [c.format_is_judged for c in other.cells[:3]] == [True, True, False], "seed 5 is not the task's"


# Validate


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, task: LoadedTask, behave: Behaviour = right, **options: Any
) -> Record:
    """Validate the doubling task's exam on a fake GPU, where the candidate does that."""
    plain = request(out, task=task, shapes=("tiny",), fmt="float", whole=False)
    config = task.config
    whole = examined(plain, config.rung("fast"), **{"chosen": False, "seed": 77} | options)
    scripts = {"plain": Script(us=20.0), "fast": Script(us=10.0, behave=behave)}
    install(monkeypatch, FakeDevice(whole, scripts))
    return validate(whole, config.variant("plain"), config.variant("fast"), Watcher(), profile=False).record


def wrong_at(
    monkeypatch: pytest.MonkeyPatch, out: Path, task: LoadedTask, wrong: Callable[[np.ndarray], bool]
) -> list[str]:
    """Why a kernel is deferred that is off where its input's double is such an array."""

    def behave(call: Call) -> None:
        y = call.right["y"]
        call.write_all({"y": y + np.float32(1e-3)} if wrong(y) else call.right)

    record = run(monkeypatch, out, task, behave)
    assert record.decision == "DEFER"
    return record.reasons


def test_the_whole_exam_makes_a_merge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = run(monkeypatch, tmp_path / "out", doubling(tmp_path))
    assert (record.decision, record.reasons) == ("MERGE", ["all five gates hold"])
    assert record.exam is not None
    assert (record.exam.seed, record.exam.complete, record.exam.missing) == (77, True, [])
    rows = record.candidate.correctness
    assert {row.shape: row.dims for row in rows if row.shape in record.exam.drawn} == record.exam.drawn
    assert len(record.exam.drawn) == 4
    assert {(row.variant, row.drawn) for row in rows} == {
        ("normal", False), ("normal", True), ("shifted", True), ("outliers", True),
    }  # fmt: skip
    assert {row.shape for row in record.candidate.timing} == {"tiny", "page"}, "what was drawn is not timed"
    assert record.command.count("--exam-seed") == 0, "the seed was given"


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"chosen": True, "seed": None}, ["1 of 2 shapes", "nothing drawn"]),
        ({"chosen": True}, ["1 of 2 shapes"]),
    ],
)
def test_less_than_the_whole_is_partial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], missing: list[str]
) -> None:
    record = run(monkeypatch, tmp_path / "out", doubling(tmp_path), **options)
    assert record.decision == "PARTIAL"
    assert record.reasons == [f"partial: {', '.join(missing)}; all five gates hold on those"]
    assert record.exam is not None
    assert (record.exam.complete, record.exam.missing) == (False, missing)


def test_a_new_seed_is_in_the_command(tmp_path: Path) -> None:
    task = doubling(tmp_path)
    plain = request(tmp_path, task=task, shapes=("tiny",), fmt="float", whole=False)
    seeds = set()
    for _ in range(2):
        found = examined(plain, None, chosen=False)
        assert found.exam is not None
        assert found.command == f"{plain.command} --exam-seed {found.exam.seed}"
        again = examined(plain, None, chosen=False, seed=found.exam.seed)
        assert again.exam == found.exam
        seeds.add(found.exam.seed)
    assert len(seeds) == 2


def test_a_kernel_that_is_wrong_at_a_length_nobody_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reasons = wrong_at(monkeypatch, tmp_path / "out", doubling(tmp_path), lambda y: y.size not in (5, 1024))
    assert all(re.search(r"fast drawn_n\d+\S* seed 77: kernel_relative_error, kernel_bound", r) for r in reasons), (
        reasons
    )


def test_a_kernel_that_is_wrong_at_values_that_no_seed_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (first, *_) = wrong_at(monkeypatch, tmp_path / "out", doubling(tmp_path), lambda y: float(y.max()) > 50)
    assert "fast page seed 77 shifted: kernel_bound" in first


def test_a_kernel_that_refuses_what_the_ranges_allow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = FAMILY.replace(
        "    return KernelSource(",
        '    if dims["N"] not in (5, 1024) and toggles["FAST"]:\n'
        "        raise UsageError(f\"takes no N={dims['N']}\")\n    return KernelSource(",
    ).replace("import numpy", "from greenfast.spec.errors import UsageError\nimport numpy")
    record = run(monkeypatch, tmp_path / "out", doubling(tmp_path, refusing))
    assert record.decision == "DEFER"
    assert len(record.reasons) == 4
    assert re.match(
        r"BUILD: fast refuses drawn_n(\d+)\S*, which the task asks of every kernel: takes no N=\1", record.reasons[0]
    )


def test_the_formats_error_is_told_and_not_judged_where_nobody_chose_the_case() -> None:
    """With a single key, E4M3's error alone is beyond the limits of the task's own shapes."""
    task = shipped("fp8_sdpa")
    gates, shape = task.config.gates("e4m3"), Shape(name="one", dims={"B": 1, "H": 1, "S": 1, "D": 64})

    def row(drawn: bool) -> CorrectnessRow:
        case, wanted = (
            case_of(task.problem, shape.dims, 1001, "e4m3"),
            references_of(task.problem, shape.dims, 1001, "e4m3"),
        )
        found = RunResult({"out": wanted.exact.astype(np.float16)})
        return _row(Cell(shape, 1001, drawn=drawn), case, wanted, gates.error, gates.kernel_error, found, wanted.exact)

    assert not row(drawn=False).gates["format_error_pass"]
    assert row(drawn=True).passed
    assert row(drawn=True).format_error == row(drawn=False).format_error


def test_a_measured_exam_completes_one_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = doubling(tmp_path / "twice")
    monkeypatch.setenv("GREENFAST_TASKS", str(tmp_path))
    measured = run(monkeypatch, tmp_path / "out", task)
    kept = [Kept("there/record.json", "0" * 64, measured)]
    emulated = dataclasses.replace(L4, kind="emulated", name="an emulator")
    plain = request(tmp_path / "out", task=task, shapes=("tiny",), fmt="float", whole=False, device=emulated)
    here = dataclasses.replace(plain, exam=asked(task, ("tiny",), (0, 1), 9, emulated=True))

    def decided(here: Request, kept: list[Kept]) -> Record:
        install(monkeypatch, FakeDevice(here))
        one, other = (task.config.variant(name) for name in ("plain", "fast"))
        return validate(here, one, other, Watcher(), profile=False, kept=kept).record

    record = decided(here, kept)
    assert (record.decision, record.exam and record.exam.complete) == ("MERGE", True), record.reasons
    assert record.reasons[1].startswith("the rest of the exam held in the record quoted from NVIDIA L4")
    assert record.quoted is not None
    incomplete = msgspec.structs.replace(measured, exam=None)
    assert decided(here, [Kept("there/record.json", "0" * 64, incomplete)]).decision == "PARTIAL"
    more = plan(task.config, task.problem, "float", here.shapes, (0, 1), rung=None, seed=9, emulated=True)
    seeds = msgspec.structs.replace(task.config, seeds=[0, 1, 2])
    newer = dataclasses.replace(here, exam=more, task=dataclasses.replace(task, config=seeds))
    assert not completes(record.quoted, kept, newer), "a seed that the task has since then"
