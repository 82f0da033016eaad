"""The serving attention on the emulator: what the CPU's reference gives, whatever surrounds a row.

The emulator's products are exact but for their float32 sums, the reference's are exact: so weights seldom round to
another E4M3 number, and most outputs have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_ORDER
from greenfast.kernels.serving.config import few_rows
from greenfast.numerics.serving import paged_attention
from greenfast.spec.kernel import Struct
from tests.serving import emulated, oracle
from tests.serving.emulated import attention, attentions
from tests.serving.matrix import drawn
from tests.serving.oracle import NAN_CODE, Case, faults

E4M3 = torch.float8_e4m3fn
KEYS = (0, 1, 63, 64, 65, 127, 128, 129, 257, 511, 512, 513, 1100)


def case(lengths: list[tuple[int, int]], **options: Any) -> Case:
    """Pages of 128 tokens unless others are asked for, so that a tile's keys are all there.

    If pages after a sequence leave a part of a tile of 128 keys unwritten, the emulator runs a kernel four times
    more, to see that nothing depends on it. Tests of pages and lengths that are not there have such pages; others of 16
    tokens fill their tiles.
    """
    return oracle.case(lengths, **({"page_size": 128} | options))


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Whether outputs and log-sum-exps have the same bits."""
    return torch.equal(a[0].view(torch.int16), b[0].view(torch.int16)) and torch.equal(
        a[1].view(torch.int32), b[1].view(torch.int32)
    )


def steps(x: Tensor) -> Tensor:
    """16-bit floats as integers, next numbers next to each other."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def close(c: Case, found: tuple[Tensor, Tensor]) -> list[str]:
    """What is wrong with a result: it is right in float64, and next to the reference's.

    Rows are a unit of the output's last place from the reference's, but for one in 50 in which a weight was rounded to
    E4M3's other neighbour.
    """
    out, lse = found
    wanted, wanted_lse = paged_attention(**c.arguments())
    wrong = faults(c, out, lse)
    distance = (steps(out) - steps(wanted)).abs().amax(-1)
    if int((distance > 1).sum()) > distance.numel() // 50:
        wrong.append(f"out: {int((distance > 1).sum())} rows of {distance.numel()} differ from the reference")
    finite = wanted_lse.isfinite()
    off = ((lse - wanted_lse).abs() / wanted_lse.abs().clamp(min=1.0))[finite]
    if off.numel() and float(off.max()) > 1e-5:
        wrong.append(f"lse: {float(off.max())} from the reference")
    return wrong


def generated(count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Options of ``case`` and of ``attention``."""
    found = []
    generator = np.random.default_rng(15)
    for i, options in enumerate(drawn(count, seed=15)):
        keys = generator.permutation(KEYS)[:3].tolist()
        keys[0] = KEYS[i % len(KEYS)]
        queries = [1 + i % 7, 40 if i % 4 == 3 else int(generator.integers(0, 5)), int(generator.integers(0, 5))]
        options |= {"lengths": list(zip(queries, keys, strict=True))}
        options |= {"dtype": (torch.bfloat16, torch.float16)[i // 2 % 2], "group": (1, 2, 3, 4, 7, 8, 16)[i % 7]}
        run = {"multiprocessors": (1, 2, 3, 5)[i % 4], "wide": i % 3 > 0}
        rows = max(queries) * options["group"]
        run["few_rows"] = few_rows(rows)
        found.append((options, run | {"seed": i % 2, "wide": run["wide"] and not run["few_rows"]}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(64))
def test_generated(number: int) -> None:
    options, run = generated(64)[number]
    c = case(**options)
    assert close(c, attention(c, **run)) == []


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({"lengths": [(3, 129), (1, 260), (2, 0)], "kv_heads": 1}, {}),
        ({"lengths": [(12, 256), (1, 0)], "group": 7, "kv_heads": 1, "window": (100, 0), "page_size": 16}, {}),
        ({"lengths": [(1, 130)], "group": 11, "head_dim": 256, "kv_heads": 1, "softcap": 20.0}, {"few_rows": 16}),
        *(
            pytest.param(options, run, marks=pytest.mark.slow)
            for options, run in (
                ({"lengths": [(1, 130), (0, 64)], "group": 16, "strides": "HND", "dtype": torch.float16}, {"seed": 1}),
                ({"lengths": [(1, 257), (2, 600)], "group": 4, "window": (300, 0), "sinks": True}, {"few_rows": 8}),
                ({"lengths": [(3, 129), (1, 600), (2, 0)], "scales": "head", "sinks": True}, {"wide": True}),
                (
                    {"lengths": [(5, 65), (2, 3)], "head_dim": 128, "fp8_queries": True, "page_size": 128},
                    {"wide": True},
                ),
                ({"lengths": [(2, 140)], "head_dim": 256, "kv_heads": 1, "scales": "sequence", "softcap": 20.0}, {}),
                ({"lengths": [(35, 700)], "head_dim": 256, "kv_heads": 1, "group": 4}, {"wide": True}),
                ({"lengths": [(9, 3), (3, 64)], "causal": False, "window": (1, 1)}, {"multiprocessors": 5}),
            )
        ),
    ],
)
def test_some(options: dict[str, Any], run: dict[str, Any]) -> None:
    c = case(**options)
    assert close(c, attention(c, **run)) == []


def test_bits_are_the_references_where_sums_are_exact() -> None:
    """Powers of two for scales, and scores that are multiples of 1/8."""
    c = case([(4, 140), (1, 70)], group=3, scales="head", fp8_queries=True, softmax_scale=2.0**-4)
    generator = torch.Generator().manual_seed(1)
    small = torch.randint(-2, 3, c.q.shape, generator=generator).float().to(E4M3)
    keys = torch.randint(-2, 3, c.k_cache.shape, generator=generator).float().to(E4M3)
    values = torch.randint(-2, 3, c.v_cache.shape, generator=generator).float().to(E4M3)
    c = c.but(
        q=small, k_cache=keys, v_cache=values, k_scale=torch.full_like(c.k_scale, 0.5),
        v_scale=torch.full_like(c.v_scale, 2.0), q_scale=torch.full((2, 2), 0.25),
    )  # fmt: skip
    out, _ = attention(c)
    assert torch.equal(out.view(torch.int16), paged_attention(**c.arguments())[0].view(torch.int16))


def only(c: Case, b: int, last: int | None = None) -> Case:
    """One sequence of a batch, with its last queries alone if asked for."""
    begin, end = c.cu_seqlens_q[b : b + 2].tolist()
    begin = begin if last is None else end - last
    of = slice(b, b + 1)
    return c.but(
        q=c.q[begin:end].clone(),
        block_table=c.block_table[of].clone(),
        seqused_k=c.seqused_k[of].clone(),
        cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
    )


@pytest.fixture(scope="module")
def surrounded() -> tuple[Case, tuple[Tensor, Tensor]]:
    """A batch, and its result by two blocks."""
    c = case([(2, 120), (16, 630), (1, 70)], group=3, kv_heads=1, sinks=True)
    return c, attention(c, multiprocessors=1)


@pytest.mark.parametrize(
    ("multiprocessors", "wide"),  # by 2 multiprocessors: with other pages, below
    [(5, False), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(3, True, marks=pytest.mark.slow)],
)
def test_bits_do_not_depend_on_the_launch(
    surrounded: tuple[Case, tuple[Tensor, Tensor]], multiprocessors: int, wide: bool
) -> None:
    c, wanted = surrounded
    assert same(attention(c, multiprocessors=multiprocessors, wide=wide, seed=int(wide)), wanted)


@pytest.mark.parametrize(
    ("b", "last", "few_rows"),
    [
        (0, None, 8),
        (1, 5, 16),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((1, 1, 0), (1, 1, 8), (2, 1, 8))),
    ],
)
def test_bits_do_not_depend_on_the_batch(
    surrounded: tuple[Case, tuple[Tensor, Tensor]], b: int, last: int | None, few_rows: int
) -> None:
    """Decode gives what prefill gave, with rows as rows of the products or as their columns."""
    c, (out, lse) = surrounded
    end = int(c.cu_seqlens_q[b + 1])
    begin = int(c.cu_seqlens_q[b]) if last is None else end - last
    found = attention(only(c, b, last), few_rows=few_rows)
    assert same(found, (out[begin:end], lse[:, begin:end]))


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({"lengths": [(1, 17), (1, 0), (1, 140)], "group": 8, "kv_heads": 1, "head_dim": 128}, {"few_rows": 8}),
        *(
            pytest.param(options, run, marks=pytest.mark.slow)
            for options, run in (
                ({"lengths": [(5, 65), (2, 130)], "kv_heads": 1, "scales": "head"}, {"wide": True}),
                ({"lengths": [(3, 129), (2, 0), (1, 16)], "kv_heads": 1, "page_size": 32, "strides": "HND"}, {}),
                ({"lengths": [(1, 257), (2, 600)], "group": 4, "window": (300, 0)}, {"few_rows": 8}),
                (
                    {"lengths": [(1, 130)], "group": 11, "head_dim": 256, "kv_heads": 1, "softcap": 20.0},
                    {"few_rows": 16},
                ),
                ({"lengths": [(2, 140)], "head_dim": 256, "scales": "head", "page_size": 32}, {}),
                ({"lengths": [(5, 65), (2, 140)], "head_dim": 256, "kv_heads": 1, "scales": "head"}, {"wide": True}),
                ({"lengths": [(5, 65), (2, 300)], "head_dim": 128, "scales": "head"}, {"wide": True}),
                ({"lengths": [(5, 65)], "head_dim": 128, "fp8_queries": True, "page_size": 128}, {"wide": True}),
                ({"lengths": [(3, 129), (1, 600)], "scales": "head"}, {"wide": True}),
                ({"lengths": [(35, 700)], "head_dim": 256, "group": 4}, {"wide": True}),
                ({"lengths": [(9, 700)], "head_dim": 128, "group": 4}, {"seed": 1}),
            )
        ),
    ],
)
def test_bits_do_not_depend_on_the_layout_of_values(options: dict[str, Any], run: dict[str, Any]) -> None:
    rows = case(**options, layout="rows")
    found = attention(rows, **run)
    assert close(rows, found) == []
    assert same(found, attention(case(**options), **run))


@pytest.mark.slow  # pages of 16 tokens are among the quick cases of ``test_some``
def test_bits_do_not_depend_on_pages(surrounded: tuple[Case, tuple[Tensor, Tensor]]) -> None:
    other, wanted = surrounded
    c = case([(2, 120), (16, 630), (1, 70)], group=3, kv_heads=1, page_size=16, strides="HND")
    assert same(attention(c.but(sinks=other.sinks), multiprocessors=2), wanted)


@pytest.mark.slow
def test_parts_that_are_merged_in_several_turns() -> None:
    """A block merges 683 elements, 512 and 171, of five results, which the first turn takes in two parts."""
    c = case([(32, 2600)], group=4, kv_heads=1, scales="head", sinks=True)
    assert same(attention(c, multiprocessors=3, wide=True), attention(c, multiprocessors=1))


def test_a_plan_is_for_many_launches() -> None:
    """The last block of a row tile resets what counts its parts."""
    c = case([(2, 520)], kv_heads=1)
    first, second = attentions(c, 2, multiprocessors=1)
    assert close(c, first) == []
    assert same(first, second)


@pytest.mark.parametrize("few_rows", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_without_a_log_sum_exp_the_output_is_the_same(monkeypatch: pytest.MonkeyPatch, few_rows: int) -> None:
    c = case([(1, 520), (2, 70)], kv_heads=1, group=4, sinks=True)
    wanted, _ = attention(c, few_rows=few_rows)
    plan, (source, launch) = emulated.launches(c, few_rows=few_rows)
    params, k = launch.args
    assert isinstance(params, Struct)
    without = Struct(tuple(np.int64(0) if isinstance(x, str) and x == "lse" else x for x in params.fields))
    monkeypatch.setattr(emulated, "launches", lambda c, **_: [plan, (source, replace(launch, args=(without, k)))])
    assert torch.equal(attention(c, few_rows=few_rows)[0].view(torch.int16), wanted.view(torch.int16))


# ---- what must not reach other memory, or other rows ---------------------------------------------------------------


@pytest.mark.parametrize("entry", [pytest.param(-1, marks=pytest.mark.slow), 2**31 - 1])
def test_pages_that_are_not_there(entry: int) -> None:
    """A wrong result, from memory that is the cache's."""
    c = case([(2, 128), (1, 128)], kv_heads=1, page_size=16)  # whole tiles: see ``case``
    c.block_table[0, 3:] = entry
    out, _ = attention(c)
    assert torch.equal(out[2:].view(torch.int16), attention(only(c, 1))[0].view(torch.int16))


@pytest.mark.parametrize(
    ("lengths", "page_size"),
    [
        ([2**31 - 1, 2**31 - 64, -5], 128),
        *(
            pytest.param(lengths, 16, marks=pytest.mark.slow)  # part of a tile is unwritten: see ``case``
            for lengths in ([2**31 - 1, 2**31 - 64, -5], [600, 40, -5], [2**31 - 1, -(2**31), 2**31 - 64])
        ),
    ],
)
def test_lengths_beyond_the_table(lengths: list[int], page_size: int) -> None:
    c = case([(2, 30), (1, 40), (2, 50)], kv_heads=1, page_size=page_size)
    attention(c.but(seqused_k=torch.tensor(lengths, dtype=torch.int32)), multiprocessors=2)


@pytest.mark.parametrize(("said", "wide"), [(1, False), pytest.param(20, True, marks=pytest.mark.slow)])
def test_more_queries_than_were_said(monkeypatch: pytest.MonkeyPatch, said: int, wide: bool) -> None:
    """Rows are left out of the result, and the memory for partial results is not left."""
    c = case([(30, 520), (said, 70)], kv_heads=1, group=3)
    sizes = emulated.sizes_of(c)
    monkeypatch.setattr(emulated, "sizes_of", lambda c: replace(sizes, max_q_len=said))
    attention(c, wide=wide, multiprocessors=3)


def test_a_plan_for_longer_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for 1 and for 16 queries have the same size where both are one row tile."""
    c = case([(16, 520), (1, 70)], kv_heads=1, group=3)
    plan = emulated.launches(c)[0]
    sizes = emulated.sizes_of(c)
    monkeypatch.setattr(emulated, "sizes_of", lambda c: replace(sizes, max_q_len=1))
    kernel = emulated.launches(c)[1]
    monkeypatch.setattr(emulated, "launches", lambda c, **_: [plan, kernel])
    attention(c)


def poisoned(scales: str) -> Case:
    """Queries 0 to 3 at keys up to 66 to 69 of one sequence."""
    return case([(4, 70)], kv_heads=1, scales=scales)


@pytest.fixture(scope="module")
def clean_results() -> dict[str, tuple[Tensor, Tensor]]:
    return {scales: attention(poisoned(scales)) for scales in ("token", "head")}


@pytest.mark.parametrize("value", [math.nan, 0.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (math.inf, -1.0))])
@pytest.mark.parametrize("of", [pytest.param("k_scale", marks=pytest.mark.slow), "v_scale"])
def test_a_tokens_scale_reaches_the_rows_that_attend_to_it(
    of: str, value: float, clean_results: dict[str, tuple[Tensor, Tensor]]
) -> None:
    c = poisoned("token")
    key, page = 68, c.k_cache.shape[1]
    getattr(c, of)[c.block_table[0, key // page], 0, key % page] = value
    out, lse = attention(c)
    clean, clean_lse = clean_results["token"]
    assert same((out[:2], lse[:, :2]), (clean[:2], clean_lse[:, :2]))
    wanted, wanted_lse = paged_attention(**c.arguments())
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(lse.isnan(), wanted_lse.isnan())


def test_a_key_of_nan_reaches_the_rows_that_attend_to_it() -> None:
    c = poisoned("head")
    key, page = 68, c.k_cache.shape[1]
    c.k_cache.view(torch.uint8)[c.block_table[0, key // page], key % page, 0, 5] = NAN_CODE
    out, lse = attention(c)
    wanted, wanted_lse = paged_attention(**c.arguments())
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(lse.isnan(), wanted_lse.isnan())
    assert out[2:].isnan().all()
    assert not out[:2].isnan().any()


@pytest.mark.parametrize(
    ("layout", "few_rows"), [("grouped", 0), pytest.param("rows", 0, marks=pytest.mark.slow), ("rows", 8)]
)
def test_a_value_of_nan_reaches_its_row_tile(layout: str, few_rows: int) -> None:
    """As in FlashAttention: 0 times NaN is NaN. Other columns, other heads and the log-sum-exp are as they were."""
    c = case([(4, 70)], kv_heads=2, scales="head", layout=layout)
    clean, clean_lse = attention(c, few_rows=few_rows)
    key, page = 68, c.k_cache.shape[1]
    of_page = c.v_cache.view(torch.uint8)[c.block_table[0, key // page]]
    if layout == "rows":
        of_page[key % page, 1, 5] = NAN_CODE
    else:
        of_page[1, key % page // 16, 5, KEY_ORDER.index(key % 16)] = NAN_CODE
    out, lse = attention(c, few_rows=few_rows)
    assert out[:, 2:, 5].isnan().all()
    expected = clean.clone()
    expected[:, 2:, 5] = out[:, 2:, 5]
    assert same((out, lse), (expected, clean_lse))
    wanted, _ = paged_attention(**c.arguments())
    assert wanted[2:, 2:, 5].isnan().all()
    assert not wanted[:2].isnan().any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_is_its_rows_alone(
    value: float, clean_results: dict[str, tuple[Tensor, Tensor]]
) -> None:
    c = poisoned("head")
    clean = clean_results["head"][0]
    c.q[1, 1, 7] = value
    out, lse = attention(c)
    assert out[1, 1].isnan().all()
    assert lse[1, 1].isnan()
    out[1, 1] = clean[1, 1]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("softcap", [0.0, pytest.param(5.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [pytest.param(-0.01, marks=pytest.mark.slow), 0.0, math.nan])
def test_scales_of_keys_are_any_numbers(scales: str, softcap: float, value: float) -> None:
    c = case([(3, 70)], kv_heads=1, scales=scales, softcap=softcap)
    c.k_scale.fill_(value)
    out, lse = attention(c)
    if math.isnan(value):
        assert out.isnan().all()
        assert paged_attention(**c.arguments())[0].isnan().all()
    else:
        assert close(c, (out, lse)) == []


@pytest.mark.parametrize("value", [-0.01, 0.0])
def test_scales_of_queries_are_any_numbers(value: float) -> None:
    c = case([(3, 70)], kv_heads=1, scales="head", fp8_queries=True)
    c = c.but(q_scale=torch.full((1, 1), value))
    assert close(c, attention(c)) == []


def test_rows_without_keys() -> None:
    """Of seven queries on three keys four have none: 0, and the sink's logit or -inf."""
    for sinks in (False, True):
        c = case([(7, 3), (2, 0)], kv_heads=1, sinks=sinks)
        out, lse = attention(c)
        assert close(c, (out, lse)) == []
        assert (out[:4] == 0).all()
        assert (out[7:] == 0).all()
        wanted = torch.full((2, 4), -math.inf) if c.sinks is None else c.sinks.unsqueeze(1).expand(2, 4)
        torch.testing.assert_close(lse[:, :4], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["grouped", "rows"])
def test_works_without_keys_between_others(layout: str) -> None:
    """With one stage the factors of a work's first tile wait for the works before it, which have no tiles here."""
    lengths = [(1, 128), (1, 0), (2, 0), (1, 70)]
    c = case(lengths, kv_heads=1, head_dim=256, layout=layout)
    assert close(c, attention(c, wide=True)) == []


def test_sinks_of_infinity() -> None:
    c = case([(3, 1)], kv_heads=1, sinks=True)
    c = c.but(sinks=torch.tensor([-math.inf, 1000.0]))
    out, lse = attention(c)
    wanted, wanted_lse = paged_attention(**c.arguments())
    torch.testing.assert_close(lse, wanted_lse)
    assert torch.equal(out, wanted)
