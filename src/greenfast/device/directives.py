"""The directives of PTX that stand in a line with what follows them: no semicolon and no line's end closes them."""

from __future__ import annotations

#: ``.file 1 "kernel.cu"``, perhaps with a time stamp and a size; groups: its number and its path.
FILE = r'\.file\s+(\d+)\s+"([^"\n]*)"(?:\s*,\s*\d+)*'
#: ``.loc 1 7 3``, perhaps with where it was inlined; groups: file and line, and these of the caller.
LOC = (
    r"\.loc\s+(\d+)\s+(\d+)(?:\s+\d+)?"
    r"(?:\s*,\s*function_name\s+[\w$]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+\d+)?"
)
#: A comment, or a string, in which ``//`` and ``/*`` are text.
COMMENT_OR_STRING = r'//[^\n]*|/\*.*?\*/|"[^"\n]*"'
