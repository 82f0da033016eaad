"""Searches on the cache of the Hopper tilings, and the record of what proposers need there."""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
from pathlib import Path

import msgspec
import pytest

from benchmarks.proposers import PROPOSERS
from benchmarks.tuning_cache import Cache, count_evaluations, measure_recall, median_of_random_draws, search
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.proposers import make_proposer
from greenfast.evolve.t4 import read_t4
from greenfast.judge.record_io import read_content
from tests.evolve import caches

ROOT = Path(__file__).parents[2]
RECORD = read_content(ROOT / "evidence/proposers.json")
ROWS = {Path(row["cache"]).stem: row for row in RECORD["rows"]}
EACH_CACHE = pytest.mark.parametrize("name", ROWS)
#: Of chance's evaluations: what was asked for, which no proposer reaches on every cache (docs/evolve-proposers.md).
ASKED, ASKED_OF = 0.25, ("tpe", "evolutionary")


def cache_of(name: str) -> Cache:
    return Cache(read_t4(ROOT / ROWS[name]["cache"]), name)


@EACH_CACHE
def test_the_record_is_of_todays_caches_and_evolution(name: str) -> None:
    row, cache = ROWS[name], cache_of(name)
    assert (row["settings"], row["random_median"]) == (len(cache.evaluations), median_of_random_draws(cache))
    for column in ("evolutionary", "four islands"):
        made = functools.partial(make_proposer, *PROPOSERS[column])
        assert count_evaluations(made, cache, range(RECORD["seeds"])) == row["needed"][column]


def tpe_is_as_recorded(name: str, seeds: int) -> None:
    if importlib.metadata.version("optuna") != RECORD["optuna"]:
        pytest.skip(f"the record is of optuna {RECORD['optuna']}")
    found = count_evaluations(lambda: make_proposer("tpe"), cache_of(name), range(seeds))
    assert found == ROWS[name]["needed"]["tpe"][:seeds]


def test_the_record_is_of_todays_tpe() -> None:
    tpe_is_as_recorded(next(iter(ROWS)), seeds=3)


@pytest.mark.slow
@EACH_CACHE
def test_the_whole_record_is_of_todays_tpe(name: str) -> None:
    tpe_is_as_recorded(name, RECORD["seeds"])


@EACH_CACHE
def test_learning_takes_clearly_less_than_chance_with_100_seeds(name: str) -> None:
    row = ROWS[name]
    assert all(len(found) == 100 for found in row["needed"].values())
    for proposer, found in row["needed"].items():
        assert row["of_random"][proposer] == round(statistics.median(found) / row["random_median"], 3)
    assert all(row["of_random"][proposer] < 0.75 for proposer in ASKED_OF)


@EACH_CACHE
def test_the_record_of_the_screen_is_of_todays_estimates(name: str) -> None:
    screen = ROWS[name]["screen"]
    results = read_t4(ROOT / ROWS[name]["cache"])
    assert {n: msgspec.to_builtins(measure_recall(results, batch=int(n))) for n in screen} == screen


def test_the_page_says_what_was_asked_and_what_came() -> None:
    page = (ROOT / "docs" / "evolve-proposers.md").read_text(encoding="utf-8")
    for name, row in ROWS.items():
        of = row["of_random"]
        medians = {proposer: statistics.median(found) for proposer, found in row["needed"].items()}
        cells = [f"{medians[p]:g} ({of[p]:.2f})" for p in PROPOSERS]
        assert (
            f"| {name} | {row['settings']} | {row['reach_the_share']} | {row['random_median']} | " + " | ".join(cells)
            in page
        )
        screen = row["screen"]
        cells = [f"{screen['8']['kept']} of 5", *(f"{screen[n]['in_batches']:.1%}" for n in ("8", "16"))]
        assert f"| {name} | " + " | ".join(cells) + " |" in page
    met = sum(row["of_random"][p] <= ASKED for row in ROWS.values() for p in ASKED_OF)
    assert f"Met in {met} of {2 * len(ROWS)} cells" in page


def test_a_search_stops_at_its_budget_and_at_what_is_good_enough() -> None:
    cache = caches.cache()
    assert len(search(make_proposer("random"), cache, seed=0, evaluations=17, batch=5)) == 17
    history = search(make_proposer("random"), cache, seed=0, evaluations=10_000, until=0.9)
    speeds = [cache.best / e.fitness if e.fitness else 0.0 for e in history]
    assert speeds[-1] >= 0.9
    assert max(speeds[:-1]) < 0.9


def test_what_is_not_in_a_cache_is_not_in_its_space() -> None:
    cache = caches.cache()
    outside = {"tile": 128, "stages": 4, "warps": 2, "unroll": 1, "layout": 0}
    assert cache.space.violated(outside)
    found = cache.evaluate(Candidate(parameters=outside))  # type: ignore[arg-type]
    assert (found.stage, found.valid) == ("space", False)
