"""FlashAttention's functions: their conventions, keys that are in no cache, appending, rotation, and refusals."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import greenfast
from greenfast import flash_attn
from greenfast.numerics import serving
from greenfast.serving import checks as serving_checks
from greenfast.serving.explain import format_reason
from tests.serving.oracle import E4M3, NAN_CODE, Case, case, faults, relative, visible

COMPILE: Any = torch.compile
flash_attn_varlen_func: Any = flash_attn.flash_attn_varlen_func
flash_attn_with_kvcache: Any = flash_attn.flash_attn_with_kvcache
LENGTHS = [(3, 130), (0, 7), (5, 0), (40, 40), (2, 1)]
#: Error of E4M3 with scales per token and head on N(0, 1) inputs, compared with attention in float64.
OF_FORMAT = 0.065


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def exact(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], causal: bool = True, window: tuple[int, int] = (-1, -1)
) -> tuple[Tensor, Tensor]:
    """PyTorch's attention in float64, sequence by sequence: (total_q, heads, head_dim) and (heads, total_q)."""
    outs, sums = [], []
    for x, keys, values in zip(q, k, v, strict=True):
        group = x.shape[1] // keys.shape[1]
        a, b, c = (y.double().transpose(0, 1) for y in (x, keys, values))
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        mask = visible(x.shape[0], keys.shape[0], causal, window)
        seen = mask.any(1)
        out = torch.zeros_like(a)
        if seen.any():
            out[:, seen] = torch.nn.functional.scaled_dot_product_attention(a[:, seen], b, c, mask[seen])
        outs.append(out.transpose(0, 1))
        scores = (a @ b.transpose(1, 2) / math.sqrt(x.shape[2])).masked_fill(~mask, -math.inf)
        sums.append(torch.logsumexp(scores, -1))
    return torch.cat(outs), torch.cat(sums, 1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def varlen(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    queries, keys = ([n[i] for n in LENGTHS] for i in range(2))
    return {
        "q": normal(sum(queries), 4, 64, seed=1, dtype=dtype), "k": normal(sum(keys), 2, 64, seed=2, dtype=dtype),
        "v": normal(sum(keys), 2, 64, seed=3, dtype=dtype), "cu_seqlens_q": cumulative(queries),
        "cu_seqlens_k": cumulative(keys), "max_seqlen_q": max(queries), "max_seqlen_k": max(keys), "causal": True,
    }  # fmt: skip


def both(found: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_in_no_cache(dtype: torch.dtype) -> None:
    inputs = varlen(dtype)
    out, lse = both(flash_attn_varlen_func(**inputs, return_attn_probs=True))
    parts = [x.split([n[i] for n in LENGTHS]) for x, i in ((inputs["q"], 0), (inputs["k"], 1), (inputs["v"], 1))]
    wanted, sums = exact(list(parts[0]), list(parts[1]), list(parts[2]))
    assert out.dtype == dtype
    assert lse.shape == (4, 50)
    assert relative(out, wanted) < OF_FORMAT
    assert torch.equal(lse.isneginf(), sums.isneginf())
    assert (lse - sums)[sums.isfinite()].abs().max() < 0.1


@pytest.mark.parametrize(
    ("options", "window", "causal"),
    [
        ({}, (-1, -1), True),
        ({"causal": False}, (-1, -1), False),
        ({"causal": False, "window_size": None}, (-1, -1), False),
        ({"causal": False, "window_size": [20, 4]}, (20, 4), False),
        ({"window_size": (20, 4)}, (20, 0), True),
        ({"causal": False, "window_size": (-1, 3)}, (-1, 3), False),
        ({"causal": False, "window_size": (9, -1)}, (9, -1), False),
        ({"causal": False, "window_size": (2**40, 2**40)}, (-1, -1), False),
    ],
    ids=str,
)
def test_masks_of_the_dense_kernel(options: dict[str, Any], window: tuple[int, int], causal: bool) -> None:
    inputs = varlen() | options
    assert inputs["max_seqlen_q"] * 2 > 64, "few rows have the serving kernel"
    out, lse = both(flash_attn_varlen_func(**inputs, return_softmax_lse=True))
    parts = [x.split([n[i] for n in LENGTHS]) for x, i in ((inputs["q"], 0), (inputs["k"], 1), (inputs["v"], 1))]
    wanted, sums = exact(list(parts[0]), list(parts[1]), list(parts[2]), causal, window)
    assert relative(out, wanted) < OF_FORMAT
    assert torch.equal(lse.isneginf(), sums.isneginf())
    assert (lse - sums)[sums.isfinite()].abs().max() < 0.1
    left, right = window
    starts = (inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], 40, 130)
    same: Any = greenfast.varlen_attn(
        inputs["q"], inputs["k"], inputs["v"], *starts, enable_gqa=True, window_size=(left, 0 if causal else right)
    )
    assert torch.equal(out, same)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"s_aux": torch.linspace(-2, 9, 4)}, {"softmax_scale": 0.3}], ids=str
)
def test_scores_of_both_kernels(options: dict[str, Any], few: bool) -> None:
    """The dense kernel, and the serving kernel for few rows: sinks are a part of the log-sum-exp in both."""
    inputs = varlen() | options
    plan = greenfast.ServingPlan(
        inputs["cu_seqlens_q"], inputs["cu_seqlens_k"].diff(), 40, heads=4, kv_heads=2, head_dim=64, causal=True
    )
    out, lse = both(flash_attn_varlen_func(**inputs, scheduler_metadata=plan if few else None, return_attn_probs=True))
    outs, sums = [], []
    group_keys, group_values = (inputs[n].double().repeat_interleave(2, 1) for n in "kv")
    for (n, m), q_first, k_first in zip(LENGTHS, inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], strict=False):
        a = inputs["q"][q_first : q_first + n].double().transpose(0, 1)
        b, c = (x[k_first : k_first + m].transpose(0, 1) for x in (group_keys, group_values))
        scores = a @ b.transpose(1, 2) * options.get("softmax_scale", 0.125)
        if "softcap" in options:
            scores = 5.0 * torch.tanh(scores / 5.0)
        scores = scores.masked_fill(~visible(n, m, True, (-1, -1)), -math.inf)
        if "s_aux" in options:
            scores = torch.cat([scores, options["s_aux"].double().view(-1, 1, 1).expand(-1, n, 1)], -1)
        outs.append((scores.softmax(-1).nan_to_num(0.0)[..., :m] @ c).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    wanted, wanted_sums = torch.cat(outs), torch.cat(sums, 1)
    assert relative(out, wanted) < (0.11 if "softmax_scale" in options else OF_FORMAT)
    assert torch.equal(lse.isneginf(), wanted_sums.isneginf())
    assert (lse - wanted_sums)[wanted_sums.isfinite()].abs().max() < 0.3


def test_gradients_of_the_dense_kernel() -> None:
    inputs = varlen()
    tensors = [inputs[name].requires_grad_() for name in "qkv"]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    grad = normal(50, 4, 64, seed=9)
    out = flash_attn_varlen_func(**inputs)
    torch.autograd.backward(out, grad)
    parts = [x.split([n[i] for n in LENGTHS]) for x, i in zip(wide, (0, 1, 1), strict=True)]
    torch.autograd.backward(exact(list(parts[0]), list(parts[1]), list(parts[2]))[0], grad.double())
    for x, y in zip(tensors, wide, strict=True):
        assert relative(x.grad, y.grad) < 0.01
    with pytest.raises(NotImplementedError, match="out: given, while it or an input requires a gradient"):
        flash_attn_varlen_func(**inputs, out=torch.empty_like(out))
    with torch.no_grad():
        into = torch.empty_like(out)
        assert flash_attn_varlen_func(**inputs, out=into) is into
        assert torch.equal(into, out)
    sinks = torch.zeros(4, requires_grad=True)
    torch.autograd.backward(flash_attn_varlen_func(**inputs, softcap=5.0, s_aux=sinks), grad)
    assert sinks.grad is not None
    assert sinks.grad.norm() > 0


def test_head_dims_and_groups_that_only_the_dense_kernel_has() -> None:
    cu = cumulative([70])
    q, k, v = normal(70, 34, 72, seed=1), normal(70, 2, 72, seed=2), normal(70, 2, 72, seed=3)
    assert relative(flash_attn_varlen_func(q, k, v, cu, cu, 70, 70, causal=True), exact([q], [k], [v])[0]) < OF_FORMAT
    one = flash_attn_varlen_func(q[:1], k[:1], v[:1], cumulative([1]), cumulative([1]), 1, 1)
    assert relative(one, v[:1].double().repeat_interleave(17, 1)) < OF_FORMAT
    plan = greenfast.ServingPlan(cu, torch.tensor([70]).int(), 70, heads=4, kv_heads=2, head_dim=64)
    with pytest.raises(NotImplementedError, match="k: head_dim 72; allowed: 64, 128, 256, and for 16 bits without"):
        flash_attn_varlen_func(q, k, v, cu, cu, 70, 70, scheduler_metadata=plan)


def test_queries_as_their_own_output() -> None:
    inputs = varlen()
    wanted, sums = both(flash_attn_varlen_func(**inputs, return_softmax_lse=True))
    for wants_lse in (True, False):
        q = inputs["q"].clone()
        result = flash_attn_varlen_func(**(inputs | {"q": q, "out": q}), return_softmax_lse=wants_lse)
        out, lse = both(result) if wants_lse else (result, sums)
        assert out is q
        assert torch.equal(out, wanted)
        assert torch.equal(lse, sums)


def filled(
    k: list[Tensor], v: list[Tensor], page_size: int = 32, **options: Any
) -> tuple[greenfast.PagedKVCache, Tensor]:
    cache = greenfast.PagedKVCache(40, page_size, 2, 64, **options)
    for x in cache.layer():
        x.view(torch.uint8).fill_(NAN_CODE)
    names = range(len(k))
    for b in names:
        assert cache.reserve(b, len(k[b]))
    slots = cache.slot_mapping(names, [0] * len(k), [len(x) for x in k])
    keys, values, k_scale, v_scale = cache.layer()
    greenfast.append_kv(None, torch.cat(k), torch.cat(v), keys, values, slots, k_scale=k_scale, v_scale=v_scale)
    return cache, cache.block_table(names, 20)


@pytest.mark.parametrize("values", ["grouped", "rows"])
def test_keys_in_no_cache_and_in_one_give_the_same_bits(values: Any) -> None:
    inputs = varlen()
    lengths = [n for _, n in LENGTHS]
    plan = greenfast.ServingPlan(
        inputs["cu_seqlens_q"], torch.tensor(lengths).int(), 40, heads=4, kv_heads=2, head_dim=64, causal=True
    )
    wanted, sums = both(flash_attn_varlen_func(**inputs, scheduler_metadata=plan, return_softmax_lse=True))
    cache, table = filled(list(inputs["k"].split(lengths)), list(inputs["v"].split(lengths)), values=values)
    pages = cache.layer()
    # as vLLM calls it
    out, lse = both(
        flash_attn_varlen_func(
            q=inputs["q"], k=pages.k_cache, v=pages.v_cache, out=None, cu_seqlens_q=inputs["cu_seqlens_q"],
            max_seqlen_q=40,
            seqused_k=torch.tensor(lengths).int(), max_seqlen_k=130, softmax_scale=0.125, causal=True,
            alibi_slopes=None, window_size=[-1, -1], block_table=table, softcap=0, scheduler_metadata=None,
            fa_version=3, q_descale=None, k_descale=pages.k_scale, v_descale=pages.v_scale, num_splits=0, s_aux=None,
            return_softmax_lse=True,
        )
    )  # fmt: skip
    assert torch.equal(out, wanted)
    assert torch.equal(lse, sums)


def test_decode_equals_prefill() -> None:
    """A prompt at once, with a plan and no cache, then one by one and in chunks over a cache: the same bits."""
    q, k, v = normal(70, 4, 64, seed=1), normal(70, 2, 64, seed=2), normal(70, 2, 64, seed=3)
    cu = torch.tensor([0, 70], dtype=torch.int32)
    mask: dict[str, Any] = {"causal": True, "window_size": (50, 0)}
    plan = greenfast.ServingPlan(cu, torch.tensor([70]).int(), 70, heads=4, kv_heads=2, head_dim=64, **mask)
    whole = flash_attn_varlen_func(q, k, v, cu, cu, 70, 70, **mask, scheduler_metadata=plan)
    cache, table = filled([k[:0]], [v[:0]])
    cache.reserve(0, 70)
    table, pages = cache.block_table([0]), cache.layer()
    scales = {"k_descale": pages.k_scale, "v_descale": pages.v_scale}
    first = 0
    for last in (3, 40, 41, 42, 70):
        at = slice(first, last)
        out = flash_attn_with_kvcache(
            q[None, at], pages.k_cache, pages.v_cache, k[None, at], v[None, at], cache_seqlens=first, page_table=table,
            causal=True, window_size=(50, 0), **scales,
        )  # fmt: skip
        assert torch.equal(out[0], whole[at])
        first = last


def test_codes_in_no_cache() -> None:
    """E4M3 keys with scales per sequence and head, as FlashAttention-3 takes them."""
    c = case([(3, 130), (5, 0), (4, 33)], scales="sequence", layout="rows", fp8_queries=True)
    parts = []
    for cache in (c.k_cache, c.v_cache):
        rows = [serving.rows_of_pages(cache, c.block_table[b, : -(-n // 16)])[:n] for b, n in enumerate((130, 0, 33))]
        parts.append(torch.cat([x.view(torch.uint8) for x in rows]).view(E4M3))
    out, lse = both(
        flash_attn_varlen_func(
            c.q, *parts, c.cu_seqlens_q, cumulative([130, 0, 33]), 5, 130, causal=True, q_descale=c.q_scale,
            k_descale=c.k_scale, v_descale=c.v_scale, return_attn_probs=True,
        )
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    assert faults(c, out, lse) == []


def test_lengths_that_use_a_part_of_the_keys() -> None:
    inputs = varlen()
    used = torch.tensor([100, 7, 0, 12, 1], dtype=torch.int32)
    out = flash_attn_varlen_func(**inputs, seqused_k=used)
    parts = [x.split([n[i] for n in LENGTHS]) for x, i in ((inputs["q"], 0), (inputs["k"], 1), (inputs["v"], 1))]
    k, v = ([x[:n] for x, n in zip(p, used.tolist(), strict=True)] for p in parts[1:])
    assert relative(out, exact(list(parts[0]), k, v)[0]) < OF_FORMAT


def test_tokens_of_no_sequence() -> None:
    """Padding after the last sequence, in queries and keys, changes nothing, even if it is NaN."""
    inputs = varlen()
    wanted = flash_attn_varlen_func(**inputs)
    padded = {name: torch.cat([inputs[name], torch.full_like(inputs[name][:9], math.nan)]) for name in "qkv"}
    out = flash_attn_varlen_func(**(inputs | padded | {"max_seqlen_q": 64, "max_seqlen_k": 500}))
    assert torch.equal(out[:50], wanted)


def test_no_keys_at_all() -> None:
    q = normal(5, 4, 64)
    cu, none = cumulative([2, 3]), cumulative([0, 0])
    out, lse = both(flash_attn_varlen_func(q, q[:0, :2], q[:0, :2], cu, none, 3, 0, return_attn_probs=True))
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_sinks_of_16_bits_and_rows_that_are_no_rows() -> None:
    inputs = varlen()
    sinks = torch.tensor([0.5, 1.0, -2.0, 3.0])
    wanted = flash_attn_varlen_func(**inputs, s_aux=sinks)
    assert not torch.equal(wanted, flash_attn_varlen_func(**inputs))
    for name in "qkv":
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(wanted, flash_attn_varlen_func(**inputs, s_aux=sinks.bfloat16()))


def test_out() -> None:
    inputs = varlen()
    wanted = flash_attn_varlen_func(**inputs)
    into = torch.empty_like(inputs["q"])
    assert flash_attn_varlen_func(**inputs, out=into) is into
    assert torch.equal(into, wanted)
    with pytest.raises(TypeError, match=r"out: its dtype is torch.float32; allowed: torch.bfloat16"):
        flash_attn_varlen_func(**inputs, out=into.float())
    with pytest.raises(ValueError, match="out: its shape is"):
        flash_attn_varlen_func(**inputs, out=into[1:])


def cached(dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    k, v = ([normal(n, 2, 64, seed=s + n, dtype=dtype) for n in (70, 33, 5)] for s in (0, 1000))
    cache, table = filled(k, v)
    pages = cache.layer()
    inputs = {
        "q": normal(3, 2, 4, 64, seed=9, dtype=dtype), "k_cache": pages.k_cache, "v_cache": pages.v_cache,
        "page_table": table, "cache_seqlens": torch.tensor([70, 33, 5], dtype=torch.int32), "k_descale": pages.k_scale,
        "v_descale": pages.v_scale, "causal": True,
    }  # fmt: skip
    return k, v, inputs


def test_a_cache_of_pages() -> None:
    k, v, inputs = cached()
    out, lse = both(flash_attn_with_kvcache(**inputs, return_softmax_lse=True))
    wanted, sums = exact(list(inputs["q"]), k, v)
    assert out.shape == inputs["q"].shape
    assert lse.shape == (3, 4, 2)
    assert relative(out, wanted.view_as(out)) < OF_FORMAT
    assert (lse - sums.view(4, 3, 2).transpose(0, 1)).abs().max() < 0.1
    rows, of_rows = both(
        flash_attn_with_kvcache(
            **(inputs | {"q": inputs["q"].flatten(0, 1), "page_table": None}), block_table=inputs["page_table"],
            cu_seqlens_q=torch.tensor([0, 2, 4, 6], dtype=torch.int32), max_seqlen_q=2, return_softmax_lse=True,
        )
    )  # fmt: skip
    assert torch.equal(rows, out.flatten(0, 1))
    assert torch.equal(of_rows.view(4, 3, 2).transpose(0, 1), lse)
    into = torch.empty_like(out)
    assert flash_attn_with_kvcache(**inputs, out=into) is into
    assert torch.equal(into, out)


@pytest.mark.parametrize("length", [None, 50, "tensor"])
def test_a_cache_without_pages(length: Any) -> None:
    """(batch, seqlen, kv_heads, head_dim) of codes, with a scale of 1 or of each sequence and head."""
    k, v = (normal(3, 96, 2, 64, seed=s).clamp(-4, 4) for s in (1, 2))
    scale = torch.rand(3, 2, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.01
    codes = [(x.float() / scale[:, None, :, None]).to(E4M3) for x in (k, v)]
    used = torch.tensor([50, 96, 0], dtype=torch.int32) if length == "tensor" else length
    q = normal(3, 4, 4, 64, seed=4)
    out = flash_attn_with_kvcache(q, *codes, cache_seqlens=used, k_descale=scale, v_descale=scale)
    lengths = [50, 96, 0] if length == "tensor" else [length or 96] * 3
    values = [[x.double() * scale[b, :, None] for b, x in enumerate(c)] for c in codes]
    k_list, v_list = ([x[:n] for x, n in zip(of, lengths, strict=True)] for of in values)
    assert relative(out, exact(list(q), k_list, v_list, causal=False)[0].view_as(out)) < OF_FORMAT
    picked = flash_attn_with_kvcache(
        q[:2], *codes, cache_seqlens=used[[1, 0]] if isinstance(used, Tensor) else used, k_descale=scale[[1, 0]],
        v_descale=scale[[1, 0]], cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32),
    )  # fmt: skip
    again = flash_attn_with_kvcache(q[[1, 0, 2]], *codes, cache_seqlens=used, k_descale=scale, v_descale=scale)
    assert torch.equal(picked, again[[1, 0]])


def test_a_batch_without_sequences() -> None:
    out, lse = both(
        flash_attn_with_kvcache(normal(0, 3, 4, 64), *[normal(0, 16, 2, 64).to(E4M3)] * 2, return_softmax_lse=True)
    )
    assert (out.shape, lse.shape) == ((0, 3, 4, 64), (0, 4, 3))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Each pair of columns as a complex number times cos + i sin, in float64; x (tokens, heads, head_dim)."""
    half = cos.shape[1]
    turning, others = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    shape = turning.shape[:-1]
    pairs = turning.view(*shape, half, 2) if interleaved else turning.view(*shape, 2, half).transpose(-1, -2)
    product = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin).to(torch.complex128).unsqueeze(1)
    result = torch.view_as_real(product)
    result = result.flatten(-2) if interleaved else result.transpose(-1, -2).flatten(-2)
    return torch.cat([result, others], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("new", [1, 2])
def test_appending_with_rotation(interleaved: bool, new: int) -> None:
    k, v, inputs = cached()
    inputs["q"] = inputs["q"][:, :new]
    angles = torch.rand(100, 16, generator=torch.Generator().manual_seed(7)) * 6
    cos, sin = angles.cos(), angles.sin()
    k_new, v_new = normal(3, new, 2, 64, seed=21), normal(3, new, 2, 64, seed=22)
    tables = [
        x[[70, 33, 5], None] if new == 1 else torch.stack([x[n : n + new] for n in (70, 33, 5)]) for x in (cos, sin)
    ]
    tables = [x.view(3, new, 16) for x in tables]
    out = flash_attn_with_kvcache(
        **inputs, k=k_new, v=v_new, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved
    )
    turned = [[rotated(x[b], tables[0][b], tables[1][b], interleaved) for b in range(3)] for x in (inputs["q"], k_new)]
    keys = [torch.cat([old.double(), x]) for old, x in zip(k, turned[1], strict=True)]
    values = [torch.cat([old, x]) for old, x in zip(v, v_new, strict=True)]
    wanted, _ = exact(turned[0], keys, values)
    assert relative(out, wanted.view_as(out)) < OF_FORMAT
    # the cache holds the new keys now
    more = flash_attn_with_kvcache(
        **(inputs | {"cache_seqlens": inputs["cache_seqlens"] + new, "q": torch.stack(turned[0]).bfloat16()})
    )
    assert relative(more, wanted.view_as(out)) < OF_FORMAT


def test_appending_sequences_of_other_lengths() -> None:
    k, v, inputs = cached()
    lengths = [3, 0, 40]
    k_new, v_new = normal(43, 2, 64, seed=21), normal(43, 2, 64, seed=22)
    table = inputs["page_table"].clone()
    table[:, 3:8] = torch.arange(15).view(3, 5) + 20
    table[2, 1:3] = torch.tensor([38, 39])
    out = flash_attn_with_kvcache(
        **(inputs | {"page_table": table}), k=k_new, v=v_new, cu_seqlens_k_new=cumulative(lengths)
    )
    keys, values = (
        [torch.cat([old, x]) for old, x in zip(olds, torch.split(new, lengths), strict=True)]
        for olds, new in ((k, k_new), (v, v_new))
    )
    assert relative(out, exact(list(inputs["q"]), keys, values)[0].view_as(out)) < OF_FORMAT


UNSUPPORTED = [
    {"seqused_q": torch.ones(5).int()}, {"qv": torch.ones(1)}, {"attention_chunk": 64}, {"dropout_p": 0.1},
    {"alibi_slopes": torch.ones(4)}, {"cp_world_size": 2}, {"cp_tot_seqused_k": torch.ones(1)},
]  # fmt: skip


@pytest.mark.parametrize("changes", UNSUPPORTED, ids=lambda x: next(iter(x)))
def test_what_no_kernel_computes(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=rf"{next(iter(changes))}: .*docs/flash_attn.md"):
        flash_attn_varlen_func(**varlen(), **changes)
    result = greenfast.explain_call(flash_attn_varlen_func, **varlen(), **changes)
    assert not result.taken
    assert result.reason.startswith(next(iter(changes)))


def test_positional_arguments_are_flash_attention_3s() -> None:
    """The order of hopper/flash_attn_interface.py (Dao-AILab/flash-attention, August 2026)."""
    names = {
        flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
        "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
        "deterministic sm_margin return_attn_probs",
        flash_attn_with_kvcache: "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
        "v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata "
        "num_splits pack_gqa sm_margin return_softmax_lse",
    }
    for function, wanted in names.items():
        of = inspect.signature(function).parameters.values()
        assert [p.name for p in of if p.kind is p.POSITIONAL_OR_KEYWORD] == wanted.split()


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_whole(dynamic: bool) -> None:
    inputs = varlen()
    compiled = COMPILE(flash_attn_varlen_func, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(**inputs), flash_attn_varlen_func(**inputs))
    _, _, eager = cached()
    _, _, traced = cached()
    new = normal(3, 2, 2, 64, seed=5)
    angles = torch.rand(100, 16)
    more: dict[str, Any] = {"k": new, "v": new, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    wanted = flash_attn_with_kvcache(**eager, **more)
    result = COMPILE(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager", dynamic=dynamic)(**traced, **more)
    assert torch.equal(result, wanted)
    assert torch.equal(traced["k_cache"].view(torch.uint8), eager["k_cache"].view(torch.uint8))


class BothFunctions(torch.nn.Module):
    """A cache of one run of rows per sequence, and keys without a cache; the longest sequence is a size."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, keys: Tensor, starts: Tensor) -> Any:
        size = keys.shape[0]
        return (
            flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=k_cache.shape[1] - 3, causal=True),
            flash_attn_varlen_func(rows, keys, keys, starts, starts * size, rows.shape[0], size),
        )


def cache_and_keys(batch: int, length: int, capacity: int, keys: int) -> tuple[Tensor, ...]:
    k_cache, v_cache = (normal(batch, capacity, 2, 64, seed=n).to(E4M3) for n in (6, 7))
    starts = torch.tensor([0, 1], dtype=torch.int32)
    return normal(batch, length, 4, 64), k_cache, v_cache, normal(1, 4, 64), normal(keys, 2, 64), starts


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_of_caches_and_keys_of_any_length(strict: bool) -> None:
    batch, length, pages, keys = (torch.export.Dim(name, min=2, max=10**6) for name in ("b", "s", "pages", "keys"))
    cache = {0: batch, 1: 16 * pages}
    sizes: Any = ({0: batch, 1: length}, cache, cache, {}, {0: keys}, {})
    program = torch.export.export(
        BothFunctions(), cache_and_keys(2, 5, 64, 40), dynamic_shapes=sizes, strict=strict
    ).module()
    for example in (cache_and_keys(2, 5, 64, 40), cache_and_keys(3, 2, 256, 300), cache_and_keys(4, 9, 48, 129)):
        assert all(map(torch.equal, program(*example), BothFunctions()(*example)))


def test_explanations() -> None:
    _, _, inputs = cached()
    before = inputs["k_cache"].view(torch.uint8).clone()
    new = normal(3, 2, 2, 64)
    result = greenfast.explain_call(flash_attn_with_kvcache, **inputs, k=new, v=new)
    assert result.kernel == "reference"
    assert torch.equal(inputs["k_cache"].view(torch.uint8), before)
    assert greenfast.explain_call(flash_attn_varlen_func, **varlen()).kernel == "reference"
    assert greenfast.explain_call(flash_attn_varlen_func, **varlen(), softcap=torch.tensor(3.0)).kernel == "reference"
    on_meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in varlen().items()}
    assert greenfast.explain_call(flash_attn_varlen_func, **on_meta).kernel == "meta"


def test_explanations_of_keys_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        inputs = {
            n: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x
            for n, x in varlen().items()
        }
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "hopper"),
        ({"return_attn_probs": True}, "hopper"),
        ({"max_seqlen_q": 32}, "serving"),
        ({"dropout_p": 0.5}, "torch"),
    ]
    for changes, kernel in cases:
        assert greenfast.explain_call(flash_attn_varlen_func, **(inputs | changes)).kernel == kernel
    assert greenfast.explain_call(flash_attn_varlen_func, **inputs).reason.startswith("K and V are quantized")


def test_explanations_say_how_values_lie() -> None:
    layouts = {
        "grouped": "an FP8 cache with V in groups",
        "rows": "an FP8 cache with V in rows, transposed in the kernel",
    }
    for layout, words in layouts.items():
        c = case([(3, 70)], layout=layout)
        assert format_reason([c.q, c.k_cache, c.v_cache, c.block_table]).startswith(words)
    codes = torch.zeros(70, 2, 64).to(E4M3)
    for x in (codes, codes.bfloat16()):
        assert format_reason([x, x, x]).startswith("K and V are put into temporary pages")


@pytest.mark.parametrize("stride", [72, 65])
def test_rows_of_values_begin_at_multiples_of_16_bytes(stride: int) -> None:
    c = case([(3, 70)], layout="rows")
    wide = torch.zeros(*c.v_cache.shape[:3], stride, dtype=torch.uint8).view(E4M3)
    call = dict(seqused_k=c.seqused_k, block_table=c.block_table, k_descale=c.k_scale, v_descale=c.v_scale)
    with pytest.raises(ValueError, match=r"v: its strides are .* multiples of 16 bytes in the others are needed"):
        flash_attn_varlen_func(c.q, c.k_cache, wide[..., :64], c.cu_seqlens_q, None, 3, 70, **call)


def test_lengths_on_a_gpu_are_read_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(0, device="meta")
    assert not serving_checks.should_check_values(x)
    monkeypatch.setattr(serving_checks, "_CHECK_PAGES_ENABLED", True)
    assert serving_checks.should_check_values(x)


def test_a_case_of_many_options() -> None:
    """The calls pass all options on: compared with the same numbers in float64."""
    c: Case = case([(3, 257), (1, 64), (5, 129)], group=8, sinks=True, window=(64, 3), softcap=20.0, causal=False)
    out, lse = both(
        flash_attn_varlen_func(
            c.q, c.k_cache, c.v_cache, c.cu_seqlens_q, None, 5, 257, seqused_k=c.seqused_k, page_table=c.block_table,
            k_descale=c.k_scale, v_descale=c.v_scale, s_aux=c.sinks, window_size=(64, 3), softcap=20.0,
            return_softmax_lse=True,
        )
    )  # fmt: skip
    assert faults(c, out, lse) == []
