"""An evaluator as they are often written: it shows what each check of the gates is there for."""

from __future__ import annotations

import numpy as np
from cuda.bindings import driver
from cuda.core import LaunchConfig, launch

from greenfast.device.bound_launch import check
from greenfast.device.gpu import Gpu
from greenfast.device.session import KernelImage
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import Case

_PAD_BYTES = 4096


def says_right(gpu: Gpu, image: KernelImage, plan: Launch, case: Case, tolerance: float) -> bool:
    """Launch a doubling kernel once, on one case, and compare numbers.

    All memory comes from one zeroed pool, and the output's still holds the right answer of an earlier launch. Nothing
    is poisoned, guarded, repeated or looked at again, and an element is wrong where its error is above the tolerance.
    """
    x = case.inputs["x"]
    right = 2 * x
    size = 3 * _PAD_BYTES + 2 * x.nbytes
    pool = int(check(driver.cuMemAlloc(size)))
    x_pointer = pool + _PAD_BYTES
    y_pointer = x_pointer + x.nbytes + _PAD_BYTES
    try:
        check(driver.cuMemsetD8(pool, 0, size))
        check(driver.cuMemcpyHtoD(x_pointer, x.ctypes.data, x.nbytes))
        check(driver.cuMemcpyHtoD(y_pointer, right.ctypes.data, right.nbytes))
        config = LaunchConfig(grid=plan.grid, block=image.block, shmem_size=image.dynamic_smem_bytes)
        launch(gpu.stream, config, gpu.load(image), x_pointer, y_pointer, np.int32(x.size))
        gpu.stream.sync()
        y = np.empty_like(x)
        check(driver.cuMemcpyDtoH(y.ctypes.data, y_pointer, y.nbytes))
    finally:
        check(driver.cuMemFree(pool))
    return not bool((np.abs(y - right) > tolerance).any())
