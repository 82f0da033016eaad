"""Softmax over the rows of a half matrix in Triton: a program takes row after row, each as one block."""

import triton
import triton.language as tl

GREENFAST = {
    "name": "triton_softmax",
    "problem": "row_softmax",
    "description": "one program per row, the row in registers",
    "language": "triton",
    "constants": {"BLOCK": "next_power_of_2(C)"},
    "launches": [
        {
            "kernel": "softmax",
            "grid": ["R", 1, 1],
            "args": ["x", "y", "int32(C)"],
            "num_warps": "4 if C <= 2048 else 8",
        }
    ],
}


@triton.jit
def softmax(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    """Softmax of the row of the program's number; BLOCK is a power of two that holds all columns."""
    row = tl.program_id(0).to(tl.int64) * cols
    column = tl.arange(0, BLOCK)
    inside = column < cols
    x = tl.load(x_ptr + row + column, mask=inside, other=-float("inf")).to(tl.float32)
    weight = tl.exp(x - tl.max(x, axis=0))
    y = weight / tl.sum(weight, axis=0)
    tl.store(y_ptr + row + column, y.to(tl.float16), mask=inside)
