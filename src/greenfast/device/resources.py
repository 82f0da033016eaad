"""The compiler's report on a kernel, read from the log of ``ptxas -v``."""

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
    """The resources of kernel ``entry``, from the compiler's log.

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
