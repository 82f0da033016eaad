"""``sdpa`` with masks on a GPU: it agrees with the CPU, and reads lengths and masks on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from tests.ops.test_skipping import CASES, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
sdpa: Any = greenfast.sdpa
attention: Any = greenfast.attention


def make_mask(*shape: int) -> Tensor:
    """Return booleans with empty, full and partial tiles, and rows without any key."""
    generator = torch.Generator().manual_seed(len(shape))
    mask = torch.rand(*shape, generator=generator) > 0.5
    mask[..., :256, 128:256] = True
    mask[..., 128:384, 256:512] = False
    mask[..., 30:33, :] = False
    return mask


#: Options by name; tensors move to the GPU.
OPTIONS: dict[str, dict[str, Any]] = {
    "lengths": {"kv_lengths": torch.tensor([700, 33])},
    "lengths, causal": {"kv_lengths": torch.tensor([0, 512], dtype=torch.int32), "is_causal": True},
    "window": {"window": (200, 30)},
    "window, causal, lower right": {"window": (130, -1), "is_causal": True, "causal_alignment": "lower_right"},
    "right limit": {"window": (-1, 40), "causal_alignment": "lower_right"},
    "softcap and sinks": {"softcap": 15.0, "sinks": torch.tensor([-1.0, 0.0, 2.0, 50.0]), "is_causal": True},
    "window, lengths and sinks": {
        "window": (300, 0), "kv_lengths": torch.tensor([650, 701]), "sinks": torch.zeros(4).bfloat16(),
    },
    "padding": {"attn_mask": make_mask(2, 1, 1, 701) & (torch.arange(701) > 90)},
    "booleans": {"attn_mask": make_mask(600, 701)},
    "booleans of heads": {"attn_mask": make_mask(1, 4, 600, 701)},
    "booleans of each": {"attn_mask": make_mask(2, 4, 600, 701), "softcap": 30.0},
    "booleans of a batch, causal": {"attn_mask": make_mask(2, 1, 600, 701), "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("head_dim", "precision", "dtype"),
    [
        (64, "fp8", torch.bfloat16),
        (128, "int8", torch.bfloat16),
        (72, "int8_fine", torch.float16),
        (256, "fp8", torch.bfloat16),
    ],
)
def test_agrees_with_the_cpu(name: str, head_dim: int, precision: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        (torch.randn(2, heads, rows, head_dim, generator=generator) * 2 + 0.5).to(dtype)
        for heads, rows in ((4, 600), (2, 701), (2, 701))
    )
    q[0, 1, 5], k[1, 0, 650], v[0, 1, 690] = float("nan"), float("inf"), float("nan")
    options = {**OPTIONS[name], "enable_gqa": True, "precision": precision}
    on_gpu = {x: y.cuda() if isinstance(y, Tensor) else y for x, y in options.items()}
    wanted, wanted_lse = sdpa(q, k, v, **options, return_lse=True)
    found, lse = (x.cpu() for x in sdpa(q.cuda(), k.cuda(), v.cuda(), **on_gpu, return_lse=True))
    turned = (x.cuda().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    plain = sdpa(*turned, **on_gpu).cpu()
    finite = ~wanted.isnan()
    for x in (found, plain):
        assert torch.equal(x.isnan(), wanted.isnan())
        assert (x.double() - wanted.double())[finite].norm() <= 0.03 * wanted.double()[finite].norm()
    assert torch.equal(lse == -math.inf, wanted_lse == -math.inf)
    difference = (lse - wanted_lse)[wanted_lse.isfinite()]
    assert difference.square().mean().sqrt() < 0.01
    assert difference.abs().max() < 0.1  # a code that is rounded differently changes a score near 20


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("head_dim", "precision"), [(64, "fp8"), (64, "int8"), (128, "fp8"), (128, "int8_fine"), (256, "fp8")]
)
def test_the_tiles_that_the_cpu_skips_are_skipped(case: str, head_dim: int, precision: str) -> None:
    sizes, _, options = CASES[case]
    q, k, v = make_inputs(*sizes, head_dim)
    options = {**options, "enable_gqa": True, "precision": precision}
    on_gpu = {x: y.cuda() if isinstance(y, Tensor) else y for x, y in options.items()}
    wanted, wanted_lse = sdpa(q, k, v, **options, skip_threshold=0.05, return_lse=True)
    q, k, v = q.cuda(), k.cuda(), v.cuda()
    found, lse = (x.cpu() for x in sdpa(q, k, v, **on_gpu, skip_threshold=0.05, return_lse=True))
    plain = sdpa(q, k, v, **on_gpu, skip_threshold=0.05).cpu()
    for x in (found, plain):
        assert (x.double() - wanted.double()).norm() <= 0.03 * wanted.double().norm()
    assert torch.equal(lse == -math.inf, wanted_lse == -math.inf)
    assert (lse - wanted_lse)[wanted_lse.isfinite()].abs().mean() < 0.01


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3000, 100)}])
def test_long_sequences_with_most_tiles_skipped(head_dim: int, options: dict[str, Any]) -> None:
    """Warpgroups that skip other tiles than their neighbours wait for each other, whatever they skip."""
    q, k, v = (x.cuda() for x in make_inputs(5000, 6000, head_dim))
    for threshold in (1e-30, 0.05, 0.99):
        out = sdpa(q, k, v, **options, enable_gqa=True, skip_threshold=threshold)
        assert out.isfinite().all()
        assert torch.equal(out, sdpa(q, k, v, **options, enable_gqa=True, skip_threshold=threshold))


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_codes_take_masks(head_dim: int, precision: str) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(2, heads, rows, head_dim, generator=generator).bfloat16()
        for heads, rows in ((4, 600), (2, 701), (2, 701))
    )
    mask = greenfast.BlockMask.from_bool(make_mask(2, 1, 600, 701))
    quantize: Any = greenfast.quantize
    codes = quantize(q, k, v, precision=precision, log_sum_exp=True)
    for options in ({"window": (90, 0)}, {"attn_mask": mask}, {"kv_lengths": torch.tensor([701, 200])}):
        wanted, wanted_lse = attention(codes, return_lse=True, **options)
        on_gpu = {x: y.to("cuda") if isinstance(y, Tensor | greenfast.BlockMask) else y for x, y in options.items()}
        out, lse = (x.cpu() for x in attention(codes.to("cuda"), return_lse=True, **on_gpu))
        assert (out.double() - wanted.double()).norm() <= 0.03 * wanted.double().norm()
        assert torch.equal(lse == -math.inf, wanted_lse == -math.inf)
        assert (lse - wanted_lse)[wanted_lse.isfinite()].square().mean().sqrt() < 0.01


def test_a_graph_reads_new_lengths_and_masks() -> None:
    q = torch.randn(2, 4, 512, 64, device="cuda").bfloat16()
    lengths, mask = torch.tensor([100, 512], device="cuda"), make_mask(512, 512).cuda()

    def call() -> tuple[Tensor, Tensor]:
        return sdpa(q, q, q, window=(60, 0), kv_lengths=lengths), sdpa(q, q, q, attn_mask=mask)

    first = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    lengths.copy_(torch.tensor([512, 7], device="cuda"))
    mask.logical_not_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found, first, strict=True))


def test_a_mask_that_is_written_to_or_replaced_is_read_again() -> None:
    q = torch.randn(1, 2, 300, 64, device="cuda").bfloat16()
    for change in ("write", "replace"):
        mask = make_mask(300, 300).cuda()
        before = sdpa(q, q, q, mask)
        assert torch.equal(before, sdpa(q, q, q, mask))
        if change == "write":
            mask[:, :100] = True
        else:
            data = mask.tril()
            del mask
            mask = data
        assert torch.equal(sdpa(q, q, q, mask), sdpa(q, q, q, mask.clone()))
        assert not torch.equal(before, sdpa(q, q, q, mask))


@pytest.mark.parametrize(
    "name", ["window", "window, causal, lower right", "lengths, causal", "padding", "booleans of heads"]
)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (0.0, True), (5.0, True)])
def test_gradients_agree_with_the_cpu(name: str, softcap: float, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, heads, rows, 64, generator=generator).bfloat16()
        for heads, rows in ((4, 600), (2, 701), (2, 701), (4, 600))
    )
    options = {**OPTIONS[name], "enable_gqa": True, "softcap": softcap}
    on_gpu = {x: y.cuda() if isinstance(y, Tensor) else y for x, y in options.items()}
    sinks = (torch.tensor([-3.0, 0.0, 2.0, 30.0]),) if with_sinks else ()
    inputs = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
    sdpa(*inputs[:3], **options, sinks=inputs[3] if sinks else None).backward(grad)
    of_gpu = [x.detach().cuda().requires_grad_() for x in inputs]
    sdpa(*of_gpu[:3], **on_gpu, sinks=of_gpu[3] if sinks else None).backward(grad.cuda())
    for wanted, found in zip(inputs, of_gpu, strict=True):
        assert wanted.grad is not None
        assert found.grad is not None
        assert found.grad.isfinite().all()
        assert (found.grad.cpu() - wanted.grad).norm() < 0.02 * wanted.grad.norm()


def test_lists_that_name_no_tile_stay_inside_memory() -> None:
    """A BlockMask made by hand may hold any numbers: results are then arbitrary, but no address is wrong."""
    q = torch.randn(1, 2, 300, 64, device="cuda").bfloat16()
    mask = greenfast.BlockMask.from_bool(make_mask(300, 300).cuda())
    mask.entries.random_(-(2**31), 2**31 - 1)
    mask.counts.random_(-(2**31), 2**31 - 1)
    sdpa(q, q, q, mask)
    torch.cuda.synchronize()
    assert torch.equal(sdpa(q, q, q, window=(5, 5)), sdpa(q, q, q, window=(5, 5)))
