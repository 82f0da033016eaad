"""The registered operators: checks, shapes for tracing, mutations, and plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.numerics import serving, serving_append
from greenfast.serving import checks
from greenfast.serving import torch_ops as serving_ops
from tests.serving.oracle import Case, case

ATTENTION = torch.ops.greenfast.paged_attention.default
ATTENTION_OUT = torch.ops.greenfast.paged_attention_out.default
APPEND = torch.ops.greenfast.append_kv.default
PLAN = torch.ops.greenfast.paged_attention_plan.default
E4M3 = torch.float8_e4m3fn


def arguments(c: Case, plan: Tensor | None = None) -> list[Any]:
    o = c.options
    return [
        c.q, c.k_cache, c.v_cache, c.block_table, c.cu_seqlens_q, c.seqused_k, c.k_scale, c.v_scale, c.q_scale, c.sinks,
        plan, int(c.cu_seqlens_q.diff().max()), o["causal"], *o.get("window", (-1, -1)), o.get("softcap", 0.0),
        o["softmax_scale"], o["out_dtype"],
    ]  # fmt: skip


def to_append(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(5, n, 64, generator=generator).bfloat16() for n in (4, 2, 2))
    cache = greenfast.PagedKVCache(4, 16, 2, 64)
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, **cache.layer()._asdict()}
    for name in ("k_cache", "v_cache"):
        inputs[name].view(torch.uint8).zero_()
    inputs["k_scale"].fill_(1)
    inputs["v_scale"].fill_(1)
    angles = torch.rand(40, 16, generator=generator)
    inputs |= {
        "slot_mapping": torch.tensor([3, 17, -1, 40, 63]), "q_weight": torch.rand(64, generator=generator),
        "k_weight": torch.rand(64, generator=generator), "cos": angles.cos(), "sin": angles.sin(),
        "positions": torch.tensor([3, 1, 0, 39, 5]), "eps": 1e-6, "interleaved": False,
    }  # fmt: skip
    return inputs | changes


ORDER = (
    "q", "k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale", "q_weight", "k_weight", "cos", "sin",
    "positions", "eps", "interleaved",
)  # fmt: skip
MUTATED = ("k_cache", "v_cache", "k_scale", "v_scale")


def test_positions_of_arguments() -> None:
    """The named positions agree with the schemas."""
    schema = torch.ops.greenfast.paged_attention_out.default._schema
    attention = [x.name for x in schema.arguments]
    tensors = [x.name for x in schema.arguments if "Tensor" in str(x.type)]
    assert [*attention[: checks.NUM_ATTENTION_TENSORS], "out"] == tensors
    positions = (checks.Q, checks.MAX_SEQLEN_Q, checks.OUT_DTYPE, checks.OUT)
    assert [attention[i] for i in positions] == ["q", "max_seqlen_q", "out_dtype", "out"]
    append = torch.ops.greenfast.append_kv.default._schema.arguments
    assert ["Tensor" in str(x.type) for x in append].index(False) == checks.NUM_APPEND_TENSORS


def test_attention_is_the_reference() -> None:
    c = case([(3, 70), (1, 20)], sinks=True, window=(30, 0))
    out, lse = ATTENTION(*arguments(c))
    wanted = serving.paged_attention(**c.arguments())
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    into = torch.empty_like(out)
    assert torch.equal(ATTENTION_OUT(*arguments(c), into), lse)
    assert torch.equal(into, out)


def test_append_is_the_reference() -> None:
    mine, theirs = to_append(), to_append()
    result = APPEND(*(mine[name] for name in ORDER))
    wanted = serving_append.append(**theirs)
    assert wanted is not None
    assert torch.equal(result, wanted)
    for name in MUTATED:
        assert torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8))
    assert APPEND(*(to_append(q=None, q_weight=None)[name] for name in ORDER)).shape == (0,)


def check(op: Any, args: tuple[Any, ...], mutated: tuple[int, ...] = ()) -> None:
    """Run opcheck. Its test_schema cannot compare E4M3, so mutations and aliases are checked here."""
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    result = op(*args)
    for i, x in enumerate(args):
        if isinstance(x, Tensor) and i not in mutated:
            assert torch.equal(x.view(torch.uint8), before[i].view(torch.uint8)) if x.dim() else x.equal(before[i]), i
    memory = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    results = result if isinstance(result, tuple) else (result,)
    assert not memory & {x.untyped_storage().data_ptr() for x in results if x.numel()}
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=others)


OPTIONS: list[dict[str, Any]] = [
    {}, {"sinks": True, "window": (30, 2), "softcap": 20.0}, {"scales": "sequence", "fp8_queries": True},
    {"layout": "rows", "strides": "HND", "scales": "one"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck_of_attention(options: dict[str, Any]) -> None:
    c = case([(3, 70), (0, 5), (1, 0)], **options)
    check(ATTENTION, tuple(arguments(c)))
    check(ATTENTION_OUT, (*arguments(c), torch.empty(c.q.shape, dtype=torch.bfloat16)), (len(NAMES),))
    torch.library.opcheck(PLAN, (c.cu_seqlens_q, c.seqused_k, 3, 4, 2, 64, True, -1, 0))
    torch.library.opcheck(PLAN, (c.cu_seqlens_q, c.seqused_k, 3, 4, 2, 64, True, -1, 0, 7))


_CHANGES: list[dict[str, Any]] = [{}, {"q": None, "q_weight": None}, {"cos": None, "sin": None, "positions": None}]


@pytest.mark.parametrize("changes", _CHANGES, ids=list)
def test_opcheck_of_append(changes: dict[str, Any]) -> None:
    inputs = to_append(**changes)
    check(APPEND, tuple(inputs[name] for name in ORDER), tuple(ORDER.index(name) for name in MUTATED))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic: bool) -> None:
    """A step of a model, appending and attending, as one graph."""

    def step(given: dict[str, Any], c: Case) -> tuple[Any, ...]:
        rotated = greenfast.append_kv(**given)
        assert rotated is not None
        cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        used = torch.tensor([18, 30], dtype=torch.int32)
        table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        return greenfast.flash_attn_varlen_func(
            rotated, given["k_cache"], given["v_cache"], cu, None, 3, 30, seqused_k=used, block_table=table,
            k_descale=given["k_scale"], v_descale=given["v_scale"], causal=True, return_softmax_lse=True,
        ), rotated + 1  # fmt: skip

    c = case([(1, 1)])
    eager, traced = to_append(), to_append()
    wanted, _ = step(eager, c)
    result, _ = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)(traced, c)
    assert torch.equal(result[0], wanted[0])
    assert torch.equal(result[1], wanted[1])
    for name in MUTATED:
        assert torch.equal(traced[name].view(torch.uint8), eager[name].view(torch.uint8))


BAD_ATTENTION: list[tuple[str, Any, type[Exception], str]] = [
    ("q", lambda x: x.float(), TypeError, r"q: its dtype is torch.float32; allowed: torch.float16"),
    ("q", lambda x: x[0], ValueError, r"q: its shape is .*\(total_q, heads, head_dim\) is needed"),
    ("q", lambda x: x[..., :32], ValueError, "q: its head_dim is 32, the cache's 64"),
    ("q", lambda x: x[:, :3], ValueError, "q: it has 3 heads, the cache 2; 1 to 16 query heads"),
    ("q", lambda x: x.repeat(1, 9, 1), ValueError, "q: it has 36 heads, the cache 2; 1 to 16"),
    ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "q: its strides are"),
    ("q", lambda x: torch.zeros(3, 4, 68).bfloat16()[..., 2:66], ValueError, "q: its strides are .*16 bytes"),
    ("k_cache", lambda x: x.float().bfloat16(), TypeError, r"k_cache: .*bfloat16; .*view\(torch.float8_e4m3fn\)"),
    ("k_cache", lambda x: x[:, :8], NotImplementedError, "k_cache: page size 8; allowed: 16, 32, 64, 128"),
    ("k_cache", lambda x: x[..., :48], NotImplementedError, "k_cache: head_dim 48; allowed: 64, 128, 256"),
    ("k_cache", lambda x: x[0], ValueError, "k_cache: its shape is"),
    ("v_cache", lambda x: x[:, :1], ValueError, r"v_cache: .*page_size / 16, head_dim, 16\) is needed"),
    ("v_cache", lambda x: x[..., 0], ValueError, "v_cache: .*as k_cache"),
    ("v_cache", lambda x: x.view(torch.uint8).transpose(3, 4).contiguous().transpose(3, 4).view(E4M3), ValueError,
     "v_cache: its strides are"),
    ("block_table", lambda x: x.long(), TypeError, r"block_table \(page_table\): its dtype is torch.int64"),
    ("block_table", lambda x: x[:1], ValueError, r"block_table \(page_table\): .*\(2, max_pages\) is needed"),
    ("cu_seqlens_q", lambda x: x[:-1], ValueError, r"cu_seqlens_q: .*\(3,\) = \(batch \+ 1; batch: length"),
    ("cu_seqlens_q", lambda x: x - 1, ValueError, r"cu_seqlens_q: \[-1"),
    ("cu_seqlens_q", lambda x: x * 2, ValueError, "cu_seqlens_q: .*at most the 4 tokens of q"),
    ("seqused_k", lambda x: x.unsqueeze(0), ValueError, r"seqused_k \(cache_seqlens\): its shape"),
    ("seqused_k", lambda x: x + 1000, ValueError, r"seqused_k \(cache_seqlens\): 1070 of sequence 0; 0 to"),
    ("seqused_k", lambda x: x - 50, ValueError, r"seqused_k \(cache_seqlens\): -30 of sequence 1"),
    ("seqused_k", lambda x: x + 16, ValueError, r"block_table \(page_table\): .*-1\] of sequence 0"),
    ("k_scale", lambda x: x[:1], ValueError, r"k_scale \(k_descale\): .*\(batch, kv_heads\) or .*page_size\)"),
    ("k_scale", lambda x: x.double(), TypeError, r"k_scale \(k_descale\): its dtype is torch.float64"),
    ("v_scale", lambda x: torch.ones(()), ValueError, r"v_scale \(v_descale\): .*both are per token, or neither"),
    ("q_scale", lambda x: torch.ones(2, 2), ValueError, r"q_scale \(q_descale\): given for q of torch.bfloat16"),
    ("sinks", lambda x: torch.ones(3), ValueError, r"sinks \(s_aux\): its shape is \(3,\)"),
    ("plan", lambda x: torch.ones(3), TypeError, r"plan \(scheduler_metadata\): its dtype"),
]  # fmt: skip
NAMES = (
    "q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "q_scale", "sinks",
    "plan", "max_seqlen_q", "causal", "window_left", "window_right", "softcap", "softmax_scale", "out_dtype",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "error", "message"), BAD_ATTENTION, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_attention_refuses(name: str, change: Any, error: type[Exception], message: str) -> None:
    inputs = dict(zip(NAMES, arguments(case([(3, 70), (1, 20)])), strict=True))
    inputs[name] = change(inputs[name])
    for op in (ATTENTION, serving_ops.paged_attention):
        with pytest.raises(error, match=message):
            op(*inputs.values())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_seqlen_q", 2, "max_seqlen_q: 2; a sequence has 3 queries"),
        ("window_left", -2, "window_size: -2; a number of at least -1"),
        ("softcap", -1.0, "softcap: -1.0"),
        ("softmax_scale", 0.0, "softmax_scale: 0.0; a number above 0"),
        ("softmax_scale", float("inf"), "softmax_scale: inf; a finite number"),
        ("out_dtype", torch.float32, "out: dtype torch.float32"),
    ],
)
def test_numbers_that_attention_refuses(name: str, value: Any, message: str) -> None:
    inputs = dict(zip(NAMES, arguments(case([(3, 70), (1, 20)])), strict=True)) | {name: value}
    with pytest.raises((ValueError, TypeError), match=message):
        ATTENTION(*inputs.values())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(5, 2, 64)}, TypeError, "k: its dtype is torch.float32"),
        ({"v": torch.zeros(5, 2, 64).half()}, TypeError, "v: its dtype is torch.float16; allowed: torch.bfloat16"),
        ({"v": torch.zeros(4, 2, 64).bfloat16()}, ValueError, "v: its shape is"),
        ({"q": torch.zeros(4, 4, 64).bfloat16()}, ValueError, r"q: its shape is .*\(5, heads, 64\)"),
        ({"slot_mapping": torch.zeros(5).int()}, TypeError, "slot_mapping: its dtype is torch.int32"),
        ({"slot_mapping": torch.zeros(4).long()}, ValueError, "slot_mapping: its shape is"),
        (
            {"slot_mapping": torch.tensor([3, 64, -1, 40, 0])},
            ValueError,
            "slot_mapping: 64; the cache has slots 0 to 63",
        ),
        (
            {"slot_mapping": torch.tensor([3, 9, -1, -1, 9])},
            ValueError,
            "slot_mapping: 9 of 2 tokens; each needs its own",
        ),
        ({"k_scale": torch.ones(3)}, ValueError, "k_scale"),
        ({"k_scale": torch.ones(2, 2), "v_scale": torch.ones(2, 2)}, ValueError, "k_scale"),
        ({"k_weight": torch.ones(32)}, ValueError, "k_weight: its shape is"),
        ({"q": None}, ValueError, "q_weight: given without q"),
        ({"sin": None}, ValueError, r"sin \(rotary_sin\): None; a rotation needs cos, sin and positions"),
        (
            {"cos": torch.ones(40, 4), "sin": torch.ones(40, 4)},
            ValueError,
            r"cos \(rotary_cos\): .*a multiple of 16 up to head_dim 64",
        ),
        ({"positions": torch.zeros(5)}, TypeError, "positions: its dtype"),
        ({"eps": -1.0}, ValueError, "eps: -1.0"),
        ({"k_weight": None}, NotImplementedError, "q_weight, k_weight: one is None"),
        (
            {"k_cache": torch.zeros(1, 16, 2, 64).to(torch.float8_e4m3fn).expand(4, 16, 2, 64)},
            ValueError,
            "k_cache: .* share memory",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_append_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = to_append(**changes)
    before = inputs["k_cache"].view(torch.uint8).clone()
    for call in (lambda: greenfast.append_kv(**inputs), lambda: APPEND(*(inputs[name] for name in ORDER))):
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(inputs["k_cache"].view(torch.uint8), before)


def test_no_tensor_at_all() -> None:
    inputs = arguments(case([(3, 70)]))
    with pytest.raises(TypeError, match=r"k_cache: a torch.Tensor is needed, got NoneType"):
        serving_ops.paged_attention(inputs[0], None, *inputs[2:])
    with pytest.raises(TypeError, match=r"seqused_k \(cache_seqlens\): it is nested or sparse"):
        serving_ops.paged_attention(*inputs[:5], inputs[5].to_sparse(), *inputs[6:])


def test_a_gradient_is_refused() -> None:
    inputs = arguments(case([(3, 70)]))
    inputs[0] = inputs[0].requires_grad_()
    out, _ = ATTENTION(*inputs)
    with pytest.raises(NotImplementedError, match=r"greenfast.flash_attn: no gradient flows through a quantized cache"):
        out.sum().backward()


def test_a_plan_is_for_its_lengths_and_layers() -> None:
    c = case([(3, 70), (1, 20)])
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True}
    plan = greenfast.ServingPlan(c.cu_seqlens_q, c.seqused_k, 3, **sizes)
    call: dict[str, Any] = {
        "seqused_k": c.seqused_k, "block_table": c.block_table, "causal": True, "scheduler_metadata": plan,
        "k_descale": c.k_scale, "v_descale": c.v_scale,
    }  # fmt: skip
    inputs = (c.q, c.k_cache, c.v_cache, c.cu_seqlens_q, None, 3, 70)
    for _ in range(2):
        result = greenfast.flash_attn_varlen_func(*inputs, **call)
        assert isinstance(result, Tensor)
        assert torch.equal(result, serving.paged_attention(**c.arguments())[0])
    c.seqused_k[1] = 19
    with pytest.raises(ValueError, match=r"plan \(scheduler_metadata\): it was made for other lengths"):
        greenfast.flash_attn_varlen_func(*inputs, **call)
    plan.update()
    greenfast.flash_attn_varlen_func(*inputs, **call)
    with pytest.raises(ValueError, match="made for causal and window_size"):
        greenfast.flash_attn_varlen_func(*inputs, **(call | {"window_size": (5, 0)}))
    with pytest.raises(ValueError, match="made for max_seqlen_q 3, called with 16"):
        greenfast.flash_attn_varlen_func(*inputs[:5], 16, 70, **call)
    with pytest.raises(TypeError, match="scheduler_metadata: a Tensor; a greenfast"):
        greenfast.flash_attn_varlen_func(*inputs, **(call | {"scheduler_metadata": plan.tensor}))
    with pytest.raises(ValueError, match="cu_seqlens_q: its shape"):
        greenfast.ServingPlan(c.cu_seqlens_q[:2], c.seqused_k, 3, **sizes)
