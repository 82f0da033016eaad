"""The append kernel on the emulator: pages, scales and Q equal the CPU's, which agree with float64."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.device.compiler import compile_kernel, to_ptx
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention.config import KEY_ORDER
from greenfast.kernels.serving import append as kernels
from greenfast.kernels.serving.append import AppendConfig, AppendSizes
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array
from tests.emulator.kernels import run_source
from tests.kernels.serving.appends import (
    CALLS,
    MAX_POSITION,
    Append,
    assert_as_on_the_cpu,
    assert_same_bits,
    flat,
    on_cpu,
    random_call,
    request,
    run_of,
)

HOPPER = Target("sm_90a")


def emulate(call: Append, tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Array]:
    """The buffers that the kernel writes."""
    asked = request(call, tensors)
    result = run_source(asked.kernel, asked.plan, asked.case, seed=seed)
    assert not result.input_writes
    assert result.unwritten.get("q_out", 0) == 0
    return result.outputs


def check(call: Append) -> dict[str, Tensor]:
    """Compare the emulator with the CPU; returns the CPU's tensors."""
    tensors = call.tensors()
    found = emulate(call, tensors)
    assert_as_on_the_cpu(call, tensors, found)
    return tensors


#: The norm and the rotation by themselves, and each with other options, are among the quick calls.
SLOW = (
    *("norm", "partial", "norm and partial", "norm and interleaved", "HND keys", "pages of an engine, rows"),
    *("three, mid group", "sixteen, one group", "seventy in order", "partial, interleaved", "norm, 256", "quarter"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CALLS])
def test_bits_equal_the_cpus(name: str) -> None:
    check(CALLS[name])


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 6))])
def test_bits_of_random_calls_equal_the_cpus(seed: int) -> None:
    check(random_call(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_bits_of_many_random_calls_equal_the_cpus(seed: int) -> None:
    check(random_call(seed))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("norm", [None, torch.bfloat16])
def test_extremes(grouped: bool, norm: torch.dtype | None) -> None:
    factors = {0: 0.0, 1: 1e-40, 2: 1e-36, 3: 3e37, 4: np.inf, 5: np.nan, 6: 1e10, 20: -np.inf}
    call = Append(run_of(3, 24), grouped=grouped, norm=norm, edit=factors, kv_heads=2, rotary_dim=64 if norm else 0)
    made = check(call)
    scales, codes = made["v_scale"], made["v_cache"].view(torch.uint8)
    for token, slot in enumerate(call.slots):
        page, place = divmod(slot, 16)
        row = codes[page, :, 0, :, KEY_ORDER.index(place)] if grouped else codes[page, place]
        unknown = token in (4, 5, 20)
        for of in ("k_scale", "v_scale"):
            assert made[of][page, :, place].isnan().tolist() == [unknown] * 2, (of, token)
        if unknown:
            assert not row.any()
        else:
            assert float(scales[page, 0, place]) > 0
            assert not row.view(torch.float8_e4m3fn).float().isnan().any()


def test_zero_rows_have_scale_one() -> None:
    call = Append([4, 5])
    tensors = call.tensors()
    tensors["k"].zero_()
    on_cpu(call, tensors)
    assert tensors["k_scale"][0, 0, 4:6].tolist() == [1.0, 1.0]
    assert not tensors["k_cache"].view(torch.uint8)[0, 4:6].any()


def test_a_position_outside_the_table_makes_nan() -> None:
    call = Append(run_of(3, 4), rotary_dim=32)
    tensors = call.tensors()
    tensors["positions"] = torch.tensor([0, -1, MAX_POSITION, MAX_POSITION - 1])
    found = emulate(call, tensors)
    q_out = torch.from_numpy(found["q_out"]).view(torch.bfloat16)
    assert q_out.isnan().any(2).tolist() == [[False] * 2, [True] * 2, [True] * 2, [False] * 2]
    assert np.isnan(found["k_scale"].view(np.float32)[3:7]).tolist() == [False, True, True, False]


def test_neighbours_in_a_group_stay() -> None:
    """Half a group each by two blocks of one call, and by two calls, in any order of blocks and warps."""
    first = Append(run_of(3, 5), queries=False, kv_heads=2)
    tensors = first.tensors()
    before = tensors["v_cache"].view(torch.uint8).clone()
    on_cpu(first, tensors)
    changed = (tensors["v_cache"].view(torch.uint8) != before).any((0, 1, 2, 3))
    assert [KEY_ORDER[i] for i in range(16) if changed[i]] == sorted(range(3, 8), key=KEY_ORDER.index)
    for seed in range(3):
        # tokens 56..63 lie in the first tile and begin a group that tokens of the second go on with, out of step
        call = Append([*run_of(0, 56), *run_of(100, 7), *run_of(108, 4), 107], queries=False)
        made = call.tensors()
        found = emulate(call, made, seed)
        on_cpu(call, made)
        assert_same_bits(found["v_cache"], flat(made["v_cache"]), torch.uint8, "v_cache")


def in_float64(call: Append, tensors: dict[str, Tensor], which: str) -> Tensor:
    """Q, K or V after norm and RoPE, (tokens, heads, head_dim), as model code has it."""
    x = tensors[which].double()
    if which == "v":
        return x
    if call.norm:
        x = torch.nn.functional.rms_norm(x, (call.head_dim,), tensors[f"{which}_weight"].double(), 1e-6)
    if call.rotary_dim:
        turned, rest = x[..., : call.rotary_dim], x[..., call.rotary_dim :]
        cos, sin = (tensors[t].double()[tensors["positions"].long()].unsqueeze(1) for t in ("cos", "sin"))
        if call.interleaved:
            number = torch.complex(turned[..., 0::2], turned[..., 1::2]) * torch.complex(cos, sin)
            turned = torch.view_as_real(number).flatten(2)
        else:
            other = torch.cat((-turned[..., call.rotary_dim // 2 :], turned[..., : call.rotary_dim // 2]), 2)
            turned = turned * torch.cat((cos, cos), 2) + other * torch.cat((sin, sin), 2)
        x = torch.cat((turned, rest), 2)
    return x


@pytest.mark.parametrize("seed", range(60))
def test_the_cpu_agrees_with_float64(seed: int) -> None:
    call = random_call(seed)
    tensors = call.tensors()
    before = {n: x.clone() for n, x in tensors.items()}
    q_out = on_cpu(call, tensors)
    if q_out is not None:
        exact, ulp = in_float64(call, before, "q"), torch.finfo(call.dtype).eps
        assert ((q_out.double() - exact).abs() <= 0.501 * ulp * exact.abs() + 1e-6).all()
    for which in "kv":
        x, cache, scale = in_float64(call, before, which), tensors[f"{which}_cache"], tensors[f"{which}_scale"]
        codes, expected = cache.view(torch.uint8), before[f"{which}_cache"].view(torch.uint8).clone()
        for token, slot in enumerate(call.slots):
            if slot < 0:
                continue
            page, place = divmod(slot, call.page_size)
            of_row = scale[page, :, place] if call.scales == "token" else scale
            if call.scales == "token":
                assert torch.allclose(of_row.double(), x[token].abs().amax(1) / 448, rtol=1e-5, atol=0)
            at: tuple[Any, ...] = (page, place)
            if cache.dim() == 5:
                at = (page, slice(None), place // 16, slice(None), KEY_ORDER.index(place % 16))
            quotient = (x[token] / of_row.double().unsqueeze(1)).clamp(-448, 448)
            nearest = quotient.float().to(torch.float8_e4m3fn)
            found = codes[at].view(torch.float8_e4m3fn)
            error, least = ((code.double() - quotient).abs() for code in (found, nearest))
            assert (error <= least + 1e-6 * quotient.abs()).all(), "the nearest code, up to float32's rounding"
            expected[at] = codes[at]
        assert torch.equal(expected, codes), "other slots are as they were"


def test_codes_depend_on_the_scale_alone() -> None:
    """Given the scale that was found, the codes are the same."""
    dynamic = Append([4], queries=False)
    given = replace(dynamic, scales="head")
    found, fixed = dynamic.tensors(), given.tensors()
    on_cpu(dynamic, found)
    for of in ("k_scale", "v_scale"):
        fixed[of] = found[of][0, :, 4]
    on_cpu(given, fixed)
    assert torch.equal(found["k_cache"].view(torch.uint8)[0, 4], fixed["k_cache"].view(torch.uint8)[0, 4])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("grouped", "scales"),
    [
        (True, "token"),
        (False, "head"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, "head"), (False, "token"))),
    ],
)
@pytest.mark.parametrize(
    ("norm", "rotates"),
    [
        ("float32", True),  # what takes most registers
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (("", False), ("", True), ("bfloat16", True), ("float32", False))
        ),
    ],
)
def test_nothing_is_spilled(head_dim: int, grouped: bool, scales: str, norm: str, rotates: bool) -> None:
    layout = "grouped" if grouped else "rows"
    rotary_dim = head_dim if rotates else 0
    config = AppendConfig(
        head_dim=head_dim, page_size=64, norm=norm, rotary_dim=rotary_dim, value_layout=layout, scales=scales
    )
    found = compile_kernel(kernels.kernel(config), HOPPER).resources
    assert (found.spill_store_bytes, found.stack_bytes) == (0, 0), config


def test_no_sum_is_left_to_fusion() -> None:
    """The assembler makes one rounding of two where a sum does not say how it is rounded; the emulator does not."""
    config = AppendConfig(head_dim=128, page_size=64, norm="bfloat16", rotary_dim=128)
    ptx = to_ptx(kernels.kernel(config), HOPPER, assemble=False)
    assert "add.rn.f32" in ptx
    assert not re.search(r"\b(add|sub)(\.ftz)?\.f32", ptx)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("head_dim", 96, "64, 128, 256"),
        ("page_size", 8, "16, 32, 64, 128"),
        ("rotary_dim", 24, "a multiple of 16 up to head_dim 128"),
        ("rotary_dim", 144, "a multiple of 16 up to head_dim 128"),
        ("dtype", "float32", "'float16', 'bfloat16'"),
        ("value_layout", "transposed", "'grouped', 'rows'"),
        ("scales", "block", "'token', 'head'"),
        ("positions", "uint8", "'int64', 'int32'"),
    ],
)
def test_refusals_say_what_is_allowed(option: str, value: object, allowed: str) -> None:
    options: dict[str, Any] = {"head_dim": 128, "page_size": 64, option: value}
    with pytest.raises(UsageError, match=f"^{option}: {value!r}; (allowed are )?{allowed}"):
        AppendConfig(**options)


def test_blocks_take_several_heads_where_there_are_many_tokens() -> None:
    config = AppendConfig(head_dim=128, page_size=64)
    assert [kernels.choose_chunk(config, AppendSizes(t, 32, 8, 1)) for t in (1, 64, 1024, 2048, 16384)] == [
        1,
        1,
        1,
        2,
        8,
    ]
