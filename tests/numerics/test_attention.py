"""The float64 reference: compared with PyTorch's attention, and properties that any attention must have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from greenfast.numerics.attention import (
    E4M3_WEIGHTS,
    HALF_WEIGHTS,
    Rounding,
    attention,
    attention_rounding_bound,
    attention_with_bounds,
)
from greenfast.numerics.inputs import standard_normal

SCALE = 64**-0.5


def draw(seq_len: int = 40, heads: int = 2, head_dim: int = 64, seed: int = 0) -> list[Tensor]:
    return [x.double() for x in standard_normal((heads, seq_len, head_dim), 3, seed)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance)


@pytest.mark.parametrize(("seq_len", "head_dim"), [(1, 64), (2, 64), (32, 64), (77, 64), (130, 128), (512, 64)])
@pytest.mark.parametrize("scale", [None, 1.0, 0.01])
def test_agrees_with_pytorch(seq_len: int, head_dim: int, scale: float | None) -> None:
    q, k, v = draw(seq_len, head_dim=head_dim)
    expected = scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]
    actual = attention(q, k, v, head_dim**-0.5 if scale is None else scale)
    assert actual.dtype == torch.float64
    assert close(actual, expected)


def test_half_inputs_are_widened_first() -> None:
    q, k, v = draw()
    assert close(attention(q.half(), k.half(), v.half(), SCALE), attention(q, k, v, SCALE), 0.0)


def test_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[0.0, 5.0], [2.0, -1.0]]])
    v = torch.tensor([[[1.0, 10.0], [3.0, -10.0]]])
    weight = 1 / (1 + torch.exp(torch.tensor(-1.0, dtype=torch.float64)))  # of the second key: scores 0 and 1
    expected = torch.stack([1 + 2 * weight, 10 - 20 * weight])[None, None]
    assert close(attention(q, k, v, 0.5), expected, 1e-15)


def test_order_of_keys_does_not_matter() -> None:
    q, k, v = draw()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    out = attention(q, k, v, SCALE)
    assert close(attention(q, k[:, order], v[:, order], SCALE), out)
    assert not close(attention(q, k[:, order], v, SCALE), out, 0.1)


def test_order_of_queries_is_the_order_of_the_output() -> None:
    q, k, v = draw()
    assert close(attention(q.flip(1), k, v, SCALE), attention(q, k, v, SCALE).flip(1))


def test_a_shift_of_all_keys_does_not_matter() -> None:
    q, k, v = draw()
    shift = torch.linspace(-3, 3, 64, dtype=torch.float64)
    assert close(attention(q, k + shift, v, SCALE), attention(q, k, v, SCALE))


def test_output_is_linear_in_v_and_within_its_range() -> None:
    q, k, v = draw()
    out = attention(q, k, v, SCALE)
    assert close(attention(q, k, 3 * v - 1, SCALE), 3 * out - 1)
    assert bool((out <= v.amax(dim=1, keepdim=True)).all())
    assert bool((out >= v.amin(dim=1, keepdim=True)).all())


def test_limits_of_the_softmax() -> None:
    q, k, v = draw()
    assert close(attention(0 * q, k, v, SCALE), v.mean(dim=1, keepdim=True).expand_as(v))
    assert close(attention(q[:, :1], k[:, :1], v[:, :1], SCALE), v[:, :1], 0.0)
    best = (q @ k.transpose(1, 2)).argmax(dim=-1)
    one_hot = torch.stack([v[head, best[head]] for head in range(2)])
    assert close(attention(1e6 * q, k, v, SCALE), one_hot)


def test_heads_do_not_see_each_other() -> None:
    q, k, v = draw(heads=3)
    apart = torch.cat([attention(q[h : h + 1], k[h : h + 1], v[h : h + 1], SCALE) for h in range(3)])
    assert close(attention(q, k, v, SCALE), apart, 1e-15)
    apart = torch.cat([attention_rounding_bound(q[h : h + 1], k[h : h + 1], v[h : h + 1], SCALE) for h in range(3)])
    assert close(attention_rounding_bound(q, k, v, SCALE), apart, 1e-15)


def test_bound_scales_with_v() -> None:
    q, k, v = draw()
    bound = attention_rounding_bound(q, k, v, SCALE)
    scaled = attention_rounding_bound(q, k, -16 * v, SCALE)
    assert bound.shape == q.shape
    assert bool((bound > 0).all())
    subnormal = 1.01 * 2.0**-25  # of the output, which does not scale
    assert close((scaled - subnormal) / 16, bound - subnormal, 1e-15)


def test_bound_is_never_less_than_the_rounding_of_the_output() -> None:
    q, k, v = draw(300)
    out = attention(q, k, v, SCALE)
    bound = attention_rounding_bound(q, k, v, SCALE)
    assert bool(((out.half().double() - out).abs() <= bound).all())
    zero = attention_rounding_bound(q, k, 0 * v, SCALE)
    assert 0 < float(zero.max()) < 2.0**-24


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("masked", [False, True])
def test_bounds_are_sums_of_each_weights_error(masked: bool, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition of the docstring, weight by weight; a few heads at once, and a row that attends to no key."""
    monkeypatch.setattr("greenfast.numerics.attention._AT_ONCE", 2 * 20 * 20)
    q, k, v = draw(20, heads=3)
    mask = torch.ones(20, 20).tril(-1).bool() if masked else None
    roundings = (HALF_WEIGHTS, E4M3_WEIGHTS)
    out, bounds = attention_with_bounds(q, k, v, SCALE, mask, roundings, softcap)
    assert close(out, attention(q, k, v, SCALE, mask, softcap), 1e-15)
    for rounding, bound in zip(roundings, bounds, strict=True):
        expected = [
            bound_of_a_row(rounding, q[head, row], k[head, :end], v[head, :end], softcap)
            for head in range(3)
            for row in range(20)
            for end in [row if masked else 20]
        ]
        assert close(bound, torch.stack(expected).view(q.shape), 1e-14)


def bound_of_a_row(rounding: Rounding, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    """One query, and the keys that it attends to among 20, each by itself."""
    step, scores = 2.0**-23, [float(q @ key) * SCALE for key in k]
    scores = [softcap * math.tanh(score / softcap) for score in scores] if softcap else scores
    top = max(scores, default=0.0)
    p = [math.exp(score - top) for score in scores]
    total = sum(p) or 1.0
    out = sum((weight * value for weight, value in zip(p, v, strict=True)), torch.zeros_like(q)) / total
    from_weights, products = torch.zeros_like(q), torch.zeros_like(q)
    for weight, score, key, value in zip(p, scores, k, v, strict=True):
        off = max(64 * step, rounding.sum) * float(q.abs() @ key.abs()) * SCALE
        off += (4 * step + (2.0**-11 if softcap else 0.0)) * (abs(score) + abs(top))
        error = weight * (rounding.weight + 2.0**-21 + math.expm1(off)) + rounding.smallest_weight
        from_weights += error * (value.abs() + out.abs()) / total
        products += weight * value.abs() / total
    from_sums = (step * (20 + 4) + (rounding.sum if rounding.sum > step else 0.0)) * (products + out.abs())
    from_output = (2.0**-11 + 4 * step) * out.abs() + 2.0**-25
    return rounding.second_order * (from_weights + from_sums + from_output)


def test_results_are_where_the_inputs_are() -> None:
    q, k, v = (torch.empty(3, n, 64, dtype=torch.float32, device="meta") for n in (70, 5000, 5000))
    out, bounds = attention_with_bounds(q, k, v, 0.1)
    for x in (attention(q, k, v, 0.1), attention_rounding_bound(q, k, v, 0.1), out, *bounds):
        assert (x.device.type, x.dtype, x.shape) == ("meta", torch.float64, q.shape)
