"""Softmax over the rows of a half matrix in CuTe DSL: a warp per row, which it reads three times."""

import cutlass
from cutlass import cute

GREENFAST = {
    "name": "cute_softmax",
    "problem": "row_softmax",
    "description": "a warp per row, an element per lane at a time",
    "language": "cute",
    "launches": [
        {"kernel": "softmax", "grid": ["ceildiv(R, 4)"], "block": [32, 4], "args": ["x", "y", "int32(R)", "int32(C)"]}
    ],
}

LOG2_E = 1.4426950408889634


@cute.kernel
def softmax_kernel(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32, cols: cutlass.Int32):
    """Four rows per block; x and y are (rows, cols)."""
    lane, warp, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = 4 * block + warp
    if row < rows:
        top = -cutlass.Float32.inf
        for c in range(lane, cols, 32):
            top = cute.arch.fmax(top, x[row, c].to(cutlass.Float32))
        top = cute.arch.warp_reduction_max(top)
        total = cutlass.Float32(0)
        for c in range(lane, cols, 32):
            total += cute.math.exp2((x[row, c].to(cutlass.Float32) - top) * LOG2_E, fastmath=True)
        total = cute.arch.warp_reduction_sum(total)
        for c in range(lane, cols, 32):
            weight = cute.math.exp2((x[row, c].to(cutlass.Float32) - top) * LOG2_E, fastmath=True)
            y[row, c] = (weight / total).to(cutlass.Float16)


@cute.jit
def softmax(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32, cols: cutlass.Int32):
    """Launch the kernel."""
    softmax_kernel(x, y, rows, cols).launch(grid=((rows + 3) // 4, 1, 1), block=(32, 4, 1))
