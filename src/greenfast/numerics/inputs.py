"""Seeded inputs that any machine can reproduce."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: How inputs are drawn, for records.
INPUT_RECIPE = "numpy.random.Generator(PCG64(seed)).standard_normal(float32) per tensor in order, rounded to float16"


def standard_normal(shape: tuple[int, ...], count: int, seed: int) -> list[Tensor]:
    """``count`` float16 CPU tensors of ``shape`` from N(0, 1), drawn in order from one generator."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return [torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).half() for _ in range(count)]
