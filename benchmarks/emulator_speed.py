"""How fast the emulator runs the ladder: seconds and emulated instructions per second, by rung.

python benchmarks/emulator_speed.py [--shapes small,mission] [--variants stage2,...]
"""

from __future__ import annotations

import argparse
import time

from greenfast.build.compiler import compile_kernel
from greenfast.cli.console import show, table
from greenfast.cli.options import words
from greenfast.emulator.grid import program_of, run_grid
from greenfast.pipeline.tasks import find_task, load
from greenfast.spec.arch import Target


def main() -> None:
    """Run and print; results are checked by the tests, not here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=words, default=["small", "mission"])
    parser.add_argument("--variants", type=words, default=None)
    args = parser.parse_args()
    task = load(find_task("fp8_sdpa"))
    rows = []
    for name in args.variants or [rung.name for rung in task.config.rungs]:
        for shape in (task.config.shape(s) for s in args.shapes):
            toggles = task.config.variant(name).values
            source = task.family.kernel(toggles, "e4m3", shape.dims)
            ptx = compile_kernel(source, Target("sm_89")).ptx
            program_of(ptx, source.entry)
            case = task.problem.make_case(shape.dims, 0, "e4m3")
            plan = task.family.launch(toggles, "e4m3", shape.dims)
            start = time.perf_counter()
            counts = run_grid(
                ptx, source.entry, source.block, source.dynamic_smem_bytes, plan, case.inputs, case.outputs
            ).counts
            seconds = time.perf_counter() - start
            warps, threads = sum(counts.instructions.values()), sum(counts.threads.values())
            rows.append((name, shape.name, f"{seconds:.2f}", f"{warps / seconds:.3g}", f"{threads / seconds:.3g}"))
    show(table(("variant", "shape", "seconds", "warp instructions/s", "thread instructions/s"), rows))


if __name__ == "__main__":
    main()
