"""Norm and RoPE in the quantizer on a GPU: they agree with the CPU, with separate steps, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import greenfast
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
