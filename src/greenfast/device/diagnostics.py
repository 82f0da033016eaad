"""Make the compiler's messages readable: diagnostics with file and line only."""

from __future__ import annotations

import re

# Output of NVRTC and ptxas that is no diagnostic.
_NOISE = re.compile(
    r"ptxas info |ptxas +\. |Remark: The warnings can be suppressed|Compilation terminated\.|"
    r"ptxas fatal +: Ptx assembly aborted due to errors"
)
_PTXAS_ERROR = re.compile(r"ptxas application ptx input, line (\d+); (\w+) *: (.*)")
_MISSING = re.compile(r'cannot open source file "([^"]+)"')
#: Headers that only code of the host can use, by a part of their names.
_HOST_HEADERS = re.compile(
    r"^(iostream|fstream|sstream|iomanip|string|vector|map|set|list|deque|queue|stack|unordered_\w+|thread|mutex|future|"
    r"condition_variable|random|regex|filesystem|stdexcept|exception|typeinfo|cstdarg|stdarg\.h|cerrno|errno\.h|"
    r"unistd\.h|signal\.h|csignal|locale|any|string_view|charconv|cctype|ctype\.h|sys/.*|torch/.*|ATen/.*|c10/.*|"
    r"pybind11/.*|cublas.*|cudnn.*|cufft.*|cusparse.*|cuda_profiler_api\.h|nvrtc\.h|Python\.h)$"
)
_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) ")
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)


def readable(log: str, ptx: str) -> str:
    """The errors and warnings of a compile log; empty if it has none.

    ptx: the PTX that ptxas was given, or empty. ptxas states lines of this generated text; they are translated to the
    file and line of the source by its ``.loc`` directives.
    """
    kept = [_PTXAS_ERROR.sub(lambda m: _at_source(m, ptx), line) for line in log.splitlines() if not _NOISE.match(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    missing = _MISSING.search(text)
    return f"{text}\n\n{_about_header(missing[1])}" if missing else text


def _about_header(name: str) -> str:
    """Suggest a replacement for a missing include."""
    if _HOST_HEADERS.match(name):
        return (
            f"<{name}> is for code of the host. NVRTC compiles device code alone: keep host code and its headers "
            "inside #ifndef __CUDACC_RTC__"
        )
    return (
        f"{name!r} is not in the folders of the source, nor among the headers that come with greenfast. Copy it there, "
        f"or write <cuda/std/...> for a part of C++'s library: <cstdint>, <cmath>, <limits>, <type_traits>, <utility>, "
        f"<array>, <tuple>, <algorithm>, <cstdio> and C's forms of them, such as <stdint.h>, are there."
    )


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
