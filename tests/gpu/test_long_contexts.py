"""Serving at 131,072 keys on the hardware: one key among them is found, and sums over them are no less exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.flash_attn import flash_attn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

KEYS, FEW_KEYS = 131_072, 2_048
QUERIES, GROUP, KV_HEADS, HEAD_DIM, PAGE = 64, 4, 2, 128, 64
DEVICE = "cuda"


def attend(q: Tensor, k: Tensor, v: Tensor, *, decode: bool) -> Tensor:
    """q (64, 8, 128) over k and v (keys, 2, 128), appended to a paged cache with a scale for each token and head.

    decode: each query is of a sequence of its own, all of the same pages; else they are a sequence's last tokens.
    """
    tokens = k.shape[0]
    cache = greenfast.PagedKVCache(tokens // PAGE + 3, PAGE, KV_HEADS, HEAD_DIM, device=DEVICE)
    assert cache.reserve("before", PAGE)  # so that the sequence's pages do not begin at 0
    assert cache.reserve("all", tokens)
    layer, slots = cache.layer(), cache.slot_mapping(["all"], [0], [tokens])
    greenfast.append_kv(None, k, v, *layer[:2], slots, k_scale=layer.k_scale, v_scale=layer.v_scale)
    starts = [*range(QUERIES + 1)] if decode else [0, QUERIES]
    batch = len(starts) - 1
    out = flash_attn_varlen_func(
        q, *layer[:2], torch.tensor(starts, dtype=torch.int32, device=DEVICE), max_seqlen_q=QUERIES // batch,
        seqused_k=torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE), causal=True,
        block_table=cache.block_table(["all"] * batch), k_descale=layer.k_scale, v_descale=layer.v_scale,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "chunk"])
def test_a_key_that_matches_is_found(decode: bool) -> None:
    """The largest of 131,072 scores is near 5, their log-sum-exp near 12; the score of the key that matches is 45."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    directions = normal(generator, QUERIES, KV_HEADS, HEAD_DIM)
    k, v = (normal(generator, KEYS, KV_HEADS, HEAD_DIM) for _ in "kv")
    at = 1 + torch.randperm(KEYS - QUERIES - 1, device=DEVICE, generator=generator)[:QUERIES]
    at[:2] = torch.tensor([0, KEYS - QUERIES])  # the first key, and the last that all of a chunk's queries see
    k[at] = 4 * directions
    out = attend(directions.repeat_interleave(GROUP, 1), k, v, decode=decode).double()
    wanted = v[at].repeat_interleave(GROUP, 1).double()
    # The value and its weight are each rounded to E4M3: half a step of 3 mantissa bits, or of the smallest numbers of a
    # row whose largest is 448. Then the output is rounded to bfloat16.
    smallest = wanted.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    bound = wanted.abs() * ((1 + 2.0**-4) ** 2 * (1 + 2.0**-8) - 1) + 2 * smallest
    assert bool(((out - wanted).abs() <= bound).all())
    assert float((out - wanted).norm() / wanted.norm()) < 0.06


def error(keys: int, mean: float, *, decode: bool) -> float:
    """Of N(0, 1) queries and keys, and values of that mean: against float64, in Frobenius norms."""
    generator = torch.Generator(DEVICE).manual_seed(keys)
    q = normal(generator, QUERIES, GROUP * KV_HEADS, HEAD_DIM)
    k, v = (normal(generator, keys, KV_HEADS, HEAD_DIM) for _ in "kv")
    v += mean
    out = attend(q, k, v, decode=decode).double()
    hidden = torch.arange(keys, device=DEVICE) > torch.arange(keys - QUERIES, keys, device=DEVICE).unsqueeze(1)
    of_error = of_wanted = 0.0
    for head in range(GROUP * KV_HEADS):
        scores = q[:, head].double() @ k[:, head // GROUP].double().T * HEAD_DIM**-0.5
        if not decode:
            scores = scores.masked_fill(hidden, -torch.inf)
        wanted = scores.softmax(-1) @ v[:, head // GROUP].double()
        of_error += float((out[:, head] - wanted).square().sum())
        of_wanted += float(wanted.square().sum())
    return math.sqrt(of_error / of_wanted)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "chunk"])
def test_sums_over_many_keys_are_as_exact_as_over_few(decode: bool, mean: float) -> None:
    """Tensor cores keep about 14 bits of a sum: 512 keys are summed there, and those sums in float32.

    A mean of 1 makes the sum grow with every key, so that what is lost of each would add up.
    """
    assert error(KEYS, mean, decode=decode) <= 1.3 * error(FEW_KEYS, mean, decode=decode)


def test_more_elements_than_an_int_counts() -> None:
    """Q, K, V, the output and the pages have more than 2^31 elements; what lies at their ends is as it is alone."""
    tokens, pages, few = 2**31 // HEAD_DIM + 300, 2**31 // (PAGE * HEAD_DIM) + 20, 700
    x = torch.zeros(tokens, 1, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    x[-few:] = normal(torch.Generator(DEVICE).manual_seed(0), few, 1, HEAD_DIM)
    found = []
    for rows, count in ((x, pages), (x[-few:].clone(), 11)):
        cache = greenfast.PagedKVCache(count, PAGE, 1, HEAD_DIM, device=DEVICE)
        assert cache.reserve("before", (count - 11) * PAGE)
        assert cache.reserve("last", few)
        layer, slots = cache.layer(), torch.full((len(rows),), -1, dtype=torch.int64, device=DEVICE)
        slots[-few:] = cache.slot_mapping(["last"], [0], [few])
        q = greenfast.append_kv(rows, rows, rows, *layer[:2], slots, k_scale=layer.k_scale, v_scale=layer.v_scale)
        assert q is not None
        between = len(rows) - few
        starts, used = [0, between, between + few], [0, few]
        result = flash_attn_varlen_func(
            q, *layer[:2], torch.tensor(starts, dtype=torch.int32, device=DEVICE), max_seqlen_q=max(between, few),
            seqused_k=torch.tensor(used, dtype=torch.int32, device=DEVICE), causal=True,
            block_table=cache.block_table(["last"] * 2), k_descale=layer.k_scale, v_descale=layer.v_scale,
            return_softmax_lse=True,
        )  # fmt: skip
        assert isinstance(result, tuple)
        out, lse = result
        assert not out[:between].count_nonzero()
        assert bool((lse[:, :between] == -math.inf).all())
        found.append((q[-few:].clone(), out[-few:].clone(), lse[:, -few:].clone()))
    for whole, alone in zip(*found, strict=True):
        assert torch.equal(whole, alone)
        assert not whole.isnan().any()
