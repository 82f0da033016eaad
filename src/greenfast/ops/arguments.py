"""Checks of the arguments other than tensors: flags, numbers and lengths. Errors name the argument."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from greenfast.ops.quantized import DTYPES, check_choice
from greenfast.ops.symbols import require

_LARGEST = torch.finfo(torch.float32).max
_CAUSAL = {"upper_left": 1, "lower_right": 2}


def check_flag(name: str, value: object) -> None:
    """Raises TypeError for anything but True and False, as PyTorch's attention does."""
    if not isinstance(value, bool | torch.SymBool):  # to torch.compile a comparison of sizes is a bool, but not True
        kind = type(value)
        given = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"{name}: {_format_value(value)}; True or False is needed, not a {given}")


def check_length(name: str, value: object, most: int | None = None) -> None:
    """Raises TypeError for anything but a whole number, ValueError for a negative one and above ``most``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise TypeError(f"{name}: {_format_value(value)}; a whole number is needed, not a {type(value).__name__}")
    size: Any = value
    if not require(size >= 0):
        raise ValueError(f"{name}: {size}; 0 or more is needed")
    if most is not None and not require(size <= most):
        raise ValueError(f"{name}: {size}; at most {most} is allowed")


def parse_causal(is_causal: bool, alignment: str) -> int:
    """The mask as a Mask of ``kernels.attention.config``.

    Raises TypeError unless ``is_causal`` is True or False, ValueError for an unknown alignment.
    """
    check_flag("is_causal", is_causal)
    check_choice("causal_alignment", alignment, _CAUSAL)
    return _CAUSAL[alignment] if is_causal else 0


def parse_number(name: str, value: Any) -> float:
    """A Python or NumPy number, or a tensor without dimensions, as a float. Raises TypeError for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and not value.is_nested and value.dim() == 0 and not value.is_complex():
        if value.requires_grad:
            raise TypeError(f"{name}: a tensor that requires grad, but no gradient flows to it; pass {name}.item()")
        if value.dtype != torch.bool:
            return float(value)
    real = isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)
    if not real:
        raise TypeError(f"{name}: {_format_argument(value)}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: a number beyond float64; a smaller one is needed") from None


def _format_argument(value: object) -> str:
    return _describe_tensor(value) if isinstance(value, Tensor) else f"{value!r}, a {type(value).__name__}"


def _format_value(value: object) -> str:
    """Return the value as Python prints it; of a tensor with dimensions, which fills a page, what it is."""
    return _describe_tensor(value) if isinstance(value, Tensor) and value.dim() else repr(value)


def _describe_tensor(x: Tensor) -> str:
    return f"a tensor of {x.dtype} with {x.dim()} dimensions"


def parse_scale(scale: Any, head_dim: int) -> float:
    """The factor of the scores: 1 / sqrt(head_dim) by default, and 1 for head dim 0, where all scores are 0.

    Raises TypeError for anything but a number, ValueError for one that is not positive and finite.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    factor = scale if type(scale) is float else parse_number("scale", scale)
    if not is_valid_scale(factor):
        raise ValueError(
            f"scale: {factor}; a positive, finite number up to float32's {_LARGEST:.4g} is needed, as the scores of "
            "query and key are float32"
        )
    return factor


def is_valid_scale(factor: float) -> bool:
    """Whether the kernels can multiply scores by it."""
    return 0.0 < factor <= _LARGEST


def parse_dropout(dropout_p: Any) -> float:
    """The probability. Raises TypeError for anything but a number, ValueError for one outside 0 to 1."""
    found = 0.0 if dropout_p is False else parse_number("dropout_p", dropout_p)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"dropout_p: {found}; a probability from 0 to 1 is needed")
    return found


def check_cast_dtype(float32_as: Any) -> None:
    """Raises TypeError unless it is None or a dtype that the kernels take."""
    if float32_as is not None and not (isinstance(float32_as, torch.dtype) and float32_as in DTYPES):
        raise TypeError(f"float32_as: {float32_as!r}; {' or '.join(map(str, DTYPES))} is needed, or None")
