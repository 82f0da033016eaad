"""Quantized Q, K and V, and the checks of tensors and codes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention.config import KEY_GROUPS, QUERY_BLOCK, ROW_BLOCK, AttentionConfig, padded_keys
from greenfast.ops.symbols import is_known, may_be_same_shape, require, require_same_shape

Precision = Literal["fp8", "int8", "int8_fine"]
SdpaPrecision = Literal["fp8", "int8", "int8_fine", "fp8_token"]
AutoPrecision = Literal["fp8", "int8", "int8_fine", "fp8_token", "auto"]
Alignment = Literal["upper_left", "lower_right"]
Backward = Literal["16bit", "16bit_kept", "8bit", "auto"]
#: Precision -> the format of Q and K; V is always E4M3.
PRECISIONS = {"fp8": "e4m3", "int8": "int8", "int8_fine": "int8"}
PRECISIONS_AND_AUTO = (*PRECISIONS, "auto")
#: The precision with a scale for each token and head of Q, K and V. Only ``sdpa`` supports it (``ops.token_scales``).
TOKEN = "fp8_token"
BACKWARDS = ("16bit", "16bit_kept", "8bit", "auto")
SDPA_PRECISIONS = (*PRECISIONS, TOKEN, "auto")
#: The precision with a scale for each row of Q and for each of the KEY_GROUPS groups of ROW_BLOCK keys.
FINE = "int8_fine"
#: The granularity of V's scales: one per 128 keys, per head, or per channel of a head.
VALUE_SCALES = ("block", "head", "channel")
DTYPES = (torch.float16, torch.bfloat16)


def build_config(
    head_dim: int, dtype: torch.dtype, precision: str, blocks: bool = True, values: str = "block",
    key_mean: bool = True, rotate: bool = True,
) -> AttentionConfig:  # fmt: skip
    """Return the quantization config for tensors of this head dim and dtype (see ``greenfast.quantize``).

    blocks: Q and K have scales per block, else per head. values: one of VALUE_SCALES; "block" needs ``blocks``, and so
    does the precision FINE. Raises ValueError for an unknown precision, for other ``values``, and for these without
    ``blocks``.
    """
    check_choice("precision", precision, PRECISIONS)
    check_choice("value_scales", values, VALUE_SCALES)
    if values == "block" and not blocks:
        raise ValueError("value_scales: 'block' goes with scales='block', not 'head'")
    if precision == FINE and not blocks:
        raise ValueError(f"precision: {FINE!r} has scales of its own, and goes with scales='block', not 'head'")
    row_scales = "fine" if precision == FINE else "block" if blocks else "head"
    return AttentionConfig(
        head_dim=pad_head_dim_size(head_dim),
        columns=head_dim,
        format=PRECISIONS[precision],
        dtype=str(dtype).removeprefix("torch."),
        query_scales=row_scales,
        key_scales=row_scales,
        value_scales=values,
        key_mean=key_mean,
        rotate=rotate,
    )


def get_precision(config: AttentionConfig) -> str:
    """Return the precision of a config."""
    return FINE if config.key_scales == "fine" else "int8" if config.format == "int8" else "fp8"


def pad_head_dim_size(head_dim: int) -> int:
    """Return the smallest of the kernels' head dims that is at least ``head_dim``."""
    return next(d for d in HEAD_DIMS if d >= head_dim)


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedQKV:
    """Codes and scales of the inputs of one attention.

    query: uint8 (B, H, S, D). key: uint8 (B, HK, KV, D). value: uint8 (B, HK, D, KV rounded up to 16), transposed, with
    its keys in the kernels' order. D is one of HEAD_DIMS; ``head_dim`` is the caller's, without the padding.
    query_scale: float32 (B, H, blocks), one scale per 16 rows, or (B, H). key_scale: (B, HK, blocks), one per 128 rows,
    or (B, HK). With precision "int8_fine" query_scale is (B, H, S) and key_scale (B, HK, blocks, 4).
    value_scale: (B, HK, blocks), (B, HK), or (B, HK, 1, D), one scale per channel.
    key_mean: float32 (B, HK, D), the mean that was subtracted from every key, or None. It changes no weight: all scores
    of a query move by the same amount.
    dtype: of the caller's tensors and of the output.
    mean_scores: float32 (B, H, S), the product of each unquantized query with key_mean, or None. ``attention(...,
    return_lse=True)`` adds it to the log-sum-exp, times the scale.

    Tensors are contiguous and on one device. The class is a pytree (torch.utils._pytree), and can be copied and
    pickled. Once it has been imported, ``torch.load`` accepts it with weights_only=True.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor
    key_scale: Tensor
    value_scale: Tensor
    key_mean: Tensor | None
    precision: str
    head_dim: int
    key_length: int
    dtype: torch.dtype
    mean_scores: Tensor | None = None

    _checked = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise TypeError or ValueError, naming the field, for fields that do not fit together."""
        if not self._checked:
            check_codes(self._named(), self.precision, self.head_dim, self.key_length, self.dtype)
            object.__setattr__(self, "_checked", True)

    @property
    def format(self) -> str:
        """The number format of Q and K."""
        return PRECISIONS[self.precision]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.query.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and mean."""
        return sum(x.nbytes for x in self._named().values())

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> QuantizedQKV:
        """Return a copy on a device, or self if it is there already.

        Raises TypeError for anything that names no device.
        """
        if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
            raise TypeError(
                f"device: {device!r}; a torch.device, its name or its number is needed. Codes have no dtype to change"
            )
        tensors = self._named()
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()}
        return self if all(moved[name] is x for name, x in tensors.items()) else replace(self, **moved)  # type: ignore[arg-type]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return codes, scales and the mean (empty for None): the results of the operator ``quantize``."""
        mean = self.query_scale.new_empty(0) if self.key_mean is None else self.key_mean
        return (self.query, self.key, self.value, self.query_scale, self.key_scale, self.value_scale, mean)

    def _named(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return {name: x for name, x in tensors.items() if name not in _OPTIONAL or x is not None}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={_format_shape(x)}" for name, x in self._named().items())
        return (
            f"QuantizedQKV({shapes}, precision={self.precision!r}, head_dim={self.head_dim}, "
            f"key_length={self.key_length}, dtype={self.dtype}, device={getattr(self.query, 'device', None)})"
        )

    def __copy__(self) -> QuantizedQKV:
        """Return a copy that shares the tensors and their autograd history."""
        return replace(self)

    def __reduce__(self) -> tuple[type[QuantizedQKV], tuple[Any, ...]]:
        """Reduce for pickle and deepcopy, with detached tensors.

        torch cannot deepcopy a tensor with autograd history.
        """
        values = (getattr(self, field.name) for field in fields(self))
        return QuantizedQKV, tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in values)


_OPTIONAL = ("key_mean", "mean_scores")
_TENSORS = ("query", "key", "value", "query_scale", "key_scale", "value_scale", *_OPTIONAL)
_CONTEXT = ("precision", "head_dim", "dtype")


def _format_shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _sort_leaves(x: QuantizedQKV) -> dict[str, Tensor]:
    """Return the tensors, long names first.

    torch.export (2.13) mistakes a name for the prefix of a longer name after it.
    """
    return dict(sorted(x._named().items(), key=lambda named: -len(named[0])))


def _flatten(x: QuantizedQKV) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Flatten for pytree.

    The context omits the key length, so that an exported program accepts inputs of other lengths.
    """
    leaves = _sort_leaves(x)
    return list(leaves.values()), (tuple(leaves), *(getattr(x, name) for name in _CONTEXT))


def _flatten_with_keys(x: QuantizedQKV) -> tuple[list[tuple[Any, Tensor]], tuple[Any, ...]]:
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in _sort_leaves(x).items()], _flatten(x)[1]


def _unflatten(leaves: Iterable[Any], context: tuple[Any, ...]) -> QuantizedQKV:
    """Unflatten without checks, because ``tree_map`` may return any leaves.

    ``greenfast.attention`` checks the result.
    """
    whole = object.__new__(QuantizedQKV)
    values = dict(zip(context[0], leaves, strict=True)) | dict(zip(_CONTEXT, context[1:], strict=True))
    key = values["key"]
    values["key_length"] = key.shape[2] if isinstance(key, Tensor) and key.dim() == 4 else None
    for name in (*_TENSORS, *_CONTEXT, "key_length"):
        object.__setattr__(whole, name, values.get(name))
    return whole


pytree.register_pytree_node(
    QuantizedQKV,
    _flatten,
    _unflatten,
    serialized_type_name="greenfast.QuantizedQKV",
    to_dumpable_context=lambda context: [*context[:-1], str(context[-1]).removeprefix("torch.")],
    from_dumpable_context=lambda dumped: (tuple(dumped[0]), *dumped[1:3], getattr(torch, dumped[-1])),
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([QuantizedQKV])


def check_codes(
    tensors: Mapping[str, Tensor], precision: str, head_dim: int, key_length: int, dtype: torch.dtype
) -> None:
    """Raise TypeError or ValueError for codes and scales that do not fit.

    tensors: by the names of QuantizedQKV's fields.

    Kernels read them by address, so every dtype, device, shape and stride is checked.
    """
    check_choice("precision", precision, PRECISIONS)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise TypeError(f"dtype: {format_value(dtype)}; allowed are {', '.join(map(str, DTYPES))}")
    for name, x in tensors.items():
        dtype_needed = torch.uint8 if name in ("query", "key", "value") else torch.float32
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: a torch.Tensor is needed, got {type(x).__name__}")
        if x.dtype != dtype_needed:
            raise TypeError(f"{name}: its dtype is {x.dtype}; {dtype_needed} is needed")
        check_device(name, x, "query", tensors["query"])
    for name, number in (("head_dim", head_dim), ("key_length", key_length)):
        if isinstance(number, bool) or not isinstance(number, int | torch.SymInt):
            raise TypeError(f"{name}: {format_value(number)}; a whole number is needed")
    if is_known(key_length < 0):
        raise ValueError(f"key_length: {key_length}; 0 or more is needed")
    if not has_kernel(head_dim):
        raise ValueError(f"head_dim: {head_dim}; a multiple of 8 up to {HEAD_DIMS[-1]} is needed")
    for name in ("query", "key"):
        if tensors[name].dim() != 4:
            raise ValueError(
                f"{name}: its shape is {tuple(tensors[name].shape)}; (batch, heads, length, head_dim) is needed"
            )
    for name, allowed in _get_allowed_shapes(tensors, precision, head_dim, key_length).items():
        shape = tuple(tensors[name].shape)
        if not any([may_be_same_shape(shape, x) for x in allowed]):  # the operators check at run time
            raise ValueError(f"{name}: its shape is {shape}; {' or '.join(map(str, allowed))} is needed")
    if torch.compiler.is_compiling():  # is_contiguous() would fix the number of blocks; the operators check at run time
        return
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(f"{name}: it is not contiguous, strides {x.stride()}; call .contiguous() on it")


def check_operator_codes(*args: Any) -> None:
    """Call ``check_codes`` with the arguments of an operator: six tensors, then its others."""
    check_codes(dict(zip(_TENSORS, args[:6], strict=False)), *args[6:])


def _get_allowed_shapes(
    tensors: Mapping[str, Tensor], precision: str, head_dim: int, key_length: int
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes that each field may have, given the others."""
    (batch, heads, q_len, _), kv_heads = tensors["query"].shape, tensors["key"].shape[1]
    if not divides_heads(heads, kv_heads):
        raise ValueError(f"key: it has {kv_heads} heads, query {heads}; the heads of query must be a multiple of them")
    padded, blocks = pad_head_dim_size(head_dim), -(-key_length // ROW_BLOCK)
    head_scales, block_scales = (batch, kv_heads), (batch, kv_heads, blocks)
    by_block = tensors["query_scale"].dim() == 3
    shapes = {
        "query": ((batch, heads, q_len, padded),),
        "key": ((*head_scales, key_length, padded),),
        "value": ((*head_scales, padded, padded_keys(key_length)),),
        "query_scale": ((batch, heads, -(-q_len // QUERY_BLOCK)), (batch, heads)),
        "key_scale": (block_scales if by_block else head_scales,),
        "value_scale": (*((block_scales,) if by_block else ()), head_scales, (*head_scales, 1, padded)),
        "key_mean": ((*head_scales, padded),),
        "mean_scores": ((batch, heads, q_len),),
    }
    if precision == FINE:
        shapes |= {"query_scale": ((batch, heads, q_len),), "key_scale": ((*block_scales, KEY_GROUPS),)}
    return {name: allowed for name, allowed in shapes.items() if name in tensors}


def check_strided(name: str, x: Any) -> None:
    """Raise TypeError unless x is a strided tensor. Nested and sparse tensors are refused."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: a torch.Tensor is needed, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name}: it is nested or sparse; a strided tensor is needed")


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise the errors of ``greenfast.quantize`` for tensors that do not fit together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_strided(name, x)
        if x.dtype not in DTYPES:
            cast = "; greenfast.sdpa casts with float32_as" if x.dtype == torch.float32 else ""
            raise TypeError(f"{name}: its dtype is {x.dtype}; allowed are {', '.join(map(str, DTYPES))}{cast}")
        if x.dim() != 4:
            raise ValueError(f"{name}: its shape is {tuple(x.shape)}; (batch, heads, length, head_dim) is needed")
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: its dtype is {x.dtype}, query's {query.dtype}; they must agree")
        check_device(name, x, "query", query)
    if not require_same_shape(key.shape, value.shape):
        raise ValueError(f"value: its shape is {tuple(value.shape)}, key's {tuple(key.shape)}; they must agree")
    if not require(query.shape[0] == key.shape[0]) or not require(query.shape[3] == key.shape[3]):
        raise ValueError(
            f"key: its shape is {tuple(key.shape)}, query's {tuple(query.shape)}; batch and head_dim must agree"
        )
    if not divides_heads(query.shape[1], key.shape[1]):
        raise ValueError(
            f"key: it has {key.shape[1]} heads, query {query.shape[1]}; the heads of query must be a multiple of them"
        )
    if not has_kernel(query.shape[3]):
        message = format_head_dim_error("query", query.shape[3])
        raise NotImplementedError(f"{message}; torch.nn.functional.scaled_dot_product_attention takes any")


def has_kernel(head_dim: Any) -> bool:
    """Return whether a head dim of Q and K can be padded to one of the kernels; False if only the run can decide it."""
    return is_known(head_dim % 8 == 0) and is_known(head_dim >= 8) and is_known(head_dim <= HEAD_DIMS[-1])


def divides_heads(heads: Any, kv_heads: Any) -> bool:
    """Return whether ``kv_heads`` divide ``heads``; the graph asserts it if only the run can decide it."""
    if is_known(heads == kv_heads):
        return not is_known(heads == 0)
    return require(kv_heads > 0) and require(heads % kv_heads == 0)


def format_head_dim_error(name: str, head_dim: int, allowed: str = "multiples of 8") -> str:
    """Format the error for a head dim without a kernel."""
    return f"{name}: head_dim {head_dim}; the kernels take {allowed} up to {HEAD_DIMS[-1]}"


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: {format_value(value)}; allowed are {', '.join(map(repr, allowed))}")


def format_value(value: object) -> str:
    """Format a value as Python prints it. A tensor with dimensions is described, because it would fill a page."""
    return format_tensor(value) if isinstance(value, Tensor) and value.dim() else repr(value)


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if x.device != other.device:
        raise ValueError(f"{name}: it is on {x.device}, {other_name} on {other.device}; they must agree")


def format_tensor(x: Tensor) -> str:
    """Format a tensor that is in the place of another argument."""
    return f"a tensor of {x.dtype} with {x.dim()} dimensions"
