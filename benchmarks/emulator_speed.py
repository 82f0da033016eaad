"""Measure the emulator's speed on the ladder, and where its time goes: by rung, by kind of instruction, by function.

python -m benchmarks emulator_speed [--shapes small,mission] [--variants stage2,...] [--details stage2,...] [--md FILE]

Each rung runs in a separate process, to measure its peak memory. Kinds and functions are for the variants of --details
on the last shape; timing has overhead, so their sums exceed the seconds of the first table. Kinds are interpreted, the
others with compiled stretches if llvmlite is installed.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from greenfast.cli.console import show
from greenfast.cli.options import words
from greenfast.device.compiler import compile_kernel
from greenfast.emulator.grid import load_program, run_grid
from greenfast.emulator.machine.blocks import ThreadSet
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.judge.report.formatting import table
from greenfast.judge.task import find_task, load
from greenfast.spec.arch import Target

_SHOWN = 15
SPEED = ("variant", "shape", "seconds", "warp instructions/s", "thread instructions/s", "peak GiB")
KINDS = ("kind", "warp instructions", "seconds", "share", "warp instructions/s")
FUNCTIONS = ("function", "calls", "self seconds", "share")


class Launched:
    """A rung of the ladder on a shape, ready to run any number of times."""

    def __init__(self, name: str, shape: str) -> None:
        task = load("fp8_sdpa")
        toggles, dims = task.config.variant(name).values, task.config.shape(shape).dims
        source = task.family.kernel(toggles, "e4m3", dims)
        ptx = compile_kernel(source, Target("sm_89")).ptx
        _, self.program = load_program(ptx, source.entry)
        case = task.problem.make_case(dims, 0, "e4m3")
        plan = task.family.launch(toggles, "e4m3", dims)
        self.run: Callable[[], Counts] = lambda: (
            run_grid(ptx, source.entry, source.block, source.dynamic_smem_bytes, plan, case.inputs, case.outputs).counts
        )


def measure_speed(job: tuple[str, str]) -> tuple[str, ...]:
    """Return the row of the first table: seconds, instructions per second, the process's peak memory."""
    launched = Launched(*job)
    start = time.perf_counter()
    counts = launched.run()
    seconds = time.perf_counter() - start
    warps, threads = sum(counts.instructions.values()), sum(counts.threads.values())
    # Not getrusage: a process has the peak of its parent there.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return *job, f"{seconds:.2f}", f"{warps / seconds:.3g}", f"{threads / seconds:.3g}", f"{int(peak) / 2**20:.2f}"


def measure_kinds(job: tuple[str, str]) -> list[tuple[str, ...]]:
    """Return by kind of instruction its share of the time of all operations, and its instructions per second."""
    launched = Launched(*job)
    spent: dict[str, float] = defaultdict(float)

    def timed(operation: Operation, kind: str) -> Operation:
        def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
            start = time.perf_counter()
            operation(m, lanes)
            spent[kind] += time.perf_counter() - start

        return run

    program = launched.program
    untimed, stretches = program.operations, program.stretches
    program.stretches = {False: {}, True: {}}  # machine code has no times by instruction
    program.operations = [o and timed(o, kind) for o, kind in zip(untimed, program.keys, strict=True)]
    start = time.perf_counter()
    counts = launched.run()
    total = time.perf_counter() - start
    program.operations, program.stretches = untimed, stretches  # a program is kept for the next run
    rows = [
        (
            kind,
            str(counts.instructions[kind]),
            f"{s:.2f}",
            f"{100 * s / total:.1f} %",
            f"{counts.instructions[kind] / s:.3g}",
        )
        for kind, s in sorted(spent.items(), key=lambda item: -item[1])[:_SHOWN]
    ]
    rest = total - sum(spent.values())
    return [*rows, ("scheduler and counts of executions", "", f"{rest:.2f}", f"{100 * rest / total:.1f} %", "")]


def measure_functions(job: tuple[str, str]) -> list[tuple[str, ...]]:
    """Return the interpreter's functions with the most self time, by cProfile."""
    launched = Launched(*job)
    profile = cProfile.Profile()
    profile.runcall(launched.run)
    stats: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    largest = sorted(stats.items(), key=lambda item: -item[1][2])[:_SHOWN]
    return [
        (f"{Path(file).name}:{line} {name}" if line else name, str(calls), f"{own:.2f}", f"{100 * own / total:.1f} %")
        for (file, line, name), (_, calls, own, _, _) in largest
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print. The tests check results."""
    parser = make_parser("emulator_speed", __doc__)
    parser.add_argument("--shapes", type=words, default=["small", "mission"])
    parser.add_argument("--variants", type=words, default=None)
    parser.add_argument("--details", type=words, default=["stage1", "stage2"])
    parser.add_argument("--md", type=Path, help="also write the tables to this file")
    args = parser.parse_args(argv)
    rungs = args.variants or [rung.name for rung in find_task("fp8_sdpa").config.rungs]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as alone:
        rows = alone.map(measure_speed, [(name, shape) for name in rungs for shape in args.shapes], chunksize=1)
        tables = [table(SPEED, rows, right=SPEED[2:])]
        for name in args.details:
            job = (name, args.shapes[-1])
            tables.append(f"{name}, {job[1]}:\n\n{table(KINDS, alone.apply(measure_kinds, (job,)), right=KINDS[1:])}")
            tables.append(table(FUNCTIONS, alone.apply(measure_functions, (job,)), right=FUNCTIONS[1:]))
    text = "\n\n".join(tables)
    show(text)
    if args.md:
        args.md.write_text(text + "\n", encoding="utf-8")
