"""Whether a kernel's asynchronous operations are awaited before it ends, by its PTX, else by its machine code."""

from __future__ import annotations

from functools import lru_cache

from greenfast.device.compiler import CompiledKernel
from greenfast.device.machine_code import disassemble, unawaited_stores
from greenfast.emulator.pending_at_exit import find_unawaited
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import Status
from greenfast.spec.errors import MachineError, UnsupportedError


def check_awaited(side: BuiltSide) -> tuple[Status, str] | None:
    """The status of a side's kernels, and what was found; None if none of them has such operations.

    FAIL: an operation that nothing waits for. PENDING: one that a path of the PTX does not wait for, though it may
    never be taken, or a kernel that cannot be read.
    """
    pending = ""
    some = False
    for _, kernel in side.distinct:
        status, text = _check_kernel(kernel)
        some |= bool(text)
        if status == "FAIL":
            return status, f"{kernel.source.entry}: {text}"
        if status == "PENDING":
            pending = f"{kernel.source.entry}: {text}"
    if pending:
        return "PENDING", pending
    return ("PASS", "on every path to the end") if some else None


@lru_cache(maxsize=256)
def _check_kernel(kernel: CompiledKernel) -> tuple[Status, str]:
    if not kernel.ptx:
        return _check_machine_code(kernel)
    try:
        found = find_unawaited(kernel.ptx, kernel.source.entry)
    except UnsupportedError as e:
        return "PENDING", f"its PTX could not be followed: {e}"
    if not found:
        return "PASS", "awaited" if any(mark in kernel.ptx for mark in (".bulk_group", "wgmma.mma_async")) else ""
    certain = [operation for operation in found if operation.is_certain]
    return ("FAIL" if certain else "PENDING"), str((certain or found)[0])


def _check_machine_code(kernel: CompiledKernel) -> tuple[Status, str]:
    """By a kernel's machine code, which does not show the groups: whether any path from an operation has a wait."""
    try:
        found = unawaited_stores(disassemble(kernel.cubin, kernel.source.entry))
    except MachineError as e:
        return "PENDING", f"its machine code could not be followed: {e}"
    if found:
        return "FAIL", f"{found[0]}: no path from it to the end of the kernel waits for it"
    return "PASS", ""
