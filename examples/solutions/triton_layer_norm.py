"""Layer norm of the rows of a half matrix in Triton: mean, variance and result in three passes over a row."""

import triton
import triton.language as tl

GREENFAST = {
    "name": "triton_layer_norm",
    "problem": "layer_norm",
    "description": "one program per row, in blocks of at most 1024 columns",
    "language": "triton",
    "constants": {"BLOCK": "min(1024, next_power_of_2(C))"},
    "launches": [
        {
            "kernel": "layer_norm",
            "grid": ["R", 1, 1],
            "args": ["x", "weight", "bias", "y", "int32(C)", "float32(0.00001)"],
            "num_warps": 4,
        }
    ],
}


@triton.jit
def layer_norm(x_ptr, weight_ptr, bias_ptr, y_ptr, cols, epsilon, BLOCK: tl.constexpr):
    """One row: (x - mean) / sqrt(variance + epsilon) * weight + bias."""
    row = tl.program_id(0).to(tl.int64) * cols
    lane = tl.arange(0, BLOCK)

    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, cols, BLOCK):
        column = start + lane
        total += tl.load(x_ptr + row + column, mask=column < cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / cols

    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, cols, BLOCK):
        column = start + lane
        x = tl.load(x_ptr + row + column, mask=column < cols, other=0.0).to(tl.float32)
        difference = tl.where(column < cols, x - mean, 0.0)
        squares += difference * difference
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / cols + epsilon)

    for start in range(0, cols, BLOCK):
        column = start + lane
        inside = column < cols
        x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean) * scale * weight + bias
        tl.store(y_ptr + row + column, y.to(tl.float16), mask=inside)
