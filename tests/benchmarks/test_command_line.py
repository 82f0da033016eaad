"""``python -m benchmarks``: its spelling, the output of comparisons, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.records import Benchmark
from benchmarks.runner import BenchResult
from greenfast.judge.record_io import sealed_json
from tests.benchmarks.benchmarks import operator_record, peers_record, serving_record
from tests.benchmarks.command_line import run_benchmark
from tests.cli.command_line import ROOT, files_below, run_here
from tests.judge.report.webpage.reading import read

pytestmark = pytest.mark.usefixtures("machine")

PEERS = ("peers",)
EVIDENCE = ROOT / "evidence"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A finished comparison, and its request."""
    found: dict[str, Any] = {}

    def compare(comparison: Any, request: Any, variant: Any, watcher: Any, **options: Any) -> BenchResult:
        found.clear()
        found.update(options, variant=variant and variant.name, task=request.task.config.name)
        if comparison.name == "serving":
            found.update(session=comparison.session.keywords, cells=[cell.shape.name for cell in comparison.timed])
        makes = {"operator": operator_record, "serving": serving_record}
        record = makes.get(comparison.name, peers_record)()
        for shape in dict.fromkeys(row.shape for row in record.rows):
            watcher.cell([row for row in record.rows if row.shape == shape])
        return BenchResult(record, tmp_path / "run")

    monkeypatch.setattr("benchmarks.commands.compare", compare)
    return found


def test_each_shape_is_printed_when_it_ends_and_all_in_tables(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    ran = run_benchmark(capsys, *PEERS)
    assert (ran.code, ran.err) == (0, "")
    assert asked == {"shapes": None, "grid": False, "rounds": None, "variant": "hopper", "task": "fp8_attention"}
    lines = ran.out.splitlines()
    shown = [" ".join(line.split()) for line in lines]
    first = "d64_s1024 greenfast 100.0, fa3 125.0, torch_flash 80.0 µs; greenfast / better FP8 peer 1.250x"
    assert shown[0] == first
    assert "| mission (1, 8, 512, 64) | warm | 5.500 | 11.00 | - | 9.900 | 2.000x |" in lines
    assert "Speed of greenfast / better FP8 peer: 1.000x, geometric mean over 2 shapes of the grid; worst" in ran.out
    assert "- cuDNN FP8: no module cudnn" in lines
    assert lines[-1] == str(tmp_path / "run")


def test_options_are_passed_on_and_json_is_the_record(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any]
) -> None:
    ran = run_benchmark(capsys, *PEERS, "--shapes", "small,d64_s1024", "--rounds", "9", "--json")
    assert ran.code == 0
    assert (asked["shapes"], asked["rounds"]) == (["small", "d64_s1024"], 9)
    assert msgspec.json.decode(ran.out, type=Benchmark) == peers_record()
    assert "d64_s1024" in ran.err
    run_benchmark(capsys, *PEERS, "--grid")
    assert asked["grid"]


def test_the_operator_has_host_times_and_two_ratios(capsys: pytest.CaptureFixture[str], asked: dict[str, Any]) -> None:
    ran = run_benchmark(capsys, "sdpa", "--shapes", "d128_s4096")
    assert (ran.code, asked["variant"], asked["task"]) == (0, None, "fp8_attention")
    shown = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "| torch flash | 16.0 | 15.0 |" in shown
    assert "sdpa fp8 / best bf16 1.500x; sdpa int8 / best bf16 1.200x" in shown[0]
    assert "| tiny | 1, 16, 4096, 128 | 0.06 |" in shown


def test_serving_has_its_tables_and_passes_its_options_on(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    library = tmp_path / "fa3.so"
    library.touch()
    ran = run_benchmark(capsys, "serving", "--cases", "decode,append", "--quick", "--fa3-library", library)
    assert (ran.code, asked["variant"], asked["task"], asked["rounds"]) == (0, None, "fp8_attention", 10)
    assert asked["session"]["fa3_library"] == str(library)
    assert {name.split("_")[0] for name in asked["cells"]} == {"decode", "append", "read"}
    shown = "\n".join(" ".join(line.split()) for line in ran.out.splitlines())
    assert "decode_32x8_d128_1x8192greenfast 100.0, vllm_fa3 150.0" in shown.replace(" greenfast", "greenfast")
    assert "a reduction of 1 GiB reads 4.29 TB/s" in shown
    assert "| kvcache | 14.5 | 13.0 |" in shown
    assert "- FA3 FP8: no fa3-fwd" in shown
    run_benchmark(capsys, "serving", "--rounds", "9", "--shapes", "append_64")
    assert (asked["rounds"], asked["shapes"], asked["session"]["fa3_library"]) == (9, ["append_64"], "")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("sage",), 2, "unknown benchmark 'sage'; allowed: accumulation_error, "),
        ((*PEERS, "--shapes", "big"), 2, "unknown shape of benchmarks peers 'big'; allowed: d128_s1024, "),
        ((*PEERS, "--shapes", "small", "--grid"), 2, "argument --grid: not allowed with argument --shapes"),
        ((*PEERS, "--seeds", "0"), 2, "unrecognized arguments: --seeds"),
        ((*PEERS, "--require", "build"), 2, "unrecognized arguments: --require"),
        ((*PEERS, "--rounds", "1"), 2, "argument --rounds: '1': give a whole number from 2 up"),
        (("sdpa", "--iters", "5"), 2, "unrecognized arguments: --iters 5"),
        (("sdpa",), 3, "this needs a GPU; emulated"),
        (("serving",), 3, "this needs a GPU; emulated"),
        (("serving", "--cases", "chunks"), 2, "unknown case of benchmarks serving 'chunks'; allowed: append"),
        (("serving", "--fa3-library", "no.so"), 2, "--fa3-library no.so: no such file"),
        (("parallel",), 3, "torchrun --nproc-per-node N -m benchmarks parallel"),
        (("parallel", "--cases", "1k"), 2, "unknown case of benchmarks parallel '1k'; allowed: 131k_causal, "),
        (("parallel", "--contenders", "best"), 2, "unknown contender of benchmarks parallel 'best'; allowed: alone"),
        (PEERS, 3, "this needs a GPU; emulated"),
        ((*PEERS, "--device", "none"), 3, "this needs a GPU; no GPU"),
    ],
)
def test_impossible_requests_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    ran = run_benchmark(capsys, *args, "--out", tmp_path)
    assert ran.code == code, ran
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert files_below(tmp_path) == []


def test_report_says_it_again_and_the_judge_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(sealed_json(peers_record()))
    ran = run_benchmark(capsys, "report", tmp_path)
    assert ran.code == 0
    assert ran.out.startswith("# fp8_attention: hopper, compared with other libraries\n")
    ran = run_here(capsys, "report", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert f"a record of a benchmark; python -m benchmarks report {tmp_path}/record.json reads it" in ran.err


def test_report_draws_and_writes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    ran = run_benchmark(capsys, "report", EVIDENCE / "h200/peers", "--html", page)
    assert (ran.code, ran.out, ran.err) == (0, f"{page}\n", "")
    assert "fp8_attention: hopper, compared with other libraries" in read(page.read_text()).text
    for path, code, said in (
        (tmp_path / "p.gif", 2, "p.gif: the name must end in .png or .svg"),
        (tmp_path / "none" / "p.svg", 3, "p.svg cannot be written (No such file or directory)"),
    ):
        ran = run_benchmark(capsys, "report", EVIDENCE / "h200/peers", "--plot", path)
        assert (ran.code, ran.out) == (code, "")
        assert said in ran.err


def test_help_names_every_benchmark_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_benchmark(capsys).out
    assert listed == run_benchmark(capsys, "--help").out
    assert len(listed.splitlines()) == len(BENCHMARKS) + 4
    for name in BENCHMARKS:
        ran = run_benchmark(capsys, name, "--help")
        assert ran.code == 0
        assert ran.out.startswith(f"usage: python -m benchmarks {name} ")
