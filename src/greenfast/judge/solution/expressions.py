"""Evaluation of expressions in a shape's dimensions. ``ast`` parses them; they never run as Python."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping

from greenfast.spec.errors import UsageError

#: Limits on the length of the text and on the magnitude of integers at any step.
MAX_LENGTH = 500
MAX_VALUE = 2**63 - 1

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Number, Number], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "min": min,
    "max": max,
    "ceildiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda n: 1 << max(0, int(n) - 1).bit_length(),
    "sqrt": math.sqrt,
}
_WHOLE = "whole numbers, + - * // % **, comparisons, min, max, ceildiv, next_power_of_2 and `a if condition else b`"


class NoValueError(UsageError):
    """A valid expression without a value for these names: it divides by zero or overflows."""


def find_names(text: str) -> set[str]:
    """Return the names in an expression. Raises UsageError for an invalid expression."""
    return {node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)} - set(_FUNCTIONS)


def evaluate_whole(text: str | int, names: Mapping[str, int]) -> int:
    """Return the integer value of an expression. Raises UsageError with the expression for any other value."""
    value = evaluate(str(text), names)
    if not isinstance(value, int):
        raise UsageError(f"{text!r} is not a whole number; use // in place of /")
    return value


def evaluate(text: str, names: Mapping[str, int]) -> Number:
    """Return the value of an expression. / and sqrt give floats.

    Raises UsageError with the expression, and NoValueError if other values of the names may be valid.
    """
    try:
        return _value(parse(text), names, text)
    except ZeroDivisionError:
        raise NoValueError(f"{text!r} divides by zero for {_shown(names)}") from None
    except (ArithmeticError, ValueError, TypeError) as e:
        raise NoValueError(f"{text!r}: {e}") from None
    except RecursionError:
        raise UsageError(f"{text[:80]!r} has too many operators within each other") from None


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> ast.expr:
    """Return the syntax tree of an expression. Raises UsageError for an invalid expression."""
    if len(text) > MAX_LENGTH:
        raise UsageError(f"an expression of {len(text)} characters; at most {MAX_LENGTH} are read")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(f"{text!r} is not an expression; allowed are {_WHOLE}") from None


def _value(node: ast.expr, names: Mapping[str, int], text: str) -> Number:
    def evaluate_node(inner: ast.expr) -> Number:
        return _value(inner, names, text)

    result: Number
    match node:
        case ast.Constant(value=int() | float() as value):
            result = value
        case ast.Name(id=name):
            if name not in names:
                raise UsageError(f"{text!r}: {name} is not known; known are {', '.join(names) or 'no names'}")
            result = names[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -evaluate_node(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            result = _power(evaluate_node(left), evaluate_node(right), text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](evaluate_node(left), evaluate_node(right))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            values = [evaluate_node(left), *map(evaluate_node, others)]
            result = all(_COMPARISONS[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=other):
            result = evaluate_node(body) if evaluate_node(test) else evaluate_node(other)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*map(evaluate_node, arguments))
        case _:
            raise UsageError(f"{text!r}: {ast.unparse(node)!r} is not allowed; allowed are {_WHOLE}")
    return _check_magnitude(result, text)


def _power(base: Number, exponent: Number, text: str) -> Number:
    if not isinstance(exponent, int) or not 0 <= exponent <= 62:
        raise NoValueError(f"{text!r}: the exponent is {exponent:.6g}; whole numbers from 0 to 62 are allowed")
    if isinstance(base, int) and base.bit_length() * exponent > 64 * 2:
        raise NoValueError(_too_large(text))
    return base**exponent


def _check_magnitude(value: Number, text: str) -> Number:
    if isinstance(value, float):
        return value
    if abs(value) > MAX_VALUE:
        raise NoValueError(_too_large(text))
    return int(value)  # The value of a comparison is 0 or 1.


def _too_large(text: str) -> str:
    return f"{text[:80]!r} exceeds 2**63 - 1"


def _shown(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in names.items()) or "no names"
