"""The reference of paged attention: against float64, and the bits of a row whatever surrounds it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from greenfast.numerics import serving
from tests.serving.matrix import drawn
from tests.serving.oracle import NAN_CODE, Case, case, exact, faults, grouped, relative


def attend(c: Case) -> tuple[Tensor, Tensor]:
    return serving.paged_attention(**c.arguments())


@pytest.mark.parametrize("options", drawn(48), ids=lambda o: f"{o['seed']}")
def test_within_the_error_of_rounded_weights(options: dict[str, Any]) -> None:
    c = case(**options, out_dtype=torch.float32)
    assert faults(c, *attend(c)) == []


@pytest.mark.parametrize("window", [(-1, -1), (4096, 0)])
def test_long_sequences(window: tuple[int, int]) -> None:
    c = case([(3, 8191), (1, 4097)], page_size=64, kv_heads=1, group=4, window=window, out_dtype=torch.float32)
    assert faults(c, *attend(c)) == []


def test_the_comparison_finds_faults() -> None:
    c = case([(3, 257)], out_dtype=torch.float32)
    out, lse = attend(c)
    assert faults(c.but(options=c.options | {"window": (255, 0)}), out, lse)
    assert faults(c.but(v_scale=c.v_scale.roll(1, 1)), out, lse)
    assert faults(c.but(v_scale=c.v_scale * 1.1), out, lse)
    assert faults(c.but(v_cache=c.v_cache.view(torch.uint8).roll(1, -1).view(c.v_cache.dtype)), out, lse)
    assert faults(c, out * 1.2, lse)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_formats_error(head_dim: int) -> None:
    """Compared with PyTorch on unquantized inputs; what rounding the weights adds to that is little."""
    c = case([(40, 300)], head_dim=head_dim, out_dtype=torch.float32)
    q, k, v = (x.double().transpose(0, 1) for x in (c.q, c.keys[0], c.values[0]))
    k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    mask = torch.arange(300) <= torch.arange(40).unsqueeze(1) + 260
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)
    whole, of_format = relative(attend(c)[0], wanted), relative(exact(c).out, wanted)
    assert of_format < 0.055
    assert whole < 0.065


def part(c: Case, b: int, rows: slice) -> Case:
    """Queries of one sequence alone, over the keys up to the last of them."""
    first, last = c.cu_seqlens_q[b : b + 2].tolist()
    cut = last - first - rows.stop
    return c.but(
        q=c.q[first + rows.start : first + rows.stop],
        block_table=c.block_table[b : b + 1],
        cu_seqlens_q=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
        seqused_k=c.seqused_k[b : b + 1] - cut,
    )


MORE = {"window": (300, 0), "sinks": True, "softcap": 20.0}


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        pytest.param({}, "token", id="plain-token"),
        pytest.param(MORE, "head", id="all-head"),
        pytest.param({}, "head", id="plain-head", marks=pytest.mark.slow),
        pytest.param(MORE, "token", id="all-token", marks=pytest.mark.slow),
    ],
)
def test_decode_equals_prefill_bit_for_bit(
    scales: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query at a time, and chunks of queries, over a cache that already has later keys."""
    c = case([(1300, 1300), (7, 40), (130, 700)], group=3, scales=scales, **options)
    out, lse = attend(c)
    for b, q_len in ((0, 1300), (1, 7), (2, 130)):
        begin = int(c.cu_seqlens_q[b])
        for rows in (slice(0, 1), slice(5, 6), slice(q_len - 1, q_len), slice(2, 7), slice(0, q_len // 2)):
            at = slice(begin + rows.start, begin + rows.stop)
            result = attend(part(c, b, rows))
            assert torch.equal(result[0], out[at])
            assert torch.equal(result[1], lse[:, at])
    monkeypatch.setattr(serving, "_MOST_SCORES", 1)
    again = attend(part(c, 2, slice(0, 130)))
    assert torch.equal(again[0], out[-130:])


def test_page_size_and_place_change_nothing() -> None:
    results = []
    for page_size in (16, 32, 64, 128):
        for layout in ("grouped", "rows"):
            c = case([(3, 200), (5, 5), (1, 600)], page_size=page_size, layout=layout, strides="HND")
            results.append(attend(c))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_give_the_same_bits(seed: int) -> None:
    """A sequence among others, in another order, with other lengths of queries around it."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        (int(torch.randint(1, 6, (), generator=generator)), int(n))
        for n in torch.randint(5, 900, (6,), generator=generator)
    ]
    c = case(lengths, group=4, seed=seed)
    out, _ = attend(c)
    order = torch.randperm(6, generator=generator)[:4].tolist()
    parts = [c.q[c.cu_seqlens_q[b] : c.cu_seqlens_q[b + 1]] for b in order]
    mixed = c.but(
        q=torch.cat(parts),
        block_table=c.block_table[order],
        seqused_k=c.seqused_k[order],
        cu_seqlens_q=torch.tensor([0, *(len(x) for x in parts)]).cumsum(0).int(),
    )
    wanted = torch.cat([out[c.cu_seqlens_q[b] : c.cu_seqlens_q[b + 1]] for b in order])
    assert torch.equal(attend(mixed)[0], wanted)


def test_bytes_that_no_key_holds_change_nothing() -> None:
    """Slots after a sequence's keys, pages of no sequence, unused entries of the table."""
    c = case([(2, 130), (4, 17)])
    assert (c.k_cache.view(torch.uint8) == NAN_CODE).any()
    out, lse = attend(c)
    assert out.isfinite().all()
    k, v = (x.view(torch.uint8).clone() for x in (c.k_cache, c.v_cache))
    k[k == NAN_CODE], v[v == NAN_CODE] = 0x31, 0x32
    table = c.block_table.masked_fill(c.block_table < 0, 2**31 - 1)
    clean = c.but(k_cache=k.view(c.k_cache.dtype), v_cache=v.view(c.v_cache.dtype), block_table=table)
    assert torch.equal(attend(clean)[0], out)
    assert torch.equal(attend(clean)[1], lse)


def test_nan_in_a_key_or_value_reaches_the_rows_that_attend_to_it() -> None:
    c = case([(100, 100)], layout="rows", page_size=128)
    k, v = (x.view(torch.uint8).clone() for x in (c.k_cache, c.v_cache))
    page = int(c.block_table[0, 0])
    v[page, 50, 0, 3] = NAN_CODE
    out, _ = attend(c.but(v_cache=v.view(c.v_cache.dtype)))
    assert torch.equal(out[:50], attend(c)[0][:50])
    assert out[50:, :2, 3].isnan().all()
    assert int(out.isnan().sum()) == 50 * 2
    k[page, 50, 0, 3] = NAN_CODE
    out, lse = attend(c.but(k_cache=k.view(c.k_cache.dtype)))
    assert out[50:, :2].isnan().all()
    assert int(out.isnan().sum()) == 50 * 2 * 64
    assert int(lse.isnan().sum()) == 50 * 2


def test_a_scale_of_nan_reaches_the_rows_that_attend_to_its_key() -> None:
    """``append_kv`` writes such a scale for a key or value that is not finite."""
    c = case([(100, 100)], page_size=128)
    wanted, sums = attend(c)
    for name in ("k_scale", "v_scale"):
        scale = getattr(c, name).clone()
        scale[int(c.block_table[0, 0]), 1, 50] = math.nan
        out, lse = attend(c.but(**{name: scale}))
        assert torch.equal(out[:50], wanted[:50])
        assert torch.equal(lse[:, :50], sums[:, :50])
        assert out[50:, 2:].isnan().all()
        assert torch.equal(out[:, :2], wanted[:, :2])


def test_rows_without_keys() -> None:
    c = case([(3, 0), (4, 2), (0, 9)], out_dtype=torch.float32)
    out, lse = attend(c)
    assert (out[:5] == 0).all()
    assert torch.isneginf(lse[:, :5]).all()
    assert torch.isfinite(lse[:, 5:]).all()
    with_sinks = case([(3, 0), (4, 2)], sinks=True)
    assert with_sinks.sinks is not None
    out, lse = attend(with_sinks)
    assert (out[:5] == 0).all()
    assert torch.allclose(lse[:, :5], with_sinks.sinks.unsqueeze(1).expand(-1, 5), atol=1e-5)


@pytest.mark.parametrize("tiny", [0.0, 1e-38])
def test_queries_of_zeros_and_tiny_ones(tiny: float) -> None:
    c = case([(2, 50)], out_dtype=torch.float32)
    q = torch.full_like(c.q, tiny)
    q[:, :, ::2] = 0
    out, lse = attend(c.but(q=q))
    assert out.isfinite().all()
    assert torch.allclose(lse, torch.tensor([[49.0, 50.0]]).log().expand_as(lse))


def test_a_rows_largest_weight_is_exact() -> None:
    """The weight of the only key is 56. E4M3 has this number, so the output is exactly that key's value."""
    c = case([(1, 1)], out_dtype=torch.float32)
    assert torch.allclose(attend(c)[0].double(), exact(c).out, rtol=1e-6, atol=0)


def test_a_needle_in_a_long_context() -> None:
    """The last query matches one distant key; its value is the output, at any depth."""
    length, head_dim = 16384, 64
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(length, 1, head_dim, generator=generator)
    values = torch.randn(length, 1, head_dim, generator=generator)
    for position in (0, 100, 8191, length - 1):
        q = keys[position : position + 1] * (30 * head_dim**0.5 / keys[position].square().sum())
        (k, ks), (v, vs) = serving.quantize_rows(keys), serving.quantize_rows(values)
        out, _ = serving.paged_attention(
            q.bfloat16(), k.view(-1, 128, 1, head_dim), v.view(-1, 128, 1, head_dim),
            torch.arange(length // 128, dtype=torch.int32).unsqueeze(0), torch.tensor([0, 1]), torch.tensor([length]),
            k_scale=ks.view(-1, 1, 128), v_scale=vs.view(-1, 1, 128), causal=True, softmax_scale=head_dim**-0.5,
            out_dtype=torch.float32,
        )  # fmt: skip
        assert relative(out[0], values[position].double()) < 0.06


def test_values_in_groups() -> None:
    rows = torch.randint(0, 256, (3, 32, 2, 64), dtype=torch.uint8)
    assert torch.equal(serving.grouped_values(rows), grouped(rows))
    pages = torch.tensor([2, 0])
    assert torch.equal(serving.rows_of_pages(grouped(rows), pages), rows[pages].flatten(0, 1))


def test_rows_are_quantized_by_their_largest() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 448.0 / 300], [0.0, 0.0, 0.0, 0.0], [math.nan, 1.0, 2.0, 3.0]])
    codes, scale = serving.quantize_rows(x)
    assert torch.equal(scale[:2], torch.tensor([2.0, 448.0]) / 448.0)
    assert codes[0, :3].float().tolist() == [224.0, -448.0, 112.0]
    assert scale[2].isnan() or codes[2].float().isnan().any()
