"""The loop with stages that answer at once: odd proposers, budgets, the screen, full disks and interrupts."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenfast.evolve.event_log import COSTS, EVENTS
from greenfast.evolve.loop import STALE_BATCHES, Search, State
from greenfast.evolve.manifest import Manifest, SearchBudget
from greenfast.evolve.proposal import Candidate, Context, Descriptor, Evaluation, ProposerError
from greenfast.evolve.space import Parameter, Space
from greenfast.evolve.stages import StageResult
from greenfast.evolve.workers import InProcess
from greenfast.spec.errors import MachineError, UsageError

SPACE = Space(name="s", parameters={"X": Parameter(values=tuple(range(50)))})


class Stages:
    """X is the estimate; odd ones are wrong, and all above 40 render the same kernel."""

    gpu = None

    def __init__(self) -> None:
        self.sources = SimpleNamespace(texts=dict)
        self.task = SimpleNamespace(config=SimpleNamespace(defaults=SimpleNamespace(baseline="base")))
        self.calls: list[tuple[str, int]] = []

    def described(self) -> str:
        return "a task"

    def built(self, candidate: Candidate | None) -> StageResult:
        x = 100 if candidate is None else int(candidate.parameters["X"])
        self.calls.append(("built", x))
        code = f"{min(x, 41) if x < 100 else x:016x}"
        return StageResult(stage="RESOURCES", valid=True, hash=code, behaviour=Descriptor(registers=x))

    def emulated(self, candidate: Candidate | None, exam_seed: int) -> StageResult:
        x = 100 if candidate is None else int(candidate.parameters["X"])
        self.calls.append(("emulated", x))
        if x % 2 and x < 40:
            return StageResult(stage="CORRECTNESS", valid=False, feedback="odd")
        return StageResult(stage="CORRECTNESS", valid=True, estimate=(x + 1) * 1e-6, behaviour=Descriptor(pipe="issue"))


class Watcher:
    def say(self, text: str) -> None:
        pass

    def batch(self, number: int, evaluations: Sequence[Evaluation], state: State) -> None:
        pass

    def gate(self, result: Any) -> None:
        pass

    def progress(self, gate: str, share: float, text: str) -> None:
        pass


class Proposes:
    """A proposer that is one function."""

    def __init__(self, answer: Callable[[Context], Any]) -> None:
        self.propose = answer
        self.seen: list[Evaluation] = []

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        self.seen += evaluations


def x(*values: int) -> list[Candidate]:
    return [Candidate(parameters={"X": value}) for value in values]


def sampled(context: Context) -> list[Candidate]:
    rng = context.rng
    return [Candidate(parameters=context.space.sample(rng)) for _ in range(context.wanted)]


def search(folder: Path, proposer: Any, stages: Any = None, **settings: Any) -> Search:
    folder.mkdir(exist_ok=True)
    stages = stages or Stages()
    given: dict[str, Any] = {"budget": SearchBudget(evaluations=10), "batch": 4, **settings}
    manifest = Manifest(created="", task="t", space=SPACE, space_folder="", proposer="test", **given)
    return Search(folder, manifest, proposer, stages, InProcess(stages), Watcher())


def test_the_budget_is_of_new_kernels_and_every_evaluation_is_observed(tmp_path: Path) -> None:
    proposer, stages = Proposes(sampled), Stages()
    state = search(tmp_path, proposer, stages).run()
    assert state.evaluations == 10
    assert state.ended == "all 10 evaluations are used"
    assert proposer.seen == state.history
    emulated = [value for what, value in stages.calls if what == "emulated"]
    assert len(emulated) == len(set(emulated)) == 11  # with the baseline; no kernel twice
    best = min((e for e in state.history if e.valid), key=lambda e: e.fitness or 0)
    assert best.fitness == (int(best.candidate.parameters["X"]) + 1) * 1e-6


def test_equal_kernels_are_judged_once_and_share_their_fitness(tmp_path: Path) -> None:
    answers = iter([x(45, 48, 2), x(49, 2)])
    stages = Stages()
    state = search(tmp_path, Proposes(lambda _: next(answers, [])), stages).run()
    assert [e.stage for e in state.history] == ["CORRECTNESS", "duplicate", "CORRECTNESS", "duplicate", "duplicate"]
    assert len({e.fitness for e in state.history if e.candidate.parameters["X"] != 2}) == 1
    assert state.ended == "the proposer has nothing left to propose"
    assert [value for what, value in stages.calls if what == "emulated"] == [100, 45, 2]


def test_the_same_settings_make_the_same_bytes_however_often_a_run_is_cut(tmp_path: Path) -> None:
    search(tmp_path / "whole", Proposes(sampled)).run()
    whole = (tmp_path / "whole" / EVENTS).read_bytes()
    events = len(whole.splitlines())
    rng = random.Random(0)
    for count in range(0, events, 3):
        folder = tmp_path / f"cut{count}"
        folder.mkdir()
        head = b"".join(whole.splitlines(keepends=True)[: count + 1])
        (folder / EVENTS).write_bytes(head[: len(head) - rng.randint(1, 30)])  # the last line is not whole
        state = search(folder, Proposes(sampled)).run()
        assert (folder / EVENTS).read_bytes() == whole, count
        assert state.evaluations == 10


def test_what_was_logged_is_not_done_again(tmp_path: Path) -> None:
    search(tmp_path, Proposes(sampled)).run()
    stages = Stages()
    proposer = Proposes(lambda _: pytest.fail("asked again"))
    state = search(tmp_path, proposer, stages).run()
    assert stages.calls == []
    assert proposer.seen == state.history


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 5, ["X=3"], [{"X": 3}]),
        *([Candidate(parameters={"X": [3]})], [Candidate(parameters={}, rationale=7)]),  # type: ignore[arg-type, dict-item]
        *([Candidate(parameters={"X": math.nan})], [Candidate(parameters={}, rationale="\ud800")]),
    ],
)
def test_garbage_is_an_error_of_the_proposer(tmp_path: Path, answer: Any) -> None:
    with pytest.raises(ProposerError, match="test answered with no candidates"):
        search(tmp_path, Proposes(lambda _: answer)).run()
    assert search(tmp_path, Proposes(sampled)).run().evaluations == 10  # the run resumes


def test_the_same_candidate_is_built_once_however_often_it_is_proposed(tmp_path: Path) -> None:
    """In one batch two workers would write the same folder; a broken one would use up the budget."""
    answers = iter([x(3, 3, 2, 2), x(2, 3, 4), x(3)])
    stages = Stages()
    state = search(tmp_path, Proposes(lambda _: next(answers, [])), stages).run()
    assert [value for what, value in stages.calls if what == "built"] == [100, 3, 2, 4]
    ended = "CORRECTNESS duplicate CORRECTNESS duplicate duplicate duplicate CORRECTNESS duplicate"
    assert " ".join(e.stage for e in state.history) == ended
    assert [e.valid for e in state.history] == [False, False, True, True, True, False, True, False]
    assert len({(e.fitness, e.hash) for e in state.history if e.candidate.parameters["X"] == 2}) == 1
    assert state.evaluations == 3


def test_a_proposer_without_an_end_is_cut_off(tmp_path: Path) -> None:
    endless = (Candidate(parameters={"X": n % 50}) for n in itertools.count())
    state = search(tmp_path, Proposes(lambda _: endless)).run()
    assert state.evaluations == 10


def test_a_proposer_that_repeats_itself_ends_the_search(tmp_path: Path) -> None:
    state = search(tmp_path, Proposes(lambda _: x(3))).run()
    assert state.ended == f"{STALE_BATCHES} batches in a row brought no new kernel"
    assert len(state.history) == STALE_BATCHES + 1


def test_a_proposer_with_nothing_to_say_ends_the_search(tmp_path: Path) -> None:
    state = search(tmp_path, Proposes(lambda _: [])).run()
    assert (state.history, state.ended) == ([], "the proposer has nothing left to propose")


def test_a_candidate_outside_of_the_space_is_told_so(tmp_path: Path) -> None:
    class Strict(Stages):
        def built(self, candidate: Candidate | None) -> StageResult:
            if candidate is not None:
                try:
                    SPACE.decode(candidate.parameters)
                except UsageError as e:
                    return StageResult(stage="space", valid=False, feedback=str(e))
            return super().built(candidate)

    answers = iter([[Candidate(parameters={"X": 99}), Candidate(parameters={"Y": 1}), *x(2)]])
    state = search(tmp_path, Proposes(lambda _: next(answers, [])), Strict()).run()
    assert [e.stage for e in state.history] == ["space", "space", "CORRECTNESS"]
    assert "X=99" in state.history[0].feedback
    assert "unknown parameter" in state.history[1].feedback


def test_the_screen_keeps_the_better_half_and_a_tenth_of_the_rest(tmp_path: Path) -> None:
    answers = iter([x(*range(0, 40, 2))])
    budget = SearchBudget(evaluations=40)
    state = search(tmp_path, Proposes(lambda _: next(answers, [])), screen=0.5, batch=20, budget=budget).run()
    left = [e.candidate.parameters["X"] for e in state.history if e.stage != "screen"]
    assert left[:10] == list(range(0, 20, 2))
    assert len(left) == 11  # and one of the ten others
    assert all(e.valid for e in state.history)


def test_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    class Interrupted(Stages):
        def emulated(self, candidate: Candidate | None, exam_seed: int) -> StageResult:
            if len(self.calls) > 12:
                raise KeyboardInterrupt
            return super().emulated(candidate, exam_seed)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "cut", Proposes(sampled), Interrupted()).run()
    search(tmp_path / "cut", Proposes(sampled)).run()
    search(tmp_path / "whole", Proposes(sampled)).run()
    assert (tmp_path / "cut" / EVENTS).read_bytes() == (tmp_path / "whole" / EVENTS).read_bytes()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = itertools.count()

    def fsync(_: int) -> None:
        if next(synced) == 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("greenfast.evolve.event_log.os.fsync", fsync)
        with pytest.raises(MachineError, match=r"No space left on device.*--resume"):
            search(tmp_path / "cut", Proposes(sampled)).run()
    search(tmp_path / "cut", Proposes(sampled)).run()
    search(tmp_path / "whole", Proposes(sampled)).run()
    assert (tmp_path / "cut" / EVENTS).read_bytes() == (tmp_path / "whole" / EVENTS).read_bytes()


def test_an_edited_log_is_refused_with_its_line(tmp_path: Path) -> None:
    search(tmp_path, Proposes(sampled)).run()
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    changed = [line.replace(b'"estimate":', b'"estimate": ') if n == 6 else line for n, line in enumerate(lines)]
    (tmp_path / EVENTS).write_bytes(b"".join(changed))
    search(tmp_path, Proposes(sampled)).run()  # spaces change nothing that is read
    better = [line.replace(b"e-6", b"e-9") for line in lines]
    first = next(n for n, (a, b) in enumerate(zip(lines, better, strict=True)) if a != b)
    (tmp_path / EVENTS).write_bytes(b"".join(better))
    with pytest.raises(UsageError, match=f"line {first + 1} does not follow"):
        search(tmp_path, Proposes(sampled)).run()


def test_a_line_of_costs_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    search(tmp_path, Proposes(sampled)).run()
    whole = (tmp_path / EVENTS).read_bytes()
    (tmp_path / EVENTS).write_bytes(b"".join(whole.splitlines(keepends=True)[:9]))
    costs = (tmp_path / COSTS).read_bytes().splitlines(keepends=True)
    (tmp_path / COSTS).write_bytes(b"".join(costs[:9]) + costs[9][:7])
    for _ in range(2):  # the second run reads what the first one appended
        search(tmp_path, Proposes(sampled)).run()
        assert (tmp_path / EVENTS).read_bytes() == whole
    assert len((tmp_path / COSTS).read_bytes().splitlines()) == len(costs)


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b"null\n", b'{"n": 6}\n', b"[" * 5000 + b"\n", b"\xff\xfe\n"])
@pytest.mark.parametrize("line", [6, -1])
def test_a_damaged_line_is_named_with_what_to_do(tmp_path: Path, damage: bytes, line: int) -> None:
    search(tmp_path, Proposes(sampled)).run()
    whole = (tmp_path / EVENTS).read_bytes()
    lines = whole.splitlines(keepends=True)
    number = range(len(lines))[line]
    (tmp_path / EVENTS).write_bytes(b"".join([*lines[:number], damage, *lines[number + 1 :]]))
    with pytest.raises(UsageError, match=rf"line {number + 1} .*keep its first {number} lines to resume from there"):
        search(tmp_path, Proposes(sampled)).run()
    (tmp_path / EVENTS).write_bytes(b"".join(lines[:number]))  # as it says
    search(tmp_path, Proposes(sampled)).run()
    assert (tmp_path / EVENTS).read_bytes() == whole


def test_other_settings_do_not_resume_a_run(tmp_path: Path) -> None:
    search(tmp_path, Proposes(sampled)).run()
    with pytest.raises(UsageError, match="manifest differs"):
        search(tmp_path, Proposes(sampled), seed=5).run()
    grown = search(tmp_path / "other", Proposes(sampled), budget=SearchBudget(evaluations=10)).run()
    assert grown.evaluations == 10


def test_a_baseline_that_does_not_pass_ends_it(tmp_path: Path) -> None:
    class Broken(Stages):
        def built(self, candidate: Candidate | None) -> StageResult:
            return StageResult(stage="BUILD", valid=False, feedback="does not compile")

    with pytest.raises(UsageError, match="the baseline does not pass BUILD: does not compile"):
        search(tmp_path, Proposes(sampled), Broken()).run()
