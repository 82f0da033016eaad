"""``greenfast init`` and ``greenfast judge``, without a GPU: scaffolds pass at once, and each ending has its code."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from greenfast.cli.judge import UNCHECKED, UNDECIDED, exit_code
from greenfast.cli.main import main
from greenfast.device import toolchain
from greenfast.device.compiler import compile_kernel
from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import Decision, GateResult, Record, Status
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.cli.command_line import change
from tests.judge.report.records import pending_record, quoting_record
from tests.judge.report.records import record as make_record

pytestmark = pytest.mark.usefixtures("emulator_here")

NO_GPU = ["--device", "emulated", "--require", "build,resources,correctness,evidence"]


@pytest.fixture
def scaffold(tmp_path: Path) -> Path:
    """A scaffold in CUDA, to be changed."""
    assert main(["init", str(tmp_path / "mine")]) == 0
    return tmp_path / "mine"


def judge(folder: Path, *options: str, device: list[str] = NO_GPU) -> int:
    problem = ["--problem", str(folder / "problem"), "--out", str(folder / "results")]
    return main(["judge", str(folder / "solution"), *problem, *device, *options])


def record_of(folder: Path) -> Record:
    (file,) = (folder / "results").rglob("record.json")
    record = read_record(file)
    assert isinstance(record, Record)
    return record


@pytest.mark.parametrize("language", ["cuda", "ptx", "family", "triton"])
def test_a_scaffold_passes_at_once(tmp_path: Path, language: str, capsys: pytest.CaptureFixture[str]) -> None:
    if language == "triton":
        pytest.importorskip("triton")
    if language == "ptx" and not toolchain.assemblers():
        pytest.skip("no ptxas")
    folder = tmp_path / "my kernel"
    assert main(["init", str(folder), "--language", language]) == 0
    assert f"greenfast judge '{folder}'\n" in capsys.readouterr().out
    assert judge(folder) == 0, capsys.readouterr().out
    record = record_of(folder)
    assert {g.gate: g.status for g in record.gates} == {
        **dict.fromkeys(("BUILD", "RESOURCES", "CORRECTNESS", "EVIDENCE"), "PASS"),
        "PERFORMANCE": "PENDING",
    }
    side = record.candidate
    assert side.solution is not None
    assert side.solution.language == language
    assert side.sandbox
    (run,) = [file.parent for file in (folder / "results").rglob("record.json")]
    for name, digest in side.solution.files.items():
        kept = (run / "solution" / name).read_bytes()
        assert kept == (folder / "solution" / name).read_bytes()
        assert hashlib.sha256(kept).hexdigest() == digest
    assert record.baseline.solution is not None
    assert (run / "baseline" / "solution" / "baseline.cu").is_file()


def test_what_cannot_be_timed_is_not_all_that_was_asked(scaffold: Path) -> None:
    assert judge(scaffold, device=["--device", "emulated"]) == 4
    assert judge(scaffold, device=["--device", "none"]) == 4
    assert judge(scaffold, device=["--device", "none", "--require", "build,resources"]) == 0


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (("--shapes", "tail"), 4),
        (("--seeds", "7"), 4),
        (("--seeds", "0,1,2", "--exam-seed", "77"), 4),  # all shapes, with inputs that were known
        (("--shapes", "one,tail,even"), 4),  # its seeds are the task's, but nothing is drawn
        (("--device", "none", "--shapes", "one", "--require", "build"), 4),
    ],
)
def test_gates_that_hold_on_part_of_the_exam_are_no_zero(
    scaffold: Path, part: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """PERFORMANCE is PENDING here, so the decision does not say INCOMPLETE; the exit code 0 would read as passed."""
    assert judge(scaffold, *part) == code, capsys.readouterr()


def test_json_is_the_record(scaffold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert judge(scaffold, "--json", "--shapes", "tail") == 4
    printed = msgspec.json.decode(capsys.readouterr().out, type=Record)
    assert printed == record_of(scaffold)
    assert printed.task == "vector_add"
    assert (printed.candidate.variant, printed.baseline.variant) == ("four_at_a_time", "baseline")


@pytest.mark.parametrize(
    ("file", "old", "new", "code", "said"),
    [
        ("solution/kernel.cu", "z[i] = sum;", "z[i] = som;", 11, 'kernel.cu(15): error: identifier "som" is undefined'),
        ("solution/kernel.cu", "struct", "__device__ int seen; struct", 0, ""),
        (
            "solution/kernel.cu",
            "  z[i] = sum;",
            "  static __shared__ volatile int s; s = i; if (s >= 0) z[i] = sum;",
            12,
            "shared memory, bytes is 4, the budget of four_at_a_time allows 0",
        ),
        ("solution/kernel.cu", "a.values[k] + ", "1.5f * a.values[k] + ", 13, "kernel_bound"),
        ("solution/kernel.cu", "if (i >= n / VECTOR) return;", "", 13, "four_at_a_time one seed "),
        ("solution/solution.json", '"THREADS": 256', '"THREADS": "2**(2**62)"', 2, "constants.THREADS"),
        (
            "problem/config_forward.json",
            '"N": 1000}',
            '"N": 1099511627776}',
            2,
            "baseline.cu: launches[0].grid[0]: 4294967296; from 1 to 2147483647",
        ),
    ],
)
def test_each_gate_has_its_exit_code(
    scaffold: Path, file: str, old: str, new: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(scaffold / file, old, new)
    capsys.readouterr()
    found = judge(scaffold)
    output = capsys.readouterr()
    assert found == code, output
    assert said in output.out + output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize("where", ["module", "references"])
def test_a_problem_that_exits_is_no_verdict(scaffold: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = scaffold / "problem" / "problem.py"
    text = path.read_text()
    exits = "import sys\nsys.exit(0)\n"
    path.write_text(text + (f"\n{exits}" if where == "module" else "\ndef references(*_):\n    raise SystemExit(0)\n"))
    assert judge(scaffold) == 3
    assert "a module of the task called sys.exit(0); there is no verdict" in capsys.readouterr().err
    assert not list((scaffold / "results").rglob("record.json"))


@pytest.mark.parametrize("language", ["family", "triton"])
def test_code_that_exits_is_an_error_of_its_kind(
    tmp_path: Path, language: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if language == "triton":
        pytest.importorskip("triton")
    assert main(["init", str(tmp_path), "--language", language]) == 0
    (code,) = (tmp_path / "solution").glob("*.py")
    code.write_text(f"{code.read_text()}\nimport os\nos._exit(0)\n")
    assert judge(tmp_path) == 5
    assert "the solution ended without a verdict: its process ended with exit code 0" in capsys.readouterr().err
    assert not list((tmp_path / "results").rglob("record.json"))


def test_the_two_commands_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an empty folder: ``greenfast init my_kernel``, then ``greenfast judge my_kernel``."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_kernel", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == {
        "problem": "my_kernel/problem", "solution": "my_kernel/solution", "judge": "greenfast judge my_kernel"
    }  # fmt: skip
    assert main(["judge", "my_kernel", *NO_GPU]) == 0
    assert "four_at_a_time against baseline, fp32" in capsys.readouterr().out
    shutil.rmtree("my_kernel/solution")
    assert main(["judge", "my_kernel", *NO_GPU]) == 2
    assert "my_kernel/solution: no such solution" in capsys.readouterr().err


def test_a_reference_of_your_choice(scaffold: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(scaffold / "solution", other)
    change(other / "solution.json", "four_at_a_time", "other")
    assert judge(scaffold, "--baseline", str(other)) == 0
    assert record_of(scaffold).baseline.variant == "other"


def test_a_cubin_is_pending_on_the_emulator(scaffold: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_source: dict[str, Any] = json.loads((scaffold / "solution" / "solution.json").read_text())
    cubin = _built(scaffold / "problem" / "baseline.cu")
    (scaffold / "solution" / "kernel.cubin").write_bytes(cubin)
    launches = [{"kernel": "add", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "z", "int32(N)"]}]
    made = {"name": from_source["name"], "file": "kernel.cubin", "launches": launches}
    (scaffold / "solution" / "solution.json").write_text(json.dumps(made))
    assert judge(scaffold) == 4
    assert "the emulator reads PTX, and kernel.cubin is machine code" in capsys.readouterr().out
    assert record_of(scaffold).gate_status("RESOURCES") == "PASS"
    assert judge(scaffold, "--arch", "sm_89") == 11


@pytest.mark.parametrize("damage", ["cut", "no kernel", "no registers", "no ELF"])
def test_a_damaged_cubin_fails_build(scaffold: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    cubin = bytearray(_built(scaffold / "problem" / "baseline.cu"))
    if damage == "cut":
        del cubin[len(cubin) // 2 :]
    elif damage == "no kernel":
        cubin = cubin.replace(b".text.add\0", b".text.odd\0")
    elif damage == "no registers":
        cubin = cubin.replace(b".nv.info\0", b".nv.inxo\0")
    else:
        cubin[:4] = b"none"
    (scaffold / "solution" / "kernel.cubin").write_bytes(cubin)
    made = json.loads((scaffold / "solution" / "solution.json").read_text())
    launches = [{**launch, "grid": ["ceildiv(N, 256)"], "block": [256]} for launch in made["launches"]]
    text = json.dumps({"name": made["name"], "file": "kernel.cubin", "launches": launches})
    (scaffold / "solution" / "solution.json").write_text(text)
    capsys.readouterr()
    assert judge(scaffold) == 11
    said = capsys.readouterr()
    assert "BUILD       FAIL" in said.out
    assert "Traceback" not in said.err


def _built(file: Path) -> bytes:
    source = KernelSource("add", file.read_text(), file.name, (), (256, 1, 1))
    return compile_kernel(source, Target("sm_90a")).cubin


def test_without_an_assembler_ptx_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "assemblers", list)
    assert main(["init", str(tmp_path), "--language", "ptx"]) == 0
    assert judge(tmp_path) == 4
    record = record_of(tmp_path)
    statuses = {g.gate: g.status for g in record.gates}
    assert statuses == {
        "BUILD": "PASS",
        "RESOURCES": "PENDING",
        "CORRECTNESS": "PASS",
        "PERFORMANCE": "PENDING",
        "EVIDENCE": "PENDING",
    }
    assert "pip install nvidia-cuda-nvcc" in capsys.readouterr().out
    assert record.candidate.builds[0].resources is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["no_such"], "unknown task or solution 'no_such'; allowed: "),
        (["{}/problem"], "task vector_add has no rungs; `greenfast judge SOLUTION --problem"),
        (["{}/problem", "--problem", "{}/problem"], "problem: holds no solution.json of a solution"),
        (
            ["fp8_sdpa", "--problem", "{}/problem"],
            "fp8_sdpa: no such solution; --problem names the problem of a solution",
        ),
        (["{}/.."], "holds no config_forward.json of a task and no solution.json of a solution"),
        (["{}/solution", "--candidate", "fast"], "solution is a solution and so the candidate itself"),
        (["{}/solution"], "solution.json: names no problem; --problem names a task or its folder"),
        (["{}/solution", "--problem", "no_such"], "unknown task 'no_such'"),
        (["{}/solution", "--problem", "{}/problem", "--baseline", "no"], "unknown baseline 'no'; allowed: the path of"),
        (["{}/solution", "--problem", "{}/problem", "--arch", "sm_1"], "unknown target 'sm_1'"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    scaffold: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["judge", *(option.format(scaffold) for option in options)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_known_problem_may_be_named_by_the_solution(
    scaffold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GREENFAST_TASKS", str(scaffold))
    change(scaffold / "solution" / "solution.json", '"language"', '"problem": "vector_add", "language"')
    options = ["--device", "none", "--require", "build", "--out", str(tmp_path / "out")]
    assert main(["judge", str(scaffold / "solution"), *options]) == 0
    change(scaffold / "solution" / "solution.json", '"problem": "vector_add"', '"problem": "../problem"')
    assert main(["judge", str(scaffold / "solution"), *options]) == 2
    assert "unknown problem of" in capsys.readouterr().err


def test_init_does_not_write_over_anything(scaffold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(scaffold)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_a_task_that_is_a_solution_too_is_not_guessed(scaffold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--problem`` it is the solution."""
    shutil.copytree(scaffold / "problem", scaffold / "solution", dirs_exist_ok=True)
    assert main(["judge", str(scaffold / "solution")]) == 2
    assert "names a task and a solution; --problem judges the solution" in capsys.readouterr().err
    assert judge(scaffold, device=["--device", "none", "--require", "build"]) == 0


def with_gates(record: Record, decision: Decision, *failed: str, pending: str = "") -> Record:
    statuses: dict[str, Status] = {**dict.fromkeys(failed, "FAIL"), pending: "PENDING"}
    gates = [GateResult(gate=name, status=statuses.get(name, "PASS"), summary="") for name in GATES]
    return msgspec.structs.replace(record, decision=decision, gates=gates)


def test_the_exit_code_is_of_the_first_gate_that_failed() -> None:
    failed = with_gates(pending_record(), "DEFER", "PERFORMANCE", "EVIDENCE")
    assert exit_code(failed, {"BUILD"}, partial=False) == 14
    codes = {gate: exit_code(with_gates(failed, "DEFER", gate), set(), partial=True) for gate in GATES}
    assert codes == {"BUILD": 11, "RESOURCES": 12, "CORRECTNESS": 13, "PERFORMANCE": 14, "EVIDENCE": 15}


def test_the_exit_code_of_what_was_not_judged_depends_on_what_is_required() -> None:
    pending = with_gates(pending_record(), "PENDING", pending="PERFORMANCE")
    assert exit_code(pending, set(GATES), partial=False) == UNDECIDED == 4
    assert exit_code(pending, {"BUILD"}, partial=False) == 0
    assert exit_code(pending, {"BUILD"}, partial=True) == UNDECIDED
    assert exit_code(with_gates(pending, "INCOMPLETE"), {"BUILD"}, partial=False) == UNDECIDED
    quoting = with_gates(quoting_record(), "INCOMPLETE")
    assert exit_code(quoting, set(GATES), partial=False) == UNDECIDED
    assert exit_code(quoting, {"CORRECTNESS"}, partial=False) == 0, "as if nothing had been quoted"
    assert exit_code(quoting, {"CORRECTNESS"}, partial=True) == UNDECIDED
    assert exit_code(with_gates(quoting, "MERGE"), set(GATES), partial=True) == 0, "a kept record covers the rest"


def test_the_exit_code_of_a_check_that_was_not_done_belongs_to_its_gate() -> None:
    record = with_gates(make_record(), "UNCHECKED")
    record.gates[2] = GateResult(gate="CORRECTNESS", status="PASS", summary="", unchecked=["mine: ..."])
    assert exit_code(record, set(GATES), partial=False) == UNCHECKED == 6
    assert exit_code(record, {"CORRECTNESS"}, partial=False) == UNCHECKED
    assert exit_code(record, {"BUILD"}, partial=False) == 0


def test_one_cause_of_all_cases_is_reported_once(scaffold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kernel,) = (scaffold / "solution").glob("*.cu")
    change(kernel, "int n)", "int n, int m)")
    junit = scaffold / "junit.xml"
    assert judge(scaffold, "--junit", str(junit)) == 13
    record = record_of(scaffold)
    rows = record.candidate.correctness
    (reason,) = next(gate.reasons for gate in record.gates if gate.gate == "CORRECTNESS")
    cause = "add has 5 parameters, its launch gives 4"
    assert reason.endswith(f"ran (run: {cause}); {len(rows) - 1} more of {len(rows)} cases were not run")
    assert [row.is_skipped for row in rows] == [False] + [True] * (len(rows) - 1)
    assert all(cause in row.notes[0] for row in rows)
    (run,) = [file.parent for file in (scaffold / "results").rglob("record.json")]
    assert capsys.readouterr().out.count(cause) == 2  # of the gate, and of the verdict
    report = (run / "VALIDATION_REPORT.md").read_text()
    assert sum(cause in line for line in report.splitlines() if line.startswith("| candidate")) == 1
    tests = ElementTree.parse(junit).iter("testcase")
    cases = [test for test in tests if test.get("name", "").startswith("candidate ")]
    assert [len(test.findall("failure")) for test in cases] == [1] + [0] * (len(rows) - 1)
    assert [len(test.findall("skipped")) for test in cases] == [0] + [1] * (len(rows) - 1)


def test_the_page_of_a_judged_solution_shows_its_machine_code(scaffold: Path, tmp_path: Path) -> None:
    page, saved = tmp_path / "page.html", tmp_path / "saved.html"
    assert judge(scaffold, "--html", str(page)) == 0
    text = page.read_text()
    assert "Not shown: " not in text
    assert "LDG.E" in text
    (record,) = (scaffold / "results").rglob("record.json")
    assert main(["report", str(record), "--html", str(saved)]) == 0
    assert "the command under &#39;Repeat it&#39; with --html FILE writes a page" in saved.read_text()
