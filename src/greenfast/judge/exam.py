"""The exam: which cases CORRECTNESS asks, and what a run lacks of all that a task asks.

The whole exam is every shape and seed of the task, shapes that are drawn at run time within the ranges that the task
declares, and a seed that is drawn with them. Those are not known ahead, so no kernel can be made for them.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenfast.judge.task import Drawing, Range, Rung, Shape, TaskConfig
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import NORMAL, Problem, case_of, variants_of

#: Drawn seeds have this many digits or one less, so that no task names one.
_LEAST_SEED, _SEEDS = 10**7, 10**8
_TRIES, _EDGE_TRIES = 2000, 200
#: Variants and the emulator take the smallest shape whose inputs and outputs have at least this many bytes: on a single
#: element every input is alike.
_LEAST_BYTES = 1024


@dataclass(frozen=True)
class Cell:
    """A case that is asked.

    drawn: whether its shape or its seed is not the task's. The limits on a format's error are the task's for its own
    shapes and seeds, so here, and in variants, the format's error is told and not judged.
    """

    shape: Shape
    seed: int
    variant: str = NORMAL
    drawn: bool = False

    @property
    def format_is_judged(self) -> bool:
        """Whether the limits on the format's error, and on the total error, apply."""
        return not self.drawn and self.variant == NORMAL

    def __str__(self) -> str:
        return f"{self.shape.name} seed {self.seed}" + (f" {self.variant}" if self.variant != NORMAL else "")


@dataclass(frozen=True)
class Plan:
    """What a run asks.

    whole: the task's shapes that the whole exam has. small: the shape on which all variants run. emulated: the shapes
    that the emulator runs too where a GPU runs all: that one, and the smallest drawn one if it is not larger. examined:
    the names of the shapes that neither an option nor a default names. drawn: the shapes that were drawn. seed: what
    was drawn from, and the seed of their inputs; None where nothing was. missing: what the whole exam has in addition,
    in words.
    """

    cells: tuple[Cell, ...]
    whole: tuple[Shape, ...]
    small: Shape
    emulated: tuple[Shape, ...]
    examined: frozenset[str] = frozenset()
    drawn: tuple[Shape, ...] = ()
    seed: int | None = None
    missing: tuple[str, ...] = ()


def new_seed() -> int:
    """A seed that is not known ahead."""
    return _LEAST_SEED + secrets.randbelow(_SEEDS)


def shapes_of(config: TaskConfig, rung: Rung | None) -> list[Shape]:
    """The task's shapes that an exam asks: those that the candidate's rung is for, all where it is not a rung."""
    return [shape for shape in config.shapes if rung is None or rung.answers_for(shape.dims)]


def plan(
    config: TaskConfig,
    problem: Problem,
    fmt: str,
    shapes: Sequence[Shape],
    seeds: Sequence[int],
    *,
    rung: Rung | None,
    seed: int | None,
    emulated: bool,
    added: Sequence[Shape] = (),
) -> Plan:
    """The cases of these shapes and seeds, and with ``seed`` the drawn ones.

    rung: the candidate's, if it is one. seed: None draws nothing. emulated: whether the emulator runs the cases; then
    drawn shapes are smaller, and of the task's shapes only the smallest takes the drawn seed. added: the
    shapes that neither an option nor a default names.
    Raises UsageError for ranges in which no valid shape is found.
    """
    whole, small = shapes_of(config, rung), _small(problem, fmt, shapes, seeds[0])
    cells = [Cell(s, n, drawn=n not in config.seeds) for s in shapes for n in seeds]
    missing = [
        f"{have} of {len(asked)} {what}"
        for what, have, asked in (
            ("shapes", len([s for s in whole if s in shapes]), whole),
            ("seeds", len(set(seeds) & set(config.seeds)), config.seeds),
        )
        if have < len(asked)
    ]
    drawn: list[Shape] = []
    if seed is None:
        missing.append("nothing drawn")
    else:
        variants = (NORMAL, *variants_of(problem))
        for n, shape in enumerate(shapes):
            if shape == small:
                cells += [Cell(shape, seed, variant, drawn=True) for variant in variants]
            elif not emulated:
                cells.append(Cell(shape, seed, variants[n % len(variants)], drawn=True))
        drawn = draw(config, problem, fmt, seed, rung=rung, emulated=emulated)
        cells += [Cell(shape, seed, drawn=True) for shape in drawn]
    examined = frozenset(shape.name for shape in (*added, *drawn))
    smallest = min(drawn, key=lambda shape: _size(shape.dims, config.drawing), default=small)
    limit = _size(small.dims, config.drawing)
    few = [smallest] if smallest is not small and _size(smallest.dims, config.drawing) <= limit else []
    return Plan(tuple(cells), tuple(whole), small, (small, *few), examined, tuple(drawn), seed, tuple(missing))


def draw(
    config: TaskConfig, problem: Problem, fmt: str, seed: int, *, rung: Rung | None, emulated: bool
) -> list[Shape]:
    """Shapes within the task's ranges, the same ones for the same seed; none where the task declares no ranges.

    Up to half of them have the least size that is allowed in one dimension, each in another one, where such a shape is
    found: there kernels break first.
    What the problem refuses with a UsageError is drawn again. Raises UsageError where too few shapes are found.
    """
    drawing = config.drawing
    if not drawing.ranges:
        return []
    generator, edges = random.Random(seed), _edges(drawing, seed)
    limit = drawing.max_size_emulated if emulated else drawing.max_size
    known = [shape.dims for shape in config.shapes]
    found: list[Shape] = []
    refused = ""
    for n in range(_TRIES):
        if len(found) == drawing.count:
            return found
        dims = _drawn(generator, drawing, rung.only if rung else {})
        if len(found) < len(edges) and n < _EDGE_TRIES:
            dims = {key: value for key, value in {**dims, **edges[len(found)]}.items() if value}
        if dims in known or _size(dims, drawing) > limit or (rung is not None and not rung.answers_for(dims)):
            continue
        try:
            case_of(problem, dims, seed, fmt)
        except UsageError as e:
            refused = f"; the last one was refused: {e}"
            continue
        known.append(dims)
        name = "_".join(f"{key.lower()}{value}" for key, value in dims.items())
        found.append(Shape(name=f"drawn_{name}", dims=dims, purpose="drawn at run time"))
    if len(found) == drawing.count:
        return found
    raise UsageError(
        f"task {config.name}: drawing: of {_TRIES} shapes within the ranges {len(found)} fit, and count is "
        f"{drawing.count}; max_size is {limit} here{refused}"
    )


def _drawn(generator: random.Random, drawing: Drawing, only: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """One value for each range; a range's sizes are as often evenly spread as their logarithms are, 0 is left out.

    only: the values that a dimension may have, where not all of its range's are asked.
    """
    dims = {}
    for name, allowed in drawing.ranges.items():
        if not isinstance(allowed, Range):
            dims[name] = generator.choice([value for value in allowed if value in only.get(name, allowed)] or allowed)
        elif generator.random() < 0.5:
            dims[name] = generator.randint(allowed.min, allowed.max)
        else:
            size = math.exp(generator.uniform(math.log(allowed.min), math.log(allowed.max + 1)))
            dims[name] = min(int(size), allowed.max)
    return {name: value for name, value in dims.items() if value}


def _edges(drawing: Drawing, seed: int) -> list[dict[str, int]]:
    """The least that a range allows, of different dimensions, for the first of the drawn shapes."""
    least = [{name: allowed.min} for name, allowed in drawing.ranges.items() if isinstance(allowed, Range)]
    return random.Random(f"edge {seed}").sample(least, min(len(least), drawing.count // 2))


def _size(dims: Mapping[str, int], drawing: Drawing) -> int:
    return math.prod(dims.get(name, 1) for name, allowed in drawing.ranges.items() if isinstance(allowed, Range))


def _small(problem: Problem, fmt: str, shapes: Sequence[Shape], seed: int) -> Shape:
    """The smallest of the shapes that is not all too small, the largest where all are."""
    by_size = sorted(shapes, key=lambda shape: math.prod(shape.dims.values()))
    return next((s for s in by_size if case_of(problem, s.dims, seed, fmt).nbytes >= _LEAST_BYTES), by_size[-1])
