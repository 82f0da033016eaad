"""Compiled stretches: the bits, counts, findings and faults of the interpreter."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from greenfast.emulator.compiled import stretches
from greenfast.emulator.grid import load_program, run_grid
from greenfast.emulator.machine.epochs import INTERPRETED, SPANS, TAGS
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import MachineError, UnsupportedError
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import OutputSpec
from tests.emulator.hopper import wgmma
from tests.emulator.test_hopper_products import RIGHT, codes, direct
from tests.emulator.test_lockstep import FAULTY, PLAIN, compile_bodies, run_kernel

pytest.importorskip("llvmlite", reason="needs greenfast[compiled]")


#: Bodies of kernels as in the test of lockstep, with patterns of addresses that change between warps or iterations.
PATTERNS = {
    "other sectors": "float v = 0;\n#pragma unroll 1\nfor (int k = 0; k < 9; k++) v += x[g + k]; y[g] = v;",
    "other conflicts": "s[t] = x[g]; s[t + 128] = 1; __syncthreads(); float v = 0;\n#pragma unroll 1\n"
    "for (int k = 1; k < 40; k++) v += s[t * k & 255]; y[g] = v;",
    "wide elements": "float4* w = (float4*)s; w[t] = make_float4(t, b, x[g], 1); __syncthreads(); float v = 0;\n"
    "#pragma unroll 1\nfor (int k = 1; k < 9; k++) { float2 u = ((float2*)s)[t * k & 255];"
    "v += u.x * w[t * k & 63].z; } y[g] = v;",
    "a part of a warp": "s[t] = x[g]; __syncthreads(); float v = 0; if (t % 3 == 0) { v = s[t * 5 & 63] + x[g * 2];"
    "v *= v; if (v > 0.5f) v += s[t ^ 9]; } y[g] = v;",
}  # fmt: skip
#: Races that show only if a write is compared with earlier reads.
LATE_WRITES = {
    "by the first warps": "s[t] = x[g]; __syncthreads(); float v = b; if (t < n / 2) s[t] = t * 3 + v; else"
    "{ v = s[t - n / 2] * 3 + b; v = v * v + t; v = v * v + b; } y[g] = v;",
    "by the last warps": "s[t] = x[g]; __syncthreads(); float v = b; if (t >= n / 2) s[t] = t * 3 + v; else"
    "{ v = s[t + n / 2] * 3 + b; v = v * v + t; v = v * v + b; } y[g] = v;",
    "by another block": "float v = 0; if (b == 0) v = y0[g + n] * 3 + t; if (b == 1) y0[g] = t * 3 + b; y[g] = v;",
}  # fmt: skip


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Compile each stretch before it runs for the first time."""
    for name in ("LOAD_LLVM", "COMPILE_STRETCH", "COMPILE_INSTRUCTION"):
        monkeypatch.setattr(stretches, name, 0.0)
    load_program.cache_clear()
    yield monkeypatch
    load_program.cache_clear()


def run_both(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    """Return the results of a run with compiled stretches, and of one without."""
    compiled = run()
    with monkeypatch.context() as m:
        m.setattr(stretches, "is_available", lambda: False)
        return compiled, run()


def test_a_broken_llvmlite_is_named(at_once: pytest.MonkeyPatch) -> None:
    at_once.delitem(sys.modules, "greenfast.emulator.compiled.build", raising=False)
    at_once.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(MachineError, match="llvmlite is installed and cannot be imported"):
        run_kernel(compile_bodies(list(PATTERNS.values())), "k0", 128, 0)


def test_an_unknown_modifier_is_refused_in_a_compiled_stretch(at_once: pytest.MonkeyPatch) -> None:
    ptx = compile_bodies(["y[g] = (t << b) + (t ^ b) * 3 + x[g];"])
    assert "shl.b32" in ptx
    with pytest.raises(UnsupportedError, match=r"shl\.sat\.b32 has \.sat, unknown to the emulator"):
        run_kernel(ptx.replace("shl.b32", "shl.sat.b32"), "k0", 128, 0)


@pytest.mark.parametrize(
    ("kernels", "ways"),
    [(PLAIN, {SPANS, TAGS}), (PATTERNS, {SPANS}), (FAULTY, {INTERPRETED}), (LATE_WRITES, {INTERPRETED})],
    ids=["plain", "patterns", "faulty", "late writes"],
)
@pytest.mark.parametrize(("threads", "seed"), [(128, 0), (75, 1)])
def test_kernels(kernels: dict[str, str], ways: set[str], threads: int, seed: int, at_once: pytest.MonkeyPatch) -> None:
    ptx = compile_bodies(list(kernels.values()))
    seen = set()
    for n, name in enumerate(kernels):
        compiled, interpreted = run_both(at_once, lambda n=n: run_kernel(ptx, f"k{n}", threads, seed))
        assert compiled == interpreted, name
        _, program = load_program(ptx, f"k{n}")
        assert any(stretch.code for table in program.stretches.values() for stretch in table.values()), name
        seen.add(program.compiled_accesses)
    assert seen == ways or threads % 32


#: Types of registers by the types of instructions.
KINDS = {"b16": "rs", "b32": "r", "b64": "rd", "f32": "f", "f64": "fd", "pred": "p"}
NUMBERS = {
    "f32": [0.0, -0.0, 1.0, -1.5, 2.0**-126, 2.0**-127, -(2.0**-149), 3e38, -3e38, np.inf, -np.inf, np.nan, 0.1,
            (1 + 2.0**-13) * 2.0**-63, (1 - 2.0**-13) * 2.0**-63,
            65520.0, 1 + 2.0**-11, 2.0**31, -(2.0**31), 2.0**126 * 1.5, 1 - 2.0**-24, 2.0**-24, 2.0**-63],
    "f64": [0.0, -0.0, 1.0, -1.5, 5e-324, 2.0**-1022, 1e308, -1e308, np.inf, np.nan, 0.1, 2.0**63, -(2.0**31) - 0.5],
}  # fmt: skip
INTEGERS = [
    *(0, 1, -1, 2, 31, 32, 33, 255, 256, 0x7FFF, 0x8000, 0x7FFF_FFFF, -0x8000_0000, 0x12345678, -77, 1 << 40, 1 << 63)
]
#: Instructions of registers a, b, c: opcode, and the type of the result and of the sources.
OPCODES: list[tuple[str, str, tuple[str, ...]]] = [
    *((f"{name}.{kind}", kind, (kind, kind)) for name in ("add", "sub", "mul.lo", "min", "max")
      for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"{name}.{kind}", kind, (kind, kind)) for name in ("and", "or", "xor")
      for kind in ("b16", "b32", "b64", "pred")),
    *((f"not.{kind}", kind, (kind,)) for kind in ("b16", "b32", "b64", "pred")),
    *((f"{name}.{kind}", kind, (kind,)) for name in ("neg", "abs") for kind in ("s16", "s32", "s64")),
    *((f"mul.hi.{kind}", kind, (kind, kind)) for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"mul.wide.{kind}", wide, (kind, kind))
      for kind, wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64"))),
    *((f"mad.{form}.{kind}", kind, (kind, kind, kind)) for form in ("lo", "hi") for kind in ("s32", "u32", "s64")),
    ("mad.wide.u32", "u64", ("u32", "u32", "u64")), ("mad.wide.s32", "s64", ("s32", "s32", "s64")),
    *((f"shl.{kind}", kind, (kind, "u32")) for kind in ("b16", "b32", "b64")),
    *((f"shr.{kind}", kind, (kind, "u32")) for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"shf.{side}.{mode}.b32", "b32", ("b32", "b32", "u32")) for side in "lr" for mode in ("wrap", "clamp")),
    ("prmt.b32", "b32", ("b32", "b32", "b32")),
    ("bfe.u32", "u32", ("u32", "u32", "u32")), ("bfe.s32", "s32", ("s32", "u32", "u32")),
    *((f"{name}.{kind}", "u32", (kind,)) for name in ("popc", "clz") for kind in ("b32", "b64")),
    *((f"setp.{order}.{kind}", "pred", (kind, kind)) for order in ("eq", "ne", "lt", "le", "gt", "ge")
      for kind in ("s16", "u32", "s32", "u64", "f32", "f64")),
    *((f"setp.{order}.f32", "pred", ("f32", "f32"))
      for order in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")),
    ("setp.lt.ftz.f32", "pred", ("f32", "f32")), ("setp.ls.u32", "pred", ("u32", "u32")),
    *((f"selp.{kind}", kind, (kind, kind, "pred")) for kind in ("b32", "f32", "b64")),
    *((f"{name}{ftz}{sat}.f32", "f32", ("f32", "f32")) for name in ("add.rn", "sub.rn", "mul.rn")
      for ftz in ("", ".ftz") for sat in ("", ".sat")),
    *((f"{name}.f64", "f64", ("f64", "f64")) for name in ("add", "sub", "mul", "min", "max", "div.rn")),
    *((f"fma.rn{form}.f32", "f32", ("f32", "f32", "f32")) for form in ("", ".ftz", ".sat", ".ftz.sat")),
    ("fma.rn.f64", "f64", ("f64", "f64", "f64")),
    *((f"{name}.f32", "f32", ("f32", "f32")) for name in ("div.rn", "div.rn.ftz", "div.full", "div.full.ftz",
      "div.approx", "div.approx.ftz", "min", "max", "min.ftz", "max.NaN", "min.ftz.NaN")),
    *((f"{name}.f32", "f32", ("f32",)) for name in ("sqrt.rn", "sqrt.approx.ftz", "rcp.rn", "rcp.approx",
      "rcp.approx.ftz", "neg", "abs", "neg.ftz", "abs.ftz")),
    *((f"{name}.f64", "f64", ("f64",)) for name in ("sqrt.rn", "rcp.rn", "neg", "abs")),
    *((f"cvt.{to}.{source}", to, (source,)) for to in ("u16", "s16", "u32", "s32", "u64", "s64")
      for source in ("u16", "s16", "u32", "s32", "u64", "s64") if to != source),
    *((f"cvt.rn.{to}.{source}", to, (source,)) for to in ("f32", "f64")
      for source in ("u16", "s32", "u32", "s64", "u64")),
    *((f"cvt.{mode}.{to}.{source}", to, (source,)) for mode in ("rni", "rzi", "rmi", "rpi")
      for to in ("s16", "u16", "s32", "u32", "s64", "u64") for source in ("f32", "f64")),
    ("cvt.rzi.ftz.s32.f32", "s32", ("f32",)),
    ("cvt.rn.f16.f32", "b16", ("f32",)), ("cvt.rn.bf16.f32", "b16", ("f32",)), ("cvt.f32.f16", "f32", ("b16",)),
    ("cvt.f32.bf16", "f32", ("b16",)), ("cvt.rzi.s32.f16", "s32", ("b16",)),
    ("cvt.rn.f16x2.f32", "b32", ("f32", "f32")), ("cvt.rn.bf16x2.f32", "b32", ("f32", "f32")),
    ("cvt.rn.f16x2.e4m3x2", "b32", ("b16",)), ("cvt.rn.f16x2.e5m2x2", "b32", ("b16",)),
    *((f"lop3.b32.{table:#x}", "b32", ("b32", "b32", "b32")) for table in (0xE8, 0x96, 0x1B)),
]  # fmt: skip
#: Elements of a source.
COUNT = 1024


def _register(kind: str) -> str:
    return KINDS[kind if kind in KINDS else f"b{kind[1:]}"]


def _size(kind: str) -> int:
    return 4 if kind == "pred" else int(kind[1:]) // 8


def _build(opcodes: list[tuple[str, str, tuple[str, ...]]]) -> tuple[str, list[int]]:
    """Return a kernel that runs each opcode with and without a guard, and the offsets of its results."""
    lines, offsets, end = [], [], 0
    for opcode, to, sources in opcodes:
        operands = []
        for n, kind in enumerate(sources):
            name = f"%{_register(kind)}{n + 1}"
            if kind == "pred":
                lines += [f"ld.global.u32 %r9, [%rd10+{n * 8 * COUNT}];", f"setp.ne.u32 {name}, %r9, 0;"]
            else:
                source = "%rd12" if kind == "f64" else "%rd11" if kind == "f32" else "%rd10"
                lines.append(f"ld.global.b{8 * _size(kind)} {name}, [{source}+{n * 8 * COUNT}];")
            operands.append(name)
        table = ""
        if opcode.startswith("lop3"):
            opcode, _, table = opcode.rpartition(".")
            table = f", {int(table, 16)}"
        target = f"%{_register(to)}8"
        begin = f"setp.ne.u32 {target}, %r20, 0;" if to == "pred" else f"mov.b{8 * _size(to)} {target}, 77;"
        if to[0] == "f":
            begin = f"mov.{to} {target}, 0{'f3F800000' if to == 'f32' else 'd3FF0000000000000'};"
        for guard in ("", "@%p20 ", "@!%p20 "):
            lines += [begin, f"{guard}{opcode} {target}, {', '.join(operands)}{table};"]
            if to == "pred":
                lines.append(f"selp.u32 %r8, 1, 0, {target};")
            end = -(-end // _size(to)) * _size(to)
            held = "%r8" if to == "pred" else target
            lines.append(f"add.s64 %rd22, %rd15, {end * COUNT};")
            lines.append(f"mad.wide.u32 %rd22, %r20, {_size(to)}, %rd22;")
            lines.append(f"st.global.b{8 * _size(to)} [%rd22], {held};")
            offsets.append(end * COUNT)
            end += _size(to)
    registers = "".join(f".reg .{kind} %{name}<32>;\n" for kind, name in KINDS.items())
    text = f"""
.version 8.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k0, .param .u64 k1, .param .u64 k2, .param .u64 k3) {{
{registers}
mov.u32 %r21, %ctaid.x; mov.u32 %r22, %tid.x; mad.lo.u32 %r20, %r21, 128, %r22;
and.b32 %r23, %r20, 1; setp.eq.u32 %p20, %r23, 0;
ld.param.u64 %rd10, [k0]; ld.param.u64 %rd11, [k1]; ld.param.u64 %rd12, [k2]; ld.param.u64 %rd15, [k3];
mad.wide.u32 %rd10, %r20, 8, %rd10; mad.wide.u32 %rd11, %r20, 8, %rd11; mad.wide.u32 %rd12, %r20, 8, %rd12;
{chr(10).join(lines)}
ret;
}}
"""
    return text, [*offsets, end * COUNT]


def _inputs() -> dict[str, np.ndarray[Any, Any]]:
    """Return three sources of ``COUNT`` elements of 8 bytes each: integers, float32 and float64."""
    rng = np.random.default_rng(3)
    integers = rng.choice(np.array([n & 2**64 - 1 for n in INTEGERS], np.uint64), (3, COUNT))
    integers[:, COUNT // 2 :] = rng.integers(0, 2**64, (3, COUNT // 2), np.uint64)
    singles = np.zeros((3, COUNT, 2), np.float32)
    singles[:, :, 0] = rng.choice(np.array(NUMBERS["f32"], np.float32), (3, COUNT))
    some = rng.integers(0, 2**32, (3, COUNT // 2), np.uint64).astype(np.uint32)
    singles[:, COUNT // 2 :, 0] = some.view(np.float32)
    doubles = rng.choice(np.array(NUMBERS["f64"]), (3, COUNT))
    doubles[:, COUNT // 2 :] = rng.integers(0, 2**64, (3, COUNT // 2), np.uint64).view(np.float64)
    return {"i": integers.reshape(-1), "s": singles.reshape(-1), "d": doubles.reshape(-1)}


@pytest.mark.parametrize("seed", [0, 1])
def test_opcodes(seed: int, at_once: pytest.MonkeyPatch) -> None:
    """Run each opcode on special and random numbers, with a guard too. Costs 4 s: 200 opcodes in one kernel."""
    ptx, offsets = _build(OPCODES)
    plan = Launch((COUNT // 128, 1, 1), ("i", "s", "d", "y"))
    outputs = {"y": OutputSpec((offsets[-1],), "uint8")}
    compiled, interpreted = run_both(
        at_once, lambda: run_grid(ptx, "k", (128, 1, 1), 0, plan, _inputs(), outputs, seed=seed)
    )
    for n, (start, end) in enumerate(pairwise(offsets)):
        a, b = (result.outputs["y"][start:end] for result in (compiled, interpreted))
        assert a.tobytes() == b.tobytes(), (OPCODES[n // 3], n % 3, np.flatnonzero(a != b)[:8])
    assert vars(compiled.counts) == vars(interpreted.counts)
    table = load_program(ptx, "k")[1].stretches[True]
    compiled_instructions = sum(stretch.length for stretch in table.values() if stretch.code)
    assert compiled_instructions > 0.99 * sum(stretch.length for stretch in table.values())


def test_a_fault_in_compiled_code_is_the_interpreters(at_once: pytest.MonkeyPatch) -> None:
    ptx = compile_bodies(["float v = x[g] + 1; v = v * v; y[g + (t == 77 && b == 2 ? 100000 : 0)] = v;"])

    def run() -> str:
        with pytest.raises(KernelFaultError) as fault:
            run_grid(ptx, "k0", (128, 1, 1), 0, Launch((3, 1, 1), ("x", "y", "y")),
                     {"x": np.ones(4096, np.float32)}, {"y": OutputSpec((384,), "float32")})  # fmt: skip
        return str(fault.value)

    compiled, interpreted = run_both(at_once, run)
    assert compiled == interpreted
    assert "thread (77, 0, 0)" in compiled


def test_sums_in_flight_are_not_read_by_compiled_code(at_once: pytest.MonkeyPatch) -> None:
    arithmetic = "add.f32 t, %0, %1;" + "mul.f32 t, t, t;" * 9
    read = f'asm volatile("{{.reg .f32 t; {arithmetic}}}" :: "f"(d[0]), "f"(d[1])); mma_wait<0>();'
    before, a, b = wgmma("mma", 8, "k32", "f32.e4m3.e4m3"), codes(64, 32), codes(8, 32)

    def run() -> str:
        with pytest.raises(KernelFaultError, match=r"read of a wgmma's accumulator before") as fault:
            direct(RIGHT.replace("mma_wait<0>();", read, 1), 8, a, b, before)
        return str(fault.value)

    compiled, interpreted = run_both(at_once, run)
    assert compiled == interpreted


def test_threads_that_need_a_counter_at_once_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linker knows one address. The engine of another would be freed, and with it the code at the address."""
    build = importlib.import_module("greenfast.emulator.compiled.build")
    made, compile_module = [], build.llvm.create_mcjit_compiler

    def create(*arguments: Any) -> Any:
        made.append(threading.get_ident())
        time.sleep(0.05)  # so that the other thread comes meanwhile
        return compile_module(*arguments)

    monkeypatch.setattr(build.llvm, "create_mcjit_compiler", create)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(build._link_counter, [31, 31]))  # no access has so many words per thread
    assert len(made) == 1
