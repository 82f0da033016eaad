"""Make text from elsewhere safe to print: compilers' messages, printf of kernels, exceptions, names of files."""

from __future__ import annotations

import re
from typing import Any, TextIO

# Control characters but tab and line feed (escape sequences, carriage returns), characters that reorder text, and
# characters that no file can hold: halves of surrogate pairs (in names of files that are not UTF-8), noncharacters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
#: Texts that CI systems interpret as commands: GitHub at the start of a line, and anywhere in it; Azure; TeamCity.
_COMMAND_AT_START = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
_COMMAND = re.compile(r"##(?=\[|vso\[|teamcity\[)")


def printable(text: str) -> str:
    r"""Escape everything in a text that a terminal or a CI log would interpret.

    Control characters and characters that reverse text become escapes such as \x1b. A backslash is put before ``::`` at
    the start of a line, and before ``##[`` anywhere.
    """
    text = _UNSAFE.sub(lambda c: f"\\x{ord(c[0]):02x}" if ord(c[0]) < 256 else f"\\u{ord(c[0]):04x}", text)
    return _COMMAND.sub(r"#\\#", _COMMAND_AT_START.sub(r"\1\\:", text))


class PrintableStream:
    """A text stream that is no terminal, such as a CI log: all that is written to it is ``printable``.

    A line is held back until it ends or the stream is flushed, because its start decides.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        """Write text; the last line without an end waits."""
        # The part that waits is set first: after an interrupted write, the next flush must not write the text again.
        whole, end, self._line = (self._line + text).rpartition("\n")
        if end:
            self._stream.write(printable(whole) + end)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the waiting text, and flush the stream. A line that goes on afterwards is no new line."""
        line, self._line = self._line, ""
        if line:
            self._stream.write(printable(line))
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
