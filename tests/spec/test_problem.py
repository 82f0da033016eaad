"""A problem's mistakes are named as its own: references that do not hold, and cases that cannot be made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from greenfast.spec.errors import UsageError
from greenfast.spec.problem import (
    NORMAL,
    Case,
    OutputSpec,
    Problem,
    References,
    build_case,
    build_references,
    list_variants,
)

DIMS = {"R": 2, "C": 3}


class Made:
    """A problem whose references are given."""

    VARIANTS = ("normal", "shifted")

    def __init__(self, **changes: NDArray[np.float64]) -> None:
        self._changes = changes

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str, variant: str = NORMAL) -> Case:
        x = np.zeros((dims["R"], dims["C"]), np.float32) + (variant == "shifted")
        return Case({"x": x}, {"y": OutputSpec(x.shape, "float32")})

    def references(self, dims: Mapping[str, int], seed: int, fmt: str, variant: str = NORMAL) -> References:
        ones = np.ones((dims["R"], dims["C"]))
        found: dict[str, Any] = {"full": ones, "exact": ones, "bound": ones} | self._changes
        return References(**found)

    def decode(self, outputs: Mapping[str, Any], fmt: str) -> NDArray[np.float64]:
        raise NotImplementedError


def with_element(value: float) -> NDArray[np.float64]:
    """Ones, but for one element."""
    array = np.ones((2, 3))
    array[1, 2] = value
    return array


def made(**changes: Any) -> Problem:
    return cast(Problem, Made(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bound": with_element(-1e-9)}, "bound[1, 2] is -1e-09; a bound is finite and at least 0"),
        ({"bound": with_element(np.inf)}, "bound[1, 2] is inf; a bound is finite"),
        ({"bound": with_element(np.nan)}, "bound[1, 2] is nan; a bound is finite"),
        ({"bounds": {"e4m3": with_element(-2.0)}}, "bounds['e4m3'][1, 2] is -2.0; a bound is finite"),
        ({"bound": np.ones((3, 2))}, "bound has the shape (3, 2), and exact (2, 3)"),
        ({"bound": np.ones(())}, "bound has the shape (), and exact (2, 3)"),
        ({"exact": with_element(np.inf)}, "exact[1, 2] is inf; inputs must not make NaN or infinity"),
        ({"full": with_element(np.nan)}, "full[1, 2] is nan; inputs must not"),
        ({"full": np.ones((2, 3), np.float32)}, "full is float32; arrays of float64 are allowed"),
        ({"exact": [[1.0] * 3] * 2}, "exact is list; arrays of float64 are allowed"),
        ({"bound": np.ones((2, 3), complex)}, "bound is complex128; arrays of float64 are allowed"),
    ],
)
def test_references_that_do_not_hold(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        build_references(made(**changes), DIMS, 4, "fp32", "shifted")
    assert says in str(error.value)
    assert "references of R=2 C=3, seed 4, variant shifted: " in str(error.value)


def test_right_ones_are_given_on() -> None:
    assert (build_references(made(bound=np.zeros((2, 3))), DIMS, 0, "fp32").bound == 0).all()
    assert build_case(made(), DIMS, 0, "fp32").inputs["x"].max() == 0
    assert build_case(made(), DIMS, 0, "fp32", "shifted").inputs["x"].min() == 1
    assert list_variants(made()) == ("shifted",)


def test_a_case_beyond_all_memory_is_one_line_with_its_place() -> None:
    with pytest.raises(UsageError) as error:
        build_case(made(), {"R": 2**40, "C": 2**10}, 0, "fp32")
    assert "make_case of R=1099511627776 C=1024, seed 0: " in str(error.value)
    assert "its dimensions are too large: " in str(error.value)
    assert "(test_problem.py, line " in str(error.value)
    assert len(str(error.value).splitlines()) == 1


X, Y = np.zeros(3, np.float32), OutputSpec((3,), "float32")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (None, "it gives NoneType; a Case is asked for"),
        (Case({"x": [1.0]}, {"y": Y}), "input 'x' is list; NumPy arrays are allowed"),  # type: ignore[dict-item]
        (Case({"x": X.astype(object)}, {"y": Y}), "input 'x' has the dtype object"),
        (Case({"x": np.array(["a"])}, {"y": Y}), "input 'x' has the dtype <U1"),
        (Case({"x": X}, {}), "it has no outputs"),
        (Case({"x": X}, {"y": OutputSpec((3,), "float33")}), "output 'y': data type 'float33' not understood"),
        (
            Case({"x": X}, {"y": OutputSpec((-1,), "float32")}),
            "output 'y' has the shape (-1,); extents are whole numbers",
        ),
        (
            Case({"x": X}, {"x": OutputSpec((4,), "float32")}),
            "'x' is changed in place, with 12 bytes before and 16 after",
        ),
    ],
)
def test_what_is_no_case(case: Case, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Made, "make_case", lambda *_: case)
    with pytest.raises(UsageError) as error:
        build_case(made(), DIMS, 4, "fp32")
    assert f"make_case of R=2 C=3, seed 4: {says}" in str(error.value)


@pytest.mark.parametrize("variants", ["shifted", ("",), 3, (1,)])
def test_variants_that_are_no_names(variants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Made, "VARIANTS", variants)
    with pytest.raises(UsageError, match=r"VARIANTS is .*; a tuple of names is allowed"):
        list_variants(made())
