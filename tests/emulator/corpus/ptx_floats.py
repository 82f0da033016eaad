"""Floating-point instructions and conversions on zeros, subnormals, infinities, NaN and ties."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from tests.emulator.corpus.assembly import decode, encode, ptx, rounded

INF = float("inf")
NAN = float("nan")


def finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)


def add(a: float, b: float, kind: str = "f32", mode: str = "rn") -> float:
    if not finite(a, b):
        return a + b
    exact = Fraction(a) + Fraction(b)
    if exact == 0:
        if a == b == 0 and math.copysign(1, a) == math.copysign(1, b):
            return a
        return -0.0 if mode == "rm" else 0.0
    return rounded(kind, exact, mode)


def mul(a: float, b: float, kind: str = "f32", mode: str = "rn") -> float:
    if not finite(a, b) or a == 0 or b == 0:
        return a * b
    return rounded(kind, Fraction(a) * Fraction(b), mode)


def fma(a: float, b: float, c: float, kind: str = "f32", mode: str = "rn") -> float:
    if not finite(a, b):
        return a * b + c
    if not finite(c):
        return c
    exact = Fraction(a) * Fraction(b)
    if exact == 0 or exact + Fraction(c) == 0:
        return add(
            a * b if exact == 0 else (1.0 if exact > 0 else -1.0),
            c if exact == 0 else -math.copysign(1, exact),
            kind,
            mode,
        )
    return rounded(kind, exact + Fraction(c), mode)


def div(a: float, b: float, kind: str = "f32", mode: str = "rn") -> float:
    if a != a or b != b or (a == 0 and b == 0) or (abs(a) == INF and abs(b) == INF):
        return NAN
    sign = math.copysign(1, a) * math.copysign(1, b)
    if b == 0 or abs(a) == INF:
        return sign * INF
    if a == 0 or abs(b) == INF:
        return sign * 0.0
    return rounded(kind, Fraction(a) / Fraction(b), mode)


def flush(v: float) -> float:
    """Flush a subnormal float32 to zero."""
    return math.copysign(0.0, v) if v == v and abs(v) < 2.0**-126 else v


def saturate(v: float) -> float:
    return 0.0 if v != v or v <= 0 else min(v, 1.0)


def least(a: float, b: float, top: bool = False) -> float:
    """min or max: a number wins over NaN, and -0 is less than +0."""
    if a != a or b != b:
        return b if a != a else a
    if a == b:
        return a if (math.copysign(1, a) < 0) != top else b
    return max(a, b) if top else min(a, b)


def root(v: float, kind: str = "f32", mode: str = "rn") -> float:
    if v != v or v < 0:
        return NAN
    if v == 0 or v == INF:
        return v
    # some hundred bits of the root, and one more for a non-zero remainder
    value, scale = Fraction(v), 1 << 2400
    whole = math.isqrt(value.numerator * scale // value.denominator)
    remainder = Fraction(whole * whole, scale) != value
    return rounded(kind, Fraction(2 * whole + remainder, 2 << 1200), mode)


for mode in ("rn", "rz", "rm", "rp"):
    ptx(f"add_{mode}_f32", f"add.{mode}.f32 %d, %a, %b;", "f32 f32", "f32", lambda a, b, m=mode: add(a, b, "f32", m))
    ptx(
        f"fma_{mode}_f64",
        f"fma.{mode}.f64 %d, %a, %b, %c;",
        "f64 f64 f64",
        "f64",
        lambda a, b, c, m=mode: fma(a, b, c, "f64", m),
    )
ptx("mul_rz_f32", "mul.rz.f32 %d, %a, %b;", "f32 f32", "f32", lambda a, b: mul(a, b, "f32", "rz"))
ptx(
    "mul_ftz_sat_f32",
    "mul.ftz.sat.f32 %d, %a, %b;",
    "f32 f32",
    "f32",
    lambda a, b: saturate(flush(mul(flush(a), flush(b)))),
)
ptx("sub_ftz_f32", "sub.ftz.f32 %d, %a, %b;", "f32 f32", "f32", lambda a, b: flush(add(flush(a), -flush(b))))
ptx("fma_rp_f32", "fma.rp.f32 %d, %a, %b, %c;", "f32 f32 f32", "f32", lambda a, b, c: fma(a, b, c, "f32", "rp"))
ptx("fma_rn_sat_f32", "fma.rn.sat.f32 %d, %a, %b, %c;", "f32 f32 f32", "f32", lambda a, b, c: saturate(fma(a, b, c)))
ptx("add_rn_f16", "add.rn.f16 %d, %a, %b;", "f16 f16", "f16", lambda a, b: add(a, b, "f16"))
ptx("mul_sat_f16", "mul.sat.f16 %d, %a, %b;", "f16 f16", "f16", lambda a, b: saturate(mul(a, b, "f16")))
ptx("fma_rn_f16", "fma.rn.f16 %d, %a, %b, %c;", "f16 f16 f16", "f16", lambda a, b, c: fma(a, b, c, "f16"))


def relu(v: float) -> float:
    """NaN stays."""
    return v if v != v else max(v, 0.0) + 0.0


ptx("fma_relu_f16", "fma.rn.relu.f16 %d, %a, %b, %c;", "f16 f16 f16", "f16", lambda a, b, c: relu(fma(a, b, c, "f16")))
ptx("fma_rn_bf16", "fma.rn.bf16 %d, %a, %b, %c;", "bf16 bf16 bf16", "bf16", lambda a, b, c: fma(a, b, c, "bf16"))
ptx("add_rn_bf16", "add.rn.bf16 %d, %a, %b;", "bf16 bf16", "bf16", lambda a, b: add(a, b, "bf16"))


def halves(f: Any, kind: str = "f16") -> Any:
    """Apply a function of numbers to both halves of words."""

    def both(*words: int) -> int:
        low, high = (encode(kind, f(*(decode(kind, w >> s & 0xFFFF) for w in words))) for s in (0, 16))
        return low | high << 16

    return both


# words of halves without NaN
_ROWS = [
    tuple(encode("f16", v) | encode("f16", -v / 3) << 16 for v in (x, y, x - y))
    for x in (0.0, -0.0, 1.0, 65504.0, 6e-8, -2.5, 0.1, 300.0)
    for y in (0.0, 2.0, -65504.0, 1e-7, 0.3, -7.0, 1e-3, 1.0)
]
ptx(
    "fma_rn_f16x2",
    "fma.rn.f16x2 %d, %a, %b, %c;",
    "b32 b32 b32",
    "b32",
    halves(lambda a, b, c: fma(a, b, c, "f16")),
    rows=_ROWS,
)
ptx(
    "max_f16x2",
    "max.f16x2 %d, %a, %b;",
    "b32 b32",
    "b32",
    halves(lambda a, b: least(a, b, True)),
    rows=[r[:2] for r in _ROWS],
)
ptx(
    "neg_and_abs_f16x2",
    "neg.f16x2 %d, %a;\nabs.f16x2 %e, %a;",
    "b32",
    "b32 b32",
    lambda a: (a ^ 0x80008000, a & 0x7FFF7FFF),
    rows=[r[:1] for r in _ROWS],
)
ptx(
    "min_max_f32",
    "min.f32 %d, %a, %b;\nmax.f32 %e, %a, %b;",
    "f32 f32",
    "f32 f32",
    lambda a, b: (least(a, b), least(a, b, True)),
)
ptx(
    "max_nan_f32",
    "max.NaN.f32 %d, %a, %b;",
    "f32 f32",
    "f32",
    lambda a, b: NAN if a != a or b != b else least(a, b, True),
)
ptx(
    "min_nan_bf16",
    "min.NaN.bf16 %d, %a, %b;",
    "bf16 bf16",
    "bf16",
    lambda a, b: NAN if a != a or b != b else least(a, b),
)


def xorsign(a: float, b: float) -> float:
    """Return the larger size, with the exclusive or of the signs."""
    size = least(abs(a), abs(b), True)
    return math.copysign(size, math.copysign(1, a) * math.copysign(1, b)) if a == a and b == b else size


_NUMBERS = [(encode("f32", a), encode("f32", b)) for a in (0.0, -1.0, 2.5, -3.0, INF) for b in (1.0, -0.5, 4.0, -INF)]
ptx("max_xorsign_abs_f32", "max.xorsign.abs.f32 %d, %a, %b;", "f32 f32", "f32", xorsign, rows=_NUMBERS)
ptx("neg_and_abs_f32", "neg.f32 %d, %a;\nabs.ftz.f32 %e, %a;", "f32", "f32 f32", lambda a: (-a, abs(flush(a))))
ptx("copysign_f32", "copysign.f32 %d, %a, %b;", "f32 f32", "f32", lambda a, b: math.copysign(b, a) if b == b else NAN)
ptx("copysign_f64", "copysign.f64 %d, %a, %b;", "f64 f64", "f64", lambda a, b: math.copysign(b, a) if b == b else NAN)
ptx("div_rn_f32", "div.rn.f32 %d, %a, %b;", "f32 f32", "f32", div)
ptx("div_rp_f64", "div.rp.f64 %d, %a, %b;", "f64 f64", "f64", lambda a, b: div(a, b, "f64", "rp"))
ptx("rcp_rm_f32", "rcp.rm.f32 %d, %a;", "f32", "f32", lambda a: div(1.0, a, "f32", "rm"))
ptx("rcp_rn_f64", "rcp.rn.f64 %d, %a;", "f64", "f64", lambda a: div(1.0, a, "f64"))
ptx("sqrt_rn_f32", "sqrt.rn.f32 %d, %a;", "f32", "f32", root)
ptx("sqrt_rz_f64", "sqrt.rz.f64 %d, %a;", "f64", "f64", lambda a: root(a, "f64", "rz"))
_POSITIVE = [(encode("f32", v),) for v in (0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0, 1e-3, 1e5, 0.99, 1e-30, 1e30)]
ptx("rsqrt_approx_f32", "rsqrt.approx.f32 %d, %a;", "f32", "f32", lambda a: a**-0.5, rows=_POSITIVE, rtol=2e-7)
ptx("lg2_approx_f32", "lg2.approx.f32 %d, %a;", "f32", "f32", math.log2, rows=_POSITIVE, rtol=3e-6, atol=2.0**-22)
_SMALL = [(encode("f32", v),) for v in (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -3.0, 0.1, 3.1)]
ptx(
    "sin_cos_approx_f32",
    "sin.approx.f32 %d, %a;\ncos.approx.f32 %e, %a;",
    "f32",
    "f32 f32",
    lambda a: (math.sin(a), math.cos(a)),
    rows=_SMALL,
    rtol=2e-5,
)
ptx("ex2_approx_ftz_f32", "ex2.approx.ftz.f32 %d, %a;", "f32", "f32", lambda a: 2.0**a, rows=_SMALL, rtol=3e-7)
ptx("tanh_approx_f32", "tanh.approx.f32 %d, %a;", "f32", "f32", math.tanh, rows=_SMALL, rtol=2.0**-10)
_HALF = [(encode("f16", decode("f32", r[0])),) for r in _SMALL]
ptx("ex2_approx_f16", "ex2.approx.f16 %d, %a;", "f16", "f16", lambda a: 2.0**a, rows=_HALF, rtol=2.0**-9)
ptx("tanh_approx_f16", "tanh.approx.f16 %d, %a;", "f16", "f16", math.tanh, rows=_HALF, rtol=2.0**-9)
_DOUBLES = [(encode("f64", v),) for v in (1.0, -1.5, 3.0, 1e10, -7e-5)]
ptx("rcp_approx_ftz_f64", "rcp.approx.ftz.f64 %d, %a;", "f64", "f64", lambda a: 1 / a, rows=_DOUBLES, rtol=2.0**-19)
ptx(
    "rsqrt_approx_f64",
    "rsqrt.approx.f64 %d, %a;",
    "f64",
    "f64",
    lambda a: a**-0.5,
    rows=[_DOUBLES[0], _DOUBLES[2], _DOUBLES[3]],
    rtol=2.0**-19,
)
ptx(
    "div_full_f32",
    "div.full.f32 %d, %a, %b;",
    "f32 f32",
    "f32",
    lambda a, b: a / b,
    rows=[(a[0], b[0]) for a in _POSITIVE for b in _POSITIVE[:10]],
    rtol=3e-7,
)


def compared(a: float, b: float, c: int) -> tuple[int, ...]:
    unordered = a != a or b != b
    return tuple(map(int, (a < b, a < b or unordered, a == b or unordered, a != b and not unordered, not unordered)))


ptx(
    "setp_ordered_and_unordered_f32",
    "\n".join(
        f"setp.{o}.f32 %p, %a, %b;\nselp.u32 %{r}, 1, 0, %p;"
        for o, r in zip(("lt", "ltu", "equ", "ne", "num"), "dexyz", strict=True)
    ),
    "f32 f32 u32",
    "u32 u32 u32 u32 u32",
    compared,
)
ptx("setp_f16", "setp.ge.f16 %p, %a, %b;\nselp.u32 %d, 1, 0, %p;", "f16 f16", "u32", lambda a, b: int(a >= b))
ptx("setp_bf16", "setp.neu.bf16 %p, %a, %b;\nselp.u32 %d, 1, 0, %p;", "bf16 bf16", "u32", lambda a, b: int(a != b))
ptx("set_f16_of_f16", "set.lt.f16.f16 %d, %a, %b;", "f16 f16", "f16", lambda a, b: float(a < b))
ptx(
    "set_f16x2_to_a_word",
    "set.gt.u32.f16x2 %d, %a, %b;",
    "b32 b32",
    "b32",
    lambda a, b: sum(0xFFFF << s for s in (0, 16) if decode("f16", a >> s & 0xFFFF) > decode("f16", b >> s & 0xFFFF)),
)
ptx(
    "testp_f32",
    "\n".join(
        f"testp.{o}.f32 %p, %a;\nselp.u32 %{r}, 1, 0, %p;"
        for o, r in zip(("finite", "infinite", "notanumber", "normal", "subnormal"), "dexyz", strict=True)
    ),
    "f32",
    "u32 u32 u32 u32 u32",
    lambda a: tuple(
        map(
            int,
            (finite(a), abs(a) == INF, a != a, finite(a) and (a == 0 or abs(a) >= 2.0**-126), 0 < abs(a) < 2.0**-126),
        )
    ),
)


def whole(a: float, mode: str) -> int:
    exact = Fraction(a)
    down = math.floor(exact)
    return {
        "rni": round(exact),
        "rzi": math.trunc(exact),
        "rmi": down,
        "rpi": math.ceil(exact),
    }[mode]


def to_integer(a: float, mode: str, low: int, high: int) -> int:
    """Convert to an integer: NaN gives 0, values out of range give the nearest limit."""
    if a != a:
        return 0
    return (low if a < 0 else high) if abs(a) == INF else min(max(whole(a, mode), low), high)


for mode in ("rni", "rzi", "rmi", "rpi"):
    ptx(
        f"cvt_{mode}_s32_f32",
        f"cvt.{mode}.s32.f32 %d, %a;",
        "f32",
        "s32",
        lambda a, m=mode: to_integer(a, m, -(2**31), 2**31 - 1),
    )
ptx(
    "cvt_rzi_u64_f64",
    "cvt.rzi.u64.f64 %d, %a;",
    "f64",
    "u64",
    lambda a: to_integer(a, "rzi", 0, 2**64 - 1) if a == a else 2**63,
)
ptx("cvt_rni_u8_f32", "cvt.rni.sat.u8.f32 %d, %a;", "f32", "u16", lambda a: to_integer(a, "rni", 0, 255))
ptx("cvt_rni_s16_f16", "cvt.rni.s16.f16 %d, %a;", "f16", "s16", lambda a: to_integer(a, "rni", -32768, 32767))
ptx(
    "cvt_rni_f32_f32",
    "cvt.rni.f32.f32 %d, %a;",
    "f32",
    "f32",
    lambda a: math.copysign(float(whole(a, "rni")), a) if finite(a) else a,
)
ptx(
    "cvt_rmi_ftz_f32_f32",
    "cvt.rmi.ftz.f32.f32 %d, %a;",
    "f32",
    "f32",
    lambda a: math.copysign(float(whole(flush(a), "rmi")), a) if finite(a) else a,
)
for mode in ("rn", "rz", "rm", "rp"):
    ptx(f"cvt_{mode}_f32_s64", f"cvt.{mode}.f32.s64 %d, %a;", "s64", "f32", lambda a, m=mode: rounded("f32", a, m))
    ptx(
        f"cvt_{mode}_f32_f64",
        f"cvt.{mode}.f32.f64 %d, %a;",
        "f64",
        "f32",
        lambda a, m=mode: rounded("f32", Fraction(a), m) if finite(a) and a else a,
    )
ptx("cvt_rn_f16_f32", "cvt.rn.f16.f32 %d, %a;", "f32", "f16", lambda a: a)
ptx("cvt_rn_bf16_f32", "cvt.rn.bf16.f32 %d, %a;", "f32", "bf16", lambda a: a)
ptx("cvt_f32_f16_and_bf16", "cvt.f32.f16 %d, %a;\ncvt.f32.bf16 %e, %b;", "f16 bf16", "f32 f32", lambda a, b: (a, b))
ptx("cvt_sat_f32_f32", "cvt.sat.f32.f32 %d, %a;", "f32", "f32", saturate)
ptx("cvt_rn_f64_u64", "cvt.rn.f64.u64 %d, %a;", "u64", "f64", lambda a: rounded("f64", a))
ptx("cvt_rn_f16_s32", "cvt.rn.f16.s32 %d, %a;", "s32", "f16", lambda a: rounded("f16", a))
ptx(
    "cvt_two_floats_to_halves",
    "cvt.rn.f16x2.f32 %d, %a, %b;\ncvt.rn.relu.bf16x2.f32 %e, %a, %b;",
    "f32 f32",
    "b32 b32",
    lambda a, b: (encode("f16", a) << 16 | encode("f16", b), encode("bf16", relu(a)) << 16 | encode("bf16", relu(b))),
    rows=[
        (encode("f32", a), encode("f32", b))
        for a in (0.0, 1.0, -2.5, 65520.0, 1e-8, INF)
        for b in (-1.0, 3e38, 0.1, 2.0**-25)
    ],
)
ptx(
    "cvt_rna_tf32",
    "cvt.rna.tf32.f32 %d, %a;",
    "b32",
    "b32",
    lambda a: (a + 0x1000) & 0xFFFFE000,
    rows=[(encode("f32", v),) for v in (0.0, 1.0, -1.0009765625, 1.00048828125, 1.000244140625, 3.14159, -2.71828e-20)],
)


def e4m3(v: float) -> int:
    """Nearest, ties to even, saturating."""
    codes = [(abs(Fraction(v) - value(c)), c & 1, c) for c in range(127)] if v >= 0 else []
    if not codes:
        return e4m3(-v) | 0x80
    return 126 if v >= 448 else min(codes)[2]


def value(code: int) -> Fraction:
    exponent, fraction = code >> 3 & 15, code & 7
    return (
        Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)
        if exponent
        else Fraction(fraction, 8) * Fraction(1, 64)
    )


_PAIRS = [
    (encode("f32", a), encode("f32", b))
    for a in (0.5, 17.0, 1.0625, 500.0, 1e-3, 2.0**-10)
    for b in (-3.3, 448.0, -0.0019, 240.1)
]
ptx(
    "cvt_two_floats_to_e4m3",
    "cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b;",
    "f32 f32",
    "b16",
    lambda a, b: e4m3(a) << 8 | e4m3(b),
    rows=_PAIRS,
)
ptx(
    "cvt_e4m3_to_halves",
    "cvt.rn.f16x2.e4m3x2 %d, %a;",
    "b16",
    "b32",
    lambda a: sum(encode("f16", float(value(a >> s & 127)) * (-1 if a >> s & 128 else 1)) << 2 * s for s in (0, 8)),
    rows=[(a | b << 8,) for a in (0, 1, 7, 8, 0x7E, 0x81, 0xFE) for b in (0, 0x38, 0x80, 0xC0)],
)
