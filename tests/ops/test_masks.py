"""``sdpa`` with masks, softcap and sinks on the CPU: against float64, over masks, lengths, groups and head dims."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from greenfast.ops import masked
from greenfast.ops.backward import _include_sinks

sdpa: Any = greenfast.sdpa
attention: Any = greenfast.attention
compile_function: Any = torch.compile
LENGTHS = ((1, 1), (7, 300), (130, 129), (300, 300))
WINDOWS = ((-1, -1), (5, 0), (0, 0), (40, 9), (-1, 3), (200, -1))


def make_inputs(q_len: int, kv_len: int, heads: tuple[int, int] = (4, 2), head_dim: int = 64) -> Any:
    generator = torch.Generator().manual_seed(q_len + kv_len)
    return [
        (torch.randn(2, count, rows, head_dim, generator=generator) * 1.5 + 0.3).bfloat16()
        for count, rows in ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))
    ]


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention in float64. allowed: bool, broadcastable to (B, H, S, KV)."""
    share = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(share, 1), v.double().repeat_interleave(share, 1)
    scores = q @ k.mT * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    return torch.softmax(scores, 3).nan_to_num(0.0) @ v, torch.logsumexp(scores, 3)


def check(
    inputs: Any, allowed: Tensor, softcap: float = 0.0, sinks: Tensor | None = None, limit: float = 0.075,
    **options: Any,
) -> None:  # fmt: skip
    """The limit is 1.4 times the error of fp8 without a mask on such inputs."""
    q, k, v = inputs
    wanted, wanted_lse = attend(q, k, v, allowed, softcap, sinks)
    more = {"enable_gqa": True, "softcap": softcap, "sinks": sinks, **options}
    out, lse = sdpa(*inputs, return_lse=True, **more)
    assert torch.equal(out, sdpa(*inputs, **more))
    assert float((out.double() - wanted).norm()) <= limit * float(wanted.norm())
    assert torch.equal(lse.isfinite(), wanted_lse.isfinite())
    finite = wanted_lse.isfinite()
    assert not finite.any() or (lse - wanted_lse)[finite].square().mean().sqrt() < 0.12  # one score is off by 0.1
    assert not out[~wanted_lse.isfinite()].any()


def places(q_len: int, kv_len: int, alignment: str) -> tuple[Tensor, Tensor]:
    return torch.arange(q_len)[:, None] + (kv_len - q_len if alignment == "lower_right" else 0), torch.arange(kv_len)


@pytest.mark.parametrize(("window", "alignment"), list(itertools.product(WINDOWS, ("upper_left", "lower_right"))))
def test_windows_lengths_and_causal_masks_agree_with_float64(window: tuple[int, int], alignment: str) -> None:
    left, right = window
    for (q_len, kv_len), causal in itertools.product(LENGTHS, (False, True)):
        inputs = make_inputs(q_len, kv_len)
        own, keys = places(q_len, kv_len, alignment)
        end = 0 if causal else right
        allowed = (keys <= own + end) if end >= 0 else torch.ones(q_len, kv_len, dtype=torch.bool)
        if left >= 0:
            allowed = allowed & (keys >= own - left)
        more: dict[str, Any] = {"window": window, "is_causal": causal, "causal_alignment": alignment}
        check(inputs, allowed.view(1, 1, q_len, kv_len), **more)
        lengths = torch.tensor([kv_len, kv_len // 3])
        check(inputs, allowed & (keys < lengths.view(2, 1, 1, 1)), kv_lengths=lengths, **more)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
def test_head_dims_groups_and_precisions_agree_with_float64(
    heads: tuple[int, int], head_dim: int, precision: str
) -> None:
    inputs = make_inputs(70, 200, heads, head_dim)
    mask = torch.rand(2, heads[0], 70, 200, generator=torch.Generator().manual_seed(head_dim)) > 0.5
    mask[..., 3, :] = False
    check(inputs, mask, attn_mask=mask, precision=precision)
    sinks = torch.linspace(-3.0, 40.0, heads[0])
    check(inputs, mask, 2.0, sinks, attn_mask=greenfast.BlockMask.from_bool(mask), precision=precision)


@pytest.mark.parametrize("side", ["left", "right", "holes", "one sequence", "all"])
def test_padding_changes_no_bit_whatever_it_holds(side: str) -> None:
    q, k, v = make_inputs(100, 300)
    kept = torch.ones(2, 300, dtype=torch.bool)
    if side in ("left", "right"):
        kept[1, slice(0, 170) if side == "left" else slice(130, 300)] = False
    elif side == "holes":
        kept = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) > 0.4
    else:
        kept[0 if side == "one sequence" else slice(None)] = False
    mask = kept.view(2, 1, 1, 300)
    check((q, k, v), mask, attn_mask=mask)
    first = sdpa(q, k, v, mask, enable_gqa=True)
    for value in (float("nan"), float("inf"), 1e30):
        filled = [x.masked_fill(~kept.view(2, 1, 300, 1), value) for x in (k, v)]
        assert torch.equal(first, sdpa(q, *filled, mask, enable_gqa=True))
    if side == "right":
        assert torch.equal(first, sdpa(q, k, v, kv_lengths=kept.sum(1), enable_gqa=True))


@pytest.mark.parametrize("kind", ["kv_lengths", "mask", "causal mask"])
def test_gradients_and_causal_masks_ignore_what_padding_holds(kind: str) -> None:
    """0 times NaN is NaN, and under a causal mask the padding shares the blocks of other keys."""
    inputs = make_inputs(200, 200)
    kept = torch.arange(200) < torch.tensor([[200], [130]])
    options: dict[str, Any] = {"attn_mask": kept.view(2, 1, 1, 200), "is_causal": kind == "causal mask"}
    if kind == "kv_lengths":
        options = {"kv_lengths": kept.sum(1), "is_causal": True}
    results = []
    for value in (0.0, float("nan"), float("inf"), 1e30):
        padding = ~kept.view(2, 1, 200, 1)
        filled = [inputs[0], *[x.masked_fill(padding, value) for x in inputs[1:]]]
        leaves = [x.clone().requires_grad_() for x in filled]
        out = sdpa(*leaves, enable_gqa=True, **options)
        out.square().sum().backward()
        results.append((out, *[x.grad for x in leaves]))
        assert not leaves[1].grad.masked_select(padding).any()
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_the_automatic_precision_combines_booleans_with_a_causal_mask(alignment: str) -> None:
    """PyTorch's attention, which computes them on a CPU, takes one of both."""
    for q_len, kv_len in ((30, 50), (50, 30)):
        q, k, v = make_inputs(q_len, kv_len, (4, 4))
        own, keys = places(q_len, kv_len, alignment)
        mask = torch.rand(2, 1, q_len, kv_len, generator=torch.Generator().manual_seed(0)) > 0.3
        more: dict[str, Any] = {"is_causal": True, "causal_alignment": alignment, "precision": "auto"}
        wanted = attend(q, k, v, mask & (keys <= own))[0]
        assert float((sdpa(q, k, v, mask, **more).double() - wanted).norm()) <= 0.01 * float(wanted.norm())
    with pytest.raises(ValueError, match="attn_mask: only booleans can be combined with is_causal"):
        sdpa(q, k, v, mask.bfloat16(), **more)


def test_hostile_inputs_agree_with_float64() -> None:
    """Biased keys, outlying channels, tiny and huge values, under a mask with rows of one key."""
    mask = torch.ones(300, 300, dtype=torch.bool).tril() & (torch.rand(300, 300) > 0.7) | torch.eye(300).bool()
    changes: list[tuple[Any, float]] = [
        (lambda q, k, v: (q, k + 20.0, v), 0.075),
        (lambda q, k, v: (q, k, torch.cat([v[..., :1] * 50, v[..., 1:]], -1)), 0.1),
        (lambda q, k, v: (q * 1e-20, k * 1e-10, v * 1e-30), 0.075),
        (lambda q, k, v: (q, k, v * 1e30), 0.075),
    ]
    for change, limit in changes:
        inputs = change(*make_inputs(300, 300))
        q, k, v = inputs
        wanted, _ = attend(q, k, v, mask)
        out = sdpa(*inputs, mask, enable_gqa=True)
        assert float((out.double() - wanted).norm()) <= limit * float(wanted.norm())


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
def test_codes_take_the_masks_of_sdpa(precision: Any) -> None:
    q, k, v = make_inputs(130, 200)
    mask = greenfast.BlockMask.from_bool(torch.rand(2, 1, 130, 200) > 0.5)
    codes = greenfast.quantize(q, k, v, precision=precision, log_sum_exp=True)
    whole = greenfast.quantize(q, k, v, precision=precision, subtract_key_mean=False)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (codes, {"window": (30, 2)}),
        (codes, {"window": (30, -1), "is_causal": True, "causal_alignment": "lower_right"}),
        (codes, {"attn_mask": mask}),
        (codes, {"skip_threshold": 0.01}),
        (whole, {"softcap": 3.0}),
        (whole, {"sinks": torch.linspace(-1.0, 5.0, 4), "attn_mask": mask}),
    ]
    for kept, options in cases:
        wanted, wanted_lse = sdpa(q, k, v, enable_gqa=True, precision=precision, return_lse=True, **options)
        out, lse = attention(kept, return_lse=True, **options)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)
        assert torch.equal(attention(kept, **options), wanted)
    lengths = torch.tensor([200, 60])
    wanted, _ = attend(q, k, v, torch.arange(200) < lengths.view(2, 1, 1, 1))
    out = attention(codes, kv_lengths=lengths)
    assert float((out.double() - wanted).norm()) <= 0.075 * float(wanted.norm())
    compiled = compile_function(lambda x: attention(x, window=(30, 2)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(codes), attention(codes, window=(30, 2)))


def test_codes_that_do_not_fit_a_mask_are_refused_by_name() -> None:
    q, k, v = make_inputs(9, 9)
    codes = greenfast.quantize(q, k, v)
    mask = greenfast.BlockMask.from_bool(torch.eye(9) > 0)
    for kept, options, error, message in (
        (codes, {"softcap": 3.0}, ValueError, "quantized: softcap and sinks"),
        (codes, {"attn_mask": torch.eye(9) > 0}, TypeError, "attn_mask: a Tensor"),
        (codes, {"attn_mask": mask, "is_causal": True}, ValueError, "attn_mask: a BlockMask holds"),
        (codes, {"window": (1, 1), "return_lse": True}, ValueError, "return_lse: "),
        (greenfast.quantize(q, k, v, value_scales="channel"), {"window": (1, 1)}, NotImplementedError, "quantized: "),
    ):
        with pytest.raises(error, match=f"^{message}"):
            attention(kept, **options)


def test_the_gpus_operator_on_codes_checks_masks_and_fills_results_without_keys() -> None:
    """Neither needs a GPU: both are before a launch."""
    q, k, v = make_inputs(9, 9)
    attend_codes: Any = masked._masked_codes_gpu
    tail = ("fp8", 64, 9, torch.bfloat16, 1, 5, 0, 0.0, 0.0, 0.1)
    codes = greenfast.quantize(q, k, v).tensors()[:6]
    for wrong, error in (
        (torch.tensor([1, 2, 3], dtype=torch.int32), ValueError),
        (torch.tensor([1, 2]), TypeError),
        (torch.empty(2, dtype=torch.int32, device="meta"), ValueError),
    ):
        with pytest.raises(error, match=r"^kv_lengths: "):
            attend_codes(True, *codes, wrong, None, None, None, None, *tail)
    empty = greenfast.quantize(q, k[:, :, :0], v[:, :, :0]).tensors()[:6]
    for sinks, wanted in ((None, -math.inf), (torch.full((4,), 2.5), 2.5)):
        out, lse = attend_codes(True, *empty, None, sinks, None, None, None, *tail[:2], 0, *tail[3:])
        assert torch.equal(out, torch.zeros(2, 4, 9, 64).bfloat16())
        assert torch.equal(lse, torch.full((2, 4, 9), wanted))


SINKS = (-20.0, 0.5, 3.0, 40.0)


@pytest.mark.parametrize(
    "kind", ["window", "kv_lengths", "padding", "booleans", "window, sinks", "booleans, softcap, sinks", "softcap"]
)
def test_gradients_agree_with_float64(kind: str) -> None:
    inputs = make_inputs(100, 100)
    own, keys = places(100, 100, "upper_left")
    lengths = torch.tensor([100, 40])
    cases: dict[str, tuple[dict[str, Any], Tensor]] = {
        "window": ({"window": (9, 0)}, (keys <= own) & (keys >= own - 9)),
        "kv_lengths": ({"kv_lengths": lengths, "is_causal": True}, (keys <= own) & (keys < lengths.view(2, 1, 1, 1))),
        "padding": ({"attn_mask": (keys >= lengths.view(2, 1, 1, 1) - 40)}, keys >= lengths.view(2, 1, 1, 1) - 40),
        "booleans": ({"attn_mask": own % 3 != keys % 3}, own % 3 != keys % 3),
        "softcap": ({}, own >= -1),
    }  # fmt: skip
    options, allowed = cases[kind.split(",")[0]]
    softcap = 4.0 if "softcap" in kind else 0.0
    sinks = (torch.tensor(SINKS),) if "sinks" in kind else ()
    found = [x.clone().requires_grad_() for x in (*inputs, *sinks)]
    wanted = [x.double().requires_grad_() for x in (*inputs, *sinks)]
    grad = torch.randn(2, 4, 100, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    more = {"softcap": softcap, "sinks": found[3] if sinks else None, **options}
    sdpa(*found[:3], enable_gqa=True, **more).backward(grad)
    exact: Any = attend(wanted[0], wanted[1], wanted[2], allowed, softcap, wanted[3] if sinks else None)[0]
    exact.backward(grad.double())
    for a, b in zip(found, wanted, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert float((a.grad - b.grad.nan_to_num(0.0)).norm()) <= 0.01 * float(b.grad.nan_to_num(0.0).norm())


def test_a_backward_pass_without_sinks_computes_them_from_other_sums() -> None:
    """As on a GPU, where FlashAttention's backward pass knows nothing of sinks. Here PyTorch's of the CPU."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 50, 64, generator=generator) for _ in range(4))
    aten, sinks = torch.ops.aten, torch.tensor(SINKS)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    out, lse, by_sinks = _include_sinks(grad, out, lse, sinks)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    own, keys = places(50, 50, "upper_left")
    exact = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    result: Any = attend(exact[0], exact[1], exact[2], keys <= own, 0.0, exact[3])[0]
    result.backward(grad.double())
    for a, b in zip((*found, by_sinks), exact, strict=True):
        assert b.grad is not None
        assert torch.allclose(a.double(), b.grad, atol=1e-5)


def test_a_graph_of_torch_compile_takes_masks() -> None:
    q, k, v = make_inputs(130, 200)
    mask, lengths = torch.rand(130, 200) > 0.5, torch.tensor([200, 31], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return sdpa(q, k, v, mask, enable_gqa=True), sdpa(q, k, v, enable_gqa=True, window=(9, 4), kv_lengths=lengths)

    wanted = call(q, k, v, mask, lengths)
    for found in (
        compile_function(call, fullgraph=True, backend="aot_eager")(q, k, v, mask, lengths),
        torch.export.export(_Module(call), (q, k, v, mask, lengths)).module()(q, k, v, mask, lengths),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def test_a_mask_is_read_once_and_its_form_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = masked._read_mask

    def count(*args: Any) -> masked.MaskSpec:
        read.append(1)
        return original(*args)

    monkeypatch.setattr(masked, "_read_mask", count)
    q, k, v = make_inputs(130, 200)
    mask = torch.rand(1, 1, 300, 200) > 0.5
    for _ in range(3):  # layers take views of one mask
        first = sdpa(q, k, v, mask[:, :, :130], enable_gqa=True)
    assert len(read) == 1
    mask[0, 0, :50] = True
    assert not torch.equal(first, sdpa(q, k, v, mask[:, :, :130], enable_gqa=True))
    assert len(read) == 2
    held = len(masked._MASKS._specs)
    del mask
    gc.collect()
    assert len(masked._MASKS._specs) == held - 2
    for _ in range(20):
        sdpa(q, k, v, torch.rand(130, 200) > 0.5, enable_gqa=True)
    gc.collect()
    assert len(masked._MASKS._specs) <= masked._MAX_MASKS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 3}, TypeError, "window: 3; "),
        ({"window": (1, -2)}, ValueError, "window: "),
        ({"window": (1, 1), "attn_mask": torch.ones(9, 9) > 0}, None, ""),
        ({"window": (1, 1), "attn_mask": torch.eye(9) > 0}, ValueError, "window: not with attn_mask"),
        ({"kv_lengths": torch.tensor([1, 2]), "attn_mask": torch.eye(9) > 0}, ValueError, "kv_lengths: not with"),
        ({"kv_lengths": [1, 2]}, TypeError, "kv_lengths: a list"),
        ({"kv_lengths": torch.tensor([1.0, 2.0])}, TypeError, "kv_lengths: its dtype is torch.float32"),
        ({"kv_lengths": torch.tensor([1, 2, 3])}, ValueError, r"kv_lengths: its shape is \(3,\); \(2,\)"),
        ({"kv_lengths": torch.tensor([1, 10])}, ValueError, r"kv_lengths: \[1, 10\]; numbers from 0 to 9"),
        ({"softcap": -1.0}, ValueError, "softcap: -1"),
        ({"softcap": "1"}, TypeError, "softcap: "),
        ({"softcap": torch.ones(2)}, TypeError, "softcap: a tensor of torch.float32"),
        ({"softcap": 1e300}, ValueError, r"softcap: 1e\+300; 0, or a number from 1e-30 to 1e\+30"),
        ({"softcap": 1e-40}, ValueError, "softcap: 1e-40; "),
        ({"skip_threshold": torch.ones(2)}, TypeError, "skip_threshold: a tensor of torch.float32"),
        ({"window": (torch.ones(2), torch.ones(2))}, TypeError, "window: "),
        ({"kv_lengths": torch.tensor([1, 2**32 + 5])}, ValueError, r"kv_lengths: \[1, 2147483647\]; numbers from 0"),
        ({"precision": "auto", "return_lse": 0}, TypeError, "return_lse: 0"),
        ({"precision": "auto", "attn_mask": torch.eye(9)[0] > 0}, ValueError, "attn_mask: its shape cannot be"),
        ({"precision": [], "backward": "8bit"}, ValueError, r"precision: \[\]; allowed"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: its shape is \(3,\); \(4,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, "sinks: its dtype is torch.int32"),
        ({"attn_mask": torch.eye(8) > 0}, ValueError, "attn_mask: its shape cannot be broadcast"),
        ({"attn_mask": greenfast.BlockMask.from_bool(torch.eye(8) > 0)}, ValueError, "attn_mask: a BlockMask of 8"),
        ({"attn_mask": torch.ones(9, 9)}, NotImplementedError, "attn_mask: numbers to add"),
        ({"precision": "fp8_token", "window": (1, 1)}, NotImplementedError, "precision: 'fp8_token'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(
    options: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    inputs = make_inputs(9, 9)
    if error is None:  # a mask of the CPU that masks nothing is left out
        assert sdpa(*inputs, enable_gqa=True, **options).shape == (2, 4, 9, 64)
        return
    with pytest.raises(error, match=f"^{message}"):
        sdpa(*inputs, enable_gqa=True, **options)
