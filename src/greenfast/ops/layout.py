"""Memory layouts of tensors (batch, heads, length, head_dim), and of the fields of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.attention.block_mask import ROW_WORDS, TILE
from greenfast.ops.symbols import is_known

ROW_ALIGNMENT = 16  # bytes; alignment of rows


def row_strides(x: Tensor, head_dim: int) -> tuple[int, ...]:
    """Return the strides of a dense (B, H, S, head_dim) tensor. Its first three dimensions keep the memory order of x.

    This is the order of ``torch.empty_like`` and of PyTorch's own attention. An x in (B, S, H, D) order gives an output
    in the same order, so that heads and columns can be merged in a view.
    """
    rows = torch.empty_like(x[..., 0] if x.shape[3] else x.sum(3), device="meta")
    return (*(stride * head_dim for stride in rows.stride()), 1)


def empty_rows(x: Tensor, head_dim: int) -> Tensor:
    """Return an uninitialized (B, H, S, head_dim) tensor with the dtype and device of x and with ``row_strides``."""
    return x.new_empty_strided((*x.shape[:3], head_dim), row_strides(x, head_dim))


def fill_without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fill the results of a call without keys: zeros, and a log-sum-exp of the sinks (H,), or of -inf without them.

    lse: with the heads in the dimension before the last.
    """
    if sinks is None:
        lse.fill_(-float("inf"))
    else:
        lse.copy_(sinks.unsqueeze(1).expand_as(lse))
    return out.zero_(), lse


def pad_head_dim(x: Tensor, head_dim: int) -> Tensor:
    """Return x, zero-padded to ``head_dim`` columns. The other dimensions keep their memory order."""
    order = _get_memory_order(x)
    wide = torch.nn.functional.pad(x.permute(*order, 3), (0, head_dim - x.shape[3]))
    return wide.permute(*(order.index(d) for d in range(3)), 3)


def _get_memory_order(x: Tensor) -> list[int]:
    """Return the dimensions batch, heads and rows of x by descending strides."""
    strides = row_strides(x, 1)
    order = [0, 1, 2]
    for i, j in ((0, 1), (1, 2), (0, 1)):
        if is_known(strides[order[i]] < strides[order[j]]):  # any order is correct
            order[i], order[j] = order[j], order[i]
    return order


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors (B, H, S_i, D) to (B, H, S, D) in the memory order of the first one."""
    order = _get_memory_order(parts[0])
    joined = torch.cat([x.permute(*order, 3) for x in parts], order.index(2))
    return joined.permute(*(order.index(d) for d in range(3)), 3)


def joined_strides(first: Tensor, rows: int) -> tuple[int, ...]:
    """Return the strides of a dense (B, H, rows, D) tensor in the memory order of ``first``, a part of the sequence."""
    shape, strides = (*first.shape[:2], rows), [0, 0, 0]
    stride: Any = first.shape[3]
    for d in reversed(_get_memory_order(first)):
        strides[d] = stride
        stride = stride * shape[d]
    return (*strides, 1)


def empty_joined(first: Tensor, rows: int) -> Tensor:
    """Return an uninitialized (B, H, rows, D) tensor with ``joined_strides``."""
    return first.new_empty_strided((*first.shape[:2], rows, first.shape[3]), joined_strides(first, rows))


def is_aligned(address: int) -> bool:
    """Return whether rows may begin at an address. For several addresses, pass their bitwise or."""
    return address % ROW_ALIGNMENT == 0


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronized(x: Tensor) -> Tensor:
    """Return x after its stream has finished.

    Tensors for later calls need this: other streams do not wait for this stream.
    """
    if x.is_cuda and not is_capturing(x.device):
        torch.cuda.current_stream(x.device).synchronize()
    return x


def make_tma_compatible(x: Tensor, *, unique_rows: bool = False) -> Tensor:
    """Return x, or a copy in the same memory order if kernels cannot read its rows.

    Rows must begin at multiples of 16 bytes. unique_rows: rows must not share memory, as they do after ``expand``. TMA
    needs this for Q of ``sdpa``.
    """
    strides = [stride for stride, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
    fits = x.stride(3) == 1 and all(stride % 8 == 0 for stride in strides) and not (unique_rows and 0 in strides)
    return x if fits and is_aligned(x.data_ptr()) else empty_rows(x, x.shape[3]).copy_(x)


def allocate_mask(like: Tensor, blocks: Any, tiles: Any, bits: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized counts, entries and bits of a ``BlockMask``. blocks: (batch, heads, blocks of rows)."""
    shapes = (*blocks, 2), (*blocks, tiles, 2), (bits, TILE, ROW_WORDS)
    counts, entries, words = (like.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return counts, entries, words
