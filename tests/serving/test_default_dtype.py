"""torch.set_default_dtype, as code of language models calls it, changes no result and no tensor that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.flash_attn import flash_attn_varlen_func
from greenfast.serving import call as serving_call
from tests.ops.launched import PretendedGpu
from tests.serving.test_flash_attn import filled, normal

Q, K, V = (torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
TOKENS = [normal(70, heads, 64, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
CU = torch.tensor([0, 70], dtype=torch.int32)


def gradient() -> Tensor:
    q = Q.clone().requires_grad_()
    return torch.autograd.grad(greenfast.sdpa(q, K, V, is_causal=True).sum(), q)[0]


def attended(**options: Any) -> Tensor:
    out = flash_attn_varlen_func(TOKENS[0], cu_seqlens_q=CU, max_seqlen_q=70, max_seqlen_k=70, causal=True, **options)
    assert isinstance(out, Tensor)
    return out


def over_a_cache() -> Tensor:
    cache, table = filled([TOKENS[1]], [TOKENS[2]])
    pages = cache.layer()
    return attended(
        k=pages.k_cache, v=pages.v_cache, block_table=table, k_descale=pages.k_scale, v_descale=pages.v_scale,
        seqused_k=CU[1:],
    )  # fmt: skip


CALLS: dict[str, Callable[[], Any]] = {
    "fp8": lambda: greenfast.sdpa(Q, K, V),
    "int8_fine": lambda: greenfast.sdpa(Q, K, V, precision="int8_fine", is_causal=True),
    "log-sum-exp": lambda: greenfast.sdpa(Q, K, V, return_lse=True)[1],
    "scales of heads": lambda: greenfast.attention(greenfast.quantize(Q, K, V, scales="head")),
    "no keys": lambda: greenfast.quantize(Q, K[:, :, :0], V[:, :, :0]).key_scale,
    "gradient": gradient,
    "no cache": lambda: attended(k=TOKENS[1], v=TOKENS[2], cu_seqlens_k=CU),
    "over a cache": over_a_cache,
}


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("call", CALLS)
def test_results_are_the_same(default_dtype: Callable[[], None], call: str) -> None:
    wanted = CALLS[call]()
    default_dtype()
    result = CALLS[call]()
    assert result.dtype == wanted.dtype
    assert torch.equal(result, wanted)


def test_what_kernels_read_as_float32_is_float32(
    default_dtype: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    PretendedGpu(monkeypatch).forget()
    default_dtype()
    one = serving_call.get_constant(Q, "one")
    assert (one.dtype, float(one)) == (torch.float32, 1.0)
    assert serving_call.get_constant(Q, "one") is one
    each: Any = ("token", "head")
    for scales in each:
        layer = greenfast.PagedKVCache(2, 16, 2, 64, scales=scales).layer()
        assert layer.k_scale.dtype == layer.v_scale.dtype == torch.float32
