"""Results of a search in the T4 format of Kernel Tuner and other tuners.

The format: https://github.com/odgaard/TuningSchema, branch T4, version 1.0.0. Times are in milliseconds, as in Kernel
Tuner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from greenfast.evolve.proposal import Descriptor, Evaluation
from greenfast.evolve.space import Value
from greenfast.judge.store import read_json
from greenfast.spec.errors import UsageError

Invalidity = Literal["timeout", "compile", "runtime", "correctness", "constraints", "correct"]
VERSION = "1.0.0"
#: Names of measurements: the time (the objective), the estimate from counts, and the kernel's descriptor.
TIME, ESTIMATE, PIPE, SMEM, REGISTERS = "time", "estimate", "pipe", "smem_bytes", "registers"
_UNITS = {TIME: "ms", ESTIMATE: "", PIPE: "", SMEM: "bytes", REGISTERS: ""}
_STAGES: dict[str, Invalidity] = {
    "space": "constraints",
    "BUILD": "compile",
    "RESOURCES": "constraints",
    "CORRECTNESS": "correctness",
    "race": "runtime",
    "validate": "correctness",
}


class T4Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A named value."""

    name: str
    value: float | str | list[Any] | None
    unit: str = ""


class T4Times(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The times of an evaluation in milliseconds: on the GPU, and of all stages."""

    benchmark: float | None = None
    framework: float | None = None


class T4Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one configuration."""

    configuration: dict[str, Value]
    times: T4Times
    invalidity: Invalidity
    correctness: float
    timestamp: str = ""
    objectives: list[str] = []
    measurements: list[T4Measurement] = []

    @property
    def measured(self) -> dict[str, float | str]:
        """The scalar measurements by name."""
        return {m.name: m.value for m in self.measurements if isinstance(m.value, (int, float, str))}


class T4Results(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file. metadata: greenfast's description of the measurement; other tools ignore it."""

    results: list[T4Result]
    schema_version: str = VERSION
    metadata: dict[str, Any] = {}


def read_t4(path: Path) -> T4Results:
    """Read a file. Raises UsageError with its fault."""
    content: T4Results = read_json(path, T4Results, "T4 file of tuning results")
    if not content.results:
        raise UsageError(f"{path}: no results in it")
    return content


def build_results(evaluations: Iterable[Evaluation], metadata: Mapping[str, Any]) -> T4Results:
    """Convert evaluations to results. Duplicates and candidates with edits are left out: the format has no edits."""
    exported = [e for e in evaluations if e.stage != "duplicate" and not e.candidate.edits]
    return T4Results(results=[_result(e) for e in exported], metadata=dict(metadata))


def _result(e: Evaluation) -> T4Result:
    behaviour = e.behaviour or Descriptor()
    figures: dict[str, float | str | None] = {
        TIME: e.fitness * 1e3 if e.fitness is not None and e.fitness_kind == "seconds" else None,
        ESTIMATE: e.fitness if e.fitness_kind == "estimate" else None,
        PIPE: behaviour.pipe or None,
        SMEM: behaviour.smem_bytes if e.behaviour else None,
        REGISTERS: behaviour.registers if e.behaviour else None,
    }
    return T4Result(
        configuration=e.candidate.parameters,
        times=T4Times(framework=e.cost_seconds * 1e3, benchmark=e.gpu_seconds * 1e3),
        invalidity="correct" if e.valid else _STAGES.get(e.stage, "runtime"),
        correctness=float(e.valid),
        objectives=[TIME],
        measurements=[T4Measurement(name=n, value=v, unit=_UNITS[n]) for n, v in figures.items() if v is not None],
    )
