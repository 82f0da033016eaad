"""The settings of a run, stored in its folder so that it can be resumed and repeated."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from greenfast.evolve.space import Space
from greenfast.judge.record_schema import GitState
from greenfast.judge.store import read_json, to_json, write_whole
from greenfast.spec.errors import UsageError

MANIFEST = "manifest.json"
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class SearchBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a run.

    evaluations: built candidates without duplicates. gpu_seconds: GPU time. seconds: total time.
    """

    evaluations: Count = 64
    gpu_seconds: float | None = None
    seconds: float | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a run.

    task: the task's folder. space_folder: folder of the space's file; a solution's path is relative to it. baseline: a
    rung, toggles, or the path of a solution. shapes: timed on the GPU. small: run on the emulator. seeds: of the inputs
    of both; the validation of finalists draws its own. device: as ``--device``. batch: candidates per proposal.
    screen: share of a batch that passes the screen by counts, 1 for all. finalists: how many are validated.
    confidence: of all verdicts together. seed: of the search. options: of the proposer. sources: digest of the files
    that candidates are made from. untimed: why no candidate is timed and what replaces times; empty with a GPU.
    """

    version: Literal[1] = 1
    created: str
    task: str
    space: Space
    space_folder: str
    proposer: str
    options: dict[str, str] = {}
    budget: SearchBudget = SearchBudget()
    baseline: str = ""
    shapes: list[str] = []
    small: list[str] = []
    seeds: tuple[int, ...] = (0,)
    format: str = ""
    arch: str = ""
    device: str = "auto"
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 60.0
    batch: Count = 8
    screen: Annotated[float, Meta(gt=0, le=1)] = 1.0
    finalists: Count = 3
    required: float | None = None
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95
    seed: int = 0
    insights: str = ""
    sources: str = ""
    untimed: str = ""
    command: str = ""
    package_version: str = ""
    git: GitState | None = None
    environment: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over the settings that determine the run; without budget, paths, dates and versions."""
        left_out = {"created", "budget", "command", "package_version", "git", "environment", "task", "untimed"}
        left_out |= {"space_folder", "sources"}
        content = {name: value for name, value in msgspec.to_builtins(self).items() if name not in left_out}
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a run's folder. Raises MachineError if it cannot be written."""
    write_whole(folder / MANIFEST, to_json(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run's folder. Raises UsageError for any other folder."""
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder}: no run of `greenfast evolve`; it has no {MANIFEST}")
    manifest: Manifest = read_json(folder / MANIFEST, Manifest, "manifest of a search")
    return manifest


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")


def read_budget(text: str) -> SearchBudget:
    """Parse ``gpu=12m,evals=256,time=1h``, each part optional. Raises UsageError for any other text."""
    limits: dict[str, float | int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        duration = _DURATION.fullmatch(value)
        amount: float | int
        if name == "evals" and re.fullmatch(r"[1-9]\d*", value):
            key, amount = "evaluations", int(value)
        elif name in ("gpu", "time") and duration and float(duration[1]) > 0:
            key, amount = {"gpu": "gpu_seconds", "time": "seconds"}[name], float(duration[1]) * _UNITS[duration[2]]
        else:
            raise UsageError(f"--budget {part!r}: allowed are evals=256, gpu=12m and time=1h, with s, m or h")
        if key in limits:
            raise UsageError(f"--budget: {name} is given twice")
        limits[key] = amount
    try:
        return msgspec.convert(limits, SearchBudget)
    except msgspec.ValidationError as e:
        raise UsageError(f"--budget {text!r}: {e}") from None
