"""The timing of a batch on one and several GPUs, with fake devices, and the processes of a search.

Who is slower leaves, who fails is named and costs nobody else. No race mixes devices, a lost device costs its
candidates a try, and runs resume.
"""

from __future__ import annotations

import functools
import operator
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from greenfast.device.session import Block, Started, WrongLaunch
from greenfast.device.worker import WorkerError
from greenfast.evolve.event_log import EVENTS, read_events
from greenfast.evolve.halving import GpuRound, run_halving
from greenfast.evolve.loop import Search, State
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Candidate, Context, Evaluation
from greenfast.evolve.space import Parameter, Space, read_space
from greenfast.evolve.stages import StageResult, Stages
from greenfast.evolve.workers import GpuName, GpuWorkers, InProcess, ProcessPool, make_workers, read_workers
from greenfast.judge.task import find_task
from greenfast.spec.errors import MachineError
from greenfast.spec.problem import Case
from tests.evolve.doubling import KINDS, candidate, write_search_task
from tests.evolve.test_loop import Proposes, Watcher
from tests.evolve.test_loop import Stages as LoopStages

BASELINE, BASELINE_US = "baseline", 100.0


class FakeWorker:
    """Times by a kernel's name, which is the value of the candidate's parameter; the baseline's is its own."""

    def __init__(self, stages: FakeStages) -> None:
        self._stages, self._rng = stages, random.Random(0)
        self._drift = 1.0
        self._names: dict[str, str] = {}

    def __enter__(self) -> FakeWorker:
        self._stages.starts += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, key: str, executable: Any, cases: Any, warmup: int, seed: int) -> Started:
        name = self._names[key] = executable
        fault = self._stages.faults.get(name)
        if fault == "crash":
            raise WorkerError("crash: the process ended")
        if fault == "ends the racer":
            os._exit(3)
        return Started(["other" if fault == "bits" else "bits"] * len(cases))

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        name = self._names[key]
        self._stages.launches[name] = self._stages.launches.get(name, 0) + iters
        wrong = WrongLaunch(3, iters, 0, "left other bits") if self._stages.faults.get(name) == "late" else None
        self._drift *= 1.002  # the clock falls all the time; pairs see the same
        us = self._stages.times[name] * self._drift * self._rng.uniform(0.99, 1.01)
        return Block([us] * iters, {"sm_mhz": 1700.0}, wrong)


class FakeStages:
    """Stages with given times of candidates, and faults by name."""

    gpu = 0
    progress = staticmethod(lambda text: None)

    def __init__(
        self, times: Sequence[float] = (), faults: Mapping[str, str] | None = None, slower: float = 1.0
    ) -> None:
        """slower: how much longer than another device this one takes for everything."""
        named = {str(n): us for n, us in enumerate(times)} | {BASELINE: BASELINE_US}
        self.times = {name: us * slower for name, us in named.items()}
        self.faults, self.launches, self.starts = faults or {}, dict[str, int](), 0
        shape = SimpleNamespace(name="s", dims={"R": 8})
        self.raced = SimpleNamespace(
            make_worker=lambda: FakeWorker(self), shapes=[shape], seeds=[0], format="f", device=None
        )
        problem = SimpleNamespace(make_case=lambda dims, seed, fmt: Case({}, {}))
        self.task = SimpleNamespace(problem=problem)

    def on_gpu(self, candidate: Candidate | None) -> tuple[StageResult, Any, dict[tuple[str, int], str]]:
        name = BASELINE if candidate is None else str(*candidate.parameters.values())
        if self.faults.get(name) == "wrong":
            return StageResult(stage="CORRECTNESS", valid=False, feedback="kernel_bound"), None, {}
        side = SimpleNamespace(executable=lambda shape: name)
        return StageResult(stage="CORRECTNESS", valid=True), side, {("s", seed): "bits" for seed in range(3)}


class FakeWorkers:
    """Several fake devices in this process."""

    def __init__(self, devices: Sequence[FakeStages], dies: Callable[[int, list[str]], bool] | None = None) -> None:
        """dies: whether a device is lost in a race, by its slot and who races."""
        self._devices, self._dies = devices, dies or (lambda slot, names: False)
        self.started: list[tuple[int, list[str]]] = []
        self.at_once: list[int] = []

    def results(self, jobs: Any) -> Any:
        raise NotImplementedError

    def start(self, slot: int, job: Any) -> Callable[[], Any]:
        names = [str(*candidate.parameters.values()) for candidate in job.keywords["candidates"]]
        self.started.append((slot, names))
        waited = len(self.started)

        def answer() -> Any:
            self.at_once.append(len(self.started) - waited + 1)
            if self._dies(slot, names):
                raise WorkerError(f"CUDA error on GPU {slot}")
            return job(self._devices[slot])[0], 2.0

        return answer

    def close(self) -> None:
        pass


def fake_gpus(devices: Sequence[FakeStages], dies: Callable[[int, list[str]], bool] | None = None) -> GpuWorkers:
    return GpuWorkers([GpuName(str(n), "fake") for n in range(len(devices))], FakeWorkers(devices, dies))


def make_stages(gpu: int) -> Any:
    """Return the fake stages of a process that the second candidate crashes."""
    return FakeStages([50, 80], {"1": "ends the racer"}, slower=1 + gpu)


def run(times: list[float], faults: dict[str, str] | None = None) -> tuple[Any, FakeStages]:
    stages = FakeStages(times, faults)
    candidates = [Candidate(parameters={"N": n}) for n in range(len(times))]
    return run_halving(stages, candidates, seed=1)[0], stages  # type: ignore[arg-type]


def test_the_fastest_runs_longest_and_its_speedup_is_right() -> None:
    found, stages = run([100, 50, 200, 80, 120, 90, 150, 300])
    assert max(range(8), key=lambda n: found.raced[n].speedup) == 1
    for raced, us in zip(found.raced, [100, 50, 200, 80, 120, 90, 150, 300], strict=True):
        assert raced.speedup == pytest.approx(BASELINE_US / us, rel=0.02)
    rounds = [raced.rounds for raced in found.raced]
    assert rounds[1] == max(rounds) > rounds[7] == 1
    assert stages.launches["7"] < stages.launches["1"] / 4  # the slow ones cost little
    assert stages.starts == 1


@pytest.mark.parametrize(
    ("fault", "stage", "says"),
    [
        ("wrong", "CORRECTNESS", "kernel_bound"),
        ("crash", "race", "crash"),
        ("bits", "race", "other bits than the checked"),
        ("late", "race", "left other bits"),
    ],
)
def test_who_fails_is_named_and_costs_only_itself(fault: str, stage: str, says: str) -> None:
    found, _ = run([50, 80, 120], {"1": fault})
    assert (found.raced[1].stage, found.raced[1].speedup) == (stage, 0)
    assert says in found.raced[1].why
    assert found.raced[0].speedup == pytest.approx(2, rel=0.02)
    assert found.raced[2].speedup == pytest.approx(BASELINE_US / 120, rel=0.02)


def test_nobody_is_left() -> None:
    found, stages = run([50, 80], {"0": "wrong", "1": "wrong"})
    assert [r.stage for r in found.raced] == ["CORRECTNESS"] * 2
    assert stages.starts == 0


def test_a_baseline_that_fails_is_an_error() -> None:
    with pytest.raises(WorkerError, match="the baseline does not run"):
        run([50], {"baseline": "crash"})
    with pytest.raises(WorkerError, match="the baseline does not run"):
        run([50], {"baseline": "wrong"})


#: Times of candidates by number; the slow device's fastest takes longer than all of the other's.
TIMES = [50, 54, 58, 62, 66, 70, 75, 80, 85, 90, 95, 99]
SPACE = Space(name="s", parameters={"X": Parameter(values=tuple(range(len(TIMES))))})


class Right(LoopStages):
    """All candidates are right, and there is a GPU, on which finalists are not validated."""

    gpu: Any = 0

    def emulated(self, candidate: Candidate | None, exam_seed: int) -> Any:
        return msgspec.structs.replace(super().emulated(candidate, exam_seed), valid=True)


def devices(*slower: float, faults: dict[str, str] | None = None) -> list[FakeStages]:
    return [FakeStages(TIMES, faults, factor) for factor in slower]


def fakes(gpu_workers: GpuWorkers) -> FakeWorkers:
    assert isinstance(gpu_workers.workers, FakeWorkers)
    return gpu_workers.workers


def search(folder: Path, gpu_workers: Any, batch: int = 12) -> Search:
    folder.mkdir(exist_ok=True)

    def propose(context: Context) -> list[Candidate]:
        first = len(context.history)
        return [Candidate(parameters={"X": n}) for n in range(first, min(first + batch, len(TIMES)))]

    manifest = Manifest(created="", task="t", space=SPACE, space_folder="", proposer="test", batch=batch)
    stages: Any = Right()
    found = Search(folder, manifest, Proposes(propose), stages, InProcess(stages), Watcher(), (), gpu_workers)
    found._validate_finalists = lambda log: None  # type: ignore[method-assign]
    return found


def ranked(state: State) -> list[int]:
    right = [e for e in state.history if e.valid]
    return [int(e.candidate.parameters["X"]) for e in sorted(right, key=lambda e: e.fitness or 0)]


def heats(folder: Path, what: str = "raced") -> dict[tuple[int, ...], GpuRound]:
    return {e.key: msgspec.convert(e.data, GpuRound) for e in read_events(folder) if e.kind == what}


def of(state: State, x: int) -> Evaluation:
    return next(e for e in state.history if e.candidate.parameters["X"] == x)


def test_a_slow_device_does_not_change_the_ranking(tmp_path: Path) -> None:
    gpu_workers = fake_gpus(devices(1.0, 2.0))
    state = search(tmp_path, gpu_workers).run()
    assert ranked(state) == list(range(len(TIMES)))
    ran = heats(tmp_path)
    assert list(ran) == [(0, 0, 0), (0, 0, 1)]
    assert sorted(n for heat in ran.values() for n in heat.candidates) == list(range(len(TIMES)))
    assert {len(heat.candidates) for heat in ran.values()} == {6}
    absolute = {
        n: raced.us["s"]
        for heat in ran.values()
        if heat.race
        for n, raced in zip(heat.candidates, heat.race.raced, strict=True)
    }
    assert sorted(absolute, key=lambda n: absolute[n]) != list(range(len(TIMES)))  # times would have ranked wrongly
    for e in state.history:
        x = int(e.candidate.parameters["X"])
        assert state.baseline_us * 1e-6 / (e.fitness or 0) == pytest.approx(BASELINE_US / TIMES[x], rel=0.03)
        heat = next(heat for heat in ran.values() if x in heat.candidates)
        assert f"on GPU {heat.gpu}" in e.feedback
    final = heats(tmp_path, "final")[(0,)]
    assert (final.gpu, len(final.candidates)) == ("0", 2)
    assert 0 in final.candidates
    assert [place for place, _ in fakes(gpu_workers).started] == [0, 1, 0]
    assert fakes(gpu_workers).at_once == [2, 1, 1]  # both heats had begun before the first one's answer was waited for
    assert state.gpus == gpu_workers.gpus
    records = {e.digest: e.kind for e in read_events(tmp_path)}
    assert sorted(records[i.record] for i in state.insights) == ["final"] * 2 + ["raced"] * 10


def test_the_final_puts_the_heats_on_one_scale(tmp_path: Path) -> None:
    """A device on which all kernels gain a tenth more than they do on the first: its heat's winner must not lead."""
    flattering = FakeStages([us / 1.1 for us in TIMES])
    state = search(tmp_path, fake_gpus([FakeStages(TIMES), flattering])).run()
    assert ranked(state) == list(range(len(TIMES)))
    assert any("on the scale of the final on GPU 0" in e.feedback for e in state.history)


def test_gpu_seconds_are_those_of_all_gpus(tmp_path: Path) -> None:
    state = search(tmp_path, fake_gpus(devices(1.0, 1.0))).run()
    assert state.gpu_seconds == 6.0  # two heats and a final, of two seconds each as the gpu_workers say
    assert sum(e.gpu_seconds for e in state.history) == pytest.approx(6.0, abs=0.01)


def test_a_gpu_that_is_lost_costs_its_candidates_one_more_try(tmp_path: Path) -> None:
    gpu_workers = fake_gpus(devices(1.0, 2.0), lambda place, names: place == 1)
    state = search(tmp_path, gpu_workers).run()
    assert ranked(state) == list(range(len(TIMES)))
    ran = heats(tmp_path)
    assert list(ran) == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert (ran[0, 0, 1].race, ran[0, 0, 1].lost) == (None, "CUDA error on GPU 1")
    assert ran[0, 1, 0].candidates == ran[0, 0, 1].candidates


def test_who_loses_two_gpus_ends_and_takes_its_heat_only(tmp_path: Path) -> None:
    gpu_workers = fake_gpus(devices(1.0, 1.0), lambda _, names: "5" in names)
    state = search(tmp_path, gpu_workers).run()
    ran = heats(tmp_path)
    twice = next(heat for at, heat in ran.items() if at[1] == 1)
    assert twice.lost
    for e in state.history:
        failed = e.candidate.parameters["X"] in twice.candidates
        assert (e.stage, e.valid) == ("race", not failed)
        assert ("was lost, 2 times: CUDA error on GPU" in e.feedback) == failed
    assert not of(state, 5).valid
    assert sum(e.valid for e in state.history) == 6


def test_with_no_gpu_left_the_run_stops_and_resumes(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no GPU is left to race on: CUDA error on GPU 0"):
        search(tmp_path, fake_gpus(devices(1.0, 1.0), lambda *_: True)).run()
    assert heats(tmp_path) == {}  # no candidate is blamed
    with pytest.raises(WorkerError, match="no GPU is left"):
        search(tmp_path / "one", fake_gpus(devices(1.0, 1.0), lambda *_: True), batch=1).run()
    assert ranked(search(tmp_path, fake_gpus(devices(1.0, 1.0))).run()) == list(range(len(TIMES)))


def test_a_lost_final_leaves_the_heats_as_they_are(tmp_path: Path) -> None:
    gpu_workers = fake_gpus(devices(1.0, 2.0), lambda _, names: len(names) == 2)
    state = search(tmp_path, gpu_workers).run()
    assert heats(tmp_path, "final")[(0,)].lost
    assert ranked(state) == list(range(len(TIMES)))


@pytest.mark.parametrize("fault", ["wrong", "crash", "late"])
def test_a_winner_that_fails_in_the_final_is_no_winner(tmp_path: Path, fault: str) -> None:
    """GPU 1's winner is right there, and not on GPU 0."""
    failed = min(random.Random("0 deal 0").sample(range(len(TIMES)), len(TIMES))[1::2])
    gpu_workers = fake_gpus([FakeStages(TIMES, {str(failed): fault}), FakeStages(TIMES)])
    state = search(tmp_path, gpu_workers).run()
    assert heats(tmp_path, "final")[(0,)].race is not None
    assert not of(state, failed).valid
    assert of(state, failed).stage == ("CORRECTNESS" if fault == "wrong" else "race")
    assert "in the final on GPU 0; before it, " in of(state, failed).feedback
    assert ranked(state) == [n for n in range(len(TIMES)) if n != failed]


def test_a_run_is_cut_anywhere_and_comes_to_the_same_bytes(tmp_path: Path) -> None:
    def gpu_workers() -> GpuWorkers:
        return fake_gpus(devices(1.0, 2.0, 1.5), lambda place, names: place == 2)

    search(tmp_path / "whole", gpu_workers(), batch=6).run()
    whole = (tmp_path / "whole" / EVENTS).read_bytes()
    lines = whole.splitlines(keepends=True)
    cuts = [e.n for e in read_events(tmp_path / "whole") if e.kind in ("gpus", "raced", "final", "evaluated")]
    assert len(cuts) == 1 + 2 * (3 + 2 + 1 + 1) + 1
    for n in cuts:
        folder = tmp_path / f"cut{n}"
        folder.mkdir()
        (folder / EVENTS).write_bytes(b"".join(lines[:n]) + lines[n][:20])
        again = gpu_workers()
        search(folder, again, batch=6).run()
        assert (folder / EVENTS).read_bytes() == whole
        ran = sum(b'"what":"raced"' in line or b'"what":"final"' in line for line in lines[n:])
        assert len(fakes(again).started) == ran  # logged work is not run again
    finished = fake_gpus(devices(1.0))
    search(tmp_path / "whole", finished, batch=6).run()  # other GPUs, or none, read it
    state = search(tmp_path / "whole", None, batch=6).run()
    assert ranked(state) == list(range(len(TIMES)))
    assert (tmp_path / "whole" / EVENTS).read_bytes() == whole


def test_other_gpus_do_not_go_on_with_a_run(tmp_path: Path) -> None:
    search(tmp_path / "a", fake_gpus(devices(1.0, 1.0))).run()
    head = (tmp_path / "a" / EVENTS).read_bytes().splitlines(keepends=True)
    n = next(e.n for e in read_events(tmp_path / "a") if e.kind == "raced")
    for gpu_workers in (None, fake_gpus(devices(1.0, 1.0, 1.0))):
        (tmp_path / "a" / EVENTS).write_bytes(b"".join(head[:n]))
        with pytest.raises(MachineError, match=r"GPUs that it began with \(0: fake, 1: fake\), and they are not here"):
            search(tmp_path / "a", gpu_workers).run()


@pytest.mark.slow  # each process imports the judge
def test_processes_of_two_gpus() -> None:
    """Two race at once, and again after one of them ended its process."""
    pool = ProcessPool([functools.partial(make_stages, gpu) for gpu in (0, 1)])
    good, ends = (functools.partial(run_halving, candidates=[Candidate(parameters={"X": x})], seed=7) for x in (0, 1))
    try:
        waits = [pool.start(slot, good) for slot in (0, 1)]
        (first, seconds), (second, _) = (wait() for wait in waits)
        assert seconds > 0
        assert second.raced[0].us["s"] == pytest.approx(2 * first.raced[0].us["s"], rel=0.05)
        waits = [pool.start(0, good), pool.start(1, ends)]
        assert waits[0]()[0].raced[0].speedup == pytest.approx(2, rel=0.02)
        with pytest.raises(WorkerError, match="its process ended"):
            waits[1]()
        assert pool.start(1, good)()[0].raced[0].speedup == pytest.approx(2, rel=0.02)  # in a new process
    finally:
        pool.close()


_JOBS = [operator.methodcaller("built", candidate(kind)) for kind in KINDS]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    task = write_search_task(tmp_path / "task")
    space = read_space(task / "space.json")
    return Manifest(
        created="", task=str(task), space=space, space_folder=str(task), proposer="random", shapes=["tiny"],
        small=["tiny"], arch="sm_89", device="emulator",
    )  # fmt: skip


@pytest.fixture
def expected(manifest: Manifest, tmp_path: Path) -> list[StageResult]:
    with Stages(manifest, tmp_path / "here") as stages:
        found = list(InProcess(stages).results(_JOBS))
    assert [f.valid for f in found] == [kind in (0, 1, 2, 4) for kind in KINDS]
    return found


def test_a_gpu_that_follows_leaves_the_emulator_few_cases(manifest: Manifest, tmp_path: Path) -> None:
    """All variants of the smallest shape, and one case of each other shape that the emulator runs beside a GPU."""
    small_name, task = "b1_h1_s32_d64", find_task("fp8_sdpa").folder
    names = {"shapes": [small_name], "small": [small_name], "task": str(task), "space_folder": str(task)}
    manifest = msgspec.structs.replace(manifest, **names, space=read_space(task / "space.json"))
    asked: dict[bool, list[str]] = {}
    for follows in (False, True):
        with Stages(manifest, tmp_path / str(follows), gpu_follows=follows) as stages:

            def run_gates(request: Any, *_: Any, stages: Stages = stages, **__: Any) -> StageResult:
                asked[stages.gpu_follows] = [str(case) for case in request.case_plans]
                return StageResult(stage="CORRECTNESS", valid=True)

            stages._run_gates = run_gates  # type: ignore[method-assign]
            stages.emulated(None, 12345678)
    shapes = {follows: {case.partition(" ")[0] for case in cases} for follows, cases in asked.items()}
    small = [case for case in asked[False] if case.startswith(f"{small_name} ")]
    assert [case for case in asked[True] if case.startswith(f"{small_name} ")] == small
    assert len(asked[True]) - len(small) == len(shapes[True] - {small_name}) >= 1
    assert set(asked[True]) < set(asked[False])


def test_workers_are_one_per_core_and_at_most_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    assert [read_workers("local", batch) for batch in (4, 8)] == [4, 6]
    assert read_workers("local:9", 4) == 9


@pytest.mark.slow  # each worker is a process that imports all of the judge
def test_processes(manifest: Manifest, expected: list[StageResult], tmp_path: Path) -> None:
    with Stages(manifest, tmp_path) as stages:
        workers = make_workers("local:2", manifest, tmp_path, stages)
        assert isinstance(workers, ProcessPool)
        assert list(workers.results(_JOBS)) == expected
        ended, *others = workers.results([end_process, *_JOBS])
        assert (ended.valid, ended.feedback) == (False, "its worker ended twice while it was evaluated")
        assert others == expected
        workers.close()


def end_process(stages: Stages) -> None:
    os._exit(3)
