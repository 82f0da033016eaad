"""The quantization problem accepts only the exact codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.task import load_task
from greenfast.numerics.formats import quantize
from tasks.fp8_quantize import problem as quantize_problem
from tasks.fp8_quantize.problem import decode, make_case, references

CONFIG = load_task(Path(__file__).parents[2] / "tasks" / "fp8_quantize").config
DIMS = {"B": 2, "H": 3, "S": 20, "D": 64}
FORMATS = list(CONFIG.formats)
Outputs = dict[str, NDArray[Any]]


def right_outputs(fmt: str, seed: int = 0) -> Outputs:
    codes, scale = quantize(torch.from_numpy(make_case(DIMS, seed, fmt).inputs["x"]), fmt)
    return {"codes": codes.numpy().copy(), "scale": scale.numpy().copy()}


def bound_ratio(outputs: Outputs, fmt: str) -> float:
    wanted = references(DIMS, 0, fmt)
    return worst_bound_ratio(decode(outputs, fmt), wanted.exact, wanted.bound)


@pytest.mark.parametrize("fmt", FORMATS)
def test_case(fmt: str) -> None:
    case = make_case(DIMS, 0, fmt)
    x = case.inputs["x"]
    assert (x.dtype.name, x.shape) == ("float16", (6, 20, 64))
    outputs = right_outputs(fmt)
    assert {name: (o.shape, o.dtype) for name, o in case.outputs.items()} == {
        name: (a.shape, str(a.dtype)) for name, a in outputs.items()
    }


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_right_codes_decode_to_the_exact_reference(fmt: str, seed: int) -> None:
    wanted = references(DIMS, seed, fmt)
    decoded = decode(right_outputs(fmt, seed), fmt)
    assert decoded.dtype == np.float64
    assert not wanted.bound.any()
    assert decoded.shape == wanted.exact.shape == wanted.full.shape == wanted.bound.shape
    np.testing.assert_array_equal(decoded, wanted.exact)
    assert worst_bound_ratio(decoded, wanted.exact, wanted.bound) == 0.0


@pytest.mark.parametrize("fmt", FORMATS)
def test_error_against_the_unquantized_input_is_the_formats(fmt: str) -> None:
    wanted = references(DIMS, 0, fmt)
    x = make_case(DIMS, 0, fmt).inputs["x"].astype(np.float64)
    amax = np.abs(x).max()
    error = np.abs(wanted.exact - wanted.full).max()
    assert 0 < error <= amax * {"e4m3": 16 / 448, "int8": 0.5 / 127}[fmt] * 1.0001


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("step", [1, -1])
def test_one_code_off_by_one_step_is_caught(fmt: str, step: int) -> None:
    for head, row, col in [(0, 0, 0), (3, 7, 11), (5, 19, 63)]:
        outputs = right_outputs(fmt)
        outputs["codes"][head, row, col] = (int(outputs["codes"][head, row, col]) + step) % 256
        assert bound_ratio(outputs, fmt) == np.inf


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_scale_off_by_one_unit_is_caught(fmt: str) -> None:
    outputs = right_outputs(fmt)
    outputs["scale"][4] = np.nextafter(outputs["scale"][4], np.float32(1))
    assert bound_ratio(outputs, fmt) == np.inf


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_of_two_heads_swapped_are_caught(fmt: str) -> None:
    outputs = right_outputs(fmt)
    outputs["scale"][[0, 1]] = outputs["scale"][[1, 0]]
    assert bound_ratio(outputs, fmt) == np.inf


def test_other_codes_and_scales_of_the_same_numbers_are_caught() -> None:
    """Half the scale with codes twice as large gives the same values; the format defines only one of the two."""
    dims = {"B": 1, "H": 1, "S": 1, "D": 2}
    wanted = references(dims, 0, "e4m3")
    x = torch.from_numpy(make_case(dims, 0, "e4m3").inputs["x"])
    codes, scale = quantize(x, "e4m3")
    doubled = (codes.view(torch.float8_e4m3fn).float() / 2).to(torch.float8_e4m3fn).view(torch.uint8)
    decoded = decode({"codes": doubled.numpy(), "scale": (2 * scale).numpy()}, "e4m3")
    assert worst_bound_ratio(decoded, wanted.exact, wanted.bound) == np.inf


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_head_of_zeros_has_scale_one(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero codes are zero at any scale, yet only one scale is right."""
    monkeypatch.setattr(quantize_problem, "_tensor", lambda dims, seed, variant="normal": torch.zeros(6, 20, 64).half())
    outputs: Outputs = {"codes": np.zeros((6, 20, 64), np.uint8), "scale": np.ones(6, np.float32)}
    assert bound_ratio(outputs, fmt) == 0.0
    outputs["scale"][2] = 0.5
    assert bound_ratio(outputs, fmt) == np.inf


# The thresholds of the config


@pytest.mark.parametrize("seed", CONFIG.seeds)
@pytest.mark.parametrize("shape", CONFIG.defaults.shapes)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_right_quantizer_passes_the_gates(fmt: str, shape: str, seed: int) -> None:
    gates, wanted = CONFIG.gates(fmt), references(CONFIG.shape(shape).dims, seed, fmt)
    error = error_stats(wanted.exact, wanted.full, gates.error.bad_abs_err)
    assert 0 < error.max_abs_err <= gates.error.max_abs_err
    assert 0 < error.mean_abs_err <= gates.error.mean_abs_err
    assert error.pct_bad <= gates.error.pct_bad
    assert gates.kernel_error.relative_error == 0.0, "bit for bit"
