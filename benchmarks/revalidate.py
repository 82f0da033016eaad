"""Validate a winner again on another day or device: ``python -m benchmarks revalidate RUN --out FOLDER``.

The validation uses the run's settings and new random inputs. It reports whether the new speedup is within the
confidence interval of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.options import make_parser
from greenfast.evolve.manifest import Manifest, read_manifest
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import Stages, Verdict, validate_finalist
from greenfast.judge.request import NullListener, choose_device, now
from greenfast.judge.store import read_json, to_json, write_whole
from greenfast.spec.errors import MachineError, UsageError

REVALIDATION = "again.json"


class StoredWinner(msgspec.Struct, frozen=True):
    """The content of a run's ``winner/winner.json``."""

    candidate: Candidate
    verdict: Verdict


class Revalidation(msgspec.Struct, frozen=True, kw_only=True):
    """The first and the new measurement of a winner."""

    run: str
    first_created: str
    created: str
    before: Verdict
    after: Verdict

    @property
    def within_ci(self) -> bool:
        """Whether the new speedup is within the first measurement's confidence interval."""
        return self.before.low <= self.after.speedup <= self.before.high

    @property
    def in_words(self) -> str:
        """Both measurements in one line."""
        relation, b, a = "inside of" if self.within_ci else "OUTSIDE of", self.before, self.after
        device = f" {a.where}" if a.where else ""
        return (
            f"{a.shape}: {a.decision}, {a.speedup:.3f}x [{a.low:.3f}, {a.high:.3f}]{device}, {relation} "
            f"{b.speedup:.3f}x [{b.low:.3f}, {b.high:.3f}] {b.where or f'of {self.first_created[:10]}'}"
        )


def revalidate(run: Path, out: Path, device: str = "auto") -> Revalidation:
    """Validate a run's winner again; write the record below ``out``.

    Raises UsageError for a folder without a run or a winner, MachineError without a GPU, and as ``validate``.
    """
    manifest: Manifest = read_manifest(run)
    winner = run / "winner" / "winner.json"
    if not winner.is_file():
        raise UsageError(f"{run}: this search has no winner, so there is nothing to measure again")
    first = read_json(winner, StoredWinner, "winner of a search")
    gpu = choose_device(device)
    if not isinstance(gpu, int):
        raise MachineError("a winner can be measured again on a GPU only, and there is none")
    out.mkdir(parents=True, exist_ok=True)
    manifest = msgspec.structs.replace(manifest, device=str(gpu))
    finalists = round((1 - manifest.confidence) / (1 - first.verdict.confidence))
    with Stages(manifest, out, gpu) as stages:
        verdict = validate_finalist(stages, first.candidate, finalists, out, NullListener())
    result = Revalidation(
        run=run.name,
        first_created=manifest.created,
        created=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        before=first.verdict,
        after=verdict,
    )
    write_whole(out / REVALIDATION, to_json({**msgspec.to_builtins(result), "inside": result.within_ci}))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print both measurements; return 0 if the new one is within the first one's interval, else 1."""
    parser = make_parser("revalidate", __doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    result = revalidate(args.run, args.out, args.device)
    print(result.in_words)
    return int(not result.within_ci)
