"""Tensors that begin anywhere in memory: kernels read them in vectors of 16 bytes, so others are copied first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.ops import cuda
from greenfast.ops.launch_plans import LaunchPlan
from greenfast.ops.layout import is_aligned
from greenfast.serving import cuda as serving_cuda
from greenfast.spec.arch import Target
from tests.fuzz.guards import dense
from tests.kernels.serving.appends import Append


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the addresses of the last plan by name, with CPU tensors in place of a GPU's."""
    result: dict[str, int] = {}
    target = Target("sm_90a")

    def launch(plan: LaunchPlan, addresses: Sequence[int]) -> None:
        result.update(zip(plan.names, addresses, strict=True))

    for module in (cuda, serving_cuda):
        monkeypatch.setattr(module, "get_target", lambda _: target)
        monkeypatch.setattr(module, "_PLANS", {})
    monkeypatch.setattr(LaunchPlan, "launch", launch)
    return result


def odd(x: Tensor) -> Tensor:
    """Return a copy with the same strides that begins one element after a multiple of 16 bytes."""
    whole = x.new_empty(x.untyped_storage().nbytes() // x.element_size() + 64)
    first = -(whole.data_ptr() // x.element_size()) % (16 // x.element_size()) + 1
    result = whole.as_strided(x.shape, x.stride(), first)
    assert not is_aligned(result.data_ptr())
    return result.copy_(x)


@pytest.mark.parametrize("norm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["q", "k", "v", "q_weight", "k_weight", "cos", "sin"])
def test_what_is_appended_is_read_at_multiples_of_16_bytes(
    name: str, norm: torch.dtype, addresses: dict[str, int]
) -> None:
    tensors = Append([0, 1, 5], norm=norm, rotary_dim=16).tensors()
    tensors |= {table: tensors[table].contiguous() for table in ("cos", "sin")}
    tensors[name] = odd(tensors[name])
    inputs: list[Any] = [tensors.get(n) for n in serving_cuda._APPEND_BUFFERS[:-1]]
    serving_cuda.append_kv(*inputs, 1e-6, False)
    assert all(is_aligned(addresses[n]) for n in ("q", "k", "v", "q_weight", "k_weight", "cos", "sin"))
    assert all(addresses[n] == tensors[n].data_ptr() for n in ("k_cache", "v_cache", "k_scale", "v_scale"))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_codes_are_read_at_multiples_of_16_bytes(name: str, addresses: dict[str, int]) -> None:
    codes = greenfast.quantize(*(torch.randn(1, 2, 40, 64).half() for _ in "qkv"))
    names = ("query", "key", "value", "query_scale", "key_scale", "value_scale")
    fields = dict(zip(names, codes.tensors(), strict=False))
    for _ in range(2):  # the second time by the plan of the first
        cuda.attention(*fields.values(), "fp8", 64, 40, torch.float16, 0, 0.125)
    fields[name] = odd(fields[name])
    cuda.attention(*fields.values(), "fp8", 64, 40, torch.float16, 0, 0.125)
    assert all(is_aligned(addresses[n]) for n in ("q_codes", "k_codes", "v_codes"))


def test_an_output_that_begins_anywhere_is_written_by_a_copy(addresses: dict[str, int]) -> None:
    q = torch.randn(3, 2, 64).bfloat16()
    cache = greenfast.PagedKVCache(4, 16, 1, 64).layer()
    out = odd(torch.zeros(3, 2, 64).bfloat16())
    assert out.stride() == dense((3, 2, 64))
    table, starts, used = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0, 3], [20]))
    serving_cuda.paged_attention(
        q, cache.k_cache, cache.v_cache, table, starts, used, cache.k_scale, cache.v_scale, None, None, None, 3, True,
        -1, 0, 0.0, 0.125, torch.bfloat16, out,
    )  # fmt: skip
    assert is_aligned(addresses["out"])
