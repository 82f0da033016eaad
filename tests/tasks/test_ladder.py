"""The ladder's problem: references, and the errors of the number formats, from which the thresholds are derived."""

from __future__ import annotations

from functools import cache
from statistics import median

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.record_schema import ErrorStats
from greenfast.judge.task import ErrorGate
from greenfast.numerics.attention import attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize, quantize
from greenfast.numerics.inputs import standard_normal
from tasks.fp8_sdpa_stage_c_wmma import problem as sdpa_problem
from tests.kernels.ladder_task import CONFIG, SMALL

SCALE = 64**-0.5


@cache
def format_error(shape: str, seed: int, fmt: str) -> ErrorStats:
    dims, limit = CONFIG.shape(shape).dims, CONFIG.gates(fmt).error.bad_abs_err
    tensors = standard_normal((dims["B"] * dims["H"], dims["S"], dims["D"]), 3, seed)
    q, k, v = (dequantize(*quantize(x, fmt), fmt) for x in tensors)
    return error_stats(attention(q, k, v, SCALE).numpy(), _full(shape, seed), limit)


@cache
def _full(shape: str, seed: int) -> NDArray[np.float64]:
    dims = CONFIG.shape(shape).dims
    q, k, v = standard_normal((dims["B"] * dims["H"], dims["S"], dims["D"]), 3, seed)
    full: NDArray[np.float64] = attention(q, k, v, SCALE).numpy()
    return full


def failures(error: ErrorStats, gate: ErrorGate) -> list[str]:
    limits = {"max_abs_err": gate.max_abs_err, "mean_abs_err": gate.mean_abs_err, "pct_bad": gate.pct_bad}
    return [name for name, limit in limits.items() if getattr(error, name) > limit]


# The references


@pytest.mark.parametrize("fmt", CONFIG.formats)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_references_are_of_the_case(fmt: str, head_dim: int) -> None:
    dims = {"B": 2, "H": 2, "S": 50, "D": head_dim}
    case, wanted = sdpa_problem.make_case(dims, 3, fmt), sdpa_problem.references(dims, 3, fmt)
    scale = head_dim**-0.5
    arrays = {name: torch.from_numpy(a) for name, a in case.inputs.items()}
    q, k, v = (dequantize(arrays[name], arrays[f"{name}_scale"], fmt) for name in "qkv")
    assert np.abs(wanted.exact - attention(q, k, v, scale).numpy()).max() <= 1e-12
    assert np.abs(wanted.bound - attention_rounding_bound(q, k, v, scale).numpy()).max() <= 1e-12
    q, k, v = standard_normal((4, 50, head_dim), 3, 3)
    assert np.abs(wanted.full - attention(q, k, v, scale).numpy()).max() <= 1e-12
    assert np.abs(wanted.full - wanted.exact).max() > 1e-3
    assert {a.dtype for a in (wanted.full, wanted.exact, wanted.bound)} == {np.dtype(np.float64)}
    assert case.outputs["out"].shape == wanted.full.shape == (4, 50, head_dim)
    assert case.outputs["out"].dtype == "float16"
    assert {name: a.dtype.name for name, a in case.inputs.items()} == {
        **dict.fromkeys("qkv", "uint8"),
        **{f"{n}_scale": "float32" for n in "qkv"},
    }


def test_decoded_output_is_the_output() -> None:
    out = np.array([[[0.5, -(2.0**-24)]]], dtype=np.float16)
    decoded = sdpa_problem.decode({"out": out}, "e4m3")
    assert decoded.dtype == np.float64
    assert decoded.tolist() == [[[0.5, -(2.0**-24)]]]


@pytest.mark.parametrize("fmt", CONFIG.formats)
def test_a_perfect_kernel_in_half_passes_both_gates(fmt: str) -> None:
    gates, wanted = CONFIG.gates(fmt), sdpa_problem.references(SMALL, 0, fmt)
    decoded = sdpa_problem.decode({"out": wanted.exact.astype(np.float16)}, fmt)
    kernel_error = error_stats(decoded, wanted.exact, 1.0)
    assert 0 < kernel_error.relative_error <= gates.kernel_error.relative_error
    assert 0 < worst_bound_ratio(decoded, wanted.exact, wanted.bound) <= gates.kernel_error.bound_factor
    assert failures(error_stats(decoded, wanted.full, gates.error.bad_abs_err), gates.error) == []


# The table of format errors, as the mission states it: median and worst largest error, worst mean error, worst
# percentage beyond 0.06, relative error


@pytest.mark.parametrize(
    ("fmt", "shape", "seeds", "max_median", "max_worst", "mean_worst", "pct_worst", "relative"),
    [
        ("int8", "small", 12, 0.016, 0.026, 0.0033, 0.0, 0.013),
        ("int8", "mission", 4, 0.010, 0.016, 0.0010, 0.0, 0.017),
        ("e4m3", "small", 12, 0.066, 0.118, 0.0103, 0.39, 0.043),
        ("e4m3", "mission", 4, 0.039, 0.059, 0.0027, 0.0, 0.048),
        ("e4m3", "mission_b2", 4, 0.061, 0.094, 0.0037, 0.001, 0.047),
    ],
)
def test_format_errors_are_as_documented(
    fmt: str,
    shape: str,
    seeds: int,
    max_median: float,
    max_worst: float,
    mean_worst: float,
    pct_worst: float,
    relative: float,
) -> None:
    errors = [format_error(shape, seed, fmt) for seed in range(seeds)]
    assert median(e.max_abs_err for e in errors) == pytest.approx(max_median, rel=0.35)
    assert max(e.max_abs_err for e in errors) <= 1.05 * max_worst
    assert 0.7 * mean_worst <= max(e.mean_abs_err for e in errors) <= 1.05 * mean_worst
    assert max(e.pct_bad for e in errors) <= 1.05 * pct_worst
    assert median(e.relative_error for e in errors) == pytest.approx(relative, rel=0.1)


# The thresholds of the config


#: One seed of each shape is quick.
CHECKED = [
    pytest.param(shape.name, seed, marks=[pytest.mark.slow] if seed != CONFIG.seeds[0] else [])
    for shape in CONFIG.shapes
    if shape.dims["S"] <= 512
    for seed in CONFIG.seeds
]


@pytest.mark.parametrize(("shape", "seed"), CHECKED)
@pytest.mark.parametrize("fmt", CONFIG.formats)
def test_format_error_alone_is_within_the_gates(fmt: str, shape: str, seed: int) -> None:
    assert failures(format_error(shape, seed, fmt), CONFIG.gates(fmt).error) == []


def test_format_error_of_the_longest_shape_is_within_the_gates() -> None:
    longest = max(CONFIG.shapes, key=lambda shape: shape.dims["S"]).name
    for fmt in CONFIG.formats:
        assert failures(format_error(longest, CONFIG.seeds[0], fmt), CONFIG.gates(fmt).error) == []


def test_default_shapes_are_among_those_checked() -> None:
    checked = {shape.name for shape in CONFIG.shapes if shape.dims["S"] <= 512}
    assert set(CONFIG.defaults.shapes) <= checked


@pytest.mark.parametrize("shape", ["small", "mission_b2"])
def test_int8_gates_refuse_the_errors_of_e4m3(shape: str) -> None:
    """Thresholds are per format because one format's would be wrong for the other."""
    errors = [format_error(shape, seed, "e4m3") for seed in CONFIG.seeds]
    assert any(failures(error, CONFIG.gates("int8").error) for error in errors)
