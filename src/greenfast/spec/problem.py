"""The specification of a kernel's computation: inputs, outputs and references."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.errors import UsageError, too_large, unknown
from greenfast.spec.facts import KernelCounts

Array = NDArray[Any]


def to_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name, including the dtypes of ml_dtypes. Raises TypeError for another name."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # noqa: F401 - registers its names; only the judge's extras have it

        return np.dtype(name)


@dataclass(frozen=True)
class OutputSpec:
    """Shape and dtype of one output buffer. zeros: it is filled with zeros, not NaN, before a launch.

    dtype: NumPy's name, or one of ml_dtypes: bfloat16, float8_e4m3fn, float8_e5m2.
    """

    shape: tuple[int, ...]
    dtype: str
    zeros: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * to_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Case:
    """One problem instance: named input arrays, and the outputs that the kernel must write completely.

    A name among both is one buffer, changed in place: it holds the input before each launch.
    """

    inputs: dict[str, Array]
    outputs: dict[str, OutputSpec]

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs and outputs."""
        written = sum(out.nbytes for out in self.outputs.values())
        return written + sum(array.nbytes for array in self.inputs.values())

    @property
    def digest(self) -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of all inputs; equal digests mean equal inputs."""
        h = hashlib.sha256()
        for name in sorted(self.inputs):
            a = np.ascontiguousarray(self.inputs[name])
            h.update(f"{name}:{a.dtype}:{a.shape};".encode())
            h.update(a.tobytes())
        return h.hexdigest()[:16]


@dataclass(frozen=True)
class References:
    """The references for the decoded output of a case; float64 arrays of one shape.

    full: exact arithmetic on the unquantized inputs.
    exact: exact arithmetic on the dequantized inputs of the kernel.
    bound: per element, the largest |kernel - exact| from the kernel's documented roundings.
    bounds: the same by name, for kernels that round differently; a rung's ``kernel_error.rounding`` selects one.
    matched: share of elements that must be within the bound, for a problem with a tolerance only.
    most: largest absolute error of any element, independent of its bound.
    is_run: whether ``exact`` was computed by the problem's own reference on the CPU, with its own roundings. The same
    reference on a GPU is then equally correct.
    relative: replaces ``bound`` if trivial outputs, such as zeros, are within ``bound``: a stated tolerance relative to
    the magnitude of the outputs. None if there is none.
    sizes: number of elements per output in the flat arrays; ``matched`` applies to each output. Empty for one output.
    """

    full: NDArray[np.float64]
    exact: NDArray[np.float64]
    bound: NDArray[np.float64]
    bounds: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    matched: float = 1.0
    most: float = math.inf
    is_run: bool = False
    relative: NDArray[np.float64] | None = None
    sizes: tuple[int, ...] = ()

    def get_bound(self, rounding: str) -> NDArray[np.float64]:
        """Return the bound with this name, ``bound`` for an empty name. Raises UsageError with the known names."""
        if rounding and rounding not in self.bounds:
            raise unknown("rounding of the problem's bounds", rounding, self.bounds)
        return self.bounds[rounding] if rounding else self.bound


class Problem(Protocol):
    """A problem: a module with these three functions. All of them are deterministic in their arguments.

    seed: a whole number below 2**64. Other seeds give other inputs.

    It may have a fourth, ``least_work(dims)``: minima for a launch's counts (see least_work). And it may offer other
    inputs than its normal ones, by the names in ``VARIANTS``: ``make_case`` and ``references`` then take ``variant``.
    """

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        """Make the inputs for a shape and a seed in a number format."""

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        """Compute the references for the same case."""

    def decode(self, outputs: Mapping[str, Array], fmt: str) -> NDArray[np.float64]:
        """Decode raw output buffers to real values in the shape of the references."""


#: The counts that a problem may give a minimum for.
LEAST_WORK = tuple(name for name, kind in KernelCounts.__annotations__.items() if kind == "int")


def least_work(problem: Problem, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the problem's minimum counts for these dimensions, by name; empty without ``least_work``.

    Raises UsageError for a name that is not in LEAST_WORK.
    """
    function = getattr(problem, "least_work", None)
    minima: dict[str, int] = dict(function(dims)) if function else {}
    for name in minima:
        if name not in LEAST_WORK:
            raise unknown("count of least_work", name, LEAST_WORK)
    return minima


#: The variant of the inputs that every problem has.
NORMAL = "normal"
_Made = TypeVar("_Made")


def list_variants(problem: Problem) -> tuple[str, ...]:
    """Return the names of a problem's input variants except NORMAL. Raises UsageError for an invalid VARIANTS."""
    names = getattr(problem, "VARIANTS", ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f'{_get_name(problem)}: VARIANTS is {names!r}; a tuple of names is allowed, such as ("outliers",)'
        )
    return tuple(name for name in names if name != NORMAL)


def build_case(problem: Problem, dims: Mapping[str, int], seed: int, fmt: str, variant: str = NORMAL) -> Case:
    """Make a problem's case.

    Raises UsageError if the dimensions are too large, or if the result is not a valid Case.
    """
    case = _made(problem, problem.make_case, dims, seed, fmt, variant)
    fault = _find_fault(case)
    if fault:
        raise UsageError(f"{_get_name(problem)}: make_case of {_described(dims)}, seed {seed}: {fault}")
    return case


def _find_fault(case: Case) -> str:
    """Describe the fault of make_case's result; empty for a valid Case."""
    if not isinstance(case, Case):
        return f"it gives {type(case).__name__}; a Case is asked for"
    for name, array in case.inputs.items():
        if not isinstance(array, np.ndarray):
            return f"input {name!r} is {type(array).__name__}; NumPy arrays are allowed"
        if array.dtype.hasobject or array.dtype.kind in "USMm":
            return f"input {name!r} has the dtype {array.dtype}; a kernel reads numbers"
    if not case.outputs:
        return "it has no outputs; name at least one, with an OutputSpec"
    for name, spec in case.outputs.items():
        try:
            nbytes = spec.nbytes
        except (AttributeError, TypeError) as e:
            return f"output {name!r}: {e}; an OutputSpec with a shape and the name of a NumPy dtype is asked for"
        if not all(isinstance(n, int | np.integer) and n >= 0 for n in spec.shape):
            return f"output {name!r} has the shape {spec.shape}; extents are whole numbers from 0"
        if name in case.inputs and case.inputs[name].nbytes != nbytes:
            return f"{name!r} is changed in place, with {case.inputs[name].nbytes} bytes before and {nbytes} after"
    return ""


def build_references(
    problem: Problem, dims: Mapping[str, int], seed: int, fmt: str, variant: str = NORMAL
) -> References:
    """Compute and check the references of the same case.

    Raises UsageError for dimensions that are too large, for references that are not float64 arrays of one shape, for
    such that are not finite, and for bounds that are not finite or negative.
    """
    references = _made(problem, problem.references, dims, seed, fmt, variant)
    where = f"{_get_name(problem)}: references of {_described(dims)}, seed {seed}"
    where += f", variant {variant}" if variant != NORMAL else ""
    if references.sizes and sum(references.sizes) != np.size(references.exact):
        raise UsageError(f"{where}: sizes has {sum(references.sizes)} elements, and exact {np.size(references.exact)}")
    bounds = {"bound": references.bound, **({} if references.relative is None else {"relative": references.relative})}
    bounds |= {f"bounds[{name!r}]": bound for name, bound in references.bounds.items()}
    for name, array in {"full": references.full, "exact": references.exact, **bounds}.items():
        if not isinstance(array, np.ndarray | np.generic) or array.dtype != np.float64:
            kind = array.dtype if isinstance(array, np.ndarray | np.generic) else type(array).__name__
            raise UsageError(f"{where}: {name} is {kind}; arrays of float64 are allowed")
        shape = np.shape(array)
        if shape != np.shape(references.exact):
            raise UsageError(f"{where}: {name} has the shape {shape}, and exact {np.shape(references.exact)}")
        bad = ~np.isfinite(array) if name not in bounds else ~(np.isfinite(array) & (array >= 0))
        if bad.any():
            index = tuple(map(int, np.argwhere(bad)[0]))
            rule = "; a bound is finite and at least 0" if name in bounds else "; inputs must not make NaN or infinity"
            raise UsageError(f"{where}: {name}{list(index)} is {array[index]}{rule}")
    return references


def _made(
    problem: Problem, function: Callable[..., _Made], dims: Mapping[str, int], seed: int, fmt: str, variant: str
) -> _Made:
    try:
        return function(dims, seed, fmt) if variant == NORMAL else function(dims, seed, fmt, variant=variant)
    except Exception as e:
        name = getattr(function, "__name__", "the problem")
        where = f"{_get_name(problem)}: {name} of {_described(dims)}, seed {seed}"
        error = too_large(where, e)
        if error is None and seed >= 2**32 and isinstance(e, ValueError | OverflowError):
            message = f"{type(e).__name__}: {e}"
            raise UsageError(f"{where}: {message}; seeds have 64 bits: numpy.random.default_rng takes them") from e
        if error is None:
            raise
        raise error from e


def _get_name(problem: Problem) -> str:
    return str(getattr(problem, "__file__", None) or problem)


def _described(dims: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in dims.items())
