"""The benchmark of quality: with bfloat16 nothing differs, and each recipe has its own errors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.quality import RECIPES, attend_exactly, measure, picture, render
from benchmarks.small_models import MODELS


def test_recipes_are_measured_against_bf16() -> None:
    torch.manual_seed(0)
    models: list[tuple[str, Any]] = [(name, kind()) for name, kind in MODELS.items()]
    rows = []
    for name, model in models:
        wanted: list[torch.Tensor] = []
        rows += [measure(name, model, recipe, 1, wanted) for recipe in RECIPES]
        exact = float(model.loss(attend_exactly, torch.Generator().manual_seed(2)).detach())
        assert rows[-len(RECIPES)].loss == exact
    for row in rows:
        low, high = (0.0, 0.01) if row.recipe == "bf16" else (0.0005, 0.1)
        assert all(low <= error < high for error in row.errors), row
        assert (row.psnr is None) == (row.model != "denoiser" or row.recipe == "bf16")
        assert row.psnr is None or row.psnr > 25
    assert len({tuple(row.errors) for row in rows}) == len(rows)
    mappings = [asdict(row) for row in rows]
    assert "sage" in render(mappings)
    drawn = picture({"quality": mappings})
    assert drawn.startswith("<?xml")
    assert drawn == picture({"quality": mappings})
