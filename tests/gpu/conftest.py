"""What GPU tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def hopper_gpu() -> None:
    """Skips unless torch shows a GPU that runs the Hopper kernel."""
    if not torch.cuda.is_available():
        pytest.skip("this torch cannot use the GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernel needs compute capability 9.0")
