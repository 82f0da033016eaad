"""Workers give what one process gives, in the same order; one that is lost costs its candidate only."""

from __future__ import annotations

import operator
import os
from pathlib import Path

import pytest

from greenfast.evolve.manifest import Manifest
from greenfast.evolve.space import read_space
from greenfast.evolve.stages import StageResult, Stages
from greenfast.evolve.workers import InProcess, ProcessPool, make_workers
from tests.evolve.doubling import KINDS, candidate, write_search_task

pytestmark = pytest.mark.slow  # each worker is a process that imports all of the judge
JOBS = [operator.methodcaller("built", candidate(kind)) for kind in KINDS]


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
        found = list(InProcess(stages).results(JOBS))
    assert [f.valid for f in found] == [kind in (0, 1, 2, 4) for kind in KINDS]
    return found


def test_processes(manifest: Manifest, expected: list[StageResult], tmp_path: Path) -> None:
    with Stages(manifest, tmp_path) as stages:
        workers = make_workers("local:2", manifest, tmp_path, stages)
        assert isinstance(workers, ProcessPool)
        assert list(workers.results(JOBS)) == expected
        ended, *others = workers.results([end_process, *JOBS])
        assert (ended.valid, ended.feedback) == (False, "its worker ended twice while it was evaluated")
        assert others == expected
        workers.close()


def end_process(stages: Stages) -> None:
    os._exit(3)
