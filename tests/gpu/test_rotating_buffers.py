"""Timed launches on a device: no launch has the addresses of another one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.device.rotating_buffers import WRONG_BITS
from greenfast.device.session import Executable
from greenfast.device.worker import Worker
from greenfast.judge.implementation import build_image
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case, OutputSpec

pytestmark = pytest.mark.gpu

SOURCE = """extern "C" __global__ void depends(const unsigned* x, unsigned* y) {
  y[threadIdx.x] = x[threadIdx.x] + (unsigned(reinterpret_cast<unsigned long long>(POINTER)) & MASK);
}
"""


@pytest.mark.parametrize(
    ("pointer", "mask", "is_wrong"),
    [
        ("x", 0x1FF, False),
        ("x", 0x1FFE00, True),  # the address within 2 MiB, the size of the driver's pages
        ("y", 0x1FF, False),
        ("y", 0x1FFE00, True),
    ],
)
def test_only_the_alignment_of_an_address_repeats(pointer: str, mask: int, is_wrong: bool) -> None:
    target = Target.of_device(torch.cuda.get_device_capability())
    body = SOURCE.replace("POINTER", pointer).replace("MASK", hex(mask))
    image = build_image(compile_kernel(KernelSource("depends", body, "depends.cu", (), (32, 1, 1)), target))
    executable = Executable.single(image, Launch((1, 1, 1), ("x", "y")))
    cases = [Case({"x": np.arange(32, dtype=np.uint32) + n}, {"y": OutputSpec((32,), "uint32")}) for n in range(2)]
    with Worker(0, timeout_s=60) as worker:
        wrong = worker.prepare("k", executable, cases, 20, 0).wrong
        assert (wrong is not None and WRONG_BITS in str(wrong)) == is_wrong
        if not is_wrong:
            block = worker.time("k", 5, 200, False, 1)
            assert (block.wrong, len(block.samples_us)) == (None, 200)
