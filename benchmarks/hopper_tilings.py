"""Time every tiling of the Hopper kernel that a space allows, at several lengths, and keep them as T4 files.

    python -m benchmarks.hopper_tilings compile            # without a GPU: fill the build cache
    python -m benchmarks.hopper_tilings time --out FOLDER  # a file per head dim, mask and length

Each tiling is first checked against float64 on a small shape. The tilings of a cell then run in rounds, in another
order each time, all on the same buffers; the shipped tiling runs among them, eight times in each round, so that a drift
of the clock shows. The time of a tiling is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.executable import Executable
from greenfast.device.gpu import Gpu, GuardedBuffer
from greenfast.evolve.space import Space, read_space
from greenfast.judge.errors import worst_bound_ratio
from greenfast.judge.gates.sides import image_of
from greenfast.kernels.attention import hopper, tilings
from greenfast.kernels.attention.config import read_dims
from greenfast.kernels.attention.tiling import tiling
from greenfast.problems import attention
from greenfast.spec.errors import CompileError, MachineError
from greenfast.spec.problem import Case, dtype_of

HEAD_DIMS = (64, 128, 256)
LENGTHS = (1024, 4096, 16384)
TOKENS = 16384  # batch times length
COLUMNS = 2048  # heads times head dim
SPACES = Path(__file__).parents[1] / "tasks" / "fp8_attention"
_ROUNDS, _SHIPPED = 5, 8
_SAMPLE_US = 600.0
#: Of the check: a tail in queries and keys, and more tiles than stages.
_CHECKED = {"B": 1, "H": 2, "S": 1100}

Dims = dict[str, int]
Toggles = dict[str, int]


def space_of(head_dim: int) -> Space:
    """The tilings of a head dim."""
    return read_space(SPACES / f"space_d{head_dim}.json")


def dims_of(head_dim: int, causal: bool, length: int) -> Dims:
    """A shape that fills the GPU."""
    dims = {"B": TOKENS // length, "H": COLUMNS // head_dim, "S": length, "D": head_dim}
    return dims | ({"CAUSAL": 1} if causal else {})


def points(head_dim: int) -> list[Toggles]:
    """All tilings of the space."""
    return [{name: int(value) for name, value in point.items()} for point in space_of(head_dim).listed()]


def compiled(toggles: Toggles, dims: Dims) -> CompiledKernel:
    """The kernel of a tiling; the length does not matter to it."""
    return compile_kernel(tilings.kernel(toggles, "e4m3", dims), hopper.TARGET)


def _compile(job: tuple[Toggles, Dims]) -> str:
    try:
        compiled(*job)
    except CompileError as e:
        return str(e).splitlines()[0]
    return ""


def compile_all(head_dims: list[int], masks: list[str]) -> None:
    """Fill the build cache with all kernels."""
    jobs = [(t, dims_of(d, mask == "causal", 1024)) for d in head_dims for mask in masks for t in points(d)]
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        failed = [why for why in pool.map(_compile, jobs, chunksize=4) if why]
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s, {len(failed)} do not compile", *failed[:3])


def executable(toggles: Toggles | None, dims: Dims) -> tuple[Executable, CompiledKernel]:
    """What the device runs for a tiling, or for the shipped one."""
    config, sizes = read_dims(dims, "e4m3")
    if toggles is None:
        kernel = compile_kernel(hopper.kernel(config, sizes), hopper.TARGET)
        return Executable.single(image_of(kernel), hopper.launch(config, sizes)), kernel
    kernel = compiled(toggles, dims)
    return Executable.single(image_of(kernel), tilings.launch(toggles, "e4m3", dims)), kernel


def checked(gpu: Gpu, toggles: Toggles, head_dim: int, causal: bool, case: Case, references: Any) -> str:
    """Why a tiling is wrong on the small shape, or empty."""
    dims = {**_CHECKED, "D": head_dim, **({"CAUSAL": 1} if causal else {})}
    bound = gpu.bind(executable(toggles, dims)[0], case)
    out, violations = attention.decode(bound.run(), "e4m3"), bound.violations()
    bound.free()
    if violations:
        return violations[0]
    if not np.isfinite(out).all():
        return "an output is not finite"
    ratio = worst_bound_ratio(out, references.exact, references.bound_of("e4m3_polynomial"))
    return "" if ratio <= 1 else f"an error is {ratio:.2f} of its bound"


class Cell:
    """The buffers of a shape, and the tilings that run on them."""

    def __init__(self, gpu: Gpu, dims: Dims) -> None:
        self._gpu, self.dims = gpu, dims
        one = attention.make_case({**dims, "B": 1, "H": 1}, 0, "e4m3")
        heads = dims["B"] * dims["H"]
        self._buffers: dict[str, GuardedBuffer] = {}
        for name, array in one.inputs.items():
            self._buffers[name] = buffer = GuardedBuffer(array.nbytes * heads)
            buffer.upload(np.ascontiguousarray(np.tile(array, (heads, *(1 for _ in array.shape[1:])))))
        for name, spec in one.outputs.items():
            self._buffers[name] = GuardedBuffer(heads * int(np.prod(spec.shape)) * dtype_of(spec.dtype).itemsize)

    def launches(self, toggles: Toggles | None) -> list[Any]:
        """A tiling's launches on these buffers."""
        pointers = {name: buffer.pointer for name, buffer in self._buffers.items()}
        return list(self._gpu.prepare(executable(toggles, self.dims)[0], pointers))

    def sample(self, launches: list[Any], count: int) -> float:
        """Microseconds of one of ``count`` consecutive launches, after one that is not timed."""
        for launch in launches:
            launch()
        start = self._gpu.mark()
        for _ in range(count):
            for launch in launches:
                launch()
        end = self._gpu.mark()
        self._gpu.stream.sync()
        return float((end - start) * 1e3 / count)

    def free(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers.values():
            buffer.free()


def time_cell(gpu: Gpu, dims: Dims, right: list[Toggles], rounds: int) -> tuple[list[list[float]], list[float]]:
    """Per tiling its microseconds by round; and those of the shipped one."""
    cell, rng = Cell(gpu, dims), random.Random(0)
    programs = [cell.launches(t) for t in right]
    shipped = cell.launches(None)
    first = [cell.sample(p, 1) for p in programs]
    counts = [max(1, min(20, round(_SAMPLE_US / us))) for us in first]
    of_shipped = max(1, min(20, round(_SAMPLE_US / cell.sample(shipped, 1))))
    found: list[list[float]] = [[] for _ in right]
    baseline = []
    for _ in range(rounds):
        order = [*range(len(right)), *(-1 for _ in range(_SHIPPED))]
        rng.shuffle(order)
        for n in order:
            if n < 0:
                baseline.append(cell.sample(shipped, of_shipped))
            else:
                found[n].append(cell.sample(programs[n], counts[n]))
    cell.free()
    return found, baseline


def t4_row(toggles: Toggles, times: list[float], why: str, kernel: CompiledKernel | None) -> dict[str, Any]:
    """One configuration as T4 has it."""
    measured: list[dict[str, Any]] = []
    if times:
        measured.append({"name": "time", "value": round(statistics.median(times) / 1e3, 6), "unit": "ms"})
    if kernel is not None:
        used = kernel.resources
        for name, value in (
            ("registers", used.registers),
            ("smem_bytes", used.smem_bytes),
            ("spill", used.spill_bytes),
        ):
            measured.append({"name": name, "value": value, "unit": ""})
    return {
        "configuration": toggles,
        "objectives": ["time"],
        "times": {"runtimes": [round(us / 1e3, 6) for us in times]},
        "invalidity": "correct" if times else "compile" if kernel is None else "correctness",
        "correctness": int(bool(times)),
        "measurements": measured,
        **({"why": why} if why else {}),
    }


def time_all(head_dims: list[int], masks: list[str], lengths: list[int], out: Path, rounds: int) -> None:
    """Check and time all, and write the files; a head dim's are there when it is done."""
    gpu = Gpu()
    out.mkdir(parents=True, exist_ok=True)
    for head_dim in head_dims:
        for causal in (mask == "causal" for mask in masks):
            rows: list[tuple[Toggles, str, CompiledKernel | None]] = []
            small = {**_CHECKED, "D": head_dim, **({"CAUSAL": 1} if causal else {})}
            case = attention.make_case(small, 0, "e4m3")
            references = attention.references(small, 0, "e4m3")
            for toggles in points(head_dim):
                try:
                    kernel = compiled(toggles, small)
                except CompileError as e:
                    rows.append((toggles, str(e).splitlines()[0], None))
                    continue
                try:
                    why = checked(gpu, toggles, head_dim, causal, case, references)
                except MachineError as e:
                    why = str(e)
                rows.append((toggles, why, kernel))
            right = [toggles for toggles, why, kernel in rows if kernel is not None and not why]
            for length in lengths:
                start = time.perf_counter()
                dims = dims_of(head_dim, causal, length)
                found, shipped = time_cell(gpu, dims, right, rounds)
                by_point = dict(zip(map(_key, right), found, strict=True))
                results = [t4_row(t, by_point.get(_key(t), []), why, kernel) for t, why, kernel in rows]
                _write(gpu, out, dims, results, shipped)
                best = min((statistics.median(times) for times in found), default=float("nan"))
                print(
                    f"d{head_dim} {'causal' if causal else 'full'} {length}: {len(right)} of {len(rows)} right, best "
                    f"{best:.1f} us ({_tflops(dims, best):.0f} TFLOP/s), shipped {statistics.median(shipped):.1f} us, "
                    f"{time.perf_counter() - start:.1f} s",
                    flush=True,
                )


def _key(toggles: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(toggles.items()))


def _tflops(dims: Dims, us: float) -> float:
    flops = 4 * dims["B"] * dims["H"] * dims["S"] ** 2 * dims["D"] / (2 if "CAUSAL" in dims else 1)
    return flops / us / 1e6


def _write(gpu: Gpu, out: Path, dims: Dims, results: list[dict[str, Any]], shipped: list[float]) -> None:
    info = gpu.info()
    mask = "causal" if "CAUSAL" in dims else "full"
    tiles, _ = tiling(*read_dims(dims, "e4m3"), info.sm_count)
    content = {
        "schema_version": "1.0.0",
        "metadata": {
            "device": info.name,
            "driver": info.driver,
            "shape": dims,
            "format": "e4m3",
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "git": os.environ.get("GREENFAST_GIT_SHA", ""),
            "method": "median of rounds in shuffled order on the same buffers; times in ms",
            "shipped": {name: int(getattr(tiles, field)) for name, field in tilings.TOGGLES.items()},
            "shipped_ms": [round(us / 1e3, 6) for us in shipped],
        },
        "results": results,
    }
    lines = json.dumps({**content, "results": []}, indent=1)[: -len("[]\n}")]
    rows = ",\n  ".join(json.dumps(row) for row in results)
    (out / f"d{dims['D']}_{mask}_s{dims['S']}.json").write_text(f"{lines}[\n  {rows}\n ]\n}}\n")


def main() -> None:
    """Read the options and do what they say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("compile", "time"))
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("results") / "hopper_tilings")
    args = parser.parse_args()
    if args.what == "compile":
        compile_all(args.head_dims, args.masks)
    else:
        time_all(args.head_dims, args.masks, args.lengths, args.out, args.rounds)


if __name__ == "__main__":
    main()
