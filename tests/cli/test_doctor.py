"""``greenfast doctor``: every fault is named with its remedy; the exit code tells whether judge can run here."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from greenfast.cli.main import main
from greenfast.device.worker import WorkerError
from greenfast.judge import doctor
from greenfast.judge.doctor import Diagnosis
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import DeviceInfo

ROOT = Path(__file__).parents[2]
RAISING = Callable[..., Any]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(folder))
    monkeypatch.delenv("GREENFAST_TASKS", raising=False)
    return folder


def raising(error: Exception) -> RAISING:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def by_name(findings: list[Diagnosis]) -> dict[str, Diagnosis]:
    return {finding.what: finding for finding in findings}


def device(capability: str) -> DeviceInfo:
    return DeviceInfo(kind="gpu", name="a GPU", compute_capability=capability, cuda_version="13.0", driver="580.95")


def test_the_plain_installation_is_one_row_and_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No package of the extra judge is installed: pip install without an extra."""
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name in doctor._JUDGE:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", installed)
    monkeypatch.setattr(doctor, "_NO_JUDGE", "No module named 'msgspec'")
    monkeypatch.setattr(
        "greenfast.device.toolchain.nvdisasm", raising(MachineError("nvdisasm was not found; install it"))
    )
    monkeypatch.setattr(doctor, "_why_no_gpu", lambda: "no NVIDIA driver")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "EXTRA " in line]
    assert row.split("EXTRA")[0].strip() == "extra judge"
    assert row.endswith(f"not installed: {', '.join(doctor._JUDGE)}")
    assert "attention works here" in out
    assert "MISSING" not in out


def show_gpus(monkeypatch: pytest.MonkeyPatch, *answers: DeviceInfo | Exception) -> list[Diagnosis]:
    def info(ordinal: int, timeout_s: float) -> DeviceInfo:
        answer = answers[ordinal]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor, "_why_no_gpu", lambda: None)
    monkeypatch.setattr(doctor, "device_count", lambda: len(answers))
    monkeypatch.setattr(doctor, "gpu_info", info)
    return [finding for _, finding in doctor.gpus()]


def test_this_machine_has_what_the_static_gates_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split("  ")[0]: line for line in lines if line and not line.lstrip().startswith("->")}
    for what in ("Python", "torch", "greenfast", "NVRTC", "CUDA headers", "nvdisasm", "compile check", "tasks"):
        assert re.search(r"  +OK  +\S", shown[what]), shown[what]
    for what in ("compile cache", "NVML clocks", "ncu", "compute-sanitizer", "GREENFAST_CACHE_DIR"):
        assert what in shown
    assert lines[-1].startswith("judge can decide ")


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["static_gates"] is True
    assert isinstance(answer["gpu_gates"], bool)
    for finding in answer["findings"]:
        assert set(finding) == {"what", "status", "found", "remedy"}
        assert (finding["status"] == "OK") == (finding["remedy"] == ""), finding
        assert finding["found"]


def test_something_missing_is_exit_code_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "greenfast.device.toolchain.nvrtc_library", raising(MachineError("NVRTC was not found; install it"))
    )
    assert main(["doctor", "--json"]) == 3
    out = capsys.readouterr().out
    assert "MISSING" in out
    assert "install it" in out


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from greenfast.cli.main import main; rc = main(['doctor']); sys.exit(rc or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_it_runs_where_a_package_cannot_be_imported() -> None:
    """tests/test_installations.py has the packages of extras."""
    code = "import sys; sys.modules['cuda'] = None; from greenfast.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert re.search(r"MISSING +not looked at: .*\bcuda\b", done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("version", "status"), [("2.13.0+cu130", "OK"), ("2.11", "OK"), ("2.9.1", "MISSING"), ("10.0", "OK")]
)
def test_versions_are_compared_by_number(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    torch = by_name(doctor.packages())["torch"]
    assert (torch.status, torch.found) == (status, version)
    assert torch.remedy == ("" if status == "OK" else 'pip install "torch>=2.11"')


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", raising(PackageNotFoundError("torch")))
    torch = by_name(doctor.packages())["torch"]
    assert (torch.status, torch.found) == ("MISSING", "not installed")
    assert not doctor.static_gates([torch])


def test_the_least_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, least in doctor.PACKAGES.items():
        assert re.search(rf'^    "{name}>={re.escape(least)}[",]', text, re.MULTILINE), name


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    found = doctor.python()
    assert (found.status, found.remedy) == ("MISSING", "use Python 3.10 to 3.13")


def test_a_compiler_that_refuses_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "#error no\n")
    found = doctor.compile_check(Target("sm_89"))
    assert found.status == "MISSING"
    assert "probe.cu" in found.found


def test_the_cache(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.compile_cache().found == f"{cache_folder}, not made yet"
    (cache_folder / "a").mkdir(parents=True)
    (cache_folder / "a" / "one").write_bytes(bytes(3 << 20))
    assert doctor.compile_cache() == Diagnosis("compile cache", "OK", f"{cache_folder}, 1 entries, 3.0 MiB")
    (tmp_path / "file").touch()
    for lost in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("GREENFAST_CACHE_DIR", str(lost))
        found = doctor.compile_cache()
        assert found.status == "OPTIONAL"
        assert "GREENFAST_CACHE_DIR" in found.remedy


def test_each_gpu_and_the_target_picked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = show_gpus(monkeypatch, device("9.0"), device("7.5"), WorkerError("hang: info did not end"))
    assert [f.what for f in found] == ["GPU 0", "GPU 1", "GPU 2"]
    assert [f.status for f in found] == ["OK", "OPTIONAL", "OPTIONAL"]
    assert found[0].found == "a GPU, compute capability 9.0, driver 580.95 (CUDA 13.0), target sm_90a"
    assert "7.5 is not supported" in found[1].found
    assert "hang" in found[2].found
    assert all(f.remedy for f in found[1:])
    assert doctor.gpu_gates(found)
    assert not doctor.gpu_gates(found[1:])
    assert not doctor.gpu_gates([*found, Diagnosis("torch", "MISSING", "not installed")])


def test_a_missing_gpu_is_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_why_no_gpu", lambda: "no NVIDIA driver")
    ((target, found),) = doctor.gpus()
    assert target is None
    assert (found.what, found.status, found.found) == ("GPU", "OPTIONAL", "no NVIDIA driver")
    assert doctor.static_gates([found])
    assert not doctor.gpu_gates([found])
    assert doctor.clocks([target]).status == "OPTIONAL"


@pytest.mark.parametrize(
    ("told", "status", "found"),
    [
        ({"sm_mhz": 1980.0, "temperature_c": 34.0}, "OK", "SM 1980 MHz, 34 °C"),
        ({}, "OPTIONAL", "NVML does not tell them"),
        (MachineError("CUDA: CUDA_ERROR_DEVICES_UNAVAILABLE"), "OPTIONAL", "CUDA: CUDA_ERROR_DEVICES_UNAVAILABLE"),
    ],
)
def test_clocks(told: dict[str, float] | Exception, status: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeGpu:
        def __init__(self, ordinal: int) -> None:
            assert ordinal == 1  # the first that can be used

        def clocks(self) -> dict[str, float]:
            if isinstance(told, Exception):
                raise told
            return told

    monkeypatch.setattr(doctor, "Gpu", FakeGpu)
    read = doctor.clocks([None, Target("sm_90a")])
    assert (read.status, read.found) == (status, found)


def test_variables_in_force_are_shown_and_judged(tmp_path: Path) -> None:
    environment = {
        "GREENFAST_CACHE_DIR": "/a",
        "GREENFAST_TASKS": f"{tmp_path}:/no/such/folder",
        "TORCH_CUDA_ARCH_LIST": "8.9",
        "USE_CP_ASYNC": "0",
        "USE_WMMA_PV": "maybe",
        "USE_XOR_SWIZZLE": "",
        "CUDA_PATH": "/opt/cuda",
        "HOME": "/home/somebody",
    }
    found = by_name(doctor.tasks_and_variables(environment))
    assert found["tasks"].found == "fp8_attention, fp8_quantize, fp8_sdpa, sdpa_backward, serving_attention"
    assert {name: f.status for name, f in found.items() if name != "tasks"} == {
        "GREENFAST_CACHE_DIR": "OK",
        "GREENFAST_TASKS": "OPTIONAL",
        "TORCH_CUDA_ARCH_LIST": "OK",
        "USE_CP_ASYNC": "OK",
        "USE_WMMA_PV": "OPTIONAL",
        "CUDA_PATH": "OK",
    }
    assert found["GREENFAST_TASKS"].remedy == "no such folder: /no/such/folder"
    assert found["USE_WMMA_PV"].remedy == "allowed values are [0, 1]"
    assert (
        "sm_90a" in by_name(doctor.tasks_and_variables({"TORCH_CUDA_ARCH_LIST": "6.1"}))["TORCH_CUDA_ARCH_LIST"].remedy
    )
    assert "environment" in by_name(doctor.tasks_and_variables({}))


def test_an_invalid_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config_forward.json").write_text("{}")
    monkeypatch.setenv("GREENFAST_TASKS", str(tmp_path))
    found = by_name(doctor.tasks_and_variables({}))
    assert found["task mine"].status == "OPTIONAL"
    assert "config_forward.json" in found["task mine"].remedy
    assert found["tasks"].status == "OK"
