"""vLLM's FlashAttention-3 as a package: its operator is called as its schema has it, and transformers would find it."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving.oracle import visible

fa3: Any = importlib.import_module("benchmarks.fa3_of_vllm")


class Library:
    """The operator by the names of hopper/flash_api.cpp's ``mha_fwd``, in float64, on pages and on rows."""

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, k_new: Any, v_new: Any, q_v: None, out: None, cu_seqlens_q: Any,
        cu_seqlens_k: Any, cu_seqlens_k_new: None, seqused_q: None, seqused_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any, page_table: Any, kv_batch_idx: None, leftpad_k: None, rotary_cos: None, rotary_sin: None,
        seqlens_rotary: None, q_descale: None, k_descale: None, v_descale: None, softmax_scale: float, is_causal: bool,
        window_left: int, window_right: int, softcap: float, is_rotary_interleaved: bool, scheduler_metadata: None,
        num_splits: int, pack_gqa: None, sm_margin: int, s_aux: Any, cp_world_size: int, cp_rank: int,
        cp_tot_seqused_k: None,
    ) -> list[Tensor]:  # fmt: skip
        assert (num_splits, sm_margin, cp_world_size, cp_rank) == (0, 0, 1, 0)
        result = torch.zeros_like(q)
        for b in range(page_table.shape[0] if page_table is not None else cu_seqlens_q.shape[0] - 1):
            if page_table is not None:
                n, size = int(seqused_k[b]), k.shape[1]
                for x, new in ((k, k_new), (v, v_new)):
                    x[page_table[b, n // size], n % size] = new[b, 0]
                keys, values = (x[page_table[b].long()].flatten(0, 1)[: n + 1] for x in (k, v))
                queries, into = q[b], result[b]
            else:
                (a, e), (c, d) = cu_seqlens_q[b : b + 2].tolist(), cu_seqlens_k[b : b + 2].tolist()
                keys, values, queries, into = k[c:d], v[c:d], q[a:e], result[a:e]
            right = 0 if is_causal else window_right
            into[:] = attention(queries, keys, values, softmax_scale, (window_left, right), softcap)
        return [result]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int], softcap: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    mask = visible(q.shape[0], k.shape[0], False, window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v.double()).to(q.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", Library(), raising=False)


def test_sequences_and_pages(library: None) -> None:
    q, k, v = (torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(s)) for s in range(3))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    options: dict[str, Any] = {"softmax_scale": 0.5, "causal": True, "window_size": (2, 2), "softcap": 3.0}
    out = fa3.flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, **options)
    parts = [attention(q[a:b], k[a:b], v[a:b], 0.5, (2, 0), 3.0) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(out, torch.cat(parts))
    k_cache, v_cache = (torch.zeros(4, 4, 2, 16) for _ in "kv")
    k_cache[2], k_cache[1, :3], v_cache[2], v_cache[1, :3] = k[:4], k[4:7], v[:4], v[4:7]
    table, used = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    of_step = (q[7:, None], k_cache, v_cache, k[7:, None], v[7:, None])
    out = fa3.flash_attn_with_kvcache(*of_step, used, table, **options)
    whole = [attention(q[7:8], k[4:8], v[4:8], 0.5, (2, 0), 3.0)]
    keys, values = (torch.cat([x[:4], x[8:]]) for x in (k, v))
    whole.append(attention(q[8:], keys, values, 0.5, (2, 0), 3.0))
    torch.testing.assert_close(out.squeeze(1), torch.cat(whole))
    batch = fa3.flash_attn_func(q[None, :4], k[None, :4], v[None, :4], causal=True)
    torch.testing.assert_close(batch[0], attention(q[:4], k[:4], v[:4], 16**-0.5, (-1, 0), 0.0))


def test_transformers_finds_the_package(monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(sys, "path", [*sys.path])
    fa3.install_package("/some/library.so")
    assert loaded == ["/some/library.so"]
    assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    try:
        module = importlib.import_module("flash_attn_interface")
        assert module.flash_attn_varlen_func is fa3.flash_attn_varlen_func
    finally:
        sys.modules.pop("flash_attn_interface", None)
    # what transformers would pass is what these functions take
    utils: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    process = utils._lazy_define_process_function(fa3.flash_attn_with_kvcache)
    inputs = process(
        query_length=1, key_length=90, is_causal=True, softmax_scale=0.1, sliding_window=48, block_table=1,
        cache_seqlens=2, max_seqlen_q=1, max_seqlen_k=90, dropout=0.0, softcap=None, s_aux=None,
    )  # fmt: skip
    assert inputs == {
        "causal": True, "softmax_scale": 0.1, "window_size": (47, 47), "page_table": 1, "cache_seqlens": 2
    }  # fmt: skip
    inspect.signature(fa3.flash_attn_with_kvcache).bind(*range(5), **inputs)
