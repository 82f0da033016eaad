"""``greenfast emulate``."""

from __future__ import annotations

import argparse
import sys

from greenfast.cli.console import show, table
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.judge.emulate import EmulateRequest, EmulateResult, describe_fault, emulate
from greenfast.judge.report.counts import SHOWN
from greenfast.judge.store import to_json
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import KernelCounts
from greenfast.spec.printable import printable


def run(args: argparse.Namespace) -> int:
    """Run a kernel; 0 if no fault was found, else 1."""
    if args.orders == 0:
        raise UsageError("--orders 0: give at least 1")
    request = EmulateRequest(
        file=args.file,
        kernel=args.kernel,
        grid=args.grid,
        block=args.block,
        args=args.arg,
        buffers=args.buffer,
        smem=args.smem,
        arch=args.arch,
        seed=args.seed,
        orders=args.orders,
        defines=args.define,
        includes=args.include,
        expected=dict(args.expect),
        tolerance=args.tolerance,
        save=args.save,
        formal=args.formal == "fail",
    )
    try:
        result = emulate(request)
    except KernelFaultError as e:
        if args.json:
            print(to_json(describe_fault(request, e)), end="")
        elif e.printed:  # the output before the fault helps to locate it
            print(printable(e.printed), end="")
        raise
    if args.json:
        print(to_json(result), end="")
    else:
        _show(result)
    if not request.formal:
        for fault in result.faults:
            if fault.level != "error":
                print(f"greenfast: {result.kernel}: {fault.level} finding: {fault.message}", file=sys.stderr)
    for failure in result.failures:
        print(f"greenfast: {result.kernel}: {failure}", file=sys.stderr)
    return int(bool(result.failures))


def _show(result: EmulateResult) -> None:
    extents = ", ".join(
        f"{name} {','.join(map(str, e))}" for name, e in (("grid", result.grid), ("block", result.block))
    )
    runs = f"{result.orders} orders of the warps" if result.orders > 1 else "one order of the warps"
    show(f"{result.kernel}, {result.target}: {extents}; {runs}, {result.seconds:.1f} s")
    if result.resources:
        r = result.resources
        show(f"{r.registers} registers, {r.smem_bytes} bytes of shared memory, {r.spill_bytes} bytes spilled")
    if result.printed:
        show("\nprinted:")
        print(printable(result.printed), end="" if result.printed.endswith("\n") else "\n")
    show("")
    rows = [
        (
            o.name,
            o.dtype,
            ",".join(map(str, o.shape)),
            *("-" if value is None else f"{value:.6g}" for value in (o.min, o.max, o.mean)),
            str(o.nan),
            "filled before" if o.unwritten_bytes is None else f"{o.unwritten_bytes} of {o.bytes} bytes",
        )
        for o in result.outputs
    ]
    if rows:
        show(table(("output", "type", "shape", "min", "max", "mean", "NaN", "never written"), rows))
        if any(o.unwritten_bytes for o in result.outputs):
            show("(bytes that were never written read as 0xFF here: NaN, or -1)")
        show("")
    if result.counts is not None:
        show(table(("count", "", ""), count_rows(result.counts)))
    if result.saved:
        show("\n" + "\n".join(result.saved))


def count_rows(counts: KernelCounts) -> list[tuple[str, str, str]]:
    """Return one row per count of executed operations: name, number, and its kind or source line."""
    rows = [(title, str(getattr(counts, name)), "") for name, title in SHOWN.items()]
    rows += [("warp instructions", str(n), kind) for kind, n in counts.instructions.items()]
    return rows + [("bank conflicts", str(n), f"at {where}") for where, n in counts.bank_conflicts.items()]
