"""Variants of the inputs: what they change, the same for the same seed, in every problem that offers them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.numerics.inputs import VARIANTS, standard_normal, varied
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import NORMAL, build_case, build_references, list_variants
from tests.fakes import shipped
from tests.numerics.simulated_kernel import QuantizedInputs, run_kernel

DIMS = {"B": 1, "H": 2, "S": 33, "D": 64}


def of(variant: str, seed: int = 0) -> torch.Tensor:
    return varied(standard_normal((2, 33, 64), 1, seed), variant, seed)[0].float()


def test_each_variant_changes_what_it_says() -> None:
    normal = of(NORMAL)
    assert (normal == standard_normal((2, 33, 64), 1, 0)[0].float()).all()
    assert of("shifted").mean() == pytest.approx(2, abs=0.1)
    assert of("scaled")[:, ::2].std() == pytest.approx(16, rel=0.1)
    assert of("scaled")[:, 1::2].std() == pytest.approx(1 / 64, rel=0.1)
    different = of("outliers") != normal
    assert different.flatten(1).sum(1).tolist() == [1, 1], "one element of each head"
    assert (of("outliers")[different] == 200).all()
    assert (different != (of("outliers", 1) != of(NORMAL, 1))).any(), "its place is of the seed"
    with pytest.raises(UsageError, match="variant of the inputs 'wild'; allowed: normal, outliers, scaled, shifted"):
        of("wild")


@pytest.mark.parametrize("name", ["fp8_sdpa", "fp8_attention", "fp8_quantize"])
def test_every_problem_has_them_with_references_that_hold(name: str) -> None:
    problem = shipped(name).problem
    assert list_variants(problem) == VARIANTS
    digests = set()
    for variant in (NORMAL, *VARIANTS):
        for fmt in ("e4m3", "int8"):
            digests.add(build_case(problem, DIMS, 5, fmt, variant).digest)
            assert np.abs(build_references(problem, DIMS, 5, fmt, variant).exact).max() > 0
    assert len(digests) == (4 if name == "fp8_quantize" else 8)


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_right_kernel_stays_within_its_bound(variant: str, fmt: str) -> None:
    problem, gate = shipped("fp8_sdpa").problem, shipped("fp8_sdpa").config.gates(fmt).kernel_error
    for seq_len, seed in ((2, 1), (33, 2), (100, 3)):
        dims = {"B": 1, "H": 2, "S": seq_len, "D": 64}
        q, k, v = (x.float() for x in varied(standard_normal((2, seq_len, 64), 3, seed), variant, seed))
        wanted = build_references(problem, dims, seed, fmt, variant)
        out = run_kernel(QuantizedInputs(q, k, v, fmt), truncate=True).double().numpy()
        assert worst_bound_ratio(out, wanted.exact, wanted.bound) <= gate.bound_factor
        assert error_stats(out, wanted.exact, 1.0).relative_error <= gate.relative_error
