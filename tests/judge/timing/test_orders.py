"""What a measurement draws: orders in which no label has an advantage, and launches that nobody can count ahead."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from greenfast.judge.timing.interleaved import balanced, drawn_sizes, drawn_warmup, williams


def places(orders: Sequence[tuple[int, ...]]) -> Counter[tuple[int, int]]:
    """How often each thing was at each place."""
    return Counter((thing, place) for order in orders for place, thing in enumerate(order))


def neighbours(orders: Sequence[tuple[int, ...]]) -> Counter[tuple[int, int]]:
    """How often each thing came right after another in an order."""
    return Counter(pair for order in orders for pair in itertools.pairwise(order))


def spread(counts: Counter[tuple[int, int]], of: int) -> int:
    """The largest count less the smallest, of so many that there should be."""
    assert len(counts) <= of
    return max(counts.values()) - (min(counts.values()) if len(counts) == of else 0)


@pytest.mark.parametrize("n", range(1, 8))
def test_a_design_is_balanced(n: int) -> None:
    design = williams(n)
    assert len(set(design)) == len(design) == (n if n % 2 == 0 or n == 1 else 2 * n)
    assert spread(places(design), n * n) == 0
    if n > 1:
        assert spread(neighbours(design), n * (n - 1)) == 0


def test_three_labels_have_all_their_orders() -> None:
    assert set(williams(3)) == set(itertools.permutations(range(3)))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("blocks", [3, 4, 20, 60, 61])
def test_no_label_has_an_advantage(n: int, blocks: int) -> None:
    """As in a run: three labels in 60 blocks were at the three places 28, 17, 15 and 16, 19, 25 times."""
    for seed in range(20):
        orders = list(itertools.islice(balanced(range(n), random.Random(seed)), blocks))
        assert all(sorted(order) == list(range(n)) for order in orders)
        assert spread(places(orders), n * n) <= 1
        assert spread(neighbours(orders), n * (n - 1)) <= (2 if n < 4 else 3)


def test_orders_are_drawn() -> None:
    seen = {tuple(itertools.islice(balanced("abc", random.Random(seed)), 6)) for seed in range(50)}
    assert len(seen) > 30
    assert list(itertools.islice(balanced(["a"], random.Random(0)), 3)) == [("a",)] * 3


@pytest.mark.parametrize(("total", "blocks"), [(500, 20), (100, 7), (30, 20), (20, 20), (1000, 40)])
def test_the_launches_of_blocks_add_up(total: int, blocks: int) -> None:
    for seed in range(50):
        sizes = drawn_sizes(total, blocks, random.Random(seed))
        assert (len(sizes), sum(sizes)) == (blocks, total)
        assert min(sizes) >= max(1, 2 * (total // blocks) // 3)
    assert len({tuple(drawn_sizes(500, 20, random.Random(seed))) for seed in range(50)}) == 50


def test_a_block_has_at_least_one_launch() -> None:
    assert drawn_sizes(2, 4, random.Random(0)) == [1] * 4


def test_warm_up_is_at_least_what_was_asked() -> None:
    drawn = {drawn_warmup(5, random.Random(seed)) for seed in range(50)}
    assert drawn == {5, 6, 7}
    assert {drawn_warmup(1, random.Random(seed)) for seed in range(50)} == {1, 2}
