"""The quantizer: its vector rule, its launch, and four small kernels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from greenfast.device.compiler import CompiledKernel, compile_kernel, to_ptx
from greenfast.device.machine_code import count_instructions, disassemble
from greenfast.judge.task import load_task
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource
from tasks.fp8_quantize import family as quantizer
from tasks.fp8_quantize import problem as quantize_problem

ADA = Target("sm_89")
CONFIG = load_task(Path(__file__).parents[2] / "tasks" / "fp8_quantize").config
SMALL = CONFIG.shape("small").dims


def render(fmt: str = "e4m3", vector: int = 1, **dims: int) -> KernelSource:
    rung = CONFIG.rung("quantize_vector" if vector else "quantize_scalar")
    return quantizer.kernel(CONFIG.rung_variant(rung).values, fmt, {**SMALL, **dims})


def listing(kernel: CompiledKernel) -> str:
    return disassemble(kernel.cubin, quantizer.ENTRY)


# The rules


@pytest.mark.parametrize(("S", "D"), [(1, 8), (8, 1), (2, 4), (32, 64), (3, 136)])
def test_vector_loads_where_heads_are_whole_vectors(S: int, D: int) -> None:
    assert "kVector = 8;" in render(S=S, D=D).source
    assert render(S=S, D=D).source == render().source, "one kernel for all shapes"


@pytest.mark.parametrize(("S", "D"), [(1, 1), (1, 12), (33, 63), (7, 4)])
def test_vector_loads_of_parts_are_refused(S: int, D: int) -> None:
    with pytest.raises(UsageError, match=rf"USE_VECTOR_LOADS=1 needs S \* D to be a multiple of 8, got {S} \* {D}"):
        render(S=S, D=D)
    assert "kVector = 1;" in render(vector=0, S=S, D=D).source


@pytest.mark.parametrize("fmt", ["fp8", "E4M3", ""])
def test_unknown_format(fmt: str) -> None:
    with pytest.raises(UsageError, match=f"unknown format {fmt!r}; allowed: e4m3, int8"):
        render(fmt)


@pytest.mark.parametrize("dims", [{}, {"S": 32, "D": 64}, {**SMALL, "H": 0}, {"M": 4, "N": 4, "K": 4}])
@pytest.mark.parametrize("vector", [0, 1])
def test_other_dimensions(dims: dict[str, int], vector: int) -> None:
    with pytest.raises(UsageError, match="needs B, H, S and D, each at least 1; got"):
        quantizer.kernel({"USE_VECTOR_LOADS": vector}, "e4m3", dims)


def test_no_instrumented_build() -> None:
    with pytest.raises(UsageError, match="no instrumented build"):
        quantizer.kernel({"USE_VECTOR_LOADS": 0}, "e4m3", SMALL, instrumented=True)


# The launch


def test_one_block_per_head_with_the_buffers_of_the_case() -> None:
    dims = {"B": 2, "H": 3, "S": 40, "D": 64}
    launch = quantizer.launch({}, "e4m3", dims)
    assert launch.grid == (6, 1, 1)
    assert launch.args == ("x", "codes", "scale", np.int32(40 * 64))
    assert isinstance(launch.args[-1], np.int32)
    (declared,) = re.findall(r"quantize_heads\((const half\* [^)]*)\)", render().source)
    assert declared == "const half* x, unsigned char* codes, float* scale, int elements"
    case = quantize_problem.make_case(dims, 0, "e4m3")
    assert {n: str(a.dtype) for n, a in case.inputs.items()} == {"x": "float16"}
    assert {n: o.dtype for n, o in case.outputs.items()} == {"codes": "uint8", "scale": "float32"}


# The kernels


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_both_loads_compile_to_what_they_say(fmt: str) -> None:
    scalar, vector = (compile_kernel(render(fmt, v), ADA) for v in (0, 1))
    for kernel in (scalar, vector):
        assert kernel.source.block == (512, 1, 1)
        assert kernel.resources.spill_bytes == kernel.resources.stack_bytes == 0
        assert kernel.resources.smem_bytes >= 512 // 32 * 4, "one amax per warp"
        assert count_instructions(listing(kernel))["local_memory"] == 0
    for kernel, rung in zip((scalar, vector), CONFIG.rungs, strict=True):
        assert kernel.resources.registers <= rung.budget.registers
        assert kernel.resources.smem_bytes <= rung.budget.smem_bytes
    assert re.search(r"LDG\.E\.128\b", listing(vector))
    assert re.search(r"STG\.E\.64\b", listing(vector)), "eight codes"
    assert not re.search(r"(LDG|STG)\.E\.(64|128)\b", listing(scalar))


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_the_quotient_is_an_ieee_division(fmt: str) -> None:
    """An approximate one would differ from the reference in a code now and then."""
    ptx = to_ptx(render(fmt), ADA, assemble=False)
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(approx|full)|rcp\.", ptx)


def test_formats_are_different_kernels() -> None:
    assert compile_kernel(render("e4m3"), ADA).cubin != compile_kernel(render("int8"), ADA).cubin
    assert "e4m3x2" in to_ptx(render("e4m3"), ADA, assemble=False), "the conversion of the hardware"
    assert "e4m3x2" not in to_ptx(render("int8"), ADA, assemble=False)
