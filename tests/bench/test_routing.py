"""The shapes that routing is measured on, and the rules that are made of a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from greenfast.bench import routing
from greenfast.bench.attention import flops
from greenfast.bench.record import Benchmark, Row
from tests.bench.benchmarks import peers_record

Gain = Callable[[dict[str, int]], dict[str, float]]


def record(gain: Gain) -> Benchmark:
    """PyTorch takes 100 us on every shape, greenfast that divided by the gain in a precision."""
    rows = [
        Row(
            shape=s.name,
            dims=s.dims,
            grid=True,
            contender=name,
            cache="beyond L2",
            median_us=us,
            p25_us=us,
            p75_us=us,
            error=0.05,
            rounds=7,
            calls=3,
            tflops=1.0,
        )
        for s in routing.shapes()
        for name, us in {"torch": 100.0, **{f"sdpa_{p}": 100.0 / g for p, g in gain(s.dims).items()}}.items()
    ]
    own = ["sdpa_fp8", "sdpa_int8"]
    return peers_record(comparison="routing", own=own, rows=rows, versus=[], side=None)


def from_2048_keys(dims: dict[str, int]) -> dict[str, float]:
    """Where there are many queries and keys, fp8 gains, at head dim 256 int8 more; elsewhere both lose."""
    long = dims["KV"] >= 2048 and dims["S"] * dims["H"] // dims["HK"] >= 1024
    return {"fp8": 1.25 if long else 0.8, "int8": (1.5 if dims["D"] == 256 else 1.1) if long else 0.7}


def test_shapes_differ_and_cover_what_decides() -> None:
    found = routing.shapes()
    assert len({s.name for s in found}) == len(found) == len({tuple(sorted(s.dims.items())) for s in found})
    assert 150 <= len(found) <= 250
    for key, values in {"D": {64, 128, 256}, "CAUSAL": {0, 1}}.items():
        assert {s.dims[key] for s in found} == values
    assert {s.dims["H"] // s.dims["HK"] for s in found} == {1, 4, 8}
    assert min(s.dims["S"] for s in found) == 16
    assert max(s.dims["KV"] for s in found) == 32768
    assert [c.contenders for c in routing.routing().timed] == [("sdpa_fp8", "sdpa_int8", "torch")] * len(found)


def test_rules_take_what_gains_and_nothing_else() -> None:
    found = routing.rules(record(from_2048_keys))
    assert len(found) == 12
    for rule in found:
        taken = [
            s for s in routing.shapes()
            if (s.dims["D"], bool(s.dims["CAUSAL"])) == (rule["head_dim"], rule["causal"])
            and s.dims["S"] * s.dims["H"] // s.dims["HK"] >= rule["least"][0]
            and s.dims["KV"] >= rule["least"][1]
            and flops(s.dims) / 1e9 >= rule["least"][2]
        ]  # fmt: skip
        assert len(taken) == rule["shapes"]
        assert all(from_2048_keys(s.dims)[rule["precision"]] > 1 for s in taken)
        best = 1.25 if rule["precision"] == "fp8" else 1.5 if rule["head_dim"] == 256 else 1.1
        assert rule["slowest"] == rule["mean"] == rule["fastest"] == best
        missed = rule["of"] - rule["shapes"]
        assert missed == sum(
            from_2048_keys(s.dims)["fp8"] < 1 for s in routing.shapes()
            if (s.dims["D"], bool(s.dims["CAUSAL"])) == (rule["head_dim"], rule["causal"])
        )  # fmt: skip


def test_one_slow_shape_is_kept_out() -> None:
    """A rule that takes everything would be slower there."""

    def gain(dims: dict[str, int]) -> dict[str, float]:
        slow = dims["S"] == dims["KV"] == 4096 and dims["HK"] == dims["H"] and dims["B"] == 1
        return {"fp8": 0.9 if slow else 1.3, "int8": 0.9}

    found = routing.rules(record(gain))
    assert {rule["precision"] for rule in found} == {"fp8"}, "int8 is slower on every shape"
    for rule in found:
        assert rule["slowest"] == 1.3
        assert rule["shapes"] < rule["of"]


def test_held_out_shapes_show_a_rule_that_was_luck() -> None:
    """Every second shape of a head dim and mask gains; of the others only the longest do."""
    seen: Counter[tuple[int, int]] = Counter()

    def gain(dims: dict[str, int]) -> dict[str, float]:
        kind = (dims["D"], dims["CAUSAL"])
        seen[kind] += 1
        return {"fp8": 1.2 if seen[kind] % 2 or min(dims["S"], dims["KV"]) == 32768 else 0.7, "int8": 0.5}

    found = routing.rules(record(gain))
    assert [rule["held_out"] for rule in found] == [0.7] * 6
    assert all(rule["slowest"] == 1.2 and rule["shapes"] < rule["of"] for rule in found)


def test_shapes_without_a_time_are_left_out() -> None:
    whole = record(from_2048_keys)
    shape = routing.shapes()[0].name
    rows = [r for r in whole.rows if (r.shape, r.contender) != (shape, "torch")]
    found = routing.points(peers_record(comparison="routing", rows=rows, versus=[], side=None))
    assert sum(map(len, found.values())) == len(routing.shapes()) - 1


def test_the_table_has_a_line_for_each_rule() -> None:
    found = routing.rules(record(from_2048_keys))
    lines = routing.rules_table(found).splitlines()
    assert len(lines) == 2 + len(found)
    assert "| 64, none | fp8 |" in lines[2]
    assert {line.count("|") for line in lines} == {7}


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_every_kernel_that_is_timed_is_named(precision: str) -> None:
    names = list(routing.routing().kernels())  # type: ignore[misc]
    assert any(f"step 2 of {precision}" in name for name in names)
