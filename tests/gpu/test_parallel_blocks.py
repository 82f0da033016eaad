"""What the ranks of a context_parallel compute, on one GPU: the ranks one after another, nothing is exchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.kernels.quantize.qkv import sample_places
from greenfast.ops import torch_ops
from greenfast.parallel import blocks, ulysses
from greenfast.parallel.blocks import LseMerge
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.quantized_kv import QuantizedKV
from greenfast.parallel.ring import build_ring_steps
from greenfast.parallel.ulysses import ExchangedTensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def inputs(heads: int, kv_heads: int, rows: int, head_dim: int, bias: float = 0.0) -> Any:
    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = [(2, heads, rows, head_dim), *[(2, kv_heads, rows, head_dim)] * 2]
    q, k, v = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    k = k + bias * torch.randn(1, kv_heads, 1, head_dim, generator=generator, device="cuda")
    return [x.bfloat16() for x in (q, k, v)]


def exact(tensors: Any, causal: bool) -> Any:
    q, k, v = tensors
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
    )


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def ring(
    tensors: list[Tensor], layout: ShardLayout, causal: bool, precision: str, exact: bool
) -> tuple[Tensor, Tensor]:
    """The whole output and log-sum-exp, every rank's part computed as in ``ring.forward``."""
    k = tensors[1]
    samples = k[:, :, sample_places(k.shape[2])].contiguous()
    shards = [[layout.shard(x, 2, rank) for x in tensors] for rank in range(layout.size)]
    codes, means = [], []
    for _, key, value in shards:
        codes.append(QuantizedKV.allocate_like(key, precision))
        means.append(blocks.quantize_keys(key, value, samples, precision, codes[-1]))
    scale, outs, sums = tensors[0].shape[3] ** -0.5, [], []
    for rank, (query, key, _) in enumerate(shards):
        plan = build_ring_steps(rank, layout, key.shape[2], causal)
        merged = LseMerge(count=sum(turn is not None for turn in plan))
        for number, turn in enumerate(plan):
            if turn is not None:
                first, count, masked = turn
                source = codes[(rank - number) % layout.size]
                result = blocks.attend(query[:, :, first:], source, count, precision, masked, scale, exact)
                merged.add(*result, first)
        outs.append(merged.out)
        sums.append(merged.lse + torch_ops.MEAN_SCORES(query, means[rank], True) * scale)
    assert all(torch.equal(mean, means[0]) for mean in means)
    return layout.unshard(outs, 2), layout.unshard(sums, 2)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "head_dim", "size", "balanced", "causal"),
    [
        (4, 4, 2048, 128, 2, True, True),
        (4, 2, 1536, 64, 3, True, True),
        (2, 1, 1200, 128, 3, True, True),  # chunks of 200 rows: blocks that lie in two of them
        (2, 2, 600, 256, 2, True, True),
        (2, 2, 72, 72, 2, True, True),
        (4, 4, 1024, 128, 4, False, True),
        (4, 1, 1000, 128, 4, False, False),
    ],
)
def test_the_turns_of_a_ring(
    heads: int, kv_heads: int, rows: int, head_dim: int, size: int, balanced: bool, causal: bool, precision: Any
) -> None:
    tensors = inputs(heads, kv_heads, rows, head_dim, bias=3.0)
    found, lse = ring(tensors, ShardLayout(size, balanced), causal, precision, exact=True)
    attend: Any = greenfast.sdpa
    alone, lse_alone = attend(*tensors, is_causal=causal, enable_gqa=True, precision=precision, return_lse=True)
    wanted = exact(tensors, causal)
    assert error(found, wanted) < 1.05 * error(alone, wanted) + 2e-3
    assert (lse - lse_alone).abs().max() < 0.06
    rounded, _ = ring(tensors, ShardLayout(size, balanced), causal, precision, exact=False)
    assert error(rounded, wanted) < 1.05 * error(alone, wanted) + 2e-3
    again, _ = ring(tensors, ShardLayout(size, balanced), causal, precision, exact=False)
    assert torch.equal(rounded, again)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [0, 1])
def test_all_keys_give_the_bits_of_sdpa(head_dim: int, causal: int) -> None:
    """The sums that a merge needs are those that the output is divided by."""
    q, k, v = inputs(4, 2, 700, head_dim, bias=3.0)
    keys = QuantizedKV.allocate_like(k, "fp8")
    mean = blocks.quantize_keys(k, v, k[:, :, sample_places(700)].contiguous(), "fp8", keys)
    attend: Any = greenfast.sdpa
    wanted, sums = attend(q, k, v, is_causal=causal == 1, enable_gqa=True, return_lse=True)
    for exact in (False, True):
        out, lse = blocks.attend(q, keys, 700, "fp8", causal, head_dim**-0.5, exact)
        alone = wanted if exact else attend(q, k, v, is_causal=causal == 1, enable_gqa=True)
        assert torch.equal(out, alone)
        lse = lse + torch_ops.MEAN_SCORES(q, mean, True) * head_dim**-0.5
        assert (lse - sums).abs().max() < (1e-3 if exact else 0.04)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 2), (8, 2, 4), (6, 6, 4)])
def test_heads_of_whole_sequences(heads: int, kv_heads: int, size: int) -> None:
    """The codes of shards, gathered for a share of the heads, give the bits of one GPU that has these heads."""
    q, k, v = inputs(heads, kv_heads, 256 * size * 2, 128, bias=3.0)
    layout, share = ShardLayout(size, True), ulysses.HeadSharding(heads, kv_heads, size)
    samples = k[:, :, sample_places(k.shape[2])].contiguous()
    group: Any = SimpleNamespace(size=size)
    exchange = ulysses.HeadExchange(group, layout, share)
    split_heads = []
    for rank in range(size):
        query, key, value = (layout.shard(x, 2, rank) for x in (q, k, v))
        codes = blocks.quantize(query, key, value, samples, "fp8")
        fields = [
            ExchangedTensor(codes.query, 2, False), ExchangedTensor(codes.key, 2, True),
            ExchangedTensor(codes.value, 3, True),
            ExchangedTensor(codes.query_scale, 2, False),
            ExchangedTensor(codes.key_scale, 2, True), ExchangedTensor(codes.value_scale, 2, True),
        ]  # fmt: skip
        split_heads.append([exchange.split_heads(field) for field in fields])
    outs = []
    for rank in range(size):
        received = [torch.stack([sent[i][:, rank] for sent in split_heads]) for i in range(6)]
        whole = [exchange.gather_sequence(x, field.rows) for x, field in zip(received, fields, strict=True)]
        outs.append(ulysses._attend(whole, "fp8", 128, torch.bfloat16, 1, 128**-0.5, False)[0])
        mine = slice(rank * share.q_heads_per_rank, (rank + 1) * share.q_heads_per_rank)
        keys = share.assigned_kv_heads[
            rank * len(share.assigned_kv_heads) // size : (rank + 1) * len(share.assigned_kv_heads) // size
        ]
        if mine.stop <= heads:
            alone = greenfast.sdpa(q[:, mine], k[:, keys], v[:, keys], is_causal=True, enable_gqa=True)
            assert torch.equal(outs[rank], alone)
    again = torch.stack([layout.shard(outs[0], 2, rank) for rank in range(size)])
    scattered = torch.empty_like(again)
    exchange.scatter(outs[0], scattered)
    assert torch.equal(scattered, again)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")], ids=str)
@pytest.mark.parametrize("first", [0, 40])
def test_a_merge(dtypes: tuple[str, str], first: int) -> None:
    kept, given = (getattr(torch, name) for name in dtypes)
    a = torch.randn(2, 3, 72, 72, device="cuda").to(kept)
    b = torch.randn(2, 3, 72 - first, 72, device="cuda").to(torch.float16 if kept == torch.float32 else kept)
    lse_a, lse_b = torch.randn(2, 3, 72, device="cuda") * 3, torch.randn(2, 3, 72 - first, device="cuda") * 3
    lse_a[0, 0, first], lse_b[0, 0, :2] = -torch.inf, -torch.inf
    wanted, kept_lse = a.cpu().to(given), None
    kept_lse = blocks._merge(a.cpu(), lse_a.cpu(), b.cpu(), lse_b.cpu(), first, wanted)
    into = a if kept == given else torch.empty_like(a, dtype=given)
    lse = blocks.load_cuda().merge(a, lse_a, b, lse_b, first, into)
    assert torch.allclose(lse.cpu(), kept_lse, atol=1e-5)
    assert torch.allclose(into.cpu().float(), wanted.float(), atol=1e-2 if given != torch.float32 else 1e-5, rtol=1e-2)
    assert torch.equal(into[:, :, :first].cpu(), wanted[:, :, :first])
