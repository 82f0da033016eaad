"""Kernels that are launched early access no data of the launch before them until they have waited for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import disassemble, early_launch_faults
from greenfast.judge.gates.evidence import check_promises
from greenfast.judge.implementation import BuiltProgram, BuiltSide
from greenfast.judge.task import Variant
from greenfast.kernels import KERNEL_DIR
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import read_dims
from greenfast.ops import cuda
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch, Program, Step

HOPPER = Target("sm_90a")
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


LOAD = "greenfast::ptx::load_written"
RIGHT = [
    f"{WAIT} out[threadIdx.x] = {LOAD}(before + threadIdx.x);",
    f"{WAIT} out[threadIdx.x] = before[threadIdx.x];",
    f"if (n > 3) {{ {WAIT} out[0] = {LOAD}(before); }}",
    f"if (threadIdx.x) {{ {WAIT} out[1] = before[2]; }} else {{ {WAIT} out[0] = before[1]; }}",
]
WRONG = {
    f"{WAIT} out[threadIdx.x] = __ldg(before + threadIdx.x);": "constant memory",
    f"const float x = before[threadIdx.x]; {WAIT} out[threadIdx.x] = x;": "reached without",
    f"out[threadIdx.x] = 0; {WAIT} out[threadIdx.x] += before[0];": "reached without",
    f"if (n > 3) {{ {WAIT} }} out[0] = before[1];": "reached without",
    f"if (threadIdx.x) {{ {WAIT} out[1] = before[2]; }} else {{ out[0] = before[1]; }}": "reached without",
    f"for (int i = 0; i < n; ++i) {{ if (i) {WAIT} out[i] = before[i]; }}": "reached without",
    "out[threadIdx.x] = before[threadIdx.x];": "never waits",
}
BODIES = [*RIGHT, *WRONG]


def source(body: str) -> KernelSource:
    """Return the kernel of a body, in one text with all other bodies' kernels: it is compiled and listed once."""
    kernels = (
        f'extern "C" __global__ void f{n}(const float* before, float* out, int n) {{ {one} }}\n'
        for n, one in enumerate(BODIES)
    )
    text = '#include "ptx/griddepcontrol.cuh"\n' + "".join(kernels)
    return KernelSource(f"f{BODIES.index(body)}", text, "f.cu", include_dirs=(KERNEL_DIR,), block=(32, 1, 1))


def faults(kernel: KernelSource) -> list[str]:
    compiled = compile_kernel(kernel, HOPPER)
    return early_launch_faults(disassemble(compiled.cubin, kernel.entry))


@pytest.mark.parametrize("body", RIGHT)
def test_a_kernel_that_waits_has_no_fault(body: str) -> None:
    assert faults(source(body)) == []


@pytest.mark.parametrize("body", WRONG)
def test_an_access_before_the_wait_is_named(body: str) -> None:
    found = faults(source(body))
    assert found
    assert any(WRONG[body] in fault for fault in found)


@pytest.mark.parametrize(
    ("head_dim", "causal", "precision", "lse"),
    [
        *((64, 0, "int8", True), (128, 0, "fp8", True)),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((64, 1, "fp8", False), (128, 1, "int8", False))),
    ],
)
def test_attention_that_may_begin_while_the_quantizer_ends(
    head_dim: int, causal: int, precision: str, lse: bool
) -> None:
    q = torch.empty((1, 8, 4096, head_dim), dtype=torch.bfloat16, device="meta")
    config = cuda.build_sdpa_config(HOPPER, head_dim, q.dtype, precision, causal, stats=int(lse))
    quantizing, attending = cuda.build_sdpa_steps(q, q, q, config, 0.1, HOPPER)
    assert not quantizing.launch.early
    assert faults(attending.source) == []


def test_the_operators_other_launches_do_not_begin_early() -> None:
    assert not hopper.launch(*read_dims({"B": 1, "H": 1, "S": 64, "D": 64}, "e4m3")).early


WRITER = KernelSource(
    "w", 'extern "C" __global__ void w(float* before) { before[threadIdx.x] = 1; }', "w.cu", (), (32, 1, 1)
)


def check_early(body: str, *, after_a_writer: bool) -> list[str]:
    """Return the reasons of EVIDENCE for a kernel that begins early, alone or after a launch that writes ``before``."""
    kernel = source(body)
    steps = [Step(WRITER, Launch((1, 1, 1), ("before",)))] if after_a_writer else []
    steps.append(Step(kernel, Launch((1, 1, 1), ("before", "out", np.int32(4)), early=True)))
    built = BuiltProgram(Program(tuple(steps)), tuple(compile_kernel(step.kernel, HOPPER) for step in steps))
    side = BuiltSide("candidate", Variant("bad", ()), {"small": built, "large": built})
    result = check_promises(side, None, None)
    assert (result.status == "FAIL") == bool(result.reasons)
    return result.reasons


@pytest.mark.parametrize("body", WRONG)
def test_evidence_refuses_a_kernel_that_may_read_too_early(body: str) -> None:
    (reason,) = check_early(body, after_a_writer=True)
    assert "begins early" in reason
    assert reason.endswith("; 1 more shapes alike")


@pytest.mark.parametrize("body", WRONG)
def test_a_kernel_may_read_what_no_launch_writes_before_it_waits(body: str) -> None:
    """A prologue loads weights; a store before the wait, or no wait at all, is refused."""
    reasons = check_early(body, after_a_writer=False)
    if "never waits" in WRONG[body]:
        assert "never waits" in reasons[0]
    elif body in [*WRONG][:2]:
        assert reasons == []
    else:
        assert "with STG" in reasons[0]
