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
from greenfast.judge.cached_timing import covers_missing_cases
from greenfast.judge.check_plan import (
    KNOWN_INPUTS,
    NOTHING_DRAWN,
    ShapeSource,
    _compute_extent,
    add_check_plan,
    build_check_plan,
    derive_seeds,
    draw_seed,
    fits_dims,
)
from greenfast.judge.gates.correctness import _CheckedCase
from greenfast.judge.record_io import StoredRecord
from greenfast.judge.record_schema import CorrectnessRow, Record, SolutionSource
from greenfast.judge.request import EMULATOR, CasePlan, CheckPlan, Request
from greenfast.judge.task import LoadedTask, Shape, load
from greenfast.judge.validate import validate
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import render_program
from greenfast.spec.problem import build_case, build_references
from tests.fakes import (
    L4,
    Behaviour,
    Call,
    FakeDevice,
    FakeGpu,
    Script,
    Watcher,
    install,
    request,
    right,
    rungs,
    shipped,
)
from tests.judge.small_task import FAMILY, PROBLEM, write_task

pytestmark = pytest.mark.usefixtures("families_here")

ROOT = Path(__file__).parents[2]
TASKS = ("fp8_sdpa", "fp8_attention", "fp8_quantize", "serving_attention", "sdpa_backward")
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
    return load(write_task(folder, problem=VARIED, family=family, shapes=shapes, **changes))


def shapes_drawn(task: LoadedTask, seed: int = 1, emulated: bool = False) -> list[dict[str, int]]:
    return [s.dims for s in ShapeSource(task, "float", {}, seed).draw(emulated=emulated)]


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
        found = ShapeSource(task, task.config.defaults.format, {}, 3).draw(emulated=emulated)
        assert len({tuple(s.dims.items()) for s in found}) == task.config.drawing.count


def test_every_rung_takes_what_is_drawn_for_it() -> None:
    for name in TASKS:
        task = shipped(name)
        config, fmt = task.config, task.config.defaults.format
        for rung in config.rungs:
            for seed in range(3):
                for shape in ShapeSource(task, fmt, rung.only, seed).draw(emulated=True):
                    render_program(task.family, config.rung_variant(rung).values, fmt, shape.dims)
            for shape in config.shapes:
                if fits_dims(shape.dims, rung.only):
                    render_program(task.family, config.rung_variant(rung).values, fmt, shape.dims)


# What is asked


def asked(
    task: LoadedTask, shapes: tuple[str, ...], seeds: tuple[int, ...], seed: int | None, emulated: bool = False
) -> CheckPlan:
    plain = request(Path(), task=task, shapes=shapes, seeds=seeds, fmt="float", whole=False)
    return build_check_plan(dataclasses.replace(plain, ordinal=EMULATOR if emulated else 0), None, seed=seed)


def test_the_whole_exam_has_secret_seeds_for_every_shape_and_drawn_ones(tmp_path: Path) -> None:
    task = doubling(tmp_path)
    found = asked(task, ("page", "tiny"), (77, 78, 79), 77)
    assert found.missing == ()
    assert found.secret
    assert [str(c) for c in found.case_plans[:6]] == [
        *(f"page seed {n}" for n in (77, 78, 79)), *(f"tiny seed {n}" for n in (77, 78, 79)),
    ]  # fmt: skip
    assert not any(c.seed in task.config.seeds for c in found.case_plans), "a public seed"
    assert not any(c.format_is_judged for c in found.case_plans)
    assert [c.new_shape for c in found.case_plans] == [c.shape in found.random_shapes for c in found.case_plans]
    assert {c.shape.name for c in found.case_plans if c.new_shape and c.variant == "normal"} == {
        shape.name for shape in found.random_shapes
    }
    assert found.small_shape.name == "page", "on five elements all variants are much alike"
    smallest = min(found.random_shapes, key=lambda shape: shape.dims["N"])
    long = found.random_shapes[-1]
    assert found.emulated_shapes == (found.small_shape, smallest, long), (
        "a GPU runs all, and shapes of the task hide tails"
    )
    assert smallest.dims["N"] == 1
    assert 32 < long.dims["N"] <= 50, "longer than a warp, within the emulator's limit"
    assert asked(task, ("page", "tiny"), (0, 1), None).emulated_shapes == (found.small_shape,)
    emulated = asked(task, ("page", "tiny"), (77, 78, 79), 77, emulated=True)
    assert len(emulated.random_shapes) == task.config.drawing.count
    assert all(
        c.shape == found.small_shape or c.shape.dims["N"] <= 50 for c in emulated.case_plans if c.variant != "normal"
    )


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_every_variant_has_a_small_a_large_and_an_odd_shape(name: str, emulated: bool) -> None:
    """Odd: no whole warps. The emulator's large shape is longer than a tile, and within its limit."""
    task = shipped(name)
    config = task.config
    limit = config.drawing.max_size_emulated
    dealt = set()
    for seed in (2**40, 2**41, 2**42):
        shapes = [config.shape(n) for n in config.defaults.shapes] if emulated else config.shapes
        plain = request(
            Path(), task=task, shapes=[shape.name for shape in shapes], seeds=derive_seeds(config, seed),
            fmt=config.defaults.format, whole=False,
        )  # fmt: skip
        found = build_check_plan(dataclasses.replace(plain, ordinal=EMULATOR if emulated else 0), None, seed=seed)
        of: dict[str, list[Shape]] = {}
        for case_plan in found.case_plans:
            if case_plan.variant != "normal":
                of.setdefault(case_plan.variant, []).append(case_plan.shape)
        assert set(of) == set(task.problem.VARIANTS)  # type: ignore[attr-defined]
        sizes = {id(s): _compute_extent(s, config) for s in (*shapes, *found.random_shapes)}
        most = max(limit, _compute_extent(found.small_shape, config)) if emulated else max(sizes.values())
        largest = max(size for size in sizes.values() if size <= most)
        for given in of.values():
            assert found.small_shape in given
            assert any(4 * sizes[id(s)] >= largest for s in given)
            assert any(d > 32 and d % 32 for s in given for d in s.dims.values())
        dealt.add(tuple(sorted((c.shape.name, c.variant) for c in found.case_plans if c.shape in config.shapes)))
        if not emulated:
            varied = {c.shape.name for c in found.case_plans if c.variant != "normal"}
            assert varied == {s.name for s in (*shapes, *found.random_shapes)}, "a shape without a variant"
    assert emulated or len(dealt) > 1, "variants by index"


def test_a_long_shape_has_several_blocks_and_tiles(tmp_path: Path) -> None:
    sized = {"N": {"min": 1, "max": 3000}, "M": {"min": 1, "max": 900}, "FLAG": [0, 7]}
    task = doubling(tmp_path, ranges=sized, max_size_emulated=600)
    for seed in range(5):
        found = asked(task, ("page", "tiny"), (seed,), seed)
        n, m = (shape.dims for shape in found.random_shapes[-2:])
        assert n["N"] >= 225
        assert m["M"] >= 225
        assert (n["M"], m["N"]) == (2, 2)
        assert found.emulated_shapes[-2:] == found.random_shapes[-2:]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    task = doubling(tmp_path)
    assert asked(task, ("tiny",), (0,), None).missing == ("1 of 2 shapes", KNOWN_INPUTS, NOTHING_DRAWN)
    assert asked(task, ("tiny", "page"), (0, 1), None).missing == (KNOWN_INPUTS, NOTHING_DRAWN)
    other = asked(task, ("tiny",), (0, 1, 5), 9)
    assert other.missing == ("1 of 2 shapes", KNOWN_INPUTS)
    assert [c.format_is_judged for c in other.case_plans[:3]] == [True, True, False], "seed 5 is not the task's"
    assert asked(task, ("tiny",), (9, 10, 11), 9).missing == ("1 of 2 shapes",)


def test_a_secret_seed_has_64_bits() -> None:
    found = {draw_seed() for _ in range(50)}
    assert len(found) == 50
    assert all(2**32 <= seed < 2**64 - 2**16 for seed in found)
    assert any(seed >= 2**60 for seed in found)
    for name in TASKS:  # all of whose problems take them
        task = shipped(name)
        shape = min(task.config.shapes, key=lambda s: _compute_extent(s, task.config))
        build_case(task.problem, shape.dims, 2**64 - 1, task.config.defaults.format, "outliers")


def test_a_problem_that_takes_no_long_seeds_is_told_what_does(tmp_path: Path) -> None:
    short = VARIED.replace("np.random.default_rng(seed).standard_normal(dims", "np.random.RandomState(seed).randn(dims")
    problem = load(write_task(tmp_path, problem=short.replace(", dtype=np.float32)", ").astype('f4')"))).problem
    build_case(problem, {"N": 4}, 3, "float")
    with pytest.raises(UsageError, match=r"make_case of N=4, seed 8589934592: .*64 bits: numpy.random.default_rng"):
        build_case(problem, {"N": 4}, 2**33, "float")


# Validate


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, task: LoadedTask, behave: Behaviour = right, **options: Any
) -> Record:
    """Validate the doubling task's exam with the secret seed 77 on a fake GPU, where the candidate does that."""
    plain = request(out, task=task, shapes=("tiny",), fmt="float", whole=False)
    config = task.config
    monkeypatch.setattr("greenfast.judge.check_plan.draw_seed", lambda: 77)
    whole = add_check_plan(plain, config.rung("fast"), **{"chosen": False} | options)
    scripts = {"plain": Script(us=20.0), "fast": Script(us=10.0, behave=behave)}
    install(monkeypatch, FakeDevice(whole, scripts))
    return validate(whole, *rungs(whole, "plain", "fast"), Watcher(), profile=False).record


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
    assert len(record.exam.drawn) == 5
    assert {(row.variant, row.drawn, row.own_shape) for row in rows} == {
        (variant, True, own) for variant in ("normal", "shifted", "outliers") for own in (False, True)
    }
    judged = {"max_abs_err_pass", "mean_abs_err_pass", "pct_bad_pass"}
    assert all((judged <= set(row.gates)) == (row.own_shape and row.variant == "normal") for row in rows)
    assert {row.seed for row in record.candidate.timing} == {77, 78, 79}
    assert {row.seed for row in rows} == {77, 78, 79}, "every input comes from the secret seed"
    assert {row.shape for row in record.candidate.timing} == {"tiny", "page"}, "what was drawn is not timed"
    assert record.command.endswith(" --exam-seed 77")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"chosen": True}, ["1 of 2 shapes", KNOWN_INPUTS, NOTHING_DRAWN]),
        ({"seed": 77}, [KNOWN_INPUTS]),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ({"chosen": True, "public": False}, ["1 of 2 shapes", NOTHING_DRAWN]),
                ({"chosen": True, "public": False, "seed": 77}, ["1 of 2 shapes", KNOWN_INPUTS]),
            )
        ),
    ],
)
def test_less_than_the_whole_is_partial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], missing: list[str]
) -> None:
    record = run(monkeypatch, tmp_path / "out", doubling(tmp_path), **options)
    assert record.decision == "INCOMPLETE"
    assert record.reasons == [f"incomplete: {', '.join(missing)}; all five gates hold on those"]
    assert record.exam is not None
    assert (record.exam.complete, record.exam.missing) == (False, missing)


def test_a_new_seed_is_in_the_command(tmp_path: Path) -> None:
    task = doubling(tmp_path)
    plain = request(tmp_path, task=task, shapes=("tiny",), fmt="float", whole=False)
    seeds = set()
    for _ in range(2):
        found = add_check_plan(plain, None, chosen=False)
        assert found.check_plan is not None
        assert found.command == f"{plain.command} --exam-seed {found.check_plan.seed}"
        again = add_check_plan(plain, None, chosen=False, seed=found.check_plan.seed)
        assert again.check_plan is not None
        assert (again.check_plan.case_plans, again.check_plan.random_shapes, again.seeds) == (
            found.check_plan.case_plans,
            found.check_plan.random_shapes,
            found.seeds,
        )
        assert (found.check_plan.missing, again.check_plan.missing) == ((), (KNOWN_INPUTS,)), (
            "its inputs are known by now"
        )
        seeds.add(found.check_plan.seed)
    assert len(seeds) == 2


def test_a_kernel_that_is_wrong_at_a_length_nobody_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reasons = wrong_at(monkeypatch, tmp_path / "out", doubling(tmp_path), lambda y: y.size not in (5, 1024))
    pattern = r"fast drawn_n\d+\S* seed 77( shifted| outliers)?: (kernel_relative_error, )?kernel_bound"
    assert all(re.search(pattern, r) for r in reasons), reasons


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
    assert len(record.reasons) == 5
    assert re.match(r"BUILD: fast refuses drawn_n(\d+)\S*, required of every kernel: takes no N=\1", record.reasons[0])


def test_the_formats_error_is_told_and_not_judged_where_nobody_chose_the_case() -> None:
    """With a single key, E4M3's error alone is beyond the limits of the task's own shapes."""
    task = shipped("fp8_sdpa")
    gates, shape = task.config.gates("e4m3"), Shape(name="one", dims={"B": 1, "H": 1, "S": 1, "D": 64})

    def row(drawn: bool) -> CorrectnessRow:
        case, wanted = (
            build_case(task.problem, shape.dims, 1001, "e4m3"),
            build_references(task.problem, shape.dims, 1001, "e4m3"),
        )
        found = RunResult({"out": wanted.exact.astype(np.float16)})
        plan = CasePlan(shape, 1001, randomized=drawn)
        checked = _CheckedCase(task.problem, "e4m3", gates, {}, plan, case, wanted)
        return checked.compare("candidate", found, None)[0]

    assert not row(drawn=False).gates["format_error_pass"]
    assert row(drawn=True).passed
    assert row(drawn=True).format_error == row(drawn=False).format_error


def test_a_measured_exam_completes_one_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = doubling(tmp_path / "twice")
    monkeypatch.setenv("GREENFAST_TASKS", str(tmp_path))
    measured = run(monkeypatch, tmp_path / "out", task)
    kept = [StoredRecord("there/record.json", "0" * 64, measured)]
    emulated = dataclasses.replace(L4, kind="emulated", name="an emulator")
    plain = request(tmp_path / "out", task=task, shapes=("tiny",), fmt="float", whole=False, device=emulated)
    plain = dataclasses.replace(plain, seeds=[9, 10, 11])
    here = dataclasses.replace(plain, check_plan=asked(task, ("tiny",), (9, 10, 11), 9, emulated=True))

    def decided(here: Request, kept: list[StoredRecord]) -> Record:
        install(monkeypatch, FakeDevice(here))
        return validate(here, *rungs(here, "plain", "fast"), Watcher(), profile=False, kept=kept).record

    record = decided(here, kept)
    assert (record.decision, record.exam and record.exam.complete) == ("MERGE", True), record.reasons
    assert record.reasons[1].startswith("the rest of the exam held in the record quoted from NVIDIA L4")
    assert record.quoted is not None
    incomplete = msgspec.structs.replace(measured, exam=None)
    assert decided(here, [StoredRecord("there/record.json", "0" * 64, incomplete)]).decision == "INCOMPLETE"
    seeds = msgspec.structs.replace(task.config, seeds=[0, 1, 2, 3])
    newer = dataclasses.replace(here, task=dataclasses.replace(task, config=seeds))
    assert not covers_missing_cases(measured, newer), "more seeds than the task had then"
    known = dataclasses.replace(here, check_plan=asked(task, ("tiny",), (0, 1), 9, emulated=True))
    assert not covers_missing_cases(measured, known), "inputs that were known before"
    source = SolutionSource(language="cuda", sha256="0" * 64, files={})
    side = msgspec.structs.replace(measured.candidate, solution=source, timing=[])
    public = msgspec.structs.replace(measured, candidate=side)
    assert not covers_missing_cases(public, here), "a solution could hold the answers for public seeds"
    gates = [msgspec.structs.replace(gate, unchecked=["fast: no memory check"]) for gate in measured.gates]
    unchecked = msgspec.structs.replace(measured, gates=gates)
    assert covers_missing_cases(measured, here)
    assert not covers_missing_cases(unchecked, here), "a check of the exam was not done"


def test_a_table_of_answers_is_of_no_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fast where the inputs are those of the task's own seeds, as slow as the baseline elsewhere."""
    task = doubling(tmp_path)
    timed: set[int] = set()

    def pass_time(gpu: FakeGpu, script: Script) -> None:
        assert gpu.at is not None
        timed.add(gpu.at[1])
        gpu._us += 2.5 if script.us == 10.0 and gpu.at[1] < 10 else 20.0

    monkeypatch.setattr(FakeGpu, "pass_time", pass_time)
    record = run(monkeypatch, tmp_path / "out", task)
    assert timed == {77, 78, 79}
    assert record.decision == "DEFER"
    assert all(row.verdict == "NO EFFECT" for row in record.speedups)


def test_inputs_that_no_seed_changes_are_no_merge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = doubling(tmp_path)
    constant = VARIED.replace("default_rng(seed)", "default_rng(seed if dims['N'] != 5 else 0)")
    (task.folder / "problem.py").write_text(constant)
    record = run(monkeypatch, tmp_path / "out", load(task.folder))
    assert record.decision == "INCOMPLETE"
    assert record.exam is not None
    assert record.exam.missing == ["inputs that depend on the seed (tiny)"]
