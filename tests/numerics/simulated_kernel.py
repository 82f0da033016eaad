"""The attention kernel's arithmetic on the CPU: half for P, float32 for everything else, keys in tiles of 32."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from greenfast.numerics.formats import dequantize, quantize

TILE = 32

#: Faults that a kernel can have, each of which the gates must detect.
Fault = Literal[
    "last key dropped",
    "padding counted as a key",
    "softmax scale 0.5 % off",
    "P rounded to E4M3",
    "V scale of the next head",
    "K scale of the next head",
    "output not rescaled",
    "divisor not rescaled",
    "K one tile late",
    "first 16 columns of V twice",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class QuantizedInputs:
    """Codes and scales as a kernel reads them, and their values."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, fmt: str = "e4m3") -> None:
        pairs = [quantize(x, fmt) for x in (q, k, v)]
        ones = torch.ones(q.shape[0])
        # Without scales: every code is exact in half.
        self.values = [dequantize(codes, ones, fmt).float() for codes, _ in pairs]
        self.scales = [scale for _, scale in pairs]
        exact_q, exact_k, exact_v = (dequantize(codes, scale, fmt) for codes, scale in pairs)
        self.exact = exact_q, exact_k, exact_v
        self.softmax_scale = 1.0 / math.sqrt(q.shape[-1])


def run_kernel(inputs: QuantizedInputs, *, fault: Fault | None = None, truncate: bool = False) -> Tensor:
    """The output (half) of the kernel, or of one with a fault.

    truncate: sums on tensor cores are cut off after every 16 terms, not rounded.
    """
    q, k, v = inputs.values
    q_scale, k_scale, v_scale = (scale.view(-1, 1, 1) for scale in inputs.scales)
    heads, seq_len, head_dim = q.shape
    tiles = -(-seq_len // TILE)
    padding = torch.zeros(heads, tiles * TILE - seq_len, head_dim)
    k, v = torch.cat([k, padding], dim=1), torch.cat([v, padding], dim=1)
    keys = seq_len - 1 if fault == "last key dropped" else seq_len
    if fault == "padding counted as a key":
        keys += 1
    if fault == "V scale of the next head":
        v_scale = v_scale.roll(1, dims=0)
    if fault == "K scale of the next head":
        k_scale = k_scale.roll(1, dims=0)
    if fault == "K one tile late":
        k = k.roll(TILE, dims=1)
    if fault == "first 16 columns of V twice":
        v = torch.cat([v[..., :16], v[..., :16], v[..., 32:]], dim=-1)
    softmax_scale = torch.tensor(inputs.softmax_scale) * (1.005 if fault == "softmax scale 0.5 % off" else 1.0)
    scale_log2 = q_scale * k_scale * softmax_scale * torch.tensor(math.log2(math.e))

    top = torch.full((heads, seq_len, 1), -math.inf)
    total = torch.zeros(heads, seq_len, 1)
    out = torch.zeros(heads, seq_len, head_dim)
    for first in range(0, tiles * TILE, TILE):
        tile = slice(first, first + TILE)
        scores = _multiply(torch.zeros(heads, seq_len, TILE), q, k[:, tile].transpose(1, 2), truncate) * scale_log2
        scores[:, :, max(keys - first, 0) :] = -math.inf
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        p = torch.exp2(scores - new_top).to(torch.float8_e4m3fn if fault == "P rounded to E4M3" else torch.half).float()
        rescale = torch.exp2(top - new_top)
        total = total * (1.0 if fault == "divisor not rescaled" else rescale) + p.sum(dim=-1, keepdim=True)
        out = _multiply(out * (1.0 if fault == "output not rescaled" else rescale), p, v[:, tile], truncate)
        top = new_top
    return (out * (v_scale / total)).half()


def _multiply(start: Tensor, a: Tensor, b: Tensor, truncate: bool) -> Tensor:
    """start + a @ b in float32."""
    if not truncate:
        return start + a @ b
    for first in range(0, a.shape[-1], 16):
        step = slice(first, first + 16)
        wide = start.double() + a[..., step].double() @ b[..., step, :].double()
        start = wide.float()
        start = torch.where(start.double().abs() > wide.abs(), torch.nextafter(start, torch.zeros(())), start)
    return start


def hopper_sums(q: Tensor, k: Tensor, bits: int = 13) -> Tensor:
    """q k^T of E4M3 numbers (heads, rows, columns) in float64, added up as Hopper's tensor cores do.

    32 products at a time are added to the sum so far, each cut off ``bits`` bits below the largest of them.
    """
    total = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.float64)
    for first in range(0, q.shape[2], 32):
        columns = slice(first, first + 32)
        products = q[..., columns].double().unsqueeze(2) * k[..., columns].double().unsqueeze(1)
        addends = torch.cat([total.unsqueeze(-1), products], -1)
        largest = addends.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
        step = 2.0 ** (largest.log2().floor() - bits)
        total = (torch.trunc(addends / step) * step).sum(-1)
    return total
