"""Checks of flags, numbers and lengths. Errors name the argument."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenfast.ops.quantized import DTYPES, SDPA_PRECISIONS, check_choice, format_tensor, format_value
from greenfast.ops.symbols import is_certain, require

_LARGEST = torch.finfo(torch.float32).max
_SOFTCAPS = (1e-30, 1e30)  # the kernels' float32 holds the cap and its inverse, times the scales of scores
_CAUSAL = {"upper_left": 1, "lower_right": 2}
MAX_LENGTH = 2**31 - 1  # in the kernels lengths are int32
_NO_WINDOW = (-1, -1)
MAX_WINDOW = 2**30  # of a window, so that sums in int32 cannot overflow
#: Refusals of other GPUs.
SERVING_ON_HOPPER = "serving calls on CPU tensors have the same numerics; their kernels are for Hopper GPUs"
PACKED_ON_HOPPER = "packed sequences have kernels for Hopper GPUs"
MASKED_ON_HOPPER = "masks other than causal ones, softcap, sinks and skip_threshold: their kernels are for Hopper GPUs"
_CHECKED: set[tuple[Any, ...]] = set()
_MAX_CHECKED = 4096


def check_flag(name: str, value: object) -> None:
    """Raise TypeError for anything except True and False, as PyTorch's attention does."""
    if not isinstance(value, bool | torch.SymBool):  # torch.compile sees a comparison of sizes as a SymBool
        kind = type(value)
        type_name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"{name}: {format_value(value)}; True or False is needed, not a {type_name}")


def parse_length(name: str, value: object, max_value: int | None = None) -> Any:
    """Return a whole number of Python or NumPy as an int, a symbol as it is.

    Raises TypeError for anything else, ValueError for a negative number and one above ``max_value``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise TypeError(f"{name}: {format_value(value)}; a whole number is needed, not a {type(value).__name__}")
    size: Any = value if isinstance(value, int | torch.SymInt) else int(value)
    if not require(size >= 0):
        raise ValueError(f"{name}: {size}; 0 or more is needed")
    if max_value is not None and is_certain(size > max_value):  # the operators check at run time
        raise ValueError(f"{name}: {size}; at most {max_value} is allowed")
    return size


def parse_window(window: Any, name: str = "window_size") -> tuple[Any, Any]:
    """Return a window (left, right), -1 for no limit and at most MAX_WINDOW. Raises TypeError and ValueError."""
    if not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(f"{name}: {format_value(window)}; (left, right) is needed, -1 for no limit")
    sides: list[Any] = []
    for n in window:
        if not isinstance(n, numbers.Integral | torch.SymInt) or isinstance(n, bool):
            raise TypeError(f"{name}: {window!r}; whole numbers are needed")
        side: Any = n if isinstance(n, int | torch.SymInt) else int(n)
        if not (require(side >= -1) and require(side < 2**63)):
            raise ValueError(f"{name}: {window!r}; numbers of at least -1 and below 2**63 are needed")
        sides.append(min(side, MAX_WINDOW))
    return sides[0], sides[1]


def parse_causal(is_causal: bool, alignment: str) -> int:
    """Return the mask as a Mask of ``kernels.attention.config``.

    Raises TypeError unless ``is_causal`` is True or False, ValueError for an unknown alignment.
    """
    check_flag("is_causal", is_causal)
    check_choice("causal_alignment", alignment, _CAUSAL)
    return _CAUSAL[alignment] if is_causal else 0


def parse_number(name: str, value: Any) -> float:
    """Return a Python or NumPy number, or a tensor without dimensions, as a float.

    Raises TypeError for anything else.
    """
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and not value.is_nested and value.dim() == 0 and not value.is_complex():
        if value.requires_grad:
            raise TypeError(f"{name}: a tensor that requires grad, but no gradient flows to it; pass {name}.item()")
        if value.is_meta:
            raise TypeError(f"{name}: a tensor on meta, without a number; a number is needed")
        if value.dtype != torch.bool:
            return float(value)
    real = isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)
    if not real:
        raise TypeError(f"{name}: {_format_argument(value)}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: a number beyond float64; a smaller one is needed") from None


def parse_softcap(softcap: Any) -> float:
    """Return the softcap of a call, 0 for none. Raises TypeError unless it is a number, ValueError out of range."""
    cap = parse_number("softcap", softcap)
    if not (cap == 0.0 or _SOFTCAPS[0] <= cap <= _SOFTCAPS[1]):
        smallest, largest = _SOFTCAPS
        raise ValueError(f"softcap: {cap}; 0, or a number from {smallest} to {largest} is needed")
    return cap


class ScoreOptions(NamedTuple):
    """Options of ``sdpa`` for scores, beyond a causal mask.

    window: (left, right), -1 for no limit. softcap: 0 for none. sinks: (H,), or None. kv_lengths: (B,), or None.
    skip_threshold: 0 for none. alignment: of the window, as in MaskSpec.
    """

    window: tuple[int, int] = _NO_WINDOW
    softcap: float = 0.0
    sinks: Tensor | None = None
    kv_lengths: Tensor | None = None
    skip_threshold: float = 0.0
    alignment: int = 1


NO_OPTIONS = ScoreOptions()


def parse_options(
    window: Any, softcap: Any, sinks: Any, kv_lengths: Any, skip_threshold: Any, alignment: str
) -> ScoreOptions:
    """Return checked options. Raises TypeError and ValueError; sizes and devices are checked by the operator."""
    if (
        sinks is None
        and kv_lengths is None
        and type(softcap) is type(skip_threshold) is float
        and softcap == skip_threshold == 0.0
        and type(window) is tuple
        and len(window) == 2
        and type(window[0]) is type(window[1]) is int
        and window == _NO_WINDOW
    ):  # most calls; comparisons of values of other types may raise
        return NO_OPTIONS
    left, right = parse_window(window, "window")
    cap = parse_softcap(softcap)
    threshold = parse_number("skip_threshold", skip_threshold)
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"skip_threshold: {skip_threshold}; a number from 0 to below 1 is needed")
    for name, x, allowed in (
        ("sinks", sinks, (torch.float32, torch.bfloat16, torch.float16)),
        ("kv_lengths", kv_lengths, (torch.int32, torch.int64)),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name}: a {type(x).__name__}; a strided tensor is needed")
        if x.dtype not in allowed:
            raise TypeError(f"{name}: its dtype is {x.dtype}; allowed: {', '.join(map(str, allowed))}")
        if x.dim() != 1:
            raise ValueError(f"{name}: its shape is {tuple(x.shape)}; one dimension is needed")
    if (left, right) == _NO_WINDOW and cap == 0.0 and sinks is None and kv_lengths is None and threshold == 0.0:
        return NO_OPTIONS
    return ScoreOptions((left, right), cap, sinks, kv_lengths, threshold, 2 if alignment == "lower_right" else 1)


def _format_argument(value: object) -> str:
    return format_tensor(value) if isinstance(value, Tensor) else f"{value!r}, a {type(value).__name__}"


def parse_scale(scale: Any, head_dim: int) -> float:
    """Return the factor of the scores. The default is 1 / sqrt(head_dim), or 1 for head dim 0.

    Raises TypeError unless it is a number, ValueError unless it is positive and finite.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    factor = scale if type(scale) is float else parse_number("scale", scale)
    if not is_valid_scale(factor):
        raise ValueError(
            f"scale: {factor}; a positive, finite number up to float32's {_LARGEST:.4g} is needed, because the "
            "scores of query and key are float32"
        )
    return factor


def is_valid_scale(factor: float) -> bool:
    """Return whether the kernels can multiply scores by a factor."""
    return 0.0 < factor <= _LARGEST


def parse_dropout(dropout_p: Any) -> float:
    """Return the probability. Raises TypeError unless it is a number, ValueError unless it is from 0 to 1."""
    if type(dropout_p) is float and dropout_p == 0.0:  # most calls
        return dropout_p
    probability = 0.0 if dropout_p is False else parse_number("dropout_p", dropout_p)
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"dropout_p: {probability}; a probability from 0 to 1 is needed")
    return probability


def check_cast_dtype(float32_as: Any) -> None:
    """Raise TypeError unless a dtype is None or one of the kernels' dtypes."""
    if float32_as is not None and not (isinstance(float32_as, torch.dtype) and float32_as in DTYPES):
        raise TypeError(f"float32_as: {float32_as!r}; {' or '.join(map(str, DTYPES))} is needed, or None")


def parse_settings(
    dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any, precision: Any, causal_alignment: Any, return_lse: Any,
    float32_as: Any,
) -> tuple[float, int, float | None]:  # fmt: skip
    """Check the arguments of ``sdpa`` besides tensors and ScoreOptions. Return dropout, the mask and the scale.

    The scale may be one that the kernels do not take; None is the default.
    """
    causal = parse_causal(is_causal, causal_alignment)
    check_choice("precision", precision, SDPA_PRECISIONS)
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    check_cast_dtype(float32_as)
    return parse_dropout(dropout_p), causal, None if scale is None else parse_number("scale", scale)


def check_once(check: Any, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Call ``check`` once per combination of tensor properties and other arguments, while tracing in every call."""
    if torch.compiler.is_compiling():
        check(*tensors, *others)
        return
    try:
        kind = (
            check,
            *[x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout) for x in tensors],
            others,
        )
        if kind in _CHECKED:
            return
    except (AttributeError, RuntimeError, TypeError):  # not strided tensors (the check raises), or symbolic sizes
        check(*tensors, *others)
        return
    check(*tensors, *others)
    if len(_CHECKED) >= _MAX_CHECKED:
        _CHECKED.clear()
    _CHECKED.add(kind)


def check_starts(name: str, starts: Tensor, tokens: int, owner: str) -> list[int]:
    """Return the lengths between the starts of sequences.

    Raises ValueError unless they ascend within ``tokens`` tokens.

    owner: the name of the tensor with these tokens.
    """
    ends: list[int] = starts.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    if ends[0] != 0 or min(lengths, default=0) < 0 or ends[-1] > tokens:
        raise ValueError(f"{name}: {ends}; from 0, never falling, to at most the {tokens} tokens of {owner}")
    return lengths


def check_used(seqused_k: Tensor, lengths: list[int]) -> list[int]:
    """Return the numbers of keys that are used. Raises ValueError if a sequence has fewer; lengths: its keys."""
    used: list[int] = seqused_k.tolist()
    for b, (n, length) in enumerate(zip(used, lengths, strict=True)):
        if not 0 <= n <= length:
            raise ValueError(f"seqused_k: {n} of sequence {b}; it has {length} keys")
    return used


def has_key_mean(softcap: float, sinks: Tensor | None) -> bool:
    """Return whether K may be quantized minus a mean: not if a score's own value matters, as with softcap and sinks."""
    return softcap == 0.0 and sinks is None
