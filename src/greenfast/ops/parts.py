"""The attention block of a sequence in two parts, such as text and image tokens: arguments and operators.

Each part has tensors, norm weights and RoPE tables of its own. The quantizer reads both in place, so that neither norm
and RoPE nor the joined tensors are written to memory. Other calls with parts are joined by ``block.join_parts``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import flop_counter

from greenfast.kernels.quantize.qkv import Prologue, SecondPart
from greenfast.ops import autograd, torch_ops
from greenfast.ops.arguments import check_flag, parse_length, parse_number
from greenfast.ops.block import (
    BlockOperators,
    QKTransform,
    RowArguments,
    Tensors,
    build_prologue,
    check_transform,
    get_table_strides,
    make_readable,
    transform,
)
from greenfast.ops.layout import empty_joined, join_rows, make_tma_compatible
from greenfast.ops.quantized import check_tensors
from greenfast.ops.symbols import is_known

_PART = 7  # tensors of a part
_TENSORS = 2 * _PART
_OPTIONS = 5  # arguments of TwoParts after the tensors


class SequencePart(NamedTuple):
    """Q, K and V (B, H, S_i, D) of a part of a sequence, the weights (D,) of its norms, and its tables.

    cos, sin: as in ``QKTransform``; None if the part is not rotated.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


class TwoParts(NamedTuple):
    """Both parts of a sequence, and the options of norm and RoPE that they share.

    norm: "rms", or "" without a norm. own_tables: whether each part has tables of its own, or none. Else the tables of
    ``first`` span the sequence.
    """

    first: SequencePart
    second: SequencePart
    norm: str
    eps: float
    rope_dim: int
    interleaved: bool
    own_tables: bool

    @property
    def both(self) -> tuple[SequencePart, SequencePart]:
        """The parts in order."""
        return self.first, self.second

    @property
    def query_shape(self) -> tuple[int, ...]:
        """The shape of the joined query."""
        return _join_shapes(self.first.query, self.second.query)

    @property
    def key_shape(self) -> tuple[int, ...]:
        """The shape of the joined key."""
        return _join_shapes(self.first.key, self.second.key)

    @classmethod
    def parse(cls, args: Sequence[Any]) -> TwoParts:
        """Return the parts of an operator's arguments."""
        first, second = SequencePart(*args[:_PART]), SequencePart(*args[_PART:_TENSORS])
        return cls(first, second, *args[_TENSORS : _TENSORS + _OPTIONS])

    @property
    def tensors(self) -> Tensors:
        """The tensors of the operators, in their order."""
        return (*self.first, *self.second)

    def flatten(self) -> tuple[Any, ...]:
        """Return the arguments of the operators."""
        return (*self.tensors, *self[2:])

    def check(self) -> None:
        """Raise TypeError or ValueError for parts that do not fit together, and for wrong weights and tables."""
        for part in self.both:
            check_tensors(part.query, part.key, part.value)
        mismatch = _find_mismatch(self)
        if mismatch:
            raise ValueError(mismatch)
        for part in self.both:
            own = self.own_tables and part.cos is not None
            cos, sin = (part.cos, part.sin) if own else (None, None)
            options = _build_options(self, part, cos, sin)
            check_transform(part.query, part.key, options if own else options._replace(rope_dim=0))
        if not self.own_tables:
            one = self.first.query.new_empty(1, 1, 1, 1)
            query, key = one.expand(self.query_shape), one.expand(self.key_shape)
            tables = (self.first.cos, self.first.sin)
            check_transform(
                query, key, QKTransform(None, None, None, None, *tables, "", 0.0, self.rope_dim, self.interleaved)
            )

    def transform_query(self) -> list[Tensor]:
        """Normalize and rotate the query of each part by PyTorch."""
        both = zip(self.both, get_options(self), strict=True)
        return [transform(part.query, part.q_norm, None, options) for part, options in both]

    def transform(self) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate each part by PyTorch, and join them."""
        both = zip(self.both, get_options(self), strict=True)
        key = [transform(part.key, part.k_norm, None, options) for part, options in both]
        return join_rows(self.transform_query()), join_rows(key), join_rows([part.value for part in self.both])

    def make_readable(self) -> TwoParts:
        """Return the parts, with copies of tensors that the kernel cannot read in place."""

        def make(part: SequencePart) -> SequencePart:
            options = make_readable(_build_options(self, part, part.cos, part.sin))
            query, key, value = (make_tma_compatible(x) for x in part[:3])
            return SequencePart(query, key, value, options.q_norm, options.k_norm, options.cos, options.sin)

        return self._replace(first=make(self.first), second=make(self.second))

    def build_prologue(self) -> Prologue:
        """Describe parts, norm and RoPE for the quantizer's kernel, which can read all tensors."""
        first, second = self.both
        rotated = first if first.cos is not None else second
        batch = first.query.shape[0]
        return replace(
            build_prologue(_build_options(self, first, rotated.cos, rotated.sin), batch),
            table_strides=get_table_strides(first.cos, batch),
            second=SecondPart(
                q_rows=second.query.shape[2],
                kv_rows=second.key.shape[2],
                strides=tuple(x.stride()[:3] for x in second[:3]),
                has_tables=(first.cos is not None, second.cos is not None) if self.own_tables else None,
                table_strides=get_table_strides(second.cos, batch),
            ),
        )

    def allocate(self) -> Tensor:
        """Return an uninitialized output of the sequence."""
        return empty_joined(self.first.query, self.query_shape[2])


def _join_shapes(first: Tensor, second: Tensor) -> tuple[int, ...]:
    return (*first.shape[:2], first.shape[2] + second.shape[2], first.shape[3])


def list_tensors(args: RowArguments) -> tuple[Any, ...] | None:
    """Return the tensors of a call in the order of the operators, and whether each part has tables of its own.

    Only types are checked. None if the call is not on two parts, or has norms that no kernel computes for parts.
    """
    if not all(isinstance(x, list | tuple) and len(x) == 2 for x in args[:3]):
        return None
    if args.q_norm_bias is not None or args.k_norm_bias is not None:
        return None
    norms: list[Any] = []
    for x in (args.q_norm, args.k_norm):
        pair = list(x) if isinstance(x, list | tuple) else [x, x]
        if len(pair) != 2:
            return None
        norms.append(pair)
    every = [*norms[0], *norms[1]]
    if args.norm != "rms" and any([x is not None for x in every]):
        return None
    same = all([isinstance(x, Tensor) for x in every]) or all([x is every[0] for x in every])
    if not same or not (every[0] is None or every[0] is True or isinstance(every[0], Tensor)):
        return None
    rope: Any = args.rope
    tables: list[Any] = [None] * 4
    own_tables = False
    if rope is not None:
        if not isinstance(rope, list | tuple) or len(rope) != 2:
            return None
        own_tables = not isinstance(rope[0], Tensor)
        pairs = list(rope) if own_tables else [rope, None]
        for x in pairs:
            if x is not None and not (
                isinstance(x, list | tuple) and len(x) == 2 and all([isinstance(y, Tensor) for y in x])
            ):
                return None
        tables = [y for x in pairs for y in ((None, None) if x is None else x)]
        own_tables = own_tables and not all([x is None for x in tables])
    first, second = (
        (args.query[i], args.key[i], args.value[i], norms[0][i], norms[1][i], *tables[2 * i : 2 * i + 2])
        for i in range(2)
    )
    if not all([isinstance(x, Tensor) for x in (*first[:3], *second[:3])]):
        return None
    return (*first, *second, own_tables)


def parse_parts(args: RowArguments) -> TwoParts | None:
    """Return the checked parts of a call, or None if no kernel reads them: ``join_parts`` joins these or raises.

    Raises TypeError and ValueError that name the argument.
    """
    listed = list_tensors(args)
    if listed is None:
        return None
    check_flag("rope_interleaved", args.rope_interleaved)
    eps = parse_number("norm_eps", args.norm_eps)
    has_tables = any([x is not None for x in (listed[5], listed[12])])
    if not 0.0 <= eps < math.inf or (args.rope_dim is not None and not has_tables):
        return None
    tensors = [x if isinstance(x, Tensor) else None for x in listed[:_TENSORS]]
    if any([x is not None and (x.is_nested or x.layout is not torch.strided) for x in tensors]) or listed[0].dim() != 4:
        return None
    width = 0
    if has_tables:
        width = listed[0].shape[3] if args.rope_dim is None else parse_length("rope_dim", args.rope_dim)
    norm = "" if listed[3] is None else "rms"
    parts = TwoParts.parse([*tensors, norm, eps, width, args.rope_interleaved, listed[_TENSORS]])
    if _find_mismatch(parts):
        return None
    parts.check()
    return parts


def _find_mismatch(parts: TwoParts) -> str:
    """Return why no kernel reads two parts as one sequence; empty if one does."""
    first, second = parts.both
    for name in ("query", "key", "value"):
        a, b = getattr(first, name), getattr(second, name)
        if a.dim() != 4 or b.dim() != 4 or not all([is_known(a.shape[d] == b.shape[d]) for d in (0, 1, 3)]):
            return f"{name}: its shapes are {tuple(a.shape)} and {tuple(b.shape)}; all but the rows must agree"
        if a.dtype != b.dtype or a.device != b.device:
            return f"{name}: its parts are {a.dtype} on {a.device} and {b.dtype} on {b.device}; they must agree"
    for name in ("q_norm", "k_norm"):
        a, b = getattr(first, name), getattr(second, name)
        if (a is None) != (b is None):
            return f"{name}: weights of both parts, or of none, are needed"
        if a is not None and (a.dim() != 1 or b.dim() != 1 or a.dtype != b.dtype):
            return f"{name}: weights (D,) of one dtype are needed for both parts"
    if not parts.rope_dim:
        return ""
    tables = [x for part in parts.both for x in (part.cos, part.sin)]
    if any([x is not None and x.dim() not in (2, 3) for x in tables]):
        return "rope: tables of two or three dimensions are needed"
    if not all([is_known(part.query.shape[2] == part.key.shape[2]) for part in parts.both]):
        return "rope: each part must have as many queries as keys"
    if not parts.own_tables:
        return "" if second.cos is None and second.sin is None else "rope: the tables of the first part span both"
    a, b = first.cos, second.cos
    if a is not None and b is not None and not (a.dtype == b.dtype and is_known(a.shape[-1] == b.shape[-1])):
        return "rope: the tables of both parts must have one dtype and width"
    return ""


def _build_options(parts: TwoParts, part: SequencePart, cos: Tensor | None, sin: Tensor | None) -> QKTransform:
    """Return norm and RoPE of a part with these tables."""
    return QKTransform(part.q_norm, part.k_norm, None, None, cos, sin, *parts[2:6])


def get_options(parts: TwoParts) -> tuple[QKTransform, QKTransform]:
    """Return norm and RoPE of each part for PyTorch. A part without tables is rotated by angles of 0."""
    rows = parts.first.query.shape[2]
    tables: list[Any] = [(part.cos, part.sin) for part in parts.both]
    if parts.rope_dim and not parts.own_tables:
        tables = [tuple(x[..., part, :] for x in tables[0]) for part in (slice(rows), slice(rows, None))]
    elif parts.rope_dim:
        like = next(x[0] for x in tables if x[0] is not None)
        tables = [
            x if x[0] is not None else _make_angles_of_0(like, part.query.shape[2])
            for x, part in zip(tables, parts.both, strict=True)
        ]
    first, second = (_build_options(parts, part, cos, sin) for part, (cos, sin) in zip(parts.both, tables, strict=True))
    return first, second


def _make_angles_of_0(like: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    cos = like.new_ones(rows, like.shape[-1])
    return cos, torch.zeros_like(cos)


def _format_part(prefix: str) -> str:
    inputs = ", ".join(f"Tensor {prefix}{name}" for name in SequencePart._fields[:3])
    return f"{inputs}, {', '.join(f'Tensor? {prefix}{name}' for name in SequencePart._fields[3:])}"


_ARGUMENTS = (
    f"{_format_part('')}, {_format_part('second_')}, str norm, float norm_eps, int rope_dim, bool rope_interleaved, "
    "bool own_tables"
)
PARTS = BlockOperators(TwoParts, _TENSORS, _OPTIONS)
for _name, _schema, _cpu, _cuda, _fake, _refusal in (
    (
        "quantize_parts",
        f"({_ARGUMENTS}, str precision, bool blocks, str values, bool key_mean, bool rotate) -> "
        f"({', '.join(['Tensor'] * 7)})",
        PARTS.quantize_cpu, PARTS.quantize_cuda, PARTS.quantize_fake,
        "greenfast.quantize: no gradient flows to codes; greenfast.attention_block has gradients",
    ),
    (
        "block_parts", f"({_ARGUMENTS}, str precision, int causal, float scale) -> Tensor",
        PARTS.attend_cpu, PARTS.attend_cuda, PARTS.attend_fake,
        "greenfast.block_parts: it has no gradient; greenfast.attention_block has",
    ),
):  # fmt: skip
    torch_ops.define_operator(_name, _schema, _cpu, _cuda, _fake)
    autograd.register(torch_ops.LIBRARY, _name, _refusal, public="greenfast.attention_block")


@flop_counter.register_flop_formula(torch.ops.greenfast.block_parts, get_raw=True)
def _count_flops(*args: Any, **kwargs: Any) -> int:
    parts = TwoParts.parse(args)
    return torch_ops.count_flops(2, parts.query_shape, parts.key_shape[2])


QUANTIZE_PARTS = torch.ops.greenfast.quantize_parts.default
BLOCK_PARTS = torch.ops.greenfast.block_parts.default
