"""The shares of a trace in ``python -m benchmarks parallel``."""

from __future__ import annotations

import pytest

from benchmarks.parallel import ParallelCase, covered, shares


@pytest.mark.parametrize(
    ("exchanges", "others", "expected"),
    [
        ([], [(0, 4), (4, 10)], (0, 0, 0)),
        ([(0, 2)], [(2, 10)], (0.2, 0, 0.2)),
        ([(1, 3), (2, 6)], [(0, 2), (5, 8), (9, 10)], (0.3, 0.1, 0.5)),
        ([], [], (0, 0, 0)),
    ],
)
def test_shares_of_a_trace(
    exchanges: list[tuple[float, float]], others: list[tuple[float, float]], expected: tuple[float, float, float]
) -> None:
    assert shares(exchanges, others) == pytest.approx(expected)


def test_covered() -> None:
    assert covered([(3, 4), (0, 2), (1, 2.5), (1, 2)]) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("ranks", "rows", "shared"), [(2, 32768, 32768), (3, 32768, 32256), (7, 1024, 1022), (5, 4, 10)]
)
def test_rows_that_ranks_can_share(ranks: int, rows: int, shared: int) -> None:
    assert ParallelCase("any", rows, True).on(ranks).rows == shared
