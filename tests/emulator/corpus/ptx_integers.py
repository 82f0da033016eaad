"""Integer and bit instructions on edges."""

from __future__ import annotations

from typing import Any

from tests.emulator.corpus.assembly import ptx

M32, M64 = 2**32 - 1, 2**64 - 1


def signed(v: int, bits: int = 32) -> int:
    v &= (1 << bits) - 1
    return v - (1 << bits) if v >> (bits - 1) else v


def clamp(v: int, low: int, high: int) -> int:
    return min(max(v, low), high)


def sat32(v: int) -> int:
    return clamp(v, -(2**31), 2**31 - 1)


def quotient(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def no_zero(kind: str) -> list[tuple[int, int]]:
    bits = int(kind[1:])
    edges = [
        0,
        1,
        2,
        3,
        7,
        10,
        100,
        2 ** (bits - 1) - 1,
        2 ** (bits - 1),
        2 ** (bits - 1) + 1,
        2**bits - 1,
        2**bits - 7,
    ]
    return [(a, b) for a in edges for b in edges if b][:190]


ptx("add_sat_s32", "add.sat.s32 %d, %a, %b;", "s32 s32", "s32", lambda a, b: sat32(a + b))
ptx("sub_sat_s32", "sub.sat.s32 %d, %a, %b;", "s32 s32", "s32", lambda a, b: sat32(a - b))
ptx("mul_hi_s32", "mul.hi.s32 %d, %a, %b;", "s32 s32", "s32", lambda a, b: a * b >> 32)
ptx("mul_hi_u64", "mul.hi.u64 %d, %a, %b;", "u64 u64", "u64", lambda a, b: a * b >> 64)
ptx("mul_wide_s16", "mul.wide.s16 %d, %a, %b;", "s16 s16", "s32", lambda a, b: a * b)
ptx("mul_wide_u32", "mul.wide.u32 %d, %a, %b;", "u32 u32", "u64", lambda a, b: a * b)
ptx("mad_lo_s64", "mad.lo.s64 %d, %a, %b, %c;", "s64 s64 s64", "s64", lambda a, b, c: a * b + c)
ptx("mad_wide_s32", "mad.wide.s32 %d, %a, %b, %c;", "s32 s32 s64", "s64", lambda a, b, c: a * b + c)
ptx("mad_hi_sat_s32", "mad.hi.sat.s32 %d, %a, %b, %c;", "s32 s32 s32", "s32", lambda a, b, c: sat32((a * b >> 32) + c))
ptx("mul24_lo_u32", "mul24.lo.u32 %d, %a, %b;", "u32 u32", "u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))
ptx("mul24_hi_s32", "mul24.hi.s32 %d, %a, %b;", "s32 s32", "s32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16)
ptx(
    "mad24_lo_s32",
    "mad24.lo.s32 %d, %a, %b, %c;",
    "s32 s32 s32",
    "s32",
    lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
)
ptx("sad_s32", "sad.s32 %d, %a, %b, %c;", "s32 s32 s32", "s32", lambda a, b, c: c + abs(a - b))
ptx("sad_u16", "sad.u16 %d, %a, %b, %c;", "u16 u16 u16", "u16", lambda a, b, c: c + abs(a - b))
ptx("sad_u64", "sad.u64 %d, %a, %b, %c;", "u64 u64 u64", "u64", lambda a, b, c: c + abs(a - b))
ptx("div_s32", "div.s32 %d, %a, %b;", "s32 s32", "s32", quotient, rows=no_zero("s32"))
ptx("rem_s32", "rem.s32 %d, %a, %b;", "s32 s32", "s32", lambda a, b: a - b * quotient(a, b), rows=no_zero("s32"))
ptx("div_u64", "div.u64 %d, %a, %b;", "u64 u64", "u64", lambda a, b: a // b, rows=no_zero("u64"))
ptx("rem_s16", "rem.s16 %d, %a, %b;", "s16 s16", "s16", lambda a, b: a - b * quotient(a, b), rows=no_zero("s16"))
ptx("abs_and_neg_s32", "abs.s32 %d, %a;\nneg.s32 %e, %a;", "s32", "s32 s32", lambda a: (abs(a), -a))
ptx("abs_s16", "abs.s16 %d, %a;", "s16", "s16", abs)
ptx(
    "min_max_s64", "min.s64 %d, %a, %b;\nmax.s64 %e, %a, %b;", "s64 s64", "s64 s64", lambda a, b: (min(a, b), max(a, b))
)
ptx(
    "min_max_u16", "min.u16 %d, %a, %b;\nmax.u16 %e, %a, %b;", "u16 u16", "u16 u16", lambda a, b: (min(a, b), max(a, b))
)
ptx("max_relu_s32", "max.relu.s32 %d, %a, %b;", "s32 s32", "s32", lambda a, b: max(a, b, 0))


def by_half(f: Any) -> Any:
    """Build a function of two signed 16-bit numbers on both halves of words."""

    def both(a: int, b: int) -> int:
        low, high = (int(f(signed(a >> s, 16), signed(b >> s, 16))) & 0xFFFF for s in (0, 16))
        return low | high << 16

    return both


ptx("max_s16x2", "max.s16x2 %d, %a, %b;", "b32 b32", "b32", by_half(max))
ptx("min_relu_s16x2", "min.relu.s16x2 %d, %a, %b;", "b32 b32", "b32", by_half(lambda a, b: max(min(a, b), 0)))
ptx("add_s16x2", "add.s16x2 %d, %a, %b;", "b32 b32", "b32", by_half(lambda a, b: a + b))
ptx("logic_b64", "and.b64 %d, %a, %b;\nxor.b64 %e, %a, %b;", "b64 b64", "b64 b64", lambda a, b: (a & b, a ^ b))
ptx("not_and_cnot_b32", "not.b32 %d, %a;\ncnot.b32 %e, %a;", "b32", "b32 b32", lambda a: (~a, int(a == 0)))
ptx("cnot_b16", "cnot.b16 %d, %a;", "b16", "b16", lambda a: int(a == 0))
ptx(
    "shifts_b32",
    "shl.b32 %d, %a, %b;\nshr.s32 %e, %a, %b;\nshr.u32 %x, %a, %b;",
    "b32 u32",
    "b32 b32 b32",
    lambda a, b: (a << min(b, 32), signed(a) >> min(b, 32), a >> min(b, 32)),
)
ptx(
    "shifts_b16",
    "shl.b16 %d, %a, %b;\nshr.s16 %e, %a, %b;\nshr.u16 %x, %a, %b;",
    "b16 u32",
    "b16 b16 b16",
    lambda a, b: (a << min(b, 16), signed(a, 16) >> min(b, 16), a >> min(b, 16)),
)
ptx(
    "shifts_b64",
    "shl.b64 %d, %a, %b;\nshr.s64 %e, %a, %b;\nshr.b64 %x, %a, %b;",
    "b64 u32",
    "b64 b64 b64",
    lambda a, b: (a << min(b, 64), signed(a, 64) >> min(b, 64), a >> min(b, 64)),
)
ptx(
    "funnel_shifts_clamped",
    "shf.l.clamp.b32 %d, %a, %b, %c;\nshf.r.clamp.b32 %e, %a, %b, %c;",
    "b32 b32 u32",
    "b32 b32",
    lambda a, b, c: ((b << 32 | a) << min(c, 32) >> 32, (b << 32 | a) >> min(c, 32)),
)
ptx(
    "funnel_shifts_wrapped",
    "shf.l.wrap.b32 %d, %a, %b, %c;\nshf.r.wrap.b32 %e, %a, %b, %c;",
    "b32 b32 u32",
    "b32 b32",
    lambda a, b, c: ((b << 32 | a) << (c & 31) >> 32, (b << 32 | a) >> (c & 31)),
)
ptx(
    "counts_of_bits_b32",
    "popc.b32 %d, %a;\nclz.b32 %e, %a;\nbrev.b32 %x, %a;",
    "b32",
    "u32 u32 b32",
    lambda a: (a.bit_count(), 32 - a.bit_length(), int(f"{a:032b}"[::-1], 2)),
)
ptx(
    "counts_of_bits_b64",
    "popc.b64 %d, %a;\nclz.b64 %e, %a;\nbrev.b64 %x, %a;",
    "b64",
    "u32 u32 b64",
    lambda a: (a.bit_count(), 64 - a.bit_length(), int(f"{a:064b}"[::-1], 2)),
)


def bfind(a: int, bits: int = 32) -> int:
    """Return the position of the highest bit that differs from the sign bit, or -1."""
    return (a if a >= 0 else ~a).bit_length() - 1


ptx("bfind_s32", "bfind.s32 %d, %a;", "s32", "u32", bfind)
ptx("bfind_shiftamt_u32", "bfind.shiftamt.u32 %d, %a;", "u32", "u32", lambda a: 31 - bfind(a) if a else M32)
ptx("bfind_s64", "bfind.s64 %d, %a;", "s64", "u32", bfind)


def bfe(a: int, b: int, c: int, bits: int, is_signed: bool) -> int:
    """bfe as the ISA's pseudocode has it; position and length are 8 bits."""
    position, length = b & 255, c & 255
    top = bits - 1
    sign = 0
    if is_signed and length:
        sign = a >> min(position + length - 1, top) & 1
    result = 0
    for i in range(bits):
        inside = i < length and position + i <= top
        result |= ((a >> (position + i) & 1) if inside else sign) << i
    return result


def bfi(a: int, b: int, c: int, d: int, bits: int) -> int:
    position, length = c & 255, d & 255
    result = b
    for i in range(length):
        if position + i < bits:
            result = result & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return result


ptx("bfe_u32", "bfe.u32 %d, %a, %b, %c;", "b32 u32 u32", "b32", lambda a, b, c: bfe(a, b, c, 32, False))
ptx("bfe_s32", "bfe.s32 %d, %a, %b, %c;", "b32 u32 u32", "b32", lambda a, b, c: bfe(a, b, c, 32, True))
# beyond 64 bits the hardware does other than the ISA's pseudocode
_WITHIN = [
    (a, b, c)
    for a in (0, M64, 2**63, 0x0123456789ABCDEF)
    for b in (0, 1, 31, 32, 63)
    for c in (0, 1, 33, 64)
    if b + c <= 64
]
ptx("bfe_s64", "bfe.s64 %d, %a, %b, %c;", "b64 u32 u32", "b64", lambda a, b, c: bfe(a, b, c, 64, True), rows=_WITHIN)
ptx("bfi_b32", "bfi.b32 %d, %a, %b, %c, %f;", "b32 b32 u32 u32", "b32", lambda a, b, c, f: bfi(a, b, c, f, 32))
ptx(
    "bfi_b64",
    "bfi.b64 %d, %a, %b, %c, %f;",
    "b64 b64 u32 u32",
    "b64",
    lambda a, b, c, f: bfi(a, b, c, f, 64),
    rows=[(a, ~a & M64 ^ 0xFF00, b, c) for a, b, c in _WITHIN],
)


def fns(mask: int, base: int, offset: int) -> int:
    """Return the n-th set bit from a base, after the ISA's pseudocode."""
    if offset == 0:
        return base if mask >> base & 1 else M32
    position, left = base, abs(offset) - 1
    step = 1 if offset > 0 else -1
    while 0 <= position < 32:
        if mask >> position & 1:
            if not left:
                return position
            left -= 1
        position += step
    return M32


_FNS = [
    (m, b, o & M32) for m in (0, M32, 0x80000001, 0xA5A5A5A5) for b in (0, 1, 17, 31) for o in (-33, -2, -1, 0, 1, 2, 9)
]
ptx("fns_b32", "fns.b32 %d, %a, %b, %c;", "b32 u32 s32", "b32", fns, rows=_FNS)


def bmsk(a: int, b: int, clamped: bool) -> int:
    a, b = (a, b) if clamped else (a & 31, b & 31)
    return (((1 << min(b, 64)) - 1) << a) & M32 if a < 32 else 0


ptx("bmsk_clamp", "bmsk.clamp.b32 %d, %a, %b;", "u32 u32", "b32", lambda a, b: bmsk(a, b, True))
ptx("bmsk_wrap", "bmsk.wrap.b32 %d, %a, %b;", "u32 u32", "b32", lambda a, b: bmsk(a, b, False))


def szext(a: int, n: int, is_signed: bool, clamped: bool) -> int:
    n = n if clamped else n & 31
    if n >= 32:
        return a
    if n == 0:
        return 0
    low = a & ((1 << n) - 1)
    return signed(low, n) if is_signed else low


ptx("szext_clamp_s32", "szext.clamp.s32 %d, %a, %b;", "b32 u32", "b32", lambda a, b: szext(a, b, True, True))
ptx("szext_wrap_u32", "szext.wrap.u32 %d, %a, %b;", "b32 u32", "b32", lambda a, b: szext(a, b, False, False))


def table(a: int, b: int, c: int, lut: int, bits: int = 32) -> int:
    result = 0
    for i in range(bits):
        result |= (lut >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i
    return result


ptx("lop3_b32", "lop3.b32 %d, %a, %b, %c, 0xd2;", "b32 b32 b32", "b32", lambda a, b, c: table(a, b, c, 0xD2))
ptx(
    "lop3_with_a_predicate",
    "setp.gt.u32 %q, %a, 100;\nlop3.and.b32 %d|%p, %a, %b, %c, 0x80, %q;\nselp.u32 %e, 1, 0, %p;",
    "b32 b32 b32",
    "b32 u32",
    lambda a, b, c: (a & b & c, int(a & b & c != 0 and a > 100)),
)


def prmt(a: int, b: int, selectors: list[int]) -> int:
    both, result = a | b << 32, 0
    for j, s in enumerate(selectors):
        byte = both >> 8 * (s & 7) & 255
        result |= (0xFF * (byte >> 7) if s & 8 else byte) << 8 * j
    return result


def prmt_mode(mode: str, c: int) -> list[int]:
    n = c & 3
    return {
        "f4e": [n + i for i in range(4)],
        "b4e": [n - i & 7 for i in range(4)],
        "rc8": [n] * 4,
        "ecl": [max(i, n) for i in range(4)],
        "ecr": [min(i, n) for i in range(4)],
        "rc16": [(n & 1) * 2 + i % 2 for i in range(4)],
    }[mode]


ptx(
    "prmt_b32",
    "prmt.b32 %d, %a, %b, %c;",
    "b32 b32 b32",
    "b32",
    lambda a, b, c: prmt(a, b, [c >> 4 * j & 15 for j in range(4)]),
)
for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
    ptx(
        f"prmt_{mode}",
        f"prmt.b32.{mode} %d, %a, %b, %c;",
        "b32 b32 u32",
        "b32",
        lambda a, b, c, mode=mode: prmt(a, b, prmt_mode(mode, c)),
    )


def dot(a: int, b: int, c: int, kinds: str) -> int:
    pick = [lambda v: signed(v, 8) if kinds[0] == "s" else v, lambda v: signed(v, 8) if kinds[1] == "s" else v]
    return c + sum(pick[0](a >> s & 255) * pick[1](b >> s & 255) for s in (0, 8, 16, 24))


ptx("dp4a_s32_u32", "dp4a.s32.u32 %d, %a, %b, %c;", "b32 b32 s32", "s32", lambda a, b, c: dot(a, b, c, "su"))
ptx(
    "dp2a_hi_u32_s32",
    "dp2a.hi.u32.s32 %d, %a, %b, %c;",
    "b32 b32 s32",
    "s32",
    lambda a, b, c: c + (a & 0xFFFF) * signed(b >> 16, 8) + (a >> 16) * signed(b >> 24, 8),
)
ptx(
    "carry_chain_of_adds",
    "add.cc.u32 %d, %a, %b;\naddc.cc.u32 %e, %b, %c;\naddc.u32 %x, %c, %a;",
    "u32 u32 u32",
    "u32 u32 u32",
    lambda a, b, c: (a + b, b + c + (a + b >> 32), c + a + (b + c + (a + b >> 32) >> 32)),
)
ptx(
    "borrow_chain_of_subs",
    "sub.cc.u32 %d, %a, %b;\nsubc.cc.u32 %e, %b, %c;\nsubc.u32 %x, %c, %a;",
    "u32 u32 u32",
    "u32 u32 u32",
    lambda a, b, c: (a - b, b - c - (a < b), c - a - (b - c - (a < b) < 0)),
)
ptx(
    "carry_chain_of_mads_64",
    "mad.lo.cc.u64 %d, %a, %b, %c;\nmadc.hi.u64 %e, %a, %b, %c;",
    "u64 u64 u64",
    "u64 u64",
    lambda a, b, c: ((a * b & M64) + c, (a * b >> 64) + c + ((a * b & M64) + c >> 64)),
)
ptx(
    "slct_by_an_integer",
    "slct.u64.s32 %d, %a, %b, %c;",
    "u64 u64 s32",
    "u64",
    lambda a, b, c: a if c >= 0 else b,
)
ptx("slct_by_a_float", "slct.b32.f32 %d, %a, %b, %c;", "b32 b32 f32", "b32", lambda a, b, c: a if c >= 0 else b)
ptx(
    "setp_with_two_results",
    "setp.eq.u32 %q, %c, 7;\nsetp.lt.xor.s32 %p|%q, %a, %b, %q;\nselp.u32 %d, 1, 0, %p;\nselp.u32 %e, 1, 0, %q;",
    "s32 s32 u32",
    "u32 u32",
    lambda a, b, c: (int((a < b) ^ (c == 7)), int((not a < b) ^ (c == 7))),
)
ptx(
    "setp_unsigned_words",
    "setp.lo.u32 %p, %a, %b;\nselp.u32 %d, 1, 0, %p;\nsetp.hs.u32 %p, %a, %b;\nselp.u32 %e, 1, 0, %p;\n"
    "setp.ls.u16 %p, %c, 7;\nselp.u32 %x, 1, 0, %p;",
    "u32 u32 u16",
    "u32 u32 u32",
    lambda a, b, c: (int(a < b), int(a >= b), int(c <= 7)),
)
ptx(
    "set_to_words_and_floats",
    "set.le.u32.s32 %d, %a, %b;\nset.gt.f32.u32 %e, %a, %b;",
    "b32 b32",
    "u32 f32",
    lambda a, b: (M32 if signed(a) <= signed(b) else 0, float(a > b)),
)
ptx(
    "predicate_logic",
    "setp.lt.s32 %p, %a, 0;\nsetp.ne.b32 %q, %b, 0;\nand.pred %p, %p, %q;\nnot.pred %q, %q;\nor.pred %p, %p, %q;\n"
    "@%p mov.u32 %d, 5;\n@!%p mov.u32 %d, 6;",
    "s32 b32",
    "u32",
    lambda a, b: 5 if (a < 0 and b != 0) or b == 0 else 6,
)
ptx(
    "cvt_of_integers",
    "cvt.s8.s32 %d, %a;\ncvt.u16.s32 %e, %a;\ncvt.s64.s32 %x, %a;\ncvt.u64.u32 %y, %a;",
    "s32",
    "s16 u16 s64 u64",
    lambda a: (signed(a, 8), a, a, a & M32),
)
ptx(
    "cvt_saturated_integers",
    "cvt.sat.s8.s32 %d, %a;\ncvt.sat.u8.s32 %e, %a;\ncvt.sat.u16.s32 %x, %a;\n"
    "cvt.sat.s32.s64 %y, %b;\ncvt.sat.u32.s64 %z, %b;",
    "s32 s64",
    "s16 u16 u16 s32 u32",
    lambda a, b: (clamp(a, -128, 127), clamp(a, 0, 255), clamp(a, 0, 65535), sat32(b), clamp(b, 0, M32)),
)
ptx(
    "cvt_pack_to_halves",
    "cvt.pack.sat.s16.s32 %d, %a, %b;",
    "s32 s32",
    "b32",
    lambda a, b: (clamp(a, -32768, 32767) & 0xFFFF) << 16 | clamp(b, -32768, 32767) & 0xFFFF,
)
ptx(
    "cvt_pack_to_bytes",
    "cvt.pack.sat.u8.s32.b32 %d, %a, %b, %c;",
    "s32 s32 b32",
    "b32",
    lambda a, b, c: (c & 0xFFFF) << 16 | clamp(a, 0, 255) << 8 | clamp(b, 0, 255),
)
ptx(
    "mov_packs_and_unpacks",
    "{ .reg .b32 low, high;\nmov.b64 {low, high}, %a;\nxor.b32 low, low, high;\nmov.b64 %d, {high, low};\n"
    ".reg .b16 h<4>;\nmov.b64 {h0, h1, h2, h3}, %a;\nmov.b64 %e, {h3, h1, h2, h0}; }",
    "b64",
    "b64 b64",
    lambda a: (
        a >> 32 | ((a ^ a >> 32) & M32) << 32,
        a >> 48 | (a >> 16 & 0xFFFF) << 16 | (a >> 32 & 0xFFFF) << 32 | (a & 0xFFFF) << 48,
    ),
)

ptx(
    "vabsdiff4_with_an_add",
    "vabsdiff4.u32.u32.u32.add %d, %a, %b, %c;",
    "u32 u32 u32",
    "u32",
    lambda a, b, c: c + sum(abs((a >> s & 255) - (b >> s & 255)) for s in (0, 8, 16, 24)),
)
