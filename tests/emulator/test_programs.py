"""Programs of several launches: scratch buffers, outputs that begin as zeros, and buffers changed in place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.session import Executable
from greenfast.emulator import grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import GlobalMemory
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.implementation import build_image, build_side
from greenfast.judge.task import Shape, Variant
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.kernel import KernelSource, Launch, Program, Step, Workspace
from greenfast.spec.problem import Case, OutputSpec, to_dtype
from tests.emulator.kernels import TARGET

N = 64


def source(entry: str, parameters: str, body: str) -> KernelSource:
    text = f'extern "C" __global__ void {entry}({parameters}) {{ int i = threadIdx.x; {body} }}'
    return KernelSource(entry, text, f"{entry}.cu", (KERNEL_DIR,), (N, 1, 1))


def executable(program: Program) -> Executable:
    steps = ((build_image(compile_kernel(step.kernel, TARGET)), step.launch) for step in program.steps)
    return Executable(tuple(steps), program.workspaces)


SQUARE = Step(source("square", "const float* x, float* w", "w[i] = x[i] * x[i];"), Launch((1, 1, 1), ("x", "scratch")))
SUM = Step(source("sum", "const float* w, float* y", "atomicAdd(y, w[i]);"), Launch((1, 1, 1), ("scratch", "y")))
NORM = Program((SQUARE, SUM), {"scratch": Workspace(4 * N)})


def test_launches_share_scratch_buffers_and_an_output_may_begin_as_zeros() -> None:
    x = np.arange(N, dtype=np.float32)
    case = Case({"x": x}, {"y": OutputSpec((1,), "float32", zeros=True)})
    result = EmulatorSession().run(executable(NORM), case, 2)
    assert result.outputs["y"] == (x * x).sum()
    assert (result.violations, result.repeatable) == ([], True)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_leaves_nothing_in_memory(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers and access logs take much memory, and Python collects cycles rarely."""
    made: list[weakref.ref[ResidentBlocks]] = []
    memories: list[weakref.ref[GlobalMemory]] = []

    def remember(self: ResidentBlocks, before: Callable[[ResidentBlocks], None] = ResidentBlocks.__post_init__) -> None:
        before(self)
        made.append(weakref.ref(self))
        memories.append(weakref.ref(self.memory))

    monkeypatch.setattr(ResidentBlocks, "__post_init__", remember)
    case = Case({"x": np.zeros(N // 2 if wrong else N, np.float32)}, {"y": OutputSpec((1,), "float32", zeros=True)})
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KernelFaultError) if wrong else nullcontext():
            EmulatorSession().run(executable(NORM), case, 1)
        assert made
        assert [vars(machine) for ref in made if (machine := ref())] == []
        assert [ref for ref in memories if ref()] == []
    finally:
        gc.enable()


def test_a_scratch_buffer_holds_zeros_only_where_it_is_asked_for() -> None:
    case = Case({}, {"y": OutputSpec((1,), "float32", zeros=True)})
    zeros = Program((SUM,), {"scratch": Workspace(4 * N, zeros=True)})
    assert EmulatorSession().run(executable(zeros), case, 1).outputs["y"] == 0
    unwritten = Program((SUM,), {"scratch": Workspace(4 * N)})
    with pytest.raises(KernelFaultError, match="nothing has written: byte 0 of 'scratch'"):
        EmulatorSession().run(executable(unwritten), case, 1)


def test_a_buffer_changed_in_place_is_no_violation() -> None:
    twice = Step(source("twice", "float* x", "x[i] *= 2;"), Launch((1, 1, 1), ("x",)))
    x = np.arange(N, dtype=np.float32)
    result = EmulatorSession().run(
        executable(Program((twice, twice))), Case({"x": x}, {"x": OutputSpec((N,), "float32")}), 2
    )
    assert np.array_equal(result.outputs["x"], 4 * x)
    assert (result.violations, result.repeatable) == ([], True)


def test_a_table_that_a_launch_changes_is_a_violation() -> None:
    """The compiler took it for read-only; a write past the end of the variable in front of it finds it nevertheless."""
    body = "y[i] = table[i % 4]; if (i == 0) *(float*)((unsigned long long)table ^ x[0]) = 3;"
    text = (
        '__device__ float table[4] = {1, 2, 3, 4}; extern "C" __global__ void k(unsigned long long* x, float* y)'
        f"{{ int i = threadIdx.x; {body} }}"
    )
    built = compile_kernel(KernelSource("k", text, "k.cu", (), (4, 1, 1)), TARGET)
    image = replace(build_image(built), tables=("table",))
    case = Case({"x": np.zeros(1, np.uint64)}, {"y": OutputSpec((4,), "float32")})
    launch = Launch((1, 1, 1), ("x", "y"))
    result = EmulatorSession().run(Executable.single(image, launch), case, 1)
    assert result.violations == ["variable 'k: table' of its module was changed"]
    honest = replace(built.source, source=text.replace(body, "y[i] = table[i % 4];"))
    image = build_image(compile_kernel(honest, TARGET))
    assert image.tables == ("table",)
    assert EmulatorSession().run(Executable.single(image, launch), case, 2).violations == []


class NormFamily:
    """A family of several launches."""

    def program(self, toggles: object, fmt: str, dims: object, *, instrumented: bool = False) -> Program:
        return NORM


def test_a_side_holds_every_launch_by_a_name_of_its_own() -> None:
    shape = Shape(name="one", dims={"N": N})
    side = build_side("candidate", NormFamily(), Variant("norm", ()), "fp32", [shape], TARGET)  # type: ignore[arg-type]
    assert [kernel.source.entry for _, kernel in side.distinct] == ["square", "sum"]
    facts = side.programs["one"].name_launches("one", shape.dims)
    assert {name: kernel.source.entry for name, (kernel, _) in facts.items()} == {
        "one launch 0": "square",
        "one launch 1": "sum",
    }
    assert len(side.executable("one").steps) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_buffers_may_hold_the_small_formats(dtype: str) -> None:
    copy = Step(source("copy", "const char* x, char* y", "y[i] = x[i];"), Launch((1, 1, 1), ("x", "y")))
    kind = to_dtype(dtype)
    x = np.arange(N // kind.itemsize).astype(kind)
    result = EmulatorSession().run(executable(Program((copy,))), Case({"x": x}, {"y": OutputSpec(x.shape, dtype)}), 2)
    assert (result.outputs["y"].dtype, result.outputs["y"].tobytes()) == (kind, x.tobytes())


def test_machines_are_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold gigabytes for a grid of a hundred blocks with maximal shared memory."""
    alive = []
    real = ResidentBlocks

    def machine(**supplied: Any) -> Any:
        alive.append(sum(isinstance(x, real) for x in gc.get_objects()))
        return real(**supplied)

    monkeypatch.setattr(grid, "ResidentBlocks", machine)
    case = Case({"x": np.ones(N, np.float32)}, {"y": OutputSpec((1,), "float32", zeros=True)})
    gc.collect()
    gc.disable()
    try:
        EmulatorSession().run(executable(NORM), case, 4)
    finally:
        gc.enable()
    assert len(alive) == 8
    assert max(alive) <= 1
