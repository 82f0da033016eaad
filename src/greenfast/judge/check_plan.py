"""The exam: the cases that CORRECTNESS checks, and what a run lacks of the whole exam.

All inputs of the whole exam come from one secret seed that is drawn at run time. Its cases are every shape of the task,
shapes that are drawn within the ranges that the task declares, and the variants of the inputs. No kernel can hold
answers for inputs that nobody knew before the run. The seed is recorded, so that a run can be repeated; a run with a
given seed is not the whole exam.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from greenfast.judge.record_schema import DRAWN
from greenfast.judge.task import Drawing, Range, Rung, Shape, TaskConfig
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import NORMAL, Problem, case_of, variants_of

#: A secret seed has 64 bits. It is above the seeds that tasks name, and the seeds that follow it have 64 bits too.
_LEAST_SEED, _LAST_SEED = 2**32, 2**64 - 2**16
#: The least number of seeds per shape: each timed launch draws its inputs from the cases of these seeds.
MIN_SEEDS = 3
_TRIES, _EDGE_TRIES, _LONG_TRIES = 2000, 200, 200
#: A dimension whose range reaches this size gets a small shape that is longer than a tile in this dimension.
_LONG = 64
#: A shape of at least this share of the largest one is large.
_LARGE = 0.25
#: Threads of a warp: a size above it that it does not divide is odd.
_WARP = 32
#: Variants and the emulator take the smallest shape whose inputs and outputs have at least this many bytes: on a single
#: element every input is alike.
_LEAST_BYTES = 1024


@dataclass(frozen=True)
class CasePlan:
    """A case that is asked.

    drawn: whether its shape or its seed is not the task's. The limits on a format's error are the task's for its own
    shapes and seeds, so here, and in variants, the format's error is told and not judged. new_shape: whether its shape
    is not the task's.
    """

    shape: Shape
    seed: int
    variant: str = NORMAL
    drawn: bool = False
    new_shape: bool = False

    @property
    def format_is_judged(self) -> bool:
        """Whether the limits on the format's error, and on the total error, apply."""
        return not self.drawn and self.variant == NORMAL

    def __str__(self) -> str:
        return f"{self.shape.name} seed {self.seed}" + (f" {self.variant}" if self.variant != NORMAL else "")


@dataclass(frozen=True)
class CheckPlan:
    """What a run asks.

    whole: the task's shapes that the whole exam has. small: the shape on which all variants run. emulated: the shapes
    that the emulator also runs while a GPU runs all: ``small``, the smallest drawn one if it is not larger, and those
    that are longer than a tile. examined: the names of the shapes that neither an option nor a default names. drawn:
    the shapes that were drawn. seed: the first seed of the inputs, from which all else is drawn; None if the inputs
    come from public seeds. missing: what the whole exam has in addition, in words. secret: whether ``seed`` was unknown
    before the run.
    """

    cells: tuple[CasePlan, ...]
    whole: tuple[Shape, ...]
    small: Shape
    emulated: tuple[Shape, ...]
    examined: frozenset[str] = frozenset()
    drawn: tuple[Shape, ...] = ()
    seed: int | None = None
    missing: tuple[str, ...] = ()
    secret: bool = True


#: What a run with a given seed lacks.
KNOWN_INPUTS = "inputs that nobody knew before the run (a seed was given)"
NOTHING_DRAWN = "nothing drawn"


def draw_seed() -> int:
    """Draw the secret seed of an exam from the system's random numbers."""
    return _LEAST_SEED + secrets.randbelow(_LAST_SEED - _LEAST_SEED)


def derive_seeds(config: TaskConfig, seed: int) -> list[int]:
    """Return the seeds of the inputs of each of the task's shapes: ``seed`` and those that follow it."""
    return [seed + n for n in range(max(MIN_SEEDS, len(config.seeds)))]


def select_shapes(config: TaskConfig, rung: Rung | None) -> list[Shape]:
    """The task's shapes that an exam asks: those that the candidate's rung is for, all where it is not a rung."""
    return [shape for shape in config.shapes if rung is None or rung.answers_for(shape.dims)]


def build_check_plan(
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
    draws: bool = True,
    secret: bool = True,
) -> CheckPlan:
    """Plan the cases of these shapes and seeds, the variants and the drawn shapes.

    rung: the candidate's, if it is one. seed: of all that is drawn; None draws nothing. emulated: whether the emulator
    is the device; then drawn shapes are smaller, and only small shapes have variants. added: the shapes that neither an
    option nor a default names. draws: whether shapes and variants are drawn. secret: whether ``seed`` was unknown
    before the run; else the exam is not the whole one. It is not if the inputs' seeds are others than ``derive_seeds``.
    Raises UsageError for ranges in which no valid shape is found.
    """
    whole, small = select_shapes(config, rung), _small(problem, fmt, shapes, seeds[0])
    cells = [CasePlan(s, n, drawn=n not in config.seeds) for s in shapes for n in seeds]
    missing = []
    secret = secret and seed is not None and set(seeds) >= set(derive_seeds(config, seed))
    asked = [s for s in whole if s in shapes]
    if len(asked) < len(whole):
        missing.append(f"{len(asked)} of {len(whole)} shapes")
    if not secret:
        missing.append(KNOWN_INPUTS)
    drawn: list[Shape] = []
    long: list[Shape] = []
    if seed is None or not draws:
        missing.append(NOTHING_DRAWN)
    else:
        drawn = draw_shapes(config, problem, fmt, seed, rung=rung, emulated=emulated)
        long = draw_long_shapes(config, problem, fmt, seed, rung=rung, known=drawn)
        drawn = [*drawn[: len(drawn) - len(long)], *long] if emulated else [*drawn, *long]
        for shape, variant in _assign_variants(config, problem, shapes, drawn, small, long, seed, emulated):
            cells.append(CasePlan(shape, seed, variant, drawn=True, new_shape=shape in drawn))
        cells += [CasePlan(shape, seed, drawn=True, new_shape=True) for shape in drawn]
    examined = frozenset(shape.name for shape in (*added, *drawn))
    smallest = min(drawn, key=lambda shape: _size(shape.dims, config.drawing), default=small)
    limit = _size(small.dims, config.drawing)
    few = [smallest] if smallest is not small and _size(smallest.dims, config.drawing) <= limit else []
    also = list({shape.name: shape for shape in (small, *few, *long)}.values())
    return CheckPlan(
        tuple(cells), tuple(whole), small, tuple(also), examined, tuple(drawn), seed, tuple(missing), secret
    )


def _assign_variants(
    config: TaskConfig,
    problem: Problem,
    shapes: Sequence[Shape],
    drawn: Sequence[Shape],
    small: Shape,
    long: Sequence[Shape],
    seed: int,
    emulated: bool,
) -> Iterator[tuple[Shape, str]]:
    """Yield pairs of a shape and a variant: each variant on ``small``, on ``long``, on a large and on an odd shape.

    Each other shape has one of the variants. On the emulator, shapes beyond its limit have none.
    """
    variants = variants_of(problem)
    if not variants:
        return
    rng = random.Random(f"variants {seed}")
    pool = [*shapes, *drawn]
    if emulated:
        limit = max(config.drawing.max_size_emulated, _extent(small, config))
        pool = [shape for shape in pool if shape == small or _extent(shape, config) <= limit]
    most = max(_extent(shape, config) for shape in pool)
    large = [shape for shape in pool if _extent(shape, config) >= _LARGE * most]
    odd = [shape for shape in pool if _is_odd(shape, config)]
    if emulated and long:  # which are large and odd, where cases take long
        large, odd = [], []
    pairs = [(shape, variant) for shape in (small, *long) for variant in variants]
    for candidates in (large, odd):
        candidates = [shape for shape in candidates if shape != small] or candidates
        rng.shuffle(candidates)
        for n, variant in enumerate(rng.sample(variants, len(variants)) if candidates else ()):
            pairs.append((candidates[n % len(candidates)], variant))
    varied = {shape.name for shape, _ in pairs}
    pairs += [(shape, rng.choice(variants)) for shape in pool if shape.name not in varied]
    yield from {(shape.name, variant): (shape, variant) for shape, variant in pairs}.values()


def _sized(shape: Shape, config: TaskConfig) -> dict[str, int]:
    """The dimensions of a shape that are sizes. A dimension that the task's ranges may leave out is an option."""
    ranges = config.drawing.ranges
    options = {name for name, allowed in ranges.items() if not isinstance(allowed, Range) and 0 in allowed}
    return {name: size for name, size in shape.dims.items() if name not in options}


def _extent(shape: Shape, config: TaskConfig) -> int:
    return _size(shape.dims, config.drawing) if config.drawing.ranges else math.prod(shape.dims.values())


def _is_odd(shape: Shape, config: TaskConfig) -> bool:
    """Whether a size of the shape ends in a part of a warp."""
    return any(size > _WARP and size % _WARP for size in _sized(shape, config).values())


def draw_long_shapes(
    config: TaskConfig, problem: Problem, fmt: str, seed: int, *, rung: Rung | None, known: Sequence[Shape]
) -> list[Shape]:
    """Draw a shape for each dimension with a long range: as long as the emulator's limit allows, and not a warp's.

    So that the emulator sees several blocks and several tiles. Another dimension is 2, the others have their least
    size. A dimension for which the problem takes no such shape has none.
    """
    drawing, generator = config.drawing, random.Random(f"long {seed}")
    sized = {name: allowed for name, allowed in drawing.ranges.items() if isinstance(allowed, Range)}
    taken = [shape.dims for shape in (*config.shapes, *known)]
    found: list[Shape] = []
    for long in [name for name, allowed in sized.items() if allowed.max >= _LONG][: drawing.count]:
        for _ in range(_LONG_TRIES):
            dims = _drawn(generator, drawing, rung.only if rung else {}) | {n: r.min for n, r in sized.items()}
            others = [name for name, allowed in sized.items() if name != long and allowed.min < 2 <= allowed.max]
            if others:
                dims[generator.choice(others)] = 2
            rest = math.prod(dims[name] for name in sized if name != long)
            most = min(sized[long].max, drawing.max_size_emulated // rest)
            if most < max(2, sized[long].min):
                break
            dims[long] = generator.randint(max(2, sized[long].min, most * 3 // 4), most)
            if dims[long] % _WARP == 0 and dims[long] > sized[long].min:
                dims[long] -= 1
            if _refusal(config, problem, fmt, seed, dims, taken, rung) is None:
                taken.append(dims)
                found.append(_drawn_shape(dims))
                break
    return found


def _refusal(
    config: TaskConfig,
    problem: Problem,
    fmt: str,
    seed: int,
    dims: dict[str, int],
    known: Sequence[Mapping[str, int]],
    rung: Rung | None,
) -> str | None:
    """Return why these dimensions make no new case; None if they do, empty if they are known or not the rung's."""
    if dims in known or (rung is not None and not rung.answers_for(dims)):
        return ""
    try:
        case_of(problem, dims, seed, fmt)
    except UsageError as e:
        return str(e)
    return None


def _drawn_shape(dims: dict[str, int]) -> Shape:
    name = "_".join(f"{key.lower()}{value}" for key, value in dims.items())
    return Shape(name=f"{DRAWN}{name}", dims=dims, purpose="drawn at run time")


def draw_shapes(
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
        if _size(dims, drawing) > limit:
            continue
        why = _refusal(config, problem, fmt, seed, dims, known, rung)
        if why is not None:
            refused = f"; the last one was refused: {why}" if why else refused
            continue
        known.append(dims)
        found.append(_drawn_shape(dims))
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
