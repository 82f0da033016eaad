"""A record's conclusions follow from its measurements; a file with other conclusions or another digest is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from benchmarks.kernel import bench
from greenfast.cli.main import main
from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_io import (
    DIGEST,
    RECORD,
    compute_digest,
    conclude,
    conclude_content,
    read_content,
    read_record,
    sealed_json,
)
from greenfast.judge.record_schema import FIRST_GATES, OBSERVED_GATES, SCHEMA_VERSION, Record
from greenfast.judge.timing.estimators import noise_floor, speedup_interval
from greenfast.judge.validate import validate
from greenfast.spec.errors import UsageError
from tests.fakes import L4, FakeDevice, Script, Watcher, install, request, rungs
from tests.judge.small_task import FAMILY, loaded

Content: TypeAlias = dict[str, Any]
EVIDENCE = Path(__file__).parents[2] / "evidence" / "h100"
DEFERRED = EVIDENCE / "fp8_sdpa-e4m3-stage3a"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Content]]:
    """The records of a run that merged and of one that fell short, with their conclusions and as files."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("runs")

        def run(name: str, us: float) -> Content:
            asked = request(folder / name, device=L4)
            install(patch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=us)}))
            outcome = validate(asked, *rungs(asked, "stage1", "stage2"), Watcher(), profile=False)
            (folder / f"{name}.json").write_bytes((outcome.folder / RECORD).read_bytes())
            content: Content = json.loads(sealed_json(outcome.record, conclusions=True))
            return content

        runs = {"merged": run("merged", 10.0), "short": run("short", 20.0 / 1.1)}
        files = {f"{name} file": json.loads((folder / f"{name}.json").read_bytes()) for name in runs}
        yield runs | files


@pytest.fixture
def merged(runs: dict[str, Content]) -> Content:
    return copy.deepcopy(runs["merged"])


@pytest.fixture
def short(runs: dict[str, Content]) -> Content:
    return copy.deepcopy(runs["short"])


def resealed(content: Content) -> Content:
    return content | {DIGEST: compute_digest(content)}


def written(folder: Path, content: Content) -> Path:
    path = folder / RECORD
    path.write_text(json.dumps(content))
    return path


def test_a_run_stores_what_its_conclusions_come_from(merged: Content, tmp_path: Path) -> None:
    assert merged["schema_version"] == SCHEMA_VERSION == 3
    assert len(merged["baseline_again"]) == len(merged["baseline"]["timing"]) > 0
    record = read_record(written(tmp_path, merged))
    assert isinstance(record, Record)
    assert conclude(record) == record
    for row in record.speedups:  # exactly, not nearly

        def blocks(rows: Any, row: Any = row) -> list[list[float]]:
            mine = [r.block_medians_us for r in rows if (r.shape, r.cache) == (row.shape, row.cache)]
            return [[t for seed in mine for t in seed[p]] for p in range(len(mine[0]))]

        one, other = blocks(record.baseline.timing), blocks(record.candidate.timing)
        found = speedup_interval(one, other, confidence=row.confidence)
        assert (row.speedup, row.ci_low, row.ci_high) == (
            round(found.estimate, 4), round(found.low, 4), round(found.high, 4)
        )  # fmt: skip
        assert row.noise_floor == round(noise_floor(one, blocks(record.baseline_again)), 5)
    limits = record.candidate.limits["b1_h1_s32_d64"]
    assert 0 < limits.relative_error < 1
    assert limits.bound_factor == 1


def set_at(*path: Any, to: Any) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        at: Any = content
        for step in path[:-1]:
            at = at[step]
        assert at[path[-1]] != to
        at[path[-1]] = to

    return change


def gate_at(content: Content, name: str) -> Content:
    (found,) = [gate for gate in content["gates"] if gate["gate"] == name]
    changed: Content = found
    return changed


def forge(content: Content) -> None:
    """The edit of the issue: a run that fell short, made a MERGE in all the places that say so."""
    for row in content["speedups"]:
        row |= {"speedup": 2.0, "ci_low": 1.9, "ci_high": 2.1, "verdict": "FAST"}
    gate_at(content, "PERFORMANCE").update(
        status="PASS",
        reasons=[],
        summary="b1_h1_s32_d64 2.000x [1.900, 2.100], FAST",
        checks=[["b1_h1_s32_d64, warm L2", ">= 1.15x", "2.000x [1.900, 2.100], FAST", "PASS"]],
    )
    content |= {"decision": "MERGE", "reasons": ["all five gates hold"]}


def lower_the_requirement(content: Content) -> None:
    for row in content["speedups"]:
        row |= {"required": 0.0, "verdict": "FAST"}


def drop_the_gated_row(content: Content) -> None:
    content["speedups"] = [row for row in content["speedups"] if not row["gated"]]


def nothing_is_gated(content: Content) -> None:
    for row in content["speedups"]:
        row["gated"] = False


def drop_a_gate(content: Content) -> None:
    content["gates"] = [gate for gate in content["gates"] if gate["gate"] != "PERFORMANCE"]
    content |= {"decision": "MERGE", "reasons": ["all five gates hold"]}


def drop_the_evidence(content: Content) -> None:
    content["gates"] = [gate for gate in content["gates"] if gate["gate"] != "EVIDENCE"]


def faster_blocks(content: Content) -> None:
    for row in content["candidate"]["timing"]:
        row["block_medians_us"] = [[t / 2 for t in process] for process in row["block_medians_us"]]


def quiet_again(content: Content) -> None:
    content["baseline_again"] = copy.deepcopy(content["baseline"]["timing"])
    for row in content["baseline_again"]:
        row["block_medians_us"] = [[1.5 * t for t in process] for process in row["block_medians_us"]]


def wrong_output(content: Content) -> None:
    row = content["candidate"]["correctness"][0]
    row["bound_ratio"] = 1.5


def less_was_asked(content: Content) -> None:
    content["exam"] |= {"complete": False, "missing": ["1 of 2 shapes"]}


def fewer_rows(content: Content) -> None:
    content["candidate"]["correctness"].pop()


def over_budget(content: Content) -> None:
    check = next(c for c in gate_at(content, "RESOURCES")["checks"] if c[0].endswith("registers"))
    check[2] = "1000"


def more_registers(content: Content) -> None:
    for build in content["candidate"]["builds"]:
        build["resources"]["registers"] = 1000


def no_row_of_registers(content: Content) -> None:
    gate = gate_at(content, "RESOURCES")
    gate["checks"] = [check for check in gate["checks"] if not check[0].endswith("registers")]


EDITS: list[tuple[str, Callable[[Content], None], str]] = [
    ("short", forge, r"gates\[3\] \(PERFORMANCE\)\.status says PASS, but recomputed it is FAIL"),
    ("short", lower_the_requirement, r"\.required says 0\.0, but recomputed it is 1\.15"),
    ("short", drop_the_gated_row, r"speedups says \['b1_h1_s32_d64'\], but recomputed it is \['b1_h1_s32_d64', 'b1_"),
    ("short", nothing_is_gated, r"speedups\[0\] \(b1_h1_s32_d64\)\.gated says False, but recomputed it is True"),
    ("short", drop_a_gate, r"gates says \["),
    ("short", faster_blocks, r"p50_us is \d+\.\d+, its blocks are from"),
    ("short", set_at("decision", to="MERGE"), "decision says MERGE, but recomputed it is DEFER"),
    ("short", set_at("reasons", to=["bad luck"]), r"reasons\[0\] says bad luck, but recomputed it is PERFORMANCE: "),
    ("short", set_at("speedups", 0, "verdict", to="FAST"), r"\.verdict says FAST, but recomputed it is SHORT"),
    ("merged", set_at("speedups", 0, "ci_low", to=1.9), r"\.ci_low says 1\.9, but recomputed it is "),
    ("merged", set_at("speedups", 0, "ci_high", to=2.9), r"\.ci_high says 2\.9, but recomputed it is "),
    ("merged", set_at("speedups", 1, "noise_floor", to=0.0), r"\.noise_floor says 0\.0, but recomputed it is 0\.005"),
    ("merged", set_at("speedups", 0, "blocks", to=1000), r"\.blocks says 1000, but recomputed it is "),
    ("merged", set_at("speedups", 0, "confidence", to=0.5), r"\.confidence says 0\.5"),
    ("merged", set_at("candidate", "timing", 0, "p50_us", to=0.5), r"p50_us is 0\.5, its blocks are from \d"),
    ("merged", set_at("candidate", "timing", 0, "p90_us", to=0.5), r"p50_us is .* and its p90_us is 0\.5"),
    ("merged", set_at("baseline_again", to=[]), "no processes to compare; the record was edited"),
    ("merged", quiet_again, r"p50_us is \d+\.\d+, its blocks are from"),
    ("merged", set_at("gates", 3, "summary", to="ten times"), r"\(PERFORMANCE\)\.summary says ten times"),
    ("merged", set_at("gates", 3, "checks", 0, 2, to="9x"), r"\(PERFORMANCE\)\.checks\[0\]\[2\] says 9x"),
    ("merged", wrong_output, "timings unless its CORRECTNESS gate passed; the record was edited"),
    ("merged", fewer_rows, "timings unless its CORRECTNESS gate passed; the record was edited"),
    ("merged", over_budget, r"gates\[1\] \(RESOURCES\)\.checks\[0\]\[2\] says 1000, but recomputed it is \d\d;"),
    ("merged file", more_registers, r"gates\[1\] \(RESOURCES\)\.status says PASS, but recomputed it is FAIL"),
    ("merged file", no_row_of_registers, r"gates\[1\] \(RESOURCES\)\.status says PASS, but recomputed it is FAIL"),
    ("merged file", drop_the_evidence, r"gates says \["),
    ("merged", set_at("gates", 4, "checks", 0, 3, to="FAIL"), r"gates\[4\] \(EVIDENCE\)"),
    ("merged", set_at("gates", 0, "status", to="FAIL"), "decision says MERGE, but recomputed it is DEFER"),
    ("merged", set_at("exam", to=None), "decision says MERGE, but recomputed it is INCOMPLETE"),
    ("merged", set_at("exam", "missing", to=["1 of 2 shapes"]), "decision says MERGE, but recomputed it is INCOMPLETE"),
    ("merged", less_was_asked, "decision says MERGE, but recomputed it is INCOMPLETE"),
    (
        "merged",
        set_at("exam", "drawn", to={"drawn_s3": {"S": 3}}),
        "decision says MERGE, but recomputed it is INCOMPLETE",
    ),
]


@pytest.mark.parametrize(
    ("run", "edit", "says"), EDITS, ids=[f"{i} {says[:30]}" for i, (_, _, says) in enumerate(EDITS)]
)
def test_a_conclusion_that_does_not_follow_is_named(
    runs: dict[str, Content], run: str, edit: Callable[[Content], None], says: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(runs[run])
    edit(content)
    path = written(tmp_path, resealed(content))
    with pytest.raises(UsageError, match=says) as refused:
        read_record(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_a_file_has_no_conclusions(runs: dict[str, Content], tmp_path: Path) -> None:
    for name in ("merged", "short"):
        content = runs[f"{name} file"]
        assert content.keys() == runs[name].keys() - {"decision", "reasons", "speedups"}
        assert gate_at(content, "PERFORMANCE") == {"gate": "PERFORMANCE"}
        assert {gate for row in content["candidate"]["correctness"] for gate in row["gates"]} <= {*OBSERVED_GATES}
        record = read_record(written(tmp_path, content))
        assert record == read_record(written(tmp_path, runs[name]))
        assert json.loads(sealed_json(record)) == content


def slower_blocks(content: Content) -> None:
    for row in content["candidate"]["timing"]:
        row["block_medians_us"] = [[3 * t for t in process] for process in row["block_medians_us"]]
        row |= {"p50_us": 3 * row["p50_us"], "p90_us": 3 * row["p90_us"]}


@pytest.mark.parametrize(
    ("edit", "decision", "reason"),
    [
        (slower_blocks, "DEFER", "PERFORMANCE: .* SLOWER; required"),
        (set_at("claim", "gated", to=[]), "DEFER", "no shape decides: none is gated"),
        (set_at("claim", to=None), "PENDING", "PERFORMANCE: "),
        (lambda content: content.pop("exam"), "INCOMPLETE", "incomplete: a check plan"),
    ],
)
def test_conclusions_follow_from_the_measurements_in_a_file(
    runs: dict[str, Content], edit: Callable[[Content], None], decision: str, reason: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(runs["merged file"])
    edit(content)
    record = read_record(written(tmp_path, resealed(content)))
    assert isinstance(record, Record)
    assert record.decision == decision
    assert re.search(reason, record.reasons[0])
    with pytest.raises(UsageError, match=f"decision says MERGE, but recomputed it is {decision}"):
        read_record(written(tmp_path, resealed(content | {"decision": "MERGE"})))


@pytest.mark.parametrize(
    "edit",
    [
        set_at("device", "name", to="NVIDIA H100"),
        set_at("candidate", "timing", 0, "mean_us", to=1.0),
        set_at("created", to="2031-01-01T00:00:00Z"),
        set_at("git", "sha", to="0" * 40),
        lambda content: content.update(remark="added"),
        lambda content: content.pop(DIGEST),
    ],
)
def test_what_cannot_be_recomputed_is_in_the_digest(merged: Content, edit: Any, tmp_path: Path) -> None:
    edit(merged)
    with pytest.raises(UsageError, match=r"digest says (missing|[0-9a-f]{64}), but recomputed it is [0-9a-f]{64}"):
        read_record(written(tmp_path, merged))


def test_the_digest_is_of_the_content_and_not_of_its_layout(merged: Content, tmp_path: Path) -> None:
    record = read_record(written(tmp_path, merged))
    for text in (json.dumps(merged, indent=7), json.dumps(merged, sort_keys=True, ensure_ascii=False)):
        (tmp_path / RECORD).write_text(text)
        assert read_record(tmp_path) == record
    assert compute_digest({"b": 1.0, "a": [True, None, "é"], DIGEST: "x"}) == (
        "a8c8ed7df5dc6d196cc4953b0fd52368cb483ac8eb64e40e6205368a5d071f40"
    )


def test_a_newer_record_is_refused_in_words(merged: Content, tmp_path: Path) -> None:
    for content in (merged | {"schema_version": 4}, {"schema_version": 99, "kind": "of the future"}):
        path = written(tmp_path, content)
        version = content["schema_version"]
        message = f"{path}: schema_version {version} is newer than this greenfast; it reads records up to 3"
        with pytest.raises(UsageError, match=message):
            read_record(path)


def test_a_record_of_one_variant_has_a_digest_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(tmp_path / "out")
    install(monkeypatch, FakeDevice(asked))
    folder = bench(asked, asked.task.config.variant("stage2"), Watcher()).folder
    content = json.loads((folder / RECORD).read_bytes())
    content["side"]["correctness"][0]["kernel_error"]["relative_error"] = 0.9
    with pytest.raises(UsageError, match="timings unless its CORRECTNESS gate passed; the record was edited"):
        read_record(written(tmp_path, resealed(content)))


@pytest.mark.parametrize("version", [1, 0, -1])
def test_an_older_record_is_refused_in_words(merged: Content, tmp_path: Path, version: int) -> None:
    """It could be a newer one without what checks it: then its noise floor would be what anybody writes."""
    content = {**merged, "schema_version": version}
    for name in ("digest", "exam", "baseline_again", "timing_faults"):
        content.pop(name, None)
    for side in ("baseline", "candidate"):
        content[side] = {key: value for key, value in content[side].items() if key != "limits"}
    content["speedups"] = [{**row, "noise_floor": 0.0} for row in content["speedups"]]
    for edited in (content, resealed(content)):
        with pytest.raises(
            UsageError, match=f"a record of version {version} has too few fields to verify it; measure again"
        ):
            read_record(written(tmp_path, edited))


def test_an_edited_record_is_not_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As it was done: a DEFER under the task's evidence, edited to a MERGE, was quoted as one."""
    content: Content = read_content(DEFERRED / RECORD)
    for row in content["speedups"]:
        row |= {"speedup": 9.0, "ci_low": 8.0, "ci_high": 9.5, "verdict": "FAST"}
    content |= {"decision": "MERGE", "reasons": ["all five gates hold"]}
    path = written(tmp_path, resealed(content))
    for command in (["report", str(path)], ["judge", "fp8_sdpa", "--quote", str(path), "--out", str(tmp_path)]):
        assert main(command) == 2
        assert "speedups[0]" in capsys.readouterr().err


def test_the_fields_of_a_record_have_no_digest_in_memory(merged: Content) -> None:
    record = msgspec.convert(merged, Record)
    assert not hasattr(record, DIGEST)


#: A program of two kernels: the second one repeats the first.
TWO_KERNELS = f"""{FAMILY}
from dataclasses import replace
from greenfast.spec.kernel import Program, Step

def program(toggles, fmt, dims, *, instrumented=False):
    first, plan = kernel(toggles, fmt, dims), launch(toggles, fmt, dims)
    second = replace(first, entry="twice_again", source=first.source.replace("twice", "twice_again"))
    return Program((Step(first, plan), Step(second, plan)))
"""


def test_each_kernel_of_a_program_has_rows_of_its_own(tmp_path: Path) -> None:
    task = loaded(tmp_path / "twice", family=TWO_KERNELS)
    asked = request(tmp_path / "out", task=task, shapes=["tiny"], fmt="float", device=None)
    record = validate(asked, *rungs(asked, "fast", "fast"), Watcher(), profile=False).record
    (resources,) = (gate for gate in record.gates if gate.gate == "RESOURCES")
    names = [name for name, *_ in resources.checks]
    assert resources.status == "PASS"
    assert len(names) == len({*names})
    (path,) = tmp_path.rglob(RECORD)
    assert read_record(path) == record
    content = json.loads(path.read_text())
    asked_row = "candidate fast (tiny, twice_again): registers"
    row = next(row for row in gate_at(content, "RESOURCES")["checks"] if row[0] == asked_row)
    row[2] = "38"
    with pytest.raises(UsageError, match=r"\(RESOURCES\)\.checks\[\d+\]\[2\] says 38, but recomputed it is \d+"):
        conclude_content(msgspec.convert(content, Record), content, path)


def test_a_record_is_judged_by_the_gates_that_it_lists(merged: Content, tmp_path: Path) -> None:
    """One that was made before a gate was added, and one that has such a gate."""
    more = copy.deepcopy(merged)
    repeats = {"gate": "REPEATS", "status": "PASS", "summary": "the same bits", "reasons": [], "checks": []}
    more["gates"].insert(3, repeats)
    more["reasons"] = ["all 6 gates hold"]
    for name, content in (("before", merged), ("after", more)):
        (tmp_path / name).mkdir()
        read_record(written(tmp_path / name, resealed(content)))
    more["gates"][3]["status"] = "FAIL"
    (tmp_path / "failed").mkdir()
    with pytest.raises(UsageError, match="decision says MERGE, but recomputed it is DEFER"):
        read_record(written(tmp_path / "failed", resealed(more)))


def test_a_record_lacks_none_of_the_first_gates(merged: Content, tmp_path: Path) -> None:
    for name in FIRST_GATES:
        less = copy.deepcopy(merged)
        less["gates"] = [gate for gate in less["gates"] if gate["gate"] != name]
        less["reasons"] = ["all 4 gates hold"]
        (tmp_path / name).mkdir()
        with pytest.raises(UsageError, match=r"gates says|unless its CORRECTNESS gate passed"):
            read_record(written(tmp_path / name, resealed(less)))


def test_exit_codes_belong_to_the_names_of_gates() -> None:
    documented = {"BUILD": 11, "RESOURCES": 12, "CORRECTNESS": 13, "PERFORMANCE": 14, "EVIDENCE": 15}
    codes = {name: gate.exit_code for name, gate in GATES.items()}
    assert documented.items() <= codes.items()
    assert len({*codes.values()}) == len(GATES)
