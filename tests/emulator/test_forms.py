"""Accepted forms: every opcode refuses modifiers outside of its forms, invented and real ones."""

from __future__ import annotations

import itertools

import pytest

from greenfast.emulator.program import BUILDERS, CONTROL, NOTHING, REPLACED, Program
from greenfast.emulator.ptx.forms import FORMS, fits, parse_groups, refusal
from greenfast.emulator.ptx.inlining import inline_calls
from greenfast.emulator.ptx.parser import parse
from greenfast.emulator.ptx.recursion import JUMPS
from greenfast.spec.errors import UnsupportedError
from scripts import emulator_forms

#: Modifiers and types of the PTX ISA.
_ISA = """
rn rz rm rp rni rzi rmi rpi rna rs ftz sat satfinite relu NaN xorsign abs noftz approx full oob cc lo hi wide clamp
wrap l r shiftamt f4e b4e rc8 ecl ecr rc16 lt le gt ge ls hs eq ne equ neu ltu leu gtu geu num nan and or xor not popc
to uni const global local param param:entry param:func shared shared:cta shared:cluster ca cg cs lu cv wb wt weak
volatile relaxed acquire release acq_rel sc mmio cta cluster gpu sys gl L1:evict_last L1:no_allocate L2:evict_first
L2:cache_hint L2:128B v2 v4 v8 nc async bulk tensor 1d 5d tile tile:gather4 tile:scatter4 im2col im2col:w bulk_group
multicast:cluster cp_mask mbarrier:complete_tx:bytes mbarrier:arrive:one noinc expect_tx noComplete parity cta_group:1
cta_group:2 read ignore_oob sync aligned up down bfly idx all any ballot add min max inc dec cas exch m8n8 m16n16
m8n16 x1 x2 x4 trans m8n8k4 m16n8k4 m16n8k8 m16n8k16 m16n8k32 m16n8k64 m16n8k128 m16n8k256 m8n32k16 m32n8k16 m16n16k8
m8n8k32 m8n8k128 m64n8k8 m64n8k256 row col kind:f8f6f4 kind:mxf8f6f4 block_scale scale_vec:1X sp sp:ordered_metadata
collector:a:fill load store mma mma_async fence commit_group wait_group fractional range proxy alias tensormap:generic
mbarrier_init sync_restrict:shared:cta warp red arrive wait pack b1 b8 b16 b32 b64 b128 u4 s4 u8 s8 u16 s16 u32 s32
u64 s64 f16 bf16 f32 f64 tf32 f16x2 bf16x2 u16x2 s16x2 e4m3 e5m2 e4m3x2 e5m2x2 e2m1 e2m3 e3m2 e2m1x2 e2m3x2 e3m2x2
ue8m0x2 ue4m3 f32x2 e4m3x4 e5m2x4 pred
"""
REAL = _ISA.split()


def program(ptx: str) -> Program:
    module = parse(ptx)
    return Program(inline_calls(module, module.entry("k")))


def instances(form: str) -> list[tuple[str, ...]]:
    """Return some ways to write a form: the first and the last of its words, without and with what may be left out."""
    groups = parse_groups(form)
    short = tuple(g.words[0] for g in groups if not g.optional)
    return list(dict.fromkeys((short, tuple(g.words[-1] for g in groups), tuple(g.words[0] for g in groups))))


def accepts(name: str, parts: tuple[str, ...]) -> bool:
    return any(fits(parts, parse_groups(form)) for form in FORMS[name])


def test_every_opcode_has_forms() -> None:
    assert set(FORMS) == {*BUILDERS, *CONTROL, *NOTHING, *REPLACED} - set(JUMPS)  # which no PTX has


@pytest.mark.parametrize("name", FORMS)
def test_an_opcode_takes_its_forms_and_nothing_else(name: str) -> None:
    words = {word for form in FORMS[name] for g in parse_groups(form) for word in g.words}
    others = [m for m in REAL if m not in words]
    assert len(others) > 100
    # Words that a form may have twice, such as .row.row and .u32.u32.
    repeated = {w for form in FORMS[name] for w in words if sum(w in g.words for g in parse_groups(form)) > 1}
    for form in FORMS[name]:
        for parts in instances(form):
            assert refusal(name, parts) == ""
            for index in range(len(parts) + 1):
                assert ".frobnicate" in refusal(name, (*parts[:index], "frobnicate", *parts[index:]))
            for other in others:
                assert f".{other.replace(':', '::')}," in refusal(name, (*parts, other))
            for word in set(parts) - repeated:
                assert refusal(name, (*parts, word))
        if len(parse_groups(form)) > 1:
            for n in range(len(short := instances(form)[0])):
                left = (*short[:n], *short[n + 1 :])
                assert accepts(name, left) or refusal(name, left)


@pytest.mark.parametrize("name", FORMS)
def test_a_program_refuses_by_name_and_line(name: str) -> None:
    opcode = ".".join((name, *instances(FORMS[name][0])[0], "frobnicate")).replace(":", "::")
    ptx = (
        '.version 8.0\n.target sm_90a\n.address_size 64\n.file 1 "some/k.cu"\n.visible .entry k()\n'
        f"{{\n.reg .b32 %r<9>;\n.loc 1 7 3\n{opcode} %r1, %r2, %r3;\n}}\n"
    )
    with pytest.raises(UnsupportedError, match=r"frobnicate has \.frobnicate, unknown .* at k\.cu:7: "):
        program(ptx)


@pytest.mark.parametrize(
    ("opcode", "named"),
    [
        ("shl.sat.b32", "sat"),
        ("and.ftz.b32", "ftz"),
        ("popc.sat.b32", "sat"),
        ("ld.global.v8.b32", "v8"),
        ("ld.global.v4.b64", "b64"),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u16", "u16"),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.inc.u32", "async"),
        ("atom.global.cas.b128", "b128"),
        ("mov.b128", "b128"),
        ("shfl.bfly.b32", ""),
        ("vote.all.pred", ""),
        ("redux.sync.min.abs.f32", "abs"),
        ("cvt.rs.f16x2.f32", "rs"),
        ("cvt.rn.f16", ""),
        ("cvt.rn.f32.f16", "f16"),
        ("add.rn.f64.f32", "f32"),
        ("fma.rn.oob.relu.f16", "oob"),
        ("setp.lt.ftz.s32", "s32"),
        ("ex2.approx.f64", "f64"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8", "m8n16"),
        ("cp.async.ca.shared.global.L2::evict_last", "L2::evict_last"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes", "im2col"),
        ("tensormap.replace.tile.rank.global.b1024.b64", "b64"),
        ("mul.s32", ""),
        ("frob.b32", "opcode"),
    ],
)
def test_what_is_refused_is_named(opcode: str, named: str) -> None:
    name, *parts = opcode.replace("::", ":").split(".")
    why = refusal(name, tuple(parts))
    if named == "opcode":
        assert why == "is not known to the emulator"
    elif named:
        assert f"has .{named}, unknown to the emulator" in why
    else:
        assert why == "lacks a modifier or a type that the emulator needs to know"


@pytest.mark.parametrize(
    "opcode",
    [
        "atom.global.gpu.acq_rel.add.u32",  # in the order that Triton writes
        "atom.add.release.gpu.global.f32",
        "ld.global.L1::evict_last.L2::cache_hint.v4.b32",
        "ld.global.nc.L1::no_allocate.L2::128B.v4.f32",
        "st.relaxed.gpu.global.u32",
        "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e5m2.f32",
        "prmt.b32.f4e",
    ],
)
def test_modifiers_may_stand_in_any_order(opcode: str) -> None:
    name, *parts = opcode.replace("::", ":").split(".")
    assert refusal(name, tuple(parts)) == ""


def test_the_order_of_types_counts() -> None:
    for a, b in itertools.permutations(("f16", "f32", "s32", "u8"), 2):
        one, other = accepts("cvt", ("rn", a, b)), accepts("cvt", ("rn", b, a))
        assert not (one and other)
    assert not accepts("cp", ("async", "ca", "global", "shared"))


def test_the_page_lists_what_is_accepted() -> None:
    page = emulator_forms.PAGE.read_text(encoding="utf-8")
    assert emulator_forms.updated(page) == page, "python -m scripts.emulator_forms renews it"
    for name in FORMS:
        assert f"`{name}`" in page
