"""The space of a search: parameters with values and constraints, and source regions that may be replaced.

A space is a JSON file of the user or of the task. The types below are its schema.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from greenfast.judge.solution.expressions import NoValueError, evaluate, find_names
from greenfast.judge.store import read_json
from greenfast.spec.errors import UsageError, unknown

Value = int | float | str
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", max_length=100)]
#: If _HITS of _TRIES draws are allowed, settings are drawn at random; else they are listed, up to these limits.
_HITS, _TRIES, MAX_LISTED, MAX_STEPS = 3, 1000, 100_000, 1_000_000
#: Most values in a message.
_MAX_SHOWN = 40


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter. values: in natural order, so that neighbours differ least."""

    values: Annotated[tuple[Value, ...], Meta(min_length=1)]
    default: Value | None = None
    help: str = ""

    @property
    def start(self) -> Value:
        """The default, or the first value."""
        return self.values[0] if self.default is None else self.default


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a source that an edit may replace: the lines between two markers, or the whole file without markers.

    file: path in the solution; or in the folder ``kernels`` of the task, else in greenfast's kernels. begin, end: texts
    of the marker lines; these are kept. text: the current text; filled in when a run starts.
    """

    file: str
    begin: str = ""
    end: str = ""
    help: str = ""
    text: str = ""


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The parameters and regions of a search.

    constraints: expressions in the parameters that must not be 0, such as "BLOCK_N * STAGES <= 512", in the syntax of a
    solution's expressions. An expression without a value, such as a division by zero, forbids the setting too. regions:
    by name. solution: path of a user's solution, relative to the space's file; the parameters are its constants.
    family: module that receives the parameters as toggles; empty for the task's family. rung: the rung with budget and
    error limits for candidates that are no rung; empty for the task's default candidate.
    """

    name: str
    solution: str = ""
    family: str = ""
    rung: str = ""
    only: dict[str, list[int]] = {}
    parameters: Annotated[dict[Name, Parameter], Meta(max_length=200)] = {}
    constraints: tuple[str, ...] = ()
    regions: dict[Name, Region] = {}

    @property
    def points(self) -> int:
        """Number of settings, including those that a constraint forbids."""
        return math.prod(len(p.values) for p in self.parameters.values())

    def complete(self, parameters: Mapping[str, Value]) -> dict[str, Value]:
        """Return all parameters in the space's order with defaults filled in. Constraints are not checked.

        Raises UsageError with the parameter, its value and the allowed values.
        """
        for name, value in parameters.items():
            if name not in self.parameters:
                raise unknown(f"parameter of space {self.name}", str(name), self.parameters)
            allowed = self.parameters[name].values
            if not any(value == v and type(value) is type(v) for v in allowed):
                raise UsageError(f"space {self.name}: {name}={value!r}: allowed values are {_format_values(allowed)}")
        return {name: parameters.get(name, p.start) for name, p in self.parameters.items()}

    def violated(self, complete: Mapping[str, Value]) -> str | None:
        """Return the first constraint that a complete setting breaks, or None."""
        return next((c for c in self.constraints if not _is_satisfied(c, complete)), None)

    def decode(self, parameters: Mapping[str, Value]) -> dict[str, Value]:
        """Return ``complete(parameters)``. Raises UsageError with the constraint that it breaks."""
        complete = self.complete(parameters)
        if broken := self._broken(complete):
            raise UsageError(f"space {self.name}: {broken}")
        return complete

    def _broken(self, complete: Mapping[str, Value]) -> str:
        """Describe how a complete setting breaks a constraint; empty if it breaks none."""
        constraint = self.violated(complete)
        if constraint is None:
            return ""
        shown = ", ".join(f"{n}={v!r}" for n, v in complete.items() if n in find_names(constraint)) or "every setting"
        try:
            evaluate(constraint, complete)  # type: ignore[arg-type]
        except NoValueError as e:
            return f"{shown} leaves a constraint without a value: {e}"
        return f"{shown} breaks the constraint {constraint!r}"

    def shown(self, parameters: Mapping[str, Value]) -> str:
        """Describe a setting by its differences from the defaults."""
        of_default = {name: p.start for name, p in self.parameters.items()}
        changed = [f"{name}={value}" for name, value in parameters.items() if of_default.get(name) != value]
        return ", ".join(changed) or ("the defaults" if self.parameters else "")

    def listed(self, steps: int | None = None) -> Iterator[dict[str, Value]]:
        """Yield every allowed setting; the last parameter changes fastest.

        A constraint is evaluated as soon as its parameters have values. steps: most values to try.
        """
        names = list(self.parameters)
        due: list[list[str]] = [[] for _ in range(len(names) + 1)]  # by how many parameters have values
        for constraint in self.constraints:
            due[max((names.index(name) + 1 for name in find_names(constraint)), default=0)].append(constraint)
        left = itertools.repeat(None) if steps is None else itertools.repeat(None, steps)

        def extended(point: dict[str, Value]) -> Iterator[dict[str, Value]]:
            if not all(_is_satisfied(constraint, point) for constraint in due[len(point)]):
                return
            if len(point) == len(names):
                yield point
                return
            name = names[len(point)]
            for value, _ in zip(self.parameters[name].values, left, strict=False):
                yield from extended({**point, name: value})

        return extended({})

    @functools.cached_property
    def _rare(self) -> list[dict[str, Value]]:
        """The allowed settings if hardly any draw is allowed; else empty.

        Raises UsageError if no setting is allowed.
        """
        rng = random.Random(0)
        if sum(self.violated(self._drawn(rng)) is None for _ in range(_TRIES)) >= _HITS:
            return []
        allowed = list(itertools.islice(self.listed(MAX_STEPS), MAX_LISTED))
        if not allowed:
            far = "" if self.points <= MAX_STEPS else f", as far as {MAX_STEPS} steps of a search through it show"
            reason = self._broken({name: p.start for name, p in self.parameters.items()})
            raise UsageError(f"space {self.name}: its constraints allow no setting of {self.points}{far}; {reason}")
        return allowed

    def _drawn(self, rng: random.Random) -> dict[str, Value]:
        return {name: rng.choice(p.values) for name, p in self.parameters.items()}

    def sample(self, rng: random.Random) -> dict[str, Value]:
        """Draw an allowed setting uniformly. Raises UsageError if no setting is allowed.

        If hardly any setting is allowed, draw from the first MAX_LISTED of them.
        """
        if self._rare:
            return rng.choice(self._rare)
        while self.violated(point := self._drawn(rng)) is not None:
            pass
        return point

    def neighbours(self, point: Mapping[str, Value]) -> list[dict[str, Value]]:
        """Return the allowed settings that differ from a complete one in one parameter."""
        neighbours = []
        for name, parameter in self.parameters.items():
            for value in parameter.values:
                if value != point[name] and self.violated(changed := {**point, name: value}) is None:
                    neighbours.append(changed)
        return neighbours


def _is_satisfied(constraint: str, point: Mapping[str, Value]) -> bool:
    try:
        return bool(evaluate(constraint, point))  # type: ignore[arg-type]  # check() lets numbers alone into constraints
    except NoValueError:
        return False


def read_space(path: Path) -> Space:
    """Read and check a space. Raises UsageError with the file and the fault."""
    space: Space = read_json(path, Space, "space")
    try:
        check(space)
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from None
    return space


def check(space: Space) -> None:
    """Raise UsageError for a space that is empty or contradictory, or has a constraint that cannot be evaluated."""
    if not space.parameters and not space.regions:
        raise UsageError(f"space {space.name} is empty: declare `parameters`, `regions` or both")
    for name, parameter in space.parameters.items():
        values = parameter.values
        if len(set(values)) != len(values):  # 1 and 1.0 are one value
            raise UsageError(f"space {space.name}: {name}: a value is twice in {_format_values(values)}")
        if not any(parameter.start == v and type(parameter.start) is type(v) for v in values):
            raise UsageError(
                f"space {space.name}: {name}: default {parameter.default!r} is not one of {_format_values(values)}"
            )
    numbers = [n for n, p in space.parameters.items() if not any(isinstance(v, str) for v in p.values)]
    for constraint in space.constraints:
        if unknown_names := sorted(find_names(constraint) - set(numbers)):
            texts = " (its values are texts)" if unknown_names[0] in space.parameters else ""
            known = ", ".join(numbers) or "none"
            raise UsageError(
                f"space {space.name}: constraint {constraint!r}: {unknown_names[0]}{texts} is not known; known are "
                f"{known}"
            )
    space.sample(random.Random(0))


def _format_values(values: Sequence[Value]) -> str:
    """Format values for a message, at most ``_MAX_SHOWN``."""
    shown = ", ".join(map(repr, values[:_MAX_SHOWN]))
    return shown if len(values) <= _MAX_SHOWN else f"{shown} and {len(values) - _MAX_SHOWN} more"
