"""Saved records: read back, and stale once their kernel is no longer what the sources make."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.kernel import bench
from greenfast.judge import record_io
from greenfast.judge.record_io import check_freshness, find_outdated, read_record, sealed_json
from greenfast.judge.record_schema import AnyRecord, BenchRecord, GateResult, Record, Side
from greenfast.judge.store import to_json
from greenfast.judge.validate import validate
from greenfast.spec.errors import UsageError
from tests.fakes import Watcher, request, rungs
from tests.judge.report.records import correctness_row, speedup_row
from tests.judge.report.records import record as make_record
from tests.judge.small_task import FAMILY, loaded, write_task

pytestmark = pytest.mark.usefixtures("families_here")

#: A kernel whose header lies next to its family.
WITH_HEADER = FAMILY.replace('source = """', 'source = """#include "factor.cuh"\n').replace(
    '"twice.cu", ()', '"twice.cu", (__import__("pathlib").Path(__file__).parent,)'
)


def write_with_header(folder: Path) -> Path:
    """Write a task with a kernel that includes a header; return its folder."""
    folder.mkdir(parents=True)
    (folder / "factor.cuh").write_text("// two\n")
    return write_task(folder, family=WITH_HEADER)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a known task whose kernel includes a header."""
    monkeypatch.setenv("GREENFAST_TASKS", str(tmp_path / "tasks"))
    return write_with_header(tmp_path / "tasks" / "twice")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run of the task as it is in ``folder``."""
    base = tmp_path_factory.mktemp("record")
    task = loaded(write_with_header(base / "twice"), family=WITH_HEADER)
    asked = request(base / "out", task=task, shapes=("tiny",), fmt="float", device=None)
    return validate(asked, *rungs(asked, "plain", "fast"), Watcher()).record


@pytest.mark.usefixtures("made_up_records")
def test_aliases_of_shapes_are_read_as_their_names(tmp_path: Path) -> None:
    """In rows, lists and keys, and in what the gates say; the command stays as it was typed."""
    then = make_record(command="greenfast judge fp8_sdpa --shapes small,mission,long")
    build = msgspec.structs.replace(then.candidate.builds[0], shapes=["small", "mission"])
    then = with_side(then, builds=[build])
    said = GateResult(
        gate="PERFORMANCE",
        status="PASS",
        summary="mission 2.750x [2.727, 2.772], FAST; hopper (small) 96 registers; a long run",
        reasons=["long: 1.02x", "PERFORMANCE: mission: 1.01x"],
        checks=[("mission, warm L2", "1.15x", "2.75x", "PASS"), ("candidate stage2 (small): spills", "0", "0", "PASS")],
    )
    then = msgspec.structs.replace(then, gates=[*then.gates, said], least_work={"small": {"exponentials": 1}})
    (tmp_path / "record.json").write_text(to_json(then))
    now = read_record(tmp_path)
    assert isinstance(now, Record)
    assert {row.shape for row in now.speedups} == {"b1_h8_s512_d64"}
    assert [row.shape for row in then.candidate.correctness] == ["small"] * 3 + ["mission"] * 3
    assert [row.shape for row in now.candidate.correctness] == ["b1_h1_s32_d64"] * 3 + ["b1_h8_s512_d64"] * 3
    assert now.candidate.builds[0].shapes == ["b1_h1_s32_d64", "b1_h8_s512_d64"]
    assert now.least_work == {"b1_h1_s32_d64": {"exponentials": 1}}
    gate = now.gates[-1]
    assert gate.summary == (
        "b1_h8_s512_d64 2.750x [2.727, 2.772], FAST; hopper (b1_h1_s32_d64) 96 registers; a long run"
    )
    assert gate.reasons == ["b1_h8_s2048_d64: 1.02x", "PERFORMANCE: b1_h8_s512_d64: 1.01x"]
    assert [check[0] for check in gate.checks] == [
        "b1_h8_s512_d64, warm L2",
        "candidate stage2 (b1_h1_s32_d64): spills",
    ]
    assert now.command == then.command
    (tmp_path / "record.json").write_text(to_json(now))
    assert read_record(tmp_path) == now  # names are read as they are


@pytest.mark.usefixtures("made_up_records")
def test_the_shapes_of_an_unknown_task_keep_their_names(tmp_path: Path) -> None:
    then = make_record(task="no_more")
    (tmp_path / "record.json").write_text(to_json(then))
    assert read_record(tmp_path) == then


def with_side(record: Record, **changes: object) -> Record:
    candidate: Side = msgspec.structs.replace(record.candidate, **changes)
    return msgspec.structs.replace(record, candidate=candidate)


def said(record: AnyRecord) -> str:
    return str(check_freshness(record))


def test_a_record_of_todays_kernels_is_current(record: Record) -> None:
    assert said(record) == "current"
    assert find_outdated([("now", record)]) == {}


def test_other_text_with_the_same_machine_code_is_current(record: Record, folder: Path) -> None:
    (folder / "factor.cuh").write_text("// three\nstruct Three { static constexpr int kThree = 3; };\n")
    assert said(record) == "current"
    write_task(folder, family=WITH_HEADER.replace('"4.0f * 0.5f"', '"(4.0f) * (0.5f)"'))
    assert said(record) == "current"
    older = with_side(record, builds=[msgspec.structs.replace(b, code_hash="") for b in record.candidate.builds])
    assert said(older) == (
        "cannot tell: the source of the candidate kernel at tiny or the options differ, and the record has "
        "no hash of machine code"
    )


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ('"2.0f"', '"3.0f"', "the machine code of the candidate kernel at tiny differs"),
        ('"4.0f * 0.5f"', '"4.0f * 0.75f"', "the machine code of the baseline kernel at tiny differs"),
        ("i < n", "i <= n", "the machine code of the baseline kernel at tiny differs; the machine code of"),
        ("(-(-dims[", "(1-(-dims[", "the grid (1x1x1, now 2x1x1) of the baseline kernel at tiny differs"),
        ("np.int32", "np.int64", "argument 2 (int32 5, now int64 5) of the baseline kernel at tiny differs"),
        ('"y", np', '"x", np', "argument 1 (buffer 1, now buffer 0) of the baseline kernel at tiny differs"),
        ('["N"])))', '["N"])), early=True)', "the early launch (no, now yes) of the baseline kernel at tiny differs"),
        ("(256", "(128", "the block (256x1x1, now 128x1x1) of the baseline kernel at tiny differs"),
        ("(256, 1, 1)", "(256, 1, 1), 64", "the dynamic shared memory (0 bytes, now 64 bytes) of the baseline kernel"),
        ("threadIdx.x;", "threadIdx.y", "the baseline kernel at tiny cannot be built any more"),
    ],
)
def test_what_makes_a_record_stale_is_named(
    record: Record, folder: Path, before: str, after: str, differs: str
) -> None:
    assert before in WITH_HEADER
    write_task(folder, family=WITH_HEADER.replace(before, after))
    assert differs in said(record)
    assert list(find_outdated([("then", record)])) == ["then"]


def test_the_name_of_a_buffer_does_not_matter(record: Record, folder: Path) -> None:
    write_task(folder, family=WITH_HEADER.replace('("x", "y"', '("first", "second"'))
    assert said(record) == "current"


def test_another_compiler_cannot_tell(record: Record, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_io, "compiler_version", lambda: "NVRTC 99.1.2")
    ours = record.candidate.builds[0].compiler
    answer = check_freshness(record)
    assert str(answer) == f"cannot tell: it was compiled by {ours}, and this is NVRTC 99.1.2"
    assert answer.other_compiler
    write_task(folder, family=WITH_HEADER.replace("np.int32", "np.int64"))
    assert check_freshness(record).status == "stale"  # the launch can be compared all the same


def test_a_record_that_does_not_say_how_it_launched_cannot_be_compared(record: Record) -> None:
    older = with_side(record, builds=[msgspec.structs.replace(b, launches={}) for b in record.candidate.builds])
    assert said(older) == "cannot tell: the record does not state how the candidate kernel was launched"


def test_a_record_is_not_stale_because_of_anything_else(record: Record, folder: Path) -> None:
    write_task(folder, family=WITH_HEADER + "\n# a comment\n", description="another one", seeds=[7])
    assert said(record) == "current"


def test_a_record_that_asked_for_less_than_its_task_is_stale(record: Record, folder: Path) -> None:
    """Its decision follows from its options, so reading it alone finds nothing."""
    limits = {name: msgspec.structs.replace(then, bound_factor=9.0) for name, then in record.candidate.limits.items()}
    rows = [msgspec.structs.replace(correctness_row("mission", 0), shape="tiny", dims={"N": 5})]
    assert said(with_side(record, correctness=rows)) == "current"
    easier = with_side(record, correctness=rows, limits=limits)
    assert said(easier) == "stale: it allowed the candidate bound_factor 9, the task allows 1"

    gates = [msgspec.structs.replace(gate, status="PASS") for gate in record.gates]
    timed = msgspec.structs.replace(record, gates=gates, speedups=[speedup_row("tiny", required=1.05)])
    assert said(timed) == "current"
    config = json.loads((folder / "config_forward.json").read_text())
    config["rungs"][-1]["required_speedup"] = 1.15
    assert config["rungs"][-1]["name"] == record.candidate.variant
    (folder / "config_forward.json").write_text(json.dumps(config))
    assert said(timed) == "stale: it required 1.05x, the task requires 1.15x"
    assert said(msgspec.structs.replace(timed, speedups=[speedup_row("tiny", required=1.2)])) == "current"


def test_a_record_without_a_kernel_of_today_is_stale(record: Record, folder: Path) -> None:
    cases: list[dict[str, object]] = [{"builds": []}, {"toggles": {"NO_SUCH": 1}}, {"toggles": {"FAST": 7}}]
    for changes in cases:
        assert check_freshness(with_side(record, **changes)).status == "stale"
    (folder / "config_forward.json").unlink()
    assert said(record).startswith("stale: the baseline kernel is no more: ")


def test_records_are_read_by_folder_and_by_file(record: Record, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "record.json").write_text(sealed_json(record))
    assert read_record(run) == read_record(run / "record.json") == record


def test_a_benchs_record_is_read_and_can_be_stale(folder: Path, tmp_path: Path) -> None:
    task = loaded(folder, family=WITH_HEADER)
    asked = request(tmp_path / "out", task=task, shapes=("tiny",), fmt="float", device=None)
    outcome = bench(asked, task.config.variant("fast"), Watcher())
    again = read_record(outcome.folder)
    assert isinstance(again, BenchRecord)
    assert again == outcome.record
    assert said(again) == "current"
    write_task(folder, family=WITH_HEADER.replace('"2.0f"', '"3.0f"'))
    assert said(again) == "stale: the machine code of the kernel at tiny differs"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"schema_version": 1, "created": 5}'])
def test_what_is_no_record_is_a_usage_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(UsageError, match=r"record\.json: not a record as greenfast writes it"):
        read_record(tmp_path)


def test_a_forged_record_cannot_be_read(record: Record, tmp_path: Path) -> None:
    """Timings with a correctness that is pending."""
    forged = json.loads(to_json(record))
    forged["speedups"] = [
        *({"shape": "tiny", "cache": "warm", "speedup": 9.0, "ci_low": 8.0, "ci_high": 10.0, "confidence": 0.95}
          | {"noise_floor": 0.005, "required": 0.0, "gated": True, "verdict": "FAST", "processes": 5, "blocks": 20},)
    ]  # fmt: skip
    (tmp_path / "record.json").write_text(json.dumps(forged))
    with pytest.raises(UsageError, match="unless its CORRECTNESS gate passed"):
        read_record(tmp_path)
