"""The fuzzer finds nothing on the CPU, finds planted faults, and lists the kernels of its draws."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from greenfast.kernels.serving import append
from greenfast.numerics import serving as serving_numerics
from greenfast.numerics import serving_append
from greenfast.ops import canonicalize, reference
from greenfast.spec.arch import Target
from tests.fuzz import sdpa, serving
from tests.fuzz.__main__ import draw, faults_of
from tests.fuzz.calls import Run, repeated
from tests.fuzz.guards import Guards

CPU = Run("cpu", 2)


def wrong(kind: str, count: int) -> list[str]:
    """All faults of some draws of a kind."""
    return [fault for number in range(count) for fault in faults_of(draw(number, False, (kind,))[1], CPU)]


@pytest.mark.parametrize(("kind", "count"), [("sdpa", 30), ("serving", 20), ("keys", 10), ("append", 8)])
def test_the_cpu_is_right(kind: str, count: int) -> None:
    assert wrong(kind, count) == []


def test_a_key_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = reference._mask_scores

    def without_one(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = masked(scores, *rest)
        if result.shape[-1] > 8:
            result[..., 5:6] = -torch.inf
        return result

    monkeypatch.setattr(reference, "_mask_scores", without_one)
    assert any("beyond the kernel's bound" in fault for fault in wrong("sdpa", 12))


def test_a_mask_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    form_of = canonicalize.canonicalize
    monkeypatch.setattr(canonicalize, "canonicalize", lambda q, k, v, mask, *rest: form_of(q, k, v, None, *rest))
    masked = [n for n in range(300) if getattr(draw(n, False, ("sdpa",))[1], "masked", False)]
    assert faults_of(draw(masked[0], False, ("sdpa",))[1], CPU) == ["attn_mask: left out without a word"]


def test_scales_of_the_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = serving_numerics.paged_attention

    def shifted(*args: Any, k_scale: Any, **options: Any) -> Any:
        return paged(*args, k_scale=k_scale.roll(1, -1) if k_scale.dim() == 3 else k_scale, **options)

    monkeypatch.setattr(serving_numerics, "paged_attention", shifted)
    assert any(fault.startswith("out: ") for fault in wrong("serving", 12))


def test_a_code_off_by_one_and_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = serving_append._quantize
    monkeypatch.setattr(serving_append, "_quantize", lambda x, *rest: quantize(x * 1.06, *rest))
    assert any("attention in float64" in fault for fault in wrong("keys", 20))
    call = next(d for n in range(99) if getattr(d := draw(n, False, ("sdpa",))[1], "gradients", False))
    right = sdpa._sdpa
    monkeypatch.setattr(sdpa, "_sdpa", lambda q, *x, **o: right(q if o.get("return_lse") else q * 1.3, *x, **o))
    assert any(fault.startswith("gradient of q") for fault in faults_of(call, CPU))


def test_bytes_around_and_other_bits() -> None:
    with Guards() as guards:
        x = torch.empty(3, 5, dtype=torch.float16)
        y = x.new_empty_strided((2, 3), (8, 1))
    assert x.isnan().all()
    assert y.stride() == (8, 1)
    assert guards.faults() == []
    x.as_strided((1,), (1,), x.storage_offset() + 128)[0] = 1  # after its 256 bytes
    assert [fault[:15] for fault in guards.faults()] == ["guard: buffer 0"]
    rng = random.Random(0)
    assert repeated(Run("cpu", 3), lambda: torch.tensor([rng.random()]))[1]


def test_draws_need_no_kernels_but_those_that_are_compiled() -> None:
    kinds = {serving.ServingDraw, sdpa.SdpaDraw, serving.KeysDraw, serving.AppendDraw}
    drawn = [draw(n, True)[1] for n in range(200)]
    assert {type(d) for d in drawn} == kinds
    known = set(serving.sources(Target("sm_90a")))  # sdpa's are tested in tests/ops/test_warmup.py
    for d in drawn:
        if isinstance(d, serving.AppendDraw):
            assert append.kernel(d.call.config()) in known
        elif isinstance(d, sdpa.SdpaDraw):
            assert (d.head_dim, d.dtype, d.precision) in sdpa.KINDS
        elif isinstance(d, serving.ServingDraw):
            assert d.kind in serving.KINDS
