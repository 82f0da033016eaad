"""Counts per phase of instrumented builds: known phases, the ladder, and phases that cannot be separated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from greenfast.cli.main import main
from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.phases import OUTSIDE
from greenfast.emulator.result import GridResult
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import PhaseRecord
from greenfast.judge.report.markdown import report
from greenfast.judge.task import load
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import PHASE_BUFFER, KernelSource, Launch
from greenfast.spec.problem import OutputSpec
from tests.emulator.kernels import TARGET
from tests.fakes import emulate_here

BEFORE = '#include "common/phase_clock.cuh"\n#include "ptx/math.cuh"\n'


def phases(body: str, names: tuple[str, ...], *, threads: int = 64, blocks: int = 3) -> GridResult:
    """Count the phases of a kernel with a clock of them: y[i] for thread i of each block."""
    source = (
        f'{BEFORE}extern "C" __global__ void k(float* y, long long* out) {{\n'
        f"greenfast::PhaseClock<true, {len(names)}> clock(out);\n"
        "const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f"float v = threadIdx.x;\n{body}\ny[i] = v;\nclock.write();\n}}"
    )
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (threads, 1, 1))
    outputs = {"y": OutputSpec((threads * blocks,), "float32")}
    plan = Launch((blocks, 1, 1), ("y", PHASE_BUFFER))
    return run_grid(to_ptx(kernel, TARGET, assemble=False), "k", kernel.block, 0, plan, {}, outputs, phases=names)


def test_work_is_counted_in_the_phase_whose_mark_follows() -> None:
    result = phases(
        "#pragma unroll 1\nfor (int n = 0; n < 5; ++n) {\n"
        "v = greenfast::ptx::ex2(v); v = greenfast::ptx::ex2(-v); clock.mark(1);\n"
        "v = greenfast::ptx::ex2(v); clock.mark(0); __syncthreads(); clock.mark(0);\n}\n"
        "v = greenfast::ptx::ex2(v); clock.mark(2);",
        ("barrier", "two", "last"),
    )
    threads = 3 * 64
    assert {name: c.exponentials for name, c in result.phases.items()} == {
        "barrier": 5 * threads,
        "two": 10 * threads,
        "last": threads,
        OUTSIDE: 0,
    }
    assert {name: c.barriers for name, c in result.phases.items() if c.barriers} == {"barrier": 5 * threads // 32}
    assert result.phases[OUTSIDE].global_store_bytes == 4 * threads + 3 * 3 * 8  # y, and each block's sums


def test_a_phase_that_no_thread_comes_to_counts_nothing() -> None:
    result = phases(
        "if (i < 0) { v = 1; clock.mark(0); }\nv = greenfast::ptx::ex2(v); clock.mark(1);", ("never", "all")
    )
    assert sum(result.phases["never"].instructions.values()) == 0
    assert result.phases["all"].exponentials == 3 * 64


def test_phases_add_up_and_hold_what_they_are_named_for() -> None:
    task = load("fp8_sdpa")
    for variant in ("scalar", "stage2", "stage3a_swizzle", "stage3b", "stage3b_specialized", "stage3b_persistent"):
        one_tile = [{"B": 1, "H": 1, "S": 32, "D": 64}] if variant in ("stage2", "stage3b") else []
        for dims in (*one_tile, {"B": 1, "H": 2, "S": 40, "D": 64}):
            toggles = task.config.variant(variant).values
            source = task.family.kernel(toggles, "e4m3", dims, instrumented=True)
            case = task.problem.make_case(dims, 0, "e4m3")
            result = run_grid(
                to_ptx(source, Target("sm_90a"), assemble=False),
                source.entry,
                source.block,
                source.dynamic_smem_bytes,
                task.family.launch(toggles, "e4m3", dims),
                case.inputs,
                case.outputs,
                phases=source.phases,
            )
            assert tuple(result.phases) == (*source.phases, OUTSIDE)
            total = Counts()
            for part in result.phases.values():
                total.add(part)
            assert total == result.counts
            share = {name: c.matrix_flops for name, c in result.phases.items() if c.matrix_flops}
            if "stage3b" in variant:  # which multiplies the weights with ones too, and weighs its partial results
                assert share["QK^T"] * 9 == share["P*V"] * 8
                assert set(share) == {"QK^T", "P*V"}
                assert result.phases["softmax"].exponentials + result.phases["store"].exponentials == total.exponentials
            else:
                assert share == ({} if variant == "scalar" else dict.fromkeys(("QK^T", "P*V"), total.matrix_flops // 2))
                assert result.phases["softmax"].exponentials == total.exponentials > 0
            assert result.phases["store"].global_store_bytes == 2 * dims["B"] * dims["H"] * dims["S"] * dims["D"]
            outside = result.phases[OUTSIDE]  # parameters, the first clock and the sums themselves
            alone = variant == "stage3b_specialized"  # a separate warp copies, in no phase
            blocks, tiles = -(-dims["S"] // 32) * dims["H"], -(-dims["S"] // 32)
            copies = 2 * 2048 // 128 * tiles * blocks
            assert (outside.shared_passes, outside.barriers) == ((copies, blocks) if alone else (0, 0))
            assert outside.exponentials == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("const int p = i == 64; if (p) clock.mark(1); else clock.mark(0);", None),
        ("long long now = clock64(); clock.cycles[i % 2] += now; clock.cycles[1] += now;", "ends several phases: a, b"),
        ("clock.mark(0); if (threadIdx.x < 99) { y[i] = v; return; }", "16 bytes of its phases' sums unwritten"),
    ],
)
def test_phases_that_cannot_be_told_apart_are_refused(body: str, message: str | None) -> None:
    if message is None:
        assert set(phases(body, ("a", "b")).phases) == {"a", "b", OUTSIDE}
        return
    with pytest.raises(UsageError, match=message):
        phases(body, ("a", "b"), blocks=1)


def test_a_kernel_without_a_clock_has_no_phases() -> None:
    source = 'extern "C" __global__ void k(float* y, long long* out) { y[threadIdx.x] = 1; }'
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (32, 1, 1))
    plan, outputs = Launch((1, 1, 1), ("y", PHASE_BUFFER)), {"y": OutputSpec((32,), "float32")}
    with pytest.raises(UsageError, match="reads the clock in 0 places"):
        run_grid(to_ptx(kernel, TARGET, assemble=False), "k", (32, 1, 1), 0, plan, {}, outputs, phases=("a",))


def test_a_clock_grows_where_no_phases_are_counted() -> None:
    source = (
        'extern "C" __global__ void k(long long* y) { long long a = clock64(); __syncthreads(); y[0] = clock64() - a; }'
    )
    kernel = KernelSource("k", source, "k.cu", (KERNEL_DIR,), (32, 1, 1))
    outputs = {"y": OutputSpec((1,), "int64")}
    result = run_grid(
        to_ptx(kernel, TARGET, assemble=False), "k", (32, 1, 1), 0, Launch((1, 1, 1), ("y",)), {}, outputs
    )
    assert result.outputs["y"][0] > 0
    assert result.phases == {}


def test_profile_shows_what_each_phase_executes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_here(monkeypatch)
    command = ["profile", "fp8_sdpa", "--phases", "--device", "emulator", "--shapes", "small", "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "stage2, b1_h1_s32_d64, emulated" in out
    (folder,) = (tmp_path / "fp8_wmma_baseline").iterdir()
    record = read_record(folder)
    assert isinstance(record, PhaseRecord)
    assert record.phase_cycles == {}
    counts = record.phase_counts["b1_h1_s32_d64"]
    (line,) = [line for line in out.splitlines() if line.startswith("softmax")]
    assert line.split()[1] == str(counts["softmax"].warp_instructions)
    assert line.split()[5] == str(counts["softmax"].exponentials) == "1152"
    text = report(record)
    assert "b1_h1_s32_d64, `emulated`:" in text
    assert f"| softmax | {counts['softmax'].warp_instructions} |" in text
    assert "cycles" not in text.split("## How to reproduce")[0]
    assert np.isclose(
        sum(float(line.split(" | ")[2].split()[0]) for line in text.splitlines() if "%" in line), 100, 0.1
    )
