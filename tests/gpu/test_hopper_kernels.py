"""The emulator's tests of Hopper instructions, with their kernels run on the hardware too.

The hardware runs in a separate process, which is restarted after a kernel breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage, RunResult
from greenfast.device.worker import Worker, WorkerError
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.result import GridResult
from tests.emulator import hopper, kernels
from tests.emulator import test_hopper_copies as copies
from tests.emulator import test_hopper_instructions as instructions
from tests.emulator import test_hopper_pipeline as pipeline
from tests.emulator import test_hopper_products as products

pytestmark = pytest.mark.gpu

# Hopper adds products of 8-bit floats with about 14 bits of significand; the largest sum determines what is lost.
LOST = 2.0**-10
TIMEOUT_S = 20.0

_worker: list[Worker] = []


@pytest.fixture(scope="module", autouse=True)
def worker_ends() -> Iterator[None]:
    yield
    while _worker:
        _worker.pop().close()


def on_gpu(asked: kernels.Request) -> RunResult:
    """The hardware's result. Raises WorkerError if the kernel fails."""
    compiled = compile_kernel(asked.kernel, hopper.HOPPER)
    image = KernelImage(compiled.cubin, "k", asked.kernel.block, asked.kernel.dynamic_smem_bytes)
    if not _worker:
        _worker.append(Worker(0, timeout_s=TIMEOUT_S))
    try:
        return _worker[0].run(Executable.single(image, asked.plan), asked.case, 1)
    except WorkerError:
        _worker.clear()  # it is closed
        raise


def both(*args: Any, seed: int = 0, **more: Any) -> GridResult:
    """The emulator's result, after checking that the hardware's is the same."""
    emulated = hopper.run(*args, seed=seed, **more)
    measured = on_gpu(hopper.request(*args, **more))
    assert measured.violations == []
    for name, found in measured.outputs.items():
        expected = emulated.outputs[name]
        if found.dtype.kind == "f":
            assert np.allclose(expected, found, rtol=0, atol=LOST * np.abs(found).max())
        else:
            assert np.array_equal(expected, found)
    return emulated


def both_or_neither(*args: Any, **more: Any) -> GridResult:
    """As ``both``; if the emulator finds a fault, the hardware must refuse the kernel, too."""
    try:
        return both(*args, **more)
    except KernelFaultError:
        with pytest.raises(WorkerError, match=r"(?i)illegal.?instruction"):
            on_gpu(hopper.request(*args, **more))
        raise


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


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_copies_of_tiles(swizzle: int) -> None:
    copies.test_a_tile_goes_through_swizzled_shared_memory(swizzle)


@pytest.mark.parametrize("start", [8, 16])
def test_rows_that_end_between_chunks_of_16_bytes(start: int) -> None:
    copies.test_rows_that_end_between_chunks_of_16_bytes(start)


@pytest.mark.parametrize(("old", "new"), [("&bar, 32, 8", "&bar, 3, 8"), ("s, 64, 0", "s, 1, 0")])
def test_tiles_that_begin_between_chunks_of_16_bytes(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "run", both_or_neither)
    copies.test_tiles_that_begin_between_chunks_of_16_bytes_are_refused(old, new)


def test_other_8_bit_floats() -> None:
    products.test_other_8_bit_floats("e4m3.e5m2")


@pytest.mark.parametrize(
    "kernel", [pipeline.test_producer_and_two_consumers, instructions.test_two_warpgroups_ping_pong]
)
def test_pipelines(kernel: Callable[[int], None]) -> None:
    kernel(0)


@pytest.mark.parametrize(
    "kernel",
    [
        products.test_8_bit_integers_without_swizzle_accumulate,
        products.test_a_from_registers_and_negated,
        products.test_a_wait_that_leaves_a_group_under_way,
        copies.test_swizzle_of_shared_memory,
        copies.test_bulk_copies_without_a_tensor_map,
        instructions.test_barrier_reductions,
        instructions.test_threads_of_a_warp_wait_for_each_other,
        instructions.test_a_state_token_and_test_wait,
        instructions.test_cache_hints_and_dependent_launches_change_nothing,
    ],
)
def test_kernel(kernel: Callable[[], None]) -> None:
    kernel()
