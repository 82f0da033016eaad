"""Gradients are close to full-precision attention's for all inputs, lengths and masks, and good enough to train."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import greenfast
from greenfast.ops import backward, reference
from tests.ops.gradient_cases import KINDS, Sizes, bound, case, error, gradients, torch_attention

sdpa: Any = greenfast.sdpa
of_reference: Any = reference.compute_gradients
of_gpu: Any = backward.sdpa_backward

SIZES = (
    Sizes(1, 1),
    Sizes(7, 1, causal=1),
    Sizes(70, 70, causal=1),
    Sizes(130, 300, heads=4, causal=2),
    Sizes(300, 130, 72, kv_heads=1, causal=1),
    Sizes(300, 130, 40, causal=2),  # rows that attend to no key
    Sizes(129, 257, 128),
    Sizes(33, 17, 256, causal=1),
)


def judge(kind: str, several: Sequence[Sizes], dtype: torch.dtype) -> None:
    for sizes in several:
        inputs, grad = case(kind, sizes, dtype)
        result = gradients(lambda q, k, v, s=sizes: sdpa(q, k, v, **s.options()), inputs, grad)
        theirs = gradients(lambda q, k, v, s=sizes: torch_attention(q, k, v, s.causal), inputs, grad)
        doubles = [x.double() for x in inputs]
        exact = gradients(lambda q, k, v, s=sizes: torch_attention(q, k, v, s.causal), doubles, grad.double())
        for name, mine, other, wanted in zip("qkv", result, theirs, exact, strict=True):
            assert mine.dtype == dtype
            assert torch.isfinite(wanted).all()
            assert error(mine, wanted, grad) <= bound(other, wanted, grad), (sizes, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_within_three_times_the_error_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    judge(kind, SIZES, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_sizes(kind: str) -> None:
    draw = random.Random(kind)
    several = []
    for _ in range(40):
        kv_heads = draw.choice((1, 2))
        heads = kv_heads * draw.choice((1, 2, 3))
        lengths = draw.randint(1, 300), draw.randint(1, 300)
        several.append(Sizes(*lengths, 8 * draw.randint(1, 32), heads, kv_heads, draw.choice((0, 1, 2))))
    judge(kind, several, torch.bfloat16)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_the_precision_of_the_forward_does_not_matter(precision: Any) -> None:
    inputs, grad = case("biased 10", Sizes(60, 60, causal=1), torch.bfloat16)
    result = gradients(lambda *x: sdpa(*x, is_causal=True, precision=precision), inputs, grad)
    wanted = of_reference(grad, *inputs, 1, 1 / 8)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, wanted, strict=True))


def test_a_scale_and_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_ROWS", 16)
    inputs, grad = case("normal", Sizes(70, 90), torch.float16)
    result = gradients(lambda *x: sdpa(*x, scale=0.3), inputs, grad)
    doubles = [x.double() for x in inputs]
    wanted = gradients(
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3), doubles, grad.double()
    )
    for mine, theirs in zip(result, wanted, strict=True):
        assert error(mine, theirs, grad) < 2e-3


@pytest.mark.parametrize("shapes", [((0, 2, 5, 64), (0, 2, 5, 64)), ((1, 2, 0, 64), (1, 2, 3, 64)),
                                    ((1, 2, 3, 64), (1, 2, 0, 64))], ids=str)  # fmt: skip
@pytest.mark.parametrize("function", [reference.compute_gradients, backward.sdpa_backward])
def test_gradients_of_empty_inputs(shapes: Any, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    q, k = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
    result = function(q, q, k, k, 0, 0.125)
    assert all(torch.equal(x, torch.zeros_like(y)) for x, y in zip(result, (q, k, k), strict=True))


def test_one_input_alone_and_gradients_of_any_layout() -> None:
    (q, k, v), grad = case("normal", Sizes(30, 30), torch.bfloat16)
    whole = gradients(sdpa, [q, k, v], grad)
    leaf = k.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(sdpa(q, leaf, v), leaf, grad)[0], whole[1])
    strided = grad.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(torch.equal(a, b) for a, b in zip(gradients(sdpa, [q, k, v], strided), whole, strict=True))
    ones = gradients(sdpa, [q, k, v], torch.ones_like(grad))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sdpa(*leaves).sum().backward()
    assert all(torch.equal(x.grad, b) for x, b in zip(leaves, ones, strict=True) if x.grad is not None)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for x, a, b in zip(transposed, gradients(sdpa, transposed, grad), whole, strict=True):
        assert a.stride() == x.stride(), "as PyTorch's attention lays them out"
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (5, 9), (9, 5), (1, 4), (4, 1)])
def test_the_parts_for_kernels_that_align_masks_at_the_end(
    q_len: int, kv_len: int, causal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts for PyTorch's kernels add up to the whole; stand-ins replace those kernels."""

    def kernels(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, masked: bool, scale: float, kept: None
    ) -> tuple[Tensor, ...]:
        assert kept is None
        assert not masked or q.shape[2] <= k.shape[2]
        return reference.compute_gradients(grad, q, k, v, 2 if masked else 0, scale)

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(backward, "_torch_backward", kernels)
    inputs, grad = case("normal", Sizes(q_len, kv_len, heads=4), torch.float16)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    sliced = [torch.cat([x, x], -1)[..., :64] for x in strided]  # as from one projection to Q, K and V
    for tensors in (inputs, strided, sliced):
        result = of_gpu(grad.expand(1, 4, q_len, 64), *tensors, causal, 1 / 8)
        wanted = of_reference(grad, *inputs, causal, 1 / 8)
        for x, mine, theirs in zip(tensors, result, wanted, strict=True):
            assert mine.stride() == torch.empty_like(x).stride()
            assert error(mine, theirs, grad) < 1e-3


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize(
    "sizes", [Sizes(50, 50), Sizes(20, 50, heads=4, causal=2), Sizes(50, 20, 72, causal=1)], ids=str
)
def test_pytorchs_kernels_accept_the_arguments(sizes: Sizes, cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors check the arguments."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(backward, "_uses_cudnn", lambda *args: cudnn)
    inputs, grad = case("normal", sizes, torch.bfloat16)
    monkeypatch.setattr(backward, "make_tma_compatible", lambda x, unique_rows: x.to("meta"))
    meta = [x.to("meta") for x in inputs]
    result = of_gpu(grad, *meta, sizes.causal, 0.1)
    assert [x.shape for x in result] == [x.shape for x in inputs]


class Block(nn.Module):
    """A layer of a language model. Its keys have a bias in every channel."""

    def __init__(self, width: int, heads: int, bias: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        with torch.no_grad():
            self.key.bias.copy_(bias * torch.randn(width))

    def forward(self, x: Tensor, attention: Any) -> Tensor:
        y = self.before(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2).bfloat16()
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(attention(q, k, v, is_causal=True).float().transpose(1, 2).flatten(2))
        added: Tensor = self.down(nn.functional.gelu(self.up(self.between(x))))
        return x + added


def losses(attention: Any, text: Tensor, steps: int, length: int = 64) -> Tensor:
    """The losses of a two-layer model that learns to continue the text, averaged over every 40 steps."""
    torch.manual_seed(0)
    symbols = int(text.max()) + 1
    symbol, position = nn.Embedding(symbols, 64), nn.Embedding(length, 64)
    blocks = nn.ModuleList(Block(64, 2, bias=10.0) for _ in range(2))
    head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, symbols))
    model = nn.ModuleList([symbol, position, blocks, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    result = []
    for _ in range(steps):
        some = text[torch.randint(0, len(text) - length - 1, (8, 1)) + torch.arange(length + 1)]
        x = symbol(some[:, :-1]) + position.weight
        for block in blocks:
            x = block(x, attention)
        loss = nn.functional.cross_entropy(head(x).flatten(0, 1), some[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        result.append(loss.detach())
    return torch.stack(result).view(-1, 40).mean(1)


@pytest.mark.slow
def test_a_language_model_learns_as_with_bfloat16(pytestconfig: pytest.Config) -> None:
    letters = torch.tensor(list((pytestconfig.rootpath / "LICENSE").read_bytes()))
    text = torch.unique(letters, return_inverse=True)[1]
    wanted = losses(nn.functional.scaled_dot_product_attention, text, 320)
    result = losses(greenfast.sdpa, text, 320)
    assert wanted[-1] < 0.7 * wanted[0], "it learns"
    assert ((result - wanted).abs() / wanted).max() < 0.01
