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

#: Random evaluations before the estimator is used.
STARTUP = 10
# Most suggestions of the estimator before a neighbour of one is used: in a finite space it repeats itself.
_ASKS = 8
# Constraint violation of an invalid candidate, by the stage at which it failed; lower for later stages.
_VIOLATIONS = {s: n for n, s in enumerate(("validate", "race", "screen", "CORRECTNESS", "RESOURCES", "BUILD"), 1)}


class TpeProposer:
    """Proposes the settings of optuna's TPE sampler.

    An invalid candidate becomes a trial that violates a constraint. A candidate that the screen dropped becomes a
    pruned trial with its estimate; optuna ranks these after all measured ones. Values are categorical: on the caches in
    docs/evolve-proposers.md this took fewer evaluations than ordered numbers.
    """

    def __init__(self, startup: int = STARTUP) -> None:
        """Start without evaluations. startup: see STARTUP. Raises MachineError without optuna."""
        require("the proposer tpe", "evolve")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._startup = startup
        self._study = optuna.create_study()
        self._evaluations: list[Evaluation] = []
        self._told = 0  # evaluations in the study; observe() cannot add them, because it does not have the space
        self._untried = Untried()

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
            point = self._ask(space, batch) if known >= self._startup and space.parameters else None
            point = point or self._untried.draw(space, rng, batch)
            if point is None:
                break
            batch.append(point)
        return [Candidate(parameters=point) for point in batch]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Store the evaluations for the study."""
        self._evaluations += evaluations
        self._untried.observe(evaluations)

    def _ask(self, space: Space, batch: Sequence[Point]) -> Point | None:
        """Return a new setting from the estimator, or the first new neighbour of one, or None."""
        asked: list[Point] = []
        for _ in range(_ASKS):
            trial = self._study.ask({name: self._categories(p) for name, p in space.parameters.items()})
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # the result becomes a separate trial
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
        trial.set_constraint("valid", 0.0 if usable else float(_VIOLATIONS.get(evaluation.stage, len(_VIOLATIONS))))
        self._study.add_trial(trial)

    def _categories(self, parameter: Parameter) -> Any:
        return self._optuna.distributions.CategoricalDistribution(range(len(parameter.values)))
