"""Product of two half matrices in Triton: float32 sums, tiles in groups of rows so that neighbours share B in L2."""

import triton
import triton.language as tl

GREENFAST = {
    "name": "triton_matmul",
    "problem": "matmul",
    "description": "grouped tiles, float32 accumulation on the tensor cores",
    "language": "triton",
    "constants": {
        "BLOCK_M": "128 if M >= 1024 else 64",
        "BLOCK_N": "128 if N >= 1024 else 64",
        "BLOCK_K": 64,
        "GROUP_M": 8,
        "WHOLE_K": "K % BLOCK_K == 0",
    },
    "launches": [
        {
            "kernel": "matmul",
            "grid": ["ceildiv(M, BLOCK_M) * ceildiv(N, BLOCK_N)", 1, 1],
            "args": ["a", "b", "c", "int32(M)", "int32(N)", "int32(K)"],
            "num_warps": "8 if BLOCK_M * BLOCK_N == 128 * 128 else 4",
            "num_stages": 3,
        }
    ],
}


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """C (M, N) = A (M, K) B (K, N), all of them row by row; WHOLE_K: K is a multiple of BLOCK_K."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Programs with neighbouring numbers go down GROUP_M rows of tiles before they go on to the next column of tiles.
    tile = tl.program_id(0)
    group = tile // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    rows_of_group = min(tiles_m - first_m, GROUP_M)
    in_group = tile % (GROUP_M * tiles_n)
    m = (first_m + in_group % rows_of_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (in_group // rows_of_group) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    # Rows and columns behind the end are read as the first ones again; their results are not stored.
    a = a_ptr + (m % M)[:, None].to(tl.int64) * K + k[None, :]
    b = b_ptr + k[:, None].to(tl.int64) * N + (n % N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE_K:
            a_tile = tl.load(a)
            b_tile = tl.load(b)
        else:
            a_tile = tl.load(a, mask=k[None, :] < K - start, other=0.0)
            b_tile = tl.load(b, mask=k[:, None] < K - start, other=0.0)
        total = tl.dot(a_tile, b_tile, total)
        a += BLOCK_K
        b += BLOCK_K * N

    c = c_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c, total.to(tl.float16), mask=(m[:, None] < M) & (n[None, :] < N))
