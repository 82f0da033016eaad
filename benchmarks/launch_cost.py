"""Measure the host time of one launch through the runtime. Needs a GPU.

python -m benchmarks launch_cost [--device 0] [--batches 200] [--json FILE]

Each way of launching is timed over batches of launches that are queued without waiting. The queue is empty when a batch
begins and has room for far more launches, so the host never waits for the device within a batch. The batches of the
ways are interleaved, so that a drift of the clock affects all of them. The kernel is stage2 on shape small.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.timing import interleave
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Bound, Gpu
from greenfast.device.helper_kernels import Instruments
from greenfast.device.rotating_buffers import Rotation
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.implementation import build_side
from greenfast.judge.task import load
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import Case

AIM_US = 10.0
VARIANT, SHAPE = "stage2", "small"
LAUNCHES = 100  # per batch; the driver's queue takes about a thousand before a launch waits
WARMUP_BATCHES = 5


@dataclass(frozen=True)
class LaunchCost:
    """Host time of one call in microseconds: the median over batches, and the 10th and 90th percentile."""

    what: str
    median_us: float
    p10_us: float
    p90_us: float


def compile_empty_kernel(target: Target) -> KernelImage:
    """Compile a kernel that does nothing."""
    source = KernelSource("empty", 'extern "C" __global__ void empty() {}\n', "empty.cu", (), (32, 1, 1))
    return KernelImage(compile_kernel(source, target).cubin, source.entry, source.block, 0)


def build_program(target: Target) -> tuple[Executable, Case]:
    """Build the kernel of the task, and its case."""
    task = load("fp8_sdpa")
    config = task.config
    shape, fmt = config.shape(SHAPE), config.defaults.format
    side = build_side("timed", task.family, config.variant(VARIANT), fmt, [shape], target)
    case = task.problem.make_case(shape.dims, config.seeds[0], fmt)
    return side.executable(shape.name), case


def measure(gpu: Gpu, ways: dict[str, Callable[[], None]], batches: int) -> list[LaunchCost]:
    """Measure the host time per call of each way; waiting for the device is outside the timed part."""

    def time_batch(call: Callable[[], None]) -> float:
        gpu.stream.sync()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        return (time.perf_counter() - start) / LAUNCHES * 1e6

    gc.collect()
    gc.disable()
    try:
        samples = interleave({what: partial(time_batch, call) for what, call in ways.items()}, batches, WARMUP_BATCHES)
        gpu.stream.sync()
    finally:
        gc.enable()
    return [
        LaunchCost(what, *(round(float(np.quantile(us, q)), 3) for q in (0.5, 0.1, 0.9)))
        for what, us in samples.items()
    ]


def list_launches(bound: Bound, empty: Bound) -> dict[str, Callable[[], None]]:
    """Return the runtime's launch, the smallest launch, and the loop alone."""
    return {
        "Bound.launch": bound.launch,
        "Bound.launch, empty kernel, no arguments": empty.launch,
        "a Python call that does nothing": lambda: None,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the cost of each way; exit 3 without a GPU."""
    parser = make_parser("launch_cost", __doc__)
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU's number (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=200, metavar="N", help="timed batches (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times there")
    args = parser.parse_args(argv)
    if args.batches < 2:
        parser.error("--batches: give at least 2")
    gpu = Gpu(args.device)
    target = Target.of_device(gpu.capability)
    kernel = build_program(target)
    empty = Executable.single(compile_empty_kernel(target), Launch((1, 1, 1), ())), Case({}, {})
    costs = measure(gpu, list_launches(gpu.bind(*kernel), gpu.bind(*empty)), args.batches)
    instruments = Instruments(gpu)
    device_us = {}
    for what, (executable, case) in (
        (f"{VARIANT} on {SHAPE}", kernel),
        ("an empty kernel, the smallest measurable", empty),
    ):
        timed = Rotation(gpu, instruments, executable, [case]).time(20, 200, cold=False, seed=0)
        device_us[what] = statistics.median(timed[0])
    runtime = costs[0].median_us
    info = gpu.info()
    print(
        f"{info.name}, driver {info.driver}; {VARIANT} on {SHAPE}, {LAUNCHES} launches a batch, {args.batches} batches"
    )
    print(f"\n{'host time of one launch, µs':48} {'median':>7} {'p10':>7} {'p90':>7}")
    for cost in costs:
        print(f"{cost.what:48} {cost.median_us:7.2f} {cost.p10_us:7.2f} {cost.p90_us:7.2f}")
    held = "within" if runtime <= AIM_US else "OVER"
    print(f"\nBound.launch: {runtime:.2f} µs, {held} the aim of {AIM_US:.0f} µs")
    for what, us in device_us.items():
        print(f"device time between two events, {what}: {us:.2f} µs")
    write_measurements(
        args.json, "launch_cost", info, cpu_count=os.cpu_count(), variant=VARIANT, shape=SHAPE,
        launches_per_batch=LAUNCHES, batches=args.batches, aim_us=AIM_US, costs=costs,
        device_us={what: round(us, 3) for what, us in device_us.items()},
    )  # fmt: skip
