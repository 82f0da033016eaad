"""Memory instructions: vectors of every width, atomics with their results and memory, cp.async."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.emulator.instructions import exact
from tests.emulator.instructions.case import Case, width
from tests.emulator.instructions.exact import decode, encode, flush, on_halves
from tests.emulator.instructions.integers import value

_REGISTER = {
    8: ("unsigned short", "h"),
    16: ("unsigned short", "h"),
    32: ("unsigned", "r"),
    64: ("unsigned long long", "l"),
}
_MINE = "unsigned* mine = (unsigned*)(s + 16 * threadIdx.x);"
_SHARED = "unsigned at = (unsigned)__cvta_generic_to_shared(s) + 16 * threadIdx.x;"


def _loads_and_stores() -> list[Case]:
    """16 bytes of shared memory per thread: written in words and read in elements, or the other way round."""
    result = []
    ins = ("b32",) * 4
    fill = f"{_MINE} mine[0] = a0; mine[1] = a1; mine[2] = a2; mine[3] = a3; "
    for kind, count in [
        *itertools.product(("u8", "u16", "u32"), (1, 2, 4)), ("s8", 1), ("s16", 1), ("u64", 1), ("u64", 2),
    ]:  # fmt: skip
        bits = int(kind[1:])
        constraint = _REGISTER[bits][1]
        vector = f".v{count}" if count > 1 else ""
        names = ", ".join(f"%{n}" for n in range(count))
        operand = f"{{{names}}}" if count > 1 else names
        out = f"b{max(16, bits)}"
        whole = (1 << bits) - 1

        def loaded(*words: int, bits: int = bits, kind: str = kind, count: int = count) -> tuple[int, ...]:
            memory = sum(w << 32 * n for n, w in enumerate(words))
            return tuple(value(memory >> bits * n, kind) for n in range(count))

        results = ", ".join(f'"={constraint}"(d{n})' for n in range(count))
        load = f'asm volatile("ld.shared{vector}.{kind} {operand}, [%{count}];" : {results} : "r"(at) : "memory");'
        result.append(
            Case(f"ld.shared{vector}.{kind}", f"{fill}{_SHARED} {load}", ins, (out,) * count, loaded, shared=16)
        )
        if kind[0] == "s":
            continue

        def stored(*elements: int, bits: int = bits, whole: int = whole) -> tuple[int, ...]:
            memory = sum((e & whole) << bits * n for n, e in enumerate(elements))
            return tuple(memory >> 32 * n & 0xFFFFFFFF for n in range(4))

        names = ", ".join(f"%{n + 1}" for n in range(count))
        operand = f"{{{names}}}" if count > 1 else names
        supplied = ", ".join(f'"{constraint}"(a{n})' for n in range(count))
        clear = f"{_MINE} mine[0] = mine[1] = mine[2] = mine[3] = 0; "
        store = f'asm volatile("st.shared{vector}.{kind} [%0], {operand};" : : "r"(at), {supplied} : "memory"); '
        read = "d0 = mine[0]; d1 = mine[1]; d2 = mine[2]; d3 = mine[3];"
        result.append(
            Case(f"st.shared{vector}.{kind}", f"{clear}{_SHARED} {store}{read}", (out,) * count, ins, stored, shared=16)
        )
    for kind, count in (("u32", 4), ("u64", 2), ("u16", 4), ("u8", 4)):
        # Rows of four words: global memory at 16 bytes per thread.
        bits = int(kind[1:])
        constraint = _REGISTER[bits][1]
        results = ", ".join(f'"={constraint}"(d{n})' for n in range(count))
        names = ", ".join(f"%{n}" for n in range(count))
        load = f'asm volatile("ld.global.nc.v{count}.{kind} {{{names}}}, [%{count}];" : {results} : "l"(x));'

        def loaded_globally(*words: int, bits: int = bits, count: int = count) -> tuple[int, ...]:
            memory = sum(w << 32 * n for n, w in enumerate(words))
            return tuple(memory >> bits * n & (1 << bits) - 1 for n in range(count))

        result.append(Case(f"ld.global.nc.v{count}.{kind}", load, ins, (f"b{max(16, bits)}",) * count, loaded_globally))
    return result


def _global_loads() -> list[Case]:
    """ldu and red on global memory, each thread at a different place."""
    ldu = 'asm volatile("ldu.global.v2.u32 {%0, %1}, [%2];" : "=r"(d0), "=r"(d1) : "l"(x));'
    result = [Case("ldu.global.v2.u32", ldu, ("b32", "b32"), ("b32", "b32"), lambda a, b: (a, b))]
    sums: dict[str, tuple[str, Callable[[int, int], int]]] = {
        "add.u32": ("u32", lambda a, b: a + b),
        "xor.b32": ("b32", lambda a, b: a ^ b),
        "add.f32": ("f32", _float_sum("f32", True)),
        "add.noftz.f16x2": ("f16x2", on_halves(_float_sum("f16", False))),
        "add.noftz.bf16x2": ("bf16x2", on_halves(_float_sum("bf16", False))),
    }
    for name, (kind, function) in sums.items():
        statement = f'asm volatile("red.global.{name} [%0], %1;" : : "l"(y), "r"(a1) : "memory");'
        body = f"*y = a0; {statement} d0 = *(volatile unsigned*)y;"
        result.append(Case(f"red.global.{name}", body, (kind, kind), (kind,), function))
    return result


def _increment(old: int, limit: int) -> int:
    return 0 if old >= limit else old + 1


def _decrement(old: int, limit: int) -> int:
    return limit if old == 0 or old > limit else old - 1


def _float_sum(form: str, ftz: bool) -> Callable[[int, int], int]:
    """Return the sum that an atomic operation forms; on global memory the float32 sum flushes subnormal numbers."""

    def total(a: int, b: int) -> int:
        x, y = (flush(decode(p, form), form) if ftz else decode(p, form) for p in (a, b))
        bits = encode(exact.add(x, y), form)
        return encode(flush(decode(bits, form), form), form) if ftz else bits

    return total


def _atomics() -> list[Case]:
    """Return cases with a separate place per thread: the instruction's result, and the place afterwards."""
    result = []
    operations: dict[str, tuple[str, Callable[..., int]]] = {}
    for kind in ("u32", "s32", "u64", "s64"):
        if kind != "s64":
            operations[f"add.{kind}"] = (kind, lambda old, b: old + b)
        operations[f"min.{kind}"] = (kind, lambda old, b, k=kind: min(value(old, k), value(b, k)))
        operations[f"max.{kind}"] = (kind, lambda old, b, k=kind: max(value(old, k), value(b, k)))
    for kind in ("b32", "b64"):
        operations[f"and.{kind}"] = (kind, lambda old, b: old & b)
        operations[f"or.{kind}"] = (kind, lambda old, b: old | b)
        operations[f"xor.{kind}"] = (kind, lambda old, b: old ^ b)
        operations[f"exch.{kind}"] = (kind, lambda old, b: b)
        operations[f"cas.{kind}"] = (kind, lambda old, b, c: c if old == b else old)
    operations["inc.u32"] = ("u32", _increment)
    operations["dec.u32"] = ("u32", _decrement)
    operations["cas.b16"] = ("b16", lambda old, b, c: c if old == b else old)
    for name, kind in (("add.f32", "f32"), ("add.f64", "f64"), ("add.noftz.f16", "f16"), ("add.noftz.bf16", "bf16"),
                       ("add.noftz.f16x2", "f16x2"), ("add.noftz.bf16x2", "bf16x2")):  # fmt: skip
        operations[name] = (kind, lambda old, b: 0)
    for space, (name, (kind, function)) in itertools.product(("global", "shared"), operations.items()):
        arguments = 3 if name.startswith("cas") else 2
        form = kind.removesuffix("x2")
        if "add" in name and form in exact.FORMATS:
            function = _float_sum(form, space == "global" and kind == "f32")
            if kind.endswith("x2"):
                function = on_halves(function)
        bits = width(kind)
        c_type, constraint = _REGISTER[bits]
        location = f"({c_type}*)(s + 8 * threadIdx.x)" if space == "shared" else f"({c_type}*)y"
        address = '"r"((unsigned)__cvta_generic_to_shared(at))' if space == "shared" else '"l"(at)'
        supplied = ", ".join(f'"{constraint}"(a{n})' for n in range(1, arguments))
        numbers = ", ".join(f"%{n}" for n in range(2, arguments + 1))
        body = (
            f"{c_type}* at = {location}; *at = a0; "
            f'asm volatile("atom.{space}.{name} %0, [%1], {numbers};" '
            f': "=&{constraint}"(d0) : {address}, {supplied} : "memory"); '
            f"d1 = *(volatile {c_type}*)at;"
        )
        ins = (kind,) * arguments

        def meaning(old: int, *supplied: int, f: Any = function) -> tuple[int, int]:
            return old, f(old, *supplied)

        result.append(
            Case(
                f"atom.{space}.{name}",
                body,
                ins,
                (kind, kind),
                meaning,
                shared=8 * (space == "shared"),
                any_nan=kind == "f64",
            )
        )
    # Vectors of float32 and of halves, each element for itself.
    for count, kind, form in ((2, "f32", "f32"), (4, "f32", "f32"), (2, "noftz.f16x2", "f16x2")):
        ins = (form,) * (2 * count)
        lists = ["{" + ", ".join(f"%{count * g + n + (1 if g else 0)}" for n in range(count)) + "}" for g in range(2)]
        operation = kind.replace("noftz.", f"noftz.v{count}.") if "noftz" in kind else f"v{count}.{kind}"
        results = ", ".join(f'"=&r"(d{n})' for n in range(count))
        supplied = ", ".join(f'"r"(a{count + n})' for n in range(count))
        body = (
            f"unsigned* at = y; {' '.join(f'at[{n}] = a{n};' for n in range(count))} "
            f'asm volatile("atom.global.add.{operation} {lists[0]}, [%{count}], {lists[1]};" '
            f': {results} : "l"(at), {supplied} : "memory"); '
            + " ".join(f"d{count + n} = *(volatile unsigned*)(at + {n});" for n in range(count))
        )

        def each(*words: int, count: int = count, form: str = form) -> tuple[int, ...]:
            one = _float_sum("f32", True) if form == "f32" else on_halves(_float_sum("f16", False))
            return (*words[:count], *(one(words[n], words[count + n]) for n in range(count)))

        result.append(Case(f"atom.global.add.{operation}", body, ins, ins, each))
    # All threads of a warp update one place that holds 0: the order is open, the final value is not.
    sums: dict[str, Callable[[list[int]], int]] = {
        "add.u32": sum,
        "max.s32": lambda supplied: max(0, *(value(x, "s32") for x in supplied)),
    }
    for name, left in sums.items():
        body = (
            "unsigned* at = (unsigned*)s + threadIdx.x / 32; if (threadIdx.x % 32 == 0) *at = 0; __syncwarp(); "
            f'asm volatile("red.shared.{name} [%0], %1;" '
            ': : "r"((unsigned)__cvta_generic_to_shared(at)), "r"(a0) : "memory"); '
            "__syncwarp(); d0 = *(volatile unsigned*)at;"
        )

        def common(rows: list[tuple[int]], left: Any = left) -> list[int]:
            return [left([row[0] for row in rows])] * 32

        result.append(Case(f"red.shared.{name} of a warp", body, ("u32",), ("u32",), common, of_warp=True, shared=4))
    return result


def _copies() -> list[Case]:
    """cp.async of 4, 8 and 16 bytes, whole and in part, with the rest zero; sources of 16 bytes per thread."""
    result = []
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        for form, hint in itertools.product(("whole", "src-size", "ignore-src"), ("", ".L2::cache_hint", ".L2::128B")):
            if hint and (form == "whole") != (size == 4):  # a policy is not a source size, whatever comes before it
                continue
            ins = ("b32",) * 4
            extra = {"whole": "", "src-size": ", %2", "ignore-src": ", p"}[form]
            chosen = {"whole": "0", "src-size": f"a3 % {size + 1}", "ignore-src": "a3 % 2"}[form]
            policy = ", policy" if "hint" in hint else ""
            statement = f"cp.async.{cache}.shared.global{hint} [%0], [%1], {size}{extra}{policy};"
            if form == "ignore-src":
                statement = f"{{ .reg .pred p; setp.ne.u32 p, %2, 0; {statement} }}"
            if policy:
                made = "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
                statement = f"{{ .reg .b64 policy; {made} {statement} }}"
            body = (
                f"{_MINE} mine[0] = mine[1] = mine[2] = mine[3] = 0xABABABAB; {_SHARED} unsigned chosen = {chosen}; "
                f'asm volatile("{statement}" : : "r"(at), "l"(x), "r"(chosen) : "memory"); '
                'asm volatile("cp.async.wait_all;" : : : "memory"); '
                "d0 = mine[0]; d1 = mine[1]; d2 = mine[2]; d3 = mine[3];"
            )

            def meaning(*words: int, size: int = size, form: str = form) -> tuple[int, ...]:
                source = b"".join(w.to_bytes(4, "little") for w in words)
                count = words[3] % (size + 1) if form == "src-size" else size
                if form == "ignore-src" and words[3] % 2:
                    count = 0
                data = source[:count].ljust(size, b"\0").ljust(16, b"\xab")
                return tuple(int.from_bytes(data[n : n + 4], "little") for n in range(0, 16, 4))

            result.append(
                Case(f"cp.async.{cache}.shared.global{hint} {size} {form}", body, ins, ins, meaning, shared=16)
            )
    return result


def _addresses() -> list[Case]:
    """isspacep and cvta: of a thread's own shared, global or local memory."""
    result = []
    for space in ("global", "shared", "local"):
        body = (
            "unsigned mine[2] = {a0, a0}; s[threadIdx.x] = 0; "
            "const void* at = a0 == 0 ? (const void*)x : a0 == 1 ? (const void*)(s + threadIdx.x) "
            ": (const void*)(mine + (row & 1)); "
            f'asm volatile("{{ .reg .pred p; isspacep.{space} p, %1; selp.u32 %0, 1, 0, p; }}" : "=r"(d0) : "l"(at));'
        )
        number = ("global", "shared", "local").index(space)
        result.append(Case(f"isspacep.{space}", body, ("few",), ("u32",), lambda a, n=number: int(a == n), shared=1))
    # Round trip: data written through one address is read through the other.
    body = (
        "unsigned long long generic = (unsigned long long)(s + 4 * threadIdx.x); unsigned long long own, again; "
        'asm volatile("cvta.to.shared.u64 %0, %1;" : "=l"(own) : "l"(generic)); '
        'asm volatile("st.shared.u32 [%0], %1;" : : "l"(own), "r"(a0) : "memory"); '
        'asm volatile("cvta.shared.u64 %0, %1;" : "=l"(again) : "l"(own)); '
        'asm volatile("ld.u32 %0, [%1];" : "=r"(d0) : "l"(again) : "memory"); d1 = again == generic;'
    )
    result.append(Case("cvta.shared", body, ("b32",), ("b32", "u32"), lambda a: (a, 1), shared=4))
    return result


def cases() -> list[Case]:
    """Return all cases."""
    return [*_loads_and_stores(), *_global_loads(), *_atomics(), *_copies(), *_addresses()]
