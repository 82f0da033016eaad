"""What GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Several processes share the GPU: what a test with large tensors leaves in PyTorch's cache is another's."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def hopper_gpu() -> None:
    """Skips unless torch shows a GPU that runs the Hopper kernel."""
    if not torch.cuda.is_available():
        pytest.skip("this torch cannot use the GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernel needs compute capability 9.0")
