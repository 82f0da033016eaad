"""What GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from greenfast.problems import attention as attention_problem
from tasks.fp8_sdpa_stage_c_wmma import problem as ladder_problem
from tests.gpu import references


@pytest.fixture(autouse=True)
def references_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problems compute their references on the GPU."""
    for problem in (attention_problem, ladder_problem):
        monkeypatch.setattr(problem, "attention", references.attention)
        monkeypatch.setattr(problem, "attention_with_bounds", references.attention_with_bounds)


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
