"""Compute attention in float64, and the error of a backend's output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.comparison import CheckResult
from benchmarks.inputs import Inputs
from greenfast.numerics.attention import E4M3_POLYNOMIAL_WEIGHTS, attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize


@dataclass(frozen=True)
class Reference:
    """Attention for some query rows of every head; float64 (heads, rows, head_dim).

    rows: indices, (heads, rows). full: on the unquantized values. exact: on the dequantized codes. bound: largest
    rounding error of a kernel with E4M3 weights relative to ``exact``. The last two are empty if no backend reads
    codes.
    """

    rows: Tensor
    full: Tensor
    exact: Tensor
    bound: Tensor

    def check(self, out: Tensor, same_codes: bool) -> CheckResult:
        """Measure the errors of an output, float32 (heads, length, head_dim). same_codes: computed from the codes."""
        heads = torch.arange(len(self.rows), device=out.device).unsqueeze(1)
        sampled = out[heads, self.rows].double()
        error, finite = float((sampled - self.full).norm() / self.full.norm()), bool(torch.isfinite(out).all())
        if not same_codes:
            return CheckResult(error, finite=finite)
        deviation = (sampled - self.exact).abs()
        kernel_error = float(deviation.norm() / self.exact.norm())
        return CheckResult(error, kernel_error, float((deviation / self.bound).max()), finite)


def reference(inputs: Inputs, count: int, *, codes: bool) -> Reference:
    """Compute references for up to ``count`` random rows per head, including the first and the last row."""
    config, sizes = inputs.config, inputs.sizes
    scale, device = 1.0 / math.sqrt(config.head_dim), inputs.values["q"].device
    generator = torch.Generator().manual_seed(sizes.q_len)
    keys = torch.arange(sizes.kv_len, device=device)
    rows, full, exact, bound = [], [], [], []
    group = sizes.heads // sizes.kv_heads
    for head in range(sizes.batch * sizes.heads):
        if count < sizes.q_len:
            drawn = torch.randperm(sizes.q_len, generator=generator)[:count]
            drawn[0], drawn[-1] = 0, sizes.q_len - 1
        else:
            drawn = torch.arange(sizes.q_len)
        chosen = drawn.to(device)
        mask = keys <= chosen.unsqueeze(1) if config.causal else None
        index = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (inputs.values[name][index[name]].unsqueeze(0) for name in "qkv")
        full.append(attention(q[:, chosen], k, v, scale, mask))
        rows.append(chosen)
        if codes:
            q, k, v = (
                dequantize(inputs.codes[name][i : i + 1], inputs.scales[name][i : i + 1], "e4m3")
                for name, i in index.items()
            )
            exact.append(attention(q[:, chosen], k, v, scale, mask))
            bound.append(attention_rounding_bound(q[:, chosen], k, v, scale, mask, E4M3_POLYNOMIAL_WEIGHTS))
    none = torch.empty(0, device=device)
    return Reference(
        torch.stack(rows), torch.cat(full), torch.cat(exact) if codes else none, torch.cat(bound) if codes else none
    )
