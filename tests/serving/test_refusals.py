"""Lengths, tables, plans and gradients that fit no call: refused by name, and before the cache is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import greenfast
from greenfast.kernels.serving import attention
from greenfast.kernels.serving.config import ServingConfig
from greenfast.serving.cuda import _get_planner, build_attention_steps, get_attention_plan, get_plan_size

varlen: Any = greenfast.flash_attn_varlen_func
with_kvcache: Any = greenfast.flash_attn_with_kvcache


def int32(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def keys() -> dict[str, Any]:
    """Two sequences, of 4 and 6 queries and of 5 and 7 keys."""
    return {
        "q": normal(10, 4, 64), "k": normal(12, 2, 64), "v": normal(12, 2, 64), "cu_seqlens_q": int32(0, 4, 10),
        "cu_seqlens_k": int32(0, 5, 12), "max_seqlen_q": 6, "max_seqlen_k": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens_k": int32(0, 5, 13)}, ValueError, "cu_seqlens_k: .* to at most the 12 tokens"),
        ({"cu_seqlens_k": int32(0, 9, 4)}, ValueError, "cu_seqlens_k: .* never falling"),
        ({"cu_seqlens_k": int32(1, 5, 12)}, ValueError, "cu_seqlens_k: .* from 0"),
        ({"cu_seqlens_k": int32(0, 5, 12).long()}, TypeError, "cu_seqlens_k: its dtype is torch.int64"),
        ({"cu_seqlens_q": int32(), "cu_seqlens_k": int32()}, ValueError, r"cu_seqlens_q: .*\(0,\); int32 \(batch"),
        ({"cu_seqlens_q": [0, 4, 10]}, ValueError, "cu_seqlens_q: list"),
        ({"max_seqlen_k": 6}, ValueError, "max_seqlen_k: 6; a sequence has 7 keys"),
        ({"max_seqlen_q": 5}, ValueError, "max_seqlen_q: 5; a sequence has 6 queries"),
        ({"cu_seqlens_q": int32(0, 4, 11)}, ValueError, "cu_seqlens_q: .* to at most the 10 tokens of q"),
        ({"cu_seqlens_q": int32(0, 4, 10).long()}, TypeError, "cu_seqlens_q: its dtype is torch.int64"),
        ({"seqused_k": int32(1, 2).long()}, TypeError, "seqused_k .*: its dtype is torch.int64"),
        ({"seqused_k": int32(1, 2, 3)}, ValueError, "cu_seqlens_q: its shape|seqused_k"),
        ({"s_aux": torch.zeros(3)}, ValueError, r"sinks \(s_aux\): its shape is \(3,\)"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale: -1.0"),
        ({"softcap": -1.0}, ValueError, "softcap: -1.0"),
        ({"v": normal(12, 2, 64).half()}, TypeError, "v: its dtype is torch.float16"),
        ({"v": normal(12, 2, 32)}, ValueError, "v: .*, k .*; they must agree"),
        ({"q": normal(10, 4, 32)}, ValueError, "q: its head_dim is 32, k's 64"),
        ({"q_descale": torch.ones(())}, ValueError, r"q_scale \(q_descale\): given for q of torch.bfloat16"),
        ({"out": normal(10, 4, 64).half()}, TypeError, "out: its dtype is torch.float16"),
        ({"seqused_k": int32(6, 2)}, ValueError, "seqused_k: 6 of sequence 0; it has 5 keys"),
        ({"seqused_k": int32(-1, 2)}, ValueError, "seqused_k: -1 of sequence 0"),
        ({"out": normal(1, 4, 64).expand(10, 4, 64)}, ValueError, "out: .* share memory"),
        ({"out": [1]}, TypeError, "out: a torch.Tensor is needed, got list"),
        ({"max_seqlen_q": 2**31}, ValueError, "max_seqlen_q: 2147483648; at most 2147483647"),
        ({"max_seqlen_k": 2**70}, ValueError, "max_seqlen_k: .*; at most 2147483647"),
        ({"window_size": (2**63, 0)}, ValueError, r"window_size: .* below 2\*\*63"),
        ({"softmax_scale": 1e39}, ValueError, "softmax_scale: 1e.39; a finite number of float32"),
        ({"softcap": 1e39}, ValueError, "softcap: 1e.39; 0, or a number from"),
        ({"softcap": float("nan")}, ValueError, "softcap: nan; 0, or a number"),
        ({"q": normal(10, 4, 64).to_sparse()}, TypeError, "q: it is nested or sparse"),
        ({"cu_seqlens_k": int32(0, 5, 12).to("meta")}, ValueError, "cu_seqlens_k: it is on meta, q on cpu"),
        (
            {"window_size": normal(4, 64)},
            TypeError,
            r"window_size: a tensor of torch.bfloat16 with 2 dimensions; \(left, right\)",
        ),
        ({"return_attn_probs": normal(4)}, TypeError, "return_attn_probs: a tensor of .*; True or False"),
        *(
            ({name: int32(1, 2)}, NotImplementedError, f"{name}: a Tensor; the kernels have none")
            for name in ("attention_chunk", "dropout_p", "cp_world_size", "cp_rank", "qv")
        ),
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: NoneType; .*without block_table it is needed"),
        ({"max_seqlen_k": None}, TypeError, "max_seqlen_k: None; a whole number"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q: None; a whole number"),
        ({"causal": 1}, TypeError, "causal: 1; True or False"),
        ({"window_size": 5}, TypeError, "window_size: 5; "),
        ({"window_size": (1, -2)}, ValueError, r"window_size: \(1, -2\); numbers of at least -1"),
        ({"num_splits": -1}, ValueError, "num_splits: -1"),
        ({"k_descale": torch.ones(())}, ValueError, "k_descale, v_descale: given for k of torch.bfloat16"),
        ({"block_table": int32(1, 1)[:, None]}, ValueError, "seqused_k: None; with block_table"),
        ({"block_table": int32(1, 1)[:, None], "page_table": int32(1, 1)[:, None]}, ValueError, "page_table: given"),
        ({"q": normal(2, 5, 4, 64)}, ValueError, r"q: its shape is \(2, 5, 4, 64\); \(total_q, heads, head_dim\)"),
        ({"q": None}, TypeError, "q: a torch.Tensor is needed, got NoneType"),
        ({"k": normal(12, 2, 64).float()}, TypeError, "k: its dtype is torch.float32"),
        ({"k": normal(12, 2, 64).to_sparse()}, TypeError, "k: it is nested or sparse"),
        (
            {"v": torch.nested.nested_tensor([normal(2, 64)] * 12, layout=torch.jagged)},
            TypeError,
            "v: it is nested or sparse",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("max_seqlen_q", [6, 40], ids=["serving", "dense"])
def test_keys_that_are_not_there(
    changes: dict[str, Any], error: type[Exception], message: str, max_seqlen_q: int
) -> None:
    inputs = keys() | {"max_seqlen_q": max_seqlen_q}
    varlen(**inputs)
    with pytest.raises(error, match=message):
        varlen(**inputs | changes)


def step() -> tuple[dict[str, Any], list[Tensor]]:
    """Return three new tokens for each of two sequences, and a cache filled with NaN."""
    tensors = list(greenfast.PagedKVCache(8, 16, 2, 64).layer())
    for x in tensors:
        x.fill_(torch.nan) if x.dtype == torch.float32 else x.view(torch.uint8).fill_(0x7F)
    k_cache, v_cache, k_scale, v_scale = tensors
    inputs = {
        "q": normal(2, 3, 4, 64), "k_cache": k_cache, "v_cache": v_cache, "k": normal(2, 3, 2, 64),
        "v": normal(2, 3, 2, 64), "cache_seqlens": int32(0, 5), "page_table": int32(*range(8)).view(2, 4),
        "k_descale": k_scale, "v_descale": v_scale, "causal": True,
    }  # fmt: skip
    return inputs, tensors


def plan(**changes: Any) -> greenfast.ServingPlan:
    sizes: Any = {"heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True} | changes
    return greenfast.ServingPlan(int32(0, 3, 6), int32(99, 99), 3, **sizes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cache_seqlens": 62}, ValueError, "seqused_k .*: 65 of sequence 0"),
        ({"cache_seqlens": int32(-2, 3)}, ValueError, "seqused_k .*: -2 of sequence 0"),
        ({"cache_seqlens": int32(0, 5).long()}, TypeError, "seqused_k .*torch.int64"),
        ({"cache_seqlens": None}, ValueError, "seqused_k .*: 67"),
        ({"cu_seqlens_k_new": int32(0, 3, 6).to("meta"), "k": normal(6, 2, 64), "v": normal(6, 2, 64)}, ValueError,
         "cu_seqlens_k_new: .*is needed, on cpu"),
        ({"attention_chunk": int32(1, 2)}, NotImplementedError, "attention_chunk: a Tensor"),
        ({"cache_seqlens": 2**40}, ValueError, "cache_seqlens: .*; at most 2147483647"),
        ({"cache_seqlens": int32(5)}, ValueError, r"cache_seqlens: .*\(1,\); int32 \(batch,\) is needed, batch 2"),
        ({"k": normal(2, 3, 2, 64).to_sparse()}, TypeError, "k: it is nested or sparse"),
        ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved: 1; True or False"),
        ({"page_table": int32(*range(6, 14)).view(2, 4)}, ValueError, "block_table"),
        ({"page_table": int32(*range(-1, 7)).view(2, 4)}, ValueError, "block_table"),
        ({"out": normal(2, 3, 4, 64).half()}, TypeError, "out: its dtype"),
        ({"out": normal(1, 3, 4, 64)}, ValueError, "out: its shape"),
        ({"out": normal(2, 3, 4, 64).to_sparse()}, TypeError, "^out: it is nested or sparse"),
        ({"scheduler_metadata": plan(heads=8)}, ValueError, "made for heads 8"),
        ({"scheduler_metadata": plan()}, ValueError, "made for other lengths"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"q": normal(2, 3, 4, 0)}, ValueError, "q: its head_dim is 0"),
        ({"s_aux": torch.ones(3)}, ValueError, r"sinks \(s_aux\)"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale: -1.0"),
        ({"v": normal(2, 1, 2, 64)}, ValueError, "v: its shape"),
        ({"v": None}, ValueError, "k, v: None; both are given"),
        ({"k": None, "v": None, "rotary_cos": torch.ones(3, 8)}, ValueError, "k, v: None; both are given, or neither"),
        ({"rotary_cos": torch.ones(100, 16)}, ValueError, r"sin \(rotary_sin\): None"),
        ({"rotary_seqlens": int32(1, 1, 1)}, ValueError, r"rotary_seqlens: .*int32 \(2,\) is needed"),
        ({"cu_seqlens_k_new": torch.ones(3)}, ValueError, "k: .*total_new"),
        ({"page_table": int32(*range(4)).view(1, 4)}, ValueError, "page_table"),
        ({"page_table": int32().view(2, 0)}, ValueError, "page_table: .*new keys need pages"),
        ({"page_table": None}, ValueError, "v_cache: .*without page_table it has the shape of k_cache"),
        ({"cache_leftpad": torch.ones(2)}, NotImplementedError, "cache_leftpad: a Tensor"),
        ({"cache_batch_idx": int32(1, 1)}, ValueError, "cache_batch_idx: given with page_table"),
        ({"cache_seqlens": torch.ones(2)}, TypeError, r"seqused_k \(cache_seqlens\): its dtype is torch.float32"),
        ({"cache_seqlens": 5.0}, TypeError, "cache_seqlens: 5.0; a whole number"),
        ({"cu_seqlens_q": int32(0, 3, 6)}, ValueError, r"q: its shape is .*\(total_q, heads, head_dim\)"),
        ({"k_descale": torch.ones(3, 2), "v_descale": torch.ones(3, 2)}, ValueError, "k_descale"),
        ({"out": normal(3, 2, 4, 128).transpose(0, 1)}, ValueError, "out: its "),
        (
            {"q": normal(6, 4, 64), "k": normal(6, 2, 64), "v": normal(6, 2, 64), "cu_seqlens_q": int32(0, 3, 6),
             "max_seqlen_q": 3, "cu_seqlens_k_new": int32(0, 6, 3)}, ValueError, "cu_seqlens_k_new: .* never falling",
        ),
        (
            {"q": normal(6, 4, 64), "k": normal(6, 2, 64), "v": normal(6, 2, 64), "cu_seqlens_q": int32(0, 3, 6),
             "max_seqlen_q": 3, "cu_seqlens_k_new": int32(0, 3, 9)}, ValueError, "cu_seqlens_k_new: .* the 6 tokens",
        ),
        (
            {"q": normal(6, 4, 64), "k": normal(6, 2, 64), "v": normal(6, 2, 64), "cu_seqlens_q": int32(0, 4, 3),
             "max_seqlen_q": 4, "cu_seqlens_k_new": int32(0, 3, 6)}, ValueError, "cu_seqlens_q: .* never falling",
        ),
        ({"out": normal(2, 3, 4, 64), "k": normal(2, 3, 2, 64).requires_grad_()}, NotImplementedError, "out: given"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_nothing_is_written(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs, tensors = step()
    with pytest.raises(error, match=message):
        with_kvcache(**inputs | changes)
    k_cache, v_cache, k_scale, v_scale = tensors
    assert all((x.view(torch.uint8) == 0x7F).all() for x in (k_cache, v_cache))
    assert k_scale.isnan().all()
    assert v_scale.isnan().all()
    with_kvcache(**inputs)
    assert not k_scale[0, :, :3].isnan().any()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_of_any_input_is_refused(name: str) -> None:
    """Also where Q has none, as with keys that a prefix adds to frozen queries."""
    for call, inputs in ((varlen, keys()), (with_kvcache, step()[0] | {"cache_seqlens": 0})):
        wanted = call(**inputs)
        inputs[name] = inputs[name].clone().requires_grad_()
        result = call(**inputs)
        assert result.requires_grad
        assert torch.equal(result, wanted)
        with pytest.raises(NotImplementedError, match="no gradient flows"):
            result.float().sum().backward()
        with pytest.raises(NotImplementedError, match="out: given, while"):
            call(**inputs, out=torch.empty_like(wanted))
        with torch.no_grad():
            out = torch.empty_like(wanted)
            assert torch.equal(call(**inputs, out=out), wanted)


#: Inputs of ``append_kv`` that may have a gradient.
APPENDED = ["q", "k", "v", "q_weight", "k_weight", "cos", "sin", "k_scale", "v_scale"]


@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("name", APPENDED)
def test_a_gradient_of_what_is_appended_is_refused(name: str, scales: Any) -> None:
    """With Q the refusal comes from the output; without Q it comes at once, before the cache is written."""

    def given(**more: Any) -> tuple[Any, ...]:
        cache = greenfast.PagedKVCache(4, 16, 2, 64, scales=scales).layer()
        cache.k_cache.view(torch.uint8).fill_(0x7F)
        tensors = {
            "q": normal(3, 4, 64), "k": normal(3, 2, 64), "v": normal(3, 2, 64), **cache._asdict(),
            "slot_mapping": torch.arange(3), "q_weight": torch.ones(64), "k_weight": torch.ones(64),
            "cos": torch.ones(9, 16), "sin": torch.zeros(9, 16), "positions": torch.arange(3),
        }  # fmt: skip
        return tensors | more, tensors["k_cache"]

    def written(k_cache: Tensor) -> bool:
        return bool((k_cache.view(torch.uint8)[0, :3] != 0x7F).any())

    tensors, _ = given()
    tensors[name].requires_grad_()
    result = greenfast.append_kv(**tensors)
    assert result is not None
    with pytest.raises(NotImplementedError, match=r"append_kv: no gradient flows"):
        result.float().sum().backward()  # type: ignore[no-untyped-call]
    if name in ("q", "q_weight"):
        return
    tensors, k_cache = given(q=None, q_weight=None)
    tensors[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: a gradient is required, but none is computed"):
        greenfast.append_kv(**tensors)
    assert not written(k_cache)
    for without in (torch.no_grad(), torch.inference_mode()):
        tensors, k_cache = given(q=None, q_weight=None)
        tensors[name].requires_grad_()
        with without:
            greenfast.append_kv(**tensors)
        assert written(k_cache)


@pytest.mark.parametrize("name", ["out", "s_aux", "k_descale", "v_descale", "rotary_cos", "k"])
def test_out_is_refused_where_it_would_drop_a_gradient(name: str) -> None:
    inputs, (k_cache, *_) = step()
    inputs |= {"cache_seqlens": 0, "out": normal(2, 3, 4, 64), "s_aux": torch.ones(4)}
    inputs |= {"rotary_cos": torch.ones(9, 16), "rotary_sin": torch.zeros(9, 16)}
    inputs[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="out: given, while it or an input requires a gradient"):
        with_kvcache(**inputs)
    assert (k_cache.view(torch.uint8) == 0x7F).all()
    with torch.no_grad():
        assert with_kvcache(**inputs) is inputs["out"]


@pytest.mark.parametrize("name", ["out", "s_aux", "q_descale", "k_descale"])
def test_out_of_a_call_that_only_reads(name: str) -> None:
    inputs, _ = step()
    inputs = {x: inputs[x] for x in ("k_cache", "v_cache", "page_table", "k_descale", "v_descale")}
    inputs |= {"q": normal(2, 3, 4, 64).to(torch.float8_e4m3fn), "q_descale": torch.ones(2, 2), "cache_seqlens": 5}
    inputs |= {"out": normal(2, 3, 4, 64), "s_aux": torch.ones(4)}
    inputs[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="out: given, while it or an input requires a gradient"):
        with_kvcache(**inputs)
    with torch.no_grad():
        with_kvcache(**inputs)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"heads": 3}, ValueError, "heads: 3, kv_heads 2"),
        ({"heads": 64}, ValueError, "heads: 64"),
        ({"heads": 0, "kv_heads": 0}, ValueError, "heads: 0"),
        ({"head_dim": 96}, NotImplementedError, "head_dim: 96; allowed: 64, 128, 256"),
    ],
)
def test_plans_that_no_call_has(changes: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(**changes)


def test_explain_call_wants_the_function() -> None:
    wrong: Any = normal(1, 1, 64)
    with pytest.raises(TypeError, match="function: a Tensor; the function"):
        greenfast.explain_call(wrong, normal(1, 1, 64))


def test_tokens_of_no_sequence_are_zeros() -> None:
    none = {"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)}
    assert not varlen(**keys() | none).any()


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_plan_that_no_kernel_could_count() -> None:
    """Lengths are int32, and so is every number of a plan, on a GPU: their product need not be."""
    cache, scale = greenfast.PagedKVCache(2, 16, 2, 64, device="meta").layer(), meta(dtype=torch.float32)
    lengths = (meta(65), meta(64), scale, scale, None, None, None)
    with pytest.raises(ValueError, match=r"max_seqlen_q: 2147483647, of 64 sequences; .* give the longest"):
        build_attention_steps(
            meta(70, 32, 64, dtype=torch.bfloat16), *cache[:2], meta(64, 2), *lengths, 2**31 - 1, (True, -1, -1), 0.0,
            1.0, torch.bfloat16,
        )  # fmt: skip


def test_a_plan_of_another_batch_whose_row_tiles_are_others() -> None:
    """69 sequences have wide row tiles, one has narrow tiles: the size of a plan shows which."""
    (_, of_many), (_, of_one) = (_get_planner(-1, (batch, 48, 32, 8, 128, None), True, -1, -1) for batch in (69, 1))
    cache, scale = greenfast.PagedKVCache(2, 16, 8, 128, device="meta").layer(), meta(dtype=torch.float32)
    of_batch = (meta(1, 2), meta(2), meta(1), scale, scale, None, None)

    def call(size: int) -> None:
        args: Any = (*cache[:2], *of_batch, meta(size), 48, True, -1, -1, 0.0, 1.0, torch.bfloat16)
        get_attention_plan(meta(48, 32, 128, dtype=torch.bfloat16), *args)

    call(of_one)
    with pytest.raises(ValueError, match="made for another batch"):
        call(of_many)


def test_the_size_of_a_plan_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    shapes = ShapeEnv()

    def traced(name: str, n: int) -> Any:
        source = ConstantSource(name)
        return shapes.create_symintnode(shapes.create_symbol(n, source, DimDynamic.DYNAMIC), hint=n, source=source)

    numbers = (traced("batch", 32), traced("longest", 512), 32, 8, 64)
    for total_q in (31 + 512, None):
        size = get_plan_size(*numbers, None if total_q is None else traced("tokens", total_q))
        assert int(size) == _get_planner(-1, (32, 512, 32, 8, 64, total_q), True, -1, -1)[1]


@pytest.mark.parametrize("tokens", [31 + 512, 32 * 512])
@pytest.mark.parametrize(("total_q", "wide"), [(31 + 512, False), (32 * 512, True), (None, True)])
def test_a_call_has_the_row_tiles_of_its_plan(tokens: int, total_q: int | None, wide: bool) -> None:
    """A step of 31 decoding sequences and one of 512 tokens; the tokens of the call do not matter."""
    _, size = _get_planner(-1, (32, 512, 32, 8, 64, total_q), True, -1, -1)
    cache, scale = greenfast.PagedKVCache(2, 16, 8, 64, device="meta").layer(), meta(dtype=torch.float32)
    of_batch = (meta(32, 2), meta(33), meta(32), scale, scale, None, None)
    args: Any = (*cache[:2], *of_batch, meta(size), 512, True, -1, -1, 0.0, 1.0, torch.bfloat16)
    (step,) = get_attention_plan(meta(tokens, 32, 64, dtype=torch.bfloat16), *args).steps
    assert step.source == attention.kernel(ServingConfig(head_dim=64, wide=wide))


def test_rows_too_far_apart_for_the_kernels(tmp_path: Path) -> None:
    """16 GiB, of a file that takes no room."""
    step = 2**33
    memory = torch.from_file(str(tmp_path / "q"), shared=True, size=step + 4 * 64, dtype=torch.bfloat16)
    q = memory.as_strided((2, 4, 64), (step, 64, 1))
    with pytest.raises(ValueError, match=r"q: its strides are \(8589934592, 64, 1\); less than 17179869184 bytes"):
        varlen(**keys() | {"q": q, "cu_seqlens_q": int32(0, 1, 2)})
