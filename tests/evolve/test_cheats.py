"""A proposer whose stream is the corpus of cheats: none is left at the end, and the honest ones among them are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.evolve.proposal import Candidate, Edit, Evaluation
from greenfast.judge.store import to_json
from tests.cheats.corpus import GPU_ONLY, Entry, entries
from tests.cheats.host import HOST, HostCheat
from tests.cheats.judging import task_of
from tests.cheats.kernels import HONEST, KERNELS
from tests.cli.command_line import run_here
from tests.evolve.doubling import evaluated

pytestmark = pytest.mark.usefixtures("machine")
#: What the emulator cannot catch: a kernel that is right and only lacks what its rung promises, which EVIDENCE asks of
#: finalists, and those that take a GPU (docs/cheats.md). They are left, and nothing is claimed of them.
NOT_BY_SEARCH = {"no_async_copy", *GPU_ONLY}


#: An honest solution of each problem. Every candidate replaces its whole file.
BASES = {"doubling": "grid_stride", "sums": "block_sums", "counts": "global_atomics", "in_place": "in_place"}
SHAPES = {"sums": "whole,odd"}
#: The search over the rungs of the doubling task.
RUNGS = "rungs"
#: The one over solutions that bring code, edits of an honest one; without ``hangs``, which is waited for minutes.
HOSTS, _BASE_HOST, _NO_HOSTS = "host", HostCheat("honest", "", ""), {"hangs"}


def find_problem(entry: Entry) -> str:
    """The problem of a kernel with a header; ``rungs`` of a rung, ``host`` of code; else empty."""
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


def searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problem: str, some: Sequence[Entry]
) -> list[Evaluation]:
    """What became of each, in order, in a search on the emulator."""
    ran = run_here(capsys, *command(problem, some, tmp_path), "--device", "emulator")
    assert ran.code == 0, ran.out + ran.err
    folder = Path(ran.out.splitlines()[0].removeprefix("run "))
    assert not (folder / "winner").exists()
    return evaluated(folder)


def test_some_of_each_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [
        "grid_stride",
        "keyed_by_shape",
        "doubles_twice",
        "known_sizes",
        "clock_bits",
        "index_of_nine_bits",
        "bits",
    ]
    some = [entry for entry in entries() if entry.name in names and find_problem(entry) == "doubling"]
    assert len(some) >= 6
    check(some, searched(capsys, tmp_path, "doubling", some), ("RESOURCES", "CORRECTNESS"))


@pytest.mark.slow
@pytest.mark.parametrize("problem", BASES)
def test_the_whole_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path, problem: str) -> None:
    """Some of it compile to the same code."""
    some = [entry for entry in entries() if find_problem(entry) == problem]
    check(some, searched(capsys, tmp_path, problem, some), ("RESOURCES", "CORRECTNESS"), "duplicate")


@pytest.mark.slow
def test_code_that_cheats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nobody is left, and no candidate's code ends the search or another candidate.

    For some, half of a drawn shape is one element, which cannot be launched: BUILD.
    """
    some = [entry for entry in entries() if find_problem(entry) == HOSTS]
    assert len(some) > 12
    check(some, searched(capsys, tmp_path, HOSTS, some), ("CORRECTNESS",), "BUILD")


def check(some: Sequence[Entry], found: Sequence[Evaluation], gates: tuple[str, ...] = (), other: str = "") -> None:
    """Check what became of each. gates: of an entry's gate among these, the stage is that gate, or ``other``."""
    assert [e.candidate.rationale for e in found] == [entry.name for entry in some]
    left = [entry.name for entry, e in zip(some, found, strict=True) if e.valid and not entry.honest]
    assert set(left) <= NOT_BY_SEARCH
    for entry, e in zip(some, found, strict=True):
        if entry.honest:
            assert e.valid, (entry.name, e.stage, e.feedback)
        if entry.gate in gates:  # and for the right reason
            assert e.stage in (entry.gate, other), (entry.name, e.feedback)


@pytest.mark.slow
def test_the_rungs_that_cheat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = [entry for entry in entries() if find_problem(entry) == RUNGS]
    check(some, searched(capsys, tmp_path, RUNGS, some))
