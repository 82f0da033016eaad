"""``sdpa`` with ``skip_threshold`` on the CPU: against float64, without effect on gradients, and its refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.ops import reference
from greenfast.ops.quantized import TOKEN

sdpa: Any = greenfast.sdpa
COMPILE: Any = torch.compile
TILE, ROWS = 128, 64


def make_inputs(q_len: int, kv_len: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V with the largest weights at the first key, and near the query's place from the end."""
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = (
        torch.randn(2, heads, rows, head_dim, generator=generator)
        for heads, rows in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    places = 0.4 * torch.randn(-(-kv_len // ROWS), head_dim, generator=generator).repeat_interleave(ROWS, 0)[:kv_len]
    q, k = 1.0 + 0.4 * q + places[-q_len:], 0.4 * k + places
    k[:, :, 0] += 5 * head_dim**-0.5
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, threshold: float, partial_first: bool
) -> tuple[Tensor, Tensor, float]:
    """Compute attention in float64, group by group and tile by tile. q, mask: (S, ...); k, v: (KV, ...), of one head.

    Returns the output, the log-sum-exp, and the share of tiles with a key that are skipped.
    """
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~mask, -math.inf)
    skipped = attended = 0
    for first in range(0, q.shape[0], ROWS):
        tiles = [slice(key, key + TILE) for key in range(0, k.shape[0], TILE)]
        if partial_first:
            block = mask[first // TILE * TILE : first // TILE * TILE + TILE]
            tiles.sort(key=lambda tile: bool(block[:, tile].all()) and tile.stop <= k.shape[0])
        group = scores[first : first + ROWS]
        largest = torch.full_like(group[:, 0], -math.inf)
        for tile in tiles:
            tops = group[:, tile].amax(1)
            if (tops == -math.inf).all():
                continue
            attended += 1
            if ((tops == -math.inf) | (torch.exp(tops - largest) < threshold)).all():
                group[:, tile] = -math.inf
                skipped += 1
            largest = torch.maximum(largest, tops)
    lse = scores.logsumexp(1)
    return torch.softmax(scores, 1).nan_to_num(0.0) @ v, lse, skipped / attended


def make_bool(q_len: int, kv_len: int, generator: torch.Generator) -> Tensor:
    """Return a mask with empty, full and partial tiles, partial ones later than full ones."""
    mask = torch.ones(4, q_len, kv_len, dtype=torch.bool)
    mask[1, :, 256:] = torch.rand(q_len, kv_len - 256, generator=generator) > 0.3
    mask[2, :TILE, :TILE] = False
    mask[2, 70:90] = False
    mask[3, :, 128:256] &= torch.rand(q_len, 128, generator=generator) > 0.9
    return mask


CASES: dict[str, tuple[tuple[int, int], Any, dict[str, Any]]] = {
    "no mask": ((300, 700), "fp8", {}),
    "causal": ((300, 300), "int8", {"is_causal": True}),
    "causal, lower right": ((150, 640), "int8_fine", {"is_causal": True, "causal_alignment": "lower_right"}),
    "window": ((200, 640), "fp8", {"window": (600, 20), "causal_alignment": "lower_right"}),
    "lengths": ((100, 640), "int8", {"kv_lengths": torch.tensor([640, 300])}),
    "lists": ((200, 650), "fp8", {"attn_mask": make_bool(200, 650, torch.Generator().manual_seed(0))}),
}  # fmt: skip


@pytest.mark.parametrize("threshold", [0.05, 0.4])
@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_float64(case: str, threshold: float) -> None:
    (q_len, kv_len), precision, options = CASES[case]
    q, k, v = make_inputs(q_len, kv_len)
    out, lse = sdpa(q, k, v, **options, enable_gqa=True, precision=precision, skip_threshold=threshold, return_lse=True)
    own = torch.arange(q_len).unsqueeze(1) + (kv_len - q_len if "causal_alignment" in options else 0)
    left, right = options.get("window", (kv_len, 0 if "is_causal" in options else kv_len))
    keys = torch.arange(kv_len)
    mask = (keys <= own + right) & (keys >= own - left)
    shares = []
    for b in range(2):
        length = int(options["kv_lengths"][b]) if "kv_lengths" in options else kv_len
        parts = (q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length])
        codes: Any = greenfast.quantize(*parts, precision=precision)
        scores = reference.compute_mean_scores(parts[0], codes.key_mean, rotated=True) * q.shape[3] ** -0.5
        wide = [x(codes)[0].double() for x in (reference.dequantize_queries, reference.dequantize_keys)]
        values = reference.dequantize_values(codes)[0].double()
        for h in range(4):
            of_head = options["attn_mask"][h] if "attn_mask" in options else mask
            wanted, sums, share = attend(
                wide[0][h], wide[1][h // 2], values[h // 2], of_head[:, :length], threshold, "attn_mask" in options
            )
            shares.append(share)
            assert (out[b, h] - wanted).norm() < 0.03 * wanted.norm()
            has_keys = sums > -math.inf
            assert torch.equal(lse[b, h] > -math.inf, has_keys)
            assert (lse[b, h] - sums - scores[0, h])[has_keys].abs().max() < 0.01
    assert 0.01 < sum(shares) / len(shares) < 0.95


def test_a_threshold_that_no_weight_is_below_changes_no_bit() -> None:
    q, k, v = make_inputs(200, 400)
    for options in (
        {},
        {"is_causal": True},
        {"window": (150, 9)},
        {"attn_mask": make_bool(200, 400, torch.Generator())},
    ):
        dense = sdpa(q, k, v, **options, enable_gqa=True)
        assert torch.equal(sdpa(q, k, v, **options, enable_gqa=True, skip_threshold=0.0), dense)
        assert torch.equal(sdpa(q, k, v, **options, enable_gqa=True, skip_threshold=1e-30), dense)
        assert not torch.equal(sdpa(q, k, v, **options, enable_gqa=True, skip_threshold=0.5), dense)


def test_a_skipped_tile_that_is_not_finite_is_seen() -> None:
    q, k, v = make_inputs(128, 512)
    assert not torch.equal(sdpa(q, k, v, enable_gqa=True, skip_threshold=0.9), sdpa(q, k, v, enable_gqa=True))
    for x in (v, k):
        x[1, 0, 140] = float("nan")
        nan = sdpa(q, k, v, enable_gqa=True, skip_threshold=0.9).isnan()
        assert nan[1, :2].all()
        assert not nan[0].any()
        assert not nan[1, 2:].any()
        x[1, 0, 140] = 0.0


def test_gradients_are_those_without_skipped_tiles() -> None:
    grads = []
    for threshold in (0.0, 0.5):
        inputs = [x.requires_grad_() for x in make_inputs(100, 300)]
        sdpa(*inputs, enable_gqa=True, window=(400, 400), skip_threshold=threshold).sum().backward()
        grads.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_it_compiles_and_is_explained() -> None:
    q, k, v = make_inputs(100, 300)
    call = COMPILE(lambda *x: sdpa(*x, enable_gqa=True, skip_threshold=0.5), fullgraph=True, backend="eager")
    assert torch.equal(call(q, k, v), sdpa(q, k, v, enable_gqa=True, skip_threshold=0.5))
    explanation = greenfast.explain(q, k, v, enable_gqa=True, skip_threshold=0.5, target="sm_90a")
    assert explanation.taken
    assert "skip_threshold" in explanation.reason
    assert not greenfast.explain(q, k, v, enable_gqa=True, skip_threshold=0.5, target="sm_89").taken


@pytest.mark.parametrize("threshold", [1.0, -0.1, float("nan"), float("inf")])
def test_other_numbers_are_refused(threshold: float) -> None:
    q, k, v = make_inputs(10, 10)
    with pytest.raises(ValueError, match=r"skip_threshold: .* a number from 0 to below 1 is needed"):
        sdpa(q, k, v, enable_gqa=True, skip_threshold=threshold)


@pytest.mark.parametrize("threshold", ["0.1", True, None])
def test_what_is_no_number_is_refused(threshold: Any) -> None:
    q, k, v = make_inputs(10, 10)
    with pytest.raises(TypeError, match="skip_threshold: "):
        sdpa(q, k, v, enable_gqa=True, skip_threshold=threshold)


def test_calls_without_kernels_for_it_are_refused() -> None:
    q, k, v = make_inputs(10, 10)
    with pytest.raises(NotImplementedError, match="skip_threshold"):
        sdpa(q, k, v, enable_gqa=True, precision=TOKEN, skip_threshold=0.1)
    nested = torch.nested.nested_tensor([q[0].transpose(0, 1)] * 2, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(NotImplementedError, match="skip_threshold: not with nested tensors"):
        sdpa(nested, nested, nested, skip_threshold=0.1)
