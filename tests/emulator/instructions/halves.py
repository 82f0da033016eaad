"""set in and of halves, min and max with the sign of a product, and approximate float64 reciprocals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions import exact
from tests.emulator.instructions.case import Case, instruction
from tests.emulator.instructions.exact import FORMATS, Number, decode, encode, flush, on_halves, real
from tests.emulator.instructions.floating import compare

_ONES = {"f16": 0x3C00, "bf16": 0x3F80, "u16": 0xFFFF, "u32": 2**32 - 1, "s32": 2**32 - 1}


def _sets() -> list[Case]:
    result = []
    singles = [
        *(("f16", out) for out in ("f16", "bf16", "u16", "u32")), ("bf16", "bf16"), ("bf16", "u32"), ("f32", "f16"),
        ("f64", "bf16"),
    ]  # fmt: skip
    for (kind, out), name in itertools.product(singles, ("lt", "geu", "nan")):
        if out == "bf16" and kind == "f16":
            continue

        def one(a: int, b: int, kind: str = kind, name: str = name, out: str = out) -> int:
            return _ONES[out] if compare(decode(a, kind), decode(b, kind), name) else 0

        width = "b16" if out in ("f16", "bf16", "u16") else "b32"
        result.append(instruction(f"set.{name}.{out}.{kind}", f"{kind} {kind}", width, one))
    for kind, name, mask in itertools.product(("f16x2", "bf16x2"), ("eq", "neu", "gt"), (False, True)):
        form = kind.removesuffix("x2")
        yes = 0xFFFF if mask else _ONES[form]

        def half(a: int, b: int, form: str = form, name: str = name, yes: int = yes) -> int:
            return yes if compare(decode(a, form), decode(b, form), name) else 0

        out = "u32" if mask else kind
        result.append(instruction(f"set.{name}.{out}.{kind}", f"{kind} {kind}", "b32", on_halves(half)))

    def flushed(a: int, b: int) -> int:
        return 0x3C00 if compare(flush(decode(a, "f16"), "f16"), flush(decode(b, "f16"), "f16"), "eq") else 0

    result.append(instruction("set.eq.ftz.f16x2.f16x2", "f16x2 f16x2", "b32", on_halves(flushed)))
    return result


def _is_nan(pattern: int, form: str) -> bool:
    return decode(pattern, form).kind == "nan"


def _signed_extremes() -> list[Case]:
    result = []
    for (op, pick), (kind, ftz) in itertools.product(
        (("min", min), ("max", max)), (("f32", ""), ("f32", ".ftz"), ("f16", ""), ("f16x2", ""), ("bf16x2", ""))
    ):
        form = kind.removesuffix("x2")

        def one(a: int, b: int, form: str = form, pick: Any = pick, ftz: str = ftz) -> int:
            x, y = (flush(decode(p, form), form) if ftz else decode(p, form) for p in (a, b))

            def size(n: Number) -> Any:
                return (n.kind == "inf", abs(n.value))

            chosen = pick((x, y), key=size)
            return encode(replace(chosen, negative=False, value=abs(chosen.value)), form) | (
                (x.negative != y.negative) << sum(FORMATS[form][:2])
            )

        def nan_among(a: int, b: int, form: str = form, pair: bool = kind.endswith("x2")) -> bool:
            if pair:  # the ISA leaves the sign of a NaN open
                return any(_is_nan(p >> index & 0xFFFF, form) for p in (a, b) for index in (0, 16))
            return _is_nan(a, form) or _is_nan(b, form)

        def meaning(a: int, b: int, f: Any = one, bad: Any = nan_among, pair: bool = kind.endswith("x2")) -> int:
            if bad(a, b):
                return 0
            return on_halves(f)(a, b) if pair else int(f(a, b))

        name = f"{op}{ftz}.xorsign.abs.{kind}"
        result.append(instruction(name, f"{kind} {kind}", kind, meaning, undefined=nan_among))
    return result


def _upper(operands: list[NDArray[np.uint64]], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 20 bits of fraction; the last two may differ (not in the ISA)."""
    return np.abs(values) * 2.0**-18


def _gross() -> list[Case]:
    """Return cases that map the operand's upper 32 bits to the result's; the ISA bounds neither."""

    def reciprocal(a: int) -> int:
        number = flush(decode(a >> 32 << 32, "f64"), "f64")
        inverse = exact.divide(real(decode(0x3FF0_0000_0000_0000, "f64").value), number)
        return encode(flush(inverse, "f64"), "f64") if inverse.kind != "nan" else FORMATS["f64"][2]

    def root(a: int) -> int:
        inverse = exact.divide(real(decode(0x3FF0_0000_0000_0000, "f64").value), exact.root(decode(a, "f64")))
        return encode(inverse, "f64")

    bound: dict[str, Any] = {"allowed": _upper, "bound": "2^-18 relative (not in the ISA)", "any_nan": True}
    return [
        instruction("rcp.approx.ftz.f64", "f64", "f64", reciprocal, **bound),
        instruction("rsqrt.approx.f64", "f64", "f64", root, **bound),
    ]


def cases() -> list[Case]:
    """Return all cases."""
    return [*_sets(), *_signed_extremes(), *_gross()]
