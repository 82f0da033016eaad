"""RESOURCES of machine code alone: what may be state, and what is compared after the launches instead."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.module_variables import HEAP_BYTES
from greenfast.judge.gates.resources import _count_state_bytes, check_budgets
from greenfast.judge.implementation import BuiltProgram, BuiltSide, build_image, watched_variables
from greenfast.judge.task import Budget, BudgetWhere, Rung, Shape, Variant
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch, Program, Step

#: A table that is read, a counter of launches, and a kernel that has neither.
SOURCE = """__device__ float table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__constant__ float halves[2] = {0.5f, 1.5f};
__device__ int calls;
extern "C" __global__ void reads(float* y, int n) { y[threadIdx.x] = table[n & 7] * halves[n & 1]; }
extern "C" __global__ void counts(float* y) { y[threadIdx.x] = atomicAdd(&calls, 1); }
extern "C" __global__ void neither(float* y) { y[threadIdx.x] = 1; }
extern "C" __global__ void allocates(float** y) { y[threadIdx.x] = new float[4]; }
__device__ __noinline__ void* block(int n) { return malloc(n); }
extern "C" __global__ void through_a_function(void** y, int n) { y[threadIdx.x] = block(n); }
"""
TARGET = Target("sm_90a")


@pytest.fixture(scope="module")
def source() -> KernelSource:
    return KernelSource("reads", SOURCE, "state.cu", (), (32, 1, 1))


def as_cubin(source: KernelSource, entry: str) -> CompiledKernel:
    binary = compile_kernel(source, TARGET).cubin
    given = KernelSource(entry, "", f"{entry}.cubin", (), (32, 1, 1), language="cubin", binary=binary)
    return compile_kernel(given, TARGET)


@pytest.mark.parametrize(("entry", "watched", "nbytes"), [("counts", ("calls",), 4), ("neither", (), 0)])
def test_variables_of_machine_code_are_compared(
    source: KernelSource, entry: str, watched: tuple[str, ...], nbytes: int
) -> None:
    kernel = as_cubin(source, entry)
    assert kernel.resources.global_bytes > 0  # of the module
    assert watched_variables(kernel) == build_image(kernel).variables == watched
    assert _count_state_bytes(kernel) == (0, nbytes)


@pytest.mark.parametrize("entry", ["allocates", "through_a_function"])
def test_the_device_heap_counts_for_machine_code_that_allocates(source: KernelSource, entry: str) -> None:
    """What lies there outlives a launch and cannot be compared; ``neither``, of the same module, has none of it."""
    assert _count_state_bytes(as_cubin(source, entry))[0] == HEAP_BYTES


def test_a_table_is_compared_too(source: KernelSource) -> None:
    kernel = as_cubin(source, "reads")
    assert "table" in watched_variables(kernel)
    assert _count_state_bytes(kernel)[1] >= 32


def test_memory_without_a_name_cannot_be_compared(source: KernelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = as_cubin(source, "counts")
    for module in ("gates.resources", "implementation"):
        monkeypatch.setattr(f"greenfast.judge.{module}.state_variables", lambda _: {"": 20, "calls": 4})
    assert _count_state_bytes(kernel) == (20, 4)


def test_what_ptx_shows_is_decided_by_it(source: KernelSource) -> None:
    kernel = compile_kernel(dataclasses.replace(source, entry="counts"), TARGET)
    assert watched_variables(kernel) == ()
    assert _count_state_bytes(kernel) == (kernel.resources.global_bytes, 0)
    assert kernel.resources.global_bytes >= 4


def make_run(side: BuiltSide, rung: Rung, shapes: list[Shape]) -> Any:
    """A run with all that RESOURCES reads of it."""
    return SimpleNamespace(
        sides=[side],
        implementations={side.role: SimpleNamespace(requirements=rung)},
        request=SimpleNamespace(built_shapes=shapes),
    )


def test_the_reason_names_the_variables(source: KernelSource) -> None:
    kernel = compile_kernel(dataclasses.replace(source, entry="counts"), TARGET)
    program = BuiltProgram(Program((Step(kernel.source, Launch((1, 1, 1), ("y",))),)), (kernel,))
    side = BuiltSide("candidate", Variant("one", ()), {"wide": program})
    rung = Rung(name="one", title="", budget=Budget(registers=255, smem_bytes=0))
    (reason,) = check_budgets(make_run(side, rung, [Shape(name="wide", dims={"D": 1})])).reasons
    assert reason.endswith("allows 0 (written, or its address is used for more than loads: calls)")


def test_a_kernel_meets_the_budget_of_every_shape(source: KernelSource) -> None:
    """The first shape that runs it may have the largest."""
    kernel = compile_kernel(dataclasses.replace(source, entry="neither"), TARGET)
    program = BuiltProgram(Program((Step(kernel.source, Launch((1, 1, 1), ("y",))),)), (kernel,))
    side = BuiltSide("candidate", Variant("one", ()), {"wide": program, "narrow": program, "thin": program})
    wide = BudgetWhere(registers=255, smem_bytes=0, device_state_bytes=1 << 30, when={"D": 128})
    rung = Rung(
        name="one", title="", budget=Budget(registers=1, smem_bytes=0, device_state_bytes=1 << 30), budget_where=[wide]
    )
    shapes = [Shape(name=name, dims={"D": d}) for name, d in (("wide", 128), ("narrow", 64), ("thin", 32))]
    result = check_budgets(make_run(side, rung, shapes))
    used = kernel.resources.registers
    assert result.reasons == [f"candidate one (narrow): registers is {used}, the budget of one allows 1"]
    assert len(result.checks) == 2 * 5
