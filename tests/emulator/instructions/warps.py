"""Instructions of a whole warp: shuffles, votes, matches, reductions, matrix fragments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions.case import WARP, Case, assembly
from tests.emulator.instructions.exact import decode, encode, real
from tests.emulator.instructions.integers import value

Rows = Sequence[tuple[int, ...]]
_ALL = "0xffffffff"


def _shuffle_lane(mode: str, lane: int, by: int, control: int) -> tuple[int, bool]:
    """Return the lane that a lane reads from, and whether it is in its segment (PTX ISA, "shfl.sync")."""
    by, clamp, segment = by & 31, control & 31, control >> 8 & 31
    limit = lane & segment | clamp & ~segment
    if mode == "up":
        source, inside = lane - by, lane - by >= limit
    elif mode == "down":
        source, inside = lane + by, lane + by <= limit
    elif mode == "bfly":
        source, inside = lane ^ by, lane ^ by <= limit
    else:
        source = lane & segment | by & ~segment
        inside = source <= limit
    return (source if inside else lane), inside


def _shuffles() -> list[Case]:
    """Segments of 32, 16, 8 and 4 lanes, and a clamp in mid-segment; the lane or distance is each thread's own."""
    result = []
    for mode in ("up", "down", "bfly", "idx"):
        for segment in (32, 16, 8, 4):
            mask = (32 - segment) << 8
            clamps = (0,) if mode == "up" else (31, segment // 2 + 2) if segment == 32 else (31,)
            for control in (mask | c for c in clamps):
                # A distance that differs between threads is defined for idx only as far as sources stay in the warp.
                ins = ("b32", "lane")
                text = (
                    f"{{ .reg .pred p; shfl.sync.{mode}.b32 %0|p, %2, %3, {control}, {_ALL}; selp.u32 %1, 1, 0, p; }}"
                )

                def meaning(rows: Rows, mode: str = mode, control: int = control) -> list[tuple[int, int]]:
                    lanes = [_shuffle_lane(mode, lane, row[1], control) for lane, row in enumerate(rows)]
                    return [(rows[source][0], int(inside)) for source, inside in lanes]

                result.append(
                    Case(
                        f"shfl.sync.{mode}.b32 {control:#x}",
                        assembly(text, ins, ("b32", "u32")),
                        ins,
                        ("b32", "u32"),
                        meaning,
                        of_warp=True,
                    )
                )
    return result


def _votes() -> list[Case]:
    result = []
    votes: dict[str, Callable[[list[int]], int]] = {
        "all": lambda bits: int(all(bits)),
        "any": lambda bits: int(any(bits)),
        "uni": lambda bits: int(len(set(bits)) == 1),
    }
    for name, decide in votes.items():
        for negate in ("", "!"):
            vote = f"vote.sync.{name}.pred p, {negate}p, {_ALL};"
            text = f"{{ .reg .pred p; setp.ne.u32 p, %1, 0; {vote} selp.u32 %0, 1, 0, p; }}"

            def meaning(rows: Rows, decide: Any = decide, negate: str = negate) -> list[int]:
                return [decide([int(bool(row[0]) != bool(negate)) for row in rows])] * WARP

            result.append(
                Case(
                    f"vote.sync.{name}.pred {negate}p",
                    assembly(text, ("votes",), ("u32",)),
                    ("votes",),
                    ("u32",),
                    meaning,
                    of_warp=True,
                )
            )
    text = f"{{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, {_ALL}; }}"
    result.append(
        Case(
            "vote.sync.ballot.b32",
            assembly(text, ("bit",), ("b32",)),
            ("bit",),
            ("b32",),
            lambda rows: [sum(row[0] << n for n, row in enumerate(rows))] * WARP,
            of_warp=True,
        )
    )
    for kind, pools in (("b32", ("few", "votes")), ("b64", ("few64", "votes64"))):

        def same(rows: Rows) -> list[int]:
            return [sum((row == other) << n for n, other in enumerate(rows)) for row in rows]

        ins: tuple[str, ...] = pools[:1]
        text = f"match.any.sync.{kind} %0, %1, {_ALL};"
        result.append(Case(f"match.any.sync.{kind}", assembly(text, ins, ("b32",)), ins, ("b32",), same, of_warp=True))

        def unanimous(rows: Rows) -> list[tuple[int, int]]:
            yes = len(set(rows)) == 1
            return [(2**32 - 1 if yes else 0, int(yes))] * WARP

        text = f"{{ .reg .pred p; match.all.sync.{kind} %0|p, %2, {_ALL}; selp.u32 %1, 1, 0, p; }}"
        ins, outs = pools[1:], ("b32", "u32")
        result.append(Case(f"match.all.sync.{kind}", assembly(text, ins, outs), ins, outs, unanimous, of_warp=True))
    return result


def _reductions() -> list[Case]:
    result = []
    functions: dict[str, Any] = {"add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b,
                                 "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}  # fmt: skip
    for op, kind in [
        *itertools.product(("add", "min", "max"), ("u32", "s32")),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
    ]:

        def meaning(rows: Rows, op: str = op, kind: str = kind) -> list[int]:
            total = value(rows[0][0], kind)
            for row in rows[1:]:
                total = functions[op](total, value(row[0], kind))
            return [total] * WARP

        result.append(
            Case(
                f"redux.sync.{op}.{kind}",
                assembly(f"redux.sync.{op}.{kind} %0, %1, {_ALL};", (kind,), (kind,)),
                (kind,),
                (kind,),
                meaning,
                of_warp=True,
            )
        )
    text = assembly("activemask.b32 %0;", (), ("b32",))
    result.append(
        Case(
            "activemask.b32",
            f"if (a0) {text}",
            ("bit",),
            ("b32",),
            lambda rows: [sum(r[0] << n for n, r in enumerate(rows)) if row[0] else 0 for row in rows],
            of_warp=True,
        )
    )
    return result


# ---- matrices -------------------------------------------------------------------------------------------------------


def _halves(words: Sequence[int]) -> list[float]:
    """Return the float16 numbers in some words, lower halves first."""
    return [float(decode(w >> index & 0xFFFF, "f16").value) for w in words for index in (0, 16)]


def _mma_operands(rows: Rows) -> tuple[Any, Any, Any]:
    """Return A (16, 16), B (16, 8) and C (16, 8) of m16n8k16 from the lanes (PTX ISA, figures of its fragments)."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane, row in enumerate(rows):
        group, member = lane // 4, lane % 4
        for i, x in enumerate(_halves(row[:4])):
            a[group + (8 if i // 2 % 2 else 0), 2 * member + i % 2 + (8 if i >= 4 else 0)] = x
        for i, x in enumerate(_halves(row[4:6])):
            b[2 * member + i % 2 + (8 if i >= 2 else 0), group] = x
        for i, word in enumerate(row[6:10]):
            c[group + (8 if i >= 2 else 0), 2 * member + i % 2] = float(decode(word, "f32").value)
    return a, b, c


def _single(x: float) -> int:
    return encode(real(Fraction(x)), "f32")


def _mma_result(matrix: Any) -> list[tuple[int, ...]]:
    return [
        tuple(_single(float(matrix[lane // 4 + (8 if i >= 2 else 0), 2 * (lane % 4) + i % 2])) for i in range(4))
        for lane in range(WARP)
    ]


def _mma_meaning(rows: Rows) -> list[tuple[int, ...]]:
    a, b, c = _mma_operands(rows)
    return _mma_result(a @ b + c)


def _mma_allowed(operands: list[NDArray[np.uint64]], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """17 terms, each cut to some 24 bits of the largest term; |a b| <= 25 and |c| <= 5 for normal random operands."""
    return np.full(len(values), 17 * 25 * 2.0**-23)


def _mma() -> list[Case]:
    numbers = ", ".join
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        f"{{{numbers(f'%{n}' for n in range(4))}}}, {{{numbers(f'%{n}' for n in range(4, 8))}}}, "
        f"{{{numbers(f'%{n}' for n in range(8, 10))}}}, {{{numbers(f'%{n}' for n in range(10, 14))}}};"
    )
    outs = ("f32",) * 4
    whole = ("small_halves",) * 6 + ("small",) * 4
    normal = ("unit_halves",) * 6 + ("unit",) * 4
    name = "mma.sync.m16n8k16.f32.f16.f16.f32"
    return [
        Case(f"{name} whole numbers", assembly(text, whole, outs), whole, outs, _mma_meaning, of_warp=True),
        Case(f"{name} normal numbers", assembly(text, normal, outs), normal, outs, _mma_meaning, of_warp=True,
             allowed=_mma_allowed, bound="17 terms cut at 24 bits (not in the ISA)"),
    ]  # fmt: skip


def _ldmatrix() -> list[Case]:
    """Each lane writes its four words to shared memory as one row of a tile, each at a different place."""
    result = []
    ins, outs = ("b32",) * 4, ("b32",) * 4
    for count, transposed in itertools.product((1, 2, 4), (False, True)):
        trans = ".trans" if transposed else ""
        registers = ", ".join(f"%{n}" for n in range(count))
        results = ", ".join(f'"=r"(d{n})' for n in range(count))
        body = (
            "unsigned* mine = (unsigned*)(s + 16 * threadIdx.x); "
            "mine[0] = a0; mine[1] = a1; mine[2] = a2; mine[3] = a3; __syncthreads(); "
            # Lane n takes the row of lane 5 n + 3 of its warp: any order of rows is allowed.
            "unsigned from = threadIdx.x / 32 * 32 + (5 * threadIdx.x + 3) % 32; "
            "unsigned at = (unsigned)__cvta_generic_to_shared(s) + 16 * from; "
            f'asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%{count}];" '
            f': {results} : "r"(at) : "memory");'
        )

        def meaning(rows: Rows, count: int = count, transposed: bool = transposed) -> list[tuple[int, ...]]:
            halves = [[w >> index & 0xFFFF for w in row[:4] for index in (0, 16)] for row in rows]
            result = []
            for lane in range(WARP):
                held = []
                for n in range(4):
                    if n >= count:
                        held.append(0)
                        continue
                    tile = [halves[(5 * (8 * n + r) + 3) % 32] for r in range(8)]
                    if transposed:
                        tile = [list(column) for column in zip(*tile, strict=True)]
                    low, high = tile[lane // 4][2 * (lane % 4)], tile[lane // 4][2 * (lane % 4) + 1]
                    held.append(low | high << 16)
                result.append(tuple(held))
            return result

        result.append(Case(f"ldmatrix.m8n8.x{count}{trans}.b16", body, ins, outs, meaning, of_warp=True, shared=16))
    return result


def _wmma() -> list[Case]:
    """Fragments are opaque, so that only whole products are compared: of a row-major A and both orders of B."""
    result = []
    # A warp's shared memory: A and B as halves (16 x 16 each), C and then D as floats.
    for order, pool in itertools.product(("row", "col"), ("whole", "normal")):
        ins = (("small_halves",) * 8 + ("small",) * 8) if pool == "whole" else (("unit_halves",) * 8 + ("unit",) * 8)
        outs = ("f32",) * 8
        eight = "{" + ", ".join(f"f{n}" for n in range(8)) + "}"
        names = {letter: eight.replace("f", letter) for letter in "abcd"}
        declared = " ".join(f".reg .b32 {letter}<8>;" for letter in "ab") + " .reg .f32 c<8>; .reg .f32 d<8>;"
        text = (
            f"{{ {declared} "
            f"wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {names['a']}, [%0], 16; "
            f"wmma.load.b.sync.aligned.{order}.m16n16k16.shared.f16 {names['b']}, [%1], 16; "
            f"wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {names['c']}, [%2], 16; "
            f"wmma.mma.sync.aligned.row.{order}.m16n16k16.f32.f32 {', '.join(names[letter] for letter in 'dabc')}; "
            f"wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%2], {names['d']}, 16; }}"
        )
        stores = " ".join(f"h[4 * lane + {n}] = a{n}; h[128 + 4 * lane + {n}] = a{n + 4};" for n in range(4))
        stores += " ".join(f" f[8 * lane + {n}] = a{n + 8};" for n in range(8))
        body = (
            "unsigned lane = threadIdx.x % 32; "
            "unsigned* h = (unsigned*)(s + 2048 * (threadIdx.x / 32)); unsigned* f = h + 256; "
            f"{stores} __syncwarp(); unsigned at = (unsigned)__cvta_generic_to_shared(h); "
            f'asm volatile("{text}" : : "r"(at), "r"(at + 512), "r"(at + 1024) : "memory"); __syncwarp(); '
            + " ".join(f"d{n} = f[8 * lane + {n}];" for n in range(8))
        )

        def meaning(rows: Rows, order: str = order) -> list[tuple[int, ...]]:
            a = np.array(_halves([w for row in rows for w in row[:4]])).reshape(16, 16)
            b = np.array(_halves([w for row in rows for w in row[4:8]])).reshape(16, 16)
            c = np.array([float(decode(w, "f32").value) for row in rows for w in row[8:]]).reshape(16, 16)
            d = (a @ (b if order == "row" else b.T) + c).reshape(WARP, 8)
            return [tuple(_single(float(x)) for x in row) for row in d]

        bounded: dict[str, Any] = (
            {} if pool == "whole" else {"allowed": _mma_allowed, "bound": "17 terms cut at 24 bits (not in the ISA)"}
        )
        result.append(
            Case(
                f"wmma.m16n16k16.row.{order}.f32 {pool} numbers",
                body,
                ins,
                outs,
                meaning,
                of_warp=True,
                shared=64,
                **bounded,
            )
        )
    return result


def _stmatrix() -> list[Case]:
    """Each lane fills its row with the complement of its words and reads it back after the store."""
    result = []
    kinds = ("b32",) * 4
    for count, transposed in itertools.product((1, 2, 4), (False, True)):
        trans = ".trans" if transposed else ""
        registers = ", ".join(f"%{n + 1}" for n in range(count))
        words = ", ".join(f'"r"(a{n})' for n in range(count))
        body = (
            "unsigned* mine = (unsigned*)(s + 16 * threadIdx.x); "
            "mine[0] = ~a0; mine[1] = ~a1; mine[2] = ~a2; mine[3] = ~a3; __syncthreads(); "
            "unsigned to = threadIdx.x / 32 * 32 + (5 * threadIdx.x + 3) % 32; "  # as in _ldmatrix
            "unsigned at = (unsigned)__cvta_generic_to_shared(s) + 16 * to; "
            f'asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%0], {{{registers}}};" '
            f': : "r"(at), {words} : "memory"); __syncthreads(); '
            "d0 = mine[0]; d1 = mine[1]; d2 = mine[2]; d3 = mine[3];"
        )

        def meaning(rows: Rows, count: int = count, transposed: bool = transposed) -> list[tuple[int, ...]]:
            left = [tuple(~w for w in row[:4]) for row in rows]
            for n, r in itertools.product(range(count), range(8)):
                places = [(c, r) if transposed else (r, c) for c in range(8)]
                halves = [rows[4 * i + j // 2][n] >> 16 * (j % 2) & 0xFFFF for i, j in places]
                left[(5 * (8 * n + r) + 3) % 32] = tuple(halves[c] | halves[c + 1] << 16 for c in range(0, 8, 2))
            return left

        result.append(Case(f"stmatrix.m8n8.x{count}{trans}.b16", body, kinds, kinds, meaning, of_warp=True, shared=16))
    return result


def _movmatrix(rows: Rows) -> list[tuple[int, ...]]:
    tile = [[rows[4 * r + c // 2][0] >> 16 * (c % 2) & 0xFFFF for c in range(8)] for r in range(8)]
    return [(tile[2 * (lane % 4)][lane // 4] | tile[2 * (lane % 4) + 1][lane // 4] << 16,) for lane in range(WARP)]


def _elect(rows: Rows) -> list[tuple[int, ...]]:
    """Return cases of elect: the ISA fixes that one thread leads, but not which one."""
    return [(1, 1)] * WARP


def _hopper() -> list[Case]:
    elect = (
        '{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(leader), "=r"(leads));'
        " d0 = __popc(__ballot_sync(0xffffffff, leads)); d1 = leads == (threadIdx.x % 32 == leader);"
    )
    move = assembly("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;", ("b32",), ("b32",))
    # A launch without clusters has clusters of one block.
    mapped = (
        "unsigned* mine = (unsigned*)(s + 4 * threadIdx.x); *mine = a0; "
        "unsigned at = (unsigned)__cvta_generic_to_shared(mine); "
        'asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %2, 0; ld.shared::cluster.u32 %0, [r]; '
        'getctarank.shared::cluster.u32 %1, r; }" : "=r"(d0), "=r"(d1) : "r"(at) : "memory");'
    )
    return [
        Case(
            "elect.sync", f'unsigned leader, leads; asm volatile("{elect}', ("b32",), ("u32",) * 2, _elect, of_warp=True
        ),
        Case("movmatrix.trans.b16", move, ("b32",), ("b32",), _movmatrix, of_warp=True),
        Case("mapa and getctarank", mapped, ("b32",), ("b32", "u32"), lambda a: (a, 0), shared=4),
    ]


def cases() -> list[Case]:
    """Return all cases."""
    return [*_shuffles(), *_votes(), *_reductions(), *_mma(), *_ldmatrix(), *_stmatrix(), *_hopper(), *_wmma()]
