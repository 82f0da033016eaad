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


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("blocks", ("mask", "bool")),
        ("documents", ("mask", "varlen")),
        ("causal documents", ("mask", "varlen")),
        ("window", ("mask", "options", "varlen")),
        ("padding", ("mask", "options")),
    ],
)
def test_the_calls_of_greenfast_attend_to_what_the_mask_allows(case: str, names: tuple[str, ...]) -> None:
    inputs = MAKERS[case]()
    for name in names:
        assert masks.measure_error(inputs, masks.BACKENDS[name].bind(inputs).call()) < 0.1


def test_the_calls_that_make_masks_make_those_of_the_case() -> None:
    for case, name in (("blocks", "from_blocks"), ("causal documents", "from_segments"), ("window", "from_bool")):
        inputs = MAKERS[case]()
        assert torch.equal(masks.BACKENDS[name].bind(inputs).call(), inputs.mask.counts)


def test_every_block_of_rows_has_as_many_tiles() -> None:
    inputs = masks.make_blocks(HEADS, 0.4, 1280, "cpu")
    assert (inputs.mask.counts.sum(-1) == 4).all()
    assert not torch.equal(inputs.mask.entries[:, 0], inputs.mask.entries[:, 1])


def test_the_efficiency_is_1_for_as_much_time_as_tiles() -> None:
    us = {"dense": 100.0, "mask": 25.0, "bool": 50.0, "flex": 25.0}
    assert masks.compare_with_dense(us, 0.25, 1.0) == {"mask": 1.0, "bool": 0.5}
    assert masks.compare_with_dense(us, 0.125, 0.5) == {"mask": 1.0, "bool": 0.5}
    assert masks.compare_with_dense({"mask": 25.0}, 0.25, 1.0) == {}


def test_the_time_to_make_a_mask_is_a_share_of_attention() -> None:
    us = {"mask": 50.0, "from_bool": 5.0, "from_blocks": 1.0, "dense": 9.0}
    assert masks.compare_making(us) == {"from_bool": 0.1, "from_blocks": 0.02}
    assert masks.compare_making({"from_bool": 5.0}) == {}


def test_every_case_has_backends_and_its_heads_are_known() -> None:
    for _, names in masks.CASES.values():
        assert set(names) <= set(masks.BACKENDS)
    assert sum(masks.DOCUMENTS) == masks.TOKENS
    assert sum(masks.PADDED) == len(masks.PADDED) * max(masks.PADDED) // 2


def test_a_larger_threshold_skips_more_and_costs_accuracy() -> None:
    inputs = masks.make_local(HEADS, 0.0, 1000, "cpu")
    assert torch.equal(inputs.mask.to_bool(), make_dense(inputs)[:, :1])
    rows = masks.compare_thresholds(inputs)
    assert [row["threshold"] for row in rows] == list(masks.THRESHOLDS)
    skipped, errors = ([row[name] for row in rows] for name in ("skipped", "error"))
    assert skipped[0] == 0.0
    assert skipped == sorted(skipped)
    assert 0.2 < skipped[-1] < 0.9
    assert errors[0] < 0.1
    assert errors[-1] > 1.5 * errors[0]
    assert masks.compare_thresholds(inputs, diagonal_first=True)[-1]["skipped"] > 0.2


def test_the_common_part_of_local_inputs_is_as_large_everywhere() -> None:
    """Beyond the first chunk of its sum too."""
    inputs = masks.make_local((1, 1), 0.0, 9000, "cpu")
    for part in inputs.q[0, 0].float().unflatten(0, (3, 3000)):  # type: ignore[no-untyped-call]
        assert part.isfinite().all()
        assert 0.8 < part.std() < 1.2


def test_a_small_model_learns_and_its_inputs_are_those_of_attention() -> None:
    layers = masks.train_model(b"abcdefgh" * 100, 3, 64, width=64, layers=1)
    assert [part.shape for part in layers[0]] == [(1, 1, 64, 64)] * 3
    assert all(part.dtype == torch.bfloat16 and part.isfinite().all() for part in layers[0])
