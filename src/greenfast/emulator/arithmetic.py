"""Arithmetic, comparison, logic and move instructions on integers and floats (PTX ISA, "Instruction Set")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from greenfast.emulator.machine import Lanes, Machine, Operation, Values
from greenfast.emulator.memory import LOCAL_BASE, PARAM_BASE, SHARED_BASE
from greenfast.emulator.operands import dtype_of, reader, type_of, unsupported, writer
from greenfast.emulator.ptx import Instruction, Vector
from greenfast.emulator.rounding import fused

Function: Any = Callable[..., Values]


def elementwise(
    instruction: Instruction, function: Function, types: list[str] | None = None, out: str = ""
) -> Operation:
    """An operation that writes function(sources) to its first operand; ``types``: of the sources, ``out``: its own."""
    kind = type_of(instruction)
    destination, *sources = instruction.operands
    types = types or [kind] * len(sources)
    read = [reader(s, t, instruction) for s, t in zip(sources, types, strict=True)]
    write = writer(destination, out or kind, instruction)

    def run(m: Machine, lanes: Lanes) -> None:
        write(m, lanes, function(*(r(m, lanes) for r in read)))

    return run


def _flush(values: Values) -> Values:
    """Subnormal float32 values to zero of their sign (.ftz)."""
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def _ftz(instruction: Instruction, function: Function) -> Function:
    """The function with .ftz applied to sources and result where the instruction has it."""
    if "ftz" not in instruction.parts:
        return function
    return lambda *sources: _flush(np.asarray(function(*(_flush(np.asarray(s)) for s in sources)), np.float32))


def _packed(function: Function) -> Function:
    """A function of halves on registers that hold two of them."""

    def run(*sources: Values) -> Values:
        shape = np.broadcast_shapes(*(np.shape(s) for s in sources))
        halves = [np.ascontiguousarray(np.broadcast_to(s, shape)).view(np.float16).reshape(*shape, 2) for s in sources]
        result = np.ascontiguousarray(np.asarray(function(*halves), np.float16))
        return result.view(np.uint32).reshape(shape)

    return run


def _float_function(instruction: Instruction, function: Function) -> Function:
    return _packed(function) if type_of(instruction) == "f16x2" else _ftz(instruction, function)


def add_like(function: Function) -> Callable[[Instruction], Operation]:
    """add and sub: integers wrap, .sat saturates s32, floats round once."""

    def build(i: Instruction) -> Operation:
        towards = _direction(i)
        if towards is not None:
            directed = lambda a, b: fused(a, np.ones_like(a), function(np.zeros_like(b), b), towards)  # noqa: E731
            return elementwise(i, _ftz(i, directed))
        if type_of(i) == "s32" and "sat" in i.parts:
            wide = lambda a, b: np.clip(function(np.int64(a), np.int64(b)), -(2**31), 2**31 - 1).astype(np.int32)  # noqa: E731
            return elementwise(i, wide)
        return elementwise(i, _float_function(i, function) if _is_float(i) else function)

    return build


def _is_float(i: Instruction) -> bool:
    return type_of(i) in ("f16", "f32", "f64", "f16x2")


#: Rounding mode -> what it rounds towards.
_TOWARDS = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}


def _direction(i: Instruction) -> float | None:
    """What a float32 instruction rounds towards; None for the nearest."""
    if type_of(i) != "f32":
        _nearest_only(i)
        return None
    return next((_TOWARDS[p] for p in i.parts if p in _TOWARDS), None)


def _nearest_only(i: Instruction) -> None:
    if _is_float(i) and set(_TOWARDS) & set(i.parts):
        raise unsupported(i, "has a rounding mode that is not known to the emulator")


_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _product(i: Instruction) -> tuple[Function, str]:
    """The integer product that .lo, .hi or .wide asks for, and the result's type."""
    kind = type_of(i)
    if "wide" in i.parts:
        wide = dtype_of(_WIDE[kind])
        return lambda a, b: np.asarray(a).astype(wide) * np.asarray(b).astype(wide), _WIDE[kind]
    if "hi" in i.parts:
        if kind not in _WIDE:
            raise unsupported(i)
        wide, bits, narrow = dtype_of(_WIDE[kind]), 8 * dtype_of(kind).itemsize, dtype_of(kind)
        return lambda a, b: ((np.asarray(a).astype(wide) * np.asarray(b).astype(wide)) >> bits).astype(narrow), kind
    return lambda a, b: a * b, kind


def mul(i: Instruction) -> Operation:
    """mul."""
    _nearest_only(i)
    if _is_float(i):
        return elementwise(i, _float_function(i, lambda a, b: a * b))
    function, out = _product(i)
    return elementwise(i, function, out=out)


def mad(i: Instruction) -> Operation:
    """mad (integers), fma and mad (floats)."""
    kind, towards = type_of(i), _direction(i)
    if _is_float(i):
        if kind in ("f16", "f16x2"):
            # The product of two halves is exact in float32, and its sum with a third in float64.
            half = lambda a, b, c: (np.asarray(a, np.float64) * b + c).astype(np.float16)  # noqa: E731
            return elementwise(i, _float_function(i, half))
        return elementwise(i, _ftz(i, lambda a, b, c: fused(a, b, c, towards)))
    function, out = _product(i)
    return elementwise(i, lambda a, b, c: function(a, b) + c, types=[kind, kind, out], out=out)


def divide(i: Instruction) -> Operation:
    """div: integers truncate toward zero, and x / 0 is all ones."""
    _nearest_only(i)
    if _is_float(i):
        return elementwise(i, _ftz(i, lambda a, b: a / b))

    def quotient(a: Values, b: Values) -> Values:
        safe = np.where(b == 0, 1, b)
        result = np.asarray(a // safe)
        if np.asarray(a).dtype.kind == "i":
            result = result + ((result < 0) & (result * safe != a))
        return np.where(b == 0, -1, result).astype(np.asarray(a).dtype)

    return elementwise(i, quotient)


def remainder(i: Instruction) -> Operation:
    """rem, of the sign of the dividend."""
    return elementwise(
        i, lambda a, b: np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))).astype(np.asarray(a).dtype)
    )


def extreme(smaller: bool) -> Callable[[Instruction], Operation]:
    """min and max: of a number and NaN the number, with .NaN NaN."""

    def build(i: Instruction) -> Operation:
        if _is_float(i):
            if "NaN" in i.parts:
                function: Function = np.minimum if smaller else np.maximum
            else:
                function = np.fmin if smaller else np.fmax
            return elementwise(i, _float_function(i, function))
        return elementwise(i, np.minimum if smaller else np.maximum)

    return build


def negate(i: Instruction) -> Operation:
    """neg."""
    return elementwise(i, _float_function(i, np.negative) if _is_float(i) else lambda a: -a)


def absolute(i: Instruction) -> Operation:
    """abs."""
    return elementwise(i, _float_function(i, np.abs) if _is_float(i) else np.abs)


def bitwise(function: Function) -> Callable[[Instruction], Operation]:
    """and, or, xor, not."""
    return lambda i: elementwise(i, function)


def shift(right: bool) -> Callable[[Instruction], Operation]:
    """shl and shr: amounts beyond the width shift everything out."""

    def build(i: Instruction) -> Operation:
        kind = type_of(i)
        bits = 8 * dtype_of(kind).itemsize
        signed = dtype_of(kind).kind == "i"

        def function(a: Values, b: Values) -> Values:
            amount = np.minimum(b, bits - 1).astype(np.asarray(a).dtype)
            if right and signed:
                return np.asarray(a >> amount)
            shifted = a >> amount if right else a << amount
            return np.where(b >= bits, 0, shifted).astype(np.asarray(a).dtype)

        return elementwise(i, function, types=[kind, "u32"])

    return build


_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_LOGIC: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(i: Instruction) -> Function:
    """The comparison of setp and set. A float comparison is false with NaN, its unordered form (ltu, ...) true."""
    name = i.parts[0]
    if name in _COMPARE:
        ordered = _COMPARE[name]
        if name == "ne" and _is_float(i):
            return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
        return ordered
    if name == "num":
        return lambda a, b: ~np.isnan(a) & ~np.isnan(b)
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name.endswith("u") and name[:-1] in _COMPARE:
        unordered = _COMPARE[name[:-1]]
        return lambda a, b: unordered(a, b) | np.isnan(a) | np.isnan(b)
    raise unsupported(i)


def setp(i: Instruction) -> Operation:
    """setp, with the optional second predicate (the complement) and combination with a third operand."""
    kind = type_of(i)
    compare = _comparison(i)
    targets = i.operands[0].items if isinstance(i.operands[0], Vector) else (i.operands[0],)
    write = [writer(t, "pred", i) for t in targets]
    read = [reader(o, kind, i) for o in i.operands[1:3]]
    combine = _LOGIC.get(i.parts[1]) if len(i.operands) == 4 else None
    third = reader(i.operands[3], "pred", i) if len(i.operands) == 4 else None

    def run(m: Machine, lanes: Lanes) -> None:
        result = compare(read[0](m, lanes), read[1](m, lanes))
        both = (result, ~np.asarray(result))
        for w, value in zip(write, both, strict=False):
            w(m, lanes, combine(value, third(m, lanes)) if combine and third else value)

    return run


def selp(i: Instruction) -> Operation:
    """selp."""
    kind = type_of(i)
    return elementwise(i, lambda a, b, p: np.where(p, a, b), types=[kind, kind, "pred"])


def move(i: Instruction) -> Operation:
    """mov, also packing {a, b} into one register and unpacking it, and taking a variable's address."""
    kind = type_of(i)
    destination, source = i.operands
    if isinstance(source, Vector):
        return _pack(i, kind, destination, source)
    if isinstance(destination, Vector):
        return _unpack(i, kind, destination, source)
    return elementwise(i, lambda a: a)


def _pack(i: Instruction, kind: str, destination: Any, source: Vector) -> Operation:
    size = dtype_of(kind).itemsize // len(source.items)
    part = f"b{8 * size}"
    read = [reader(item, part, i) for item in source.items]
    write = writer(destination, f"b{8 * size * len(source.items)}", i)

    def run(m: Machine, lanes: Lanes) -> None:
        whole: Any = np.uint64(0)
        for n, r in enumerate(read):
            whole = whole | (np.asarray(r(m, lanes)).astype(np.uint64) << np.uint64(8 * size * n))
        write(m, lanes, np.asarray(whole).astype(dtype_of(f"b{8 * size * len(read)}")))

    return run


def _unpack(i: Instruction, kind: str, destination: Vector, source: Any) -> Operation:
    size = dtype_of(kind).itemsize // len(destination.items)
    read = reader(source, f"b{8 * dtype_of(kind).itemsize}", i)
    write = [writer(item, f"b{8 * size}", i) for item in destination.items]

    def run(m: Machine, lanes: Lanes) -> None:
        whole = np.asarray(read(m, lanes)).astype(np.uint64)
        for n, w in enumerate(write):
            w(m, lanes, (whole >> np.uint64(8 * size * n)).astype(dtype_of(f"b{8 * size}")))

    return run


def approximate(function: Function) -> Callable[[Instruction], Operation]:
    """A special function: computed in float64 and rounded once. The hardware's may differ in its last two bits."""

    def build(i: Instruction) -> Operation:
        if type_of(i) != "f32":
            raise unsupported(i)
        return elementwise(i, _ftz(i, lambda a: function(np.asarray(a, np.float64)).astype(np.float32)))

    return build


def sqrt(i: Instruction) -> Operation:
    """sqrt.rn and sqrt.approx."""
    _nearest_only(i)
    return elementwise(i, _ftz(i, np.sqrt))


def cvta(i: Instruction) -> Operation:
    """cvta: global addresses are generic already; shared and local ones move into or out of their window."""
    from_generic = "to" in i.parts
    space = next(p for p in i.parts if p in ("global", "shared", "local", "const", "param"))
    base = _WINDOWS.get(space, 0)
    kind = type_of(i)
    offset = np.uint64(base)
    return elementwise(
        i,
        lambda a: (np.asarray(a).astype(np.uint64) + (np.uint64(0) - offset if from_generic else offset)).astype(
            dtype_of(kind)
        ),
    )


_WINDOWS = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}

BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    "add": add_like(lambda a, b: a + b),
    "sub": add_like(lambda a, b: a - b),
    "mul": mul,
    "mad": mad,
    "fma": mad,
    "div": divide,
    "rem": remainder,
    "min": extreme(True),
    "max": extreme(False),
    "neg": negate,
    "abs": absolute,
    "copysign": lambda i: elementwise(i, lambda sign, size: np.copysign(size, sign)),
    "and": bitwise(lambda a, b: a & b),
    "or": bitwise(lambda a, b: a | b),
    "xor": bitwise(lambda a, b: a ^ b),
    "not": bitwise(lambda a: ~a),
    "shl": shift(False),
    "shr": shift(True),
    "setp": setp,
    "selp": selp,
    "mov": move,
    "ex2": approximate(np.exp2),
    "lg2": approximate(np.log2),
    "rcp": approximate(lambda a: 1.0 / a),
    "rsqrt": approximate(lambda a: 1.0 / np.sqrt(a)),
    "sin": approximate(np.sin),
    "cos": approximate(np.cos),
    "tanh": approximate(np.tanh),
    "sqrt": sqrt,
    "cvta": cvta,
}
