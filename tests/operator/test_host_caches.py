"""A cached launch equals a newly made one, even where all addresses are the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from greenfast.operator import cuda
from greenfast.operator.sdpa import quantize
from tests.operator.launched import PretendedGpu

Call = Callable[..., Any]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    return PretendedGpu(monkeypatch)


def tensors(heads: int, kv_heads: int, length: int, keys: int, head_dim: int, dtype: torch.dtype, rows: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, head_dim), *[(1, kv_heads, keys, head_dim)] * 2]
    found = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) if rows else x for x in found]


SDPA: list[Call] = [cuda.sdpa, cuda.sdpa_lse]
QUANTIZE: Call = cuda.quantize
SHAPES = [(2, 2, 40, 40), (2, 1, 40, 40), (2, 2, 40, 130), (4, 2, 20, 40), (1, 1, 80, 40)]
SCORES = [("fp8", 0, 0.1), ("int8", 0, 0.1), ("fp8", 1, 0.1), ("fp8", 2, 0.1), ("fp8", 0, 0.2)]
RECIPES = [("fp8", True, True), ("int8", True, True), ("fp8", False, True), ("fp8", True, False)]
SCALES = [("block", "block"), ("block", "head"), ("block", "channel"), ("head", "head"), ("head", "channel")]
OUTPUTS = [(torch.float16, 0, 0.1), (torch.bfloat16, 0, 0.1), (torch.float16, 1, 0.1), (torch.float16, 0, 0.3)]


def calls() -> list[partial[Any]]:
    found: list[partial[Any]] = []
    dtypes = (torch.float16, torch.bfloat16)
    for shape, head_dim, dtype, rows in itertools.product(SHAPES, (64, 72, 128), dtypes, (False, True)):
        inputs = tensors(*shape, head_dim, dtype, rows)
        found += [partial(op, *inputs, *more) for more in SCORES for op in SDPA]
        found += [partial(QUANTIZE, *inputs, precision, True, "block", *more) for precision, *more in RECIPES]
    for shape, (scales, values), precision in itertools.product(SHAPES, SCALES, ("fp8", "int8")):
        inputs = tensors(*shape, 64, torch.float16, False)
        codes = quantize(*inputs, precision=precision, scales=scales, value_scales=values)  # type: ignore[arg-type]
        fields = (*codes.tensors()[:6], precision, 64, shape[3])
        found += [partial(op, *fields, *more) for more in OUTPUTS for op in (cuda.attention, cuda.attention_lse)]
    return found


def test_a_cached_launch_equals_a_new_one(gpu: PretendedGpu) -> None:
    every = calls()
    for call in every[:: len(every) // 3]:  # a few have addresses of their own
        gpu.keep(x for x in call.args if isinstance(x, Tensor))
    fresh = []
    for call in every:
        gpu.forget()
        call()
        fresh.append(gpu.launched())
    assert all(fresh)
    gpu.forget()
    order = list(range(len(every))) * 2
    random.Random(1).shuffle(order)
    for i in order:
        every[i]()
        assert gpu.launched() == fresh[i]
    plans = cuda._PLANS.values()
    assert len(plans) <= len(every)
    assert all(len(idle) == 1 for plan in plans for idle in plan.idle.values()), "calls took the launches of others"
