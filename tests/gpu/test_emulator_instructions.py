"""Instructions of the emulator's tests on a GPU: the catalog's, and kernels around groups, tiles, calls and clusters.

The hardware runs in a separate process, which is restarted after a kernel breaks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.emulator_instructions import Device, build_images, try_case
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage
from greenfast.device.worker import Worker, WorkerError
from greenfast.emulator.result import GridResult
from greenfast.spec.arch import Target
from tests.emulator import hopper, kernels
from tests.emulator import test_calls as calls
from tests.emulator import test_clusters as clusters
from tests.emulator import test_member_masks as masks
from tests.emulator import test_wmma as wmma
from tests.emulator.instructions.case import Case
from tests.emulator.instructions.catalog import CASES, units

pytestmark = pytest.mark.gpu

ROWS = 1024
TIMEOUT_S = 20.0

_worker: list[Worker] = []


@pytest.fixture(scope="module", autouse=True)
def worker_ends() -> Iterator[None]:
    yield
    while _worker:
        _worker.pop().close()


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    found = Device(0)
    yield found
    found.close()


@pytest.mark.parametrize("unit", units(CASES), ids=lambda unit: f"{unit[0].name}-to-{unit[-1].name}")
def test_an_instruction_gives_what_the_hardware_gives(unit: Sequence[Case], device: Device) -> None:
    """The benchmark records everything; this reports only what is wrong."""
    target = Target.of_device(Gpu().capability)
    rows = [try_case(case, image, device, ROWS) for case, image in build_images(unit, target)]
    wrong = [
        f"{row['instruction']}: {row.get('error') or row['examples_wrong'][:2]}"
        for row in rows
        if (row.get("error") or row["wrong"]) and not _illegal_on_hopper(row)
    ]
    assert wrong == []


def _illegal_on_hopper(row: dict[str, Any]) -> bool:
    """An H200 takes the machine code of cp.async with a cache policy (NVRTC 13.0) for an illegal instruction."""
    policy = row["instruction"].startswith("cp.async") and "cache_hint" in row["instruction"]
    return policy and "CUDA_ERROR_ILLEGAL_INSTRUCTION" in str(row.get("error"))


def _both(asked: Any, emulated: GridResult, target: Target) -> GridResult:
    """The emulator's result, after checking that the hardware gives the same bits."""
    compiled = compile_kernel(asked.kernel, target)
    image = KernelImage(compiled.cubin, "k", asked.kernel.block, asked.kernel.dynamic_smem_bytes)
    if not _worker:
        _worker.append(Worker(0, timeout_s=TIMEOUT_S))
    try:
        measured = _worker[0].run(Executable.single(image, asked.plan), asked.case, 1)
    except WorkerError:
        _worker.clear()  # it is closed
        raise
    assert measured.violations == []
    for name, found in measured.outputs.items():
        assert np.array_equal(emulated.outputs[name], found, equal_nan=found.dtype.kind == "f")
    return emulated


@pytest.fixture
def on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels of other modules on the emulator and on the GPU."""
    if Gpu().capability != (9, 0):
        pytest.skip("these kernels are Hopper's")
    emulate, emulate_hopper = kernels.run, hopper.run

    def plain(*args: Any, seed: int = 0, **more: Any) -> GridResult:
        more["target"] = hopper.HOPPER
        return _both(kernels.request(*args, **more), emulate(*args, seed=seed, **more), hopper.HOPPER)

    def of_hopper(*args: Any, seed: int = 0, **more: Any) -> GridResult:
        return _both(hopper.request(*args, **more), emulate_hopper(*args, seed=seed, **more), hopper.HOPPER)

    for module in (masks, wmma, calls):
        monkeypatch.setattr(module, "run", plain)
    monkeypatch.setattr(clusters, "run", of_hopper)


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("name", masks.PARTITIONS)
def test_groups_of_a_warp(name: str) -> None:
    masks.test_exchanges_stay_in_their_group(name)
    masks.test_a_shuffle_reads_from_its_group(name)


@pytest.mark.usefixtures("on_both")
def test_some_threads_of_a_warp() -> None:
    masks.test_half_a_warp_reduces_alone()


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("case", wmma.TYPES, ids=lambda c: f"{c[0].split(':')[-1]}-{c[1]}-{c[2]}")
def test_tiles(case: Any) -> None:
    wmma.test_products_of_every_type(case, "row", "col", "row")
    wmma.test_products_of_every_type(case, "col", "row", "col")


@pytest.mark.usefixtures("on_both")
def test_tiles_of_different_strides() -> None:
    wmma.test_each_warp_has_its_own_stride()


@pytest.mark.usefixtures("on_both")
def test_calls() -> None:
    calls.test_functions_with_arguments_and_results()
    calls.test_pointers_to_functions_and_virtual_functions()


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("how", ["mapped", "generic", "cooperative groups"])
def test_clusters_share_memory(how: str) -> None:
    clusters.test_blocks_read_and_write_each_other(how)


@pytest.mark.usefixtures("on_both")
def test_clusters() -> None:
    clusters.test_special_registers()
    clusters.test_getctarank()
    clusters.test_arrivals_at_the_mbarrier_of_another_block()
    clusters.test_a_tile_for_several_blocks()
    clusters.test_asynchronous_stores(0)
