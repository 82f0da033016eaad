"""Whether a problem's check notices a wrong output: parts that nothing compares, and answers that compute nothing.

A check that cannot fail accepts every kernel. So a result that passed is changed, and decode must show each change. And
answers that need no work (zeros, a constant, another seed's answer, a copy of an input) must not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Array, Case, References, dtype_of

Floats = NDArray[np.float64]
#: Elements of an output that are changed one at a time, besides its first and last.
_PLACES = 4
#: Arbitrary values; no right output is near all of them.
FILLS = (7.0, 99.0)
#: Elements that are compared before all are.
_SAMPLE = 4096
#: More elements than allowed must be wrong in the sample by this share before the rest is not looked at.
_MARGIN = 0.1
_SEED = 1
#: Answers that compute nothing. The last two take the answer to other inputs.
ZEROS, OTHER, CONSTANT = "zeros", "the answer to other inputs", "a constant"
NEED_OTHERS = frozenset({OTHER, CONSTANT})


def find_dropped(decode: Callable[[dict[str, Array]], Floats], outputs: Mapping[str, Array], decoded: Floats) -> str:
    """Return which part of the outputs decode does not show; empty if it shows all.

    outputs: raw buffers that passed the check. decoded: what decode gives for them. Changed are: all elements of an
    output, their signs, and single elements. What decode raises for changed outputs counts as shown.
    """
    for name, array in outputs.items():
        parts = _words(array)
        if not parts.size:
            continue
        sign = parts.dtype.type(1 if array.dtype == np.bool_ else 1 << (8 * parts.itemsize - 1))
        flipped = parts ^ sign if array.dtype == np.bool_ else ~parts
        if (shown := _shown(decode, outputs, name, flipped, decoded)) < parts.size:
            return f"all {parts.size} elements of {name!r} were changed, and {shown} elements of decode's result"
        if array.dtype != np.bool_:
            if array.dtype.kind == "i":  # whose sign is not one bit
                signed = int(np.count_nonzero(parts & ~sign))
                if (shown := _shown(decode, outputs, name, ~parts + parts.dtype.type(1), decoded)) < signed:
                    return f"the sign of {signed} elements of {name!r} was changed, and {shown} of decode's result"
            signed = int(np.count_nonzero(parts & ~sign))
            if (shown := _shown(decode, outputs, name, parts ^ sign, decoded)) < signed:
                return f"the highest bit of {signed} elements of {name!r} was changed, and {shown} of decode's result"
        rng = np.random.default_rng(_SEED)
        for place in {0, parts.size - 1, *rng.integers(0, parts.size, _PLACES).tolist()}:
            changed = parts.copy()
            changed[place] = flipped[place]
            if not _shown(decode, outputs, name, changed, decoded):
                index = tuple(int(n) for n in np.unravel_index(place * array.size // parts.size, array.shape))
                return f"{name}{list(index)} was changed, and no element of decode's result"
    return ""


def _words(array: Array) -> NDArray[Any]:
    """The bits of an output's elements as flat unsigned numbers; of a complex element two."""
    size = array.itemsize // 2 if array.dtype.kind == "c" else array.itemsize
    return np.ascontiguousarray(array).reshape(-1).view(f"u{size}")


def _shown(
    decode: Callable[[dict[str, Array]], Floats],
    outputs: Mapping[str, Array],
    name: str,
    words: NDArray[Any],
    before: Floats,
) -> int:
    """Count the elements of decode's result that change with an output; all if decode refuses it."""
    changed = {**outputs, name: words.view(outputs[name].dtype).reshape(outputs[name].shape)}
    try:
        with np.errstate(all="ignore"):
            after = decode(changed)
    except Exception:
        return words.size
    if after.shape != before.shape:
        return words.size
    return int(np.count_nonzero(after != before))


def filled(outputs: Mapping[str, Array]) -> Iterator[tuple[str, list[dict[str, Array]]]]:
    """Yield each output's name, and the outputs with that one filled with each of FILLS."""
    for name, array in outputs.items():
        if array.size and array.dtype != np.bool_:
            with np.errstate(all="ignore"):
                yield name, [{**outputs, name: np.full_like(array, value)} for value in FILLS]


def trivial_answers(case: Case, references: References, other: Floats | None) -> Iterator[tuple[str, Floats]]:
    """Yield the name and the values of each answer that computes nothing.

    other: the answer to other inputs of this shape; None for the first inputs.
    """
    exact = references.exact
    yield ZEROS, np.zeros_like(exact)
    known = other is not None and other.shape == exact.shape
    if other is not None and known:
        yield OTHER, other
    parts = segments(references, exact)
    others = segments(references, other) if other is not None and known else []
    for n, of_other in enumerate(others):
        constant = np.broadcast_to(np.float64(of_other.mean() if of_other.size else 0.0), of_other.shape)
        yield CONSTANT, _with_part(exact, parts, n, constant)
    for n in range(len(parts) if len(parts) > 1 else 0):  # one output alone, and the others right
        yield ZEROS, _with_part(exact, parts, n, np.zeros(parts[n].size))
        if others:
            yield OTHER, _with_part(exact, parts, n, others[n])
    specs = list(case.outputs.values())
    for name, array in case.inputs.items():
        if array.size != exact.size or len(specs) != 1:
            continue
        with np.errstate(all="ignore"):
            copy = array.reshape(-1).astype(dtype_of(specs[0].dtype)).astype(np.float64).reshape(exact.shape)
        if not np.array_equal(copy, exact):  # else a copy is the right answer
            yield f"a copy of {name!r}", copy


def _with_part(exact: Floats, parts: Sequence[Floats], number: int, part: Floats) -> Floats:
    """Return exact values with one output's in place of them."""
    if len(parts) == 1:
        return part.reshape(exact.shape)
    return np.concatenate([*parts[:number], part, *parts[number + 1 :]]).reshape(exact.shape)


def segments(references: References, values: Floats) -> list[Floats]:
    """Split flat values into those of each output."""
    sizes = references.sizes or (values.size,)
    return np.split(values.reshape(-1), np.cumsum(sizes)[:-1])


def is_far(answer: Floats, references: References, bound: Floats, factor: float) -> bool:
    """Check a sample of elements: whether an answer is beyond a multiple of the bound on more than may be."""
    if not answer.size:
        return False
    places = np.random.default_rng(_SEED).integers(0, answer.size, min(_SAMPLE, answer.size))
    a, e, b = (array.flat[places] for array in (answer, references.exact, bound))
    wrong = float(np.mean(~(np.abs(a - e) <= factor * b)))
    return wrong > (1 - references.matched) + _MARGIN if references.matched < 1 else wrong > 0
