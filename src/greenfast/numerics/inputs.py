"""Seeded inputs that any machine can reproduce."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from greenfast.spec.errors import unknown


def standard_normal(shape: tuple[int, ...], count: int, seed: int) -> list[Tensor]:
    """Return ``count`` float16 CPU tensors of a shape from N(0, 1).

    They are drawn in order by ``numpy.random.Generator(PCG64(seed)).standard_normal`` in float32, and rounded.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    return [torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).half() for _ in range(count)]


#: Inputs that standard normal numbers do not reach: see ``varied``.
VARIANTS = ("shifted", "scaled", "outliers")


def varied(tensors: list[Tensor], variant: str, seed: int) -> list[Tensor]:
    """Return float16 tensors (..., rows, columns) as a variant changes them; unchanged for "normal".

    shifted: 2 is added to all. scaled: every second row is 16 times as large, the others 1/64. outliers: one element
    of each leading slice, at a place that depends on the seed, is 200. Raises UsageError for any other name.
    """
    if variant not in ("normal", *VARIANTS):
        raise unknown("variant of the inputs", variant, ("normal", *VARIANTS))
    places = np.random.Generator(np.random.PCG64([seed, 1]))
    return [_varied(x, variant, places) for x in tensors]


def _varied(x: Tensor, variant: str, places: np.random.Generator) -> Tensor:
    if variant == "shifted":
        return (x.float() + 2).half()
    if variant == "scaled":
        rows = torch.arange(x.shape[-2]).unsqueeze(-1)
        return (x.float() * torch.where(rows % 2 == 0, 16.0, 1 / 64)).half()
    if variant == "outliers":
        flat = x.clone().flatten(-2).view(-1, x.shape[-2] * x.shape[-1])
        flat[torch.arange(len(flat)), torch.from_numpy(places.integers(0, flat.shape[1], len(flat)))] = 200
        return flat.view(x.shape)
    return x
