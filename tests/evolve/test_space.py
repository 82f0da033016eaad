"""Spaces that are hostile: equal values, constraints without a value, few allowed settings among very many."""

from __future__ import annotations

import json
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.evolve.proposal import Context
from greenfast.evolve.proposers import make_proposer
from greenfast.evolve.space import Space, check, read_space
from greenfast.spec.errors import UsageError


def space_of(constraints: list[str], **values: list[Any]) -> Space:
    parameters = {name: {"values": given} for name, given in values.items()}
    return msgspec.convert({"name": "s", "parameters": parameters, "constraints": constraints}, Space)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"A": {"values": [1, 1.0]}}', "A: a value is twice in 1, 1.0"),
        ('{"A": {"values": [1, 2], "default": 1.0}}', "A: default 1.0 is not one of 1, 2"),
        ('{"A": {"values": [1]}, "A": {"values": [2]}}', "'A' is twice in one object"),
        ('{"A\\n": {"values": [1]}}', "matching regex"),
        ('{"\\u00c4": {"values": [1]}}', "matching regex"),
        ('{"A": {"values": [NaN]}}', "malformed"),
        ('{"A": {"values": [1e999]}}', "out of range"),
        ('{"A": {"values": [true]}}', "got `bool`"),
        (json.dumps({f"P{n}": {"values": [1]} for n in range(300)}), "length <= 200"),
    ],
)
def test_what_is_no_space(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "space.json").write_text(f'{{"name": "s", "parameters": {text}}}')
    with pytest.raises(UsageError, match=says):
        read_space(tmp_path / "space.json")


def test_texts_are_no_numbers_of_a_constraint() -> None:
    for values in (["a", "b"], ["a", 1]):
        with pytest.raises(UsageError, match=r"A \(its values are texts\) is not known; known are B"):
            check(space_of(["A == 1"], A=values, B=[1]))
    with pytest.raises(UsageError, match="C is not known"):  # also where the defaults do not come to it
        check(space_of(["A if B else C"], A=[1], B=[1, 0]))


def test_a_constraint_without_a_value_forbids_the_setting() -> None:
    """An error in the middle of a search would come again whenever it is resumed."""
    space = space_of(["12 // A >= 2", "2 ** A < 2 ** 40"], A=[3, 0, 62, 9, 4, 63])
    check(space)
    assert [point["A"] for point in space.listed()] == [3, 4]
    with pytest.raises(UsageError, match=r"A=0 leaves a constraint without a value: .* divides by zero for A=0"):
        space.decode({"A": 0})
    with pytest.raises(UsageError, match=r"A=9 breaks the constraint '12 // A >= 2'"):
        space.decode({"A": 9})


def test_the_list_is_that_of_all_settings_whatever_the_constraints_ask_first() -> None:
    rng = random.Random(0)
    for _ in range(30):
        values = {name: rng.sample(range(6), rng.randint(1, 4)) for name in "ABCD"}
        pool = ["A + B < 7", "C != A", "D", "1", "B * D - C", "A % (C + 1) < 2", "4 // D"]
        space = space_of(rng.sample(pool, 3), **values)
        every = space_of([], **values)
        assert list(space.listed()) == [point for point in every.listed() if space.violated(point) is None]


def test_few_settings_among_very_many_are_found() -> None:
    names = [f"P{n}" for n in range(20)]
    space = space_of([f"{name} == 9" for name in names], **{name: list(range(10)) for name in names})
    start = time.monotonic()
    only = dict.fromkeys(names, 9)
    assert list(space.listed()) == [only]
    for proposer in ("random", "exhaustive", "evolutionary"):
        found = make_proposer(proposer).propose(Context(space=space, task="", wanted=4, seed=1))
        assert [candidate.parameters for candidate in found] == [only]
    assert time.monotonic() - start < 20  # hours, one after the other


def test_a_contradiction_among_very_many_settings_is_found() -> None:
    names = [f"P{n}" for n in range(20)]
    space = space_of(["P0 > 9"], **{name: list(range(10)) for name in names})
    with pytest.raises(UsageError, match=r"allow no setting of 10{20}, as far as .* show; P0=0 breaks the constraint"):
        check(space)


def test_a_search_through_a_space_ends() -> None:
    names = [f"P{n}" for n in range(20)]
    space = space_of(["P19 > 9"], **{name: list(range(10)) for name in names})  # known with the last value alone
    assert list(space.listed(5000)) == []
    free = space_of([], **{name: list(range(10)) for name in names})
    assert len(list(islice(free.listed(), 100))) == 100
    assert 0 < len(list(free.listed(5000))) <= 5000


def test_draws_of_one_seed_do_not_depend_on_what_was_drawn_before() -> None:
    names = [f"P{n}" for n in range(6)]
    rare = {name: list(range(10)) for name in names}
    for constraints in (["P0 + P1 + P2 > 25"], ["P0 > 2"]):
        first, second = space_of(constraints, **rare), space_of(constraints, **rare)
        first.sample(random.Random(1))
        assert [first.sample(random.Random(n)) for n in range(9)] == [second.sample(random.Random(n)) for n in range(9)]
