"""All forms of PyTorch's attention: greenfast.sdpa computes them right, or refuses them with the reason of explain."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

import greenfast
import greenfast.ops.torch_ops

Shape = tuple[int, ...]
Case = tuple[tuple[Shape, Shape, Shape], dict[str, Any]]

#: The documented refusals of calls that PyTorch computes.
DOCUMENTED = (
    "attn_mask: numbers to add to the scores; the kernels take booleans",
    "dropout_p: the kernels have no dropout",
    "query: head_dim",
    "value: head_dim",
)
LEADING = ((), (3,), (2, 3), (2, 1, 3), (1, 2, 1, 3))
TOLERANCE = 0.1  # for outputs with few elements; with many, the error of fp8 is 0.053


def of_any_rank() -> Iterator[Case]:
    for leading, (q_len, kv_len), causal in product(LEADING, ((5, 5), (5, 9), (9, 5), (1, 9), (1, 1)), (False, True)):
        query, key = ((*leading, n, 64) for n in (q_len, kv_len))
        yield (query, key, key), {"is_causal": causal}
        yield (query, key, key), {"scale": 0.3, "is_causal": causal}


def broadcast() -> Iterator[Case]:
    prefixes: tuple[Shape, ...] = ((), (1,), (3,), (2, 3), (2, 1), (1, 3), (2, 2, 3))
    for q, k, v in product(prefixes, repeat=3):
        yield ((*q, 5, 16), (*k, 7, 16), (*v, 7, 16)), {}


def shared_heads() -> Iterator[Case]:
    for heads, key_heads, value_heads in product((1, 4, 6), (1, 2, 3, 4, 6), (1, 2, 3, 6)):
        for q, kv in (((2,), (2,)), ((2,), (1,)), ((), ()), ((2, 1, 2), (2, 2, 1)), ((2,), ()), ((1,), (2,))):
            shapes = (*q, heads, 5, 16), (*kv, key_heads, 7, 16), (*kv, value_heads, 7, 16)
            yield shapes, {"enable_gqa": True, "is_causal": heads == 6}


def head_dims() -> Iterator[Case]:
    for own, of_values in product((0, 8, 20, 40, 64, 72, 128, 200, 256, 264), (0, 1, 8, 20, 64, 72, 130, 256, 257)):
        yield ((2, 3, 6, own), (2, 3, 7, own), (2, 3, 7, of_values)), {}
    yield ((6, 40), (7, 40), (7, 24)), {"is_causal": True}
    yield ((2, 4, 6, 40), (1, 2, 7, 40), (1, 2, 7, 24)), {"enable_gqa": True}


def empty() -> Iterator[Case]:
    for zero, causal in product(range(5), (False, True)):
        batch, heads, q_len, kv_len, head_dim = (0 if i == zero else n for i, n in enumerate((2, 3, 5, 7, 16)))
        kv = (batch, heads, kv_len, head_dim)
        yield ((batch, heads, q_len, head_dim), kv, kv), {"is_causal": causal}
        yield ((heads, q_len, head_dim), kv[1:], kv[1:]), {"is_causal": causal}
    yield ((2, 0, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)), {"enable_gqa": True}


def masks() -> Iterator[Case]:
    plain = ((2, 3, 6, 16), (2, 3, 8, 16), (2, 3, 8, 16))
    shapes: tuple[Shape, ...] = ((6, 8), (1, 8), (6, 1), (2, 1, 1, 8), (2, 3, 6, 8), (3, 1, 1), (1, 1, 1, 1))
    for shape in (*shapes, (8,), (), (5, 8), (4, 1, 6, 8), (1, 1, 1, 6, 8)):
        ones = torch.ones(shape, dtype=torch.bool)
        some = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) > 0.4
        for mask in (ones, some, ones.bfloat16() - 1, ones.bfloat16(), ones.float() - 1):
            yield plain, {"attn_mask": mask}
            if shape in ((6, 8), (2, 3, 6, 8)):  # PyTorch cannot combine others with a causal mask
                yield plain, {"attn_mask": mask, "is_causal": True}
    for shape in ((6, 8), (6, 1), (3, 1, 8)):  # with fewer dimensions than the tensors have
        some = torch.rand(shape, generator=torch.Generator().manual_seed(7)) > 0.4
        yield ((2, 2, 3, 6, 16), (2, 2, 3, 8, 16), (1, 3, 8, 16)), {"attn_mask": some}
    padded = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    padded[1, ..., 5:] = False
    yield plain, {"attn_mask": padded}
    yield plain, {"attn_mask": torch.ones(6, 8, dtype=torch.bool).tril()}
    yield plain, {"attn_mask": torch.ones(6, 8, dtype=torch.int32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bias, sizes in product((causal_upper_left, causal_lower_right), ((6, 8), (6, 6), (8, 8), (7, 9), (8, 6))):
            yield plain, {"attn_mask": bias(*sizes)}
            yield ((6, 16), (8, 16), (8, 24)), {"attn_mask": bias(*sizes), "enable_gqa": False}
    yield plain, {"attn_mask": causal_upper_left(6, 8), "is_causal": True}
    yield plain, {"attn_mask": causal_upper_left(6, 8), "dropout_p": 0.5}


def tensors(shapes: tuple[Shape, ...], dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor | None:
    """Return PyTorch's result in float64; None if PyTorch refuses the call."""
    mask = options.get("attn_mask")
    if type(mask) is Tensor and (mask.is_floating_point() or mask.dtype == torch.bool) and options.get("is_causal"):
        hidden = torch.ones(mask.shape[-2:]).triu(1).bool()  # PyTorch 2.15 refuses both in one call
        mask = mask.masked_fill(hidden, False if mask.dtype == torch.bool else -math.inf)
        options = {**options, "attn_mask": mask, "is_causal": False}
    if type(mask) is Tensor and mask.dtype == torch.bfloat16:
        options = {**options, "attn_mask": mask.double()}
    elif type(mask) is Tensor and mask.dtype == torch.float32:
        try:
            scaled_dot_product_attention(q, k, v, **options)
        except (RuntimeError, IndexError):
            return None
        options = {**options, "attn_mask": mask.double()}
    try:
        return scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    except (RuntimeError, IndexError, ValueError):
        return None


def outcome(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor | Exception:
    try:
        result: Tensor = greenfast.sdpa(q, k, v, **options)
    except (TypeError, ValueError, NotImplementedError) as e:
        return e
    return result


@pytest.mark.parametrize(
    ("cases", "least", "most_refused"),
    [
        (of_any_rank, 100, 0),
        (broadcast, 250, 0),
        (shared_heads, 120, 0),
        (head_dims, 92, 50),
        (empty, 20, 0),
        (masks, 45, 30),
    ],
)
def test_right_or_refused_by_name(cases: Any, least: int, most_refused: int) -> None:
    accepted, refused = 0, Counter[str]()
    for shapes, options in cases():
        q, k, v = tensors(shapes)
        wanted = exact(q, k, v, options)
        result = greenfast.explain(q, k, v, **options)
        out = outcome(q, k, v, options)
        if isinstance(out, Exception):
            assert not result.taken, (shapes, options)
            assert str(out).startswith(result.reason), (shapes, options)
            if wanted is not None:
                assert isinstance(out, NotImplementedError), (shapes, options, out)
                assert str(out).startswith(DOCUMENTED), (shapes, options, out)
                accepted += 1
                refused[str(out).split(":")[0]] += 1
            continue
        assert result.taken, (shapes, options)
        assert wanted is not None, (shapes, options)
        accepted += 1
        assert out.shape == wanted.shape
        assert out.dtype == q.dtype
        assert out.isfinite().all()
        if wanted.numel():
            error = float((out.double() - wanted).norm())
            assert error <= TOLERANCE * max(1e-3, float(wanted.norm())), (shapes, options)
        if "attn_mask" not in options and out.numel():
            on_meta = greenfast.sdpa(q.to("meta"), k.to("meta"), v.to("meta"), **options)
            assert (on_meta.shape, on_meta.stride()) == (out.shape, out.stride()), (shapes, options)
    print(f"{cases.__name__}: of {accepted} that PyTorch accepts, refused {refused.total()}: {dict(refused)}")
    assert accepted >= least
    assert refused.total() <= most_refused


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((7, 16), (9, 16), (9, 16)), {}),
        (((3, 7, 16), (3, 9, 16), (3, 9, 16)), {"is_causal": True}),
        (((2, 1, 4, 7, 16), (2, 2, 1, 9, 16), (1, 4, 9, 24)), {}),
        (((2, 4, 7, 16), (1, 2, 9, 16), (1, 2, 9, 8)), {"enable_gqa": True}),
    ],
    ids=str,
)
def test_log_sum_exp_and_gradients(shapes: tuple[Shape, ...], options: dict[str, Any]) -> None:
    inputs = [x.requires_grad_() for x in tensors(shapes)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = greenfast.sdpa(*inputs, return_lse=True, **options)
    wanted = scaled_dot_product_attention(*doubles, **options)
    assert lse.shape == wanted.shape[:-1]
    q, k, _ = doubles
    k = k if "enable_gqa" not in options else k.repeat_interleave(2, -3)
    scores = q @ k.transpose(-1, -2) / 4
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    assert (lse - torch.logsumexp(scores, -1).expand(lse.shape)).abs().max() < 0.2
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    torch.autograd.backward([out, wanted], [weight.bfloat16(), weight])
    for mine, theirs in zip(inputs, doubles, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert float((mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < 0.2


def test_gradients_of_empty_inputs_are_zeros() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(((2, 3, 5, 16), (2, 3, 0, 16), (2, 3, 0, 24))))
    torch.autograd.backward(greenfast.sdpa(q, k, v).sum())
    assert q.grad is not None
    assert (q.grad == 0).all()
    assert k.grad is not None
    assert v.grad is not None


def test_broadcast_heads_are_not_quantized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of K and V for all queries stays one; batches that share K and V share memory."""
    seen: list[tuple[Shape, Shape, int]] = []
    op = greenfast.ops.torch_ops.SDPA

    def record(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        seen.append((tuple(k.shape), tuple(v.shape), k.stride(0)))
        result: Tensor = op(q, k, v, *rest)
        return result

    monkeypatch.setattr(greenfast.ops.torch_ops, "SDPA", record)
    greenfast.sdpa(*tensors(((2, 4, 5, 64), (1, 7, 64), (1, 1, 7, 64))))
    assert seen == [((2, 1, 7, 64), (2, 1, 7, 64), 0)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (3, 0, 1, 2, 4)])
@pytest.mark.parametrize("of_values", [16, 24, 8])
def test_outputs_of_other_forms_have_the_layout_of_their_queries(order: Shape, of_values: int) -> None:
    sizes = (2, 2, 3, 5, 16)
    q = torch.randn([sizes[d] for d in order]).bfloat16().permute([order.index(d) for d in range(5)])
    k, v = tensors(((2, 2, 3, 7, 16), (2, 2, 3, 7, of_values)))
    out = greenfast.sdpa(q, k, v)
    assert out.permute(order).is_contiguous()
    assert out.untyped_storage().nbytes() == out.nbytes


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_float32_by_choice(cast: torch.dtype) -> None:
    q, k, v = tensors(((2, 3, 70, 64), (2, 3, 90, 64), (2, 3, 90, 64)), torch.float32)
    with pytest.raises(TypeError, match=r"query: .*torch.float32; .*float32_as"):
        greenfast.sdpa(q, k, v)
    assert not greenfast.explain(q, k, v).taken
    assert greenfast.explain(q, k, v, float32_as=cast).taken
    q.requires_grad_()
    out = greenfast.sdpa(q, k, v, float32_as=cast)
    assert out.dtype == torch.float32
    assert torch.equal(out, greenfast.sdpa(q.to(cast), k.to(cast), v.to(cast)).float())
    torch.autograd.backward(out.sum())
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    lse = greenfast.sdpa(q, k, v, float32_as=cast, return_lse=True)[1]
    assert lse.dtype == torch.float32
    saved = greenfast.sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), float32_as=cast)
    assert saved.dtype == torch.bfloat16, "other dtypes stay"
    with pytest.raises(TypeError, match="another dtype"):
        greenfast.sdpa(q, k.half() if cast == torch.bfloat16 else k.bfloat16(), v, float32_as=cast)
    with torch.autocast("cpu", torch.bfloat16):
        assert greenfast.sdpa(q, k, v, float32_as=cast).dtype == torch.bfloat16, "as autocast casts"


def test_float32_errs_as_its_cast_does() -> None:
    """The cast adds little to the error of eight bits (docs/operator.md)."""
    q, k, v = tensors(((1, 4, 512, 64),) * 3, torch.float32)
    wanted = scaled_dot_product_attention(q.double(), k.double(), v.double())
    for cast in (torch.bfloat16, torch.float16):
        out = greenfast.sdpa(q, k, v, float32_as=cast)
        assert float((out - wanted).norm() / wanted.norm()) < 0.06


Q, K, V = tensors(((2, 4, 40, 64), (2, 4, 40, 64), (2, 4, 40, 64)))
SPARSE = torch.zeros(2, 4, 40, 64).bfloat16().to_sparse()
MKLDNN = torch.zeros(2, 4, 40, 64).bfloat16().to_mkldnn()
JAGGED = torch.nested.nested_tensor(
    [torch.zeros(n, 4, 64) for n in (5, 7)], dtype=torch.bfloat16, layout=torch.jagged
).transpose(1, 2)
NESTED = torch.nested.as_nested_tensor([Q[0], Q[1]], layout=torch.strided)
NO_FLAGS: tuple[Any, ...] = ("yes", 1, 0, None, 1.0, [], torch.tensor(True), np.bool_(True))
NO_NUMBERS: tuple[Any, ...] = ("0.1", 1j, [0.1], torch.tensor([0.1]), np.array([0.1]), torch.tensor(True), {})
NO_NUMBERS += (torch.empty((), device="meta"),)
NO_NAMES: tuple[Any, ...] = (None, ["fp8"], 8, {}, "FP8")
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"is_causal": x}, TypeError, "is_causal: .*True or False is needed") for x in NO_FLAGS),
    *(({"enable_gqa": x}, TypeError, "enable_gqa: .*True or False is needed") for x in NO_FLAGS),
    *(({"scale": x}, TypeError, "scale: .*a number is needed") for x in (*NO_NUMBERS, True)),
    *(({"dropout_p": x}, TypeError, "dropout_p: .*a number is needed") for x in (*NO_NUMBERS, True, None, "")),
    *(({"dropout_p": x}, ValueError, "dropout_p: .*a probability") for x in (-0.1, 1.5, math.nan)),
    ({"scale": torch.tensor(0.1, requires_grad=True)}, TypeError, r"scale: .*requires grad.*scale\.item"),
    *(({"precision": x}, ValueError, "precision: ") for x in NO_NAMES),
    *(({"causal_alignment": x}, ValueError, "causal_alignment: ") for x in NO_NAMES),
    *(({"float32_as": x}, TypeError, "float32_as: ") for x in (torch.float32, "bfloat16", True, 1)),
    *(
        ({"attn_mask": x}, TypeError, "attn_mask: a torch.Tensor or a BlockMask is")
        for x in ("causal", [1], np.ones((40, 40)))
    ),
    *(
        ({name: x}, TypeError, f"{name}: a torch.Tensor is needed, got")
        for name, x in product(("query", "key", "value"), (None, 1, "q", Q.tolist(), Q.float().numpy()))
    ),
    *(
        ({name: x}, NotImplementedError, f"{name}: nested or sparse")
        for name, x in product(("query", "key", "value"), (SPARSE, NESTED, JAGGED, MKLDNN))
    ),
    ({"precision": Q}, ValueError, "precision: .* with 4 dimensions; allowed are"),
    *(({"scale": x}, ValueError, "scale: .*query") for x in (1e300, 1e39, np.float64(1e200), torch.tensor(math.inf))),
    *(({"scale": x}, ValueError, "scale: ") for x in (0, -1.0, math.nan, 10**400)),
    *(
        ({"scale": x}, TypeError, "scale: ")
        for x in (1j, True, "1", torch.tensor(True), torch.ones(1), torch.tensor(1j))
    ),
    *(
        ({name: Q[0, 0, 0], "precision": "auto", **more}, ValueError, f"{name}: 1-D")
        for name in ("query", "key", "value")
        for more in ({}, {"is_causal": True, "causal_alignment": "lower_right"})
    ),
    *(({name: Q[0, 0, 0]}, ValueError, f"{name}: 1-D") for name in ("query", "key", "value")),
    *(({name: Q.to(torch.complex64)}, TypeError, f"{name}: |query: ") for name in ("query", "key", "value")),
]


@pytest.mark.parametrize(
    ("change", "error", "says"), WRONG, ids=lambda x: str({k: type(v) for k, v in x.items()} if type(x) is dict else x)
)
def test_a_wrong_argument_is_named(change: dict[str, Any], error: type[Exception], says: str) -> None:
    call = {"query": Q, "key": K, "value": V, **change}
    with pytest.raises(error, match=says):
        greenfast.sdpa(**call)
    if error is NotImplementedError or says.endswith("D") or ("tensor" in says.lower() and "grad" not in says):
        assert not greenfast.explain(**call).taken


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({"scale": torch.tensor(0.3)}, {"scale": 0.3}),
        ({"scale": np.float32(0.25)}, {"scale": 0.25}),
        ({"scale": np.float64(0.3)}, {"scale": 0.3}),
        ({"scale": 1}, {"scale": 1.0}),
        ({"scale": np.int64(2)}, {"scale": 2.0}),
        ({"dropout_p": 0}, {}),
        ({"dropout_p": False}, {}),
        ({"dropout_p": np.float32(0)}, {}),
        ({"dropout_p": torch.tensor(0.0)}, {}),
    ],
    ids=str,
)
def test_numbers_of_any_kind(change: dict[str, Any], plain: dict[str, Any]) -> None:
    assert greenfast.explain(Q, K, V, **change).taken
    result, wanted = greenfast.sdpa(Q, K, V, **change), greenfast.sdpa(Q, K, V, **plain)
    assert float((result - wanted).abs().max()) <= 1e-2


@pytest.mark.parametrize("function", [greenfast.sdpa, greenfast.quantize], ids=["sdpa", "quantize"])
def test_flags_of_other_functions(function: Any) -> None:
    names = ["return_lse"] if function is greenfast.sdpa else ["subtract_key_mean", "rotate"]
    for name, value in product(names, NO_FLAGS):
        with pytest.raises(TypeError, match=f"{name}: .*True or False"):
            function(Q, K, V, **{name: value})
    if function is greenfast.quantize:
        quantized = greenfast.quantize(Q, K, V)
        for name, value in product(("return_lse", "is_causal"), NO_FLAGS):
            with pytest.raises(TypeError, match=f"{name}: .*True or False"):
                greenfast.attention(quantized, **{name: value})
        wrong: Any
        for wrong in (Q, None, quantized.tensors()):
            with pytest.raises(TypeError, match=r"quantized: .*QuantizedQKV"):
                greenfast.attention(wrong)
        for bad in (SPARSE, NESTED):
            with pytest.raises(TypeError, match="query: it is nested or sparse"):
                greenfast.quantize(bad, K, V)


@pytest.mark.parametrize("length", ["4096", 1.5, True, -1])
def test_invalid_lengths(length: Any) -> None:
    for function in (
        lambda: greenfast.explain(Q, K, V, min_length=length),
        lambda: greenfast.use(min_length=length),
        lambda: greenfast.register_with_transformers(min_length=length),
    ):
        with pytest.raises((TypeError, ValueError), match=r"min_length: .* is needed"):
            function()


def test_lengths_of_numpy() -> None:
    for length, kernel in ((Q.shape[-2], "reference"), (Q.shape[-2] + 1, "torch")):
        numpy_length: Any = np.int64(length)
        assert greenfast.explain(Q, K, V, min_length=numpy_length).kernel == kernel


def test_other_forms_compiled() -> None:
    def attend(q: Tensor) -> tuple[Tensor, ...]:
        return (
            greenfast.sdpa(q[0], K[0], V[0]),
            greenfast.sdpa(q, K[:1, :1], V[:1, :1], is_causal=True),
            greenfast.sdpa(q[None], K, V[..., :24], scale=1),
            greenfast.sdpa(q.float(), K.float(), V.float(), float32_as=torch.bfloat16),
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    for length in (40, 33):
        result, wanted = compiled(Q[:, :, :length]), attend(Q[:, :, :length])
        assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


def test_a_mask_that_transformers_hands_on_is_not_lost() -> None:
    library = pytest.importorskip("transformers")
    greenfast.register_with_transformers(min_length=0)
    attend = library.AttentionInterface()["greenfast"]
    out, _ = attend(torch.nn.Module(), Q, K, V, causal_upper_left(40, 40), is_causal=False)
    assert torch.equal(out, greenfast.sdpa(Q, K, V, is_causal=True).transpose(1, 2))
    assert not torch.equal(out, greenfast.sdpa(Q, K, V).transpose(1, 2))
