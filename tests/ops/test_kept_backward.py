"""``sdpa(..., backward="8bit" | "16bit_kept")``: which calls take it, and that its operators behave as PyTorch's do.

On the CPU the gradients are exact; the kernels' gradients are compared in tests/kernels and tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import greenfast
from greenfast.kernels.attention import backward as backward_kernels
from greenfast.ops import cuda, masked, quantized_backward, reference, routing, torch_ops
from tests.ops.gradient_cases import Sizes, case
from tests.ops.launched import PretendedGpu
from tests.ops.launched import gpu as gpu

sdpa: Any = greenfast.sdpa
compiled: Any = torch.compile


def inputs(q_len: int = 40, kv_len: int = 50, head_dim: int = 128) -> list[Tensor]:
    tensors, _ = case("biased 10", Sizes(q_len, kv_len, head_dim), torch.bfloat16)
    return [x.requires_grad_() for x in tensors]


def gradients(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    out = sdpa(*tensors, enable_gqa=True, **options)
    return list(torch.autograd.grad(out.float().square().sum(), tensors))


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the arguments of each call of the operator that keeps its output."""
    calls: list[Any] = []
    op = torch_ops.SDPA_KEPT

    def call(*args: Any) -> Any:
        calls.append(args)
        return op(*args)

    monkeypatch.setattr(torch_ops, "SDPA_KEPT", call)
    return calls


@pytest.mark.parametrize(
    ("backward", "precision", "head_dim"),
    [("8bit", "fp8", 128), ("8bit", "int8", 64), ("8bit", "int8", 256), ("16bit_kept", "int8", 72)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_results_on_a_cpu_are_those_of_16_bits(
    causal: bool, backward: str, precision: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, options = inputs(head_dim=head_dim), {"is_causal": causal, "precision": precision}
    wanted, out = gradients(tensors, **options), sdpa(*tensors, enable_gqa=True, **options)
    kept = record_calls(monkeypatch)
    assert torch.equal(sdpa(*tensors, enable_gqa=True, backward=backward, **options), out)
    found = gradients(tensors, backward=backward, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert [args[-1] for args in kept] == [8 if backward == "8bit" else 16] * 2
    with torch.no_grad():
        assert torch.equal(sdpa(*tensors, enable_gqa=True, backward=backward, **options), out)
    assert len(kept) == 2, "nothing is kept without gradients"


@pytest.mark.parametrize(
    "options",
    [
        {"window": (7, 3)},
        {"window": (20, 0), "causal_alignment": "lower_right"},
        {"is_causal": True, "causal_alignment": "lower_right"},
        {"kv_lengths": torch.tensor([0, 33])},
        {"kv_lengths": torch.tensor([1, 50]), "is_causal": True, "window": (9, 0)},
        {"attn_mask": (torch.arange(100) % 3 > 0).view(2, 1, 1, 50)},
    ],
    ids=str,
)
def test_windows_and_lengths(options: dict[str, Any]) -> None:
    """On a CPU: PyTorch's gradients with the same mask, exactly 0 for the padding, and no NaN from it."""
    q, k, v = (torch.cat([x, x.flip(2)]).detach().requires_grad_() for x in inputs())
    lengths = options.get("kv_lengths")
    if "attn_mask" in options:
        padding: Any = ~options["attn_mask"].view(2, 1, 50)
    else:
        padding = None if lengths is None else torch.arange(50) >= lengths.view(2, 1, 1)
    with torch.no_grad():
        if padding is not None:
            k.masked_fill_(padding.unsqueeze(-1), float("nan"))
            v.masked_fill_(padding.unsqueeze(-1), float("nan"))
    found = gradients([q, k, v], backward="8bit", **options)
    left, right = options.get("window", (-1, 0 if options.get("is_causal") else -1))
    alignment = 2 if "causal_alignment" in options else 1
    mask = options.get("attn_mask", masked.MaskSpec(alignment, left, right, lengths).build_bool(40, 50, q.device))
    mask = mask.expand(-1, -1, 40, -1)
    tensors = [x.detach().nan_to_num(0.0).double().requires_grad_() for x in (q, k, v)]
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    out = attend(*tensors, attn_mask=mask, enable_gqa=True)
    kept = sdpa(q, k, v, enable_gqa=True, backward="8bit", **options).detach()
    wanted = torch.autograd.grad(out, tensors, 2 * kept.double())
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()
    blind = ~mask.any(-2).expand(2, -1, -1)
    assert not any(x.transpose(1, 2)[blind[:, 0]].any() for x in found[1:])


def test_the_operators_are_registered_as_pytorch_wants() -> None:
    q, k, v = inputs(20, 20)
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")  # others send gradients to its log-sum-exp
    torch.library.opcheck(torch.ops.greenfast.sdpa_kept.default, (q, k, v, "fp8", 1, 0.1, 8), test_utils=parts)
    kept = torch.ops.greenfast.sdpa_kept(q.detach(), k.detach(), v.detach(), "fp8", 1, 0.1, 8)
    call = (kept[0], q.detach(), k.detach(), v.detach(), *kept, 1, 0.1, 8)
    torch.library.opcheck(torch.ops.greenfast.sdpa_kept_backward.default, call)
    limits = (torch.tensor([13], dtype=torch.int32), None, 1, 5, 0, 0.1)
    torch.library.opcheck(torch.ops.greenfast.masked_kept.default, (q, k, v, "fp8", *limits), test_utils=parts)
    kept = torch.ops.greenfast.masked_kept(q.detach(), k.detach(), v.detach(), "fp8", *limits)
    call = (kept[0], q.detach(), k.detach(), v.detach(), *kept, *limits)
    torch.library.opcheck(torch.ops.greenfast.masked_kept_backward.default, call)
    grad, *_ = torch.autograd.grad(
        torch.ops.greenfast.sdpa_kept(q, k, v, "fp8", 1, 0.1, 8)[0].sum(), q, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="its gradients are not differentiable"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("options", [{}, {"kv_lengths": torch.tensor([33]), "window": (9, 4)}], ids=str)
def test_compiled_and_in_checkpoints(options: dict[str, Any]) -> None:
    tensors = inputs()
    wanted = gradients(tensors, backward="8bit", **options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return sdpa(q, k, v, enable_gqa=True, backward="8bit", **options)

    for function in (compiled(attend, fullgraph=True, backend="aot_eager", dynamic=True), attend):
        for use_checkpoint in (False, True):
            out = checkpoint(function, *tensors, use_reentrant=False) if use_checkpoint else function(*tensors)
            found = torch.autograd.grad(out.float().square().sum(), tensors)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_other_calls_are_refused_by_name() -> None:
    q, k, v = inputs(40, 40)
    named = [x.detach() for x in (q, k, v)]
    rows = [torch.randn(n, 2, 64).bfloat16() for n in (3, 5)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    for tensors, options, message in (
        (named, {"backward": "fp8"}, r"backward: 'fp8'; allowed are '16bit', '16bit_kept', '8bit', 'auto'"),
        (named, {"attn_mask": torch.ones(40, 40).bool()}, "with softcap, .*attn_mask other than.*recomputes"),
        (named, {"window": (3, 0), "softcap": 3.0}, "with softcap, .*attn_mask other than.*recomputes"),
        (named, {"return_lse": True}, "with softcap, .*attn_mask other than.*recomputes"),
        (named, {"backward": "16bit_kept", "window": (3, 0)}, r'recomputes the forward pass; "8bit" has them'),
        (named, {"attn_mask": torch.ones(1, 1, 1, 40).bool(), "is_causal": True}, "an attn_mask other than booleans"),
        ([q, k, v], {"kv_lengths": torch.tensor([3, 4])}, r"kv_lengths: .*\(1,\) is needed"),
        ([jagged] * 3, {}, r'jagged tensors .* recomputes the forward pass; "8bit" takes padding with kv_lengths'),
        (named, {"precision": "fp8_token"}, "allowed are 'fp8', 'int8', 'int8_fine'"),
        (named, {"backward": "16bit_kept", "softcap": 2.0}, "16bit_kept.*with softcap, sinks"),
        (
            [x.float() for x in named],
            {"backward": "16bit_kept"},
            r"must be float16 or bfloat16 tensors \(B, H, length, D",
        ),
        ([x.half() for x in named], {}, r"must be bfloat16 tensors \(B, H, length, D\) with D 64, 128 or 256"),
        ([x[..., :32] for x in named], {}, r"must be bfloat16 tensors \(B, H, length, D\).*query \("),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=message):
            sdpa(*tensors, **({"enable_gqa": True, "backward": "8bit"} | options))


def test_auto_takes_long_calls_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = record_calls(monkeypatch)
    monkeypatch.setattr(routing, "LONG_BACKWARD", 32)
    q, k, v = inputs()
    for tensors, options, taken in (
        ((q, k, v), {}, True),
        ((q[:, :, :31], k, v), {}, False),
        ((q, k, v), {"softcap": 3.0}, False),
        ((q[..., :64], k[..., :64], v[..., :64]), {}, True),
        (tuple(x[..., :64].half() for x in (q, k, v)), {"causal_alignment": "lower_right", "is_causal": True}, True),
        ((q[..., :32], k[..., :32], v[..., :32]), {}, False),
    ):
        sdpa(*tensors, enable_gqa=True, backward="auto", **options)
        assert len(kept) == taken
        kept.clear()


def test_explained_with_the_reason() -> None:
    """On an H100 that this machine does not have, and on the CPU."""
    q = torch.empty(1, 4, 4096, 128, dtype=torch.bfloat16, device="meta")
    short, softcap = q[:, :, :4095], {"softcap": 3.0}
    long = torch.empty(1, 4, 100_000, 128, dtype=torch.bfloat16, device="meta")

    def explain(x: Tensor, backward: Any, **options: Any) -> greenfast.Explanation:
        return greenfast.explain(x, x, x, backward=backward, **({"target": "sm_90a"} | options))

    for x, asked, options, chosen, reason in (
        (q, "16bit", {}, "16bit", ""),
        (q, "8bit", {}, "8bit", "int8 and E4M3 products"),
        (q, "auto", {"is_causal": True}, "8bit", "int8 and E4M3 products"),
        (short, "8bit", {}, "8bit", "int8 and E4M3 products"),
        (short, "auto", {}, "16bit", "may be shorter than 4096"),
        (q, "auto", softcap, "16bit", "with softcap, sinks"),
        (q, "8bit", {"attn_mask": torch.empty(1, 1, 1, 4096, dtype=torch.bool, device="meta")}, "8bit", "int8 and"),
        (q, "8bit", {"window": (1024, 0)}, "8bit", "int8 and E4M3 products"),
        (q, "auto", {"window": (1024, 0)}, "8bit", "int8 and E4M3 products"),
        (q[..., :64], "auto", {"window": (1023, -1), "is_causal": True}, "8bit", "int8 and E4M3 products"),
        (q, "auto", {"window": (1022, -1), "is_causal": True}, "16bit", "was not measured"),
        (q, "auto", {"kv_lengths": torch.tensor([9])}, "8bit", "int8 and E4M3 products"),
        (q, "auto", {"is_causal": True, "causal_alignment": "lower_right"}, "8bit", "int8 and E4M3"),
        (q, "8bit", {"kv_lengths": torch.empty(1, dtype=torch.int32, device="meta")}, "8bit", "int8 and E4M3"),
        (q[..., :32], "auto", {}, "16bit", "must be bfloat16 tensors"),
        (q[..., :64], "auto", {}, "8bit", "int8 and E4M3 products"),
        (q[..., :64].half(), "auto", {}, "16bit_kept", "PyTorch's backward pass"),
        (q.half(), "auto", {}, "16bit_kept", "PyTorch's backward pass"),
        (q.half(), "auto", {"window": (1024, 0)}, "16bit", "must be bfloat16 tensors"),
        (long, "auto", {}, "16bit_kept", "PyTorch's backward pass"),
        (long, "auto", {"window": (1024, 0), "is_causal": True}, "8bit", "int8 and E4M3 products"),
        (q.half(), "16bit_kept", {"causal_alignment": "lower_right"}, "16bit_kept", "PyTorch's backward pass"),
        (q, "auto", {"q_norm": True}, "16bit", "attention_block recomputes"),
        (q.half(), "auto", {"target": "sm_89"}, "16bit", "must be bfloat16 tensors"),
        (q.half(), "16bit", {"target": "sm_80"}, "torch", ""),
        (inputs()[0], "8bit", {"target": None}, "8bit", "exact gradients without a GPU"),
    ):
        explanation = explain(x, asked, **options)
        assert explanation.backward == chosen, explanation
        assert reason in explanation.backward_reason
        assert bool(reason) == ("backward" in str(explanation))
    others: list[tuple[Tensor, Any, str]] = [
        (q, softcap, "with softcap, sinks"),
        (q.half(), {}, "bfloat16"),
        (q, {"rope": ()}, "block"),
    ]
    for x, options, reason in others:
        refused = explain(x, "8bit", **options)
        assert (refused.kernel, refused.backward) == ("torch", "torch")
        assert refused.reason.startswith('backward="8bit": ')
        assert reason in refused.reason
    refused = explain(long, "8bit")
    assert f'backward="8bit": dS takes {100_032 * 100_096} bytes for one head of key, and may take 8' in refused.reason
    nearly = long[:, :, :92_681]  # 92,681 squared is below the limit, but not in whole tiles, as the operator counts
    assert explain(nearly, "auto").backward == "16bit_kept"
    with pytest.raises(ValueError, match=r"backward: 'int8'; allowed are '16bit', '16bit_kept', '8bit', 'auto'"):
        explain(q, "int8")


@pytest.mark.parametrize(("head_dim", "launches"), [(64, 5), (128, 5), (256, 6)])
def test_what_a_training_step_launches(gpu: PretendedGpu, head_dim: int, launches: int) -> None:
    """Forward: the quantizer and attention. Backward: three kernels of the quantizer, dK and dV, dQ; none if empty."""
    q = torch.randn(2, 4, 300, head_dim).bfloat16()
    k, v = torch.randn(2, 2, 2, 200, head_dim).bfloat16().transpose(2, 3).contiguous().transpose(2, 3)
    for keys, counts in ((200, (2, launches)), (0, (0, 0))):
        tensors = (q, k[:, :, :keys], v[:, :, :keys])
        kept = cuda.sdpa_kept(*tensors, "int8", 1, 0.1, 8)
        shapes = [(*q.shape,), (2, 4, 300, 2), (2, 2, head_dim)]
        assert [tuple(x.shape) for x in kept] == shapes
        assert len(gpu.launched()) == counts[0]
        grads = quantized_backward.sdpa_kept_backward(torch.randn_like(q), *tensors, *kept, 1, 0.1)
        assert [x.shape for x in grads] == [x.shape for x in tensors]
        assert len(gpu.launched()) == counts[1]


def test_heads_that_share_memory_for_ds(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of K in each launch, since there is no room for dS of two; and none at all."""
    q, k, v = torch.randn(2, 4, 310, 64).bfloat16(), *torch.randn(2, 2, 2, 200, 64).bfloat16()
    kept = cuda.sdpa_kept(q, k, v, "int8", 1, 0.1, 8)
    of_head = backward_kernels.stored_bytes(2, 310, 200, backward_kernels.CAUSAL)
    monkeypatch.setattr(backward_kernels, "MOST_STORED_BYTES", 2 * of_head - 1)
    gpu.launched()
    quantized_backward.sdpa_kept_backward(torch.randn_like(q), q, k, v, *kept, 1, 0.1)
    assert len(gpu.launched()) == 3 + 2 * 4
    monkeypatch.setattr(backward_kernels, "MOST_HEAD_BYTES", of_head - 1)
    with pytest.raises(NotImplementedError, match=f"dS takes {of_head} bytes for one head of key"):
        quantized_backward.sdpa_kept_backward(torch.randn_like(q), q, k, v, *kept, 1, 0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (50, 0)},
        {"kv_lengths": torch.tensor([120, 0])},
        {"kv_lengths": torch.tensor([120, 0]), "kv_rows": torch.arange(200, dtype=torch.int32).flip(0).expand(2, 200)},
    ],
    ids=["window", "lengths", "rows"],
)
def test_what_a_masked_training_step_launches(gpu: PretendedGpu, options: dict[str, Any]) -> None:
    """Forward: the quantizer, the schedule and attention. Backward: as without a mask."""
    rows, lengths = options.get("kv_rows"), options.get("kv_lengths")
    lengths = None if lengths is None else lengths.to(torch.int32)
    q_len = 300 if rows is None else 301  # plans of equal calls are kept from one pretended GPU to the next
    q = torch.randn(2, 4, q_len, 64).bfloat16()
    k, v = torch.randn(2, 2, 2, 200, 64).bfloat16()
    limits = (lengths, rows, 1, *options.get("window", (-1, -1)), 0.1)
    cases = ((200, (3, 5)), (0, (0, 0))) if rows is None else ((200, (3, 5)),)
    for keys, counts in cases:
        tensors = (q, k[:, :, :keys], v[:, :, :keys])
        kept = cuda.masked_kept(*tensors, "int8", *limits)
        assert [tuple(x.shape) for x in kept] == [(*q.shape,), (2, 4, q_len, 2), (2, 2, 64)]
        assert len(gpu.launched()) == counts[0]
        grads = quantized_backward.masked_kept_backward(torch.randn_like(q), *tensors, *kept, *limits)
        assert [x.shape for x in grads] == [x.shape for x in tensors]
        assert len(gpu.launched()) == counts[1]


def test_autocast_casts_first() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(q, k, v, enable_gqa=True, backward="8bit")
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


@pytest.mark.parametrize("kind", ["normal", "biased 30", "uniform"])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_the_kept_log_sum_exp_is_that_of_centered_keys(kind: str, head_dim: int) -> None:
    """PyTorch's backward pass gets these keys and this log-sum-exp: then the weights of a row add to about 1."""
    (q, k, v), _ = case(kind, Sizes(40, 300, head_dim, heads=4, kv_heads=2), torch.bfloat16)
    scale = head_dim**-0.5
    _, lse, mean = torch.ops.greenfast.sdpa_kept(q, k, v, "int8", 0, scale, 16)
    centered, lse = reference.center_keys(q, k.transpose(1, 2).contiguous().transpose(1, 2), lse, mean, scale)
    assert centered.double().mean(-2).abs().max() < 0.01
    assert (centered.dtype, centered.shape) == (k.dtype, k.shape)
    scores = q.double() @ centered.double().repeat_interleave(2, 1).mT * scale
    weights = torch.exp(scores - lse.unsqueeze(-1))
    assert (weights.sum(-1) - 1.0).abs().max() < 0.05


def test_centered_scores_that_exceed_float16_without_their_scale() -> None:
    """One large key moves the mean of all keys far from the estimated one."""
    (q, k, v), _ = case("normal", Sizes(40, 64, 128), torch.float16)
    q, k[..., 0, :] = q.abs() * 4, 2e4
    _, lse, mean = torch.ops.greenfast.sdpa_kept(q, k, v, "int8", 0, 128**-0.5, 16)
    shift = k.double().mean(-2) - reference._rotate_back(mean, 128).double()
    scores = (q.double() @ shift.unsqueeze(-1)).squeeze(-1)
    assert scores.abs().max() > torch.finfo(torch.float16).max, "else this tests nothing"
    _, moved = reference.center_keys(q, k, lse, mean, 128**-0.5)
    wanted = lse.double() - scores * 128**-0.5
    assert (moved - wanted).abs().max() < 2e-3 * scores.abs().max() * 128**-0.5
