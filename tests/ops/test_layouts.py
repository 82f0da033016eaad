"""The memory layout of outputs: dense, as in PyTorch's own attention, and the same in every implementation."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import greenfast
from greenfast.kernels.attention import ada, hopper
from greenfast.kernels.attention.config import Strides, read_dims
from greenfast.ops import cuda, torch_ops
from greenfast.ops.cuda import build_sdpa_config, build_sdpa_steps
from greenfast.ops.layout import empty_rows, make_tma_compatible, row_strides
from tests.ops.launched import PretendedGpu

BATCH, HEADS, LENGTH = 2, 3, 5


def ordered(order: tuple[int, ...], head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor (BATCH, HEADS, LENGTH, head_dim) with its dimensions in memory in this order."""
    sizes = (BATCH, HEADS, LENGTH, head_dim)
    x = torch.randn([sizes[d] for d in order], generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.permute([order.index(d) for d in range(4)])


ORDERS = [(*first, 3) for first in permutations(range(3))]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 80])
def test_an_output_has_the_layout_of_its_query(order: tuple[int, ...], head_dim: int) -> None:
    q, k, v = ordered(order, head_dim), ordered(ORDERS[1], head_dim), ordered(ORDERS[2], head_dim)
    for out in (greenfast.sdpa(q, k, v), greenfast.sdpa(q, k, v, return_lse=True)[0]):
        assert out.stride() == q.stride()
        assert out.permute(order).is_contiguous()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert torch_ops.SDPA(*fake, "fp8", 0, 1.0).stride() == q.stride()
        assert torch_ops.SDPA_LSE(*fake, "fp8", 0, 1.0)[0].stride() == q.stride()
    meta = torch_ops.SDPA(*(x.to("meta") for x in (q, k, v)), "fp8", 0, 1.0)
    assert meta.stride() == q.stride()
    assert row_strides(q, head_dim) == torch.empty_like(q).stride()


def test_heads_and_columns_merge_in_a_view() -> None:
    """Models do this after attention, with queries from a separate projection or from a fused one of Q, K and V."""
    packed = torch.randn(2, 5, 3, 4, 80, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    out = greenfast.sdpa(q, k, v)
    assert out.transpose(1, 2).view(2, 5, 320).is_contiguous()
    assert out.stride() == torch.empty_like(q).stride()


def test_an_output_is_no_view_of_a_wider_buffer() -> None:
    q = torch.randn(2, 3, 7, 72, dtype=torch.float16)
    for out in (greenfast.sdpa(q, q, q), greenfast.attention(greenfast.quantize(q, q, q))):
        assert out.is_contiguous()
        assert out.untyped_storage().nbytes() == q.nbytes


def test_an_output_of_kept_codes_is_contiguous() -> None:
    q = ordered((0, 2, 1, 3), 72)
    quantized = greenfast.quantize(q, q, q)
    out = greenfast.attention(quantized)
    assert out.is_contiguous()
    args = (*quantized.tensors()[:6], "fp8", 72, LENGTH, torch.bfloat16, 0, 1.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert torch_ops.ATTENTION(*args).stride() == out.stride()
        assert torch_ops.ATTENTION_LSE(*args)[0].stride() == out.stride()


@pytest.mark.parametrize(
    "query",
    [
        torch.zeros(2, 1, 5, 64).expand(2, 3, 5, 64),
        torch.zeros(1, 3, 5, 64).expand(2, 3, 5, 64),
        torch.zeros(2, 3, 64, 5).transpose(2, 3),
        torch.zeros(2, 5, 64, 3).permute(0, 3, 1, 2),
        torch.zeros(2, 3, 5, 128)[..., ::2],
        torch.zeros(2, 3, 5, 65)[..., 1:],
        torch.zeros(2, 6, 10, 64)[:, ::2, 5:],
        torch.zeros(1, 1, 1, 64),
        torch.zeros(2, 3, 1, 64).transpose(1, 2).contiguous().transpose(1, 2),
        torch.zeros(0, 3, 5, 64),
        torch.zeros(2, 0, 5, 64),
        torch.zeros(2, 3, 0, 64),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_strides_of_any_query(query: Tensor) -> None:
    """Dense, columns last, the other dimensions as in ``empty_like``, and the same after the query has been copied."""
    query = query.half()
    strides = row_strides(query, 64)
    copied = make_tma_compatible(query, unique_rows=True)
    assert row_strides(copied, 64) == strides
    assert empty_rows(query, 64).stride() == strides
    assert strides[3] == 1
    if query.numel():
        by_size = sorted(range(4), key=lambda d: (-strides[d], query.shape[d] != 1))
        assert empty_rows(query, 64).permute(by_size).is_contiguous()
        key = torch.zeros_like(query, memory_format=torch.contiguous_format)
        out = torch_ops.SDPA(query, key, key, "fp8", 0, 1.0)
        assert out.stride() == strides


def test_rows_that_kernels_cannot_read_are_copied() -> None:
    x = torch.zeros(2, 3, 10, 64, dtype=torch.float16)
    assert make_tma_compatible(x) is x
    assert make_tma_compatible(x.transpose(1, 2)).data_ptr() == x.data_ptr()
    shared = x[:, :1].expand(2, 3, 10, 64)
    assert make_tma_compatible(shared) is shared
    assert make_tma_compatible(shared, unique_rows=True).stride() == torch.empty_like(shared).stride()
    assert make_tma_compatible(x[:1], unique_rows=True).data_ptr() == x.data_ptr()
    odd = torch.zeros(2, 3, 10, 65, dtype=torch.float16)[..., 1:]
    assert make_tma_compatible(odd).is_contiguous()
    assert make_tma_compatible(x.transpose(2, 3)).stride(3) == 1


@pytest.mark.parametrize("head_dim", [64, 72, 200])
def test_the_kernel_is_told_the_strides(head_dim: int) -> None:
    q = torch.empty(2, 7, 3, head_dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    config = build_sdpa_config(hopper.TARGET, head_dim, q.dtype, "fp8", 0)
    attending = build_sdpa_steps(q, q, q, config, 1.0, hopper.TARGET)[1]
    assert [int(x) for x in attending.launch.args[-5:]] == [18 * head_dim, head_dim, 3 * head_dim, 3, head_dim]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [hopper, ada])
def test_without_a_layout_the_output_is_contiguous(family: object) -> None:
    attention = read_dims({"B": 2, "H": 3, "S": 7, "D": 64}, "e4m3")
    contiguous = Strides(out=(3 * 7 * 64, 7 * 64, 64))
    assert family.launch(*attention) == family.launch(*attention, strides=contiguous)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", torch.bfloat16), ("sm_89", torch.float16)])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_what_a_gpu_writes_into(
    order: tuple[int, ...], target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = PretendedGpu(monkeypatch, target)
    q = ordered(order, 72, dtype)
    out = cuda.sdpa(q, q, q, "fp8", 0, 1.0)
    assert out.stride() == q.stride()
    assert out.untyped_storage().nbytes() == q.nbytes
    assert any(out.data_ptr().to_bytes(8, "little") in a for a in gpu.launched()[-1].arguments)
    expanded = ordered((1, 0, 2, 3), 72, dtype)[:1].expand(2, 3, 5, 72)
    for query in (expanded, ordered((0, 3, 2, 1), 72, dtype)):  # which are copied first
        assert cuda.sdpa(query, q, q, "fp8", 0, 1.0).stride() == row_strides(query, 72)
    if target == "sm_90a":
        assert cuda.sdpa_lse(q, q, q, "fp8", 0, 1.0)[0].stride() == q.stride()
        codes = greenfast.quantize(q, q, q)
        saved = cuda.attention(*codes.tensors()[:6], "fp8", 72, LENGTH, dtype, 0, 1.0)
        assert saved.is_contiguous()
        assert saved.shape == q.shape
