"""Patterns of PTX directives that neither a semicolon nor the end of a line terminates."""

from __future__ import annotations

#: ``.file 1 "kernel.cu"``, perhaps with a time stamp and a size; groups: its number and its path.
FILE = r'\.file\s+(\d+)\s+"([^"\n]*)"(?:\s*,\s*\d+)*'
#: ``.loc 1 7 3``, optionally with its inlining position; groups: file and line, and file and line of the caller.
LOC = (
    r"\.loc\s+(\d+)\s+(\d+)(?:\s+\d+)?"
    r"(?:\s*,\s*function_name\s+[\w$]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+\d+)?"
)
#: A comment or a string (``//`` and ``/*`` inside a string are text).
COMMENT_OR_STRING = r'//[^\n]*|/\*.*?\*/|"[^"\n]*"'
