"""The registered operators of attention on several GPUs: ``torch.ops.greenfast.context_attention`` and its gradients.

A graph of torch.compile contains one call, with the name of the process group. The exchanges are inside the operator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greenfast.ops import autograd, torch_ops
from greenfast.parallel import cost, ring, ulysses
from greenfast.parallel.group import RankGroup, find_group
from greenfast.parallel.layout import ShardLayout

METHODS = {"ring": ring.forward, "ulysses": ulysses.forward}
_OPTIONS = "int causal, float scale, str method, bool balanced, str group"
_SCHEMAS = {
    "context_attention": "(Tensor query, Tensor key, Tensor value, str precision, bool with_lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    "context_attention_backward": f"(Tensor grad, Tensor query, Tensor key, Tensor value, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
}
_SECOND_DERIVATIVE_MESSAGE = "greenfast.sdpa: its gradients in a context_parallel are not differentiable"


def _forward(
    query: Tensor, key: Tensor, value: Tensor, precision: str, with_lse: bool, causal: int, scale: float, method: str,
    balanced: bool, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = find_group(group)
    (batch, heads, rows, head_dim), (_, kv_heads, keys, _) = query.shape, key.shape
    sizes = cost.CallSizes(ranks.size, batch, heads, kv_heads, rows, keys, head_dim, causal > 0)
    method, _ = cost.select_method(method, sizes)  # outside the graph: inside, it would specialize the lengths
    options = f", {precision}, return_lse {with_lse}"
    _agree(ranks, f"sdpa by {method}", (query, key, value), causal, scale, balanced, options)
    if _is_empty(query, key):
        out, lse = query.new_zeros(query.shape), query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
    else:
        layout = ShardLayout(ranks.size, balanced)
        with ranks.report_errors():
            out, lse = METHODS[method](ranks, layout, query, key, value, precision, causal, scale, with_lse)
    return out, lse if with_lse else lse.new_empty(0)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: int, scale: float, method: str, balanced: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ranks = find_group(group)
    _agree(ranks, "the gradient of sdpa", (query, key, value), causal, scale, balanced)
    if _is_empty(query, key):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    with ranks.report_errors():
        return ulysses.backward(ranks, ShardLayout(ranks.size, balanced), grad, query, key, value, causal, scale)


def _agree(
    ranks: RankGroup,
    name: str,
    tensors: tuple[Tensor, ...],
    causal: int,
    scale: float,
    balanced: bool,
    options: str = "",
) -> None:
    """Return after all ranks make this call."""
    shapes = ", ".join(
        f"{tensor_name} {tuple(x.shape)}" for tensor_name, x in zip(("query", "key", "value"), tensors, strict=True)
    )
    ranks.agree(
        f"{name}, {shapes}, {tensors[0].dtype}, causal {bool(causal)}, scale {scale}, load_balance {balanced}{options}"
    )


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return 0 in (*query.shape, *key.shape)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, precision: str, with_lse: bool, *options: Any) -> Any:
    lse = query.new_empty(query.shape[:3] if with_lse else (0,), dtype=torch.float32)
    return query.new_empty(query.shape), lse


def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    return tuple(torch.empty_like(x) for x in (query, key, value))


for _name, _call, _shapes, _message in (
    ("context_attention", _forward, _forward_fake, None),
    ("context_attention_backward", _backward, _backward_fake, _SECOND_DERIVATIVE_MESSAGE),
):
    torch_ops.define_operator(_name, _SCHEMAS[_name], _call, _call, _shapes)
    autograd.register(torch_ops.LIBRARY, _name, _message, "context_attention_backward", 5)

CONTEXT_ATTENTION = torch.ops.greenfast.context_attention.default
