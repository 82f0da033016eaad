"""Attention of packed sequences on the CPU: its values, gradients, traces, refusals and repeated launches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.varlen import AuxRequest

import greenfast
from greenfast.ops import call_cache, varlen
from tests.ops.launched import PretendedGpu
from tests.ops.launched import gpu as gpu
from tests.ops.test_host_caches import assert_launches_repeat

varlen_attn: Any = greenfast.varlen_attn
LENGTHS = ([40, 0, 1, 130, 7], [130, 12, 0, 200, 7])
COMPILE: Any = torch.compile
LSE = AuxRequest(lse=True)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, scale: float = 1.0, shift: float = 0.0) -> Any:
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (
        (torch.randn(sum(n), h, head_dim, generator=generator) * scale + shift).bfloat16()
        for n, h in zip((LENGTHS[0], LENGTHS[1], LENGTHS[1]), (heads, kv_heads, kv_heads), strict=True)
    )
    return q, k, v, starts(LENGTHS[0]), starts(LENGTHS[1]), max(LENGTHS[0]), max(LENGTHS[1])


def exact(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    sinks: Tensor | None = None, used: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In float64, a sequence at a time."""
    outs, sums = [], []
    share = q.shape[1] // k.shape[1]
    split: Any = torch.split
    parts = zip(split(q, LENGTHS[0]), split(k, LENGTHS[1]), split(v, LENGTHS[1]), used or LENGTHS[1], strict=True)
    for x, keys, values, n in parts:
        a = x.double().transpose(0, 1)
        b, c = (y[:n].double().transpose(0, 1).repeat_interleave(share, 0) for y in (keys, values))
        scores = a @ b.transpose(1, 2) / math.sqrt(q.shape[2])
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(x.shape[0]).unsqueeze(1) + n - x.shape[0]
        places = torch.arange(n)
        hidden = (places > own + window[1]) & (window[1] >= 0) | (places < own - window[0]) & (window[0] >= 0)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, x.shape[0], 1)], -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :n]
        outs.append((weights @ c).transpose(0, 1))
        sums.append(torch.logsumexp(scores, -1))
    return torch.cat(outs), torch.cat(sums, 1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"head_dim": 128, "shift": 3.0}, {"window_size": (-1, 0)}),
        ({"head_dim": 72, "scale": 1e-3}, {"window_size": (20, 0)}),
        ({"heads": 2, "scale": 4.0}, {"window_size": (9, 5)}),
        ({"shift": -2.0}, {"window_size": (16, -1), "sinks": torch.tensor([-3.0, 0.0, 4.0, 90.0])}),
        ({"scale": 3.0}, {"softcap": 5.0, "window_size": (-1, 3)}),
        ({"head_dim": 256}, {"seqused_k": torch.tensor([100, 0, 0, 150, 7], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_agrees_with_float64(sizes: dict[str, Any], options: dict[str, Any], precision: str) -> None:
    q, k, v, *lengths = inputs(**sizes)
    out, lse = varlen_attn(q, k, v, *lengths, enable_gqa=True, return_aux=LSE, precision=precision, **options)
    used = options.get("seqused_k")
    wanted, sums = exact(
        q, k, v, options.get("window_size", (-1, -1)), options.get("softcap", 0.0), options.get("sinks"),
        None if used is None else used.tolist(),
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    # With large scores, rows attend to few keys, and an error of 1 % of a score changes which.
    assert relative(out, wanted) < (0.25 if sizes.get("scale", 1.0) > 2 else 0.07)
    assert lse.shape == (q.shape[1], q.shape[0])
    assert torch.equal(lse.isneginf(), sums.isneginf())
    finite = sums.isfinite()
    assert (lse - sums)[finite].abs().max() <= 0.06 + 0.04 * float(sums[finite].abs().max())
    assert torch.equal(out, varlen_attn(q, k, v, *lengths, enable_gqa=True, precision=precision, **options))


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    q, k, v, cu_q, cu_k, max_q, max_k = inputs()
    for x, at in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[at[3] : at[4]] = float("nan")
    whole = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=True, window_size=(-1, 0))
    for b, (n, m) in enumerate(zip(*LENGTHS, strict=True)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = varlen_attn(
            q[rows], k[keys], v[keys], starts([n]), starts([m]), n, m, enable_gqa=True, window_size=(-1, 0)
        )
        assert torch.equal(whole[rows].nan_to_num(7.0), one.nan_to_num(7.0))
        assert bool(one.isnan().any()) == (b == 3)


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [((-1, -1), 0.0, False), ((-1, 0), 0.0, True), ((16, 4), 0.0, False), ((16, 0), 3.0, True)],
)
def test_gradients_are_those_of_exact_attention(window: tuple[int, int], softcap: float, with_sinks: bool) -> None:
    q, k, v, *lengths = inputs()
    sinks = (torch.tensor([-3.0, 0.0, 2.0, 30.0]),) if with_sinks else ()
    tensors = [x.requires_grad_() for x in (q, k, v, *sinks)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    options: dict[str, Any] = {"window_size": window, "softcap": softcap, "sinks": tensors[3] if sinks else None}
    torch.autograd.backward(varlen_attn(*tensors[:3], *lengths, enable_gqa=True, **options), grad)
    wanted = exact(wide[0], wide[1], wide[2], window, softcap, wide[3] if sinks else None)[0]
    torch.autograd.backward(wanted, grad.double())
    for x, y in zip(tensors, wide, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert relative(x.grad, y.grad) < 0.01


def test_gradients_that_do_not_exist_are_refused() -> None:
    q, k, v, *lengths = inputs()
    used = torch.tensor([1, 0, 0, 1, 1]).int()
    out = varlen_attn(q.requires_grad_(), k, v, *lengths, enable_gqa=True, seqused_k=used)
    with pytest.raises(NotImplementedError, match="seqused_k: with it there are no gradients"):
        out.sum().backward()


def test_compiled_for_any_number_of_tokens() -> None:
    compiled = COMPILE(varlen_attn, fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v, *lengths = inputs()
    assert torch.equal(
        compiled(q, k, v, *lengths, enable_gqa=True, window_size=(9, 0)),
        varlen_attn(q, k, v, *lengths, enable_gqa=True, window_size=(9, 0)),
    )
    cu = starts([3, 5])
    found = compiled(q[:8], k[:8], v[:8], cu, cu, 5, 5, enable_gqa=True, window_size=(9, 0))
    assert torch.equal(found, varlen_attn(q[:8], k[:8], v[:8], cu, cu, 5, 5, enable_gqa=True, window_size=(9, 0)))


def test_no_sequences_and_no_tokens() -> None:
    none = starts([])
    q = torch.randn(3, 2, 64).bfloat16()
    assert (varlen_attn(q, q, q, none, none, 0, 0) == 0).all()
    empty = q[:0]
    assert varlen_attn(empty, empty, empty, starts([0, 0]), starts([0, 0]), 0, 0).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.ones(3, 4, 64)}, TypeError, r"query: its dtype is torch.float32; allowed: torch.float16"),
        ({"query": torch.ones(1, 178, 4, 64).bfloat16()}, ValueError, r"query: its shape is \(1, 178, 4, 64\)"),
        ({"query": None}, TypeError, "query: a NoneType"),
        ({"key": torch.ones(349, 3, 64).bfloat16()}, ValueError, "key, value: their shapes"),
        ({"value": torch.ones(349, 2, 64).half()}, TypeError, "value: its dtype is torch.float16, but query is"),
        ({"cu_seq_q": torch.zeros(6)}, TypeError, "cu_seq_q: its dtype is torch.float32; allowed: torch.int32"),
        ({"cu_seq_k": None}, ValueError, "cu_seq_k: None"),
        ({"cu_seq_k": starts([349])}, ValueError, r"cu_seq_k: its shape is \(2,\); \(N \+ 1,\)"),
        ({"cu_seq_k": starts([349, 0, 0, 0, 9])}, ValueError, "cu_seq_k: .* to at most the 349 tokens"),
        ({"cu_seq_q": torch.tensor([0, 9, 3, 3, 3, 3]).int()}, ValueError, "cu_seq_q: .*never falling"),
        ({"seqused_k": torch.tensor([1, 13, 0, 0, 0]).int()}, ValueError, "seqused_k: 13 of sequence 1; it has 12"),
        ({"max_q": -1}, ValueError, "max_q: -1"),
        ({"max_k": 1.5}, TypeError, "max_k: 1.5"),
        ({"enable_gqa": False}, ValueError, "query: it has 4 heads, key 2; with enable_gqa=True"),
        ({"window_size": (1, -2)}, ValueError, r"window_size: \(1, -2\)"),
        ({"window_size": 5}, TypeError, "window_size: 5"),
        ({"softcap": -1.0}, ValueError, "softcap: -1.0"),
        ({"softcap": math.inf}, ValueError, "softcap: inf"),
        ({"return_aux": True}, TypeError, "return_aux: a bool; a torch.nn.attention.varlen.AuxRequest"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: \(3,\) on cpu; \(4,\)"),
        ({"sinks": torch.zeros(4).half()}, TypeError, "sinks: torch.float16; a float32 tensor"),
        ({"scale": -1.0}, ValueError, "scale: -1.0"),
        ({"precision": "fp4"}, ValueError, "precision: 'fp4'"),
        ({"block_table": torch.zeros(5, 1).int()}, NotImplementedError, "block_table"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    arguments = dict(zip(names, inputs(), strict=True)) | {"enable_gqa": True}
    with pytest.raises(error, match=message):
        varlen_attn(**(arguments | changes))


def repeated() -> list[partial[Any]]:
    """Return calls that differ in one argument."""
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    base = dict(zip(names, inputs(), strict=True)) | {"enable_gqa": True}
    wide = torch.zeros(349, 6, 64).bfloat16()
    changes: list[dict[str, Any]] = [
        {},
        {"cu_seq_k": base["cu_seq_q"]},
        {"max_q": 131},
        {"max_k": 500},
        {"scale": 0.5},
        {"scale": 1.0},
        {"window_size": (-1, 0)},
        {"window_size": [-1, 0]},
        {"window_size": (20, 0)},
        {"window_size": (20, 5)},
        {"softcap": 5.0},
        {"softcap": 6.0},
        {"softcap": 5.0, "return_aux": LSE},
        {"return_aux": LSE},
        {"return_aux": AuxRequest()},
        {"sinks": torch.zeros(4)},
        {"sinks": torch.zeros(4), "return_aux": LSE},
        {"seqused_k": torch.tensor([1, 0, 0, 1, 1]).int()},
        {"seqused_k": torch.tensor([1, 0, 0, 1, 1]).int(), "sinks": torch.zeros(4)},
        {"precision": "int8"},
        {"precision": "int8_fine"},
        {"key": wide[:, ::3], "value": wide[:, 1::3]},
        {"key": base["value"]},
        {name: base[name].half() for name in ("query", "key", "value")},
        {"query": base["query"].transpose(0, 1).contiguous().transpose(0, 1)},
        {"cu_seq_q": torch.zeros(12).int()[::2]},
        {"query": base["query"][:0]},
    ]
    return [partial(varlen_attn, **(base | change)) for change in changes]


def test_a_repeated_call_launches_what_a_first_one_does(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    every = repeated()
    for call in every:
        gpu.keep(x for x in call.keywords.values() if isinstance(x, Tensor))
    assert_launches_repeat(gpu, every[:-1], 3, seed=3)
    assert (every[-1]().shape, gpu.launched()) == ((0, 4, 64), [])  # no rows, no launch
    monkeypatch.setattr(call_cache, "_MAX_GUARDS", 1000)
    # A list may change, a copy has its own memory, and the mean of the keys is added to a log-sum-exp in PyTorch.
    slow = [7, 13, 25, 26]
    fast = [call for i, call in enumerate(every) if i not in slow]
    for call in fast:
        call()
    monkeypatch.setattr(varlen, "check_once", None)  # only a first call checks
    for call in fast:
        result = call()
        out, lse = result if isinstance(result, tuple) else (result, None)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((178, 4, 64), call.keywords["query"].dtype, True)
        assert (lse is not None) == (call.keywords.get("return_aux") == LSE)
        assert lse is None or (lse.shape, lse.dtype) == ((4, 178), torch.float32)
    for i in slow:
        with pytest.raises(TypeError, match="NoneType"):
            every[i]()


def test_every_refusal_stays(gpu: PretendedGpu) -> None:
    every = repeated()
    for call in every:
        call()
    gpu.launched()
    for wrong in (
        {"enable_gqa": 1},
        {"enable_gqa": False},
        {"max_q": True},
        {"max_k": 200.0},
        {"window_size": (True, 0)},
        {"window_size": (-1.0, 0)},
        {"softcap": True},
        {"softcap": -5.0},
        {"scale": True},
        {"precision": "fp4"},
        {"block_table": torch.zeros(5, 1).int()},
        {"sinks": torch.zeros(8)[::2].half()},
        {"seqused_k": torch.zeros(5)},
        {"value": torch.zeros(349, 2, 64)},
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=next(iter(wrong)) + ": |query: it has"):
            every[0](**wrong)
    assert not gpu.launched()


def test_rows_at_an_odd_address_are_copied(gpu: PretendedGpu) -> None:
    call = repeated()[0]
    gpu.keep(x for x in call.keywords.values() if isinstance(x, Tensor))
    for name, launch in (("query", 2), ("key", 1), ("value", 1)):
        memory = torch.zeros(call.keywords[name].numel() + 4).bfloat16()
        gpu.keep([memory])
        odd = memory[4:].view(call.keywords[name].shape)
        call()
        gpu.launched()
        call(**{name: odd})
        launches = gpu.launched()
        assert len(launches) == 3
        assert odd.data_ptr().to_bytes(8, "little") not in b"".join(launches[launch].arguments)
        call()
        gpu.launched()
        call()
        address = call.keywords[name].data_ptr().to_bytes(8, "little")
        assert address in b"".join(gpu.launched()[launch].arguments)


class Subclass(Tensor):
    pass


def test_an_observed_call_goes_through_the_dispatcher(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call = repeated()[0]
    for _ in range(2):
        call()
    gpu.launched()
    seen: list[Any] = []

    def dispatched(query: Tensor, *args: Any) -> Tensor:
        seen.append(args)
        return query

    monkeypatch.setattr(varlen, "VARLEN", dispatched)
    for observer in (torch.autograd.profiler.profile(), torch.autocast("cpu", torch.bfloat16), forward_ad.dual_level()):
        with observer:
            call()
        assert seen.pop()
    for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k"):
        call(**{name: call.keywords[name].as_subclass(Subclass)})
        assert seen.pop()
    for name in ("query", "key", "value"):
        call(**{name: call.keywords[name].clone().requires_grad_()})
        assert seen.pop()
        call(**{name: torch._neg_view(call.keywords[name])})
        assert seen.pop()

    def transformed(x: Tensor) -> Tensor:
        call()
        return x

    torch.vmap(transformed)(torch.zeros(2))
    assert seen.pop()
    assert not gpu.launched()
    with torch.no_grad():
        call(query=call.keywords["query"].clone().requires_grad_())
    call()
    assert not seen
    assert len(gpu.launched()) == 6
    with FakeTensorMode(allow_non_fake_inputs=True):
        call()
    assert seen
