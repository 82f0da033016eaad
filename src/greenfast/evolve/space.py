"""The space of a search: parameters with values and constraints, and regions of source that may be replaced.

It is a JSON file that a user writes, or the task's own (``spaces``). The types below are the schema.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from greenfast.judge.solution.expressions import evaluate
from greenfast.judge.store import read_json
from greenfast.spec.errors import UsageError, unknown

Value = int | float | str
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
#: Tries of ``sample`` before it lists what is left; and the most points that a space is listed to find a valid one.
_TRIES, _MOST_LISTED = 1000, 2_000_000


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


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be searched.

    constraints: expressions in the parameters that must not be 0, such as "BLOCK_N * STAGES <= 512", in the language of
    a solution's expressions. regions: by name.
    solution: the user's own, whose constants the parameters are; a path from the space's file. family: the module that
    parameters are given to as toggles; empty for the task's. rung: whose budget and error candidates answer to where
    they are no rung themselves; empty for the task's default candidate.
    """

    name: str
    solution: str = ""
    family: str = ""
    rung: str = ""
    only: dict[str, list[int]] = {}
    parameters: dict[Name, Parameter] = {}
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
                shown = ", ".join(repr(v) for v in allowed)
                raise UsageError(f"space {self.name}: {name}={value!r}: allowed values are {shown}")
        return {name: given.get(name, p.start) for name, p in self.parameters.items()}

    def violated(self, complete: Mapping[str, Value]) -> str | None:
        """The first constraint that a complete setting breaks, or None."""
        names = {name: value for name, value in complete.items() if not isinstance(value, str)}
        return next((c for c in self.constraints if not evaluate(c, names)), None)  # type: ignore[arg-type]

    def decode(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """``complete``, and raises UsageError that quotes the constraint where one forbids it."""
        complete = self.complete(given)
        broken = self.violated(complete)
        if broken is not None:
            shown = ", ".join(f"{n}={v!r}" for n, v in complete.items() if n in broken)
            raise UsageError(f"space {self.name}: {shown} breaks the constraint {broken!r}")
        return complete

    def shown(self, parameters: Mapping[str, Value]) -> str:
        """A setting in words: what differs from the defaults."""
        of_default = {name: p.start for name, p in self.parameters.items()}
        changed = [f"{name}={value}" for name, value in parameters.items() if of_default.get(name) != value]
        return ", ".join(changed) or ("the defaults" if self.parameters else "")

    def listed(self) -> Iterator[dict[str, Value]]:
        """Every setting that the constraints allow, the last parameter changing fastest."""
        names = list(self.parameters)
        for values in itertools.product(*(p.values for p in self.parameters.values())):
            point = dict(zip(names, values, strict=True))
            if self.violated(point) is None:
                yield point

    def sample(self, rng: random.Random) -> dict[str, Value]:
        """A setting that the constraints allow, evenly drawn. Raises UsageError where there is none."""
        for _ in range(_TRIES):
            point = {name: rng.choice(p.values) for name, p in self.parameters.items()}
            if self.violated(point) is None:
                return point
        allowed = list(itertools.islice(self.listed(), _MOST_LISTED)) if self.points <= _MOST_LISTED else []
        if not allowed:
            raise UsageError(f"space {self.name}: its constraints allow no setting of {self.points}")
        return rng.choice(allowed)

    def neighbours(self, point: Mapping[str, Value]) -> list[dict[str, Value]]:
        """The allowed settings that differ from a complete one in one parameter."""
        found = []
        for name, parameter in self.parameters.items():
            for value in parameter.values:
                if value != point[name] and self.violated(changed := {**point, name: value}) is None:
                    found.append(changed)
        return found


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
        if len(set(map(repr, parameter.values))) != len(parameter.values):
            raise UsageError(f"space {space.name}: {name}: a value stands twice in {list(parameter.values)}")
        if parameter.start not in parameter.values:
            allowed = ", ".join(map(repr, parameter.values))
            raise UsageError(f"space {space.name}: {name}: default {parameter.default!r} is not one of {allowed}")
    space.sample(random.Random(0))
