"""Inputs of attention: Q, K and V from one of several distributions, and the float64 references of their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from benchmarks.comparison import CheckResult
from greenfast.kernels.attention.config import VALUE_FORMAT, AttentionConfig, Mask, Sizes, read_dims
from greenfast.numerics.attention import E4M3_POLYNOMIAL_WEIGHTS, attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize, quantize
from greenfast.spec.errors import UsageError

#: Outliers as in the FlashAttention-3 paper: N(0, 1) + N(0, 100) * Bernoulli(0.001).
_OUTLIER_SIGMA, _OUTLIER_SHARE = 10.0, 0.001
#: Realistic inputs: rank, and the factors of signal and noise; share of biased channels, and the factor of their bias.
_RANK, _SIGNAL, _NOISE = 16, 0.8, 0.3
_BIASED_SHARE, _BIAS = 0.05, {"q": 8.0, "k": 8.0, "v": 2.0}
_TINY = 1e-20
_SINK_QUERY = 8.0  # the first column of Q


@dataclass(frozen=True)
class Inputs:
    """One draw of q, k and v, by name: float32 values, their uint8 codes, and a float32 scale per (batch, head).

    values and codes are of shape (batch * heads, length, head_dim), scales of shape (batch * heads,), with Q's heads
    and length or those of K and V.
    """

    config: AttentionConfig
    sizes: Sizes
    values: dict[str, Tensor]
    codes: dict[str, Tensor]
    scales: dict[str, Tensor]

    def by_batch(self, x: Tensor) -> Tensor:
        """Reshape (batch * heads, ...) to (batch, heads, ...)."""
        return x.view(self.sizes.batch, -1, *x.shape[1:])

    def length_first(self, x: Tensor) -> Tensor:
        """Reshape (batch * heads, length, head_dim) to contiguous (batch, length, heads, head_dim)."""
        return self.by_batch(x).transpose(1, 2).contiguous()

    @property
    def grouped(self) -> bool:
        """Whether several heads of Q share a head of K and V."""
        return self.sizes.kv_heads != self.sizes.heads

    @cached_property
    def bfloat16(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V rounded to bfloat16, (batch, heads, length, head_dim)."""
        q, k, v = (self.by_batch(self.values[name].bfloat16()) for name in "qkv")
        return q, k, v


def _uniform(x: Tensor, _: str, draw: Generator) -> Tensor:
    return torch.rand(x.shape, generator=draw, device=x.device)


def _outliers(x: Tensor, _: str, draw: Generator) -> Tensor:
    large = _OUTLIER_SIGMA * torch.randn(x.shape, generator=draw, device=x.device)
    return x + large * (torch.rand(x.shape, generator=draw, device=x.device) < _OUTLIER_SHARE)


def _realistic(x: Tensor, name: str, draw: Generator) -> Tensor:
    heads, length, head_dim = x.shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=x.device)

    whole = normal(heads, length, _RANK) @ normal(heads, _RANK, head_dim) * (_SIGNAL / math.sqrt(_RANK))
    biased = torch.rand(heads, 1, head_dim, generator=draw, device=x.device) < _BIASED_SHARE
    return _NOISE * x + (whole + _BIAS[name] * normal(heads, 1, head_dim) * biased)


def _biased_keys(x: Tensor, name: str, draw: Generator) -> Tensor:
    if name != "k":
        return x
    return x + 10.0 * torch.randn(x.shape[0], 1, x.shape[2], generator=draw, device=x.device)


def _loud_key(times: float) -> _Change:
    return lambda x, name, _: torch.cat([times * x[:, :1], x[:, 1:]], dim=1) if name == "k" else x


def _logits(deviation: float) -> _Change:
    return lambda x, name, _: x if name == "v" else x * math.sqrt(deviation)


def _rotary(x: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al., 2021) by halves, with base 10,000."""
    _, length, head_dim = x.shape
    half = head_dim // 2
    place = torch.arange(length, device=x.device, dtype=torch.float64).unsqueeze(1)
    angle = place * 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    cos, sin, (first, second) = angle.cos().float(), angle.sin().float(), (x[..., :half], x[..., half:])
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _rotary_bias(slow: bool) -> _Change:
    """Bias the slowest or fastest quarter of K's channels, then apply rotary embedding to Q and K."""

    def change(x: Tensor, name: str, draw: Generator) -> Tensor:
        if name == "v":
            return x
        if name == "k":
            turning = torch.arange(x.shape[2], device=x.device) % (x.shape[2] // 2) * 8 // x.shape[2]
            biased = turning == (3 if slow else 0)
            x = x + 10.0 * torch.randn(x.shape[0], 1, x.shape[2], generator=draw, device=x.device) * biased
        return _rotary(x)

    return change


def _sink(share: float) -> _Change:
    """Give the first key about this share of each row's weight, and a value of 0."""

    def change(x: Tensor, name: str, _: Generator) -> Tensor:
        length, head_dim = x.shape[1:]
        x = x.clone()
        if name == "q":
            x[..., 0] = _SINK_QUERY
        elif name == "k":
            x[..., 0] = x[:, 0] = 0.0
            others = max(length - 1, 1) * math.exp(0.5)  # the mean of exp(s) over N(0, 1)
            x[:, 0, 0] = math.log(others * share / (1 - share)) * math.sqrt(head_dim) / _SINK_QUERY
        else:
            x[:, 0] = 0.0
        return x

    return change


_Change: TypeAlias = Callable[[Tensor, str, Generator], Tensor]
#: Kind -> its difference from N(0, 1), and the function that changes q, k or v.
_KINDS: dict[str, tuple[str, _Change]] = {
    "normal": ("N(0, 1)", lambda x, name, draw: x),
    "uniform": ("all of Q, K and V from 0 to 1", _uniform),
    "outliers": ("with N(0, 100) added to one number in a thousand", _outliers),
    "realistic": ("of rank 16 with noise, and a bias in 5 % of the channels", _realistic),
    "biased keys": ("with N(0, 100) for each channel added to all keys", _biased_keys),
    "constant queries": ("with 10 added to all of Q", lambda x, name, draw: x + 10.0 if name == "q" else x),
    "slow bias": (
        "with rotary embedding, and before it N(0, 100) added to the quarter of K's channels that turns slowest",
        _rotary_bias(slow=True),
    ),
    "fast bias": ("the same with the quarter that turns fastest", _rotary_bias(slow=False)),
    "logits 2": ("Q and K times 1.4, so that scores have a deviation of 2", _logits(2.0)),
    "logits 4": ("Q and K times 2, so that scores have a deviation of 4", _logits(4.0)),
    "logits 8": ("Q and K times 2.8, so that scores have a deviation of 8", _logits(8.0)),
    "sink 0.98": ("with a first key that takes 0.98 of the weight, and whose value is 0", _sink(0.98)),
    "sink 0.999": ("the same with 0.999 of the weight", _sink(0.999)),
    "loud key": ("with the first key times 100", _loud_key(100.0)),
    "loud key 300": ("with the first key times 300", _loud_key(300.0)),
    "tiny": ("K and V times 1e-20, Q times 1e20", lambda x, name, draw: x * (1 / _TINY if name == "q" else _TINY)),
}
#: Kind -> its difference from N(0, 1).
INPUTS = {kind: text for kind, (text, _) in _KINDS.items()}


def make_inputs(dims: Mapping[str, int], seed: int, kind: str, device: str) -> Inputs:
    """Draw q, k and v from N(0, 1) on the device and change them. kind: a key of INPUTS.

    A torch.Generator of the device with the seed draws q, then k, then v. Raises UsageError for a mask aligned at the
    last key.
    """
    config, sizes = read_dims(dims, VALUE_FORMAT)
    if config.mask == Mask.LOWER_RIGHT:
        raise UsageError(f"backends are compared with CAUSAL 0 or 1; got {dict(dims)}")
    draw = torch.Generator(device).manual_seed(seed)
    values, codes, scales = {}, {}, {}
    for name in "qkv":
        heads, length = (sizes.heads, sizes.q_len) if name == "q" else (sizes.kv_heads, sizes.kv_len)
        shape = (sizes.batch * heads, length, config.head_dim)
        values[name] = _KINDS[kind][1](torch.randn(shape, generator=draw, device=device), name, draw)
        codes[name], scales[name] = quantize(values[name], "e4m3")
    return Inputs(config, sizes, values, codes, scales)


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
