"""Python functions that launch Triton kernels, recorded as programs without a GPU: honest ones and cheats."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, unused-ignore"

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs greenfast[triton]")

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from greenfast.cli.main import main
from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import KernelLaunch, run_chain
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import WRITTEN, GlobalMemory
from greenfast.judge.solution.messages import Rendered, decode_program, encode_program
from greenfast.judge.solution.recording import Recording
from greenfast.judge.solution.tensor_operations import OperationRunner
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, UnsupportedError, UsageError
from greenfast.spec.kernel import TensorOperation, TensorView
from greenfast.spec.problem import OutputSpec


@triton.jit
def scale(x, w, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * tl.load(w + i, mask=i < n), mask=i < n)


@triton.jit
def add_to(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y + i, tl.load(x + i, mask=i < n), mask=i < n)


N = 100
EXAMPLE, OTHER = np.random.default_rng(0).standard_normal((2, N)).astype(np.float32)
_WEIGHT = np.arange(N, dtype=np.float32)


def replay(function: Callable[..., Any], x: Any = OTHER) -> Any:
    """Record a function on EXAMPLE, and run its program on other inputs in the emulator."""
    with Recording("sm_90a") as recording:
        given = torch.from_numpy(EXAMPLE.copy()).cuda()
        wanted = torch.empty(N, device="cuda")
        program = recording.record(function, [given], {"x": given}, {"y": wanted})
    target = Target("sm_90a")
    steps = [
        KernelLaunch(
            step.kernel.source if step.kernel.language == "ptx" else to_ptx(step.kernel, target),
            step.kernel.entry,
            step.kernel.block,
            step.kernel.dynamic_smem_bytes,
            step.launch,
        )
        for step in program.steps
    ]
    program = decode_program(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_program(program)), type=Rendered))
    operations: dict[int, list[OperationRunner]] = {}
    for operation in program.operations:
        operations.setdefault(operation.step, []).append(OperationRunner(operation))
    outputs = {"y": OutputSpec((N,), "float32")}
    result = run_chain(steps, {"x": x}, outputs, workspaces=program.workspaces, explore=True, operations=operations)
    assert not result.input_writes
    assert not result.differences
    assert not result.unwritten["y"]
    return result.outputs["y"]


def weight() -> torch.Tensor:
    return torch.from_numpy(_WEIGHT).cuda()


def scaled(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.empty_like(x) if y is None else y
    scale[(2,)](x, weight(), y, N, BLOCK=64)
    return y


def test_a_launch_into_memory_of_its_own() -> None:
    assert np.array_equal(replay(scaled), OTHER * _WEIGHT)


def test_constants_fills_copies_and_atomics() -> None:
    packed: dict[str, torch.Tensor] = {}

    def run(x: torch.Tensor) -> torch.Tensor:
        packed.setdefault("w", torch.flip(weight(), (0,)) + 1)  # made in the first call, from constants alone
        total, doubled = torch.zeros_like(x), x.clone()
        scale[(2,)](doubled, packed["w"], doubled, N, BLOCK=64)
        add_to[(2,)](doubled, total, N, BLOCK=64)
        doubled.zero_()
        total[1:].clone()  # a copy from a place that is no multiple of 16
        add_to[(2,)](doubled, total, N, BLOCK=64)
        return total.view(10, 10).view(N)

    assert np.array_equal(replay(run), OTHER * (_WEIGHT[::-1] + 1))


def test_arithmetic_of_pytorch_between_launches() -> None:
    """Before, between and after the kernels: a layer, conversions, views, in-place operations, indices."""
    layer = torch.nn.Linear(N, N, bias=True)
    conv = torch.nn.Conv1d(1, 2, 3, padding=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            before = torch.nn.functional.gelu(layer.cuda()(x[None]))[0]
            y = scaled(before)
            y[::2] *= 2
            y.view(10, 10).t().add_(1)
            y = conv.cuda()(y.half().float()[None, None])[0].sum(0)
            largest, where = y.sort(descending=True)
            return torch.where(where > 50, scaled(largest), torch.cat([y[50:], y[:50]]))

    with torch.no_grad():
        x = torch.from_numpy(OTHER)
        y = torch.nn.functional.gelu(layer.cpu()(x)) * torch.from_numpy(_WEIGHT)
        y[::2] *= 2
        y = conv.cpu()((y + 1).half().float()[None, None])[0].sum(0)
        largest, where = y.sort(descending=True)
        expected = torch.where(where > 50, largest * torch.from_numpy(_WEIGHT), torch.cat([y[50:], y[:50]]))
    np.testing.assert_allclose(replay(run), expected.numpy(), rtol=1e-5)


def test_pytorch_alone() -> None:
    """It is repeated on other inputs; data that the function keeps of the example is an earlier call's memory."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return kept[0] + x

    assert np.array_equal(replay(lambda x: torch.mul(x, weight()).to("cuda")), OTHER * _WEIGHT)
    with pytest.raises(MachineError, match="an earlier call wrote"):
        replay(keep)
    with pytest.raises(KernelFaultError, match="nothing has written"):
        replay(lambda x: torch.empty_like(x) + x)


def test_pytorch_finds_memory_that_nothing_has_written() -> None:
    """The second half of y is read; a kernel that reads it after a copy finds it too."""

    def half(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        scale[(1,)](x, weight(), y, N // 2, BLOCK=64)
        return y

    with pytest.raises(KernelFaultError, match=r"aten\.add\.Tensor: a read .* nothing has written: 200 bytes"):
        replay(lambda x: half(x) + 1)
    with pytest.raises(KernelFaultError, match="nothing has written"):
        replay(lambda x: scaled(half(x).clone()))
    assert np.array_equal(replay(lambda x: torch.where(x.abs() < 9, scaled(x), half(x))), OTHER * _WEIGHT)


def test_an_operation_from_outside_is_checked() -> None:
    x = TensorView("x", "float32", (4,), (1,), 0)
    memory = GlobalMemory({"x": 16})
    memory.get_states("x")[:] = WRITTEN
    for name, args in (
        ("aten.from_file.default", ["/etc/passwd"]),
        ("aten.set_.source_Storage", [x, x]),
        ("aten.add.Tensor", [x, replace(x, shape=(5,))]),
        ("aten.add.Tensor", [x, replace(x, offset=1)]),
        ("aten.add.Tensor", [x, replace(x, dtype="load")]),
        ("aten.sum.default", [x]),
    ):
        operation = TensorOperation(0, name, args, {}, (), False, (x,))
        with pytest.raises(UnsupportedError, match="repeat"):
            OperationRunner(operation).run(memory)


def test_an_answer_of_the_input_is_no_other_answer() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        scaled(x)
        return x

    assert np.array_equal(replay(run), OTHER)


def test_an_answer_computed_on_the_host_keeps_the_example() -> None:
    """Its inputs are read without PyTorch; other inputs get the example's answer, which is wrong."""

    def run(x: torch.Tensor) -> torch.Tensor:
        scaled(x)
        values = (ctypes.c_float * N).from_address(x.data_ptr())
        return torch.tensor([v * w for v, w in zip(values, _WEIGHT.tolist(), strict=True)], device="cuda")

    assert np.allclose(replay(run), EXAMPLE * _WEIGHT)


def test_a_kept_answer_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(scaled(x))
        return kept[0]

    with pytest.raises(MachineError, match="an earlier call wrote"):
        replay(run)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: weight(), UsageError, "launched nothing"),
        (lambda x: scaled(x).masked_select(x > 0), MachineError, r"PyTorch computes aten\.masked_select\.default"),
        (lambda x: torch.rand_like(scaled(x)), MachineError, r"PyTorch computes aten\.rand_like\.default"),
        (lambda x: torch.empty(N, dtype=torch.float16, device="cuda"), UsageError, r"returned torch\.float16 \(100,\)"),
        (lambda x: torch.empty(2, N, device="cuda"), UsageError, r"the problem requires torch\.float32 \(100,\)"),
        (lambda x: scaled(x).cpu(), UsageError, "to the host"),
        (lambda x: scaled(x) if x[0].item() else None, UsageError, "reads a value of its inputs on the host"),
        (lambda x: None, UsageError, "launched nothing"),
        (lambda x: torch.cuda.CUDAGraph(), Exception, "CUDAGraph is not emulated"),
    ],
)
def test_what_no_program_can_be(function: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replay(function)


PROBLEM = """
import torch, torch.nn as nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(48))
    def forward(self, x):
        return x * self.w
def get_inputs(): return [torch.randn(4, 48)]
def get_init_inputs(): return []
"""
SOLUTION = """
import torch, torch.nn as nn, triton, triton.language as tl
@triton.jit
def scale(x, w, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    row = tl.program_id(0) * n
    tl.store(y + row + i, tl.load(x + row + i, mask=i < n) * tl.load(w + i, mask=i < n), mask=i < n)
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(48))
    def forward(self, x):
        assert x.is_cuda
        y = torch.empty_like(x)
        with torch.cuda.device(x.device):
            scale[(4,)](x, self.w, y, 48, B=64)
        return y
"""


@pytest.mark.slow
def test_a_kernelbench_solution_gets_a_verdict_of_correctness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wrong one multiplies by the neighbour of each weight."""
    (tmp_path / "problem.py").write_text(PROBLEM)
    verdicts = {}
    for name, text in {"right": SOLUTION, "wrong": SOLUTION.replace("tl.load(w + i,", "tl.load(w + (i ^ 1),")}.items():
        (tmp_path / f"{name}.py").write_text(text)
        main(["judge", str(tmp_path / f"{name}.py"), "--problem", str(tmp_path / "problem.py"), "--out", str(tmp_path)])
        lines = capsys.readouterr().out.splitlines()
        verdicts[name] = [line.split()[1] for line in lines if line.startswith(("CORRECTNESS", "PERFORMANCE"))]
    assert verdicts == {"right": ["PASS", "PENDING"], "wrong": ["FAIL", "PENDING"]}
