"""``greenfast bench``: its spelling, the output of comparisons, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.bench.record_schema import Benchmark
from greenfast.bench.runner import BenchResult
from greenfast.cli.main import spelled
from greenfast.judge.digest import sealed_json
from tests.bench.benchmarks import operator_record, peers_record, serving_record
from tests.cli.command_line import files_below, run_here

pytestmark = pytest.mark.usefixtures("machine")

PEERS = ("bench", "peers")


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

    monkeypatch.setattr("greenfast.cli.bench.compare", compare)
    return found


def test_each_shape_is_printed_when_it_ends_and_all_in_tables(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    ran = run_here(capsys, *PEERS)
    assert (ran.code, ran.err) == (0, "")
    assert asked == {"shapes": None, "grid": False, "rounds": None, "variant": "hopper", "task": "fp8_attention"}
    lines = ran.out.splitlines()
    shown = [" ".join(line.split()) for line in lines]
    first = "d64_s1024 greenfast 100.0, fa3 125.0, torch_flash 80.0 µs; greenfast / better FP8 peer 1.250x"
    assert shown[0] == first
    assert "mission 5.500 µs 18182 11.00 µs 9091 - 9.900 µs 10101 2.000x" in shown
    assert "speed of greenfast / better FP8 peer: 1.000x, geometric mean over 2 shapes of the grid; worst" in ran.out
    assert "  - cuDNN FP8: no module cudnn" in lines
    assert lines[-1] == str(tmp_path / "run")


def test_options_are_passed_on_and_json_is_the_record(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any]
) -> None:
    ran = run_here(capsys, *PEERS, "--shapes", "small,d64_s1024", "--rounds", "9", "--json")
    assert ran.code == 0
    assert (asked["shapes"], asked["rounds"]) == (["small", "d64_s1024"], 9)
    assert msgspec.json.decode(ran.out, type=Benchmark) == peers_record()
    assert "d64_s1024" in ran.err
    run_here(capsys, *PEERS, "--grid")
    assert asked["grid"]


def test_the_operator_has_host_times_and_two_ratios(capsys: pytest.CaptureFixture[str], asked: dict[str, Any]) -> None:
    ran = run_here(capsys, "bench", "operator", "--shapes", "d128_s4096")
    assert (ran.code, asked["variant"], asked["task"]) == (0, None, "fp8_attention")
    shown = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "torch_flash 16.0 15.0" in shown
    assert "sdpa fp8 / best bf16 1.500x; sdpa int8 / best bf16 1.200x" in shown[0]
    assert "tiny sdpa_fp8 0.06 -" in "\n".join(shown)


def test_serving_has_its_tables_and_passes_its_options_on(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    library = tmp_path / "fa3.so"
    library.touch()
    ran = run_here(capsys, "bench", "serving", "--cases", "decode,append", "--quick", "--fa3-library", library)
    assert (ran.code, asked["variant"], asked["task"], asked["rounds"]) == (0, None, "fp8_attention", 10)
    assert asked["session"]["fa3_library"] == str(library)
    assert {name.split("_")[0] for name in asked["cells"]} == {"decode", "append", "read"}
    shown = "\n".join(" ".join(line.split()) for line in ran.out.splitlines())
    assert "decode_32x8_d128_1x8192greenfast 100.0, vllm_fa3 150.0" in shown.replace(" greenfast", "greenfast")
    assert "a reduction of 1 GiB reads 4.29 TB/s" in shown
    assert "kvcache 14.5 13.0" in shown
    assert "- FA3 FP8: no fa3-fwd" in shown
    run_here(capsys, "bench", "serving", "--rounds", "9", "--shapes", "append_64")
    assert (asked["rounds"], asked["shapes"], asked["session"]["fa3_library"]) == (9, ["append_64"], "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bench fp8_sdpa --shapes small", "bench kernel fp8_sdpa --shapes small"),
        ("bench --variant auto fp8_sdpa", "bench kernel --variant auto fp8_sdpa"),
        ("bench fp8_attention --peers --grid", "bench peers fp8_attention --grid"),
        ("bench --peers fp8_attention --rounds 9", "bench peers fp8_attention --rounds 9"),
        ("bench --operator --json", "bench operator --json"),
        ("bench --out results --operator", "bench operator --out results"),
        ("bench peers --grid", "bench peers --grid"),
        ("bench kernel fp8_sdpa", "bench kernel fp8_sdpa"),
        ("bench --help", "bench --help"),
        ("bench", "bench"),
        ("report --peers", "report --peers"),
    ],
)
def test_old_spellings_keep_working(old: str, new: str) -> None:
    assert spelled(old.split()) == new.split()


def test_old_spellings_reach_what_they_mean(capsys: pytest.CaptureFixture[str], asked: dict[str, Any]) -> None:
    assert run_here(capsys, "bench", "fp8_attention", "--peers", "--grid").code == 0
    assert asked["grid"]
    assert run_here(capsys, "bench", "--operator").code == 0
    assert asked["variant"] is None


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("bench",), 2, "the following arguments are required: task"),
        (("bench", "peers", "fp8_sdpa"), 2, "task fp8_sdpa names no peers to be compared with; fp8_attention does"),
        ((*PEERS, "--shapes", "big"), 2, "unknown shape of bench peers 'big'; allowed: d128_s1024, "),
        ((*PEERS, "--shapes", "small", "--grid"), 2, "argument --grid: not allowed with argument --shapes"),
        ((*PEERS, "--seeds", "0"), 2, "unrecognized arguments: --seeds"),
        ((*PEERS, "--require", "build"), 2, "unrecognized arguments: --require"),
        ((*PEERS, "--rounds", "1"), 2, "argument --rounds: '1': give a whole number from 2 up"),
        (("bench", "fp8_attention", "--grid"), 2, "unrecognized arguments: --grid"),
        (("bench", "fp8_sdpa", "--operator"), 2, "unrecognized arguments: fp8_sdpa"),
        (("bench", "operator", "--iters", "5"), 2, "unrecognized arguments: --iters 5"),
        (("bench", "operator"), 3, "this needs a GPU; emulated"),
        (("bench", "serving"), 3, "this needs a GPU; emulated"),
        (("bench", "serving", "--cases", "chunks"), 2, "unknown case of bench serving 'chunks'; allowed: append"),
        (("bench", "serving", "--fa3-library", "no.so"), 2, "--fa3-library no.so: no such file"),
        (("bench", "parallel"), 3, "torchrun --nproc-per-node N -m greenfast bench parallel"),
        (("bench", "parallel", "--cases", "1k"), 2, "unknown case of bench parallel '1k'; allowed: 131k_causal, "),
        (
            ("bench", "parallel", "--contenders", "best"),
            2,
            "unknown contender of bench parallel 'best'; allowed: alone",
        ),
        (PEERS, 3, "this needs a GPU; emulated"),
        ((*PEERS, "--device", "none"), 3, "this needs a GPU; no GPU"),
    ],
)
def test_impossible_requests_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    ran = run_here(capsys, *args, "--out", tmp_path)
    assert ran.code == code, ran
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert files_below(tmp_path) == []


def test_report_says_it_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(sealed_json(peers_record()))
    ran = run_here(capsys, "report", tmp_path)
    assert ran.code == 0
    assert ran.out.startswith("# fp8_attention: hopper, compared with other libraries\n")


def test_bench_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capsys, "bench")
    assert ran.code == 2
    assert "the following arguments are required: kernel|peers|operator|routing|serving|parallel" in ran.err
