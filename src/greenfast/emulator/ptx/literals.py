"""Constants in PTX text, and the initial values of variables (PTX ISA, "Constants", "Initializers")."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from greenfast.spec.errors import UsageError

_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
#: The tokens of operands and initial values. A name may begin with a digit's %, as in %2, so 7%2 is no remainder.
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<pattern>0[fF][0-9a-fA-F]{8}(?![\w$.])|0[dD][0-9a-fA-F]{16}(?![\w$.]))
    |(?P<decimal>(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w$.])|\d+[eE][-+]?\d+(?![\w$.]))
    |(?P<integer>(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?(?![\w$.]))
    |(?P<cast>\(\s*\.[su]64\s*\))
    |(?P<name>(?:[_$%][\w$]+|[A-Za-z][\w$]*|_)(?:\.[a-z]\w*)?)
    |(?P<operator><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&^|~!?:(){}\[\],])
    )""",
    re.VERBOSE,
)
_BITS = 2**64 - 1
#: Binary operators by precedence, the loosest first.
_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip


@dataclass(frozen=True)
class Constant:
    """A constant: an integer of 64 bits, signed or not, a number of float64, or a literal of ``width`` bits."""

    value: int | float
    kind: str  # "s", "u" or "f"
    bits: int = 0
    width: int = 0

    def pattern(self) -> tuple[int, int]:
        """Return the bits, and the width of a float's (0 for an integer)."""
        if self.width:
            return self.bits, self.width
        if self.kind == "f":
            return int.from_bytes(struct.pack("<d", self.value), "little"), 64
        return int(self.value) & _BITS, 0


@dataclass(frozen=True)
class Relocation:
    """An address in a variable's initial value.

    offset, size: its position in bytes. symbol: a variable or function. addend: added to the symbol's address. mask:
    the bits that are kept and shifted down to bit 0.
    """

    offset: int
    size: int
    symbol: str
    addend: int
    mask: int

    def value(self, address: int) -> bytes:
        """Return the bytes of the relocation for a symbol at an address."""
        bits = (address + self.addend) & self.mask
        shift = (self.mask & -self.mask).bit_length() - 1
        return (bits >> shift & (1 << 8 * self.size) - 1).to_bytes(self.size, "little")


def integer(text: str) -> int | None:
    """Return an integer in decimal, hexadecimal, octal (0777) or binary (0b1), U at its end or not; None for others."""
    match = _INTEGER.match(text)
    if match is None:
        return None
    digits = match[2].lower()
    base = {"0x": 16, "0b": 2}.get(digits[:2], 8 if digits[0] == "0" else 10)
    value = int(digits[2:] if base in (2, 16) else digits, base)
    return -value if match[1] else value


def as_float(bits: int, width: int) -> float:
    """Return the number of a pattern."""
    return float(struct.unpack("<f" if width == 32 else "<d", bits.to_bytes(width // 8, "little"))[0])


class Tokens:
    """The tokens of an operand or of an initial value. ``subject``: names the text in errors."""

    def __init__(self, text: str, subject: str) -> None:
        """Split a text into tokens. Raise UsageError for invalid text."""
        self.text, self.subject, self.position = text, subject, 0
        self.tokens: list[tuple[str, str]] = []
        end, last = 0, len(text.rstrip())
        while end < last:
            match = _TOKEN.match(text, end)
            if match is None or match.lastgroup is None:
                raise self.error()
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            end = match.end()

    def error(self) -> UsageError:
        """Return the error for text that cannot be read."""
        return UsageError(f"PTX: cannot read {self.subject} {self.text[:80]!r}")

    def kind(self, ahead: int = 0) -> str:
        """Return the kind of the next token, or of one after it; empty at the end."""
        return self.tokens[self.position + ahead][0] if self.position + ahead < len(self.tokens) else ""

    def peek(self, ahead: int = 0) -> str:
        """Return the text of the next token, or of one after it; empty at the end."""
        return self.tokens[self.position + ahead][1] if self.position + ahead < len(self.tokens) else ""

    def next(self) -> str:
        """Take the next token. Raises UsageError at the end."""
        if self.position >= len(self.tokens):
            raise self.error()
        self.position += 1
        return self.tokens[self.position - 1][1]

    def accept(self, token: str) -> bool:
        """Take a token if it is the next one; returns whether it was."""
        result = self.peek() == token
        self.position += result
        return result

    def expect(self, token: str) -> None:
        """Take a token. Raises UsageError if another one is next."""
        if not self.accept(token):
            raise self.error()

    def end(self) -> None:
        """Raise UsageError unless every token was taken."""
        if self.position < len(self.tokens):
            raise self.error()

    # ---- constant expressions ---------------------------------------------------------------------------------------

    def constant(self) -> Constant:
        """Take a constant expression and return its value."""
        condition = self._binary(0)
        if not self.accept("?"):
            return condition
        self._integers(condition)
        first = self.constant()
        self.expect(":")
        second = self.constant()
        kind = self._common(first, second)
        chosen = first if condition.value else second
        return chosen if kind == "f" else _wrap(int(chosen.value), kind)

    def _common(self, a: Constant, b: Constant) -> str:
        """Return the kind that two operands are converted to."""
        if (a.kind == "f") != (b.kind == "f"):
            raise self.error()
        return "f" if a.kind == "f" else "u" if "u" in (a.kind, b.kind) else "s"

    def _integers(self, *operands: Constant) -> None:
        if any(o.kind == "f" for o in operands):
            raise self.error()

    def _binary(self, level: int) -> Constant:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self.peek() in _LEVELS[level] and self.kind() == "operator":
            operator = self.next()
            left = self._apply(operator, left, self._binary(level + 1))
        return left

    def _apply(self, operator: str, a: Constant, b: Constant) -> Constant:
        """Apply a binary operator as defined by the PTX ISA's table of constant expressions."""
        if operator in ("&&", "||"):
            self._integers(a, b)
            both = bool(a.value), bool(b.value)
            return _wrap(int(all(both) if operator == "&&" else any(both)), "s")
        if operator in _BITWISE:
            self._integers(a, b)
            return _wrap(_BITWISE[operator](int(a.value) & _BITS, int(b.value) & _BITS), "u")
        if operator in ("<<", ">>"):
            self._integers(a, b)
            amount = int(b.value) & _BITS
            if amount > 63:
                raise self.error()
            value = int(a.value)
            return _wrap(value << amount if operator == "<<" else value >> amount, a.kind)
        kind = self._common(a, b)
        if operator in _COMPARED:
            if kind == "u":
                a, b = (_wrap(int(x.value), "u") for x in (a, b))
            return _wrap(int(_COMPARED[operator](a.value, b.value)), "s")
        if kind == "f":
            if operator == "%" or (operator == "/" and not b.value):
                raise self.error()
            return Constant(_fold_float(operator, float(a.value), float(b.value)), "f")
        left, right = (int(_wrap(int(x.value), kind).value) for x in (a, b))
        if operator in "/%" and not right:
            raise self.error()
        return _wrap(_fold_integer(operator, left, right), kind)

    def _unary(self) -> Constant:
        if self.kind() == "cast":
            to = self.next().strip("() \t\n")[1]
            operand = self._unary()
            self._integers(operand)
            return _wrap(int(operand.value), to)
        if self.kind() == "operator" and self.peek() in "+-!~":
            operator = self.next()
            operand = self._unary()
            if operator in "!~":
                self._integers(operand)
                return _wrap(int(not operand.value), "s") if operator == "!" else _wrap(~int(operand.value), "u")
            if operand.width:  # ptxas takes no sign in front of 0f and 0d
                raise self.error()
            if operator == "+":
                return operand
            return Constant(-operand.value, "f") if operand.kind == "f" else _wrap(-int(operand.value), operand.kind)
        if self.accept("("):
            result = self.constant()
            self.expect(")")
            return result
        kind, text = self.kind(), self.next()
        if kind == "integer":
            value = integer(text)
            if value is None or value > _BITS:
                raise self.error()
            return Constant(value, "u" if text.endswith("U") or value >> 63 else "s")
        if kind == "decimal":
            return Constant(float(text), "f")
        if kind == "pattern":
            width = 32 if text[1] in "fF" else 64
            bits = int(text[2:], 16)
            return Constant(as_float(bits, width), "f", bits, width)
        if text == "WARP_SZ":
            return Constant(32, "s")
        raise self.error()

    def offset(self) -> int:
        """Parse ``+ constant`` or ``- constant`` if it is next, and return the sum; 0 if neither is next."""
        if self.kind() != "operator" or self.peek() not in ("+", "-"):
            return 0
        if self.peek() == "+":
            self.next()
        result = self.constant()
        self._integers(result)
        return int(_wrap(int(result.value), "s").value)


_BITWISE: dict[str, Callable[[int, int], int]] = {
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _wrap(value: int, kind: str) -> Constant:
    """Return the value as a 64-bit integer constant."""
    value &= _BITS
    return Constant(value - (1 << 64) if kind == "s" and value >> 63 else value, kind)


def _fold_integer(operator: str, a: int, b: int) -> int:
    if operator in "+-*":
        return a + b if operator == "+" else a - b if operator == "-" else a * b
    quotient = abs(a) // abs(b)  # toward zero, as in C
    quotient = -quotient if (a < 0) != (b < 0) else quotient
    return quotient if operator == "/" else a - quotient * b


def _fold_float(operator: str, a: float, b: float) -> float:
    return a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b


class _Reader(Tokens):
    """Reader of an initial value: elements of a type, nested by dimension; omitted elements are zero."""

    def __init__(self, text: str, kind: str, size: int, dims: tuple[int, ...]) -> None:
        super().__init__(text, "the initial value")
        self.of, self.size, self.dims = kind, size, dims
        self.relocations: list[Relocation] = []

    def values(self, dims: tuple[int, ...], start: int) -> bytes:
        """Parse a value, or { ... } of values; ``start``: its offset."""
        if not self.accept("{"):
            return self.element(start)
        data, inner = b"", dims[1:]
        step = self.size * math.prod(inner)
        count = 0
        while self.peek() != "}":
            nested = self.peek() == "{"
            result = self.values(inner, start + len(data))
            data += result.ljust(step, b"\0") if nested else result
            count += 1
            if self.peek() != "}":
                self.expect(",")
                if self.peek() == "}":
                    raise self.error()
        self.expect("}")
        if dims[:1] != (0,) and len(data) > self.size * math.prod(dims):
            raise UsageError(f"PTX: more values than elements in the initial value {self.text[:80]!r}")
        return data

    def element(self, start: int) -> bytes:
        """Take a number, an address, or some bits of an address."""
        if self.kind() == "name" and self.peek() != "WARP_SZ":
            return self.address(start, _BITS)
        if self.kind() == "integer" and self.peek(1) == "(":
            mask = integer(self.next())
            self.expect("(")
            data = self.address(start, (mask or 0) & _BITS)
            self.expect(")")
            return data
        result = self.constant()
        bits, width = result.pattern()
        if self.of in ("f32", "f64"):
            if not width:
                raise self.error()
            if width != 8 * self.size:
                return struct.pack("<f" if self.size == 4 else "<d", result.value)
        elif width and width != 8 * self.size:
            raise self.error()
        return (bits & (1 << 8 * self.size) - 1).to_bytes(self.size, "little")

    def address(self, start: int, mask: int) -> bytes:
        """Take symbol or generic(symbol), either of them with + or - a number."""
        of_generic = self.peek() == "generic" and self.peek(1) == "("
        self.position += 2 * of_generic
        if self.kind() != "name":
            raise self.error()
        name = self.next()
        if of_generic:
            self.expect(")")
        self.relocations.append(Relocation(start, self.size, name, self.offset(), mask))
        return bytes(self.size)


def initial(text: str, kind: str, size: int, dims: tuple[int, ...]) -> tuple[bytes, tuple[Relocation, ...]]:
    """Return the bytes of an initial value of elements of ``size`` bytes, and the addresses to be filled in.

    Raises UsageError for text that is none.
    """
    read = _Reader(text, kind, size, dims)
    data = read.values(dims, 0)
    read.end()
    return data, tuple(read.relocations)
