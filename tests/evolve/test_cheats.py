"""A proposer whose stream is the corpus of cheats: none is left at the end, and the honest ones among them are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from greenfast.evolve.proposal import Evaluation
from tests.cheats.corpus import GPU_ONLY, Entry, entries
from tests.cli.command_line import run_here
from tests.evolve.cheat_stream import BASES, HOSTS, RUNGS, command, evaluated, problem_of, summary

pytestmark = pytest.mark.usefixtures("machine")
#: What the emulator cannot catch: a kernel that is right and only lacks what its rung promises, which EVIDENCE asks of
#: finalists, and those that take a GPU (docs/cheats.md). They are left, and nothing is claimed of them.
NOT_BY_SEARCH = {"no_async_copy", *GPU_ONLY}


def searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, problem: str, some: Sequence[Entry]
) -> list[Evaluation]:
    """What became of each, in order, in a search on the emulator."""
    ran = run_here(capsys, *command(problem, some, tmp_path), "--device", "emulator")
    assert ran.code == 0, ran.out + ran.err
    folder = Path(ran.out.splitlines()[0].removeprefix("run "))
    assert not (folder / "winner").exists()
    assert summary(problem, some, folder)["false_accepts"] == []
    return evaluated(folder)


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
def test_code_that_cheats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nobody is left, and no candidate's code ends the search or another candidate."""
    some = [entry for entry in entries() if problem_of(entry) == HOSTS]
    assert len(some) > 12
    found = searched(capsys, tmp_path, HOSTS, some)
    check(some, found)
    for entry, e in zip(some, found, strict=True):
        if entry.gate == "CORRECTNESS":  # or half of a drawn shape of one element, which cannot be launched
            assert e.stage in (entry.gate, "BUILD"), (entry.name, e.feedback)


@pytest.mark.slow
def test_the_rungs_that_cheat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = [entry for entry in entries() if problem_of(entry) == RUNGS]
    check(some, searched(capsys, tmp_path, RUNGS, some))
