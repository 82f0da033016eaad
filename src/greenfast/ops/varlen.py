"""Attention of packed sequences of several lengths, with the arithmetic of ``sdpa`` for each sequence.

The lengths stay on the device: no call waits for the GPU. A kernel makes the list of work tiles from them
(``kernels.attention.packed``), then K and V are quantized, then the dense attention kernel runs over the list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention.config import Mask
from greenfast.ops import autograd, reference, torch_ops
from greenfast.ops.arguments import (
    MAX_LENGTH,
    check_flag,
    check_once,
    check_starts,
    check_used,
    has_key_mean,
    parse_length,
    parse_scale,
    parse_softcap,
    parse_window,
)
from greenfast.ops.backward import flash_backward, refuse_gradients
from greenfast.ops.call_cache import CachedLaunch, CallCache, build_allocator, replay
from greenfast.ops.canonicalize import get_rows_shape
from greenfast.ops.layout import is_capturing
from greenfast.ops.masked import MaskSpec
from greenfast.ops.quantized import DTYPES, PRECISIONS, Precision, build_config, check_choice, check_device
from greenfast.ops.symbols import require, require_same_shape

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

VARLEN_CACHE = CallCache(7)  # calls that skipped the dispatcher; their first 7 arguments are tensors or None
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? seqused_k, Tensor? sinks, "
    "SymInt max_q, SymInt max_k, str precision, int window_left, int window_right, float softcap, float scale"
)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    precision: Precision = "fp8",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute FP8 attention of packed sequences, with the signature of ``torch.nn.attention.varlen.varlen_attn``.

    query: (total_q, H, D); key and value: (total_k, HK, D). HK is H, or with ``enable_gqa`` a divisor of H. The dtype
    is float16 or bfloat16, D is a multiple of 8 up to 256. Sequence i has the rows cu_seq_q[i] .. cu_seq_q[i + 1] - 1
    of query, and by cu_seq_k of key and value; both are int32 (N + 1,) on the same device. Any length may be 0.
    seqused_k: int32 (N,), only the first keys of each sequence are attended to. max_q, max_k: the longest lengths.
    window_size: (left, right), the keys before and after a query's own place, -1 for all of them; (-1, 0) is a causal
    mask. Places are counted from the last query and key of a sequence. softcap: scores s become softcap * tanh(s /
    softcap). sinks: float32 (H,), the logit of one more key of each row, without a value. precision: as in ``sdpa``;
    scales and the mean of K belong to one sequence, so that the result of a sequence does not depend on the others.
    num_splits is ignored: rows are never split.

    Returns (total_q, H, D) of the inputs' dtype; with ``return_aux.lse`` also the natural log-sum-exp, float32
    (H, total_q). The sink is a part of it. Rows without keys are 0, and -inf or the sink. Rows of query outside of
    all sequences are 0 on the CPU, and not written on a GPU. Gradients are computed for attention on the unquantized
    tensors, and for sinks. With softcap they are in float32 and read the lengths. With seqused_k there are none.

    Raises TypeError and ValueError for arguments that do not fit, and NotImplementedError for block_table, head dims
    and GPUs without a kernel, and gradients that do not exist.
    """
    wants_lse = return_aux is not None and _parse_aux(return_aux)
    request = None
    if block_table is None and not torch.compiler.is_compiling():
        # One argument or two, so that requests with different optional arguments differ in length.
        window = window_size if type(window_size) is tuple and len(window_size) == 2 else (window_size,)
        request = (
            query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks, max_q, max_k, precision, *window, softcap, scale,
            enable_gqa, wants_lse,
        )  # fmt: skip
        replayed = replay(VARLEN_CACHE, request, query)
        if replayed is not None:
            return replayed if wants_lse else replayed[0]  # type: ignore[return-value]
    check_choice("precision", precision, PRECISIONS)
    check_flag("enable_gqa", enable_gqa)
    if block_table is not None:
        raise NotImplementedError(
            "block_table: keys in pages are of a PagedKVCache; greenfast.flash_attn_varlen_func reads it"
        )
    left, right = parse_window(window_size)
    if cu_seq_k is None:
        raise ValueError("cu_seq_k: None; int32 (N + 1,) is needed, as cu_seq_q")
    max_q, max_k = parse_length("max_q", max_q, MAX_LENGTH), parse_length("max_k", max_k, MAX_LENGTH)
    check_once(check_varlen, (query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks), ())
    if not enable_gqa and not require(query.shape[1] == key.shape[1]):
        raise ValueError(
            f"query: it has {query.shape[1]} heads, key {key.shape[1]}; with enable_gqa=True query heads share them"
        )
    cap = parse_softcap(softcap)
    factor = parse_scale(scale, query.shape[2])
    arguments = (
        query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks, max_q, max_k, precision, left, right, cap, factor
    )  # fmt: skip
    out, lse = attend_packed(arguments, None, wants_lse)
    if request is not None:
        _record_launches(request, arguments, wants_lse)
    return out if lse is None else (out, lse)


def _parse_aux(return_aux: Any) -> bool:
    """Return whether the log-sum-exp is requested. Raises TypeError unless it is an AuxRequest."""
    if not hasattr(return_aux, "lse"):
        raise TypeError(
            f"return_aux: a {type(return_aux).__name__}; a torch.nn.attention.varlen.AuxRequest is needed, or None"
        )
    check_flag("return_aux.lse", return_aux.lse)
    return return_aux.lse  # type: ignore[no-any-return]


def _record_launches(request: tuple[Any, ...], args: tuple[Any, ...], wants_lse: bool) -> None:
    """Record the launches of a call, unless it used copies or added the mean of the keys after the launches.

    args: the operator's arguments. Memory of a CUDA graph belongs to the graph, so its calls are not recorded.
    """
    tensors = [x for x in args[:7] if x is not None]
    if not VARLEN_CACHE.cacheable(request) or not torch_ops.can_skip_dispatcher(*tensors):
        return
    plan = None if is_capturing(args[0].device) else torch_ops.load_cuda().get_varlen_plan(wants_lse, *args)
    if plan is None or "k_mean" in plan.names:
        return
    names = (*plan.names[: plan.names.index("out")], *(["lse"] if wants_lse else []), "out")
    launch = CachedLaunch(plan.with_argument_order(names), build_allocator(args[0], args[0].dtype), 3, wants_lse)
    VARLEN_CACHE.put(request, launch)


def attend_packed(args: tuple[Any, ...], out: Tensor | None, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed sequences.

    args: the operator's arguments. out: a tensor for the output, without gradients. Returns the output, and the
    log-sum-exp or None.
    """
    query, key, value, starts_q, starts_k, seqused_k, sinks, *_, softcap, _ = args
    tensors = [x for x in (query, key, value, starts_q, starts_k, seqused_k, sinks, out) if x is not None]
    # The output may overwrite query, unless query is needed after the launches, for the log-sum-exp.
    needs_query = wants_lse and has_key_mean(softcap, sinks)
    if not torch_ops.can_skip_dispatcher(*tensors) or (
        out is not None and (not out.is_contiguous() or (needs_query and out.data_ptr() == query.data_ptr()))
    ):
        result, lse = VARLEN_LSE(*args) if wants_lse else (VARLEN(*args), None)
        return (result, lse) if out is None else (out.copy_(result), lse)
    result, lse = torch_ops.load_cuda().varlen(wants_lse, *args, out)
    return result, lse if wants_lse else None


def attend_jagged(
    query: Any, key: Any, value: Any, sinks: Tensor | None, window: tuple[int, int], softcap: float, scale: float,
    precision: str, wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute ``sdpa`` of jagged tensors (B, H, j, D). Return the output, and the log-sum-exp (B, H, j) or None.

    ``parse_call`` has accepted the arguments. window: aligned at the last query and key of each sequence. No
    length is read on the host: the number of all rows replaces a maximum that is not cached.
    """
    starts_q = _get_starts(query)
    same = key.lengths() is query.lengths() and (key.lengths() is not None or key.offsets() is query.offsets())
    starts_k = starts_q if same else _get_starts(key)
    max_q, max_k = (get_rows_shape(x)[1] if x._maybe_max_seqlen is None else x._maybe_max_seqlen for x in (query, key))
    q, k, v = (_pack_rows(x, starts) for x, starts in ((query, starts_q), (key, starts_k), (value, starts_k)))
    args = (q, k, v, starts_q, starts_k, None, sinks, max_q, max_k, precision, *window, softcap, scale)
    out, lse = attend_packed(args, None, wants_lse)
    out = _unpack_rows(out, query, starts_q)
    return out, None if lse is None else _unpack_rows(lse.transpose(0, 1), query, starts_q)


def _get_starts(x: Any) -> Tensor:
    """Return where the sequences of a jagged tensor start if there are no gaps between them, int32 (B + 1,)."""
    lengths = x.lengths()
    starts: Tensor = x.offsets() if lengths is None else torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return starts.to(torch.int32)


def _pack_rows(x: Any, starts: Tensor) -> Tensor:
    """Return the rows (tokens, H, D) of a jagged tensor (B, H, j, D), with sequences at ``starts``."""
    rows: Tensor = x.values().transpose(0, 1)
    offsets: Tensor = x.offsets()
    if x.lengths() is None:
        return rows
    places = torch.arange(rows.shape[0], dtype=starts.dtype, device=rows.device)
    sequences = _find_sequences(places, starts)
    sources = places + offsets[sequences] - starts[sequences]
    # Rows after the last sequence are 0, so that no gradient flows back from them.
    packed = rows.index_select(0, sources.clamp(max=rows.shape[0] - 1))
    return packed.masked_fill((places >= starts[-1]).view(-1, 1, 1), 0.0)


def _unpack_rows(packed: Tensor, like: Any, starts: Tensor) -> Tensor:
    """Return packed rows (tokens, H, ...) as a jagged tensor (B, H, j, ...) that is stored like another one.

    starts: of the sequences in ``packed``. Rows between sequences become 0.
    """
    offsets, lengths = like.offsets(), like.lengths()
    if lengths is not None:
        places = torch.arange(packed.shape[0], dtype=offsets.dtype, device=packed.device)
        sequences = _find_sequences(places, offsets)
        within = places - offsets[sequences]
        gaps = ((within < 0) | (within >= lengths[sequences])).view(-1, *[1] * (packed.dim() - 1))
        sources = (within + starts[sequences]).clamp(0, packed.shape[0] - 1)
        packed = packed.index_select(0, sources).masked_fill(gaps, 0.0)
    return torch.nested.nested_tensor_from_jagged(
        packed.transpose(0, 1), offsets, lengths, jagged_dim=2, min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )  # fmt: skip


def _find_sequences(places: Tensor, starts: Tensor) -> Tensor:
    """Return the sequence of each row; 0 before the first, and B - 1 after the last. starts: (B + 1,)."""
    return torch.bucketize(places, starts[1:-1], right=True)


def check_varlen(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, seqused_k: Any, sinks: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError for tensors that do not fit."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name}: a {type(x).__name__}; a strided tensor is needed, not a nested or sparse one")
        if x.dim() != 3:
            raise ValueError(f"{name}: its shape is {tuple(x.shape)}; (tokens, heads, head_dim) is needed")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: its dtype is {x.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: its dtype is {x.dtype}, but query is {query.dtype}; they must agree")
        check_device(name, x, "query", query)
    heads, head_dim = query.shape[1:]
    if head_dim % 8 or not 8 <= head_dim <= HEAD_DIMS[-1]:
        raise NotImplementedError(f"query: head_dim {head_dim}; a multiple of 8 up to {HEAD_DIMS[-1]} is needed")
    if not require_same_shape(value.shape, key.shape) or not require(key.shape[2] == head_dim):
        raise ValueError(
            f"key, value: their shapes are {tuple(key.shape)} and {tuple(value.shape)}; both (tokens, kv_heads, "
            f"{head_dim}) are needed"
        )
    if heads < 1 or key.shape[1] < 1 or heads % key.shape[1]:
        raise ValueError(f"query: it has {heads} heads, key {key.shape[1]}; a multiple is needed")
    sequences = cu_seq_q.shape[0] - 1 if isinstance(cu_seq_q, Tensor) and cu_seq_q.dim() == 1 else -1
    for name, x, count in (
        ("cu_seq_q", cu_seq_q, sequences + 1),
        ("cu_seq_k", cu_seq_k, sequences + 1),
        ("seqused_k", seqused_k, sequences),
    ):
        if x is None and name == "seqused_k":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: a {type(x).__name__}; an int32 tensor is needed")
        if x.dtype != torch.int32:
            raise TypeError(f"{name}: its dtype is {x.dtype}; allowed: torch.int32")
        if sequences < 0 or x.dim() != 1 or not require(x.shape[0] == count):
            raise ValueError(
                f"{name}: its shape is {tuple(x.shape)}; ({'N' if name == 'seqused_k' else 'N + 1'},) is needed"
            )
        check_device(name, x, "query", query)
    if sinks is not None:
        if not isinstance(sinks, Tensor) or sinks.dtype != torch.float32:
            kind = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
            raise TypeError(f"sinks: {kind}; a float32 tensor is needed")
        if sinks.dim() != 1 or not require(sinks.shape[0] == heads) or sinks.device != query.device:
            raise ValueError(f"sinks: {tuple(sinks.shape)} on {sinks.device}; ({heads},) on {query.device} is needed")


def _read_lengths(
    query: Tensor, key: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None
) -> list[tuple[slice, slice]]:
    """Return the rows of query and of key of each sequence. Raises ValueError for lengths that do not fit."""
    queries = check_starts("cu_seq_q", cu_seq_q, query.shape[0], "query")
    keys = check_starts("cu_seq_k", cu_seq_k, key.shape[0], "key")
    used = keys if seqused_k is None else check_used(seqused_k, keys)
    rows = zip(accumulate(queries, initial=0), queries, accumulate(keys, initial=0), used, strict=False)
    return [(slice(q, q + q_len), slice(k, k + k_len)) for q, q_len, k, k_len in rows]


def _as_batch(x: Tensor, rows: slice) -> Tensor:
    """Return the rows of a packed tensor as a batch of one, (1, heads, rows, head_dim)."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _varlen_cpu(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None,
    sinks: Tensor | None, max_q: int, max_k: int, precision: str, window_left: int, window_right: int, softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_varlen(query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks)
    centered, spec = has_key_mean(softcap, sinks), MaskSpec(Mask.LOWER_RIGHT, window_left, window_right)
    config = build_config(query.shape[2], query.dtype, precision, key_mean=centered)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = query.new_full((query.shape[1], query.shape[0]), -math.inf, dtype=torch.float32)
    for rows, keys in _read_lengths(query, key, cu_seq_q, cu_seq_k, seqused_k):
        if rows.start == rows.stop:
            continue
        if keys.start == keys.stop:
            if sinks is not None:
                lse[:, rows] = sinks.unsqueeze(1)
            continue
        q = _as_batch(query, rows)
        codes = reference.quantize(q, _as_batch(key, keys), _as_batch(value, keys), config)
        mask = spec.build_bool(q.shape[2], codes.key_length, q.device)
        part, sums = reference.attention(codes, 0, scale, softcap, sinks, mask)
        if centered:
            scores = reference.compute_mean_scores(q, codes.tensors()[-1], rotated=True)
            sums = reference.add_mean_scores(sums, scores, Mask.LOWER_RIGHT, scale)
        out[rows], lse[:, rows] = part[0].transpose(0, 1), sums[0]
    return out, lse


def _varlen_gpu(lse: bool, *args: Any) -> Any:
    check_once(check_varlen, args[:7], ())
    return torch_ops.load_cuda().varlen(lse, *args)


def _varlen_fake(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    check_varlen(query, *args[:6])
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def _backward_by_sequence(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    seqused_k: Tensor | None, sinks: Tensor | None, max_q: int, max_k: int, precision: str, window_left: int,
    window_right: int, softcap: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients in float32. The lengths are read on the host."""
    refuse_gradients(seqused_k=seqused_k is not None)
    by_sinks = query.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    spec = MaskSpec(Mask.LOWER_RIGHT, window_left, window_right)
    for rows, keys in _read_lengths(query, key, cu_seq_q, cu_seq_k, None):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        *parts, by_part_sinks = reference.compute_score_gradients(
            _as_batch(grad, rows), _as_batch(query, rows), _as_batch(key, keys), _as_batch(value, keys), sinks, 0,
            scale, spec.build_bool(rows.stop - rows.start, keys.stop - keys.start, query.device), softcap,
        )  # fmt: skip
        by_sinks += by_part_sinks
        for whole, part, tokens in zip(grads, parts, (rows, keys, keys), strict=True):
            whole[tokens] = part[0].transpose(0, 1)
    return *grads, by_sinks


def _backward_cuda(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    seqused_k: Tensor | None, sinks: Tensor | None, max_q: int, max_k: int, precision: str, window_left: int,
    window_right: int, softcap: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients by FlashAttention in PyTorch, without softcap.

    The forward pass is recomputed first (see ``ops.backward``).
    """
    if softcap:
        return _backward_by_sequence(
            grad, query, key, value, cu_seq_q, cu_seq_k, seqused_k, sinks, max_q, max_k, precision, window_left,
            window_right, softcap, scale,
        )  # fmt: skip
    refuse_gradients(seqused_k=seqused_k is not None)
    if not query.numel() or not key.numel():
        by_sinks = query.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), by_sinks
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    return flash_backward(grad, query, key, value, sinks, lengths, (window_left, window_right), scale)


def _backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    seqused_k: Tensor | None, sinks: Tensor | None, *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return torch_ops.infer_score_gradients(grad, query, key, value, sinks)


for _name in torch_ops.define_pair("varlen", _ARGUMENTS, _varlen_cpu, _varlen_gpu, _varlen_fake):
    autograd.register(torch_ops.LIBRARY, _name, None, backward="varlen_backward", first=3, inputs=(0, 1, 2, 6))
torch_ops.define_operator(
    "varlen_backward", f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)", _backward_by_sequence,
    _backward_cuda, _backward_fake,
)  # fmt: skip
autograd.register(torch_ops.LIBRARY, "varlen_backward", "greenfast.varlen_attn: its gradients are not differentiable")

VARLEN = torch.ops.greenfast.varlen.default
VARLEN_LSE = torch.ops.greenfast.varlen_lse.default
