"""Watched expressions: a marker in the source passes their values to the emulator, without disabling optimization.

The marker is a ``mov`` of inline assembly into a register, and has no effect. The register's name identifies the
expression.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from greenfast.spec.errors import UsageError

#: The register that a marker writes: the number of the watch and of its expression, and its type.
MARKER = re.compile(r"gf_watch_(\d+)_(\d+)_([a-z]+\d*)")
#: The file of the markers, as messages name it.
MARKERS = "gf_watch"
_SPEC = re.compile(r"(?:(?P<file>[^:]+):)?(?P<line>\d+):(?P<expressions>.*\S.*)")
#: Text without statements: comments, strings, characters.
_OPAQUE = re.compile(
    r"//(?:\\\n|[^\n])*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.[0-7xa-f]*|[^'\\\n])'", re.DOTALL
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
#: C++ types with the constraint of their assembly operand, the marker's type, and a cast.
_TYPES = (
    ("bool", "r", "bool", "(int)v"), ("char", "r", "s32", "(int)v"), ("signed char", "r", "s32", "(int)v"),
    ("unsigned char", "r", "u32", "(unsigned)v"), ("short", "r", "s32", "(int)v"),
    ("unsigned short", "r", "u32", "(unsigned)v"), ("int", "r", "s32", "v"), ("unsigned", "r", "u32", "v"),
    ("long", "l", "s64", "(long long)v"), ("unsigned long", "l", "u64", "(unsigned long long)v"),
    ("long long", "l", "s64", "v"), ("unsigned long long", "l", "u64", "v"), ("float", "f", "f32", "v"),
    ("double", "d", "f64", "v"), ("const void*", "l", "u64", "(unsigned long long)v"),
    ("const __half&", "h", "f16", "*reinterpret_cast<const unsigned short*>(&v)"),
    ("const __nv_bfloat16&", "h", "bf16", "*reinterpret_cast<const unsigned short*>(&v)"),
)  # fmt: skip
_MOV = {"bool": "u32", "f16": "b16", "bf16": "b16"}


@dataclass(frozen=True)
class Watch:
    """Expressions to record when a thread reaches a line. file: empty for the kernel's own file."""

    file: str
    line: int
    expressions: tuple[str, ...]


def parse_watch(text: str) -> Watch:
    """Parse "[FILE:]LINE:EXPRESSION,...". Raise UsageError for other texts."""
    match = _SPEC.fullmatch(text)
    if match is None or int(match["line"]) < 1:
        raise UsageError(
            f"--watch {text!r}: give LINE:EXPRESSION,... or FILE:LINE:EXPRESSION,..., as saxpy.cu:3:i,y[i]"
        )
    expressions, depth = [""], 0
    for char in match["expressions"]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            expressions.append("")
        else:
            expressions[-1] += char
    if any(not expression.strip() for expression in expressions):
        raise UsageError(f"--watch {text!r}: an expression is empty")
    return Watch(match["file"] or "", int(match["line"]), tuple(e.strip() for e in expressions))


def insert_watches(source: str, name: str, specs: Sequence[str]) -> str:
    """Return a CUDA source with a marker before each watched line; its lines keep their numbers.

    name: the source's file name or path. Raise UsageError for a line of another file, or without the start of a
    statement.
    """
    if not specs:
        return source
    watches = [parse_watch(spec) for spec in specs]
    lines = source.splitlines(keepends=True)
    for spec, watch in zip(specs, watches, strict=True):
        if watch.file and watch.file.rsplit("/", 1)[-1] != name.rsplit("/", 1)[-1]:
            raise UsageError(f"--watch {spec!r}: lines of {name} can be watched, not of {watch.file}")
        if watch.line > len(lines):
            raise UsageError(f"--watch {spec!r}: {name} has {len(lines)} lines")
    starts = [0, *itertools.accumulate(map(len, lines))]
    spans = [match.span() for match in _OPAQUE.finditer(source)]
    code = _OPAQUE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    inserted: dict[int, str] = {}
    for number, watch in enumerate(watches):
        reason, inner = _check_position(code, spans, starts[watch.line - 1])
        if reason:
            raise UsageError(f"--watch {specs[number]!r}: line {watch.line} {reason}; give the line of a statement")
        calls = ", ".join(f"::gf_watch_{number}_{n}({e})" for n, e in enumerate(watch.expressions))
        # A body without braces stays one statement with its marker.
        marker = f"if (({calls}), false) ; else " if inner else f"({calls}); "
        inserted[watch.line] = inserted.get(watch.line, "") + marker
    for row, marker in inserted.items():
        lines[row - 1] = marker + lines[row - 1]
    functions = [
        _make_function(f"gf_watch_{number}_{n}")
        for number, watch in enumerate(watches)
        for n in range(len(watch.expressions))
    ]
    declared = "struct __half; struct __nv_bfloat16;\n"
    return f'#line 1 "{MARKERS}"\n{declared}{"".join(functions)}#line 1 "{name}"\n{"".join(lines)}'


def _check_position(code: str, opaque: Sequence[tuple[int, int]], start: int) -> tuple[str, bool]:
    """Return why no marker can be at the start of a line, empty if it can, and whether the line is an unbraced body.

    code: the source with blanks for the spans ``opaque``.
    """
    if any(begin < start < end for begin, end in opaque):
        return "is inside a comment or a string", False
    directives = list(_DIRECTIVE.finditer(code))
    if any(directive.start() <= start < directive.end() for directive in directives):
        return "is a directive of the preprocessor", False
    word = re.compile(r"\s*(else|case|default)\b").match(code, start)
    if word:
        return f"begins with {word[1]!r}", False
    before = code[:start]
    for directive in reversed([directive for directive in directives if directive.end() <= start]):
        if before[directive.end() :].strip():
            break
        if "pragma" in directive[0]:
            return "follows a #pragma", False
        before = before[: directive.start()]
    before = before.rstrip()
    if not before or before[-1] in ";{}:":
        return "", False
    if before[-1] == ")" or re.search(r"\b(else|do)\Z", before):
        return "", True
    return "continues the statement before it", False


def _make_function(name: str) -> str:
    """Return the overloads of a marker, on one line."""
    overloads = []
    for cpp, constraint, kind, value in _TYPES:
        mov = _MOV.get(kind, kind)
        register = f"{name}_{kind}"
        overloads.append(
            f"static __device__ __forceinline__ void {name}({cpp} v) {{ asm volatile("
            f'"{{ .reg .{mov} {register}; mov.{mov} {register}, %0; }}" :: "{constraint}"({value})); }}'
        )
    return " ".join(overloads) + "\n"
