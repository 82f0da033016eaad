"""Instructions on registers as code of one thread, with the bits that the interpreter computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from greenfast.emulator.compiled.ir import F16, F32, F64, I1, I8, I16, I32, I64, POINTER, Builder, Value, integer
from greenfast.emulator.compiled.lane import Lane, NotCompiledError
from greenfast.emulator.instructions.arithmetic import WIDE
from greenfast.emulator.instructions.operands import TYPES, list_items, parse_dtype, parse_type
from greenfast.emulator.instructions.rounding import MODES, NAN_BITS
from greenfast.emulator.machine.memory import LOCAL_BASE, PARAM_BASE, SHARED_BASE
from greenfast.emulator.ptx.syntax import Instruction, Operand, Vector

_MODIFIERS = {"ftz", "sat", "relu", "satfinite", "oob", "approx", "full", "xorsign", "abs", "NaN"}
#: Half a step of float32 below its smallest normal number, below it: smaller results are flushed (rounding.py).
_FLUSHED = 2.0**-126 - 2.0**-151
_TINY = 2.0**-126


def _only(i: Instruction, *modifiers: str) -> None:
    """Refuse an instruction with other modifiers than these, or one that does not round to the nearest."""
    if any(p in _MODIFIERS and p not in modifiers for p in i.parts):
        raise NotCompiledError(i.text)
    if any(p in MODES and p != "rn" for p in i.parts):
        raise NotCompiledError(i.text)


# ---- integers -------------------------------------------------------------------------------------------------------


def _signed(kind: str) -> bool:
    return bool(parse_dtype(kind).kind == "i")


def _simple(function: Callable[..., Value]) -> Callable[[Lane, Instruction], None]:
    """Build the code of a function of one or two integers of a type, given the builder and their values."""

    def build(c: Lane, i: Instruction) -> None:
        kind = parse_type(i)
        if kind.endswith("x2") or kind[0] == "f" or kind == "bf16" or not {"cc", "sat"}.isdisjoint(i.parts):
            raise NotCompiledError(i.text)
        c.write(i.operands[0], kind, function(c.b, *(c.read(o, kind, i) for o in i.operands[1:])), i)

    return build


def _either(
    of_integers: Callable[[Lane, Instruction], None], of_floats: Callable[[Lane, Instruction], None]
) -> Callable[[Lane, Instruction], None]:
    return lambda c, i: (of_floats if parse_type(i) in ("f32", "f64") else of_integers)(c, i)


def _product(c: Lane, i: Instruction) -> tuple[Value, str]:
    """Return the low, high or whole product of two integers, and its type."""
    kind = parse_type(i)
    if kind[0] not in "su" or kind.endswith("x2"):
        raise NotCompiledError(i.text)
    a, b = (c.read(o, kind, i) for o in i.operands[1:3])
    width = a.type.width
    if "wide" not in i.parts and "hi" not in i.parts:
        return c.b.mul(a, b), kind
    extend = "sext" if _signed(kind) else "zext"
    wide = c.b.mul(*(c.b.convert(extend, x, integer(2 * width)) for x in (a, b)))
    if "wide" in i.parts:
        return wide, WIDE[kind]
    return c.b.convert("trunc", c.b.lshr(wide, wide.type(width)), integer(width)), kind


def _mul(c: Lane, i: Instruction) -> None:
    value, kind = _product(c, i)
    c.write(i.operands[0], kind, value, i)


def _mad(c: Lane, i: Instruction) -> None:
    if not {"cc", "sat"}.isdisjoint(i.parts):
        raise NotCompiledError(i.text)
    value, kind = _product(c, i)
    c.write(i.operands[0], kind, c.b.add(value, c.read(i.operands[3], kind, i)), i)


def _shift(right: bool) -> Callable[[Lane, Instruction], None]:
    def build(c: Lane, i: Instruction) -> None:
        kind = parse_type(i)
        a, amount = c.read(i.operands[1], kind, i), c.read(i.operands[2], "u32", i)
        width = a.type.width
        beyond = c.b.icmp_unsigned(">=", amount, I32(width))
        by = c.resize(c.b.select(beyond, I32(width - 1), amount), width)
        if right and _signed(kind):
            result = c.b.ashr(a, by)
        else:
            result = c.b.select(beyond, a.type(0), c.b.lshr(a, by) if right else c.b.shl(a, by))
        c.write(i.operands[0], kind, result, i)

    return build


def _funnel_shift(c: Lane, i: Instruction) -> None:
    low, high, amount = (c.read(o, "b32", i) for o in i.operands[1:])
    both = c.b.or_(c.b.convert("zext", low, I64), c.b.shl(c.b.convert("zext", high, I64), I64(32)))
    if "clamp" in i.parts:
        amount = c.b.select(c.b.icmp_unsigned(">", amount, I32(32)), I32(32), amount)
    else:
        amount = c.b.and_(amount, I32(31))
    amount = c.b.convert("zext", amount, I64)
    result = c.b.lshr(c.b.shl(both, amount), I64(32)) if "l" in i.parts else c.b.lshr(both, amount)
    c.write(i.operands[0], "b32", c.b.convert("trunc", result, I32), i)


def _lop3(c: Lane, i: Instruction) -> None:
    if isinstance(i.operands[0], Vector):
        raise NotCompiledError(i.text)
    x = [c.read(o, "b32", i) for o in i.operands[1:4]]
    lut = c.read(i.operands[4], "u32", i)
    if lut.constant is None:
        raise NotCompiledError(i.text)
    result = I32(0)
    for n in range(8):
        if lut.constant >> n & 1:
            a, b, d = (x[k] if n & (4 >> k) else c.b.not_(x[k]) for k in range(3))
            result = c.b.or_(result, c.b.and_(c.b.and_(a, b), d))
    c.write(i.operands[0], "b32", result, i)


def _permute(c: Lane, i: Instruction) -> None:
    if i.parts != ("b32",):
        raise NotCompiledError(i.text)
    low, high, selector = (c.read(o, "b32", i) for o in i.operands[1:])
    both = c.b.or_(c.b.convert("zext", low, I64), c.b.shl(c.b.convert("zext", high, I64), I64(32)))
    result = I32(0)
    for n in range(4):
        digit = c.b.and_(c.b.lshr(selector, I32(4 * n)), I32(15))
        by = c.b.convert("zext", c.b.shl(c.b.and_(digit, I32(7)), I32(3)), I64)
        byte = c.b.convert("trunc", c.b.lshr(both, by), I8)
        sign = c.b.ashr(byte, I8(7))
        byte = c.b.select(c.b.icmp_unsigned(">=", digit, I32(8)), sign, byte)
        result = c.b.or_(result, c.b.shl(c.b.convert("zext", byte, I32), I32(8 * n)))
    c.write(i.operands[0], "b32", result, i)


def _extract(c: Lane, i: Instruction) -> None:
    """Emit bfe of 32 bits, in 64 bits as the interpreter does."""
    kind = parse_type(i)
    if kind not in ("u32", "s32"):
        raise NotCompiledError(i.text)
    a = c.read(i.operands[1], kind, i)
    position, length = (c.b.convert("zext", c.b.and_(c.read(o, "u32", i), I32(255)), I64) for o in i.operands[2:])
    wide = c.b.convert("sext", a, I64) if _signed(kind) else c.b.convert("zext", a, I64)
    by = c.b.select(c.b.icmp_unsigned(">", position, I64(31)), I64(31), position)
    value = c.b.ashr(wide, by) if _signed(kind) else c.b.lshr(wide, by)
    if not _signed(kind):
        value = c.b.select(c.b.icmp_unsigned("<", position, I64(32)), value, I64(0))
    unused = c.b.select(c.b.icmp_unsigned(">", length, I64(64)), I64(0), c.b.sub(I64(64), length))
    unused = c.b.select(c.b.icmp_unsigned(">", unused, I64(63)), I64(63), unused)
    shifted = c.b.shl(value, unused)
    shifted = c.b.ashr(shifted, unused) if _signed(kind) else c.b.lshr(shifted, unused)
    result = c.b.select(c.b.icmp_unsigned("==", length, I64(0)), I64(0), shifted)
    c.write(i.operands[0], kind, c.b.convert("trunc", result, I32), i)


def _count_bits(name: str) -> Callable[[Lane, Instruction], None]:
    def build(c: Lane, i: Instruction) -> None:
        a = c.read(i.operands[1], parse_type(i), i)
        result = c.b.intrinsic(name, a, I1(0)) if name == "ctlz" else c.b.intrinsic(name, a)
        c.write(i.operands[0], "u32", c.resize(result, 32), i)

    return build


def _extreme(smaller: bool) -> Callable[[Lane, Instruction], None]:
    def build(c: Lane, i: Instruction) -> None:
        kind = parse_type(i)
        if kind.endswith("x2") or kind[0] not in "su" or "relu" in i.parts:
            raise NotCompiledError(i.text)
        a, b = (c.read(o, kind, i) for o in i.operands[1:])
        compare = c.b.icmp_signed if _signed(kind) else c.b.icmp_unsigned
        c.write(i.operands[0], kind, c.b.select(compare("<" if smaller else ">", a, b), a, b), i)

    return build


def _absolute(b: Builder, a: Value) -> Value:
    return b.select(b.icmp_signed("<", a, a.type(0)), b.neg(a), a)


# ---- moves and comparisons ------------------------------------------------------------------------------------------


def _move(c: Lane, i: Instruction) -> None:
    kind = parse_type(i)
    target, source = i.operands
    if isinstance(source, Vector):
        size = 8 * parse_dtype(kind).itemsize // len(source.items)
        whole = integer(size * len(source.items))(0)
        for n, item in enumerate(source.items):
            part = c.b.convert("zext", c.read(item, f"b{size}", i), whole.type)
            whole = c.b.or_(whole, c.b.shl(part, whole.type(n * size)))
        c.write(target, f"b{whole.type.width}", whole, i)
    elif isinstance(target, Vector):
        whole = c.read(source, f"b{8 * parse_dtype(kind).itemsize}", i)
        size = whole.type.width // len(target.items)
        for n, item in enumerate(target.items):
            part = c.b.convert("trunc", c.b.lshr(whole, whole.type(n * size)), integer(size))
            c.write(item, f"b{size}", part, i)
    else:
        c.write(target, kind, c.read(source, kind, i), i)


def _cvta(c: Lane, i: Instruction) -> None:
    kind = parse_type(i)
    space = next(n for p in i.parts if (n := p.split(":")[0]) in ("global", "shared", "local", "const", "param"))
    base = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}.get(space, 0)
    value = c.resize(c.read(i.operands[1], kind, i), 64)
    moved = c.b.sub(value, I64(base)) if "to" in i.parts else c.b.add(value, I64(base))
    c.write(i.operands[0], kind, c.resize(moved, 8 * parse_dtype(kind).itemsize), i)


def _select(c: Lane, i: Instruction) -> None:
    kind = parse_type(i)
    a, b = (c.read(o, kind, i) for o in i.operands[1:3])
    c.write(i.operands[0], kind, c.b.select(c.read(i.operands[3], "pred", i), a, b), i)


_ORDERS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_ORDERS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _compare(c: Lane, i: Instruction) -> None:
    kind, name = parse_type(i), i.parts[0]
    if len(i.operands) > 3 or kind.endswith("x2") or kind in ("f16", "bf16"):
        raise NotCompiledError(i.text)
    if kind in ("f32", "f64"):
        a, b = (c.number(o, kind, i) for o in i.operands[1:3])
        if "ftz" in i.parts:
            a, b = _flush(c, a), _flush(c, b)
        if name in ("num", "nan"):
            result = c.b.are_ordered(a, b)
            result = result if name == "num" else c.b.not_(result)
        elif name in _ORDERS:
            result = c.b.fcmp_ordered(_ORDERS[name], a, b)
        elif name[:-1] in _ORDERS:
            result = c.b.fcmp_unordered(_ORDERS[name[:-1]], a, b)
        else:
            raise NotCompiledError(i.text)
    else:
        a, b = (c.read(o, kind, i) for o in i.operands[1:3])
        if name not in _ORDERS and name not in _UNSIGNED_ORDERS:
            raise NotCompiledError(i.text)
        compare = c.b.icmp_signed if _signed(kind) else c.b.icmp_unsigned
        result = compare(_ORDERS.get(name) or _UNSIGNED_ORDERS[name], a, b)
    for target, value in zip(list_items(i.operands[0]), (result, c.b.not_(result)), strict=False):
        c.write(target, "pred", value, i)


# ---- floating point -------------------------------------------------------------------------------------------------


def _canonical(c: Lane, x: Value) -> Value:
    """Return a number with the canonical NaN in place of any."""
    kind = {16: "f16", 32: "f32", 64: "f64"}[x.type.width]
    nan = x.type.from_bits(NAN_BITS[kind])
    return c.b.select(c.b.is_nan(x), nan, x)


def _magnitude(c: Lane, x: Value) -> Value:
    return c.b.intrinsic("fabs", x)


def _signed_zero(c: Lane, x: Value) -> Value:
    """Return a zero with the sign of a float32."""
    return c.b.convert("bitcast", c.b.and_(c.bits(x), I32(1 << 31)), F32)


def _flush(c: Lane, x: Value) -> Value:
    """Return a float32 with zero in place of a subnormal number."""
    tiny = c.b.fcmp_ordered("<", _magnitude(c, x), F32(_TINY))
    return c.b.select(tiny, _signed_zero(c, x), x)


def _finish(c: Lane, i: Instruction, kind: str, result: Value, exact: Callable[[], tuple[Value, Value | None]]) -> None:
    """Apply .ftz, .sat and canonical NaN, and write the result.

    exact: returns the result before rounding as a float64, and the error of that.
    """
    if "ftz" in i.parts:
        wide, error = exact()
        size, limit = _magnitude(c, wide), F64(_FLUSHED)
        tiny = c.b.fcmp_ordered("<", size, limit)
        if error is not None:  # the sum was rounded to the limit: it may be below it
            toward_zero = c.b.fcmp_ordered("<", c.b.fmul(error, wide), F64(0.0))
            tiny = c.b.or_(tiny, c.b.and_(c.b.fcmp_ordered("==", size, limit), toward_zero))
        result = c.b.select(tiny, _signed_zero(c, result), result)
    if "sat" in i.parts:
        below = c.b.select(c.b.fcmp_ordered("<", result, result.type(1.0)), result, result.type(1.0))
        result = c.b.select(c.b.fcmp_ordered(">", result, result.type(0.0)), below, result.type(0.0))
    c.write(i.operands[0], kind, _canonical(c, result), i)


def _sources(c: Lane, i: Instruction, kind: str) -> list[Value]:
    numbers = [c.number(o, kind, i) for o in i.operands[1:]]
    return [_flush(c, x) for x in numbers] if "ftz" in i.parts else numbers


def _add_with_error(c: Lane, a: Value, b: Value) -> tuple[Value, Value]:
    """Return a + b, and its rounding error (Knuth's TwoSum)."""
    total = c.b.fadd(a, b)
    part = c.b.fsub(total, a)
    return total, c.b.fadd(c.b.fsub(a, c.b.fsub(total, part)), c.b.fsub(b, part))


def _arithmetic(name: str) -> Callable[[Lane, Instruction], None]:
    """Build the code of add, sub, mul, fma or mad of float32 or float64, rounded to the nearest."""

    def build(c: Lane, i: Instruction) -> None:
        kind = parse_type(i)
        _only(i, "ftz", "sat")
        if kind == "f64" and ("sat" in i.parts or "ftz" in i.parts):
            raise NotCompiledError(i.text)
        x = _sources(c, i, kind)
        simple = {"add": c.b.fadd, "sub": c.b.fsub, "mul": c.b.fmul}
        result = simple[name](*x) if name in simple else c.b.intrinsic("fma", *x)

        def exact() -> tuple[Value, Value | None]:
            wide = [c.b.convert("fpext", n, F64) for n in x]
            if name == "mul":
                return c.b.fmul(*wide), None
            if name == "fma":
                wide = [c.b.fmul(wide[0], wide[1]), wide[2]]
            elif name == "sub":
                wide[1] = c.b.fneg(wide[1])
            return _add_with_error(c, wide[0], wide[1])

        _finish(c, i, kind, result, exact)

    return build


def _divide(c: Lane, i: Instruction) -> None:
    """Emit div of floating-point numbers; .approx is 0 for a divisor above 2^126."""
    kind = parse_type(i)
    _only(i, "ftz", "approx", "full")
    if kind not in ("f32", "f64"):
        raise NotCompiledError(i.text)
    a, b = _sources(c, i, kind)
    result = c.b.fdiv(a, b)
    if "approx" in i.parts:
        one = c.b.convert("bitcast", c.b.or_(c.b.and_(c.bits(b), I32(1 << 31)), I32(0x3F80_0000)), F32)
        zero = c.b.fmul(a, c.b.fmul(F32(0.0), one))
        result = c.b.select(c.b.fcmp_ordered(">", _magnitude(c, b), F32(2.0**126)), zero, result)
        if "ftz" in i.parts:  # no exact quotient decides
            result = _flush(c, result)
        c.write(i.operands[0], kind, _canonical(c, result), i)
        return
    _finish(
        c,
        i,
        kind,
        result,
        lambda: (c.b.fdiv(c.b.convert("fpext", a, F64), c.b.convert("fpext", b, F64)), None),
    )


def _root(c: Lane, i: Instruction) -> None:
    kind = parse_type(i)
    _only(i, "ftz", "approx")
    if kind == "f64" and len(i.parts) != 2:
        raise NotCompiledError(i.text)
    (a,) = _sources(c, i, kind)
    result = c.b.intrinsic("sqrt", a)
    _finish(c, i, kind, result, lambda: (c.b.intrinsic("sqrt", c.b.convert("fpext", a, F64)), None))


def _reciprocal(c: Lane, i: Instruction) -> None:
    kind = parse_type(i)
    _only(i, "ftz", "approx")
    if kind == "f64" and "approx" in i.parts:
        raise NotCompiledError(i.text)
    (a,) = _sources(c, i, kind)
    _finish(c, i, kind, c.b.fdiv(a.type(1.0), a), lambda: (c.b.fdiv(F64(1.0), c.b.convert("fpext", a, F64)), None))


def _float_extreme(smaller: bool) -> Callable[[Lane, Instruction], None]:
    """Build the code of min and max: of a number and NaN the number, with .NaN NaN; -0 is less than +0."""

    def build(c: Lane, i: Instruction) -> None:
        kind = parse_type(i)
        _only(i, "ftz", "NaN")
        if len(i.operands) != 3 or (kind == "f64" and "ftz" in i.parts):
            raise NotCompiledError(i.text)
        x = _sources(c, i, kind)
        a, b = (c.bits(n) for n in x)
        sign = a.type(1 << (a.type.width - 1))
        order_a, order_b = (
            c.b.select(c.b.icmp_signed("<", n, n.type(0)), c.b.not_(n), c.b.or_(n, sign)) for n in (a, b)
        )
        bad_a, bad_b = (c.b.is_nan(n) for n in x)
        first = c.b.icmp_unsigned("<" if smaller else ">=", order_a, order_b)
        result = c.b.select(c.b.or_(bad_b, c.b.and_(first, c.b.not_(bad_a))), a, b)
        bad = c.b.or_(bad_a, bad_b) if "NaN" in i.parts else c.b.and_(bad_a, bad_b)
        c.write(i.operands[0], kind, c.b.select(bad, a.type(NAN_BITS[kind]), result), i)

    return build


def _sign(negates: bool) -> Callable[[Lane, Instruction], None]:
    """Build the code of neg and abs."""

    def build(c: Lane, i: Instruction) -> None:
        kind = parse_type(i)
        (x,) = _sources(c, i, kind)
        if kind == "f64" and "ftz" in i.parts:
            raise NotCompiledError(i.text)
        a = c.bits(x)
        sign = a.type(1 << (a.type.width - 1))
        result = c.b.xor(a, sign) if negates else c.b.and_(a, c.b.not_(sign))
        if kind != "f64":
            result = c.b.select(c.b.is_nan(x), a.type(NAN_BITS[kind]), result)
        c.write(i.operands[0], kind, result, i)

    return build


# ---- conversions ----------------------------------------------------------------------------------------------------

_ROUNDED = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def _convert(c: Lane, i: Instruction) -> None:
    kinds = [p for p in i.parts if p in TYPES or p in ("tf32", "e4m3x2", "e5m2x2")]
    if len(kinds) != 2 or "pack" in i.parts or {"relu", "satfinite"} & set(i.parts):
        raise NotCompiledError(i.text)
    to, source = kinds
    if not c.halves and ("f16" in kinds or to == "f16x2"):
        raise NotCompiledError(i.text)
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        _from_eight_bits(c, i, source)
    elif to in ("f16x2", "bf16x2") and source == "f32":
        upper, lower = (_narrow(c, i, o, to[:-2]) for o in i.operands[1:3])
        c.write(
            i.operands[0],
            "b32",
            c.b.or_(c.b.shl(c.b.convert("zext", upper, I32), I32(16)), c.b.convert("zext", lower, I32)),
            i,
        )
    elif to in ("f16", "bf16") and source == "f32":
        c.write(i.operands[0], "b16", _narrow(c, i, i.operands[1], to), i)
    elif to == "f32" and source in ("f16", "bf16"):
        _only(i)
        if any(p in _ROUNDED for p in i.parts):
            raise NotCompiledError(i.text)
        if source == "bf16":
            bits = c.b.shl(c.b.convert("zext", c.read(i.operands[1], "b16", i), I32), I32(16))
            c.write(i.operands[0], "b32", bits, i)
        else:
            wide = c.b.convert("fpext", c.number(i.operands[1], "f16", i), F32)
            c.write(i.operands[0], "f32", _canonical(c, wide), i)
    elif to in ("f32", "f64") and source[0] in "su" and not source.endswith("x2"):
        _only(i)
        a = c.read(i.operands[1], source, i)
        number = c.b.convert("sitofp" if _signed(source) else "uitofp", a, F32 if to == "f32" else F64)
        c.write(i.operands[0], to, number, i)
    elif to[0] in "su" and source in ("f16", "f32", "f64") and not to.endswith("x2"):
        _float_to_integer(c, i, to, source)
    elif to[0] in "sub" and source[0] in "sub" and "f" not in to + source and "x" not in to + source:
        if "sat" in i.parts:
            raise NotCompiledError(i.text)
        value = c.read(i.operands[1], source, i)
        bits = 8 * parse_dtype(to).itemsize
        c.write(i.operands[0], to, c.resize(value, bits, _signed(source)), i)
    else:
        raise NotCompiledError(i.text)


def _narrow(c: Lane, i: Instruction, operand: Operand, to: str) -> Value:
    """Return the bits of a float32 rounded to the nearest f16 or bf16."""
    _only(i)
    x = c.number(operand, "f32", i)
    if to == "f16":
        return c.bits(_canonical(c, c.b.convert("fptrunc", x, F16)))
    bits = c.bits(x)
    odd = c.b.and_(c.b.lshr(bits, I32(16)), I32(1))
    rounded = c.b.convert("trunc", c.b.lshr(c.b.add(c.b.add(bits, I32(0x7FFF)), odd), I32(16)), I16)
    return c.b.select(c.b.is_nan(x), I16(NAN_BITS["bf16"]), rounded)


def _float_to_integer(c: Lane, i: Instruction, to: str, source: str) -> None:
    mode = next((_ROUNDED[p] for p in i.parts if p in _ROUNDED), None)
    if mode is None or "sat" in i.parts or ("ftz" in i.parts and source != "f32"):
        raise NotCompiledError(i.text)
    x = c.number(i.operands[1], source, i)
    if "ftz" in i.parts:
        x = _flush(c, x)
    whole = c.b.intrinsic(mode, x if source == "f64" else c.b.convert("fpext", x, F64))
    limits, bits = np.iinfo(parse_dtype(to)), 8 * parse_dtype(to).itemsize
    target = integer(bits)
    above = c.b.fcmp_ordered(">=", whole, F64(2.0 ** (bits - _signed(to))))
    below = c.b.fcmp_ordered("<", whole, F64(float(limits.min)))
    bad = c.b.is_nan(whole)
    inside = c.b.select(c.b.or_(c.b.or_(above, below), bad), F64(0.0), whole)
    value = c.b.convert("fptosi" if _signed(to) else "fptoui", inside, target)
    value = c.b.select(above, target(int(limits.max)), c.b.select(below, target(int(limits.min)), value))
    nan = 1 << (bits - 1) if source == "f64" or bits == 64 else 0
    c.write(i.operands[0], to, c.b.select(bad, target(nan), value), i)


def _from_eight_bits(c: Lane, i: Instruction, source: str) -> None:
    _only(i)
    table = c.entry.convert("inttoptr", c.symbol("table", source), POINTER)
    codes = c.read(i.operands[1], "b16", i)
    upper, lower = (
        c.b.convert("zext", c.b.load(I16, c.b.element(I16, table, c.b.convert("zext", n, I64))), I32)
        for n in (c.b.lshr(codes, I16(8)), c.b.and_(codes, I16(255)))
    )
    c.write(i.operands[0], "b32", c.b.or_(c.b.shl(upper, I32(16)), lower), i)


LOWERED: dict[str, Callable[[Lane, Instruction], None]] = {
    "mov": _move,
    "cvta": _cvta,
    "add": _either(_simple(Builder.add), _arithmetic("add")),
    "sub": _either(_simple(Builder.sub), _arithmetic("sub")),
    "mul": _either(_mul, _arithmetic("mul")),
    "mad": _either(_mad, _arithmetic("fma")),
    "fma": _either(_mad, _arithmetic("fma")),
    "and": _simple(Builder.and_),
    "or": _simple(Builder.or_),
    "xor": _simple(Builder.xor),
    "not": _simple(Builder.not_),
    "shl": _shift(False),
    "shr": _shift(True),
    "shf": _funnel_shift,
    "lop3": _lop3,
    "prmt": _permute,
    "bfe": _extract,
    "popc": _count_bits("ctpop"),
    "clz": _count_bits("ctlz"),
    "min": _either(_extreme(True), _float_extreme(True)),
    "max": _either(_extreme(False), _float_extreme(False)),
    "neg": _either(_simple(Builder.neg), _sign(True)),
    "abs": _either(_simple(_absolute), _sign(False)),
    "setp": _compare,
    "selp": _select,
    "div": _divide,
    "sqrt": _root,
    "rcp": _reciprocal,
    "cvt": _convert,
}
