"""The tree-structured Parzen estimator (Bergstra et al. 2011), by optuna."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from greenfast.evolve.proposal import Candidate, Context, Evaluation
from greenfast.evolve.proposers.untried import Point, Untried
from greenfast.evolve.space import Parameter, Space
from greenfast.spec.errors import UsageError
from greenfast.spec.extras import require

#: Evaluations drawn by chance before the estimator has a say.
STARTUP = 10
# Settings that the estimator is asked for before a neighbour of the last is taken: in a finite space it repeats itself.
_ASKS = 8
# How much an invalid candidate violates, by the stage that it failed: the later, the less.
_VIOLATIONS = {s: n for n, s in enumerate(("validate", "race", "screen", "CORRECTNESS", "RESOURCES", "BUILD"), 1)}


class TpeProposer:
    """Asks optuna, and tells it what came.

    An invalid candidate is told as one that violates a constraint; one that the screen kept from the GPU as pruned,
    with its estimate: optuna ranks these behind all that were measured. Values are categories, which took fewer
    evaluations than numbers in an order did, on the caches that docs/evolve-proposers.md names.
    """

    def __init__(self, startup: int = STARTUP) -> None:
        """Start with nothing evaluated. startup: see STARTUP. Raises MachineError without optuna."""
        require("the proposer tpe", "evolve")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._startup = startup
        self._study = optuna.create_study()
        self._evaluations: list[Evaluation] = []
        self._told = 0  # of them; a study needs the space, which observe does not have
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Fresh settings; fewer than wanted where fewer are left."""
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
            point = self._ask(space, batch) if known >= self._startup and space.parameters else None
            point = point or self._untried.draw(space, rng, batch)
            if point is None:
                break
            batch.append(point)
        return [Candidate(parameters=point) for point in batch]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Keep what came for the study."""
        self._evaluations += evaluations
        self._untried.observe(evaluations)

    def _ask(self, space: Space, batch: Sequence[Point]) -> Point | None:
        """A fresh setting that the estimator likes, or the first fresh neighbour of one; None if there is none."""
        asked: list[Point] = []
        for _ in range(_ASKS):
            trial = self._study.ask({name: self._categories(p) for name, p in space.parameters.items()})
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # what came is told as another trial
            point = {name: p.values[trial.params[name]] for name, p in space.parameters.items()}
            if space.violated(point) is None:
                if self._untried.fresh(point, batch):
                    return point
                asked.append(point)
        nearby = (near for point in asked for near in space.neighbours(point) if self._untried.fresh(near, batch))
        return next(nearby, None)

    def _tell(self, space: Space, evaluation: Evaluation) -> None:
        states, fitness = self._optuna.trial.TrialState, evaluation.fitness
        try:
            point = space.complete(evaluation.candidate.parameters)
        except UsageError:  # a setting outside the space: not one of this proposer's
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
        trial.set_constraint("valid", 0.0 if usable else float(_VIOLATIONS.get(evaluation.stage, len(_VIOLATIONS))))
        self._study.add_trial(trial)

    def _categories(self, parameter: Parameter) -> Any:
        return self._optuna.distributions.CategoricalDistribution(range(len(parameter.values)))
