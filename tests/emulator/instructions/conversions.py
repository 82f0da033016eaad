"""cvt between all supported types."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tests.emulator.instructions import exact
from tests.emulator.instructions.case import Case, instruction
from tests.emulator.instructions.exact import FORMATS, Number, decode, encode, flush, real
from tests.emulator.instructions.integers import saturated, value

INTEGERS = [f"{s}{n}" for n in (8, 16, 32, 64) for s in "us"]


def _container(kind: str) -> str:
    """Return the register type for a type of 8 bits or more."""
    return {"u8": "b16", "s8": "b16"}.get(kind, kind)


def whole(number: Number, mode: str) -> int:
    """Return the integer that a finite number rounds to in .rni, .rzi, .rmi or .rpi."""
    size = exact.round_magnitude(abs(number.value.numerator), number.value.denominator, number.negative, mode)
    return -size if number.negative else size


def _integers() -> list[Case]:
    result = []
    for to, source in itertools.product(INTEGERS, repeat=2):
        ins = source if source[1:] != "8" else "b16"  # a wider register's low bits count

        def plain(a: int, to: str = to, source: str = source) -> int:
            return value(value(a, source), to)

        result.append(instruction(f"cvt.{to}.{source}", ins, _container(to), plain))
        limits = [
            value(v, source)
            for v in (0, (1 << int(source[1:])) - 1, 1 << int(source[1:]) - 1, (1 << int(source[1:]) - 1) - 1)
        ]
        if any(saturated(v, to) != v for v in limits):
            result.append(
                instruction(
                    f"cvt.sat.{to}.{source}",
                    ins,
                    _container(to),
                    lambda a, to=to, source=source: saturated(value(a, source), to),
                )
            )
    return result


def _float_to_integer() -> list[Case]:
    result = []
    pools = {"f32": "to_integer", "f64": "double_to_integer", "f16": "f16", "bf16": "bf16"}
    for to, source, mode in itertools.product(INTEGERS, pools, ("rni", "rzi", "rmi", "rpi")):
        if (source, to[1:]) == ("bf16", "8"):
            continue  # ptxas refuses it
        for ftz in ("", ".ftz") if source == "f32" else ("",):

            def meaning(a: int, to: str = to, source: str = source, mode: str = mode, ftz: str = ftz) -> int:
                number = flush(decode(a, source), source) if ftz else decode(a, source)
                bits = int(to[1:])
                if number.kind == "nan":
                    return value(1 << bits - 1, to) if source == "f64" or bits == 64 else 0
                if number.kind == "inf":
                    return saturated(-(2**99) if number.negative else 2**99, to)
                return saturated(whole(number, mode), to)

            result.append(instruction(f"cvt.{mode}{ftz}.{to}.{source}", pools[source], _container(to), meaning))
    return result


def _integer_to_float() -> list[Case]:
    result = []
    for to, source, mode in itertools.product(("f32", "f64", "f16", "bf16"), INTEGERS, ("rn", "rz", "rm", "rp")):
        if (to, source[1:]) == ("bf16", "8"):
            continue  # ptxas refuses it
        ins = source if source[1:] != "8" else "b16"
        result.append(
            instruction(
                f"cvt.{mode}.{to}.{source}",
                ins,
                to,
                lambda a, to=to, source=source, mode=mode: encode(real(Fraction(value(a, source))), to, mode),
            )
        )
    return result


def _kept_nan(a: int, to: str, source: str) -> int:
    """A NaN made quiet in another format, with its sign and the top of its fraction (F2F on H100, 2026-11-21)."""
    (exponent, fraction, _), (new_exponent, new, _) = FORMATS[source], FORMATS[to]
    payload = a % (1 << fraction)
    payload = payload << new - fraction if new > fraction else payload >> fraction - new
    top = (a >> exponent + fraction) << new_exponent | (1 << new_exponent) - 1
    return top << new | 1 << new - 1 | payload


def converted(to: str, source: str, name: str) -> Callable[[int], int]:
    """Return the meaning of a float-to-float conversion with the modifiers in its name."""
    parts = name.split(".")
    mode = next((p for p in parts if p in ("rn", "rz", "rm", "rp", "rna")), "rn")
    integral = next((p for p in parts if p in ("rni", "rzi", "rmi", "rpi")), "")

    def meaning(a: int) -> int:
        number = decode(a, source)
        if "ftz" in parts and source == "f32":
            number = flush(number, "f32")
        if integral and number.kind == "real":
            number = real(Fraction(whole(number, integral)), number.negative)
        if "sat" in parts:
            number = exact.clamp(number)
        if "relu" in parts:
            number = exact.rectified(number)
        if "ftz" in parts and to == "f32":
            number = exact.flush_rounded(number, to, mode)
        if number.kind == "nan" and "f64" in (to, source):
            return _kept_nan(FORMATS["f32"][2] if "ftz" in parts and source == "f32" else a, to, source)
        if number.kind == "nan" and "rna" in parts:
            return (a >> 13 << 13) - (0x2000 if "satfinite" in parts else 0)
        bits = encode(number, to, mode, saturate="satfinite" in parts)
        return bits << 13 if to == "tf32" else bits

    return meaning


def _floats() -> list[Case]:
    result = []

    def put(name: str, to: str, source: str, pool: str = "", **options: Any) -> None:
        out = "b32" if to == "tf32" else to
        result.append(instruction(name, pool or source, out, converted(to, source, name), **options))

    narrowing = [
        ("f32", "f64"),
        ("f16", "f64"),
        ("f16", "f32"),
        ("bf16", "f32"),
        ("bf16", "f64"),
        ("f16", "bf16"),
        ("bf16", "f16"),
    ]
    for (to, source), mode in itertools.product(narrowing, ("rn", "rz", "rm", "rp")):
        put(f"cvt.{mode}.{to}.{source}", to, source, "double_to_integer" if (to, source) == ("f32", "f64") else "")
    put("cvt.bf16.f16", "bf16", "f16")
    put("cvt.f16.bf16", "f16", "bf16")
    for mode in ("rn", "rz", "rm", "rp"):
        put(f"cvt.{mode}.ftz.f32.f64", "f32", "f64", "double_to_integer")
        put(f"cvt.{mode}.sat.f32.f64", "f32", "f64", "double_to_integer")
    put("cvt.rn.ftz.f16.f32", "f16", "f32")
    put("cvt.rn.sat.f16.f32", "f16", "f32")
    for to in ("f16", "bf16"):
        for mode, relu, finite in itertools.product(("rn", "rz"), ("", ".relu"), ("", ".satfinite")):
            if relu or finite:
                put(f"cvt.{mode}{relu}{finite}.{to}.f32", to, "f32")
    # A wider float holds the number as it is. Which NaN float64 gets is open, and so it is from bf16.
    for to, source in (("f32", "f16"), ("f64", "f16"), ("f64", "f32"), ("f32", "bf16"), ("f64", "bf16")):
        put(f"cvt.{to}.{source}", to, source, any_nan=to == "f64" or source == "bf16")
    put("cvt.ftz.f32.f16", "f32", "f16")
    put("cvt.sat.f32.f16", "f32", "f16")
    put("cvt.ftz.f64.f32", "f64", "f32", any_nan=True)
    put("cvt.sat.f32.f32", "f32", "f32")
    put("cvt.ftz.sat.f32.f32", "f32", "f32")
    put("cvt.sat.f64.f64", "f64", "f64")
    for mode in ("rni", "rzi", "rmi", "rpi"):
        put(f"cvt.{mode}.f32.f32", "f32", "f32", "to_integer")
        put(f"cvt.{mode}.ftz.f32.f32", "f32", "f32", "to_integer")
        put(f"cvt.{mode}.sat.f32.f32", "f32", "f32", "to_integer")
        put(f"cvt.{mode}.f16.f16", "f16", "f16")
        put(f"cvt.{mode}.f64.f64", "f64", "f64", "double_to_integer", any_nan=True)
    for modifiers in ("rn", "rz", "rn.relu", "rz.relu"):
        put(f"cvt.{modifiers}.tf32.f32", "tf32", "f32")
    for modifiers in ("rna", "rna.satfinite"):
        # ptxas uses integers here, which truncate a NaN like any number, and so turn some into infinity.
        put(f"cvt.{modifiers}.tf32.f32", "tf32", "f32", undefined=lambda a: decode(a, "f32").kind == "nan")
    return result


def _pairs() -> list[Case]:
    """Two numbers at once: the first operand goes to the upper half."""
    result = []
    for to, mode, relu, finite in itertools.product(("f16", "bf16"), ("rn", "rz"), ("", ".relu"), ("", ".satfinite")):
        name = f"cvt.{mode}{relu}{finite}.{to}x2.f32"
        one = converted(to, "f32", name)
        result.append(instruction(name, "f32 f32", f"{to}x2", lambda a, b, f=one: f(a) << 16 | f(b)))
    for to, relu in itertools.product(("e4m3", "e5m2"), ("", ".relu")):
        name = f"cvt.rn.satfinite{relu}.{to}x2"
        one = converted(to, "f32", name)
        result.append(instruction(f"{name}.f32", "to_eight to_eight", "b16", lambda a, b, f=one: f(a) << 8 | f(b)))
        half = converted(to, "f16", name)
        result.append(instruction(f"{name}.f16x2", "f16x2", "b16", lambda a, f=half: f(a >> 16) << 8 | f(a & 0xFFFF)))
        back = converted("f16", to, f"cvt.rn{relu}")
        result.append(
            instruction(f"cvt.rn{relu}.f16x2.{to}x2", "b16", "f16x2", lambda a, f=back: f(a >> 8) << 16 | f(a & 0xFF))
        )
    return result


def cases() -> list[Case]:
    """Return all cases."""
    return [*_integers(), *_float_to_integer(), *_integer_to_float(), *_floats(), *_pairs()]
