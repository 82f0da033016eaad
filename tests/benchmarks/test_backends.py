"""Contenders are called as their libraries expect it: layouts, scales and masks, on libraries made up here."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import sdpa_backends
from benchmarks.registry import KERNEL, Backend, BoundCall
from benchmarks.sdpa_backends import BACKENDS, FP8
from benchmarks.sdpa_inputs import INPUTS, Inputs, make_inputs, reference
from greenfast.kernels.attention import config
from greenfast.numerics.formats import transposed_values
from greenfast.spec.errors import UsageError

#: Sizes that are all different, so that a swapped pair shows.
DIMS = {"B": 2, "H": 3, "S": 80, "D": 64}
CAUSAL = pytest.mark.parametrize("causal", [0, 1])


def inputs(causal: int = 0, kind: str = "normal") -> Inputs:
    return make_inputs({**DIMS, "CAUSAL": causal}, 0, kind, "cpu")


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """(batch, heads, length, head_dim) float64."""
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def error(found: Inputs, ready: BoundCall) -> float:
    out = ready.call()
    assert out.shape == tuple(DIMS[d] for d in "BHSD")
    checked = reference(found, 80, codes=False).check(out.float().flatten(0, 1) * ready.unit, False)
    assert checked.finite
    assert checked.error is not None
    return checked.error


def test_the_tasks_kernel_alone_is_not_bound_to_inputs_here() -> None:
    assert [name for name, c in BACKENDS.items() if c.prepare is None] == [KERNEL]
    assert [name for name, c in BACKENDS.items() if c.same_codes] == [KERNEL, "fa3"]
    assert {name for name, c in BACKENDS.items() if not c.own} == {
        "copy", "fa3", "cudnn", "fa3_bf16", "sage", "torch_flash", "torch_cudnn", "torch"
    }  # fmt: skip
    assert [name for name, c in BACKENDS.items() if not c.attention] == ["quantize_fp8", "copy"]


@pytest.mark.parametrize("length", [1, 16, 33])
def test_values_are_transposed_as_the_problem_does_it(length: int) -> None:
    codes = torch.randint(0, 256, (2, length, 64), dtype=torch.uint8)
    padded = -(-length // 16) * 16
    whole = np.zeros((2, padded, 64), np.uint8)
    whole[:, :length] = codes.numpy()
    keys = [position // 16 * 16 + config.KEY_ORDER[position % 16] for position in range(padded)]
    assert (transposed_values(codes).numpy() == whole[:, keys].transpose(0, 2, 1)).all()


def test_inputs_are_drawn_once_and_have_outliers_where_asked() -> None:
    first, again, large = inputs(), inputs(), inputs(kind="outliers")
    for name in "qkv":
        assert torch.equal(first.values[name], again.values[name])
        assert first.values[name].abs().max() < 6 < large.values[name].abs().max()
        decoded = first.codes[name].view(FP8).float() * first.scales[name].view(-1, 1, 1)
        assert (decoded - first.values[name]).norm() < 0.05 * first.values[name].norm()
    assert not torch.equal(first.values["k"], first.values["v"])


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_inputs_differs_from_normal_as_it_says(kind: str) -> None:
    normal, found = inputs().values, inputs(kind=kind).values
    changed = {name for name in "qkv" if not torch.equal(normal[name], found[name])}
    only = {"normal": "", "constant queries": "q", "loud key": "k", "loud key 300": "k", "biased keys": "kv"}
    only |= {f"logits {deviation}": "qk" for deviation in (2, 4, 8)}  # V behind a bias is another draw
    assert changed == set(only.get(kind, "qkv"))
    scores = {"logits 2": 2.0, "logits 4": 4.0, "logits 8": 8.0, "tiny": 1.0}
    if kind in scores:
        ratio = (found["q"].double() @ found["k"].double().transpose(1, 2)).std() / math.sqrt(64)
        assert ratio.item() == pytest.approx(scores[kind], rel=0.05)
    assert all(bool(torch.isfinite(found[name]).all()) for name in "qkv")


def test_a_mask_aligned_at_the_last_key_is_refused() -> None:
    with pytest.raises(UsageError, match="backends are compared with CAUSAL 0 or 1"):
        make_inputs({**DIMS, "CAUSAL": 2}, 0, "normal", "cpu")


@CAUSAL
@pytest.mark.parametrize("name", ["sdpa_fp8", "sage", "torch"])
@pytest.mark.parametrize("dims", [{"HK": 1}, {"KV": 90}, {"HK": 1, "KV": 33}])
def test_shared_heads_and_unequal_lengths_are_compared_too(causal: int, name: str, dims: dict[str, int]) -> None:
    found = make_inputs({**DIMS, **dims, "CAUSAL": causal}, 0, "normal", "cpu")
    assert error(found, BACKENDS[name].bind(found)) < (0.01 if name == "torch" else 0.09)


def test_libraries_refuse_what_they_would_compute_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", ModuleType("fa3_fwd_interface"))
    with pytest.raises(ValueError, match="aligns a causal mask at the last key"):
        BACKENDS["fa3_bf16"].bind(make_inputs({**DIMS, "KV": 90, "CAUSAL": 1}, 0, "normal", "cpu"))


@pytest.mark.parametrize("share", [0.98, 0.999])
def test_a_sink_takes_its_share_of_the_weight_and_has_no_value(share: float) -> None:
    found = inputs(kind=f"sink {share}").values
    weights = (found["q"].double() @ found["k"].double().transpose(1, 2) / 8).softmax(-1)
    assert 1 - weights[..., 0].mean().item() == pytest.approx(1 - share, rel=0.3)
    assert (found["v"][:, 0] == 0).all()


@pytest.mark.parametrize(("kind", "turns"), [("slow bias", False), ("fast bias", True)])
def test_a_bias_under_rotary_embedding_turns_or_stays(kind: str, turns: bool) -> None:
    keys = inputs(kind=kind).values["k"][0]
    bias = keys[:16] - inputs(kind="normal").values["k"][0][:16]  # of places close to each other
    mean, size = keys.mean(0).norm(), keys.norm(dim=1).mean()
    assert bias.norm() > 10
    assert (mean < 0.3 * size) == turns, "what turns has no mean"


@CAUSAL
def test_sages_arithmetic_is_attention_with_its_roundings(causal: int) -> None:
    found = inputs(causal)
    assert 0.01 < error(found, BACKENDS["sage"].bind(found)) < 0.05
    biased = inputs(causal, "biased keys")
    assert error(biased, BACKENDS["sage"].bind(biased)) < 0.05, "without their mean"


@CAUSAL
@pytest.mark.parametrize("name", ["torch_flash", "torch"])
def test_torch_is_right(causal: int, name: str) -> None:
    found = inputs(causal)
    assert error(found, BACKENDS[name].bind(found)) < 0.01


@pytest.mark.parametrize("also_lse", [False, True])
@CAUSAL
def test_flash_attention_3_gets_lengths_before_heads_and_a_scale_per_head(
    monkeypatch: pytest.MonkeyPatch, causal: int, also_lse: bool
) -> None:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **scales: Tensor) -> Any:
        def decode(x: Tensor, scale: Tensor) -> Tensor:
            assert x.dtype == FP8
            assert x.is_contiguous()
            assert x.shape == (2, 80, 3, 64)
            assert scale.shape == (2, 3)
            return (x.double() * scale.double()[:, None, :, None]).transpose(1, 2)

        q, k, v = (decode(x, scales[f"{n}_descale"]) for n, x in zip("qkv", (q, k, v), strict=True))
        out = attend(q, k, v, 1 / 8, causal).transpose(1, 2).bfloat16()
        return (out, None) if also_lse else out

    module = ModuleType("fa3_fwd_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    found = inputs(causal)
    assert error(found, BACKENDS["fa3"].bind(found)) < 0.07


@CAUSAL
def test_flash_attention_3_takes_bfloat16_too(monkeypatch: pytest.MonkeyPatch, causal: int) -> None:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        assert all(x.is_contiguous() and x.shape == (2, 80, 3, 64) for x in (q, k, v))
        q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, 1 / 8, causal).transpose(1, 2).bfloat16()

    module = ModuleType("fa3_fwd_interface")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    found = inputs(causal)
    assert error(found, BACKENDS["fa3_bf16"].bind(found)) < 0.01


@pytest.mark.parametrize(
    ("name", "most"), [("sdpa_fp8", 0.07), ("sdpa_int8", 0.05), ("sdpa_int8_fine", 0.05), ("attention_fp8", 0.07)]
)
@CAUSAL
def test_the_operator_is_called_with_the_mask_and_precision(causal: int, name: str, most: float) -> None:
    found = inputs(causal)
    assert 0.01 < error(found, BACKENDS[name].bind(found)) < most


def test_a_copy_moves_as_many_bytes_as_quantization_must() -> None:
    found = inputs()
    to = BACKENDS["copy"].bind(found).call()
    assert 2 * to.numel() == pytest.approx(3 * 3 * found.values["q"].numel(), abs=1)


class FakeGraph:
    """cuDNN's frontend graph with one node, sdpa_fp8, on host memory."""

    def __init__(self, **_: Any) -> None:
        self.done: list[str] = []

    def tensor(self, dim: list[int], stride: list[int], data_type: str) -> Any:
        return Described(dim, stride, data_type)

    def sdpa_fp8(self, **given: Any) -> tuple[Any, ...]:
        self.given = given
        self.out = tuple(Described([], [], "") for _ in range(4))
        return self.out

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.done.append(name)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, feed: dict[Any, Tensor], workspace: Tensor, handle: object) -> None:
        assert self.done == [
            "validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"
        ]  # fmt: skip

        def read(name: str) -> Tensor:
            described = self.given[name]
            x = feed[described]
            assert [*x.shape] == described.dim
            assert [*x.stride()] == described.stride
            return x.view(FP8).double() if described.kind == "FP8_E4M3" else x.double()

        q, k, v = (read(n) * read(f"descale_{n}") for n in "qkv")
        assert q.shape == (2, 3, 80, 64)
        assert read("scale_s") * read("descale_s") == 1
        out = attend(q, k, v, self.given["attn_scale"], self.given["use_causal_mask"]) * read("scale_o")
        assert out.abs().max() <= 448
        result = self.out[0]
        assert result.kind == "FP8_E4M3"
        feed[result].copy_(out.to(FP8).view(torch.uint8))
        assert result.stride == [*feed[result].stride()]


class Described:
    def __init__(self, dim: list[int], stride: list[int], kind: str) -> None:
        self.dim, self.stride, self.kind = dim, stride, kind

    def set_output(self, _: bool) -> Described:
        return self

    def set_dim(self, dim: list[int]) -> Described:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Described:
        self.stride = stride
        return self

    def set_data_type(self, kind: str) -> Described:
        self.kind = kind
        return self


@CAUSAL
def test_cudnn_gets_a_scale_per_tensor_and_an_output_scale_that_cannot_overflow(
    monkeypatch: pytest.MonkeyPatch, causal: int
) -> None:
    module: Any = ModuleType("cudnn")
    module.create_handle = object
    module.pygraph = FakeGraph
    module.data_type = SimpleNamespace(FP8_E4M3="FP8_E4M3", FLOAT="FLOAT")
    module.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    monkeypatch.setitem(sys.modules, "cudnn", module)
    sdpa_backends._cudnn_handle.cache_clear()
    found = inputs(causal)
    assert error(found, BACKENDS["cudnn"].bind(found)) < 0.08
    sdpa_backends._cudnn_handle.cache_clear()


def make_backend(module: str) -> Backend:
    return Backend("x", "X", "fp8", (module, "x-wheel"), lambda found: BoundCall(lambda: found.values["q"]))


def test_a_library_that_is_missing_or_broken_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    missing = make_backend("no_such_library").describe()
    assert missing.version == ""
    assert missing.missing == "x-wheel is not installed (no module no_such_library): pip install x-wheel"
    (tmp_path / "a_broken_library.py").write_text("raise OSError('libcudart.so.12: cannot open\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = make_backend("a_broken_library").describe()
    assert broken.missing == "a_broken_library cannot be imported: OSError: libcudart.so.12: cannot open"
    here = make_backend("math").describe()
    assert (here.version, here.missing) == ("x-wheel unknown", "")
    assert BACKENDS["torch_flash"].describe().version == f"torch {torch.__version__}"
