"""Norm and RoPE in the quantizer on a GPU: they agree with the CPU, with separate steps, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import greenfast
from greenfast.ops.block import parse_transform, transform_both
from tests.ops.test_block import EPS, exact, make_angles, make_weights, measure_error, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
block: Any = greenfast.attention_block
quantize: Any = greenfast.quantize
#: Head dim, rotated columns, interleaved, dtype of the tables, norm.
CASES: list[Any] = [
    (64, 64, False, torch.bfloat16, "weights"), (64, 32, False, torch.float32, "weights"),
    (128, 128, False, torch.float32, "weights"), (128, 128, True, torch.float32, "weights"),
    (128, 64, True, torch.float16, ""), (256, 256, False, torch.bfloat16, "plain"),
    (256, 128, True, torch.float32, "weights"), (128, 0, False, torch.float32, "weights"),
    (72, 72, False, torch.float32, "weights"), (80, 20, False, torch.bfloat16, ""),
    (40, 36, True, torch.float32, "plain"),
]  # fmt: skip


def make_options(case: tuple[int, int, bool, torch.dtype, str], rows: int, batch: int = 1) -> dict[str, Any]:
    head_dim, rope_dim, interleaved, table, norm = case
    options: dict[str, Any] = {"rope_interleaved": interleaved, "norm_eps": EPS}
    if norm:
        weights: list[Any] = [True, True] if norm == "plain" else [x.cuda() for x in make_weights(head_dim)]
        options |= {"q_norm": weights[0], "k_norm": weights[1]}
    if rope_dim:
        angles = make_angles(rope_dim, rows, batch).cuda()
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        options |= {"rope": (angles.cos().to(table), angles.sin().to(table)), "rope_dim": rope_dim}
    return options


def move(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.cpu() if isinstance(x, Tensor) else tuple(y.cpu() for y in x) if isinstance(x, tuple) else x
        for name, x in options.items()
    }


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_agree_with_the_cpu(case: Any, precision: str, dtype: torch.dtype) -> None:
    """Sums in another order change a 16-bit result now and then, and with it the codes of its row."""
    q, k, v = tensors(case[0], (4, 2), 700, dtype, shift=0.5)
    options = make_options(case, 700, 2)
    wanted = quantize(q, k, v, **move(options), precision=precision)
    found = quantize(*(x.cuda() for x in (q, k, v)), **options, precision=precision)
    assert torch.equal(found.value.cpu(), wanted.value)
    for name in ("query", "key"):
        codes, scale = (getattr(found, x).cpu() for x in (name, f"{name}_scale"))
        assert (codes != getattr(wanted, name)).float().mean() < 5e-3
        assert torch.allclose(scale, getattr(wanted, f"{name}_scale"), rtol=2**-7)
    assert torch.allclose(found.key_mean.cpu(), wanted.key_mean, atol=2e-3)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("heads", "rows", "causal"), [((8, 2), 2000, True), ((24, 24), 4608, False), ((2, 2), 77, True)]
)
def test_block_agrees_with_separate_steps(
    case: Any, precision: str, heads: tuple[int, int], rows: int, causal: bool
) -> None:
    head_dim, rope_dim, interleaved, _, norm = case
    q, k, v = (x.cuda() for x in tensors(head_dim, heads, rows))
    options = make_options(case, rows)
    found = block(q, k, v, causal, **options, precision=precision)
    codes = greenfast.attention(quantize(q, k, v, **options, precision=precision), is_causal=causal)
    assert torch.equal(found, codes)
    assert found.stride() == q.stride()
    if rows < 4000:
        weights = {"": None, "plain": (None, None), "weights": (options.get("q_norm"), options.get("k_norm"))}[norm]
        angles = make_angles(rope_dim, rows).cuda() if rope_dim else None
        assert measure_error(found, exact(q, k, v, weights, angles, causal, interleaved)) < 0.07


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_extremes(head_dim: int) -> None:
    q, k, v = tensors(head_dim, rows=300)
    q[0, 0, 5], q[0, 1, 40, 3], k[1, 1, 200], q[1] = torch.nan, torch.inf, -torch.inf, q[1] * 1e37
    q[0, 2, 100] = 0.0
    options = make_options((head_dim, head_dim, False, torch.float32, "weights"), 300) | {"norm_eps": 0.0}
    wanted = block(q, k, v, True, **move(options))
    found = block(q.cuda(), k.cuda(), v.cuda(), True, **options).cpu()
    assert torch.equal(found.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    assert (found - wanted)[finite].norm() <= 0.03 * wanted[finite].norm()


def test_layouts_are_read_without_a_copy() -> None:
    """Packed projections, unaligned weights, and tables of other strides."""
    packed = torch.randn(2, 500, 3, 8, 128, device="cuda").bfloat16()
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    options = make_options((128, 128, False, torch.float32, "weights"), 500, 2)
    wanted = block(q.contiguous(), k.contiguous(), v.contiguous(), **options)
    assert torch.equal(block(q, k, v, **options), wanted)
    shifted = torch.empty(129, device="cuda")
    shifted[1:] = options["q_norm"]
    table = torch.empty(2, 128, 500, device="cuda").transpose(1, 2).copy_(options["rope"][0])
    other = options | {"q_norm": shifted[1:], "rope": (table, options["rope"][1])}
    assert torch.equal(block(q, k, v, **other), wanted)
    base = torch.empty(2 * 8 * 500 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 8, 500, 128)
    assert torch.equal(block(base.copy_(q), k, v, **options), wanted)


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_norms_over_all_heads(head_dim: int) -> None:
    q, k, v = tensors(head_dim, (8, 2), 700)
    weights = [x * torch.linspace(0.5, 1.0, n).view(-1, 1) for x, n in zip(make_weights(head_dim), (8, 2), strict=True)]
    angles = make_angles(head_dim, 700)
    options = {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": EPS, "rope": (angles.cos(), angles.sin())}
    wanted = exact(q, k, v, weights, angles)
    options = {name: tuple(y.cuda() for y in x) if isinstance(x, tuple) else x for name, x in options.items()}
    options |= {"q_norm": weights[0].cuda(), "k_norm": weights[1].cuda()}
    found = block(q.cuda(), k.cuda(), v.cuda(), True, **options)
    assert measure_error(found.cpu(), wanted) < 0.07
    assert torch.equal(found, greenfast.attention(quantize(q.cuda(), k.cuda(), v.cuda(), **options), is_causal=True))


@pytest.mark.parametrize(("heads", "rows"), [((4, 2), 700), ((24, 24), 4608)])
@pytest.mark.parametrize("over_heads", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_layer_norm(head_dim: int, over_heads: bool, heads: tuple[int, int], rows: int) -> None:
    """Codes of rows that PyTorch normalizes and rotates, also where the deviation is small beside the mean."""
    q, k, v = (x.cuda() for x in tensors(head_dim, heads, rows))
    shapes = [(n, head_dim) if over_heads else (head_dim,) for n in heads]
    weights = [torch.rand(shape, device="cuda") + 0.5 for shape in shapes]
    biases = [torch.randn(shape, device="cuda") / 5 for shape in shapes]
    options: Any = {"norm": "layer", "q_norm_bias": biases[0], "k_norm_bias": biases[1]}
    options |= make_options((head_dim, head_dim // 8 * 4, True, torch.float32, ""), rows)
    assert_codes_of_separate_steps(q, k, v, q_norm=weights[0], k_norm=weights[1], **options)
    plain = options | {"q_norm_bias": None, "k_norm_bias": None}
    weights = weights if over_heads else [True, True]  # type: ignore[list-item]
    assert_codes_of_separate_steps(100 + q / 10, 100 + k / 10, v, q_norm=weights[0], k_norm=weights[1], **plain)


@pytest.mark.parametrize(("heads", "rows"), [(3, 700), (32, 5120)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_heads(head_dim: int, interleaved: bool, heads: int, rows: int) -> None:
    """LTX-Video: norms over all heads, and tables (B, S, H x D); each head has a part of them."""
    q, k, v = (x.cuda() for x in tensors(head_dim, (heads, heads), rows))
    weights = [torch.rand(heads, head_dim, device="cuda") + 0.5 for _ in range(2)]
    angles = torch.randn(2, rows, heads, head_dim // 2, device="cuda")
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    rope = angles.cos().transpose(1, 2), angles.sin().transpose(1, 2)
    options: Any = dict(q_norm=weights[0], k_norm=weights[1], norm_eps=EPS, rope=rope, rope_interleaved=interleaved)
    assert_codes_of_separate_steps(q, k, v, **options)
    out = block(q, k, v, True, **options)
    assert torch.equal(out, greenfast.attention(quantize(q, k, v, **options), is_causal=True))


def assert_codes_of_separate_steps(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Compare codes and scales of rows that PyTorch has normalized and rotated in 16 bits."""
    defaults: dict[str, Any] = dict(norm="rms", q_norm_bias=None, k_norm_bias=None, rope_dim=None)
    transform = parse_transform(q, k, **defaults | options)
    assert transform is not None
    wanted = quantize(*transform_both(q, k, transform), v)
    found = quantize(q, k, v, **options)
    assert torch.equal(found.value, wanted.value)
    for name in ("query", "key"):
        assert (getattr(found, name) != getattr(wanted, name)).float().mean() < 5e-3, name
        scale = f"{name}_scale"
        assert torch.allclose(getattr(found, scale), getattr(wanted, scale), rtol=2**-7), name
    assert torch.allclose(found.key_mean, wanted.key_mean, atol=2e-3)


def test_gradients() -> None:
    q, k, v = tensors(128, (8, 2), 600)
    options = make_options((128, 128, False, torch.float32, "weights"), 600)
    weights = [options["q_norm"].requires_grad_(), options["k_norm"].requires_grad_()]
    leaves = [*(x.cuda().requires_grad_() for x in (q, k, v)), *weights]
    grad = torch.randn(2, 8, 600, 128, device="cuda").bfloat16()
    grads = torch.autograd.grad(block(*leaves[:3], True, **options), leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = exact(wide[0], wide[1], wide[2], wide[3:], make_angles(128, 600).cuda())
    for x, y in zip(grads, torch.autograd.grad(out, wide, grad.double()), strict=True):
        assert measure_error(x, y) < 0.02


def test_graphs_and_compile() -> None:
    q, k, v = (x.cuda() for x in tensors(128, (8, 2), 1000))
    options = make_options((128, 128, True, torch.bfloat16, "weights"), 1000)
    wanted = block(q, k, v, True, **options)
    compiled: Any = torch.compile(block, fullgraph=True)
    assert torch.equal(compiled(q, k, v, True, **options), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block(q, k, v, True, **options)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    for x in options["rope"]:
        x.zero_()
    graph.replay()
    assert not torch.equal(out, wanted), "tables are read in each replay"


def test_norm_is_that_of_pytorch() -> None:
    """In 16 bits, 99.9 % of the numbers are the same, and so is attention without quantization error of its own."""
    q, k, v = (x.cuda() for x in tensors(128, (4, 4), 512))
    weight = make_weights(128, torch.bfloat16)[0].cuda()
    a, b = (rms_norm(x, (128,), weight, EPS) for x in (q, k))
    fused, separate = (
        block(q, k, v, q_norm=weight, k_norm=weight, norm_eps=EPS), greenfast.sdpa(a, b, v)
    )  # fmt: skip
    error = measure_error(separate, scaled_dot_product_attention(a.double(), b.double(), v.double()))
    assert measure_error(fused, separate.double()) < 0.3 * error


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(
    ("head_dim", "rows", "heads", "tables", "interleaved"),
    [
        (64, (77, 1000), (8, 2), "second", True), (128, (512, 4096), (24, 24), "whole", True),
        (128, (226, 700), (8, 8), "own", True), (256, (33, 300), (4, 2), "whole", False),
        (64, (0, 300), (4, 2), "", False),
        (128, (300, 0), (4, 4), "first", False), (128, (300, 16384), (24, 24), "own", False),
    ],
    ids=str,
)  # fmt: skip
def test_parts_are_one_sequence(
    head_dim: int, rows: tuple[int, int], heads: tuple[int, int], tables: str, interleaved: bool, precision: str
) -> None:
    """Norms and tables of each part: equal weights give the codes of joined tensors, other weights PyTorch's codes."""
    parts = [[x.cuda() for x in tensors(head_dim, heads, n)] for n in rows]
    query, key, value = ([x, y] for x, y in zip(*parts, strict=True))
    joined = [torch.cat(pair, 2) for pair in (query, key, value)]
    angles = make_angles(head_dim, sum(rows))[0].cuda()
    pair = angles.cos(), angles.sin()
    each: list[Any] = [tuple(x[: rows[0]] for x in pair), tuple(x[rows[0] :] for x in pair)]
    rope: Any = {
        "whole": pair, "own": each, "first": [each[0], None], "second": [None, each[1]], "": None
    }[tables]  # fmt: skip
    whole = pair
    if tables in ("first", "second"):
        part = slice(rows[0], None) if tables == "first" else slice(0, rows[0])
        whole = pair[0].clone(), pair[1].clone()
        whole[0][part], whole[1][part] = 1.0, 0.0
    weights = [x.cuda() for x in make_weights(head_dim)]
    options: dict[str, Any] = dict(norm_eps=EPS, rope_interleaved=interleaved)
    same = dict(q_norm=weights[0], k_norm=weights[1])
    results = quantize(query, key, value, rope=rope, **same, **options, precision=precision)
    wanted = quantize(*joined, rope=whole if tables else None, **same, **options, precision=precision)
    for x, y in zip(results.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(x, y)
    out = block(query, key, value, rope=rope, **same, **options, precision=precision)
    assert torch.equal(out, greenfast.attention(wanted))
    assert out.transpose(1, 2).is_contiguous(), "the memory order of query"
    own = dict(q_norm=[weights[0], 3 * weights[0]], k_norm=[weights[1], 3 * weights[1]])
    found = quantize(query, key, value, rope=rope, **own, **options, precision=precision)
    with torch.enable_grad():  # PyTorch computes the norms for calls with gradients
        leaves = [x.detach().requires_grad_() for x in query]
        separate = block(leaves, key, value, rope=rope, **own, **options, precision=precision).detach()
    fused = block(query, key, value, rope=rope, **own, **options, precision=precision)
    assert torch.equal(fused, greenfast.attention(found))
    assert measure_error(fused, separate.double()) < 5e-3


def test_parts_in_graphs_and_with_masks() -> None:
    text, image = ([x.cuda() for x in tensors(128, (8, 8), n)] for n in (77, 700))
    weights = [x.cuda() for x in (*make_weights(128), *(2 * y for y in make_weights(128)))]
    angles = make_angles(128, 700)[0].cuda()
    tables = angles.cos(), angles.sin()
    call = dict(
        q_norm=weights[::2], k_norm=weights[1::2], norm_eps=EPS, rope=[None, tables], rope_interleaved=True
    )  # fmt: skip
    pairs = [[x, y] for x, y in zip(text, image, strict=True)]
    wanted = block(*pairs, **call)
    for _ in range(2):  # a repeated call is replayed
        assert torch.equal(block(*pairs, **call), wanted)
    compiled: Any = torch.compile(block, fullgraph=True)
    assert torch.equal(compiled(*pairs, **call), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block(*pairs, **call)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    tables[0].zero_()
    graph.replay()
    assert not torch.equal(out, wanted), "tables are read in each replay"
    tables[0].copy_(angles.cos())
    mask = torch.rand(2, 1, 777, 777, device="cuda") < 0.5
    joined = [torch.cat(pair, 2) for pair in pairs]
    whole = [torch.cat([torch.full((77, 64), x, device="cuda"), y]) for x, y in zip((1.0, 0.0), tables, strict=True)]
    same = dict(q_norm=weights[0], k_norm=weights[1], norm_eps=EPS, rope_interleaved=True)
    masks: list[dict[str, Any]] = [
        dict(attn_mask=mask), dict(window=(100, 0)), dict(return_lse=True), dict(softcap=20.0)
    ]  # fmt: skip
    for options in masks:
        results = block(*pairs, **same, rope=[None, tables], **options)
        expected = block(*joined, **same, rope=tuple(whole), **options)
        results, expected = ((x if isinstance(x, tuple) else (x,)) for x in (results, expected))
        for x, y in zip(results, expected, strict=True):
            assert torch.allclose(x, y, atol=1e-3), options
