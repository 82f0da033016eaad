"""The operator beside PyTorch's own attention on one GPU: device time, host time, errors; a record and a report."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from greenfast import __version__
from greenfast.bench.operator_record import INPUTS, OperatorRecord, SpeedRow
from greenfast.bench.operator_report import report
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.identity import code_hash
from greenfast.judge.artifacts import RECORD, REPORT
from greenfast.judge.environment import git_state, now, package_versions
from greenfast.judge.freshness import of_build, of_launch
from greenfast.judge.record import TimedKernel
from greenfast.judge.store import check_writable, new_run_folder, read_json, to_json
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.freshness import STALE, Freshness, worst
from greenfast.spec.kernel import KernelSource

#: The folder of runs below ``out``.
RESULTS = "operator"


@dataclass(frozen=True)
class OperatorOutcome:
    """A record, and the folder that holds it with its report."""

    record: OperatorRecord
    folder: Path


def measure_operator(out: Path, command: str, watch: Callable[[list[SpeedRow]], None]) -> OperatorOutcome:
    """Measure, and write record and report below ``out``; ``watch`` is told the rows of each shape as it is done.

    Raises MachineError without a Hopper GPU that PyTorch can use, and WrongResultError for a result that is not right.
    """
    # By its name, as kernel families are loaded: what only reads records needs no PyTorch.
    measure: Any = importlib.import_module("greenfast.bench.operator_calls")
    measure.require_gpu()
    parent = out / RESULTS
    check_writable(parent)
    gpu, speed = Gpu(0), []
    for dims in measure.shapes():
        found = measure.speed(dims)
        clocks = gpu.clocks()
        rows = [msgspec.structs.replace(row, clocks=clocks) for row in found]
        watch(rows)
        speed += rows
    started = now()
    record = OperatorRecord(
        created=started.isoformat(),
        command=command,
        package_version=__version__,
        git=git_state(),
        device=gpu.info(),
        environment=package_versions() | measure.library_versions(),
        kernels=timed_kernels(),
        speed=speed,
        host=measure.host(),
        errors=[row for kind in INPUTS for row in measure.errors(kind)],
    )
    with new_run_folder(parent, started.strftime("%Y%m%d-%H%M%S")) as (work, publish):
        (work / RECORD).write_text(to_json(record), encoding="utf-8")
        (work / REPORT).write_text(report(record), encoding="utf-8")
        return OperatorOutcome(record, publish())


def read_operator_record(path: Path) -> OperatorRecord:
    """The record of such a run. Raises UsageError for anything else."""
    record: OperatorRecord = read_json(path, OperatorRecord, "record of the operator")
    return record


def timed_kernels() -> dict[str, TimedKernel]:
    """What would be timed today, by what it is for; compiles it. Needs no GPU."""
    measure: Any = importlib.import_module("greenfast.bench.operator_calls")
    found = {}
    for name, (source, facts) in measure.timed_kernels().items():
        compiled = compile_kernel(source, measure.TARGET)
        found[name] = TimedKernel(
            arch=compiled.target.name,
            options=list(compiled.options),
            compiler=compiled.compiler,
            kernel_hash=compiled.kernel_hash,
            code_hash=code_hash(compiled),
            launch=facts,
        )
    return found


def freshness(record: OperatorRecord) -> Freshness:
    """Whether the kernels that were timed, and their launches, are today's."""
    measure: Any = importlib.import_module("greenfast.bench.operator_calls")
    today: dict[str, tuple[KernelSource, LaunchFacts]] = measure.timed_kernels()
    answers = [
        Freshness(STALE, (f"{name} is {'not in the record' if name in today else 'timed no more'}",))
        for name in sorted(today.keys() ^ record.kernels.keys())
    ]
    for name, then in record.kernels.items():
        if name in today:
            source, facts = today[name]
            answers += [of_build(name, then, source), of_launch(name, then.launch, facts)]
    return worst(answers)
