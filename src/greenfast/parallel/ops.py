"""Attention on several GPUs as PyTorch knows it: ``torch.ops.greenfast.context_attention`` and its gradients.

A graph of torch.compile holds one call of it, with the name of the process group; what is exchanged is inside.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from greenfast.operator import ops
from greenfast.operator.quantized import PRECISIONS
from greenfast.parallel import ring, ulysses
from greenfast.parallel.group import Group, group_named
from greenfast.parallel.layout import Layout

METHODS = {"ring": ring.forward, "ulysses": ulysses.forward}
_OPTIONS = "int causal, float scale, str method, bool balanced, str group"
_SCHEMAS = {
    "context_attention": "(Tensor query, Tensor key, Tensor value, str precision, bool with_lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    "context_attention_backward": f"(Tensor grad, Tensor query, Tensor key, Tensor value, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
}
_LSE = "greenfast.sdpa: a gradient reaches its log-sum-exp, which has none; use lse.detach() if none is meant"


def _forward(
    query: Tensor, key: Tensor, value: Tensor, precision: str, with_lse: bool, causal: int, scale: float, method: str,
    balanced: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = group_named(group)
    options = (list(PRECISIONS).index(precision), with_lse)
    _agree(ranks, "sdpa", (query, key, value), causal, scale, method, balanced, options)
    out, lse = METHODS[method](
        ranks, Layout(ranks.size, balanced), query, key, value, precision, causal, scale, with_lse
    )
    return out, lse if with_lse else lse.new_empty(0)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: int, scale: float, method: str, balanced: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ranks = group_named(group)
    _agree(ranks, "the gradient of sdpa", (query, key, value), causal, scale, method, balanced, ())
    return ulysses.backward(ranks, Layout(ranks.size, balanced), grad, query, key, value, causal, scale)


def _agree(
    ranks: Group, name: str, tensors: tuple[Tensor, ...], causal: int, scale: float, method: str, balanced: bool,
    options: tuple[int, ...],
) -> None:  # fmt: skip
    (bits,) = struct.unpack("q", struct.pack("d", scale))
    flags = (len(name), causal, bits, list(METHODS).index(method), balanced, tensors[0].dtype == torch.float16)
    shapes = [n for x in tensors for n in x.shape]
    named = zip(("query", "key", "value"), tensors, strict=True)
    shown = ", ".join(f"{of} {tuple(x.shape)}" for of, x in named)
    described = f"{name} by {method}, {shown}, {tensors[0].dtype}, causal {bool(causal)}, scale {scale:.6g}"
    ranks.agree([*flags, *map(int, options), *shapes], described)


def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, precision: str, with_lse: bool, *options: Any) -> Any:
    lse = query.new_empty(query.shape[:3] if with_lse else (0,), dtype=torch.float32)
    return query.new_empty(query.shape), lse


def _backward_shapes(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, _, _, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value)


def _gradients(ctx: Any, grad: Tensor | None, of_lse: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    found: list[Any] = [None, None, None]
    if grad is not None:
        found = list(torch.ops.greenfast.context_attention_backward(grad, *tensors, *ctx.options))
    if of_lse is not None and of_lse.numel():
        refused = [torch.ops.greenfast.refuse_gradient(of_lse, x.shape, _LSE) for x in tensors]
        found = [b if a is None else a + b for a, b in zip(found, refused, strict=True)]
    return (*found, *[None] * 7)


def _twice(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("greenfast.sdpa: its gradients in a context_parallel are not differentiable")


for _name, _call, _shapes in (
    ("context_attention", _forward, _forward_shapes),
    ("context_attention_backward", _backward, _backward_shapes),
):
    ops.LIBRARY.define(_name + _SCHEMAS[_name])
    for _device in ("CPU", "CUDA"):
        ops.LIBRARY.impl(_name, _call, _device)
    torch.library.register_fake(f"greenfast::{_name}", _shapes, lib=ops.LIBRARY)
torch.library.register_autograd("greenfast::context_attention", _gradients, setup_context=_setup, lib=ops.LIBRARY)
torch.library.register_autograd("greenfast::context_attention_backward", _twice, lib=ops.LIBRARY)

CONTEXT_ATTENTION = torch.ops.greenfast.context_attention.default
