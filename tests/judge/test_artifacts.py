"""What a run leaves behind: the files, and in each the fields that the mission lists and exactly these in addition."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.judge.record_io import PerformanceFile, read_record
from greenfast.judge.report.markdown import report as render
from greenfast.judge.report.plots import save_plot
from greenfast.judge.validate import Outcome, validate
from tests.fakes import L4, Behaviour, FakeDevice, Script, Watcher, install, request, rungs, shipped
from tests.judge import behaviours

MISSION_TOGGLES = {
    *("USE_CP_ASYNC", "USE_WMMA_PV", "USE_FUSED_SOFTMAX_PV", "USE_XOR_SWIZZLE", "USE_THREE_STAGE_PIPE"),
    *("USE_KV_LUT", "DEBUG_PRINT"),
}
SHAPE = {"shape", "B", "H", "S", "D", "seed"}
ERRORS = {"max_abs_err", "mean_abs_err", "max_rel_err", "pct_bad"}
MISSION_GATES = {"max_abs_err_pass", "mean_abs_err_pass", "pct_bad_pass"}
BLOCKS = {"block_medians_us", "block_mhz", "block_watts", "floor", "function_us", "resolution_us"}
TIMES = {"warmup_iters", "timed_iters", "p50_us", "p90_us", "mean_us", "std_us", "iters_per_sec"}


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, behave: Behaviour | None = None, *, gpu: bool = True) -> Outcome:
    asked = request(folder / "results", device=L4 if gpu else None)
    candidate = Script(us=10.0) if behave is None else Script(us=10.0, behave=behave)
    install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": candidate}))
    return validate(asked, *rungs(asked, "stage1", "stage2"), Watcher(), profile=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_files_of_a_run_are_these(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("greenfast.judge.validate.save_plot", save_plot)
    outcome = run(monkeypatch, tmp_path)
    assert (outcome.folder / "performance.png").read_bytes().startswith(b"\x89PNG")
    assert re.fullmatch(r"\d{8}-\d{6}", outcome.folder.name)
    assert outcome.folder.parent == tmp_path / "results" / "fp8_wmma_baseline"
    side = {"build_meta.json", "correctness_summary.json", "perf_baseline.json"}
    files = {str(p.relative_to(tmp_path / "results")) for p in (tmp_path / "results").rglob("*") if p.is_file()}
    run_folder = f"fp8_wmma_baseline/{outcome.folder.name}"
    assert files == {
        "COMPARE.md",
        *(f"{run_folder}/{name}" for name in side | {"record.json", "VALIDATION_REPORT.md", "performance.png"}),
        *(f"{run_folder}/baseline/{name}" for name in side),
    }


def test_the_record_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = run(monkeypatch, tmp_path)
    again = read_record(outcome.folder)
    assert again == outcome.record
    report = (outcome.folder / "VALIDATION_REPORT.md").read_text()
    assert report == render(again, plot="performance.png")
    assert report.startswith("# fp8_sdpa: stage1 -> stage2, MERGE\n")


@pytest.mark.parametrize(("sub", "variant"), [(".", "stage2"), ("baseline", "stage1")])
def test_build_meta(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sub: str, variant: str) -> None:
    outcome = run(monkeypatch, tmp_path)
    meta = read(outcome.folder / sub / "build_meta.json")
    assert set(meta) == {"timestamp", "task", "variant", "format", "build", "git", "device", "environment"}
    assert meta["variant"] == variant
    assert meta["timestamp"] == outcome.record.created
    toggles = shipped("fp8_sdpa").config.variant(variant).values
    assert set(toggles) >= MISSION_TOGGLES
    assert set(meta["build"]) == set(toggles) | {"arch", "flags", "compiler", "kernels"}
    assert {name: meta["build"][name] for name in toggles} == toggles
    assert meta["build"]["USE_WMMA_PV"] == int(variant == "stage2")
    assert meta["build"]["arch"] == "sm_89"
    assert any("sm_89" in flag for flag in meta["build"]["flags"])
    assert meta["build"]["compiler"].startswith("NVRTC ")
    (kernel,) = meta["build"]["kernels"]
    assert set(kernel) == {
        *("dims", "entry", "kernel_hash", "code_hash", "machine_code"),
        *("registers", "shared_memory_bytes", "static_smem_bytes", "dynamic_smem_bytes", "stack_bytes"),
        *("spill_store_bytes", "spill_load_bytes"),
    }
    assert kernel["registers"] > 16
    assert kernel["shared_memory_bytes"] == kernel["static_smem_bytes"] + kernel["dynamic_smem_bytes"] > 0
    assert set(meta["git"]) == {"sha", "branch", "dirty"}
    assert {"name", "compute_capability", "cuda_version", "driver"} <= set(meta["device"])
    assert meta["device"]["name"] == "NVIDIA L4"
    assert {"python", "torch", "numpy"} <= set(meta["environment"])


@pytest.mark.parametrize(
    "behave", [None, behaviours.all_zeros, behaviours.one_nan, behaviours.crashes, behaviours.changes_an_input]
)
def test_correctness_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behave: Behaviour | None) -> None:
    """The mission's fields are there whatever the kernel did: null where nothing was measured, never a pass."""
    outcome = run(monkeypatch, tmp_path, behave)
    summary = read(outcome.folder / "correctness_summary.json")
    assert set(summary) == {"task", "variant", "format", "results", "all_pass", "pending"}
    assert summary["all_pass"] is (behave is None)
    assert summary["pending"] is None
    assert [row["seed"] for row in summary["results"]] == [0, 1, 2]  # the third takes part in timing
    more = {
        "format_error",
        "kernel_error",
        "bound_ratio",
        "inputs_digest",
        "variant",
        "drawn",
        "gates",
        "pass",
        "notes",
    }
    for row in summary["results"]:
        assert set(row) == SHAPE | ERRORS | more
        assert (row["B"], row["H"], row["S"], row["D"]) == (1, 1, 32, 64)
        assert set(row["gates"]) >= MISSION_GATES
        of_the_kernel = {name: held for name, held in row["gates"].items() if not row["drawn"] or held is not None}
        assert row["pass"] is all(of_the_kernel.values())
        measured = behave not in (behaviours.one_nan, behaviours.crashes)
        assert {isinstance(row[name], float) for name in ERRORS} == {measured}
        if not measured:
            assert not any(row["gates"][name] for name in MISSION_GATES)
    assert read(outcome.folder / "baseline" / "correctness_summary.json")["all_pass"] is True


@pytest.mark.parametrize("sub", [".", "baseline"])
def test_perf_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sub: str) -> None:
    outcome = run(monkeypatch, tmp_path)
    path = outcome.folder / sub / "perf_baseline.json"
    content = read(path)
    assert set(content) == {"task", "variant", "format", "results", "pending"}
    assert len(content["results"]) == 4  # two seeds, warm and cold
    for row in content["results"]:
        assert set(row) == SHAPE | TIMES | {"dims", "method", "cache", "discarded_iters", *BLOCKS}
        assert (row["B"], row["H"], row["S"], row["D"]) == (1, 1, 32, 64)
    side = outcome.record.candidate if sub == "." else outcome.record.baseline
    assert msgspec.json.decode(path.read_bytes(), type=PerformanceFile).results == side.timing


def test_compare_md_is_of_the_two_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path)
    text = (tmp_path / "results" / "COMPARE.md").read_text()
    rows = re.findall(r"^\| b1_h1_s32_d64 \| .* \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)x \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "0", "1"]  # cold, then warm
    for _, baseline, candidate, speedup in rows:
        assert float(baseline) == pytest.approx(20, rel=0.01)
        assert float(candidate) == pytest.approx(10, rel=0.01)
        assert float(speedup) == pytest.approx(2, rel=0.01)
    assert re.search(r"Average speedup.*2\.0\d\dx|1\.99\dx", text)
    assert "required 1.15x: PASS" in text


def test_what_was_not_timed_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = run(monkeypatch, tmp_path, behaviours.all_zeros)
    content = read(outcome.folder / "perf_baseline.json")
    assert content["results"] == []
    assert content["pending"] == "not asked: a kernel that is not correct is not timed"
    assert not (outcome.folder / "performance.png").exists()


def test_what_could_not_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = run(monkeypatch, tmp_path, gpu=False)
    for sub in (".", "baseline"):
        summary = read(outcome.folder / sub / "correctness_summary.json")
        assert (summary["results"], summary["all_pass"]) == ([], None)
        assert summary["pending"].startswith("no GPU")
        assert read(outcome.folder / sub / "perf_baseline.json")["pending"].startswith("no GPU")
        assert read(outcome.folder / sub / "build_meta.json")["device"] is None


def test_nothing_is_left_of_a_run_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interrupt while the report is written."""

    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("greenfast.judge.validate.report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path)
    assert [p for p in (tmp_path / "results").rglob("*") if p.is_file() or p.name.startswith(".")] == []
