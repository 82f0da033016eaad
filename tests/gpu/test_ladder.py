"""Every rung on a GPU, on shapes and inputs that the task's configs do not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import Gpu
from greenfast.device.session import Executable, KernelImage
from greenfast.judge.error_metrics import error_stats, worst_bound_ratio
from greenfast.judge.task import Rung, find_task
from greenfast.numerics.attention import attention, attention_rounding_bound
from greenfast.numerics.formats import dequantize, quantize
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Family, Launch
from greenfast.spec.problem import Case, OutputSpec
from tasks.fp8_quantize import family as quantizer
from tasks.fp8_quantize import problem as quantize_problem
from tasks.fp8_sdpa_stage_c_wmma import problem as sdpa_problem
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder

pytestmark = pytest.mark.gpu

CONFIG = find_task("fp8_sdpa").config
RUNGS = CONFIG.rungs
FORMATS = ("e4m3", "int8")
LENGTHS = (1, 7, 31, 32, 33, 63, 64, 65, 97, 129, 1000)


@cache
def gpu() -> Gpu:
    return Gpu(0)


def image(family: Family, toggles: dict[str, int], fmt: str, dims: dict[str, int]) -> KernelImage:
    compiled = compile_kernel(family.kernel(toggles, fmt, dims), Target.of_device(gpu().capability))
    source = compiled.source
    return KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)


def run(family: Family, rung: Rung, fmt: str, dims: dict[str, int], case: Case) -> dict[str, np.ndarray]:
    """The outputs of two runs, which must be bit-identical and leave all other memory unchanged."""
    toggles = CONFIG.rung_variant(rung).values
    plan: Launch = family.launch(toggles, fmt, dims)
    bound = gpu().bind(Executable.single(image(family, toggles, fmt, dims), plan), case)
    first, second = bound.run(), bound.run()
    assert bound.violations() == []
    assert first["out"].tobytes() == second["out"].tobytes()
    bound.free()
    return first


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_any_length_and_both_head_dims(rung: Rung, fmt: str) -> None:
    for head_dim in ladder.HEAD_DIMS:
        for length in LENGTHS:
            dims = {"B": 1, "H": 2, "S": length, "D": head_dim}
            outputs = run(ladder, rung, fmt, dims, sdpa_problem.make_case(dims, 5, fmt))
            references = sdpa_problem.references(dims, 5, fmt)
            out = sdpa_problem.decode(outputs, fmt)
            assert worst_bound_ratio(out, references.exact, references.bound) <= 1, dims
            assert error_stats(out, references.exact, 1).relative_error <= 2e-3, dims


def unusual_inputs(heads: int, length: int, head_dim: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, q, k and v stacked) of inputs far from standard normal."""
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(3, heads, length, head_dim, generator=generator)
    yield "scores that overflow a naive exponential", torch.stack([30 * normal[0], 30 * normal[1], normal[2]])
    outlier = torch.rand(normal.shape, generator=generator) < 0.001
    yield "outliers", normal + 10 * torch.randn(normal.shape, generator=generator) * outlier
    yield "a constant V", torch.stack([normal[0], normal[1], torch.full_like(normal[2], 0.75)])
    yield "all zeros", torch.zeros_like(normal)
    yield (
        "rising scores",
        torch.stack([normal[0].abs(), normal[1].abs() * torch.linspace(0, 3, length)[:, None], normal[2]]),
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_unusual_inputs(rung: Rung, fmt: str) -> None:
    heads, length = 2, 300
    for head_dim in ladder.HEAD_DIMS:
        dims = {"B": 1, "H": heads, "S": length, "D": head_dim}
        scale = 1 / math.sqrt(head_dim)
        for name, tensors in unusual_inputs(heads, length, head_dim):
            codes = [quantize(x, fmt) for x in tensors]
            inputs = {n: c.numpy() for n, (c, _) in zip("qkv", codes, strict=True)}
            inputs |= {f"{n}_scale": s.numpy() for n, (_, s) in zip("qkv", codes, strict=True)}
            case = Case(inputs, {"out": OutputSpec((heads, length, head_dim), "float16")})
            q, k, v = (dequantize(c, s, fmt) for c, s in codes)
            out = run(ladder, rung, fmt, dims, case)["out"].astype(np.float64)
            bound = attention_rounding_bound(q, k, v, scale).numpy()
            assert worst_bound_ratio(out, attention(q, k, v, scale).numpy(), bound) <= 1, (name, head_dim)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("vector", [0, 1])
def test_quantizer_is_bit_for_bit_the_format(fmt: str, vector: int) -> None:
    for dims in ({"B": 1, "H": 1, "S": 1, "D": 8}, {"B": 2, "H": 3, "S": 100, "D": 64}):
        case = quantize_problem.make_case(dims, 3, fmt)
        kernel = image(quantizer, {"USE_VECTOR_LOADS": vector}, fmt, dims)
        bound = gpu().bind(Executable.single(kernel, quantizer.launch({}, fmt, dims)), case)
        decoded = quantize_problem.decode(bound.run(), fmt)
        assert bound.violations() == []
        bound.free()
        assert np.array_equal(decoded, quantize_problem.references(dims, 3, fmt).exact)
