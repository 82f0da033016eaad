"""The attention block with LayerNorm, parts of a sequence, tables of heads, masks, and the log-sum-exp, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

import greenfast
from greenfast.ops.block import parse_transform, transform_both
from greenfast.ops.layout import make_tma_compatible
from tests.ops.test_block import EPS, make_angles, make_weights, tensors

block: Any = greenfast.attention_block
quantize: Any = greenfast.quantize
sdpa: Any = greenfast.sdpa
torch_sdpa: Any = scaled_dot_product_attention
#: Relative error of attention on FP8 codes of Gaussian tensors, against 16 bits.
FP8_ERROR = 0.06


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring columns, as complex numbers: an independent RoPE."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones(()), angles)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def error(result: Tensor, wanted: Tensor) -> float:
    return float(((result.float() - wanted.float()).norm() / wanted.float().norm()).detach())


@pytest.mark.parametrize("over_heads", [False, True])
def test_layer_norm_is_torchs(over_heads: bool) -> None:
    q, k, v = tensors(64, heads=(2, 2), shift=3.0)
    shape = (2, 64) if over_heads else (64,)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.rand(shape, generator=generator) + 0.5 for _ in range(2)]
    biases = [torch.randn(shape, generator=generator) for _ in range(2)]

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.transpose(1, 2).float()
        rows = rows.flatten(2) if over_heads else rows
        out = layer_norm(rows, rows.shape[-1:], weight.flatten(), bias.flatten(), EPS)
        return out.view(2, 150, 2, 64).transpose(1, 2).to(x.dtype)

    expected = quantize(normalize(q, weights[0], biases[0]), normalize(k, weights[1], biases[1]), v)
    options = dict(q_norm=weights[0], k_norm=weights[1], q_norm_bias=biases[0], k_norm_bias=biases[1], norm_eps=EPS)
    codes = quantize(q, k, v, norm="layer", **options)
    for name in ("query", "key"):
        differing = (getattr(codes, name) != getattr(expected, name)).float().mean()
        assert differing < 2e-3, "a last bit of 16 at most"
    plain = sdpa(
        normalize(q, weights[0], biases[0]), normalize(k, weights[1], biases[1]), v, is_causal=True, enable_gqa=True
    )
    assert error(block(q, k, v, True, norm="layer", **options), plain) < 2e-3
    free = block(q, k, v, norm="layer", q_norm=True, k_norm=True)
    centered = [layer_norm(x.float(), (64,), eps=1e-6).to(x.dtype) for x in (q, k)]
    assert error(free, sdpa(*centered, v)) < 2e-3


@pytest.mark.parametrize(("weighted", "over_heads"), [(False, False), (True, False), (True, True)])
def test_gradients_of_layer_norm_and_tables_of_heads_are_pytorchs(weighted: bool, over_heads: bool) -> None:
    shape = (2, 64) if over_heads else (64,)
    generator = torch.Generator().manual_seed(6)
    leaves = tensors(64, heads=(2, 2), rows=90, shift=1.0)
    if weighted:
        leaves += [torch.rand(shape, generator=generator) + 0.5 for _ in range(2)]
        leaves += [torch.randn(shape, generator=generator) for _ in range(2)]
    leaves = [x.requires_grad_() for x in leaves]
    wide: Any = [x.detach().double().requires_grad_() for x in leaves]
    angles = torch.stack([make_angles(64, 90)[0], make_angles(64, 90)[0] * 0.3])

    def attend(q: Tensor, k: Tensor, v: Tensor, *norms: Tensor) -> Tensor:
        rows = []
        for x, weight, bias in zip((q, k), norms[:2] or (None, None), norms[2:] or (None, None), strict=True):
            over = x.transpose(1, 2).flatten(2) if over_heads else x
            own = (x if x is None else x.flatten() for x in (weight, bias))
            normalized = layer_norm(over, over.shape[-1:], next(own), next(own), EPS)
            rows.append(normalized.view(2, 90, 2, 64).transpose(1, 2) if over_heads else normalized)
        turned = [
            torch.view_as_real(
                torch.view_as_complex(x.reshape(*x.shape[:3], 32, 2)) * torch.polar(torch.ones(()), angles)
            )
            for x in rows
        ]
        return torch_sdpa(*(x.flatten(-2) for x in turned), v)  # type: ignore[no-any-return]

    options = dict(norm="layer", q_norm=True, k_norm=True)
    if weighted:
        options |= dict(zip(("q_norm", "k_norm", "q_norm_bias", "k_norm_bias"), leaves[3:], strict=True))
    out = block(
        *leaves[:3], **options, norm_eps=EPS, rope=(angles.cos().unsqueeze(0), angles.sin().unsqueeze(0)),
        rope_interleaved=True,
    )  # fmt: skip
    wanted = attend(*wide)
    assert error(out, wanted) < FP8_ERROR
    grad = torch.randn(out.shape, generator=generator).bfloat16()
    for x, y, leaf in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, wide, grad.double()), leaves, strict=True
    ):
        assert x.dtype == leaf.dtype
        assert error(x, y) < 0.01


def test_parts_with_norms_and_tables_of_their_own_are_one_sequence() -> None:
    text, image = tensors(64, rows=37), tensors(64, rows=150, shift=1.0)
    text_norms, image_norms = make_weights(64), [x * 3 for x in make_weights(64)]
    angles = make_angles(64, 150)

    def normalize(part: list[Tensor], norms: list[Tensor]) -> list[Tensor]:
        return [rms_norm(x.float(), (64,), w, EPS).to(x.dtype) for x, w in zip(part[:2], norms, strict=True)] + part[2:]

    first, second = normalize(text, text_norms), normalize(image, image_norms)
    second[:2] = [rotate(x, angles[0]) for x in second[:2]]
    joined = [torch.cat(pair, 2) for pair in zip(first, second, strict=True)]
    options = dict(
        q_norm=(text_norms[0], image_norms[0]), k_norm=(text_norms[1], image_norms[1]), norm_eps=EPS,
        rope_interleaved=True,
    )  # fmt: skip
    tables = (angles.cos()[0], angles.sin()[0])
    parts = [list(pair) for pair in zip(text, image, strict=True)]
    out = block(*parts, rope=(None, tables), **options)
    assert out.shape == (2, 4, 187, 64)
    assert error(out, sdpa(*joined, enable_gqa=True)) < 2e-3
    whole = (torch.cat((torch.ones(37, 32), tables[0])), torch.cat((torch.zeros(37, 32), tables[1])))
    assert torch.equal(block(*parts, rope=whole, **options), out)
    codes = quantize(*parts, rope=(None, tables), **options)
    assert torch.equal(greenfast.attention(codes), out)
    shared = block(*parts, q_norm=image_norms[0], k_norm=image_norms[1], norm_eps=EPS)
    both = [torch.cat(pair, 2) for pair in parts]
    assert torch.equal(shared, block(*both, q_norm=image_norms[0], k_norm=image_norms[1], norm_eps=EPS))


def test_tables_of_heads_rotate_each_head_by_its_own_angles() -> None:
    q, k, v = tensors(64, heads=(2, 2))
    angles = torch.stack([make_angles(64)[0], make_angles(64)[0] * 0.3])
    weights = [torch.rand(2, 64) + 0.5 for _ in range(2)]
    tables = tuple(x.repeat_interleave(2, -1).unsqueeze(0) for x in (angles.cos(), angles.sin()))
    out = block(q, k, v, q_norm=weights[0], k_norm=weights[1], norm_eps=EPS, rope=tables, rope_interleaved=True)
    normalized = [
        rms_norm(x.transpose(1, 2).float().flatten(2), (128,), w.flatten(), EPS).view(2, 150, 2, 64).transpose(1, 2)
        for x, w in zip((q, k), weights, strict=True)
    ]
    expected = sdpa(*(rotate(x.to(q.dtype), angles) for x in normalized), v)
    assert error(out, expected) < 2e-3
    q, k, v, cos, sin = (x[:0] for x in (q, k, v, *tables))
    assert block(q, k, v, rope=(cos, sin), rope_interleaved=True).shape == q.shape


def masks() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    keys = torch.tensor([150, 97])
    kept = (torch.arange(150) < keys.unsqueeze(1))[:, None, None]
    dense = torch.rand(2, 1, 150, 150, generator=generator) < 0.5
    return {
        "window": dict(window=(40, 0)),
        "lengths": dict(kv_lengths=keys),
        "padding": dict(attn_mask=kept),
        "booleans": dict(attn_mask=dense),
        "causal booleans": dict(attn_mask=dense | torch.eye(150, dtype=torch.bool), is_causal=True),
        "lists": dict(attn_mask=greenfast.BlockMask.from_bool(dense)),
        "softcap": dict(softcap=20.0),
        "sinks": dict(sinks=torch.randn(4, generator=generator)),
        "sinks and window": dict(sinks=torch.randn(4, generator=generator), window=(31, 0), is_causal=True),
        "skip": dict(skip_threshold=1e-3),
        "none": {},
    }


@pytest.mark.parametrize(
    ("name", "grad"),
    [
        (name, grad)
        for name in masks()
        for grad in (False, True)
        if not (grad and ("softcap" in name or "sinks" in name))
    ],
)
def test_masks_and_the_log_sum_exp_are_those_of_sdpa(name: str, grad: bool) -> None:
    """With gradients PyTorch computes norm and RoPE, and the results have the same bits."""
    options = masks()[name]
    q, k, v = tensors(64, shift=0.5)
    if grad:
        q.requires_grad_()
    weights, angles = make_weights(64), make_angles(64)
    rows: dict[str, Any] = dict(q_norm=weights[0], k_norm=weights[1], norm_eps=EPS, rope=(angles.cos(), angles.sin()))
    out, sums = block(q, k, v, return_lse=True, **rows, **options)
    plain = block(q, k, v, **rows, **options)
    transform = parse_transform(q, k, weights[0], weights[1], "rms", None, None, EPS, rows["rope"], None, False)
    assert transform is not None
    transformed = transform_both(q, k, transform)
    wanted, wanted_sums = sdpa(*transformed, v, enable_gqa=True, return_lse=True, **options)
    assert error(out, wanted) < 2e-3
    assert torch.allclose(sums, wanted_sums, atol=5e-3)
    assert error(plain, wanted) < 2e-3
    if grad:
        (by_query,) = torch.autograd.grad(plain.sum(), q)
        exact = torch.autograd.grad(sdpa(*transformed, v, enable_gqa=True, **options).sum(), q)[0]
        assert error(by_query, exact) < 2e-2


def test_layouts_and_packed_projections_are_read_in_place() -> None:
    """Rows of one projection, and heads after rows: the same bits as contiguous tensors, in the memory order of Q."""
    packed = torch.randn(2, 150, 3, 4, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    weights, angles = make_weights(64), make_angles(64)
    options = dict(q_norm=weights[0], k_norm=weights[1], rope=(angles.cos(), angles.sin()))
    out = block(q, k, v, **options)
    assert torch.equal(out, block(*(x.contiguous() for x in (q, k, v)), **options))
    assert out.transpose(1, 2).is_contiguous()
    for x in (q, k, v):
        assert make_tma_compatible(x) is x


def test_graphs_and_gradients_of_parts() -> None:
    text, image = tensors(64, rows=20), tensors(64, rows=40)
    norms = [torch.nn.Parameter(x) for x in (*make_weights(64), *make_weights(64))]
    leaves = [x.detach().requires_grad_() for x in (*text, *image)]

    def call(*parts: Tensor) -> Tensor:
        pairs = [list(pair) for pair in zip(parts[:3], parts[3:], strict=True)]
        out: Tensor = block(*pairs, q_norm=(norms[0], norms[2]), k_norm=(norms[1], norms[3]), norm_eps=EPS)
        return out

    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = [f(*leaves) for f in (call, compiled)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(x.float().square().sum(), [*leaves, *norms]) for x in results]
    for one, other in zip(*grads, strict=True):
        assert error(one, other) < 1e-2

    def exact() -> Any:
        parts = [
            [rms_norm(x.float(), (64,), w, EPS).to(x.dtype) for x, w in zip(p[:2], n, strict=True)] + [p[2]]
            for p, n in ((leaves[:3], norms[:2]), (leaves[3:], norms[2:]))
        ]
        return torch_sdpa(*(torch.cat(pair, 2) for pair in zip(*parts, strict=True)), enable_gqa=True)

    wanted = exact()
    assert error(results[0], wanted) < FP8_ERROR
    for mine, theirs in zip(
        grads[0], torch.autograd.grad(wanted.float().square().sum(), [*leaves, *norms]), strict=True
    ):
        assert error(mine, theirs) < 2 * FP8_ERROR


@pytest.mark.parametrize(
    ("options", "error_type", "message"),
    [
        (dict(norm="batch"), ValueError, "norm: 'batch'; allowed are 'rms', 'layer'"),
        (dict(q_norm_bias=torch.ones(64)), ValueError, 'q_norm_bias: only norm="layer" has one'),
        (dict(norm="layer", k_norm_bias=torch.ones(64)), ValueError, "k_norm_bias: k_norm is None"),
        (dict(norm="layer", q_norm=torch.ones(32), k_norm=torch.ones(64)), ValueError, r"q_norm: its shape is \(32,\)"),
        (dict(norm="layer", k_norm=True), ValueError, "k_norm: True, q_norm None"),
        (
            dict(norm="layer", q_norm=torch.ones(64), k_norm=torch.ones(64), q_norm_bias=torch.ones(64)),
            ValueError, "k_norm_bias: biases of both",
        ),
        (
            dict(norm="layer", q_norm=torch.ones(64), k_norm=torch.ones(64), q_norm_bias=[1, 2]),
            TypeError, r"q_norm_bias: \[1, 2\]; a tensor",
        ),
        (
            dict(norm="layer", **{f"{n}_norm{b}": torch.ones(64) for n in "qk" for b in ("", "_bias")}
                 | dict(k_norm_bias=torch.ones(64).half())),
            TypeError, "k_norm_bias: its dtype is torch.float16",
        ),
        (dict(rope=(torch.ones(1, 3, 150, 32),) * 2), ValueError, r"rope: the shape of cos is \(1, 3, 150, 32\)"),
        (dict(return_lse=1), TypeError, "return_lse: 1"),
        (
            dict(window=(1, 1), attn_mask=torch.ones(2, 1, 150, 150).bool().tril(), q_norm=True, k_norm=True),
            ValueError, "window: not with attn_mask",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_refusals_name_the_argument(options: dict[str, Any], error_type: type[Exception], message: str) -> None:
    with pytest.raises(error_type, match=message):
        block(*tensors(64), **options)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, k, v: ([q], k, v), {}, "key: 1 tensors are needed"),
        (lambda q, k, v: (q, [k], v), {}, "key: 1 tensors, query is one"),
        (lambda q, k, v: ([], [], []), {}, "query: no tensors"),
        (lambda q, k, v: ([q], [k], [v]), dict(q_norm=[True, True], k_norm=[True]), "q_norm, k_norm: 2 norms; 1 are"),
        (lambda q, k, v: ([q], [k], [v]), dict(rope=[None, None]), "rope: 2 pairs; 1 are needed"),
        (lambda q, k, v: ([q], [k], [v]), dict(rope=[3]), "rope: for each part"),
    ],
)
def test_refusals_of_parts(change: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        block(*change(*tensors(64)), **options)


def test_explain_names_the_pass() -> None:
    q, k, v = tensors(64)
    table = make_angles(64).cos()
    explain: Any = greenfast.explain

    def reason(**options: Any) -> str:
        return str(explain(q, k, v, enable_gqa=True, target="sm_90a", **options).reason)

    assert reason(rope=(table, table)).endswith("; RoPE in the pass that quantizes Q, K and V")
    assert reason(q_norm=True, rope=(table, table)).endswith("; norm and RoPE in the pass that quantizes Q, K and V")
    assert reason(q_norm=True, norm="layer").endswith("; norm in the pass that quantizes Q, K and V")
    heads = table.expand(1, 4, -1, -1)
    assert reason(rope=(heads, heads)).endswith("; RoPE in the pass that quantizes Q, K and V")
    assert reason(q_norm=True, kv_lengths=torch.tensor([9, 9])).endswith("; norm by PyTorch, before quantization")
    assert "norm" not in reason()
    assert "norm" not in explain(q, k, v, dropout_p=0.1, q_norm=True).reason, "PyTorch's own attention"
