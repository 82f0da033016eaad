"""Doubling as a kernel family: KERNEL is the number of the rung's .cu file in this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import KernelSource, Launch

FOLDER = Path(__file__).parent
#: File names without .cu; a kernel's place is its value of KERNEL.
KERNELS = (
    "good",
    "unwritten",
    "tail_unwritten",
    "zeros",
    "nan",
    "infinity",
    "input_overwritten",
    "writes_in_front",
    "writes_behind",
    "reads_behind",
    "remembers",
    "later_wrong",
    "later_idle",
    "one_shape",
    "one_seed",
    "cached_by_shape",
    "order_dependent",
    "hang",
    "wild_pointer",
    "trap",
    "too_much_smem",
    "too_many_registers",
    "spills",
    "local_array",
    "no_async_copy",
    "slow",
    "skips_written",
    "memoizes",
    "works_on_launches",
    "every_second_launch",
    "first_address",
    "previous_output",
    "cached_by_address",
    "input_restored",
    "guards_in_between",
    "stale_shared",
)
_THREADS = 256
# (threads, dynamic shared memory in bytes) of the kernels that ask for more than they can get
_LAUNCH_BOUNDS = {"too_much_smem": (_THREADS, 300 * 1024), "too_many_registers": (1024, 0)}


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render the kernel of one file; all shapes share it."""
    if instrumented:
        raise UsageError("doubling has no instrumented build")
    if fmt != "fp32":
        raise unknown("format", fmt, ["fp32"])
    name = KERNELS[toggles["KERNEL"]]
    threads, smem = _LAUNCH_BOUNDS.get(name, (_THREADS, 0))
    return KernelSource(
        entry="doubling",
        source=f'#include "{name}.cu"\n',
        name=f"{name}_rendered.cu",
        include_dirs=(FOLDER,),
        block=(threads, 1, 1),
        dynamic_smem_bytes=smem,
    )


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """One thread per element."""
    return Launch(grid=(-(-dims["N"] // _THREADS), 1, 1), args=("x", "y", np.int32(dims["N"])))
