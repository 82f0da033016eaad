"""Quantized inputs: the codes are in the kernels' form, options change no score, and errors name the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.kernels.attention.config import read_dims
from greenfast.ops.reference import build_rotation, dequantize_keys, dequantize_queries
from greenfast.ops.sdpa import attention, quantize
from tasks.fp8_attention import problem as attention_problem


def tensors(
    batch: int = 1, heads: int = 4, kv_heads: int = 2, length: int = 40, keys: int = 300, head_dim: int = 64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, length, head_dim), *[(batch, kv_heads, keys, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
@pytest.mark.parametrize(
    ("values", "extras"),
    [
        ("head", {}),
        ("channel", {"QBLOCK": 16, "KBLOCK": 128, "VCHANNEL": 1}),
        ("block", {"QBLOCK": 16, "KBLOCK": 128, "VBLOCK": 128}),
    ],
)
def test_codes_equal_the_problems(values: Any, extras: dict[str, int], fmt: str) -> None:
    dims = {"B": 2, "H": 4, "HK": 2, "S": 40, "KV": 300, "D": 64, **extras}
    case = attention_problem.make_case(dims, 3, fmt)
    q, k, v = attention_problem._tensors(*read_dims(dims, fmt), 3)
    result = quantize(
        *(x.view(2, -1, *x.shape[1:]) for x in (q, k, v)),
        precision="int8" if fmt == "int8" else "fp8",
        scales="block" if extras else "head",
        value_scales=values,
        subtract_key_mean=False,
        rotate=False,
    )
    for name, tensor in (
        ("q", result.query), ("k", result.key), ("v_t", result.value),
        ("q_scale", result.query_scale), ("k_scale", result.key_scale), ("v_scale", result.value_scale),
    ):  # fmt: skip
        wanted = case.inputs[name]
        assert np.array_equal(tensor.flatten(0, 1).numpy().reshape(wanted.shape), wanted), name


def test_it_is_public_and_loaded_on_demand() -> None:
    assert greenfast.quantize is quantize
    assert {"quantize", "QuantizedQKV"} <= set(dir(greenfast))
    with pytest.raises(AttributeError, match="nothing"):
        greenfast.nothing  # noqa: B018


def test_strides_do_not_matter() -> None:
    q, k, v = tensors()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    assert torch.equal(quantize(q, k, v).value, quantize(*strided).value)


def test_a_head_dim_is_padded() -> None:
    q, k, v = tensors(head_dim=40)
    result = quantize(q, k, v, rotate=False)
    assert result.query.shape[-1] == 64
    assert result.head_dim == 40
    assert (result.query[..., 40:] == 0).all()
    assert (result.value[:, :, 40:] == 0).all()


@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_rotation_is_orthogonal(size: int) -> None:
    matrix = build_rotation(size)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-6)


@pytest.mark.parametrize(("size", "largest"), [(64, 1.0), (128, 2**0.5), (256, 1.0)])
def test_the_rotation_makes_no_spike_of_equal_channels(size: int, largest: float) -> None:
    alternating = torch.tensor([1.0, -1.0]).repeat(size // 2)
    for x in (torch.ones(size), alternating, torch.ones(size // 2).repeat_interleave(2).cumsum(0).sign()):
        assert (x @ build_rotation(size)).abs().max() <= largest + 1e-5


@pytest.mark.parametrize("constant", [3, 10])
def test_a_constant_over_channels_costs_no_precision(constant: int) -> None:
    q, k, v = tensors(heads=8, kv_heads=8, length=512, keys=512)
    q = q + constant
    exact = torch.softmax(q.double() @ k.double().transpose(-1, -2) / 8, -1) @ v.double()

    def error(rotate: bool) -> float:
        return float((attention(quantize(q, k, v, rotate=rotate)) - exact).norm() / exact.norm())

    assert error(True) < 1.25 * error(False), "1.04 to 1.1 times; 2.3 times where one channel gets all"


def test_rotation_spreads_outliers_of_int8() -> None:
    q, k, v = tensors(length=256, keys=256, head_dim=128)
    spikes = torch.rand(k.shape, generator=torch.Generator().manual_seed(1)) < 0.001
    k = k + 30 * spikes.half()
    exact = q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2)

    def error(rotate: bool) -> float:
        result = quantize(q, k, v, precision="int8", subtract_key_mean=False, rotate=rotate)
        scores = dequantize_queries(result) @ dequantize_keys(result).repeat_interleave(2, 1).transpose(-1, -2)
        return float((scores - exact).norm() / exact.norm())

    assert error(True) < 0.5 * error(False)


def test_fine_scales_are_of_rows_and_of_the_keys_that_a_thread_holds() -> None:
    q, k, v = (torch.randn(1, 1, 300, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    q = q * torch.where(torch.arange(300) % 2 == 0, 16.0, 1 / 16).bfloat16().view(1, 1, -1, 1)
    k = k * torch.where(torch.arange(300) % 8 // 2 == 1, 16.0, 1 / 16).bfloat16().view(1, 1, -1, 1)
    worst = {}
    for precision in ("int8", "int8_fine"):
        codes = quantize(q, k, v, precision=precision, rotate=False, subtract_key_mean=False)
        for name, result, x in (("q", dequantize_queries(codes), q), ("k", dequantize_keys(codes), k)):
            worst[name, precision] = ((result - x.float()).norm(dim=3) / x.float().norm(dim=3)).max().item()
    assert worst["q", "int8_fine"] < 0.012
    assert worst["k", "int8_fine"] < 0.02
    assert worst["q", "int8"] > 0.5 < worst["k", "int8"], "which have one scale for large and small ones"
    assert codes.query_scale.shape == (1, 1, 300)
    assert codes.key_scale.shape == (1, 1, 3, 4)
    with pytest.raises(ValueError, match="'int8_fine' has scales of its own"):
        quantize(q, k, v, precision="int8_fine", scales="head")


@pytest.mark.parametrize(("precision", "most"), [("fp8", 0.15), ("int8_fine", 0.07)])
def test_a_sink_leaves_other_blocks_of_keys_their_precision(precision: Any, most: float) -> None:
    """The first key takes 0.999 of the weight or more; values of its block are 0. Its own score errs, more in fp8."""
    q, k, v = (torch.randn(1, 1, 1024, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    q[..., 0], k[..., 0], v[:, :, :128] = 8.0, 0.0, 0.0
    k[:, :, 0] = 0.0
    k[:, :, 0, 0] = 17.0
    scores = q.double() @ k.double().transpose(2, 3) / 8
    assert scores.softmax(-1)[..., 0].min() > 0.999
    wanted = scores.softmax(-1) @ v.double()
    result = greenfast.sdpa(q, k, v, precision=precision).double()
    assert (result - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("bad", [1e3, -6e4, torch.inf, torch.nan])
def test_no_single_key_dominates_the_mean(bad: float) -> None:
    q, k, v = tensors(length=1024, keys=1024)
    for position in (0, 32, 64, 1023):
        hurt = k.clone()
        hurt[:, :, position] = hurt[:, :, position] * bad if bad == bad else bad
        result, plain = (quantize(q, x, v, rotate=False).key_mean for x in (hurt, k))
        assert result is not None
        assert plain is not None
        assert (result - plain).abs().max() < 1


@pytest.mark.parametrize("period", [16, 31, 32, 33, 64, 128])
def test_recurring_keys_do_not_dominate_the_mean(period: int) -> None:
    q, k, v = tensors(length=1024, keys=1024)
    loud = k.clone()
    loud[:, :, ::period] += 100
    result = quantize(q, loud, v, rotate=False).key_mean
    assert result is not None
    assert result.abs().max() < 2


def test_the_mean_of_biased_keys() -> None:
    q, k, v = tensors()
    biased = k + 8 * torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    result = quantize(q, biased, v, rotate=False)
    assert result.key_mean is not None
    assert (result.key_mean - biased.float().mean(2)).abs().max() < 1, "the mean of some keys is near the mean of all"
    whole = dequantize_keys(result) + result.key_mean.unsqueeze(2)
    plain = dequantize_keys(quantize(q, biased, v, subtract_key_mean=False, rotate=False))
    assert (whole - biased).norm() < 0.3 * (plain - biased).norm()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"query": 3}, TypeError, "query: a torch.Tensor is needed, got int"),
        ({"key": torch.zeros(1, 2, 300, 64, dtype=torch.int8)}, TypeError, "key: its dtype is torch.int8; allowed"),
        (
            {"key": torch.zeros(1, 2, 300, 64).bfloat16()},
            TypeError,
            "key: its dtype is torch.bfloat16, query's torch.float16",
        ),
        ({"query": torch.zeros(4, 40, 64).half()}, ValueError, r"query: its shape is \(4, 40, 64\); \(batch, heads"),
        ({"value": torch.zeros(1, 2, 299, 64).half()}, ValueError, "value: its shape is .*299.*, key's "),
        ({"query": torch.zeros(2, 4, 40, 64).half()}, ValueError, "batch and head_dim must agree"),
        ({"query": torch.zeros(1, 3, 40, 64).half()}, ValueError, "key: it has 2 heads, query 3"),
        ({"precision": "fp4"}, ValueError, "precision: 'fp4'; allowed are 'fp8', 'int8'"),
        ({"scales": "token"}, ValueError, "scales: 'token'"),
        ({"value_scales": "token"}, ValueError, "value_scales: 'token'"),
        ({"value_scales": 3}, ValueError, "value_scales: 3; allowed"),
        ({"value_scales": "block", "scales": "head"}, ValueError, "value_scales: 'block' goes with scales='block'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, object], error: type[Exception], says: str) -> None:
    q, k, v = tensors()
    with pytest.raises(error, match=says):
        quantize(**{"query": q, "key": k, "value": v, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [4, 60, 264])
def test_head_dims_that_no_kernel_has(head_dim: int) -> None:
    with pytest.raises(NotImplementedError, match=f"head_dim {head_dim}; .*scaled_dot_product_attention takes any"):
        quantize(*tensors(head_dim=head_dim))


@pytest.mark.parametrize(("blocks", "values", "says"), [(False, "block", "goes with scales"), (True, "row", "'row'")])
def test_the_operator_itself_refuses_scales_that_no_kernel_writes(blocks: bool, values: str, says: str) -> None:
    """Otherwise a GPU's quantizer would write per-block scales into a buffer for per-head scales."""
    with pytest.raises(ValueError, match=says):
        torch.ops.greenfast.quantize(*tensors(), "fp8", blocks, values, True, True)
