"""Row softmax as a kernel family: toggles and shape to CUDA source, shape to launch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "row_softmax"
FOLDER = Path(__file__).parent
# The grid depends on the shape alone, so every rung's block covers the same number of rows.
_ROWS_PER_BLOCK = 32
_FORMATS = ("fp16",)


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render one variant; shapes with the same vector width share a kernel. Raises UsageError as Family says."""
    if instrumented:
        raise UsageError("row_softmax has no instrumented build; profile it with Nsight Compute")
    if fmt not in _FORMATS:
        raise unknown("format", fmt, _FORMATS)
    if missing := {"R", "C"} - dims.keys():
        raise UsageError(f"a shape of row_softmax needs {' and '.join(sorted(missing))}; got {dict(dims)}")
    lanes = 32 if toggles["USE_WARP_PER_ROW"] else 1
    # Each row must start at a whole vector.
    vector = next(v for v in (8, 2, 1) if dims["C"] % v == 0) if toggles["USE_VECTOR_LOADS"] else 1
    source = f"""struct Cfg {{
  static constexpr int kRowsPerBlock = {_ROWS_PER_BLOCK};
  static constexpr int kLanesPerRow = {lanes};
  static constexpr int kVector = {vector};
}};

#include "row_softmax.cu"
"""
    return KernelSource(
        entry=ENTRY,
        source=source,
        name=f"{ENTRY}_cfg.cu",
        include_dirs=(FOLDER, KERNEL_DIR),
        block=(_ROWS_PER_BLOCK * lanes, 1, 1),
    )


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """One block per 32 rows; the arguments in the order of the kernel's parameters."""
    return Launch(
        grid=(-(-dims["R"] // _ROWS_PER_BLOCK), 1, 1), args=("x", "y", np.int32(dims["R"]), np.int32(dims["C"]))
    )
