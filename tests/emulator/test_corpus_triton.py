"""Triton's kernels on the emulator, where the package is installed; it needs no GPU to compile."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.emulator.corpus import triton_kernels
from tests.emulator.corpus.runner import classify
from tests.emulator.corpus.triton_entry import KERNELS, compiled

pytestmark = pytest.mark.slow


def test_there_are_kernels_of_every_sort() -> None:
    assert len(KERNELS) >= 45
    assert triton_kernels.__doc__


@pytest.mark.parametrize("name", KERNELS)
def test_a_triton_kernel_is_right(name: str) -> None:
    outcome = classify(compiled(KERNELS[name]))
    assert outcome.status == "right", str(outcome)
