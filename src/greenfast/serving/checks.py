"""Checks of the serving operators: dtype, shape, strides and device of every tensor, once per combination."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention.config import KEY_GROUP
from greenfast.ops.arguments import (
    MAX_LENGTH,
    check_once,
    check_starts,
    check_used,
    parse_length,
    parse_softcap,
)
from greenfast.ops.quantized import DTYPES, check_device, check_strided
from greenfast.ops.symbols import is_known, require, require_same_shape

E4M3 = torch.float8_e4m3fn
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP_SIZE = 16  # query heads per KV head
#: Set it to 1 to check block tables and lengths on a GPU before each call. This synchronizes with the GPU.
CHECK_PAGES = "GREENFAST_CHECK_PAGES"
_CHECK_PAGES_ENABLED = os.environ.get(CHECK_PAGES, "0") not in ("", "0")

#: In the kernels numbers are float32.
_MAX_FLOAT = torch.finfo(torch.float32).max
_MAX_STRIDE = 2**34  # bytes; the kernels count units of 8 bytes in int32
_ROW_ALIGNMENT = 16  # bytes; alignment of rows
_FLOATS = (*DTYPES, torch.float32)
#: The operators' arguments begin with their tensors: this many of ``paged_attention`` and of ``append_kv``.
NUM_ATTENTION_TENSORS, NUM_APPEND_TENSORS = 11, 13
#: Positions in the arguments of ``paged_attention`` (a test compares them with the schema). ``paged_attention_out`` has
#: OUT after all others. Calls are too short for a dataclass of their arguments.
Q, MAX_SEQLEN_Q, OUT_DTYPE, OUT = 0, 11, 17, 18
#: Names of arguments in errors, with FlashAttention's names in parentheses.
_DISPLAY_NAMES = {
    "q_scale": "q_scale (q_descale)",
    "k_scale": "k_scale (k_descale)",
    "v_scale": "v_scale (v_descale)",
    "block_table": "block_table (page_table)",
    "seqused_k": "seqused_k (cache_seqlens)",
    "sinks": "sinks (s_aux)",
    "cos": "cos (rotary_cos)",
    "sin": "sin (rotary_sin)",
    "plan": "plan (scheduler_metadata)",
}


def check_attention_once(*args: Any) -> None:
    """Call ``check_attention`` with these arguments, once per combination."""
    check_once(check_attention, args[:NUM_ATTENTION_TENSORS], args[NUM_ATTENTION_TENSORS:])


def check_append_once(*args: Any) -> None:
    """Call ``check_append`` with these arguments, once per combination."""
    check_once(check_append, args[:NUM_APPEND_TENSORS], args[NUM_APPEND_TENSORS:])


def check_strided_argument(name: str, x: Any) -> None:
    """Raise TypeError unless x is a strided tensor. Errors show FlashAttention's names too."""
    check_strided(_DISPLAY_NAMES.get(name, name), x)


def _check_tensor(name: str, x: Any, dtypes: tuple[torch.dtype, ...], like: Tensor | None, hint: str = "") -> None:
    check_strided_argument(name, x)
    shown = _DISPLAY_NAMES.get(name, name)
    if x.dtype not in dtypes:
        raise TypeError(f"{shown}: its dtype is {x.dtype}; allowed: {', '.join(map(str, dtypes))}{hint}")
    if like is not None:
        check_device(shown, x, "q or k", like)


def _check_shape(name: str, x: Tensor, *allowed: tuple[tuple[Any, ...], str]) -> None:
    """Raise ValueError unless x has an allowed shape. Each comes with the names of its dimensions."""
    if not any(
        len(x.shape) == len(shape) and all(is_known(a == b) for a, b in zip(x.shape, shape, strict=True))
        for shape, _ in allowed
    ) and not (len(allowed) == 1 and require_same_shape(x.shape, allowed[0][0])):
        expected = " or ".join(f"{tuple(shape)} = ({names})" for shape, names in allowed)
        raise ValueError(f"{_DISPLAY_NAMES.get(name, name)}: its shape is {tuple(x.shape)}; {expected} is needed")


def _get_relevant_strides(x: Tensor) -> list[Any]:
    """Return the strides of dimensions with more than one element; a last dimension of one element counts as 1.

    The list is empty if the tensor has no elements.
    """
    if any(is_known(n == 0) for n in x.shape):
        return []
    pairs = [*zip(x.shape, x.stride(), strict=True)]
    if not pairs:
        return []
    return [step for n, step in pairs[:-1] if not is_known(n == 1)] + [
        1 if is_known(pairs[-1][0] == 1) else pairs[-1][1]
    ]


def _check_rows(name: str, x: Tensor) -> None:
    """Raise ValueError unless the last dimension is dense and every row begins at a multiple of 16 bytes."""
    strides = _get_relevant_strides(x)
    if strides and (strides[-1] != 1 or any(is_known(s * x.itemsize % _ROW_ALIGNMENT != 0) for s in strides[:-1])):
        raise ValueError(
            f"{name}: its strides are {x.stride()}; 1 in the last dimension, and multiples of {_ROW_ALIGNMENT} bytes "
            "in the others are needed; .contiguous() makes them"
        )


def _has_strides(x: Tensor, expected: tuple[Any, ...]) -> bool:
    """Return whether the last dimensions have these strides; dimensions of one element may have any."""
    last = zip(x.shape[-len(expected) :], x.stride()[-len(expected) :], expected, strict=True)
    return all(is_known(n == 1) or is_known(step == needed) for n, step, needed in last)


def _check_dense(name: str, x: Tensor) -> None:
    size: Any = 1
    for n, step in reversed([*zip(x.shape, x.stride(), strict=True)] if _get_relevant_strides(x) else []):
        if is_known(n == 1):
            continue
        if is_known(step != size):
            break
        size *= n
    else:
        return
    raise ValueError(f"{_DISPLAY_NAMES.get(name, name)}: it is not contiguous, strides {x.stride()}")


def _check_no_overlap(name: str, x: Tensor) -> None:
    """Raise ValueError if elements share memory, as they do after expand()."""
    if any(is_known(step == 0) and not is_known(n <= 1) for n, step in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name}: its strides are {x.stride()}; elements that share memory cannot be written")


def _check_number(name: str, value: Any, least: float, *, above: bool = False) -> None:
    if isinstance(value, float) and not abs(value) <= _MAX_FLOAT:
        raise ValueError(f"{name}: {value}; a finite number of float32 is needed")
    if is_known(value < least) or (above and is_known(value == least)):
        raise ValueError(f"{name}: {value}; a number {'above' if above else 'of at least'} {least:g} is needed")


def is_valid_grouping(heads: Any, kv_heads: Any) -> bool:
    """Return whether 1 to MAX_GROUP_SIZE query heads share each KV head. A graph checks unknown sizes when it runs."""
    if not require(kv_heads > 0) or not require(heads % kv_heads == 0):
        return False
    return require(heads >= kv_heads) and require(heads <= MAX_GROUP_SIZE * kv_heads)


def check_cache(k_cache: Tensor, v_cache: Tensor, like: Tensor) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless the two are the K and V pages of one cache."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_tensor(name, x, (E4M3,), like, "; bytes of a cache become it by .view(torch.float8_e4m3fn)")
    if k_cache.dim() != 4:
        raise ValueError(
            f"k_cache: its shape is {tuple(k_cache.shape)}; (pages, page_size, kv_heads, head_dim) is needed"
        )
    pages, page_size, kv_heads, head_dim = k_cache.shape
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"k_cache: page size {page_size}; allowed: {', '.join(map(str, PAGE_SIZES))}")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"k_cache: head_dim {head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    _check_rows("k_cache", k_cache)
    if v_cache.dim() == 5:
        grouped = (pages, kv_heads, page_size // KEY_GROUP, head_dim, KEY_GROUP)
        _check_shape("v_cache", v_cache, (grouped, "pages, kv_heads, page_size / 16, head_dim, 16"))
        inner = (head_dim * KEY_GROUP, KEY_GROUP, 1)
        if _get_relevant_strides(v_cache) and not _has_strides(v_cache, inner):
            raise ValueError(f"v_cache: its strides are {v_cache.stride()}; the last three must be {inner}")
        _check_rows("v_cache", v_cache)
    else:
        _check_shape("v_cache", v_cache, (tuple(k_cache.shape), "as k_cache, or with 5 dimensions the layout grouped"))
        _check_rows("v_cache", v_cache)


def _check_scales(k_cache: Tensor, k_scale: Tensor, v_scale: Tensor, batch: Any, like: Tensor) -> None:
    """Check scales. batch: the size of scales per sequence, or None if these are not allowed."""
    pages, page_size, kv_heads, _ = k_cache.shape
    tokens = ((pages, kv_heads, page_size), "pages, kv_heads, page_size")
    heads = [((), "one for all"), ((kv_heads,), "kv_heads")]
    if batch is not None:
        heads.append(((batch, kv_heads), "batch, kv_heads"))
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_tensor(name, x, (torch.float32,), like)
        _check_shape(name, x, *heads, tokens)
        if x.dim() == 3 and _get_relevant_strides(x) and not _has_strides(x, (page_size, 1)):
            raise ValueError(f"{_DISPLAY_NAMES[name]}: its strides are {x.stride()}; each page's must be contiguous")
    if (k_scale.dim() == 3) != (v_scale.dim() == 3):
        raise ValueError(
            f"{_DISPLAY_NAMES['v_scale']}: its shape is {tuple(v_scale.shape)}, k_scale's {tuple(k_scale.shape)}; "
            "both are per token, or neither"
        )


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    k_scale: Tensor, v_scale: Tensor, q_scale: Tensor | None, sinks: Tensor | None, plan: Tensor | None,
    max_seqlen_q: int, causal: bool, window_left: int, window_right: int, softcap: float, softmax_scale: float,
    out_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise TypeError, ValueError or NotImplementedError for arguments that no kernel can compute."""
    _check_tensor("q", q, (*DTYPES, E4M3), None)
    if q.dim() != 3:
        raise ValueError(f"q: its shape is {tuple(q.shape)}; (total_q, heads, head_dim) is needed")
    check_cache(k_cache, v_cache, q)
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], k_cache.shape[2]
    if head_dim != k_cache.shape[3]:
        raise ValueError(f"q: its head_dim is {head_dim}, the cache's {k_cache.shape[3]}; they must agree")
    if not is_valid_grouping(heads, kv_heads):
        raise ValueError(
            f"q: it has {heads} heads, the cache {kv_heads}; 1 to {MAX_GROUP_SIZE} query heads share each head of K "
            "and V"
        )
    _check_rows("q", q)
    steps = [step for n, step in zip(q.shape, q.stride(), strict=True) if not is_known(n <= 1)]
    if any(is_known(step * q.itemsize >= _MAX_STRIDE) for step in steps):
        raise ValueError(f"q: its strides are {q.stride()}; less than {_MAX_STRIDE} bytes are needed")
    for name, x in (("block_table", block_table), ("cu_seqlens_q", cu_seqlens_q), ("seqused_k", seqused_k)):
        _check_tensor(name, x, (torch.int32,), q)
    if seqused_k.dim() != 1:
        raise ValueError(f"{_DISPLAY_NAMES['seqused_k']}: its shape is {tuple(seqused_k.shape)}; (batch,) is needed")
    batch = seqused_k.shape[0]
    _check_shape(
        "cu_seqlens_q", cu_seqlens_q, ((batch + 1,), f"batch + 1; batch: length of {_DISPLAY_NAMES['seqused_k']}")
    )
    if block_table.dim() != 2 or not require(block_table.shape[0] == batch):
        shape = tuple(block_table.shape)
        raise ValueError(f"{_DISPLAY_NAMES['block_table']}: its shape is {shape}; ({batch}, max_pages) is needed")
    if (
        _get_relevant_strides(block_table)
        and is_known(block_table.shape[1] > 1)
        and is_known(block_table.stride(1) != 1)
    ):
        raise ValueError(
            f"{_DISPLAY_NAMES['block_table']}: its strides are {block_table.stride()}; rows must be contiguous"
        )
    _check_dense("cu_seqlens_q", cu_seqlens_q)
    _check_dense("seqused_k", seqused_k)
    _check_scales(k_cache, k_scale, v_scale, batch, q)
    if q.dtype == E4M3:
        if q_scale is None:
            raise ValueError(
                f"{_DISPLAY_NAMES['q_scale']}: None; for q of {E4M3} its scales (batch, kv_heads) are needed"
            )
        _check_tensor("q_scale", q_scale, (torch.float32,), q)
        _check_shape("q_scale", q_scale, ((batch, kv_heads), "batch, kv_heads"))
    elif q_scale is not None:
        raise ValueError(
            f"{_DISPLAY_NAMES['q_scale']}: given for q of {q.dtype}. This call quantizes q; None is needed"
        )
    if sinks is not None:
        _check_tensor("sinks", sinks, (torch.float32,), q)
        _check_shape("sinks", sinks, ((heads,), "heads"))
        _check_dense("sinks", sinks)
    if plan is not None:
        _check_tensor("plan", plan, (torch.int32,), q)
        _check_dense("plan", plan)
    if out_dtype not in DTYPES:
        raise TypeError(f"out: dtype {out_dtype}; allowed: {', '.join(map(str, DTYPES))}")
    parse_length("max_seqlen_q", max_seqlen_q, MAX_LENGTH)
    _check_number("window_size", window_left, -1)
    _check_number("window_size", window_right, -1)
    parse_softcap(softcap)
    _check_number("softmax_scale", softmax_scale, 0, above=True)


def check_out(out: Tensor, q: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless the output can be written to ``out``."""
    _check_tensor("out", out, (dtype,), q)
    _check_shape("out", out, (tuple(q.shape), "as q"))
    _check_rows("out", out)
    _check_no_overlap("out", out)


def check_append(
    q: Tensor | None, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor,
    v_scale: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    """Raise TypeError, ValueError or NotImplementedError for arguments that cannot be appended."""
    _check_tensor("k", k, DTYPES, None)
    check_cache(k_cache, v_cache, k)
    kv_heads, head_dim = k_cache.shape[2:]
    tokens = k.shape[0] if k.dim() else 0
    _check_shape("k", k, ((tokens, kv_heads, head_dim), "tokens, kv_heads, head_dim"))
    _check_tensor("v", v, (k.dtype,), k)
    _check_shape("v", v, (tuple(k.shape), "as k"))
    if q is not None:
        _check_tensor("q", q, (k.dtype,), k)
        if q.dim() != 3 or not require(q.shape[0] == tokens) or not require(q.shape[2] == head_dim):
            raise ValueError(f"q: its shape is {tuple(q.shape)}; ({tokens}, heads, {head_dim}) is needed")
        _check_rows("q", q)
    _check_rows("k", k)
    _check_rows("v", v)
    _check_tensor("slot_mapping", slot_mapping, (torch.int64,), k)
    _check_shape("slot_mapping", slot_mapping, ((tokens,), "tokens"))
    _check_dense("slot_mapping", slot_mapping)
    _check_scales(k_cache, k_scale, v_scale, None, k)
    token_scales = {"k_scale": k_scale, "v_scale": v_scale} if k_scale.dim() == 3 else {}
    for name, written in ({"k_cache": k_cache, "v_cache": v_cache} | token_scales).items():
        _check_no_overlap(name, written)
    for name, x in (("q_weight", q_weight), ("k_weight", k_weight)):
        if x is not None:
            _check_tensor(name, x, _FLOATS, k)
            _check_shape(name, x, ((head_dim,), "head_dim"))
            _check_dense(name, x)
    if q_weight is not None and q is None:
        raise ValueError("q_weight: given without q")
    if q is not None and (q_weight is None) != (k_weight is None):
        raise NotImplementedError("q_weight, k_weight: one is None; with q both are given, or neither")
    _check_rotation(cos, sin, positions, k)
    _check_number("eps", eps, 0)


def _check_rotation(cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, k: Tensor) -> None:
    if cos is None and sin is None and positions is None:
        return
    for name, x in (("cos", cos), ("sin", sin), ("positions", positions)):
        if x is None:
            raise ValueError(f"{_DISPLAY_NAMES.get(name, name)}: None; a rotation needs cos, sin and positions")
    assert cos is not None
    assert sin is not None
    assert positions is not None
    _check_tensor("cos", cos, _FLOATS, k)
    _check_tensor("sin", sin, (cos.dtype,), k)
    if cos.dim() != 2 or cos.shape[1] % 8 or not 8 <= cos.shape[1] <= k.shape[2] // 2:
        raise ValueError(
            f"{_DISPLAY_NAMES['cos']}: its shape is {tuple(cos.shape)}; (positions, rotary_dim / 2) is needed, "
            f"rotary_dim a multiple of 16 up to head_dim {k.shape[2]}"
        )
    _check_shape("sin", sin, (tuple(cos.shape), "as cos"))
    _check_dense("cos", cos)
    _check_dense("sin", sin)
    _check_tensor("positions", positions, (torch.int64, torch.int32), k)
    _check_shape("positions", positions, ((k.shape[0],), "tokens"))
    _check_dense("positions", positions)


def should_check_values(x: Tensor) -> bool:
    """Return whether lengths and block tables are read before a call: always on the CPU, on a GPU with CHECK_PAGES."""
    return _CHECK_PAGES_ENABLED or x.is_cpu


def check_keys(cu_seqlens_k: Tensor, total_k: int, max_seqlen_k: int, seqused_k: Tensor | None) -> None:
    """Raise ValueError for lengths of keys without a cache, if a sequence has fewer keys than would be read."""
    lengths = check_starts("cu_seqlens_k", cu_seqlens_k, total_k, "k")
    if max(lengths, default=0) > max_seqlen_k:
        raise ValueError(f"max_seqlen_k: {max_seqlen_k}; a sequence has {max(lengths)} keys")
    if seqused_k is not None and seqused_k.shape == (len(lengths),):
        check_used(seqused_k, lengths)


def check_queries(cu_seqlens_q: Tensor, total_q: int, max_seqlen_q: int) -> None:
    """Raise ValueError for lengths of queries that do not fit."""
    lengths = check_starts("cu_seqlens_q", cu_seqlens_q, total_q, "q")
    if max(lengths, default=0) > max_seqlen_q:
        raise ValueError(f"max_seqlen_q: {max_seqlen_q}; a sequence has {max(lengths)} queries")


def check_slots(slot_mapping: Tensor, k_cache: Tensor) -> None:
    """Raise ValueError for slots after the cache's last one, and for a slot of two tokens."""
    slots, counts = torch.unique(slot_mapping[slot_mapping >= 0], return_counts=True)
    last = k_cache.shape[0] * k_cache.shape[1] - 1
    if bool((slots > last).any()):
        raise ValueError(f"slot_mapping: {int(slots[-1])}; the cache has slots 0 to {last}, negative ones are skipped")
    if bool((counts > 1).any()):
        raise ValueError(f"slot_mapping: {int(slots[counts > 1][0])} of {int(counts.max())} tokens; each needs its own")


def check_values(
    q: Tensor, k_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int
) -> None:
    """Raise ValueError for lengths that do not fit, and for pages outside the cache."""
    (pages, page_size), capacity = k_cache.shape[:2], block_table.shape[1] * k_cache.shape[1]
    check_queries(cu_seqlens_q, q.shape[0], max_seqlen_q)
    for b, n in enumerate(seqused_k.tolist()):
        if not 0 <= n <= capacity:
            shown = _DISPLAY_NAMES["seqused_k"]
            raise ValueError(f"{shown}: {n} of sequence {b}; 0 to {capacity} keys fit a row of the block table")
        entries = block_table[b, : -(-n // page_size)]
        if n and not bool(((entries >= 0) & (entries < pages)).all()):
            shown = _DISPLAY_NAMES["block_table"]
            raise ValueError(f"{shown}: {entries.tolist()} of sequence {b}; the cache has pages 0 to {pages - 1}")
