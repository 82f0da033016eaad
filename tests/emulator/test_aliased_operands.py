"""Each form with a result register that is also a source: the result must equal that with separate registers.

The instructions come from the table of forms, so new forms are included automatically. All operands are 64-bit
registers, unless PATTERNS defines others (the emulator reads the low bits of a register wider than its type).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from greenfast.emulator.grid import run_grid
from greenfast.emulator.instructions import formats, fragments
from greenfast.emulator.program import Program
from greenfast.emulator.ptx.forms import FORMS, count_operands, parse_groups
from greenfast.emulator.ptx.inlining import inline_calls
from greenfast.emulator.ptx.parser import parse
from greenfast.spec.errors import UnsupportedError
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import OutputSpec

#: Instructions without a result in a register.
NO_RESULT = {
    *(
        "st",
        "red",
        "membar",
        "fence",
        "cp",
        "stmatrix",
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "call",
        "nanosleep",
    ),
    *("pmevent", "prefetch", "prefetchu", "setmaxnreg", "griddepcontrol", "bar", "barrier", "tensormap"),
}
#: The results are the accumulators, which are sources by design; reads in flight are tested in hopper.py.
IN_PLACE = {"wgmma"}
#: Operands of opcodes: D a result, S a source, A an address, numbers as they are, L a literal.
PATTERNS = {
    "shfl": ("D|D S S 31 -1", "D S S S -1"),
    "vote": ("D S -1",),
    "match": ("D S -1",),
    "redux": ("D S -1",),
    "elect": ("D|D -1",),
    "activemask": ("D",),
    "setp": ("D|D S S", "D|D S S S", "D S S S"),
    "lop3": ("D S S S 0x96", "D|D S S S 0x96 S"),
    "createpolicy": ("D 0f3F800000", "D S", "D A 16 16"),
    "mapa": ("D A 0",),
    "getctarank": ("D A",),
    "isspacep": ("D A",),
    "cvta": ("D A",),
    "movmatrix": ("D S",),
}
SPACES = {"global": "x", "shared": "s", "local": "l", "const": "c"}
_SPACE = re.compile(r"global|shared|local|const|param")
HEAD = """.version 8.6
.target sm_90a
.address_size 64
.const .align 16 .b64 c[8] = {1, 2, 3, 4, 5, 6, 7, 8};
.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 z)
{
.reg .b64 %x, %y, %z, %a, %t, %g<9>, %d<40>, %s<40>, %v<40>; .reg .pred %p<3>; .reg .b32 %w, %i;
.shared .align 128 .b64 s[256]; .shared .align 8 .b64 bar; .local .align 16 .b64 l[8];
ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.u64 %z, [z];
mov.u32 %w, %tid.x; cvt.u64.u32 %t, %w;
mad.lo.u64 %x, %t, 320, %x; mad.lo.u64 %z, %t, 64, %z; mad.lo.u64 %y, %t, STRIDE, %y;
"""


def written(name: str, form: str) -> Iterator[tuple[str, ...]]:
    """Yield some spellings of a form: with the first and the last of its words, without and with optional parts."""
    groups = parse_groups(form)
    yield tuple(g.words[0] for g in groups if not g.optional)
    yield tuple(g.words[-1] for g in groups)


def vectors(name: str, parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the operands of instructions that hold several elements; None for others."""
    count = next((int(p[1:]) for p in parts if re.fullmatch(r"[vx][1248]", p)), 1)
    several = "D" if count == 1 else "{" + ",".join("D" * count) + "}"
    if name in ("ld", "ldu", "ldmatrix"):
        return (f"{several} A",)
    if name == "atom":
        sources = several.replace("D", "S")
        return (f"{several} A {sources}" + (" S" if "cas" in parts else ""),)
    if name == "mbarrier":  # no wait for what does not come
        if parts[0] in ("test_wait", "try_wait"):
            return ("D A 1",) if "parity" in parts else ()
        plain = {"pending_count": ("D S",)}.get(parts[0], ("D A",) if parts[0].startswith("arrive") else ())
        return ("D A 4",) if not {"expect_tx", "noComplete"}.isdisjoint(parts) else plain
    if name == "mov" and parts[0] == "b64":
        return ("D S", "{D,D} S", "D {S,S}")
    if name in ("mma", "wmma"):
        return (fragments_of(name, parts),)
    return None


def fragments_of(name: str, parts: tuple[str, ...]) -> str:
    """Return the operands of a matrix instruction."""
    shape = next(re.fullmatch(r"m(\d+)n(\d+)k(\d+)", p) for p in parts if re.fullmatch(r"m\d+n\d+k\d+", p))
    assert shape
    m, n, k = map(int, shape.groups())
    kinds = [p for p in parts if p in formats.BITS or p in ("f32", "s32")]
    if name == "wmma" and "mma" in parts and len(kinds) == 2:
        kinds = [kinds[0], "f16", "f16", kinds[1]]

    def held(letter: str, kind: str, rows: int, columns: int) -> str:
        per = 2 if kind == "f16" and letter in "CD" else 1
        count = rows * columns // 32 // per if letter in "CD" else fragments.registers(rows, columns, kind)
        return "{" + ",".join(("D" if letter == "D" else "S") * count) + "}"

    if name == "wmma" and parts[0] == "load":
        if parts[1] == "c":
            return held("D", kinds[0], m, n) + " A"
        return held("A", kinds[0], m if parts[1] == "a" else n, k).replace("S", "D") + " A"
    return " ".join(
        (held("D", kinds[0], m, n), held("A", kinds[1], m, k), held("B", kinds[2], n, k), held("C", kinds[3], m, n))
    )


def patterns(name: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the operands that an opcode may have."""
    result = vectors(name, parts)
    if result is None:
        result = PATTERNS.get(name)
    if result is None:
        least, limit = count_operands(name, parts)
        result = tuple("D" + " S" * (count - 1) for count in range(least, limit + 1))
    return tuple(f"{p} S" for p in result) if "L2:cache_hint" in parts else result


def spelled(name: str, parts: tuple[str, ...], pattern: str, source: dict[int, str], base: str) -> tuple[str, int, int]:
    """Return a statement with the numbers of its results and sources; ``source``: registers for some of these."""
    results, sources = itertools.count(), itertools.count()
    count = [0, 0]

    def operand(match: re.Match[str]) -> str:
        if match[0] == "D":
            count[0] += 1
            return f"%d{next(results)}"
        if match[0] == "A":
            return base
        count[1] += 1
        n = next(sources)
        return source.get(n, f"%s{n}")

    brackets = name not in ("cvta", "isspacep", "mapa", "getctarank")
    text = ", ".join(pattern.split(" "))
    text = re.sub(r"\b[DSA]\b", operand, text.replace("A", "[A]") if brackets else text)
    return f"{'.'.join((name, *parts)).replace(':', '::')} {text};", count[0], count[1]


def accepted(statement: str) -> bool:
    text = HEAD.replace("STRIDE", "8") + statement + "\n}\n"
    module = parse(text)
    try:
        Program(inline_calls(module, module.entry("k")))
    except UnsupportedError:
        return False
    return True


def prepared(name: str, parts: tuple[str, ...], n_sources: int, n_results: int) -> list[str]:
    """Statements that put everything into the state that an instruction begins in."""
    space = next((p.split(":")[0] for p in parts if _SPACE.match(p)), "")
    lines = [f"mov.b64 %d{n}, -1;" for n in range(n_results)]
    lines += [f"mov.b64 %s{n}, %v{n};" for n in range(n_sources)]
    lines += ["add.cc.u32 %t, -1, 1;"]  # sets the carry
    if name in ("ld", "ldu", "atom", "wmma", "createpolicy", "ldmatrix"):
        where = {"shared": "s", "local": "l", "const": "c"}.get("shared" if name == "ldmatrix" else space, "")
        lines += [f"mov.u64 %a, {where};" if where else "mov.u64 %a, %z;"]
        if where == "s":  # 64 bytes for each thread
            lines += ["mul.lo.u32 %i, %w, 64;", "cvt.u64.u32 %t, %i;", "add.u64 %a, %a, %t;", "bar.sync 0;"]
        kind = {"s": "shared", "l": "local"}.get(where, "global")
        if kind != "global" or name == "atom":
            lines += [f"st.{kind}.b64 [%a+{8 * n}], {7 * n + 5};" for n in range(8)]
        if where == "s":
            lines += ["bar.sync 0;"]
        if name == "wmma":
            lines += ["mov.u64 %a, s;" if where else "ld.param.u64 %a, [z];"]
        if name == "ldmatrix" and space != "shared":
            lines += ["cvta.shared.u64 %a, %a;"]
    elif name == "mbarrier":
        lines += ["mov.u64 %a, bar;"]
        space = ".shared" if any(p.startswith("shared") for p in parts) else ""
        lines += ["bar.sync 0;", "setp.eq.u32 %p1, %w, 0;", "@%p1 mbarrier.init.shared.b64 [%a], 512;", "bar.sync 0;"]
        if not space:
            lines += ["cvta.shared.u64 %a, %a;"]
    else:
        generic = name == "isspacep" or "to" in parts or (name in ("mapa", "getctarank") and not space)
        lines += ["mov.u64 %a, s;" if space in ("", "shared") else "mov.u64 %a, %z;"]
        if generic and space in ("", "shared"):
            lines += ["cvta.shared.u64 %a, %a;"]
    return lines


def cleaned(name: str) -> list[str]:
    if name == "mbarrier":
        return ["bar.sync 0;", "@%p1 mbarrier.inval.shared.b64 [bar];", "bar.sync 0;"]
    return []


def variants(name: str, parts: tuple[str, ...], pattern: str) -> Iterator[tuple[list[str], list[str], str]]:
    """Yield (statements with separate registers, statements with a result as a source, description)."""
    plain, results, sources = spelled(name, parts, pattern, {}, "%a")
    chosen = [(d, s) for d in range(results) for s in range(sources)]
    if len(chosen) > 6:  # of matrices the first and the last ones
        chosen = [(d, s) for d in (0, results - 1) for s in (0, sources // 2, sources - 1)]
    base = [*prepared(name, parts, sources, results), plain]
    for d, s in chosen:
        text, _, _ = spelled(name, parts, pattern, {s: f"%d{d}"}, "%a")
        yield base, [*prepared(name, parts, sources, results), f"mov.b64 %d{d}, %s{s};", text], text
    if results and sources > 1:  # one register everywhere
        text, _, _ = spelled(name, parts, pattern, dict.fromkeys(range(sources), "%d0"), "%a")
        same, _, _ = spelled(name, parts, pattern, dict.fromkeys(range(sources), "%s0"), "%a")
        before = prepared(name, parts, sources, results)
        yield [*before, same], [*before, "mov.b64 %d0, %s0;", text], text
    if "A" in pattern:
        for d in {0, results - 1}:
            text, _, _ = spelled(name, parts, pattern, {}, f"%d{d}")
            yield base, [*prepared(name, parts, sources, results), f"mov.b64 %d{d}, %a;", text], text


def tried(name: str) -> tuple[list[tuple[list[str], list[str], str, int]], list[str]]:
    """Return all cases of an opcode, and the forms without a case."""
    result: list[tuple[list[str], list[str], str, int]] = []
    left = []
    for form in FORMS[name]:
        before = len(result)
        for parts in dict.fromkeys(written(name, form)):
            if name == "wmma" and parts[0] == "store":
                continue
            if name == "mapa" and parts == ("u32",):  # generic addresses have 64 bits
                continue
            if any(p.startswith("param") for p in parts) or ("const" in parts and name != "ld"):
                continue
            for pattern in patterns(name, parts):
                try:
                    statement, results, _ = spelled(name, parts, pattern, {}, "%a")
                except (AssertionError, StopIteration):
                    continue
                if accepted(statement):
                    result += [(*v, results) for v in variants(name, parts, pattern)]
        if len(result) == before:
            left.append(form)
    return result, left


NAMES = [name for name in FORMS if name not in NO_RESULT | IN_PLACE]
#: Forms with only constant sources.
NOTHING_TO_ALIAS = {"activemask", "elect"}
PER_KERNEL = 120


@pytest.mark.parametrize("name", NAMES)
def test_a_result_in_the_place_of_a_source(name: str) -> None:
    cases, left = tried(name)
    assert bool(cases) != (name in NOTHING_TO_ALIAS)
    # Forms without a result in a register, or that wait for a phase.
    expected = {"mbarrier": ("init", "expect_tx"), "wmma": ("store",)}.get(name, ())
    assert name in NOTHING_TO_ALIAS or all(form.startswith(expected) for form in left), left
    for start in range(0, len(cases), PER_KERNEL):
        check(name, cases[start : start + PER_KERNEL])


def check(name: str, cases: list[tuple[list[str], list[str], str, int]]) -> None:
    """Run pairs of statements and compare their results."""
    lines, index, places = [], 0, []
    for base, other, _, results in cases:
        places.append((index, results))
        for statements in (base, other):
            lines += [
                *statements,
                *(f"st.global.b64 [%y+{index + 8 * n}], %d{n};" for n in range(results)),
                *cleaned(name),
            ]
            index += 8 * results
    loads = [f"ld.global.b64 %v{n}, [%x+{8 * n}];" for n in range(40)]
    text = HEAD.replace("STRIDE", str(index)) + "\n".join([*loads, *lines]) + "\nret;\n}\n"
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**63, (32, 40), np.uint64) * np.uint64(2) + np.uint64(1)
    x[::3] %= np.uint64(7)  # amounts of shifts, positions, equal numbers
    inputs: dict[str, Any] = {"x": x, "z": rng.integers(0, 250, (32, 64), np.uint8)}
    outputs = {"y": OutputSpec((32, index // 8), "uint64"), "z": OutputSpec((32, 64), "uint8")}
    threads = 4 if name == "atom" else 32  # which take their turns one by one
    result = run_grid(text, "k", (threads, 1, 1), 0, Launch((1, 1, 1), ("x", "y", "z")), inputs, outputs)
    y = result.outputs["y"][:threads]
    wrong = []
    for (_, _, statement, results), (start, _) in zip(cases, places, strict=True):
        first = y[:, start // 8 : start // 8 + results]
        second = y[:, start // 8 + results : start // 8 + 2 * results]
        if (first != second).any():
            wrong.append(statement)
    assert wrong == []


def test_the_check_finds_a_result_that_is_written_too_early() -> None:
    base = ["mov.b64 %s0, %v0;", "add.u64 %d0, %s0, %s0;", "add.u64 %d1, %s0, 1;"]
    early = ["mov.b64 %d0, %v0;", "add.u64 %d0, %d0, %d0;", "add.u64 %d1, %d0, 1;"]
    with pytest.raises(AssertionError, match="early"):
        check("add", [(base, early, "early", 2)])
