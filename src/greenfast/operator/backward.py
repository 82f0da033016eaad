"""The gradients of the operator on a GPU, which are those of PyTorch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor

from greenfast.operator import reference


def sdpa_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by PyTorch's FlashAttention backward where it has the case, else by ``reference.gradients``."""
    lengths_agree = query.shape[2] == key.shape[2]
    if query.numel() == 0 or key.numel() == 0 or (causal and not lengths_agree) or query.shape[3] % 8:
        return tuple(x.contiguous() for x in reference.gradients(grad, query, key, value, out, lse, causal, scale))  # type: ignore[return-value]
    share = query.shape[1] // key.shape[1]
    k, v = (x if share == 1 else x.repeat_interleave(share, 1) for x in (key, value))
    empty = torch.empty(0, dtype=torch.int64, device=query.device)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad.contiguous(), query, k, v, out, lse, None, None, query.shape[2], key.shape[2], 0.0, bool(causal), empty,
        empty, scale=scale,
    )  # fmt: skip
    by_query, by_key, by_value = found
    if share > 1:
        by_key, by_value = (x.unflatten(1, (key.shape[1], share)).sum(2) for x in (by_key, by_value))
    return by_query, by_key, by_value
