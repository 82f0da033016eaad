"""Tests of a problem's check: every part of the outputs must matter, and trivial answers must fail.

A check that cannot fail accepts every kernel. So a result that passed is changed, and decode must show each change.
Trivial answers (zeros, a constant, the answer of another seed, a copy of an input) must not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Array, Case, References, to_dtype

Floats = NDArray[np.float64]
#: Number of elements of an output that are changed one at a time, besides its first and last.
_NUM_ELEMENTS = 4
#: Arbitrary values. No correct output is near both.
FILLS = (7.0, 99.0)
#: Their bits in bfloat16, for outputs of uint16: NumPy has no bfloat16, and the integer 7 is nearly 0 as its bits.
_BFLOAT16_FILLS = (0x40E0, 0x42C6)
#: Number of elements of the sample that is compared before all elements are.
_SAMPLE = 4096
#: An answer is rejected by the sample alone if the share of wrong elements exceeds the allowed one by this margin.
_MARGIN = 0.1
_SEED = 1
#: Trivial answers. The last two need the answer to other inputs.
ZEROS, OTHER, CONSTANT = "zeros", "the answer to other inputs", "a constant"
NEED_OTHERS = frozenset({OTHER, CONSTANT})


def find_dropped(decode: Callable[[dict[str, Array]], Floats], outputs: Mapping[str, Array], decoded: Floats) -> str:
    """Return the part of the outputs that decode ignores, in words; empty if there is none.

    The function changes all elements of an output, their signs, and single elements, and compares decode's results. An
    exception of decode for changed outputs counts as a different result.
    outputs: raw buffers that passed the check. decoded: decode's result for them.
    """
    for name, array in outputs.items():
        parts = _view_words(array)
        if not parts.size:
            continue
        sign = parts.dtype.type(1 if array.dtype == np.bool_ else 1 << (8 * parts.itemsize - 1))
        flipped = parts ^ sign if array.dtype == np.bool_ else ~parts
        if (shown := _count_changes(decode, outputs, name, flipped, decoded)) < parts.size:
            return f"all {parts.size} elements of {name!r} were changed, and {shown} elements of decode's result"
        if array.dtype != np.bool_:
            if array.dtype.kind == "i":  # Two's complement: the sign is not a single bit.
                signed = int(np.count_nonzero(parts & ~sign))
                if (shown := _count_changes(decode, outputs, name, ~parts + parts.dtype.type(1), decoded)) < signed:
                    return f"the sign of {signed} elements of {name!r} was changed, and {shown} of decode's result"
            signed = int(np.count_nonzero(parts & ~sign))
            if (shown := _count_changes(decode, outputs, name, parts ^ sign, decoded)) < signed:
                return f"the highest bit of {signed} elements of {name!r} was changed, and {shown} of decode's result"
        rng = np.random.default_rng(_SEED)
        for element in {0, parts.size - 1, *rng.integers(0, parts.size, _NUM_ELEMENTS).tolist()}:
            changed = parts.copy()
            changed[element] = flipped[element]
            if not _count_changes(decode, outputs, name, changed, decoded):
                index = tuple(int(n) for n in np.unravel_index(element * array.size // parts.size, array.shape))
                return f"{name}{list(index)} was changed, and no element of decode's result"
    return ""


def _view_words(array: Array) -> NDArray[Any]:
    """Return the bits of an output as flat unsigned integers, one per element, two per complex element."""
    size = array.itemsize // 2 if array.dtype.kind == "c" else array.itemsize
    return np.ascontiguousarray(array).reshape(-1).view(f"u{size}")


def _count_changes(
    decode: Callable[[dict[str, Array]], Floats],
    outputs: Mapping[str, Array],
    name: str,
    words: NDArray[Any],
    before: Floats,
) -> int:
    """Count the elements of decode's result that change with an output. If decode raises, all elements count."""
    changed = {**outputs, name: words.view(outputs[name].dtype).reshape(outputs[name].shape)}
    try:
        with np.errstate(all="ignore"):
            after = decode(changed)
    except Exception:
        return words.size
    if after.shape != before.shape:
        return words.size
    return int(np.count_nonzero(after != before))


def fill_outputs(outputs: Mapping[str, Array]) -> Iterator[tuple[str, list[dict[str, Array]]]]:
    """Yield the name of each output, and one copy of the outputs per value of FILLS with this output filled.

    An output of uint16 is filled with the bits of the values in bfloat16.
    """
    for name, array in outputs.items():
        if array.size and array.dtype != np.bool_:
            fills = _BFLOAT16_FILLS if array.dtype == np.uint16 else FILLS
            with np.errstate(all="ignore"):
                yield name, [{**outputs, name: np.full_like(array, value)} for value in fills]


def generate_trivial_answers(case: Case, references: References, other: Floats | None) -> Iterator[tuple[str, Floats]]:
    """Yield the name and the values of each trivial answer.

    other: the answer to other inputs of this shape; None for the first inputs.
    """
    exact = references.exact
    yield ZEROS, np.zeros_like(exact)
    if other is not None and other.shape != exact.shape:
        other = None
    if other is not None:
        yield OTHER, other
    parts = split_outputs(references, exact)
    other_parts = split_outputs(references, other) if other is not None else []
    for n, other_part in enumerate(other_parts):
        constant = np.broadcast_to(np.float64(other_part.mean() if other_part.size else 0.0), other_part.shape)
        yield CONSTANT, _replace_part(exact, parts, n, constant)
    for n in range(len(parts) if len(parts) > 1 else 0):  # One output is wrong, the others are right.
        yield ZEROS, _replace_part(exact, parts, n, np.zeros(parts[n].size))
        if other_parts:
            yield OTHER, _replace_part(exact, parts, n, other_parts[n])
    specs = list(case.outputs.values())
    for name, array in case.inputs.items():
        if array.size != exact.size or len(specs) != 1:
            continue
        with np.errstate(all="ignore"):
            copy = array.reshape(-1).astype(to_dtype(specs[0].dtype)).astype(np.float64).reshape(exact.shape)
        if not np.array_equal(copy, exact):  # Otherwise a copy is the right answer.
            yield f"a copy of {name!r}", copy


def _replace_part(exact: Floats, parts: Sequence[Floats], number: int, part: Floats) -> Floats:
    if len(parts) == 1:
        return part.reshape(exact.shape)
    return np.concatenate([*parts[:number], part, *parts[number + 1 :]]).reshape(exact.shape)


def split_outputs(references: References, values: Floats) -> list[Floats]:
    """Split flat values into one array per output."""
    sizes = references.sizes or (values.size,)
    return np.split(values.reshape(-1), np.cumsum(sizes)[:-1])


def is_far(answer: Floats, references: References, bound: Floats, factor: float) -> bool:
    """Return True if too many elements of a sample exceed ``factor`` times the bound."""
    if not answer.size:
        return False
    sample = np.random.default_rng(_SEED).integers(0, answer.size, min(_SAMPLE, answer.size))
    a, e, b = (array.flat[sample] for array in (answer, references.exact, bound))
    wrong = float(np.mean(~(np.abs(a - e) <= factor * b)))
    return wrong > (1 - references.matched) + _MARGIN if references.matched < 1 else wrong > 0
