"""Attention on quantized inputs: the kernels' numbers, masks, lengths, log-sum-exp, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import read_dims
from greenfast.ops.quantized import Precision
from greenfast.ops.sdpa import attention, quantize, sdpa
from tasks.fp8_attention import problem as attention_problem
from tests.emulator.kernels import run_source

CASES = (
    {"B": 1, "H": 2, "S": 70, "D": 64},
    {"B": 2, "H": 4, "HK": 2, "S": 33, "KV": 200, "D": 128, "CAUSAL": 2},
    {"B": 1, "H": 4, "HK": 1, "S": 90, "KV": 40, "D": 64, "CAUSAL": 2},
    {"B": 1, "H": 2, "S": 40, "KV": 70, "D": 256, "CAUSAL": 1},
)


#: The default scales of ``quantize``.
BLOCKS = {"QBLOCK": 16, "KBLOCK": 128, "VBLOCK": 128}


def inputs(dims: dict[str, int], seed: int = 0) -> list[Tensor]:
    config, sizes = read_dims(dims, "e4m3")
    return [x.view(sizes.batch, -1, *x.shape[1:]) for x in attention_problem._tensors(config, sizes, seed)]


def options(dims: dict[str, int]) -> dict[str, Any]:
    causal = dims.get("CAUSAL", 0)
    return {"is_causal": causal > 0, "causal_alignment": "lower_right" if causal == 2 else "upper_left"}


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("dims", CASES, ids=str)
def test_within_the_kernels_error(dims: dict[str, int], precision: Precision) -> None:
    fmt = "int8" if precision == "int8" else "e4m3"
    references = attention_problem.references({**dims, **BLOCKS}, 0, fmt)
    quantized = quantize(*inputs(dims), precision=precision, subtract_key_mean=False, rotate=False)
    result = attention(quantized, **options(dims))
    assert isinstance(result, Tensor)
    assert result.dtype == torch.float16
    out = result.flatten(0, 1).double().numpy()
    assert worst_bound_ratio(out, references.exact, references.bounds["e4m3"]) <= 1
    assert error_stats(out, references.exact, 1).relative_error <= 0.03


#: One is enough here: tests/emulator/test_hopper_attention.py compares the kernel with the same float64 reference.
@pytest.mark.parametrize(
    "dims", [CASES[2], *(pytest.param(d, marks=pytest.mark.slow) for d in (*CASES[:2], CASES[3]))], ids=str
)
def test_agrees_with_the_hopper_kernel(dims: dict[str, int]) -> None:
    """On the same codes the two differ only by how each rounds the weights."""
    whole = {**dims, **BLOCKS}
    case = attention_problem.make_case(whole, 0, "e4m3")
    result = run_source(hopper.kernel(*read_dims(whole, "e4m3")), hopper.launch(*read_dims(whole, "e4m3")), case)
    theirs = attention_problem.decode(result.outputs, "e4m3")
    mine = attention(quantize(*inputs(dims), subtract_key_mean=False, rotate=False), **options(dims))
    assert isinstance(mine, Tensor)
    assert error_stats(mine.flatten(0, 1).double().numpy(), theirs, 1).relative_error <= 0.03


@pytest.mark.parametrize("bias", [0, 3, 10, 30])
@pytest.mark.parametrize("rotate", [False, True])
def test_log_sum_exp(bias: int, rotate: bool) -> None:
    """Its error is within the codes' error, whatever mean the keys have."""
    dims = {"B": 1, "H": 4, "HK": 2, "S": 50, "KV": 60, "D": 64, "CAUSAL": 2}
    q, k, v = inputs(dims)
    k = k + bias * torch.randn(64, generator=torch.Generator().manual_seed(1)).half()
    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2) / 8
    scores = scores.masked_fill(torch.arange(60) > torch.arange(50).unsqueeze(1) + 10, -math.inf)
    wanted = torch.logsumexp(scores, -1)
    codes = quantize(q, k, v, precision="int8", rotate=rotate, log_sum_exp=True)
    assert (attention(codes, return_lse=True, **options(dims))[1] - wanted).abs().max() < 0.03
    assert (
        sdpa(q, k, v, precision="int8", enable_gqa=True, return_lse=True, **options(dims))[1] - wanted
    ).abs().max() < 0.03
    if not bias:
        codes = quantize(q, k, v, precision="int8", rotate=rotate, subtract_key_mean=False)
        assert (attention(codes, return_lse=True, **options(dims))[1] - wanted).abs().max() < 0.03


def test_codes_that_cannot_give_the_log_sum_exp() -> None:
    codes = quantize(*inputs({"B": 1, "H": 2, "S": 6, "KV": 2, "D": 64}))
    with pytest.raises(ValueError, match=r"return_lse: .*log_sum_exp=True, or with subtract_key_mean=False"):
        attention(codes, return_lse=True)


def test_rows_without_a_key() -> None:
    q, k, v = inputs({"B": 1, "H": 2, "S": 6, "KV": 2, "D": 64})
    out, lse = attention(
        quantize(q, k, v, log_sum_exp=True), is_causal=True, causal_alignment="lower_right", return_lse=True
    )
    assert (out[:, :, :4] == 0).all()
    assert torch.isneginf(lse[:, :, :4]).all()
    assert torch.isfinite(lse[:, :, 4:]).all()
    empty = attention(quantize(q, k[:, :, :0], v[:, :, :0]))
    assert isinstance(empty, Tensor)
    assert (empty == 0).all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (1, 2, 0, 64)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, dtype=torch.bfloat16)
    result = attention(quantize(q, q, q))
    assert isinstance(result, Tensor)
    assert result.shape == shape
    assert result.dtype == torch.bfloat16


def test_row_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = quantize(*inputs({"B": 1, "H": 2, "S": 70, "D": 64}))
    whole = attention(quantized, is_causal=True)
    monkeypatch.setattr("greenfast.ops.reference._ROWS", 16)
    assert isinstance(whole, Tensor)
    assert torch.allclose(whole, attention(quantized, is_causal=True), atol=2e-3)


def test_a_padded_head_dim_keeps_its_scale() -> None:
    q, k, v = (x[..., :40] for x in inputs({"B": 1, "H": 2, "S": 70, "D": 64}))
    result = attention(quantize(q, k, v))
    assert isinstance(result, Tensor)
    assert result.shape == q.shape
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert float((result.float() - wanted).norm() / wanted.norm()) < 0.08


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_scale(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale: .*positive, finite"):
        attention(quantize(*inputs({"B": 1, "H": 1, "S": 4, "D": 64})), scale=scale)


def test_an_unknown_alignment() -> None:
    with pytest.raises(ValueError, match="'middle'; allowed are 'upper_left', 'lower_right'"):
        attention(
            quantize(*inputs({"B": 1, "H": 1, "S": 4, "D": 64})),
            is_causal=True,
            causal_alignment="middle",  # type: ignore[call-overload]
        )


def test_finer_choices_err_less() -> None:
    q, k, v = inputs({"B": 1, "H": 2, "S": 256, "D": 64})
    v = v * torch.logspace(-2, 2, 64).half()
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())

    def error(**choices: Any) -> float:
        result = attention(quantize(q, k, v, **choices))
        assert isinstance(result, Tensor)
        relative = (result.float() - wanted).flatten(0, 2).norm(dim=0) / wanted.flatten(0, 2).norm(dim=0)
        return float(relative.square().mean().sqrt())

    assert error(precision="int8") < error()
    assert error(value_scales="channel") < error()
