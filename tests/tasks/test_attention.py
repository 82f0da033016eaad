"""The attention kernels' problem: masks, grouped heads, different lengths, and V as the kernel reads it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from greenfast.kernels.attention.config import KEY_ORDER, Mask, Sizes, read_dims
from greenfast.numerics.formats import dequantize, transposed_values
from greenfast.spec.errors import UsageError
from tasks.fp8_attention import problem as attention_problem
from tasks.fp8_attention.problem import mask_of
from tasks.fp8_sdpa_stage_c_wmma import problem as sdpa_problem

PLAIN = {"B": 1, "H": 2, "S": 40, "D": 64}


def test_without_options_it_equals_the_ladders_problem() -> None:
    mine, theirs = attention_problem.make_case(PLAIN, 3, "e4m3"), sdpa_problem.make_case(PLAIN, 3, "e4m3")
    assert all((mine.inputs[name] == array).all() for name, array in theirs.inputs.items())
    mine_too, theirs_too = attention_problem.references(PLAIN, 3, "e4m3"), sdpa_problem.references(PLAIN, 3, "e4m3")
    assert (mine_too.exact == theirs_too.exact).all()
    assert (mine_too.bound == theirs_too.bound).all()


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 40])
def test_transposed_values(keys: int) -> None:
    v = np.random.default_rng(0).integers(1, 255, (3, keys, 64), np.uint8)
    t = transposed_values(torch.from_numpy(v)).numpy()
    assert t.shape == (3, 64, -(-keys // 16) * 16)
    for position in range(t.shape[2]):
        key = position // 16 * 16 + KEY_ORDER[position % 16]
        assert (t[:, :, position] == (v[:, key] if key < keys else 0)).all()


@pytest.mark.parametrize("causal", [0, 1, 2])
def test_references_attend_to_what_the_mask_leaves(causal: int) -> None:
    dims = {"B": 2, "H": 4, "HK": 2, "S": 12, "KV": 7, "D": 64, "CAUSAL": causal}
    case, found = attention_problem.make_case(dims, 1, "e4m3"), attention_problem.references(dims, 1, "e4m3")
    arrays = {name: torch.from_numpy(a) for name, a in case.inputs.items()}
    q, k, v = (dequantize(arrays[name], arrays[f"{name}_scale"], "e4m3").numpy() for name in "qkv")
    for head in range(8):
        batch, kv_head = head // 4, head % 4 // 2 + head // 4 * 2
        assert kv_head // 2 == batch
        for row in range(12):
            last = {0: 6, 1: min(row, 6), 2: row + 7 - 12}[causal]
            scores = k[kv_head, : max(0, last + 1)] @ q[head, row] / math.sqrt(64)
            weights = np.exp(scores - scores.max(initial=-np.inf)) if len(scores) else np.zeros(0)
            expected = weights / weights.sum() @ v[kv_head, : len(weights)] if len(weights) else np.zeros(64)
            assert np.abs(found.exact[head, row] - expected).max() <= 1e-12
    if causal == 2:
        assert (found.exact[:, :5] == 0).all(), "rows 0 to 4 attend to no key"


def test_the_bound_of_e4m3_weights_is_the_wider_one() -> None:
    found = attention_problem.references(PLAIN, 0, "e4m3")
    assert (found.bounds["e4m3"] > 8 * found.bound).all()
    with pytest.raises(UsageError, match=r"fp4.*e4m3"):
        found.get_bound("fp4")


def test_least_work_counts_what_the_mask_leaves() -> None:
    least = attention_problem.least_work({"B": 2, "H": 3, "S": 4, "D": 64, "CAUSAL": 1})
    assert least["exponentials"] == 2 * 3 * (1 + 2 + 3 + 4)
    assert least["matrix_flops"] == 4 * 64 * least["exponentials"]


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"B": 1, "H": 2, "S": 4}, "needs B, H, S, D"),
        ({**PLAIN, "X": 1}, "may have HK, KV, BF16, CAUSAL, LSE, QBLOCK, KBLOCK, VBLOCK, VCHANNEL"),
        ({**PLAIN, "HK": 3}, "H=2 query heads cannot share HK=3"),
        ({**PLAIN, "CAUSAL": 3}, "CAUSAL=3"),
        ({**PLAIN, "KBLOCK": 64}, "KBLOCK=64: allowed are 0, 128"),
        ({**PLAIN, "VBLOCK": 128, "VCHANNEL": 1}, "VBLOCK and VCHANNEL: "),
        ({**PLAIN, "LSE": 2}, "LSE=2: allowed are 0, 1"),
        ({**PLAIN, "QBLOCK": 16}, "QBLOCK, VBLOCK. go with scales of blocks of K .KBLOCK"),
    ],
)
def test_dimensions_that_do_not_fit(dims: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_dims(dims, "e4m3")


def test_without_a_mask_there_is_no_tensor() -> None:
    assert mask_of(Mask.NONE, Sizes(1, 1, 1, 4, 4)) is None


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_scales_of_blocks_and_channels(fmt: str) -> None:
    dims = {"B": 1, "H": 2, "S": 5, "KV": 300, "D": 64, "KBLOCK": 128, "VCHANNEL": 1}
    case = attention_problem.make_case(dims, 0, fmt)
    assert case.inputs["k_scale"].shape == (2, 3), "of 128, 128 and 44 keys"
    assert case.inputs["v_scale"].shape == (2, 64)
    k, v = (torch.from_numpy(case.inputs[name]) for name in "kv")
    top = {"e4m3": 0x7E, "int8": 127}[fmt]
    for block in range(3):
        magnitude = k[:, 128 * block : 128 * (block + 1)].view(torch.int8).to(torch.int16)
        magnitude = magnitude.abs() if fmt == "int8" else magnitude & 0x7F
        assert (magnitude.flatten(1).amax(1) == top).all(), "each block uses the whole range"
    assert ((v & 0x7F).amax(1) == 0x7E).all(), "each channel of V, which is E4M3 in both, uses the whole range"


def test_the_error_of_finer_scales_and_int8_is_smaller() -> None:
    base = {"B": 1, "H": 2, "S": 256, "D": 64}

    def error(fmt: str, extras: dict[str, int]) -> float:
        found = attention_problem.references({**base, **extras}, 0, fmt)
        return float(np.linalg.norm(found.exact - found.full) / np.linalg.norm(found.full))

    assert error("int8", {}) < 0.8 * error("e4m3", {})
    assert error("int8", {"KBLOCK": 128}) < error("int8", {})


def test_bfloat16_is_decoded() -> None:
    dims = {**PLAIN, "BF16": 1}
    assert attention_problem.make_case(dims, 0, "e4m3").outputs["out"].dtype == "uint16"
    wanted = torch.randn(2, 40, 64).to(torch.bfloat16)
    found = attention_problem.decode({"out": wanted.view(torch.int16).numpy().view(np.uint16)}, "e4m3")
    assert (found == wanted.double().numpy()).all()


def test_log_sum_exp_of_a_row_without_a_key() -> None:
    found = attention_problem.log_sum_exp({"B": 1, "H": 1, "S": 3, "KV": 1, "D": 64, "CAUSAL": 2}, 0, "e4m3")
    assert np.isinf(found[0, :2]).all()
    assert np.isfinite(found[0, 2])
