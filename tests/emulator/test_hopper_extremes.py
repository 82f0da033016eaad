"""The Hopper attention kernel on the emulator, on inputs that are tiny, huge, one-sided or no numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import read_dims
from greenfast.numerics.attention import attention
from greenfast.spec.problem import Array, Case
from tasks.fp8_attention import problem as attention_problem
from tests.emulator.kernels import run_source

BLOCKS = {"QBLOCK": 16, "KBLOCK": 128, "VBLOCK": 128}


def changed(dims: Mapping[str, int], inputs: Mapping[str, Array] | None = None, fmt: str = "e4m3") -> Case:
    """Return the case of these dimensions with other codes or scales."""
    case = attention_problem.make_case(dims, 0, fmt)
    return dataclasses.replace(case, inputs={**case.inputs, **(inputs or {})})


def run(
    dims: Mapping[str, int], case: Case, fmt: str = "e4m3", scale: float | None = None, multiprocessors: int = 132
) -> dict[str, NDArray[Any]]:
    config, sizes = read_dims(dims, fmt)
    plan = hopper.launch(config, sizes, scale, multiprocessors=multiprocessors)
    outputs = run_source(hopper.kernel(config, sizes, multiprocessors), plan, case).outputs
    # Without the log-sum-exp, which the tests compare in its own unit.
    return {**outputs, "out": attention_problem.decode({"out": outputs["out"]}, fmt)}


def exact(dims: Mapping[str, int], case: Case, fmt: str = "e4m3") -> NDArray[np.float64]:
    """Compute attention on the decoded values of a case."""
    codes = {n: (torch.from_numpy(case.inputs[n]), torch.from_numpy(case.inputs[f"{n}_scale"])) for n in "qkv"}
    config, sizes = read_dims(dims, fmt)
    q, k, v = attention_problem.dequantized(codes, config)
    mask = attention_problem.mask_of(config.mask, sizes)
    result: NDArray[np.float64] = attention(q, k, v, config.head_dim**-0.5, mask, config.softcap).numpy()
    return result


@pytest.mark.parametrize(
    ("name", "head", "first", "end"), [("q_scale", 1, 16, 32), ("k_scale", 0, 128, 256), ("v_scale", 1, 128, 256)]
)
@pytest.mark.parametrize("lse", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_what_is_not_a_number_shows_in_the_rows_that_see_it(
    name: str, head: int, first: int, end: int, lse: int
) -> None:
    """The scale of the second block is NaN, as the quantizer produces it for a NaN input."""
    dims = {"B": 1, "H": 2, "S": 256, "D": 64, "CAUSAL": 1, "LSE": lse, **BLOCKS}
    scales = changed(dims).inputs[name].copy()
    scales[head, 1] = np.nan
    result = run(dims, changed(dims, {name: scales}))
    unknown = np.zeros((2, 256), bool)
    unknown[head, first:end] = True
    assert (np.isnan(result["out"]).any(-1) == unknown).all()
    assert (np.isnan(result["out"]).all(-1) == unknown).all()
    if lse:
        assert (np.isnan(result["lse"]) == (unknown & (name != "v_scale"))).all(), "values are no part of scores"


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_rows_that_see_nothing_of_a_block_do_not_mind_what_it_holds(name: str) -> None:
    """Use rows of one warpgroup: the first attend to no key, the next ones to one block, the last ones to two."""
    dims = {"B": 1, "H": 1, "S": 200, "KV": 160, "D": 128, "CAUSAL": 2, **BLOCKS}
    scales = changed(dims).inputs[name].copy()
    scales[0, 1] = np.nan
    result = run(dims, changed(dims, {name: scales}))["out"][0]
    assert (result[:40] == 0).all()
    assert np.isfinite(result[:168]).all()
    assert np.isnan(result[168:]).all()


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_scale_of_a_head_that_is_not_a_number(name: str) -> None:
    dims = {"B": 1, "H": 2, "S": 70, "D": 64, "LSE": 1}
    result = run(dims, changed(dims, {name: np.array([np.nan, 1], np.float32)}))
    assert np.isnan(result["out"][0]).all()
    assert np.isfinite(result["out"][1]).all()
    assert np.isnan(result["lse"][0]).all() == (name != "v_scale")


@pytest.mark.parametrize(
    ("head_dim", "fmt"),
    [
        (64, "e4m3"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((64, "int8"), (256, "e4m3"), (256, "int8"), (128, "e4m3"), (128, "int8"))
        ),
    ],
)
def test_masked_scores_weigh_nothing_however_small_scores_are(head_dim: int, fmt: str) -> None:
    dims = {"B": 1, "H": 1, "S": 70, "KV": 90, "D": head_dim, "CAUSAL": 1, "KBLOCK": 128}
    plain = changed(dims, fmt=fmt).inputs
    case = changed(dims, {n: plain[n] * np.float32(1e-12) for n in ("q_scale", "k_scale")}, fmt)
    assert np.abs(run(dims, case, fmt)["out"] - exact(dims, case, fmt)).max() < 0.06


@pytest.mark.parametrize("scale", [pytest.param(1e-30, marks=pytest.mark.slow), 1e-50])
def test_a_scale_of_scores_that_float32_lacks_counts_as_nothing(scale: float) -> None:
    dims = {"B": 1, "H": 1, "S": 70, "D": 64, "CAUSAL": 1, **BLOCKS}
    case = changed(dims)
    zero = changed(dims, {"q_scale": case.inputs["q_scale"] * np.float32(1e-30)})
    assert np.abs(run(dims, case, scale=scale)["out"] - exact(dims, zero)).max() < 0.02


@pytest.mark.parametrize("head_dim", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256))])
@pytest.mark.parametrize(
    "units",
    [
        *((1e30, 1e-30, 1e-3), (1e-34, 1e30, 1e-34)),
        *(pytest.param(u, marks=pytest.mark.slow) for u in ((1e-34, 1e-32, 3e-35), (1, 1e-30, 1e-34))),
    ],
    ids=str,
)
def test_blocks_of_values_may_differ_by_any_factor(head_dim: int, units: tuple[float, ...]) -> None:
    """Each row is right compared with its own largest value: a causal row of the first block sees no other."""
    dims = {"B": 1, "H": 1, "S": 384, "D": head_dim, "CAUSAL": 1, "BF16": 1, **BLOCKS}
    case = changed(dims)
    case = changed(dims, {"v_scale": (case.inputs["v_scale"] * np.array(units)).astype(np.float32)})
    result, wanted = run(dims, case, multiprocessors=1)["out"][0], exact(dims, case)[0]
    assert (np.linalg.norm(result - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max() < 0.1


def test_values_of_a_block_that_weighs_nothing_may_be_huge() -> None:
    """All scores of the first block are so far below the others that its weights are 0."""
    dims = {"B": 1, "H": 1, "S": 64, "KV": 256, "D": 64, "BF16": 1, **BLOCKS}
    case = changed(dims)
    q, k = case.inputs["q"] & 0x7F, case.inputs["k"].copy()
    k[:, :128] |= 0x80
    k[:, 128:] &= 0x7F
    units = np.array([[1e20, 1e-3]], np.float32)
    case = changed(dims, {"q": q, "k": k, "q_scale": case.inputs["q_scale"] * 20, "v_scale": units})
    result, wanted = run(dims, case)["out"][0], exact(dims, case)[0]
    assert np.abs(wanted).max() < 1
    assert np.linalg.norm(result - wanted) < 0.04 * np.linalg.norm(wanted)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_scores_that_are_all_negative(head_dim: int) -> None:
    """All rows of one head, of the other every other row with the first tile."""
    dims = {"B": 1, "H": 2, "S": 300, "D": head_dim, **BLOCKS}
    plain = changed(dims).inputs
    q, k = plain["q"].copy(), plain["k"].copy()
    q[0] &= 0x7F
    k[0] |= 0x80
    q[1, ::2] &= 0x7F
    k[1, :128] |= 0x80
    case = changed(dims, {"q": q, "k": k})
    wanted = exact(dims, case)
    assert np.linalg.norm(run(dims, case)["out"] - wanted) < 0.04 * np.linalg.norm(wanted)


SOFTCAPS = {
    "causal, log-sum-exp": {"S": 150, "D": 64, "CAUSAL": 1, "LSE": 1, "SOFTCAP": 30},
    "scales of blocks": {"S": 70, "KV": 300, "D": 128, "SOFTCAP": 50, **BLOCKS},
    "head dim 256": {"S": 70, "D": 256, "SOFTCAP": 50},
}


QUICK_SOFTCAPS = (("causal, log-sum-exp", "e4m3"), ("scales of blocks", "int8"))


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        pytest.param(name, fmt, marks=[] if (name, fmt) in QUICK_SOFTCAPS else [pytest.mark.slow])
        for name in SOFTCAPS
        for fmt in ("e4m3", "int8")
    ],
)
def test_softcap(name: str, fmt: str) -> None:
    """Use scores up to about 100; without a cap the weights would differ."""
    dims = {"B": 1, "H": 1, **SOFTCAPS[name]}
    case = changed(dims, fmt=fmt)
    case = changed(dims, {"q_scale": case.inputs["q_scale"] * 25}, fmt)
    result, wanted = run(dims, case, fmt), exact(dims, case, fmt)
    without = exact({k: n for k, n in dims.items() if k != "SOFTCAP"}, case, fmt)
    norm = np.linalg.norm(wanted)
    assert np.linalg.norm(result["out"] - wanted) < 0.03 * norm
    assert np.linalg.norm(without - wanted) > 0.2 * norm
    if "LSE" in dims:
        assert np.isfinite(result["lse"]).all()
        assert result["lse"].max() < 30 + np.log(dims["S"])


@pytest.mark.parametrize(
    ("head_dim", "fmt"),
    [(64, "e4m3"), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((128, "int8"), (256, "e4m3")))],
)
def test_a_sink_leaves_later_keys_their_precision(head_dim: int, fmt: str) -> None:
    """All rows give the first key 0.9998 of their weight or more, and its value, like all of its block, is 0."""
    dims = {"B": 1, "H": 1, "S": 64, "KV": 512, "D": head_dim, **BLOCKS}
    case = changed(dims, fmt=fmt)
    q, k, v, v_t = (case.inputs[name].copy() for name in ("q", "k", "v", "v_t"))
    largest = 0x7E if fmt == "e4m3" else 127
    q[..., :10], k[..., :10], k[:, 0, :10] = largest, 0, largest
    v[:, :128] = v_t[..., :128] = 0
    q_scale = case.inputs["q_scale"] * np.float32((head_dim / 64) ** 0.5)
    case = changed(dims, {"q": q, "k": k, "v": v, "v_t": v_t, "q_scale": q_scale}, fmt)
    wanted = exact(dims, case, fmt)
    assert np.linalg.norm(run(dims, case, fmt)["out"] - wanted) < 0.04 * np.linalg.norm(wanted)


@pytest.mark.parametrize("times", [pytest.param(30, marks=pytest.mark.slow), 1e5])
def test_scores_of_int8_may_be_steep(times: float) -> None:
    """Scale up to one unit of a score being a power of e^12; scores have thousands of units."""
    dims = {"B": 1, "H": 2, "S": 70, "KV": 300, "D": 64, **BLOCKS}
    case = changed(dims, fmt="int8")
    case = changed(dims, {"q_scale": case.inputs["q_scale"] * np.float32(times)}, "int8")
    result, wanted = run(dims, case, "int8")["out"], exact(dims, case, "int8")
    assert np.linalg.norm(result - wanted) < 0.04 * np.linalg.norm(wanted)
