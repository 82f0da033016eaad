"""A whole search by the command line: on the emulator, and on a fake GPU where it ends with a verdict."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.revalidate import REVALIDATION, Revalidation, revalidate
from greenfast.device.worker import Worker
from greenfast.evolve.event_log import EVENTS, read_events
from greenfast.evolve.manifest import Manifest, read_manifest
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.run_folder import choose_gpus
from greenfast.evolve.space import read_space
from greenfast.evolve.stages import Stages, Verdict
from greenfast.evolve.workers import InProcess
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.request import CasePlan
from greenfast.judge.task import load
from greenfast.spec.errors import UsageError
from tests.cli.command_line import Ran, run_here
from tests.evolve.doubling import KINDS, candidate, evaluated, write_search_task
from tests.fakes import L4, EmulatorHere, FakeDevice, FakeWorker, Script, import_families_here, install, request

pytestmark = pytest.mark.usefixtures("machine")
STREAM = [candidate(kind) for kind in KINDS] + [candidate(0, 64), candidate(0, 256), candidate(0, 128)]


def written(path: Path, candidates: list[Candidate]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(c) + b"\n" for c in candidates))
    return path


def folder_of(ran: Ran) -> Path:
    return Path(ran.out.splitlines()[0].removeprefix("run "))


def pool_here(makes: Sequence[Callable[[], Stages]]) -> InProcess:
    """All stages in this process; races of all GPUs on one fake device."""
    return InProcess(makes[0]())


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages, the emulator and families run in the process of the test: three processes take 3 s of CPU to start."""
    monkeypatch.setattr("greenfast.evolve.workers.ProcessPool", pool_here)
    monkeypatch.setattr("greenfast.evolve.stages.Worker", lambda ordinal=0, **options: EmulatorHere())
    import_families_here(monkeypatch)


def test_a_search_on_the_emulator(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_search_task(tmp_path / "task")
    stream = written(tmp_path / "stream.jsonl", STREAM)
    ran = run_here(
        capsys, "evolve", task, "--proposer", "scripted", "--option", f"file={stream}", "--device", "emulator",
        "--batch", "4", "--out", tmp_path / "runs",
    )  # fmt: skip
    assert ran.code == 0
    untimed = "--device emulator: candidates run on the PTX emulator"
    assert ran.err.startswith(f"greenfast: {untimed}")
    assert ran.err.count("\n") == 1
    assert "no claim is made" in ran.out
    assert "no speed" in ran.out
    folder = folder_of(ran)
    found = evaluated(folder)
    assert [e.candidate for e in found] == STREAM
    ended = [e.stage if not e.valid or e.stage == "duplicate" else "" for e in found]
    assert ended == [*KINDS.values(), "", "duplicate", "duplicate"]
    assert "the same machine code and launches as the baseline" in found[-2].feedback
    assert found[1].fitness == found[0].fitness  # a duplicate is given what the first one got
    assert {e.fitness_kind for e in found if e.valid} == {"estimate"}
    assert "kernel_bound" in found[2].feedback
    assert "never written" in found[4].feedback
    assert "device variables" in found[5].feedback

    with sqlite3.connect(folder / "index.sqlite") as index:
        assert dict(index.execute("select stage, count(*) from evaluations group by stage")) == Counter(
            e.stage for e in found
        )
    assert json.loads((folder / "t4.json").read_text())["results"]
    before = (folder / EVENTS).read_bytes()
    ended_run = run_here(capsys, "evolve", "--resume", folder, "--json")  # only writes what follows from it
    assert (
        json.loads(ended_run.out)["evaluations"]
        == len({e.hash for e in found if e.hash and e.stage != "duplicate"}) + 2
    )
    assert (folder / EVENTS).read_bytes() == before
    page = (folder / "report.html").read_text()
    assert "They are no speeds, and no claim is made" in page
    assert untimed in page
    assert json.loads(ended_run.out)["untimed"].startswith(untimed)
    assert json.loads((folder / "manifest.json").read_text())["untimed"].startswith(untimed)
    assert "<script" not in page
    assert not (folder / "winner").exists()


@pytest.mark.parametrize(
    ("device", "gpus", "cause"),
    [
        ("auto", 0, "no GPU was found: "),
        ("all", 0, "no GPU was found: "),
        ("none", 1, "--device none: "),
        ("emulator", 1, "--device emulator: "),
    ],
)
def test_what_takes_the_place_of_a_gpu_is_noted(
    device: str, gpus: int, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("greenfast.judge.request.device_count", lambda: gpus)
    space = read_space(write_search_task(tmp_path / "task") / "space.json")
    given = Manifest(created="", task="", space=space, space_folder="", proposer="random", device=device)
    chosen, manifest = choose_gpus(tmp_path, given)
    assert chosen == []
    assert manifest.untimed.startswith(cause)
    assert "no speed is measured" in manifest.untimed
    assert read_manifest(tmp_path) == manifest
    assert manifest.digest == given.digest
    monkeypatch.setattr("greenfast.evolve.run_folder.has_ended", lambda folder: True)
    assert choose_gpus(tmp_path, given) == ([], given), "a search that has ended is only shown here"


def test_a_search_resumes_in_another_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_search_task(tmp_path / "task")
    monkeypatch.chdir(tmp_path)
    written(Path("stream.jsonl"), [candidate(6)])
    ran = run_here(
        capsys, "evolve", "task", "--proposer", "scripted", "--option", "file=stream.jsonl", "--device", "emulator",
        "--out", "runs",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    folder = folder_of(ran).resolve()
    (folder / EVENTS).unlink()
    monkeypatch.chdir(tmp_path / "task")
    resumed = run_here(capsys, "evolve", "--resume", folder)
    assert resumed.code == 0, resumed.err


@pytest.mark.usefixtures("one_process")
def test_a_search_whose_task_was_changed_does_not_go_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its baseline is of the old kernels, and what would come is of the new ones."""
    task = write_search_task(tmp_path / "task")
    stream = written(tmp_path / "stream.jsonl", [candidate(6)])
    ran = run_here(
        capsys, "evolve", task, "--proposer", "scripted", "--option", f"file={stream}", "--device", "emulator",
        "--out", tmp_path / "runs",
    )  # fmt: skip
    folder = folder_of(ran)
    (code,) = task.glob("*family*.py")
    code.write_text(code.read_text() + "\n# changed\n")
    assert run_here(capsys, "evolve", "--resume", folder).code == 0  # all was evaluated: it is only shown
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    (folder / EVENTS).write_bytes(b"".join(lines[:-1]))
    refused = run_here(capsys, "evolve", "--resume", folder)
    assert refused.code == 2
    assert "changed since the run began; put them back, or begin a new run" in refused.err


@pytest.mark.usefixtures("one_process")
def test_a_search_without_a_kernel_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_search_task(tmp_path / "task")
    defaults = [Candidate(parameters={"KIND": 3}), Candidate(parameters={"SPEED": 1})]
    stream = written(tmp_path / "stream.jsonl", [candidate(6, threads) for threads in (32, 64)] + defaults)
    ran = run_here(
        capsys, "evolve", task, "--proposer", "scripted", "--option", f"file={stream}", "--device", "emulator",
        "--out", tmp_path / "runs",
    )  # fmt: skip
    assert "best: none\n  2 ended at space: KIND=6: this family has no such kernel\n  1 ended at BUILD: " in ran.out
    results = json.loads((folder_of(ran) / "t4.json").read_text())["results"]
    assert [r["configuration"] for r in results[2:]] == [{"KIND": 3, "THREADS": 256}, {"SPEED": 1}]
    assert "KIND=6: this family has no such kernel" in (folder_of(ran) / "report.html").read_text()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    """A GPU on which fewer threads are faster, and which knows the cases of exam seed 77."""
    task = load(str(write_search_task(tmp_path / "task")))
    plain = request(tmp_path, task=task, shapes=("tiny",), seeds=(0, 1, 2), fmt="float", whole=False)
    asked = add_check_plan(plain, None, chosen=False, seed=77)
    assert asked.check_plan is not None
    public = tuple(CasePlan(shape, seed) for shape in asked.shapes for seed in plain.seeds)  # what the search takes
    asked = replace(asked, check_plan=replace(asked.check_plan, case_plans=(*asked.check_plan.case_plans, *public)))
    scripts = {"plain": Script(us=20.0), "fast": Script(us=15.0), "KIND=0,THREADS=64": Script(us=12.0)}
    device = install(monkeypatch, FakeDevice(asked, scripts, default=Script(us=30.0)))

    def start(ordinal: int = 0, **options: Any) -> Worker:
        if "make_session" in options:
            return EmulatorHere()
        return FakeWorker(device, timeout_s=options["timeout_s"])

    monkeypatch.setattr("greenfast.evolve.stages.Worker", start)
    monkeypatch.setattr("greenfast.judge.check_plan.draw_seed", lambda: 77)
    return device


def test_a_search_on_a_gpu_ends_with_a_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, tmp_path: Path
) -> None:
    stream = written(tmp_path / "stream.jsonl", STREAM)
    ran = run_here(
        capsys, "evolve", tmp_path / "task", "--proposer", "scripted", "--option", f"file={stream}", "--batch", "10",
        "--out", tmp_path / "runs", "--finalists", "2", "--shapes", "tiny",
    )  # fmt: skip
    assert ran.code == 0, ran.out + ran.err
    folder = folder_of(ran)
    raced = {(e.candidate.parameters["THREADS"]): e for e in evaluated(folder) if e.stage == "race"}
    assert set(raced) == {64, 128}
    assert raced[64].fitness == pytest.approx(12e-6, rel=0.02)
    kept_evaluations = [json.loads(path.read_text()) for path in folder.glob("candidates/*/evaluation.json")]
    ((n, _),) = [(e.n, e.kind) for e in read_events(folder) if e.kind == "raced"]
    whole = json.loads((folder / "costs.jsonl").read_text().splitlines()[n])["gpu_seconds"]
    assert sum(e["gpu_seconds"] for e in kept_evaluations) == pytest.approx(whole, abs=0.01)  # they shared the race
    winner = json.loads((folder / "winner" / "winner.json").read_text())
    assert winner["candidate"]["parameters"] == {"KIND": 0, "THREADS": 64}
    verdict = winner["verdict"]
    assert verdict["decision"] == "MERGE"
    assert verdict["low"] <= 20 / 12 <= verdict["high"]
    assert verdict["confidence"] == pytest.approx(0.975)  # of two finalists
    where = f"on NVIDIA L4, {verdict['created'][:10]}"
    assert f"at tiny {where}" in ran.out
    assert f"by the whole validation {where}; of that machine and day" in (folder / "report.html").read_text()
    assert json.loads((folder / "winner" / "rung.json").read_text())["toggles"] == {"THREADS": 64}
    found = revalidate(folder, tmp_path / "again")
    assert found.in_words.count(f" {where}") == 2
    assert found.before.record_digest == verdict["record_digest"]
    assert found.after.decision == "MERGE"
    assert found.after.confidence == found.before.confidence
    kept = json.loads((tmp_path / "again" / REVALIDATION).read_text())
    assert kept["inside"] is found.within_ci
    assert (tmp_path / "again" / kept["after"]["record"] / "record.json").is_file()

    (folder / "report.html").unlink()
    monkeypatch.setattr("greenfast.judge.request.device_count", lambda: 0)
    assert run_here(capsys, "evolve", "--resume", folder).code == 0  # what a GPU measured can be read without one
    assert "MERGE" in (folder / "report.html").read_text()
    assert (folder / "winner" / "record.json").is_file()
    assert len([e for e in read_events(folder) if e.kind == "validated"]) == 2
    assert "MERGE" in ran.out
    insights = [json.loads(line) for line in (folder / "insights.jsonl").read_text().splitlines()]
    assert len(insights) == 2
    assert all(i["record"] for i in insights)


def test_a_search_on_two_gpus_ends_with_a_verdict_of_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, tmp_path: Path
) -> None:
    monkeypatch.setattr("greenfast.judge.request.device_count", lambda: 2)
    monkeypatch.setattr("greenfast.evolve.workers.device_info", lambda ordinal, timeout_s: L4)
    monkeypatch.setattr("greenfast.evolve.workers.ProcessPool", pool_here)
    stream = written(tmp_path / "stream.jsonl", [candidate(0), candidate(0, 64), candidate(0, 32)])
    ran = run_here(
        capsys, "evolve", tmp_path / "task", "--proposer", "scripted", "--option", f"file={stream}", "--batch", "10",
        "--out", tmp_path / "runs", "--finalists", "1", "--shapes", "tiny", "--device", "all",
    )  # fmt: skip
    assert ran.code == 0, ran.out + ran.err
    folder = folder_of(ran)
    winner = json.loads((folder / "winner" / "winner.json").read_text())
    assert winner["candidate"]["parameters"] == {"KIND": 0, "THREADS": 64}
    events = [(e.kind, e.key) for e in read_events(folder)]
    assert [at for what, at in events if what == "raced"] == [(0, 0, 0), (0, 0, 1)]
    assert ("final", (0,)) in events
    assert "Races were spread over GPU 0, 1, each an NVIDIA L4" in (folder / "report.html").read_text()
    before = (folder / EVENTS).read_bytes()
    monkeypatch.setattr("greenfast.judge.request.device_count", lambda: 0)
    assert run_here(capsys, "evolve", "--resume", folder).code == 0  # what GPUs measured can be read without one
    assert (folder / EVENTS).read_bytes() == before


@pytest.mark.usefixtures("one_process")
def test_a_run_that_began_without_a_gpu_goes_on_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, tmp_path: Path
) -> None:
    """Times and estimates cannot be ranked together."""
    stream = written(tmp_path / "stream.jsonl", [candidate(0), candidate(0, 64)])
    with monkeypatch.context() as patched:
        patched.setattr("greenfast.judge.request.device_count", lambda: 0)
        ran = run_here(
            capsys, "evolve", tmp_path / "task", "--proposer", "scripted", "--option", f"file={stream}", "--batch", "1",
            "--out", tmp_path / "runs", "--arch", "sm_89",
        )  # fmt: skip
    assert ran.code == 0, ran.err
    folder = folder_of(ran)
    whole = (folder / EVENTS).read_bytes()
    (folder / EVENTS).write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    resumed = run_here(capsys, "evolve", "--resume", folder)
    assert "no claim is made" in resumed.out
    assert (folder / EVENTS).read_bytes() == whole
    assert read_manifest(folder).untimed.startswith("no GPU was found")


@pytest.mark.usefixtures("one_process")
def test_a_run_resumes_at_every_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, tmp_path: Path
) -> None:
    stream = written(tmp_path / "stream.jsonl", [candidate(0), candidate(2), candidate(0, 64)])
    ran = run_here(
        capsys, "evolve", tmp_path / "task", "--proposer", "scripted", "--option", f"file={stream}", "--batch", "2",
        "--out", tmp_path / "runs", "--finalists", "1", "--shapes", "tiny",
    )  # fmt: skip
    assert ran.code == 0, ran.out + ran.err
    folder = folder_of(ran)
    monkeypatch.setattr("greenfast.cli.evolve.write_report", lambda *_: None)  # slow to draw
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["what"] for line in lines]
    for count in (kinds.index("emulated"), kinds.index("raced"), kinds.index("validated")):
        (folder / EVENTS).write_bytes(b"".join(lines[:count]) + lines[count][:20])  # and a line that was cut short
        resumed = run_here(capsys, "evolve", "--resume", folder)
        assert resumed.code == 0, resumed.err
        now = (folder / EVENTS).read_bytes().splitlines(keepends=True)
        assert now[:count] == lines[:count]
        assert [json.loads(line)["what"] for line in now] == kinds


def test_a_winner_measured_again_is_inside_of_its_interval_or_is_not() -> None:
    before = Verdict(decision="MERGE", reasons=[], shape="s", speedup=1.6, low=1.5, high=1.7)
    for speedup, words in ((1.5, "inside of"), (1.49, "OUTSIDE of"), (1.71, "OUTSIDE of")):
        after = Verdict(decision="MERGE", reasons=[], shape="s", speedup=speedup, low=1.4, high=1.8)
        found = Revalidation(run="r", first_created="2026-11-22T22:00:11Z", created="", before=before, after=after)
        assert f"{words} 1.600x [1.500, 1.700] of 2026-11-22" in found.in_words
        assert found.within_ci is (words == "inside of")


def test_a_folder_that_is_no_run_is_not_measured_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run of `greenfast evolve`"):
        revalidate(tmp_path, tmp_path / "out")
