"""The bad kernels without a GPU: each one compiles, and what can be seen in its build is seen there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from greenfast.cli.main import main
from greenfast.device.compiler import compile_kernel
from greenfast.judge.record_schema import Record
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError
from greenfast.spec.kernel import KernelSource, render_program
from tests.cheats.cheats import CHEATS, FAILURES, TASK, UNLAUNCHABLE, doubling
from tests.cheats.doubling.family import KERNELS

CONFIG = doubling().config
RUNGS = {rung.name: rung for rung in CONFIG.rungs}


def render(name: str) -> KernelSource:
    values = CONFIG.rung_variant(RUNGS[name]).values
    (step,) = render_program(doubling().family, values, "fp32", CONFIG.shape("even").dims).steps
    return step.kernel


def static_gates(name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Record]:
    """Validate a kernel against the good one without a device."""
    argv = ["judge", str(TASK), "--baseline", "good", "--candidate", name, "--device", "none", "--out", str(out)]
    code = main([*argv, "--json"])
    return code, msgspec.json.decode(capsys.readouterr().out, type=Record)


def reasons(record: Record, gate: str) -> str:
    (result,) = [g for g in record.gates if g.gate == gate]
    assert result.status == "FAIL"
    return "\n".join(result.reasons)


def test_each_rung_is_a_kernel_of_its_name_and_each_kernel_a_rung() -> None:
    assert {name: render(name).source for name in RUNGS} == KERNELS
    assert {cheat.name for cheat in CHEATS} | set(FAILURES) | set(UNLAUNCHABLE) <= set(RUNGS)


@pytest.mark.parametrize("target", ["sm_89", "sm_90a"])
def test_every_kernel_compiles(target: str) -> None:
    for name in RUNGS:
        assert compile_kernel(render(name), Target(target)).resources.registers > 0


def test_one_seed_knows_the_first_element_of_seed_0() -> None:
    def first(seed: int) -> int:
        return int(doubling().problem.make_case(CONFIG.shape("even").dims, seed, "fp32").inputs["x"].view(np.uint32)[0])

    assert f"kFirstOfSeed0 = {first(0):#x};" in KERNELS["one_seed"]
    assert first(1) != first(0)


def test_the_good_kernel_passes_what_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = static_gates("good", tmp_path, capsys)
    assert code == 4  # two gates are open
    assert [g.status for g in record.gates] == ["PASS", "PASS", "PENDING", "PENDING", "PASS"]


@pytest.mark.parametrize(
    ("name", "resources", "evidence"),
    [
        ("spills", "spills, bytes is ", "local_memory is "),
        ("local_array", "stack, bytes is 128, the budget of local_array allows 0", "local_memory is "),
        ("no_async_copy", None, "even: cp_async is 0, promised >= 1"),
    ],
)
def test_what_the_build_shows_is_caught_without_a_gpu(
    name: str, resources: str | None, evidence: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = static_gates(name, tmp_path, capsys)
    assert code == (12 if resources else 15)
    assert record.decision == "DEFER"
    for gate, text in (("RESOURCES", resources), ("EVIDENCE", evidence)):
        if text is None:
            assert record.gate_status(gate) == "PASS"
        else:
            assert text in reasons(record, gate)


@pytest.mark.parametrize("name", UNLAUNCHABLE)
def test_what_no_gpu_can_launch_is_caught_without_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = static_gates(name, tmp_path, capsys)
    assert (code, record.decision) == (11, "DEFER")
    assert re.search(f"{name} {UNLAUNCHABLE[name]}", reasons(record, "BUILD"))


def test_a_kernel_cannot_launch_another_one() -> None:
    source = KernelSource(
        entry="parent",
        source='extern "C" __global__ void child(float* y) { y[0] = 1.0f; }\n'
        'extern "C" __global__ void parent(float* y) { child<<<1, 1>>>(y); }\n',
        name="parent.cu",
        include_dirs=(),
        block=(1, 1, 1),
    )
    with pytest.raises(CompileError, match=r"parent.cu\(2\): error: device-side kernel launch"):
        compile_kernel(source, Target("sm_90a"))
