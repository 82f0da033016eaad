"""``greenfast build --library``: the compiled kernels for some options and targets, and the output."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenfast.cli import library
from greenfast.cli.progress import ProgressLine
from greenfast.device.compiler import compile_kernel
from greenfast.ops import warmup
from greenfast.ops.warmup import WarmupResult, kernels_for
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.cli.command_line import run_here
from tests.fakes import FakeDevice, install, request
from tests.ops.test_warmup import tiny

pytestmark = pytest.mark.usefixtures("machine")

NO_GPU = "no GPU here: compiling for sm_90a, Hopper, with wgmma and setmaxnreg; --arch names another target"
ONE = ("--head-dims", "64", "--dtypes", "float16", "--precisions", "fp8", "--causal", "no", "--lengths", "128")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache, and one kernel with one head for each length."""
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup, "_HEADS", (1,))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[KernelSource], str]]:
    """Instead of compiling: the kernels and the target's name of each call."""
    calls: list[tuple[set[KernelSource], str]] = []

    def warm(sources: list[KernelSource], target: Target, progress: object) -> WarmupResult:
        calls.append((set(sources), target.name))
        return WarmupResult(len(sources), 0, 1.0)

    monkeypatch.setattr(warmup, "warm", warm)
    return calls


def test_the_first_run_compiles_and_the_second_finds_it(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    ran = run_here(capsys, "build", "--library", *ONE)
    assert (ran.code, ran.err) == (0, "")
    first, *steps, counts, folder = ran.out.splitlines()
    assert first == NO_GPU
    assert sorted(line.split()[1] for line in steps) == ["fp8_attention", "fp8_attention", "quantize_qkv"]
    assert [line.split()[0] for line in steps] == ["1/3", "2/3", "3/3"]
    assert all(line.endswith(" ms") for line in steps)
    assert counts.startswith("sm_90a: 3 kernels compiled, 0 already cached, ")
    assert folder.startswith(f"{cache_folder}: 3 entries, ")
    assert folder.endswith(" MiB")
    again = run_here(capsys, "build", "--library", *ONE, "--arch", "9.0a")
    assert again.out.startswith("sm_90a: 0 kernels compiled, 3 already cached, "), "no line for what was there"
    assert again.out.splitlines()[1:] == [folder]


def test_a_terminal_gets_a_counter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "kernels_for", lambda *_, **__: tiny(3))
    monkeypatch.setattr(warmup, "_compile_cached", lambda *kernel: replace(compile_kernel(*kernel), from_cache=False))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    steps: list[str] = []

    class Recorded(ProgressLine):
        def __setattr__(self, name: str, value: object) -> None:
            steps.extend([str(value)] if name == "step" else [])
            super().__setattr__(name, value)

    monkeypatch.setattr(library, "ProgressLine", Recorded)
    ran = run_here(capsys, "build", "--library", *ONE)
    assert steps[-3:] == ["compiling 1/3", "compiling 2/3", "compiling 3/3"]
    assert " ms" not in ran.out


def test_the_options_reach_the_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: list[tuple[set[KernelSource], str]]
) -> None:
    calls: list[dict[str, Any]] = []

    def record(target: Target, *, left_out: object, **options: Any) -> list[KernelSource]:
        calls.append({"target": target.name, **options})
        return []

    default = {"target": "sm_90a", "log_sum_exp": False, "causal": (False, True), "lengths": warmup.LENGTHS}
    default |= {
        "backward": (),
        "head_dims": (64, 128, 256),
        "dtypes": ("float16", "bfloat16"),
        "precisions": ("fp8", "int8"),
    }
    monkeypatch.setattr(warmup, "kernels_for", record)
    assert run_here(capsys, "build", "--library").code == 0
    assert calls.pop() == default
    options = ("--causal", "yes", "--head-dims", "72,128", "--dtypes", "bfloat16", "--precisions", "int8")
    run_here(capsys, "build", "--library", *options, "--lengths", "64,300", "--log-sum-exp", "--backward", "8bit")
    assert calls.pop() == default | {
        "causal": (True,), "head_dims": [72, 128], "dtypes": ["bfloat16"], "precisions": ["int8"],
        "lengths": [64, 300], "log_sum_exp": True, "backward": ["8bit"],
    }  # fmt: skip
    run_here(capsys, "build", "--library", "--arch", "sm_90a,8.9", "--causal", "no")
    assert calls == [default | {"target": name, "causal": (False,)} for name in ("sm_90a", "sm_89")]
    assert [target for _, target in asked] == ["sm_90a", "sm_90a", "sm_90a", "sm_89"]


def test_combinations_that_calls_refuse_are_printed(
    capsys: pytest.CaptureFixture[str], asked: list[tuple[set[KernelSource], str]]
) -> None:
    ran = run_here(capsys, "build", "--library", "--arch", "sm_89", "--dtypes", "float16", "--precisions", "int8")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "no kernel on sm_89, so calls refuse these: head dim 256, float16, int8"
    assert asked[0][0] == set(
        kernels_for(Target("sm_89"), dtypes=["float16"], precisions=["int8"], head_dims=[64, 128])
    )


def test_a_gpu_chooses_the_target_unless_it_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: list[tuple[set[KernelSource], str]],
) -> None:
    device = install(monkeypatch, FakeDevice(request(tmp_path)))
    monkeypatch.setattr(warmup, "kernels_for", lambda target, **_: [])
    ran = run_here(capsys, "build", "--library")
    assert (ran.code, asked.pop()[1]) == (0, "sm_89")
    assert "no GPU" not in ran.out
    device.workers.clear()
    run_here(capsys, "build", "--library", "--arch", "sm_90a")
    assert asked.pop()[1] == "sm_90a"
    assert device.workers == [], "a GPU is not asked, it may be out of order"
