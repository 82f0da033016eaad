"""Read the compiler's log: diagnostics with file and line, and the resources that ``ptxas -v`` reports."""

from __future__ import annotations

import re

from greenfast.spec.errors import MachineError
from greenfast.spec.facts import Resources

# One section per kernel; functions that it calls without inlining follow within its section, with their own frames:
#   ptxas info    : Compiling entry function 'k' for 'sm_89'
#   ptxas info    : Function properties for k
#   ptxas         .     144 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
#   ptxas info    : Used 64 registers, used 1 barriers, 144 bytes cumulative stack size, 256 bytes smem
# A source can have the compiler print anything, by a #warning for one, but only before ptxas begins: a whole line of
# ptxas's that is the last of its kind is its own.
_SECTION = re.compile(r"^ptxas info +: Compiling entry function '([\w$.%]+)' for '\w+'$", re.MULTILINE)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SMEM = re.compile(r"(\d+) bytes smem")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")


def parse_resources(log: str, entry: str, dynamic_smem_bytes: int) -> Resources:
    """Return the resources of kernel ``entry``, from the compiler's log.

    Spills are summed over the kernel and every function that it calls; the stack is the deepest.
    Raises MachineError with the missing entry: a missing value never counts as zero.
    """
    _, *parts = _SECTION.split(log)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    if entry not in sections:
        raise MachineError(
            f"the compiler's log has no section for kernel {entry!r}; it has: {', '.join(sections) or 'none'}"
        )
    section = sections[entry]
    frames = [tuple(map(int, frame)) for frame in _FRAME.findall(section)]
    used = _USED.search(section)
    if not frames:
        raise MachineError(f"the compiler's log does not state the stack frame and spills of kernel {entry!r}")
    if used is None:
        raise MachineError(f"the compiler's log does not state the registers of kernel {entry!r}")
    # ptxas omits shared memory from the line if a kernel has none.
    smem = _SMEM.search(used[2])
    cumulative = _CUMULATIVE_STACK.search(used[2])
    return Resources(
        registers=int(used[1]),
        static_smem_bytes=int(smem[1]) if smem else 0,
        dynamic_smem_bytes=dynamic_smem_bytes,
        stack_bytes=max(frames[0][0], int(cumulative[1]) if cumulative else 0),
        spill_store_bytes=sum(stores for _, stores, _ in frames),
        spill_load_bytes=sum(loads for _, _, loads in frames),
    )


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
_UNANNOTATED = "A function without execution space annotations"
#: An error in CUB's or Thrust's code of the host.
_HOST_CUB = re.compile(r"^\S*/(?:cub|thrust)/\S+\(\d+\): error: .*__host__ function", re.MULTILINE)
_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) ")
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)


def readable(log: str, ptx: str) -> str:
    """Return the errors and warnings of a compile log; empty if it has none.

    ptx: the PTX that ptxas was given, or empty. ptxas states lines of this generated text; they are translated to the
    file and line of the source by its ``.loc`` directives.
    """
    kept = [_PTXAS_ERROR.sub(lambda m: _at_source(m, ptx), line) for line in log.splitlines() if not _NOISE.match(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    if (host := _HOST_CUB.search(text)) is not None:  # a hundred errors in headers, each with two lines of them
        first = text[: text.find("\n", host.end())]
        return (
            f"{first}\n\n<cub/cub.cuh> and <thrust/...> have code of the host, and NVRTC compiles device code alone: "
            "include the parts that kernels use, such as <cub/block/block_reduce.cuh> or <cub/warp/warp_scan.cuh>"
        )
    if _UNANNOTATED in text:
        return (
            f"{text}\n\nNVRTC counts a function without __device__ as code of the host, and so also a lambda with auto "
            "parameters: name their types, or write a __device__ function template"
        )
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
    """Return a ptxas message with the source line and the instruction that it refers to, as far as known."""
    number, kind, text = int(message[1]), message[2], message[3]
    lines = ptx.splitlines()
    if number > len(lines):
        return message[0]
    files = dict(_FILE.findall(ptx))
    locations = [m for m in map(_LOC.match, lines[:number]) if m]
    place = f"{files.get(locations[-1][1], '?')}({locations[-1][2]})" if locations else f"PTX line {number}"
    return f"{place}: ptxas {kind}: {text}\n  {lines[number - 1].strip()}"
