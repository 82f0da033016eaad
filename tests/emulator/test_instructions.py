"""What the catalog of instructions has no operands or no form for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.emulator.instructions.floats import fused
from tests.emulator.kernels import run


def test_fused_multiply_add_rounds_once() -> None:
    """The product is 2**24 + 1, halfway between two float32; in float64 the addends leave no trace in the sum."""
    a, b, c = np.array([[24929] * 3, [673] * 3, [2.0**-40, -(2.0**-40), 0]], np.float32)
    assert fused(a, b, c).tolist() == [2.0**24 + 2, 2.0**24, 2.0**24]


def test_expf_as_it_is_without_fast_math() -> None:
    """It adds a number of magic with fma.rm."""
    x = np.linspace(-20, 20, 64, dtype=np.float32)
    result = run("y[threadIdx.x] = expf(x[threadIdx.x]);", {"x": x}, {"y": (64, "float32")}, threads=64)
    assert np.allclose(result.outputs["y"], np.exp(x.astype(np.float64)), rtol=3e-7, atol=0)


def test_constant_memory_holds_its_values() -> None:
    result = run(
        "y[threadIdx.x] = table[(int)x[threadIdx.x]];",
        {"x": np.arange(32, dtype=np.float32) % 4},
        {"y": (32, "float32")},
        before="__constant__ float table[4] = {5, 6, 7, 8};",
    )
    assert result.outputs["y"].tolist() == [5, 6, 7, 8] * 8


@pytest.mark.parametrize("op", ["/", "%"])
def test_what_a_division_by_zero_gives_is_another_thing_in_another_order(op: str) -> None:
    """The ISA leaves the result open, so outputs that depend on it differ between runs."""
    how: dict[str, Any] = {"parameters": "unsigned* y, unsigned zero", "args": ("y", np.uint32(0))}
    first, other = (
        run(f"y[threadIdx.x] = threadIdx.x {op} zero;", {}, {"y": (32, "uint32")}, seed=seed, **how).outputs["y"]
        for seed in range(2)
    )
    assert first.tolist() == [0xFFFFFFFF] * 32
    assert other.tolist() == [0] * 32


def test_the_place_of_a_warp_tells_warps_of_a_block_apart_and_is_not_their_number() -> None:
    body = """unsigned place; asm volatile("mov.u32 %0, %%warpid;" : "=r"(place));
    if (threadIdx.x % 32 == 0) y[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = place;"""
    result = run(body, {}, {"y": (16, "uint32")}, threads=256, blocks=2).outputs["y"].reshape(2, 8)
    assert all(len(set(places)) == 8 and max(places) < 64 for places in result.tolist())
    assert (result != np.arange(8)).all()
