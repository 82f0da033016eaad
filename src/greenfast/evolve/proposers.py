"""Proposers, and ``make_proposer`` by their names.

optuna's random and grid samplers ignore a space's constraints, and few settings of a space may satisfy them. So
``random`` and ``exhaustive`` use the space itself, and only ``tpe`` uses optuna.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from greenfast.evolve.language import DEFAULT_TIMEOUTS, STRATEGIES, AnswerLimits, EngineerProposer, make_model
from greenfast.evolve.proposal import Candidate, Context, Evaluation, Proposer, build_archive, read_lines
from greenfast.evolve.space import MAX_LISTED, MAX_STEPS, Parameter, Space, Value
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.extras import require

Point = dict[str, Value]
#: Options of the strategies with a language model and their defaults; empty for a required option or no default.
_OF_MODELS = {"model": "", "model_name": "", "tokens": "1000000", "answer_tokens": "8192", "timeout": ""}
#: Proposer -> its options and their defaults. startup: random evaluations of ``tpe`` before its estimator is used.
#: islands: they search independently; several help only in large spaces (docs/evolve-proposers.md).
OPTIONS: dict[str, dict[str, str]] = {
    "random": {},
    "exhaustive": {},
    "scripted": {"file": ""},
    "tpe": {"startup": "10"},
    "evolutionary": {"islands": "1"},
    **dict.fromkeys(STRATEGIES, _OF_MODELS),
}
#: Random draws before the settings are listed.
_DRAWS = 30
#: For ``tpe``: constraint violation of an invalid candidate, by the stage at which it failed; lower for later stages.
_VIOLATIONS = {s: n for n, s in enumerate(("validate", "race", "screen", "CORRECTNESS", "RESOURCES", "BUILD"), 1)}


def make_proposer(
    name: str, options: Mapping[str, str] | None = None, log: Callable[[str], None] = lambda _: None
) -> Proposer:
    """Make a proposer by its name.

    options: texts by name, see OPTIONS. log: receives one line per answer of a model. Raises UsageError for an unknown
    name or option or a wrong value, and MachineError if an extra is not installed.
    """
    if name not in OPTIONS:
        raise unknown("proposer", name, OPTIONS)
    set_options = {key: value for key, value in (options or {}).items() if value}
    for key in set_options:
        if key not in OPTIONS[name]:
            allowed = ", ".join(OPTIONS[name]) or "none"
            raise UsageError(f"proposer {name}: unknown option {key!r}; allowed: {allowed}")
    chosen = {**OPTIONS[name], **set_options}

    def read_count(key: str, minimum: int = 1, maximum: int = 10**12) -> int:
        text = chosen[key]
        digits = text.isascii() and text.isdigit() and len(text) <= len(str(maximum))
        if not (digits and minimum <= int(text) <= maximum):
            allowed = f"a whole number of at least {minimum} and at most {maximum}"
            raise UsageError(f"proposer {name}: {key}={text[:40]!r}: {allowed} is needed")
        return int(text)

    if name in STRATEGIES:
        model = make_model(chosen["model"], chosen["model_name"])
        default = DEFAULT_TIMEOUTS[chosen["model"].partition(":")[0]]
        seconds = read_count("timeout") if chosen["timeout"] else default
        limits = AnswerLimits(tokens=read_count("answer_tokens"), seconds=seconds)
        return EngineerProposer(name, model, limits, read_count("tokens"), log)
    if name == "tpe":
        return TpeProposer(read_count("startup", minimum=0))
    if name == "evolutionary":
        return EvolutionaryProposer(read_count("islands", maximum=1000))
    if name == "scripted":
        if not chosen["file"]:
            raise UsageError("proposer scripted: give its candidates, one as JSON on each line: file=FILE")
        return ScriptedProposer(chosen["file"])
    return RandomProposer() if name == "random" else ExhaustiveProposer()


def make_paths_absolute(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with absolute paths, because a run may be resumed in another working directory."""
    resolved = dict(options)
    if resolved.get("file"):
        resolved["file"] = str(Path(resolved["file"]).resolve())
    carrier, _, folder = resolved.get("model", "").partition(":")
    if carrier == "mailbox" and folder:
        resolved["model"] = f"{carrier}:{Path(folder).resolve()}"
    return resolved


class ScriptedProposer:
    """Proposes the candidates of a file in order, one JSON object per line."""

    def __init__(self, file: str) -> None:
        """Read the file. Raises UsageError with the number of an invalid line."""
        self._left = list(read_lines(Path(file), Candidate, "candidate"))

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return the next candidates."""
        return self._left[: context.wanted]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Skip the evaluated candidates; their results are not used."""
        self._left = self._left[len(evaluations) :]


class RandomProposer:
    """Draws allowed settings uniformly, none twice."""

    def __init__(self) -> None:
        """Start with nothing evaluated."""
        self._taken: set[tuple[Value, ...]] = set()
        self._allowed: list[Point] | None = None

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Draw settings; fewer than wanted if fewer are left."""
        rng = context.rng
        batch: list[Point] = []
        while len(batch) < context.wanted and (point := self.draw(context.space, rng, batch)) is not None:
            batch.append(point)
        return [Candidate(parameters=point) for point in batch]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Remember the settings of evaluations."""
        self._taken |= {_identity(e.candidate.parameters) for e in evaluations}

    def is_new(self, point: Mapping[str, Value], batch: Sequence[Point] = ()) -> bool:
        """Return whether a complete setting was not evaluated and is not in the current batch."""
        return _identity(point) not in self._taken and point not in batch

    def draw(self, space: Space, rng: random.Random, batch: Sequence[Point] = ()) -> Point | None:
        """Draw a new allowed setting uniformly; None if none is left.

        If _DRAWS draws give none, draw from the first MAX_LISTED of the space; without a new one among these, the space
        counts as used up.
        """
        for _ in range(_DRAWS):
            if self.is_new(point := space.sample(rng), batch):
                return point
        if self._allowed is None:
            self._allowed = list(islice(space.listed(MAX_STEPS), MAX_LISTED))
        left = [point for point in self._allowed if self.is_new(point, batch)]
        return rng.choice(left) if left else None


def _identity(point: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(value for _, value in sorted(point.items()))


class ExhaustiveProposer(RandomProposer):
    """Proposes every allowed setting, in the space's order."""

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return the next settings."""
        points = (point for point in context.space.listed() if self.is_new(point))
        return [Candidate(parameters=point) for point in islice(points, context.wanted)]


class TpeProposer(RandomProposer):
    """Proposes the settings of optuna's tree-structured Parzen estimator (Bergstra et al. 2011).

    An invalid candidate becomes a trial that violates a constraint. A candidate that the screen dropped becomes a
    pruned trial with its estimate; optuna ranks these after all measured ones. Values are categorical: on the caches in
    docs/evolve-proposers.md this took fewer evaluations than ordered numbers.
    """

    # Most suggestions of the estimator before a neighbour of one is used: in a finite space it repeats itself.
    _SUGGESTIONS = 8

    def __init__(self, startup: int = 10) -> None:
        """Start without evaluations. startup: see OPTIONS. Raises MachineError without optuna."""
        super().__init__()
        require("the proposer tpe", "evolve")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._startup = startup
        self._study = optuna.create_study()
        self._evaluations: list[Evaluation] = []
        self._told = 0  # evaluations in the study; observe() cannot add them, because it does not have the space

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return new settings; fewer than wanted if fewer are left."""
        space, rng = context.space, context.rng
        for evaluation in self._evaluations[self._told :]:
            self._tell(space, evaluation)
        self._told = len(self._evaluations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=rng.getrandbits(32), multivariate=True, n_startup_trials=0
            )
        batch: list[Point] = []
        while len(batch) < context.wanted:
            known = self._told + len(batch)
            point = self._suggest(space, batch) if known >= self._startup and space.parameters else None
            point = point or self.draw(space, rng, batch)
            if point is None:
                break
            batch.append(point)
        return [Candidate(parameters=point) for point in batch]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Store the evaluations for the study."""
        super().observe(evaluations)
        self._evaluations += evaluations

    def _suggest(self, space: Space, batch: Sequence[Point]) -> Point | None:
        """Return a new setting from the estimator, or the first new neighbour of one, or None."""
        suggestions: list[Point] = []
        for _ in range(self._SUGGESTIONS):
            trial = self._study.ask({name: self._categories(p) for name, p in space.parameters.items()})
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # the result becomes a separate trial
            point = {name: p.values[trial.params[name]] for name, p in space.parameters.items()}
            if space.violated(point) is None:
                if self.is_new(point, batch):
                    return point
                suggestions.append(point)
        nearby = (near for point in suggestions for near in space.neighbours(point) if self.is_new(near, batch))
        return next(nearby, None)

    def _tell(self, space: Space, evaluation: Evaluation) -> None:
        states, fitness = self._optuna.trial.TrialState, evaluation.fitness
        try:
            point = space.complete(evaluation.candidate.parameters)
        except UsageError:  # a setting outside the space, from another proposer
            return
        usable = evaluation.valid and fitness is not None
        measured = not usable or evaluation.fitness_kind == "seconds"
        trial = self._optuna.trial.create_trial(
            params={name: p.values.index(point[name]) for name, p in space.parameters.items()},
            distributions={name: self._categories(p) for name, p in space.parameters.items()},
            state=states.COMPLETE if measured else states.PRUNED,
            value=(fitness if usable else 0.0) if measured else None,
            intermediate_values={} if measured else {0: fitness},
        )
        violation = _VIOLATIONS.get(evaluation.stage, len(_VIOLATIONS))
        trial.set_constraint("valid", 0.0 if usable else float(violation))
        self._study.add_trial(trial)

    def _categories(self, parameter: Parameter) -> Any:
        return self._optuna.distributions.CategoricalDistribution(range(len(parameter.values)))


class EvolutionaryProposer(RandomProposer):
    """MAP-Elites on islands: mutates one or two parameters of a parent, or crosses two parents (Mouret and Clune 2015).

    Parents are the elites of an island's archive (``build_archive``), drawn by rank. Islands take turns.
    """

    _ORIGIN = "island "
    _STARTUP = 1  # random proposals per island
    _EVERY = 8  # every 8th proposal of an island has a parent from the previous island
    _TRIES, _WIDER = 16, 5  # attempts to make a new child; after each _WIDER attempts one more parameter is changed
    # Probability that two elites are crossed, that a second parameter is changed, and that a value moves to a neighbour
    _CROSSED, _TWICE, _NEAR = 0.2, 0.1, 0.5

    def __init__(self, islands: int = 1) -> None:
        """Start without evaluations. islands: their number, at least 1."""
        super().__init__()
        self._histories: list[list[Evaluation]] = [[] for _ in range(islands)]

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return children, at first random settings. Returns fewer than wanted if fewer are left."""
        rng = context.rng
        counts = Counter({n: len(history) for n, history in enumerate(self._histories)})
        archives = [build_archive(history) for history in self._histories]
        candidates: list[Candidate] = []
        while len(candidates) < context.wanted:
            batch = [candidate.parameters for candidate in candidates]
            island = min(range(len(archives)), key=lambda n: counts[n])
            migrates = counts[island] % self._EVERY == self._EVERY - 1
            elites = () if counts[island] < self._STARTUP else archives[island - 1 if migrates else island]
            candidate = self._make_child(context.space, elites, rng, batch)
            if candidate is None:
                point = self.draw(context.space, rng, batch)
                if point is None:
                    break
                candidate = Candidate(parameters=point)
            counts[island] += 1
            candidates.append(msgspec.structs.replace(candidate, origin=f"{self._ORIGIN}{island}"))
        return candidates

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Add each evaluation to its island."""
        super().observe(evaluations)
        for evaluation in evaluations:
            number = evaluation.candidate.origin.removeprefix(self._ORIGIN)
            island = int(number) % len(self._histories) if number.isdigit() else 0
            self._histories[island].append(evaluation)

    def _make_child(
        self, space: Space, elites: Sequence[Evaluation], rng: random.Random, batch: Sequence[Point]
    ) -> Candidate | None:
        """Make a new child of the elites. Return None without elites, or if no child is new."""
        for attempt in range(self._TRIES if elites else 0):
            parents = [_draw_by_rank(elites, rng)]
            point = dict(parents[0].parameters)
            if len(elites) > 1 and rng.random() < self._CROSSED:
                parents.append(_draw_by_rank(elites, rng))
                point = {name: rng.choice((value, parents[1].parameters[name])) for name, value in point.items()}
            else:
                for _ in range(1 + attempt // self._WIDER + (rng.random() < self._TWICE)):
                    point = self._mutate(space, point, rng)
            if space.violated(point) is None and self.is_new(point, batch):
                return Candidate(parameters=point, parents=tuple(p.key for p in parents))
        return None

    def _mutate(self, space: Space, point: Point, rng: random.Random) -> Point:
        """Change one parameter, in half of the cases to a neighbouring value."""
        names = [name for name, p in space.parameters.items() if len(p.values) > 1]
        if not names:
            return point
        name = rng.choice(names)
        values = space.parameters[name].values
        index = values.index(point[name])
        near = [value for n, value in enumerate(values) if abs(n - index) == 1]
        others = near if rng.random() < self._NEAR else [value for value in values if value != point[name]]
        return {**point, name: rng.choice(others)}


def _draw_by_rank(elites: Sequence[Evaluation], rng: random.Random) -> Candidate:
    """Draw an elite; each is half as likely as the previous one."""
    return elites[min(int(-math.log2(1 - rng.random())), len(elites) - 1)].candidate
