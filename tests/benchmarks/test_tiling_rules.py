"""From times of tilings to rules: an interval over processes decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiling_rules import LEAST_PROCESSES, derive_tiling_rules, find_fastest_tiling
from greenfast.kernels.attention import tuning_space

SHIPPED = {
    "BLOCK_N": 128,
    "CONSUMERS": 2,
    "STAGES": 4,
    "OUT_COLUMNS": 128,
    "PING_PONG": 1,
    "POLYNOMIALS": 8,
    "OVERLAP": 1,
    "TWO_LEVELS": 1,
}
OTHER, THIRD = {**SHIPPED, "STAGES": 3}, {**SHIPPED, "POLYNOMIALS": 12}
ROUNDS = 12


def process(gains: list[tuple[dict[str, int], float]], number: int) -> dict[str, Any]:
    """Times of one process in which a tiling gains so much, with noise of 0.1 %."""
    noise = [1 + 0.001 * ((7 * i + 3 * number) % 5 - 2) for i in range(ROUNDS)]
    tiled = [{"configuration": t, "ms": [x / gain for x in noise]} for t, gain in gains]
    return {"shipped_ms": [1.0] * 2 * ROUNDS, "tilings": tiled}


def metadata(*gains: list[tuple[dict[str, int], float]], length: int = 1024) -> dict[str, Any]:
    """Of a T4 file: what each process found."""
    return {
        "device": "GPU",
        "shape": {"B": 1, "H": 1, "S": length, "D": 128},
        "format": "e4m3",
        "shipped": SHIPPED,
        "confirmed": [process(of, number) for number, of in enumerate(gains)],
    }


@pytest.mark.parametrize(
    ("gains", "wanted"),
    [
        ([[(OTHER, 1.03), (THIRD, 1.05)]] * 3, THIRD),
        ([[(OTHER, 1.03), (SHIPPED, 1.05)]] * 3, OTHER),  # noise of the planned tiling itself
        ([[(OTHER, 1.009)]] * 3, None),
        ([[(OTHER, 1.05)], [(OTHER, 1.05)], [(OTHER, 0.97)]], None),  # processes disagree
        ([[(OTHER, 1.05)]] * (LEAST_PROCESSES - 1), None),
        ([[(OTHER, 1.02), (THIRD, 1.2)], [(OTHER, 1.02)], [(OTHER, 1.02)]], OTHER),  # one process alone had the third
    ],
)
def test_the_fastest(gains: list[list[tuple[dict[str, int], float]]], wanted: dict[str, int] | None) -> None:
    found = find_fastest_tiling(metadata(*gains))
    assert (found and found[0]) == wanted
    if found:
        assert 1.01 < found[1].low < found[1].high


def test_rules(tmp_path: Path) -> None:
    faster = [[(OTHER, 1.03)]] * 3
    for length, gains in ((1024, faster), (4096, [[(OTHER, 1.0)]] * 3), (16384, faster)):
        (tmp_path / f"s{length}.json").write_text(json.dumps({"metadata": metadata(*gains, length=length)}))
    (tmp_path / "unconfirmed.json").write_text('{"metadata": {}}')
    data = derive_tiling_rules(tmp_path, tmp_path.parent)
    assert data["device"] == "GPU"
    assert [rule["keys"] for rule in data["rules"]] == [[1024, 4096], [16384, None]]
    for rule in data["rules"]:
        assert rule["of"] == [128, False, "head", "head", "head", "e4m3"]
        assert rule["tiles"] == {**rule["instead_of"], "stages": 3}
        assert set(rule["tiles"]) >= set(tuning_space.TOGGLES.values())
        assert rule["record"].startswith(tmp_path.name)
