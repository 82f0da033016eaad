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
from greenfast.kernels.quantize.qkv import Sharing, choose_sharing, sample_places
from greenfast.ops import reference
from greenfast.ops.block import QKTransform, build_prologue, transform_both
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
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, expected: QuantizedQKV, samples: Tensor | None = None,
    options: QKTransform | None = None,
) -> dict[str, Array]:  # fmt: skip
    strides = Strides(q.stride()[:3], k.stride()[:3], v.stride()[:3])
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    outputs = {
        "q_codes": expected.query, "k_codes": expected.key, "v_codes": expected.value,
        "q_scale": expected.query_scale, "k_scale": expected.key_scale, "v_scale": expected.value_scale,
    }  # fmt: skip
    if expected.key_mean is not None:
        outputs["k_mean"] = expected.key_mean
    inputs = {"q": q, "k": k, "v": v} | ({} if samples is None else {"samples": samples})
    prologue = None
    if options is not None:
        prologue = build_prologue(options, q.shape[0])
        inputs |= dict(zip(prologue.buffers(), [x for x in options.tensors if x is not None], strict=True))
        if prologue.across_heads:
            inputs |= run_norms(q, k, config, sizes, strides, prologue)
    case = Case(
        {name: get_storage(x) for name, x in inputs.items()},
        {name: OutputSpec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in outputs.items()},
    )
    sampled = samples is not None
    source = qkv_quantizer.kernel(config, sizes, sampled=sampled, prologue=prologue)
    launch = qkv_quantizer.launch(config, sizes, strides, sampled=sampled, prologue=prologue)
    return run_source(source, launch, case).outputs


def get_storage(x: Tensor) -> Array:
    """Return the memory from the first element of a tensor on, one element if there are none."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :]
    flat = flat if flat.numel() else torch.zeros(1, dtype=x.dtype)
    return (flat if x.dtype == torch.float32 else flat.view(torch.uint16)).numpy()


def run_norms(
    q: Tensor, k: Tensor, config: AttentionConfig, sizes: Sizes, strides: Strides, prologue: qkv_quantizer.Prologue
) -> dict[str, Tensor]:
    """Return the moments of rows over all heads by their kernel."""
    of_row = (2,) if prologue.centered else ()
    shapes = {name: (x.shape[0], x.shape[2], *of_row) for name, x in (("q_moments", q), ("k_moments", k))}
    case = Case(
        {name: get_storage(x) for name, x in (("q", q), ("k", k))},
        {name: OutputSpec(shape, "float32") for name, shape in shapes.items()},
    )
    launch = qkv_quantizer.norms_launch(config, sizes, strides, prologue.eps)
    outputs = run_source(qkv_quantizer.norms_kernel(config, centered=prologue.centered), launch, case).outputs
    for name, x in (("q_moments", q), ("k_moments", k)):
        wanted = torch.rsqrt(x.double().square().mean((1, 3)) + prologue.eps)
        if prologue.centered:
            mean = x.double().mean((1, 3))
            variance = (x.double() - mean[:, None, :, None]).square().mean((1, 3))
            wanted = torch.stack([mean, torch.rsqrt(variance + prologue.eps)], -1)
        assert np.allclose(outputs[name], wanted.numpy(), rtol=1e-5 if prologue.centered else 1e-6, equal_nan=True)
    return {name: torch.from_numpy(outputs[name]) for name in shapes}


def assert_close_codes(result: dict[str, Array], expected: QuantizedQKV, *, equal_nan: bool = False) -> None:
    """Compare codes and scales; V's are exact."""
    assert np.array_equal(result["v_codes"], expected.value.numpy())
    for name, codes, scale in (
        ("q", expected.query, expected.query_scale), ("k", expected.key, expected.key_scale),
    ):  # fmt: skip
        # Sums in another order: now and then a result is the next 16-bit number, which changes the codes of its row.
        assert np.allclose(result[f"{name}_scale"], scale.numpy(), rtol=2**-7, atol=0, equal_nan=equal_nan), name
        assert np.mean(result[f"{name}_codes"] != codes.numpy()) < 5e-3, name


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
    config = config_for(64, torch.bfloat16)
    sharing = [choose_sharing(config, Sizes(1, heads, heads, 1, 4096)) for heads in (1, 31, 32)]
    assert sharing == [Sharing(n, 1, 1, False) for n in (1, 1, 4)]


def make_transform(
    rows: int, head_dim: int, norm: str, rope_dim: int, table: str = "float32", *, columns: int = 0,
    interleaved: bool = False, batch: int = 0, heads: tuple[int, int] | None = None, layer: bool = False,
    biased: bool = False, table_heads: int = 0,
) -> QKTransform:  # fmt: skip
    """Return weights and tables for ``rows`` tokens.

    columns: of the tables; batch: 0 for tables of two dimensions; heads: of Q and K, for a norm over all heads; layer:
    LayerNorm, with biases if ``biased``; table_heads: heads with tables of their own, which are stored as (S, H, T).
    """
    generator = torch.Generator().manual_seed(head_dim)
    weights: list[Tensor | None] = [None, None]
    biases: list[Tensor | None] = [None, None]
    if norm not in ("", "plain"):
        dtype = getattr(torch, norm)
        shapes = [(n, head_dim) for n in heads] if heads else [(head_dim,)] * 2
        weights = [(torch.rand(shape, generator=generator) + 0.5).to(dtype) for shape in shapes]
        if biased:
            biases = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    cos = sin = None
    if rope_dim:
        before = (*((batch or 1,) if batch or table_heads else ()), rows, *((table_heads,) if table_heads else ()))
        angles = torch.randn(*before, rope_dim // 2, generator=generator) * 3
        if columns == rope_dim:
            angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        cos, sin = (x.to(getattr(torch, table)) for x in (angles.cos(), angles.sin()))
        if table_heads:
            cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    kind = "" if not norm else "layer" if layer else "rms"
    return QKTransform(
        weights[0], weights[1], biases[0], biases[1], cos, sin, kind, 1e-6, rope_dim, interleaved
    )  # fmt: skip


#: Head dim, rows, dtype, choices of the quantizer, norm, rotated columns, and the tables.
TRANSFORMS: list[Any] = [
    (64, 150, torch.bfloat16, dict(rotate=True, key_mean=True), "bfloat16", 64, dict(table="float32")),
    (128, 129, torch.float16, dict(), "float32", 128, dict(table="float32", columns=128, interleaved=True)),
    (72, 40, torch.bfloat16, dict(rotate=True), "bfloat16", 72, dict(table="float32", columns=72)),
    (256, 40, torch.bfloat16, dict(rotate=True, key_mean=True), "plain", 256, dict(table="bfloat16")),
    (72, 40, torch.bfloat16, dict(rotate=True), "float32", 72, dict(table="float32", heads=(2, 1))),
    (40, 17, torch.bfloat16, dict(precision="int8_fine"), "", 20, dict(table="bfloat16", interleaved=True)),
]
SLOW_TRANSFORMS: list[Any] = [
    (64, 300, torch.bfloat16, dict(precision="int8_fine"), "float16", 32, dict(table="float16", columns=32)),
    (128, 150, torch.bfloat16, dict(rotate=True, key_mean=True), "bfloat16", 0, dict(table="")),
    (128, 150, torch.bfloat16, dict(precision="int8"), "", 64, dict(table="float32", interleaved=True)),
    (256, 40, torch.bfloat16, dict(), "float32", 128, dict(table="float32", columns=128, interleaved=True)),
    (256, 20, torch.bfloat16, dict(), "bfloat16", 256, dict(table="bfloat16", heads=(2, 1))),
    (256, 40, torch.float16, dict(rotate=True), "bfloat16", 96, dict(table="float32")),
    (80, 40, torch.bfloat16, dict(rotate=True, key_mean=True), "bfloat16", 80, dict(table="bfloat16", batch=1)),
    (40, 17, torch.bfloat16, dict(rotate=True), "float32", 14, dict(table="float32")),
]


@pytest.mark.parametrize(
    ("head_dim", "rows", "dtype", "choices", "norm", "rope_dim", "tables"),
    [*TRANSFORMS, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_TRANSFORMS)],
    ids=str,
)
def test_norm_and_rope_are_as_before_quantization(
    head_dim: int, rows: int, dtype: torch.dtype, choices: dict[str, Any], norm: str, rope_dim: int,
    tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The kernel's codes equal codes of tensors that PyTorch has normalized and rotated."""
    if rows in (300, 129, 20):  # blocks take several tiles of K, and share the angles of a tile
        monkeypatch.setattr(qkv_quantizer, "_MANY_TILES", 1)
        monkeypatch.setattr(qkv_quantizer, "choose_sharing", lambda *call: Sharing(4, 1, 2, call[2] is not None))
    _, k, v = inputs(rows, head_dim, dtype)
    q = torch.cat([k.flip(2), k * 3], 1)
    options = make_transform(rows, head_dim, norm, rope_dim, **tables)
    config = config_for(head_dim, dtype, **choices)
    expected = reference.quantize(*transform_both(q, k, options), v, config)
    result = run(q, k, v, config, expected, options=options)
    assert_close_codes(result, expected)


@pytest.mark.parametrize("name", EXTREMES)
def test_norm_and_rope_of_extremes(name: str) -> None:
    q, k, v = (EXTREMES[name](x.float()).bfloat16() for x in inputs(40, 64, torch.bfloat16))
    options = make_transform(40, 64, "bfloat16", 64, "float32")
    config = config_for(64, q.dtype, rotate=True, key_mean=True)
    expected = reference.quantize(*transform_both(q, k, options), v, config)
    result = run(q, k, v, config, expected, options=options)
    for of in "qk":
        scale, code = getattr(expected, SCALES[of]).numpy(), getattr(expected, CODES[of]).numpy()
        assert np.allclose(result[f"{of}_scale"], scale, rtol=2**-7, atol=0, equal_nan=True), of
        assert np.mean(result[f"{of}_codes"] != code) < 5e-3, of
    assert np.isnan(result["q_scale"]).sum() == 2 * (name in ("not a number", "infinite"))


#: What LayerNorm and tables of heads meet: deviations that are small beside the mean, equal and extreme numbers.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "biased": lambda x: 100 + 0.1 * x,
    "zeros": torch.zeros_like,
    "tiny": lambda x: x * 1e-37,
    "huge": lambda x: x.clamp(-3, 3) * 1e38,
}
#: Head dim, rows, heads of Q and K, memory order, dtype, choices of the quantizer, norm, rotated columns, options of
#: ``make_transform``.
LAYERS: list[Any] = [
    (64, 150, (4, 2), "bshd", torch.bfloat16, dict(), "bfloat16", 64,
     dict(layer=True, biased=True, interleaved=True, columns=64)),
    (64, 150, (2, 2), "bshd", torch.bfloat16, dict(), "float32", 64,
     dict(heads=(2, 2), table_heads=2, interleaved=True, columns=64)),
    (128, 129, (2, 1), "bhsd", torch.float16, dict(precision="int8"), "plain", 0, dict(layer=True)),
    (72, 20, (1, 1), "bshd", torch.bfloat16, dict(), "plain", 20, dict(layer=True)),
    (256, 20, (1, 1), "bshd", torch.bfloat16, dict(), "bfloat16", 0, dict(layer=True, biased=True)),
    (64, 40, (2, 1), "bshd", torch.bfloat16, dict(), "float16", 0, dict(layer=True, biased=True, heads=(2, 1))),
]  # fmt: skip
SLOW_LAYERS: list[Any] = [
    (256, 33, (2, 2), "bhsd", torch.bfloat16, dict(), "bfloat16", 256,
     dict(layer=True, biased=True, table_heads=2, table="bfloat16")),
    (128, 150, (2, 2), "bshd", torch.float16, dict(precision="int8_fine"), "float32", 96,
     dict(layer=True, table_heads=2)),
    (256, 150, (2, 1), "bshd", torch.float16, dict(), "float32", 64, dict(layer=True, biased=True, interleaved=True)),
    (256, 150, (2, 2), "bshd", torch.bfloat16, dict(), "", 256, dict(table_heads=2, table="bfloat16")),
    (72, 40, (2, 1), "bhsd", torch.bfloat16, dict(precision="int8"), "bfloat16", 36,
     dict(layer=True, biased=True, heads=(2, 1), batch=1)),
    (128, 40, (2, 2), "bshd", torch.bfloat16, dict(), "", 128, dict(table_heads=2, table="float16", columns=128)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "rows", "heads", "order", "dtype", "choices", "norm", "rope_dim", "options"),
    [*LAYERS, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_LAYERS)],
    ids=str,
)
def test_layer_norm_and_tables_of_heads_are_as_before_quantization(
    head_dim: int, rows: int, heads: tuple[int, int], order: str, dtype: torch.dtype, choices: dict[str, Any],
    norm: str, rope_dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Heads of a block that share angles, or Q and K of a head, have the bits of single heads."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randn(1, rows, heads[0] + 2 * heads[1], head_dim, generator=generator)
    transform = make_transform(rows, head_dim, norm, rope_dim, **options)
    config = config_for(head_dim, dtype, rotate=True, key_mean=True, **choices)
    for name in ("normal", "biased"):
        x = ROWS[name](packed)
        x[:, :, -heads[1] :] = packed[:, :, -heads[1] :]
        x = x.to(dtype).transpose(1, 2)
        q, k, v = torch.split(x if order == "bshd" else x.contiguous(), [heads[0], heads[1], heads[1]], 1)
        expected = reference.quantize(*transform_both(q, k, transform), v, config)
        result = run(q, k, v, config, expected, options=transform)
        assert_close_codes(result, expected)
        if name == "normal" and rope_dim:
            shared_heads = (1, 1) if "table_heads" in options else heads[::-1]
            with monkeypatch.context() as patch:
                patch.setattr(qkv_quantizer, "choose_sharing", lambda *_, n=shared_heads: Sharing(2, n[0], n[1], True))
                shared = run(q, k, v, config, expected, options=transform)
            for buffer, wanted in result.items():
                assert np.array_equal(shared[buffer], wanted), buffer


@pytest.mark.parametrize("name", ["zeros", "tiny", "huge", "not a number", "infinite"])
@pytest.mark.parametrize("over_heads", [False, True])
def test_layer_norm_of_extremes(name: str, over_heads: bool) -> None:
    """No sum of the mean overflows: huge rows become 0, as in PyTorch's LayerNorm, and not NaN."""
    extreme = (ROWS | EXTREMES)[name]
    q, k, v = inputs(40, 64, torch.bfloat16)
    q, k = (extreme(x.float()).bfloat16() for x in (q, k))
    options = make_transform(40, 64, "bfloat16", 64, layer=True, heads=(2, 1) if over_heads else None)
    config = config_for(64, q.dtype, rotate=True, key_mean=True)
    expected = reference.quantize(*transform_both(q, k, options), v, config)
    result = run(q, k, v, config, expected, options=options)
    assert_close_codes(result, expected, equal_nan=True)
    nonfinite = name in ("not a number", "infinite")
    assert np.isnan(result["q_scale"]).sum() == 2 * nonfinite
    assert result["q_codes"].any() == (name not in ("zeros", "huge"))


@pytest.mark.parametrize(
    ("head_dim", "kv_len", "heads", "precision", "rope_dim", "tables"),
    [
        (64, 150, 4, "fp8", 64, dict(table="bfloat16")),
        (128, 40, 2, "int8_fine", 128, dict(table="float32", columns=128, interleaved=True)),
        (256, 40, 2, "fp8", 256, dict(table="bfloat16")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (72, 150, 4, "int8", 36, dict(table="float32", batch=1)),
                (128, 150, 4, "int8_fine", 128, dict(table="float32", columns=128, interleaved=True)),
                (256, 150, 4, "fp8", 64, dict(table="float32", interleaved=True)),
                (128, 150, 4, "fp8", 10, dict(table="float16")),
            )
        ),
    ],
    ids=str,
)
def test_heads_that_share_angles_have_the_same_bits(
    head_dim: int, kv_len: int, heads: int, precision: Any, rope_dim: int, tables: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, k, v = inputs(kv_len, head_dim, torch.bfloat16)
    q = torch.cat([k.flip(2), k * 3, k.flip(3), k * 0.1][:heads], 1)
    k, v = (torch.cat([x, x.flip(2) - 1][: heads // 2], 1) for x in (k, v))
    options = make_transform(kv_len, head_dim, "bfloat16", rope_dim, **tables)
    config = config_for(head_dim, q.dtype, precision=precision, rotate=True, key_mean=True)
    expected = reference.quantize(*transform_both(q, k, options), v, config)
    results = []
    for sharing in (Sharing(1, 1, 1, False), Sharing(1, 1, 2, True), Sharing(2, 2, 4, True))[: heads // 2 + 1]:
        monkeypatch.setattr(qkv_quantizer, "choose_sharing", lambda *call, fixed=sharing: fixed)
        results.append(run(q, k, v, config, expected, options=options))
    own, *shared = results
    assert all(np.array_equal(result[name], own[name]) for name in own for result in shared)


def test_blocks_take_several_heads_with_rope() -> None:
    """As many as leave enough blocks."""
    rope = qkv_quantizer.Prologue(rotary_dim=128)
    for heads, kv_heads, rows, shared in (
        (40, 40, 32760, (4, 8, 10)), (24, 24, 16384, (4, 4, 8)), (24, 24, 4608, (2, 4, 8)), (32, 8, 32768, (4, 4, 8)),
        (7, 7, 65536, (4, 1, 7)), (36, 3, 8192, (2, 3, 6)),
    ):  # fmt: skip
        sizes, config = Sizes(1, heads, kv_heads, rows, rows), config_for(128, torch.bfloat16)
        assert choose_sharing(config, sizes, rope) == Sharing(*shared, True), heads
        assert not choose_sharing(config, sizes, qkv_quantizer.Prologue(norm="plain")).several_heads
    assert not choose_sharing(config, Sizes(1, 2, 2, 1000, 1000), rope).several_heads
    of_heads = qkv_quantizer.Prologue(rotary_dim=64, table_head=64)
    assert choose_sharing(config_for(64, torch.bfloat16), Sizes(1, 32, 32, 5120, 5120), of_heads) == Sharing(
        2, 1, 1, True
    )
