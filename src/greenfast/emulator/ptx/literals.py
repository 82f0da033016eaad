"""Constants in PTX text, and the initial values of variables (PTX ISA, "Constants", "Initializers")."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from greenfast.spec.errors import UsageError

_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_DECIMAL = re.compile(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$")
_SYMBOL = re.compile(r"[A-Za-z_$%][\w$]*$")
_TOKEN = re.compile(r"\s*(-?\d+\.?\d*[eE][-+]\d+|[{},()+]|-?[\w$%.]+|-)")


@dataclass(frozen=True)
class Relocation:
    """An address in a variable's initial value.

    offset, size: where it stands, in bytes. symbol: a variable or function. addend: what is added to its address.
    mask: which bits of it are kept, moved down to the lowest.
    """

    offset: int
    size: int
    symbol: str
    addend: int
    mask: int

    def value(self, address: int) -> bytes:
        """The bytes that stand there when the symbol lies at an address."""
        bits = (address + self.addend) & self.mask
        shift = (self.mask & -self.mask).bit_length() - 1
        return (bits >> shift & (1 << 8 * self.size) - 1).to_bytes(self.size, "little")


_EVERYTHING = 2**64 - 1


def integer(text: str) -> int | None:
    """An integer in decimal, hexadecimal, octal (0777) or binary (0b1), may end in U; None for other text."""
    match = _INTEGER.match(text)
    if match is None:
        return None
    digits = match[2].lower()
    base = {"0x": 16, "0b": 2}.get(digits[:2], 8 if digits[0] == "0" else 10)
    value = int(digits[2:] if base in (2, 16) else digits, base)
    return -value if match[1] else value


def pattern(text: str) -> tuple[int, int] | None:
    """The bits of a floating-point constant and its width: 0f or 0d with the bits, or a decimal number (of 64 bits)."""
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return int(text[2:], 16), 32
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return int(text[2:], 16), 64
    if _DECIMAL.match(text):
        return int.from_bytes(struct.pack("<d", float(text)), "little"), 64
    return None


def as_float(bits: int, width: int) -> float:
    """The number of a pattern."""
    return float(struct.unpack("<f" if width == 32 else "<d", bits.to_bytes(width // 8, "little"))[0])


class _Reader:
    """Reads an initial value: elements of a type, nested as the dimensions say, what is left out zero."""

    def __init__(self, text: str, kind: str, size: int, dims: tuple[int, ...]) -> None:
        self.text, self.kind, self.size, self.dims = text, kind, size, dims
        self.tokens = _TOKEN.findall(text)
        self.at = 0
        self.relocations: list[Relocation] = []
        if "".join(self.tokens) != re.sub(r"\s+", "", text):
            raise self.unreadable()

    def unreadable(self) -> UsageError:
        return UsageError(f"PTX: cannot read the initial value {self.text[:80]!r}")

    def next(self) -> str:
        if self.at >= len(self.tokens):
            raise self.unreadable()
        self.at += 1
        return str(self.tokens[self.at - 1])

    def peek(self) -> str:
        return str(self.tokens[self.at]) if self.at < len(self.tokens) else ""

    def expect(self, token: str) -> None:
        if self.next() != token:
            raise self.unreadable()

    def values(self, dims: tuple[int, ...], start: int) -> bytes:
        """A value, or { ... } of them; ``start``: where it will stand."""
        if self.peek() != "{":
            return self.element(start)
        self.expect("{")
        data, inner = b"", dims[1:]
        step = self.size
        for n in inner:
            step *= n
        while self.peek() != "}":
            nested = self.peek() == "{"
            found = self.values(inner, start + len(data))
            data += found.ljust(step, b"\0") if nested else found
            if self.peek() != "}":
                self.expect(",")
        self.expect("}")
        return data

    def element(self, start: int) -> bytes:
        """A number, an address, or some bits of an address."""
        token = self.next()
        found = pattern(token)
        if found is not None:
            return self.float_bytes(*found)
        number = integer(token)
        if number is None:
            self.at -= 1
            return self.address(start, _EVERYTHING)
        if self.peek() != "(":
            return (number & (1 << 8 * self.size) - 1).to_bytes(self.size, "little")
        self.expect("(")
        data = self.address(start, number & _EVERYTHING)
        self.expect(")")
        return data

    def float_bytes(self, bits: int, width: int) -> bytes:
        if self.kind in ("f32", "f64") and 8 * self.size != width:
            return struct.pack("<f" if self.size == 4 else "<d", as_float(bits, width))
        return (bits & (1 << 8 * self.size) - 1).to_bytes(self.size, "little")

    def address(self, start: int, mask: int) -> bytes:
        """symbol, generic(symbol), either of them with + or - a number."""
        name = self.next()
        if name == "generic" and self.peek() == "(":
            self.expect("(")
            name = self.next()
            self.expect(")")
        if not _SYMBOL.match(name):
            raise self.unreadable()
        addend = 0
        while self.peek() in ("+", "-") or integer(self.peek()) is not None:
            token = self.next()
            sign = -1 if token == "-" else 1
            number = integer(self.next() if token in ("+", "-") else token)
            if number is None:
                raise self.unreadable()
            addend += sign * number
        self.relocations.append(Relocation(start, self.size, name, addend, mask))
        return bytes(self.size)


def initial(text: str, kind: str, size: int, dims: tuple[int, ...]) -> tuple[bytes, tuple[Relocation, ...]]:
    """The bytes of an initial value of elements of ``size`` bytes, and the addresses that are still to be filled in.

    Raises UsageError for text that is none.
    """
    read = _Reader(text, kind, size, dims)
    data = read.values(dims, 0)
    if read.peek():
        raise read.unreadable()
    return data, tuple(read.relocations)
