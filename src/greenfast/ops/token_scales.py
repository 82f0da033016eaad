"""Attention with one scale per token and head, so that a row of the output depends only on the tokens it attends to.

``greenfast.sdpa(..., precision="fp8_token")``. The other precisions share a scale among 16 queries and among 128 keys,
and subtract a mean of all keys. There, a row under a causal mask changes a little with later tokens. Here each token
and head of Q, K and V has its own scale, and no mean is subtracted. The serving kernels compute it, on temporary pages.
The forward pass is the same, bit for bit, for a sequence and for each of its prefixes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from greenfast.ops import autograd, torch_ops
from greenfast.ops.backward import split_mask
from greenfast.ops.layout import empty_rows, make_tma_compatible, pad_head_dim
from greenfast.ops.quantized import check_tensors, pad_head_dim_size
from greenfast.serving.call import AttentionCall, get_constant

_ARGUMENTS = "Tensor query, Tensor key, Tensor value, int causal, float scale"


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output, (B, H, S, D) in the memory order of query, and the log-sum-exp, float32 (B, H, S)."""
    check_tensors(query, key, value)
    columns = query.shape[3]
    out = empty_rows(query, columns)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    parts = split_mask(query.shape[2], key.shape[2], causal) if query.numel() and key.numel() else []
    if len(parts) != 1 or parts[0][0] != slice(0, query.shape[2]):  # some rows have no keys
        out.zero_()
        lse.fill_(-math.inf)
    with torch.no_grad():  # the operator's own autograd node has the gradients
        wide = [_make_kernel_input(x) for x in (query, key, value)]
        for rows, keys, masked in parts:
            part_out, part_lse = _attend_part(
                wide[0][:, :, rows], wide[1][:, :, keys], wide[2][:, :, keys], masked, scale
            )
            lse[:, :, rows] = part_lse
            out[:, :, rows] = part_out[..., :columns]
    return out, lse


def _make_kernel_input(x: Tensor) -> Tensor:
    """Return x, or a copy if its head dim is padded or a kernel cannot read its rows."""
    head_dim = pad_head_dim_size(x.shape[3])
    return make_tma_compatible(x, unique_rows=True) if x.shape[3] == head_dim else pad_head_dim(x, head_dim)


def _attend_part(query: Tensor, key: Tensor, value: Tensor, masked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of all rows to all keys, or with a mask that is aligned at the last key."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    by_head = heads == kv_heads and all(_has_contiguous_heads(x) for x in (query, key, value))

    def tokens(x: Tensor) -> Tensor:
        """Return x as (tokens, heads, head_dim). It is a view if each head counts as a sequence."""
        return x.reshape(-1, 1, head_dim) if by_head else x.transpose(1, 2).reshape(-1, x.shape[1], head_dim)

    sequences = batch * heads if by_head else batch
    call = AttentionCall(
        tokens(query), get_constant(query, "arange", q_len, sequences), q_len, scale, masked, (-1, -1), 0.0, None, None,
        None,
    )  # fmt: skip
    starts = get_constant(query, "arange", kv_len, sequences)
    out, lse = call.over_keys(tokens(key), tokens(value), starts, kv_len, None, (None, None, None), True)
    if by_head:
        return out.view(query.shape), lse.view(query.shape[:3])
    return out.view(batch, q_len, heads, head_dim).transpose(1, 2), lse.view(heads, batch, q_len).transpose(0, 1)


def _has_contiguous_heads(x: Tensor) -> bool:
    """Return whether each head's tokens follow the tokens of the head before, as in a contiguous (B, H, S, D)."""
    return x.is_contiguous() and x.shape[0] > 1


for _name in torch_ops.define_pair(
    "sdpa_token", _ARGUMENTS, _attend, lambda _, *args: _attend(*args), torch_ops.infer_attention
):
    autograd.register(torch_ops.LIBRARY, _name, None, first=3)
    torch.library.register_vmap(
        f"greenfast::{_name}", torch_ops.build_vmap_rule(getattr(torch.ops.greenfast, _name)), lib=torch_ops.LIBRARY
    )

torch_ops.register_sdpa_flops(torch.ops.greenfast.sdpa_token, torch.ops.greenfast.sdpa_token_lse)

SDPA_TOKEN = torch.ops.greenfast.sdpa_token.default
SDPA_TOKEN_LSE = torch.ops.greenfast.sdpa_token_lse.default
