"""Errors go to standard error and name what is allowed; the exit code tells whose fault it is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from greenfast.cli.main import parser
from tests.cli.command_line import assert_said, files_below, run_here
from tests.fakes import FakeDevice, install, request
from tests.judge.report.records import timing_row
from tests.judge.small_task import FAMILY, PROBLEM, loaded, write_task

pytestmark = pytest.mark.usefixtures("machine")

JUDGE = ("judge", "fp8_sdpa", "--no-quote")
LIBRARY = ("build", "--library", "--arch", "sm_90a")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("validate fp8_sdpa --candidate x", "judge fp8_sdpa --candidate x"),
        ("validate fp8_sdpa --required 1.2", "judge fp8_sdpa --speedup 1.2"),
        ("compare a b --required=1.2", "report --compare a b --speedup=1.2"),
        ("compare a/run 'b/perf_baseline.json'", "report --compare a/run b/perf_baseline.json"),
        ("history results --git", "report results --git"),
        ("warmup --head-dims 64", "build --library --head-dims 64"),
        ("bench fp8_sdpa --variant stage2", "python -m benchmarks kernel fp8_sdpa --variant stage2"),
        ("bench operator --grid", "python -m benchmarks sdpa --grid"),
        ("bench kernel fp8_sdpa", "python -m benchmarks kernel fp8_sdpa"),
        ("bench parallel", "python -m benchmarks parallel"),
        ("tasks", "list"),
        ("tasks --json", "list --json"),
        ("variants", "list fp8_sdpa"),
        ("variants --choose sm_90a fp8_attention", "list --choose sm_90a fp8_attention"),
        ("variants --json --choose sm_90a", "list fp8_sdpa --json --choose sm_90a"),
        ("variants 'my task'", "list 'my task'"),
    ],
)
def test_an_earlier_versions_command_answers_with_the_command_of_today(
    capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    ran = run_here(capsys, *shlex.split(old))
    assert (ran.code, ran.out) == (2, "")
    today = new if new.startswith("python ") else f"greenfast {new}"
    word, _, command = ran.err.removeprefix("greenfast: ").partition(" is now: ")
    assert command == f"{today}\n"
    assert word.strip("'") in old
    if today != new:
        parser().parse_args(shlex.split(new))
    else:
        assert shlex.split(new)[3] in BENCHMARKS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("judge mine.cu --against 'my other.cu'", "judge mine.cu --baseline 'my other.cu'"),
        ("judge nothing.cu --problem p.py --required 1.2", "judge nothing.cu --problem p.py --speedup 1.2"),
    ],
)
def test_a_renamed_option_is_named_and_obeyed(capsys: pytest.CaptureFixture[str], old: str, new: str) -> None:
    ran, today = run_here(capsys, *shlex.split(old)), run_here(capsys, *shlex.split(new))
    notice, _, rest = ran.err.partition("\n")
    assert notice.endswith(f" is now: greenfast {new}")
    assert (ran.code, ran.out, rest) == (today.code, today.out, today.err)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        # names
        (
            ("judge", "fp9"),
            "greenfast: unknown task or solution 'fp9'; allowed: fp8_attention, fp8_quantize, fp8_sdpa, "
            "sdpa_backward, serving_attention, the folder of a task, the path of a solution\n",
        ),
        (("list", "fp9"), "unknown task 'fp9'; allowed: "),
        (("list", "fp8_sdpa", "--choose", "sm_89"), "task fp8_sdpa are chosen by name: scalar"),
        (("list", "fp8_attention", "--shapes", "small"), "--format and --shapes are for --choose"),
        (("list", "--choose", "sm_89"), "--choose: name the task"),
        (("report",), "give a run's folder or its record.json, a folder of runs, or --schema"),
        (("report", "a", "--git"), "--git is for a folder of runs"),
        (("report", "a", "--speedup", "1.1"), "--speedup is for --compare"),
        (("report", "evidence", "--short"), "--short is for the report of a run"),
        (("report", "--compare", "a", "b", "--html", "x"), "--html is for the report of a run or a folder of runs"),
        (("report", "--compare", "a"), "--compare: give two runs, a baseline and a candidate; these are 1"),
        (("report", "--compare", "--table", "a", "b"), "not allowed with argument"),
        (("build", "fp9"), "unknown task 'fp9'; allowed: "),
        (("build",), "name a task, or --library for the kernels of calls in PyTorch"),
        (("build", "fp8_sdpa", "--head-dims", "64"), "--head-dims is for --library"),
        (("build", "fp8_sdpa", "--library"), "--library: leave out the task"),
        ((*JUDGE, "--candidate", "stage9"), "unknown variant of task fp8_sdpa 'stage9'; allowed: "),
        ((*JUDGE, "--baseline", "stage9"), "unknown baseline 'stage9'; allowed: kv_lut, scalar, "),
        (("build", "fp8_sdpa", "--variants", "stage1,stage9"), "unknown variant of task fp8_sdpa 'stage9'"),
        ((*JUDGE, "--shapes", "small,big"), "unknown shape of task fp8_sdpa 'big'; allowed: b16_h8_s512_d64, "),
        (("build", "fp8_sdpa", "--shapes", "big"), "unknown shape of task fp8_sdpa 'big'"),
        ((*JUDGE, "--format", "fp4"), "unknown format of task fp8_sdpa 'fp4'; allowed: e4m3, int8"),
        (("build", "fp8_sdpa", "--formats", "fp4"), "unknown format of task fp8_sdpa 'fp4'; allowed: e4m3, int8"),
        ((*JUDGE, "--arch", "sm_75"), "unknown target 'sm_75'; allowed: sm_100, sm_120, sm_80, "),
        (("build", "fp8_sdpa", "--arch", "sm_89,9.9"), "unknown target '9.9'; allowed: "),
        ((*JUDGE, "--require", "speed"), "--require speed: allowed are build, resources, correctness, performance, "),
        (("examine", "fp8_sdpa"), "invalid choice: 'examine'"),
        ((*JUDGE, "--fast"), "unrecognized arguments: --fast"),
        ((), "the following arguments are required: VERB"),
        # toggles
        (
            (*JUDGE, "--candidate", "USE_FUSED_SOFTMAX_PV=1,USE_WMMA_PV=0"),
            "USE_FUSED_SOFTMAX_PV=1 needs USE_WMMA_PV=1: ",
        ),
        (
            ("build", "fp8_sdpa", "--variants", "USE_XOR_SWIZZLE=1,USE_WMMA_QK=0"),
            "USE_XOR_SWIZZLE=1 needs USE_WMMA_QK=1",
        ),
        # numbers
        ((*JUDGE, "--shapes", "small,small"), "shapes b1_h1_s32_d64, b1_h1_s32_d64: one is named twice"),
        ((*JUDGE, "--shapes", ","), "argument --shapes: ',' names nothing"),
        ((*JUDGE, "--seeds", "0,1,0"), "seeds [0, 1, 0]: different whole numbers from 0 up are needed"),
        ((*JUDGE, "--seeds=-1"), "seeds [-1]: different whole numbers from 0 up are needed"),
        ((*JUDGE, "--seeds", "a"), "argument --seeds: 'a': give whole numbers separated by commas"),
        ((*JUDGE, "--seeds", "1.5"), "argument --seeds: '1.5': give whole numbers"),
        ((*JUDGE, "--iters=-5"), "timed_iters: -5 is not at least 1"),
        ((*JUDGE, "--iters", "0"), "timed_iters: 0 is not at least 1"),
        ((*JUDGE, "--iters", "many"), "argument --iters: invalid int value: 'many'"),
        ((*JUDGE, "--warmup", "0"), "warmup_iters: 0 is not at least 1"),
        ((*JUDGE, "--processes", "0"), "processes: 0 is not at least 1"),
        ((*JUDGE, "--timeout", "0"), "--timeout 0: give a number of seconds above 0"),
        ((*JUDGE, "--timeout", "nan"), "--timeout nan: give a number of seconds above 0"),
        ((*JUDGE, "--timeout", "inf"), "--timeout inf: give a number of seconds above 0"),
        ((*JUDGE, "--speedup", "0.15"), "argument --speedup: '0.15': give a ratio from 1 up, such as 1.15"),
        (("judge", "fp8_sdpa", "--quote", "none"), "greenfast: none: cannot be read (No such file or directory)"),
        (
            ("judge", "fp8_sdpa", "--quote", str(Path(__file__).parent)),
            "tests/cli: no record.json there holds a comparison measured on a GPU",
        ),
        ((*JUDGE, "--quote", "a", "--no-quote"), "not allowed with argument"),
        (("build", "--library", "--arch", "sm_75"), "unknown target 'sm_75'; allowed: sm_100, sm_120, sm_80, "),
        ((*LIBRARY, "--head-dims", "100"), "greenfast: head dim 100: the kernels take multiples of 8 up to 256"),
        ((*LIBRARY, "--head-dims", "d64"), "argument --head-dims: 'd64': give whole numbers separated by commas"),
        ((*LIBRARY, "--dtypes", "float32"), "unknown dtype 'float32'; allowed: bfloat16, float16"),
        ((*LIBRARY, "--precisions", "fp4"), "unknown precision 'fp4'; allowed: fp8, int8"),
        ((*LIBRARY, "--causal", "maybe"), "argument --causal: invalid choice: 'maybe'"),
        ((*LIBRARY, "--lengths", "128,0"), "length 0: the kernels take lengths from 1 to 2147483647"),
        ((*LIBRARY, "--lengths", ","), "argument --lengths: ',' names nothing"),
        (("build", "--library", "--arch", "sm_80"), "compute capability 8.9 and up, this is sm_80; "),
        ((*JUDGE, "--device", "gpu"), "device 'gpu': allowed are auto, none"),
        ((*JUDGE, "--device=-1"), "device '-1': allowed are auto, none"),
        ((*JUDGE, "--device", "²"), "device '²': allowed are auto, none"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    out = ("--out", str(tmp_path)) if args[:1] == ("judge",) else ()
    assert_said(run_here(capsys, *args, *out), 2, said)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("verb", ["judge", "profile"])
def test_a_missing_gpu_is_a_machine_error(capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str) -> None:
    ran = run_here(capsys, verb, "fp8_sdpa", "--device", "99", "--out", tmp_path)
    assert_said(ran, 3, "device 99: the driver shows 0 GPU(s); use --device none to run without one")


def test_a_profile_without_a_gpu_is_a_machine_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert_said(run_here(capsys, "profile", "fp8_sdpa"), 3, "a profile needs a GPU; emulated")
    assert_said(run_here(capsys, "profile", "fp8_sdpa", "--device", "none"), 3, "a profile needs a GPU; no GPU")


def test_a_results_folder_that_cannot_be_made_is_a_machine_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ran = run_here(capsys, *JUDGE, "--out", tmp_path / "file" / "results")
    assert_said(ran, 3, "file/results/fp8_wmma_baseline cannot be written (Not a directory); choose another with --out")


def perf_file(folder: Path, **changes: Any) -> Path:
    """A perf_baseline.json of 10 microseconds."""
    row = json.loads(json.dumps({f: getattr(timing_row(), f) for f in timing_row().__struct_fields__}))
    row |= {"p50_us": 10.0, "p90_us": 10.0, "block_medians_us": [[10.0] * len(x) for x in row["block_medians_us"]]}
    content = {"task": "fp8_sdpa", "format": "e4m3", "variant": "v", "results": [row], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "perf_baseline.json").write_text(json.dumps(content))
    return folder / "perf_baseline.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"results": [], "pending": "no GPU"}, "perf_baseline.json: holds no timings (no GPU)"),
        ({"task": "fp8_quantize"}, "the runs differ in task: fp8_sdpa ("),
        ({"format": "int8"}, "the runs differ in format: e4m3 ("),
        ({"results": 5}, "perf_baseline.json: not a perf_baseline.json as greenfast writes it: "),
    ],
)
def test_runs_that_cannot_be_compared_say_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    files = perf_file(tmp_path / "a"), perf_file(tmp_path / "b", **changes)
    assert_said(run_here(capsys, "report", "--compare", *files, "--out", tmp_path / "COMPARE.md"), 2, said)
    assert not (tmp_path / "COMPARE.md").exists()


def test_a_comparison_that_cannot_be_written_is_a_machine_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = perf_file(tmp_path / "a").parent
    ran = run_here(capsys, "report", "--compare", run, run, "--out", run / "perf_baseline.json" / "sub" / "COMPARE.md")
    assert_said(ran, 3, "COMPARE.md cannot be written (Not a directory)")


def test_a_missing_run_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_said(run_here(capsys, "report", tmp_path / "none"), 2, "none: cannot be read (No such file or directory)")
    assert_said(
        run_here(capsys, "report", "--compare", tmp_path, tmp_path),
        2,
        "perf_baseline.json: cannot be read (No such file",
    )
    (tmp_path / "record.json").write_text("{}")
    assert_said(
        run_here(capsys, "report", tmp_path), 2, "record.json: not a record as greenfast writes it: Object miss"
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"text": "{"}, "config_forward.json: Input data was truncated"),
        ({"seeds": "0"}, "config_forward.json: Expected `array`, got `str` - at `$.seeds`"),
        ({"shapes": []}, "Expected `array` of length >= 1 - at `$.shapes`"),
        ({"shapes": [{"name": "tiny", "dims": {"N": 1}}] * 2}, "shapes: 'tiny' appears more than once"),
        ({"speed": 1}, "Object contains unknown field `speed`"),
        ({"family": None}, "family.py: no such file"),
        ({"problem": "raise ValueError('no luck')"}, "problem 'problem.py' cannot be imported: ValueError: no luck"),
        ({"problem": PROBLEM.replace("def decode", "def undecode")}, "problem 'problem.py' has no function decode"),
    ],
)
def test_an_invalid_task_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    folder = write_task(tmp_path / "mine", **files)
    ran = run_here(capsys, "judge", folder, "--out", tmp_path / "out")
    assert_said(ran, 2, said)
    assert str(folder) in ran.err
    assert not (tmp_path / "out").exists()


def test_a_task_folder_without_a_config_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_said(run_here(capsys, "judge", tmp_path), 2, "holds no config_forward.json of a task and no solution.json")


def test_a_broken_task_is_listed_with_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_task(tmp_path / "mine", seeds=[])
    monkeypatch.setenv("GREENFAST_TASKS", str(tmp_path))
    ran = run_here(capsys, "list", "--json")
    assert ran.code == 2
    descriptions = {row["name"]: row["description"] for row in json.loads(ran.out)}
    assert "Expected `array` of length >= 1 - at `$.seeds`" in descriptions["mine"]
    assert "fp8_sdpa" in descriptions


def test_a_kernel_that_does_not_compile_fails_build_with_file_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "mine", family=FAMILY.replace("int i =", "int j ="))
    ran = run_here(capsys, "judge", folder, "--out", tmp_path / "out")
    assert ran.code == 11
    assert ran.out.startswith("BUILD       FAIL")
    assert 'twice.cu(3): error: identifier "i" is undefined' in ran.out
    assert "DEFER" in ran.out
    ran = run_here(capsys, "build", folder)
    assert_said(ran, 1, 'twice.cu(3): error: identifier "i" is undefined')


@pytest.mark.usefixtures("crashing_compiler")
def test_a_kernel_that_crashes_the_compiler_fails_build(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    family = FAMILY.replace("int i =", "// crash\\n  int i =")
    folder = write_task(tmp_path / "mine", family=family)
    said = "twice.cu: kernel 'twice': the compiler, NVRTC "
    ran = run_here(capsys, "judge", folder, "--out", tmp_path / "out")
    assert (ran.code, ran.err) == (11, "")
    assert ran.out.startswith("BUILD       FAIL")
    assert said in ran.out
    ran = run_here(capsys, "build", folder)
    assert_said(ran, 1, said)
    assert "crashed (SIGSEGV) while it compiled for sm_89" in ran.err


def test_a_failing_task_module_is_distinguished_from_greenfast(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A bug in a task's module: its author needs the lines of it, and no others."""
    folder = write_task(tmp_path / "mine", family=FAMILY.replace("    source =", "    1 / 0\n    source ="))
    ran = run_here(capsys, "judge", folder, "--out", tmp_path / "out")
    assert ran.code == 5
    assert "the solution ended without a verdict: it raised ZeroDivisionError: division by zero" in ran.err
    assert "family.py, line 6, in kernel: 1 / 0" in ran.err
    assert files_below(tmp_path / "out") == []


@pytest.mark.parametrize("function", ["make_case", "references", "decode"])
def test_an_exception_of_a_problem_is_its_authors(
    function: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = PROBLEM.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"def {function}(")) + 1
    problem = "\n".join([*lines[:at], "    {}['absent']", *lines[at:]])
    folder = write_task(tmp_path / "mine", problem=problem)
    ran = run_here(capsys, "judge", folder, "--out", tmp_path / "out")
    assert ran.code == 2
    assert f"problem.py:{at + 1}, in {function}: KeyError: 'absent' (at: {{}}['absent'])" in ran.err
    assert "Traceback" not in ran.err
    assert files_below(tmp_path / "out") == []


def test_an_input_with_nan_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = PROBLEM.replace("return np.random.default_rng", "return np.nan * np.random.default_rng")
    task = loaded(tmp_path / "mine", problem=problem)
    asked = request(tmp_path / "out", task=task, shapes=("tiny",), fmt="float")
    install(monkeypatch, FakeDevice(asked))
    ran = run_here(capsys, "judge", tmp_path / "mine", "--out", tmp_path / "out")
    assert ran.code == 2
    assert re.search(r"problem.py: references of N=5, seed \d+: full\[0\] is nan; inputs must not make NaN", ran.err)
    assert "Traceback" not in ran.err
    assert files_below(tmp_path / "out") == []


@pytest.mark.parametrize("device", ["emulator", "none"])
def test_dims_beyond_all_memory_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str) -> None:
    folder = write_task(tmp_path / "mine", shapes=[{"name": "tiny", "dims": {"N": 2**40}}])
    ran = run_here(capsys, "judge", folder, "--device", device, "--out", tmp_path / "out")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert re.search(
        r"(problem|family)\.py: .*its dimensions are too large: .* \((problem|family)\.py, line \d+\)$", ran.err
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("(256, 1, 1)", "(2048, 1, 1)"), "its block is 2048 x 1 x 1; extents are at least 1, and at most 1024"),
        (("(256, 1, 1)", "(0, 1, 1)"), "its block is 0 x 1 x 1"),
        (("(256, 1, 1)", "(256, 1, 1), 300000"), "a block asks for 300000 bytes of shared memory"),
        (("// 256), 1, 1)", "// 256), 70000, 1)"), "its grid is 1 x 70000 x 1"),
    ],
)
@pytest.mark.usefixtures("emulator_here", "families_here")
@pytest.mark.parametrize("device", ["emulator", "none"])
def test_a_launch_that_no_gpu_takes_is_the_kernels_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: tuple[str, str], said: str, device: str
) -> None:
    folder = write_task(tmp_path / "mine", family=FAMILY.replace(*change))
    ran = run_here(capsys, "judge", folder, "--device", device, "--out", tmp_path / "out")
    assert (ran.code, ran.err) == (11, "")
    assert ran.out.startswith("BUILD       FAIL")
    assert f"fast cannot be launched at tiny: {said}" in ran.out
    assert "DEFER" in ran.out
