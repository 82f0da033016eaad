"""Routing of PyTorch's attention, by the same rules as greenfast.sdpa."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import greenfast
from greenfast.ops import cuda, routing
from greenfast.spec.arch import Target

MASK = "attn_mask: numbers to add to the scores; the kernels take booleans"


def tensors(
    length: int = 40, keys: int | None = None, heads: int = 4, kv_heads: int | None = None, head_dim: int = 64,
    batch: int = 2, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(length)
    kv = (batch, heads if kv_heads is None else kv_heads, length if keys is None else keys, head_dim)
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in ((batch, heads, length, head_dim), kv, kv))
    return q, k, v


class Named(torch.Tensor):
    """A subclass of Tensor, such as sharded and compressed tensors are."""


def named(x: Tensor) -> Tensor:
    return x.as_subclass(Named)


Q, K, V = tensors()
LONG = (torch.zeros(2, 4, 40, 264).half(),) * 3
#: Calls that greenfast.sdpa refuses: the change from (Q, K, V), and the reason.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attn_mask": torch.ones(40, 40).bfloat16()}, MASK),
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
    ({"key": torch.cat([K, K[:1]]), "value": torch.cat([V, V[:1]])}, "key: its batch differs from query's"),
    ({"key": K[..., :32], "value": V[..., :32]}, "key: another head_dim than query"),
    ({"key": K[:, :2], "value": V[:, :2]}, "key: its heads differ from query's"),
    ({"value": V[:, :2]}, "value: its heads differ from query's"),
    ({"value": torch.cat([V, V[:1]])}, "value: its batch differs from query's"),
    ({"key": K[:, :3], "value": V[:, :3], "enable_gqa": True}, "key: the heads of query are not a multiple"),
    ({"query": Q[..., :60], "key": K[..., :60], "value": V[..., :60]}, "query: head_dim 60; the kernels"),
    (dict(zip(("query", "key", "value"), LONG, strict=True)), "query: head_dim 264; the kernels take multiples"),
    ({"key": K.to("meta"), "value": V.to("meta")}, "key: on another device than query"),
]
#: Calls that greenfast.sdpa computes but routing passes to PyTorch.
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
    {"attn_mask": torch.ones(40, 40).bool().triu(-9)},
    {"attn_mask": torch.arange(40).expand(2, 1, 1, 40) < 23},
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
    result = call(greenfast.explain, change)
    assert result.kernel == "torch"
    assert not result.taken
    assert result.reason.startswith(reason)
    assert str(result) == f"torch: {result.reason}"


@pytest.mark.parametrize("change", [c for c, _ in REFUSED], ids=names)
def test_greenfast_refuses_what_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        call(greenfast.sdpa, change)


TRIANGLE = torch.ones(40, 40).bool().tril()


@pytest.mark.parametrize(
    "change",
    [
        {"attn_mask": TRIANGLE, "window": (3, 0)},
        {"attn_mask": TRIANGLE, "kv_lengths": torch.tensor([3, 4])},
        {"attn_mask": greenfast.BlockMask.from_bool(TRIANGLE[:30])},
        {"attn_mask": greenfast.BlockMask.from_bool(TRIANGLE.repeat(3, 1, 1))},
        {"attn_mask": greenfast.BlockMask.from_bool(TRIANGLE.repeat(3, 1, 1, 1))},
        {"sinks": torch.zeros(3)},
        {"kv_lengths": torch.tensor([1, 2, 3])},
    ],
    ids=["window", "kv_lengths", "lengths", "heads", "batch", "sinks", "lengths of another batch"],
)
def test_explains_refusals_of_options(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=":") as refused:
        call(greenfast.sdpa, change)
    assert call(greenfast.explain, change) == greenfast.Explanation("torch", str(refused.value), "", "torch")


@pytest.mark.parametrize("change", TAKEN, ids=names)
def test_greenfast_computes_what_is_taken(change: dict[str, Any]) -> None:
    result = call(greenfast.explain, change)
    on_meta = "query" in change and change["query"].is_meta
    assert result.kernel == ("meta" if on_meta else "reference")
    assert result.taken
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
        result = outcome()
    assert routed.taken == 0
    assert [saved.startswith(reason) for saved in routed.fallen_back] == [True]
    if isinstance(wanted, str):
        assert result == wanted
    else:
        assert type(result) is type(wanted)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def test_strided_nested_tensors_are_left_to_pytorch() -> None:
    parts = [torch.randn(n, 2, 16).bfloat16() for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.strided).transpose(1, 2)
    result = greenfast.explain(x, x, x)
    assert result.kernel == "torch"
    assert "strided tensors" in result.reason


def test_autocast_decides_the_dtype() -> None:
    q, k, v = (x.float() for x in (Q, K, V))
    with torch.autocast("cpu", torch.bfloat16):
        assert greenfast.explain(q, k.half(), v).taken, "autocast makes all of them bfloat16"
        assert greenfast.explain(q.double(), k.double(), v.double()).reason.startswith("query: torch.float64")
        with greenfast.use(min_length=0) as routed:
            assert functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert routed.taken == 1
    assert not greenfast.explain(q, k, v).taken


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", FLOATS)
def test_autocast_and_a_mask(cast: torch.dtype, mask: torch.dtype) -> None:
    """``use`` computes or raises as PyTorch does, and routes as ``explain`` reports."""

    def call() -> Any:
        try:
            return functional.scaled_dot_product_attention(q, k, k, attn_mask=zeros)
        except RuntimeError as e:
            return str(e)

    zeros = torch.zeros(8, 8, dtype=mask)
    for dtypes in product(FLOATS, FLOATS):
        q, k = (x[:, :, :8].to(dtype) for x, dtype in zip((Q, K), dtypes, strict=True))
        with torch.autocast("cpu", cast):
            wanted, taken = call(), greenfast.explain(q, k, k, attn_mask=zeros).taken
            with greenfast.use(min_length=0) as routed:
                result = call()
        assert routed.taken == taken, dtypes
        if isinstance(wanted, str):
            assert result == wanted, dtypes
        else:
            assert result.dtype == wanted.dtype, dtypes
            assert (result.double() - wanted.double()).norm() < 0.2 * wanted.double().norm(), dtypes


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"precision": "fp4"}, "precision: 'fp4'; allowed"),
        ({"causal_alignment": "middle"}, "causal_alignment: 'middle'"),
    ],
)
def test_unknown_choices(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        greenfast.explain(Q, K, V, **wrong)
    if "precision" in wrong:
        with pytest.raises(ValueError, match=says):
            greenfast.use(**wrong)


def test_an_explanation_does_not_change() -> None:
    result = greenfast.explain(Q, K, V)
    assert isinstance(result, greenfast.Explanation)
    with pytest.raises(FrozenInstanceError):
        result.kernel = "hopper"  # type: ignore[misc]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the GPU that greenfast finds."""

    def set_target(name: str) -> None:
        routing._explain_cuda.cache_clear()
        monkeypatch.setattr(cuda, "get_target", lambda device: Target(name))

    yield set_target
    routing._explain_cuda.cache_clear()


def on_gpu(x: Tensor, device: str = "cuda") -> Tensor:
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype, device=device)


def test_explains_which_kernel_a_gpu_would_run(target: Callable[[str], None]) -> None:
    q, k, v = (on_gpu(x) for x in (Q, K, V))
    target("sm_90a")
    config = cuda.build_sdpa_config(Target("sm_90a"), q.shape[3], q.dtype, "fp8", 1)
    choice = cuda.choose_kernel(Target("sm_90a"), config, cuda.get_sizes(q.shape, k.shape))
    assert greenfast.explain(q, k, v, is_causal=True) == greenfast.Explanation(
        choice.rung, choice.reason, "fp8", "16bit"
    )
    assert choice.rung == "hopper"
    target("sm_89")
    assert greenfast.explain(q.half(), k.half(), v.half()).kernel == "ada"
    assert "bfloat16" in greenfast.explain(q.bfloat16(), k.bfloat16(), v.bfloat16()).reason
    target("sm_80")
    old = greenfast.explain(q, k, v)
    assert old.kernel == "torch"
    assert "sm_80" in old.reason


def test_other_devices_have_no_kernel() -> None:
    q, k, v = (on_gpu(x, "xpu") for x in (Q, K, V))
    assert str(greenfast.explain(q, k, v)) == "torch: query: on xpu, for which there are no kernels"


def test_explains_a_gpus_kernel_while_a_graph_is_traced(target: Callable[[str], None]) -> None:
    def f(x: Tensor) -> Tensor:
        name, _ = routing._explain_traced(0, 64, torch.bfloat16, "fp8", 1)
        return x + 1 if name == "hopper" else x

    for name, wanted in (("sm_90a", 1.0), ("sm_80", 0.0)):
        target(name)
        torch._dynamo.reset()
        assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(1)).item() == wanted


def test_public_names_are_looked_up_once() -> None:
    for name in ("explain", "use", "register_with_transformers", "Explanation", "sdpa"):
        vars(greenfast).pop(name, None)
        assert name in dir(greenfast)
        assert vars(greenfast).get(name) is None
        assert getattr(greenfast, name) is vars(greenfast)[name]


def test_a_target_is_explained_on_any_machine() -> None:
    q = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    assert greenfast.explain(q, q, q).kernel == "meta"
    hopper = greenfast.explain(q, q, q, target="sm_90a", precision="auto")
    assert (hopper.kernel, hopper.precision) == ("hopper", "fp8")
    assert "measured shapes" in hopper.reason
    assert greenfast.explain(q, q, q, target="9.0a", precision="fp8_token").kernel == "serving"
    assert not greenfast.explain(q, q, q, target="sm_89").taken
    short = q[:, :, :64]
    assert not greenfast.explain(short, short, short, target="sm_90a", precision="auto").taken
    with pytest.raises(ValueError, match=r"target: unknown target 'H100'; allowed: .*sm_90a"):
        greenfast.explain(q, q, q, target="H100")
    with pytest.raises(TypeError, match="target: 90"):
        greenfast.explain(q, q, q, target=90)  # type: ignore[arg-type]
