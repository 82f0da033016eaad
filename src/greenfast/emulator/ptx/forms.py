"""The forms of PTX instructions that the emulator implements.

A form is a list of an opcode's modifiers and types: ``a|b`` is one of several, a ``?`` after them makes them optional.
An instruction is accepted if one form of its opcode contains all of its parts, and the instruction has all required
parts of the form. Types must be in the form's order; other modifiers may be in any order, as for ptxas. Everything else
is refused by name, so an unforeseen modifier is never ignored.
"""

from __future__ import annotations

from functools import cache, lru_cache

_UNSIGNED, _SIGNED, _BITS = "u16|u32|u64", "s16|s32|s64", "b16|b32|b64"
_INTEGERS = f"{_UNSIGNED}|{_SIGNED}"
_WORDS = "u32|s32|u64|s64"
_BYTES_UP = f"u8|s8|{_INTEGERS}"
_HALVES, _BRAINS = "f16|f16x2", "bf16|bf16x2"
_SINGLE, _DOUBLE = "rn|rz|rm|rp? ftz? sat? f32", "rn|rz|rm|rp? f64"
_SUMS = (_SINGLE, _DOUBLE, f"rn? ftz? sat? {_HALVES}", f"rn? {_BRAINS}")
_ROUNDED = ("rn|rz|rm|rp ftz? f32", "rn|rz|rm|rp f64")
_SIGNS = (_SIGNED, "ftz? f32", "f64", f"ftz? {_HALVES}", _BRAINS)
_EXTREMES = (
    _INTEGERS, "u16x2|s16x2", "relu s32|s16x2", "ftz? NaN? f32", "ftz? NaN? xorsign abs f32", "f64",
    f"ftz? NaN? {_HALVES}", f"ftz? NaN? xorsign abs {_HALVES}", f"NaN? {_BRAINS}", f"NaN? xorsign abs {_BRAINS}",
)  # fmt: skip

_ORDERS, _LOGIC = "lt|le|gt|ge", "and|or|xor?"
_FLOAT_ORDERS = f"eq|ne|{_ORDERS}|equ|neu|ltu|leu|gtu|geu|num|nan"
_COMPARED = (
    (f"eq|ne {_LOGIC}", f"{_INTEGERS}|{_BITS}"),
    (f"{_ORDERS} {_LOGIC}", _INTEGERS),
    (f"lo|ls|hi|hs {_LOGIC}", _UNSIGNED),
    (f"{_FLOAT_ORDERS} {_LOGIC} ftz?", "f32"),
    (f"{_FLOAT_ORDERS} {_LOGIC}", "f64"),
)

_INTEGRAL = "rni|rzi|rmi|rpi"
_CONVERSIONS = (
    f"sat? {_BYTES_UP} {_BYTES_UP}",
    f"{_INTEGRAL} ftz? sat? {_BYTES_UP} f32",
    f"{_INTEGRAL} sat? {_BYTES_UP} f16|bf16|f64",
    f"rn|rz|rm|rp f16|bf16|f32|f64 {_BYTES_UP}",
    "ftz? sat? f32 f16", "f32 bf16", "ftz? f64 f32", "f64 f16|bf16",
    f"{_INTEGRAL}? ftz? sat? f32 f32", f"{_INTEGRAL}? sat? f16 f16", f"{_INTEGRAL}? sat? f64 f64",
    "rn|rz|rm|rp ftz? sat? f32 f64", "rn|rz|rm|rp ftz? sat? f16 f32", "rn|rz|rm|rp sat? f16 f64|bf16",
    "rn|rz|rm|rp bf16 f16|f32|f64", "rn|rz relu? satfinite? f16|bf16 f32", "rn|rz relu? satfinite? f16x2|bf16x2 f32",
    "rn|rz relu? tf32 f32", "rna satfinite? tf32 f32",
    "pack sat u16|s16 s32", "pack sat u8|s8 s32 b32", "rn satfinite relu? e4m3x2|e5m2x2 f32|f16x2",
    "rn relu? f16x2 e4m3x2|e5m2x2",
    "bf16 f16", "f16 bf16",  # to nearest: ptxas makes the same machine code as for .rn
)  # fmt: skip

_SHARED = "shared|shared:cta|shared:cluster"
_SPACES = f"global|local|const|param|param:entry|param:func|{_SHARED}?"
_LEVELS = (
    "L1:evict_normal|L1:evict_unchanged|L1:evict_first|L1:evict_last|L1:no_allocate? "
    "L2:evict_normal|L2:evict_first|L2:evict_last? L2:cache_hint? L2:64B|L2:128B|L2:256B?"
)
_NUMBERS = "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
_NARROW = "b8|b16|b32|u8|u16|u32|s8|s16|s32|f32"
_VECTORS = (f"v2? {_NUMBERS}", f"v4 {_NARROW}")
_SCOPES = "cta|cluster|gpu|sys"
_READ, _WRITTEN = (
    (f"weak? {space} {caches} {_LEVELS}", f"volatile {space} L2:64B|L2:128B|L2:256B?")
    for space, caches in ((_SPACES, "ca|cg|cs|lu|cv?"), (_SPACES.replace("const|", ""), "wb|cg|cs|wt?"))
)
_AT_ONCE = f"relaxed|acquire|release|acq_rel? {_SCOPES}? global|{_SHARED}? L2:cache_hint?"
_ATOMIC = (
    *(
        f"{_AT_ONCE} {form}"
        for form in (
            "add u32|s32|u64|f32|f64", f"add noftz {_HALVES}|{_BRAINS}", "min|max u32|s32|u64|s64",
            "and|or|xor b32|b64", "inc|dec u32",
        )
    ),
    *(
        f"relaxed|acquire|release|acq_rel? {_SCOPES}? global? L2:cache_hint? add {form}"
        for form in ("v2|v4 f32", f"noftz v2|v4 {_HALVES}|{_BRAINS}", "noftz v8 f16|bf16")
    ),
)  # fmt: skip

_BARRIER = f"relaxed|release? {_SCOPES}? {_SHARED}?"
_HINT = "L2:cache_hint?"
_POLICIES = "L2:evict_last|L2:evict_normal|L2:evict_first|L2:evict_unchanged"
_RANKS = "1d|2d|3d|4d|5d"
_WIDE, _LONG, _SHORT = ("|".join(f"m64n{n}k{k}" for n in range(8, 257, 8)) for k in (16, 32, 8))
_FLOAT8 = "e4m3|e5m2"
_TILES = "m16n16k16|m8n32k16|m32n8k16"

#: Forms by opcode; "" is an opcode with nothing after it.
FORMS: dict[str, tuple[str, ...]] = {
    # integers and floating point
    "add": (_INTEGERS, "u16x2|s16x2", "sat s32", f"cc {_WORDS}", *_SUMS),
    "sub": (_INTEGERS, "sat s32", f"cc {_WORDS}", *_SUMS),
    "addc": (f"cc? {_WORDS}",),
    "subc": (f"cc? {_WORDS}",),
    "mul": (f"lo|hi {_INTEGERS}", "wide u16|s16|u32|s32", *_SUMS),
    "mad": (
        f"lo|hi {_INTEGERS}", "wide u16|s16|u32|s32", "hi sat s32", f"lo|hi cc {_WORDS}", "rn|rz|rm|rp ftz? sat? f32",
        "rn|rz|rm|rp f64",
    ),
    "madc": (f"lo|hi cc? {_WORDS}",),
    "mul24": ("lo|hi u32|s32",),
    "mad24": ("lo|hi u32|s32", "hi sat s32"),
    "sad": (_INTEGERS,),
    "div": (_INTEGERS, "approx|full ftz? f32", *_ROUNDED),
    "rem": (_INTEGERS,),
    "dp4a": ("u32|s32 u32|s32",),
    "dp2a": ("lo|hi u32|s32 u32|s32",),
    "min": _EXTREMES,
    "max": _EXTREMES,
    "neg": _SIGNS,
    "abs": _SIGNS,
    "fma": (
        "rn|rz|rm|rp ftz? sat? f32", "rn|rz|rm|rp f64", f"rn ftz? sat? {_HALVES}", f"rn ftz? relu {_HALVES}",
        f"rn relu? {_BRAINS}",
    ),
    "rcp": ("approx ftz? f32", "approx ftz f64", *_ROUNDED),
    "sqrt": ("approx ftz? f32", *_ROUNDED),
    "rsqrt": ("approx ftz? f32|f64",),
    "sin": ("approx ftz? f32",),
    "cos": ("approx ftz? f32",),
    "lg2": ("approx ftz? f32",),
    "ex2": ("approx ftz? f32", f"approx {_HALVES}", f"approx ftz {_BRAINS}"),
    "tanh": (f"approx f32|{_HALVES}|{_BRAINS}",),
    "copysign": ("f32|f64",),
    "testp": ("finite|infinite|number|notanumber|normal|subnormal f32|f64",),
    # bits
    "and": (f"pred|{_BITS}",),
    "or": (f"pred|{_BITS}",),
    "xor": (f"pred|{_BITS}",),
    "not": (f"pred|{_BITS}",),
    "cnot": (_BITS,),
    "lop3": ("b32", "or|and b32"),
    "fns": ("b32",),
    "shl": (_BITS,),
    "shr": (f"{_INTEGERS}|{_BITS}",),
    "shf": ("l|r clamp|wrap b32",),
    "prmt": ("b32 f4e|b4e|rc8|ecl|ecr|rc16?",),
    "bfi": ("b32|b64",),
    "bfe": (_WORDS,),
    "bfind": (f"shiftamt? {_WORDS}",),
    "bmsk": ("clamp|wrap b32",),
    "brev": ("b32|b64",),
    "clz": ("b32|b64",),
    "popc": ("b32|b64",),
    "szext": ("clamp|wrap u32|s32",),
    # comparison and selection
    "setp": (
        *(f"{how} {suffix}" for how, suffix in _COMPARED), f"{_FLOAT_ORDERS} {_LOGIC} ftz? {_HALVES}",
        f"{_FLOAT_ORDERS} {_LOGIC} {_BRAINS}",
    ),
    "set": (
        *(f"{how} u32|s32|f32|f16|bf16 {suffix}" for how, suffix in _COMPARED),
        *(
            f"{_FLOAT_ORDERS} {_LOGIC} {ftz} u16|s16|u32|s32|{to} {half}"
            for ftz, to, half in (("ftz?", "f16|bf16", "f16"), ("", "bf16", "bf16"))
        ),
        f"{_FLOAT_ORDERS} {_LOGIC} ftz? u32|s32|f16x2 f16x2", f"{_FLOAT_ORDERS} {_LOGIC} u32|s32|bf16x2 bf16x2",
    ),
    "vabsdiff4": ("u32|s32 u32|s32 u32|s32 sat?", "u32|s32 u32|s32 u32|s32 add"),
    "selp": (f"{_INTEGERS}|{_BITS}|f32|f64",),
    "slct": (f"{_INTEGERS}|{_BITS}|f32|f64 s32", f"ftz? {_INTEGERS}|{_BITS}|f32|f64 f32"),
    # moves and conversions
    "mov": (f"pred|{_INTEGERS}|{_BITS}|f32|f64",),
    "cvt": _CONVERSIONS,
    "cvta": (f"to? global|local|const|param|param:entry|{_SHARED} u32|u64",),
    "isspacep": (f"global|local|param|param:entry|{_SHARED}",),
    # memory
    "ld": (
        *(f"{how} {suffix}" for how in _READ for suffix in _VECTORS),
        *(f"relaxed|acquire {_SCOPES} global|{_SHARED}? {_LEVELS} {suffix}" for suffix in _VECTORS),
        *(f"global nc ca|cg|cs? {_LEVELS} {suffix}" for suffix in _VECTORS),
        f"mmio relaxed sys global? {_NUMBERS}",
    ),
    "ldu": tuple(f"global? {suffix}" for suffix in _VECTORS),
    "st": (
        *(f"{how} {suffix}" for how in _WRITTEN for suffix in _VECTORS),
        *(f"relaxed|release {_SCOPES} global|{_SHARED}? {_LEVELS} {suffix}" for suffix in _VECTORS),
        f"mmio relaxed sys global? {_NUMBERS}",
        "async weak? shared:cluster? mbarrier:complete_tx:bytes v2? b32|b64|u32|u64|s32|s64|f32|f64",
        "async weak? shared:cluster? mbarrier:complete_tx:bytes v4 b32|u32|s32|f32",
    ),
    "atom": (*_ATOMIC, f"{_AT_ONCE} exch b32|b64", f"{_AT_ONCE} cas b16|b32|b64"),
    "red": _ATOMIC,
    "prefetch": ("global|local? L1|L2", "global L2:evict_last|L2:evict_normal", "const|param? tensormap"),
    "prefetchu": ("L1",),
    "createpolicy": (
        f"fractional {_POLICIES} L2:evict_first|L2:evict_unchanged? b64",
        f"range global? {_POLICIES} L2:evict_first|L2:evict_unchanged? b64",
        "cvt L2 b64",
    ),
    "membar": ("cta|gl|sys", "proxy alias"),
    "fence": (
        f"sc|acq_rel|acquire|release? {_SCOPES}", "mbarrier_init release cluster", "proxy alias",
        f"proxy async global|{_SHARED}?", f"proxy tensormap:generic release|acquire {_SCOPES}",
    ),
    # copies
    "cp": (
        f"async ca|cg shared|shared:cta global {_HINT} L2:64B|L2:128B|L2:256B?",
        "async commit_group", "async wait_group", "async wait_all", f"async mbarrier arrive noinc? {_SHARED}? b64",
        f"async bulk shared:cluster|shared:cta global mbarrier:complete_tx:bytes multicast:cluster? {_HINT}",
        f"async bulk tensor {_RANKS} shared:cluster|shared:cta global tile? mbarrier:complete_tx:bytes "
        f"multicast:cluster? {_HINT}",
        f"async bulk global shared:cta bulk_group {_HINT}",
        f"async bulk tensor {_RANKS} global shared:cta tile? bulk_group {_HINT}",
        f"reduce async bulk global shared:cta bulk_group {_HINT} and|or|xor b32|b64",
        f"reduce async bulk global shared:cta bulk_group {_HINT} add u32|s32|u64|f32|f64",
        f"reduce async bulk global shared:cta bulk_group {_HINT} add noftz f16|bf16",
        f"reduce async bulk global shared:cta bulk_group {_HINT} inc|dec u32",
        f"reduce async bulk global shared:cta bulk_group {_HINT} min|max u32|s32|u64|s64",
        "async bulk commit_group", "async bulk wait_group read?",
        f"async bulk prefetch L2 global {_HINT}", f"async bulk prefetch tensor {_RANKS} L2 global tile? {_HINT}",
    ),
    "mbarrier": (
        f"init|inval {_SHARED}? b64", f"expect_tx|complete_tx relaxed? {_SCOPES}? {_SHARED}? b64",
        f"arrive|arrive_drop expect_tx? {_BARRIER} b64", f"arrive|arrive_drop noComplete {_BARRIER} b64",
        f"test_wait|try_wait parity? acquire|relaxed? {_SCOPES}? {_SHARED}? b64", "pending_count b64",
    ),
    # warps, warpgroups and clusters
    "shfl": ("sync up|down|bfly|idx b32",),
    "vote": ("sync all|any|uni pred", "sync ballot b32"),
    "match": ("any|all sync b32|b64",),
    "redux": ("sync add|min|max u32|s32", "sync and|or|xor b32"),
    "elect": ("sync",),
    "activemask": ("b32",),
    "ldmatrix": (f"sync aligned m8n8 x1|x2|x4 trans? {_SHARED}? b16",),
    "stmatrix": (f"sync aligned m8n8 x1|x2|x4 trans? {_SHARED}? b16",),
    "movmatrix": ("sync aligned m8n8 trans b16",),
    "wmma": (
        *(
            f"load a|b sync aligned row|col {shape} global|{_SHARED}? {kind}"
            for shape, kind in ((_TILES, "f16|bf16|s8|u8"), ("m16n16k8", "tf32"), ("m8n8k4", "f64"))
        ),
        *(
            f"{how} sync aligned row|col {shape} global|{_SHARED}? {kind}"
            for how in ("load c", "store d")
            for shape, kind in (
                (_TILES, "f16|f32|s32"), ("m16n16k8", "f32"), ("m8n8k4", "f64"),
            )
        ),
        f"mma sync aligned row|col row|col {_TILES} f16|f32 f16|f32",
        f"mma sync aligned row|col row|col {_TILES} f32 bf16 bf16 f32",
        f"mma sync aligned row|col row|col {_TILES} s32 s8 s8 s32 satfinite?",
        f"mma sync aligned row|col row|col {_TILES} s32 u8 u8 s32 satfinite?",
        "mma sync aligned row|col row|col m16n16k8 f32 tf32 tf32 f32",
        "mma sync aligned row|col row|col m8n8k4 rn? f64 f64 f64 f64",
    ),
    "mma": (
        "sync aligned m16n8k8|m16n8k16 row col f32 f16 f16 f32",
        "sync aligned m16n8k8|m16n8k16 row col f32 bf16 bf16 f32",
        "sync aligned m16n8k8|m16n8k16 row col f16 f16 f16 f16",
        "sync aligned m16n8k4|m16n8k8 row col f32 tf32 tf32 f32",
        "sync aligned m8n8k4|m16n8k4|m16n8k8|m16n8k16 row col rn? f64 f64 f64 f64",
        *(
            f"sync aligned m16n8k16|m16n8k32 row col kind:f8f6f4? {out} {_FLOAT8} {_FLOAT8} {out}"
            for out in ("f32", "f16")
        ),
        "sync aligned m8n8k16|m16n8k16|m16n8k32 row col satfinite? s32 s8|u8 s8|u8 s32",
    ),
    "wgmma": (
        "fence sync aligned", "commit_group sync aligned", "wait_group sync aligned",
        f"mma_async sync aligned {_WIDE} f32|f16 f16 f16", f"mma_async sync aligned {_WIDE} f32 bf16 bf16",
        f"mma_async sync aligned {_SHORT} f32 tf32 tf32", f"mma_async sync aligned {_LONG} f32|f16 {_FLOAT8} {_FLOAT8}",
        f"mma_async sync aligned {_LONG} satfinite? s32 s8|u8 s8|u8",
    ),
    "tensormap": (
        "replace tile global_address global|shared:cta? b1024 b64",
        "replace tile rank|box_dim|global_dim|element_stride global|shared:cta? b1024 b32",
        "replace tile global_stride global|shared:cta? b1024 b64",
        "replace tile elemtype|interleave_layout|swizzle_mode|swizzle_atomicity|fill_mode global|shared:cta? b1024 b32",
        f"cp_fenceproxy global shared:cta tensormap:generic release {_SCOPES} sync aligned",
    ),
    "setmaxnreg": ("inc|dec sync aligned u32",),
    "griddepcontrol": ("wait|launch_dependents",),
    "mapa": (f"{_SHARED}? u32|u64",),
    "getctarank": (f"{_SHARED}? u32|u64",),
    # control
    "bra": ("uni?",),
    "brx": ("idx uni?",),
    "ret": ("uni?",),
    "exit": ("",),
    "trap": ("",),
    "brkpt": ("",),
    "call": ("uni?",),
    "nanosleep": ("u32",),
    "pmevent": ("mask?",),
    "bar": ("cta? sync", "cta? arrive", "cta? red popc u32", "cta? red and|or pred", "warp sync"),
    "barrier": (
        "cta? sync|arrive aligned?", "cta? red popc aligned? u32", "cta? red and|or aligned? pred",
        "cluster arrive release|relaxed? aligned?", "cluster wait acquire? aligned?",
    ),
}  # fmt: skip

#: Numbers of operands that do not depend on the form: a count, and the opcodes with this count.
_COUNTS = {
    "0": "ret exit trap brkpt membar griddepcontrol",
    "1": "activemask bra nanosleep prefetch prefetchu setmaxnreg pmevent",
    "2": "abs neg rcp sqrt rsqrt sin cos lg2 ex2 tanh testp not cnot bfind brev clz popc mov cvta isspacep ld ldu "
    "elect getctarank ldmatrix stmatrix movmatrix brx red",
    "3": "addc subc mul mul24 div rem and or xor shl shr bmsk szext copysign min max add sub vote match redux mapa",
    "4": "mad madc mad24 sad dp4a dp2a fma shf prmt bfe selp slct fns mma vabsdiff4",
    "5": "bfi shfl",
    "1-4": "call",
}
_BARRIERS = "cluster 0, warp 1, red 3-4, arrive 2, 1-2"
#: Other numbers by opcode: parts and a number. The first entry with parts that the instruction has counts.
_COUNTS_BY_PARTS = {
    **{name: count for count, names in _COUNTS.items() for name in names.split()},
    "setp": "and 4, or 4, xor 4, 3",
    "set": "and 4, or 4, xor 4, 3",
    "lop3": "and 6, or 6, 5",
    "st": "async 3, 2",
    "atom": "cas 4, 3",
    "wmma": "mma 4, 2-3",
    "cvt": "pack b32 4, pack 3, f32 f16x2 3, f32 bf16x2 3, f32 e4m3x2 3, f32 e5m2x2 3, 2",
    "cp": "commit_group 0, wait_all 0, wait_group 1, mbarrier 1, prefetch tensor 1, prefetch 2, tensor 2, bulk 3, 3-4",
    "fence": "tensormap:generic acquire 2, 0",
    # An arrival in another block returns no state; its count is optional.
    "mbarrier": "arrive expect_tx 2-3, arrive_drop expect_tx 2-3, arrive noComplete 2-3, arrive_drop noComplete 2-3, "
    "arrive 1-3, arrive_drop 1-3, test_wait 3, try_wait 3-4, inval 1, 2",
    "bar": _BARRIERS,
    "barrier": _BARRIERS,
    # D, A, B, scale-d, then the signs of A and B, then the transpositions.
    "wgmma": "wait_group 1, commit_group 0, fence 0, s32 4, e4m3 6, e5m2 6, tf32 6, 7-8",
    "tensormap": "cp_fenceproxy 3, box_dim 3, global_dim 3, global_stride 3, element_stride 3, 2",
    "createpolicy": "range 4, cvt 2, 1-2",
}
#: Modifiers that add an operand.
_WITH_OPERAND = {"L2:cache_hint", "multicast:cluster"}


@lru_cache(maxsize=4096)
def count_operands(name: str, parts: tuple[str, ...]) -> tuple[int, int]:
    """Return the fewest and the most operands that an opcode has; a negated predicate and {a, b} are one."""
    for row in _COUNTS_BY_PARTS[name].split(", "):
        *needed, number = row.split()
        if set(needed) <= set(parts):
            break
    more = len(_WITH_OPERAND.intersection(parts)) + (name == "cp" and "mbarrier:complete_tx:bytes" in parts)
    least, _, limit = number.partition("-")
    return int(least) + more, int(limit or least) + more


#: Opcodes with a modifier for the number of elements: the position of the operand with these elements.
_ELEMENTS = {"ld": 0, "ldu": 0, "st": 1, "ldmatrix": 0, "stmatrix": 1}


def parse_vectors(name: str, parts: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
    """Return which operands hold several elements, and how many; no operands and 0 if the builder decides."""
    count = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8", "x1", "x2", "x4")), 1)
    if name in _ELEMENTS:
        return (_ELEMENTS[name],), count
    if name in ("atom", "red"):
        return ((0, 2) if name == "atom" else (1,)), count
    return (), 0


#: Words that describe an operand: their order counts.
_IN_ORDER = {"pred", "tf32", "row", "col", "e4m3", "e5m2", "e4m3x2", "e5m2x2"}
_IN_ORDER |= {f"{s}{n}{x}" for s in "bus" for n in (8, 16, 32, 64) for x in ("", "x2")}
_IN_ORDER |= {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "global", *_SHARED.split("|")}


class _Group:
    """The alternatives for one word of a form."""

    def __init__(self, text: str) -> None:
        self.optional = text.endswith("?")
        self.words = text.removesuffix("?").split("|")
        self.in_order = not _IN_ORDER.isdisjoint(self.words)


@cache
def parse_groups(form: str) -> tuple[_Group, ...]:
    """Return the groups of a form."""
    return tuple(_Group(text) for text in form.split())


def fits(parts: tuple[str, ...], groups: tuple[_Group, ...]) -> bool:
    """Return whether a form has all of the parts, each once, and the parts include all required ones."""
    if not parts:
        return all(group.optional for group in groups)
    first, remainder = parts[0], parts[1:]
    for n, group in enumerate(groups):
        if first in group.words:
            before = groups[:n]
            # Modifiers must not follow a word with a fixed position.
            skipped = [g for g in before if group.in_order and g.in_order]
            if all(g.optional for g in skipped):
                left = tuple(g for g in before if g not in skipped) + groups[n + 1 :]
                if fits(remainder, left):
                    return True
    return False


@cache
def _words(name: str) -> frozenset[str]:
    """Return all words in an opcode's forms."""
    return frozenset(word for form in FORMS[name] for group in parse_groups(form) for word in group.words)


@lru_cache(maxsize=4096)
def refusal(name: str, parts: tuple[str, ...]) -> str:
    """Return why an opcode is refused; empty if it is accepted."""
    forms = FORMS.get(name)
    if forms is None:
        return "is not known to the emulator"
    unknown = next((part for part in parts if part not in _words(name)), None)
    if unknown is not None:
        return f"has .{unknown.replace(':', '::')}, unknown to the emulator,"
    groups = [parse_groups(form) for form in forms]
    if any(fits(parts, g) for g in groups):
        return ""
    for n, part in enumerate(parts):  # the first that no form has together with the parts before it
        if not any(_begins(parts[: n + 1], g) for g in groups):
            return f"has .{part.replace(':', '::')}, unknown to the emulator together with the rest,"
    return "lacks a modifier or a type that the emulator needs to know"


def _begins(parts: tuple[str, ...], groups: tuple[_Group, ...]) -> bool:
    """Return whether a form contains all of the parts; others may be missing."""
    loose = [_Group("|".join(group.words) + "?") for group in groups]
    return fits(parts, tuple(loose))
