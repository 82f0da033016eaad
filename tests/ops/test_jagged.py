"""``sdpa`` of jagged nested tensors: compared with PyTorch's attention, sequence by sequence and nested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import greenfast
from greenfast.ops import varlen

NESTED: Any = torch.nested
COMPILE: Any = torch.compile
SDPA: Any = greenfast.sdpa
LENGTHS = [40, 0, 1, 130, 7], [130, 12, 0, 200, 7]
SAME = LENGTHS[1], LENGTHS[1]


def parts(lengths: Sequence[int], heads: int, head_dim: int = 64, seed: int = 0, shift: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, heads, head_dim, generator=generator) + shift).bfloat16() for n in lengths]


def nested(tensors: list[Tensor], offsets: Tensor | None = None) -> Any:
    """Build (B, H, j, D) from (j, H, D), without cached lengths if there are offsets."""
    if offsets is None:
        x = NESTED.nested_tensor(tensors, layout=torch.jagged)
    else:
        x = NESTED.nested_tensor_from_jagged(torch.cat(tensors), offsets)
    return x.transpose(1, 2)


def narrowed(tensors: list[Tensor]) -> Any:
    """Build the same with gaps between sequences, which hold NaN."""
    lengths = torch.tensor([len(x) for x in tensors])
    starts = torch.tensor([3, 1, 0, 2, 5])
    padded = torch.full((len(tensors), int(lengths.max()) + 8, *tensors[0].shape[1:]), torch.nan).bfloat16()
    for row, x, start in zip(padded, tensors, starts.tolist(), strict=True):
        row[start : start + len(x)] = x
    result = NESTED.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert result.lengths() is not None
    return result.transpose(1, 2)


def make_offsets(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(x) for x in tensors)]).cumsum(0)


def exact(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], *, causal: bool, lower_right: bool = False
) -> list[Tensor]:
    """PyTorch's attention in float64 of each sequence, (j, H, D); rows that attend to nothing are 0."""
    outs = []
    for a, b, c in zip(q, k, v, strict=True):
        mask = torch.ones(len(a), len(b), dtype=torch.bool)
        if causal:
            mask = mask.tril(len(b) - len(a) if lower_right else 0)
        x, y, z = (t.double().transpose(0, 1) for t in (a, b, c))
        y, z = (t.repeat_interleave(a.shape[1] // b.shape[1], 0) for t in (y, z))
        seen = mask.any(1)
        out = x.new_zeros(x.shape)
        if seen.any():
            out[:, seen] = scaled_dot_product_attention(x[:, seen], y, z, mask[seen])
        outs.append(out.transpose(0, 1))
    return outs


def relative(result: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    a, b = (torch.cat([x.flatten() for x in tensors]).double() for tensors in (result, wanted))
    return float((a - b).norm() / b.norm())


def unbound(x: Any) -> list[Tensor]:
    return [y.transpose(0, 1) for y in x.unbind()]


@pytest.mark.parametrize("build", [nested, narrowed], ids=["offsets", "gaps"])
@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(("heads", "shift"), [((4, 2), 0.0), ((2, 2), 3.0), ((4, 1), -1.0)])
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_float64(
    build: Callable[..., Any], precision: str, heads: tuple[int, int], shift: float, causal: bool
) -> None:
    q, k, v = (
        parts(n, h, 64, i, shift)
        for i, (n, h) in enumerate(
            zip((LENGTHS[0], LENGTHS[1], LENGTHS[1]), (heads[0], heads[1], heads[1]), strict=True)
        )
    )
    inputs = [build(x) for x in (q, k, v)]
    options: dict[str, Any] = {"enable_gqa": heads[0] != heads[1], "precision": precision}
    out, lse = SDPA(*inputs, is_causal=causal, causal_alignment="lower_right", return_lse=True, **options)
    wanted = exact(q, k, v, causal=causal, lower_right=True)
    assert out.shape == inputs[0].shape
    assert out.is_nested
    assert out.dtype == torch.bfloat16
    assert relative(unbound(out), wanted) < 0.07
    assert lse.shape == inputs[0].shape[:3]
    for i, row in enumerate(lse.unbind()):
        packed = [x[i].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        if row.numel() and packed[1].numel():
            _, alone = SDPA(*packed, is_causal=causal, causal_alignment="lower_right", return_lse=True, **options)
            assert torch.equal(row, alone[0])
        else:
            assert row.isneginf().all()
    plain = SDPA(*inputs, is_causal=causal, causal_alignment="lower_right", **options)
    assert torch.equal(plain.values(), out.values())


@pytest.mark.parametrize(
    "options",
    [
        {"window": (9, 2)},
        {"window": (20, -1), "is_causal": True},
        {"softcap": 5.0, "is_causal": True},
        {"sinks": torch.tensor([0.5, -3.0, 9.0, 0.0]).bfloat16()},
        {"window": (30, 0), "softcap": 8.0, "sinks": torch.linspace(-1.0, 2.0, 4), "scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("build", [nested, narrowed], ids=["offsets", "gaps"])
def test_options_are_those_of_each_sequence_alone(
    build: Callable[..., Any], options: dict[str, Any], alignment: str
) -> None:
    """tests/ops/test_masks.py compares the calls on one sequence with PyTorch."""
    lengths = LENGTHS if alignment == "lower_right" else SAME
    tensors = [parts(n, h, seed=i) for i, (n, h) in enumerate(zip((*lengths, lengths[1]), (4, 2, 2), strict=True))]
    options = {**options, "causal_alignment": alignment, "enable_gqa": True, "return_lse": True}
    out, lse = SDPA(*[build(x) for x in tensors], **options)
    for a, b, c, result, sums in zip(*tensors, unbound(out), lse.unbind(), strict=True):
        if len(a) and len(b):
            wanted, wanted_sums = SDPA(*[x.transpose(0, 1).unsqueeze(0) for x in (a, b, c)], **options)
            assert relative([result], [wanted[0].transpose(0, 1)]) < 0.01
            assert torch.allclose(sums, wanted_sums[0], atol=0.02)
        else:
            sinks = options.get("sinks")
            assert not result.any()
            assert torch.equal(
                sums, torch.full_like(sums, -torch.inf) if sinks is None else sinks.float().view(-1, 1).expand_as(sums)
            )


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_agrees_with_pytorch_on_nested_tensors(precision: str) -> None:
    q, k, v = (
        nested(parts(n, 4, seed=i)) for i, n in enumerate(([40, 1, 130, 7], [130, 12, 200, 7], [130, 12, 200, 7]))
    )
    wanted = scaled_dot_product_attention(q, k, v)
    out = SDPA(q, k, v, precision=precision)
    assert out.shape == wanted.shape
    assert relative([out.values()], [wanted.values()]) < 0.07
    twice = SDPA(q, k, v, scale=0.25) + q  # the result has q's own lengths
    assert relative([(twice - q).values()], [scaled_dot_product_attention(q, k, v, scale=0.25).values()]) < 0.07


@pytest.mark.parametrize("same", ["tensor of offsets", "values of offsets", "lengths of gaps"])
def test_a_causal_mask_from_the_first_key(same: str) -> None:
    """With equal lengths both alignments agree."""
    tensors = [parts(LENGTHS[1], 2, seed=i) for i in range(3)]
    offsets = make_offsets(tensors[0])
    q, k, v = (
        narrowed(x) if same.startswith("lengths") else nested(x, offsets if same.startswith("tensor") else None)
        for x in tensors
    )
    out = SDPA(q, k, v, is_causal=True)
    assert relative(unbound(out), exact(tensors[0], tensors[1], tensors[2], causal=True)) < 0.07
    assert torch.equal(out.values(), SDPA(q, k, v, is_causal=True, causal_alignment="lower_right").values())


def test_gaps_are_zero_and_their_numbers_do_not_matter() -> None:
    tensors = [parts(LENGTHS[1], 2, seed=i) for i in range(3)]
    out = SDPA(*[narrowed(x) for x in tensors], is_causal=True)
    dense = SDPA(*[nested(x) for x in tensors], is_causal=True)
    assert torch.equal(torch.cat(unbound(out)), torch.cat(unbound(dense)))
    total, wanted = (float(x.values().double().abs().sum()) for x in (out, dense))
    assert total == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("build", [nested, narrowed], ids=["offsets", "gaps"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_exact_attention(build: Callable[..., Any], causal: bool) -> None:
    tensors = [
        [x.requires_grad_() for x in parts(n, h, seed=i)]
        for i, (n, h) in enumerate(((LENGTHS[1], 4), (LENGTHS[1], 2), (LENGTHS[1], 2)))
    ]
    wide = [[x.detach().double().requires_grad_() for x in each] for each in tensors]
    grads = parts(LENGTHS[1], 4, seed=9)

    def joined(each: list[Tensor]) -> Tensor:
        if build is narrowed:
            lengths, starts = torch.tensor([len(x) for x in each]), torch.tensor([3, 1, 0, 2, 5])
            rows = [
                torch.nn.functional.pad(x, (0, 0, 0, 0, s, 208 - len(x) - s), value=7.0)
                for x, s in zip(each, starts.tolist(), strict=True)
            ]
            x: Tensor = NESTED.narrow(torch.stack(rows), 1, starts, lengths, layout=torch.jagged)
        else:
            x = NESTED.as_nested_tensor(each, layout=torch.jagged)
        return x.transpose(1, 2)

    out = SDPA(*[joined(x) for x in tensors], is_causal=causal, enable_gqa=True)
    for outs in (unbound(out), exact(wide[0], wide[1], wide[2], causal=causal)):
        loss: Any = sum((x * grad).sum() for x, grad in zip(outs, grads, strict=True))
        loss.backward()
    for each, other in zip(tensors, wide, strict=True):
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in each]
        wanted = [torch.zeros_like(x) if x.grad is None else x.grad for x in other]
        assert relative(found, wanted) < 0.01


def test_lengths_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item of a tensor would wait for a GPU."""
    tensors = [parts(LENGTHS[1], 2, seed=i) for i in range(3)]
    seen: list[Any] = []

    def attended(args: tuple[Any, ...], *rest: Any) -> tuple[Tensor, None]:
        seen.append(args)
        return torch.zeros_like(args[0]), None

    monkeypatch.setattr(varlen, "attend_packed", attended)
    for name in ("item", "tolist", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, None)
    offsets = make_offsets(tensors[0])
    for x, longest in ((nested(tensors[0], offsets), 349), (nested(tensors[0]), 200)):
        SDPA(x, x, x, is_causal=True)
        (q, k, _, starts_q, starts_k, *_, max_q, max_k, _, _, _, _, _), *_ = [seen.pop()]
        assert (max_q, max_k) == (longest, longest)
        assert starts_q is starts_k
        assert q.is_contiguous()
        assert q.data_ptr() == k.data_ptr() == x.values().data_ptr()


def test_under_use() -> None:
    q, k, v = (
        nested(parts(n, 4, seed=i)) for i, n in enumerate(([40, 1, 130, 7], [130, 12, 200, 7], [130, 12, 200, 7]))
    )
    with greenfast.use(min_length=0) as routed:
        out = scaled_dot_product_attention(q, k, v)
        assert (routed.taken, routed.fallen_back.total()) == (1, 0)
        assert torch.equal(out.values(), SDPA(q, k, v).values())
        scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert [reason.startswith("dropout_p") for reason in routed.fallen_back] == [True]
    with greenfast.use(min_length=88) as routed:  # the mean is 45 queries and 88 keys
        wanted = scaled_dot_product_attention(k, q, q)
    assert [reason.startswith("key: shorter") for reason in routed.fallen_back] == [True]
    assert torch.equal(wanted.values(), scaled_dot_product_attention(k, q, q).values())
    with greenfast.use() as routed:  # no measurement shows a gain
        scaled_dot_product_attention(q, k, v)
    assert routed.taken == 0


def test_explanations() -> None:
    def long(n: int) -> Tensor:
        x = NESTED.nested_tensor_from_jagged(
            torch.empty(2 * n, 8, 128, device="meta", dtype=torch.bfloat16), torch.tensor([0, n, 2 * n], device="meta")
        )
        return x.transpose(1, 2)  # type: ignore[no-any-return]

    x = long(8192)
    explanation = greenfast.explain(x, x, x, precision="auto", target="sm_90a")
    assert (explanation.kernel, explanation.precision) == ("hopper", "fp8")
    assert not greenfast.explain(x, x, x, target="sm_89").taken
    assert "Hopper" in greenfast.explain(x, x, x, target="sm_89").reason
    short = long(8)
    assert not greenfast.explain(short, short, short, precision="auto", target="sm_90a").taken
    assert greenfast.explain(x, x, x).kernel == "meta"
    q = nested(parts([5, 7], 4))
    assert greenfast.explain(q, q, q).kernel == "reference"
    assert greenfast.explain(q, q, q, precision="fp8_token").reason.startswith("precision: 'fp8_token'")


def test_auto_runs_pytorch_if_no_kernel_is_faster() -> None:
    q = nested(parts([5, 7], 4))
    assert torch.equal(SDPA(q, q, q, precision="auto").values(), scaled_dot_product_attention(q, q, q).values())


def test_auto_keeps_what_pytorch_lacks() -> None:
    """PyTorch refuses jagged tensors with lengths of their own and a causal mask, and it has no softcap."""
    q, k = nested(parts([3, 5], 4)), nested(parts([6, 5], 4))
    causal: dict[str, Any] = {"is_causal": True, "causal_alignment": "lower_right"}
    for options in (causal, {"softcap": 5.0}):
        assert greenfast.explain(q, k, k, precision="auto", **options).precision == "fp8"
        auto = SDPA(q, k, k, precision="auto", **options)
        assert torch.equal(auto.values(), SDPA(q, k, k, **options).values())


@pytest.mark.parametrize("build", [nested, narrowed], ids=["offsets", "gaps"])
def test_compiled_for_any_lengths(build: Callable[..., Any]) -> None:
    compiled = COMPILE(SDPA, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([40, 1, 130, 7, 3], [9, 80, 2, 2, 31]):
        q, k, v = (build(parts(lengths, 2, seed=i)) for i in range(3))
        assert torch.equal(compiled(q, q, q, is_causal=True).values(), SDPA(q, q, q, is_causal=True).values())
        if build is nested:  # two more graphs; their lengths are read as the first graph's
            assert torch.equal(compiled(q, k, v).values(), SDPA(q, k, v).values())


def test_autocast_and_float32() -> None:
    q, k, v = (nested([x.float() for x in parts([5, 70], 4, seed=i)]) for i in range(3))
    wanted = SDPA(*[x.bfloat16() for x in (q, k, v)])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(SDPA(q, k, v).values(), wanted.values())
    cast = SDPA(q, k, v, float32_as=torch.bfloat16)
    assert cast.dtype == torch.float32
    assert torch.equal(cast.bfloat16().values(), wanted.values())
    with pytest.raises(TypeError, match=r"query: torch\.float32"):
        SDPA(q, k, v)


def test_no_tokens_and_no_sequences() -> None:
    x = nested([torch.zeros(0, 2, 64).bfloat16()] * 3, torch.zeros(4, dtype=torch.int64))
    assert SDPA(x, x, x).shape == x.shape
    none = nested([torch.zeros(0, 2, 64).bfloat16()], torch.zeros(1, dtype=torch.int64))
    assert SDPA(none, none, none).values().numel() == 0


Q = nested(parts([5, 7], 4))
OTHER = nested(parts([6, 6], 4))
FLAT: Any = NESTED.nested_tensor(parts([5, 7], 4), layout=torch.jagged)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": FLAT, "key": FLAT, "value": FLAT},
            NotImplementedError,
            r"query: lengths differ in dimension 1; \(B, H, j",
        ),
        ({"value": OTHER}, ValueError, "value: other lengths than key"),
        ({"value": nested(parts([5, 7, 1], 4))}, ValueError, "key, value: their batch differs"),
        ({"key": OTHER, "value": OTHER, "is_causal": True}, NotImplementedError, "is_causal, window: .*lower_right"),
        ({"key": nested(parts([5, 7], 2)), "value": nested(parts([5, 7], 2))}, ValueError, "key: its heads differ"),
        ({"key": nested(parts([5, 7], 1)), "enable_gqa": True}, ValueError, "key, value: their heads"),
        ({"query": nested(parts([5, 7], 1))}, ValueError, "key, value: their heads"),
        ({"value": nested(parts([5, 7], 4, 32))}, NotImplementedError, "value: another head_dim than key"),
        ({"key": nested(parts([5, 7], 4, 32))}, ValueError, "key: another head_dim than query"),
        ({"key": Q.half()}, TypeError, "key: another dtype than query"),
        ({"attn_mask": torch.ones(1)}, NotImplementedError, "attn_mask: with nested tensors"),
        ({"dropout_p": 0.5}, NotImplementedError, "dropout_p"),
        ({"kv_lengths": torch.tensor([5, 7])}, NotImplementedError, "kv_lengths: nested tensors have lengths"),
        ({"key": OTHER, "value": OTHER, "window": (9, 0)}, NotImplementedError, "is_causal, window: .*lower_right"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: \(3,\) on cpu; \(4,\)"),
        ({"precision": "fp8_token"}, NotImplementedError, "precision: 'fp8_token' has no kernel for nested tensors"),
        ({"key": torch.zeros(2, 4, 7, 64).bfloat16()}, NotImplementedError, "query: nested"),
        ({"scale": -1.0}, ValueError, "scale: -1.0"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SDPA(**({"query": Q, "key": Q, "value": Q} | change))
    if error is NotImplementedError:
        reason = greenfast.explain(**({"query": Q, "key": Q, "value": Q} | change)).reason
        assert reason.split(":")[0] == message.split(":")[0]
