"""Routing: what ``greenfast.use`` takes, alone and nested, in layers, with gradients and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import CheckpointError, checkpoint

import greenfast

MASK = "attn_mask: numbers to add to the scores; the kernels take booleans"
Q, K, V = torch.randn(3, 2, 4, 40, 64, generator=torch.Generator().manual_seed(40)).bfloat16()


def fp8(x: Tensor = Q, precision: Any = "fp8") -> Tensor:
    out: Tensor = greenfast.sdpa(x, K, V, precision=precision)
    return out


def attend(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, K, V)


PLAIN = attend(Q)


@pytest.mark.parametrize(
    "function",
    [attend, lambda x: imported_by_name(x, K, V), lambda x: torch._C._nn.scaled_dot_product_attention(x, K, V)],
)
def test_under_any_name(function: Callable[[Tensor], Tensor]) -> None:
    with greenfast.use("int8", min_length=0):
        assert torch.equal(function(Q), fp8(precision="int8"))
    assert torch.equal(function(Q), PLAIN)


def test_short_calls_are_left_to_pytorch_by_default() -> None:
    with greenfast.use() as routed:
        attend(Q)
    assert routed.fallen_back.total() == 1
    assert "they are taken from 4096 queries and keys on" in next(iter(routed.fallen_back))


def test_a_decorator_counts_all_calls() -> None:
    route = greenfast.use(min_length=0)

    @route
    def again(times: int) -> Tensor:
        """The name and the text stay."""
        return attend(Q) if times == 0 else again(times - 1)

    assert again.__doc__ == "The name and the text stay."
    assert torch.equal(again(3), fp8())
    assert torch.equal(again(0), fp8())
    assert route.routed.taken == 2
    assert torch.equal(attend(Q), PLAIN)


def test_the_innermost_of_nested_switches_decides() -> None:
    outer, inner = greenfast.use(min_length=0), greenfast.use(min_length=1000)
    with outer as routed:
        with inner:
            assert torch.equal(attend(Q), PLAIN)
            with outer:
                assert torch.equal(attend(Q), fp8())
            assert torch.equal(attend(Q), PLAIN)
        assert torch.equal(attend(Q), fp8())
    assert torch.equal(attend(Q), PLAIN)
    assert routed.taken == 2
    assert inner.routed.fallen_back.total() == 2


def test_it_ends_with_an_error() -> None:
    outer = greenfast.use(min_length=0)

    def fails() -> None:
        with outer, greenfast.use():
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(attend(Q), PLAIN)


def test_other_modes_see_what_is_left() -> None:
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 50, 128).bfloat16()
    with Watch(), greenfast.use(min_length=10**9):
        attend(Q)
        layer(x, x, x, need_weights=False)
    assert seen.count(functional.scaled_dot_product_attention) == 2
    assert functional.linear in seen


def test_booleans_are_numbers_where_pytorch_takes_them_so() -> None:
    with greenfast.use(min_length=0) as routed:
        result = functional.scaled_dot_product_attention(Q, K, V, scale=True, dropout_p=False)
        functional.scaled_dot_product_attention(Q, K, V, dropout_p=True)
        numpy_scale: Any = np.True_
        functional.scaled_dot_product_attention(Q, K, V, scale=numpy_scale)
    assert torch.equal(result, greenfast.sdpa(Q, K, V, scale=1.0))
    assert (routed.taken, routed.fallen_back) == (2, {"dropout_p: the kernels have no dropout": 1})


@pytest.mark.parametrize("grad", [False, True])
def test_multi_head_attention(grad: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16).eval()
    x = torch.randn(2, 50, 128).bfloat16()
    with torch.set_grad_enabled(grad):
        wanted = layer(x, x, x, need_weights=False)[0]
        with greenfast.use(min_length=0) as routed:
            result = layer(x, x, x, need_weights=False)[0]
            layer(x, x, x, need_weights=False, attn_mask=torch.ones(50, 50).bool().tril(-1))
    result, wanted = result.detach(), wanted.detach()
    assert routed.taken == 1
    assert routed.fallen_back == {MASK: 1}
    # on N(0, 1) inputs the error of the FP8 kernels is 0.053 (evidence/h200/peers), and the projections add roundings
    assert 0.01 < float((result - wanted).norm() / wanted.norm()) < 0.08


def test_multi_head_attention_of_a_subclass_is_the_subclasses() -> None:
    seen = []

    class Mine(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 50, 128).bfloat16()
    mine = x.as_subclass(Mine)
    with greenfast.use(min_length=0) as routed:
        result = layer(mine, mine, mine, need_weights=False)[0]
    assert functional.multi_head_attention_forward in seen
    assert routed.taken == 0
    assert torch.equal(result.as_subclass(Tensor), layer(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_layer(causal: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 2, 64, batch_first=True, dropout=0.0, dtype=torch.bfloat16).eval()
    x = torch.randn(2, 50, 128).bfloat16()
    mask = nn.Transformer.generate_square_subsequent_mask(50, dtype=torch.bfloat16) if causal else None
    with torch.no_grad():  # routing turns off the fast path, a single function that does not call attention
        wanted = layer(x, src_mask=mask, is_causal=causal)
        with greenfast.use(min_length=0) as routed:
            result = layer(x, src_mask=mask, is_causal=causal)
    assert routed.taken == 1
    assert 0 < float((result - wanted).norm() / wanted.norm()) < 0.05, "the layer adds attention to its input"


def pad_left_and_right() -> Tensor:
    """(2, 50), True for padding."""
    padding = torch.zeros(2, 50, dtype=torch.bool)
    padding[0, :20] = padding[1, 41:] = True
    return padding


@pytest.mark.parametrize("causal", [False, True])
def test_padded_layers_are_left_to_pytorch(causal: bool) -> None:
    """PyTorch's modules turn boolean masks into numbers, which are added to the scores."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16).eval()
    one = nn.TransformerEncoderLayer(128, 2, 64, batch_first=True, dropout=0.0, dtype=torch.bfloat16)
    encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 50, 128).bfloat16(), torch.zeros(2, 50, dtype=torch.bool)
    padding[0, 30:] = padding[1, 41:] = True  # on the right: rows without keys would be NaN in PyTorch
    mask = torch.ones(50, 50, dtype=torch.bool).triu(1) if causal else None
    valid = padding.logical_not()

    def run() -> tuple[Tensor, Tensor]:
        attended = layer(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
        return attended[valid], encoder(x, mask=mask, src_key_padding_mask=padding)[valid]

    with torch.no_grad():
        wanted = run()
        with greenfast.use(min_length=0) as routed:
            result = run()
    assert (routed.taken, routed.fallen_back) == (0, {MASK: 3})
    for found, right in zip(result, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=0.05, atol=0.05)  # the encoder's fast path is another function


@pytest.mark.parametrize("kind", ["padding", "causal and padding", "window and padding", "is_causal"])
def test_boolean_masks_of_a_functional_call(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 50, 64).bfloat16() for _ in range(3))
    own = torch.arange(50)
    mask = pad_left_and_right().logical_not()[:, None, None]
    if kind != "padding":
        mask = mask & (own <= own[:, None])
    if kind == "window and padding":
        mask = mask & (own > own[:, None] - 9)
    causal = kind == "is_causal"
    if causal:
        mask = torch.ones(1, 1, 50, 50, dtype=torch.bool).tril()
    rows = mask.any(-1, keepdim=True).expand(2, 4, 50, 1)[..., 0]  # PyTorch's results without keys depend on its kernel
    with greenfast.use(min_length=0) as routed:
        result = functional.scaled_dot_product_attention(q, k, v, None if causal else mask, is_causal=causal)
    assert (routed.taken, routed.fallen_back) == (1, {})
    wanted = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    assert 0.01 < float((result - wanted)[rows].norm() / wanted[rows].norm()) < 0.08
    assert not result[rows.logical_not()].any(), "rows without keys are 0"
    if kind == "padding":  # what padded keys hold changes nothing
        k, v = (torch.where(mask.mT, x, torch.nan) for x in (k, v))
        with greenfast.use(min_length=0):
            assert torch.equal(functional.scaled_dot_product_attention(q, k, v, mask), result)


def test_padded_calls_follow_the_rules_of_explain() -> None:
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[0, ..., 30:] = False
    with greenfast.use() as routed:
        result = functional.scaled_dot_product_attention(Q, K, V, mask)
    assert routed.fallen_back == {greenfast.explain(Q, K, V, mask, min_length=None).reason: 1}
    assert torch.equal(result, functional.scaled_dot_product_attention(Q, K, V, mask))


def test_gradients_are_those_of_greenfast() -> None:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    with greenfast.use(min_length=0) as routed:
        result = torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    assert routed.taken == 1
    wanted = torch.autograd.grad(greenfast.sdpa(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


def test_checkpoints_recompute_what_is_decorated() -> None:
    route = greenfast.use(min_length=0)
    x = Q.clone().requires_grad_()
    checkpoint(route(attend), x, use_reentrant=False).sum().backward()
    assert route.routed.taken == 2, "forward, and again in the backward pass"
    assert x.grad is not None


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_checkpoints_do_not_recompute_in_pytorch_what_was_routed(kv_heads: int, inside: bool) -> None:
    """Its attention saves the inputs in another order: without an error K would be taken for Q."""
    x = Q.clone().requires_grad_()
    k, v = K[:, :kv_heads], V[:, :kv_heads]

    def grouped(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, k, v, enable_gqa=kv_heads < 4)

    with greenfast.use(min_length=0) as routed:
        loss = checkpoint(grouped, x, use_reentrant=False).sum()
        if inside:
            with pytest.raises(CheckpointError):
                loss.backward()
    if not inside:
        with pytest.raises(CheckpointError):
            loss.backward()
    assert routed.taken == 1


def test_models_with_a_decorated_forward_can_be_copied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route = greenfast.use(min_length=0)

        def forward(self, x: Tensor) -> Tensor:
            with self.route:
                return attend(x)

    model = Model()
    assert torch.equal(copy.deepcopy(model)(Q), fp8())
    assert model.route.routed.taken == 0


def inside(x: Tensor) -> Tensor:
    with greenfast.use(min_length=0):
        return attend(x)


@pytest.mark.parametrize("function", [inside, greenfast.use(min_length=0)(attend)], ids=["inside", "decorated"])
def test_compiled(function: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(Q), fp8())
    with greenfast.use("int8", min_length=0):
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(Q), fp8()), "the innermost"


def test_compiled_and_routed_from_outside() -> None:
    """One graph for each setting, however often it is entered."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(Q), PLAIN)
        with greenfast.use(min_length=0) as routed:
            assert torch.equal(compiled(Q), fp8())
        with greenfast.use("int8", min_length=0):
            assert torch.equal(compiled(Q), fp8(precision="int8"))
        with greenfast.use(min_length=41):
            assert torch.equal(compiled(Q), PLAIN)
        assert routed.taken == 0, "a graph runs without the counts"
    assert counter.frame_count == 4


def test_compiled_for_any_length() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for length in (10, 20, 29, 30, 35, 40):
        x = Q[:, :, :length].contiguous()
        with greenfast.use(min_length=30):
            result = compiled(x)
        assert torch.equal(result, fp8(x) if length >= 30 else attend(x)), length
        frames.append(counter.frame_count)
    assert frames[0] == frames[2] < frames[3] == frames[5], "traced again only at min_length"


@pytest.mark.parametrize(
    ("backend", "fullgraph", "inside"),
    [("eager", False, False), ("eager", False, True), ("eager", True, True), ("aot_eager", True, False)],
)
def test_compiled_multi_head_attention_is_left_to_pytorch(backend: str, fullgraph: bool, inside: bool) -> None:
    torch._dynamo.reset()
    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 50, 128).bfloat16()

    def model(x: Tensor) -> Tensor:
        out: Tensor = layer(x, x, x, need_weights=False)[0]
        return out

    def routed_inside(x: Tensor) -> Tensor:
        with greenfast.use(min_length=0):
            return model(x)

    compiled = torch.compile(routed_inside if inside else model, backend=backend, fullgraph=fullgraph)
    with greenfast.use(min_length=0) as routed:
        result = compiled(x)
    assert torch.equal(result, model(x))
    assert (routed.taken, routed.fallen_back) == (0, {})


def precisions(function: Callable[[], tuple[Tensor, ...]]) -> list[str]:
    """Return, for each result, PyTorch or the precision of greenfast."""
    known = {"torch": PLAIN, "fp8": fp8(), "int8": fp8(precision="int8")}
    return [next(name for name, wanted in known.items() if torch.equal(x, wanted)) for x in function()]


def nested() -> tuple[Tensor, ...]:
    with greenfast.use("int8", min_length=0):
        first = attend(Q)
        with greenfast.use(min_length=10**9):
            second = attend(Q)
            with greenfast.use(min_length=0):
                third = attend(Q)
        fourth = attend(Q)
    return first, second, third, fourth, attend(Q)


def nested_with_breaks() -> tuple[Tensor, ...]:
    with greenfast.use("int8", min_length=0):
        first = attend(Q)
        torch._dynamo.graph_break()
        with greenfast.use(min_length=10**9):
            torch._dynamo.graph_break()
            second = attend(Q)
            third = in_a_function_that_breaks()
        fourth = attend(Q)
    torch._dynamo.graph_break()
    return first, second, third, fourth, attend(Q)


@greenfast.use(min_length=0)
def in_a_function_that_breaks() -> Tensor:
    out = attend(Q)
    torch._dynamo.graph_break()
    return out


@pytest.mark.parametrize(("function", "backend"), [(nested, "aot_eager"), (nested_with_breaks, "eager")])
def test_the_innermost_decides_in_a_compiled_function(function: Callable[..., Any], backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=function is nested)
    for _ in range(2):
        assert precisions(compiled) == ["int8", "torch", "fp8", "int8", "torch"]
        with greenfast.use(min_length=0):
            assert precisions(compiled) == ["int8", "torch", "fp8", "int8", "fp8"]
    assert torch._C._len_torch_function_stack() == 0


def test_errors_and_generators_in_a_compiled_function() -> None:
    @greenfast.use("int8", min_length=0)
    def steps() -> Iterator[Tensor]:
        for _ in range(2):
            yield attend(Q)

    def function() -> tuple[Tensor, ...]:
        try:
            with greenfast.use(min_length=0):
                first = attend(Q)
                raise KeyError
        except KeyError:
            pass
        return (first, *steps(), attend(Q))

    torch._dynamo.reset()
    assert precisions(torch.compile(function, backend="eager")) == ["fp8", "int8", "int8", "torch"]
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with greenfast.use("int8", min_length=0):
                y = attend(x)
                with greenfast.use(min_length=10**9):
                    return y + attend(x)

    with greenfast.use(min_length=0):
        program = torch.export.export(Model(), (Q,), strict=strict)
    assert torch.equal(program.module()(Q), fp8(precision="int8") + PLAIN)
