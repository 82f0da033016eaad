"""The script that runs compute-sanitizer: its planted faults are faults, and what it reads from a tool's output."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import OutputSpec
from scripts.sanitize import PLANTED, cases, summary

#: What the emulator allows, as threads that have ended release a barrier, and what is no fault.
ALLOWED = {"a barrier in a branch", "a correct pipeline of bulk copies", "correct pairs of warps, then all"}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_on_the_emulator(name: str) -> None:
    source = f'extern "C" __global__ void k(const float* x, float* y) {{\n{PLANTED[name].body}\n}}'
    block = (PLANTED[name].threads, 1, 1)
    ptx = to_ptx(KernelSource("k", source, "k.cu", (), block), Target("sm_90a"), assemble=False)
    outputs = {"y": OutputSpec((256,), "float32")}

    def run() -> None:
        for seed in range(3):
            run_grid(
                ptx, "k", block, 0, Launch((1, 1, 1), ("x", "y")), {"x": np.ones(256, np.float32)}, outputs, seed=seed
            )

    if name in ALLOWED:
        run()
    else:
        with pytest.raises(KernelFaultError):
            run()


def test_cases_have_names_of_their_own() -> None:
    names = [name for name, _ in cases()]
    assert len(set(names)) == len(names) > 30


def test_what_is_read_from_a_log() -> None:
    log = """========= COMPUTE-SANITIZER
case: one
case: two
========= Invalid __global__ write of size 4 bytes
=========     at k+0x10
========= Invalid __global__ write of size 4 bytes
========= ERROR SUMMARY: 2 errors
"""
    assert summary(log) == ("2", 2, {"two": "Invalid __global__ write of size 4 bytes"})
    assert summary("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == ("0", 0, {})
    assert summary("case: one\n") == ("no end", 1, {})
