"""Time the ladder's kernels compiled cold and loaded from the cache. Needs no GPU.

python -m benchmarks compile_time [--targets sm_89,sm_90a] [--formats e4m3,int8] [--json FILE]

The cache is a temporary folder, so every first compile is cold. The cached times are each kernel's first load in a new
process, as in the next run of a command.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from greenfast.cli.options import words
from greenfast.device.compiler import compile_kernel
from greenfast.device.machine_code import disassemble
from greenfast.judge.task import find_task, load_family
from greenfast.spec.arch import Target

AIM_COLD_MS, AIM_CACHED_MS = 2000.0, 50.0

Times = dict[tuple[str, str, str], tuple[float, float]]  # (rung, format, target) -> ms of compile and of disassembly


def compile_ladder(formats: list[str], targets: list[Target]) -> Times:
    """Compile and disassemble every rung once, for the task's default shape."""
    task = find_task("fp8_sdpa")
    config, family = task.config, load_family(task)
    dims = config.shape(config.defaults.shapes[-1]).dims
    times: Times = {}
    for target in targets:
        for fmt in formats:
            for rung in config.rungs:
                kernel = compile_kernel(family.kernel(config.rung_variant(rung).values, fmt, dims), target)
                start = time.perf_counter()
                disassemble(kernel.cubin, kernel.source.entry)
                times[rung.name, fmt, target.name] = kernel.compile_ms, (time.perf_counter() - start) * 1e3
    return times


def compile_in_new_process(formats: list[str], targets: list[Target]) -> Times:
    """Call ``compile_ladder`` in a new process, with nothing in memory yet."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(compile_ladder, (formats, targets))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per kernel, and the slowest of each column compared with its target."""
    parser = make_parser("compile_time", __doc__)
    parser.add_argument("--targets", type=words, default=["sm_89", "sm_90a"], help="default: sm_89,sm_90a")
    parser.add_argument("--formats", type=words, default=["e4m3"], help="default: e4m3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times there")
    args = parser.parse_args(argv)
    targets = [Target.parse(name) for name in args.targets]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GREENFAST_CACHE_DIR"] = folder
        cold = compile_in_new_process(args.formats, targets)
        cached = compile_in_new_process(args.formats, targets)

    print(f"{'rung':18} {'format':6} {'target':7} {'cold ms':>8} {'cached ms':>9} {'SASS ms':>8} {'cached ms':>9}")
    for key in cold:
        rung, fmt, target = key
        print(f"{rung:18} {fmt:6} {target:7} ", end="")
        print(f"{cold[key][0]:8.0f} {cached[key][0]:9.2f} {cold[key][1]:8.0f} {cached[key][1]:9.2f}")
    slowest = {"cold": max(ms for ms, _ in cold.values()), "cached": max(ms for ms, _ in cached.values())}
    for name, aim in (("cold", AIM_COLD_MS), ("cached", AIM_CACHED_MS)):
        held = "within" if slowest[name] <= aim else "OVER"
        print(f"slowest {name}: {slowest[name]:.1f} ms, {held} the aim of {aim:.0f} ms")
    rows = [
        {
            **dict(zip(("variant", "format", "target"), key, strict=True)),
            "cold_ms": round(cold[key][0], 1),
            "cached_ms": round(cached[key][0], 2),
            "disassembly_cold_ms": round(cold[key][1], 1),
            "disassembly_cached_ms": round(cached[key][1], 2),
        }
        for key in cold
    ]
    aims = {"cold_ms": AIM_COLD_MS, "cached_ms": AIM_CACHED_MS}
    write_measurements(args.json, "compile_time", None, cpu_count=os.cpu_count(), aims=aims, results=rows)
