"""Searches whose proposer is the corpus of cheats: ``python -m tests.evolve.cheat_stream --out FOLDER``.

One search for each problem of the corpus, and one for the rungs of the doubling task. On a GPU what passes the emulator
is raced and its fastest are validated whole; a cheat among the winners is a false accept.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from greenfast.cli.main import main as greenfast
from greenfast.evolve.event_log import read_events
from greenfast.evolve.proposal import Candidate, Edit, Evaluation
from greenfast.judge.environment import choose_device, device_info, git_state, now
from greenfast.judge.store import to_json, write_whole
from tests.cheats.corpus import Entry, entries
from tests.cheats.host import HOST, HostCheat
from tests.cheats.judging import task_of
from tests.cheats.kernels import HONEST, KERNELS

#: An honest solution of each problem, whose whole file every candidate replaces.
BASES = {
    "doubling": "grid_stride",
    "sums": "block_sums",
    "counts": "global_atomics",
    "in_place": "in_place",
}
SHAPES = {"sums": "whole,odd"}
#: The search over the rungs of the doubling task.
RUNGS = "rungs"
#: The one over solutions that bring code, edits of an honest one; without ``hangs``, which is waited for minutes.
HOSTS, _BASE_HOST, _NO_HOSTS = "host", HostCheat("honest", "", ""), {"hangs"}


def problem_of(entry: Entry) -> str:
    """The problem of a kernel with a header; ``rungs`` of a rung, ``host`` of code; empty for what is none of these."""
    if entry.kind == "host" and entry.name not in _NO_HOSTS:
        return HOSTS
    if entry.name in {rung.name for rung in task_of("doubling").config.rungs}:
        return RUNGS
    if entry.kernel is None or entry.kernel.suffix != ".cu":
        return ""
    return next((p for p in BASES if f'"problem": "{p}"' in entry.kernel.text), "")


def command(problem: str, some: Sequence[Entry], folder: Path) -> list[str]:
    """The arguments of the search over some entries of a problem; its space and stream are written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    task = task_of("doubling" if problem in (RUNGS, HOSTS) else problem)
    small = SHAPES.get(problem, "even,tail")
    against: list[str] = []
    if problem == RUNGS:
        rungs = {rung.name: rung for rung in task.config.rungs}
        values = sorted({rung.toggles.get("KERNEL", 0) for rung in rungs.values()})
        space: dict[str, Any] = {"name": RUNGS, "parameters": {"KERNEL": {"values": values}}}
        candidates = [Candidate(parameters=dict(rungs[e.name].toggles), rationale=e.name) for e in some]
        against = ["--baseline", "good"]
    elif problem == HOSTS:
        space = {"name": HOSTS, "solution": "mine.py", "regions": {"file": {"file": "mine.py"}}}
        (folder / "mine.py").write_text(_BASE_HOST.text)
        candidates = [
            Candidate(parameters={}, edits=(Edit("file", HOST[e.name].text),), rationale=e.name) for e in some
        ]
    else:
        base = f"{BASES[problem]}.cu"
        space = {"name": problem, "solution": base, "regions": {"kernel": {"file": base}}}
        (folder / base).write_text(KERNELS[HONEST][BASES[problem]].text)
        candidates = [
            Candidate(parameters={}, edits=(Edit("kernel", e.kernel.text),), rationale=e.name)
            for e in some
            if e.kernel is not None
        ]
    (folder / "space.json").write_text(to_json(space))
    stream = folder / "stream.jsonl"
    stream.write_bytes(b"".join(msgspec.json.encode(c) + b"\n" for c in candidates))
    return [
        "evolve", str(task.folder), "--space", str(folder / "space.json"), "--proposer", "scripted", "--option",
        f"file={stream}", "--batch", "100", "--budget", "evals=500", "--small", small, "--shapes", small.split(",")[0],
        "--seeds", "0,1", "--arch", "sm_90a", "--out", str(folder), *against,
    ]  # fmt: skip


def evaluated(folder: Path) -> list[Evaluation]:
    """What became of each candidate of a run, in order."""
    data = [one for e in read_events(folder) if e.kind == "evaluated" for one in e.data]
    return [msgspec.convert(one, Evaluation) for one in data]


def summary(problem: str, some: Sequence[Entry], run: Path) -> dict[str, Any]:
    """What a search over some entries came to. false_accepts: cheats that a validation said MERGE of."""
    cheats = {e.name for e in some if not e.honest}
    found = evaluated(run)
    verdicts = [e.data for e in read_events(run) if e.kind == "validated"]
    ranked = sorted(
        (e for e in found if e.valid and e.stage == "race" and e.fitness is not None), key=lambda e: e.fitness or 0.0
    )
    finals = list(zip((e.candidate.rationale for e in ranked), verdicts, strict=False))
    return {
        "problem": problem,
        "cheats": len(cheats),
        "honest": len(some) - len(cheats),
        "ended": dict(Counter(e.stage for e in found if e.candidate.rationale in cheats and not e.valid)),
        "cheats_left": sorted(e.candidate.rationale for e in found if e.valid and e.candidate.rationale in cheats),
        "honest_ended": sorted(
            e.candidate.rationale for e in found if not e.valid and e.candidate.rationale not in cheats
        ),
        "finalists": [{"name": name, "decision": v["decision"], "reasons": v["reasons"]} for name, v in finals],
        "false_accepts": sorted(name for name, v in finals if name in cheats and v["decision"] == "MERGE"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the searches; 1 where a cheat was accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and cheats.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", default="local:1")
    parser.add_argument("--finalists", default="2")
    parser.add_argument("--problems", default=",".join((*BASES, RUNGS, HOSTS)))
    parser.add_argument("--cheats-only", action="store_true", help="leave the honest kernels out")
    args = parser.parse_args(argv)
    rows = []
    for problem in args.problems.split(","):
        some = [e for e in entries() if problem_of(e) == problem and not (args.cheats_only and e.honest)]
        folder = args.out / problem
        greenfast(
            [*command(problem, some, folder), "--device", args.device, "--workers", args.workers, "--finalists",
             args.finalists]
        )  # fmt: skip
        rows.append(summary(problem, some, max(folder.glob("evolve-*"))))
        device = device_info(choose_device(args.device), 60.0)
        stamp = now().strftime("%Y-%m-%dT%H:%M:%SZ")
        found = {"created": stamp, "git": git_state(), "device": device, "rows": rows}
        write_whole(args.out / "cheats.json", to_json(found))
        print(json.dumps(rows[-1]), flush=True)
    return int(any(row["false_accepts"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
