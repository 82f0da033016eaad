"""Memory layouts of tensors (batch, heads, length, head_dim), and which of them the kernels can read."""

from __future__ import annotations

import torch
from torch import Tensor

from greenfast.ops.symbols import is_known

ROW_ALIGNMENT = 16  # bytes, of the rows that kernels read


def row_strides(x: Tensor, head_dim: int) -> tuple[int, ...]:
    """Strides of a dense (B, H, S, head_dim) with the first three dimensions in the memory order of x, columns last.

    The order is as in ``torch.empty_like`` and PyTorch's own attention: an x laid out as (B, S, H, D) gives an output
    laid out the same way, so that heads and columns can be merged in a view.
    """
    rows = torch.empty_like(x[..., 0] if x.shape[3] else x.sum(3), device="meta")
    return (*(stride * head_dim for stride in rows.stride()), 1)


def empty_rows(x: Tensor, head_dim: int) -> Tensor:
    """An uninitialized (B, H, S, head_dim) of x's dtype and device, with ``row_strides``."""
    return x.new_empty_strided((*x.shape[:3], head_dim), row_strides(x, head_dim))


def pad_head_dim(x: Tensor, head_dim: int) -> Tensor:
    """x zero-padded to ``head_dim`` columns; the other dimensions keep their order."""
    strides = row_strides(x, 1)
    order = [0, 1, 2]
    for i, j in ((0, 1), (1, 2), (0, 1)):
        if is_known(strides[order[i]] < strides[order[j]]):  # any order is right
            order[i], order[j] = order[j], order[i]
    wide = torch.nn.functional.pad(x.permute(*order, 3), (0, head_dim - x.shape[3]))
    return wide.permute(*(order.index(d) for d in range(3)), 3)


def is_aligned(address: int) -> bool:
    """Whether rows may begin at an address; for several addresses, pass their bitwise or."""
    return address % ROW_ALIGNMENT == 0


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronized(x: Tensor) -> Tensor:
    """A tensor that is kept for later calls, once it is made: calls on other streams do not wait for this one's."""
    if x.is_cuda and not is_capturing(x.device):
        torch.cuda.current_stream(x.device).synchronize()
    return x


def make_tma_compatible(x: Tensor, *, unique_rows: bool = False) -> Tensor:
    """x, or a copy in the same order where a kernel could not read its rows.

    Rows must begin at multiples of 16 bytes. Rows that TMA reads, which are Q's in ``sdpa``, must not overlap, as they
    do after ``expand``.
    """
    strides = [stride for stride, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
    fits = x.stride(3) == 1 and all(stride % 8 == 0 for stride in strides) and not (unique_rows and 0 in strides)
    return x if fits and is_aligned(x.data_ptr()) else empty_rows(x, x.shape[3]).copy_(x)
