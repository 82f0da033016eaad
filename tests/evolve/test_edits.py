"""The ladder's scripted edits: each candidate ends where it says, on the emulator where that can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenfast.cli.evolve import find_space
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Candidate, read_lines
from greenfast.evolve.sources import Sources
from greenfast.evolve.stages import make_search_request
from greenfast.judge.task import find_task, load
from greenfast.spec.errors import UsageError
from tests.cli.command_line import run_here
from tests.evolve.doubling import evaluated

pytestmark = pytest.mark.usefixtures("machine")
TASK = find_task("fp8_sdpa").folder
STREAM = TASK / "edits.jsonl"


def candidates() -> list[Candidate]:
    return list(read_lines(STREAM, Candidate, "candidate"))


def test_each_edit_is_of_a_region_and_changes_it(tmp_path: Path) -> None:
    space, where = find_space("edits", TASK)
    manifest = Manifest(created="", task=str(TASK), space=space, space_folder=str(where), proposer="scripted")
    request = make_search_request(manifest, load("fp8_sdpa"), [], "none", tmp_path)
    sources = Sources(space, where, request, tmp_path)
    texts = sources.texts()
    for candidate in candidates():
        if candidate.prediction == "ends at space":
            with pytest.raises(UsageError, match="unknown region"):
                sources.implementation(candidate)
            continue
        sources.implementation(candidate)
        for edit in candidate.edits:
            assert edit.text != texts[edit.region].text, candidate.rationale


@pytest.mark.slow
def test_the_good_ones_are_left_and_the_others_end_where_they_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = run_here(
        capsys, "evolve", "fp8_sdpa", "--space", "edits", "--baseline", "stage3b", "--proposer", "scripted", "--option",
        f"file={STREAM}", "--batch", "32", "--device", "emulator", "--arch", "sm_90a", "--shapes", "mission",
        "--out", tmp_path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = evaluated(Path(ran.out.splitlines()[0].removeprefix("run ")))
    assert [e.candidate for e in found] == candidates()
    for e in found:
        said = e.candidate.prediction
        if said.startswith("right") or "on the GPU" in said:
            assert e.valid, (e.candidate.rationale, e.feedback)
        else:
            stage = said.split(":")[0].removeprefix("ends at ")
            assert (e.valid, e.stage) == (False, stage), (e.candidate.rationale, e.feedback)
