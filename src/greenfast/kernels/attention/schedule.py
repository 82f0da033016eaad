"""Render and launch the kernels that make the schedule of the attention kernel, ``kernels/attention/schedule.cuh``."""

from __future__ import annotations

import numpy as np

from greenfast.kernels import make_source
from greenfast.kernels.attention.config import AttentionConfig, MaskLists, Sizes
from greenfast.kernels.attention.heuristics import Tiling
from greenfast.spec.kernel import Argument, KernelSource, Launch

_THREADS = 1024
TILE_WORDS = 8  # of a ScheduledTile
_TILES = "greenfast::ScheduledTile* tiles, int max_tiles, int* tile_count"
_SCHEDULE = "{batch, block_m, block_n, causal, causal_shift, window, window_shift, tiles, max_tiles, tile_count}"


def packed_kernel() -> KernelSource:
    """Render the kernel for packed sequences."""
    return _kernel(
        """const int* cu_seqlens_q, const int* cu_seqlens_k, const int* seqused_k, int q_rows, int k_rows,
              greenfast::PackedKeys* sequences, int* block_sequence, int key_blocks""",
        """greenfast::PackedSequences{cu_seqlens_q, cu_seqlens_k, seqused_k, q_rows, k_rows, sequences, block_sequence,
                                                       key_blocks}, greenfast::LimitedKeys{}""",
    )


def batch_kernel(*, lengths: bool, listed: bool) -> KernelSource:
    """Render the kernel for the sequences of a batch. lengths: they have numbers of keys. listed: there are lists."""
    parameters, work = "int heads, int q_len, int kv_len, int shift", "greenfast::LimitedKeys{}"
    if lengths:
        parameters = f"const int* kv_lengths, {parameters}"
    if listed:
        parameters += ", const int2* counts, const int2* entries, const unsigned* bits, int masks, int list_heads"
        parameters += ", int list_step"
        work = "greenfast::ListedKeys{{counts, entries, bits, masks, list_heads, list_step}}"
    given = "kv_lengths" if lengths else "nullptr"
    return _kernel(
        parameters, f"greenfast::BatchSequences{{{given}, heads, q_len, kv_len, shift}},\n" + " " * 28 + work
    )


def _kernel(parameters: str, arguments: str) -> KernelSource:
    source = f"""#include "attention/schedule.cuh"

extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
make_schedule({parameters},
              int batch, int block_m, int block_n, int causal, int causal_shift, int window, int window_shift,
              {_TILES}) {{
  greenfast::make_schedule({_SCHEDULE},
                           {arguments});
}}
"""
    return make_source("make_schedule", source, _THREADS)


def batch_launch(
    config: AttentionConfig,
    sizes: Sizes,
    tiles: Tiling,
    shift: int,
    *,
    lengths: bool,
    window: tuple[int, int] = (0, 0),
    lists: MaskLists | None = None,
) -> Launch:
    """Return the launch for the sequences of a batch.

    shift: the key at the place of row 0. lengths: there is a buffer ``kv_lengths``. window, lists: as for
    ``hopper.launch``.
    """
    arguments = (
        *(("kv_lengths",) if lengths else ()),
        *(np.int32(n) for n in (sizes.heads, sizes.q_len, sizes.kv_len, shift)),
        *(lists.arguments() if lists is not None else ()),
    )
    return launch(arguments, config, tiles, sizes.batch, max_tiles(sizes, tiles), window, early=True)


def max_tiles(sizes: Sizes, tiles: Tiling) -> int:
    """Return the work tiles of a head, over the sequences of a batch."""
    return sizes.batch * -(-sizes.q_len // tiles.block_m)


def buffer_bytes(max_tiles: int) -> dict[str, int]:
    """Return the sizes of the schedule's buffers, in bytes."""
    return {"tiles": 4 * TILE_WORDS * max_tiles, "tile_count": 8}


def launch(
    arguments: tuple[Argument, ...], config: AttentionConfig, tiles: Tiling, batch: int, max_tiles: int,
    window: tuple[int, int], *, early: bool = False,
) -> Launch:  # fmt: skip
    """Return the launch with the arguments of a source of sequences.

    early: the kernel may start before the one that is launched before it has ended.
    """
    numbers = (batch, tiles.block_m, tiles.block_n, config.causal, window[1], config.window, -window[0])
    return Launch(
        grid=(1, 1, 1),
        args=(*arguments, *(np.int32(n) for n in numbers), "tiles", np.int32(max_tiles), "tile_count"),
        early=early,
    )
