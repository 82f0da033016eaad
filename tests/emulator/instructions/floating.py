"""Floating-point instructions: arithmetic in every format and rounding, comparisons, special functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions import exact
from tests.emulator.instructions.case import Allowed, Case, instruction, predicate
from tests.emulator.instructions.exact import FORMATS, Number, decode, encode, flush, on_halves, real

MODES = ("rn", "rz", "rm", "rp")
Operation = Callable[..., Number]

_TWO: dict[str, Operation] = {
    "add": exact.add,
    "sub": lambda a, b, mode: exact.add(a, exact.negated(b), mode),
    "mul": lambda a, b, mode: exact.multiply(a, b),
}


def _fma(a: Number, b: Number, c: Number, mode: str) -> Number:
    return exact.add(exact.multiply(a, b), c, mode)


def rounded(operation: Operation, form: str, name: str) -> Callable[..., int]:
    """Return the meaning of an instruction that rounds an operation once, with the modifiers in its name."""
    parts = name.split(".")
    mode = next((p for p in parts if p in MODES), "rn")
    ftz = "ftz" in parts

    def meaning(*patterns: int) -> int:
        numbers = [decode(p, form) for p in patterns]
        if ftz:
            numbers = [flush(n, form) for n in numbers]
        result = operation(*numbers, mode)
        if ftz:
            result = exact.flush_rounded(result, form, mode)
        bits = encode(result, form, mode)
        if "sat" in parts:
            bits = encode(exact.clamp(decode(bits, form)), form)
        if "relu" in parts:
            bits = encode(exact.rectified(decode(bits, form)), form)
        return bits

    return meaning


def _arithmetic() -> list[Case]:
    """add, sub, mul, fma of every type, rounding and modifier; div, sqrt and rcp."""
    result = []

    def put(op: str, modifiers: str, kind: str, count: int, operation: Operation) -> None:
        name = f"{op}{modifiers}.{kind}"
        meaning = rounded(operation, kind.removesuffix("x2"), name)
        if kind.endswith("x2"):
            meaning = on_halves(meaning)
        # The ISA leaves the NaN of float64 arithmetic open.
        result.append(instruction(name, f"{kind} " * count, kind, meaning, any_nan=kind == "f64"))

    for op, operation in _TWO.items():
        for mode, ftz, sat in itertools.product(MODES, ("", ".ftz"), ("", ".sat")):
            put(op, f".{mode}{ftz}{sat}", "f32", 2, operation)
        put(op, "", "f32", 2, operation)
        for mode in MODES:
            put(op, f".{mode}", "f64", 2, operation)
        for kind in ("f16", "f16x2"):
            for modifiers in ("", ".rn", ".ftz", ".sat", ".ftz.sat"):
                put(op, modifiers, kind, 2, operation)
        for kind in ("bf16", "bf16x2"):
            put(op, ".rn", kind, 2, operation)
    for mode, ftz, sat in itertools.product(MODES, ("", ".ftz"), ("", ".sat")):
        put("fma", f".{mode}{ftz}{sat}", "f32", 3, _fma)
    put("mad", ".rn", "f32", 3, _fma)
    for mode in MODES:
        put("fma", f".{mode}", "f64", 3, _fma)
    for kind in ("f16", "f16x2"):
        for modifiers in (".rn", ".rn.ftz", ".rn.sat", ".rn.ftz.relu", ".rn.relu"):
            put("fma", modifiers, kind, 3, _fma)
    for kind, modifiers in itertools.product(("bf16", "bf16x2"), (".rn", ".rn.relu")):
        put("fma", modifiers, kind, 3, _fma)
    for mode in MODES:
        for kind, ftz in (("f32", ""), ("f32", ".ftz"), ("f64", "")):
            put("div", f".{mode}{ftz}", kind, 2, lambda a, b, mode: exact.divide(a, b))
            put("sqrt", f".{mode}{ftz}", kind, 1, lambda a, mode: exact.root(a))
            put("rcp", f".{mode}{ftz}", kind, 1, lambda a, mode: exact.divide(real(Fraction(1)), a))
    return result


def _order(number: Number) -> tuple[float | Fraction, bool]:
    """Return a key that orders numbers, -0 before +0."""
    if number.kind == "inf":
        return (-math.inf if number.negative else math.inf, False)
    return (number.value, not number.negative)


def _extremes() -> list[Case]:
    result = []
    for op, choose in (("min", min), ("max", max)):
        for kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
            modifiers = ["", ".NaN", ".ftz", ".ftz.NaN"] if kind in ("f32", "f16", "f16x2") else ["", ".NaN"]
            for modifier in modifiers[: 1 if kind == "f64" else 4]:
                form = kind.removesuffix("x2")

                def meaning(*patterns: int, form: str = form, choose: Any = choose, modifier: str = modifier) -> int:
                    numbers = [decode(p, form) for p in patterns]
                    if "ftz" in modifier:
                        numbers = [flush(n, form) for n in numbers]
                    good = [n for n in numbers if n.kind != "nan"]
                    if not good or ("NaN" in modifier and len(good) < 2):
                        return FORMATS[form][2]
                    return encode(choose(good, key=_order), form)

                function = on_halves(meaning) if kind.endswith("x2") else meaning
                result.append(
                    instruction(f"{op}{modifier}.{kind}", f"{kind} {kind}", kind, function, any_nan=kind == "f64")
                )
    return result


def _signs() -> list[Case]:
    """Return cases of neg, abs and copysign; the ISA leaves the NaN of neg and abs open."""
    result = []
    for kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
        form = kind.removesuffix("x2")
        for op, ftz in itertools.product(("neg", "abs"), ("", ".ftz") if kind in ("f32", "f16", "f16x2") else ("",)):

            def meaning(a: int, form: str = form, op: str = op, ftz: str = ftz) -> int:
                number = flush(decode(a, form), form) if ftz else decode(a, form)
                top = 1 << sum(FORMATS[form][:2])
                if number.kind == "nan":
                    return FORMATS[form][2]
                return encode(number, form) ^ top if op == "neg" else encode(number, form) & ~top

            function = on_halves(meaning) if kind.endswith("x2") else meaning
            result.append(instruction(f"{op}{ftz}.{kind}", kind, kind, function, any_nan=True))
    for kind in ("f32", "f64"):
        top = 1 << sum(FORMATS[kind][:2])
        result.append(
            instruction(f"copysign.{kind}", f"{kind} {kind}", kind, lambda a, b, top=top: (a & top) | (b & ~top))
        )
    return result


def _tests() -> list[Case]:
    result = []
    for kind in ("f32", "f64"):
        for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):

            def meaning(a: int, kind: str = kind, name: str = name) -> int:
                number = decode(a, kind)
                tiny = number.kind == "real" and 0 < abs(number.value) < exact.smallest_normal(kind)
                return int(
                    {
                        "finite": number.kind == "real",
                        "infinite": number.kind == "inf",
                        "number": number.kind != "nan",
                        "notanumber": number.kind == "nan",
                        "normal": number.kind == "real" and not tiny,
                        "subnormal": tiny,
                    }[name]
                )

            result.append(predicate(f"testp.{name}.{kind}", kind, meaning))
    return result


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def compare(a: Number, b: Number, name: str) -> bool:
    """Return a comparison of floats by name; ordered ones are false with NaN, unordered ones true."""
    ordered = a.kind != "nan" and b.kind != "nan"
    if name in ("num", "nan"):
        return ordered == (name == "num")
    if not ordered:
        return name.endswith("u")
    return COMPARE[name.removesuffix("u")](*(_order(n)[0] for n in (a, b)))


def _comparisons() -> list[Case]:
    result = []
    names = [*COMPARE, *(f"{n}u" for n in COMPARE), "num", "nan"]
    for name in names:
        for kind, ftz in (("f32", ""), ("f32", ".ftz"), ("f64", ""), ("f16", ""), ("bf16", "")):

            def meaning(a: int, b: int, kind: str = kind, name: str = name, ftz: str = ftz) -> int:
                x, y = (flush(decode(p, kind), kind) if ftz else decode(p, kind) for p in (a, b))
                return int(compare(x, y, name))

            result.append(predicate(f"setp.{name}{ftz}.{kind}", f"{kind} {kind}", meaning))
    for kind in ("f16x2", "bf16x2"):
        for name in ("lt", "neu"):

            def both(a: int, b: int, kind: str = kind, name: str = name) -> int:
                form = kind.removesuffix("x2")
                low = compare(decode(a & 0xFFFF, form), decode(b & 0xFFFF, form), name)
                return int(low) | int(compare(decode(a >> 16, form), decode(b >> 16, form), name)) << 1

            text = f".reg .pred q; .reg .b32 t; setp.{name}.{kind} p|q, %1, %2; selp.u32 t, 2, 0, q;"
            case = predicate(f"setp.{name}.{kind}", f"{kind} {kind}", both, text)
            body = case.body.replace("selp.u32 %0, 1, 0, p;", "selp.u32 %0, 1, 0, p; or.b32 %0, %0, t;")
            result.append(replace(case, body=body))
    for name, out in itertools.product(("lt", "geu", "nan"), ("u32", "f32")):
        yes = 0x3F80_0000 if out == "f32" else 2**32 - 1
        result.append(
            instruction(
                f"set.{name}.{out}.f32",
                "f32 f32",
                "b32",
                lambda a, b, name=name, yes=yes: yes if compare(decode(a, "f32"), decode(b, "f32"), name) else 0,
            )
        )

    def slct(a: int, b: int, c: int, ftz: bool = False) -> int:
        number = flush(decode(c, "f32"), "f32") if ftz else decode(c, "f32")
        zero = number.kind == "real" and number.value == 0
        return a if number.kind != "nan" and (zero or not number.negative) else b

    result.append(instruction("slct.u32.f32", "u32 u32 f32", "u32", slct))
    result.append(instruction("slct.ftz.u32.f32", "u32 u32 f32", "u32", lambda a, b, c: slct(a, b, c, True)))
    return result


# ---- special functions ----------------------------------------------------------------------------------------------


def number_of(patterns: NDArray[np.uint64], form: str) -> NDArray[np.float64]:
    """Convert patterns of up to 32 bits to float64."""
    if form == "f16":
        return patterns.astype(np.uint16).view(np.float16).astype(np.float64)
    bits = patterns.astype(np.uint32) << np.uint32(16 if form == "bf16" else 0)
    return bits.view(np.float32).astype(np.float64)


def last_bit(values: NDArray[np.float64], form: str) -> NDArray[np.float64]:
    """Return the value of the last bit of each number."""
    exponent_bits, fraction, _ = FORMATS[form]
    lowest = 2 - (1 << exponent_bits - 1)
    exponent = np.frexp(np.where(np.isfinite(values), values, 0))[1] - 1
    return np.asarray(np.exp2(np.maximum(np.where(values == 0, lowest, exponent), lowest) - fraction))


def within(
    form: str, *, ulps: float = 0, relative: float = 0, absolute: Callable[..., Any] | float = 0, ftz: bool = False
) -> Allowed:
    """Return a bound against the exact result, widened by the half bit that each of two rounded results may add."""

    def allowed(operands: list[NDArray[np.uint64]], values: NDArray[np.float64]) -> NDArray[np.float64]:
        fixed = absolute(number_of(operands[0], form)) if callable(absolute) else absolute
        size = np.where(np.isfinite(values), np.abs(values), 0)
        total = fixed + relative * size + (ulps + 1) * last_bit(values, form)
        if ftz:  # next to the smallest normal number a result may also have been flushed
            smallest = float(exact.smallest_normal(form))
            total = np.where(size <= smallest * (1 + 2.0**-9), np.maximum(total, smallest * (1 + 2.0**-9)), total)
        return np.asarray(total)

    return allowed


def near(function: Callable[[float], float], form: str, ftz: bool) -> Callable[[int], int]:
    """Return the meaning of a special function: Python's, rounded to the nearest."""

    def meaning(a: int) -> int:
        number = flush(decode(a, form), form) if ftz else decode(a, form)
        x = math.nan if number.kind == "nan" else math.inf if number.kind == "inf" else abs(float(number.value))
        x = -x if number.negative else x
        try:
            y = function(x)
        except ValueError:
            y = math.nan
        except OverflowError:
            y = math.inf
        result = (
            exact.NAN
            if math.isnan(y)
            else exact.infinity(y < 0)
            if math.isinf(y)
            else real(Fraction(y), math.copysign(1, y) < 0)
        )
        bits = encode(result, form)
        return encode(flush(decode(bits, form), form), form) if ftz else bits

    return meaning


def _signed_inverse(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / x


def _near_one(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the absolute error that lg2.approx may have."""
    return np.where((x > 0.5) & (x < 2), 2.0**-22, 0)


def _special() -> list[Case]:
    """Return the bounds of the PTX ISA 9.0, in the words of each instruction's notes."""
    logarithm = lambda x: -math.inf if x == 0 else math.log2(x)  # noqa: E731
    inverse_root = lambda x: _signed_inverse(x) if x == 0 else 1 / math.sqrt(x)  # noqa: E731
    power = lambda x: 2.0**x  # noqa: E731
    cases: list[tuple[str, str, Callable[[float], float], dict[str, Any], str]] = [
        ("ex2", "exponent", power, {"ulps": 1}, "2 ulp of the rounded result"),
        ("lg2", "f32", logarithm, {"absolute": _near_one, "relative": 2.0**-22}, "2^-22, absolute near 1"),
        ("rcp", "f32", _signed_inverse, {"ulps": 1}, "1 ulp"),
        ("rsqrt", "f32", inverse_root, {"relative": 2.0**-22.9}, "2^-22.9 relative"),
        ("sqrt", "f32", math.sqrt, {"relative": 2.0**-23}, "2^-23 relative"),
        ("sin", "angle", math.sin, {"absolute": 2.0**-20.5}, "2^-20.5 absolute in [-2pi, 2pi]"),
        ("cos", "angle", math.cos, {"absolute": 2.0**-20.5}, "2^-20.5 absolute in [-2pi, 2pi]"),
        ("sin", "wide_angle", math.sin, {"absolute": 2.0**-14.7}, "2^-14.7 absolute in [-100pi, 100pi]"),
        ("cos", "wide_angle", math.cos, {"absolute": 2.0**-14.7}, "2^-14.7 absolute in [-100pi, 100pi]"),
    ]  # fmt: skip
    result = []
    for (op, pool, function, bound, words), ftz in itertools.product(cases, ("", ".ftz")):
        name = f"{op}.approx{ftz}.f32"
        case = instruction(
            name,
            pool,
            "f32",
            near(function, "f32", bool(ftz)),
            allowed=within("f32", **bound, ftz=bool(ftz)),
            bound=words,
        )
        if pool == "wide_angle":
            case = replace(case, name=f"{name} wide")
        result.append(case)
    result.append(
        instruction(
            "tanh.approx.f32",
            "f32",
            "f32",
            near(math.tanh, "f32", False),
            allowed=within("f32", relative=2.0**-11),
            bound="2^-11 relative",
        )
    )
    halves: list[tuple[str, str, Callable[[float], float], str, str, dict[str, Any], str]] = [
        ("ex2.approx", "f16", power, "half_exponent", "half_exponents", {"relative": 2.0**-9.9}, "2^-9.9 relative"),
        ("ex2.approx.ftz", "bf16", power, "bf16", "bf16x2", {"relative": 2.0**-7}, "2^-7 relative"),
        ("tanh.approx", "f16", math.tanh, "f16", "f16x2", {"absolute": 2.0**-10.987}, "2^-10.987 absolute"),
        ("tanh.approx", "bf16", math.tanh, "bf16", "bf16x2", {"absolute": 2.0**-8}, "2^-8 absolute"),
    ]
    for op, form, function, pool, pair, bound, words in halves:
        ftz = "ftz" in op
        meaning = near(function, form, ftz)
        allowed = within(form, **bound, ftz=ftz)
        result.append(instruction(f"{op}.{form}", pool, form, meaning, allowed=allowed, bound=words))
        result.append(
            instruction(f"{op}.{form}x2", pair, f"{form}x2", on_halves(meaning), allowed=allowed, bound=words)
        )
    return result


def _divisions() -> list[Case]:
    """Return cases of div.full and div.approx, which is a * (1 / b) with separate limits for large b."""
    result = []
    for ftz in ("", ".ftz"):
        full = rounded(lambda a, b, mode: exact.divide(a, b), "f32", f"div{ftz}")

        def approximate(a: int, b: int, full: Any = full) -> int:
            x, y = decode(a, "f32"), decode(b, "f32")
            if y.kind == "real" and abs(y.value) > 2**126 and x.kind != "nan":
                return FORMATS["f32"][2] if x.kind == "inf" else int(x.negative != y.negative) << 31
            return int(full(a, b))

        bound = within("f32", ulps=2, ftz=bool(ftz))
        result.append(instruction(f"div.full{ftz}.f32", "f32 f32", "f32", full, allowed=bound, bound="2 ulp"))
        result.append(
            instruction(
                f"div.approx{ftz}.f32",
                "f32 f32",
                "f32",
                approximate,
                allowed=bound,
                bound="2 ulp for |b| in [2^-126, 2^126]",
                undefined=lambda a, b: (
                    decode(b, "f32").kind == "real" and 0 < abs(decode(b, "f32").value) < Fraction(2) ** -126
                ),
            )
        )
    return result


def cases() -> list[Case]:
    """Return all cases."""
    return [
        *_arithmetic(), *_extremes(), *_signs(), *_tests(), *_comparisons(), *_special(), *_divisions(),
    ]  # fmt: skip
