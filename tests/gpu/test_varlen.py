"""Attention of packed sequences on a GPU: it agrees with the CPU, and reads lengths on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest

import greenfast
from tests.ops.test_jagged import narrowed, nested, parts
from tests.ops.test_varlen import starts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
varlen_attn: Any = greenfast.varlen_attn
SDPA: Any = greenfast.sdpa
TORCH_SDPA: Any = torch.nn.functional.scaled_dot_product_attention
LENGTHS = [1000, 77, 3, 700, 0, 513], [900, 177, 3, 1700, 5, 513]


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "options"),
    [
        ((8, 2), 64, torch.bfloat16, {"window_size": (-1, 0)}),
        ((2, 2), 72, torch.float16, {}),
        ((8, 2), 128, torch.bfloat16, {"window_size": (300, 40)}),
        ((4, 4), 128, torch.bfloat16, {"window_size": (-1, 7), "softcap": 20.0}),
        ((4, 1), 256, torch.bfloat16, {"window_size": (500, 0)}),
        ((8, 8), 64, torch.bfloat16, {"window_size": (128, -1), "sinks": torch.linspace(-2.0, 3.0, 8)}),
        ((2, 1), 256, torch.float16, {"seqused_k": torch.tensor([800, 0, 3, 1700, 1, 200], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_agrees_with_the_cpu(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, options: dict[str, Any], precision: str
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        (torch.randn(sum(LENGTHS[i]), heads[i], head_dim, generator=generator) * 2 + 0.5).to(dtype) for i in (0, 1, 1)
    )
    cu_q, cu_k = starts(LENGTHS[0]), starts(LENGTHS[1])
    q[cu_q[1]], k[cu_k[2] - 1], v[cu_k[5]] = float("nan"), float("inf"), float("nan")
    lengths = (cu_q, cu_k, max(LENGTHS[0]), max(LENGTHS[1]))
    more = {"enable_gqa": True, "precision": precision, "return_aux": AuxRequest(lse=True)}
    wanted, wanted_lse = varlen_attn(q, k, v, *lengths, **options, **more)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    tensors = [x.cuda() for x in (q, k, v, cu_q, cu_k)]
    found, lse = (x.cpu() for x in varlen_attn(*tensors, *lengths[2:], **on_gpu, **more))
    plain = varlen_attn(*tensors, *lengths[2:], **on_gpu, **(more | {"return_aux": None})).cpu()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(plain.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    for x in (found, plain):
        assert (x.double() - wanted.double())[finite].norm() <= 0.03 * wanted.double()[finite].norm()
    assert torch.equal(lse == -math.inf, wanted_lse == -math.inf)
    assert (lse - wanted_lse)[wanted_lse.isfinite()].abs().max() < 0.05


def test_a_graph_reads_new_lengths() -> None:
    q = torch.randn(512, 4, 64, device="cuda").bfloat16()
    cu = starts([100, 412]).cuda()

    def call() -> Any:
        return varlen_attn(q, q, q, cu, cu, 512, 512, window_size=(-1, 0))

    first = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, first)
    cu.copy_(starts([300, 212]))
    graph.replay()
    assert torch.equal(out, call())
    assert not torch.equal(out, first)


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [((-1, -1), 0.0, False), ((-1, 0), 0.0, False), ((50, 0), 0.0, True), ((-1, 0), 5.0, True)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_agree_with_the_cpu(head_dim: int, window: tuple[int, int], softcap: float, with_sinks: bool) -> None:
    cu, generator = starts([100, 0, 300]), torch.Generator().manual_seed(1)
    given = [torch.randn(400, h, head_dim, generator=generator).bfloat16() for h in (4, 2, 2)]
    grad = torch.randn(400, 4, head_dim, generator=generator).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        tensors = [x.detach().to(device).requires_grad_() for x in given]
        if with_sinks:
            tensors.append(torch.tensor([-3.0, 0.0, 2.0, 30.0], device=device).requires_grad_())
        options = {"window_size": window, "softcap": softcap, "sinks": tensors[3] if with_sinks else None}
        at = cu.to(device)
        varlen_attn(*tensors[:3], at, at, 300, 300, enable_gqa=True, **options).backward(grad.to(device))
        results.append([x.grad.double().cpu() for x in tensors if x.grad is not None])
    for wanted, found in zip(*results, strict=True):
        assert (found - wanted).norm() <= 0.01 * wanted.norm()


def test_strides_and_addresses_that_kernels_cannot_read_are_copied() -> None:
    cu = starts([60, 40]).cuda()
    wide = torch.randn(100, 2, 3 * 64 + 1, device="cuda").bfloat16()
    q, k, v = (wide[..., first : first + 64] for first in (1, 65, 129))
    wanted = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, 60, 60)
    assert torch.equal(varlen_attn(q, k, v, cu, cu, 60, 60), wanted)
    shifted = torch.empty(100 * 2 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(100, 2, 64)
    assert torch.equal(varlen_attn(shifted.copy_(q), k, v, cu, cu, 60, 60), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("build", [nested, narrowed], ids=["offsets", "gaps"])
def test_jagged_tensors_agree_with_the_cpu_and_wait_for_nothing(build: Any, causal: bool) -> None:
    lengths = [700, 0, 1, 130, 513]
    given = [build(parts(lengths, h, 128, seed)) for seed, h in enumerate((4, 2, 2))]
    wanted = SDPA(*given, is_causal=causal, enable_gqa=True)
    q, k, v = (x.cuda() for x in given)
    k, v = (torch.nested.nested_tensor_from_jagged(x.values(), q.offsets(), q.lengths(), jagged_dim=2) for x in (k, v))
    for x in (q, k, v):
        x.requires_grad_()
    SDPA(q, k, v, is_causal=causal, enable_gqa=True)  # the first call compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = SDPA(q, k, v, is_causal=causal, enable_gqa=True)
        torch.autograd.backward(out, torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = torch.cat([(x.cpu() - y).flatten() for x, y in zip(out.unbind(), wanted.unbind(), strict=True)])
    assert float(difference.double().norm()) <= 0.03 * float(wanted.values().double().norm())
    grads: list[Any] = [x.grad for x in (q, k, v)]
    assert all(x.values().isfinite().all() for x in grads)


def test_jagged_tensors_agree_with_pytorch() -> None:
    """PyTorch's FlashAttention in bfloat16, on the same offsets."""
    offsets = torch.tensor([0, 700, 701, 831, 1344], device="cuda")
    inputs = [make_nested(torch.randn(1344, 4, 64, device="cuda").bfloat16(), offsets) for _ in range(3)]
    for causal in (False, True):
        wanted = TORCH_SDPA(*inputs, is_causal=causal)
        with greenfast.use(min_length=0) as routed:
            out = TORCH_SDPA(*inputs, is_causal=causal)
        assert routed.taken == 1
        assert float((out - wanted).values().double().norm()) <= 0.07 * float(wanted.values().double().norm())


def make_nested(rows: torch.Tensor, offsets: torch.Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
