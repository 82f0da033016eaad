"""The space of a search: parameters with values and constraints, and regions of source that may be replaced.

It is a JSON file that a user writes, or the task's own (``spaces``). The types below are the schema.
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
#: A space is drawn from where _HITS of _TRIES draws are allowed; else it is listed, up to these many settings or steps.
_HITS, _TRIES, MOST_LISTED, MOST_STEPS = 3, 1000, 100_000, 1_000_000
#: Values that a message lists.
_SHOWN = 40


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter: its values in their natural order, of which neighbours differ least."""

    values: Annotated[tuple[Value, ...], Meta(min_length=1)]
    default: Value | None = None
    help: str = ""

    @property
    def start(self) -> Value:
        """The default, or the first value."""
        return self.values[0] if self.default is None else self.default


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a source that an edit may replace: what stands between two lines, or the whole file without them.

    file: of the solution, or of greenfast's kernels, relative to its folder. begin, end: texts that one line each
    contains, the end's after the begin's; both lines stay. text: what stands there now, filled in when a run starts.
    """

    file: str
    begin: str = ""
    end: str = ""
    help: str = ""
    text: str = ""


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be searched.

    constraints: expressions in the parameters that must not be 0, such as "BLOCK_N * STAGES <= 512", in the language of
    a solution's expressions; one without a value, such as a division by zero, forbids the setting too. regions: by
    name.
    solution: the user's own, whose constants the parameters are; a path from the space's file. family: the module that
    parameters are given to as toggles; empty for the task's. rung: whose budget and error candidates answer to where
    they are no rung themselves; empty for the task's default candidate.
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
        """Settings of the parameters, those that a constraint forbids included."""
        return math.prod(len(p.values) for p in self.parameters.values())

    def complete(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """All parameters in the space's order, defaults filled in, whether or not constraints allow them.

        Raises UsageError that names the parameter, what came and what is allowed.
        """
        for name, value in given.items():
            if name not in self.parameters:
                raise unknown(f"parameter of space {self.name}", str(name), self.parameters)
            allowed = self.parameters[name].values
            if not any(value == v and type(value) is type(v) for v in allowed):
                raise UsageError(f"space {self.name}: {name}={value!r}: allowed values are {_listed(allowed)}")
        return {name: given.get(name, p.start) for name, p in self.parameters.items()}

    def violated(self, complete: Mapping[str, Value]) -> str | None:
        """The first constraint that a complete setting breaks, or None."""
        return next((c for c in self.constraints if not _holds(c, complete)), None)

    def decode(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """``complete``, and raises UsageError that quotes the constraint where one forbids it."""
        complete = self.complete(given)
        if broken := self._broken(complete):
            raise UsageError(f"space {self.name}: {broken}")
        return complete

    def _broken(self, complete: Mapping[str, Value]) -> str:
        """In words, how a complete setting breaks a constraint; empty where it breaks none."""
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
        """A setting in words: what differs from the defaults."""
        of_default = {name: p.start for name, p in self.parameters.items()}
        changed = [f"{name}={value}" for name, value in parameters.items() if of_default.get(name) != value]
        return ", ".join(changed) or ("the defaults" if self.parameters else "")

    def listed(self, steps: int | None = None) -> Iterator[dict[str, Value]]:
        """Every setting that the constraints allow, the last parameter changing fastest.

        A constraint is asked as soon as its parameters have values. steps: how many values are looked at, at most.
        """
        names = list(self.parameters)
        due: list[list[str]] = [[] for _ in range(len(names) + 1)]  # by how many parameters have values
        for constraint in self.constraints:
            due[max((names.index(name) + 1 for name in find_names(constraint)), default=0)].append(constraint)
        left = itertools.repeat(None) if steps is None else itertools.repeat(None, steps)

        def extended(point: dict[str, Value]) -> Iterator[dict[str, Value]]:
            if not all(_holds(constraint, point) for constraint in due[len(point)]):
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
        """Where hardly any draw is allowed, settings that are; else none. Raises UsageError where none is found."""
        rng = random.Random(0)
        if sum(self.violated(self._drawn(rng)) is None for _ in range(_TRIES)) >= _HITS:
            return []
        found = list(itertools.islice(self.listed(MOST_STEPS), MOST_LISTED))
        if not found:
            far = "" if self.points <= MOST_STEPS else f", as far as {MOST_STEPS} steps of a search through it show"
            said = self._broken({name: p.start for name, p in self.parameters.items()})
            raise UsageError(f"space {self.name}: its constraints allow no setting of {self.points}{far}; {said}")
        return found

    def _drawn(self, rng: random.Random) -> dict[str, Value]:
        return {name: rng.choice(p.values) for name, p in self.parameters.items()}

    def sample(self, rng: random.Random) -> dict[str, Value]:
        """A setting that the constraints allow. Raises UsageError where there is none.

        Evenly drawn; where hardly any is allowed, from the first MOST_LISTED of them.
        """
        if self._rare:
            return rng.choice(self._rare)
        while self.violated(point := self._drawn(rng)) is not None:
            pass
        return point

    def neighbours(self, point: Mapping[str, Value]) -> list[dict[str, Value]]:
        """The allowed settings that differ from a complete one in one parameter."""
        found = []
        for name, parameter in self.parameters.items():
            for value in parameter.values:
                if value != point[name] and self.violated(changed := {**point, name: value}) is None:
                    found.append(changed)
        return found


def _holds(constraint: str, point: Mapping[str, Value]) -> bool:
    try:
        return bool(evaluate(constraint, point))  # type: ignore[arg-type]  # check() lets numbers alone into constraints
    except NoValueError:
        return False


def read_space(path: Path) -> Space:
    """Read and check a space. Raises UsageError that names the file and what is wrong in it."""
    space: Space = read_json(path, Space, "space")
    try:
        check(space)
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from None
    return space


def check(space: Space) -> None:
    """Raise UsageError for a space that is empty or contradictory, or whose constraints cannot be evaluated."""
    if not space.parameters and not space.regions:
        raise UsageError(f"space {space.name} is empty: declare `parameters`, `regions` or both")
    for name, parameter in space.parameters.items():
        values = parameter.values
        if len(set(values)) != len(values):  # 1 and 1.0 are one value
            raise UsageError(f"space {space.name}: {name}: a value stands twice in {_listed(values)}")
        if not any(parameter.start == v and type(parameter.start) is type(v) for v in values):
            raise UsageError(
                f"space {space.name}: {name}: default {parameter.default!r} is not one of {_listed(values)}"
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


def _listed(values: Sequence[Value]) -> str:
    """Values in a message, not all of thousands."""
    shown = ", ".join(map(repr, values[:_SHOWN]))
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"
