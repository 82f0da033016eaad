"""Inputs for checking gradients, and PyTorch's gradients in float64 and in the inputs' dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The inputs: N(0, 1) except for this.
KINDS = ("normal", "uniform", "biased 3", "biased 10", "biased 30", "outliers", "logits 4", "logits 8")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case; causal: 0, 1 (aligned at the first key) or 2 (at the last)."""

    q_len: int
    kv_len: int
    head_dim: int = 64
    heads: int = 2
    kv_heads: int = 2
    causal: int = 0

    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``greenfast.sdpa``."""
        alignment = "lower_right" if self.causal == 2 else "upper_left"
        return {"is_causal": self.causal > 0, "causal_alignment": alignment, "enable_gqa": True}


def case(kind: str, sizes: Sizes, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Q, K, V of that kind, and the gradient of the output."""
    generator = torch.Generator().manual_seed(sizes.q_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (1, sizes.heads, sizes.q_len, sizes.head_dim)
    shapes = (shape, *[(1, sizes.kv_heads, sizes.kv_len, sizes.head_dim)] * 2)
    q, k, v = (normal(*x) for x in shapes)
    number = float(kind.split()[1]) if " " in kind else 0.0
    if kind == "uniform":
        q, k, v = (torch.rand(x, generator=generator) for x in shapes)
    elif kind == "outliers":
        q, k, v = (x + 10 * normal(*x.shape) * (torch.rand(x.shape, generator=generator) < 0.001) for x in (q, k, v))
    elif kind.startswith("biased"):
        k = k + number * normal(sizes.head_dim)
    elif kind.startswith("logits"):  # their standard deviation
        q, k = q * number**0.5, k * number**0.5
    return [x.to(dtype) for x in (q, k, v)], normal(*shape).to(dtype)


def torch_attention(query: Tensor, key: Tensor, value: Tensor, causal: int) -> Tensor:
    """PyTorch's attention, in the inputs' dtype."""
    mask = None
    if causal:
        last = torch.arange(query.shape[2], device=query.device).unsqueeze(1)
        if causal == 2:
            last = last + key.shape[2] - query.shape[2]
        mask = torch.arange(key.shape[2], device=query.device) <= last
    function = torch.nn.functional.scaled_dot_product_attention
    return function(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def gradients(function: Callable[..., Any], inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def error(found: Tensor, wanted: Tensor, grad: Tensor) -> float:
    """Relative (Frobenius); for a zero gradient, such as Q's with one key, relative to a millionth of grad."""
    size = wanted.double().norm() + 1e-6 * grad.double().norm()
    return float((found.double() - wanted.double()).norm() / size)


def bound(theirs: Tensor, exact: Tensor, grad: Tensor) -> float:
    """The largest allowed error of a gradient: three times the error of 16-bit attention, or 4 %."""
    return max(3 * error(theirs, exact, grad), 0.04)
