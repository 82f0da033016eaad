"""The Hopper kernel on a GPU: odd lengths, masks, grouped heads, hard inputs, all its tiles, and the log-sum-exp."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import read_dims
from greenfast.kernels.attention.heuristics import ONE_LEVEL_KEYS, Rule, rules, tiling
from greenfast.numerics.attention import E4M3_POLYNOMIAL_WEIGHTS, attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize, quantize, transposed_values
from greenfast.spec.arch import Target
from greenfast.spec.problem import Case, OutputSpec
from tasks.fp8_attention import problem as attention_problem
from tasks.fp8_attention.problem import mask_of
from tests.kernels.tiling_dims import MULTIPROCESSORS, rule_dims

pytestmark = pytest.mark.gpu

LENGTHS = (1, 7, 63, 65, 127, 129, 1000)
GRID = {"B": 3, "H": 16, "HK": 4, "S": 1000}
LONG = {"B": 1, "H": 3, "S": 4097}
HARD = {"B": 1, "H": 2, "S": 700}
SHAPES: tuple[dict[str, int], ...] = (*({"B": 1, "H": 2, "S": length} for length in LENGTHS), GRID, LONG, HARD)
#: Different lengths of queries and keys.
PAIRS = ((1, 4097), (130, 333), (333, 130), (64, 128), (200, 70))
#: Shapes and numbers of multiprocessors: few make blocks of several warpgroups, each with several work tiles.
TILINGS: tuple[tuple[int, dict[str, int]], ...] = (
    (132, {"B": 1, "H": 4, "HK": 2, "S": 200, "KV": 130, "CAUSAL": 2}),
    (2, {"B": 1, "H": 2, "S": 600}),
    (2, {"B": 1, "H": 2, "S": 1000, "CAUSAL": 1}),
)


@cache
def gpu() -> Gpu:
    found = Gpu(0)
    if found.capability != (9, 0):
        pytest.skip(f"the Hopper kernel needs compute capability 9.0, this GPU has {found.capability}")
    return found


def run(dims: dict[str, int], case: Case, fmt: str = "e4m3", size: int = 132) -> dict[str, NDArray[Any]]:
    """The outputs of two runs, which must be bit-identical and leave all other memory unchanged.

    size: the number of multiprocessors that the work is distributed over.
    """
    config, sizes = read_dims(dims, fmt)
    source = hopper.kernel(config, sizes, size)
    compiled = compile_kernel(source, Target("sm_90a"))
    image = KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)
    bound = gpu().bind(Executable.single(image, hopper.launch(config, sizes, multiprocessors=size)), case)
    first, second = bound.run(), bound.run()
    assert bound.violations() == []
    bound.free()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    return first


def check(dims: dict[str, int], case: Case) -> None:
    """The kernel-error gates of the task."""
    config, sizes = read_dims(dims, "e4m3")
    arrays = {name: torch.from_numpy(a) for name, a in case.inputs.items()}
    share = sizes.heads // sizes.kv_heads
    q, k, v = (dequantize(arrays[n], arrays[f"{n}_scale"], "e4m3") for n in "qkv")
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scale, mask = 1 / math.sqrt(config.head_dim), mask_of(config.mask, sizes)
    exact = attention(q, k, v, scale, mask).numpy()
    bound = attention_rounding_bound(q, k, v, scale, mask, E4M3_POLYNOMIAL_WEIGHTS).numpy()
    out = run(dims, case)["out"].astype(np.float64)
    assert worst_bound_ratio(out, exact, bound) <= 1, dims
    assert error_stats(out, exact, 1).relative_error <= 0.03, dims


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [0, 1])
def test_any_length(head_dim: int, causal: int) -> None:
    for length in LENGTHS:
        dims = {"B": 1, "H": 2, "S": length, "D": head_dim, "CAUSAL": causal}
        check(dims, attention_problem.make_case(dims, length, "e4m3"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [0, 1])
def test_grids_that_fill_the_chip(head_dim: int, causal: int) -> None:
    dims = {**GRID, "D": head_dim, "CAUSAL": causal}
    check(dims, attention_problem.make_case(dims, 0, "e4m3"))


@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize(("q_len", "kv_len"), PAIRS)
def test_lengths_that_differ(q_len: int, kv_len: int, causal: int) -> None:
    dims = {"B": 2, "H": 8, "HK": 1, "S": q_len, "KV": kv_len, "D": 128, "CAUSAL": causal}
    check(dims, attention_problem.make_case(dims, 0, "e4m3"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [0, 1])
def test_long(head_dim: int, causal: int) -> None:
    dims = {**LONG, "D": head_dim, "CAUSAL": causal}
    check(dims, attention_problem.make_case(dims, 0, "e4m3"))


@pytest.mark.parametrize("heads", [1, 132])
def test_two_levels_at_head_dim_256(heads: int) -> None:
    dims = {"B": 1, "H": heads, "HK": 1, "S": 100, "KV": ONE_LEVEL_KEYS + 1, "D": 256}
    assert tiling(*read_dims(dims, "e4m3"), 132)[0].two_levels
    check(dims, attention_problem.make_case(dims, 0, "e4m3"))


def hard_case(dims: dict[str, int], q: Tensor, k: Tensor, v: Tensor) -> Case:
    inputs = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        codes, scale = quantize(x, "e4m3")
        inputs[name], inputs[f"{name}_scale"] = codes.numpy(), scale.numpy()
    inputs["v_t"] = transposed_values(torch.from_numpy(inputs["v"])).numpy()
    return Case(inputs, {"out": OutputSpec(inputs["q"].shape, "float16")})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["outliers", "constant V", "overflow", "all negative", "zero Q", "growing"])
def test_hard_inputs(kind: str, head_dim: int) -> None:
    dims = {**HARD, "D": head_dim}
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (torch.randn(2, 700, head_dim, generator=generator) for _ in range(3))
    if kind == "outliers":  # N(0, 1) + N(0, 100) Bernoulli(0.001)
        q, k, v = (
            x + 10 * torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 0.001)
            for x in (q, k, v)
        )
    elif kind == "constant V":
        v = torch.full_like(v, 0.7)
    elif kind == "overflow":
        q, k = 5 * q, 5 * k
        assert (q @ k.transpose(-1, -2)).max() / math.sqrt(head_dim) > 89, "its exponential is infinite in float32"
    elif kind == "all negative":
        q, k = q.abs(), -k.abs()
    elif kind == "zero Q":
        q = 0 * q
    else:
        k = k * torch.linspace(0, 8, 700).view(1, -1, 1)
    check(dims, hard_case(dims, q, k, v))


EXTRAS: tuple[dict[str, int], ...] = (
    *({}, {"LSE": 1}, {"BF16": 1}, {"KBLOCK": 128}, {"VCHANNEL": 1}, {"SOFTCAP": 30}),
    {"LSE": 1, "BF16": 1, "KBLOCK": 128, "VCHANNEL": 1},
)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_formats_scales_and_outputs(extras: dict[str, int], fmt: str, head_dim: int) -> None:
    for multiprocessors, shape in TILINGS:
        dims = {**shape, "D": head_dim, **extras}
        references = attention_problem.references(dims, 0, fmt)
        outputs = run(dims, attention_problem.make_case(dims, 0, fmt), fmt, multiprocessors)
        out = attention_problem.decode(outputs, fmt)
        assert worst_bound_ratio(out, references.exact, references.bounds["e4m3_polynomial"]) <= 1, dims
        assert error_stats(out, references.exact, 1).relative_error <= 0.03, dims
        if "LSE" in dims:
            wanted = attention_problem.log_sum_exp(dims, 0, fmt)
            assert (np.isinf(outputs["lse"]) == np.isinf(wanted)).all()
            finite = np.isfinite(wanted)
            # The tensor cores keep 14 bits of a score's sum of products, whose magnitudes add up to D * 0.64 / sqrt(D).
            assert np.abs(outputs["lse"] - wanted)[finite].max() <= 1e-4 + 2**-12 * math.sqrt(head_dim), dims


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.key}, {rule.keys}")
def test_tiles_that_were_measured_to_be_faster(rule: Rule) -> None:
    dims, fmt = rule_dims(rule), rule.key[-1]
    config, sizes = read_dims(dims, fmt)
    assert tiling(config, sizes, MULTIPROCESSORS)[0] == rule.tiles
    references = attention_problem.references(dims, 0, fmt)
    outputs = run(dims, attention_problem.make_case(dims, 0, fmt), fmt, MULTIPROCESSORS)
    out = attention_problem.decode(outputs, fmt)
    assert worst_bound_ratio(out, references.exact, references.bounds["e4m3_polynomial"]) <= 1
    assert error_stats(out, references.exact, 1).relative_error <= 0.03
