"""Validate the finalists with all gates, in new processes, on shapes and seeds that the search did not use."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import msgspec

from greenfast.evolve.proposal import Candidate
from greenfast.evolve.sources import copy_folder
from greenfast.evolve.stages import Stages
from greenfast.judge.artifacts import RECORD, REPORT
from greenfast.judge.digest import compute_digest
from greenfast.judge.record_schema import Record
from greenfast.judge.request import ProgressListener, Request, add_check_plan
from greenfast.judge.store import to_json, write_whole
from greenfast.judge.task import Shape
from greenfast.judge.validate import validate


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a finalist's validation.

    record: path of its record, relative to the run's folder. record_digest: digest of that record. speedup, low, high:
    speedup and confidence interval of the gated shape with the smallest gain; 0 if nothing was timed. confidence:
    corrected for the number of finalists. device, created: the GPU and the date of the timing.
    """

    decision: str
    reasons: list[str]
    record: str = ""
    record_digest: str = ""
    shape: str = ""
    speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0
    confidence: float = 0.0
    device: str = ""
    created: str = ""

    @property
    def where(self) -> str:
        """Return the device and the day in words; empty if unknown (older runs)."""
        return f"on {self.device}, {self.created[:10]}" if self.device else ""


@dataclasses.dataclass(frozen=True)
class _FullRequest(Request):
    """A request that checks the whole check plan and times only the gated shapes."""

    @property
    def built_shapes(self) -> list[Shape]:
        """All shapes of the check plan."""
        plan = self.check_plan
        shapes = [*self.shapes, *(plan.required_shapes if plan else ()), *(plan.random_shapes if plan else ())]
        return list({shape.name: shape for shape in shapes}.values())


def correct_confidence(confidence: float, finalists: int) -> float:
    """Return the confidence per verdict so that all verdicts hold together with ``confidence`` (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, finalists)


def validate_finalist(
    stages: Stages, candidate: Candidate, finalists: int, folder: Path, observer: ProgressListener
) -> Verdict:
    """Validate one of several finalists against the baseline. folder: of the run.

    Raises as ``validate`` does.
    """
    manifest, request = stages.manifest, stages.raced
    implementation = stages.implementation(candidate)
    timing = msgspec.structs.replace(
        request.timing,
        confidence=correct_confidence(manifest.confidence, finalists),
        gate_shapes=[shape.name for shape in request.shapes],
    )
    request = dataclasses.replace(request, timing=timing, seeds=list(request.task.config.seeds))
    timed = request.shapes
    request = add_check_plan(request, implementation.rung or stages.sources.rung, chosen=False)
    whole = _FullRequest(**{field.name: getattr(request, field.name) for field in dataclasses.fields(request)})
    request = dataclasses.replace(whole, shapes=timed)
    outcome = validate(request, stages.baseline(), implementation, observer, required=manifest.required, profile=False)
    return _verdict(outcome.record, outcome.folder, folder)


def _verdict(record: Record, where: Path, folder: Path) -> Verdict:
    gated = [row for row in record.speedups if row.gated]
    least = min(gated, key=lambda row: row.ci_low, default=None)
    verdict = Verdict(
        decision=record.decision,
        reasons=list(record.reasons),
        record=where.relative_to(folder).as_posix(),
        record_digest=compute_digest(msgspec.to_builtins(record)),
    )
    if least is None:
        return verdict
    return msgspec.structs.replace(
        verdict,
        shape=least.shape,
        speedup=least.speedup,
        low=least.ci_low,
        high=least.ci_high,
        confidence=least.confidence,
        device=record.device.name if record.device else "",
        created=record.created,
    )


def keep_winner(stages: Stages, candidate: Candidate, verdict: Verdict, folder: Path) -> None:
    """Write ``winner/``: candidate, verdict, record, report, sources, and the rung to add to the task for toggles."""
    winner, record = folder / "winner", folder / verdict.record
    shutil.rmtree(winner, ignore_errors=True)
    write_whole(winner / "winner.json", to_json({"candidate": candidate, "verdict": verdict}))
    for name in (RECORD, REPORT):
        if (record / name).is_file():
            write_whole(winner / name, (record / name).read_bytes())
    sources = folder / "candidates" / candidate.key
    for kind in ("solution", "kernels"):
        if (sources / kind).is_dir():
            copy_folder(sources / kind, winner / kind)
    space = stages.manifest.space
    implementation = stages.implementation(candidate)
    if not space.solution and not space.family and implementation.rung is None:
        rung = {
            "name": f"evolved_{candidate.key[:6]}",
            "title": candidate.rationale.splitlines()[0][:80] if candidate.rationale else "found by greenfast evolve",
            "toggles": {name: value for name, value in implementation.variant.toggles if value},
            "after": stages.manifest.baseline or stages.task.config.defaults.baseline,
            "required_speedup": max(1.0, round(verdict.low - 0.005, 2)),
            "budget": msgspec.to_builtins(implementation.requirements.budget),
        }
        write_whole(winner / "rung.json", to_json(rung))
