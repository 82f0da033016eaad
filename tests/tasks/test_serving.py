"""The serving problem: what its reference computes, what its bound stops, and the smallest shape on the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.judge.check_plan import fits_dims
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.implementation import build_side
from greenfast.judge.task import Shape, load
from greenfast.numerics.serving import paged_attention
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array, References
from tasks.serving_attention import family
from tasks.serving_attention.problem import VARIANTS, decode, least_work, make_case, references
from tests.serving.oracle import Case, exact

TASK = load("serving_attention")
GATES = TASK.config.gates("e4m3")
DECODE = {"B": 3, "Q": 1, "S": 300, "H": 4, "HK": 2, "D": 64}
CHUNK = {"B": 3, "Q": 20, "S": 70, "H": 4, "HK": 2, "D": 64, "PAGE": 16}
OPTIONS = [
    DECODE, CHUNK, CHUNK | {"VROWS": 1, "D": 128}, CHUNK | {"HEADSCALE": 1, "S": 9}, DECODE | {"D": 256, "PAGE": 128},
]  # fmt: skip
SMALL_SHAPES = [s for s in TASK.config.shapes if math.prod(s.dims[name] for name in "BQSH") <= 500_000]
Inputs = dict[str, Array]


def as_case(dims: dict[str, int], inputs: Inputs) -> Case:
    """The inputs as the tests of serving have them."""
    tensors: dict[str, Any] = {name: torch.from_numpy(x) for name, x in inputs.items()}
    for name in ("k_cache", "v_cache"):
        tensors[name] = tensors[name].view(torch.float8_e4m3fn)
    options = {"causal": True, "softmax_scale": dims["D"] ** -0.5, "out_dtype": torch.float16}
    return Case(**tensors, q_scale=None, sinks=None, options=options)


def computed(dims: dict[str, int], inputs: Inputs) -> NDArray[np.float64]:
    """By the CPU's arithmetic, which is the kernels'."""
    out, _ = paged_attention(**as_case(dims, inputs).arguments())
    return decode({"out": out.numpy()}, "e4m3")


def passes(found: NDArray[np.float64], wanted: References) -> bool:
    gate = GATES.kernel_error
    relative = float(np.linalg.norm(found - wanted.exact) / np.linalg.norm(wanted.exact))
    return relative <= gate.relative_error and worst_bound_ratio(found, wanted.exact, wanted.bound) <= gate.bound_factor


@pytest.mark.parametrize("dims", OPTIONS, ids=str)
def test_the_reference_is_attention_over_the_pages(dims: dict[str, int]) -> None:
    case, wanted = make_case(dims, 1, "e4m3"), references(dims, 1, "e4m3")
    assert {name: (x.shape, x.dtype) for name, x in case.outputs.items()} == {"out": (wanted.exact.shape, "float16")}
    np.testing.assert_allclose(wanted.exact, exact(as_case(dims, case.inputs)).out.numpy(), rtol=1e-12, atol=1e-14)
    format_error = np.linalg.norm(wanted.exact - wanted.full) / np.linalg.norm(wanted.full)
    assert 0.02 < format_error < 0.08


@pytest.mark.parametrize("variant", ["normal", *VARIANTS])
@pytest.mark.parametrize("dims", OPTIONS, ids=str)
def test_right_arithmetic_is_within_the_bound(dims: dict[str, int], variant: str) -> None:
    found = computed(dims, make_case(dims, 2, "e4m3", variant).inputs)
    assert passes(found, references(dims, 2, "e4m3", variant))


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=lambda shape: shape.name)
def test_the_formats_error_is_within_its_gates(shape: Shape) -> None:
    found, gate = computed(shape.dims, make_case(shape.dims, 0, "e4m3").inputs), GATES.error
    error = error_stats(found, references(shape.dims, 0, "e4m3").full, gate.bad_abs_err)
    assert 0 < error.max_abs_err <= gate.max_abs_err
    assert error.mean_abs_err <= gate.mean_abs_err
    assert error.pct_bad <= gate.pct_bad


def wrong_pages(inputs: Inputs) -> Inputs:
    """A sequence's first page in place of another's."""
    table = inputs["block_table"].copy()
    table[0, 0] = table[1, 0]
    return {"block_table": table}


def full_lengths(inputs: Inputs) -> Inputs:
    """Each sequence with the keys of the longest, on the pages of its own, or of the first."""
    table = np.where(inputs["block_table"] < 0, inputs["block_table"][:1], inputs["block_table"])
    known = {name: np.nan_to_num(inputs[name], nan=0.01) for name in ("k_scale", "v_scale")}
    codes = {name: np.where(inputs[name] == 0x7F, 0x30, inputs[name]) for name in ("k_cache", "v_cache")}
    return (
        known | codes | {"block_table": table, "seqused_k": np.full_like(inputs["seqused_k"], inputs["seqused_k"][0])}
    )


@pytest.mark.parametrize("dims", [DECODE, CHUNK | {"B": 2}, CHUNK | {"HEADSCALE": 1}], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        wrong_pages,
        full_lengths,
        lambda given: {"v_scale": given["v_scale"] * np.float32(1.3)},
        lambda given: {"k_scale": given["k_scale"] * np.float32(1.3)},
        lambda given: {"v_scale": np.roll(given["v_scale"], 1, axis=-1)},
        lambda given: {"q": np.roll(given["q"], 1, axis=1)},
    ],
    ids=["wrong pages", "lengths ignored", "v_scale x1.3", "k_scale x1.3", "another's v_scale", "another head's q"],
)
def test_wrong_attention_is_beyond_the_bound(dims: dict[str, int], change: Callable[[Inputs], Inputs]) -> None:
    inputs, wanted = make_case(dims, 0, "e4m3").inputs, references(dims, 0, "e4m3")
    assert len(set(inputs["seqused_k"].tolist())) > 1
    assert passes(computed(dims, inputs), wanted)
    assert not passes(computed(dims, inputs | change(inputs)), wanted)


def test_lengths_and_pages() -> None:
    assert family.query_lengths(4, 70) == [70, 63, 56, 49]
    assert family.query_lengths(3, 1) == [1, 1, 1]
    first, second = (make_case(DECODE, seed, "e4m3").inputs for seed in (0, 1))
    assert first["seqused_k"][0] == second["seqused_k"][0] == DECODE["S"]
    assert not np.array_equal(first["seqused_k"], second["seqused_k"])
    pages = first["block_table"][first["block_table"] >= 0]
    assert len(set(pages.tolist())) == len(pages)
    assert pages.max() < len(first["k_cache"])
    assert least_work(DECODE) == {"matrix_flops": 4 * 4 * 300 * 64, "exponentials": 4 * 300}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"D": 96}, "D=96: allowed are 64, 128, 256"),
        ({"PAGE": 48}, "PAGE=48: allowed are 16, 32, 64, 128"),
        ({"HK": 3}, "H=4, HK=3: 1 to 16 query heads share a head"),
        ({"S": 0}, "a serving shape needs B, Q, S, H, HK, D, each at least 1"),
        ({"KV": 3}, "a serving shape needs .* and may have PAGE, VROWS, HEADSCALE"),
    ],
)
def test_shapes_without_a_kernel(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_case(DECODE | changes, 0, "e4m3")


def test_toggles_and_formats_without_a_kernel() -> None:
    few = TASK.config.variant("few_rows").values
    with pytest.raises(UsageError, match="up to 16 rows, Q=20 queries of 2 heads each are 40"):
        family.program(few, "e4m3", CHUNK)
    with pytest.raises(UsageError, match="two kernels"):
        family.program(few | {"USE_WIDE_ROWS": 1}, "e4m3", DECODE)
    with pytest.raises(UsageError, match="no phases"):
        family.program(few, "e4m3", DECODE, instrumented=True)
    with pytest.raises(UsageError, match="format"):
        family.program(few, "int8", DECODE)


def test_the_rungs_differ_in_their_row_tiles() -> None:
    """Every shape that a rung is for renders, and the rungs' kernels differ."""
    for shape in TASK.config.shapes:
        sources = [
            family.program(TASK.config.rung_variant(rung).values, "e4m3", shape.dims).steps[1].kernel.source
            for rung in TASK.config.rungs
            if fits_dims(shape.dims, rung.only)
        ]
        assert len(sources) == len(set(sources)) == 2, shape.name


def test_decoding_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both launches, as the gates build and run them, by a few blocks."""
    monkeypatch.setattr(family, "MULTIPROCESSORS", 2)
    shape, seed = TASK.config.shape("b2_q1_s130_h4_hk1_d64"), 0
    side = build_side(
        "candidate", TASK.family, TASK.config.variant("few_rows"), "e4m3", [shape], Target(TASK.config.defaults.arch)
    )
    assert [kernel.source.entry for kernel in side.programs[shape.name].kernels] == [
        "plan_attention",
        "paged_attention",
    ]
    found = EmulatorSession().run(side.executable(shape.name), make_case(shape.dims, seed, "e4m3"), 1)
    assert found.violations == []
    assert passes(decode(found.outputs, "e4m3"), references(shape.dims, seed, "e4m3"))
