"""The corpus of kernels on a Hopper GPU: the hardware gives the expected results, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda.core import ObjectCode

from greenfast.device.bound_launch import BoundLaunch
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu, GuardedBuffer, load_kernel
from greenfast.device.session import KernelImage
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Launch
from tests.emulator.corpus.entry import Bound, Entry, bind
from tests.emulator.corpus.everything import ENTRIES
from tests.emulator.corpus.runner import kernel_of

pytestmark = pytest.mark.gpu

CORRECT = {entry.name: entry for entry in ENTRIES if entry.kind != "bug"}
_broken: list[str] = []


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    found = Gpu()
    if found.capability != (9, 0):
        pytest.skip("the corpus is compiled for sm_90a")
    return found


def _kernel(entry: Entry, gpu: Gpu) -> Any:
    if entry.kind == "ptx":
        return ObjectCode.from_ptx(entry.source.encode()).get_kernel(entry.kernel)
    compiled = compile_kernel(kernel_of(entry), Target(entry.target))
    return load_kernel(KernelImage(compiled.cubin, entry.kernel, entry.block, entry.smem), gpu.device)


def _run(entry: Entry, bound: Bound, gpu: Gpu) -> dict[str, Any]:
    """The outputs; buffers that are also inputs start filled, all others poisoned."""
    shapes = {n: (a.shape, a.dtype.str) for n, a in bound.inputs.items()}
    shapes |= {n: (o.shape, o.dtype) for n, o in bound.outputs.items()}
    buffers = {n: GuardedBuffer(int(np.prod(shape)) * np.dtype(kind).itemsize) for n, (shape, kind) in shapes.items()}
    for name, a in bound.inputs.items():
        buffers[name].upload(np.ascontiguousarray(a))
    pointers = {name: int(buffer.pointer) for name, buffer in buffers.items()}
    plan = Launch(entry.grid, tuple(bound.args))
    BoundLaunch(_kernel(entry, gpu), entry.block, entry.smem, plan, pointers, int(gpu.stream.handle))()
    gpu.stream.sync()
    found = {n: buffers[n].download(o.shape, o.dtype) for n, o in bound.outputs.items()}
    assert all(b.guards_intact() for b in buffers.values())
    for buffer in buffers.values():
        buffer.free()
    return found


@pytest.mark.parametrize("name", CORRECT)
def test_the_hardware_agrees(name: str, gpu: Gpu) -> None:
    if _broken:
        pytest.fail(f"{_broken[0]} broke the device's context", pytrace=False)
    entry = CORRECT[name]
    bound = bind(entry)
    try:
        outputs = _run(entry, bound, gpu)
    except Exception as e:
        if "CUDA_ERROR" in str(e) and "INVALID_VALUE" not in str(e):
            _broken.append(name)
        raise
    assert bound.differences(outputs) == ""
