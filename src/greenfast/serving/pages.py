"""Pages and slots of tokens: temporary pages for keys without a cache, and slots of keys that are appended to a cache.

Everything is computed on the device, from lengths in device memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUP
from greenfast.ops.symbols import is_certain, is_known, require
from greenfast.serving.checks import E4M3, PAGE_SIZES

#: The page size of temporary pages: the KV tile of the kernels.
PAGE = PAGE_SIZES[-1]


class KVPages(NamedTuple):
    """K and V of one layer: codes and scales, in the order of the calls.

    k_cache: float8_e4m3fn (pages, page_size, kv_heads, head_dim). v_cache: the same, or in groups, (pages, kv_heads,
    page_size / 16, head_dim, 16). k_scale, v_scale: float32 (pages, kv_heads, page_size), or (kv_heads,), or ().
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor
    v_scale: Tensor


def allocate_pages(
    pages: Any, page_size: int, kv_heads: int, head_dim: int, device: torch.device | None, *, heads_first: bool = False,
    grouped: bool = True,
) -> KVPages:  # fmt: skip
    """Allocate uninitialized pages, with scales per token.

    heads_first: a page stores the tokens of one head contiguously.
    """

    def rows() -> Tensor:
        if heads_first:
            return torch.empty(pages, kv_heads, page_size, head_dim, dtype=E4M3, device=device).transpose(1, 2)
        return torch.empty(pages, page_size, kv_heads, head_dim, dtype=E4M3, device=device)

    grouped_shape = (pages, kv_heads, page_size // KEY_GROUP, head_dim, KEY_GROUP)
    values = torch.empty(grouped_shape, dtype=E4M3, device=device) if grouped else rows()
    k_scale, v_scale = (torch.empty(pages, kv_heads, page_size, dtype=torch.float32, device=device) for _ in range(2))
    return KVPages(rows(), values, k_scale, v_scale)


def get_page_bytes(page_size: int, kv_heads: int, head_dim: int, *, scales: bool = True) -> int:
    """Return the bytes of one page of K and V, a multiple of 128. scales: include scales per token."""
    return 2 * page_size * kv_heads * (head_dim + (torch.float32.itemsize if scales else 0))


def view_pages(memory: Tensor, page_size: int, kv_heads: int, head_dim: int) -> KVPages:
    """View memory of an engine as pages. Each page has K by heads, V in groups, K's scales and V's scales.

    memory: uint8 (pages, ``get_page_bytes``), dense in its second dimension. Without room for scales both are 1.
    """
    code_bytes, scale_bytes = page_size * kv_heads * head_dim, page_size * kv_heads * torch.float32.itemsize
    ends = (0, code_bytes, 2 * code_bytes, 2 * code_bytes + scale_bytes, 2 * code_bytes + 2 * scale_bytes)
    k, v, *scales = (memory[:, a:b] for a, b in pairwise(ends))
    pages, group_shape = memory.shape[0], (page_size // KEY_GROUP, head_dim, KEY_GROUP)
    keys = k.view(E4M3).view(pages, kv_heads, page_size, head_dim).transpose(1, 2)
    values = v.view(E4M3).view(pages, kv_heads, *group_shape)
    if memory.shape[1] == ends[2]:
        one = torch.ones((), dtype=torch.float32, device=memory.device)
        return KVPages(keys, values, one, one)
    key_scales, value_scales = (x.view(torch.float32).view(pages, kv_heads, page_size) for x in scales)
    return KVPages(keys, values, key_scales, value_scales)


class Slots(NamedTuple):
    """The destinations of new tokens.

    slots: int64 (tokens,), -1 for tokens of no sequence and beyond the block table. positions: int64 (tokens,).
    lengths: int32 (batch,), of the sequences with these tokens. table: int32 (batch, max_pages), if one was made.
    """

    slots: Tensor
    positions: Tensor
    lengths: Tensor
    table: Tensor


def count_pages(total_k: Any, batch: Any) -> Any:
    """Return a number of pages that fits ``batch`` sequences of any lengths with ``total_k`` keys in total."""
    return total_k // PAGE + batch


def compute_token_slots(
    starts: Tensor, before: Tensor | None, block_table: Tensor | None, counted_from: Tensor | None, tokens: Any,
    max_pages: Any, page_size: int,
) -> Slots:  # fmt: skip
    """Compute the slots of ``tokens`` new tokens. Sequence b's begin at starts[b] and follow ``before[b]`` keys.

    starts: int32 (batch + 1,). before: int32 (batch,), None for none. block_table: int32 (batch, any). Without it a
    table of max_pages columns is made: sequence b begins at page starts[b] // page_size + b. counted_from: int32
    (batch,), positions of the first new tokens, ``before`` by default.
    """
    device, batch = starts.device, starts.shape[0] - 1
    if is_known(batch == 0):
        none = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        return Slots(none, torch.zeros_like(none), starts.new_empty(0), starts.new_empty((0, max_pages)))
    new = torch.arange(tokens, dtype=torch.int64, device=device)
    sequence_ids = find_sequences(starts, new)
    inside = new - starts.long()[sequence_ids]
    counts = starts[1:] - starts[:-1]
    lengths = counts if before is None else before + counts
    positions = inside if before is None else before.long()[sequence_ids] + inside
    if block_table is None:
        first = starts[:-1] // page_size + torch.arange(batch, dtype=torch.int32, device=device)
        table = first.unsqueeze(1) + torch.arange(max_pages, dtype=torch.int32, device=device)
        slots = first.long()[sequence_ids] * page_size + positions
    else:
        table = starts.new_empty((0, 0))
        slots = compute_slots(block_table, page_size, sequence_ids, positions)
    if counted_from is not None:
        positions = counted_from.long()[sequence_ids] + inside
    return Slots(torch.where(new < starts[-1], slots, -1), positions, lengths, table)


def find_sequences(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """Return the sequence of each token, int64; the last one for tokens after all sequences."""
    indices = torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)
    return indices.clamp(max=cu_seqlens.shape[0] - 2)


def copy_codes(k: Tensor, v: Tensor, slots: Tensor, pages: KVPages) -> None:
    """Write codes (tokens, kv_heads, head_dim) to pages. The last page is spare and receives tokens of no sequence.

    Slots beyond it, from wrong lengths, go there too: an index out of range would destroy the CUDA context.
    """
    spare = (pages.k_cache.shape[0] - 1) * PAGE
    indices = torch.where((slots < 0) | (slots > spare), spare, slots)
    for x, cache in ((k, pages.k_cache), (v, pages.v_cache)):
        cache.view(torch.uint8).flatten(0, 1)[indices] = x.view(torch.uint8)


def compute_slots(block_table: Tensor, page_size: int, sequence_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the slots, int64, of tokens at these positions of their sequences; -1 beyond the block table."""
    max_pages = block_table.shape[1]
    known = (positions >= 0) & (positions < max_pages * page_size)
    pages = block_table[sequence_ids, (positions // page_size).clamp(0, max_pages - 1)].long()
    return torch.where(known, pages * page_size + positions % page_size, -1)


class PagedRows(NamedTuple):
    """A cache with contiguous rows for each sequence, viewed as pages.

    Sequence b has ``pages`` pages, the first one at b * ``step``. Pages between two sequences are not used: if
    heads come first in memory, they overlap other heads.
    """

    k_cache: Tensor
    v_cache: Tensor
    step: Any
    pages: Any


def view_rows_as_pages(k_cache: Tensor, v_cache: Tensor) -> PagedRows:
    """View caches of rows (batch, length, kv_heads, head_dim), of one shape, as pages.

    Raises ValueError for a length that is no multiple of a page size, and for strides that pages cannot have.
    """
    batch, length = k_cache.shape[:2]
    sizes = [n for n in reversed(PAGE_SIZES) if not is_known(length == 0) and _fits_pages(n, length)]
    if not sizes:
        raise ValueError(f"k_cache: {length} keys; without page_table a multiple of {PAGE_SIZES[0]} is needed")
    caches = k_cache, v_cache
    for size in sizes:
        dense = [is_known(batch <= 1) or is_known(x.stride(0) == length * x.stride(1)) for x in caches]
        if all(dense):
            keys, values = (x.view(batch, length // size, size, *x.shape[2:]).flatten(0, 1) for x in caches)
            return PagedRows(keys, values, length // size, length // size)
        steps = [_get_page_step(x, size, length) for x in caches]
        if steps[0] is not None and steps[1] is not None and is_known(steps[0] == steps[1]):
            count = (batch - 1) * steps[0] + length // size
            keys, values = (
                x.as_strided((count, size, *x.shape[2:]), (size * x.stride(1), *x.stride()[1:])) for x in caches
            )
            return PagedRows(keys, values, steps[0], length // size)
    raise ValueError(
        f"k_cache: its strides are {k_cache.stride()}, v_cache's {v_cache.stride()}; without page_table both need one "
        f"distance from sequence to sequence, a multiple of {PAGE_SIZES[0]} keys"
    )


def _fits_pages(size: int, length: Any) -> bool:
    """Return whether a length of a cache is a number of pages. If only the run can decide it: of the smallest pages.

    A graph has more than one page, because a number that may be 1 would restrict it to one length.
    """
    if size == PAGE_SIZES[0]:
        return require(length % size == 0)
    return is_certain(length % size == 0) and (not torch.compiler.is_compiling() or is_certain(length != size))


def _get_page_step(x: Tensor, size: int, length: Any) -> Any:
    """Return the pages from one sequence of a cache to the next, None if that is no whole number."""
    batch_stride, key_stride = x.stride()[:2]
    if (
        not is_known(key_stride > 0)
        or not is_known(batch_stride % (size * key_stride) == 0)
        or not is_known(batch_stride >= key_stride * length)
    ):
        return None
    return batch_stride // (size * key_stride)
