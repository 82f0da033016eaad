"""Proposers on a cache: they propose what is allowed and new, learn, and go on alike after a resume."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning_cache import Cache, count_evaluations, median_of_random_draws, search
from greenfast.evolve.proposal import (
    Candidate,
    Context,
    Descriptor,
    Evaluation,
    FitnessKind,
    Proposer,
    Stage,
    build_archive,
)
from greenfast.evolve.proposers import EvolutionaryProposer, TpeProposer, make_proposer
from greenfast.evolve.space import Parameter, Space
from greenfast.spec.errors import MachineError, UsageError
from tests.evolve import caches

SEARCHING = ("random", "exhaustive", "tpe", "evolutionary")


@pytest.fixture(scope="module")
def cache() -> Cache:
    return caches.cache()


def keys(history: list[Evaluation]) -> list[str]:
    return [e.candidate.key for e in history]


@pytest.mark.parametrize("name", SEARCHING)
def test_a_seed_decides_what_is_proposed_and_nothing_is_proposed_twice(name: str, cache: Cache) -> None:
    first = search(make_proposer(name), cache, seed=3, evaluations=40, batch=4)
    assert keys(first) == keys(search(make_proposer(name), cache, seed=3, evaluations=40, batch=4))
    assert len(set(keys(first))) == 40
    assert all(e.stage != "space" for e in first)
    if name != "exhaustive":
        assert keys(first) != keys(search(make_proposer(name), cache, seed=4, evaluations=40, batch=4))


@pytest.mark.parametrize("name", SEARCHING)
def test_a_resumed_proposer_goes_on_as_if_nothing_had_happened(name: str, cache: Cache) -> None:
    whole = search(make_proposer(name), cache, seed=5, evaluations=36, batch=4)
    resumed = make_proposer(name)
    for at in range(0, 24, 4):
        resumed.observe(whole[at : at + 4])
    context = Context(space=cache.space, task="", wanted=4, seed=77, history=tuple(whole[:24]))
    went_on = make_proposer(name)
    for at in range(0, 24, 4):
        went_on.propose(Context(space=cache.space, task="", wanted=4, seed=at, history=tuple(whole[:at])))
        went_on.observe(whole[at : at + 4])
    assert resumed.propose(context) == went_on.propose(context)


@pytest.mark.parametrize("name", SEARCHING)
def test_a_space_is_used_up_and_then_nothing_is_proposed(name: str) -> None:
    space = Space(
        name="small", parameters={"a": Parameter(values=(1, 2, 3)), "b": Parameter(values=("x", "y"))},
        constraints=("a < 3",),
    )  # fmt: skip
    proposer, found = make_proposer(name), []
    for seed in range(9):
        batch = proposer.propose(Context(space=space, task="", wanted=3, seed=seed))
        proposer.observe([Evaluation(candidate=c, stage="race", valid=True, fitness=1.0, fitness_kind="seconds")
                          for c in batch])  # fmt: skip
        found += [tuple(c.parameters.values()) for c in batch]
    assert sorted(found) == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


@pytest.mark.parametrize("name", SEARCHING)
def test_a_space_of_regions_alone_has_one_setting(name: str) -> None:
    space = Space(name="text", regions={"loop": {"file": "a.cu"}})  # type: ignore[dict-item]
    (candidate,) = make_proposer(name).propose(Context(space=space, task="", wanted=4, seed=1))
    assert candidate.parameters == {}


def test_exhaustive_goes_in_order(cache: Cache) -> None:
    history = search(make_proposer("exhaustive"), cache, seed=0, evaluations=10_000, batch=7)
    assert [e.candidate.parameters for e in history] == list(cache.space.listed())


@pytest.mark.parametrize(("name", "seeds"), [("tpe", 5), ("evolutionary", 60)])
def test_a_learning_proposer_needs_less_than_two_thirds_of_chance(name: str, seeds: int, cache: Cache) -> None:
    chance = median_of_random_draws(cache)
    assert statistics.median(count_evaluations(lambda: make_proposer(name), cache, range(seeds))) < chance * 2 / 3


def test_the_median_by_chance_is_that_of_random_draws(cache: Cache) -> None:
    drawn = statistics.median(count_evaluations(lambda: make_proposer("random"), cache, range(100)))
    assert drawn == pytest.approx(median_of_random_draws(cache), rel=0.25)


def evaluation(fitness: float | None, kind: str = "seconds", **behaviour: Any) -> Evaluation:
    return Evaluation(
        candidate=Candidate(parameters={"a": fitness or 0.0}),
        stage="race",
        valid=fitness is not None,
        fitness=fitness,
        fitness_kind=kind,  # type: ignore[arg-type]
        behaviour=Descriptor(**behaviour),
    )


def test_the_archive_keeps_the_best_of_each_behaviour_and_prefers_what_was_measured() -> None:
    tensor: dict[str, Any] = {"pipe": "tensor", "smem_bytes": 40_000, "registers": 100}
    kept = [evaluation(2.0, **tensor), evaluation(3.0, **{**tensor, "pipe": "fma"})]
    other = [evaluation(1e-9, "estimate", **tensor), evaluation(4.0, **tensor), evaluation(None, **tensor)]
    assert list(build_archive((other[0], *kept, *other[1:]))) == kept


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"registers": 97}, {"registers": 128}, True),
        ({"registers": 128}, {"registers": 129}, False),
        ({"smem_bytes": 1}, {"smem_bytes": 32768}, True),
        ({"smem_bytes": 0}, {"smem_bytes": 1}, False),
        ({"pipe": "fma"}, {"pipe": "tensor"}, False),
    ],
)
def test_cells_are_pipe_shared_memory_and_registers(one: dict[str, int], other: dict[str, int], same: bool) -> None:
    assert (Descriptor(**one).cell == Descriptor(**other).cell) == same  # type: ignore[arg-type]


def test_islands_take_turns_and_mix_only_by_migration(cache: Cache) -> None:
    proposer = EvolutionaryProposer(3)
    history = search(proposer, cache, seed=1, evaluations=60)
    origins = [e.candidate.origin for e in history]
    assert origins == [f"island {n % 3}" for n in range(60)]
    island = {e.candidate.key: e.candidate.origin for e in history}
    crossed = [n for n, e in enumerate(history) if any(island[p] != e.candidate.origin for p in e.candidate.parents)]
    assert crossed
    assert {n // 3 % 8 for n in crossed} == {7}


def test_tpe_tells_optuna_what_failed_and_what_was_only_estimated() -> None:
    space = Space(name="s", parameters={"a": Parameter(values=(10, 20, 30, 40)), "b": Parameter(values=("x", "y"))})
    proposer = TpeProposer()
    ends: list[tuple[Stage, float | None, FitnessKind]] = [
        ("race", 2e-6, "seconds"), ("screen", 5.0, "estimate"), ("BUILD", None, ""), ("CORRECTNESS", None, ""),
    ]  # fmt: skip
    proposer.observe(
        [
            Evaluation(candidate=Candidate(parameters={"a": 10 * n, "b": "y"}), stage=stage, valid=fitness is not None,
                       fitness=fitness, fitness_kind=kind)
            for n, (stage, fitness, kind) in enumerate(ends, 1)
        ]
    )  # fmt: skip
    proposer.propose(Context(space=space, task="", wanted=1, seed=0))
    trials = [t for t in proposer._study.trials if t.state.name != "FAIL"]
    assert [t.params for t in trials] == [{"a": n, "b": 1} for n in range(4)]
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "COMPLETE", "COMPLETE"]
    assert (trials[0].value, trials[1].intermediate_values) == (2e-6, {0: 5.0})
    told = [t.constraints["valid"] for t in trials]
    assert told[:2] == [0, 0]
    assert told[2] > told[3] > 0  # what failed later failed by less


def test_scripted_proposes_a_files_candidates_in_order(tmp_path: Path) -> None:
    file = tmp_path / "candidates.jsonl"
    file.write_text("".join(json.dumps({"parameters": {"a": n}}) + "\n\n" for n in range(5)))
    proposer, space = make_proposer("scripted", {"file": str(file)}), Space(name="s")
    found = []
    while batch := proposer.propose(Context(space=space, task="", wanted=2, seed=0)):
        found += [c.parameters["a"] for c in batch]
        proposer.observe([Evaluation(candidate=c, stage="space", valid=False) for c in batch])
    assert found == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("line", ["{", '{"parameters": 3}', '{"parameters": {}, "speed": 9}', "[" * 5000])
def test_scripted_names_the_line_that_is_no_candidate(tmp_path: Path, line: str) -> None:
    file = tmp_path / "candidates.jsonl"
    file.write_text(f'{{"parameters": {{}}}}\n{line}\n')
    with pytest.raises(UsageError, match="line 2: no candidate"):
        make_proposer("scripted", {"file": str(file)})


def _make(name: str, options: dict[str, str]) -> Callable[[], Proposer]:
    return lambda: make_proposer(name, options)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("annealing", {}, "unknown proposer 'annealing'; allowed: evolutionary, exhaustive, free"),
        ("random", {"islands": "4"}, "unknown option 'islands'; allowed: none"),
        ("evolutionary", {"islands": "0"}, "islands='0': a whole number of at least 1"),
        ("evolutionary", {"islands": "9999"}, "at most 1000 is needed"),  # each is an archive
        ("free", {"model": "mailbox:FOLDER", "tokens": "9" * 5000}, "at most 1000000000000 is needed"),
        ("tpe", {"startup": "-1"}, "startup='-1': a whole number of at least 0"),
        ("scripted", {}, "file=FILE"),
        ("full", {}, "allowed are http:URL"),
        ("full", {"model": "llama"}, "allowed are http:URL"),
        ("full", {"model": "http:https://host/v1"}, "model_name=NAME"),
        ("full", {"model": "http:host", "model_name": "m"}, "a URL is needed"),
        ("full", {"model": "replay:answers"}, "allowed are http:URL"),
        ("free", {"model": "http:http://host/v1", "model_name": "m", "tokens": "many"}, "tokens='many'"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, str], said: str, tmp_path: Path) -> None:
    given = {key: value.replace("FOLDER", str(tmp_path)) for key, value in options.items()}
    with pytest.raises(UsageError, match=said):
        _make(name, given)()


def test_without_optuna_tpe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.spec.extras._installed", lambda module: module != "optuna")
    with pytest.raises(MachineError, match=r"pip install '\.\[evolve\]' in a clone of greenfast \(no module optuna\)"):
        make_proposer("tpe")
