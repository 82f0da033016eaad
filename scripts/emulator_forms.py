"""Write the table of instructions that the emulator knows into docs/emulator-instructions.md.

python -m scripts.emulator_forms
"""

from __future__ import annotations

from pathlib import Path

from greenfast.emulator.ptx.forms import FORMS, parse_groups

PAGE = Path(__file__).parents[1] / "docs" / "emulator-instructions.md"
BEGIN, END = "<!-- forms:begin -->", "<!-- forms:end -->"

_INT = "u16|u32|u64|s16|s32|s64"
_BITS = "b16|b32|b64"
_SHARED = "shared|shared:cta|shared:cluster"
_FLOATS = "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"
#: Sets of modifiers that many forms share, and their name on the page.
SETS = {
    "rnd": "rn|rz|rm|rp",
    "rndi": "rni|rzi|rmi|rpi",
    "int": _INT,
    "uint": "u16|u32|u64",
    "sint": "s16|s32|s64",
    "bits": _BITS,
    "word": "u32|s32|u64|s64",
    "intx": f"u8|s8|{_INT}",
    "intb": f"{_INT}|{_BITS}",
    "any": f"{_INT}|{_BITS}|f32|f64",
    "fcmp": _FLOATS,
    "bool": "and|or|xor",
    "number": "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64",
    "narrow": "b8|b16|b32|u8|u16|u32|s8|s16|s32|f32",
    "shared": _SHARED,
    "place": f"global|{_SHARED}",
    "space": f"global|local|const|param|param:entry|param:func|{_SHARED}",
    "wspace": f"global|local|param|param:entry|param:func|{_SHARED}",
    "scope": "cta|cluster|gpu|sys",
    "L1hint": "L1:evict_normal|L1:evict_unchanged|L1:evict_first|L1:evict_last|L1:no_allocate",
    "L2hint": "L2:evict_normal|L2:evict_first|L2:evict_last",
    "L2size": "L2:64B|L2:128B|L2:256B",
    "policy": "L2:evict_last|L2:evict_normal|L2:evict_first|L2:evict_unchanged",
    "rank": "1d|2d|3d|4d|5d",
    "tile": "m16n16k16|m8n32k16|m32n8k16",
    **{f"m64nNk{k}": "|".join(f"m64n{n}k{k}" for n in range(8, 257, 8)) for k in (8, 16, 32)},
}
_NAMES = {frozenset(words.split("|")): name for name, words in SETS.items()}


def _alternatives(words: list[str]) -> str:
    name = _NAMES.get(frozenset(words))
    if name is not None:
        return f".{name}" if name.startswith("m64") else f".<{name}>"
    return ", ".join(f".{word}" for word in words).replace(":", "::")


def text_of(form: str) -> str:
    """A form as the PTX ISA would write it: {} around optional parts, () around alternatives."""
    parts = []
    for group in parse_groups(form):
        words = _alternatives(group.words)
        brackets = ("{", "}") if group.optional else ("(", ")") if ", " in words else ("", "")
        parts.append(words.join(brackets))
    return "".join(parts)


def table() -> str:
    """The sets, then one row per group of opcodes with the same forms."""
    lines = ["| in the forms | one of |", "| --- | --- |"]
    for name, words in SETS.items():
        if not name.startswith("m64"):
            lines.append(f"| `.<{name}>` | " + " ".join(f"`.{w}`" for w in words.replace(":", "::").split("|")) + " |")
    lines += ["| `.m64nNk16` and the like | N from 8 to 256 in steps of 8 |", "", "| opcode | forms |", "| --- | --- |"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, forms in FORMS.items():
        rows.setdefault(forms, []).append(name)
    for forms, names in rows.items():
        listed = "<br>".join(f"`{text_of(form)}`" if form else "no modifier" for form in forms)
        lines.append(f"| {', '.join(f'`{n}`' for n in names)} | {listed} |")
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with its table updated."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
