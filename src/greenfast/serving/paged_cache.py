"""A paged FP8 cache of keys and values: its memory, and the pages of each sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.ops.arguments import parse_length
from greenfast.ops.quantized import check_choice
from greenfast.serving.checks import PAGE_SIZES, check_strided_argument
from greenfast.serving.pages import KVPages, allocate_pages


class PagedKVCache:
    """Pages of K and V of all layers, with their scales, and a block table for any batch of sequences.

    pages: of each layer; a sequence has the same pages in all of them. page_size: 16, 32, 64 or 128 tokens.
    layout: "NHD" stores the tokens of a page one after another, each with all heads; "HND" stores its heads one after
    another. values: "grouped" stores V transposed within groups of 16 tokens, the fastest layout for the kernels;
    "rows" stores V like K. scales: "token" is one scale per token and head, computed by ``append_kv``; "head" uses the
    given k_scale and v_scale, float32 (kv_heads,) or () for all layers, 1 by default.

    The layers follow each other in memory. ``layer(i)`` returns the tensors for ``greenfast.append_kv`` and the
    attention calls. Pages are counted on the host. Any hashable object names a sequence. The class is not thread-safe.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        layers: int = 1,
        device: torch.device | str | None = None,
        layout: Literal["NHD", "HND"] = "NHD",
        values: Literal["grouped", "rows"] = "grouped",
        scales: Literal["token", "head"] = "token",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Raise TypeError or ValueError, naming the argument, for sizes and choices without a kernel."""
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim, "layers": layers}
        pages, page_size, kv_heads, head_dim, layers = (parse_length(name, n) for name, n in sizes.items())
        for name, n, allowed in (("page_size", page_size, PAGE_SIZES), ("head_dim", head_dim, HEAD_DIMS)):
            if n not in allowed:
                raise ValueError(f"{name}: {n!r}; allowed are {', '.join(map(str, allowed))}")
        check_choice("layout", layout, ("NHD", "HND"))
        check_choice("values", values, ("grouped", "rows"))
        check_choice("scales", scales, ("token", "head"))
        self.page_size, self.kv_heads, self.head_dim = page_size, kv_heads, head_dim
        where = torch.empty(0, device=device).device
        self._layers = []
        for _ in range(layers):
            layer = allocate_pages(
                pages, page_size, kv_heads, head_dim, where, heads_first=layout == "HND", grouped=values == "grouped"
            )
            if scales == "head":
                key_scale, value_scale = (
                    _check_scale(x, n, kv_heads, where) for x, n in ((k_scale, "k_scale"), (v_scale, "v_scale"))
                )
                layer = layer._replace(k_scale=key_scale, v_scale=value_scale)
            elif k_scale is not None or v_scale is not None:
                raise ValueError("k_scale, v_scale: given with scales='token'; append_kv computes them")
            self._layers.append(layer)
        self._device = where
        self._free = list(range(pages - 1, -1, -1))
        self._pages: dict[Hashable, list[int]] = {}

    def layer(self, index: int = 0) -> KVPages:
        """Return the tensors of a layer: (k_cache, v_cache, k_scale, v_scale).

        index: negative numbers count from the last layer. Raises IndexError for a layer that the cache lacks.
        """
        try:
            return self._layers[index]
        except IndexError:
            raise IndexError(f"index: {index}; the cache has {len(self._layers)} layers, from 0") from None

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales of all layers."""
        return sum(x.nbytes for layer in self._layers for x in layer)

    @property
    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    def pages_of(self, sequence: Hashable) -> tuple[int, ...]:
        """Return the pages of a sequence, in order; empty for an unknown sequence."""
        return tuple(self._pages.get(sequence, ()))

    def reserve(self, sequence: Hashable, length: int) -> bool:
        """Reserve pages for ``length`` tokens of a sequence in total.

        Return False, and reserve none, if too few are free.
        """
        length = parse_length("length", length)
        owned = self._pages.get(sequence, [])
        missing = -(-length // self.page_size) - len(owned)
        if missing > len(self._free):
            return False
        self._pages[sequence] = owned + [self._free.pop() for _ in range(missing)]
        return True

    def free(self, sequence: Hashable) -> None:
        """Free the pages of a sequence. Raises KeyError for an unknown sequence."""
        self._free += reversed(self._find_pages(sequence))
        del self._pages[sequence]

    def block_table(self, sequences: Sequence[Hashable], max_pages: int | None = None) -> Tensor:
        """Return the pages of sequences, int32 (len(sequences), max_pages), on the cache's device.

        Unused entries are -1.

        max_pages: by default the pages of the longest sequence, at least 1. A CUDA graph needs a fixed number. Raises
        KeyError for an unknown sequence, ValueError if ``max_pages`` is too small.
        """
        rows = [self._find_pages(s) for s in sequences]
        longest = max([1, *map(len, rows)])
        if max_pages is not None:
            max_pages = parse_length("max_pages", max_pages)
            if max_pages < longest:
                raise ValueError(f"max_pages: {max_pages}; a sequence has {longest}")
        width = max_pages or longest
        table = np.full((len(rows), width), -1, dtype=np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return torch.from_numpy(table).to(self._device)

    def slot_mapping(self, sequences: Sequence[Hashable], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the slots of tokens starts[i] .. starts[i] + counts[i] - 1 of each sequence, int64 (sum(counts),).

        Raises KeyError for an unknown sequence, ValueError for tokens without a page.
        """
        if not len(sequences) == len(starts) == len(counts):
            raise ValueError(
                f"starts, counts: {len(starts)} and {len(counts)} for {len(sequences)} sequences; one of each is needed"
            )
        slots: list[int] = []
        for name, start, count in zip(sequences, starts, counts, strict=True):
            row, size = self._find_pages(name), self.page_size
            start, count = parse_length("starts", start), parse_length("counts", count)
            if start + count > len(row) * size:
                raise ValueError(
                    f"starts, counts: {count} tokens from {start} of {name!r}; its pages hold {len(row) * size}"
                )
            while count > 0:  # one page per iteration
                page, offset = row[start // size] * size, start % size
                here = min(count, size - offset)
                slots += range(page + offset, page + offset + here)
                start, count = start + here, count - here
        return torch.from_numpy(np.array(slots, dtype=np.int64)).to(self._device)

    def _find_pages(self, sequence: Hashable) -> list[int]:
        if sequence not in self._pages:
            raise KeyError(f"sequence: {sequence!r} has no pages; reserve() makes it known")
        return self._pages[sequence]


def _check_scale(scale: Tensor | None, name: str, kv_heads: int, device: torch.device) -> Tensor:
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device)
    check_strided_argument(name, scale)
    if scale.dtype != torch.float32 or scale.device != device or tuple(scale.shape) not in ((), (kv_heads,)):
        raise ValueError(
            f"{name}: {scale.dtype} {tuple(scale.shape)} on {scale.device}; "
            f"float32 () or ({kv_heads},) on {device} is needed"
        )
    return scale
