"""Errors in the machine code of a kernel that may begin while the launch before it ends.

Such a kernel (CUDA's programmatic dependent launch; PTX ISA, "griddepcontrol") may access what the launch before it
writes only after its wait, ACQBULK in machine code. Source order does not prove that: the compiler may move a load
declared read-only (LDG.CONSTANT, from __ldg or const __restrict__) ahead of the wait.
"""

from __future__ import annotations

import re

_WAIT = "ACQBULK"
# Accesses to global memory. Bulk copies (UBLKCP, UTMALDG) are left out: the instruction does not show what they copy.
_ACCESSES = frozenset(("LDG", "LD", "STG", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS", "UTMASTG", "UTMAREDG"))
_LABEL = re.compile(r"^([.$\w]+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*)")
_TARGET = re.compile(r"`\(([.$\w]+)\)")


def early_launch_faults(sass: str) -> list[str]:
    """Accesses to global memory that may happen before the wait, in a listing from ``machine_code.disassemble``.

    One line each, with the instruction and its address in the kernel; empty for a kernel that may be launched early.
    Every path from the entry is followed, as if every branch could go both ways.
    """
    code: list[tuple[str, str, str, str]] = []  # address, predicate, opcode, operands
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append((found[1], found[2] or "", found[3], found[4]))
    faults = [
        f"{opcode} at {address}: a load of constant memory, which the compiler may move ahead of the wait"
        for address, _, opcode, _ in code
        if opcode.split(".")[0] == "LDG" and "CONSTANT" in opcode
    ]
    if not any(opcode == _WAIT for _, _, opcode, _ in code):
        return [*faults, f"no {_WAIT}: the kernel never waits for the launch before it"]
    for at in sorted(_before_wait(code, labels)):
        address, _, opcode, _ = code[at]
        if opcode.split(".")[0] in _ACCESSES and "CONSTANT" not in opcode:
            faults.append(f"{opcode} at {address}: reached without a wait for the launch before")
    return faults


def _before_wait(code: list[tuple[str, str, str, str]], labels: dict[str, int]) -> set[int]:
    """The instructions that a path from the entry reaches before ACQBULK."""
    reached: set[int] = set()
    ahead = [0]
    while ahead:
        at = ahead.pop()
        if at in reached or at >= len(code):
            continue
        reached.add(at)
        _, predicate, opcode, operands = code[at]
        kind = opcode.split(".")[0]
        if kind == _WAIT:
            continue
        if kind in ("BRX", "JMX"):  # indirect branch
            ahead += labels.values()
        if kind != "BSSY":  # its target is a reconvergence point
            ahead += [labels[target] for target in _TARGET.findall(operands) if target in labels]
        always = not predicate and (kind in ("EXIT", "RET") or (kind == "BRA" and operands.lstrip().startswith("`")))
        if not always:
            ahead.append(at + 1)
    return reached
