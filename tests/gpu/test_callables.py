"""Python callables: captured in a confined process, replayed in another one on inputs that they never saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.device.rotating_buffers import WRONG_VARIABLES
from greenfast.device.session import Executable
from greenfast.device.worker import Worker
from greenfast.judge.implementation import build_image
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.schema import SolutionConfig
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec, to_dtype

pytestmark = pytest.mark.gpu

DIMS = {"R": 256, "C": 512}


class Matrices:
    """Inputs x and w of some dtype; the output y is like x unless ``outputs`` says otherwise."""

    def __init__(self, dtype: str = "float32", outputs: Mapping[str, OutputSpec] | None = None) -> None:
        self.dtype, self.outputs = dtype, outputs

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((dims["R"], dims["C"])).astype(to_dtype(self.dtype))
        w = rng.standard_normal((dims["C"], dims["C"])).astype(to_dtype(self.dtype))
        return Case({"x": x, "w": w}, dict(self.outputs or {"y": OutputSpec(x.shape, self.dtype)}))


def replay(folder: Path, body: str, problem: Matrices, seed: int = 5) -> tuple[Case, dict[str, np.ndarray]]:
    """What the captured launches of ``run`` leave on inputs of another seed, in another process."""
    (folder / "mine.py").write_text(f"import torch\n{body}\n")
    solution = SolutionConfig(name="mine", language="callable", file="mine.py")
    family = RemoteFamily("mine", folder, solution, problem=problem, gpu=0)  # type: ignore[arg-type]
    program = family.program({}, "", DIMS)
    capability = torch.cuda.get_device_capability()
    target = Target.of_device(capability)
    steps = tuple((build_image(compile_kernel(step.kernel, target)), step.launch) for step in program.steps)
    case = problem.make_case(DIMS, seed, "")
    with Worker(0, timeout_s=60) as worker:
        result = worker.run(Executable(steps, program.workspaces), case, 2)
    assert (result.violations, result.repeatable) == ([], True)
    return case, result.outputs


def tensors(case: Case) -> list[torch.Tensor]:
    return [
        torch.from_numpy(a.view(np.uint8).copy()).view(getattr(torch, a.dtype.name)).reshape(a.shape).cuda()
        for a in case.inputs.values()
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "expression",
    [
        "torch.softmax(x, -1)",
        "x @ w",  # cuBLAS packs its arguments into one buffer
        "torch.nn.functional.gelu(x @ w) + torch.zeros_like(x)",  # a fill, several launches, memory between them
        "x.sort(-1)[0]",  # copies
        "torch.nn.functional.layer_norm(x, (512,))",
        "torch.pow(x.abs(), 1.5)",  # whose module has tables of constants
        # the result lies where a larger one lay before
        "((x.double() * x.double().pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype) * w[0]).to(x.dtype)",
    ],
)
def test_a_replay_computes_what_the_callable_does(tmp_path: Path, dtype: str, expression: str) -> None:
    case, outputs = replay(tmp_path, f"def run(x, w):\n    return {expression}", Matrices(dtype))
    x, w = tensors(case)
    right = eval(expression, {"torch": torch, "x": x, "w": w})
    assert outputs["y"].tobytes() == right.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def test_the_function_itself_is_timed(tmp_path: Path) -> None:
    """Without host time: a call of many small kernels takes the host longer than the device."""
    body = "def run(x, w):\n    for _ in range(20):\n        x = x + 1\n    torch.cuda._sleep(400_000)\n    return x"
    (tmp_path / "mine.py").write_text(f"import torch\n{body}\n")
    solution = SolutionConfig(name="mine", language="callable", file="mine.py")
    problem = Matrices()
    family = RemoteFamily("mine", tmp_path, solution, problem=problem, gpu=0)  # type: ignore[arg-type]
    program = family.program({}, "", DIMS)
    assert len(program.steps) >= 21
    assert 200 < program.function_us < 600
    target = Target.of_device(torch.cuda.get_device_capability())
    steps = tuple((build_image(compile_kernel(step.kernel, target)), step.launch) for step in program.steps)
    with Worker(0, timeout_s=60) as worker:
        executable = Executable(steps, program.workspaces, program.allocations)
        assert worker.prepare("k", executable, [problem.make_case(DIMS, 5, "")], 20, 0).wrong is None
        replay_us = float(np.median(worker.time("k", 5, 50, False, 1).samples_us))
    assert replay_us == pytest.approx(program.function_us, rel=0.2)


def test_weights_that_it_keeps_travel_with_it(tmp_path: Path) -> None:
    body = "torch.manual_seed(3)\nKEPT = torch.randn(512, device='cuda')\ndef run(x, w):\n    return x * KEPT"
    case, outputs = replay(tmp_path, body, Matrices())
    torch.manual_seed(3)
    assert np.array_equal(outputs["y"], (tensors(case)[0] * torch.randn(512, device="cuda")).cpu().numpy())


def test_a_result_that_was_kept_from_another_call_is_wrong_here(tmp_path: Path) -> None:
    body = "kept = {}\ndef run(x, w):\n    return torch.mul(kept.setdefault(x.shape, x * 2), 1)"
    case, outputs = replay(tmp_path, body, Matrices())
    assert not np.array_equal(outputs["y"], 2 * case.inputs["x"])


def test_work_on_other_streams_and_threads_is_part_of_the_program(tmp_path: Path) -> None:
    body = """
def run(x, w):
    side, now = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(now)
    with torch.cuda.stream(side):
        y = x * 3
    now.wait_stream(side)
    return y + 1
"""
    case, outputs = replay(tmp_path, body, Matrices())
    assert np.array_equal(outputs["y"], 3 * case.inputs["x"] + 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def run(x, w):\n    return x * x.max().item()", "cannot be captured"),
        ("def run(x, w):\n    return x.t()", "output 'y': it returned torch.float32"),
        ("def run(x, w):\n    return x, w", "it returned 2 values"),
        ("def run(x, w):\n    return x.half()", "float16"),
        ("def other(x):\n    return x", "run"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_words(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replay(tmp_path, body, Matrices())


COUNTS = """__device__ int calls;
extern "C" __global__ void counts(const float* x, float* y) {
  y[blockIdx.x * 512 + threadIdx.x] = x[blockIdx.x * 512 + threadIdx.x];
  if (blockIdx.x + threadIdx.x == 0) CHANGE;
}
"""


@pytest.mark.parametrize(("change", "state"), [("++calls", True), ("if (calls) y[0] = 0", False)])
def test_state_in_a_variable_of_machine_code_is_found(change: str, state: bool) -> None:
    target = Target.of_device(torch.cuda.get_device_capability())
    source = KernelSource("counts", COUNTS.replace("CHANGE", change), "counts.cu", (), (512, 1, 1))
    binary = compile_kernel(source, target).cubin
    given = KernelSource("counts", "", "counts.cubin", (), (512, 1, 1), language="cubin", binary=binary)
    image = build_image(compile_kernel(given, target))
    assert image.variables == ("calls",)
    executable = Executable.single(image, Launch((256, 1, 1), ("x", "y")))
    case = Matrices().make_case(DIMS, 0, "")
    with Worker(0, timeout_s=60) as worker:
        result = worker.run(executable, case, 2)
        assert result.violations == (["variable 'counts: calls' of its module was changed"] if state else [])
    with Worker(0, timeout_s=60) as worker:
        started = worker.prepare("k", executable, [case], 3, 0)
        assert (started.wrong is not None and WRONG_VARIABLES in str(started.wrong)) == state


REFUSED = """
import ctypes, os, resource, socket

def run(x, w):
    judge, refused = os.getppid(), []
    for attack in (
        lambda: os.sched_setaffinity(judge, {0}),
        lambda: os.setpriority(os.PRIO_PROCESS, judge, 5),
        lambda: resource.prlimit(judge, resource.RLIMIT_NOFILE, (64, 64)),
        lambda: os.chmod(__file__, 0o666),
        lambda: os.utime(__file__, (0, 0)),
        lambda: socket.socket(socket.AF_INET),
    ):
        try:
            attack()
        except OSError:
            refused.append(True)
    assert len(refused) == 6, refused
    return torch.softmax(x @ w, -1)
"""


def test_the_driver_runs_under_the_filter_that_refuses_the_rest(tmp_path: Path) -> None:
    """If this fails where others pass, the driver needs a call that the filter refuses: strace -f shows EPERM."""
    (tmp_path / "mine.py").write_text(f"import torch\n{REFUSED}")
    solution = SolutionConfig(name="mine", language="callable", file="mine.py")
    family = RemoteFamily("mine", tmp_path, solution, problem=Matrices(), gpu=0)  # type: ignore[arg-type]
    assert {"no network", "system calls by seccomp", "no new privileges"} <= set(family.sandbox)
    assert family.program({}, "", DIMS).steps
