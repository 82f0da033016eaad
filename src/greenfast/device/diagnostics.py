"""The compiler's messages, made readable: its diagnostics with file and line, without the noise."""

from __future__ import annotations

import re

# What NVRTC and ptxas print besides diagnostics.
_NOISE = re.compile(
    r"ptxas info |ptxas +\. |Remark: The warnings can be suppressed|Compilation terminated\.|"
    r"ptxas fatal +: Ptx assembly aborted due to errors"
)
_PTXAS_ERROR = re.compile(r"ptxas application ptx input, line (\d+); (\w+) *: (.*)")
_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) ")
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)


def readable(log: str, ptx: str) -> str:
    """The errors and warnings of a compile log; empty if it has none.

    ptx: the PTX that ptxas was given, or empty. ptxas states lines of this generated text; they are translated to the
    file and line of the source by its ``.loc`` directives.
    """
    kept = [_PTXAS_ERROR.sub(lambda m: _at_source(m, ptx), line) for line in log.splitlines() if not _NOISE.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _at_source(message: re.Match[str], ptx: str) -> str:
    """A ptxas message with the source line and the instruction that it refers to, as far as known."""
    number, kind, text = int(message[1]), message[2], message[3]
    lines = ptx.splitlines()
    if number > len(lines):
        return message[0]
    files = dict(_FILE.findall(ptx))
    locations = [m for m in map(_LOC.match, lines[:number]) if m]
    place = f"{files.get(locations[-1][1], '?')}({locations[-1][2]})" if locations else f"PTX line {number}"
    return f"{place}: ptxas {kind}: {text}\n  {lines[number - 1].strip()}"
