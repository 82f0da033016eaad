"""The attention ladder as a kernel family: toggles to CUDA source, shape to launch.

A rung has a file next to this one with its changes. ``scalar.cuh`` and ``stage1.cuh`` hold kernels; the rungs up to
Stage 3A replace parts of them. ``stage3b.cuh`` and its two variants are kernels of their own. This module composes a
kernel from these files, rejects combinations without a kernel, and plans shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import PHASE_BUFFER, KernelSource, Launch

#: Folder of the ladder's sources. Theirs are included by name, greenfast's headers by the path in ``KERNEL_DIR``.
FOLDER = Path(__file__).parent
ENTRY = "fp8_sdpa"
HEAD_DIMS = (64, 128)
PHASES = ("Q load", "K/V prefetch", "dequantization", "QK^T", "softmax", "P*V", "store")
#: Phases of full fusion, where dequantization is part of the products.
REGISTER_PHASES = ("Q load", "K/V prefetch", "QK^T", "softmax", "P*V", "combine", "store")
FULL_FUSION = 2  # value of USE_FUSED_SOFTMAX_PV

_BLOCK_M = _BLOCK_N = 32
_PERSISTENT_ON = Target("sm_90a")  # the grid fills its multiprocessors; on smaller GPUs some blocks run later
_MAX_HEADS = 65535  # CUDA's limit on a grid's second dimension
_FORMATS = {"e4m3": "kE4M3", "int8": "kInt8"}
#: Toggles of the rungs before full fusion, in the ladder's order, with the headers that hold their parts.
_HEADERS = {
    "USE_WMMA_QK": "wmma_qk",
    "USE_CP_ASYNC": "stage1",
    "USE_WMMA_PV": "stage2",
    "USE_FUSED_SOFTMAX_PV": "stage3a",
    "USE_XOR_SWIZZLE": "stage3a_swizzle",
    "USE_KV_LUT": "kv_lut",
}
#: Toggles of full fusion. At most one is set.
_OF_FULL_FUSION = ("USE_THREE_STAGE_PIPE", "USE_WARP_SPECIALIZATION", "USE_PERSISTENT_CTAS")


@dataclass(frozen=True)
class _Kernel:
    """A kernel of the ladder: its function, its headers, its specific members of Cfg, and its launch."""

    function: str
    headers: tuple[str, ...]
    members: tuple[str, ...]
    smem_bytes: int
    threads: int
    min_blocks: int
    phases: tuple[str, ...]


def _check(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> None:
    """Raise UsageError, naming the rule, for combinations that the kernel's static_asserts reject."""
    if fmt not in _FORMATS:
        raise unknown("format", fmt, _FORMATS)
    missing = [d for d in "BHSD" if d not in dims]
    if missing or min(dims.values()) < 1:
        raise UsageError(f"an attention shape needs B, H, S and D, each at least 1; got {dict(dims)}")
    if dims["B"] * dims["H"] > _MAX_HEADS:
        heads = dims["B"] * dims["H"]
        raise UsageError(f"B={dims['B']}, H={dims['H']}: {heads} heads; a grid holds {_MAX_HEADS}")
    if dims["D"] not in HEAD_DIMS:
        raise UsageError(f"head_dim D={dims['D']}: the ladder has kernels for {', '.join(map(str, HEAD_DIMS))}")
    if toggles["USE_FUSED_SOFTMAX_PV"] == FULL_FUSION:
        if missing := [name for name in ("USE_CP_ASYNC", "USE_WMMA_QK", "USE_WMMA_PV") if not toggles[name]]:
            raise UsageError(
                f"USE_FUSED_SOFTMAX_PV=2 needs {missing[0]}=1: it multiplies prefetched codes on tensor cores"
            )
        if excluded := [name for name in ("USE_XOR_SWIZZLE", "USE_KV_LUT") if toggles[name]]:
            raise UsageError(f"USE_FUSED_SOFTMAX_PV=2 excludes {excluded[0]}=1: it has no half tiles of K and V")
        if len(set_toggles := [name for name in _OF_FULL_FUSION if toggles[name]]) > 1:
            raise UsageError(
                f"{set_toggles[0]}=1 excludes {set_toggles[1]}=1: each is measured against Stage 3B as it is"
            )
        return
    if set_toggles := [name for name in _OF_FULL_FUSION if toggles[name]]:
        raise UsageError(f"{set_toggles[0]}=1 needs USE_FUSED_SOFTMAX_PV=2: the other rungs have no such form")
    if toggles["USE_FUSED_SOFTMAX_PV"] and not toggles["USE_WMMA_PV"]:
        raise UsageError("USE_FUSED_SOFTMAX_PV=1 needs USE_WMMA_PV=1: the score tile is reused for the P of WMMA P*V")
    if toggles["USE_XOR_SWIZZLE"] and not (toggles["USE_WMMA_QK"] and toggles["USE_WMMA_PV"]):
        raise UsageError(
            "USE_XOR_SWIZZLE=1 needs USE_WMMA_QK=1 and USE_WMMA_PV=1: swizzled tiles are read by tensor-core loads"
        )


def _smem_bytes(toggles: Mapping[str, int], head_dim: int) -> int:
    """Return the size of the kernel's SharedStorage; the kernel asserts that it is equal."""
    q_stride = head_dim + 8
    kv_stride = head_dim if toggles["USE_XOR_SWIZZLE"] else head_dim + 8
    members = [  # (alignment, bytes) in the order of SharedStorage
        (128, _BLOCK_M * q_stride * 2),
        (128, 2 * _BLOCK_N * kv_stride * 2),
        (128, _BLOCK_M * (_BLOCK_N + 4) * 4),
        (16, 16 if toggles["USE_FUSED_SOFTMAX_PV"] else _BLOCK_M * (_BLOCK_N + 8) * 2),
        (16, _BLOCK_M * 4),
        (16, 2 * 2 * _BLOCK_N * head_dim if toggles["USE_CP_ASYNC"] else 16),
        (16, 256 * 2 if toggles["USE_KV_LUT"] else 16),
    ]
    end = 0
    for alignment, size in members:
        end = math.ceil(end / alignment) * alignment + size
    return math.ceil(end / 128) * 128


def _staged(toggles: Mapping[str, int], head_dim: int) -> _Kernel:
    """Scores and P in shared memory: the kernel of scalar.cuh or of stage1.cuh, with the parts that toggles replace."""
    tensor_cores = "Mma" if toggles["USE_XOR_SWIZZLE"] else "Wmma"
    dequantizer = "LutDequantizer" if toggles["USE_KV_LUT"] else "ConvertDequantizer"
    layout = "XorSwizzledLayout" if toggles["USE_XOR_SWIZZLE"] else "PaddedLayout"
    p_tile = "PInScoreTile" if toggles["USE_FUSED_SOFTMAX_PV"] else "OwnPTile"
    scores = tensor_cores if toggles["USE_WMMA_QK"] else "Scalar"
    output = tensor_cores if toggles["USE_WMMA_PV"] else "Scalar"
    return _Kernel(
        function="prefetched" if toggles["USE_CP_ASYNC"] else "direct",
        headers=("scalar", *(header for toggle, header in _HEADERS.items() if toggles[toggle])),
        members=(
            f"using Dequantizer = greenfast::{dequantizer}<kFormat>;",
            f"using KvLayout = greenfast::{layout}<kHeadDim>;",
            f"using PTile = greenfast::{p_tile};",
            f"template <class Shape>\n  using Scores = greenfast::{scores}Scores<Shape>;",
            f"template <class Shape>\n  using Output = greenfast::{output}Output<Shape>;",
        ),
        smem_bytes=_smem_bytes(toggles, head_dim),
        threads=128,
        # Shared memory limits occupancy to three or four blocks; without it the compiler aims for more and spills.
        min_blocks=3,
        phases=PHASES,
    )


def _fused(toggles: Mapping[str, int], head_dim: int) -> _Kernel:
    """Scores and P in registers: stage3b.cuh, or a kernel that divides the same work in another way."""
    stages = 3 if toggles["USE_THREE_STAGE_PIPE"] else 2
    # Tiles of K and V of 2 KB each for four groups of keys; then eight warps' partial results, each 16 rows of 64
    # columns, a bias and a sum.
    tiles, partial = stages * 4 * 2 * 2048, 8 * 16 * (64 + 2) * 4
    function, header, smem, threads = "registers", "stage3b", max(tiles, partial), 256
    if toggles["USE_WARP_SPECIALIZATION"]:
        # Two mbarriers for each stage; one more warp.
        function, header, threads = "specialized", "stage3b_specialized", 256 + 32
        smem += stages * 4 * 2 * 8
    if toggles["USE_PERSISTENT_CTAS"]:
        # The partial results take the place of the second stages alone.
        function, header, smem = "persistent", "stage3b_persistent", tiles // 2 + max(tiles // 2, partial)
    members = (f"static constexpr int kStages = {stages};",)
    return _Kernel(function, (header,), members, smem, threads, _fused_blocks(head_dim), REGISTER_PHASES)


def _fused_blocks(head_dim: int) -> int:
    """Return the blocks of full fusion per multiprocessor: 1 at head dim 128, which needs more registers."""
    return 2 if head_dim == 64 else 1


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render one rung for a head dim. Raises UsageError for toggles or dimensions without a legal kernel."""
    _check(toggles, fmt, dims)
    chosen = (_fused if toggles["USE_FUSED_SOFTMAX_PV"] == FULL_FUSION else _staged)(toggles, dims["D"])
    includes = "".join(f'#include "{header}.cuh"\n' for header in chosen.headers)
    members = "".join(f"  {member}\n" for member in chosen.members)
    # Persistent blocks cannot derive the number of heads from their grid.
    parameter, argument = (", int heads", ", heads") if toggles["USE_PERSISTENT_CTAS"] else ("", "")
    source = f"""{includes}
struct Cfg {{
  static constexpr int kHeadDim = {dims["D"]};
  static constexpr greenfast::Format kFormat = greenfast::Format::{_FORMATS[fmt]};
  static constexpr int kSmemBytes = {chosen.smem_bytes};
  static constexpr bool kDebugPrint = {str(bool(toggles["DEBUG_PRINT"])).lower()};
  static constexpr bool kPhaseClocks = {str(instrumented).lower()};
{members}}};

extern "C" __global__ void __launch_bounds__({chosen.threads}, {chosen.min_blocks})
{ENTRY}(const unsigned char* q, const unsigned char* k, const unsigned char* v, const float* q_scale,
         const float* k_scale, const float* v_scale, half* out, int seq_len, float softmax_scale,
         long long* phase_cycles{parameter}) {{
  greenfast::attention_{chosen.function}<Cfg>(
      {{q, k, v, q_scale, k_scale, v_scale, out, seq_len, softmax_scale, phase_cycles}}{argument});
}}
"""
    return KernelSource(
        entry=ENTRY,
        source=source,
        name=f"{ENTRY}.cu",
        include_dirs=(FOLDER, KERNEL_DIR),
        block=(chosen.threads, 1, 1),
        dynamic_smem_bytes=chosen.smem_bytes,
        phases=chosen.phases if instrumented else (),
    )


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """Return the launch: one block per 32 query rows and head, or as many as are resident if persistent."""
    heads, row_blocks = dims["B"] * dims["H"], -(-dims["S"] // _BLOCK_M)
    args = (
        *("q", "k", "v", "q_scale", "k_scale", "v_scale", "out"),
        np.int32(dims["S"]),
        np.float32(1.0 / math.sqrt(dims["D"])),
        PHASE_BUFFER,
    )
    if toggles.get("USE_PERSISTENT_CTAS"):
        blocks = min(_PERSISTENT_ON.multiprocessors * _fused_blocks(dims["D"]), row_blocks * heads)
        return Launch(grid=(blocks, 1, 1), args=(*args, np.int32(heads)))
    return Launch(grid=(row_blocks, heads, 1), args=args)
