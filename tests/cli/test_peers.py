"""``greenfast bench TASK --peers``: what is printed, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.bench.peers import PeersOutcome
from greenfast.judge.record import PeersRecord
from tests.cli.command_line import files_below, run_here
from tests.judge.report.peer_records import CONTENDERS, peers_record, rows

pytestmark = pytest.mark.usefixtures("machine")

PEERS = ("bench", "fp8_attention", "--peers")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A comparison that has been made, and what it was asked for."""
    found: dict[str, Any] = {}

    def compare(request: Any, variant: Any, observer: Any, **options: Any) -> PeersOutcome:
        found.update(options, variant=variant.name)
        shapes = dict.fromkeys(row.shape for row in rows())
        for shape in shapes:
            observer.cell([row for row in rows() if row.shape == shape], CONTENDERS)
        return PeersOutcome(peers_record(), tmp_path / "run")

    monkeypatch.setattr("greenfast.cli.peers.compare_with_peers", compare)
    return found


def test_each_shape_is_said_as_it_ends_and_all_are_tables(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any], tmp_path: Path
) -> None:
    ran = run_here(capsys, *PEERS)
    assert (ran.code, ran.err) == (0, "")
    assert asked == {"shapes": None, "grid": False, "rounds": None, "variant": "hopper"}
    lines = ran.out.splitlines()
    shown = [" ".join(line.split()) for line in lines]
    first = "d64_s1024 greenfast 100.0, fa3 125.0, torch_flash 80.0 µs; greenfast / better FP8 peer 1.250x"
    assert shown[0] == first
    assert "mission 5.500 µs 18182 11.00 µs 9091 - 9.900 µs 10101 2.000x" in shown
    assert "1.000x the speed of the better FP8 peer, geometric mean over 2 shapes of the grid; worst" in ran.out
    assert "  - cuDNN FP8: no module cudnn" in lines
    assert lines[-1] == str(tmp_path / "run")


def test_options_are_passed_on_and_json_is_the_record(
    capsys: pytest.CaptureFixture[str], asked: dict[str, Any]
) -> None:
    ran = run_here(capsys, *PEERS, "--shapes", "small,d64_s1024", "--rounds", "9", "--json")
    assert ran.code == 0
    assert (asked["shapes"], asked["rounds"]) == (["small", "d64_s1024"], 9)
    assert msgspec.json.decode(ran.out, type=PeersRecord) == peers_record()
    assert "d64_s1024" in ran.err
    run_here(capsys, *PEERS, "--grid")
    assert asked["grid"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("bench", "fp8_sdpa", "--peers"), 2, "task fp8_sdpa names no peers to be measured beside; fp8_attention does"),
        ((*PEERS, "--shapes", "big"), 2, "unknown shape of the comparison with peers 'big'; allowed: d128_s1024, "),
        ((*PEERS, "--shapes", "small", "--grid"), 2, "--shapes and --grid: give one of them"),
        ((*PEERS, "--seeds", "0"), 2, "--seeds is not for --peers, which takes --shapes or --grid, --rounds, --json"),
        ((*PEERS, "--iters", "5"), 2, "--iters is not for --peers"),
        ((*PEERS, "--require", "build"), 2, "--require is not for --peers"),
        ((*PEERS, "--rounds", "1"), 2, "argument --rounds: '1': give a whole number from 2 up"),
        ((*PEERS, "--variant", "hopper"), 2, "not allowed with argument"),
        (("bench", "fp8_attention", "--grid"), 2, "--grid and --rounds are for --peers"),
        (("bench", "fp8_attention", "--rounds", "9"), 2, "--grid and --rounds are for --peers"),
        (PEERS, 3, "this needs a GPU; emulated"),
        ((*PEERS, "--device", "none"), 3, "this needs a GPU; no GPU"),
    ],
)
def test_what_cannot_be_done_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    ran = run_here(capsys, *args, "--out", tmp_path)
    assert ran.code == code, ran
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert files_below(tmp_path) == []


def test_report_says_it_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(msgspec.json.encode(peers_record()))
    ran = run_here(capsys, "report", tmp_path)
    assert ran.code == 0
    assert ran.out.startswith("# fp8_attention: hopper beside its peers\n")
