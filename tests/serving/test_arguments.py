"""Arguments of the serving calls: strides of one element, wide windows, refusals that write nothing, rows of heads."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import greenfast
from greenfast import flash_attn

#: The functions as a caller without types has them: calls here are made of parts, and some are wrong on purpose.
flash_attn_varlen_func: Any = flash_attn.flash_attn_varlen_func
flash_attn_with_kvcache: Any = flash_attn.flash_attn_with_kvcache
append_kv: Any = greenfast.append_kv

E4M3, I32 = torch.float8_e4m3fn, torch.int32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def codes(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).to(E4M3)


def starts(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=I32)


def restrided(x: Tensor, step: int) -> Tensor:
    """The same elements, with another stride in each dimension of one element."""
    return x.as_strided(x.shape, [step if n == 1 else old for n, old in zip(x.shape, x.stride(), strict=True)])


@pytest.mark.parametrize("step", [0, 1, 7, 10**12])
def test_a_dimension_of_one_element_may_have_any_stride(step: int) -> None:
    q, cu = normal(20, 1, 64), starts(20)
    k, v = normal(20, 1, 64, seed=1), normal(20, 1, 64, seed=2)
    plain = flash_attn_varlen_func(q, k, v, cu, cu, 20, 20)
    assert torch.equal(flash_attn_varlen_func(*(restrided(x, step) for x in (q, k, v)), cu, cu, 20, 20), plain)
    pages, scale = codes(1, 32, 1, 64), torch.rand(1, 1, 32)
    table, used = torch.zeros(1, 1, dtype=I32), torch.tensor([30], dtype=I32)

    def paged(change: Any, values: Tensor) -> Any:
        return flash_attn_varlen_func(
            change(q), change(pages), change(values), cu, None, 20, None, seqused_k=used, block_table=change(table),
            k_descale=change(scale), v_descale=change(scale),
        )  # fmt: skip

    for values in (codes(1, 32, 1, 64), codes(1, 1, 2, 64, 16)):
        assert torch.equal(paged(lambda x: restrided(x, step), values), paged(lambda x: x, values))
    written = [codes(1, 32, 1, 64) for _ in range(4)]
    new = normal(3, 1, 64), normal(3, 1, 64, seed=1)
    scales = [torch.zeros(1, 1, 32) for _ in range(4)]
    slots = torch.tensor([0, 5, 31])
    append_kv(None, *new, *written[:2], slots, k_scale=scales[0], v_scale=scales[1])
    odd = [restrided(x, step or 64) for x in (*new, *written[2:], *scales[2:])]
    append_kv(None, *odd[:4], slots, k_scale=odd[4], v_scale=odd[5])
    for a, b in zip((*written[:2], *scales[:2]), (*written[2:], *scales[2:]), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("side", [2**31 - 1, 2**31, 2**62, 2**63 - 64, sys.maxsize])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_wider_than_the_keys_is_none(side: int, causal: bool) -> None:
    q, k, v = (normal(40, 2, 64, seed=n) for n in range(3))
    cu, cu_k = starts(10, 10, 40), starts(30, 33, 40)

    def call(window: tuple[int, int]) -> Any:
        return flash_attn_varlen_func(q, k, v, cu, cu_k, 30, 30, causal=causal, window_size=window)

    for window in ((side, side), (-1, side), (side, -1)):
        assert torch.equal(call(window), call((-1, -1)))
    for left in (0, 3):
        assert torch.equal(call((left, side)), call((left, -1)))


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_whole_numbers_of_numpy(kind: Any) -> None:
    """The negative of a np.uint8 is positive."""
    q, k = normal(200, 4, 64), normal(200, 2, 64)
    cu = starts(190, 200)
    numpy_longest, numpy_window = kind(190), (kind(150), kind(0))
    result = flash_attn_varlen_func(q, k, k, cu, cu, numpy_longest, numpy_longest, window_size=numpy_window)
    assert torch.equal(result, flash_attn_varlen_func(q, k, k, cu, cu, 190, 190, window_size=(150, 0)))
    cache = greenfast.PagedKVCache(kind(16), kind(16), kind(2), kind(64), layers=kind(1))
    assert cache.reserve("a", kind(200))
    assert cache.free_pages == 3
    assert torch.equal(cache.slot_mapping(["a"], [kind(100)], [kind(100)]), cache.slot_mapping(["a"], [100], [100]))
    assert cache.block_table(["a"], kind(14)).shape == (1, 14)
    plan = greenfast.ServingPlan(
        cu, torch.tensor([190, 10], dtype=I32), kind(190), heads=kind(4), kv_heads=kind(2), head_dim=kind(64)
    )
    assert type(plan.max_seqlen_q) is int


def test_numbers_in_tensors_are_read_for_an_explanation() -> None:
    q, cu = normal(20, 2, 64), starts(20)
    for scale, kernel in ((torch.tensor(0.2), "reference"), (torch.tensor(-0.2), "torch")):
        explanation = greenfast.explain_call(flash_attn_varlen_func, q, q, q, cu, cu, 20, 20, softmax_scale=scale)
        assert explanation.kernel == kernel


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_without_keys_has_no_weight_whatever_its_query(wrong: float) -> None:
    q, k = normal(1, 1, 40, 64), normal(1, 1, 8, 64)
    q[0, 0, 3, 0] = wrong
    options: Any = {"is_causal": True, "causal_alignment": "lower_right", "return_lse": True}
    for precision in ("fp8", "int8", "int8_fine"):
        saved = greenfast.quantize(q, k, k, precision=precision, log_sum_exp=True)
        for out, lse in (
            greenfast.sdpa(q, k, k, precision=precision, **options),
            greenfast.attention(saved, **options),
        ):
            assert (lse[0, 0, :32] == -math.inf).all()
            assert (out[0, 0, :32] == 0).all()
            assert lse[0, 0, 32:].isfinite().all()
    rows, keys = q[0].transpose(0, 1), k[0].transpose(0, 1)
    out, lse = flash_attn_varlen_func(
        rows, keys, keys, starts(40), starts(8), 40, 8, causal=True, return_softmax_lse=True
    )
    assert (lse[0, :32] == -math.inf).all()
    assert (out[:32] == 0).all()


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def longer(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x.float(), math.nan).to(x.dtype)], 1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    "layout", [heads_first, longer, lambda x: longer(heads_first(x))], ids=["HND", "slice", "both"]
)
@pytest.mark.parametrize("length", [16, 48, 256])
@pytest.mark.parametrize("batch_idx", [None, (2, 0)])
def test_runs_of_rows_per_sequence(layout: Any, length: int, batch_idx: tuple[int, ...] | None) -> None:
    q, new = normal(2, 2, 4, 64), normal(2, 2, 2, 64, seed=3)
    rows = 2 if batch_idx is None else 3
    plain = [codes(rows, length, 2, 64, seed=n) for n in (1, 2)]
    other = [layout(x.clone()) for x in plain]
    more = {} if batch_idx is None else {"cache_batch_idx": torch.tensor(batch_idx, dtype=I32)}
    results = [
        flash_attn_with_kvcache(
            q, *cache, new, new, cache_seqlens=torch.tensor([length - 2, 7], dtype=I32), causal=True, **more
        )
        for cache in (plain, other)
    ]
    assert torch.equal(*results)
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_messages_name_arguments_of_the_call() -> None:
    cu = starts(0, 1)
    q, k = normal(1, 21, 124), normal(1, 7, 124)
    with pytest.raises(NotImplementedError, match=r"^k: head_dim 124"):
        flash_attn_varlen_func(q, k, k, cu, cu, 1, 1)
    with pytest.raises(ValueError, match=r"^v: .*, k .*they must agree"):
        flash_attn_varlen_func(normal(1, 2, 64), normal(1, 2, 64), normal(2, 2, 64), cu, cu, 1, 1)
    with pytest.raises(ValueError, match=r"^q: it has 3 heads, k 2"):
        flash_attn_varlen_func(normal(1, 3, 64), *[normal(1, 2, 64)] * 2, cu, cu, 1, 1)
    paged = {"seqused_k": torch.tensor([0, 1], dtype=I32), "block_table": torch.zeros(2, 1, dtype=I32)}
    for pages in (normal(2, 16, 2, 64), codes(2, 17, 2, 64), codes(2, 16, 2, 72)):
        with pytest.raises((TypeError, NotImplementedError), match=r"^k: "):
            flash_attn_varlen_func(normal(1, 2, 64), pages, pages, cu, None, 1, None, **paged)
    cache = [codes(2, 32, 4, 64) for _ in range(2)]
    new = normal(2, 3, 4, 64)
    with pytest.raises(ValueError, match=r"cache_seqlens: sequence 0 has 32 keys .* 3 new ones; .* room for 32$"):
        flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=32, causal=True)


#: Values that are wrong for some arguments of any kind. A call that accepts one may write; one that raises may not.
WRONG: tuple[Any, ...] = (
    None, "1", 1, -1, 2**40, 1.5, math.nan, -math.inf, (1, 2), True, torch.tensor(0.5), torch.ones(2, 4), torch.ones(3),
    torch.tensor([True, False]), torch.ones(2, 4).to_sparse(), torch.ones(2, 3, 4, 64, device="meta"),
    torch.zeros(2, dtype=I32), torch.full((2,), 99, dtype=I32), torch.zeros(2, dtype=torch.int64),
    torch.ones(1, 2, 64).bfloat16().expand(6, 2, 64), torch.zeros(0), torch.ones(2, 4, dtype=torch.float64),
)  # fmt: skip


def changed(x: Any) -> list[Any]:
    """Wrong forms of an argument: other dtypes, shapes, devices and strides."""
    if not isinstance(x, Tensor):
        return []
    wide = x.float() if x.is_floating_point() else x
    result = [wide.double(), x.unsqueeze(0), x.to("meta"), wide.half()]
    if x.dim():
        result += [x[..., :0], x[:1].expand(x.shape), x[:-1], torch.cat([wide, wide], -1).to(x.dtype)[..., ::2]]
    if x.dtype == torch.bfloat16:
        result.append(x.clone().requires_grad_())
    return result


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Calls that write, with all of their arguments."""
    q, k, v = (normal(2, 3, 4, 64, seed=n) for n in range(3))
    pages, scales = [codes(5, 16, 4, 64) for _ in range(2)], [torch.ones(5, 4, 16) for _ in range(2)]
    table, cos = torch.tensor([[0, 1], [2, 3]], dtype=I32), normal(40, 16)
    options: dict[str, Any] = {
        "rotary_cos": None, "rotary_sin": None, "rotary_seqlens": None, "q_descale": None, "k_descale": None,
        "v_descale": None, "softmax_scale": 0.1, "causal": True, "window_size": (8, 0), "softcap": 0.0, "num_splits": 0,
        "rotary_interleaved": True, "return_softmax_lse": True, "s_aux": None, "out": None, "scheduler_metadata": None,
        "cu_seqlens_q": None, "cu_seqlens_k_new": None, "max_seqlen_q": None, "cache_batch_idx": None,
    }  # fmt: skip
    lengths = torch.tensor([4, 20], dtype=I32)
    rows = [codes(2, 32, 4, 64) for _ in range(2)]
    step: dict[str, Any] = options | {"q": q, "k": k, "v": v, "cache_seqlens": lengths, "page_table": table}
    flat = (x.flatten(0, 1) for x in (q, k, v))
    append = dict(zip(("q", "k", "v"), flat, strict=True)) | {
        "k_cache": pages[0], "v_cache": pages[1], "slot_mapping": torch.tensor([0, 1, 20, 21, 22, -1]),
        "k_scale": scales[0], "v_scale": scales[1], "q_weight": normal(64), "k_weight": normal(64), "eps": 1e-6,
        "cos": cos, "sin": cos, "positions": torch.arange(6), "interleaved": False,
    }  # fmt: skip
    reads: dict[str, Any] = {
        "q": append["q"], "cu_seqlens_q": starts(3, 6), "max_seqlen_q": 3, "max_seqlen_k": 32, "causal": True,
        "window_size": (8, 0), "softcap": 0.0, "softmax_scale": 0.1, "s_aux": torch.zeros(4),
        "return_softmax_lse": True, "out": torch.zeros(6, 4, 64).bfloat16(),
    }  # fmt: skip
    return {
        "keys": (flash_attn_varlen_func, reads | {"k": append["k"], "v": append["v"], "cu_seqlens_k": starts(2, 6)}),
        "paged": (flash_attn_varlen_func, reads | {
            "k": pages[0], "v": pages[1], "k_descale": scales[0], "v_descale": scales[1], "block_table": table,
            "seqused_k": torch.tensor([20, 32], dtype=I32),
        }),
        "pages": (flash_attn_with_kvcache, step | {
            "k_cache": pages[0], "v_cache": pages[1], "k_descale": scales[0], "v_descale": scales[1],
            "rotary_cos": cos, "rotary_sin": cos, "rotary_seqlens": lengths, "out": torch.zeros(2, 3, 4, 64).bfloat16(),
            "s_aux": torch.zeros(4),
        }),
        "rows": (flash_attn_with_kvcache, step | {
            "k_cache": rows[0], "v_cache": rows[1], "page_table": None, "k_descale": torch.tensor(0.1),
            "v_descale": torch.ones(4), "q": q.to(E4M3), "q_descale": torch.ones(2, 4),
        }),
        "append": (greenfast.append_kv, append),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_a_call_that_raises_writes_nothing(name: str) -> None:
    function, _ = calls()[name]
    names = calls()[name][1]
    refused = 0
    for argument in names:
        for n in range(len(WRONG) + len(changed(names[argument]))):
            inputs = calls()[name][1]
            wrong = WRONG[n] if n < len(WRONG) else changed(inputs[argument])[n - len(WRONG)]
            inputs[argument] = wrong
            tensors = [
                x for x in inputs.values() if isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_sparse
            ]
            before = [x.detach().contiguous().clone() for x in tensors]
            error = None
            try:
                function(**inputs)
            except (TypeError, ValueError, NotImplementedError) as e:
                error = e
            if error is None:
                continue
            refused += 1
            assert len(str(error)) < 600
            for x, saved in zip(tensors, before, strict=True):
                now, old = (t.view(-1).view(torch.uint8) for t in (x.detach().contiguous(), saved))
                assert torch.equal(now, old), (argument, wrong, error)
    assert refused > 10 * len(names)


@pytest.mark.parametrize(
    "wrong", [None, "x", torch.ones(9), normal(2, 16, 2, 64).to_sparse()], ids=["None", "text", "1-D", "sparse"]
)
def test_pages_that_are_none(wrong: Any) -> None:
    function, inputs = calls()["paged"]
    for name in ("k", "v"):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
            function(**inputs | {name: wrong})
