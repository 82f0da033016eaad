"""Some seconds of the fuzzer on the GPU; ``python -m tests.fuzz --device cuda`` takes as many as one likes."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import draw, faults_of
from tests.fuzz.calls import Run

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("hopper_gpu")]


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_calls_at_random(first: int) -> None:
    for number in range(first, first + 20):
        _, call = draw(number, True)
        assert faults_of(call, Run("cuda", 10, busy=number % 3 == 0)) == [], (number, call)
