"""The quantizing kernel on the emulator: its codes and scales equal the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention.config import AttentionConfig, Sizes, Strides
from greenfast.kernels.quantize import qkv as qkv_quantizer
from greenfast.kernels.quantize.qkv import key_tiles, sample_places
from greenfast.ops import reference
from greenfast.ops.quantized import QuantizedQKV, build_config
from greenfast.spec.problem import Array, Case, OutputSpec
from tests.emulator.kernels import run_source

SCALES = {"q": "query_scale", "k": "key_scale", "v": "value_scale"}
CODES = {"q": "query", "k": "key", "v": "value"}


def inputs(kv_len: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_len)
    shapes = [(1, 2, 40, head_dim), *[(1, 1, kv_len, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, expected: QuantizedQKV, samples: Tensor | None = None
) -> dict[str, Array]:
    strides = Strides(q.stride()[:3], k.stride()[:3], v.stride()[:3])
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    outputs = {
        "q_codes": expected.query, "k_codes": expected.key, "v_codes": expected.value,
        "q_scale": expected.query_scale, "k_scale": expected.key_scale, "v_scale": expected.value_scale,
    }  # fmt: skip
    if expected.key_mean is not None:
        outputs["k_mean"] = expected.key_mean
    inputs = {"q": q, "k": k, "v": v} | ({} if samples is None else {"samples": samples})
    case = Case(
        {name: x.view(torch.uint16).numpy() for name, x in inputs.items()},
        {name: OutputSpec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in outputs.items()},
    )
    sampled = samples is not None
    source = qkv_quantizer.kernel(config, sizes, sampled=sampled)
    return run_source(source, qkv_quantizer.launch(config, sizes, strides, sampled=sampled), case).outputs


def config_for(head_dim: int, dtype: torch.dtype, **choices: Any) -> AttentionConfig:
    return build_config(head_dim, dtype, **{"precision": "fp8", "key_mean": False, "rotate": False, **choices})


@pytest.mark.parametrize(
    ("head_dim", "kv_len", "dtype", "choices"),
    [
        (64, 300, torch.float16, dict()),
        (128, 129, torch.bfloat16, dict(precision="int8")),
        (40, 17, torch.bfloat16, dict(rotate=True)),
        (64, 300, torch.bfloat16, dict(precision="int8_fine", rotate=True, key_mean=True)),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (64, 200, torch.float16, dict(key_mean=True)),
                (128, 150, torch.bfloat16, dict(rotate=True, key_mean=True)),
                (256, 33, torch.float16, dict(precision="int8", rotate=True, key_mean=True)),
                (256, 270, torch.bfloat16, dict(rotate=True, key_mean=True)),
                (128, 129, torch.float16, dict(precision="int8_fine")),
                (256, 150, torch.bfloat16, dict(precision="int8_fine", rotate=True, key_mean=True)),
            )
        ),
    ],
    ids=str,
)
def test_codes_equal_the_cpus(
    head_dim: int, kv_len: int, dtype: torch.dtype, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kv_len >= 200:
        monkeypatch.setattr(qkv_quantizer, "_MANY_TILES", 1)  # blocks take several tiles
    q, k, v = inputs(kv_len, head_dim, dtype)
    config = config_for(head_dim, dtype, **choices)
    expected = reference.quantize(q, k, v, config)
    result = run(q, k, v, config, expected)
    exact = not (config.rotate or config.key_mean)  # sums in another order
    for name, codes, scale in (
        ("q", expected.query, expected.query_scale),
        ("k", expected.key, expected.key_scale),
        ("v", expected.value, expected.value_scale),
    ):
        if exact or name == "v":
            assert np.array_equal(result[f"{name}_codes"], codes.numpy()), name
            assert np.array_equal(result[f"{name}_scale"], scale.numpy()), name
        else:
            assert np.allclose(result[f"{name}_scale"], scale.numpy(), rtol=1e-5), name
            assert np.mean(result[f"{name}_codes"] != codes.numpy()) < 1e-3, name
    if expected.key_mean is not None:
        assert np.allclose(result["k_mean"], expected.key_mean.numpy(), atol=1e-5)


def test_parts_of_the_keys_have_the_mean_of_all() -> None:
    """A part, with the samples of the whole, has the codes that it has in the whole."""
    q, k, v = inputs(512, 64, torch.bfloat16)
    k = k + 5 * torch.randn(1, 1, 1, 64).bfloat16()
    config = config_for(64, q.dtype, rotate=True, key_mean=True)
    whole = reference.quantize(q, k, v, config)
    samples = k[:, :, sample_places(512)].contiguous()
    part_k, part_v = (x[:, :, 256:].contiguous() for x in (k, v))
    expected = reference.quantize(q, part_k, part_v, config, samples)
    assert torch.equal(expected.key, whole.key[:, :, 256:])
    assert torch.equal(expected.key_scale, whole.key_scale[..., 2:])
    assert not torch.equal(expected.key, reference.quantize(q, part_k, part_v, config).key)
    result = run(q, part_k, part_v, config, expected, samples)
    assert np.allclose(result["k_mean"], expected.key_mean, atol=1e-5)  # type: ignore[arg-type]
    assert np.mean(result["k_codes"] != expected.key.numpy()) < 1e-3
    assert np.array_equal(result["v_codes"], expected.value.numpy())


EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "tiny": lambda x: x * 1e-37,
    "huge": lambda x: x.clamp(-3, 3) * 1e38,
    "not a number": lambda x: x.index_fill(2, torch.tensor([5]), torch.nan),
    "infinite": lambda x: x.index_fill(2, torch.tensor([20]), -torch.inf),
    "outlying": lambda x: torch.cat([x[:, :, :1] * 1e6, x[:, :, 1:]], 2),
    "equal channels": lambda x: x + 10,
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize(
    ("rotate", "precision"), [(True, "fp8"), pytest.param(False, "fp8", marks=pytest.mark.slow), (True, "int8_fine")]
)
def test_extremes_are_as_on_the_cpu(name: str, rotate: bool, precision: str) -> None:
    q, k, v = (EXTREMES[name](x.float()).bfloat16() for x in inputs(140, 64, torch.bfloat16))
    config = config_for(64, q.dtype, rotate=rotate, key_mean=True, precision=precision)
    expected = reference.quantize(q, k, v, config)
    result = run(q, k, v, config, expected)
    fine = precision == "int8_fine"
    for of in "qkv":
        scale, code = getattr(expected, SCALES[of]).numpy(), getattr(expected, CODES[of]).numpy()
        assert np.allclose(result[f"{of}_scale"], scale, rtol=1e-5, atol=0, equal_nan=True), of
        assert np.mean(result[f"{of}_codes"] != code) < 2e-3, of
    unknown = name in ("not a number", "infinite")
    assert np.isnan(result["k_scale"]).tolist() == [[[[unknown] * 4, [False] * 4] if fine else [unknown, False]]]
    assert np.isnan(result["v_scale"]).tolist() == [[[unknown, False]]]
    assert np.isnan(result["q_scale"]).sum() == 2 * unknown, "one block of 16 rows, or one row, of each head"


def test_blocks_take_several_tiles_of_many() -> None:
    assert [key_tiles(Sizes(1, heads, heads, 1, 4096)) for heads in (1, 31, 32)] == [1, 1, 4]
