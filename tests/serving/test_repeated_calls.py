"""A repeated serving call has the launches and the refusals of the first call."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import greenfast
from greenfast import flash_attn
from greenfast.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from greenfast.ops import call_cache
from greenfast.ops import varlen as varlen_module
from greenfast.serving import call as serving_call
from greenfast.serving import checks as serving_checks
from greenfast.serving import cuda as serving_cuda
from greenfast.serving import launch_cache as serving_request
from greenfast.serving import torch_ops as serving_ops
from tests.ops.launched import Launch, PretendedGpu, pretend_cuda

BATCH, HEADS, KV_HEADS, DIM, PAGES = 3, 8, 2, 64, 12
Options = dict[str, Any]
COMPOSED = 39


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(serving_ops, "PLAN", serving_cuda.plan)
    monkeypatch.setattr(serving_checks, "_CHECK_PAGES_ENABLED", False)
    return PretendedGpu(monkeypatch)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns within a call."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def cache(page: int = 64, **options: Any) -> Options:
    made = greenfast.PagedKVCache(PAGES, page, KV_HEADS, DIM, **options).layer()
    return {"k_cache": made.k_cache, "v_cache": made.v_cache, "k_descale": made.k_scale, "v_descale": made.v_scale}


def plan(max_seqlen_q: int = 1, **options: Any) -> greenfast.ServingPlan:
    starts, lengths = torch.arange(BATCH + 1).int() * max_seqlen_q, torch.full((BATCH,), 9).int()
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM} | options
    return greenfast.ServingPlan(starts, lengths, max_seqlen_q, **sizes)


def query(length: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(BATCH, length, HEADS, DIM).to(dtype)


def base() -> Options:
    table = torch.arange(PAGES).int().view(BATCH, 4)
    return {"q": query(), **cache(scales="head"), "page_table": table, "cache_seqlens": torch.full((BATCH,), 9).int()}


def variants() -> list[Options]:
    """Calls that differ in one thing from another."""
    wide = torch.zeros(BATCH, 1, 2 * HEADS, DIM, dtype=torch.bfloat16)
    scale = torch.ones(())
    changes: list[Options] = [
        {},
        {"q": query()},
        {"q": wide[:, :, :HEADS]},
        {"q": wide[:, :, ::2]},
        {"q": query(2)},
        {"q": query(dtype=torch.float16)},
        {"q": query(dtype=torch.float8_e4m3fn)},
        {"q": query(dtype=torch.float8_e4m3fn), "q_descale": torch.ones(BATCH, KV_HEADS)},
        {"q": query(dtype=torch.float8_e4m3fn), "q_descale": torch.ones(KV_HEADS, BATCH).t()},
        {"q": query(dtype=torch.float8_e4m3fn), "q_descale": torch.ones(())},
        {"q": query().flatten(0, 1), "cu_seqlens_q": torch.arange(BATCH + 1).int(), "max_seqlen_q": 1},
        {"q": query().flatten(0, 1), "cu_seqlens_q": torch.arange(BATCH + 1).int(), "max_seqlen_q": 2},
        {"q": query(4), "max_seqlen_q": 2},
        cache(32, scales="head"),
        cache(layout="HND", scales="head"),
        cache(scales="token"),
        cache(layout="HND", scales="token"),
        {"k_descale": scale, "v_descale": scale},
        {"k_descale": scale, "v_descale": torch.ones(())},
        {"k_descale": None},
        {"k_descale": None, "v_descale": None},
        {"k_descale": torch.ones(KV_HEADS)},
        {"k_descale": torch.ones(2 * KV_HEADS)[::2]},
        {"k_descale": torch.ones(BATCH, KV_HEADS)},
        {"page_table": torch.zeros(BATCH, 9).int()[:, :4]},
        {"page_table": torch.zeros(BATCH, 5).int()},
        {"cache_seqlens": torch.full((BATCH,), 8).int()},
        {"cache_seqlens": 9},
        {"cache_seqlens": 1},
        {"cache_seqlens": None},
        {"causal": True},
        {"window_size": (4, 0)},
        {"window_size": [4, 0]},
        {"window_size": (5, 0)},
        {"window_size": (4, -1)},
        {"window_size": (4, -1), "causal": True},
        {"window_size": None},
        {"window_size": (1, 0)},
        {"softcap": 1.0},
        {"softcap": 20.0},
        {"softcap": 20},
        {"softcap": 30.0},
        {"softmax_scale": 0.5},
        {"softmax_scale": torch.tensor(0.5)},
        {"softmax_scale": 1.0},
        {"softmax_scale": 1},
        {"s_aux": torch.zeros(HEADS)},
        {"s_aux": torch.zeros(HEADS).bfloat16()},
        {"return_softmax_lse": True},
        {"return_softmax_lse": True, "s_aux": torch.zeros(HEADS)},
        {"out": query()},
        {"out": query(), "return_softmax_lse": True},
        {"out": torch.zeros(BATCH, 1, HEADS, 2 * DIM, dtype=torch.bfloat16)[..., :DIM]},
        {"scheduler_metadata": plan()},
        {"scheduler_metadata": plan()},
        {"scheduler_metadata": plan(causal=True), "causal": True},
        {"scheduler_metadata": plan(window_size=(4, 0)), "window_size": (4, 0)},
        {"q": query(2), "scheduler_metadata": plan(2)},
    ]
    aliased = base()
    aliased["out"] = aliased["q"]
    return [base() | change for change in changes] + [aliased]


def tensors_of(options: Options) -> list[Tensor]:
    plans = [x.tensor for x in options.values() if isinstance(x, greenfast.ServingPlan)]
    return [x for x in options.values() if isinstance(x, Tensor)] + plans


def call(options: Options) -> Any:
    inputs = dict(options)
    return flash_attn_with_kvcache(inputs.pop("q"), inputs.pop("k_cache"), inputs.pop("v_cache"), **inputs)


def varlen(options: Options) -> Any:
    inputs = dict(options)
    q = inputs.pop("q").flatten(0, 1)
    k, v, lengths = (inputs.pop(name) for name in ("k_cache", "v_cache", "cache_seqlens"))
    inputs["return_attn_probs"] = inputs.pop("return_softmax_lse", False)
    if inputs.get("out") is not None:
        inputs["out"] = inputs["out"].flatten(0, 1)
    return flash_attn_varlen_func(q, k, v, STARTS, max_seqlen_q=1, seqused_k=lengths, **inputs)


STARTS = torch.arange(BATCH + 1).int()


def calls() -> list[tuple[Callable[[], Any], list[Tensor]]]:
    result: list[tuple[Callable[[], Any], list[Tensor]]] = []
    for options in variants():
        result.append((partial(call, options), tensors_of(options)))
        lengths, table = options["cache_seqlens"], options["page_table"]
        one = options["q"].dim() == 4 and options["q"].shape[1] == 1
        if one and isinstance(lengths, Tensor) and table is not None:
            result.append((partial(varlen, options), [*tensors_of(options), STARTS]))
    result += [(partial(flash_attn_varlen_func, **x), tensors_of(x)) for x in (*dense(), *observed()[:3])]
    return result


def new_keys(length: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(BATCH, length, KV_HEADS, DIM).to(dtype)


def angles(dtype: torch.dtype = torch.float32) -> Options:
    return {"rotary_cos": torch.zeros(300, 16).to(dtype), "rotary_sin": torch.zeros(300, 16).to(dtype)}


def appending() -> list[Options]:
    """Return calls that append and differ in one argument."""
    rows = {"q": query().flatten(0, 1), "cu_seqlens_q": STARTS, "max_seqlen_q": 1}
    new_rows = {"k": new_keys()[:, 0], "v": new_keys()[:, 0], "cu_seqlens_k_new": STARTS.clone()}
    wide = torch.zeros(BATCH, 1, 3 * KV_HEADS, DIM, dtype=torch.bfloat16)
    changes: list[Options] = [
        {},
        {"k": new_keys()},
        {"k": wide[:, :, ::3]},
        {"k": wide[:, :, :KV_HEADS], "v": wide[:, :, KV_HEADS : 2 * KV_HEADS]},
        {"k": new_keys(2), "v": new_keys(2)},
        {"k": new_keys(2), "v": new_keys(2), "q": query(2), "causal": True},
        {"k": new_keys(2), "v": new_keys(2), "q": query(2), "causal": True, **angles()},
        angles(),
        angles(torch.bfloat16),
        {**angles(), "rotary_interleaved": False},
        {**angles(), "rotary_seqlens": torch.full((BATCH,), 5).int()},
        rows,
        {**rows, **new_rows},
        {**rows, **new_rows, **angles()},
        {"q": query(dtype=torch.float8_e4m3fn)},
        cache(scales="token"),
        cache(32, scales="token"),
        {**cache(scales="token"), **angles()},
        {"k_descale": None, "v_descale": None},
        {"cache_seqlens": 9},
        {"cache_seqlens": 8},
        {"softcap": 3.0},
        {"window_size": (7, 0)},
        {"scheduler_metadata": plan()},
        {"return_softmax_lse": True, "s_aux": torch.zeros(HEADS)},
        {"out": query(), **angles()},
    ]
    same = new_keys()
    return [base() | {"k": new_keys(), "v": new_keys()} | change for change in changes] + [
        base() | {"k": same, "v": same}
    ]


def uncached() -> list[Options]:
    """Return calls on keys without a cache that differ in one argument."""
    lengths = torch.tensor([0, 3, 7, 9]).int()
    base: Options = {
        "q": torch.zeros(9, HEADS, DIM).bfloat16(), "k": torch.zeros(9, KV_HEADS, DIM).bfloat16(),
        "v": torch.zeros(9, KV_HEADS, DIM).bfloat16(), "cu_seqlens_q": lengths, "cu_seqlens_k": lengths.clone(),
        "max_seqlen_q": 4, "max_seqlen_k": 4,
    }  # fmt: skip
    changes: list[Options] = [
        {},
        {"cu_seqlens_k": lengths},
        {"max_seqlen_k": 300},
        {"max_seqlen_q": 5},
        {"seqused_k": torch.ones(3).int()},
        {"causal": True},
        {"k": torch.zeros(9, 3 * KV_HEADS, DIM).bfloat16()[:, ::3]},
        {"k": torch.zeros(11, KV_HEADS, DIM).bfloat16(), "v": torch.zeros(11, KV_HEADS, DIM).bfloat16()},
        {name: base[name].half() for name in ("q", "k", "v")},
        {"q": base["q"].to(torch.float8_e4m3fn)},
        {"s_aux": torch.zeros(HEADS), "return_attn_probs": True},
        {"out": torch.zeros(9, HEADS, DIM).bfloat16()},
    ]
    return [base | change for change in changes]


def dense() -> list[Options]:
    """Return calls on keys without a cache that the dense kernel computes, and that differ in one argument."""
    changes: list[Options] = [
        {"max_seqlen_q": 41},
        {"softmax_scale": 0.5},
        {"softcap": 3.0},
        {"softcap": 3.0, "return_softmax_lse": True},
        {"s_aux": torch.zeros(HEADS)},
        {"window_size": (4, 0)},
        {"window_size": (4, 2)},
        {"window_size": (4, 2), "causal": True},
        {"q": torch.zeros(9, 2 * HEADS, DIM).bfloat16()[:, ::2]},
        {"q": torch.zeros(9, 17 * KV_HEADS, DIM).bfloat16()},
        {name: torch.zeros(9, 2, 72).bfloat16() for name in ("q", "k", "v")},
        {"out": torch.zeros(9, HEADS, DIM).bfloat16(), "softcap": 3.0},
        {"out": torch.zeros(9, HEADS, DIM).bfloat16(), "s_aux": torch.zeros(HEADS), "return_softmax_lse": True},
    ]
    plain = [x | {"max_seqlen_q": 40} for x in uncached() if x["q"].dtype != torch.float8_e4m3fn]
    aliased = plain[0] | {"softcap": 4.0}
    aliased["out"] = aliased["q"]
    return plain + [plain[0] | change for change in changes] + [aliased]


def observed() -> list[Options]:
    """Return calls of the dense kernel that are not replayed."""
    base = dense()[0]
    into = base["q"].clone()
    return [
        base | {"return_softmax_lse": True},  # the keys' mean is added to it
        base | {"s_aux": torch.zeros(HEADS).bfloat16()},
        base | {"window_size": [4, 0]},
        base | {"q": into, "out": into, "return_softmax_lse": True},
        base | {"out": torch.zeros(9, 2 * HEADS, DIM).bfloat16()[:, ::2]},
        base | {"k": torch.zeros(9, 2 * DIM, KV_HEADS).bfloat16().transpose(1, 2)[..., ::2]},
        base | {"cu_seqlens_q": torch.zeros(8).int()[::2]},
    ]


def composed() -> list[tuple[partial[Any], list[Tensor]]]:
    appended = [(partial(call, options), tensors_of(options)) for options in appending()]
    return appended + [(partial(flash_attn_varlen_func, **options), tensors_of(options)) for options in uncached()]


def test_their_number() -> None:
    assert len(appending()) + len(uncached()) == COMPOSED


def kinds(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(kinds(x) for x in result)
    return (result.shape, result.stride(), result.dtype) if isinstance(result, Tensor) else result


def fresh(gpu: PretendedGpu, every: list[Any]) -> list[tuple[Any, list[Launch]]]:
    actual = []
    gpu.launched()  # of plans
    for run, tensors in every:
        gpu.keep(tensors)
        gpu.forget()
        result = kinds(run())
        actual.append((result, gpu.launched()))
    gpu.forget()
    return actual


def test_a_repeated_call_launches_what_a_first_one_does(gpu: PretendedGpu) -> None:
    every = calls()
    wanted = fresh(gpu, every)
    assert sum(bool(launches) for _, launches in wanted) > 0.9 * len(every)
    order = list(range(len(every))) * 3
    random.Random(0).shuffle(order)
    for i in order:
        assert kinds(every[i][0]()) == wanted[i][0]
        assert gpu.launched() == wanted[i][1], i


def words(launches: list[Launch]) -> list[Any]:
    """Return the arguments of the launches in words of 8 bytes."""
    result: list[Any] = []
    for launch in launches:
        result += [launch.kernel, launch.grid, launch.stream]
        for argument in launch.arguments:
            result += [argument[at : at + 8] for at in range(0, len(argument), 8)]
    return result


@pytest.mark.parametrize("i", range(COMPOSED))
def test_several_launches_at_once_are_those_one_by_one(gpu: PretendedGpu, i: int) -> None:
    """They differ only in the addresses of the call's own memory, and consistently."""
    run, tensors = composed()[i]
    gpu.real = True
    gpu.launched()
    wanted = kinds(run())
    one_by_one = words(gpu.launched())
    assert kinds(run()) == wanted
    at_once = words(gpu.launched())
    assert len(at_once) == len(one_by_one)
    inputs = {x.data_ptr().to_bytes(8, "little") for x in tensors}
    moved: dict[Any, Any] = {}
    for a, b in zip(one_by_one, at_once, strict=True):
        if a != b:
            assert a not in inputs
            assert moved.setdefault(a, b) == b
    assert len(set(moved.values())) == len(moved)


def kept_calls() -> list[Any]:
    return [entries for entry in serving_request.ATTENTION_CACHE._entries.values() for entries in entry.values.values()]


@pytest.mark.parametrize("appends", [False, True])
def test_lengths_as_numbers_share_their_launches(gpu: PretendedGpu, appends: bool) -> None:
    options = appending()[0] if appends else base()
    for length in range(1, 9):
        for _ in range(2):
            call(options | {"cache_seqlens": length})
    saved = kept_calls()
    assert len(saved) == 8
    (plan,) = {id(known.plan): known.plan for ((_, known),) in saved}.values()
    assert [len(idle) for idle in plan.idle.values()] == [1]


def test_the_workspace_has_room_for_all(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, int] = {}
    slots, append = serving_cuda.token_slots, serving_cuda.append_kv

    def token_slots(*args: Any) -> Any:
        result = slots(*args)
        made.update(zip(("slots", "positions", "lengths", "made_table"), (x.nbytes for x in result), strict=True))
        return result

    def append_kv(*args: Any, **options: Any) -> Tensor:
        result = append(*args, **options)
        made["turned"] = result.nbytes
        pages = zip(("k_cache", "v_cache", "k_scale", "v_scale"), (*args[3:5], *args[6:8]), strict=True)
        made.update({name: x.nbytes for name, x in pages})
        return result

    monkeypatch.setattr(serving_cuda, "token_slots", token_slots)
    monkeypatch.setattr(serving_cuda, "append_kv", append_kv)
    for run, _ in composed():
        gpu.forget()
        run()
        ((_, known),) = kept_calls()[0]
        work = sorted(known.plan.work.items(), key=lambda x: x[1])
        ends = [*(at for _, at in work[1:]), known.plan.work_bytes]
        assert {"slots", "positions", "lengths"} <= {name for name, _ in work}
        for (name, at), end in zip(work, ends, strict=True):
            assert at % 256 == 0
            assert end - at >= made.get(name, 1), name


def test_several_launches_at_once_are_those_of_the_call(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MAX_GUARDS", 1000)
    every = composed()
    wanted = []
    gpu.launched()
    for run, tensors in every:
        gpu.keep(tensors)
        gpu.forget()
        run()
        gpu.launched()
        result = kinds(run())
        wanted.append((result, gpu.launched()))
    gpu.forget()
    for run, _ in every:
        run()
    gpu.launched()
    order = list(range(len(every))) * 3
    random.Random(0).shuffle(order)
    for i in order:
        assert (kinds(every[i][0]()), gpu.launched()) == wanted[i], i


def test_what_is_repeated_skips_the_checks(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other tests would compare a slow path with itself."""
    monkeypatch.setattr(call_cache, "_MAX_GUARDS", 1000)
    options = [base(), base() | {"scheduler_metadata": plan()}, base() | {"out": query(), "return_softmax_lse": True}]
    for inputs in options:
        call(inputs)
        varlen(inputs)
    uncached_calls = [partial(flash_attn_varlen_func, **x) for x in dense()]
    slow = [partial(flash_attn_varlen_func, **x) for x in observed()]
    for run in (*(run for run, _ in composed()), *uncached_calls, *slow[:3]):
        run()
    monkeypatch.setattr(flash_attn, "AttentionCall", None)
    for inputs in options:
        call(inputs)
        varlen(inputs)
    for run in (*(run for run, _ in composed()), *uncached_calls):
        run()
    for run in slow:
        with pytest.raises(TypeError, match="NoneType"):
            run()


@pytest.mark.parametrize("cached", [True, False])
def test_outputs_are_where_they_were_asked_for(gpu: PretendedGpu, cached: bool) -> None:
    inputs = base() | {"out": query()} if cached else next(x for x in dense() if "out" in x)
    attend: Any = call if cached else lambda options: flash_attn_varlen_func(**options)
    gpu.real = True
    address = inputs["out"].data_ptr().to_bytes(8, "little")
    for _ in range(3):
        assert attend(inputs) is inputs["out"]
        assert address in b"".join(gpu.launched()[-1].arguments)
    del inputs["out"]
    result = [attend(inputs) for _ in range(3)]
    assert len({x.untyped_storage().data_ptr() for x in result}) == 3


def test_a_kept_tensor_is_made_before_another_stream_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Tensor] = []

    def settled(x: Tensor) -> Tensor:
        waited.append(x)
        return x

    monkeypatch.setattr(serving_call, "_CONSTANTS", {})
    monkeypatch.setattr(serving_call, "synchronized", settled)
    like = torch.empty(1)
    first, again = (serving_call.get_constant(like, "arange", 1, 3) for _ in range(2))
    assert first is again is waited[0]
    assert len(waited) == 1


@pytest.mark.parametrize("appends", [False, True])
def test_lengths_that_a_stream_made_are_read_on_it_alone(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, appends: bool
) -> None:
    made: list[Tensor] = []
    lengths = flash_attn._parse_lengths

    def noted(*args: Any) -> Tensor:
        made.append(lengths(*args))
        return made[-1]

    monkeypatch.setattr(flash_attn, "_parse_lengths", noted)
    options = (appending()[0] if appends else base()) | {"cache_seqlens": 5}
    for stream, count in ((1, 1), (1, 1), (2, 2), (2, 2)):
        gpu.stream[threading.get_ident()] = stream
        call(options)
        assert len(made) == count


def test_threads_and_streams_have_launches_of_their_own(gpu: PretendedGpu, quick_switches: None) -> None:
    every = [c for i, c in enumerate(calls()) if i % 3 == 0]
    wanted = fresh(gpu, every)
    wrong: list[Any] = []

    def work(stream: int) -> None:
        gpu.stream[threading.get_ident()] = stream
        order = list(range(len(every))) * 4
        random.Random(stream).shuffle(order)
        for i in order:
            every[i][0]()
            launches = [x._replace(stream=7) for x in gpu.launches[threading.get_ident()] if x.stream == stream]
            gpu.launches.pop(threading.get_ident())
            if launches != wanted[i][1]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (1, 2, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"causal": 0}, TypeError),
        ({"softcap": True}, TypeError),
        ({"softcap": -1.0}, ValueError),
        ({"softcap": float("nan")}, ValueError),
        ({"window_size": (True, 0)}, TypeError),
        ({"window_size": (1.0, 0)}, TypeError),
        ({"window_size": 4}, TypeError),
        ({"window_size": (None, None)}, TypeError),
        ({"window_size": (-1, -1, 0.0)}, TypeError),
        ({"softmax_scale": torch.tensor(1.0, requires_grad=True)}, TypeError),
        ({"softmax_scale": True}, TypeError),
        ({"softmax_scale": 0.0}, ValueError),
        ({"num_splits": True}, TypeError),
        ({"attention_chunk": 1}, NotImplementedError),
        ({"max_seqlen_q": True, "q": query()[:, 0], "cu_seqlens_q": STARTS}, TypeError),
        ({"cache_seqlens": True}, TypeError),
        ({"cache_seqlens": 9.0}, TypeError),
        ({"cache_seqlens": torch.zeros(BATCH)}, TypeError),
        ({"cache_seqlens": torch.zeros(BATCH + 1).int()}, ValueError),
        ({"page_table": torch.zeros(BATCH, 4)}, TypeError),
        ({"page_table": torch.zeros(4, BATCH).int().t()}, ValueError),
        ({"q": torch.zeros(BATCH, 1, HEADS, DIM)}, TypeError),
        ({"q": [1]}, TypeError),
        ({"s_aux": query()}, ValueError),
        ({"s_aux": torch.zeros(2 * HEADS)[::2]}, ValueError),
        ({"out": query(dtype=torch.float16)}, TypeError),
        ({"out": query(2)}, ValueError),
        ({"scheduler_metadata": 1}, TypeError),
        ({"scheduler_metadata": plan().tensor}, TypeError),
        ({"scheduler_metadata": {"max_seqlen_q": 2}}, ValueError),
        ({"scheduler_metadata": {"heads": 16}}, ValueError),
        ({"scheduler_metadata": {"causal": True}}, ValueError),
        ({"q_descale": torch.ones(())}, ValueError),
        ({"k_descale": torch.ones(KV_HEADS).double()}, TypeError),
        ({"block_table": torch.zeros(BATCH, 4).int()}, ValueError),
        ({"k": query()}, ValueError),
        ({"cache_batch_idx": torch.zeros(BATCH).int()}, ValueError),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else "",
)
def test_every_refusal_stays(gpu: PretendedGpu, change: Options, error: type[Exception]) -> None:
    for options in variants():
        call(options)
    made = {name: plan(**x) if isinstance(x, dict) else x for name, x in change.items()}
    gpu.launched()
    for _ in range(2):
        with pytest.raises(error):
            call(base() | made)
    assert not gpu.launched()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"causal": 1}, TypeError, "causal: 1"),
        ({"softcap": True}, TypeError, "softcap: True"),
        ({"softcap": -3.0}, ValueError, "softcap: -3.0"),
        ({"softcap": float("nan")}, ValueError, "softcap: nan"),
        ({"window_size": (True, 0)}, TypeError, "window_size: "),
        ({"window_size": (4.0, 0)}, TypeError, "window_size: "),
        ({"window_size": 4}, TypeError, "window_size: "),
        ({"softmax_scale": True}, TypeError, "softmax_scale: "),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale: "),
        ({"softmax_scale": torch.tensor(0.5, requires_grad=True)}, TypeError, "softmax_scale: "),
        ({"num_splits": True}, TypeError, "num_splits: "),
        ({"max_seqlen_q": True}, TypeError, "max_seqlen_q: "),
        ({"max_seqlen_q": 40.0}, TypeError, "max_seqlen_q: "),
        ({"max_seqlen_k": None}, TypeError, "max_seqlen_k: "),
        ({"seqused_q": torch.ones(3).int()}, NotImplementedError, "seqused_q: "),
        ({"seqused_k": torch.ones(3)}, TypeError, "seqused_k "),
        ({"seqused_k": torch.ones(4).int()}, ValueError, "seqused_k|cu_seqlens_q"),
        ({"cu_seqlens_k": torch.ones(3).int()}, ValueError, "cu_seqlens_k: "),
        ({"cu_seqlens_q": torch.zeros(4)}, TypeError, "cu_seqlens_q: "),
        ({"q": torch.zeros(9, HEADS, DIM)}, TypeError, "q: "),
        ({"q": [1]}, TypeError, "q: "),
        ({"k": torch.zeros(9, 3, DIM).bfloat16()}, ValueError, "q: it has 8 heads, k 3"),
        ({"v": torch.zeros(9, KV_HEADS, DIM).half()}, TypeError, "v: "),
        ({"k_descale": torch.ones(())}, ValueError, "k_descale, v_descale: "),
        ({"q_descale": torch.ones(())}, ValueError, r"q_scale \(q_descale\): "),
        ({"s_aux": torch.zeros(2 * HEADS)}, ValueError, r"sinks \(s_aux\): "),
        ({"out": torch.zeros(9, HEADS, DIM).half()}, TypeError, "out: its dtype"),
        ({"out": torch.zeros(8, HEADS, DIM).bfloat16()}, ValueError, "out: its shape"),
        ({"out": torch.zeros(1, HEADS, DIM).bfloat16().expand(9, HEADS, DIM)}, ValueError, "out: .* share memory"),
        ({"scheduler_metadata": 1}, TypeError, "scheduler_metadata: "),
        ({"block_table": torch.zeros(3, 4).int()}, ValueError, "seqused_k: None"),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else "",
)
def test_every_refusal_of_keys_without_a_cache_stays(
    gpu: PretendedGpu, change: Options, error: type[Exception], message: str
) -> None:
    every = dense()
    for options in every:
        flash_attn_varlen_func(**options)
    gpu.launched()
    for _ in range(2):
        with pytest.raises(error, match=message):
            flash_attn_varlen_func(**(every[0] | change))
    assert not gpu.launched()


def test_arguments_in_the_wrong_places_are_refused(gpu: PretendedGpu) -> None:
    """In one sequence, their values equal a cached call's."""
    made = plan()
    call(base() | {"scheduler_metadata": made})
    parts = {"scheduler_metadata": made.tensor, "max_seqlen_q": 1, "softmax_scale": HEADS, "causal": KV_HEADS}
    with pytest.raises(TypeError):
        call(base() | parts | {"window_size": (DIM, made.mask, None, None, False, -1, -1)})


def test_a_cache_at_an_odd_address_is_refused_after_one_that_is_not(gpu: PretendedGpu) -> None:
    inputs = base()
    memory = torch.zeros(inputs["k_cache"].numel() + 8, dtype=torch.uint8)
    places = [memory[at:][: inputs["k_cache"].numel()].view(torch.float8_e4m3fn) for at in (0, 8)]
    good, bad = (x.view(inputs["k_cache"].shape) for x in places)
    gpu.keep([memory])
    for _ in range(2):
        call(inputs | {"k_cache": good})
    with pytest.raises(ValueError, match="k_cache: it begins at address"):
        call(inputs | {"k_cache": bad})


@pytest.mark.parametrize(
    ("cached", "name", "launch"), [(True, "q", -1), (False, "q", 2), (False, "k", 1), (False, "v", 1)]
)
def test_tensors_at_an_odd_address_are_copied(gpu: PretendedGpu, cached: bool, name: str, launch: int) -> None:
    inputs = base() if cached else dense()[0]
    attend: Any = call if cached else lambda options: flash_attn_varlen_func(**options)
    memory = torch.zeros(inputs[name].numel() + 4).bfloat16()
    gpu.keep([memory, *tensors_of(inputs)])
    odd = memory[4:].view(inputs[name].shape)
    for _ in range(2):
        attend(inputs)
    gpu.launched()
    attend(inputs | {name: odd})
    launches = gpu.launched()
    assert cached or len(launches) == 3
    assert odd.data_ptr().to_bytes(8, "little") not in b"".join(launches[launch].arguments)


def test_a_plan_that_was_changed_is_checked_again(gpu: PretendedGpu) -> None:
    made = plan()
    inputs = base() | {"scheduler_metadata": made}
    call(inputs)
    call(inputs)
    made.heads = 16
    with pytest.raises(ValueError, match="made for heads 16"):
        call(inputs)


def test_a_plan_is_made_again_in_its_memory(gpu: PretendedGpu) -> None:
    made = plan()
    gpu.keep([made.tensor, made.cu_seqlens_q, made.seqused_k])
    gpu.launched()
    position = made.tensor.data_ptr().to_bytes(8, "little")
    made.update()
    (launch,) = gpu.launched()
    assert position in launch.arguments
    made.kv_heads = 8
    with pytest.raises(ValueError, match="make a new plan"):
        made.update()
    assert not gpu.launched()


def test_pages_are_checked_where_that_is_asked_for(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_checks, "_CHECK_PAGES_ENABLED", True)
    inputs = base()
    call(inputs)
    call(inputs)
    with pytest.raises(ValueError, match="9999 of sequence 0"):
        call(inputs | {"cache_seqlens": torch.full((BATCH,), 9999).int()})


class Subclass(Tensor):
    pass


@pytest.mark.parametrize("cached", [True, False])
def test_an_observed_call_goes_through_the_dispatcher(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    inputs = base() if cached else dense()[0]
    tensors = ("page_table", "cache_seqlens", "k_descale") if cached else ("cu_seqlens_q", "cu_seqlens_k")
    leaves = ("q",) if cached else ("q", "k", "v")
    seen: list[Any] = []

    def attend(**changes: Any) -> None:
        call(inputs | changes) if cached else flash_attn_varlen_func(**(inputs | changes))

    def dispatched(query: Tensor, *args: Any) -> Any:
        seen.append(args)
        return (query.clone(), torch.zeros(query.shape[1], query.shape[0])) if cached else query

    for _ in range(2):
        attend()
    gpu.launched()
    monkeypatch.setattr(*((serving_ops, "_PAGED_ATTENTION") if cached else (varlen_module, "VARLEN")), dispatched)
    for observer in (torch.autograd.profiler.profile(), torch.autocast("cpu", torch.bfloat16), forward_ad.dual_level()):
        with observer:
            attend()
        assert seen.pop()
    for name in (*leaves, *tensors, *(["k_cache"] if cached else [])):
        attend(**{name: inputs[name].as_subclass(Subclass)})
        assert seen.pop()
    for name in leaves:
        attend(**{name: inputs[name].clone().requires_grad_()})
        assert seen.pop()

    def transformed(x: Tensor) -> Tensor:
        attend()
        return x

    torch.vmap(transformed)(torch.zeros(2))
    assert seen.pop()
    assert not gpu.launched()
    attend()
    with torch.no_grad():
        attend(q=inputs["q"].clone().requires_grad_())
    assert not seen
    assert len(gpu.launched()) == (4 if cached else 6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        attend()
    assert seen
