"""PERFORMANCE quoted from a kept record: only of the same kernels on the same inputs, and never as a measurement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.kernel import bench
from greenfast.judge.record_io import (
    RECORD,
    find_evidence_folders,
    load_records,
    load_required_records,
    read_record,
    sealed_json,
)
from greenfast.judge.record_schema import GateResult, Record, Side
from greenfast.judge.report.markdown import report, short_form
from greenfast.judge.validate import Outcome, validate
from greenfast.spec.errors import UsageError
from tests.fakes import L4, FakeDevice, Script, Watcher, install, request, rungs
from tests.judge import behaviours

SLOW, FAST = Script(us=20.4), Script(us=10.0)
EMULATED = dataclasses.replace(L4, kind="emulated", name="an emulator")


class Machines:
    """The same comparison on a machine with a GPU, and then on one without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, measured: dict[str, Outcome], kept: Path) -> None:
        self.monkeypatch, self.folder, self.measured, self.kept = monkeypatch, folder, measured, kept

    def measure(self, candidate: Script = FAST, **options: Any) -> Outcome:
        """On an L4, once for all tests that ask for the same."""
        key = repr((candidate, options))
        if key not in self.measured:
            scripts = {"stage1": SLOW, "stage2": candidate}
            self.measured[key] = self._run(self.kept / str(len(self.measured)), L4, scripts, (), None, options)
        return self.measured[key]

    def quote(
        self,
        *kept: Path,
        required: float | None = None,
        candidate: Script = FAST,
        device: Any = EMULATED,
        **options: Any,
    ) -> Outcome:
        """On an emulator (or ``device``), with these records at hand."""
        found = [record for path in kept for record in load_required_records(path)]
        outcome = self._run(self.folder / "none", device, {"stage2": candidate}, found, required, options)
        assert not outcome.record.speedups or device.kind == "gpu"
        return outcome

    def _run(self, folder: Path, device: Any, scripts: Any, kept: Any, required: float | None, options: Any) -> Outcome:
        asked = request(folder, device=device, **{"warmup_iters": 5, "timed_iters": 40, **options})
        install(self.monkeypatch, FakeDevice(asked, scripts))
        one, other = rungs(asked, "stage1", "stage2")
        return validate(asked, one, other, Watcher(), required=required, profile=False, kept=kept)


@pytest.fixture(scope="module")
def measured() -> dict[str, Outcome]:
    return {}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: dict[str, Outcome], kept: Path) -> Machines:
    return Machines(monkeypatch, tmp_path, measured, kept)


def performance(outcome: Outcome) -> GateResult:
    return next(g for g in outcome.record.gates if g.gate == "PERFORMANCE")


def keep(folder: Path, record: Record) -> Path:
    """Write a record with its conclusions as a run's folder."""
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(sealed_json(record, conclusions=True))
    return folder


def test_a_record_of_the_same_kernels_is_quoted(machines: Machines) -> None:
    measured = machines.measure()
    outcome = machines.quote(measured.folder)
    record, quoted = outcome.record, outcome.record.quoted
    assert record.decision == "MERGE"
    source = f"quoted from NVIDIA L4, {measured.record.created[:10]}, commit {measured.record.git.sha[:10]}"
    assert record.reasons[0] == "all five gates hold"
    assert record.reasons[1].startswith(f"PERFORMANCE {source}")
    assert record.reasons[1].endswith(": not measured in this run")
    gate = performance(outcome)
    assert gate.status == "PASS"
    assert gate.summary.startswith(source)
    assert "not measured here: b1_h1_s32_d64 2." in gate.summary
    assert [check[0] for check in gate.checks] == ["b1_h1_s32_d64, warm L2, quoted"]
    assert quoted is not None
    assert quoted.speedups == measured.record.speedups
    assert (quoted.device, quoted.created, quoted.git) == (L4, measured.record.created, measured.record.git)
    assert quoted.path == str(measured.folder / RECORD)
    assert len(quoted.sha256) == 64
    assert record.device == EMULATED


def test_what_is_quoted_cannot_be_taken_for_a_measurement(machines: Machines) -> None:
    outcome = machines.quote(machines.measure().folder)
    record, folder = outcome.record, outcome.folder
    assert (record.speedups, record.baseline.timing, record.candidate.timing, record.clocks) == ([], [], [], {})
    assert not (folder.parents[1] / "COMPARE.md").exists()
    assert not (folder / "performance.png").exists()
    for file in (folder / "perf_baseline.json", folder / "baseline" / "perf_baseline.json"):
        content = json.loads(file.read_text())
        assert content["results"] == []
        assert content["pending"].startswith("nothing was timed here; PERFORMANCE was quoted from NVIDIA L4, ")
    text = (folder / "VALIDATION_REPORT.md").read_text()
    assert text == report(record)
    assert "- **Performance**: not measured here, quoted from NVIDIA L4, " in text
    section = text.split("## Performance\n")[1].split("\n## ")[0]
    assert "### Not measured in this run: quoted from NVIDIA L4, " in section
    assert "| b1_h1_s32_d64 | warm | 2." in section
    assert f"| record | {record.quoted.path} |" in section if record.quoted else False
    assert "not measured here, quoted from NVIDIA L4" in short_form(record)
    assert read_record(folder) == record
    timed = machines.measure().record
    with pytest.raises(ValueError, match="its own timings or quotes another's, never both"):
        msgspec.structs.replace(record, speedups=timed.speedups)
    with pytest.raises(ValueError, match="its own timings or quotes another's, never both"):
        msgspec.structs.replace(record, candidate=timed.candidate)


def test_a_record_that_quotes_is_not_quoted_again(machines: Machines) -> None:
    outcome = machines.quote(machines.measure().folder)
    with pytest.raises(UsageError, match=r"no record\.json there holds a comparison measured on a GPU"):
        load_required_records(outcome.folder)


def test_what_fell_short_is_quoted_too(machines: Machines) -> None:
    outcome = machines.quote(machines.measure(candidate=Script(us=20.0 / 1.1)).folder)
    assert outcome.record.decision == "DEFER"
    assert performance(outcome).status == "FAIL"
    assert all("quoted from NVIDIA L4" in reason for reason in outcome.record.reasons)
    assert "SHORT" in outcome.record.reasons[0]


@pytest.mark.parametrize("device", [EMULATED, None])
def test_what_did_not_pass_correctness_here_is_not_quoted(machines: Machines, device: Any) -> None:
    folder = machines.measure().folder
    outcome = machines.quote(folder, candidate=Script(behave=behaviours.one_nan), device=device)
    assert outcome.record.quoted is None
    assert performance(outcome).status == "PENDING"
    assert outcome.record.decision == ("PENDING" if device is None else "DEFER")
    with pytest.raises(ValueError, match="unless its CORRECTNESS gate passed"):
        msgspec.structs.replace(outcome.record, quoted=machines.quote(folder).record.quoted)


def test_where_there_is_a_gpu_it_is_measured(machines: Machines) -> None:
    outcome = machines.quote(machines.measure().folder, device=L4)
    assert outcome.record.quoted is None
    assert outcome.record.speedups


def test_the_newest_of_several_is_quoted(machines: Machines) -> None:
    """Also where an older one says something better."""
    records = [machines.measure().record, machines.measure(candidate=Script(us=20.0 / 1.1)).record]
    days = ("2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z")
    folders = [
        keep(machines.folder / day[:10], msgspec.structs.replace(record, created=day))
        for day, record in zip(days, records, strict=True)
    ]
    for order in (folders, folders[::-1]):
        outcome = machines.quote(*order)
        assert outcome.record.quoted is not None
        assert outcome.record.quoted.created == days[1]
        assert outcome.record.decision == "DEFER"


def edit(side: str, **changes: Any) -> Callable[[Record], Record]:
    """Change the first kernel of a side."""

    def change(record: Record) -> Record:
        before: Side = getattr(record, side)
        build = msgspec.structs.replace(before.builds[0], **changes)
        return msgspec.structs.replace(record, **{side: msgspec.structs.replace(before, builds=[build])})

    return change


OTHER_CODE = {"kernel_hash": "0" * 16, "code_hash": "0" * 16}


def other_inputs(record: Record) -> Record:
    rows = [msgspec.structs.replace(row, inputs_digest="0" * 16) for row in record.candidate.correctness[:1]]
    rows += record.candidate.correctness[1:]
    return msgspec.structs.replace(record, candidate=msgspec.structs.replace(record.candidate, correctness=rows))


def gate_failed(record: Record) -> Record:
    found = [msgspec.structs.replace(g, status="FAIL") if g.gate == "RESOURCES" else g for g in record.gates]
    return msgspec.structs.replace(record, gates=found)


def timing(**changes: Any) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        rows = [msgspec.structs.replace(row, **changes) for row in record.candidate.timing]
        return msgspec.structs.replace(record, candidate=msgspec.structs.replace(record.candidate, timing=rows))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: msgspec.structs.replace(r, arch="sm_90a"), "is of sm_90a, not sm_89"),
        (edit("baseline", **OTHER_CODE), "is stale: the machine code of the baseline kernel at b1_h1_s32_d64 differs"),
        (
            edit("candidate", **OTHER_CODE),
            "is stale: the machine code of the candidate kernel at b1_h1_s32_d64 differs",
        ),
        (
            edit("candidate", kernel_hash="0" * 16, code_hash=""),
            "cannot be compared: the source of the candidate kernel at b1_h1_s32_d64 or the options differ",
        ),
        (
            edit("candidate", launches={}),
            "does not name the candidate kernel that b1_h1_s32_d64 ran",
        ),
        (
            edit("candidate", compiler="NVRTC 13.9.1"),
            "cannot be compared: it was compiled by NVRTC 13.9.1, and this is",
        ),
        (gate_failed, "did not pass RESOURCES"),
        (other_inputs, "had other inputs at b1_h1_s32_d64 seed 0"),
        (timing(method="another clock"), "was timed otherwise"),
        (timing(warmup_iters=7), "was timed otherwise"),
        (timing(timed_iters=499), "was timed otherwise"),
        (timing(block_medians_us=[[1.0] * 5] * 4, p50_us=1.0), "was timed otherwise"),
        (timing(block_medians_us=[[1.0] * 3] * 5, p50_us=1.0), "was timed otherwise"),
        (
            lambda r: msgspec.structs.replace(
                r, speedups=[msgspec.structs.replace(row, confidence=0.9) for row in r.speedups]
            ),
            "was timed otherwise",
        ),
        (
            lambda r: msgspec.structs.replace(
                r, speedups=[msgspec.structs.replace(row, gated=False) for row in r.speedups]
            ),
            "did not gate b1_h1_s32_d64",
        ),
    ],
)
@pytest.mark.usefixtures("made_up_records")
def test_a_record_of_anything_else_is_named_and_not_quoted(
    machines: Machines, change: Callable[[Record], Record], says: str
) -> None:
    folder = keep(machines.folder / "kept", change(machines.measure().record))
    outcome = machines.quote(folder)
    assert (outcome.record.quoted, outcome.record.decision) == (None, "PENDING")
    gate = performance(outcome)
    assert gate.status == "PENDING"
    assert gate.summary.startswith("emulated: an emulator cannot measure time; the record of 20")
    assert f" ({folder}) {says}" in gate.summary


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shapes": ("b1_h1_s32_d64", "b1_h2_s100_d64")}, "did not time b1_h2_s100_d64"),
        ({"timed_iters": 400}, "was timed otherwise"),
        ({"processes": 4}, "was timed otherwise"),
        ({"arch": "sm_90a"}, "is of sm_89, not sm_90a"),
    ],
)
def test_a_run_that_asks_for_more_or_else_is_pending(machines: Machines, options: dict[str, Any], says: str) -> None:
    gate = performance(machines.quote(machines.measure().folder, **options))
    assert gate.status == "PENDING"
    assert says in gate.summary


def test_inputs_of_other_seeds_are_quoted_too(machines: Machines) -> None:
    """Seeds are secret, and no two runs have the same. What was timed is made again from the record's own seeds."""
    outcome = machines.quote(machines.measure().folder, seeds=(2**60, 2**60 + 1))
    assert performance(outcome).status == "PASS"
    assert outcome.record.quoted is not None


def test_a_part_of_what_was_measured_can_be_quoted(machines: Machines) -> None:
    measured = machines.measure(shapes=("b1_h1_s32_d64", "b1_h2_s100_d64"))
    quoted = machines.quote(measured.folder, shapes=("b1_h2_s100_d64",), seeds=(1,)).record.quoted
    assert quoted is not None
    assert quoted.speedups == [row for row in measured.record.speedups if row.shape == "b1_h2_s100_d64"]


def test_what_was_measured_once_more_can_be_quoted(machines: Machines) -> None:
    outcome = machines.quote(machines.measure(candidate=Script(us=20.0 / 1.15, process_sigma=0.1)).folder)
    assert outcome.record.quoted is not None
    assert {row.processes for row in outcome.record.quoted.speedups} == {10}
    assert "INCONCLUSIVE" in performance(outcome).summary
    assert outcome.record.decision == "DEFER"  # as the machine that measured it said


@pytest.mark.parametrize(
    ("required", "status", "says"),
    [
        (1.5, "PASS", "FAST"),
        (2.5, "FAIL", "SHORT"),
        (2.04, "PENDING", "does not decide whether b1_h1_s32_d64 reaches 2.04x"),
    ],
)
def test_the_requirement_of_this_run_decides(machines: Machines, required: float, status: str, says: str) -> None:
    outcome = machines.quote(machines.measure().folder, required=required)
    gate = performance(outcome)
    assert (gate.status, says in gate.summary) == (status, True)
    if outcome.record.quoted:
        assert {row.required for row in outcome.record.quoted.speedups} == {required}


@pytest.mark.usefixtures("made_up_records")
def test_of_several_kernels_the_record_must_say_which_ran(machines: Machines) -> None:
    measured = machines.measure(shapes=("b1_h1_s32_d64", "b1_h2_s100_d64")).record
    (build,) = measured.candidate.builds
    assert build.shapes == ["b1_h1_s32_d64", "b1_h2_s100_d64"]
    one, two = ({shape: build.launches[shape]} for shape in build.shapes)
    mine = msgspec.structs.replace(build, launches=one)
    other = msgspec.structs.replace(build, **OTHER_CODE, launches=two)

    def kept(name: str, *builds: Any) -> Path:
        side = msgspec.structs.replace(measured.candidate, builds=list(builds))
        return keep(machines.folder / name, msgspec.structs.replace(measured, candidate=side))

    assert machines.quote(kept("said", mine, other)).record.quoted is not None
    ragged = performance(machines.quote(kept("b1_h2_s100_d64", mine, other), shapes=("b1_h2_s100_d64",)))
    assert "the machine code of the candidate kernel at b1_h2_s100_d64 differs" in ragged.summary
    silent = [msgspec.structs.replace(b, launches={}) for b in (build, other)]
    gate = performance(machines.quote(kept("silent", *silent)))
    assert "does not name the candidate kernel that b1_h1_s32_d64 ran" in gate.summary


@pytest.mark.usefixtures("made_up_records")
def test_records_of_other_variants_are_counted(machines: Machines) -> None:
    record = machines.measure().record
    sides = {"baseline": record.candidate, "candidate": record.baseline}
    gate = performance(machines.quote(keep(machines.folder / "kept", msgspec.structs.replace(record, **sides))))
    assert gate.summary.endswith("; none of 1 kept records compares stage1 with stage2")


def test_evidence_lies_with_the_task_or_next_to_the_tasks(tmp_path: Path) -> None:
    mine, shipped = tmp_path / "mine", tmp_path / "repo" / "tasks" / "mine"
    for folder in (mine, shipped):
        folder.mkdir(parents=True)
        assert find_evidence_folders(folder) == []  # as where the package is installed
    (tmp_path / "evidence").mkdir()
    (tmp_path / "repo" / "evidence").mkdir()
    assert find_evidence_folders(mine) == []
    assert find_evidence_folders(shipped) == [tmp_path / "repo" / "evidence"]
    (shipped / "evidence").mkdir()
    assert find_evidence_folders(shipped) == [shipped / "evidence", tmp_path / "repo" / "evidence"]


def test_an_evidence_folder_holds_what_can_be_read_of_it(machines: Machines) -> None:
    measured = machines.measure()
    evidence = machines.folder / "evidence"
    keep(evidence / "l4" / "mine", measured.record)
    (evidence / "l4" / "broken").mkdir()
    (evidence / "l4" / "broken" / RECORD).write_text("{}")
    edited = sealed_json(measured.record, conclusions=True).replace('"verdict": "FAST"', '"verdict": "SHORT"', 1)
    (evidence / "l4" / "edited").mkdir()
    (evidence / "l4" / "edited" / RECORD).write_text(edited)
    told: list[str] = []
    (found,) = load_records(evidence, told.append)
    assert (found.path, found.record) == ("evidence/l4/mine/record.json", measured.record)
    broken, changed = told
    assert broken.startswith(f"not quoted: {evidence / 'l4' / 'broken' / RECORD}: not a record as greenfast writes it")
    assert "edited/record.json: speedups[0] (b1_h1_s32_d64).verdict says SHORT" in changed
    (evidence / "l4" / "edited" / RECORD).unlink()
    with pytest.raises(UsageError, match=r"broken/record\.json: not a record as greenfast writes it"):
        load_required_records(evidence)


def test_what_holds_no_comparison_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machines: Machines
) -> None:
    asked = request(tmp_path / "out")
    install(monkeypatch, FakeDevice(asked))
    one = bench(asked, asked.task.config.variant("stage2"), Watcher()).folder
    (tmp_path / "empty").mkdir()
    for path in (one, one / RECORD, tmp_path / "empty"):
        with pytest.raises(UsageError, match=r"no record\.json there holds a comparison measured on a GPU"):
            load_required_records(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_required_records(tmp_path / "none")
