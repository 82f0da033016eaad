"""``greenfast profile``."""

from __future__ import annotations

import argparse
import json

import msgspec

from greenfast.cli.console import show, table
from greenfast.cli.progress import ProgressLine
from greenfast.judge.implementation import build_rung_implementation
from greenfast.judge.profiling import count_phases, take_profile
from greenfast.judge.report.facts import PHASE_HEADER, phase_rows
from greenfast.judge.request import now, read_request
from greenfast.judge.store import check_writable
from greenfast.judge.task import load
from greenfast.spec.errors import MachineError, UsageError


def run(args: argparse.Namespace) -> int:
    """Profile one variant: phase shares by in-kernel clocks, and a Nsight Compute file per shape.

    On the emulator, only the phases are profiled, by their instruction counts.
    """
    request = read_request(load(args.task), args)
    config = request.task.config
    variant = config.variant(args.variant or config.defaults.candidate)
    only_phases = args.phases and not args.ncu
    reason = request.cannot_run() if only_phases else request.cannot_time()
    if reason:
        raise MachineError(f"a profile needs a GPU; {reason}")
    if args.launches < 1:
        raise UsageError(f"--launches {args.launches}: give at least 1")
    both = args.ncu == args.phases
    result: dict[str, object] = {"variant": variant.name}
    if args.phases or both:
        with ProgressLine(f"counting the phases of {variant.name}"):
            record, folder = count_phases(request, variant)
        result["phases"] = msgspec.to_builtins(record)
        for shape, cycles in record.phase_cycles.items():
            total = sum(cycles.values())
            rows = [(name, f"{c:.0f}", f"{100 * c / total:.1f} %") for name, c in cycles.items()]
            if not args.json:
                show(table(("phase", "cycles per block", "share"), rows, title=f"{variant.name}, {shape}"))
        for shape, counts in record.phase_counts.items():
            if not args.json:
                show(table(PHASE_HEADER, phase_rows(counts), title=f"{variant.name}, {shape}, emulated"))
        if not args.json:
            show(f"{folder}")
    if args.ncu or both:
        check_writable(request.results)
        stamp, implementation = now().strftime("%Y%m%d-%H%M%S"), build_rung_implementation(request.task, variant)
        with ProgressLine(f"profiling {variant.name}"):
            files = [
                str(take_profile(request, implementation, shape, request.seeds[0], stamp, launches=args.launches))
                for shape in request.shapes
            ]
        result["profiles"] = files
        if not args.json:
            show("\n".join(files))
    if args.json:
        print(json.dumps(result, indent=2))
    return 0
