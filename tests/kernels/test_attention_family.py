"""The attention kernels as a family: which kernel toggles select, which one suits a call, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks.kernel import chosen_rung
from greenfast.judge.task import Shape, choices, find_task, load
from greenfast.kernels.attention import ada, hopper
from greenfast.kernels.attention.config import FORMATS, read_dims
from greenfast.spec.arch import TARGETS, Target
from greenfast.spec.errors import UsageError
from tasks.fp8_attention import family as fast
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder

DIMS = {"B": 1, "H": 8, "S": 512, "D": 64}
HOPPER, ADA, STAGE2 = ({"USE_WGMMA": w, "USE_QMMA": q} for w, q in ((1, 0), (0, 1), (0, 0)))


def test_toggles_name_a_kernel() -> None:
    assert fast.kernel(HOPPER, "e4m3", DIMS) == hopper.kernel(*read_dims(DIMS, "e4m3"))
    assert fast.launch(HOPPER, "e4m3", DIMS) == hopper.launch(*read_dims(DIMS, "e4m3"))
    assert fast.kernel(ADA, "int8", DIMS) == ada.kernel(read_dims(DIMS, "int8")[0])
    assert fast.launch(ADA, "int8", DIMS) == ada.launch(*read_dims(DIMS, "int8"))
    assert fast.kernel(STAGE2, "e4m3", DIMS).entry == ladder.ENTRY


@pytest.mark.parametrize(
    ("toggles", "fmt", "extras", "instrumented", "says"),
    [
        (STAGE2, "int8", {}, False, "with int8 V is E4M3: compare with ada"),
        (STAGE2, "e4m3", {"CAUSAL": 1}, False, "Stage 2 has no mask"),
        (STAGE2, "e4m3", {"LSE": 1}, False, "no log_sum_exp"),
        (STAGE2, "e4m3", {"D": 256}, False, "Stage 2 is for head dims 64, 128"),
        (HOPPER, "e4m3", {}, True, "no phases to count"),
        (ADA, "e4m3", {}, True, "no phase counters"),
        ({"USE_WGMMA": 1, "USE_QMMA": 1}, "e4m3", {}, False, "two kernels"),
    ],
)
def test_what_is_refused(
    toggles: dict[str, int], fmt: str, extras: dict[str, int], instrumented: bool, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        fast.kernel(toggles, fmt, {**DIMS, **extras}, instrumented=instrumented)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "extras", [{}, {"CAUSAL": 1}, {"D": 128, "HK": 2}, {"D": 256}, {"LSE": 1}, {"KBLOCK": 128}], ids=str
)
def test_a_choice_is_for_its_target(target: str, fmt: str, extras: dict[str, int]) -> None:
    dims = {**DIMS, **extras}
    config = find_task("fp8_attention").config
    (_, chosen), *_ = choices(load("fp8_attention"), Target(target), fmt, [Shape(name="x", dims=dims)])
    if isinstance(chosen, str):
        assert target != "sm_90a", "the Hopper kernel computes them all"
        assert chosen.startswith(f"no kernel for head_dim {dims['D']}, format {fmt}")
        return
    source = fast.kernel(config.variant(chosen.rung).values, fmt, dims)
    assert source.requires in ("", target)
    assert chosen.rung != "ada" or Target(target).capability >= (8, 9)


def test_shapes_that_take_different_variants() -> None:
    task = load("fp8_attention")
    small = Shape(name="small", dims=DIMS)
    assert chosen_rung(task, Target("sm_90a"), "e4m3", [small, Shape(name="wide", dims={**DIMS, "D": 256})]) == "hopper"
    with pytest.raises(UsageError, match=r"shape wide: no kernel for .*sm_89: the Ada kernel is for head dims 64, 128"):
        chosen_rung(task, Target("sm_89"), "e4m3", [small, Shape(name="wide", dims={**DIMS, "D": 256})])
    with pytest.raises(UsageError, match=r"task fp8_sdpa are chosen by name: scalar, "):
        chosen_rung(load("fp8_sdpa"), Target("sm_89"), "e4m3", [small])


def test_reasons() -> None:
    assert "1 should take the least time for 8 heads of 512" in fast.choose(Target("sm_90a"), "e4m3", DIMS).reason
    assert "native on sm_89; not timed" in fast.choose(Target("sm_89"), "e4m3", DIMS).reason
    assert "build for sm_90a" in fast.choose(Target("sm_90"), "e4m3", DIMS).reason
    assert fast.choose(Target("sm_80"), "e4m3", DIMS).rung == "stage2"
    with pytest.raises(UsageError, match=r"on sm_80: Stage 2 has no mask"):
        fast.choose(Target("sm_80"), "e4m3", {**DIMS, "CAUSAL": 1})
    with pytest.raises(UsageError, match=r"compute capability 7.5 is not supported"):
        Target.of_device((7, 5))
