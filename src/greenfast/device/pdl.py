"""Check the machine code of a kernel for programmatic dependent launch: it may start before the previous launch ends.

Such a kernel (PTX ISA, "griddepcontrol") may access the previous launch's outputs only after its wait, ACQBULK in
machine code. Source order does not prove that: the compiler may move a load declared read-only (LDG.CONSTANT, from
__ldg or const __restrict__) before the wait.
"""

from __future__ import annotations

from greenfast.device.machine_code import find_reachable, parse_listing

_WAIT = "ACQBULK"
# Accesses to global memory, without bulk copies (UBLKCP, UTMALDG): the instruction does not show their addresses.
_ACCESSES = frozenset(("LDG", "LD", "STG", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS", "UTMASTG", "UTMAREDG"))


def early_launch_faults(sass: str) -> list[str]:
    """Accesses to global memory that may happen before the wait, in a listing from ``machine_code.disassemble``.

    One line each, with the instruction and its address in the kernel; empty for a kernel that may be launched early.
    Every path from the entry is followed, as if every branch could go both ways.
    """
    code, labels = parse_listing(sass)
    faults = [
        f"{opcode} at {address}: a load of constant memory, which the compiler may move ahead of the wait"
        for address, _, opcode, _ in code
        if opcode.split(".")[0] == "LDG" and "CONSTANT" in opcode
    ]
    if not any(opcode == _WAIT for _, _, opcode, _ in code):
        return [*faults, f"no {_WAIT}: the kernel never waits for the launch before it"]
    for at in sorted(find_reachable(code, labels, 0, _is_wait)):
        address, _, opcode, _ = code[at]
        if opcode.split(".")[0] in _ACCESSES and "CONSTANT" not in opcode:
            faults.append(f"{opcode} at {address}: reached without a wait for the launch before")
    return faults


def _is_wait(opcode: str, operands: str) -> bool:
    return opcode == _WAIT
