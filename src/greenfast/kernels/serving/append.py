"""Render and launch the kernel that appends new tokens to a paged FP8 cache, ``kernels/serving/append.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenfast.kernels import CUDA_TYPES, FLOAT_TYPES, HEAD_DIMS, make_source
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Argument, KernelSource, Launch

ENTRY = "append_kv"
PAGE_SIZES = (16, 32, 64, 128)
#: Columns of a row per thread. RoPE rotates all of them or none.
COLUMNS = 16
#: Tokens of grouped V per block.
VALUE_TOKENS = 64
_THREADS = 256
#: Heads per block, one after another: as many as leave _BLOCKS blocks to fill a GPU, and at most _HEADS.
_BLOCKS, _HEADS = 1024, 8

_POSITIONS = {"int64": "long long", "int32": "int"}


@dataclass(frozen=True, kw_only=True)
class AppendConfig:
    """All options of an append. Equal options give equal kernels.

    dtype: of Q, K, V and the Q output: "bfloat16" or "float16".
    value_layout: "grouped", (pages, kv_heads, page_size // 16, head_dim, 16), or "rows", the layout of K.
    scales: "token": computed per token and head, and written to the cache; "head": an input.
    queries: whether Q is normalized and rotated too.
    norm: dtype of the QK-norm weights, "float32", "bfloat16" or "float16"; empty for no norm.
    rotary_dim: columns that RoPE rotates, a multiple of 16; 0 for no RoPE. interleaved: RoPE pairs are columns 2i and
    2i + 1, else i and i + rotary_dim / 2. tables: dtype of cosines and sines. positions: "int64" or "int32".

    Raises UsageError for values that are not listed here.
    """

    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    value_layout: str = "grouped"
    scales: str = "token"
    queries: bool = True
    norm: str = ""
    rotary_dim: int = 0
    interleaved: bool = False
    tables: str = "float32"
    positions: str = "int64"

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[object, ...]] = {
            "head_dim": HEAD_DIMS,
            "page_size": PAGE_SIZES,
            "dtype": tuple(CUDA_TYPES),
            "value_layout": ("grouped", "rows"),
            "scales": ("token", "head"),
            "norm": ("", *FLOAT_TYPES),
            "tables": tuple(FLOAT_TYPES),
            "positions": tuple(_POSITIONS),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise UsageError(f"{name}: {getattr(self, name)!r}; allowed are {', '.join(map(repr, values))}")
        if self.rotary_dim % COLUMNS or not 0 <= self.rotary_dim <= self.head_dim:
            raise UsageError(
                f"rotary_dim: {self.rotary_dim}; a multiple of {COLUMNS} up to head_dim {self.head_dim} is needed"
            )


@dataclass(frozen=True)
class AppendSizes:
    """Sizes of one append: Q is (tokens, heads, head_dim), K and V (tokens, kv_heads, head_dim).

    pages: of the cache. max_position: rows of the tables of cosines and sines.
    """

    tokens: int
    heads: int
    kv_heads: int
    pages: int
    max_position: int = 0


@dataclass(frozen=True)
class AppendStrides:
    """Strides in elements. Rows are aligned to 16 bytes, and columns are contiguous.

    query, key, value: (token, head). key_cache, value_cache: (page, slot, head); slot is 0 for grouped V.
    key_scale, value_scale: of pages for token scales; of heads, 0 or 1, for scales per head. cos, sin: of positions.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    key_cache: tuple[int, int, int]
    value_cache: tuple[int, int, int]
    key_scale: int = 0
    value_scale: int = 0
    cos: int = 0
    sin: int = 0


def kernel(config: AppendConfig) -> KernelSource:
    """Render the kernel for a configuration."""
    constants = {
        "HeadDim": config.head_dim,
        "PageSize": config.page_size,
        "Threads": _THREADS,
        "RotaryDim": config.rotary_dim,
    }
    flags = {
        "GroupedValues": config.value_layout == "grouped",
        "TokenScales": config.scales == "token",
        "Queries": config.queries,
        "Norm": bool(config.norm),
        "Interleaved": config.interleaved,
    }
    types = {
        "In": FLOAT_TYPES[config.dtype],
        "Weight": FLOAT_TYPES[config.norm or "float32"],
        "Table": FLOAT_TYPES[config.tables],
        "Position": _POSITIONS[config.positions],
    }
    members = [
        *(f"  static constexpr int k{name} = {value};" for name, value in constants.items()),
        *(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items()),
        *(f"  using {name} = {value};" for name, value in types.items()),
    ]
    body = "\n".join(members)
    source = f"""#include "serving/append.cuh"

struct Cfg {{
{body}
}};

extern "C" __global__ void __launch_bounds__({_THREADS}, {_resident(config)})
{ENTRY}(const void* q, const void* k, const void* v, long long q_token, long long q_head, long long k_token,
        long long k_head, long long v_token, long long v_head, void* q_out, unsigned char* k_cache,
        unsigned char* v_cache, long long k_page, long long k_slot, long long k_cache_head, long long v_page,
        long long v_slot, long long v_cache_head, float* k_scale, float* v_scale,
        long long k_scale_stride, long long v_scale_stride, const long long* slot_mapping, long long slots,
        const void* q_weight, const void* k_weight, float eps, const void* cos, const void* sin, long long cos_stride,
        long long sin_stride, const void* positions, long long max_position, int tokens, int heads, int kv_heads,
        int chunk) {{
  greenfast::append<Cfg>({{{{q, q_token, q_head}}, {{k, k_token, k_head}}, {{v, v_token, v_head}}, q_out,
                          {{k_cache, k_page, k_slot, k_cache_head, k_scale, k_scale_stride}},
                          {{v_cache, v_page, v_slot, v_cache_head, v_scale, v_scale_stride}}, slot_mapping, slots,
                          q_weight, k_weight, eps, cos, sin, cos_stride, sin_stride, positions, max_position, tokens,
                          heads, kv_heads, chunk}});
}}
"""
    return make_source(ENTRY, source, _THREADS)


def _resident(config: AppendConfig) -> int:
    """Return the blocks per multiprocessor for __launch_bounds__: as many as need no spills."""
    if config.norm and config.rotary_dim:
        return 2 if config.norm == "float32" or config.scales == "head" else 3
    return 3 if config.norm or config.rotary_dim else 4


def choose_chunk(config: AppendConfig, sizes: AppendSizes) -> int:
    """Return the heads of Q or K per block."""
    rows = _tiles(config, sizes) * (sizes.kv_heads + sizes.heads * config.queries)
    return max(1, min(_HEADS, rows // _BLOCKS))


def _tiles(config: AppendConfig, sizes: AppendSizes) -> int:
    return -(-sizes.tokens // (_THREADS * COLUMNS // config.head_dim))


def launch(config: AppendConfig, sizes: AppendSizes, strides: AppendStrides, eps: float = 1e-6) -> Launch:
    """Return the launch for tensors of such sizes, with at least one token.

    Buffers: q, k, v, q_out, k_cache, v_cache, k_scale, v_scale, slot_mapping (int64), and depending on the
    configuration q_weight, k_weight, cos, sin, positions. eps: of the norm.
    """
    grouped, chunk = config.value_layout == "grouped", choose_chunk(config, sizes)
    q_chunks, kv_chunks = (-(-heads // chunk) for heads in (sizes.heads * config.queries, sizes.kv_heads))
    blocks = _tiles(config, sizes) * (q_chunks + kv_chunks * (1 if grouped else 2))
    if grouped:
        blocks += -(-sizes.tokens // VALUE_TOKENS) * sizes.kv_heads

    def if_asked(condition: object, *names: str) -> tuple[Argument, ...]:
        return names if condition else (np.int64(0),) * len(names)

    return Launch(
        grid=(blocks, 1, 1),
        args=(
            *if_asked(config.queries, "q"),
            *("k", "v"),
            *(np.int64(n) for n in (*strides.query, *strides.key, *strides.value)),
            *if_asked(config.queries, "q_out"),
            *("k_cache", "v_cache"),
            *(np.int64(n) for n in (*strides.key_cache, *strides.value_cache)),
            *("k_scale", "v_scale"),
            *(np.int64(strides.key_scale), np.int64(strides.value_scale)),
            *("slot_mapping", np.int64(sizes.pages * config.page_size)),
            *if_asked(config.norm and config.queries, "q_weight"),
            *if_asked(config.norm, "k_weight"),
            np.float32(eps),
            *if_asked(config.rotary_dim, "cos", "sin"),
            *(np.int64(strides.cos), np.int64(strides.sin)),
            *if_asked(config.rotary_dim, "positions"),
            np.int64(sizes.max_position),
            *(np.int32(n) for n in (sizes.tokens, sizes.heads, sizes.kv_heads, chunk)),
        ),
    )
