"""``greenfast.parallel.cuda`` on the emulator: its launches and their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention import hopper
from greenfast.kernels.quantize.qkv import sample_places
from greenfast.ops import reference
from greenfast.ops.launch_plans import LaunchStep
from greenfast.ops.quantized import QuantizedQKV
from greenfast.parallel import blocks, cuda
from greenfast.parallel.quantized_kv import QuantizedKV
from greenfast.spec.problem import Case, OutputSpec
from tests.emulator.kernels import run_source

_WRITTEN = ("out", "lse", "k_codes", "v_codes", "k_scale", "v_scale", "k_mean", "q_codes", "q_scale", "lse_out")


def memory(x: Tensor) -> Any:
    """Return the memory of a view, from its first element to the end of the storage."""
    flat = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.as_strided((flat,), (1,)).view(torch.uint16 if x.itemsize == 2 else x.dtype).numpy()


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launches run on the emulator; the numbers of their blocks."""
    actual: list[int] = []

    def launch(device: int, at: Any, step: Any, buffers: dict[str, Tensor]) -> None:
        made: LaunchStep = step()
        used = made.buffers()
        assert used <= set(buffers), f"{used - set(buffers)} are missing"
        writes = {name for name in _WRITTEN if name in used and name not in _READ.get(made.source.entry, ())}
        arrays = {name: memory(x) for name, x in buffers.items() if name not in writes}
        arrays |= {name: arrays[of] for name, of in made.names.items()}
        specs = {n: OutputSpec(tuple(buffers[n].shape), str(memory(buffers[n]).dtype)) for n in writes}
        result = run_source(made.source, made.launch, Case(arrays, specs))
        for name in writes:
            values = torch.from_numpy(np.asarray(result.outputs[name])).view(buffers[name].dtype)
            buffers[name].copy_(values.view(buffers[name].shape))
        actual.append(made.launch.grid[0])

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(cuda, "_get_target", lambda device: hopper.TARGET)
    return actual


#: Buffers that one kernel reads and another one writes.
_READ = {"fp8_attention": ("k_codes", "v_codes", "k_scale", "v_scale", "q_codes", "q_scale")}


def inputs(rows: int, keys: int, head_dim: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(keys)
    shapes = [(1, 2, rows, head_dim), *[(1, 1, keys, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("head_dim", "rows", "first", "count", "causal", "precision"),
    [
        (64, 70, 30, 150, 0, "fp8"),
        pytest.param(64, 40, 0, 300, 1, "int8", marks=pytest.mark.slow),
        pytest.param(256, 20, 4, 140, 0, "fp8", marks=pytest.mark.slow),
        pytest.param(64, 40, 10, 200, 0, "int8_fine", marks=pytest.mark.slow),
    ],
)
def test_some_queries_over_the_first_of_kept_keys(
    grids: list[int], head_dim: int, rows: int, first: int, count: int, causal: int, precision: str
) -> None:
    q, k, v = inputs(rows, 300, head_dim)
    samples = k[:, :, sample_places(300)].contiguous()
    keys, wanted = QuantizedKV.allocate_like(k, precision), QuantizedKV.allocate_like(k, precision)
    mean = cuda.quantize_keys(k, v, samples, precision, keys)
    expected = blocks.quantize_keys(k, v, samples, precision, wanted)
    assert torch.allclose(mean, expected, atol=1e-5)
    assert float((keys.key != wanted.key).float().mean()) < 1e-3
    assert torch.equal(keys.value, wanted.value)
    assert torch.allclose(keys.key_scale, wanted.key_scale, rtol=1e-5)
    some, scale = q[:, :, first:], head_dim**-0.5
    out, lse = blocks.attend(some, keys, count, precision, causal, scale, True)
    for exact in (True, False):
        result, sums = cuda.attend(some, keys, count, precision, causal, scale, exact)
        assert error(result, out) < 0.02, "weights are rounded at other sums"
        assert float((sums - lse).abs().max()) < (1e-3 if exact else 0.05)


@pytest.mark.slow
def test_codes_of_queries(grids: list[int]) -> None:
    q, k, v = inputs(70, 140)
    samples = k[:, :, sample_places(140)].contiguous()
    codes: QuantizedQKV = cuda.quantize(q, k, v, samples, "int8")
    expected = blocks.quantize(q, k, v, samples, "int8")
    assert float((codes.query != expected.query).float().mean()) < 2e-3
    for with_lse in (True, False):
        out, lse = cuda.attend_codes(codes, 1, 0.2, with_lse)
        wanted, sums = reference.attention(codes, 1, 0.2)
        assert error(out, wanted) < 0.02
        assert lse.numel() == 0 if not with_lse else torch.allclose(lse, sums, atol=1e-3)


def test_a_merge(grids: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(1, 2, rows, 24, generator=generator).bfloat16() for rows in (30, 13))
    sums = [torch.randn(1, 2, rows, generator=generator) for rows in (30, 13)]
    wanted, into = torch.empty(a.shape), torch.empty(a.shape)
    expected = blocks._merge(a, sums[0], b, sums[1], 17, wanted)
    lse = cuda.merge(a, sums[0], b, sums[1], 17, into)
    assert torch.allclose(lse, expected, atol=1e-5)
    assert torch.allclose(into, wanted, atol=1e-5)
