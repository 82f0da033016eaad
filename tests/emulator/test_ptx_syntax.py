"""Operands in every form of the PTX ISA; other text is refused and never dropped."""

from __future__ import annotations

import random
import re

import pytest

from greenfast.emulator.program import Program
from greenfast.emulator.ptx.inlining import inline_calls
from greenfast.emulator.ptx.parser import parse
from greenfast.spec.errors import UnsupportedError, UsageError
from tests.emulator.test_ptx_text import HEAD, run

ALL = 2**32 - 1


def words(value: int) -> list[int]:
    """Return the two words of 64 bits."""
    return [value & ALL, value >> 32 & ALL]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # The values are those of ptxas 13.0.
        ("(1 + 2) * 3", 9),
        ("1 + 2 * 3", 7),
        ("7 - 10", -3),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("~5", -6),
        ("!5", 0),
        ("!0", 1),
        ("+4", 4),
        ("- -4", 4),
        ("7 | 8", 15),
        ("6 & 3 ^ 1", 3),
        ("1 << 4 >> 2", 4),
        ("-8 >> 1", -4),
        ("-1 >> 60", -1),
        ("0xffffffffffffffffU >> 60", 15),
        ("0xffffffffffffffff >> 60", 15),
        ("(.u64) -1 >> 60", 15),
        ("(.s64) 0xffffffffffffffff >> 60", -1),
        ("-1 < 0", 1),
        ("-1 < 0U", 0),
        ("3 == 3", 1),
        ("3 != 3", 0),
        ("2 && 0 || 1", 1),
        ("1 ? 7 : 8", 7),
        ("0 ? 7 : 1 ? 8 : 9", 8),
        ("1.5 > 1.0 ? 3 : 4", 3),
        ("WARP_SZ * 2", 64),
        ("0777", 0o777),
        ("0b101", 5),
        ("0X1f", 31),
        ("0x8000000000000000 / 2", 2**62),
    ],
)
def test_constant_expressions(text: str, value: int) -> None:
    assert run(f"mov.b64 %rd1, {text}; st.global.b64 [%out], %rd1;", 2) == words(value)


def test_constant_expressions_of_floats() -> None:
    body = "mov.f32 %f1, 1.0 / 4.0 - 2.0; st.global.f32 [%out], %f1; mov.f32 %f1, -(.5); st.global.f32 [%out+4], %f1;"
    assert run(body, 2) == [0xBFE0_0000, 0xBF00_0000]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.b64 %rd1, 12; st.global.b64 [%out], %rd1 + 1;", [13, 0]),
        ("mov.b64 %rd1, 12; st.global.b64 [%out], %rd1+-2;", [10, 0]),
        ("mov.b32 %r1, 5; add.u32 %r2, %r1+4, 1; st.global.v2.u32 [%out], {%r2, 7};", [10, 7]),
        ("mov.b32 %r1, -1; mov.b32 %r2, %r1 + 2; st.global.v2.u32 [%out], {%r2, %r1};", [1, ALL]),
        (
            "mov.b32 %r1, 3; setp.eq.u32 %p1, %r1, 0; @%p1 add.u32 %r1, %r1+4, 1; st.global.v2.u32 [%out], {%r1, 0};",
            [3, 0],
        ),
        ("mov.b32 %r1, 3; @! %p1 mov.b32 %r1, 4; @%p1 mov.b32 %r1, 4; st.global.v2.u32 [%out], {%r1, 0};", [4, 0]),
        ("st.global.u32 [%out + (2 + 2)], 7; st.global.u32 [%out+1-1], 8;", [8, 7]),
        (".reg .v2 .u32 t; mov.u32 t.x, 1; mov.u32 t.y, t.x; st.global.v2.u32 [%out], t;", [1, 1]),
        (".reg .v2 .u32 t<3>; mov.u32 t1.r, 1; mov.u32 t1.g, 2; st.global.v2.u32 [%out], {t1.y, t1.x};", [2, 1]),
        (
            ".reg .v2 .b16 t; mov.b32 %r1, 0x20001; mov.b32 t, %r1; mov.b32 %r2, {t.y, t.x}; "
            "st.global.v2.u32 [%out], {%r2, 0};",
            [0x1_0002, 0],
        ),
        (
            ".reg .v4 .u32 t; mov.u32 t.x, 4; mov.u32 t.y, 5; mov.u32 t.z, 6; mov.u32 t.w, 7; "
            "st.global.v2.u32 [%out], {t.a, t.b};",
            [7, 6],
        ),
        ("{ .reg .v2 .u32 t; mov.u32 t.x, 1; mov.u32 t.y, 2; st.global.v2.u32 [%out], t; }", [1, 2]),
        (
            ".global .u32 g[4] = {1, 2, 3, 4}; ld.global.u32 %r1, [g+4]; ld.global.u32 %r2, g[2]; "
            "st.global.v2.u32 [%out], {%r1, %r2};",
            [2, 3],
        ),
        (
            ".const .b16 c[2] = {1 + 1, 3}; .reg .b16 %h<3>; ld.const.b16 %h1, [c]; ld.const.b16 %h2, c[1]; "
            "cvt.u32.u16 %r1, %h1; cvt.u32.u16 %r2, %h2; st.global.v2.u32 [%out], {%r1, %r2};",
            [2, 3],
        ),
        (
            "{ .shared .u32 s[2]; st.shared.u32 [s], 1; st.shared.u32 [s+4], 2; "
            "bar.sync 0; ld.shared.v2.u32 {%r1, %r2}, [s]; "
            "st.global.v2.u32 [%out], {%r1, %r2}; }",
            [1, 2],
        ),
        (
            ".local .align 8 .u32 l[2]; st.u32 [l], 1; st.u32 l[1], 2; ld.v2.u32 {%r1, %r2}, [l]; "
            "st.global.v2.u32 [%out], {%r1, %r2};",
            [1, 2],
        ),
        (
            ".shared .align 8 .u32 l[2]; st.u32 [l], 1; st.u32 [l+4], 2; ld.u32 %r1, [l+4]; "
            "st.global.v2.u32 [%out], {%r1, 0};",
            [2, 0],
        ),
        (
            ".local .u32 l; .reg .b64 %q; st.local.u32 [l], 9; mov.b64 %q, l; cvta.local.u64 %q, %q; ld.u32 %r1, [%q]; "
            "st.global.v2.u32 [%out], {%r1, 0};",
            [9, 0],
        ),
        ("setp.eq.and.u32 _|%p2, 1, 1, !%p2; selp.u32 %r1, 1, 0, %p2; st.global.v2.u32 [%out], {%r1, 0};", [0, 0]),
        ("mov.b64 {%r1, _}, 0x500000006; st.global.v2.u32 [%out], {%r1, 0};", [6, 0]),
        (
            "{ .reg .b32 q; mov.b32 q, 1; { .reg .b32 q; mov.b32 q, 2; st.global.u32 [%out], q; "
            "} st.global.u32 [%out+4], q; }",
            [2, 1],
        ),
        ("bra L; st.global.u32 [%out], 9; L: st.global.v2.u32 [%out], {1, 2};", [1, 2]),
        ("add .u32 %r1, 2, 3; st.global .v2.u32 [%out], {%r1, 1};", [5, 1]),
        ('.pragma "nounroll"; .reg.b32 q; mov.b32 q, 3; st.global.v2.u32 [%out], {q, 1};', [3, 1]),
    ],
)
def test_operands(body: str, expected: list[int]) -> None:
    assert run(body, 2, threads=1) == expected


def test_declarations() -> None:
    before = """
    .visible .global .u32 a, b[2] = {7, 8};
    .global.u32 c = 9;
    .global .align 16 .v2 .u32 d[2] = {{1, 2}, {3, 4}};
    .global .u32 e [0x2] = {5, (4 > 3) ? 6 : 7};
    .weak .const .attribute(.managed) .u32 f[] = {1, 2, 3};
    .global .u64 g[2] = {generic(b) + 4, b+4};
    .pragma "nounroll";
    .func (.param.u32 out) twice (.param.u32 in) { .reg .u32 t; ld.param.u32 t, [in]; add.u32 t, t, t;
      st.param.u32 [out], t; ret; }
    """
    loads = ["[a]", "b[1]", "[c]", "[d + 12]", "d[1]", "[e+4]"]
    body = "".join(f"ld.global.u32 %r1, {x}; st.global.u32 [%out+{4 * n}], %r1;" for n, x in enumerate(loads))
    body += "ld.const.u32 %r1, f[2]; st.global.u32 [%out+24], %r1; ld.global.u64 %rd1, g[1]; ld.u32 %r1, [%rd1];"
    body += "{ .param.b32 p; .param.b32 q; st.param.b32 [p], %r1; call (q), twice, (p); ld.param.b32 %r1, [q]; }"
    body += "st.global.u32 [%out+28], %r1;"
    assert run(body, 8, before, threads=1) == [0, 8, 9, 4, 3, 6, 3, 16]


@pytest.mark.parametrize(
    "before", [".extern .shared .b32 s [];", ".extern .shared .align 8 .b8 s[];", ".extern .shared.b64 s[];"]
)
def test_dynamic_shared_memory(before: str) -> None:
    assert run(
        "st.shared.u32 [s], 7; ld.shared.u32 %r1, [s]; st.global.u32 [%out], %r1;", 1, before, threads=1, smem=16
    ) == [7]


@pytest.mark.parametrize(
    "statement",
    [
        "add.u32 %r1, %r2, 1, 2;",
        "add.u32 %r1, %r2, 1,;",
        "add.u32 %r1,, %r2, 1;",
        "add.u32 %r1, (%r2), 1;",
        "add.u32 %r1, {%r2}, 1;",
        "add.u32 %r1, -%r2, 1;",
        "add.u32 %r1 + 1, %r2, 1;",
        "add.u32 %r1, %r2 %r3, 1;",
        "add.u32 %r1, %r2, 1 2;",
        "add.u32 %r1, %r2, _;",
        "add.u32 %r1, %r2, 1.5;",
        "add.u32 %r1, %r2, x;",
        "add.u32 %r1, %r2, [%r3];",
        "add.u32 %r1, %r2, 1 / 0;",
        "add.u32 %r1, %r2, 1 +;",
        "add.u32 %r1, %r2, 7%2;",
        "add.u32 %r1, %r2, 089;",
        "add.u32 %r1, %r2, %r9;",
        "add.u32 %r1, %r2, %r01;",
        "add.u32 %r1, %r2, generic(%r1);",
        "add.f32 %f1, %f2, 1;",
        "add.f32 %f1, %f2, -0f3F800000;",
        "add.f32 %f1, %f2, 1.5 + 1;",
        "add.u32 %r1, %r2, 0f3F800000;",
        "ld.global.u32 %r1, [%out;",
        "ld.global.u32 %r1, %out];",
        "ld.global.u32 %r1, %out;",
        "ld.global.u32 %r1, [%out], 4;",
        "ld.global.u32 %r1, [%out]+4;",
        "ld.global.u32 %r1, [%out+%rd1];",
        "ld.global.u32 {%r1, %r2}, [%out];",
        "ld.global.v2.u32 {%r1, %r2, %r3}, [%out];",
        "ld.global.v2.u32 {%r1, %r2,}, [%out];",
        "ld.global.v2.u32 %r1, [%out];",
        "ld.global.u32 %r1, [nowhere];",
        "ld.global.u32 %r1, [_];",
        "ld.global.u32 %r1, nowhere[1];",
        "ld.global.u32 %r1, [%out}];",
        "st.global.u32 [%out], %r1, %r2;",
        "st.global.v2.u32 [%out], {%r1};",
        "st.global.u32 [%out], {};",
        "setp.eq.u32 %p1, %r1, %r2, %p2;",
        "setp.eq.and.u32 %p1, %r1, %r2;",
        "setp.eq.u32 %p1|!%p2, %r1, 1;",
        "setp.eq.u32 %p1|%p2|%p3, %r1, 1;",
        "selp.u32 %r1, 1, 2, !%r3;",
        "atom.global.add.u32 %r1, [%out], %r2, %r3;",
        "atom.global.cas.b32 %r1, [%out], %r2;",
        "red.global.add.u32 [%out], %r1, %r2;",
        "fence.sc.gpu %r1;",
        "exit 1;",
        "ret %r1;",
        "bar.sync 0, 32, 1;",
        "bra L + 1;",
        "bra;",
        "bra L, L;",
        "@%r1 bra L;",
        "@%p1;",
        "@%p1 @%p2 bra L;",
        "@ add.u32 %r1, 1, 2;",
        "prmt.b32 %r1, %r1, %r2, %r3, %r1;",
        "cvt.u32.u16 %r1, %r2, %r3;",
        "L: L: exit;",
        ";",
        ".reg .b32 %r<4>;",
        ".reg .b32 q, q;",
        ".reg .b32 q = 1;",
        ".reg .b32 q r;",
        ".reg .b32 q<x>;",
        ".global .u32 g 5;",
        ".global .u32 g = 1 = 2;",
        ".global .u32 g[2] = {1, 2, 3};",
        ".global .u32 g[2] = {1, 2,};",
        ".global .u32 g = 1.5;",
        ".global .f32 g = 1;",
        ".global .u32 .u32 g;",
        ".global .align 3 .u32 g;",
        ".global .pred g;",
        ".frob 1;",
        ".pragma 1;",
        ".global .u32 g[x];",
        '.pragma "a" b;',
        "call nowhere, (%r1), x, y, z;",
        "mbarrier.inval.shared.b64 [%out], 1;",
        "cp.async.commit_group 1;",
        "cp.async.wait_all 0;",
        "cp.async.ca.shared.global [%r1], [%out], 4, 4, 4;",
    ],
)
def test_what_is_no_statement_is_refused(statement: str) -> None:
    body = f".reg .b64 %out, %rd<9>; .reg .b32 %r<4>; .reg .f32 %f<3>; .reg .pred %p<4>;\nL:\n{statement}\nret;\n"
    with pytest.raises((UsageError, UnsupportedError)):
        assemble(body)


@pytest.mark.parametrize(
    "text",
    [
        ".frob 1;",
        ".alias f, g;",
        ".global .u32 g 1;",
        ".func f( ) .frob { ret; }",
        ".entry q() .maxntid { ret; }",
        ".entry q() 7 { ret; }",
        ".entry q(.param .u32 a b) { ret; }",
        ".entry q(.param .u32 a, .param .frob b) { ret; }",
        "junk;",
    ],
)
def test_what_is_no_part_of_a_module_is_refused(text: str) -> None:
    with pytest.raises((UsageError, UnsupportedError)):
        assemble("ret;", text)


def test_directives_of_a_kernel() -> None:
    text = f'{HEAD}.visible .entry k() .maxntid 128, 1, 1 .minnctapersm 2 .pragma "nounroll";\n.maxnreg 64 {{ ret; }}'
    assert parse(text).functions["k"].directives.split()[:2] == [".maxntid", "128,"]


def test_a_variable_that_another_module_defines_is_refused_where_it_is_used() -> None:
    before = ".extern .global .u32 elsewhere;"
    assert run("st.global.u32 [%out], 1;", 1, before) == [1]
    with pytest.raises(UsageError, match="elsewhere in k is not defined in this module"):
        run("ld.global.u32 %r1, [elsewhere]; st.global.u32 [%out], %r1;", 1, before)


def assemble(body: str, before: str = "") -> Program:
    module = parse(f"{HEAD}{before}\n.visible .entry k()\n{{\n{body}\n}}\n")
    return Program(inline_calls(module, module.entry("k")))


VALID = """
add.u32 %r1, %r2, 3;
mad.lo.s32 %r1, %r2, %r3, -4;
setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;
selp.b32 %r1, %r2, 0x10, %p1;
ld.global.v2.u32 {%r1, %r2}, [%out+8];
st.global.v4.u32 [%out], {%r1, %r2, 1, %r3};
st.shared.u32 [s+4], %r1;
ld.shared.u32 %r1, [s];
atom.global.add.u32 %r1, [%out], %r2;
atom.global.cas.b32 %r1, [%out+4], %r2, 7;
red.global.max.s32 [%out], %r1;
shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;
vote.sync.ballot.b32 %r1, !%p1, 0xffffffff;
cvt.rn.f16x2.f32 %r1, %f1, %f2;
fma.rn.f32 %f1, %f2, 0f3F800000, %f1;
mov.b64 {%r1, %r2}, %rd1;
mov.b64 %rd1, {%r1, %r2};
mov.u32 %r1, %tid.x;
cvta.to.global.u64 %rd1, %out;
bar.sync 1, 64;
bfi.b32 %r1, %r2, %r3, 4, 8;
prmt.b32 %r1, %r2, %r3, 0x5410;
lop3.b32 %r1, %r2, %r3, %r1, 0x96;
cp.async.cg.shared.global [%r1], [%out], 16;
cp.async.wait_group 1;
mbarrier.try_wait.parity.shared.b64 %p1, [s], %r1;
mbarrier.arrive.expect_tx.shared.b64 _, [s], 64;
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f1, %f2, %f3, %f4};
@%p1 bra L;
@!%p1 exit;
""".strip().splitlines()  # noqa: E501
_TOKENS = re.compile(r"\.?[%\w$]+(?:::\w+)*|\S")
#: Tokens that make each of these statements invalid, at any position.
STRAY = (
    ".frob",
    "frob",
    "]",
    "[",
    "}",
    ")",
    "1 2",
    "%r1 %r2",
    "_ _",
    "=",
    "?",
    ":",
    '"x"',
    "#",
    "@",
    "..",
    "%r77",
    "0x",
    "1.2.3",
)


def declared(statement: str) -> str:
    return (
        ".reg .b64 %out, %rd<4>; .reg .b32 %r<6>; .reg .f32 %f<6>; .reg .pred %p<4>; .shared .align 8 .u32 s[16];\n"
        f"L:\n{statement}\nret;"
    )


@pytest.mark.parametrize("statement", VALID)
def test_a_stray_token_is_refused(statement: str) -> None:
    assemble(declared(statement))
    tokens = _TOKENS.findall(statement)
    for position in range(len(tokens)):  # never after the semicolon
        for stray in STRAY:
            text = " ".join((*tokens[:position], stray, *tokens[position:]))
            try:
                assemble(declared(text))
            except (UsageError, UnsupportedError):
                continue
            pytest.fail(f"accepted: {text}")


def meaning(text: str) -> list[object]:
    """Return the instructions of a body, without their text."""
    return [(i.name, sorted(i.parts), i.operands, i.guard) for i in assemble(declared(text)).function.code]


@pytest.mark.parametrize("statement", VALID)
def test_a_token_twice_or_left_out_is_refused_or_another_statement(statement: str) -> None:
    """An accepted statement differs from the original one; only + + is an additional sign."""
    tokens = _TOKENS.findall(statement)
    right = meaning(statement)
    for position in range(len(tokens) - 1):
        for saved in ((*tokens[: position + 1], *tokens[position:]), (*tokens[:position], *tokens[position + 1 :])):
            text = " ".join(saved)
            try:
                result = meaning(text)
            except (UsageError, UnsupportedError):
                continue
            assert result != right or "+ +" in text, text


def test_random_text_ends_in_an_error_that_is_told() -> None:
    rng = random.Random(0)
    pieces = [t for s in VALID for t in _TOKENS.findall(s)] + list(STRAY)
    for _ in range(1500):
        text = " ".join(rng.choices(pieces, k=rng.randrange(1, 9))) + ";"
        try:
            assemble(declared(text))
        except (UsageError, UnsupportedError):
            continue
