"""Gradients on a GPU: PyTorch's attention on the unquantized inputs, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from greenfast.ops import reference
from greenfast.ops.layout import make_tma_compatible

_ATEN = torch.ops.aten


def refuse_gradients(**given: bool) -> None:
    """Raise NotImplementedError for the first argument that is given and has no gradients."""
    for name, has in given.items():
        if has:
            raise NotImplementedError(f"{name}: with it there are no gradients; use torch.no_grad()")


def sdpa_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: int, scale: float,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.sdpa_backward`` of CUDA tensors: gradients with the inputs' dtypes and strides.

    The forward pass is recomputed in 16 bits, so that weights, output and log-sum-exp come from the same arithmetic.
    kept: the output and the log-sum-exp of a forward pass in 8 bits instead. They do not match the weights of the
    backward pass. If the keys have a mean, dQ is a small difference of large numbers, and such a mismatch would
    dominate it. So these keys must be centered.
    """
    if not torch.backends.cuda.is_flash_attention_available():
        return reference.compute_gradients(grad, query, key, value, causal, scale)
    inputs = (query, key, value)
    grads: list[Tensor] = []
    for queries, keys, masked in (
        split_mask(query.shape[2], key.shape[2], causal) if query.numel() and key.numel() else []
    ):
        slices = (queries, keys, keys)
        rows = zip((*inputs, grad), (*slices, queries), strict=True)
        q, k, v, g = (make_tma_compatible(x[:, :, part], unique_rows=True) for x, part in rows)
        results = None
        if kept is not None:
            out, lse = kept
            results = make_tma_compatible(out[:, :, queries], unique_rows=True), lse[:, :, queries].contiguous()
        parts = zip(inputs, slices, _torch_backward(g, q, k, v, masked, scale, results), strict=True)
        part_grads = [_pad_rows(x, at, part) for x, at, part in parts]
        grads = [a + b for a, b in zip(grads, part_grads, strict=True)] if grads else part_grads
    by_query, by_key, by_value = grads or [torch.zeros_like(x) for x in inputs]
    return by_query, by_key, by_value


def sdpa_kept_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, key_mean: Tensor, causal: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.sdpa_kept_backward`` in 16 bits: gradients with the inputs' dtypes and strides.

    out, lse, key_mean: as ``torch.ops.greenfast.sdpa_kept`` returned them. The gradients are computed with centered
    keys: subtracting a vector from all keys changes neither the weights nor their gradients.
    """
    if not (query.numel() and key.numel()):
        return sdpa_backward(grad, query, key, value, causal, scale)
    centered, lse = reference.center_keys(query, key, lse, key_mean, scale)
    return sdpa_backward(grad, query, centered, value, causal, scale, (out, lse))


def _pad_rows(x: Tensor, rows: slice, part: Tensor) -> Tensor:
    """Return a gradient like x, with ``part`` in these rows and 0 in all others."""
    if part.shape == x.shape and part.stride() == torch.empty_like(x, device="meta").stride():
        return part
    whole = torch.zeros_like(x)
    whole[:, :, rows] = part
    return whole


def split_mask(q_len: int, kv_len: int, causal: int) -> list[tuple[slice, slice, bool]]:
    """Split masked attention into parts (queries, keys, masked) for PyTorch. Queries without keys are left out.

    A masked part is square, or has fewer queries than keys and a mask aligned at the last key.
    """
    everything = slice(0, q_len), slice(0, kv_len)
    if not causal:
        return [(*everything, False)]
    if causal == 2:
        return [(slice(max(0, q_len - kv_len), q_len), everything[1], True)]
    square = min(q_len, kv_len)
    parts = [(slice(0, square), slice(0, square), True)]
    return parts if q_len <= kv_len else [*parts, (slice(kv_len, q_len), everything[1], False)]


def _torch_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, masked: bool, scale: float,
    kept: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients by cuDNN if PyTorch would choose it, else by FlashAttention.

    FlashAttention aligns its mask at the last key. kept: the output and the log-sum-exp, computed here if None.
    """
    no_starts, lengths = (None, None), (query.shape[2], key.shape[2])
    if not (masked and query.shape[2] != key.shape[2]) and _uses_cudnn(query, key, value, masked, scale):
        if kept is None:
            forward = _ATEN._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, masked, False, scale=scale
            )
        else:
            unused = torch.zeros((), dtype=torch.int64, device=query.device)  # the state of dropout's random numbers
            forward = (kept[0], kept[1].unsqueeze(-1), *no_starts, *lengths, unused, unused, None)
        out, lse, from_q, from_k, most_q, most_k, seed, offset, _ = forward
        cudnn: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, lse, seed, offset, None, from_q, from_k, most_q, most_k, 0.0, masked,
            scale=scale,
        )  # fmt: skip
        return cudnn
    if kept is None:
        forward = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, masked, False, scale=scale)
    else:
        unused = torch.zeros(2, dtype=torch.int64, device=query.device)
        forward = (*kept, *no_starts, *lengths, unused, unused[0], None)
    out, lse, from_q, from_k, most_q, most_k, seed, offset, _ = forward
    flash: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, from_q, from_k, most_q, most_k, 0.0, masked, seed, offset, scale=scale
    )
    return flash


def _uses_cudnn(query: Tensor, key: Tensor, value: Tensor, masked: bool, scale: float) -> bool:
    """Return whether PyTorch's attention would train with cuDNN on such tensors."""
    shared = query.shape[1] != key.shape[1]
    with torch.enable_grad():
        trained = query.detach().requires_grad_()
        chosen = torch._fused_sdp_choice(trained, key, value, None, 0.0, masked, scale=scale, enable_gqa=shared)
    return int(chosen) == int(SDPBackend.CUDNN_ATTENTION.value)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, lengths: tuple[Any, ...],
    window: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients by FlashAttention. It aligns windows at the last key. The last one is the sinks'.

    Tensors: (B, S, H, D) with ``lengths`` (None, None, S, KV), or packed, (tokens, H, D), with the starts of sequences
    and their longest lengths. sinks: (H,) or None.
    """
    inputs = [x.contiguous() for x in (query, key, value)]
    causal = window == (-1, 0)
    options: dict[str, Any] = {"scale": scale}
    if not causal and window != (-1, -1):
        options |= {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, seed, unused, _ = _ATEN._flash_attention_forward(*inputs, *lengths, 0.0, causal, False, **options)
    grad = grad.contiguous()
    by_sinks = query.new_zeros(0)
    if sinks is not None:
        rows, lse, by_sinks = _include_sinks(grad.transpose(-3, -2), out.transpose(-3, -2), lse, sinks)
        out = rows.transpose(-3, -2).contiguous()
    by_query, by_key, by_value = _ATEN._flash_attention_backward(
        grad, *inputs, out, lse, *lengths, 0.0, causal, seed, unused, **options
    )
    return by_query, by_key, by_value, by_sinks


def _include_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return an output and its log-sum-exp with the sinks' weights in their sums, and the gradient of sinks.

    grad, out: (..., H, S, D). lse: (..., H, S). A backward pass computes weights as exp(score - lse). It subtracts the
    mean gradient of weights, the product of a row of grad and out. So it needs no other change.
    """
    logits = sinks.float().unsqueeze(-1)
    out = (out * torch.sigmoid(lse - logits).unsqueeze(-1)).to(out.dtype)
    lse = torch.logaddexp(lse, logits)
    mean = (grad.float() * out.float()).sum(-1)
    by_sinks = -(torch.exp(logits - lse) * mean).sum(-1)
    return out, lse, by_sinks.sum(0) if by_sinks.dim() > 1 else by_sinks


def masked_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients by PyTorch's memory-efficient attention. The last one is for sinks, (H,) or None.

    mask: bool, broadcastable to (B, H, S, KV). The scores' bias takes S x KV numbers of 16 bits for each of its heads.
    """
    (batch, heads, q_len, _), kv_len, share = query.shape, key.shape[2], query.shape[1] // key.shape[1]
    blind = mask.any(-1, keepdim=True).logical_not()  # these rows attend to all keys instead, and get no gradient
    padded = torch.nn.functional.pad(mask | blind, (0, -kv_len % 8))  # the kernels need aligned rows
    bias = torch.zeros_like(padded, dtype=query.dtype).masked_fill_(padded.logical_not(), -float("inf"))
    bias = bias[..., :kv_len].expand(batch, heads, q_len, kv_len)
    k, v = (x.repeat_interleave(share, 1) for x in (key, value))
    out, lse, seed, offset = _ATEN._scaled_dot_product_efficient_attention(query, k, v, bias, True, scale=scale)
    grad = grad.masked_fill(blind, 0.0)
    by_sinks = query.new_zeros(0)
    if sinks is not None:
        out, sums, by_sinks = _include_sinks(grad, out, lse[..., :q_len], sinks)
        lse = torch.cat([sums, lse[..., q_len:]], -1)  # it is padded
    by_query, *by_keys, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        grad, query, k, v, bias, out, lse, seed, offset, 0.0, [True, True, True, False],
        scale=scale,
    )  # fmt: skip
    by_key, by_value = (
        torch.empty_like(like).copy_(x.unflatten(1, (-1, share)).sum(2))
        for x, like in zip(by_keys, (key, value), strict=True)
    )
    return torch.empty_like(query).copy_(by_query), by_key, by_value, by_sinks
