"""The mission's four commands, verbatim, on a machine without a GPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.command_line import ROOT, Ran, run_command
from tests.judge.report.records import timing_row

pytestmark = pytest.mark.usefixtures("machine")

RUNNER = ("python", "-m", "tasks.fp8_sdpa_stage_c_wmma.runner")
FIRST = (*RUNNER, "--shapes", "small,mission", "--seeds", "0,1,2", "--iters", "100")
SECOND = (*RUNNER, "--shapes", "mission", "--seeds", "0", "--iters", "500")


def build_of(ran: Ran) -> dict[str, Any]:
    """The ``build`` of the run whose folder was printed last."""
    folder = Path(ran.out.splitlines()[-1])
    build: dict[str, Any] = json.loads((folder / "build_meta.json").read_text())["build"]
    return build


def assert_emulated(ran: Ran) -> None:
    """Without a GPU the emulator decides everything but time."""
    assert (ran.code, ran.err) == (0, "")
    statuses = {line.split()[0]: line.split()[1] for line in ran.out.splitlines() if line[:1].isupper()}
    assert statuses == {"BUILD": "PASS", "RESOURCES": "PASS", "CORRECTNESS": "PASS", "PERFORMANCE": "PENDING"}


@pytest.mark.parametrize("more", [("--shapes", "small", "--seeds", "0"), pytest.param((), marks=pytest.mark.slow)])
def test_the_first_command(more: tuple[str, ...], tmp_path: Path) -> None:
    ran = run_command(*FIRST, *more, "--out", tmp_path, USE_CP_ASYNC="1", USE_WMMA_PV="1")
    assert_emulated(ran)
    build = build_of(ran)
    assert (build["USE_CP_ASYNC"], build["USE_WMMA_PV"], build["arch"]) == (1, 1, "sm_89")
    assert Path(ran.out.splitlines()[-1]).parent == tmp_path / "fp8_wmma_baseline"


@pytest.mark.slow
def test_the_second_command(tmp_path: Path) -> None:
    ran = run_command(*SECOND, "--out", tmp_path, USE_CP_ASYNC="0")
    assert_emulated(ran)
    assert_direct_loads(build_of(ran))


def assert_direct_loads(build: dict[str, Any]) -> None:
    assert (build["USE_CP_ASYNC"], build["USE_WMMA_PV"]) == (0, 1)  # the toggle, and a default
    (kernel,) = build["kernels"]
    assert kernel["machine_code"]["cp_async"] == 0


def run_door(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, **variables: str) -> Ran:
    """The second command on a small shape and in this process, which saves the imports."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["runner.py", *SECOND[3:], "--shapes", "small", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(RUNNER[2], run_name="__main__")
    assert isinstance(end.value.code, int)
    return Ran(end.value.code, *capsys.readouterr())


def test_toggles_and_target_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = run_door(monkeypatch, capsys, tmp_path, USE_CP_ASYNC="0", TORCH_CUDA_ARCH_LIST="9.0a")
    assert_emulated(ran)
    assert build_of(ran)["arch"] == "sm_90a"
    assert_direct_loads(build_of(ran))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"USE_CP_ASYNC": "yes"}, "USE_CP_ASYNC='yes': allowed values are [0, 1]"),
        ({"USE_FUSED_SOFTMAX_PV": "3"}, "USE_FUSED_SOFTMAX_PV=3: allowed values are [0, 1, 2]"),
        ({"TORCH_CUDA_ARCH_LIST": "7.5"}, "unknown target '7.5'; allowed: sm_100, "),
    ],
)
def test_a_wrong_value_in_the_environment_is_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variables: dict[str, str],
    said: str,
) -> None:
    ran = run_door(monkeypatch, capsys, tmp_path, **variables)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert list(tmp_path.iterdir()) == []


def saved(folder: Path, variant: str, us: float, shape: str = "b1_h8_s512_d64") -> Path:
    """A perf_baseline.json as a run writes it, with made-up timings."""
    rows = [timing_row("mission", seed, us, cache=cache) for seed in (0, 1, 2) for cache in ("warm", "cold")]
    results = [{**msgspec.to_builtins(row), **row.dims, "shape": shape} for row in rows]
    content = {"task": "fp8_sdpa", "variant": variant, "format": "e4m3", "results": results, "pending": None}
    folder.mkdir()
    (folder / "perf_baseline.json").write_text(json.dumps(content))
    return folder / "perf_baseline.json"


def test_the_third_command(tmp_path: Path) -> None:
    """Also from a run before shapes got their names."""
    baseline, candidate = saved(tmp_path / "a", "stage1", 1200.8, "mission"), saved(tmp_path / "b", "stage2", 656.4)
    ran = run_command("python", "scripts/compare_results.py", baseline, candidate, "--out", tmp_path / "COMPARE.md")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (tmp_path / "COMPARE.md").read_text()
    assert ran.out.count("| b1_h8_s512_d64 | B=1 H=8 S=512 D=64 |") == 6
    assert ran.out.count("(geometric mean of 3): 1.829x, nothing required") == 2


def profile(tmp_path: Path, *args: str) -> Ran:
    """Run scripts/profile_ncu.sh; if the checkout has no virtual environment, its python3 is this one."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return run_command(ROOT / "scripts" / "profile_ncu.sh", *args, PATH=f"{tmp_path}:/usr/bin:/bin")


def test_the_fourth_command_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    ran = profile(tmp_path, "mission", "0", "3")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "greenfast: a profile needs a GPU; emulated: PTX emulator cannot measure time\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "usage: scripts/profile_ncu.sh SHAPE [SEED [LAUNCHES]]"),
        (("mission", "0", "3", "4"), "usage: scripts/profile_ncu.sh SHAPE"),
    ],
)
def test_the_fourth_command_with_other_words_is_2(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    ran = profile(tmp_path, *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
