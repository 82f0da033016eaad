"""Triton's kernels on the emulator, where the package is installed; it needs no GPU to compile."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.emulator.corpus import triton_kernels, triton_products
from tests.emulator.corpus.runner import classify
from tests.emulator.corpus.triton_entry import KERNELS, compiled

pytestmark = pytest.mark.slow


def test_there_are_kernels_of_every_sort() -> None:
    assert len(KERNELS) >= 30
    assert {k.function.__module__ for k in KERNELS.values()} == {triton_kernels.__name__, triton_products.__name__}
    assert sum(bool(k.refused) for k in KERNELS.values()) <= 0.05 * len(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_a_triton_kernel_is_right(name: str) -> None:
    entry = compiled(KERNELS[name])
    outcome = classify(entry)
    assert outcome.status == ("refused" if entry.refused else "right"), str(outcome)
    assert entry.refused in outcome.detail
