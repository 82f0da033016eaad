"""Routing of calls by measurement, and sdpa(precision="auto")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.utils.flop_counter import FlopCounterMode

import greenfast
from greenfast.kernels import HEAD_DIMS
from greenfast.ops import routing, routing_rules
from greenfast.ops.quantized import PRECISIONS
from greenfast.ops.routing_rules import FA3, TORCH


def rule(
    head_dim: int, causal: bool, precision: str, least: list[float] | None, mean: float = 1.1, against: str = TORCH
) -> dict[str, Any]:
    source = {"against": against, "record": "a record", "device": "a GPU"}
    gains = {"slowest": 1.01, "mean": mean, "fastest": 1.5, "held_out": None}
    kind = {"head_dim": head_dim, "causal": causal, "precision": precision, "least": least, "shapes": 3, "of": 4}
    return {**source, **kind, **(gains if least else {"shapes": 0})}


RULES = [
    rule(64, False, "fp8", [64, 32, 0.001], 1.2),
    rule(64, False, "int8", [16, 16, 0.0]),
    rule(64, True, "fp8", None),
    rule(64, True, "int8", None),
    rule(128, True, "fp8", None),
    rule(128, True, "int8", [48, 32, 0.0]),
    rule(64, False, "fp8", [128, 128, 0.001], 1.2, FA3),
    rule(64, False, "int8", None, against=FA3),
]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """RULES in place of the package's, and CPU tensors treated as such of a GPU that was measured."""
    monkeypatch.setattr(routing_rules, "load_data", lambda: {"rules": RULES})
    monkeypatch.setattr(routing, "_have_rules", lambda query, gpu: True)
    routing_rules.find_rules.cache_clear()
    yield
    routing_rules.find_rules.cache_clear()


def tensors(length: int = 64, keys: int = 64, head_dim: int = 64, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((1, heads, length, head_dim), (1, 2, keys, head_dim), (1, 2, keys, head_dim))
    q, k, v = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    return q, k, v


def test_auto_compares_only_calls_that_pytorch_has(rules: None) -> None:
    """PyTorch would be faster on 15 queries, but has no softcap."""
    q, k, v = tensors(15)
    options: dict[str, Any] = {"attn_mask": torch.ones(15, 64, dtype=torch.bool).tril(3), "softcap": 5.0}
    assert greenfast.explain(q, k, v, precision="auto", **options).precision == "fp8"
    assert torch.equal(greenfast.sdpa(q, k, v, precision="auto", **options), greenfast.sdpa(q, k, v, **options))


@pytest.mark.parametrize(
    ("shape", "causal", "precision", "wanted"),
    [
        ({}, False, "auto", "fp8"),  # it gains more
        ({}, False, "int8", "int8"),
        ({"length": 63}, False, "auto", "int8"),  # reuse too small for fp8's rule
        ({"length": 63}, False, "fp8", ""),
        ({"length": 16, "heads": 8}, False, "auto", "fp8"),  # four heads of a group read each key
        ({"length": 15}, False, "auto", ""),
        ({"keys": 31}, False, "auto", "int8"),
        ({"keys": 15}, False, "auto", ""),
        ({}, True, "auto", ""),  # no rule: PyTorch is faster everywhere
        ({}, False, "int8_fine", ""),  # not measured, and short
        ({"head_dim": 128}, True, "auto", "int8"),
        ({"head_dim": 128}, True, "fp8", ""),
        ({"head_dim": 96}, True, "auto", ""),  # not measured, and short
    ],
)
def test_a_rule_decides(rules: None, shape: dict[str, int], causal: bool, precision: Any, wanted: str) -> None:
    q, k, v = tensors(**shape)
    result = greenfast.explain(q, k, v, is_causal=causal, enable_gqa=True, precision=precision, min_length=None)
    assert result.precision == wanted
    assert result.taken == bool(wanted)
    if precision == "auto":
        assert greenfast.explain(q, k, v, is_causal=causal, enable_gqa=True, precision="auto") == result
    out = greenfast.sdpa(q, k, v, is_causal=causal, enable_gqa=True, precision="auto")
    auto = greenfast.explain(q, k, v, is_causal=causal, enable_gqa=True, precision="auto").precision
    if auto:
        same = greenfast.sdpa(q, k, v, is_causal=causal, enable_gqa=True, precision=auto)  # type: ignore[call-overload]
    else:
        same = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert torch.equal(out, same)


def test_the_measurement_is_quoted(rules: None) -> None:
    taken = greenfast.explain(*tensors(), precision="auto").reason
    assert "fp8 1.01 to 1.50 times as fast as PyTorch's attention on the 3 of 4 measured shapes" in taken
    assert "64 queries to a key, 32 keys" in taken
    assert "(a GPU, a record)" in taken
    left = greenfast.explain(*tensors(length=8), precision="fp8", min_length=None)
    assert left.kernel == "torch"
    assert left.reason.startswith("not known to be faster than PyTorch here: fp8 1.01 to 1.50")
    none = greenfast.explain(*tensors(), is_causal=True, precision="auto").reason
    assert none == "not known to be faster than PyTorch here: no measured shapes show it"


@pytest.mark.parametrize(
    ("lengths", "alignment", "wanted"),
    [
        ((48, 48), "upper_left", "int8"),
        ((48, 64), "upper_left", ""),  # 64 keys are quantized for 48 that count: each is read less often
        ((64, 80), "upper_left", "int8"),
        ((64, 256), "upper_left", ""),
        ((512, 32), "upper_left", "int8"),
        ((48, 256), "lower_right", "int8"),
        ((64, 32), "lower_right", ""),  # half of the queries attend to nothing
    ],
)
def test_what_a_mask_leaves_is_what_counts(rules: None, lengths: tuple[int, int], alignment: Any, wanted: str) -> None:
    q, k, v = tensors(lengths[0], lengths[1], 128)
    result = greenfast.explain(q, k, v, is_causal=True, precision="auto", causal_alignment=alignment)
    assert result.precision == wanted


def test_a_precision_that_was_not_measured_is_not_called_slower(rules: None) -> None:
    q = torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16)
    result = greenfast.explain(q, q, q, precision="int8_fine", min_length=None)
    assert (result.precision, result.taken) == ("int8_fine", True)
    left = greenfast.explain(q[:, :, 1:], q, q, precision="int8_fine", min_length=None)
    assert left.reason == "such calls have not been measured; they are taken from 4096 queries and keys on"


def test_a_later_flash_attention_has_rules_of_its_own(rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(127, 128)
    assert greenfast.explain(q, k, v, precision="auto").precision == "fp8"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    saved = greenfast.explain(q, k, v, precision="auto")
    assert (saved.kernel, saved.taken) == ("torch", False)
    taken = greenfast.explain(*tensors(128, 128), precision="auto")
    assert taken.precision == "fp8"
    assert f"times as fast as {FA3} on" in taken.reason
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")  # PyTorch of before
    assert greenfast.explain(q, k, v, precision="auto").precision == "fp8"


def test_use_follows_the_rules_and_counts(rules: None) -> None:
    q, k, v = tensors()
    short = tensors(length=8)
    with greenfast.use("auto") as routed:
        result = functional.scaled_dot_product_attention(q, k, v)
        saved = functional.scaled_dot_product_attention(*short)
    assert torch.equal(result, greenfast.sdpa(q, k, v))
    assert torch.equal(saved, functional.scaled_dot_product_attention(*short))
    assert (routed.taken, routed.fallen_back.total()) == (1, 1)
    with greenfast.use("auto", min_length=65) as routed:
        functional.scaled_dot_product_attention(q, k, v)
    assert routed.taken == 0


def test_auto_takes_what_no_kernel_takes(rules: None) -> None:
    q, k, v = tensors()
    mask = torch.rand(64, 64) < 0.5
    mask[:, 0] = True
    assert torch.equal(
        greenfast.sdpa(q, k, v, mask, precision="auto"), functional.scaled_dot_product_attention(q, k, v, mask)
    )
    negative = greenfast.sdpa(q, k, v, scale=-0.5, precision="auto")
    assert torch.equal(negative, functional.scaled_dot_product_attention(q, k, v, scale=-0.5))
    with pytest.raises(RuntimeError):  # PyTorch's own error
        greenfast.sdpa(q, k[..., :32], v, precision="auto")


def test_auto_aligns_masks_and_casts_as_asked(rules: None) -> None:
    q, k, v = tensors(length=8, keys=40)
    result = greenfast.sdpa(q, k, v, is_causal=True, causal_alignment="lower_right", precision="auto")
    wanted = functional.scaled_dot_product_attention(q, k, v, causal_lower_right(8, 40))
    assert torch.equal(result, wanted)
    with FlopCounterMode(display=False):  # a dispatch mode: no CausalBias can be made
        counted = greenfast.sdpa(q, k, v, is_causal=True, causal_alignment="lower_right", precision="auto")
    assert torch.allclose(counted, wanted, atol=1e-2)
    wide = [x.float() for x in (q, k, v)]
    result = greenfast.sdpa(*wide, precision="auto", float32_as=torch.bfloat16)  # type: ignore[call-overload]
    assert result.dtype == torch.float32
    assert torch.equal(result, functional.scaled_dot_product_attention(q, k, v).float())


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_auto_leaves_rows_without_keys_zero(rules: None, enable_gqa: bool) -> None:
    """PyTorch and the kernels agree; PyTorch's own function would give NaN."""
    q, k, v = tensors(length=14, keys=8, heads=4 if enable_gqa else 2)
    wanted = greenfast.sdpa(q, k, v, is_causal=True, causal_alignment="lower_right", enable_gqa=enable_gqa)
    forms: Any = ({"is_causal": True, "causal_alignment": "lower_right"}, {"attn_mask": causal_lower_right(14, 8)})
    for more in forms:
        assert not greenfast.explain(q, k, v, enable_gqa=enable_gqa, precision="auto", **more).taken
        result = greenfast.sdpa(q, k, v, enable_gqa=enable_gqa, precision="auto", **more)
        assert torch.equal(result[:, :, :6], torch.zeros_like(result[:, :, :6]))
        assert float((result - wanted).norm() / wanted.norm()) < 0.08


def test_auto_takes_a_mask_and_a_causal_one_with_either_alignment(rules: None) -> None:
    q, k, v = tensors(length=8, keys=12)
    everything = torch.ones(8, 12, dtype=torch.bool)
    for alignment in ("upper_left", "lower_right"):
        more: Any = {"is_causal": True, "causal_alignment": alignment, "precision": "auto"}
        assert torch.equal(greenfast.sdpa(q, k, v, everything, **more), greenfast.sdpa(q, k, v, **more))
    half = torch.arange(12) % 2 == 0
    both = half & everything.tril(diagonal=4)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, both)
    torch.testing.assert_close(greenfast.sdpa(q, k, v, half.expand(8, 12), **more), wanted)


def test_auto_with_the_log_sum_exp_is_fp8(rules: None) -> None:
    q, k, v = tensors(length=8)
    result = greenfast.sdpa(q, k, v, precision="auto", return_lse=True)
    wanted = greenfast.sdpa(q, k, v, precision="fp8", return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


@pytest.mark.parametrize(
    ("precision", "inside"),
    [
        ("fp8", False),
        ("auto", True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("int8", True), ("auto", False))),
    ],
)
def test_use_follows_the_rules_in_a_graph(rules: None, precision: Any, inside: bool) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    def routed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with greenfast.use(precision):
            out = attend(q, k, v)
        return out

    compiled = torch.compile(routed if inside else attend, backend="eager", fullgraph=True, dynamic=True)
    for length in (64, 15, 96):
        inputs = tensors(length)
        with nullcontext() if inside else greenfast.use(precision):
            result = compiled(*inputs)
        assert torch.equal(result, routed(*inputs)), length


@pytest.mark.parametrize("alignment", ["", pytest.param("upper_left", marks=pytest.mark.slow), "lower_right"])
def test_rules_hold_while_a_graph_is_traced(rules: None, alignment: str) -> None:
    torch._dynamo.reset()
    more: Any = {"is_causal": True, "causal_alignment": alignment} if alignment else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = greenfast.sdpa(q, k, v, precision="auto", **more)
        return out

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    for lengths in ((64, 64), (96, 96), (8, 8), (15, 40), (70, 60), (60, 70)):
        inputs = tensors(*lengths, head_dim=128 if alignment else 64)
        result, wanted = compiled(*inputs), attend(*inputs)
        assert (
            float((result - wanted).norm() / wanted.norm()) < 0.005
        )  # PyTorch's kernels with masks differ by roundings


def test_unmeasured_calls_need_long_sequences() -> None:
    q = torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16, device="meta")
    assert greenfast.explain(q, q, q, precision="auto").precision == "fp8"
    result = greenfast.explain(q[:, :, 1:], q, q, precision="int8", min_length=None)
    assert (result.kernel, result.precision) == ("torch", "")
    assert "they are taken from 4096 queries and keys on" in result.reason


def test_the_packages_rules_are_of_measured_head_dims() -> None:
    result = routing_rules.load_data()["rules"]
    assert {(rule["against"], rule["precision"], rule["head_dim"], rule["causal"]) for rule in result} == set(
        product((TORCH, FA3), PRECISIONS, HEAD_DIMS, (False, True))
    )
    for rule in result:
        assert rule["least"] is None or rule["slowest"] >= 1.0
        assert 0 <= rule["shapes"] <= rule["of"]
