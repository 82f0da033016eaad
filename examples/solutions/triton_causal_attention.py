"""Causal attention on half Q, K and V in Triton: online softmax over blocks of keys."""

import triton
import triton.language as tl

GREENFAST = {
    "name": "triton_causal_attention",
    "problem": "causal_attention",
    "description": "one program per block of queries of a head; scores, weights and sums in registers",
    "language": "triton",
    "constants": {"BLOCK_M": "128 if S >= 1024 else 64", "BLOCK_N": 64},
    "launches": [
        {
            "kernel": "causal_attention",
            "grid": ["ceildiv(S, BLOCK_M)", "B * H", 1],
            "args": ["q", "k", "v", "out", "int32(S)", "float32(1.4426950408889634 / sqrt(D))"],
            "num_warps": "BLOCK_M // 16",
            "num_stages": 2,
        }
    ],
}


@triton.jit
def causal_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, S, scale_log2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A block of queries of a head; each tensor is (B * H, S, D). scale_log2: the scores' scale times log2(e)."""
    head = tl.program_id(1).to(tl.int64) * S * D
    first = tl.program_id(0) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head + m[:, None] * D + d[None, :], mask=m[:, None] < S, other=0.0)

    top = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    # No query of the block attends to a key behind its last query.
    for start in range(0, tl.minimum(S, first + BLOCK_M), BLOCK_N):
        n = start + lane
        k = tl.load(k_ptr + head + n[None, :] * D + d[:, None], mask=n[None, :] < S, other=0.0)
        score = tl.dot(q, k) * scale_log2
        score = tl.where(n[None, :] <= m[:, None], score, -float("inf"))
        # Every query attends to key 0, so the maximum is finite from the first block on.
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        v = tl.load(v_ptr + head + n[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0)
        out = tl.dot(weight.to(tl.float16), v, out * shrink[:, None])
        top = new_top

    out = out / total[:, None]
    tl.store(out_ptr + head + m[:, None] * D + d[None, :], out.to(tl.float16), mask=m[:, None] < S)
