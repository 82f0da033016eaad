"""Draws of a measurement: balanced orders of the labels, and the launches of each block."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

Label = TypeVar("Label")


def williams(n: int) -> list[tuple[int, ...]]:
    """Orders of n things in which each is equally often at each place and right after each other (Williams 1949).

    n orders if n is even, else 2 n; the first n alone have each thing at each place once.
    """
    # 0, n-1, 1, n-2, ...: the differences of neighbours are all different
    first = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    square = [tuple((place + row) % n for place in first) for row in range(n)]
    return square if n % 2 == 0 or n == 1 else square + [order[::-1] for order in square]


def balanced(labels: Sequence[Label], rng: random.Random) -> Iterator[tuple[Label, ...]]:
    """Orders without end, at random; over any number of them, places and neighbours are as even as they can be.

    A design follows the other, each with the labels in another order and its rows shuffled.
    """
    n = len(labels)
    while True:
        named = rng.sample(list(labels), n)
        design = williams(n)
        for square in (design[:n], design[n:]):
            for order in rng.sample(square, len(square)):
                yield tuple(named[i] for i in order)


def drawn_sizes(total: int, blocks: int, rng: random.Random) -> list[int]:
    """The launches of each block: ``total`` in all, each block within a third of the others' mean, at least 1."""
    sizes = [max(1, total // blocks + (i < total % blocks)) for i in range(blocks)]
    order = rng.sample(range(blocks), blocks)
    for i, j in zip(order[::2], order[1::2], strict=False):
        shift = min(sizes[i], sizes[j]) // 3
        change = rng.randint(-shift, shift)
        sizes[i], sizes[j] = sizes[i] + change, sizes[j] - change
    return sizes


def drawn_warmup(least: int, rng: random.Random) -> int:
    """How many launches warm up: at least so many, at most half as many again."""
    return least + rng.randint(0, max(1, least // 2))
