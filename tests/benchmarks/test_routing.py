"""The shapes that routing is measured on, and the rules that are made of a record."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks import routing
from benchmarks.records import Benchmark, Row
from benchmarks.sdpa import flops
from greenfast.ops.quantized import PRECISIONS
from greenfast.ops.routing_rules import FA3, TORCH
from tests.benchmarks.benchmarks import peers_record

Gain = Callable[[dict[str, int]], dict[str, float]]


def record(gain: Gain) -> Benchmark:
    """PyTorch takes 100 us on every shape, greenfast that divided by the gain in a precision."""
    rows = [
        Row(
            shape=s.name,
            dims=s.dims,
            grid=True,
            backend=name,
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
    assert 200 <= len(found) <= 250
    for key, values in {"D": {64, 128, 256}, "CAUSAL": {0, 1}}.items():
        assert {s.dims[key] for s in found} == values
    assert {s.dims["H"] // s.dims["HK"] for s in found} == {1, 4, 8}
    assert min(s.dims["S"] for s in found) == 16
    assert max(s.dims["KV"] for s in found) == 32768
    assert [c.backends for c in routing.routing().timed] == [
        ("sdpa_fp8", "sdpa_int8", "sdpa_int8_fine", "torch", "fa3_bf16")
    ] * len(found)
    few = [s for s in found if s.dims["S"] < s.dims["KV"]]
    assert {s.dims["B"] for s in few} == {1, 5, 40}, "where one sequence leaves multiprocessors idle, more do not"


def rules(gain: Gain) -> list[dict[str, Any]]:
    return routing.rules([("a record", record(gain))])


def reached(rule: dict[str, Any], share: float) -> list[dict[str, int]]:
    """The shapes of a rule's kind with at least this share of each of its thresholds."""
    found = []
    for dims in (s.dims for s in routing.shapes()):
        sizes = (dims["S"] * dims["H"] // dims["HK"], dims["KV"], flops(dims) / 1e9)
        if (dims["D"], bool(dims["CAUSAL"])) == (rule["head_dim"], rule["causal"]):
            found += [dims] * all(x >= share * least for x, least in zip(sizes, rule["least"], strict=True))
    return found


def test_rules_take_what_gains_at_a_distance_from_what_does_not() -> None:
    found = rules(from_2048_keys)
    assert len(found) == 12
    for rule in found:
        assert (rule["against"], rule["record"]) == (TORCH, "a record")
        taken, near = reached(rule, 1.0), reached(rule, 0.5)
        assert len(near) > len(taken) == rule["shapes"] > rule["of"] / 4
        assert all(from_2048_keys(dims)[rule["precision"]] > 1 for dims in near)
        best = 1.25 if rule["precision"] == "fp8" else 1.5 if rule["head_dim"] == 256 else 1.1
        assert rule["slowest"] == rule["mean"] == rule["fastest"] == rule["held_out"] == best
        assert rule["least"][1] == 4096, "half of 3,072 is 1,536, which is slower"


def test_one_slow_shape_is_kept_out() -> None:
    """A rule that takes everything would be slower there."""

    def gain(dims: dict[str, int]) -> dict[str, float]:
        slow = dims["S"] == dims["KV"] == 4096 and dims["HK"] == dims["H"] and dims["B"] == 1
        return {"fp8": 0.9 if slow else 1.3, "int8": 0.9}

    for rule in rules(gain):
        if rule["precision"] == "int8":
            assert (rule["least"], rule["shapes"]) == (None, 0), "it is slower on every shape"
        else:
            assert rule["slowest"] == 1.3
            assert 0 < rule["shapes"] < rule["of"]


def test_gains_of_a_gpu_that_is_not_full_make_no_rule_alone() -> None:
    """A few queries that gain in one sequence, where many are not measured, say nothing of many sequences."""

    def gain(dims: dict[str, int]) -> dict[str, float]:
        return {"fp8": 1.3 if dims["S"] >= 2048 or (dims["S"] <= 128 and dims["B"] == 1) else 0.8, "int8": 0.5}

    one = record(gain)
    alone = [r for r in one.rows if r.dims["S"] > 128 or r.dims["B"] == 1]
    for rows in (one.rows, alone):
        for rule in routing.rules([("a record", peers_record(comparison="routing", rows=rows, versus=[], side=None))]):
            if rule["precision"] == "fp8":
                assert all(dims["S"] >= 2048 for dims in reached(rule, 1.0))


def test_a_shape_is_held_out_once() -> None:
    """One shape of each kind is slower than all others around it: without it, the rule would take it."""

    def gain(dims: dict[str, int]) -> dict[str, float]:
        slow = (dims["S"], dims["KV"], dims["B"]) == (8192, 8192, 2) and dims["HK"] == dims["H"]
        return {"fp8": 0.7 if slow else 1.2, "int8": 0.5}

    found = [rule for rule in rules(gain) if rule["least"]]
    assert [rule["held_out"] for rule in found] == [0.7] * 6
    assert all(rule["slowest"] == 1.2 and rule["shapes"] < rule["of"] for rule in found)


def test_flash_attention_3_is_a_rival_where_it_was_timed() -> None:
    """A rule of each rival and precision comes from the first record that has its times."""
    first = record(from_2048_keys)
    second = record(lambda dims: {"int8": 0.9, "int8_fine": 1.4})
    flash = [
        msgspec.structs.replace(r, backend="fa3_bf16", median_us=80.0) for r in second.rows if r.backend == "torch"
    ]
    second = msgspec.structs.replace(second, rows=[*second.rows, *flash[::2]])
    found = routing.rules([("first", first), ("second", second)])
    sources = {(rule["against"], rule["precision"]): rule["record"] for rule in found}
    assert sources == {
        (TORCH, "fp8"): "first", (TORCH, "int8"): "first", (TORCH, "int8_fine"): "second",
        (FA3, "int8"): "second", (FA3, "int8_fine"): "second",
    }  # fmt: skip
    fine = {rule["against"]: rule for rule in found if rule["precision"] == "int8_fine"}
    assert (fine[TORCH]["slowest"], fine[FA3]["slowest"]) == (1.4, 1.12)
    assert sum(rule["of"] for rule in found if (rule["against"], rule["precision"]) == (FA3, "int8")) == len(flash[::2])


def test_shapes_without_a_time_are_left_out() -> None:
    whole = record(from_2048_keys)
    shape = routing.shapes()[0].name
    rows = [r for r in whole.rows if (r.shape, r.backend) != (shape, "torch")]
    found = routing.points(peers_record(comparison="routing", rows=rows, versus=[], side=None), TORCH)
    assert sum(map(len, found.values())) == len(routing.shapes()) - 1


def test_the_table_has_a_line_for_each_rule() -> None:
    found = [*rules(from_2048_keys), *rules(lambda dims: {"int8_fine": 0.5})]
    lines = routing.rules_table(found, TORCH).splitlines()
    assert len(lines) == 2 + len(found) + 2 == 22
    source = f"[{len(routing.shapes())} shapes](../a record) on NVIDIA H100"
    assert lines[-1] == f"Measured: fp8, int8, int8_fine on {source}."
    assert "| 64, none | fp8 |" in lines[2]
    assert re.fullmatch(r"\| 64, none \| int8_fine \|  \| 0 of \d+ \|  \|  \|", lines[14])
    assert {line.count("|") for line in lines[:-2]} == {7}
    assert len(routing.rules_table(found, FA3).splitlines()) == 2


def test_every_kernel_that_is_timed_is_named() -> None:
    names = list(routing.routing().kernels())  # type: ignore[misc]
    assert all(any(f"step 2 of {precision}," in name for name in names) for precision in PRECISIONS)
