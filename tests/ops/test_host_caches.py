"""A cached launch equals a newly made one, even where all addresses are the same."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.ops import call_cache, cuda, launch_plans, sdpa, torch_ops
from greenfast.ops.sdpa import quantize
from greenfast.spec.errors import MachineError
from tests.ops.launched import PretendedGpu, pretend_cuda

Call = Callable[..., Any]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    return PretendedGpu(monkeypatch)


def tensors(heads: int, kv_heads: int, length: int, keys: int, head_dim: int, dtype: torch.dtype, rows: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, head_dim), *[(1, kv_heads, keys, head_dim)] * 2]
    result = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) if rows else x for x in result]


SDPA: list[Call] = [cuda.sdpa, cuda.sdpa_lse]
QUANTIZE: Call = cuda.quantize
SHAPES = [(2, 2, 40, 40), (2, 1, 40, 40), (2, 2, 40, 130), (4, 2, 20, 40), (1, 1, 80, 40)]
SCORES = [("fp8", 0, 0.1), ("int8", 0, 0.1), ("fp8", 1, 0.1), ("fp8", 2, 0.1), ("fp8", 0, 0.2)]
RECIPES = [("fp8", True, True), ("int8", True, True), ("fp8", False, True), ("fp8", True, False)]
SCALES = [("block", "block"), ("block", "head"), ("block", "channel"), ("head", "head"), ("head", "channel")]
OUTPUTS = [(torch.float16, 0, 0.1), (torch.bfloat16, 0, 0.1), (torch.float16, 1, 0.1), (torch.float16, 0, 0.3)]


def calls() -> list[partial[Any]]:
    result: list[partial[Any]] = []
    dtypes = (torch.float16, torch.bfloat16)
    for shape, head_dim, dtype, rows in itertools.product(SHAPES, (64, 72, 128), dtypes, (False, True)):
        inputs = tensors(*shape, head_dim, dtype, rows)
        result += [partial(op, *inputs, *more) for more in SCORES for op in SDPA]
        result += [partial(QUANTIZE, *inputs, precision, True, "block", *more) for precision, *more in RECIPES]
    for shape, (scales, values), precision in itertools.product(SHAPES, SCALES, ("fp8", "int8")):
        inputs = tensors(*shape, 64, torch.float16, False)
        codes = quantize(*inputs, precision=precision, scales=scales, value_scales=values)  # type: ignore[arg-type]
        fields = (*codes.tensors()[:6], precision, 64, shape[3])
        result += [
            partial(op, *fields, *more) for more in OUTPUTS for op in (cuda.attention, partial(cuda.attend_codes, True))
        ]
    return result


def assert_launches_repeat(gpu: PretendedGpu, every: Sequence[Call], times: int, seed: int) -> None:
    """Check that each call, in any order and ``times`` times, has the launches of a call with empty caches."""
    fresh = []
    for call in every:
        gpu.forget()
        call()
        fresh.append(gpu.launched())
    assert all(fresh)
    gpu.forget()
    order = list(range(len(every))) * times
    random.Random(seed).shuffle(order)
    for i in order:
        every[i]()
        assert gpu.launched() == fresh[i], i


def test_a_cached_launch_equals_a_new_one(gpu: PretendedGpu) -> None:
    every = calls()
    for call in every[:: len(every) // 3]:  # a few have addresses of their own
        gpu.keep(x for x in call.args if isinstance(x, Tensor))
    assert_launches_repeat(gpu, every, 2, seed=1)
    plans = cuda._PLANS.values()
    assert len(plans) <= len(every)
    assert all(len(idle) == 1 for plan in plans for idle in plan.idle.values()), "calls took the launches of others"


def test_memory_is_given_back_where_a_launch_fails(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(2, 2, 40, 40, 64, torch.float16, False)

    def refused(*args: Any) -> None:
        raise MachineError("CUDA: refused")

    for _ in range(2):  # one that is prepared, and one that is taken
        with monkeypatch.context() as patch:
            patch.setattr(launch_plans.BoundLaunches, "__call__", refused)
            with pytest.raises(MachineError):
                SDPA[0](*inputs, "fp8", 0, 0.1)
        SDPA[0](*inputs, "fp8", 0, 0.1)  # a thread holds one workspace at a time
    assert len(gpu.launched()) == 4


def forms() -> list[Call]:
    """Calls of ``greenfast.sdpa`` that differ in one thing from another."""
    q, k, v = tensors(4, 4, 40, 40, 64, torch.bfloat16, False)
    grouped = tensors(4, 2, 40, 40, 64, torch.bfloat16, False)
    options: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_alignment": "lower_right"},
        {"precision": "int8"},
        {"scale": 0.5},
        {"scale": 1.0},
        {"scale": 1},
        {"scale": torch.tensor(0.5)},
        {"return_lse": True},
        {"enable_gqa": True},
    ]
    inputs = [
        (q, k, v), (q, k, k), (q, q, q), (k, q, v), tensors(4, 4, 40, 40, 64, torch.float16, False),
        tensors(4, 4, 40, 40, 64, torch.bfloat16, True), tensors(4, 4, 40, 90, 64, torch.bfloat16, False),
        tensors(4, 4, 40, 40, 72, torch.bfloat16, False), tensors(4, 4, 40, 40, 64, torch.bfloat16, False),
    ]  # fmt: skip
    result = [partial(greenfast.sdpa, *given, **more) for given in inputs for more in options]
    lengths, other = (torch.tensor([n], dtype=torch.int32) for n in (9, 30))
    blocks = [greenfast.BlockMask.from_bool(torch.ones(size, size, dtype=torch.bool).tril()) for size in (40, 40)]
    masks: list[dict[str, Any]] = [
        {"window": (5, 0)}, {"window": (6, 0)}, {"window": (5, 1)}, {"window": (5, 1), "is_causal": True},
        {"window": (5, 1), "causal_alignment": "lower_right"}, {"softcap": 2.0}, {"softcap": 3.0}, {"softcap": 3},
        {"window": [5, 0]}, {"kv_lengths": lengths, "sinks": torch.ones(4), "softcap": 2.0},
        {"window": (5, 1), "precision": "int8", "scale": 2}, {"kv_lengths": lengths, "scale": torch.tensor(0.3)},
        {"kv_lengths": lengths}, {"kv_lengths": other}, {"kv_lengths": lengths.long()}, {"sinks": torch.ones(4)},
        {"sinks": torch.ones(4).bfloat16()}, {"kv_lengths": lengths, "is_causal": True, "scale": 0.5},
        {"attn_mask": blocks[0]}, {"attn_mask": blocks[1]}, {"attn_mask": blocks[0], "softcap": 2.0},
    ]  # fmt: skip
    for given in (x for x in inputs if x[1].shape[2] == 40):
        result += [partial(greenfast.sdpa, *given, **more) for more in masks]
    result += [partial(greenfast.sdpa, *grouped, enable_gqa=True, **more) for more in masks[:9]]
    return [*result, *(partial(greenfast.sdpa, *grouped, enable_gqa=True, **more) for more in options[:8])]


def test_a_repeated_call_launches_what_a_first_one_does(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch_ops, "SDPA_LSE", cuda.sdpa_lse)  # which calls do not skip
    every = forms()
    for call in every:
        gpu.keep(x for x in call.args if isinstance(x, Tensor))  # type: ignore[attr-defined]
    assert_launches_repeat(gpu, every, 3, seed=2)
    monkeypatch.setattr(call_cache, "_MAX_GUARDS", 1000)
    plain = [call for call in every if not {"return_lse", "scale"} & set(call.keywords)]  # type: ignore[attr-defined]
    for call in plain:
        call()
    cached = [
        call
        for call in plain
        if "attn_mask" not in call.keywords  # type: ignore[attr-defined]
        and not any(getattr(x, "dtype", None) in (torch.int64, torch.bfloat16) for x in call.keywords.values())  # type: ignore[attr-defined]
    ]
    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "parse_call", None)  # only a first call checks
        for call in cached:
            call()
    for wrong in ({"is_causal": 1}, {"enable_gqa": 1}, {"scale": True}, {"scale": -0.5}, {"precision": "fp4"}):
        with pytest.raises((TypeError, ValueError)):
            every[0](**wrong)
    monkeypatch.undo()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_view_that_negates_memory_goes_through_the_dispatcher(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The kernels read memory, where the imaginary part of a conjugate has the other sign."""
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch_ops, "SDPA", lambda *args: "dispatched")
    q, k, v = tensors(2, 2, 64, 64, 64, torch.float16, False)
    inputs = [q, k, v]
    inputs[place] = torch._neg_view(inputs[place])
    assert greenfast.sdpa(q, k, v) != "dispatched"
    for _ in range(2):
        assert greenfast.sdpa(*inputs) == "dispatched"


class Subclass(Tensor):
    """Stands for a module's parameter or a DTensor: the dispatcher must see it."""


def test_tensors_are_alike_in_all_that_a_launch_depends_on() -> None:
    cache = call_cache.CallCache(2)
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    cache.put((x, y, "a"), 1)
    assert cache.get((y, x, "a")) == (1, (y, x))
    assert cache.get((torch.ones(4, 4), x, "a"))[0] == 1
    for other in (
        torch.zeros(4, 5), torch.zeros(4, 4, 1), torch.zeros(4, 4).t(), torch.zeros(4, 8)[:, :4],
        torch.zeros(4, 4).half(), torch.zeros(4, 4, device="meta"), torch.zeros(4, 4, requires_grad=True),
        torch.nn.Parameter(x), x.as_subclass(Subclass), torch.zeros(4, 4).to_sparse(), None, 3, [1],
    ):  # fmt: skip
        assert cache.get((other, x, "a"))[0] is None
        assert cache.get((x, other, "a"))[0] is None
    assert cache.get((x, y, "b"))[0] is None
    with torch.inference_mode():
        assert cache.get((torch.zeros(4, 4), torch.zeros(4, 4), "a"))[0] is None
    seen: list[Any] = []

    def transformed(z: Tensor) -> Tensor:
        seen.append(cache.get((x, y, "a"))[0])
        return z

    torch.vmap(transformed)(x)
    torch.jit.trace(transformed, x, check_trace=False)  # type: ignore[no-untyped-call]
    with torch.autocast("cpu", torch.bfloat16):
        transformed(x)
    assert seen == [None, None, None]


def test_other_arguments_are_alike_in_type_and_value() -> None:
    cache = call_cache.CallCache(1)
    x = torch.zeros(3)
    for value in (1, True, 1.0, None, "1", (1, 2)):
        cache.put((x, value), repr(value))
    for value in (1, True, 1.0, None, "1", (1, 2)):
        assert cache.get((x, value))[0] == repr(value)
    others: tuple[Any, ...] = (False, 0, 2.0, torch.tensor(1.0), [1, 2], {}, torch.float16, (2, 1))
    for value in others:
        assert cache.get((x, value))[0] is None
    for other in (torch.tensor(1.0), [1, 2], torch.float16):
        cache.put((x, other), "not kept: its value is not looked at, or may change")
        assert cache.get((x, other))[0] is None


def test_a_tensor_may_be_in_several_places() -> None:
    """A launch depends only on the address of each tensor."""
    cache = call_cache.CallCache(4)
    x, y, z = (torch.zeros(3) for _ in range(3))
    cache.put((x, y, x, x), "as often")
    for inputs in ((x, y, x, x), (z, x, z, z), (x, y, z, x)):
        assert cache.get(inputs) == ("as often", inputs)
    for position in range(4):
        changed = [x, y, x, x]
        changed[position] = torch.zeros(4)
        assert cache.get((*changed,))[0] is None
    assert cache.get((x, x, x, x))[0] is None
    cache.put((x, x, x, x), "everywhere")
    assert cache.get((y, y, y, y))[0] == "everywhere"


def test_no_tensor_is_kept_and_few_kinds_are() -> None:
    cache = call_cache.CallCache(1)
    saved = []
    for n in range(6):
        x = torch.zeros(n + 1)
        saved.append(weakref.ref(x))
        cache.put((x,), n)
    del x
    assert not any(ref() is not None for ref in saved)
    assert [cache.get((torch.zeros(n + 1),))[0] for n in range(6)] == [None, None, 2, 3, 4, 5]
