"""Expressions in dimensions: what they give, and that nothing in them takes long or runs."""

from __future__ import annotations

import pytest

from greenfast.judge.solution.expressions import MAX_LENGTH, evaluate, evaluate_whole
from greenfast.spec.errors import UsageError

NAMES = {"R": 33, "C": 150}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (7, 7),
        ("7", 7),
        ("ceildiv(R, 4)", 9),
        ("R // 4 * C % 7", 1200 % 7),
        ("-R + C", 117),
        ("2 ** 62", 2**62),
        ("min(C, 8, R)", 8),
        ("max(C, R) if C > R else 0", 150),
        ("1 < R < 40", 1),
        ("8 if C % 8 == 0 else 2 if C % 2 == 0 else 1", 2),
    ],
)
def test_a_whole_number(text: str | int, value: int) -> None:
    assert evaluate_whole(text, NAMES) == value


def test_a_float_where_one_is_wanted() -> None:
    assert evaluate("1 / sqrt(C)", NAMES) == pytest.approx(150**-0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2**(2**62)", "the exponent is 4.6"),
        ("9**62", "exceeds 2"),
        ("9**9**9", "the exponent is"),
        ("2**62 * 2", "exceeds 2"),
        ("2**-1", "the exponent is -1"),
        ("9" * 400, "exceeds 2"),
        ("1 // 0", "divides by zero for R=33, C=150"),
        ("R / 2", "use // in place of /"),
        ("D", "D is not known; known are R, C"),
        ("R.real", "'R.real' is not allowed; allowed are whole numbers"),
        ("__import__('os').system('true')", "is not allowed"),
        ("[R for R in R]", "is not allowed"),
        ("'text'", "is not allowed"),
        ("(lambda: 1)()", "is not allowed"),
        ("min(*[1, 2])", "is not allowed"),
        ("R +", "is not an expression"),
        ("", "is not an expression"),
        ("1\0", "is not an expression"),
        ("(" * 240 + ")" * 240, "is not an expression"),
        ("-" * (MAX_LENGTH - 1) + "R", "too many operators within each other"),
        ("1+" * MAX_LENGTH + "1", "an expression of 1001 characters"),
    ],
)
def test_everything_else_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as found:
        evaluate_whole(text, NAMES)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
