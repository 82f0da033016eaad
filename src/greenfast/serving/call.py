"""A call of attention for servers: shared code of the two functions of ``greenfast.flash_attn``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.serving.config import NARROW_ROWS
from greenfast.ops.arguments import (
    MAX_LENGTH,
    check_flag,
    check_once,
    check_starts,
    is_valid_scale,
    parse_length,
    parse_number,
)
from greenfast.ops.layout import is_capturing, synchronized
from greenfast.ops.quantized import DTYPES, check_device
from greenfast.ops.symbols import is_certain, is_known, require, require_same_shape
from greenfast.ops.varlen import attend_packed, check_varlen
from greenfast.serving import torch_ops as serving_ops
from greenfast.serving.checks import (
    E4M3,
    MAX_GROUP_SIZE,
    NUM_ATTENTION_TENSORS,
    check_append_once,
    check_attention_once,
    check_keys,
    check_out,
    check_queries,
    check_strided_argument,
    check_values,
    is_valid_grouping,
    should_check_values,
)
from greenfast.serving.launch_cache import record_attention, record_packed
from greenfast.serving.pages import PAGE, allocate_pages, copy_codes, count_pages
from greenfast.serving.plan import GRADIENT_MESSAGE, ServingPlan, describe_tensor, parse_window, requires_grad

Result = Tensor | tuple[Tensor, Tensor]
_CONSTANTS: dict[tuple[Any, ...], Tensor] = {}
_MAX_CONSTANTS = 1024


class AttentionCall:
    """One call of either function: queries in rows, (total_q, heads, head_dim), and the options of the attention."""

    def __init__(
        self, q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: Any, softmax_scale: float | None, causal: bool,
        window_size: Sequence[int] | None, softcap: float, sinks: Tensor | None, plan: ServingPlan | None,
        out: Tensor | None,
    ) -> None:  # fmt: skip
        if causal is not True and causal is not False:
            check_flag("causal", causal)
        self.q = make_rows_dense("q", q)
        self.cu_seqlens_q, self.max_seqlen_q = cu_seqlens_q, max_seqlen_q
        self.scale = (
            max(1, q.shape[-1]) ** -0.5 if softmax_scale is None else parse_number("softmax_scale", softmax_scale)
        )
        self.mask = (causal, *parse_window(causal, window_size))
        self.softcap = parse_number("softcap", softcap)
        if sinks is not None and isinstance(sinks, Tensor) and sinks.dtype in DTYPES:
            sinks = sinks.float()
        self.sinks, self.out = sinks, out
        if plan is not None and not isinstance(plan, ServingPlan):
            raise TypeError(f"scheduler_metadata: a {type(plan).__name__}; a greenfast.ServingPlan is needed, or None")
        self.plan = plan
        self.has_table = True  # False for a cache of one run of rows per sequence
        self.before: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None  # arguments of token_slots and append_kv

    def arguments(
        self, k: Tensor, v: Tensor, table: Tensor, used: Tensor, scales: tuple[Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Return the arguments of the operator. scales: of Q, K and V."""
        q_scale, k_scale, v_scale = scales
        if q_scale is None and self.q.dtype == E4M3:
            q_scale = get_unit_scale(self.q).expand(used.shape[0], k.shape[2])
        elif isinstance(q_scale, Tensor) and (
            q_scale.dim() == 0 or (q_scale.dim() == 1 and require(q_scale.shape[0] == k.shape[2]))
        ):
            q_scale = q_scale.expand(used.shape[0], k.shape[2])
        dtype = self.q.dtype
        if dtype == E4M3:
            dtype = self.out.dtype if self.out is not None else torch.bfloat16
        return (
            self.q, k, v, table, self.cu_seqlens_q, used, get_unit_scale(self.q) if k_scale is None else k_scale,
            get_unit_scale(self.q) if v_scale is None else v_scale, q_scale, self.sinks,
            None if self.plan is None else self.plan.tensor, self.max_seqlen_q, *self.mask, self.softcap, self.scale,
            dtype,
        )  # fmt: skip

    def attend(
        self, k: Tensor, v: Tensor, table: Tensor, used: Tensor, scales: tuple[Tensor | None, ...], wants_lse: bool,
        request: tuple[Any, ...] | None = None,
    ) -> Result:  # fmt: skip
        """Compute attention over pages, and record its launches for ``request``."""
        args = self.arguments(k, v, table, used, scales)
        self._check_plan(k.shape[2])
        if self.out is None:
            out, lse = serving_ops.paged_attention(*args, lse=wants_lse)
        else:
            self._check_out_gradient(*args[:NUM_ATTENTION_TENSORS])
            out, lse = self.out, serving_ops.paged_attention_out(*args, self.out, lse=wants_lse)
        if request is not None:
            record_attention(request, args, out, self.before, lse=wants_lse)
        return (out, lse) if wants_lse else out

    def over_keys(
        self, k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_k: int | None, seqused_k: Tensor | None,
        scales: tuple[Tensor | None, ...], wants_lse: bool, request: tuple[Any, ...] | None = None,
        allow_dense: bool = False,
    ) -> Result:  # fmt: skip
        """Compute attention over keys without a cache. They are first quantized into temporary pages.

        allow_dense: compute by the dense kernel if that is faster. A row then depends on all rows of its sequence.
        """
        for name, x in (("k", k), ("v", v)):
            check_strided_argument(name, x)
            if x.dim() != 3:
                raise ValueError(
                    f"{name}: {describe_tensor(x)}; without block_table (total_k, kv_heads, head_dim) is needed"
                )
        starts = self.cu_seqlens_q
        if not isinstance(starts, Tensor) or starts.dim() != 1 or starts.shape[0] == 0:
            raise ValueError(f"cu_seqlens_q: {describe_tensor(starts)}; int32 (batch + 1,) is needed")
        if not isinstance(cu_seqlens_k, Tensor) or not require_same_shape(cu_seqlens_k.shape, starts.shape):
            raise ValueError(
                f"cu_seqlens_k: {describe_tensor(cu_seqlens_k)}; as cu_seqlens_q, without block_table it is needed"
            )
        if cu_seqlens_k.dtype != torch.int32:
            raise TypeError(f"cu_seqlens_k: its dtype is {cu_seqlens_k.dtype}; allowed: torch.int32")
        check_device("cu_seqlens_k", cu_seqlens_k, "q", self.q)
        max_seqlen_k = parse_length("max_seqlen_k", max_seqlen_k, MAX_LENGTH)
        total, batch = k.shape[0], cu_seqlens_k.shape[0] - 1
        is_quantized = k.dtype == E4M3
        if not is_quantized and (scales[1] is not None or scales[2] is not None):
            raise ValueError(f"k_descale, v_descale: given for k of {k.dtype}. This call quantizes k; None is needed")
        if allow_dense and scales[0] is None and self._uses_dense_kernel(k, v, cu_seqlens_k, seqused_k):
            return self._attend_dense(k, v, cu_seqlens_k, max_seqlen_k, seqused_k, wants_lse, request)
        if k.shape[2] not in HEAD_DIMS:
            raise NotImplementedError(
                f"k: head_dim {k.shape[2]}; allowed: {', '.join(map(str, HEAD_DIMS))}, and for 16 bits without "
                "scheduler_metadata multiples of 8 up to 256"
            )
        if not require(self.q.shape[-1] == k.shape[2]):
            raise ValueError(f"q: its head_dim is {self.q.shape[-1]}, k's {k.shape[2]}; they must agree")
        if not is_valid_grouping(self.q.shape[1], k.shape[1]):
            raise ValueError(
                f"q: it has {self.q.shape[1]} heads, k {k.shape[1]}; 1 to {MAX_GROUP_SIZE} query heads share each head "
                "of K and V"
            )
        if not require_same_shape(v.shape, k.shape):
            raise ValueError(f"v: {describe_tensor(v)}, k {describe_tensor(k)}; they must agree")
        k, v = make_rows_dense("k", k), make_rows_dense("v", v)
        # A size that may be 1 would restrict a graph, so there it has a spare page, and the table two spare columns.
        traced = torch.compiler.is_compiling()
        count = count_pages(total, batch) + int(is_quantized or traced)
        pages = allocate_pages(count, PAGE, k.shape[1], k.shape[2], k.device, grouped=not is_quantized)
        if not is_quantized:
            scales = (scales[0], pages.k_scale, pages.v_scale)
        width: Any = max_seqlen_k // PAGE + 2 if traced else max(1, -(-max_seqlen_k // PAGE))
        self._check(pages, (batch, width), cu_seqlens_k, scales, like=seqused_k)
        if not is_quantized:
            self._check_append(None, k, v, pages[:2], scales)
        elif v.dtype != E4M3 or v.device != k.device:
            raise ValueError(f"v: {describe_tensor(v)}, k {describe_tensor(k)}; they must agree")
        if _can_check_values(cu_seqlens_k, seqused_k):
            check_keys(cu_seqlens_k, total, max_seqlen_k, seqused_k)
        self._refuse_gradients(k, v)
        slots_args = (cu_seqlens_k, None, None, None, total, width, PAGE)
        slots, _, lengths, table = serving_ops.token_slots(*slots_args)
        if is_quantized:
            copy_codes(k, v, slots, pages)
        else:
            append_args = (None, k, v, *pages[:2], slots, *scales[1:], *[None] * 5, 0.0, False)
            serving_ops.append_kv(*append_args)
            self.before = slots_args, append_args
        used = lengths if seqused_k is None else seqused_k
        return self.attend(*pages[:2], table, used, scales, wants_lse, None if is_quantized else request)

    def _uses_dense_kernel(self, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None) -> bool:
        """Return whether the dense kernel computes the call over keys without a cache.

        It has no plan, and computes keys of 16 bits. The serving kernel is faster if all query tokens of a group of
        heads are in one of its narrow row tiles, as in decoding. It also gets the calls that no kernel can compute,
        because its errors have FlashAttention's names.
        """
        numbers_fit = is_valid_scale(self.scale) and (self.softcap == 0.0 or is_valid_scale(self.softcap))
        if self.plan is not None or not numbers_fit:
            return False
        try:
            check_once(check_varlen, (self.q, k, v, self.cu_seqlens_q, cu_seqlens_k, seqused_k, self.sinks), ())
        except (TypeError, ValueError, NotImplementedError):
            return False
        group = self.q.shape[1] // k.shape[1]
        is_narrow = is_certain(self.max_seqlen_q * group <= NARROW_ROWS)
        return not (is_narrow and k.shape[2] in HEAD_DIMS and group <= MAX_GROUP_SIZE)

    def _attend_dense(
        self, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, seqused_k: Tensor | None, wants_lse: bool,
        request: tuple[Any, ...] | None,
    ) -> Result:  # fmt: skip
        if self.out is not None:
            check_out(self.out, self.q, self.q.dtype)
            self._check_out_gradient(self.q, k, v, self.sinks)
        if _can_check_values(self.cu_seqlens_q, cu_seqlens_k, seqused_k):
            check_keys(cu_seqlens_k, k.shape[0], max_seqlen_k, seqused_k)
            check_queries(self.cu_seqlens_q, self.q.shape[0], self.max_seqlen_q)
        _, left, right = self.mask
        args = (
            self.q, k, v, self.cu_seqlens_q, cu_seqlens_k, seqused_k, self.sinks, self.max_seqlen_q, max_seqlen_k,
            "fp8", left, right, self.softcap, self.scale,
        )  # fmt: skip
        out, lse = attend_packed(args, self.out, wants_lse)
        if request is not None:
            record_packed(request, args, lse=wants_lse)
        return out if lse is None else (out, lse)

    def append(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, used: Tensor,
        starts: Tensor | None, scales: tuple[Tensor | None, ...], rotary: tuple[Any, ...], length: Any,
    ) -> Tensor:  # fmt: skip
        """Append new keys, rotate the queries, and return the lengths with the new keys."""
        cos, sin, seqlens, interleaved = rotary
        batch = used.shape[0]
        shape = "batch, seqlen_new" if starts is None else "total_new"
        if interleaved is not True and interleaved is not False:
            check_flag("rotary_interleaved", interleaved)
        for name, x in (("k", k), ("v", v)):
            check_strided_argument(name, x)
            if x.dim() != (4 if starts is None else 3) or (starts is None and not require(x.shape[0] == batch)):
                raise ValueError(
                    f"{name}: {describe_tensor(x)}; ({shape}, kv_heads, head_dim) is needed, batch {batch}"
                )
        for name, lengths_new, count in (("cu_seqlens_k_new", starts, batch + 1), ("rotary_seqlens", seqlens, batch)):
            if lengths_new is not None and (
                not isinstance(lengths_new, Tensor)
                or lengths_new.dtype != torch.int32
                or not require_same_shape(lengths_new.shape, (count,))
                or lengths_new.device != self.q.device
            ):
                raise ValueError(
                    f"{name}: {describe_tensor(lengths_new)}; int32 ({count},) is needed, on {self.q.device}"
                )
        if is_known(table.shape[1] == 0):
            raise ValueError(f"page_table: its shape is {tuple(table.shape)}; new keys need pages")
        new = None if starts is not None else k.shape[1]
        if new is not None:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        rotates = cos is not None or sin is not None
        if rotates:
            several = (new is None and not is_known(self.max_seqlen_q == 1)) or (
                new is not None and not is_known(new <= 1)
            )
            same = require(new == length) if starts is None else require(self.q.shape[0] == k.shape[0])
            if not same or (several and self.mask == (False, -1, -1)):
                raise NotImplementedError(
                    "rotary_cos: q and k must have the same tokens, and several of each a causal mask or a window"
                )
        if starts is None:
            starts = get_constant(self.q, "arange", new, batch)
        k, v = make_rows_dense("k", k), make_rows_dense("v", v)
        q, scales = (
            self.q if rotates else None,
            (scales[0], *[get_unit_scale(self.q) if x is None else x for x in scales[1:]]),
        )
        self._check((k_cache, v_cache), table, used, scales, like=used)
        places = k.new_empty(k.shape[0], dtype=torch.int64)
        self._check_append(q, k, v, (k_cache, v_cache), scales, cos, sin, places if rotates else None)
        self._refuse_gradients(k, v)
        self._check_attend(k_cache.shape[2], (k_cache, v_cache, *scales, cos, sin))
        slots_args = (starts, used, table, seqlens, k.shape[0], table.shape[1], k_cache.shape[1])
        slots, positions, lengths, _ = serving_ops.token_slots(*slots_args)
        if _can_check_values(self.q, table, used, starts, lengths):
            new_counts = check_starts("cu_seqlens_k_new", starts, k.shape[0], "k")
            if not self.has_table:
                _check_capacity(table.shape[1] * k_cache.shape[1], used, new_counts)
            check_values(self.q, k_cache, table, self.cu_seqlens_q, used, self.max_seqlen_q)
            check_values(self.q, k_cache, table, self.cu_seqlens_q, lengths, self.max_seqlen_q)
            if self.plan is not None and self.q.is_cpu:
                serving_ops.check_plan(self.plan.tensor, self.cu_seqlens_q, lengths)
        append_args = (
            q, k, v, k_cache, v_cache, slots, *scales[1:], None, None, cos, sin, positions if rotates else None, 0.0,
            interleaved,
        )  # fmt: skip
        turned = serving_ops.append_kv(*append_args)
        self.before = slots_args, append_args
        if rotates:
            self.q = turned
        return lengths

    def _check(
        self, pages: Sequence[Tensor], table: Tensor | tuple[Any, ...], lengths: Tensor,
        scales: tuple[Tensor | None, ...], like: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Check the attention before anything is appended.

        Tensors that are not computed yet are replaced by empty ones.
        """
        if torch.compiler.is_compiling():  # the operators check when they are traced
            return
        block_table = table if isinstance(table, Tensor) else lengths.new_empty(table, dtype=torch.int32)
        used = lengths.new_empty(block_table.shape[0]) if like is None else like
        args = self.arguments(pages[0], pages[1], block_table, used, scales)
        check_attention_once(*args)
        if self.plan is not None and type(self.q) is Tensor and self.q.is_cuda and type(self.plan.tensor) is Tensor:
            serving_ops.load_cuda().get_attention_plan(*args)  # raises for plans of another size

    def _check_plan(self, kv_heads: int) -> None:
        if self.plan is not None:
            self.plan.check(self.max_seqlen_q, self.q.shape[1], kv_heads, self.q.shape[2], self.mask)

    def _check_attend(self, kv_heads: int, inputs: Sequence[Tensor | None]) -> None:
        """Raise the remaining errors of ``attend`` before the cache is written."""
        self._check_plan(kv_heads)
        if self.out is not None and not torch.compiler.is_compiling():
            check_out(self.out, self.q, self.out.dtype if self.q.dtype == E4M3 else self.q.dtype)
            self._check_out_gradient(self.q, self.sinks, *inputs)

    def _check_out_gradient(self, *inputs: Tensor | None) -> None:
        """Raise NotImplementedError if ``out`` or an input requires a gradient, as PyTorch's operators do."""
        if requires_grad(self.out, *inputs):
            raise NotImplementedError(
                "out: given, while it or an input requires a gradient; leave it out or use torch.no_grad()"
            )

    def _refuse_gradients(self, k: Tensor, v: Tensor) -> None:
        """Make the output depend on K and V for autograd, so that their gradients are refused even if Q needs none."""
        if not requires_grad(k, v) or self.q.requires_grad:
            return
        if self.q.dtype == E4M3:
            raise NotImplementedError(GRADIENT_MESSAGE.format("k, v"))
        self.q = self.q + (k[:0].sum() + v[:0].sum()).to(self.q.dtype)

    def _check_append(
        self, q: Tensor | None, k: Tensor, v: Tensor, pages: Sequence[Tensor], scales: tuple[Tensor | None, ...],
        cos: Tensor | None = None, sin: Tensor | None = None, positions: Tensor | None = None,
    ) -> None:  # fmt: skip
        if torch.compiler.is_compiling():
            return
        slots = k.new_empty(k.shape[0], dtype=torch.int64)
        check_append_once(q, k, v, *pages, slots, *scales[1:], None, None, cos, sin, positions, 0.0, False)


def _check_capacity(capacity: int, used: Tensor, new_counts: Sequence[int]) -> None:
    """Raise ValueError if a sequence's cache has no room for its new keys."""
    for b, (n, new) in enumerate(zip(used.tolist(), new_counts, strict=True)):
        if n + new > capacity:
            raise ValueError(
                f"cache_seqlens: sequence {b} has {n} keys in the cache and gets {new} new ones; its cache has room "
                f"for {capacity}"
            )


def _can_check_values(first: Tensor, *others: Tensor | None) -> bool:
    """Return whether lengths can be read and checked here: in eager calls, if ``should_check_values``."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not should_check_values(first):
        return False
    return all(x is None or type(x) is Tensor for x in (first, *others))


def make_rows_dense(name: str, x: Tensor) -> Tensor:
    """Return x with dense rows. Raises TypeError for nested and sparse tensors."""
    check_strided_argument(name, x)
    return x if x.stride(-1) == 1 else x.contiguous()


def get_unit_scale(like: Tensor) -> Tensor:
    """Return a scale of 1."""
    return get_constant(like, "one")


def get_constant(like: Tensor, kind: str, step: Any = 0, count: Any = 0) -> Tensor:
    """Return a constant tensor. It is cached if a later call may use its memory.

    kind: "one" is a float32 1, "arange" is int32 0, step .. count * step, "table" is the block table of ``PagedRows``,
    with count = (batch, pages).
    """
    device = like.device
    cacheable = not torch.compiler.is_compiling() and type(like) is Tensor
    if cacheable:
        key = (kind, device, step, count)
        cached = _CONSTANTS.get(key)
        if cached is not None:
            return cached
    if kind == "one":
        tensor = torch.ones((), dtype=torch.float32, device=device)
    elif kind == "table":
        first, each = (torch.arange(n, dtype=torch.int32, device=device) for n in count)
        tensor = (first * step).unsqueeze(1) + each
    else:
        tensor = torch.arange(count + 1, dtype=torch.int32, device=device) * step
    # Memory of a CUDA graph belongs to the graph, and tensors of a mode belong to the mode.
    if cacheable and not torch._C._len_torch_dispatch_stack() and not is_capturing(device):
        if len(_CONSTANTS) >= _MAX_CONSTANTS:
            _CONSTANTS.clear()
        return _CONSTANTS.setdefault(key, synchronized(tensor))
    return tensor
