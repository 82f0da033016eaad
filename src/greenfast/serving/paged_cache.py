"""A paged FP8 cache of keys and values: its memory, and which pages belong to which sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from greenfast.ops.arguments import check_length
from greenfast.ops.quantized import HEAD_DIMS, check_choice
from greenfast.serving.checks import PAGE_SIZES, check_strided
from greenfast.serving.pages import KVPages, allocate_pages


class PagedKVCache:
    """Pages of K and V of all layers, with their scales, and a block table for any batch of sequences.

    pages: of each layer; a sequence has the same pages in all of them. page_size: 16, 32, 64 or 128 tokens.
    layout: "NHD", a page's tokens one after another with all heads, or "HND", its heads one after another.
    values: "grouped", V transposed within groups of 16 tokens as the kernels read it fastest, or "rows", V as K.
    scales: "token", one of each token and head, which ``append_kv`` finds, or "head", given: k_scale and v_scale,
    float32 (kv_heads,) or () for all layers, 1 by default.

    Its memory is layer after layer; ``layer(i)`` has the tensors for ``greenfast.append_kv`` and the attention calls.
    Pages are counted on the host, by whichever hashable names the caller gives its sequences. It is not thread-safe.
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
        """Raises TypeError and ValueError, naming the argument, for sizes and choices that no kernel takes."""
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim, "layers": layers}
        for name, n in sizes.items():
            check_length(name, n)
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
            made = allocate_pages(
                pages, page_size, kv_heads, head_dim, where, heads_first=layout == "HND", grouped=values == "grouped"
            )
            if scales == "head":
                of_keys, of_values = (
                    _check_scale(x, n, kv_heads, where) for x, n in ((k_scale, "k_scale"), (v_scale, "v_scale"))
                )
                made = made._replace(k_scale=of_keys, v_scale=of_values)
            elif k_scale is not None or v_scale is not None:
                raise ValueError("k_scale, v_scale: given with scales='token', where append_kv finds them")
            self._layers.append(made)
        self._device = where
        self._free = list(range(pages - 1, -1, -1))
        self._pages: dict[Hashable, list[int]] = {}

    def layer(self, index: int = 0) -> KVPages:
        """The tensors of a layer: (k_cache, v_cache, k_scale, v_scale)."""
        return self._layers[index]

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
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
        """The pages of a sequence, in order; none for one that is not known."""
        return tuple(self._pages.get(sequence, ()))

    def reserve(self, sequence: Hashable, length: int) -> bool:
        """Give a sequence pages for ``length`` tokens in all; False, and no page, where too few are free."""
        check_length("length", length)
        owned = self._pages.get(sequence, [])
        more = -(-length // self.page_size) - len(owned)
        if more > len(self._free):
            return False
        self._pages[sequence] = owned + [self._free.pop() for _ in range(more)]
        return True

    def free(self, sequence: Hashable) -> None:
        """Take the pages of a sequence back. Raises KeyError for one that is not known."""
        self._free += reversed(self._pages.pop(sequence))

    def block_table(self, sequences: Sequence[Hashable], max_pages: int | None = None) -> Tensor:
        """The pages of these sequences, int32 (len(sequences), max_pages), on the cache's device, -1 behind the last.

        max_pages: by default as many as the longest sequence has, at least 1. A CUDA graph wants one that stays.
        Raises KeyError for a sequence that is not known, ValueError where ``max_pages`` are too few.
        """
        rows = [self._pages[s] for s in sequences]
        most = max([1, *map(len, rows)])
        if max_pages is not None:
            check_length("max_pages", max_pages)
            if max_pages < most:
                raise ValueError(f"max_pages: {max_pages}; a sequence has {most}")
        width = max_pages or most
        table = np.full((len(rows), width), -1, dtype=np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return torch.from_numpy(table).to(self._device)

    def slot_mapping(self, sequences: Sequence[Hashable], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Slots of tokens starts[i] .. starts[i] + counts[i] - 1 of each sequence, int64 (sum(counts),).

        Raises KeyError for a sequence that is not known, ValueError for tokens that it has no page for.
        """
        if not len(sequences) == len(starts) == len(counts):
            raise ValueError(
                f"starts, counts: {len(starts)} and {len(counts)} for {len(sequences)} sequences; one of each is needed"
            )
        slots: list[int] = []
        for name, start, count in zip(sequences, starts, counts, strict=True):
            row, size = self._pages[name], self.page_size
            if start < 0 or count < 0 or start + count > len(row) * size:
                raise ValueError(
                    f"starts, counts: {count} tokens from {start} of {name!r}, whose pages have {len(row) * size}"
                )
            while count > 0:  # a page at a time
                page, place = row[start // size] * size, start % size
                here = min(count, size - place)
                slots += range(page + place, page + place + here)
                start, count = start + here, count - here
        return torch.from_numpy(np.array(slots, dtype=np.int64)).to(self._device)


def _check_scale(scale: Tensor | None, name: str, kv_heads: int, device: torch.device) -> Tensor:
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device)
    check_strided(name, scale)
    if scale.dtype != torch.float32 or scale.device != device or tuple(scale.shape) not in ((), (kv_heads,)):
        raise ValueError(
            f"{name}: {scale.dtype} {tuple(scale.shape)} on {scale.device}; "
            f"float32 () or ({kv_heads},) on {device} is needed"
        )
    return scale
