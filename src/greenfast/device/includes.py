"""Find the files that a CUDA source may open."""

from __future__ import annotations

import functools
import re

_INCLUDE = re.compile(
    rb'(?:^[ \t]*#[ \t]*include[ \t]*|\b__has_include[ \t]*\([ \t]*)(["<])([^">\n]+)[">]', re.MULTILINE
)
#: Any directive that opens a file, also forms that _INCLUDE does not match: with a macro or a comment.
_ANY_INCLUDE = re.compile(rb"(?:#|%:)(?:\s|/\*.*?\*/)*(?:include|import)|\b__has_include", re.DOTALL)
_ASKS_FOR_IT = re.compile(rb"(?:#[ \t]*ifn?def[ \t]+|\bdefined[ \t]*\(?[ \t]*)__has_include\b")
_SPLICE = re.compile(rb"\\[ \t]*\r?\n")


@functools.lru_cache(maxsize=512)
def includes(text: bytes) -> list[tuple[bytes, bytes]]:
    """(opening quote, name) of each include: a process hashes the same headers for every kernel.

    Conditions are not evaluated, so some may never be read.
    """
    return _INCLUDE.findall(_SPLICE.sub(b"", text))


@functools.lru_cache(maxsize=512)
def includes_by_a_macro(text: bytes) -> bool:
    """Return whether a source may open a file that is not in ``includes``."""
    rest = _INCLUDE.sub(b"", _ASKS_FOR_IT.sub(b"", _SPLICE.sub(b"", text)))
    return _ANY_INCLUDE.search(rest) is not None
