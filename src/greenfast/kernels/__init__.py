"""CUDA C++ sources, and the Python that renders and launches them. README.md lists the files."""

from pathlib import Path

from greenfast.spec.kernel import KernelSource

#: The folder that kernels' ``#include "..."`` lines resolve in.
KERNEL_DIR = Path(__file__).parent

#: Head dims of the Hopper kernels. Other head dims are zero-padded to the next one.
HEAD_DIMS = (64, 128, 256)

#: dtype of an attention's input or output -> CUDA C++ type.
CUDA_TYPES = {"float16": "half", "bfloat16": "__nv_bfloat16"}

#: The same for weights and tables; these may be float32.
FLOAT_TYPES = {**CUDA_TYPES, "float32": "float"}


def make_source(
    entry: str, source: str, threads: int, *, dynamic_smem_bytes: int = 0, requires: str = ""
) -> KernelSource:
    """Return the source of a kernel with headers in KERNEL_DIR. threads: of a block."""
    return KernelSource(
        entry=entry,
        source=source,
        name=f"{entry}.cu",
        include_dirs=(KERNEL_DIR,),
        block=(threads, 1, 1),
        dynamic_smem_bytes=dynamic_smem_bytes,
        requires=requires,
    )
