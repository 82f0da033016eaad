"""Check that a kernel waits for its asynchronous operations before it ends, from its PTX or its machine code."""

from __future__ import annotations

from functools import lru_cache

from greenfast.device.compiler import CompiledKernel
from greenfast.device.machine_code import disassemble, find_unawaited_stores
from greenfast.emulator.pending_at_exit import find_unawaited
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import Status
from greenfast.spec.errors import MachineError, UnsupportedError


def check_awaited(side: BuiltSide) -> tuple[Status, str] | None:
    """Return the status of an implementation's kernels with a reason; None if no kernel has asynchronous operations.

    FAIL: no path waits for an operation. PENDING: a path of the PTX does not wait for an operation, but this path may
    never be taken; or a kernel cannot be analysed.
    """
    pending = ""
    has_operations = False
    for _, kernel in side.distinct:
        status, text = _check_kernel(kernel)
        has_operations |= bool(text)
        if status == "FAIL":
            return status, f"{kernel.source.entry}: {text}"
        if status == "PENDING":
            pending = f"{kernel.source.entry}: {text}"
    if pending:
        return "PENDING", pending
    return ("PASS", "on every path to the end") if has_operations else None


@lru_cache(maxsize=256)
def _check_kernel(kernel: CompiledKernel) -> tuple[Status, str]:
    if not kernel.ptx:
        return _check_machine_code(kernel)
    try:
        unawaited = find_unawaited(kernel.ptx, kernel.source.entry)
    except UnsupportedError as e:
        return "PENDING", f"its PTX could not be followed: {e}"
    if not unawaited:
        return "PASS", "awaited" if any(mark in kernel.ptx for mark in (".bulk_group", "wgmma.mma_async")) else ""
    certain = [operation for operation in unawaited if operation.is_certain]
    return ("FAIL" if certain else "PENDING"), str((certain or unawaited)[0])


def _check_machine_code(kernel: CompiledKernel) -> tuple[Status, str]:
    """Check that some path from each store has a wait. Machine code does not show the groups of operations."""
    try:
        unawaited = find_unawaited_stores(disassemble(kernel.cubin, kernel.source.entry))
    except MachineError as e:
        return "PENDING", f"its machine code could not be followed: {e}"
    if unawaited:
        return "FAIL", f"{unawaited[0]}: no path from it to the end of the kernel waits for it"
    return "PASS", ""
