"""The inputs of ``python -m benchmarks masks``, small and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import masks

HEADS = (4, 2)
MAKERS: dict[str, Callable[[], masks.MaskInputs]] = {
    "blocks": lambda: masks.make_blocks(HEADS, 0.5, 600, "cpu"),
    "documents": lambda: masks.make_documents(HEADS, False, (40, 300, 1, 200), "cpu"),
    "causal documents": lambda: masks.make_documents(HEADS, True, (40, 300, 1, 200), "cpu"),
    "window": lambda: masks.make_window(HEADS, 600, 150, "cpu"),
    "padding": lambda: masks.make_padding(HEADS, (300, 130, 1), "cpu"),
}


def make_dense(inputs: masks.MaskInputs) -> Tensor:
    """Return the mask as booleans, (B, H, S, KV), from ``allows``."""
    batch, heads, length, _ = inputs.q.shape
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    dense: Tensor = inputs.allows(b, h, torch.arange(length).view(-1, 1), torch.arange(length))
    return dense.expand(batch, heads, length, length)


@pytest.mark.parametrize("case", MAKERS)
def test_the_mask_by_tiles_and_the_errors_are_those_of_the_case(case: str) -> None:
    inputs = MAKERS[case]()
    dense = make_dense(inputs)
    assert torch.equal(inputs.mask.to_bool().expand(dense.shape), dense)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    wide = [x.double() for x in (inputs.q, inputs.k, inputs.v)]
    assert masks.measure_error(inputs, attend(*wide, attn_mask=dense, enable_gqa=True)) < 1e-6
    assert masks.measure_error(inputs, attend(*wide, enable_gqa=True)) > 0.3


def test_every_block_of_rows_has_as_many_tiles() -> None:
    inputs = masks.make_blocks(HEADS, 0.4, 1280, "cpu")
    assert (inputs.mask.counts.sum(-1) == 4).all()
    assert not torch.equal(inputs.mask.entries[:, 0], inputs.mask.entries[:, 1])


def test_the_efficiency_is_1_for_as_much_time_as_tiles() -> None:
    us = {"dense": 100.0, "mask": 25.0, "bool": 50.0, "flex": 25.0}
    assert masks.compare_with_dense(us, 0.25, 1.0) == {"mask": 1.0, "bool": 0.5}
    assert masks.compare_with_dense(us, 0.125, 0.5) == {"mask": 1.0, "bool": 0.5}
    assert masks.compare_with_dense({"mask": 25.0}, 0.25, 1.0) == {}


def test_every_case_has_backends_and_its_heads_are_known() -> None:
    for _, names in masks.CASES.values():
        assert set(names) <= set(masks.BACKENDS)
    assert sum(masks.DOCUMENTS) == masks.TOKENS
    assert sum(masks.PADDED) == len(masks.PADDED) * max(masks.PADDED) // 2
