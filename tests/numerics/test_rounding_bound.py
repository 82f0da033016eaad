"""The gate on the kernel error: it passes every correct kernel and no wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.task import load_task
from greenfast.numerics.attention import (
    E4M3_SUM,
    E4M3_WEIGHTS,
    attention,
    attention_rounding_bound,
    attention_with_bounds,
)
from greenfast.numerics.formats import quantize
from greenfast.numerics.inputs import standard_normal, varied
from tests.numerics.simulated_kernel import FAULTS, Fault, QuantizedInputs, hopper_sums, run_kernel

CONFIG = load_task(Path(__file__).parents[2] / "tasks" / "fp8_sdpa_stage_c_wmma").config


def kernel_error(inputs: QuantizedInputs, out: Tensor) -> tuple[float, float]:
    """The worst element's error over its bound, and the relative error."""
    exact = attention(*inputs.exact, inputs.softmax_scale).numpy()
    bound = attention_rounding_bound(*inputs.exact, inputs.softmax_scale).numpy()
    actual = out.double().numpy()
    return worst_bound_ratio(actual, exact, bound), error_stats(actual, exact, 1.0).relative_error


def passes(ratio: float, relative_error: float, fmt: str) -> bool:
    gate = CONFIG.gates(fmt).kernel_error
    return ratio <= gate.bound_factor and relative_error <= gate.relative_error


def with_outliers(x: Tensor) -> Tensor:
    """x + N(0, 100) * Bernoulli(0.001)."""
    generator = torch.Generator().manual_seed(x.numel())
    hit = torch.rand(x.shape, generator=generator) < 0.001
    return x + 10 * torch.randn(x.shape, generator=generator) * hit


Inputs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
INPUTS: dict[str, Inputs] = {
    "random": lambda q, k, v: (q, k, v),
    "outliers": lambda q, k, v: (with_outliers(q), with_outliers(k), with_outliers(v)),
    "constant V": lambda q, k, v: (q, k, torch.full_like(v, 0.7)),
    "V far from zero": lambda q, k, v: (q, k, v + 100),
    "tiny V": lambda q, k, v: (q, k, 1e-4 * v),
    "peaky": lambda q, k, v: (8 * q, k, v),
    "very peaky": lambda q, k, v: (30 * q, 30 * k, v),
    "flat": lambda q, k, v: (0 * q, k, v),
    # each tile's maximum is above the last one's, so that every tile rescales
    "growing scores": lambda q, k, v: (q, k * torch.linspace(0, 8, k.shape[1]).view(1, -1, 1), v),
}


def draw(kind: str, seq_len: int, fmt: str, head_dim: int = 64, heads: int = 2, seed: int = 0) -> QuantizedInputs:
    q, k, v = (x.float() for x in standard_normal((heads, seq_len, head_dim), 3, seed))
    return QuantizedInputs(*INPUTS[kind](q, k, v), fmt)


@pytest.mark.parametrize("fmt", sorted(CONFIG.formats))
@pytest.mark.parametrize("kind", INPUTS)
def test_a_right_kernel_passes(kind: str, fmt: str) -> None:
    for seq_len, head_dim in [(1, 64), (31, 64), (33, 64), (100, 128), (320, 64)]:
        inputs = draw(kind, seq_len, fmt, head_dim)
        for truncate in (False, True):
            ratio, relative_error = kernel_error(inputs, run_kernel(inputs, truncate=truncate))
            assert passes(ratio, relative_error, fmt), (seq_len, head_dim, truncate, ratio, relative_error)


@pytest.mark.parametrize("fmt", sorted(CONFIG.formats))
@pytest.mark.parametrize("kind", ["random", "outliers", "peaky"])
def test_the_bound_is_not_vacuous(kind: str, fmt: str) -> None:
    inputs = draw(kind, 320, fmt)
    assert kernel_error(inputs, run_kernel(inputs))[0] > 0.05


@pytest.mark.parametrize("kind", ["random", "outliers"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_caught(fault: Fault, kind: str) -> None:
    for fmt in CONFIG.formats:
        inputs = draw(kind, 100, fmt, heads=4, seed=1)
        assert passes(*kernel_error(inputs, run_kernel(inputs)), fmt)
        ratio, relative_error = kernel_error(inputs, run_kernel(inputs, fault=fault))
        assert not passes(ratio, relative_error, fmt), (fmt, ratio, relative_error)


def _e4m3_terms(target: float) -> list[float]:
    """E4M3 numbers a, b, c, d with a + b + (c + d) / 64 nearly equal to ``target``: E4M3 alone has steps of 2^-9."""
    found: list[float] = []
    for weight in (1.0, 1.0, 1 / 64, 1 / 64):
        found.append(float(torch.tensor(target / weight).to(torch.float8_e4m3fn)))
        target -= found[-1] * weight
    return found


def weighted_keys(*groups: tuple[int, float, float]) -> QuantizedInputs:
    """One key with weight 1 and V = 0, and for each group (count, weight, V) that many more keys."""
    seq_len = 1 + sum(count for count, _, _ in groups)
    q, k, v = torch.zeros(3, 1, seq_len, 64)
    q[..., 0] = 448  # makes the scale of Q 1; no key looks at it
    k[:, 0, -1] = 448  # makes the scale of K 1; Q is zero there
    first = 1
    for i, (count, weight, value) in enumerate(groups):
        columns, keys = slice(1 + 4 * i, 5 + 4 * i), slice(first, first + count)
        q[..., columns] = torch.tensor(_e4m3_terms(-8 * math.log(weight)))
        k[:, keys, columns] = torch.tensor([-1, -1, -1 / 64, -1 / 64])
        v[:, keys] = value
        first += count
    return QuantizedInputs(q, k, v)


@pytest.mark.parametrize("count", [32, 200])
def test_the_bound_is_nearly_reached_where_all_roundings_conspire(count: int) -> None:
    """Weights that a half cannot represent: with V = 1 all round down, with V = -1 up, by half a step each."""
    down, up = 0.5 * (1 + 2.0**-11) * (1 - 2.0**-16), 0.25 * (1 + 2.0**-11) * (1 + 2.0**-16)
    inputs = weighted_keys((count, down, 1.0), (2 * count, up, -1.0))
    ratio, _ = kernel_error(inputs, run_kernel(inputs))
    assert 0.8 < ratio <= 1.0


def test_the_bound_is_nearly_reached_where_small_weights_are_lost() -> None:
    """Weights just below half of the smallest half become zero, however many there are."""
    inputs = weighted_keys((300, 2.0**-25 * (1 - 2.0**-8), 448.0))
    out = run_kernel(inputs)
    assert not out.any()
    assert 0.8 < kernel_error(inputs, out)[0] <= 1.0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_steep_scores_of_hopper_are_within_what_is_allowed_for(head_dim: int) -> None:
    """Rows 16 times as large: scores of a thousand, of which the tensor cores cut off tenths."""
    codes = [quantize(x, "e4m3") for x in varied(standard_normal((2, 64, head_dim), 3, 5), "scaled", 5)]
    (q, q_scale), (k, k_scale), (v, v_scale) = (
        (code.view(torch.float8_e4m3fn).double(), scale.double().view(-1, 1, 1)) for code, scale in codes
    )
    sums, exact = hopper_sums(q, k), q @ k.transpose(1, 2)
    off = ((sums - exact).abs() / (q.abs() @ k.abs().transpose(1, 2))).max()
    assert E4M3_SUM / 2 < off < E4M3_SUM

    scale = 1 / math.sqrt(head_dim)
    right, (bound,) = attention_with_bounds(q * q_scale, k * k_scale, v * v_scale, scale, None, (E4M3_WEIGHTS,))
    for products, passes_ in ((sums, True), (exact.roll(1, 2), False)):
        scores = products * (q_scale * k_scale * scale)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        rounded = (weights * 256).to(torch.float8_e4m3fn).double()
        out = (rounded @ (v * v_scale) / rounded.sum(-1, keepdim=True)).half().double()
        assert bool(((out - right).abs() <= bound).all()) is passes_
