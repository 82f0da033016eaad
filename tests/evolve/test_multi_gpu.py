"""Races spread over several GPUs: none mixes devices, a lost one costs its candidates a try, and runs resume."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.device.worker import WorkerError
from greenfast.evolve.event_log import EVENTS, read_events
from greenfast.evolve.halving import GpuRound, run_halving
from greenfast.evolve.loop import Search, State
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Candidate, Context, Evaluation
from greenfast.evolve.space import Parameter, Space
from greenfast.evolve.workers import GpuWorkers, InProcess, ProcessPool
from greenfast.spec.errors import MachineError
from tests.evolve.racing import BASELINE_US, FakeStages, FakeWorkers, fake_gpus, in_a_process
from tests.evolve.test_loop import Proposes, Stages, Watcher

#: Of candidates by number; in absolute time the slow device's fastest comes behind all of the other's.
TIMES = [50, 54, 58, 62, 66, 70, 75, 80, 85, 90, 95, 99]
SPACE = Space(name="s", parameters={"X": Parameter(values=tuple(range(len(TIMES))))})


class Right(Stages):
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
        assert len(fakes(again).started) == ran  # what was logged is not run again
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
    pool = ProcessPool([functools.partial(in_a_process, gpu) for gpu in (0, 1)])
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
