"""Source names of mangled functions and variables, and of elements of arrays.

Facts: Itanium C++ ABI, 5.1 ("External Names").
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_NUMBER = re.compile(r"\d+")
#: Bytes of an element, by its type in C++.
_BYTES = {
    "char": 1, "bool": 1, "int8_t": 1, "uint8_t": 1, "__nv_fp8_e4m3": 1, "__nv_fp8_e5m2": 1, "u8": 1,
    "short": 2, "int16_t": 2, "uint16_t": 2, "half": 2, "__half": 2, "__nv_bfloat16": 2, "bf16": 2,
    "int": 4, "unsigned": 4, "float": 4, "int32_t": 4, "uint32_t": 4, "half2": 4, "__half2": 4, "u32": 4, "uint": 4,
    "long": 8, "double": 8, "int64_t": 8, "uint64_t": 8, "float2": 8, "int2": 8, "uint2": 8, "size_t": 8, "u64": 8,
    "float4": 16, "int4": 16, "uint4": 16, "double2": 16,
}  # fmt: skip
_DECLARATION = re.compile(r"\b(?:__shared__|__device__|__constant__)\b([^;{}]*)[;={]")
_DECLARATOR = re.compile(r"([A-Za-z_]\w*)\s*((?:\[[^\[\]]*\]\s*)+)")
_CONSTANT = re.compile(r"(?:#define\s+|\bconst(?:expr)?\s+(?:static\s+)?[\w\s]*?)([A-Za-z_]\w*)\s*=?\s*(\d+)\b")
#: Codes of types and their parts, without a name.
_SUBSTITUTION = re.compile(r"S[0-9A-Z]*_|S[tabsiod]|T\d*_|A\d+_|Dv\d+_|DF\d+b?_?")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class ArrayShape:
    """An array as it is declared: bytes of an element, and dimensions."""

    item: int
    dims: tuple[int, ...]


def demangle(symbol: str) -> str:
    """Return the C++ name of a symbol with its scopes and without types; names that are not mangled are unchanged."""
    if not symbol.startswith("_Z"):
        return symbol
    name, _ = _encoding(symbol, 2)
    return name or symbol


def _encoding(text: str, index: int) -> tuple[str, int]:
    """Return the name that begins at a position, empty if it cannot be read, and where its name ends."""
    if text.startswith("Z", index):  # of a local variable: function E name
        end = index
        while (end := text.find("E", end + 1)) >= 0:
            name, stop = _source_name(text, end + 1)
            if name and re.fullmatch(r"(?:_\d+|__\d+_)?", text[stop:]):
                return name, stop
        outer, _ = _encoding(text, index + 1)
        return (f"{outer}::lambda" if outer and "Ul" in text else outer), len(text)
    if text.startswith("L", index):
        index += 1
    if not text.startswith("N", index):
        if text.startswith("St", index):
            index += 2
        return _source_name(text, index)
    parts, index = [], index + 1
    while index < len(text) and text[index] in "rVKRO":
        index += 1
    while index < len(text) and text[index] != "E":
        name, stop = _source_name(text, index + (text[index] == "L"))
        if name:
            parts.append("(anonymous)" if name.startswith("_GLOBAL__N_") else name)
            index = stop
        elif text.startswith("St", index):
            index += 2
        elif text[index] == "I":
            index = _skip_template(text, index)
        else:
            break
    return "::".join(parts), index


def _source_name(text: str, index: int) -> tuple[str, int]:
    """Return the name after its length, and the position after the name."""
    length = _NUMBER.match(text, index)
    if length is None:
        return "", index
    end = length.end() + int(length[0])
    return (text[length.end() : end], end) if end <= len(text) else ("", index)


def _skip_template(text: str, index: int) -> int:
    """Return where template arguments end that begin with I."""
    opened: list[str] = []
    while index < len(text):
        skipped = _SUBSTITUTION.match(text, index)
        if skipped:
            index = skipped.end()
            continue
        if text[index].isdigit():  # the value of a literal, or a name
            digits = _NUMBER.match(text, index)
            literal = opened[-1:] == ["L"] and digits is not None
            index = digits.end() if literal and digits else max(_source_name(text, index)[1], index + 1)
            continue
        if text[index] in "INLXJF":
            opened.append(text[index])
        elif text[index] == "E" and opened:
            opened.pop()
        index += 1
        if not opened:
            break
    return index


def read_shapes(sources: Iterable[str]) -> dict[str, ArrayShape]:
    """Return the arrays that CUDA sources declare with numbers or constants as dimensions, by name.

    Names with several different declarations are omitted. The size of an array is compared with the PTX later.
    """
    shapes: dict[str, ArrayShape | None] = {}
    for source in sources:
        text = _COMMENT.sub(" ", source)
        constants = {name: int(value) for name, value in _CONSTANT.findall(text)}
        for declaration in _DECLARATION.findall(text):
            item = max((_BYTES.get(word, 0) for word in re.findall(r"\w+", declaration)), default=0)
            for name, extents in _DECLARATOR.findall(declaration):
                dims = tuple(_dimension(d, constants) for d in re.findall(r"\[([^\[\]]*)\]", extents))
                shape = ArrayShape(item, dims)
                shapes[name] = shape if shapes.get(name, shape) == shape else None
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _dimension(text: str, constants: dict[str, int]) -> int:
    """Parse a dimension: a number, a constant, or a sum or product of two. Return 0 for anything else."""
    terms = re.fullmatch(r"\s*(\w+)\s*(?:([+*/-])\s*(\w+)\s*)?", text)
    if terms is None:
        return 0
    values = [constants.get(t, int(t) if t.isdigit() else 0) for t in (terms[1], terms[3]) if t is not None]
    if len(values) == 1 or not all(values):
        return values[0] if len(values) == 1 else 0
    a, b = values
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[terms[2]]


def describe_element(symbol: str, offset: int, size: int, shapes: dict[str, ArrayShape]) -> str:
    """Return an element of a variable, as ``As[2][0]``; ``As + 128`` if its declaration is not known.

    offset: in bytes; one within an element is added. size: of the variable, 0 if it is declared without one.
    """
    name = demangle(symbol)
    shape = shapes.get(name.rsplit("::", 1)[-1])
    if shape is None:
        return f"{name} + {offset}"
    dims, item = list(shape.dims), shape.item
    if dims.count(0) == 1 and size and item:
        unknown, known = dims.index(0), math.prod(d for d in dims if d) * item
        dims[unknown] = size // known
    if not item and size and all(dims):
        item = size // math.prod(dims)
    if not item or not all(dims[1:]) or (size and math.prod(dims) * item != size):
        return f"{name} + {offset}"
    index, remainder = divmod(offset, item)
    places = []
    for extent in reversed(dims[1:]):
        index, location = divmod(index, extent)
        places.append(location)
    result = name + "".join(f"[{n}]" for n in (index, *reversed(places)))
    return f"{result} + {remainder}" if remainder else result
