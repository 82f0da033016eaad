"""The Hopper kernel with tiles that are named: the shipped ones make the shipped kernel, others are refused by rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.evolve.space import read_space
from greenfast.kernels.attention import hopper, tuning_space
from greenfast.kernels.attention.config import read_dims
from greenfast.kernels.attention.heuristics import Rule, planned, rules, tiling
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from tests.kernels.tiling_dims import MULTIPROCESSORS, rule_dims

TASK = Path(__file__).parents[2] / "tasks" / "fp8_attention"
GOOD = {
    "BLOCK_N": 128,
    "CONSUMERS": 2,
    "STAGES": 3,
    "OUT_COLUMNS": 128,
    "PING_PONG": 1,
    "POLYNOMIALS": 8,
    "OVERLAP": 1,
    "TWO_LEVELS": 1,
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [0, 1])
def test_the_shipped_tiles_make_the_shipped_kernel(head_dim: int, causal: int) -> None:
    dims = {"B": 4, "H": 32, "S": 4096, "D": head_dim} | ({"CAUSAL": 1} if causal else {})
    config, sizes = read_dims(dims, "e4m3")
    tiles, _ = tiling(config, sizes, hopper.TARGET.multiprocessors)
    toggles = {name: int(getattr(tiles, field)) for name, field in tuning_space.TOGGLES.items()}
    assert tuning_space.kernel(toggles, "e4m3", dims) == hopper.kernel(config, sizes)
    assert tuning_space.launch(toggles, "e4m3", dims) == hopper.launch(config, sizes)
    space = read_space(TASK / f"space_d{head_dim}.json")
    assert space.decode(toggles) == toggles  # a search can find what ships


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_space_allows_nothing_that_the_family_refuses(head_dim: int) -> None:
    config, _ = read_dims({"B": 1, "H": 1, "S": 1, "D": head_dim}, "e4m3")
    points = list(read_space(TASK / f"space_d{head_dim}.json").listed())
    assert len(points) >= 50
    for point in points:
        tuning_space.parse_tiles({name: int(value) for name, value in point.items()}, config)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"BLOCK_N": 64}, "multiple of 128"),
        ({"CONSUMERS": 3}, "CONSUMERS is not"),
        ({"OUT_COLUMNS": 96}, "does not divide"),
        ({"OUT_COLUMNS": 64}, "OVERLAP=1 needs"),
        ({"OVERLAP": 0, "TWO_LEVELS": 0}, "TWO_LEVELS=0 needs"),
        ({"CONSUMERS": 1}, "PING_PONG=1 needs"),
        ({"STAGES": 12}, "bytes of shared memory"),
    ],
)
def test_a_rule_is_named(change: dict[str, int], rule: str) -> None:
    config, _ = read_dims({"B": 1, "H": 1, "S": 1, "D": 128}, "e4m3")
    tuning_space.parse_tiles(GOOD, config)
    with pytest.raises(UsageError, match=rule):
        tuning_space.parse_tiles({**GOOD, **change}, config)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.key}, {rule.keys}")
def test_a_measured_rule(rule: Rule) -> None:
    """It is taken on a full GPU from its first to its last number of keys."""
    config, sizes = read_dims(rule_dims(rule), rule.key[-1])
    tiles, why = tiling(config, sizes, MULTIPROCESSORS)
    assert tiles == rule.tiles != planned(config, sizes, MULTIPROCESSORS)[0]
    assert why.endswith(rule.quote)
    few = replace(sizes, kv_len=100)
    assert tiling(config, few, MULTIPROCESSORS) == planned(config, few, MULTIPROCESSORS), "below all that was measured"
    exact = replace(config, log_sum_exp=True)
    assert tiling(exact, sizes, MULTIPROCESSORS) == planned(exact, sizes, MULTIPROCESSORS)


#: One rule; the others are checked with the slow tests.
QUICK = {rule.key[0]: rule for rule in rules() if rule.key[0] == 128}.values()


@pytest.mark.parametrize(
    ("rule", "in_kernel"),
    [
        pytest.param(
            rule,
            in_kernel,
            id=f"{rule.key}, {rule.keys}, {in_kernel}",
            marks=[] if in_kernel and rule in QUICK else [pytest.mark.slow],
        )
        for rule in rules()
        for in_kernel in (True, False)
    ],
)
def test_kernels_of_a_measured_rule_hardly_spill(rule: Rule, in_kernel: bool) -> None:
    """in_kernel: whether the kernel quantizes its queries if it can, which takes more registers."""
    config, sizes = read_dims(rule_dims(rule), rule.key[-1])
    config = replace(config, fuse_q_quant=in_kernel and config.query_scales == "block")
    compiled = compile_kernel(hopper.kernel(config, sizes, MULTIPROCESSORS), Target("sm_90a"))
    assert compiled.resources.spill_bytes <= 64
    assert "C75" not in compiled.log, "the assembler serializes the products"
