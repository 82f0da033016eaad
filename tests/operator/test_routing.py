"""Which calls of PyTorch's attention are routed, that the rules are those of greenfast.sdpa, and the routing itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

import greenfast
from greenfast.operator import cuda, routing
from greenfast.operator.quantized import Recipe
from greenfast.spec.arch import Target

MASK = "attn_mask: the kernels know causal masks alone"


def tensors(
    length: int = 40, keys: int | None = None, heads: int = 4, kv_heads: int | None = None, head_dim: int = 64,
    batch: int = 2, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(length)
    kv = (batch, heads if kv_heads is None else kv_heads, length if keys is None else keys, head_dim)
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in ((batch, heads, length, head_dim), kv, kv))
    return q, k, v


class Named(torch.Tensor):
    """A subclass, as those that shard or compress are."""


def named(x: Tensor) -> Tensor:
    return x.as_subclass(Named)


Q, K, V = tensors()
LONG = (torch.zeros(2, 4, 40, 264).half(),) * 3
#: Calls that greenfast.sdpa refuses: what is other than (Q, K, V), and the reason.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attn_mask": torch.zeros(40, 40).bool()}, MASK),
    ({"dropout_p": 0.1}, "dropout_p: the kernels have no dropout"),
    ({"scale": 0.0}, "scale: the kernels take positive"),
    ({"scale": -1.0}, "scale: the kernels take positive"),
    ({"scale": float("nan")}, "scale: the kernels take positive"),
    ({"scale": float("inf")}, "scale: the kernels take positive"),
    ({"query": Q[0, 0, 0]}, "query: 1-D; (..., length, head_dim) is needed"),
    ({"key": K[0], "value": V[0, 0], "enable_gqa": True}, "enable_gqa: with it, query, key and value have heads"),
    ({"query": Q.float(), "key": K.float(), "value": V.float()}, "query: torch.float32; the kernels take"),
    ({"key": K.half()}, "key: another dtype than query"),
    ({"value": V[:, :, :30]}, "value: another length than key"),
    ({"key": torch.cat([K, K[:1]]), "value": torch.cat([V, V[:1]])}, "key: another batch than query"),
    ({"key": K[..., :32], "value": V[..., :32]}, "key: another head_dim than query"),
    ({"key": K[:, :2], "value": V[:, :2]}, "key: its heads are not those of query"),
    ({"key": K[:, :3], "value": V[:, :3], "enable_gqa": True}, "key: the heads of query are no multiple"),
    (
        {"query": Q[..., :60], "key": K[..., :60], "value": V[..., :60]},
        "query: head_dim 60; the kernels",
    ),
    (dict(zip(("query", "key", "value"), LONG, strict=True)), "query: head_dim 264; the kernels take multiples"),
    ({"key": K.to("meta"), "value": V.to("meta")}, "key: on another device than query"),
]
#: Calls that greenfast.sdpa computes and routing leaves to PyTorch all the same.
LEFT: list[tuple[dict[str, Any], str]] = [
    ({"query": named(Q)}, "query: a Named; the kernels take plain tensors"),
    ({"value": named(V)}, "value: a Named; the kernels take plain tensors"),
    ({"query": Q[:, :, :0], "min_length": 1}, "query: shorter than min_length=1"),
    ({"min_length": 41}, "query: shorter than min_length=41"),
    ({"key": K[:, :, :30], "value": V[:, :, :30], "min_length": 31}, "key: shorter than min_length=31"),
]
TAKEN: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "scale": 0.3},
    {"key": K[:, :2], "value": V[:, :2], "enable_gqa": True},
    {"query": Q[:, :, :7], "is_causal": True},
    {"query": Q[..., :40], "key": K[..., :40], "value": V[..., :40]},
    {"query": Q.half(), "key": K.half(), "value": V.half()},
    {"query": Q[0], "key": K[0], "value": V[0]},
    {"key": K[None], "value": V[0, 0]},
    {"value": V[..., :32]},
    {"key": K[:1], "value": V[:, :1]},
    {"attn_mask": torch.ones(40, 40).bool()},
    {"attn_mask": torch.zeros(2, 1, 1, 40).bfloat16()},
    {"attn_mask": causal_lower_right(40, 30), "key": K[:, :, :30], "value": V[:, :, :30]},
    {"query": nn.Parameter(Q), "min_length": 40},
    {"query": Q.to("meta"), "key": K.to("meta"), "value": V.to("meta")},
]


def names(change: dict[str, Any]) -> str:
    return "-".join(f"{n}={tuple(x.shape) if isinstance(x, Tensor) else x}" for n, x in change.items()) or "plain"


def call(function: Callable[..., Any], change: dict[str, Any]) -> Any:
    return function(**{"query": Q, "key": K, "value": V, **change})


def without_length(change: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in change.items() if name != "min_length"}


@pytest.mark.parametrize(("change", "reason"), REFUSED + LEFT, ids=[names(c) for c, _ in REFUSED + LEFT])
def test_what_pytorch_keeps_and_why(change: dict[str, Any], reason: str) -> None:
    found = call(greenfast.explain, change)
    assert found.kernel == "torch"
    assert not found.taken
    assert found.reason.startswith(reason)
    assert str(found) == f"torch: {found.reason}"


@pytest.mark.parametrize("change", [c for c, _ in REFUSED], ids=names)
def test_what_is_refused_greenfast_refuses(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        call(greenfast.sdpa, change)


@pytest.mark.parametrize("change", TAKEN, ids=names)
def test_what_is_taken_greenfast_computes(change: dict[str, Any]) -> None:
    found = call(greenfast.explain, change)
    on_meta = "query" in change and change["query"].is_meta
    assert found.kernel == ("meta" if on_meta else "reference")
    assert found.taken
    change = without_length(change)
    out = call(greenfast.sdpa, change)
    with greenfast.use(min_length=0) as routed:
        again = call(functional.scaled_dot_product_attention, change)
    assert (routed.taken, routed.fallen_back) == (1, {})
    assert again.shape == out.shape
    assert on_meta or torch.equal(out, again)


@pytest.mark.parametrize(("change", "reason"), REFUSED + LEFT, ids=[names(c) for c, _ in REFUSED + LEFT])
def test_what_is_not_taken_is_as_without_routing(change: dict[str, Any], reason: str) -> None:
    """The same result, or the same error."""

    def outcome() -> Any:
        torch.manual_seed(0)
        try:
            return call(functional.scaled_dot_product_attention, without_length(change))
        except (RuntimeError, IndexError) as e:
            return str(e)

    wanted = outcome()
    with greenfast.use(min_length=change.get("min_length", 0)) as routed:
        found = outcome()
    assert routed.taken == 0
    assert [kept.startswith(reason) for kept in routed.fallen_back] == [True]
    if isinstance(wanted, str):
        assert found == wanted
    else:
        assert type(found) is type(wanted)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_pytorchs(layout: torch.layout) -> None:
    parts = [torch.randn(n, 2, 16).bfloat16() for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    found = greenfast.explain(x, x, x)
    assert found.kernel == "torch"
    assert "strided tensors" in found.reason or "plain tensors" in found.reason


def test_autocast_decides_the_dtype() -> None:
    q, k, v = (x.float() for x in (Q, K, V))
    with torch.autocast("cpu", torch.bfloat16):
        assert greenfast.explain(q, k.half(), v).taken, "autocast makes all of them bfloat16"
        assert greenfast.explain(q.double(), k.double(), v.double()).reason.startswith("query: torch.float64")
        with greenfast.use(min_length=0) as routed:
            assert functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert routed.taken == 1
    assert not greenfast.explain(q, k, v).taken


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"precision": "fp4"}, "precision: 'fp4'; allowed"),
        ({"causal_alignment": "middle"}, "causal_alignment: 'middle'"),
    ],
)
def test_choices_that_there_are_not(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        greenfast.explain(Q, K, V, **wrong)
    if "precision" in wrong:
        with pytest.raises(ValueError, match=says):
            greenfast.use(**wrong)


def test_an_explanation_does_not_change() -> None:
    found = greenfast.explain(Q, K, V)
    assert isinstance(found, greenfast.Explanation)
    with pytest.raises(FrozenInstanceError):
        found.kernel = "hopper"  # type: ignore[misc]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets what GPU there is."""

    def set_target(name: str) -> None:
        routing._cuda_kernel.cache_clear()
        monkeypatch.setattr(cuda, "target_of", lambda device: Target(name))

    yield set_target
    routing._cuda_kernel.cache_clear()


def on_gpu(x: Tensor, device: str = "cuda") -> Tensor:
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype, device=device)


def test_of_a_gpu_the_kernel_that_would_run(target: Callable[[str], None]) -> None:
    q, k, v = (on_gpu(x) for x in (Q, K, V))
    target("sm_90a")
    choice = cuda.kernel_for(Target("sm_90a"), cuda.dims_of(q.shape, k.shape, q.dtype, Recipe(), 1, False), "e4m3")
    assert greenfast.explain(q, k, v, is_causal=True) == greenfast.Explanation(choice.rung, choice.reason)
    assert choice.rung == "hopper"
    target("sm_89")
    assert greenfast.explain(q.half(), k.half(), v.half()).kernel == "ada"
    assert "bfloat16" in greenfast.explain(q.bfloat16(), k.bfloat16(), v.bfloat16()).reason
    target("sm_80")
    old = greenfast.explain(q, k, v)
    assert old.kernel == "torch"
    assert "sm_80" in old.reason


def test_of_other_devices_there_is_no_kernel() -> None:
    q, k, v = (on_gpu(x, "xpu") for x in (Q, K, V))
    assert str(greenfast.explain(q, k, v)) == "torch: query: on xpu, for which there are no kernels"


def test_of_a_gpu_while_a_graph_is_traced(target: Callable[[str], None]) -> None:
    def f(x: Tensor) -> Tensor:
        name, _ = routing._traced_kernel(0, 64, torch.bfloat16, "fp8", 1)
        return x + 1 if name == "hopper" else x

    for name, wanted in (("sm_90a", 1.0), ("sm_80", 0.0)):
        target(name)
        torch._dynamo.reset()
        assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(1)).item() == wanted


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


def test_short_calls_are_left_by_default() -> None:
    with greenfast.use() as routed:
        attend(Q)
    assert routed.fallen_back == {
        f"query: shorter than min_length={routing.MIN_LENGTH}, where quantization does not pay": 1
    }


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


def test_of_nested_ones_the_innermost_decides() -> None:
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


def test_it_holds_in_its_thread_alone() -> None:
    found = []
    with greenfast.use(min_length=0) as routed:
        thread = threading.Thread(target=lambda: found.append(attend(Q)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], PLAIN)
    assert routed.taken == 0


def test_other_modes_see_what_is_left() -> None:
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch(), greenfast.use():
        attend(Q)
    assert functional.scaled_dot_product_attention in seen


@pytest.mark.parametrize("grad", [False, True])
def test_multi_head_attention(grad: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16).eval()
    x = torch.randn(2, 50, 128).bfloat16()
    with torch.set_grad_enabled(grad):
        wanted = layer(x, x, x, need_weights=False)[0]
        with greenfast.use(min_length=0) as routed:
            found = layer(x, x, x, need_weights=False)[0]
            layer(x, x, x, need_weights=False, attn_mask=torch.ones(50, 50).bool().tril(-1))
    found, wanted = found.detach(), wanted.detach()
    assert routed.taken == 1
    assert routed.fallen_back == {MASK: 1}
    # of N(0, 1) inputs the FP8 kernels err by 0.053 (evidence/h100/peers), and the projections add roundings
    assert 0.01 < float((found - wanted).norm() / wanted.norm()) < 0.08


def test_multi_head_attention_of_a_pytorch_without_redispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_REDISPATCH", None)
    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 50, 128).bfloat16()
    with greenfast.use(min_length=0):
        found = layer(x, x, x, need_weights=False)[0]
    assert torch.equal(found, layer(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_layer(causal: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 2, 64, batch_first=True, dropout=0.0, dtype=torch.bfloat16).eval()
    x = torch.randn(2, 50, 128).bfloat16()
    mask = nn.Transformer.generate_square_subsequent_mask(50, dtype=torch.bfloat16) if causal else None
    with torch.no_grad():  # the fast path, which is one function without attention in it, is left off under routing
        wanted = layer(x, src_mask=mask, is_causal=causal)
        with greenfast.use(min_length=0) as routed:
            found = layer(x, src_mask=mask, is_causal=causal)
    assert routed.taken == 1
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.05, "the layer adds attention to its input"


def test_gradients_are_those_of_greenfast() -> None:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    with greenfast.use(min_length=0) as routed:
        found = torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    assert routed.taken == 1
    wanted = torch.autograd.grad(greenfast.sdpa(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_checkpoints_recompute_what_is_decorated() -> None:
    route = greenfast.use(min_length=0)
    x = Q.clone().requires_grad_()
    checkpoint(route(attend), x, use_reentrant=False).sum().backward()
    assert route.routed.taken == 2, "forward, and again in the backward pass"
    assert x.grad is not None


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
            found = compiled(x)
        assert torch.equal(found, fp8(x) if length >= 30 else attend(x)), length
        frames.append(counter.frame_count)
    assert frames[0] == frames[2] < frames[3] == frames[5], "traced again at min_length alone"


def test_compiled_multi_head_attention_is_left_to_pytorch() -> None:
    torch._dynamo.reset()
    layer = nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 50, 128).bfloat16()
    with greenfast.use(min_length=0):
        found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, x, x, need_weights=False)[0]
    assert torch.equal(found, layer(x, x, x, need_weights=False)[0])


def test_public_names_are_looked_up_once() -> None:
    for name in ("explain", "use", "register_with_transformers", "Explanation", "sdpa"):
        vars(greenfast).pop(name, None)
        assert name in dir(greenfast)
        assert vars(greenfast).get(name) is None
        assert getattr(greenfast, name) is vars(greenfast)[name]
