"""Norm and rotary embedding (RoPE) of Q and K before their quantization: arguments, PyTorch's arithmetic, operators.

``greenfast.quantize`` and ``greenfast.attention_block`` take them. The quantizer computes them in the same pass, with
the arithmetic of ``transform``: each result is computed in float32 and rounded to the tensors' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from greenfast.kernels.quantize.qkv import Prologue
from greenfast.numerics.serving_append import rotate
from greenfast.ops import autograd, reference, torch_ops
from greenfast.ops.arguments import check_flag, check_once, parse_length, parse_number
from greenfast.ops.backward import sdpa_backward
from greenfast.ops.layout import empty_rows, is_aligned, join_rows, make_tma_compatible
from greenfast.ops.quantized import build_config, check_choice, check_device, check_strided, check_tensors, format_value
from greenfast.ops.symbols import is_known, require

Norm = Literal["rms", "layer"]
NORMS = ("rms", "layer")
#: dtypes of weights and tables.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? q_norm, Tensor? k_norm, Tensor? q_norm_bias, Tensor? k_norm_bias, "
    "Tensor? cos, Tensor? sin, str norm, float norm_eps, int rope_dim, bool rope_interleaved"
)
_TENSORS = 7  # the arguments with gradients: Q, K, V, the weights and the biases
_OPTIONS = 10  # fields of QKTransform

Tensors = tuple[Tensor | None, ...]


class QKTransform(NamedTuple):
    """Norm and RoPE of Q and K, as the operators take them.

    q_norm, k_norm: weights (D,), or (H, D) and (HK, D) of a norm over all heads, or None. q_norm_bias, k_norm_bias: of
    the same shapes, or None. cos, sin: (S, T), (B or 1, S, T), or (B or 1, H, S, T) with tables of each head, where T
    is rope_dim or half of it, or None. norm: "rms", "layer", or "" without a norm. rope_dim: 0 without RoPE.
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    q_norm_bias: Tensor | None
    k_norm_bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    norm: str
    eps: float
    rope_dim: int
    interleaved: bool

    @property
    def tensors(self) -> Tensors:
        """The weights, the biases and the tables."""
        return self[:6]


def parse_transform(
    query: Tensor, key: Tensor, q_norm: Any, k_norm: Any, norm: Any, q_norm_bias: Any, k_norm_bias: Any, norm_eps: Any,
    rope: Any, rope_dim: Any, rope_interleaved: Any,
) -> QKTransform | None:  # fmt: skip
    """Return the checked norm and RoPE of a call, or None if there is neither.

    query, key: accepted by ``check_tensors``. Raises TypeError and ValueError that name the argument.
    """
    check_choice("norm", norm, NORMS)
    check_flag("rope_interleaved", rope_interleaved)
    eps = parse_number("norm_eps", norm_eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"norm_eps: {eps}; 0 or a positive number is needed")
    q_weight, k_weight = _parse_weight("q_norm", q_norm), _parse_weight("k_norm", k_norm)
    kinds = ["a tensor" if isinstance(x, Tensor) else str(x) for x in (q_norm, k_norm)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"k_norm: {kinds[1]}, q_norm {kinds[0]}; both must be tensors, or True, or None")
    q_bias = _parse_bias("q_norm", q_norm_bias, q_norm, norm)
    k_bias = _parse_bias("k_norm", k_norm_bias, k_norm, norm)
    cos, sin = None, None
    columns = query.shape[3]
    if rope is None:
        if rope_dim is not None:
            raise ValueError(f"rope_dim: {format_value(rope_dim)}; without rope it has no meaning")
        width = 0
    else:
        if not isinstance(rope, Sequence) or len(rope) != 2:
            raise TypeError(f"rope: a {type(rope).__name__}; a pair (cos, sin) of tensors is needed")
        cos, sin = rope
        for x in rope:
            if not isinstance(x, Tensor):
                raise TypeError(f"rope: it contains a {type(x).__name__}; a pair (cos, sin) of tensors is needed")
        width = columns if rope_dim is None else parse_length("rope_dim", rope_dim)
    if q_norm is None and rope is None:
        return None
    options = QKTransform(
        q_weight, k_weight, q_bias, k_bias, cos, sin, "" if q_norm is None else norm, eps, width, rope_interleaved
    )  # fmt: skip
    check_transform(query, key, options)
    return options


def _parse_weight(name: str, norm: Any) -> Tensor | None:
    if norm is None or norm is True:
        return None
    if not isinstance(norm, Tensor):
        raise TypeError(f"{name}: {norm!r}; a tensor of weights, True for a norm without weights, or None is needed")
    return norm


def _parse_bias(name: str, bias: Any, weight: Any, norm: str) -> Tensor | None:
    """Return the checked bias of a norm. name, weight: of the norm."""
    if bias is None:
        return None
    if norm != "layer":
        raise ValueError(f'{name}_bias: only norm="layer" has one')
    if not isinstance(weight, Tensor):
        raise ValueError(f"{name}_bias: {name} is {weight}; weights are needed too")
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name}_bias: {bias!r}; a tensor of biases, or None, is needed")
    return bias


def check_transform(query: Tensor, key: Tensor, options: QKTransform) -> None:
    """Raise TypeError or ValueError for weights and tables that do not fit to Q and K."""
    columns, rows = query.shape[3], query.shape[2]
    names = ("q_norm", "k_norm", "q_norm_bias", "k_norm_bias", "rope", "rope")
    named = tuple(zip(names, options.tensors, strict=True))
    for name, x in named:
        if x is None:
            continue
        check_strided(name, x)
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: its dtype is {x.dtype}; allowed are {', '.join(map(str, FLOATS))}")
        check_device(name, x, "query", query)
    for (name, x), heads in zip(named[:4], (query.shape[1], key.shape[1]) * 2, strict=True):
        if x is None:
            continue
        if not (
            x.dim() in (1, 2) and require(x.shape[-1] == columns) and (x.dim() == 1 or require(x.shape[0] == heads))
        ):
            raise ValueError(
                f"{name}: its shape is {tuple(x.shape)}; ({columns},), the head dim, is needed, or for a norm over all "
                f"heads ({heads}, {columns})"
            )
    q_norm, k_norm, q_bias, k_bias, cos, sin = options.tensors
    check_choice("norm", options.norm, ("", *NORMS))
    for name, x in named[1:4]:
        if x is not None and q_norm is not None and x.dim() != q_norm.dim():
            raise ValueError(f"{name}: it has {x.dim()} dimensions, q_norm {q_norm.dim()}; they must agree")
    if (q_norm is None) != (k_norm is None) or (q_norm is not None and not options.norm):
        raise ValueError("k_norm: weights of both Q and K, or of none, are needed")
    if (q_bias is None) != (k_bias is None) or (q_bias is not None and (q_norm is None or options.norm != "layer")):
        raise ValueError("k_norm_bias: biases of both Q and K, or of none, are needed, with weights of LayerNorm")
    if (cos is None) != (sin is None) or (cos is None) != (options.rope_dim == 0):
        raise ValueError(f"rope: cos and sin, and rope_dim {options.rope_dim}; all three are needed, or none")
    for name, x in named[1:4]:
        if x is not None and q_norm is not None and x.dtype != q_norm.dtype:
            raise TypeError(f"{name}: its dtype is {x.dtype}, q_norm's {q_norm.dtype}; they must agree")
    if cos is None or sin is None:
        return
    width = options.rope_dim
    if not 2 <= width <= columns or width % 2:
        raise ValueError(f"rope_dim: {width}; an even number from 2 to the head dim {columns} is needed")
    if cos.dtype != sin.dtype:
        raise TypeError(f"rope: cos is {cos.dtype} and sin {sin.dtype}; they must agree")
    if cos.dim() != sin.dim() or not all([require(a == b) for a, b in zip(cos.shape, sin.shape, strict=True)]):
        raise ValueError(f"rope: cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; the same shape is needed")
    if cos.dim() not in (2, 3, 4):
        raise ValueError(
            f"rope: the shape of cos is {tuple(cos.shape)}; (S, columns), (B, S, columns) or (B, H, S, columns) is "
            "needed"
        )
    if not (is_known(cos.shape[-1] == width) or is_known(cos.shape[-1] * 2 == width)):
        raise ValueError(
            f"rope: cos and sin have {cos.shape[-1]} columns; {width} or {width // 2} are needed, to rotate {width} of "
            f"{columns} columns; rope_dim is the number of rotated columns"
        )
    if not (require(rows == key.shape[2]) and require(cos.shape[-2] == rows)):
        raise ValueError(
            f"rope: cos and sin have {cos.shape[-2]} rows, query {rows} and key {key.shape[2]}; the same number is "
            "needed, one row for each token"
        )
    if cos.dim() == 4 and not all([require(cos.shape[1] == x.shape[1]) for x in (query, key)]):
        raise ValueError(
            f"rope: the shape of cos is {tuple(cos.shape)}, tables of {cos.shape[1]} heads; query has {query.shape[1]} "
            f"and key {key.shape[1]}, and all must agree"
        )
    if cos.dim() > 2 and not (is_known(cos.shape[0] == 1) or require(cos.shape[0] == query.shape[0])):
        raise ValueError(f"rope: cos and sin have batch {cos.shape[0]}, query {query.shape[0]}; they must agree, or 1")
    if cos.requires_grad or sin.requires_grad:
        raise TypeError("rope: a table requires grad, but no gradient flows to it; use .detach()")


def transform(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: QKTransform) -> Tensor:
    """Normalize and rotate x (B, H, S, D) by PyTorch. Each result is computed in float32 and rounded to x's dtype."""
    if options.norm:
        wide, inverse = _center(x, weight, options)
        wide = wide * inverse
        if weight is not None:
            wide = wide * _broadcast_weight(weight)
        if bias is not None:
            wide = wide + _broadcast_weight(bias)
        x = wide.to(x.dtype)
    if options.cos is None or options.sin is None:
        return x
    return rotate(x.float(), *_get_angles(options.cos, options.sin, options), options.interleaved).to(x.dtype)


def _center(x: Tensor, weight: Tensor | None, options: QKTransform) -> tuple[Tensor, Tensor]:
    """Return x as float32, with LayerNorm without its mean, and the inverse root of the mean square of that.

    The mean is summed in float64: a sum of numbers of bfloat16 can overflow in float32.
    """
    dims = _get_norm_dims(weight)
    wide = x.float()
    if options.norm == "layer":
        wide = wide - wide.mean(dims, keepdim=True, dtype=torch.float64).float()
    return wide, torch.rsqrt(wide.square().mean(dims, keepdim=True) + options.eps)


def _get_norm_dims(weight: Tensor | None) -> tuple[int, ...]:
    """Return the dimensions of (B, H, S, D) that a norm is over."""
    return (1, 3) if weight is not None and weight.dim() == 2 else (3,)


def _broadcast_weight(weight: Tensor) -> Tensor:
    """Return weights or biases of a norm as float32, broadcastable to (B, H, S, D)."""
    return weight.float() if weight.dim() == 1 else weight.float().unsqueeze(1)


def _get_angles(cos: Tensor, sin: Tensor, options: QKTransform) -> tuple[Tensor, Tensor]:
    """Return the tables as float32 (B or 1, 1 or H, S, rope_dim / 2)."""

    def get(table: Tensor) -> Tensor:
        if table.shape[-1] == options.rope_dim:
            table = table[..., ::2] if options.interleaved else table[..., : options.rope_dim // 2]
        return table.float() if table.dim() == 4 else table.float().unsqueeze(-3)

    return get(cos), get(sin)


def transform_both(query: Tensor, key: Tensor, options: QKTransform) -> tuple[Tensor, Tensor]:
    """Normalize and rotate Q and K by PyTorch."""
    return (
        transform(query, options.q_norm, options.q_norm_bias, options),
        transform(key, options.k_norm, options.k_norm_bias, options),
    )


class RowArguments(NamedTuple):
    """The arguments of a call on rows of Q and K: tensors, or one for each part of the sequence; norms and tables."""

    query: Any
    key: Any
    value: Any
    q_norm: Any
    k_norm: Any
    norm: Any
    q_norm_bias: Any
    k_norm_bias: Any
    norm_eps: Any
    rope: Any
    rope_dim: Any
    rope_interleaved: Any


def join_parts(args: RowArguments) -> RowArguments:
    """Return the call on the whole sequence: parts with norms of their own are normalized, then all are joined.

    A norm that all parts share stays an argument. Raises TypeError and ValueError that name the argument.
    """
    if not isinstance(args.query, list | tuple):
        name, x = next((n, x) for n, x in (("key", args.key), ("value", args.value)) if isinstance(x, list | tuple))
        raise TypeError(f"{name}: {len(x)} tensors, query is one; they must agree")
    count = len(args.query)
    for name, x in (("key", args.key), ("value", args.value)):
        if not isinstance(x, list | tuple) or len(x) != count:
            raise TypeError(f"{name}: {count} tensors are needed, as query is, one for each part of the sequence")
    if count == 0:
        raise ValueError("query: no tensors; at least one part of the sequence is needed")
    parts = list(zip(args.query, args.key, args.value, strict=True))
    for part in parts:
        check_tensors(*part)
    own_norms = [
        x for x in (args.q_norm, args.k_norm, args.q_norm_bias, args.k_norm_bias) if isinstance(x, list | tuple)
    ]
    for x in own_norms:
        if len(x) != count:
            raise ValueError(f"q_norm, k_norm: {len(x)} norms; {count} are needed, one for each part of the sequence")
    joined = args
    if own_norms:
        every = [_repeat(x, count) for x in (args.q_norm, args.k_norm, args.q_norm_bias, args.k_norm_bias)]
        parts = [
            _normalize_part(part, args.norm, norms, args.norm_eps)
            for part, norms in zip(parts, zip(*every, strict=True), strict=True)
        ]
        joined = args._replace(q_norm=None, k_norm=None, q_norm_bias=None, k_norm_bias=None)
    query, key, value = (join_rows([part[i] for part in parts]) for i in range(3))
    return joined._replace(query=query, key=key, value=value, rope=_join_tables(args.rope, [p[0] for p in parts]))


def _repeat(norm: Any, count: int) -> Sequence[Any]:
    return norm if isinstance(norm, list | tuple) else [norm] * count


def _normalize_part(
    part: tuple[Tensor, Tensor, Tensor], norm: Any, norms: tuple[Any, ...], eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize Q and K of a part. norms: weights of Q and K, then their biases."""
    query, key, value = part
    q_norm, k_norm, q_bias, k_bias = norms
    options = parse_transform(query, key, q_norm, k_norm, norm, q_bias, k_bias, eps, None, None, False)
    return (*(transform_both(query, key, options) if options else (query, key)), value)


def _join_tables(rope: Any, parts: list[Tensor]) -> Any:
    """Return the tables of the whole sequence. rope: a pair for it, or for each part a pair or None (no rotation)."""
    if rope is None or not isinstance(rope, list | tuple) or any(isinstance(x, Tensor) for x in rope):
        return rope
    if len(rope) != len(parts):
        raise ValueError(f"rope: {len(rope)} pairs; {len(parts)} are needed, one for each part of the sequence")
    for pair in rope:
        if pair is not None and not (
            isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)
        ):
            raise TypeError("rope: for each part of the sequence a pair (cos, sin) of tensors, or None, is needed")
    given = [pair for pair in rope if pair is not None]
    if not given:
        return None
    like = max((pair[0] for pair in given), key=Tensor.dim)

    def fill(pair: Any, part: Tensor, index: int) -> Tensor:
        if pair is None:  # angles of 0
            shape = (*like.shape[:-2], part.shape[2], like.shape[-1])
            return (torch.ones if index == 0 else torch.zeros)(shape, dtype=like.dtype, device=like.device)
        table = cast(Tensor, pair[index])
        return table.expand(*like.shape[: like.dim() - table.dim()], *table.shape)

    return tuple(torch.cat([fill(pair, part, i) for pair, part in zip(rope, parts, strict=True)], -2) for i in range(2))


def _transform_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: QKTransform
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias (empty without), from the gradient of ``transform``'s result.

    They are computed in float32. An operator cannot differentiate by autograd, because it runs below it.
    """
    by_result = grad.float()
    if options.cos is not None and options.sin is not None:
        cos, sin = _get_angles(options.cos, options.sin, options)
        by_result = rotate(by_result, cos, -sin, options.interleaved)
    by_weight, by_bias = grad.new_empty(0), grad.new_empty(0)
    if options.norm:
        dims = _get_norm_dims(weight)
        wide, inverse = _center(x, weight, options)
        normalized = wide * inverse
        if bias is not None:
            by_bias = _sum_to_weight(by_result, bias)
        if weight is not None:
            by_weight = _sum_to_weight(by_result * normalized, weight)
            by_result = by_result * _broadcast_weight(weight)
        if options.norm == "layer":
            by_result = by_result - by_result.mean(dims, keepdim=True)
        by_result = inverse * (by_result - normalized * (by_result * normalized).mean(dims, keepdim=True))
    return torch.empty_like(x).copy_(by_result), by_weight, by_bias


def _sum_to_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Sum x (B, H, S, D) to the shape and dtype of weights or biases."""
    return x.sum((0, 1, 2) if weight.dim() == 1 else (0, 2)).to(weight.dtype)


def build_prologue(options: QKTransform, batch: int) -> Prologue:
    """Describe norm and RoPE for the quantizer's kernel. The tables have dense columns and equal strides."""
    weight, table = options.q_norm, options.cos
    norm = "" if not options.norm else "plain" if weight is None else str(weight.dtype).removeprefix("torch.")
    prologue = Prologue(
        norm=norm,
        centered=options.norm == "layer",
        biased=options.q_norm_bias is not None,
        across_heads=weight is not None and weight.dim() == 2,
        eps=options.eps,
    )
    if table is None:
        return prologue
    return replace(
        prologue,
        rotary_dim=options.rope_dim,
        interleaved=options.interleaved,
        table=str(table.dtype).removeprefix("torch."),
        angle_step=2 if options.interleaved and table.shape[-1] == options.rope_dim else 1,
        table_strides=get_table_strides(table, batch),
        table_head=table.stride(1) if table.dim() == 4 and table.shape[1] > 1 else 0,
    )


def get_table_strides(table: Tensor | None, batch: int) -> tuple[int, int]:
    """Return the strides of batch and row of a table, in elements; 0 for a table that all sequences share."""
    if table is None:
        return 0, 0
    shared = table.dim() == 2 or table.shape[0] == 1 or batch == 1
    return (0 if shared else table.stride(0)), table.stride(-2)


def _is_readable(options: QKTransform) -> bool:
    """Return whether the kernel can read the weights, biases and tables."""
    weights_fit = all(x is None or (x.is_contiguous() and is_aligned(x.data_ptr())) for x in options[:4])
    cos, sin = options.cos, options.sin
    if cos is None or sin is None:
        return weights_fit
    return (
        weights_fit
        and cos.stride() == sin.stride()
        and all(x.stride(-1) == 1 and is_aligned(x.data_ptr()) for x in (cos, sin))
    )


def make_readable(options: QKTransform) -> QKTransform:
    """Return norm and RoPE, with copies of weights, biases and tables if the kernel cannot read one of them."""
    if _is_readable(options):
        return options

    def copy(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.clone(memory_format=torch.contiguous_format)

    q_norm, k_norm, q_bias, k_bias, cos, sin = map(copy, options.tensors)
    return options._replace(
        q_norm=q_norm, k_norm=k_norm, q_norm_bias=q_bias, k_norm_bias=k_bias, cos=cos, sin=sin
    )  # fmt: skip


class BlockCall(NamedTuple):
    """Q, K and V (B, H, S, D) of an operator, and norm and RoPE of Q and K."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: QKTransform

    @classmethod
    def parse(cls, args: Sequence[Any]) -> BlockCall:
        """Return the call of an operator's arguments."""
        query, key, value, *options = args[: 3 + _OPTIONS]
        return cls(query, key, value, QKTransform(*options))

    @property
    def tensors(self) -> Tensors:
        """The tensors of the operator, in its order."""
        return (*self[:3], *self.options.tensors)

    @property
    def query_shape(self) -> tuple[int, ...]:
        """The shape of Q."""
        return self.query.shape

    @property
    def key_shape(self) -> tuple[int, ...]:
        """The shape of K."""
        return self.key.shape

    def check(self) -> None:
        """Raise TypeError or ValueError for tensors that do not fit together."""
        check_tensors(self.query, self.key, self.value)
        check_transform(self.query, self.key, self.options)

    def transform(self) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate by PyTorch."""
        return (*transform_both(self.query, self.key, self.options), self.value)

    def make_readable(self) -> BlockCall:
        """Return the call, with copies of tensors that the kernel cannot read in place."""
        query, key, value = (make_tma_compatible(x) for x in self[:3])
        return BlockCall(query, key, value, make_readable(self.options))

    def build_prologue(self) -> Prologue:
        """Describe norm and RoPE for the quantizer's kernel, which can read all tensors."""
        return build_prologue(self.options, self.query.shape[0])

    def allocate(self) -> Tensor:
        """Return an uninitialized output."""
        return empty_rows(self.query, self.query.shape[3])


class BlockOperators:
    """Implementations of the operators that quantize, and that attend to, calls of one class.

    kind: ``BlockCall`` or ``parts.TwoParts``. tensors, options: the number of an operator's tensors, and of the
    arguments after them that belong to the call. The others are the choices of ``quantize``, or precision, causal and
    scale.
    """

    def __init__(self, kind: Any, tensors: int, options: int) -> None:
        self._kind, self._tensors, self._count = kind, tensors, tensors + options

    def _check(self, *args: Any) -> None:
        self._kind.parse(args).check()

    def _parse(self, args: Sequence[Any]) -> tuple[Any, Any]:
        """Return the checked call, and the other arguments."""
        call = self._kind.parse(args)
        call.check()
        return call, args[self._count :]

    def quantize_cpu(self, *args: Any) -> tuple[Tensor, ...]:
        """Quantize CPU tensors."""
        call, choices = self._parse(args)
        return torch_ops.quantize_cpu(*call.transform(), *choices)

    def quantize_cuda(self, *args: Any) -> Any:
        """Quantize CUDA tensors."""
        call, choices = self._parse(args)
        cuda, (_, _, values, *_) = torch_ops.load_cuda(), choices
        if is_empty(call) or values != "block":
            return cuda.quantize(*call.transform(), *choices)
        call = call.make_readable()
        return cuda.quantize_block(call.tensors, call.build_prologue(), *choices)

    def quantize_fake(self, *args: Any) -> tuple[Tensor, ...]:
        """Return codes without numbers."""
        call, choices = self._parse(args)
        query, key = (call.tensors[0].new_empty(shape) for shape in (call.query_shape, call.key_shape))
        return torch_ops.quantize_fake(query, key, key, *choices)

    def attend_cpu(self, *args: Any) -> Tensor:
        """Compute attention of CPU tensors."""
        call, (precision, causal, scale) = self._parse(args)
        out: Tensor = call.allocate()
        if is_empty(call):
            return out.zero_()
        config = build_config(call.query_shape[3], out.dtype, precision)
        query, key, value = call.transform()
        return out.copy_(reference.attention(reference.quantize(query, key, value, config), causal, scale)[0])

    def attend_cuda(self, *args: Any) -> Tensor:
        """Compute attention of CUDA tensors."""
        return self.attend(*args)[0]

    def attend(self, *args: Any) -> tuple[Tensor, Any]:
        """Compute attention of CUDA tensors. Return also the plan of its launches, or None if it needed more."""
        check_once(self._check, args[: self._tensors], args[self._tensors : self._count])
        call, choices, cuda = self._kind.parse(args), args[self._count :], torch_ops.load_cuda()
        if is_empty(call):
            return call.allocate().zero_(), None
        if not cuda.has_block_scales(call.tensors[0].get_device()):
            return cuda.sdpa(*call.transform(), *choices), None
        tensors = (readable := call.make_readable()).tensors
        out, plan = cuda.block(tensors, readable.build_prologue(), *choices)
        return out, plan if all([x is y for x, y in zip(tensors, args, strict=False)]) else None

    def attend_fake(self, *args: Any) -> Tensor:
        """Return an output without numbers."""
        call, _ = self._parse(args)
        return call.allocate()  # type: ignore[no-any-return]


def is_empty(call: Any) -> bool:
    """Return whether a call has no queries or no keys."""
    return not (math.prod(call.query_shape) and math.prod(call.key_shape))


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of Q, K, V, weights and biases (empty without): PyTorch recomputes norm and RoPE."""
    options = QKTransform(*args[:_OPTIONS])
    _, causal, scale = args[_OPTIONS:]
    attention_backward = sdpa_backward if query.is_cuda else reference.compute_gradients
    q, k = transform_both(query, key, options)
    grad_q, grad_k, by_value = attention_backward(grad, q, k, value, causal, scale)
    by_query, by_q_norm, by_q_bias = _transform_backward(grad_q, query, options.q_norm, options.q_norm_bias, options)
    by_key, by_k_norm, by_k_bias = _transform_backward(grad_k, key, options.k_norm, options.k_norm_bias, options)
    return by_query, by_key, by_value, by_q_norm, by_k_norm, by_q_bias, by_k_bias


def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    weights = (grad.new_empty(0) if x is None else torch.empty_like(x) for x in args[:4])
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), *weights


_CHOICES = "str precision, bool blocks, str values, bool key_mean, bool rotate"
_ATTENTION = "str precision, int causal, float scale"
_SEVEN = f"({', '.join(['Tensor'] * 7)})"
_REFUSED = "greenfast.quantize: no gradient flows to codes; greenfast.attention_block has gradients"
BLOCKS = BlockOperators(BlockCall, 9, 4)
for _name, _schema, _cpu, _cuda, _fake, _refusal in (
    (
        "quantize_block", f"({_ARGUMENTS}, {_CHOICES}) -> {_SEVEN}",
        BLOCKS.quantize_cpu, BLOCKS.quantize_cuda, BLOCKS.quantize_fake, _REFUSED,
    ),
    (
        "block_backward", f"(Tensor grad, {_ARGUMENTS}, {_ATTENTION}) -> {_SEVEN}",
        _backward, _backward, _backward_fake, "greenfast.attention_block: its gradients are not differentiable",
    ),
    (
        "block", f"({_ARGUMENTS}, {_ATTENTION}) -> Tensor", BLOCKS.attend_cpu, BLOCKS.attend_cuda, BLOCKS.attend_fake,
        None,
    ),
):  # fmt: skip
    torch_ops.define_operator(_name, _schema, _cpu, _cuda, _fake)
    autograd.register(
        torch_ops.LIBRARY, _name, _refusal, backward="block_backward", first=_TENSORS, inputs=(*range(_TENSORS),),
        public="greenfast.attention_block",
    )  # fmt: skip
torch_ops.register_sdpa_flops(torch.ops.greenfast.block)

QUANTIZE_BLOCK = torch.ops.greenfast.quantize_block.default
BLOCK = torch.ops.greenfast.block.default
