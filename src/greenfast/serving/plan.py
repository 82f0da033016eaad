"""``append_kv`` for a paged FP8 cache, and the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.ops import arguments
from greenfast.ops.arguments import MAX_LENGTH, check_flag, parse_length, parse_number
from greenfast.ops.call_cache import replay
from greenfast.ops.quantized import check_device
from greenfast.ops.symbols import require
from greenfast.serving import torch_ops as serving_ops
from greenfast.serving.checks import MAX_GROUP_SIZE, check_strided_argument, is_valid_grouping
from greenfast.serving.launch_cache import APPEND_CACHE, record_append

#: The error for tensors that require a gradient if no result carries it.
GRADIENT_MESSAGE = "{}: a gradient is required, but none is computed; use torch.no_grad()"


def append_kv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor,
    v_scale: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor | None:
    """Normalize and rotate Q and K, quantize K and V, and write them to the pages of a cache, in one kernel.

    q: (tokens, heads, head_dim), or None; k, v: (tokens, kv_heads, head_dim), float16 or bfloat16, rows dense and at
    multiples of 16 bytes. k_cache, v_cache, k_scale, v_scale: of a layer of a ``PagedKVCache``, or any such pages
    (docs/serving.md): E4M3 codes (pages, page_size, kv_heads, head_dim), V optionally in groups. Scales of (pages,
    kv_heads, page_size) are written, one for each token and head; scales of () or (kv_heads,) are read. slot_mapping:
    int64 (tokens,), page * page_size + offset in the page; tokens with negative slots are not written. Two tokens must
    not have the same slot. Slots are checked on the CPU, and on a GPU with GREENFAST_CHECK_PAGES=1; without the check,
    tokens with slots after the cache's last one are not written.
    q_weight, k_weight: (head_dim,), of an RMS norm of each head, with ``eps``; with q both or neither. cos, sin:
    (positions, rotary_dim / 2), a rotation of the first rotary_dim columns, by the rows that ``positions``, (tokens,),
    select. A position out of range makes Q and K NaN. ``interleaved`` rotates columns 2i and 2i + 1 together, else i
    and i + rotary_dim / 2.

    Returns Q for attention, contiguous and of q's dtype, or None without q. There are no gradients: one that reaches Q
    raises NotImplementedError, and without q an input that requires one does.
    Raises TypeError, ValueError and NotImplementedError, naming the argument, before anything is written.
    """
    request = (
        q, k, v, k_cache, v_cache, q_weight, k_weight, cos, sin, slot_mapping, k_scale, v_scale, positions, eps,
        interleaved,
    )  # fmt: skip
    compiling = torch.compiler.is_compiling()
    if not compiling:
        known = replay(APPEND_CACHE, request, q)
        if known is not None:
            return known[0]  # type: ignore[no-any-return]
    check_flag("interleaved", interleaved)
    if q is None and torch.is_grad_enabled():
        tensors = {"k": k, "v": v, "k_weight": k_weight, "cos": cos, "sin": sin, "k_scale": k_scale, "v_scale": v_scale}
        if names := [name for name, x in tensors.items() if requires_grad(x)]:
            raise NotImplementedError(GRADIENT_MESSAGE.format(", ".join(names)))
    args = (
        q, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, q_weight, k_weight, cos, sin, positions,
        parse_number("eps", eps), interleaved,
    )  # fmt: skip
    result = serving_ops.append_kv(*args)
    if not compiling:
        record_append(request, args)
    return None if q is None else result


class ServingPlan:
    """The work split of one step's attention. It is made once, and used by all layers with these heads and this mask.

    It is made on the device from lengths in device memory. In a CUDA graph, make it, or call ``update``, inside the
    graph: lengths may then change between replays. On the CPU nothing is split, but a call with a plan of other lengths
    is refused, to detect plans that were not updated.

    cu_seqlens_q: int32 (batch + 1,). seqused_k: int32 (batch,), keys of each sequence, appended ones included.
    max_seqlen_q: at least the queries of any sequence. causal, window_size: as in the calls. total_q: queries of all
    sequences, the rows of ``q``. If one sequence is much longer than most, calls without it take up to 1.6 times as
    long. It is no limit.
    tensor: int32, read by the kernels only.
    """

    def __init__(
        self, cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, *, heads: int, kv_heads: int, head_dim: int,
        causal: bool = False, window_size: Sequence[int] | None = (-1, -1), total_q: int | None = None,
    ) -> None:  # fmt: skip
        """Raise TypeError, ValueError or NotImplementedError, naming the argument, for an impossible batch."""
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("seqused_k", seqused_k)):
            check_strided_argument(name, x)
            if x.dtype != torch.int32 or x.dim() != 1:
                raise TypeError(f"{name}: {describe_tensor(x)}; an int32 tensor of one dimension is needed")
        if not require(cu_seqlens_q.shape[0] == seqused_k.shape[0] + 1):
            raise ValueError(
                f"cu_seqlens_q: its shape is {tuple(cu_seqlens_q.shape)}, seqused_k's {tuple(seqused_k.shape)}; "
                "(batch + 1,) and (batch,) are needed"
            )
        check_device("seqused_k", seqused_k, "cu_seqlens_q", cu_seqlens_q)
        heads, kv_heads = parse_length("heads", heads, MAX_LENGTH), parse_length("kv_heads", kv_heads, MAX_LENGTH)
        head_dim = parse_length("head_dim", head_dim, MAX_LENGTH)
        max_seqlen_q = parse_length("max_seqlen_q", max_seqlen_q, MAX_LENGTH)
        if head_dim not in HEAD_DIMS:
            raise NotImplementedError(f"head_dim: {head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
        if not is_valid_grouping(heads, kv_heads):
            raise ValueError(f"heads: {heads}, kv_heads {kv_heads}; 1 to {MAX_GROUP_SIZE} heads share each of kv_heads")
        if total_q is not None:
            total_q = parse_length("total_q", total_q, MAX_LENGTH)
        check_flag("causal", causal)
        self.cu_seqlens_q, self.seqused_k, self.max_seqlen_q = cu_seqlens_q, seqused_k, max_seqlen_q
        self.heads, self.kv_heads, self.head_dim, self.total_q = heads, kv_heads, head_dim, total_q
        self.mask = (causal, *parse_window(causal, window_size))
        self.tensor = self._make(None)

    def _make(self, into: Tensor | None) -> Tensor:
        lengths, sizes = (self.cu_seqlens_q, self.seqused_k), (self.heads, self.kv_heads, self.head_dim)
        return serving_ops.plan(*lengths, self.max_seqlen_q, *sizes, *self.mask, self.total_q, into=into)

    def update(self) -> None:
        """Recompute the plan in the same memory, from the current values of the length tensors."""
        self._make(self.tensor)

    def parts(self) -> tuple[Any, ...]:
        """Return the plan's tensor, and the sizes and mask that a call must match."""
        return self.tensor, self.max_seqlen_q, self.heads, self.kv_heads, self.head_dim, self.mask

    def check(self, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int, mask: tuple[bool, int, int]) -> None:
        """Raise ValueError, naming the difference, unless the plan is for such a call."""
        for name, expected, actual in (
            ("max_seqlen_q", self.max_seqlen_q, max_seqlen_q),
            ("heads", self.heads, heads),
            ("kv_heads", self.kv_heads, kv_heads),
            ("head_dim", self.head_dim, head_dim),
            ("causal and window_size", self.mask, mask),
        ):
            if not require(expected == actual):
                raise ValueError(f"plan (scheduler_metadata): made for {name} {expected}, called with {actual}")


def parse_window(causal: bool, window_size: Any) -> tuple[int, int]:
    """Return the window as (left, right), -1 for no limit; with ``causal`` right is 0.

    Raises TypeError and ValueError.
    """
    left, right = (-1, -1) if window_size is None else arguments.parse_window(window_size)
    return left, 0 if causal else right


def requires_grad(*tensors: Tensor | None) -> bool:
    """Return whether any tensor requires a gradient."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def describe_tensor(x: object) -> str:
    """Return a tensor's dtype and shape, or the type of another object, for errors."""
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
