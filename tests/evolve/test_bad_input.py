"""What a user can ask wrongly of `greenfast evolve`: each with a message that says what is allowed, and no folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from greenfast.spec.facts import DeviceInfo
from tests.cli.command_line import run_here
from tests.evolve.doubling import SPACE, write_search_task
from tests.fakes import L4

pytestmark = pytest.mark.usefixtures("machine", "families_here")
PARAMETERS: Any = SPACE["parameters"]


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"name": "s"}, "space s is empty: declare `parameters`, `regions` or both"),
        ({**SPACE, "constraints": ["KIND > 9"]}, "space doubling: its constraints allow no setting of 28"),
        ({**SPACE, "constraints": ["SPEED > 9"]}, "SPEED is not known; known are KIND, THREADS"),
        ({**SPACE, "constraints": ["KIND >"]}, "is not an expression"),
        ({**SPACE, "constraints": ["__import__('os')"]}, "__import__ is not known; known are KIND, THREADS"),
        ({**SPACE, "constraints": ["9 ** 99"]}, "leaves a constraint without a value: '9 ** 99': the exponent is 99"),
        ({"name": "s", "parameters": {"KIND": {"values": []}}}, "length >= 1"),
        ({"name": "s", "parameters": {"KIND": {"values": ["a", "b"]}}}, "KIND='a': allowed by the task are [0, 1, 2"),
        ({"name": "s", "parameters": {"KIND": {"values": [1.5]}}}, "KIND=1.5: allowed by the task are"),
        ({"name": "s", "parameters": {"KIND": {"values": [7]}}}, "KIND=7: allowed by the task are"),
        ({"name": "s", "parameters": {"KIND": {"values": [0, 1.0]}}}, "KIND=1.0: toggles are whole numbers"),
        ({"name": "s", "parameters": {"KIND": {"values": [1, 1]}}}, "KIND: a value is twice"),
        ({"name": "s", "parameters": {"KIND": {"values": [1], "default": 2}}}, "KIND: default 2 is not one of 1"),
        ({"name": "s", "parameters": {"SPEED": {"values": [1]}}}, "no toggle of task twice is called 'SPEED'; allowed"),
        ({"name": "s", "parameters": {"KIND": {"values": [1], "helpp": ""}}}, "unknown field `helpp`"),
        ({"name": "s", "regions": {"a": {"file": "../a.cuh"}}}, "region a: ../a.cuh is outside of"),
        ({"name": "s", "regions": {"a": {"file": "a.cuh"}}}, "cannot be read"),
        ({**SPACE, "rung": "nobody"}, "unknown variant of task twice 'nobody'; allowed: fast, plain"),
        ({**SPACE, "only": {"N": [7]}}, "no shape of task twice has {'N': [7]}"),
    ],
)
def test_spaces(capsys: pytest.CaptureFixture[str], tmp_path: Path, space: dict[str, Any], says: str) -> None:
    task = write_search_task(tmp_path / "task")
    (task / "space.json").write_text(json.dumps(space))
    ran = run_here(capsys, "evolve", task, "--device", "emulator", "--out", tmp_path / "runs")
    assert ran.code == 2
    assert says in ran.err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--proposer", "magic"), "unknown proposer 'magic'; allowed: "),
        (("--option", "file"), "--option 'file': NAME=VALUE is needed"),
        (("--budget", "gpu=12"), "allowed are evals=256, gpu=12m and time=1h"),
        (("--budget", "evals=0"), "allowed are evals=256"),
        (("--budget", "evals=3,evals=4"), "evals is given twice"),
        (("--space", "none"), "--space 'none': no such file; spaces of the task by name: none"),
        (("--workers", "cloud:3"), "--workers 'cloud:3': allowed is local:N"),
        (("--baseline", "nobody"), "unknown baseline 'nobody'; allowed: fast, plain"),
        (("--shapes", "huge"), "unknown shape of task twice 'huge'"),
        (("--small", "huge"), "--small 'huge': shapes of space doubling are tiny, page"),
        (("--insights", "/none"), "/none: cannot be read"),
        (("--islands", "0", "--proposer", "evolutionary"), "islands='0': a whole number of at least 1"),
        (("--timeout", "nan"), "timeout_s"),
        (("--timeout", "0"), "timeout_s"),
        (("--budget", "evals=99999999999"), "--budget 'evals=99999999999': Expected `int` <= 1000000"),
        (("--batch", "99999999999999999999"), "batch"),
        (("--batch", "0"), "batch"),
        (("--screen", "2"), "give a share above 0 and up to 1"),
    ],
)
def test_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    task = write_search_task(tmp_path / "task")
    ran = run_here(capsys, "evolve", task, "--device", "emulator", "--out", tmp_path / "runs", *options)
    assert ran.code == 2
    assert says in ran.err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("device", "code", "says"),
    [
        ("0,0", 2, "device '0,0': a GPU is named twice"),
        ("0,7", 3, "device 7: the driver shows 2 GPU(s)"),
        ("0,x", 2, "device '0,x': allowed are auto, all, none, emulator, and GPUs' numbers such as 0 or 0,1"),
        ("0,emulator", 2, "device '0,emulator': allowed are auto, all"),
        ("gpu", 2, "device 'gpu': allowed are auto, all"),
        ("", 2, "device '': allowed are auto, all"),
        ("0,1", 2, "GPUs of one kind, and these are of several: 0 is an NVIDIA H100 (132 multiprocessors), 1 is an N"),
        ("all", 2, "1 is an NVIDIA H200 (132 multiprocessors)"),
    ],
)
def test_devices(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
    code: int,
    says: str,
) -> None:
    def info(ordinal: int, timeout_s: float) -> DeviceInfo:
        return dataclasses.replace(L4, name=("NVIDIA H100", "NVIDIA H200")[ordinal], sm_count=132)

    monkeypatch.setattr("greenfast.judge.request.device_count", lambda: 2)
    for module in ("judge.request", "evolve.workers"):
        monkeypatch.setattr(f"greenfast.{module}.device_info", info)
    task = write_search_task(tmp_path / "task")
    ran = run_here(capsys, "evolve", task, "--device", device, "--out", tmp_path / "runs")
    assert (ran.code, list(tmp_path.glob("runs/*"))) == (code, [])
    assert says in ran.err


def test_a_stream_that_never_ends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_search_task(tmp_path / "task")
    ran = run_here(capsys, "evolve", task, "--proposer", "scripted", "--option", "file=/dev/zero", "--out", tmp_path)
    assert ran.code == 2
    why = "/dev/zero: cannot be read (no regular file)"
    assert f"{why}; allowed is a file of lines, each a candidate as JSON" in ran.err


def test_resuming(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_search_task(tmp_path / "task")
    for arguments, says in (
        (("--resume", tmp_path), "no run of `greenfast evolve`; it has no manifest.json"),
        (("--resume", tmp_path, "--proposer", "tpe"), "keeps the settings of its run: --proposer cannot"),
        ((task, "--resume", tmp_path), "a task cannot change them; --budget can"),
        ((), "name a task, or a run with --resume"),
    ):
        ran = run_here(capsys, "evolve", *arguments)
        assert ran.code == 2
        assert says in ran.err
