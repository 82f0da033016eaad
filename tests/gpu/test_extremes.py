"""The operator on tiny, huge, biased, outlying or NaN inputs, compared with PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

PRECISIONS = pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 96, 128, 256])


def inputs(length: int = 300, head_dim: int = 64, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(length + head_dim)
    shape = (1, heads, length, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "qkv")
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    found: Tensor = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    errors: Tensor = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return errors


@PRECISIONS
@HEAD_DIMS
@pytest.mark.parametrize("size", [1e-3, 3e-3, 1e-12])
@pytest.mark.parametrize("causal", [False, True])
def test_small_scores_behind_a_mask_or_a_tail(size: float, causal: bool, head_dim: int, precision: Any) -> None:
    q, k, v = inputs(200, head_dim)
    q, k = q * size, k * size
    assert (
        error(greenfast.sdpa(q, k, v, is_causal=causal, precision=precision), exact(q, k, v, is_causal=causal)) < 0.06
    )


@PRECISIONS
@HEAD_DIMS
@pytest.mark.parametrize(
    ("of_q", "of_k", "of_v"),
    [
        (1e-15, 1e15, 1.0),
        (1e15, 1e-15, 1.0),
        (1e-30, 1e30, 1.0),
        (1.0, 1.0, 1e-13),
        (1.0, 1.0, 1e-35),
        (1.0, 1.0, 2e37),
    ],
)
def test_tiny_and_huge_tensors(of_q: float, of_k: float, of_v: float, head_dim: int, precision: Any) -> None:
    q, k, v = inputs(head_dim=head_dim)
    q, k, v = q * of_q, k * of_k, v * of_v
    for causal in (False, True):
        found = greenfast.sdpa(q, k, v, is_causal=causal, precision=precision)
        assert error(found, exact(q, k, v, is_causal=causal)) < 0.07


@HEAD_DIMS
def test_a_scale_beyond_float32(head_dim: int) -> None:
    q, k, v = inputs(head_dim=head_dim)
    for causal in (False, True):
        found = greenfast.sdpa(q, k, v, is_causal=causal, scale=1e-50)
        assert error(found, exact(q, k, v, is_causal=causal, scale=1e-50)) < 0.06


@PRECISIONS
@HEAD_DIMS
@pytest.mark.parametrize("units", [(1e30, 1e-30, 1e-3), (1e-36, 1e30, 1e-36), (1.0, 1e-30, 1e-36)], ids=str)
def test_blocks_of_values_differ_by_any_factor(units: tuple[float, ...], head_dim: int, precision: Any) -> None:
    q, k, v = inputs(384, head_dim)
    v = v * torch.tensor(units, device="cuda").repeat_interleave(128).view(1, 1, -1, 1).bfloat16()
    found = greenfast.sdpa(q, k, v, is_causal=True, precision=precision)
    assert row_errors(found, exact(q, k, v, is_causal=True)).max() < 0.2


@PRECISIONS
@HEAD_DIMS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_non_finite_input_reaches_only_rows_that_attend_to_its_block(
    name: str, bad: float, head_dim: int, precision: Any
) -> None:
    q, k, v = inputs(1024, head_dim)
    for place in (0, 32, 700, 1023):
        hurt = {"k": k.clone(), "v": v.clone()}
        hurt[name][:, 0, place, 3] = bad
        found, lse = greenfast.sdpa(q, hurt["k"], hurt["v"], is_causal=True, precision=precision, return_lse=True)
        plain = greenfast.sdpa(q, hurt["k"], hurt["v"], is_causal=True, precision=precision)
        first = place // 128 * 128
        for out in (found, plain):
            assert out[:, 0, first:].isnan().all()
            assert out[:, 0, :first].isfinite().all()
            assert out[:, 1].isfinite().all()
        assert lse[:, 0, first:].isnan().all() == (name == "k")
        assert lse[:, 0, :first].isfinite().all()
        wanted = exact(q, k, v, is_causal=True)
        if first:
            assert error(plain[:, 0, :first], wanted[:, 0, :first]) < 0.08


@PRECISIONS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_large_key_affects_only_rows_that_attend_to_it(head_dim: int, precision: Any) -> None:
    q, k, v = inputs(1024, head_dim)
    for place in (512, 992, 1023):
        loud = k.clone()
        loud[:, :, place] *= 1000
        found, wanted = (f(q, loud, v, is_causal=True)[:, :, : place // 128 * 128] for f in (greenfast.sdpa, exact))
        assert error(found, wanted) < 0.07
    torch.cuda.synchronize()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("constant", [3, 10])
def test_a_constant_over_channels_costs_no_precision(constant: int, head_dim: int) -> None:
    q, k, v = inputs(1024, head_dim, heads=32)
    q = q + constant
    wanted = exact(q, k, v)
    plain = greenfast.attention(greenfast.quantize(q, k, v, rotate=False))
    assert error(greenfast.sdpa(q, k, v), wanted) < 1.3 * error(plain, wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_another_configuration_at_the_same_addresses(head_dim: int) -> None:
    q, k, v = inputs(400, head_dim)
    wanted = exact(q, k, v)
    for _ in range(3):
        for scales in ("block", "head"):
            for values in ("head", "channel"):
                codes = greenfast.quantize(q, k, v, scales=scales, value_scales=values)
                out = greenfast.attention(codes)
                assert error(out, wanted) < 0.08
                del codes, out


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_that_are_all_negative(head_dim: int) -> None:
    q, k, v = inputs(1000, head_dim)
    codes = greenfast.quantize(q.abs(), -k.abs(), v, subtract_key_mean=False, rotate=False)
    assert error(greenfast.attention(codes), exact(q.abs(), -k.abs(), v)) < 0.1
