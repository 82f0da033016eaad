"""The benchmark of 8-bit backward passes: without rounding it is exact, and each recipe is what its name says."""

from __future__ import annotations

import pytest
import torch

from benchmarks import backward
from benchmarks.backward import RECIPES, Recipe, compute_exact, compute_gradients
from benchmarks.small_models import train


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(centered=True, rotated=True, fine=True, reused=True)], ids=str)
def test_without_rounding_the_gradients_are_exact(recipe: Recipe, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 70, 64, generator=generator) for _ in range(4))
    wanted = compute_exact(q, k, v, grad, causal)
    for a, b in zip(compute_gradients(q, k, v, grad, causal, recipe), wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_blocks_have_scales_of_their_own() -> None:
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 20, 70).unsqueeze(1)
    codes, scale = backward.encode(x, "int8", (1, 0))
    assert codes.abs().amax(1).eq(127).all()
    assert len(set(scale[:, 0].tolist())) == 70
    assert len(set(backward.encode(x, "int8", (16, 32))[1].flatten().tolist())) == 5 * 2
    assert float((codes * scale - x).norm() / x.norm()) < 0.01


def test_reused_codes_keep_the_errors_of_int8_small() -> None:
    """The claim of docs/training-errors.md, on inputs on which FP8 and blocks of int8 miss it."""
    *_, outliers = (case for case in backward.generate_cases(256) if case[0] in ("outliers", "biased keys"))
    names = ("e4m3", "int8, centered", "int8, fine scales, codes reused")
    worst = [max(r.dq, r.dk, r.dv) for r in backward.measure_errors(outliers, {n: RECIPES[n] for n in names})]
    assert worst[2] < 0.04 < min(worst[:2])


def test_a_model_learns_with_rounded_gradients() -> None:
    exact = train("denoiser", backward.attend_with(Recipe()), 3)[1]
    rounded = train("denoiser", backward.attend_with(RECIPES["the same, forward kept"]), 3)[1]
    assert exact[-1] < exact[0]
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, rtol=0.02)
