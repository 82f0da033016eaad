"""A proposer whose stream is the corpus of cheats: none is left at the end, and the honest ones among them are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from greenfast.evolve.log import read_events
from greenfast.evolve.proposal import Candidate, Edit, Evaluation
from greenfast.judge.store import to_json
from tests.cheats.corpus import Entry, entries
from tests.cheats.judging import FOLDER, task_of
from tests.cli.command_line import Ran, run_here

pytestmark = pytest.mark.usefixtures("machine")
#: An honest solution of each problem, whose whole file every candidate replaces.
BASES = {
    "doubling": "grid_stride.cu",
    "sums": "block_sums.cu",
    "counts": "global_atomics.cu",
    "in_place": "in_place.cu",
}
SHAPES = {"sums": "whole,odd"}
#: What the emulator cannot catch: a kernel that is right and only lacks what its rung promises, which EVIDENCE asks of
#: finalists, and those that take a GPU (docs/cheats.md). They are left, and nothing is claimed of them.
NOT_BY_SEARCH = {"no_async_copy", "global_timer", "right_while_the_clock_is_young"}


def problem_of(entry: Entry) -> str:
    """The problem of a kernel with a header; empty for what is no such file."""
    path = entry.path
    if path is None or path.suffix != ".cu" or path.parent.name == "doubling":
        return ""
    return next((p for p in BASES if f'"problem": "{p}"' in path.read_text()), "")


def searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problem: str, some: Sequence[Entry]
) -> list[Evaluation]:
    """What became of each, in order, in a search on the emulator."""
    base = BASES[problem]
    space = {"name": problem, "solution": base, "regions": {"kernel": {"file": base}}}
    (tmp_path / "space.json").write_text(to_json(space))
    (tmp_path / base).write_bytes((FOLDER / "honest" / base).read_bytes())
    stream = tmp_path / "stream.jsonl"
    candidates = [
        Candidate(parameters={}, edits=(Edit("kernel", entry.path.read_text()),), rationale=entry.name)
        for entry in some
        if entry.path is not None
    ]
    stream.write_bytes(b"".join(msgspec.json.encode(c) + b"\n" for c in candidates))
    ran = run_here(
        capsys, "evolve", task_of(problem).folder, "--space", tmp_path / "space.json", "--proposer", "scripted",
        "--option", f"file={stream}", "--device", "emulator", "--batch", "100", "--budget", "evals=500",
        "--small", SHAPES.get(problem, "even,tail"), "--shapes", SHAPES.get(problem, "even,tail").split(",")[0],
        "--seeds", "0,1", "--arch", "sm_90a", "--out", tmp_path / "runs",
    )  # fmt: skip
    return evaluations(ran)


def evaluations(ran: Ran) -> list[Evaluation]:
    assert ran.code == 0, ran.out + ran.err
    folder = Path(ran.out.splitlines()[0].removeprefix("run "))
    assert not (folder / "winner").exists()
    data = [one for e in read_events(folder) if e.what == "evaluated" for one in e.data]
    return [msgspec.convert(one, Evaluation) for one in data]


def check(some: Sequence[Entry], found: Sequence[Evaluation]) -> None:
    assert [e.candidate.rationale for e in found] == [entry.name for entry in some]
    left = [entry.name for entry, e in zip(some, found, strict=True) if e.valid and not entry.honest]
    assert set(left) <= NOT_BY_SEARCH
    for entry, e in zip(some, found, strict=True):
        if entry.honest:
            assert e.valid, (entry.name, e.stage, e.feedback)


def test_some_of_each_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = (
        "grid_stride",
        "keyed_by_shape",
        "doubles_twice",
        "known_sizes",
        "clock_bits",
        "index_of_nine_bits",
        "bits",
    )
    some = [entry for entry in entries() if entry.name in names and problem_of(entry) == "doubling"]
    assert len(some) >= 6
    found = searched(capsys, tmp_path, "doubling", some)
    check(some, found)
    for entry, e in zip(some, found, strict=True):
        if entry.gate in ("RESOURCES", "CORRECTNESS"):  # and for the right reason
            assert e.stage == entry.gate, (entry.name, e.feedback)


@pytest.mark.slow
@pytest.mark.parametrize("problem", BASES)
def test_the_whole_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path, problem: str) -> None:
    some = [entry for entry in entries() if problem_of(entry) == problem]
    found = searched(capsys, tmp_path, problem, some)
    check(some, found)
    for entry, e in zip(some, found, strict=True):
        if entry.gate in ("RESOURCES", "CORRECTNESS"):  # some of the corpus compile to the same code
            assert e.stage in (entry.gate, "duplicate"), (entry.name, e.feedback)


@pytest.mark.slow
def test_the_rungs_that_cheat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rungs = {rung.name: rung for rung in task_of("doubling").config.rungs}
    some = [entry for entry in entries() if entry.name in rungs]
    values = sorted({rung.toggles.get("KERNEL", 0) for rung in rungs.values()})
    (tmp_path / "space.json").write_text(to_json({"name": "rungs", "parameters": {"KERNEL": {"values": values}}}))
    stream = tmp_path / "stream.jsonl"
    stream.write_bytes(
        b"".join(
            msgspec.json.encode(Candidate(parameters=dict(rungs[entry.name].toggles), rationale=entry.name)) + b"\n"
            for entry in some
        )
    )
    ran = run_here(
        capsys, "evolve", task_of("doubling").folder, "--space", tmp_path / "space.json", "--proposer", "scripted",
        "--option", f"file={stream}", "--device", "emulator", "--batch", "100", "--budget", "evals=500", "--against",
        "good", "--small", "even,tail", "--shapes", "even", "--seeds", "0,1", "--arch", "sm_90a", "--out", tmp_path,
    )  # fmt: skip
    check(some, evaluations(ran))
