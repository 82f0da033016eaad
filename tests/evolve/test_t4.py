"""The T4 format: what is written is what the schema asks for, and what others wrote is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning_cache import Cache
from greenfast.evolve.proposal import Candidate, Descriptor, Edit, Evaluation
from greenfast.evolve.t4 import build_results, read_t4
from greenfast.judge.store import to_json, write_whole
from greenfast.spec.errors import UsageError

#: As Kernel Tuner 1.0 writes a result, with what greenfast has no use for.
KERNEL_TUNER: dict[str, Any] = {
    "metadata": {"timeunit": "miliseconds"},
    "schema_version": "1.0.0",
    "results": [
        {
            "timestamp": "2023-12-22 09:54:05.502007+00:00",
            "configuration": {"block_size_x": 16, "tile_size_x": 2},
            "times": {"compilation": 918.5, "benchmark": 1.5, "framework": 105.2, "search_algorithm": 0,
                      "validation": 0, "runtimes": [3.5, 3.0]},
            "invalidity": "correct",
            "correctness": 1,
            "measurements": [{"name": "time", "value": 3.25, "unit": "ms"}, {"name": "GFLOP/s", "value": 9}],
            "objectives": ["time"],
        },
        {
            "timestamp": "2023-12-22 09:54:06+00:00",
            "configuration": {"block_size_x": 32, "tile_size_x": 2},
            "times": {"compilation": 0, "runtimes": []},
            "invalidity": "compile",
            "correctness": 1,
            "measurements": [{"name": "time", "value": "CompilationFailedConfig", "unit": "ms"}],
            "objectives": ["time"],
        },
        {
            "timestamp": "",
            "configuration": {"block_size_x": 64, "tile_size_x": 2},
            "times": {},
            "invalidity": "constraints",
            "correctness": 0,
        },
    ],
}  # fmt: skip


def test_kernel_tuners_file_is_a_cache(tmp_path: Path) -> None:
    file = tmp_path / "t4.json"
    file.write_text(json.dumps(KERNEL_TUNER))
    cache = Cache(read_t4(file), "conv")
    assert {n: p.values for n, p in cache.space.parameters.items()} == {"block_size_x": (16, 32), "tile_size_x": (2,)}
    right = cache.evaluate(Candidate(parameters={"block_size_x": 16, "tile_size_x": 2}))
    assert (right.valid, right.fitness, right.fitness_kind, right.behaviour) == (True, 0.00325, "seconds", None)
    failed = cache.evaluate(Candidate(parameters={"block_size_x": 32, "tile_size_x": 2}))
    assert (failed.valid, failed.stage, failed.fitness) == (False, "BUILD", None)
    assert cache.best == 0.00325


EVALUATIONS = (
    Evaluation(candidate=Candidate(parameters={"A": 1}), hash="x", stage="race", valid=True, fitness=2e-6,
               fitness_kind="seconds", behaviour=Descriptor(pipe="fma", smem_bytes=1024, registers=40),
               cost_seconds=3.0, gpu_seconds=0.5),
    Evaluation(candidate=Candidate(parameters={"A": 2}), stage="BUILD", valid=False),
    Evaluation(candidate=Candidate(parameters={"A": 3}), stage="screen", valid=True, fitness=7.0,
               fitness_kind="estimate"),
    Evaluation(candidate=Candidate(parameters={"A": 4}), stage="CORRECTNESS", valid=False),
    Evaluation(candidate=Candidate(parameters={"A": 5}), hash="x", stage="duplicate", valid=True, fitness=2e-6),
    Evaluation(candidate=Candidate(parameters={"A": 6}, edits=(Edit(region="r", text=""),)), stage="race", valid=True),
)  # fmt: skip


def test_what_is_written_is_what_the_schema_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "t4.json"
    write_whole(file, to_json(build_results(EVALUATIONS, {"device": "a GPU"})))
    content = json.loads(file.read_bytes())
    assert content["schema_version"] == "1.0.0"
    rows = content["results"]
    assert [row["configuration"]["A"] for row in rows] == [1, 2, 3, 4]
    assert [row["invalidity"] for row in rows] == ["correct", "compile", "correct", "correctness"]
    for row in rows:
        assert {"configuration", "times", "invalidity", "correctness"} <= row.keys()
        assert all(isinstance(value, (int, float)) for value in row["times"].values())
        assert all(m.keys() == {"name", "value", "unit"} for m in row["measurements"])
    assert rows[0]["measurements"] == [
        {"name": "time", "value": 0.002, "unit": "ms"},
        {"name": "pipe", "value": "fma", "unit": ""},
        {"name": "smem_bytes", "value": 1024, "unit": "bytes"},
        {"name": "registers", "value": 40, "unit": ""},
    ]
    assert rows[0]["times"] == {"framework": 3000.0, "benchmark": 500.0}
    assert rows[2]["measurements"] == [{"name": "estimate", "value": 7.0, "unit": ""}]  # and no time
    (read,) = [e for e in Cache(read_t4(file)).evaluations.values() if e.valid]
    assert (read.fitness, read.behaviour) == (2e-6, EVALUATIONS[0].behaviour)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(results=[]), "no results"),
        (lambda c: c.pop("results"), "not a T4 file"),
        (lambda c: c["results"][0].update(invalidity="perhaps"), "Invalid enum value 'perhaps'"),
        (lambda c: c["results"][0].update(configuration={"other": 1}), "different parameters"),
        (lambda c: c["results"].pop(0), "none of its 1 configurations is right"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, change: Any, said: str) -> None:
    content = json.loads(json.dumps(KERNEL_TUNER))
    change(content)
    file = tmp_path / "t4.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=said):
        Cache(read_t4(file))
