"""The memory check on a GPU: real guard pages, machine code without PTX, and Python functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver

from greenfast.device.bound_launch import check
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, RunResult
from greenfast.device.virtual_memory import GUARD_ADDRESSES, Access, PhysicalMemory, is_supported
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.implementation import build_image, build_side, build_solution_implementation
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.schema import SolutionConfig, find_solution
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec
from tests.cheats.judging import task_of
from tests.cheats.kernels import KERNELS as CORPUS

pytestmark = pytest.mark.gpu

N = 1000
SIGNATURE = 'extern "C" __global__ void k(const float* x, float* y, int n) { int i = blockIdx.x * 256 + threadIdx.x; '
#: Kernels of y = 2 x, and what the check finds; None for right ones.
KERNELS = {
    "right": ("if (i < n) y[i] = 2 * x[i];", None),
    "vectors and a tail": (
        "if (4 * i + 3 < n) { float4 v = ((const float4*)x)[i]; "
        "((float4*)y)[i] = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w); }"
        "else if (4 * i < n) for (int j = 4 * i; j < n; ++j) y[j] = 2 * x[j];",
        None,
    ),
    "in front": ("if (i < n) y[i] = 2 * x[i] + (x[i - 1] == 1e30f);", "ILLEGAL_ADDRESS"),
    "behind": ("if (i < n) y[i] = 2 * x[i] + (x[i + 1] == 1e30f);", "ILLEGAL_ADDRESS"),
    "far in front": ("if (i < n) y[i] = 2 * x[i] + (x[i - 100000000] == 1e30f);", "ILLEGAL_ADDRESS"),
    "far behind": ("if (i < n) y[i] = 2 * x[i] + (x[i + 100000000] == 1e30f);", "ILLEGAL_ADDRESS"),
    "writes behind": ("if (i < n) y[i] = 2 * x[i]; if (i == 0) y[n] = 1;", "ILLEGAL_ADDRESS"),
    "looks at the output": ("if (i < n) { float v = y[i]; y[i] = v > 0 && v < 1 ? 0 : 2 * x[i]; }", "uninitialized"),
    "adds to the output": ("if (i < n) y[i] = y[i] == 0 ? 2 * x[i] : 2 * x[i] + 1;", "uninitialized"),
    "stale shared memory": (
        "__shared__ float s[256]; float v = ((volatile float*)s)[threadIdx.x];"
        " if (i < n) y[i] = v == 0 ? 0 : 2 * x[i] + v;",
        "uninitialized",
    ),
    "writes an input": ("if (i < n) { y[i] = 2 * x[i]; ((float*)x)[i] = 7; }", "input"),
    "restores an input": (
        "if (i < n) { float v = x[i]; ((volatile float*)x)[i] = 2 * v; y[i] = ((volatile float*)x)[i];"
        " ((volatile float*)x)[i] = v; }",
        "ILLEGAL_ADDRESS",
    ),
}


def case(n: int = N) -> Case:
    x = np.random.default_rng(1).standard_normal(n, dtype=np.float32)
    return Case({"x": x}, {"y": OutputSpec((n,), "float32")})


def judge(body: str, n: int = N) -> RunResult | WorkerError:
    """The check of a cubin without PTX."""
    source = KernelSource("k", f"{SIGNATURE} {body} }}", "k.cu", (), (256, 1, 1))
    kernel = compile_kernel(source, Target.of_device(Gpu().capability))
    image = replace(build_image(kernel), ptx="", tables=())
    launch = Launch((-(-n // 256), 1, 1), ("x", "y", np.int32(n)))
    with Worker(0, timeout_s=60) as worker:
        try:
            return worker.check_memory(Executable.single(image, launch), case(n))
        except WorkerError as e:
            return e


@pytest.mark.parametrize("n", [N, 1024, 1])
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_without_ptx(name: str, n: int) -> None:
    body, says = KERNELS[name]
    if says and n == 1 and name in ("behind", "writes behind"):
        pytest.skip("28 bytes lie between one float and the end of its pages")
    found = judge(body, n)
    if says is None:
        assert isinstance(found, RunResult)
        assert (found.violations, found.repeatable) == ([], True)
        assert np.array_equal(found.outputs["y"], 2 * case(n).inputs["x"])
        return
    text = str(found) if isinstance(found, WorkerError) else "; ".join(found.violations)
    if name == "restores an input" and isinstance(found, RunResult):
        pytest.xfail("this driver has no read-only mappings")
    assert says in text or (name == "writes an input" and "ILLEGAL_ADDRESS" in text)


@pytest.mark.parametrize("name", ["reads_in_front", "padding_not_set", "wide_tail", "scratch_behind_output"])
def test_cheats_of_the_corpus_as_machine_code(name: str) -> None:
    found = find_solution(CORPUS["memory"][name].path)
    task = task_of(found.config.problem or "doubling")
    target = Target.of_device(Gpu().capability)
    implementation = build_solution_implementation(task, found, target)
    shape = task.config.shapes[1]
    side = build_side(
        "candidate", implementation.family, implementation.variant, task.config.defaults.format, [shape], target
    )
    one = side.executable(shape.name)
    bare = Executable(tuple((replace(i, ptx="", tables=()), plan) for i, plan in one.steps), one.workspaces)
    with Worker(0, timeout_s=60) as worker:
        try:
            text = "; ".join(
                worker.check_memory(bare, task.problem.make_case(shape.dims, 0, task.config.defaults.format)).violations
            )
        except WorkerError as e:
            text = str(e)
    assert text


LEFTOVERS = """
def run(x):
    a = 2 * x
    del a
    return torch.empty_like(x)
"""
HONEST = """
def run(x):
    a = x + x
    b = torch.empty_like(a)
    torch.mul(x, 2, out=b)
    del a
    c = torch.softmax(b, 0)
    return b + 0 * c
"""


@pytest.mark.parametrize(("body", "right"), [(LEFTOVERS, False), (HONEST, True)])
def test_a_function_that_returns_what_a_freed_tensor_left(tmp_path: Path, body: str, right: bool) -> None:
    class Doubling:
        def make_case(self, dims: object, seed: int, fmt: str) -> Case:
            return case()

    (tmp_path / "mine.py").write_text(f"import torch\n{body}")
    solution = SolutionConfig(name="mine", language="callable", file="mine.py")
    program = RemoteFamily("mine", tmp_path, solution, problem=Doubling(), gpu=0).program({}, "", {"N": N})  # type: ignore[arg-type]
    assert program.allocations, "the allocations of the captured call are known"
    target = Target.of_device(Gpu().capability)
    steps = tuple((build_image(compile_kernel(step.kernel, target)), step.launch) for step in program.steps)
    with Worker(0, timeout_s=60) as worker:
        result = worker.check_memory(Executable(steps, program.workspaces, program.allocations), case())
    assert (result.violations == []) == right


def test_mappings_have_no_memory_beside_them() -> None:
    gpu = Gpu()
    assert is_supported(gpu.device.device_id)
    memory = PhysicalMemory(100, gpu.device.device_id)
    writable = memory.map()
    check(driver.cuMemsetD8(writable.pointer, 7, writable.nbytes))
    for outside in (writable.pointer - 1, writable.end, writable.end + GUARD_ADDRESSES - 1):
        with pytest.raises(MachineError):
            check(driver.cuMemsetD8(outside, 7, 1))
    readable = memory.map(Access.READ)
    held = np.zeros(100, np.uint8)
    check(driver.cuMemcpyDtoH(held.ctypes.data, readable.pointer, 100))
    assert (held == 7).all()
    for mapping in (writable, readable):
        mapping.free()
    memory.release()
