"""Parsing: checks a call of attention and maps PyTorch's inputs to (batch, heads, length, head_dim).

``greenfast.sdpa`` and ``greenfast.explain`` parse a call once, to an ``SdpaCall``. The first raises a refusal as an
error, the second returns it. Reasons contain no lengths, because these may be symbols of a traced graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.ops import torch_ops
from greenfast.ops.arguments import NO_OPTIONS, ScoreOptions, parse_settings
from greenfast.ops.block_mask import BlockMask
from greenfast.ops.layout import pad_head_dim
from greenfast.ops.quantized import DTYPES, PRECISIONS, TOKEN, format_head_dim_error
from greenfast.ops.symbols import broadcast_shapes, is_known, require

Shape = tuple[int, ...]

BIAS = "torch.nn.attention.bias"  # imported by any caller with such a mask; importing it takes seconds


class Refusal(NamedTuple):
    """The reason why the kernels cannot compute a call, and the error type that ``greenfast.sdpa`` raises."""

    error: type[Exception]
    reason: str


class CanonicalCall(NamedTuple):
    """The shapes of a call in the kernels' layout.

    query: (B, H, S, D); key: (B, HK, KV, D), also for value. If key and value have different head dims, D is the larger
    one; zero padding changes no score. out: the shape of the caller's output. causal: a Mask of
    ``kernels.attention.config``. mask: a BlockMask, or booleans of 4 dimensions that broadcast to (B, H, S, KV).
    """

    query: Shape
    key: Shape
    out: Shape
    causal: int
    mask: Any = None

    @property
    def empty(self) -> bool:
        """Whether there are no rows to compute or no keys. False if only the run can decide it."""
        for n in (*self.query[:3], *self.key[:3]):  # noqa: SIM110 - torch.compile would trace a generator
            if is_known(n == 0):
                return True
        return False


class SdpaCall(NamedTuple):
    """The arguments of a call of ``sdpa``, parsed.

    query, key, value, attn_mask: as passed. causal: a Mask of ``kernels.attention.config``. scale: None for the
    default. canonical: whether query, key and value are (B, H, S, D), (B, HK, KV, D) as the operators take them.
    jagged: whether all three are jagged. form: None if nothing is to be mapped and the operators check the tensors.
    """

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    dropout_p: float
    causal: int
    scale: float | None
    enable_gqa: bool
    precision: str
    return_lse: bool
    float32_as: torch.dtype | None
    options: ScoreOptions
    canonical: bool
    jagged: bool
    form: CanonicalCall | Refusal | None


def parse_call(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    precision: Any, causal_alignment: Any, return_lse: Any, float32_as: Any, options: ScoreOptions, *,
    operators_check: bool,
) -> SdpaCall:  # fmt: skip
    """Parse the arguments of ``sdpa``. Launches nothing.

    operators_check: leave the checks of tensors that need no mapping to the operators; ``form`` is then None. Raises
    TypeError and ValueError for flags, numbers and choices; a refusal of the tensors is returned as ``form``.
    """
    dropout, causal, scale = parse_settings(
        dropout_p, is_causal, scale, enable_gqa, precision, causal_alignment, return_lse, float32_as
    )
    canonical = is_canonical(query, key, value, enable_gqa)
    jagged = not canonical and is_jagged(query, key, value)
    unmapped = canonical and attn_mask is None and float32_as is None and options is NO_OPTIONS
    form: CanonicalCall | Refusal | None = None
    if not (unmapped and operators_check and not dropout and precision in PRECISIONS):
        arguments = (query, key, value, attn_mask, dropout, causal, enable_gqa, float32_as)
        form = _canonicalize_jagged(*arguments, precision, options) if jagged else canonicalize(*arguments)
    return SdpaCall(
        query, key, value, attn_mask, dropout, causal, scale, enable_gqa, precision, return_lse, float32_as, options,
        canonical, jagged, form,
    )  # fmt: skip


def is_canonical(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    """Return whether the operators accept the shapes of three tensors as they are. The operators check everything else.

    Most calls take this path and its host time counts, so it checks as little as possible. It does not compare the
    lengths of Q and K: that would specialize a graph for any length.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    strided = torch.strided
    if query.layout is not strided or key.layout is not strided or value.layout is not strided:
        return False
    try:
        q, k, v = query.shape, key.shape, value.shape
    except RuntimeError:  # nested
        return False
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        return False
    if torch.compiler.is_compiling():
        return _is_canonical_traced(q, k, v, enable_gqa)
    (batch, heads, _, head_dim), (kv_batch, kv_heads, _, kv_head_dim) = q, k
    if k != v or batch != kv_batch or head_dim != kv_head_dim or head_dim == 0 or heads == 0:
        return False
    return heads == kv_heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0)


def _is_canonical_traced(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> bool:
    """Apply ``is_canonical`` to sizes that may be symbols.

    Return False if only the run can decide it, except for shared heads.
    """
    for a, b in ((k[0], v[0]), (k[1], v[1]), (k[2], v[2]), (k[3], v[3]), (q[0], k[0]), (q[3], k[3])):
        if not is_known(a == b):
            return False
    if is_known(q[3] == 0) or is_known(q[1] == 0):
        return False
    return is_known(q[1] == k[1]) or (enable_gqa and is_known(k[1] > 0) and is_known(q[1] % k[1] == 0))


def canonicalize(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, causal: int, enable_gqa: bool,
    float32_as: torch.dtype | None,
) -> CanonicalCall | Refusal:  # fmt: skip
    """Return the canonical form of a call, or its refusal.

    ``dropout_p`` and ``causal`` are results of ``arguments``.
    """
    if dropout_p:
        return Refusal(NotImplementedError, "dropout_p: the kernels have no dropout")
    refused = _check_tensors(query, key, value, float32_as, torch.strided)
    if refused is not None:
        return refused
    form = _canonicalize_shapes(query.shape, key.shape, value.shape, enable_gqa)
    if isinstance(form, Refusal):
        return form
    if attn_mask is None:
        return form._replace(causal=causal)
    return _apply_mask(form, attn_mask, query, causal)


def get_cast_dtype(x: Tensor, float32_as: torch.dtype | None) -> torch.dtype:
    """Return the dtype of an input after autocast and ``float32_as``."""
    dtype = torch_ops.get_autocast_dtype(x)
    return float32_as if float32_as is not None and dtype == torch.float32 else dtype


def is_jagged(*tensors: Any) -> bool:
    """Return whether all tensors are nested, with ``layout=torch.jagged``."""
    for x in tensors:  # noqa: SIM110 - torch.compile would trace a generator
        if not isinstance(x, Tensor) or x.layout is not torch.jagged:
            return False
    return True


def _canonicalize_jagged(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, causal: int, enable_gqa: bool,
    float32_as: torch.dtype | None, precision: str, options: ScoreOptions,
) -> CanonicalCall | Refusal:  # fmt: skip
    """Return the canonical form of a call on jagged tensors (B, H, j, D), or its refusal.

    Its lengths are the mean lengths, rounded up: the lengths themselves are on the device, and are not read there.
    """
    if options.kv_lengths is not None:
        return Refusal(NotImplementedError, "kv_lengths: nested tensors have lengths of their own")
    if options.skip_threshold:
        return Refusal(NotImplementedError, "skip_threshold: not with nested tensors")
    if dropout_p:
        return Refusal(NotImplementedError, "dropout_p: the kernels have no dropout")
    if attn_mask is not None:
        return Refusal(NotImplementedError, "attn_mask: with nested tensors the kernels take is_causal and window only")
    if precision == TOKEN:
        return Refusal(NotImplementedError, f"precision: {TOKEN!r} has no kernel for nested tensors, 'fp8' has")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x._ragged_idx != 2 or len(get_rows_shape(x)) != 3:
            layout = "(B, H, j, D) is needed, as transpose(1, 2) makes it of (B, j, H, D)"
            return Refusal(NotImplementedError, f"{name}: lengths differ in dimension {x._ragged_idx}; {layout}")
    refused = _check_tensors(query, key, value, float32_as, torch.jagged)
    if refused is not None:
        return refused
    (q_heads, q_rows, q_dim), (k_heads, k_rows, k_dim), (v_heads, v_rows, v_dim) = (
        get_rows_shape(x) for x in (query, key, value)
    )
    batch, *batches = (x.offsets().shape[0] - 1 for x in (query, key, value))
    if not (require(batches[0] == batch) and require(batches[1] == batch)):
        return Refusal(ValueError, "key, value: their batch differs from query's")
    if not require(k_rows == v_rows) or _have_same_lengths(key, value) is False:
        return Refusal(ValueError, "value: other lengths than key")
    if require(q_dim == k_dim) and not require(v_dim == k_dim):
        return Refusal(NotImplementedError, "value: another head_dim than key, for which nested tensors have no kernel")
    count = max(batch, 1)
    q_shape, k_shape = (batch, q_heads, -(-q_rows // count), q_dim), (batch, k_heads, -(-k_rows // count), k_dim)
    form = _canonicalize_shapes(q_shape, k_shape, (batch, v_heads, *k_shape[2:]), enable_gqa)
    if isinstance(form, Refusal):
        return form
    if not (form.query == q_shape and form.key == k_shape and require(v_heads == k_heads)):
        return Refusal(
            ValueError, "key, value: their heads cannot be shared; heads of nested tensors are not broadcast"
        )
    window_from_first = options.window != (-1, -1) and options.alignment == 1
    if (causal == 1 or window_from_first) and not _have_same_lengths(query, key):
        return Refusal(
            NotImplementedError,
            "is_causal, window: query and key have offsets of their own, so their lengths may differ; with "
            "causal_alignment='lower_right' they may",
        )
    return form._replace(causal=causal)


def get_rows_shape(x: Any) -> torch.Size:
    """Return the shape (H, tokens, D) of the rows of a jagged tensor (B, H, j, D).

    The dispatcher of nested tensors, and so each of their sizes, costs the host about 10 microseconds; this does not.
    """
    rows: Tensor = x.values() if torch.compiler.is_compiling() else x._values
    return rows.shape


def _have_same_lengths(x: Any, y: Any) -> bool | None:
    """Return whether two jagged tensors have the same lengths; None if only the device knows it."""
    mine, other = (z.offsets() if z.lengths() is None else z.lengths() for z in (x, y))
    if mine is other or x.shape[2] == y.shape[2]:  # made from one tensor of offsets
        return True
    if torch.compiler.is_compiling() or x.device.type != "cpu" or torch._C._len_torch_dispatch_stack():
        return None
    mine, other = (z.offsets().diff() if z.lengths() is None else z.lengths() for z in (x, y))
    return torch.equal(mine, other)


def _check_tensors(
    query: Any, key: Any, value: Any, float32_as: torch.dtype | None, layout: torch.layout
) -> Refusal | None:
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        if not isinstance(x, Tensor):
            return Refusal(TypeError, f"{name}: a torch.Tensor is needed, got {type(x).__name__}")
        if x.layout is not layout or x.is_nested != (layout is torch.jagged):
            return Refusal(NotImplementedError, f"{name}: nested or sparse; the kernels take strided tensors")
        if layout is torch.strided and x.dim() < 2:
            return Refusal(ValueError, f"{name}: {x.dim()}-D; (..., length, head_dim) is needed")
    dtype = get_cast_dtype(query, float32_as)
    if dtype not in DTYPES:
        hint = "" if dtype != torch.float32 else "; pass float32_as to cast float32"
        return Refusal(TypeError, f"query: {dtype}; the kernels take {' and '.join(map(str, DTYPES))}{hint}")
    for name, x in named:
        if x.device != query.device:
            return Refusal(ValueError, f"{name}: on another device than query")
        if x.dtype != query.dtype and get_cast_dtype(x, float32_as) != dtype:
            return Refusal(TypeError, f"{name}: another dtype than query")
    return None


def _canonicalize_shapes(query: Shape, key: Shape, value: Shape, enable_gqa: bool) -> CanonicalCall | Refusal:
    """Return the canonical form for these shapes, without a mask."""
    if not require(key[-2] == value[-2]):
        return Refusal(ValueError, "value: another length than key")
    if not require(query[-1] == key[-1]):
        return Refusal(ValueError, "key: another head_dim than query")
    if not (is_known(query[-1] % 8 == 0) and is_known(query[-1] <= HEAD_DIMS[-1])):
        return Refusal(NotImplementedError, format_head_dim_error("query", query[-1]))
    if not is_known(value[-1] <= HEAD_DIMS[-1]):
        return Refusal(NotImplementedError, format_head_dim_error("value", value[-1], "those"))
    shapes = (query, key, value)
    heads, key_heads, value_heads = (1 if len(x) < 3 else x[-3] for x in shapes)
    if enable_gqa:
        if min(len(x) for x in shapes) < 3:
            return Refusal(ValueError, "enable_gqa: with it, query, key and value have heads, (..., H, length, D)")
        for name, count in (("key", key_heads), ("value", value_heads)):
            empty = is_known(heads == 0) and is_known(count == 0)
            if not (empty or is_known(heads == count) or (require(count > 0) and require(heads % count == 0))):
                return Refusal(ValueError, f"{name}: the heads of query are not a multiple of its heads")
    else:
        merged = broadcast_shapes((heads,), (key_heads,), (value_heads,))
        if merged is None:
            shared = "; enable_gqa=True lets query heads share them"
            wrong = "value" if broadcast_shapes((heads,), (key_heads,)) else "key"
            return Refusal(ValueError, f"{wrong}: its heads differ from query's and cannot be broadcast{shared}")
        heads = merged[0]
    batch = broadcast_shapes(*[x[:-3] for x in shapes])
    if batch is None:
        wrong = "value" if broadcast_shapes(query[:-3], key[:-3]) is not None else "key"
        return Refusal(ValueError, f"{wrong}: its batch differs from query's and cannot be broadcast")
    many = max(len(x) for x in shapes) > 2
    width = max(8, query[-1], -(-value[-1] // 8) * 8)
    fits = enable_gqa or is_known(key_heads == 1) or is_known(key_heads == heads)
    kv_heads = key_heads if fits and is_known(key_heads == value_heads) else heads
    size = 1
    for n in batch:
        size *= n
    return CanonicalCall(
        query=(size, heads, query[-2], width),
        key=(size, kv_heads, key[-2], width),
        out=(*batch, *([heads] if many else []), query[-2], value[-1]),
        causal=0,
    )


def _apply_mask(form: CanonicalCall, mask: Any, query: Tensor, causal: int) -> CanonicalCall | Refusal:
    """Add ``attn_mask`` to the canonical form, if its values can be known without reading a GPU's memory."""
    if isinstance(mask, BlockMask):
        if causal:
            return Refusal(
                ValueError, "attn_mask: a BlockMask holds the whole mask; it cannot be combined with is_causal"
            )
        return form._replace(mask=mask)
    if not isinstance(mask, Tensor):
        return Refusal(TypeError, f"attn_mask: a torch.Tensor or a BlockMask is needed, got {type(mask).__name__}")
    if type(mask).__name__ == "CausalBias" and type(mask).__module__ == BIAS:
        return _apply_causal_bias(form, mask, causal)
    if mask.dtype == torch.bool:
        return _apply_bool_mask(form, mask, query, causal)
    refused = Refusal(NotImplementedError, "attn_mask: numbers to add to the scores; the kernels take booleans")
    if not _can_read_mask(mask):
        return refused
    # Autocast casts a mask too. ``sdpa`` has already cast its query, ``explain`` has not.
    fits = mask.dtype in (torch.bool, torch.float32, query.dtype) or torch_ops.get_autocast_dtype(
        mask
    ) == torch_ops.get_autocast_dtype(query)
    if not fits or mask.device != query.device:
        return Refusal(
            ValueError, f"attn_mask: {mask.dtype} on {mask.device}; bool or query's dtype and device is needed"
        )
    if misfit := _refuse_mask_shape(form, mask):
        return misfit
    return form._replace(causal=causal) if (mask == 0).all() else refused


def _refuse_mask_shape(form: CanonicalCall, mask: Tensor) -> Refusal | None:
    """Return a refusal of a mask that does not broadcast to the scores, else None."""
    scores = (*form.out[:-1], form.key[2])
    if mask.dim() >= 2 and broadcast_shapes(scores, mask.shape) == scores:
        return None
    return Refusal(ValueError, "attn_mask: its shape cannot be broadcast to the scores, (..., queries, keys)")


def _apply_bool_mask(form: CanonicalCall, mask: Tensor, query: Tensor, causal: int) -> CanonicalCall | Refusal:
    """Add booleans, True for keys that a query attends to. A CPU mask without False is ignored."""
    if mask.is_nested or mask.layout is not torch.strided:
        return Refusal(NotImplementedError, "attn_mask: nested or sparse; the kernels take strided tensors")
    if mask.device != query.device:
        return Refusal(ValueError, f"attn_mask: on {mask.device}; query's device is needed")
    if misfit := _refuse_mask_shape(form, mask):
        return misfit
    if _can_read_mask(mask) and mask.all():
        return form._replace(causal=causal)
    if mask.dim() <= 4 and len(form.out) <= 4:
        return form._replace(mask=mask[(None,) * (4 - mask.dim())], causal=causal)
    mask = mask[(None,) * (3 - mask.dim())]
    heads = mask.shape[-3:]
    return form._replace(mask=mask.expand(*form.out[:-3], *heads).reshape(form.query[0], *heads), causal=causal)


def _apply_causal_bias(form: CanonicalCall, bias: Any, causal: int) -> CanonicalCall | Refusal:
    """Add a CausalBias, as torch.nn.attention.bias does.

    With equal lengths both variants are aligned at the first key.
    """
    if causal:
        return Refusal(ValueError, "attn_mask: a CausalBias cannot be combined with is_causal")
    if is_known(bias.seq_len_q == bias.seq_len_kv) or bias.variant.name == "UPPER_LEFT":
        return form._replace(causal=1)
    if not (require(bias.seq_len_q == form.query[2]) and require(bias.seq_len_kv == form.key[2])):
        return Refusal(ValueError, "attn_mask: the lengths of the CausalBias differ from query's and key's")
    return form._replace(causal=2)


def _can_read_mask(mask: Tensor) -> bool:
    """Return whether a mask can be read at no cost and unobserved: it is a plain CPU tensor in an eager call."""
    return (
        not torch.compiler.is_compiling()
        and type(mask) is Tensor
        and mask.device.type == "cpu"
        and not (mask.is_nested or mask.requires_grad)
        and mask.layout is torch.strided
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._get_tracing_state()
    )


def to_kernel_layout(form: CanonicalCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Map tensors to the kernels' layout.

    These are views if possible, and copies if dimensions merge or head dims are padded.
    """
    batch = form.out[:-3] if len(form.out) > 2 else ()

    def shaped(x: Tensor, shape: Shape) -> Tensor:
        if x.dim() == 2:
            x = x.unsqueeze(0)
        # If key and value have different numbers of heads, repeat each.
        if not is_known(x.shape[-3] == 1) and not require(x.shape[-3] == shape[1]):
            x = x.repeat_interleave(shape[1] // x.shape[-3], -3)
        x = x.expand(*batch, shape[1], *x.shape[-2:]).reshape(*shape[:3], x.shape[-1])
        return x if is_known(x.shape[3] == shape[3]) else pad_head_dim(x, shape[3])

    return shaped(query, form.query), shaped(key, form.key), shaped(value, form.key)


def from_kernel_layout(form: CanonicalCall, out: Tensor) -> Tensor:
    """Map an output (B, H, S, D) to the caller's shape. It is copied only if the head dim of value differs."""
    if not is_known(out.shape[3] == form.out[-1]):
        out = out[..., : form.out[-1]].clone()
    return out.reshape(form.out)
