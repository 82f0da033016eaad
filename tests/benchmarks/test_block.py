"""The benchmark of the attention block: its norm and RoPE equal ``attention_block``'s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import greenfast
from benchmarks import block
from benchmarks.__main__ import BENCHMARKS


@pytest.mark.parametrize(
    "name",
    [
        "Flux-like", "Flux-like, text and image", "Llama-like, 2k", "Gemma-like", "SD3-like", "LTX-like",
        "CogVideoX-like",
    ],
)  # fmt: skip
def test_separate_steps_equal_the_block(name: str) -> None:
    case = block.CASES[name]
    case = replace(
        case, batch=1, heads=4, kv_heads=4 if case.head_tables else 2, tokens=140, text=min(case.text, 50)
    )  # fmt: skip
    inputs = block.make_inputs(case, "cpu")
    sdpa: Any = greenfast.sdpa
    steps = block.normalize_and_rotate(inputs.parts, inputs.rope, case.interleaved)
    separate = sdpa(*(x.transpose(1, 2) for x in steps), is_causal=case.causal, enable_gqa=True)
    fused = block.block(*inputs.heads_first, case.causal, **inputs.options())
    assert (fused - separate).float().norm() < 5e-3 * separate.float().norm()
    assert block.measure_error(inputs, fused) < 0.06
    assert block.measure_error(inputs, torch.zeros_like(fused)) == pytest.approx(1.0)
    assert block.measure_error(inputs, fused.flip(2)) > 0.9


@pytest.mark.parametrize("whole", [False, True])
def test_codes_and_scales_are_the_rotated_tensors(whole: bool) -> None:
    inputs = block.make_inputs(replace(block.CASES["Llama-like, 2k"], batch=2, heads=4, kv_heads=2, tokens=20), "cpu")
    codes, scales = block.convert(inputs.parts, inputs.rope, False, whole)
    for found, scale, wanted in zip(
        codes, scales, block.normalize_and_rotate(inputs.parts, inputs.rope, False), strict=True
    ):
        assert scale.shape == ((1, 1, 1, 1) if whole else (2, 2))
        by_head = scale if whole else scale.repeat_interleave(wanted.shape[2] // 2, 1)[:, None, :, None]
        assert (found.float() * by_head - wanted.float()).norm() < 0.04 * wanted.float().norm()
        assert found.float().abs().max() == 448.0


def test_it_is_listed() -> None:
    assert BENCHMARKS["block"][0] == "block:main"
    assert set(block.CASES) >= {"Wan-like", "Flux-like", "Gemma-like"}
    assert torch.is_tensor(block.make_inputs(replace(block.CASES["16 x 1k"], batch=1, tokens=8), "cpu").parts[0].q)
