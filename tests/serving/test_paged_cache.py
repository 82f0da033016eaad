"""PagedKVCache: its memory in every layout, and pages of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import greenfast


@pytest.mark.parametrize("values", ["grouped", "rows"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_tensors(page_size: int, layout: Any, values: Any) -> None:
    cache = greenfast.PagedKVCache(5, page_size, 2, 64, layers=3, layout=layout, values=values)
    k, v, k_scale, v_scale = cache.layer(2)
    assert k.dtype == v.dtype == torch.float8_e4m3fn
    assert k.shape == (5, page_size, 2, 64)
    assert k.stride()[1:3] == ((128, 64) if layout == "NHD" else (64, page_size * 64))
    assert v.shape == (k.shape if values == "rows" else (5, 2, page_size // 16, 64, 16))
    assert k_scale.shape == v_scale.shape == (5, 2, page_size)
    assert cache.nbytes == 3 * 2 * 5 * page_size * 2 * (64 + 4)
    assert cache.device == torch.device("cpu")


def test_given_scales() -> None:
    inputs = torch.tensor([0.5, 2.0])
    layer = greenfast.PagedKVCache(2, 16, 2, 64, scales="head", k_scale=inputs).layer()
    assert layer.k_scale is inputs
    assert layer.v_scale.shape == ()
    assert float(layer.v_scale) == 1


def test_pages_of_sequences() -> None:
    cache = greenfast.PagedKVCache(6, 16, 2, 64)
    assert cache.reserve("a", 17)
    assert cache.reserve("b", 1)
    first = cache.pages_of("a")
    assert cache.reserve("a", 33)
    assert cache.pages_of("a")[:2] == first
    assert cache.reserve("a", 5)
    assert len(cache.pages_of("a")) == 3
    assert cache.free_pages == 2
    assert not cache.reserve("b", 70)
    assert len(cache.pages_of("b")) == 1
    assert not cache.reserve("c", 33)
    assert cache.pages_of("c") == ()
    table = cache.block_table(["b", "a"])
    assert table.dtype == torch.int32
    assert table.tolist() == [[*cache.pages_of("b"), -1, -1], list(cache.pages_of("a"))]
    assert cache.block_table(["b"], 4).shape == (1, 4)
    assert cache.block_table([]).shape == (0, 1)
    pages = {*cache.pages_of("a"), *cache.pages_of("b")}
    assert len(pages) == 4
    cache.free("a")
    assert cache.free_pages == 5
    assert cache.reserve("c", 80)
    assert not {*cache.pages_of("c")} & {*cache.pages_of("b")}


def test_slots() -> None:
    cache = greenfast.PagedKVCache(6, 16, 2, 64)
    cache.reserve("a", 20)
    cache.reserve("b", 3)
    (a0, a1), (b0,) = cache.pages_of("a"), cache.pages_of("b")
    result = cache.slot_mapping(["b", "a"], [0, 15], [2, 3])
    assert result.dtype == torch.int64
    assert result.tolist() == [b0 * 16, b0 * 16 + 1, a0 * 16 + 15, a1 * 16, a1 * 16 + 1]
    assert cache.slot_mapping(["a"], [3], [17]).tolist() == [
        *range(a0 * 16 + 3, a0 * 16 + 16),
        *range(a1 * 16, a1 * 16 + 4),
    ]
    assert cache.slot_mapping([], [], []).dtype == torch.int64
    assert cache.slot_mapping(["a", "b"], [32, 2], [0, 0]).tolist() == []
    with pytest.raises(ValueError, match="starts, counts: 3 tokens from 14 of 'b'; its pages hold 16"):
        cache.slot_mapping(["b"], [14], [3])
    for unknown in (
        lambda: cache.slot_mapping(["c"], [0], [1]),
        lambda: cache.free("c"),
        lambda: cache.block_table(["c"]),
    ):
        with pytest.raises(KeyError, match=r"sequence: 'c' has no pages; reserve\(\) makes it known"):
            unknown()
    with pytest.raises(IndexError, match="index: 7; the cache has 1 layers, from 0"):
        cache.layer(7)
    with pytest.raises(ValueError, match="max_pages: 1; a sequence has 2"):
        cache.block_table(["a"], 1)
    with pytest.raises(TypeError, match=r"max_pages: 2\.5; a whole number"):
        cache.block_table(["a"], 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="starts, counts: 2 and 1 for 1 sequences"):
        cache.slot_mapping(["a"], [0, 1], [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 48}, "page_size: 48; allowed are 16, 32, 64, 128"),
        ({"head_dim": 80}, "head_dim: 80; allowed are 64, 128, 256"),
        ({"pages": -1}, "pages: -1; 0 or more"),
        ({"layout": "DHN"}, "layout: 'DHN'"),
        ({"values": "columns"}, "values: 'columns'"),
        ({"scales": "tensor"}, "scales: 'tensor'"),
        ({"k_scale": torch.ones(2)}, "k_scale, v_scale: given with scales='token'"),
        ({"page_size": 16.0}, "page_size: 16.0; a whole number"),
        ({"scales": "head", "v_scale": 1.0}, r"v_scale .*: a torch.Tensor is needed, got float"),
        ({"scales": "head", "k_scale": torch.ones(3)}, r"k_scale: torch.float32 \(3,\) on cpu; float32 \(\) or \(2,\)"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        greenfast.PagedKVCache(**({"pages": 4, "page_size": 16, "kv_heads": 2, "head_dim": 64} | changes))
