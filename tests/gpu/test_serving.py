"""Serving on the hardware: the calls against float64, and the same bits whatever surrounds a sequence."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from greenfast.kernels.attention.config import KEY_ORDER
from greenfast.kernels.serving import attention
from greenfast.numerics import serving as reference
from greenfast.serving import launch_cache as serving_request
from greenfast.serving import torch_ops as serving_ops
from tests.ops.launched import forget_launches
from tests.serving.oracle import Case, case, faults

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

#: The tensor cores keep about 14 bits of a sum of products: so far may scores be off in natural units.
SCORES = 5e-3


@pytest.fixture
def _wide_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Row tiles of prompts are wide, though the tests' batches are too small to fill a GPU with them."""
    monkeypatch.setattr(attention, "_NARROW_ROW_TIME", dict.fromkeys(attention._NARROW_ROW_TIME, math.inf))
    forget_launches()
    yield
    forget_launches()


def on_gpu(x: Tensor | None) -> Tensor | None:
    """A copy with the same strides, and with what lies between the elements."""
    if x is None:
        return None
    flat = torch.as_strided(x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x, (whole(x),), (1,), 0)
    copied = flat.cuda()
    if x.dtype == torch.float8_e4m3fn:
        copied = copied.view(x.dtype)
    return torch.as_strided(copied, x.shape, x.stride())


def whole(x: Tensor) -> int:
    return int(x.untyped_storage().size() // x.element_size())


def arguments(c: Case, plan: Tensor | None = None) -> tuple[Any, ...]:
    """Of the operator, on the GPU."""
    o = c.options
    lengths = c.cu_seqlens_q[1:] - c.cu_seqlens_q[:-1]
    tensors = (c.q, c.k_cache, c.v_cache, c.block_table, c.cu_seqlens_q, c.seqused_k, c.k_scale, c.v_scale)
    left, right = o.get("window", (-1, -1))
    return (
        *map(on_gpu, (*tensors, c.q_scale, c.sinks)), plan, int(lengths.max()), o["causal"], left, right,
        o.get("softcap", 0.0), o["softmax_scale"], o["out_dtype"],
    )  # fmt: skip


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    lengths = [
        (
            rng.choice([0, 1, 1, 1, 2, 5, 17, 70]),
            rng.choice([0, 1, 63, 64, 65, 127, 128, 129, 257, 511, 513, 1500, 3000]),
        )
        for _ in range(rng.randint(1, 6))
    ]
    return case(
        [*lengths, (1, 5)],
        kv_heads=rng.choice([1, 2, 5]),
        group=rng.choice([1, 3, 4, 8, 16]),
        head_dim=rng.choice([64, 128, 256]),
        page_size=rng.choice([16, 32, 64, 128]),
        scales=rng.choice(["token", "head", "sequence", "one"]),
        strides=rng.choice(["NHD", "HND"]),
        window=rng.choice([(-1, -1), (-1, -1), (0, 0), (64, 0), (64, 64), (1, 0), (700, 3)]),
        causal=rng.random() < 0.6,
        softcap=rng.choice([0.0, 0.0, 20.0]),
        sinks=rng.random() < 0.3,
        fp8_queries=rng.random() < 0.2,
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        layout=rng.choice(["grouped", "rows"]),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(60))
def test_results_are_as_exact_as_their_rounding(seed: int, request: pytest.FixtureRequest) -> None:
    if seed % 2 == 0:
        request.getfixturevalue("_wide_tiles")
    is_exact(drawn(seed))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (4096, 0)])
def test_long_sequences_are_too(head_dim: int, window: tuple[int, int]) -> None:
    is_exact(case([(3, 8191), (30, 4097), (1, 8191)], head_dim=head_dim, kv_heads=1, group=4, window=window))


def is_exact(c: Case) -> None:
    out, lse = serving_ops.paged_attention(*arguments(c))
    wanted = reference.paged_attention(**c.arguments())
    assert not [fault for fault in faults(c, out.cpu(), lse.cpu()) if not fault.startswith("lse: off")]
    finite = wanted[1].isfinite()
    assert float((lse.cpu() - wanted[1])[finite].abs().max()) < SCORES


def rows_of_groups(v: Tensor) -> Tensor:
    """V in groups as V in rows."""
    pages, heads, groups, head_dim, _ = v.shape
    rows = torch.empty(pages, groups, 16, heads, head_dim, dtype=torch.uint8, device=v.device)
    rows[:, :, list(KEY_ORDER)] = v.view(torch.uint8).permute(0, 2, 4, 1, 3)
    return rows.flatten(1, 2).view(v.dtype)


@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize(("queries", "group"), [(1, 8), (1, 16), (4, 3), (5, 8), (70, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_in_rows_and_in_groups_have_the_same_bits(
    head_dim: int, queries: int, group: int, scales: str, heads_first: bool
) -> None:
    lengths = [(queries, n) for n in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 3000)]
    for page_size in (16, 32, 64, 128):
        c = case(lengths, group=group, head_dim=head_dim, page_size=page_size, scales=scales, seed=page_size)
        given = arguments(c)
        rows = rows_of_groups(given[2])
        if heads_first:
            rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
        out, lse = serving_ops.paged_attention(*given)
        for _ in range(3):
            found, sums = serving_ops.paged_attention(*given[:2], rows, *given[3:])
            assert torch.equal(found.view(torch.int16), out.view(torch.int16))
            assert torch.equal(sums.view(torch.int32), lse.view(torch.int32))


def test_a_cache_in_rows_without_a_page_table() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (
        torch.randn(3, 512, 2, 128, device="cuda", generator=generator).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn)
        for _ in "kv"
    )
    q = torch.randn(3, 2, 8, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    used = torch.tensor([5, 512, 300], dtype=torch.int32, device="cuda")
    scales: dict[str, Any] = {"k_descale": torch.full((), 0.02, device="cuda"), "causal": True}
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **scales)
    pages = k.view(torch.uint8).view(12, 128, 2, 128).view(k.dtype)
    table = torch.arange(12, dtype=torch.int32, device="cuda").view(3, 4)
    values = reference.grouped_values(v.cpu().view(torch.uint8).view(12, 128, 2, 128).view(v.dtype)).cuda()
    wanted = flash_attn_with_kvcache(q, pages, values, cache_seqlens=used, page_table=table, **scales)
    assert torch.equal(found, wanted)  # type: ignore[arg-type]


def test_values_in_rows_that_are_refused() -> None:
    c = case([(1, 70)], layout="rows", scales="head")
    given = arguments(c)
    flat = torch.zeros(given[2].numel() + 8, dtype=torch.uint8, device="cuda")[8:].view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"v_cache: it begins at address .*; a multiple of 16 is needed"):
        serving_ops.paged_attention(*given[:2], flat.view(given[2].shape), *given[3:])
    narrow = torch.zeros(*given[2].shape[:3], 72, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"v_cache: its strides are .*multiples of 16 bytes"):
        serving_ops.paged_attention(*given[:2], narrow[..., :64], *given[3:])


@pytest.mark.usefixtures("_wide_tiles")
@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_scales_and_layouts_have_the_error_of_the_reference(seed: int) -> None:
    """Long rows, of which a race or a lost tile would change little: compared with the reference, not with a bound."""
    head_dim, group = (64, 128, 256)[seed % 3], (1, 4, 8)[seed // 3 % 3]
    c = case([(33, 2100), (1, 5000)], group=group, head_dim=head_dim, page_size=64, scales="head", seed=seed)
    out, _ = serving_ops.paged_attention(*arguments(c))
    wanted, _ = reference.paged_attention(**c.arguments())
    assert float((out.cpu().float() - wanted.float()).norm() / wanted.float().norm()) < 0.02


def paged(length: int, head_dim: int, page: int, token: bool, seed: int = 0, *, grouped: bool = True) -> dict[str, Any]:
    """One sequence's cache of 2 heads, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-length // page)
    rows = [torch.randn(pages, page, 2, head_dim, generator=generator) for _ in "kv"]
    scales = [
        torch.rand(pages, 2, page, generator=generator) * 0.02 + 0.01 if token else torch.tensor([0.02, 0.01])
    ] * 2
    k, v = ((x * 50).clamp(-448, 448).to(torch.float8_e4m3fn) for x in rows)
    order = torch.randperm(pages, generator=generator)
    table = order.argsort().int()[None]
    k, v = (x.view(torch.uint8)[order].view(torch.float8_e4m3fn) for x in (k, v))
    scales = [x[order] if token else x for x in scales]
    values = reference.grouped_values(v) if grouped else v
    return {
        "k_cache": k.cuda(), "v_cache": values.cuda(), "block_table": table.cuda(), "k_scale": scales[0].cuda(),
        "v_scale": scales[1].cuda(),
    }  # fmt: skip


def attend(c: dict[str, Any], q: Tensor, starts: list[int], used: list[int], **more: Any) -> Tensor:
    """Of sequences that all have the same pages."""
    cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
    lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
    out = flash_attn_varlen_func(
        q, c["k_cache"], c["v_cache"], cu, max_seqlen_q=max(b - a for a, b in pairwise(starts)),
        seqused_k=lengths, causal=True, block_table=c["block_table"].expand(len(used), -1).contiguous(),
        k_descale=c["k_scale"], v_descale=c["v_scale"], **more,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("token", [True, False], ids=["token", "head"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (600, 0)], ids=["all", "window"])
@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "rows"])
@pytest.mark.parametrize("tiles", ["chosen", "wide"])
def test_decode_chunks_and_prefill_have_the_same_bits(
    head_dim: int, token: bool, window: tuple[int, int], grouped: bool, tiles: str, request: pytest.FixtureRequest
) -> None:
    if tiles == "wide":
        request.getfixturevalue("_wide_tiles")
    length = 2300
    q = torch.randn(length, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    c = paged(length, head_dim, 64, token, grouped=grouped)
    prefill = attend(c, q, [0, length], [length], window_size=window)
    rng = random.Random(head_dim)
    places = [0, 1, 127, 128, 511, 512, 513, length - 1, *(rng.randrange(length) for _ in range(200))]
    many = attend(c, q[places], list(range(len(places) + 1)), [at + 1 for at in places], window_size=window)
    assert torch.equal(many, prefill[places])
    for at in places[:12]:
        alone = attend(c, q[at : at + 1], [0, 1], [at + 1], window_size=window)
        assert torch.equal(alone[0], prefill[at])
    cuts = [0, 5, 300, 301, 1024, 1900, length]
    for a, b in pairwise(cuts):
        assert torch.equal(attend(c, q[a:b], [0, b - a], [b], window_size=window), prefill[a:b])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_chunk_beside_sequences_that_decode(head_dim: int) -> None:
    """The row tiles of a plan follow the tokens that it is told; neither they nor a call without one change a bit."""
    c = paged(1500, head_dim, 64, False)
    q = torch.randn(63 + 1024, 8, head_dim, device="cuda", dtype=torch.bfloat16)
    starts, used = [*range(64), 63 + 1024], [900 + n for n in range(63)] + [1500]
    cu, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts, used))

    def plan(total_q: int | None) -> greenfast.ServingPlan:
        return greenfast.ServingPlan(
            cu, lengths, 1024, heads=8, kv_heads=2, head_dim=head_dim, causal=True, total_q=total_q
        )

    wanted, plans = attend(c, q, starts, used), [plan(len(q)), plan(None)]
    assert plans[0].tensor.numel() != plans[1].tensor.numel()
    for made in plans:
        assert torch.equal(attend(c, q, starts, used, scheduler_metadata=made), wanted)
    compiled = torch.compile(lambda x: plan(x.shape[0]).tensor, fullgraph=True, dynamic=True)
    assert compiled(q).shape == plans[0].tensor.shape


def test_page_sizes_and_batches_change_no_bit() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        lengths = [(rng.choice([1, 1, 2, 40]), rng.choice([5, 129, 700, 2000])) for _ in range(7)]
        cases = [case(lengths, group=4, head_dim=128, page_size=n, seed=seed) for n in (16, 128)]
        # The same rows: pages of both hold what the generator drew, in its order.
        outs = [serving_ops.paged_attention(*arguments(c))[0] for c in cases]
        assert torch.equal(*outs)
        first = 0
        for b, (n, _) in enumerate(lengths):
            c = cases[0]
            alone = c.but(
                q=c.q[first : first + n].clone(), block_table=c.block_table[b : b + 1].clone(),
                cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32), seqused_k=c.seqused_k[b : b + 1].clone(),
            )  # fmt: skip
            assert torch.equal(serving_ops.paged_attention(*arguments(alone))[0], outs[0][first : first + n])
            first += n


@pytest.fixture
def cache() -> greenfast.PagedKVCache:
    return greenfast.PagedKVCache(256, 64, 2, 128, device="cuda")


def test_a_step_in_a_graph_with_lengths_that_change(cache: greenfast.PagedKVCache) -> None:
    """Append, plan and attention of several layers' worth, captured once; the lengths differ in each replay."""
    batch = 5
    for b in range(batch):
        assert cache.reserve(b, 3000)
    table = cache.block_table(range(batch))
    layer = cache.layer()
    k, v = (torch.randn(batch * 2900, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    greenfast.append_kv(None, k, v, *layer[:2], cache.slot_mapping(range(batch), [0] * batch, [2900] * batch),
                        k_scale=layer.k_scale, v_scale=layer.v_scale)  # fmt: skip
    q = torch.randn(batch, 8, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    used = torch.tensor([1, 700, 64, 2900, 513], dtype=torch.int32, device="cuda")

    def step(plan: greenfast.ServingPlan | None) -> Tensor:
        out = flash_attn_varlen_func(
            q, *layer[:2], cu, max_seqlen_q=1, seqused_k=used, causal=True, block_table=table, k_descale=layer.k_scale,
            v_descale=layer.v_scale, scheduler_metadata=plan,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        step(None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            plan = greenfast.ServingPlan(cu, used, 1, heads=8, kv_heads=2, head_dim=128, causal=True)
            found = [step(plan) for _ in range(3)]
    for lengths in ([1, 700, 64, 2900, 513], [2900] * 5, [0, 0, 0, 0, 9], [1200, 1, 0, 2048, 2049]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        for out in found:
            assert torch.equal(out, step(None))


def test_k_and_v_without_a_cache_against_pytorch() -> None:
    lengths, heads = [5, 300, 0, 1, 777], 8
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(sum(lengths), n, 128, device="cuda", dtype=torch.bfloat16) for n in (heads, heads // 4, heads // 4)
    )
    out = flash_attn_varlen_func(q, k, v, starts, starts, max(lengths), max(lengths), causal=True)
    assert isinstance(out, Tensor)
    for a, b in pairwise(starts.tolist()):
        if a == b:
            continue
        rows = [x[a:b].double().transpose(0, 1)[None] for x in (q, k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            rows[0], rows[1], rows[2], is_causal=True, enable_gqa=True
        )[0]
        error = (out[a:b].double().transpose(0, 1) - wanted).norm() / wanted.norm()
        assert float(error) < 0.07


@pytest.mark.parametrize("planned", [True, False], ids=["serving", "dense"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_short_work_tiles_end(head_dim: int, planned: bool) -> None:
    """With one stage and a scale per token, a wait for one phase of a barrier of two could not end."""
    lengths = [64, 200, 1024, 1, 130, 600] * 8
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(head_dim)
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (16, 8, 8)
    )

    plan = (
        greenfast.ServingPlan(
            starts, starts.diff(), 1024, heads=16, kv_heads=8, head_dim=head_dim, causal=True, total_q=sum(lengths)
        )
        if planned
        else None
    )

    def call() -> Tensor:
        out = flash_attn_varlen_func(q, k, v, starts, starts, 1024, 1024, causal=True, scheduler_metadata=plan)
        assert isinstance(out, Tensor)
        return out

    wanted = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for _ in range(4)]
    for _ in range(20):
        graph.replay()
    late = time.monotonic() + 30.0
    while not torch.cuda.current_stream().query():
        assert time.monotonic() < late, "the launches have not ended"
        time.sleep(0.01)
    assert all(torch.equal(out, wanted) for out in found)


def test_appending_in_the_call_is_appending_before_it(cache: greenfast.PagedKVCache) -> None:
    for name in range(3):
        assert cache.reserve(name, 1500)
    other = greenfast.PagedKVCache(256, 64, 2, 128, device="cuda")
    table, generator = cache.block_table(range(3)), torch.Generator("cuda").manual_seed(1)
    used = torch.tensor([3, 1000, 64], dtype=torch.int32, device="cuda")
    for c in (cache, other):
        for x in c.layer():
            x.fill_(1) if x.dtype == torch.float32 else x.view(torch.uint8).zero_()
    q, k, v = (torch.randn(3, 2, n, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for n in (8, 2, 2))
    ours, theirs = cache.layer(), other.layer()
    one = flash_attn_with_kvcache(
        q,
        *ours[:2],
        k=k,
        v=v,
        cache_seqlens=used,
        page_table=table,
        k_descale=ours.k_scale,
        v_descale=ours.v_scale,
        causal=True,
    )
    at = [(int(n) + i) for n in used.tolist() for i in range(2)]
    pages = table.long()[torch.arange(3, device="cuda").repeat_interleave(2), torch.tensor(at, device="cuda") // 64]
    slots = pages * 64 + torch.tensor(at, device="cuda") % 64
    greenfast.append_kv(
        None, k.flatten(0, 1), v.flatten(0, 1), *theirs[:2], slots, k_scale=theirs.k_scale, v_scale=theirs.v_scale
    )
    two = flash_attn_with_kvcache(
        q,
        *theirs[:2],
        cache_seqlens=used + 2,
        page_table=table,
        k_descale=theirs.k_scale,
        v_descale=theirs.v_scale,
        causal=True,
    )
    assert torch.equal(one, two)  # type: ignore[arg-type]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("form", ["read", "plan", "append", "rotate", "keys"])
def test_repeated_calls_have_the_bits_of_the_first(form: str, cache: greenfast.PagedKVCache) -> None:
    """Also on other tensors, in threads with streams of their own, and in a graph."""
    generator = torch.Generator("cuda").manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    for name in range(3):
        assert cache.reserve(name, 1500)
    k_cache, v_cache, k_scale, v_scale = cache.layer()
    for x in (k_cache, v_cache):
        codes = torch.randn(x.shape, device="cuda", generator=generator).to(x.dtype)
        x.view(torch.uint8).copy_(codes.view(torch.uint8))
    for x in (k_scale, v_scale):
        x.fill_(1)
    used = torch.tensor([3, 1000, 64], dtype=torch.int32, device="cuda")
    starts = torch.arange(4, dtype=torch.int32, device="cuda") * 2
    options: dict[str, Any] = {"causal": True}
    if form != "keys":
        options |= {"cache_seqlens": used, "page_table": cache.block_table(range(3)), "k_descale": k_scale}
        options["v_descale"] = v_scale
    if form == "plan":
        made = greenfast.ServingPlan(starts, used, 2, heads=8, kv_heads=2, head_dim=128, causal=True)
        options["scheduler_metadata"] = made
    if form == "rotate":
        options |= {"rotary_cos": drawn(2000, 32).cos(), "rotary_sin": drawn(2000, 32).sin()}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if form == "keys":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            found = flash_attn_varlen_func(q, k, v, starts, starts, 2, 2, **options)
        else:
            new: dict[str, Any] = {"k": k, "v": v} if form in ("append", "rotate") else {}
            found = flash_attn_with_kvcache(q, k_cache, v_cache, **new, **options)
        assert isinstance(found, Tensor)
        return found

    inputs = [[drawn(3, 2, n, 128) for n in (8, 2, 2)] for _ in range(4)]
    wanted = []
    for given in inputs:
        serving_request.ATTENTION_CACHE.clear()
        wanted.append(call(*given))
    wrong: list[int] = []

    def check(i: int) -> None:
        if not torch.equal(call(*inputs[i]), wanted[i]):
            wrong.append(i)

    for i in (0, 1, 1, 2, 3, 0):
        check(i)
    if form not in ("append", "rotate"):  # these write to one cache

        def work(i: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for _ in range(50):
                    check(i)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*inputs[1])
    for x, y in zip(inputs[1], inputs[2], strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, wanted[2])
    assert not wrong


@pytest.mark.parametrize("queries", [1, 60])
def test_appending_to_rows_and_to_groups(queries: int) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    q, k, v = (
        torch.randn(2 * 700, n, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for n in (8, 2, 2)
    )
    cu = torch.tensor([0, queries, 2 * queries], dtype=torch.int32, device="cuda")
    used = torch.tensor([700, 700], dtype=torch.int32, device="cuda")
    found = []
    for values in ("grouped", "rows"):
        cache = greenfast.PagedKVCache(64, 64, 2, 128, device="cuda", values=values)
        assert all(cache.reserve(name, 700) for name in range(2))
        layer = cache.layer()
        slots = cache.slot_mapping(range(2), [0, 0], [700, 700])
        greenfast.append_kv(None, k, v, *layer[:2], slots, k_scale=layer.k_scale, v_scale=layer.v_scale)
        out = flash_attn_varlen_func(
            q[: 2 * queries], *layer[:2], cu, max_seqlen_q=queries, seqused_k=used, causal=True,
            block_table=cache.block_table(range(2)), k_descale=layer.k_scale, v_descale=layer.v_scale,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        found.append(out)
    assert torch.equal(*found)
    assert not found[0].isnan().any()


def test_tables_and_lengths_that_lie_read_no_other_memory() -> None:
    c = case([(1, 600), (3, 200)], group=4, head_dim=128, page_size=64, scales="token")
    for table, used in (
        (torch.full_like(c.block_table, -1), c.seqused_k),
        (torch.full_like(c.block_table, 2**31 - 1), c.seqused_k),
        (c.block_table, torch.tensor([10**6, -5], dtype=torch.int32)),
    ):
        serving_ops.paged_attention(*arguments(c.but(block_table=table, seqused_k=used)))
    torch.cuda.synchronize()
    out, lse = serving_ops.paged_attention(*arguments(c))
    assert not [fault for fault in faults(c, out.cpu(), lse.cpu()) if not fault.startswith("lse: off")]
