"""The emulator's tests of Hopper instructions, their kernels run on the hardware too."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from greenfast.build.compiler import compile_kernel
from greenfast.emulator.grid import GridResult
from greenfast.runtime.device import Gpu, KernelImage
from tests.emulator import hopper
from tests.emulator import test_hopper_copies as copies
from tests.emulator import test_hopper_instructions as instructions
from tests.emulator import test_hopper_pipeline as pipeline
from tests.emulator import test_hopper_products as products

pytestmark = pytest.mark.gpu

# Hopper adds products of 8-bit floats with some 14 bits of significand; the largest sum decides what is lost.
LOST = 2.0**-10


def both(*args: Any, seed: int = 0, **more: Any) -> GridResult:
    """What the emulator makes of a kernel, once the hardware has been seen to make the same."""
    emulated = hopper.run(*args, seed=seed, **more)
    asked = hopper.request(*args, **more)
    gpu = Gpu()
    compiled = compile_kernel(asked.kernel, hopper.HOPPER)
    image = KernelImage(compiled.cubin, "k", asked.kernel.block, asked.kernel.dynamic_smem_bytes)
    bound = gpu.bind(image, asked.plan, asked.case)
    measured = bound.run()
    assert bound.violations() == []
    bound.free()
    for name, found in measured.items():
        expected = emulated.outputs[name]
        if found.dtype.kind == "f":
            assert np.allclose(expected, found, rtol=0, atol=LOST * np.abs(found).max())
        else:
            assert np.array_equal(expected, found)
    return emulated


@pytest.fixture(autouse=True)
def on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    if Gpu().capability != (9, 0):
        pytest.skip("these kernels are Hopper's")
    modules: tuple[ModuleType, ...] = (copies, instructions, pipeline, products)
    for module in modules:
        monkeypatch.setattr(module, "run", both)


@pytest.mark.parametrize(("k", "width"), [(64, 64), (128, 128), (128, 64), (64, 32)])
@pytest.mark.parametrize("n", [8, 128])
def test_e4m3_products(k: int, width: int, n: int) -> None:
    products.test_tensor_copy_and_e4m3_product(k, width, n)


@pytest.mark.parametrize(
    ("kind", "width", "n"), [("f16", 128, 128), ("f16", 64, 64), ("bf16", 128, 64), ("f16", 32, 32)]
)
def test_transposed_operands(kind: str, width: int, n: int) -> None:
    products.test_16_bit_product_with_transposed_b(kind, width, n)


def test_other_products() -> None:
    products.test_8_bit_integers_without_swizzle_accumulate()
    products.test_a_from_registers_and_negated()
    products.test_other_8_bit_floats("e4m3.e5m2")
    products.test_a_wait_that_leaves_a_group_under_way()


def test_pipelines() -> None:
    pipeline.test_producer_and_two_consumers(0)
    instructions.test_two_warpgroups_take_turns(0)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_copies_of_tiles(swizzle: int) -> None:
    copies.test_a_tile_goes_through_swizzled_shared_memory(swizzle)


def test_other_copies() -> None:
    copies.test_swizzle_of_shared_memory()
    copies.test_elements_that_start_between_pieces_of_16_bytes()
    copies.test_bulk_copies_without_a_tensor_map()


def test_instructions() -> None:
    instructions.test_elect()
    instructions.test_movmatrix()
    instructions.test_barrier_reductions()
    instructions.test_threads_of_a_warp_wait_for_each_other()
    instructions.test_a_state_token_and_test_wait()
    instructions.test_cache_hints_and_dependent_launches_change_nothing()
    for count in (1, 2, 4):
        for turned in ("", ".trans"):
            instructions.test_stmatrix_is_the_inverse_of_ldmatrix(count, turned)
    instructions.test_mma("m16n8k32", "f32.e4m3.e4m3.f32", 32)
    instructions.test_mma("m16n8k32", "s32.s8.s8.s32", 32)
    instructions.test_mma("m16n8k16", "f32.bf16.bf16.f32", 32)
