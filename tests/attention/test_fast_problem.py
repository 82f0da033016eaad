"""The fast kernels' problem: masks, grouped heads, lengths that differ, and V as the kernel reads it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from greenfast.attention import fast_problem, sdpa_problem
from greenfast.attention.fast_problem import KEY_ORDER, mask_of, sizes_of, transposed_values
from greenfast.numerics.formats import dequantize
from greenfast.spec.errors import UsageError

PLAIN = {"B": 1, "H": 2, "S": 40, "D": 64}


def test_without_extras_it_is_the_ladders_problem() -> None:
    mine, theirs = fast_problem.make_case(PLAIN, 3, "e4m3"), sdpa_problem.make_case(PLAIN, 3, "e4m3")
    assert all((mine.inputs[name] == array).all() for name, array in theirs.inputs.items())
    mine_too, theirs_too = fast_problem.references(PLAIN, 3, "e4m3"), sdpa_problem.references(PLAIN, 3, "e4m3")
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
    case, found = fast_problem.make_case(dims, 1, "e4m3"), fast_problem.references(dims, 1, "e4m3")
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
    found = fast_problem.references(PLAIN, 0, "e4m3")
    assert (found.bounds["e4m3"] > 8 * found.bound).all()
    with pytest.raises(UsageError, match=r"fp4.*e4m3"):
        found.bound_of("fp4")


def test_least_work_counts_what_the_mask_leaves() -> None:
    least = fast_problem.least_work({"B": 2, "H": 3, "S": 4, "D": 64, "CAUSAL": 1})
    assert least["exponentials"] == 2 * 3 * (1 + 2 + 3 + 4)
    assert least["matrix_flops"] == 4 * 64 * least["exponentials"]


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"B": 1, "H": 2, "S": 4}, "needs B, H, S, D"),
        ({**PLAIN, "X": 1}, "may have HK, KV, CAUSAL"),
        ({**PLAIN, "HK": 3}, "H=2 query heads cannot share HK=3"),
        ({**PLAIN, "CAUSAL": 3}, "CAUSAL=3"),
    ],
)
def test_dimensions_that_do_not_fit(dims: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        sizes_of(dims)


def test_no_mask_is_no_tensor() -> None:
    assert mask_of(sizes_of(PLAIN)) is None
