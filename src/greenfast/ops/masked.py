"""Attention with masks: a window, lengths of keys, lists of tiles; and with softcap, sinks and skipped tiles.

The dense attention kernel computes them with a schedule. A kernel makes it on the device (``kernels.attention.
schedule``): it lists the work tiles, and for each the key tiles follow from its limits or from a ``BlockMask``.
"""

from __future__ import annotations

import importlib
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from greenfast.ops import autograd, reference, torch_ops
from greenfast.ops.arguments import MAX_LENGTH, NO_OPTIONS, ScoreOptions, check_once, has_key_mean
from greenfast.ops.backward import flash_backward, masked_backward
from greenfast.ops.block_mask import BlockMask
from greenfast.ops.call_cache import CallCache, replay, store_plan
from greenfast.ops.layout import is_capturing
from greenfast.ops.quantized import (
    TOKEN,
    Precision,
    QuantizedQKV,
    build_config,
    check_device,
    check_tensors,
    pad_head_dim_size,
)
from greenfast.ops.symbols import is_known, require

TOKEN_MASKS = (
    f"precision: {TOKEN!r} has no masks other than causal ones, softcap, sinks and skip_threshold; 'fp8' has them"
)
MASKED_CACHE = CallCache(9)  # calls that skipped the dispatcher; their first 9 arguments are tensors or None
_MAX_MASKS = 8  # boolean masks with a kept form for the kernels
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? kv_lengths, Tensor? kv_rows, Tensor? sinks, Tensor? counts, "
    "Tensor? entries, Tensor? bits, str precision, int alignment, int window_left, int window_right, float softcap, "
    "float skip_threshold, float scale"
)
_KEPT_ARGUMENTS = "Tensor? kv_lengths, Tensor? kv_rows, int alignment, int window_left, int window_right, float scale"
_CODES_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor query_scale, Tensor key_scale, Tensor value_scale, "
    "Tensor? kv_lengths, Tensor? sinks, Tensor? counts, Tensor? entries, Tensor? bits, str precision, int head_dim, "
    "SymInt key_length, ScalarType dtype, int alignment, int window_left, int window_right, float softcap, "
    "float skip_threshold, float scale"
)


@dataclass(frozen=True)
class MaskSpec:
    """The keys that queries attend to: a key must be allowed by all parts.

    left, right: query i attends to keys i + shift - left .. i + shift + right, where -1 is no limit. The shift is KV -
    S if alignment is 2 (lower right), else 0. kv_lengths: int32 (B,), only the first keys of each sequence; or with
    kv_rows, int32 (B, KV), the keys that its first ``kv_lengths`` numbers name. lists: the tiles that queries attend
    to, without any of the other parts.
    """

    alignment: int = 1
    left: int = -1
    right: int = -1
    kv_lengths: Tensor | None = None
    kv_rows: Tensor | None = None
    lists: BlockMask | None = None

    def build_bool(self, q_len: int, kv_len: int, device: torch.device) -> Tensor:
        """Return the mask as booleans (B or 1, H or 1, S, KV)."""
        if self.lists is not None:
            return self.lists.to_bool()
        keys = torch.arange(kv_len, device=device)
        own = torch.arange(q_len, device=device).unsqueeze(1) + (kv_len - q_len if self.alignment == 2 else 0)
        mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=device)
        if self.right >= 0:
            mask = mask & (keys <= own + self.right)
        if self.left >= 0:
            mask = mask & (keys >= own - self.left)
        if self.kv_lengths is not None:
            mask = mask & self.find_kept_keys(self.kv_lengths, kv_len)[:, None, None]
        return mask

    def find_kept_keys(self, kv_lengths: Tensor, kv_len: int) -> Tensor:
        """Return which keys are not padding, bool (B, KV)."""
        kept = torch.arange(kv_len, device=kv_lengths.device) < kv_lengths.unsqueeze(1)
        return kept if self.kv_rows is None else torch.zeros_like(kept).scatter(1, self.kv_rows.long(), kept)

    def tile_order(self) -> Tensor | None:
        """Return the tiles from the first to the last, int64 (B or 1, H or 1, row blocks, tiles); None: they ascend.

        Tiles that are not in the lists come last.
        """
        if self.lists is None:
            return None
        counts, tiles = self.lists.counts.sum(-1, keepdim=True), self.lists.entries[..., 0].long()
        index = torch.arange(tiles.shape[-1], device=tiles.device).expand(tiles.shape)
        place = torch.full_like(tiles, tiles.shape[-1])
        place.scatter_reduce_(-1, tiles, index.where(index < counts, tiles.shape[-1]), "amin")
        return place.argsort(dim=-1, stable=True)

    def select_keys(self, sequence: int, kv_len: int) -> Any:
        """Return the keys of a sequence to quantize: a slice, or their numbers."""
        if self.kv_lengths is None:
            return slice(None)
        length = min(max(0, int(self.kv_lengths[sequence])), kv_len)
        return slice(length) if self.kv_rows is None else self.kv_rows[sequence, :length].long()


def make_spec(mask: Any, causal: int, options: ScoreOptions, q_len: Any, kv_len: Any, batch: Any) -> MaskSpec | None:
    """Return the mask of a call; None if the dense kernels compute it.

    mask: of a CanonicalCall. Raises ValueError for parts that cannot be combined.
    """
    left, right = options.window
    if mask is not None:
        _check_combination(mask, options, q_len, kv_len)
        return MaskSpec(lists=mask) if isinstance(mask, BlockMask) else _MASKS.get(mask, causal, q_len, kv_len, batch)
    if causal:
        right = 0
    lengths = options.kv_lengths
    if lengths is not None and lengths.dtype != torch.int32:  # clamped, so that none wraps into range
        lengths = lengths.clamp(-1, MAX_LENGTH).to(torch.int32)
    plain = left < 0 and lengths is None and right == (0 if causal else -1)
    if plain and options.softcap == 0.0 and options.sinks is None and options.skip_threshold == 0.0:
        return None
    return MaskSpec(causal or options.alignment, left, right, lengths)


def _check_combination(mask: Any, options: ScoreOptions, q_len: Any, kv_len: Any) -> None:
    """Raise ValueError for options that are not allowed with a mask, and for a BlockMask of other lengths."""
    if options.window != (-1, -1):
        raise ValueError("window: not with attn_mask; make it a part of the mask")
    if options.kv_lengths is not None:
        raise ValueError("kv_lengths: not with attn_mask; make them a part of the mask")
    if isinstance(mask, BlockMask) and not (require(mask.q_len == q_len) and require(mask.kv_len == kv_len)):
        raise ValueError(
            f"attn_mask: a BlockMask of {mask.q_len} queries and {mask.kv_len} keys; {q_len} and {kv_len} are needed"
        )


def check_options(
    mask: Any, options: ScoreOptions, query: Tensor, kv_len: Any, device: torch.device | None = None
) -> None:
    """Raise ValueError for a mask and options that ``sdpa`` refuses for a call. No value is read.

    mask: of a CanonicalCall. query: of its shape, (B, H, S, D). device: of kv_lengths and sinks, by default their own.
    """
    if mask is not None:
        _check_combination(mask, options, query.shape[2], kv_len)
    # sdpa casts both; empty tensors of the same shape cost no launch.
    lengths = (
        None if options.kv_lengths is None else torch.empty_like(options.kv_lengths, dtype=torch.int32, device=device)
    )
    sinks = None if options.sinks is None else torch.empty_like(options.sinks, dtype=torch.float32, device=device)
    lists = (mask.counts, mask.entries, mask.bits) if isinstance(mask, BlockMask) else (None, None, None)
    _check_mask(query, kv_len, lengths, None, sinks, *lists)


def describe_mask(mask: Any, options: ScoreOptions) -> str:
    """Describe the cost of a mask and options; empty without them. mask: of a CanonicalCall."""
    parts = []
    if isinstance(mask, BlockMask):
        parts = ["tiles of 128 queries and 128 keys that the mask leaves out are skipped, partial ones masked by bits"]
    elif mask is not None and is_known(mask.shape[2] == 1) and is_known(mask.shape[1] == 1):
        parts = ["keys that the mask leaves out are skipped; a new mask tensor is sorted first"]
    elif mask is not None:
        parts = ["tiles of 128 queries and 128 keys without any True are skipped; a new mask tensor is read once first"]
    elif options is not NO_OPTIONS:
        parts = ["a schedule of work tiles is made on the device"]
    if options.window != (-1, -1) or options.kv_lengths is not None:
        parts.append("key tiles out of reach are skipped")
    if options.softcap:
        parts.append("softcap takes a tanh for each score")
    if options.skip_threshold:
        parts.append(
            "tiles with weights below skip_threshold take the product Q K^T alone, the others a vote in addition"
        )
    return ", ".join(parts)


class _MaskCache:
    """The forms of boolean masks for the kernels, while their tensors live and are not written to.

    A view belongs to its base. A mask of another stream is another one: streams do not wait for each other.
    """

    def __init__(self) -> None:
        self._specs: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], MaskSpec]] = {}

    def get(self, mask: Tensor, causal: int, q_len: Any, kv_len: Any, batch: Any) -> MaskSpec:
        """Return the form of a mask of four dimensions that broadcasts to (batch, H, q_len, kv_len)."""
        if (
            torch.compiler.is_compiling()
            or type(mask) is not Tensor
            or mask.is_inference()
            or is_capturing(mask.device)
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch_ops.dispatch_mode_active()
        ):
            return _read_mask(mask, causal, q_len, kv_len, batch)
        base = mask if mask._base is None else mask._base
        stream = torch._C._cuda_getCurrentRawStream(mask.get_device()) if mask.is_cuda else 0
        key = (
            id(base),
            mask.data_ptr(),
            mask.shape,
            mask.stride(),
            mask._version,
            causal,
            q_len,
            kv_len,
            batch,
            stream,
        )
        found = self._specs.get(key)
        if found is not None and found[0]() is base:
            return found[1]
        spec = _read_mask(mask, causal, q_len, kv_len, batch)
        for oldest in [*self._specs][: len(self._specs) + 1 - _MAX_MASKS]:  # a copy: other threads may store theirs
            self._specs.pop(oldest, None)
        self._specs[key] = (weakref.ref(base, lambda _: self._specs.pop(key, None)), spec)
        return spec


_MASKS = _MaskCache()


def _read_mask(mask: Tensor, causal: int, q_len: Any, kv_len: Any, batch: Any) -> MaskSpec:
    """Return the keys to take if a mask is the same for all queries and heads, else its tiles. causal: a Mask."""
    if causal:
        mask = mask & MaskSpec(causal, right=0).build_bool(q_len, kv_len, mask.device)
    elif is_known(mask.shape[2] == 1) and is_known(mask.shape[1] == 1):
        kept = mask[:, 0, 0].expand(batch, kv_len)
        rows = torch.argsort(kept.logical_not(), dim=1, stable=True).to(torch.int32)
        return MaskSpec(kv_lengths=kept.sum(1, dtype=torch.int32), kv_rows=rows)
    return MaskSpec(lists=BlockMask.from_bool(mask.expand(*mask.shape[:2], q_len, kv_len)))


def clear_padding(kept: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V with zeros for keys of the padding: 0 times NaN would be NaN, and blocks share scales.

    kept: bool, broadcastable to (B, 1, 1, KV), False for padding.
    """
    padding = kept.logical_not().transpose(2, 3)
    return key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)


def check_masked(
    query: Tensor, key: Tensor, value: Tensor, kv_lengths: Tensor | None, kv_rows: Tensor | None, sinks: Tensor | None,
    counts: Tensor | None, entries: Tensor | None, bits: Tensor | None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError for tensors that the operator does not take."""
    check_tensors(query, key, value)
    _check_mask(query, key.shape[2], kv_lengths, kv_rows, sinks, counts, entries, bits)


def check_masked_codes(
    query: Tensor, kv_lengths: Tensor | None, sinks: Tensor | None, counts: Tensor | None, entries: Tensor | None,
    bits: Tensor | None, key_length: Any,
) -> None:  # fmt: skip
    """Check the mask of a call on codes; ``check_codes`` has accepted the codes. query: their Q."""
    _check_mask(query, key_length, kv_lengths, None, sinks, counts, entries, bits)


def _check_mask(
    query: Tensor, kv_len: Any, kv_lengths: Tensor | None, kv_rows: Tensor | None, sinks: Tensor | None,
    counts: Tensor | None, entries: Tensor | None, bits: Tensor | None,
) -> None:  # fmt: skip
    batch, heads, q_len, _ = query.shape
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[Any, ...]]] = [
        ("kv_lengths", kv_lengths, torch.int32, (batch,)),
        ("kv_rows", kv_rows, torch.int32, (batch, kv_len)),
        ("sinks", sinks, torch.float32, (heads,)),
    ]
    for name, x, dtype, shape in wanted:
        if x is None:
            continue
        if x.dtype != dtype:
            raise TypeError(f"{name}: its dtype is {x.dtype}; {dtype} is needed")
        if x.dim() != len(shape) or not all([require(n == m) for n, m in zip(x.shape, shape, strict=True)]):
            raise ValueError(f"{name}: its shape is {tuple(x.shape)}; {shape} is needed")
        check_device(name, x, "query", query)
    if kv_rows is not None and kv_lengths is None:
        raise ValueError("kv_rows: kv_lengths are needed too")
    if counts is None or entries is None or bits is None:
        return
    if kv_lengths is not None:
        raise ValueError("kv_lengths: not with lists of tiles")
    for name, n, whole in (("batch", counts.shape[0], batch), ("heads", counts.shape[1], heads)):
        if not (require(n == 1) or require(n == whole)):
            raise ValueError(f"attn_mask: its {name} is {n}; 1 or {whole} is needed")
    BlockMask(counts, entries, bits, q_len, kv_len)  # checks them
    check_device("attn_mask", counts, "query", query)


def _make_spec(
    query: Tensor, kv_len: int, kv_lengths: Tensor | None, kv_rows: Tensor | None, counts: Tensor | None,
    entries: Tensor | None, bits: Tensor | None, alignment: int, left: int, right: int,
) -> MaskSpec:  # fmt: skip
    lists = None
    if counts is not None and entries is not None and bits is not None:
        lists = BlockMask(counts, entries, bits, query.shape[2], kv_len)
    return MaskSpec(alignment, left, right, kv_lengths, kv_rows, lists)


def _check_lengths(kv_lengths: Tensor | None, kv_len: int) -> None:
    if kv_lengths is not None and ((kv_lengths < 0) | (kv_lengths > kv_len)).any():
        raise ValueError(f"kv_lengths: {kv_lengths.tolist()}; numbers from 0 to {kv_len} are needed")


def _masked_cpu(
    query: Tensor, key: Tensor, value: Tensor, kv_lengths: Tensor | None, kv_rows: Tensor | None, sinks: Tensor | None,
    counts: Tensor | None, entries: Tensor | None, bits: Tensor | None, precision: str, alignment: int,
    window_left: int, window_right: int, softcap: float, skip_threshold: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_masked(query, key, value, kv_lengths, kv_rows, sinks, counts, entries, bits)
    spec = _make_spec(
        query, key.shape[2], kv_lengths, kv_rows, counts, entries, bits, alignment, window_left, window_right
    )
    batch, _, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    _check_lengths(kv_lengths, kv_len)
    centered = has_key_mean(softcap, sinks)
    config = build_config(head_dim, query.dtype, precision, key_mean=centered)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    mask, order = spec.build_bool(q_len, kv_len, query.device), spec.tile_order()
    for b in range(batch):
        keys, one = spec.select_keys(b, kv_len), slice(b, b + 1)
        q, k, v = query[one], key[one, :, keys], value[one, :, keys]
        seen = mask[b if mask.shape[0] > 1 else 0, :, :, keys].unsqueeze(0)
        if not k.numel():
            out[one], lse[one] = 0.0, -math.inf if sinks is None else sinks.view(1, -1, 1)
            continue
        codes = reference.quantize(q, k, v, config)
        part, sums = reference.attention(
            codes, 0, scale, softcap=softcap, sinks=sinks, mask=seen, skip_threshold=skip_threshold,
            tile_order=None if order is None else order[b if order.shape[0] > 1 else 0].unsqueeze(0),
        )  # fmt: skip
        if centered:
            scores = reference.compute_mean_scores(q, codes.tensors()[-1], rotated=True)
            sums = reference.add_mean_scores(sums, scores, 2, scale)  # rows may have no key
        out[one], lse[one] = part, sums
    return out, lse


def _masked_codes_cpu(
    query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    kv_lengths: Tensor | None, sinks: Tensor | None, counts: Tensor | None, entries: Tensor | None,
    bits: Tensor | None, precision: Precision, head_dim: int, key_length: int, dtype: torch.dtype, alignment: int,
    window_left: int, window_right: int, softcap: float, skip_threshold: float, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    codes = QuantizedQKV(
        query, key, value, query_scale, key_scale, value_scale, None, precision, head_dim, key_length, dtype
    )
    check_masked_codes(query, kv_lengths, sinks, counts, entries, bits, key_length)
    _check_lengths(kv_lengths, key_length)
    spec = _make_spec(query, key_length, kv_lengths, None, counts, entries, bits, alignment, window_left, window_right)
    mask = spec.build_bool(query.shape[2], key_length, query.device)
    return reference.attention(
        codes, 0, scale, softcap=softcap, sinks=sinks, mask=mask, skip_threshold=skip_threshold,
        tile_order=spec.tile_order(),
    )  # fmt: skip


def _masked_codes_gpu(lse: bool, *args: Any) -> Any:
    check_once(check_masked_codes, (args[0], *args[6:11]), (args[13],))
    return torch_ops.load_cuda().masked_codes(lse, *args)


def _masked_codes_fake(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    kv_lengths, sinks, counts, entries, bits = args[5:10]
    check_masked_codes(query, kv_lengths, sinks, counts, entries, bits, args[12])
    out = query.new_empty((*query.shape[:3], args[11]), dtype=args[13])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _masked_gpu(lse: bool, *args: Any) -> Any:
    check_once(check_masked, args[:9], ())
    return torch_ops.load_cuda().masked(lse, *args)


def _masked_fake(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    check_masked(query, *args[:8])
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    sinks: Tensor | None, counts: Tensor | None, entries: Tensor | None, bits: Tensor | None, precision: str,
    alignment: int, window_left: int, window_right: int, softcap: float, skip_threshold: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of attention on the unquantized tensors, and of the sinks. No tile is skipped.

    PyTorch computes them on a GPU. It lacks softcap: with it, and on the CPU, they are computed in float32.
    """
    spec = _make_spec(
        query, key.shape[2], kv_lengths, kv_rows, counts, entries, bits, alignment, window_left, window_right
    )
    if kv_lengths is not None:
        key, value = clear_padding(spec.find_kept_keys(kv_lengths, key.shape[2])[:, None, None], key, value)
    tensors = (query, key, value)
    if not query.numel() or not key.numel():
        by_query, by_key, by_value = (torch.zeros_like(x) for x in tensors)
        return by_query, by_key, by_value, query.new_zeros(0) if sinks is None else torch.zeros_like(sinks)
    limited = kv_lengths is None and counts is None
    fused = query.is_cuda and softcap == 0.0
    if fused and limited and (alignment == 2 or query.shape[2] == key.shape[2]):
        q, k, v, g = (x.transpose(1, 2) for x in (*tensors, grad))
        lengths = (None, None, query.shape[2], key.shape[2])
        *grads, by_sinks = flash_backward(g, q, k, v, sinks, lengths, (window_left, window_right), scale)
        by_query, by_key, by_value = (
            torch.empty_like(like).copy_(x.transpose(1, 2)) for x, like in zip(grads, tensors, strict=True)
        )
        return by_query, by_key, by_value, by_sinks
    mask = spec.build_bool(query.shape[2], key.shape[2], query.device)
    if fused:
        return masked_backward(grad, *tensors, sinks, mask, scale)
    return reference.compute_score_gradients(grad, *tensors, sinks, 0, scale, mask=mask, softcap=softcap)


def _backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    sinks: Tensor | None, *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return torch_ops.infer_score_gradients(grad, query, key, value, sinks)


def _masked_kept_cpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    alignment: int, window_left: int, window_right: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.masked_kept`` as ``sdpa_kept`` for 8 bits. Keys are not centered: the mean is 0."""
    lists = (None, None, None, None)
    limits = (alignment, window_left, window_right)
    out, lse = _masked_cpu(query, key, value, kv_lengths, kv_rows, *lists, precision, *limits, 0.0, 0.0, scale)
    mean_shape = (*key.shape[:2], pad_head_dim_size(query.shape[3]))
    return out, torch_ops.bound_scores(lse), query.new_zeros(mean_shape, dtype=torch.float32)


def _masked_kept_gpu(
    query: Tensor, key: Tensor, value: Tensor, precision: str, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    *limits: Any,
) -> Any:  # fmt: skip
    check_once(check_masked, (query, key, value, kv_lengths, kv_rows, None, None, None, None), ())
    return torch_ops.load_cuda().masked_kept(query, key, value, precision, kv_lengths, kv_rows, *limits)


def _masked_kept_fake(
    query: Tensor, key: Tensor, value: Tensor, precision: str, kv_lengths: Tensor | None, kv_rows: Tensor | None,
    *limits: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mean_shape = (*key.shape[:2], pad_head_dim_size(query.shape[3]))
    out, lse = _masked_fake(query, key, value, kv_lengths, kv_rows, None, None, None, None)
    return out, lse.new_empty((*lse.shape, 2)), query.new_empty(mean_shape, dtype=torch.float32)


def _masked_kept_backward_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_stats: Tensor, key_mean: Tensor,
    kv_lengths: Tensor | None, kv_rows: Tensor | None, alignment: int, window_left: int, window_right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.masked_kept_backward`` of CPU tensors: the exact gradients, in float32."""
    lists = (None, None, None, None)
    limits = (alignment, window_left, window_right)
    return _backward(grad, query, key, value, kv_lengths, kv_rows, *lists, "fp8", *limits, 0.0, 0.0, scale)[:3]


def _masked_kept_backward_gpu(*args: Any) -> Any:
    return importlib.import_module("greenfast.ops.quantized_backward").masked_kept_backward(*args)


for _name in torch_ops.define_pair("masked", _ARGUMENTS, _masked_cpu, _masked_gpu, _masked_fake):
    autograd.register(torch_ops.LIBRARY, _name, None, backward="masked_backward", first=3, inputs=(0, 1, 2, 5))
torch_ops.define_operator(
    "masked_backward", f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)", _backward, _backward,
    _backward_fake,
)  # fmt: skip
autograd.register(
    torch_ops.LIBRARY, "masked_backward", "greenfast.sdpa: its gradients with a mask are not differentiable"
)

torch_ops.define_operator(
    "masked_kept", f"(Tensor query, Tensor key, Tensor value, str precision, {_KEPT_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor)", _masked_kept_cpu, _masked_kept_gpu, _masked_kept_fake,
)  # fmt: skip
autograd.register(torch_ops.LIBRARY, "masked_kept", None, "masked_kept_backward", keeps=True)
torch_ops.define_operator(
    "masked_kept_backward", "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor row_stats, "
    f"Tensor key_mean, {_KEPT_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", _masked_kept_backward_cpu,
    _masked_kept_backward_gpu, torch_ops.infer_gradients,
)  # fmt: skip
autograd.register(
    torch_ops.LIBRARY, "masked_kept_backward", "greenfast.sdpa: its gradients with a mask are not differentiable"
)

for _name in torch_ops.define_pair(
    "masked_codes", _CODES_ARGUMENTS, _masked_codes_cpu, _masked_codes_gpu, _masked_codes_fake
):
    autograd.register(torch_ops.LIBRARY, _name, torch_ops.CODES_REFUSAL)

MASKED = torch.ops.greenfast.masked.default
MASKED_LSE = torch.ops.greenfast.masked_lse.default
MASKED_KEPT = torch.ops.greenfast.masked_kept.default


def compute_masked(
    query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, options: ScoreOptions, precision: str, scale: float,
    return_lse: bool, where: tuple[CallCache, tuple[Any, ...]] | None,
) -> Any:  # fmt: skip
    """Compute attention of tensors in the kernels' layout, (B, H, S, D); with ``return_lse`` also the log-sum-exp.

    where: the cache and the key by which the caller has looked up the launches. Its tensors are query, key, value, and
    the lengths and sinks of ``options``. If None, they are looked up here.
    """
    sinks = None if options.sinks is None else options.sinks.to(torch.float32)
    lists = (None, None, None) if spec.lists is None else (spec.lists.counts, spec.lists.entries, spec.lists.bits)
    args = (
        query, key, value, spec.kv_lengths, spec.kv_rows, sinks, *lists, precision, spec.alignment, spec.left,
        spec.right, options.softcap, options.skip_threshold, scale,
    )  # fmt: skip
    if return_lse:
        return MASKED_LSE(*args)
    if torch.compiler.is_compiling():
        return MASKED(*args)
    if where is None or sinks is not options.sinks or spec.kv_lengths is not options.kv_lengths:  # these are casts
        where = MASKED_CACHE, args
        replayed = replay(*where, query)
        if replayed is not None:
            return replayed[0]
    if not torch_ops.can_skip_dispatcher(*[x for x in args if isinstance(x, Tensor)]):
        return MASKED(*args)
    out = _masked_gpu(False, *args)[0]
    store_plan(*where, torch_ops.load_cuda().get_masked_plan(False, *args), query)
    return out


def compute_masked_codes(
    quantized: QuantizedQKV, spec: MaskSpec, options: ScoreOptions, scale: float, return_lse: bool
) -> Any:
    """Compute attention of codes with a mask; with ``return_lse`` also the log-sum-exp, without the mean of the keys.

    Raises ValueError for codes of keys minus a mean, if a score's own value matters, and NotImplementedError for scales
    that are not of blocks.
    """
    if quantized.query_scale.dim() != 3 or quantized.value_scale.dim() != 3 or quantized.key_scale.dim() < 3:
        raise NotImplementedError("quantized: masks other than causal ones, softcap and sinks need scales of blocks")
    if quantized.key_mean is not None and not has_key_mean(options.softcap, options.sinks):
        raise ValueError("quantized: softcap and sinks depend on whole scores; quantize with subtract_key_mean=False")
    sinks = None if options.sinks is None else options.sinks.to(torch.float32)
    lists = (None, None, None) if spec.lists is None else (spec.lists.counts, spec.lists.entries, spec.lists.bits)
    op = torch.ops.greenfast.masked_codes_lse if return_lse else torch.ops.greenfast.masked_codes
    return op(
        *quantized.tensors()[:6], spec.kv_lengths, sinks, *lists, quantized.precision, quantized.head_dim,
        quantized.key_length, quantized.dtype, spec.alignment, spec.left, spec.right, options.softcap,
        options.skip_threshold, scale,
    )  # fmt: skip
