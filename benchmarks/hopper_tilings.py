"""Time every tiling of the Hopper kernel that a space allows, at several lengths, and keep them as T4 files.

    python -m benchmarks hopper_tilings compile            # without a GPU: fill the build cache
    python -m benchmarks hopper_tilings time --out FOLDER  # a file per head dim, mask, scales, format and length
    python -m benchmarks hopper_tilings confirm --out FOLDER  # once more the best ones of these files, in a new process

Each tiling is first checked against float64 on a small shape. The tilings of a cell then run in rounds, shuffled, on
the same buffers. The tiling that greenfast takes without measured rules, ``shipped``, runs eight times in each round,
so that a drift of the clock shows. The time of a tiling is the median of its rounds. The best of many is in part lucky,
so the best ones run again in rounds of their own beside the shipped one: ``confirmed``, for each process.
scripts/update_results.py derives the rules from these.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import make_parser
from benchmarks.timing import interleave
from greenfast.device.compiler import CompiledKernel, compile_kernel
from greenfast.device.gpu import Gpu, GuardedBuffer
from greenfast.device.session import Executable
from greenfast.evolve.space import Space, read_space
from greenfast.judge.error_metrics import worst_bound_ratio
from greenfast.judge.implementation import build_image
from greenfast.judge.store import read_json, to_json, write_whole
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention import hopper, tuning_space
from greenfast.kernels.attention.config import FORMATS, QUERY_BLOCK, ROW_BLOCK, AttentionConfig, read_dims
from greenfast.kernels.attention.heuristics import planned
from greenfast.spec.errors import CompileError, MachineError, UsageError
from greenfast.spec.problem import Case, to_dtype
from tasks.fp8_attention import problem as attention

LENGTHS = (1024, 4096, 16384)
TOKENS = 16384  # batch times length
COLUMNS = 2048  # heads times head dim
SPACES = Path(__file__).parents[1] / "tasks" / "fp8_attention"
SCALES: dict[str, dict[str, int]] = {
    "head": {},
    "block": {"QBLOCK": QUERY_BLOCK, "KBLOCK": ROW_BLOCK, "VBLOCK": ROW_BLOCK},
}
_ROUNDS, _SHIPPED = 5, 8
_BEST, _CONFIRMING = 4, 12
_SAMPLE_US = 600.0
#: The tilings that can be fast on a full GPU.
_WIDE = "several warpgroups, 256 keys or more in flight, polynomials where they are legal, without spills"
#: Bytes that a kernel may spill to be timed.
_MOST_SPILLS = 64
#: The shape of the check: a tail in queries and keys, and more tiles than stages.
_CHECKED = {"B": 1, "H": 2, "S": 1100}

Dims = dict[str, int]
Toggles = dict[str, int]


def read_tiling_space(head_dim: int) -> Space:
    """Read the tilings of a head dim."""
    return read_space(SPACES / f"space_d{head_dim}.json")


@dataclass(frozen=True)
class Group:
    """Kernels that differ in their tiling alone."""

    head_dim: int
    causal: bool
    scales: str
    fmt: str

    def dims(self, **sizes: int) -> Dims:
        """Return a shape with these sizes."""
        return sizes | {"D": self.head_dim} | ({"CAUSAL": 1} if self.causal else {}) | SCALES[self.scales]

    def filling(self, length: int) -> Dims:
        """Return a shape of a length that fills the GPU."""
        return self.dims(B=TOKENS // length, H=COLUMNS // self.head_dim, S=length)

    def points(self, wide: bool) -> list[Toggles]:
        """Return the legal tilings of the space. wide: only those that can be fast on a full GPU."""
        config, _ = read_dims(self.dims(B=1, H=1, S=1), self.fmt)
        if self.scales == "block":  # then sdpa has Q quantized in the kernel, which takes shared memory
            config = replace(config, fuse_q_quant=True)
        tilings = [
            {name: int(value) for name, value in point.items()} for point in read_tiling_space(self.head_dim).listed()
        ]
        return [t for t in tilings if _allowed(t, config) and (not wide or _can_be_fast(t, self.head_dim))]

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        more = "" if self.scales == "head" and self.fmt == FORMATS[0] else f"_{self.scales}_{self.fmt}"
        return f"d{self.head_dim}_{mask}{more}"


def _allowed(toggles: Toggles, config: AttentionConfig) -> bool:
    try:
        tuning_space.parse_tiles(toggles, config)
    except UsageError:
        return False
    return True


def _can_be_fast(t: Toggles, head_dim: int) -> bool:
    """Return whether a tiling is in ``_WIDE``, spills aside."""
    stages = (2, 3) if t["BLOCK_N"] > 128 or head_dim == 256 else (3, 4)
    fits = (
        t["OVERLAP"] == int(t["OUT_COLUMNS"] == 256) if head_dim == 256 else not (t["CONSUMERS"] == 4 and t["OVERLAP"])
    )
    polynomials = t["POLYNOMIALS"] > 0 or t["OUT_COLUMNS"] == 256
    return t["CONSUMERS"] > 1 and t["STAGES"] in stages and fits and polynomials


def compile_tiling(toggles: Toggles, dims: Dims, fmt: str) -> CompiledKernel:
    """Compile the kernel of a tiling. It is the same for every length."""
    return compile_kernel(tuning_space.kernel(toggles, fmt, dims), hopper.TARGET)


def _compile(job: tuple[Toggles, Dims, str]) -> str:
    try:
        compile_tiling(*job)
    except CompileError as e:
        return str(e).splitlines()[0]
    return ""


def compile_all(groups: list[Group], wide: bool) -> None:
    """Fill the build cache with all kernels."""
    jobs = [(t, group.filling(LENGTHS[0]), group.fmt) for group in groups for t in group.points(wide)]
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        failed = [why for why in pool.map(_compile, jobs, chunksize=4) if why]
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s, {len(failed)} do not compile", *failed[:3])


def get_shipped_tiling(dims: Dims, fmt: str, multiprocessors: int = hopper.TARGET.multiprocessors) -> Toggles:
    """Return the tiling of a shape without measured rules."""
    tiles, _ = planned(*read_dims(dims, fmt), multiprocessors)
    return {name: int(getattr(tiles, field)) for name, field in tuning_space.TOGGLES.items()}


def build_executable(toggles: Toggles | None, dims: Dims, fmt: str) -> tuple[Executable, CompiledKernel]:
    """Build the executable of a tiling. None: the shipped one."""
    if toggles is None:
        toggles = get_shipped_tiling(dims, fmt)
    kernel = compile_tiling(toggles, dims, fmt)
    return Executable.single(build_image(kernel), tuning_space.launch(toggles, fmt, dims)), kernel


def find_fault(gpu: Gpu, toggles: Toggles, dims: Dims, fmt: str, case: Case, references: Any) -> str:
    """Return the fault of a tiling on a small shape; empty for a correct one."""
    bound = gpu.bind(build_executable(toggles, dims, fmt)[0], case)
    out, violations = attention.decode(bound.run(), fmt), bound.violations()
    bound.free()
    if violations:
        return violations[0]
    if not np.isfinite(out).all():
        return "an output is not finite"
    ratio = worst_bound_ratio(out, references.exact, references.get_bound("e4m3_polynomial"))
    return "" if ratio <= 1 else f"an error is {ratio:.2f} of its bound"


class TilingCell:
    """The buffers of a shape, and the tilings that run on them."""

    def __init__(self, gpu: Gpu, dims: Dims, fmt: str) -> None:
        self._gpu, self.dims, self.fmt = gpu, dims, fmt
        one = attention.make_case({**dims, "B": 1, "H": 1}, 0, fmt)
        heads = dims["B"] * dims["H"]
        self._buffers: dict[str, GuardedBuffer] = {}
        for name, array in one.inputs.items():
            self._buffers[name] = buffer = GuardedBuffer(array.nbytes * heads)
            buffer.upload(np.ascontiguousarray(np.tile(array, (heads, *(1 for _ in array.shape[1:])))))
        for name, spec in one.outputs.items():
            self._buffers[name] = GuardedBuffer(heads * int(np.prod(spec.shape)) * to_dtype(spec.dtype).itemsize)

    def launches(self, toggles: Toggles | None) -> list[Any]:
        """Return the launches of a tiling on these buffers."""
        pointers = {name: buffer.pointer for name, buffer in self._buffers.items()}
        return list(self._gpu.prepare(build_executable(toggles, self.dims, self.fmt)[0], pointers))

    def sample(self, launches: list[Any], count: int) -> float:
        """Measure the microseconds per launch of ``count`` consecutive launches, after an untimed one."""
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


@dataclass(frozen=True)
class Times:
    """Microseconds of a cell: per tiling by round, and of the shipped tiling.

    confirmed: times of the best tilings in rounds of their own, by number. shipped_beside: times of the shipped tiling
    in those rounds, two per round.
    """

    found: list[list[float]]
    shipped: list[float]
    confirmed: dict[int, list[float]]
    shipped_beside: list[float]


class TilingRounds:
    """Tilings of a cell, by number, and the shipped one, -1, timed in rounds."""

    def __init__(self, cell: TilingCell, of: list[Toggles], seed: int) -> None:
        self._cell, self._rng = cell, random.Random(seed)
        self._programs = {n: cell.launches(t) for n, t in enumerate(of)} | {-1: cell.launches(None)}
        firsts = {n: cell.sample(program, 1) for n, program in self._programs.items()}
        self._counts = {n: max(1, min(20, round(_SAMPLE_US / us))) for n, us in firsts.items()}

    def times(self, numbers: list[int], rounds: int) -> dict[int, list[float]]:
        """Measure the microseconds of these tilings, round by round. A repeated number runs repeatedly in a round."""
        samples = {i: partial(self._cell.sample, self._programs[n], self._counts[n]) for i, n in enumerate(numbers)}
        measured = interleave(samples, rounds, arrange=lambda keys, _: self._rng.sample(keys, len(keys)))
        times: dict[int, list[float]] = {n: [] for n in numbers}
        for of_round in zip(*measured.values(), strict=True):
            for n, us in zip(numbers, of_round, strict=True):
                times[n].append(us)
        return times


def time_cell(gpu: Gpu, dims: Dims, fmt: str, right: list[Toggles], rounds: int) -> Times:
    """Time the tilings of a cell."""
    cell = TilingCell(gpu, dims, fmt)
    race = TilingRounds(cell, right, 0)
    times = race.times([*range(len(right)), *(-1 for _ in range(_SHIPPED))], rounds)
    of_shipped = times.pop(-1)
    best = sorted(times, key=lambda n: statistics.median(times[n]))[:_BEST]
    confirmed = race.times([*best, -1, -1], _CONFIRMING)
    beside = confirmed.pop(-1)
    cell.free()
    return Times([times[n] for n in range(len(right))], of_shipped, confirmed, beside)


def confirm(group: Group, length: int, file: Path, best: int) -> None:
    """Time the ``best`` tilings of the file's first process again, and add them to the file as another process."""
    content = read_json(file, dict[str, Any], "T4 file")
    processes = content["metadata"]["confirmed"]
    first = sorted(processes[0]["tilings"], key=lambda of: statistics.median(of["ms"]))[:best]
    right = [of["configuration"] for of in first]
    gpu = Gpu()
    if gpu.info().name != content["metadata"]["device"]:
        raise UsageError(f"{file}: it is of {content['metadata']['device']}, this is {gpu.info().name}")
    cell = TilingCell(gpu, group.filling(length), group.fmt)
    times = TilingRounds(cell, right, len(processes)).times([*range(len(right)), -1, -1], _CONFIRMING)
    beside = times.pop(-1)
    cell.free()
    processes.append(_process(right, times, beside))
    _store(file, content)
    print(f"{file.stem}: {[round(statistics.median(beside) / statistics.median(t), 3) for t in times.values()]}")


def format_t4_row(toggles: Toggles, times: list[float], why: str, kernel: CompiledKernel | None) -> dict[str, Any]:
    """Format one configuration for a T4 file."""
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


def time_all(groups: list[Group], lengths: list[int], wide: bool, out: Path, rounds: int) -> None:
    """Check and time all tilings; write the files of each group once it is done."""
    gpu = Gpu()
    out.mkdir(parents=True, exist_ok=True)
    for group in groups:
        rows: list[tuple[Toggles, str, CompiledKernel | None]] = []
        small = group.dims(**_CHECKED)
        case = attention.make_case(small, 0, group.fmt)
        references = attention.references(small, 0, group.fmt)
        for toggles in group.points(wide):
            try:
                kernel = compile_tiling(toggles, small, group.fmt)
            except CompileError as e:
                rows.append((toggles, str(e).splitlines()[0], None))
                continue
            spilled = kernel.resources.spill_bytes
            try:
                why = find_fault(gpu, toggles, small, group.fmt, case, references)
            except MachineError as e:
                why = str(e)
            if wide and not why and spilled > _MOST_SPILLS:
                why = f"not timed: it spills {spilled} bytes"
            rows.append((toggles, why, kernel))
        right = [toggles for toggles, why, kernel in rows if kernel is not None and not why]
        for length in lengths:
            start = time.perf_counter()
            dims = group.filling(length)
            times = time_cell(gpu, dims, group.fmt, right, rounds)
            by_point = dict(zip(map(_key, right), times.found, strict=True))
            results = [format_t4_row(t, by_point.get(_key(t), []), why, kernel) for t, why, kernel in rows]
            _write(gpu, out / f"{group}_s{length}.json", dims, group.fmt, wide, results, times, right)
            n, best = min(
                ((n, statistics.median(t)) for n, t in times.confirmed.items()),
                key=lambda at: at[1],
                default=(-1, float("nan")),
            )
            usual = statistics.median(times.shipped_beside)
            print(
                f"{group} {length}: {len(right)} of {len(rows)} right, best {best:.1f} us "
                f"({_tflops(dims, best):.0f} TFLOP/s), shipped {usual:.1f} us, {usual / best:.3f}x, "
                f"{list(right[n].values()) if right else ''}, {time.perf_counter() - start:.1f} s",
                flush=True,
            )


def _key(toggles: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(toggles.items()))


def _tflops(dims: Dims, us: float) -> float:
    flops = 4 * dims["B"] * dims["H"] * dims["S"] ** 2 * dims["D"] / (2 if "CAUSAL" in dims else 1)
    return flops / us / 1e6


def _write(
    gpu: Gpu, file: Path, dims: Dims, fmt: str, wide: bool, results: list[dict[str, Any]], times: Times,
    right: list[Toggles],
) -> None:  # fmt: skip
    info = gpu.info()
    content = {
        "schema_version": "1.0.0",
        "metadata": {
            "device": info.name,
            "driver": info.driver,
            "shape": dims,
            "format": fmt,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "git": os.environ.get("GREENFAST_GIT_SHA", ""),
            "covered": _WIDE if wide else "the whole space",
            "method": "median of rounds in shuffled order on the same buffers; times in ms",
            "shipped": get_shipped_tiling(dims, fmt, info.sm_count),
            "shipped_ms": _ms(times.shipped),
            "confirmed": [_process(right, times.confirmed, times.shipped_beside)],
        },
        "results": results,
    }
    _store(file, content)


def _store(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, to_json(content))


def _process(right: list[Toggles], confirmed: dict[int, list[float]], shipped: list[float]) -> dict[str, Any]:
    """Format one process's measurements of the best tilings."""
    of_tilings = [{"configuration": right[n], "ms": _ms(times)} for n, times in confirmed.items()]
    return {"shipped_ms": _ms(shipped), "tilings": of_tilings}


def _ms(times: list[float]) -> list[float]:
    return [round(us / 1e3, 6) for us in times]


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, time or confirm the tilings of the options."""
    parser = make_parser("hopper_tilings", __doc__)
    parser.add_argument("what", choices=("compile", "time", "confirm"))
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--scales", nargs="+", choices=tuple(SCALES), default=["head"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["e4m3"])
    parser.add_argument("--wide", action="store_true", help="only tilings that can be fast on a full GPU")
    parser.add_argument("--best", type=int, default=2, help="of confirm: how many tilings of a file")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("results") / "hopper_tilings")
    args = parser.parse_args(argv)
    groups = [
        Group(d, mask == "causal", scales, fmt)
        for fmt, scales, d, mask in product(args.formats, args.scales, args.head_dims, args.masks)
    ]
    if args.what == "compile":
        compile_all(groups, args.wide)
    elif args.what == "confirm":
        files = [(group, n, args.out / f"{group}_s{n}.json") for group in groups for n in args.lengths]
        for group, length, file in files:
            if file.is_file():
                confirm(group, length, file, args.best)
    else:
        time_all(groups, args.lengths, args.wide, args.out, args.rounds)
