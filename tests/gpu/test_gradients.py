"""Gradients on a GPU: as good as in 16-bit attention on any inputs; the forward is the same in any mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import greenfast
from greenfast.ops import backward, reference
from greenfast.ops.masked import MaskSpec
from tests.ops.gradient_cases import KINDS, Sizes, bound, case, error, gradients, torch_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
sdpa: Any = greenfast.sdpa
of_reference: Any = reference.compute_gradients
of_gpu: Any = backward.sdpa_backward

SIZES = (  # with one key dQ is 0, for which a relative error in 16 bits is meaningless
    Sizes(1, 200, heads=4, causal=2),
    Sizes(300, 300, 128, heads=4, kv_heads=1, causal=1),
    Sizes(130, 300, 128, causal=1),
    Sizes(130, 300, heads=4, causal=2),
    Sizes(300, 130, 72, kv_heads=1, causal=1),
    Sizes(300, 130, 40, causal=2),  # rows that attend to no key
    Sizes(1000, 1000, 256, causal=1),
    Sizes(129, 257, 256),
)


def on_gpu(kind: str, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Tensor]:
    inputs, grad = case(kind, sizes, dtype)
    return [x.cuda() for x in inputs], grad.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_within_three_times_the_error_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    for sizes in SIZES:
        inputs, grad = on_gpu(kind, sizes, dtype)
        found = gradients(lambda q, k, v, s=sizes: sdpa(q, k, v, **s.options()), inputs, grad)
        theirs = gradients(lambda q, k, v, s=sizes: torch_attention(q, k, v, s.causal), inputs, grad)
        with sdpa_kernel(SDPBackend.MATH):
            doubles = [x.double() for x in inputs]
            exact = gradients(lambda q, k, v, s=sizes: torch_attention(q, k, v, s.causal), doubles, grad.double())
        for name, x, mine, other, wanted in zip("qkv", inputs, found, theirs, exact, strict=True):
            assert mine.stride() == x.stride()
            assert error(mine, wanted, grad) <= bound(other, wanted, grad), (sizes, name)


#: Kind of inputs -> largest error of a gradient in 8 bits; docs/training-errors.md has more kinds.
IN_8_BITS = {"normal": 0.07, "uniform": 0.075, "biased 3": 0.07, "biased 30": 0.1, "outliers": 0.15, "logits 4": 0.2}
SIZES_8_BITS = (
    Sizes(300, 300, 128, heads=4, kv_heads=1, causal=1),
    Sizes(130, 300, 128, causal=1),
    Sizes(300, 130, 128),
    Sizes(1000, 1000, 128, causal=1),
    Sizes(64, 1025, 128),
    Sizes(300, 300, 64, heads=4, kv_heads=2, causal=1),
    Sizes(500, 1025, 64),
    Sizes(300, 300, 256, heads=4, kv_heads=2, causal=1),
    Sizes(500, 1025, 256),
)


#: The same with a kept int8 forward pass and PyTorch's backward pass.
KEPT = {"normal": 0.03, "uniform": 0.06, "biased 3": 0.03, "biased 30": 0.05, "outliers": 0.1, "logits 4": 0.15}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES_8_BITS, *SIZES], ids=str)
def test_with_a_kept_forward_pass(sizes: Sizes, dtype: torch.dtype, kind: str) -> None:
    inputs, grad = on_gpu(kind, sizes, dtype)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    options = sizes.options() | {"precision": "int8", "backward": "16bit_kept"}
    wanted = of_reference(grad, *inputs, sizes.causal, sizes.head_dim**-0.5)
    for tensors in (inputs, strided):
        found = gradients(lambda *x: sdpa(*x, **options), tensors, grad)
        for name, x, mine, exact in zip("qkv", tensors, found, wanted, strict=True):
            assert error(mine, exact, grad) < KEPT[kind], name
            assert mine.stride() == x.stride()


@pytest.mark.parametrize("kind", IN_8_BITS)
@pytest.mark.parametrize("sizes", SIZES_8_BITS, ids=str)
def test_in_8_bits(sizes: Sizes, kind: str) -> None:
    inputs, grad = on_gpu(kind, sizes)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    options = sizes.options() | {"precision": "int8", "backward": "8bit"}
    found = gradients(lambda *x: sdpa(*x, **options), inputs, grad)
    again = gradients(lambda *x: sdpa(*x, **options), strided, grad)
    wanted = of_reference(grad, *inputs, sizes.causal, sizes.head_dim**-0.5)
    for name, x, mine, same, exact in zip("qkv", strided, found, again, wanted, strict=True):
        assert error(mine, exact, grad) < IN_8_BITS[kind], name
        assert torch.equal(mine, same)
        assert same.stride() == x.stride()


#: Options -> sizes. In each, some rows, keys or tiles have no partner.
MASKED_IN_8_BITS: tuple[tuple[dict[str, Any], Sizes], ...] = (
    ({"window": (1000, 0)}, Sizes(3000, 3000, 128, heads=4, kv_heads=2)),
    ({"window": (37, 5)}, Sizes(1100, 1000, 64, heads=4, kv_heads=1)),
    ({"window": (300, 100), "causal_alignment": "lower_right"}, Sizes(500, 1500, 256)),
    ({"window": (300, 0), "causal_alignment": "lower_right"}, Sizes(1500, 500, 128)),
    ({"is_causal": True, "causal_alignment": "lower_right"}, Sizes(700, 1500, 64)),
    ({"kv_lengths": (1500, 0, 1, 777)}, Sizes(700, 1500, 128, heads=4, kv_heads=2)),
    ({"kv_lengths": (1024, 129, 64), "is_causal": True}, Sizes(1500, 1500, 64)),
    ({"kv_lengths": (1000, 1500), "window": (200, 50)}, Sizes(1500, 1500, 256)),
)


@pytest.mark.parametrize("kind", ["normal", "biased 3", "outliers"])
@pytest.mark.parametrize(("options", "sizes"), MASKED_IN_8_BITS, ids=str)
def test_masked_in_8_bits(options: dict[str, Any], sizes: Sizes, kind: str) -> None:
    """Against float32. The padding holds NaN; its gradients are exactly 0, and those of keys without a query too."""
    inputs, grad = on_gpu(kind, sizes)
    lengths = torch.tensor(options.get("kv_lengths", (sizes.kv_len,)), device="cuda")
    q, k, v, g = (x.repeat(len(lengths), 1, 1, 1) for x in (*inputs, grad))
    padding = (torch.arange(sizes.kv_len, device="cuda") >= lengths.view(-1, 1, 1)).unsqueeze(-1)
    given = [q, k.masked_fill(padding, float("nan")), v.masked_fill(padding, float("nan"))]
    chosen = {"enable_gqa": True, "precision": "int8", "backward": "8bit"} | options
    if "kv_lengths" in options:
        chosen["kv_lengths"] = lengths
    found = gradients(lambda *x: sdpa(*x, **chosen), given, g)
    again = gradients(lambda *x: sdpa(*x, **chosen), given, g)
    left, right = options.get("window", (-1, -1))
    spec = MaskSpec(2 if "causal_alignment" in options else 1, left, 0 if "is_causal" in options else right, lengths)
    mask = spec.build_bool(sizes.q_len, sizes.kv_len, q.device)
    k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    wanted = of_reference(g, q, k, v, 0, sizes.head_dim**-0.5, mask=mask)
    blind = ~mask.any(-1).squeeze(1), ~mask.any(-2).squeeze(1)
    for i, (mine, same, exact) in enumerate(zip(found, again, wanted, strict=True)):
        # A sequence of one key: its dQ and dK are the rounding of dP alone, which is small beside dV.
        allowed = IN_8_BITS[kind] * max(exact.float().norm(), wanted[2].float().norm() / 2)
        assert (mine.float() - exact.float()).norm() < allowed, "qkv"[i]
        assert torch.equal(mine, same)
        assert not mine.transpose(1, 2)[blind[min(i, 1)].expand(len(lengths), -1)].any()


def test_keys_left_out_anywhere_in_8_bits() -> None:
    """A mask (B, 1, 1, KV) gives the gradients of the same keys in another order, with lengths."""
    inputs, grad = on_gpu("normal", Sizes(500, 700, 128, heads=4, kv_heads=2))
    q, k, v, g = (x.repeat(2, 1, 1, 1) for x in (*inputs, grad))
    mask = torch.rand(2, 1, 1, 700, device="cuda") < 0.6
    hidden = ~mask.transpose(2, 3)
    given = [q, k.masked_fill(hidden, float("nan")), v.masked_fill(hidden, float("nan"))]
    found = gradients(lambda *x: sdpa(*x, mask, enable_gqa=True, precision="int8", backward="8bit"), given, g)
    wanted = of_reference(g, q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), 0, 128**-0.5, mask=mask)
    for mine, exact in zip(found, wanted, strict=True):
        assert error(mine, exact, g) < IN_8_BITS["normal"]
    assert not any(x.masked_select(hidden).any() for x in found[1:])


def test_compiled_and_zero_gradients_in_8_bits() -> None:
    inputs, grad = on_gpu("normal", SIZES_8_BITS[0])
    options = SIZES_8_BITS[0].options() | {"precision": "int8", "backward": "8bit"}
    wanted = gradients(lambda *x: sdpa(*x, **options), inputs, grad)
    compiled: Any = torch.compile(lambda *x: sdpa(*x, **options), fullgraph=True)
    for mine, theirs in zip(gradients(compiled, inputs, grad), wanted, strict=True):
        assert torch.equal(mine, theirs)
    grad[:, :, 100:] = 0.0
    found = gradients(lambda *x: sdpa(*x, **options), inputs, grad)
    assert not found[0][:, :, 100:].any()
    zeros = gradients(lambda *x: sdpa(*x, **options), inputs, torch.zeros_like(grad))
    assert not any(x.any() for x in zeros)


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_of_pytorchs_kernels(sizes: Sizes, cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chooses = backward._uses_cudnn

    def where_it_can(*args: Any) -> bool:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return cudnn and chooses(*args)

    monkeypatch.setattr(backward, "_uses_cudnn", where_it_can)
    inputs, grad = on_gpu("biased 10", sizes)
    wanted = of_reference(grad, *inputs, sizes.causal, sizes.head_dim**-0.5)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    odd = [torch.cat([x, x[..., :1]], -1)[..., 1:] for x in (*inputs, grad)]
    sliced = [torch.cat([x, x], -1)[..., : sizes.head_dim] for x in strided]
    for tensors in (inputs, strided, sliced):
        found = of_gpu(grad, *tensors, sizes.causal, sizes.head_dim**-0.5)
        for x, mine, theirs in zip(tensors, found, wanted, strict=True):
            assert mine.stride() == torch.empty_like(x).stride()
            assert error(mine, theirs, grad) < 0.1, "as bfloat16, with biased keys"
    for mine, theirs in zip(
        of_gpu(odd[3], *odd[:3], sizes.causal, sizes.head_dim**-0.5),
        of_reference(odd[3], *odd[:3], sizes.causal, sizes.head_dim**-0.5),
        strict=True,
    ):
        assert error(mine, theirs, grad) < 0.1


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_the_same_bits_in_any_mode(head_dim: int) -> None:
    inputs, _ = on_gpu("biased 10", Sizes(700, 700, head_dim, causal=1))
    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = sdpa(*inputs, is_causal=True)
    trained = sdpa(*leaves, is_causal=True)
    assert trained.requires_grad
    with torch.no_grad():
        unrecorded = sdpa(*leaves, is_causal=True)
    direct = torch.ops.greenfast.sdpa(*leaves, "fp8", 1, head_dim**-0.5)
    compiled = torch.compile(lambda *x: sdpa(*x, is_causal=True), backend="aot_eager")(*leaves)
    with torch.autocast("cuda", torch.bfloat16):
        cast = sdpa(*inputs, is_causal=True)
    assert all(torch.equal(plain, x) for x in (trained, unrecorded, direct, compiled, cast))


def test_expanded_and_shared() -> None:
    (q, k, v), _ = on_gpu("normal", Sizes(300, 300, 128, heads=4, kv_heads=4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    shared = leaves[1][:, :1].expand(1, 4, 300, 128)
    sdpa(leaves[0], shared, leaves[2]).sum().backward()
    wanted = gradients(
        lambda q, k, v: torch_attention(q, k[:, :1].expand(1, 4, 300, 128), v, 0), [q, k, v], torch.ones_like(q)
    )
    for x, theirs in zip(leaves, wanted, strict=True):
        assert x.grad is not None
        assert error(x.grad, theirs, torch.ones_like(q)) < 0.05


def test_checkpoints_and_compiled() -> None:
    inputs, grad = on_gpu("biased 10", Sizes(512, 512, 128, causal=1))

    def attend(*x: Tensor) -> Tensor:
        return sdpa(*x, is_causal=True)  # type: ignore[no-any-return]

    torch.use_deterministic_algorithms(True)
    try:
        wanted = gradients(attend, inputs, grad)
        kept = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), inputs, grad)
        compiled = gradients(torch.compile(attend, fullgraph=True), inputs, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    for found in (kept, compiled):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_transforms_and_what_raises() -> None:
    (q, k, v), grad = on_gpu("normal", Sizes(100, 100))
    wanted = gradients(sdpa, [q, k, v], torch.ones_like(grad))
    found = torch.func.grad(lambda *x: sdpa(*x).sum(), (0, 1, 2))(q, k, v)
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b, grad) < 1e-2, "sums in another order"
    many: Any = [torch.stack([x, x.flip(2)]) for x in (q, k, v)]
    assert error(torch.vmap(torch.func.grad(lambda *x: sdpa(*x).sum()))(*many)[0], wanted[0], grad) < 1e-2
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(greenfast.sdpa, (q, k, v), (q, k, v))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    codes = greenfast.quantize(*leaves)
    with pytest.raises(NotImplementedError, match="no gradient flows to codes"):
        greenfast.attention(codes).sum().backward()  # type: ignore[no-untyped-call]


def test_on_another_stream_and_in_a_graph() -> None:
    inputs, grad = on_gpu("normal", Sizes(512, 512, 128, heads=8, kv_heads=8))
    wanted = gradients(sdpa, inputs, grad)
    leaves = [x.clone().requires_grad_() for x in inputs]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.autograd.grad(sdpa(*leaves), leaves, grad)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(sdpa(*leaves), leaves, grad)
    graph.replay()
    torch.cuda.synchronize()
    for found in (late, captured):
        for a, b in zip(found, wanted, strict=True):
            assert error(a, b, grad) < 1e-2


@pytest.mark.parametrize("bias", [0, 3, 10, 30])
def test_the_log_sum_exp_of_biased_keys(bias: int) -> None:
    (q, k, v), _ = on_gpu(f"biased {bias}", Sizes(256, 256, 64, heads=4, kv_heads=4))
    wanted = torch.logsumexp(q.double() @ k.double().mT / 8, -1)
    codes = greenfast.quantize(q, k, v, log_sum_exp=True)
    lse = sdpa(q, k, v, return_lse=True)[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sdpa(q, k, v, return_lse=True)[1]
    graph.replay()
    with torch.autocast("cuda", torch.bfloat16):
        cast = sdpa(q, k, v, return_lse=True)[1]
    for found in (lse, captured, cast, greenfast.attention(codes, return_lse=True)[1]):
        assert (found - wanted).abs().max() < 0.1
