"""greenfast.sdpa on the CPU: the semantics of PyTorch's own function, refusals, and behaviour."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import greenfast
from greenfast.device.bound_launch import NoContextError
from greenfast.ops import launch_plans, torch_ops
from greenfast.ops.quantized import SDPA_PRECISIONS

torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def inputs(
    q_len: int = 60, kv_len: int | None = None, heads: int = 4, kv_heads: int | None = None, head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    generator = torch.Generator().manual_seed(q_len)
    kv = (2, kv_heads or heads, q_len if kv_len is None else kv_len, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((2, heads, q_len, head_dim), kv, kv)]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"dtype": torch.float16}, {"is_causal": True}),
        ({"kv_len": 90}, {"is_causal": True}),
        ({"head_dim": 72}, {"scale": 0.3}),
        ({"heads": 6, "kv_heads": 2}, {"enable_gqa": True}),
    ],
    ids=str,
)
def test_agrees_with_pytorch(sizes: dict[str, Any], options: dict[str, Any], precision: Any) -> None:
    q, k, v = inputs(**sizes)
    result = greenfast.sdpa(q, k, v, precision=precision, **options)
    wanted = torch_sdpa(q.float(), k.float(), v.float(), **options)
    assert result.shape == wanted.shape
    assert result.dtype == q.dtype
    assert error(result, wanted) < (0.07 if precision == "fp8" else 0.06), "within the formats' error"


def test_the_lower_right_alignment_and_the_log_sum_exp() -> None:
    q, k, v = inputs(20, 50)
    out, lse = greenfast.sdpa(q, k, v, is_causal=True, causal_alignment="lower_right", return_lse=True)
    mask = torch.arange(50) <= torch.arange(20).unsqueeze(1) + 30
    assert error(out, torch_sdpa(q.float(), k.float(), v.float(), attn_mask=mask)) < 0.07
    scores = (q.float() @ k.float().transpose(-1, -2) / 8).masked_fill(~mask, -math.inf)
    assert (lse - torch.logsumexp(scores, -1)).abs().max() < 0.15


def test_compiled_without_a_break() -> None:
    q, k, v = inputs()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return greenfast.sdpa(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), model(q, k, v))


def test_kept_codes_compiled_without_a_break() -> None:
    q, k, v = inputs()
    compiled = torch.compile(
        lambda q, k, v: greenfast.attention(greenfast.quantize(q, k, v)), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), greenfast.attention(greenfast.quantize(q, k, v)))


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_vmap_over_nothing(dim: int) -> None:
    q, k, v = inputs()
    shape = list(q.shape)
    shape.insert(dim, 0)
    none = q.new_empty(shape)
    assert torch.vmap(greenfast.sdpa, in_dims=(dim, None, None))(none, k, v).shape == (0, *q.shape)
    keys = torch.vmap(lambda x: greenfast.sdpa(q, x, v, return_lse=True)[1])(k.new_empty(0, *k.shape))
    assert keys.shape == (0, *q.shape[:3])


def test_vmap() -> None:
    q, k, v = inputs()
    batch: Any = [torch.stack([x, x.flip(2)]) for x in (q, k, v)]
    result = torch.vmap(greenfast.sdpa)(*batch)
    assert torch.equal(result[0], greenfast.sdpa(q, k, v))
    shared = torch.vmap(greenfast.sdpa, in_dims=(0, None, None))(batch[0], k, v)
    assert torch.equal(shared[0], result[0])


@pytest.mark.parametrize("precision", SDPA_PRECISIONS)
def test_autocast_takes_its_dtype(precision: Any) -> None:
    q, k, v = (x.float() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        assert greenfast.sdpa(q, k, v, precision=precision).dtype == torch.bfloat16


def test_nan_propagates() -> None:
    for precision in ("fp8", "int8"):
        q, k, v = inputs()
        k[0, 1, 3, 5] = math.nan
        v[1, 2, 0, 0] = math.inf
        out = greenfast.sdpa(q, k, v, precision=precision)
        assert out[0, 1].isnan().all()
        assert out[1, 2].isnan().any()
        assert not out[0, 0].isnan().any()


def test_nothing_to_compute() -> None:
    empty = torch.zeros(0, 2, 5, 64, dtype=torch.float16)
    assert greenfast.sdpa(empty, empty, empty).shape == empty.shape
    q, k, _ = inputs(5, 0)
    out, lse = greenfast.sdpa(q, k, k, return_lse=True)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    sizes = r"its shape is \(3,\)"
    for options in ({"sinks": torch.zeros(3)}, {"kv_lengths": torch.tensor([0, 0, 0])}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: {sizes}"):
            greenfast.sdpa(q, k, k, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "options", "kind", "says"),
    [
        (
            {},
            {"attn_mask": torch.ones(60, 60)},
            NotImplementedError,
            r"attn_mask: .*scaled_dot_product_attention has it",
        ),
        ({}, {"dropout_p": 0.1}, NotImplementedError, r"dropout_p: .*scaled_dot_product_attention has it"),
        ({}, {"precision": "fp4"}, ValueError, "precision: 'fp4'; allowed are 'fp8', 'int8'"),
        ({}, {"scale": math.nan}, ValueError, "scale: nan; a positive, finite number"),
        ({}, {"causal_alignment": "middle"}, ValueError, "causal_alignment: 'middle'; allowed are 'upper_left'"),
        ({"kv_heads": 2}, {}, ValueError, r"key: its heads .*enable_gqa=True.*key \(2, 2, 60, 64\)"),
        ({"kv_heads": 3}, {"enable_gqa": True}, ValueError, "key: the heads of query are not a multiple of its heads"),
        ({"head_dim": 60}, {}, NotImplementedError, "query: head_dim 60; the kernels take multiples of 8"),
        ({"dtype": torch.float32}, {}, TypeError, r"query: its dtype is torch\.float32; .*torch\.float16.*float32_as"),
    ],
)
def test_what_is_refused_is_named(
    change: dict[str, Any], options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        greenfast.sdpa(*inputs(**change), **options)


def test_an_argument_that_is_no_tensor() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"key: a torch\.Tensor is needed, got list"):
        greenfast.sdpa(q, k.tolist(), v)
    with pytest.raises(ValueError, match=r"query: 1-D; .* is needed \(query \(64,\)"):
        greenfast.sdpa(q[0, 0, 0], k, v)


def test_errors_name_what_came() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"is_causal: .*True.*; True or False is needed, not a numpy\.bool"):
        greenfast.sdpa(q, k, v, is_causal=np.True_)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="precision: 'fp9'; allowed are 'fp8', 'int8', 'int8_fine'"):
        torch.ops.greenfast.sdpa(q, k, v, "fp9", 0, 0.125)


class Subclass(Tensor):
    pass


def test_the_dispatcher_is_skipped_for_plain_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    assert torch_ops.can_skip_dispatcher(x)
    assert not torch_ops.can_skip_dispatcher(torch.nn.Parameter(x))
    with torch._subclasses.FakeTensorMode():
        assert not torch_ops.can_skip_dispatcher(x)
    with torch.autograd.profiler.profile():
        assert not torch_ops.can_skip_dispatcher(x)
    for disturbed in (torch.autocast("cpu", torch.bfloat16), forward_ad.dual_level()):
        with disturbed:
            assert not torch_ops.can_skip_dispatcher(x)
    wanted = torch.zeros(1, requires_grad=True)
    assert not torch_ops.can_skip_dispatcher(x, x, wanted)
    with torch.no_grad():
        assert torch_ops.can_skip_dispatcher(x, x, wanted)
    assert not torch_ops.can_skip_dispatcher(x, x.as_subclass(Subclass), x)

    def transformed(y: Tensor) -> Tensor:
        assert not torch_ops.can_skip_dispatcher(x)
        return y

    torch.vmap(transformed)(x)
    monkeypatch.undo()
    assert not torch_ops.can_skip_dispatcher(x), "nor on the CPU"


def test_the_first_launch_of_a_thread_gets_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    launched: list[object] = []

    class Launch:
        def __call__(self) -> None:
            if not current:
                raise NoContextError
            launched.append(self)

    class FakeDevice:
        def __init__(self, ordinal: int) -> None:
            self.ordinal = ordinal

        def set_current(self) -> None:
            current.append(self.ordinal)

    monkeypatch.setattr(launch_plans, "Device", FakeDevice)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)

    class Map:
        """A tensor map, which the driver encodes in a context alone."""

        def __setattr__(self, name: str, value: int) -> None:
            if not current:
                raise NoContextError
            launched.append((name, value))

    one, two = Launch(), Launch()
    saved = launch_plans.BoundLaunches((one, two), ())  # type: ignore[arg-type]
    launch_plans.LaunchPlan(3, (), idle={5: [saved]}).launch(())
    assert launched == [one, two]
    assert current == [3]
    current.clear()
    moved = launch_plans.BoundLaunches((one, two), [(0, Map())])  # type: ignore[arg-type]
    launch_plans.LaunchPlan(3, (), idle={5: [moved]}).launch((64,))
    assert launched == [one, two, ("value", 64), one, two]
    assert current == [3]


def test_nan_in_a_value_reaches_the_rows_that_attend_to_it() -> None:
    q, k, v = inputs(300)
    v[0, 1, 200, 5] = math.nan
    out = greenfast.sdpa(q, k, v, is_causal=True)
    assert out[0, 1, 128:].isnan().all(), "its block of keys has no scale"
    assert not out[0, 1, :128].isnan().any()
    assert not out[0, 0].isnan().any()
