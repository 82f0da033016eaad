"""The check plan: the cases of CORRECTNESS, and the parts of the full plan that a run skips.

The full plan has three kinds of cases: every shape of the task, random shapes within the ranges that the task declares,
and the variants of the inputs. All inputs come from one secret seed that is drawn at run time, so no kernel can hold
precomputed answers. The seed is recorded, so that a run can be repeated. A run with a known seed is not the full plan.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from greenfast.judge.record_schema import DRAWN
from greenfast.judge.request import MIN_SEEDS, CasePlan, CheckPlan, Request
from greenfast.judge.task import Drawing, LoadedTask, Range, Rung, Shape, TaskConfig
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import build_case, list_variants

#: Range of secret seeds: 64 bits, above the seeds in task files, with room for the seeds that follow it.
_LEAST_SEED, _LAST_SEED = 2**32, 2**64 - 2**16
_TRIES, _EDGE_TRIES, _LONG_TRIES = 2000, 200, 200
#: A dimension with a range up to this size gets a small shape that is longer than a tile in this dimension.
_LONG = 64
#: A shape of at least this share of the largest one is large.
_LARGE = 0.25
#: Threads of a warp. A size above it that is not a multiple of it is odd.
_WARP = 32
#: Variants and the emulator use the smallest shape with at least this many bytes of inputs and outputs. With a single
#: element, all inputs look the same.
_LEAST_BYTES = 1024


#: The part of the full plan that a run with a known seed skips.
KNOWN_INPUTS = "inputs that nobody knew before the run (a seed was given)"
NOTHING_DRAWN = "nothing drawn"


def draw_seed() -> int:
    """Draw a secret seed from the operating system's random numbers."""
    return _LEAST_SEED + secrets.randbelow(_LAST_SEED - _LEAST_SEED)


def derive_seeds(config: TaskConfig, seed: int) -> list[int]:
    """Return the seeds for the inputs of each shape of the task: ``seed`` and its successors."""
    return [seed + n for n in range(max(MIN_SEEDS, len(config.seeds)))]


def fits_dims(dims: Mapping[str, int], only: Mapping[str, Sequence[int]]) -> bool:
    """Return True if each dimension has a value that ``only`` lists, 0 for an absent one."""
    return all(dims.get(name, 0) in values for name, values in only.items())


def select_shapes(config: TaskConfig, rung: Rung | None) -> list[Shape]:
    """Return the task's shapes that the candidate's rung supports; all shapes if the candidate is not a rung."""
    return [shape for shape in config.shapes if rung is None or fits_dims(shape.dims, rung.only)]


def add_check_plan(
    request: Request, rung: Rung | None, *, chosen: bool, seed: int | None = None, public: bool | None = None
) -> Request:
    """Return the request with its check plan: the full plan on a GPU, a part that takes some minutes on the emulator.

    The inputs come from a secret seed that is drawn here and added to the request's command.
    rung: the candidate's rung; None if the candidate is not a rung.
    chosen: True if options chose the shapes or seeds. If they chose a part, nothing is drawn unless ``seed`` is set.
    seed: the seed of an earlier run, to repeat its plan.
    public: True if options chose the seeds of the inputs; None for the value of ``chosen``.
    With ``public`` or ``seed`` the inputs were known before the run, so the plan is not the full plan.
    Raises UsageError as ``build_check_plan`` does.
    """
    config = request.task.config
    by_options, public = chosen or seed is not None, chosen if public is None else public
    can_run, emulated = request.cannot_run() is None, request.is_emulated
    named_shapes, all_shapes = request.shapes, select_shapes(config, rung)
    usual = {shape.name for shape in all_shapes} if can_run and not emulated else {*config.defaults.shapes}
    if not chosen and can_run and not emulated:
        request = replace(request, shapes=all_shapes)
    has_all_shapes = not chosen or all(shape in request.shapes for shape in all_shapes)
    draws, secret = has_all_shapes or seed is not None, seed is None and not public
    if seed is None and can_run and (has_all_shapes or not public):
        seed = draw_seed()
        request = replace(request, command=f"{request.command} --exam-seed {seed}")
    if seed is not None and not public:
        request = replace(request, seeds=derive_seeds(config, seed))
    added = [shape for shape in request.shapes if shape not in named_shapes]
    check_plan = build_check_plan(request, rung, seed=seed, added=added, draws=draws, secret=secret)
    lacks_cases = not usual <= {shape.name for shape in request.shapes}
    lacks_more = any(not part.endswith(" shapes") for part in check_plan.missing)
    return replace(request, check_plan=check_plan, is_partial=by_options and (lacks_cases or lacks_more))


def build_check_plan(
    request: Request,
    rung: Rung | None,
    *,
    seed: int | None,
    added: Sequence[Shape] = (),
    draws: bool = True,
    secret: bool = True,
) -> CheckPlan:
    """Plan the cases of the request's shapes and seeds, the variants and the random shapes.

    rung: the candidate's rung; None if the candidate is not a rung.
    seed: the source of all randomness; None for no random shapes and no variants.
    added: the shapes that are in no option and no default.
    draws: False for no random shapes and no variants. On the emulator, random shapes are smaller, and only small shapes
        have variants.
    secret: True if ``seed`` was unknown before the run. The plan is full only with a secret seed, and only if the
        inputs' seeds come from ``derive_seeds``.
    Raises UsageError if the task's ranges hold too few valid shapes.
    """
    config, shapes, seeds = request.task.config, request.shapes, request.seeds
    required_shapes, small = select_shapes(config, rung), _find_small_shape(request)
    case_plans = [CasePlan(s, n, randomized=n not in config.seeds) for s in shapes for n in seeds]
    missing = list(config.left_out)
    secret = secret and seed is not None and set(seeds) >= set(derive_seeds(config, seed))
    covered = [s for s in required_shapes if s in shapes]
    if len(covered) < len(required_shapes):
        missing.append(f"{len(covered)} of {len(required_shapes)} shapes")
    if not secret:
        missing.append(KNOWN_INPUTS)
    random_shapes: list[Shape] = []
    long_shapes: list[Shape] = []
    if seed is None or not draws:
        missing.append(NOTHING_DRAWN)
    else:
        source = ShapeSource(request.task, request.format, rung.only if rung else {}, seed)
        random_shapes = source.draw(emulated=request.is_emulated)
        long_shapes = source.draw_long(random_shapes)
        if request.is_emulated:
            random_shapes = random_shapes[: len(random_shapes) - len(long_shapes)]
        random_shapes += long_shapes
        assigned = _assign_variants(request, random_shapes, small, long_shapes, seed)
        for shape, variant in assigned:
            case_plans.append(CasePlan(shape, seed, variant, randomized=True, new_shape=shape in random_shapes))
        case_plans += [CasePlan(shape, seed, randomized=True, new_shape=True) for shape in random_shapes]
    unnamed_shapes = frozenset(shape.name for shape in (*added, *random_shapes))
    smallest = min(random_shapes, key=lambda shape: _compute_size(shape.dims, config.drawing), default=small)
    limit = _compute_size(small.dims, config.drawing)
    has_smaller = smallest is not small and _compute_size(smallest.dims, config.drawing) <= limit
    emulated_shapes = {shape.name: shape for shape in (small, *([smallest] if has_smaller else []), *long_shapes)}
    return CheckPlan(
        case_plans=tuple(case_plans),
        required_shapes=tuple(required_shapes),
        small_shape=small,
        emulated_shapes=tuple(emulated_shapes.values()),
        unnamed_shapes=unnamed_shapes,
        random_shapes=tuple(random_shapes),
        seed=seed,
        missing=tuple(missing),
        secret=secret,
    )


def _assign_variants(
    request: Request, random_shapes: Sequence[Shape], small: Shape, long_shapes: Sequence[Shape], seed: int
) -> Iterator[tuple[Shape, str]]:
    """Yield pairs of a shape and a variant.

    Each variant runs on ``small``, on each of ``long_shapes``, on a large and on an odd shape. Every other shape gets
    one variant. On the emulator, shapes beyond its limit get none.
    """
    config, variants, emulated = request.task.config, list_variants(request.task.problem), request.is_emulated
    if not variants:
        return
    rng = random.Random(f"variants {seed}")
    pool = [*request.shapes, *random_shapes]
    if emulated:
        limit = max(config.drawing.max_size_emulated, _compute_extent(small, config))
        pool = [shape for shape in pool if shape == small or _compute_extent(shape, config) <= limit]
    largest = max(_compute_extent(shape, config) for shape in pool)
    large = [shape for shape in pool if _compute_extent(shape, config) >= _LARGE * largest]
    odd = [shape for shape in pool if _is_odd(shape, config)]
    if emulated and long_shapes:  # The long shapes are large and odd, and cases are slow on the emulator.
        large, odd = [], []
    pairs = [(shape, variant) for shape in (small, *long_shapes) for variant in variants]
    for candidates in (large, odd):
        candidates = [shape for shape in candidates if shape != small] or candidates
        rng.shuffle(candidates)
        for n, variant in enumerate(rng.sample(variants, len(variants)) if candidates else ()):
            pairs.append((candidates[n % len(candidates)], variant))
    varied = {shape.name for shape, _ in pairs}
    pairs += [(shape, rng.choice(variants)) for shape in pool if shape.name not in varied]
    yield from {(shape.name, variant): (shape, variant) for shape, variant in pairs}.values()


def _select_sizes(shape: Shape, config: TaskConfig) -> dict[str, int]:
    """Return the dimensions of a shape that are sizes. A dimension that a range allows to be 0 is an option."""
    ranges = config.drawing.ranges
    options = {name for name, allowed in ranges.items() if not isinstance(allowed, Range) and 0 in allowed}
    return {name: size for name, size in shape.dims.items() if name not in options}


def _compute_extent(shape: Shape, config: TaskConfig) -> int:
    if config.drawing.ranges:
        return _compute_size(shape.dims, config.drawing)
    return math.prod(shape.dims.values())


def _is_odd(shape: Shape, config: TaskConfig) -> bool:
    """Return True if a size of the shape is above a warp and not a multiple of it."""
    return any(size > _WARP and size % _WARP for size in _select_sizes(shape, config).values())


@dataclass(frozen=True)
class ShapeSource:
    """The ranges of a task, from which shapes are drawn. The same seed gives the same shapes.

    only: by dimension, the values that the candidate's rung supports.
    """

    task: LoadedTask
    fmt: str
    only: Mapping[str, Sequence[int]]
    seed: int

    def draw(self, *, emulated: bool) -> list[Shape]:
        """Draw random shapes within the task's ranges; none if the task declares no ranges.

        Up to half of the shapes have the minimum size in one dimension, a different one for each shape, because kernels
        often fail there. A shape that the problem rejects with UsageError is drawn again.
        Raises UsageError if too few shapes are valid.
        """
        config, drawing = self.task.config, self.task.config.drawing
        if not drawing.ranges:
            return []
        generator, edges = random.Random(self.seed), self._draw_edges()
        limit = drawing.max_size_emulated if emulated else drawing.max_size
        known = [shape.dims for shape in config.shapes]
        shapes: list[Shape] = []
        last_rejection = ""
        for n in range(_TRIES):
            if len(shapes) == drawing.count:
                return shapes
            dims = self._draw_dims(generator)
            if len(shapes) < len(edges) and n < _EDGE_TRIES:
                dims = {key: value for key, value in {**dims, **edges[len(shapes)]}.items() if value}
            if _compute_size(dims, drawing) > limit:
                continue
            rejection = self._explain_rejection(dims, known)
            if rejection is not None:
                last_rejection = f"; the last one was refused: {rejection}" if rejection else last_rejection
                continue
            known.append(dims)
            shapes.append(_name_shape(dims))
        if len(shapes) == drawing.count:
            return shapes
        raise UsageError(
            f"task {config.name}: drawing: of {_TRIES} shapes within the ranges {len(shapes)} fit, and count is "
            f"{drawing.count}; max_size is {limit} here{last_rejection}"
        )

    def draw_long(self, known: Sequence[Shape]) -> list[Shape]:
        """Draw a long shape for each dimension with a long range, so that the emulator runs several blocks and tiles.

        The long dimension is as long as the emulator's limit allows and is not a multiple of a warp. One other
        dimension is 2, the rest have their minimum. A dimension gets no shape if the problem rejects all tries.
        """
        drawing, generator = self.task.config.drawing, random.Random(f"long {self.seed}")
        ranges = {name: allowed for name, allowed in drawing.ranges.items() if isinstance(allowed, Range)}
        used = [shape.dims for shape in (*self.task.config.shapes, *known)]
        shapes: list[Shape] = []
        for long in [name for name, allowed in ranges.items() if allowed.max >= _LONG][: drawing.count]:
            for _ in range(_LONG_TRIES):
                dims = self._draw_dims(generator) | {n: r.min for n, r in ranges.items()}
                others = [name for name, allowed in ranges.items() if name != long and allowed.min < 2 <= allowed.max]
                if others:
                    dims[generator.choice(others)] = 2
                other_size = math.prod(dims[name] for name in ranges if name != long)
                longest = min(ranges[long].max, drawing.max_size_emulated // other_size)
                if longest < max(2, ranges[long].min):
                    break
                dims[long] = generator.randint(max(2, ranges[long].min, longest * 3 // 4), longest)
                if dims[long] % _WARP == 0 and dims[long] > ranges[long].min:
                    dims[long] -= 1
                if self._explain_rejection(dims, used) is None:
                    used.append(dims)
                    shapes.append(_name_shape(dims))
                    break
        return shapes

    def _explain_rejection(self, dims: dict[str, int], known: Sequence[Mapping[str, int]]) -> str | None:
        """Return the reason why the problem rejects these dimensions.

        None if it accepts them. Empty if they are in ``known`` or the rung does not support them.
        """
        if dims in known or not fits_dims(dims, self.only):
            return ""
        try:
            build_case(self.task.problem, dims, self.seed, self.fmt)
        except UsageError as e:
            return str(e)
        return None

    def _draw_dims(self, generator: random.Random) -> dict[str, int]:
        """Draw one value for each range. Dimensions with the value 0 are left out.

        A size is drawn with equal probability from a uniform and from a log-uniform distribution.
        """
        dims = {}
        for name, allowed in self.task.config.drawing.ranges.items():
            if not isinstance(allowed, Range):
                supported = [value for value in allowed if value in self.only.get(name, allowed)]
                dims[name] = generator.choice(supported or allowed)
            elif generator.random() < 0.5:
                dims[name] = generator.randint(allowed.min, allowed.max)
            else:
                size = math.exp(generator.uniform(math.log(allowed.min), math.log(allowed.max + 1)))
                dims[name] = min(int(size), allowed.max)
        return {name: value for name, value in dims.items() if value}

    def _draw_edges(self) -> list[dict[str, int]]:
        """Draw the dimensions that have their minimum size, one for each of the first random shapes."""
        drawing = self.task.config.drawing
        minima = [{name: allowed.min} for name, allowed in drawing.ranges.items() if isinstance(allowed, Range)]
        return random.Random(f"edge {self.seed}").sample(minima, min(len(minima), drawing.count // 2))


def _name_shape(dims: dict[str, int]) -> Shape:
    name = "_".join(f"{key.lower()}{value}" for key, value in dims.items())
    return Shape(name=f"{DRAWN}{name}", dims=dims, purpose="drawn at run time")


def _compute_size(dims: Mapping[str, int], drawing: Drawing) -> int:
    return math.prod(dims.get(name, 1) for name, allowed in drawing.ranges.items() if isinstance(allowed, Range))


def _find_small_shape(request: Request) -> Shape:
    """Return the smallest shape with at least _LEAST_BYTES of inputs and outputs, or the largest if none has."""
    problem, fmt, seed = request.task.problem, request.format, request.seeds[0]
    by_size = sorted(request.shapes, key=lambda shape: math.prod(shape.dims.values()))
    return next((s for s in by_size if build_case(problem, s.dims, seed, fmt).nbytes >= _LEAST_BYTES), by_size[-1])
